"""Two experiments compared seed by seed. tools/claims.py uses the same arithmetic."""

import math
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType

from analysis import shared
from analysis.shared import FigureOptions, Panel, TrainedRun
from engine.files import differing, from_json, read_json, to_json
from engine.table import markdown_table
from metrics.routing import mean_over_layers

MEASURES = {  # script -> the number to compare, and what it is
    "train_lm": ("ours", "test perplexity"),
    "train_mlm": ("our perplexity", "validation perplexity"),
    "train_mt": ("BLEU", "test BLEU"),
    "train_electra": ("masked tokens right", "held-out masked tokens right"),
    "finetune_xtreme": ("F1 or accuracy", "F1 or accuracy over languages"),
}
RELATIVE = {"ours", "no limit", "our perplexity", "rc", "RC", "RC at first"}  # the difference is a ratio, in %


@dataclass
class Compare(FigureOptions):
    number: str | None = None  # a column of the script's table or a routing statistic; None: the script's main measure


@dataclass
class Experiment:
    """Runs that differ only in their seed."""

    folder: str  # of one of them
    script: str
    config: dict  # its constants
    runs: dict[int, TrainedRun]  # seed -> finished run
    results: dict[int, dict]  # seed -> its result.json

    def mean(self, value: Callable) -> str:
        """The mean of value(result) over seeds, or "" if a seed has none."""
        values = [value(result) for result in self.results.values()]
        return "" if None in values else f"{fmean(values):{',.0f' if fmean(values) > 100 else '.3g'}}"


# ---------------------------------------------------------------------------------------------------------------------
# The arithmetic


def number_of(name: str, result: dict, cells: Callable) -> float | None:
    """A column of the script's table, or the mean of a routing statistic over the sparse layers."""
    columns = cells(result)
    if name in columns:
        return columns[name][0]
    layers = (result.get("test") or result.get("valid") or result["held_out"]).get("layers", [])
    known = [*columns, *(layers[0] if layers else ())]
    if name not in known:
        raise ValueError(f"there is no number {name!r}: choose from {', '.join(known)}")
    return mean_over_layers(name, layers)


def paired(ours: dict, other: dict, scale: Callable) -> dict:
    """{seed: scale(ours) - scale(other)} for the seeds in both."""
    return {seed: scale(ours[seed]) - scale(other[seed]) for seed in ours if seed in other}


def interval(differences: Iterable[float]) -> tuple[float, float, float, float]:
    """-> the mean of two or more differences, the ends of its 95% t-interval, and p for a mean of 0."""
    stats, differences = shared.library("scipy.stats", "scipy"), [*differences]
    if len({*differences}) == 1:  # no variance
        return *differences[:1] * 3, float(differences[0] == 0)
    test = stats.ttest_1samp(differences, 0)
    return fmean(differences), *test.confidence_interval(), test.pvalue


def flops_of(result: dict) -> float | None:
    """Forward FLOPs per token, or per pair of sentences; of XLM-E, those of the whole training."""
    flops = result.get("flops_per_pair") or result.get("flops")
    return flops["total"] if isinstance(flops, dict) else flops


# ---------------------------------------------------------------------------------------------------------------------
# The comparison


def compare(options: Compare, scripts: dict[str, ModuleType]):
    """Two experiments, A and B, compared seed by seed: the mean of A - B with its 95% interval.

    Pass a run of each, of the same script and data. Their other seeds are found beside them by their constants. A seed
    affects both runs of a pair alike, so their differences vary less than their scores. If the interval contains 0, the
    difference is not significant. In the figure, thin lines are seeds and the band is the interval.
    """
    if len(options.folders) != 2:
        raise ValueError("pass two runs, such as out/train_lm/demo-router=topk out/train_lm/demo")
    a, b = both = [*map(find, options.folders)]
    check_comparable(a, b)
    script, (number, words) = scripts[a.script], MEASURES[a.script]
    if options.number not in (None, number):
        number = words = options.number
    relative = number in RELATIVE
    values = []
    for side in both:
        numbers = {seed: number_of(number, result, script.cells) for seed, result in side.results.items()}
        values.append({seed: x for seed, x in numbers.items() if x is not None})
    differences = paired(*values, math.log if relative else float)
    if not differences:
        raise ValueError(f"no seed of both runs has {words}: train more with {command(script, b, min(a.runs))}")

    def number_in(difference: float) -> float:
        return 100 * math.expm1(difference) if relative else difference

    def in_words(difference: float) -> str:
        return f"{float(f'{number_in(difference):.2g}'):+g}{'%' * relative}"

    print(f"A: {a.folder}, {len(a.runs)} finished\nB: {b.folder}, {len(b.runs)} finished")
    for name in differing(a.config, b.config):
        if name not in ignored(a.config):
            print(f"{name}: {a.config[name]} in A, {b.config[name]} in B")
    rows = [[f"seed {s}", *(f"{x[s]:.5g}" for x in values), in_words(d)] for s, d in differences.items()]
    ends, verdict = None, f"one pair of seeds decides nothing{spread(values, relative)}"
    if len(differences) > 1:
        mean, *ends, p = interval(differences.values())
        means = [f"{fmean(side[seed] for seed in differences):.5g}" for side in values]
        low, high = map(in_words, ends)
        rows.append(["mean", *means, f"{in_words(mean)} ({low} to {high}, p {p:.2g})"])
        verdict = f"A is {'higher' if mean > 0 else 'lower'} by {in_words(abs(mean)).lstrip('+')}"
        if ends[0] <= 0 <= ends[1]:
            verdict = "no significant difference"
    else:
        for side in both:
            if len(side.runs) == 1:
                verdict += f"\nmore seeds of {side.folder}: {command(script, side, min(side.runs))}"
    for name, value in COSTS.items():
        row = [side.mean(value) for side in both]
        rows += [[name, *row, ""]] if any(row) else []
    table = [["", "A", "B", f"A - B, {words}"], *rows]
    print(f"\n{markdown_table(table[0], rows)}\n\npairs of seeds: {len(differences)}\n{words}: {verdict}")
    records = [{"side": "A - B", "seed": seed, words: number_in(d)} for seed, d in differences.items()]
    drawing = shared.draw(
        [*curves(both), Panel(f"A - B{', %' * relative}", records, "side", "seed", words, joined=False)]
    )
    drawing.axes[-1].axhline(0, color="0.6")
    if ends:
        drawing.axes[-1].axhspan(*map(number_in, ends), alpha=0.15)
    shared.save(compare, options, drawing, {"table": table, "verdict": verdict, "records": records})


COSTS = {  # row of the table -> its value in a result
    "FLOPs, nominal": flops_of,
    "FLOPs, served": lambda result: result.get("flops_served"),
    "minutes": lambda result: result["seconds"] / 60,
}


def find(folder: str) -> Experiment:
    """The finished runs beside a run's folder that differ only in their seed. Raises ValueError if there are none."""
    config = read_json(Path(folder, "config.json"))
    if "seed" not in config:
        raise ValueError(f"{folder} has no config.json of a run: pass the folder of a run")
    runs, results = {}, {}
    for file in sorted(Path(folder).absolute().parent.glob("*/config.json")):
        other = read_json(file)
        if "seed" not in other or {*differing(other, config)} - ignored(config):
            continue
        result = read_json(file.with_name("result.json"))
        if result:
            runs[other["seed"]], results[other["seed"]] = shared.read_run(str(file.parent)), result
        else:
            print(f"{file.parent.name} (seed {other['seed']}) is not finished: left out")
    if not runs:
        raise ValueError(f"{folder} has no finished run: repeat its command to finish it")
    script = shared.script_of(next(iter(runs.values())))
    if not script:
        raise ValueError(f"{folder} is not a run of a training script")
    return Experiment(folder, script, config, runs, results)


def ignored(config: dict) -> set[str]:
    """What may differ between seeds: in fine-tuning also the checksum, which includes the new weights."""
    return {"seed", "data_checksum"} if "task" in config else {"seed"}


def check_comparable(a: Experiment, b: Experiment):
    """Raises ValueError for different scripts or data, or if both are the same experiment."""
    if a.script != b.script:
        raise ValueError(f"{a.folder} is a run of {a.script}.py, {b.folder} of {b.script}.py: pass runs of one script")
    differ = {*differing(a.config, b.config)} - ignored(a.config)
    for name in ("data_checksum", "tokenizer_checksum", "task"):
        if name in differ:
            raise ValueError(f"{a.folder} and {b.folder} differ in {name}: pass runs on the same data")
    if not differ:
        raise ValueError(f"{a.folder} and {b.folder} differ only in their seed: pass runs of two experiments")


def spread(values: list[dict], relative: bool) -> str:
    """How much the seeds of a side differ, in words; "" if each side has one seed."""
    for name, side in zip("BA", values[::-1]):
        if len(side) > 1:
            deviation = stdev(map(math.log, side.values())) if relative else stdev(side.values())
            deviation = f"{100 * math.expm1(deviation):.2g}%" if relative else f"{deviation:.2g}"
            return f": the {len(side)} seeds of {name} have a standard deviation of {deviation}"
    return ""


def command(script: ModuleType, side: Experiment, seed: int) -> str:
    """The command that trains three seeds of an experiment: the closest preset and what differs from it."""
    config = side.config | {"seed": seed, "out_dir": str(Path(side.folder).parent)}
    changes = {}
    for preset, constants in script.PRESETS.items():
        known = from_json(to_json(vars(script.Config(**{"preset": preset} | constants))))
        changes[preset] = [*differing(known, config)]
    preset = min(changes, key=lambda name: len(changes[name]))
    words = ["python", f"{script.__name__}.py", "--preset", preset, "--seeds", "3"]
    for name in changes[preset]:
        value = config[name]
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def curves(both: list[Experiment]) -> list[Panel]:
    """Panels of the training loss and of the held-out score at each evaluation."""
    records, score = [], "held-out score"
    for name, side in zip("AB", both):
        for seed, run in side.runs.items():
            for line in run.log:
                record = {
                    "run": seed,
                    "side": f"{name}: {side.folder}",
                    "step": line["step"],
                    "loss": line["train_loss"],
                }
                if "held_out" in line:
                    score, record["score"] = "masked tokens right", line["held_out"]["sentences"]["generator"]
                else:
                    score = next(metric for metric in ("bleu", "ppl", "f1", "accuracy") if metric in line)
                    record["score"] = line[score]
                records.append(record)
    return [
        Panel("training loss", records, "side", "step", "loss"),
        Panel(f"evaluations: {score}", records, "side", "step", "score"),
    ]
