"""Two experiments compared seed by seed. tools/claims.py uses the same arithmetic."""

import math
import os
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
RELATIVE = {"ours", "no limit", "our perplexity", "rc", "RC", "RC at first"}  # differences are in %


@dataclass
class Compare(FigureOptions):
    number: str | None = None  # a column of the script's table or a routing statistic; None: the script's main measure


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


COSTS = {  # row of the table -> its value in a result, and its format
    "FLOPs, nominal": (flops_of, ",.0f"),
    "FLOPs, served": (lambda result: result.get("flops_served"), ",.0f"),
    "minutes": (lambda result: result["seconds"] / 60, ".1f"),
}


def compare(options: Compare, scripts: dict[str, ModuleType]):
    """Two experiments, A and B, compared seed by seed: the mean of A - B with its 95% interval.

    Pass a run of each, of the same script and data. Their other seeds are found beside them by their constants. A seed
    affects both runs of a pair alike, so their differences vary less than their scores. If the interval contains 0, the
    difference is not significant. In the figure, thin lines are seeds and the band is the interval.
    """
    if len(options.folders) != 2:
        raise ValueError("pass two runs, such as out/train_lm/demo-router=topk out/train_lm/demo")
    sides = a, b = [*map(find_seeds, options.folders)]
    script = scripts[check_comparable(options.folders, sides)]
    number, words = MEASURES[script.__name__]
    if options.number not in (None, number):
        number = words = options.number
    values = []
    for side in sides:
        numbers = {seed: number_of(number, run.result, script.cells) for seed, run in side.items()}
        values.append({seed: x for seed, x in numbers.items() if x is not None})
    relative = number in RELATIVE
    differences = paired(*values, math.log if relative else float)
    if not differences:
        raise ValueError(f"no seed of both runs has {words}: train more with {command(script, b, min(a))}")

    def size(difference: float) -> float:
        return 100 * math.expm1(difference) if relative else difference

    def in_words(difference: float) -> str:
        return f"{float(f'{size(difference):.2g}'):+g}{'%' * relative}"

    rows = [[f"seed {s}", *(f"{side[s]:.5g}" for side in values), in_words(d)] for s, d in differences.items()]
    records = [{"side": "A - B", "seed": s, words: size(d)} for s, d in differences.items()]
    panel = Panel(f"A - B{', %' * relative}", records, "side", "seed", words, {"no difference": 0}, joined=False)
    drawing = shared.draw([*curves(sides), panel])
    if len(differences) > 1:
        mean, low, high, p = interval(differences.values())
        drawing.axes[-1].axhspan(size(low), size(high), alpha=0.15)
        means = [f"{fmean(side[seed] for seed in differences):.5g}" for side in values]
        rows.append(["mean", *means, f"{in_words(mean)} ({in_words(low)} to {in_words(high)}, p {p:.2g})"])
        verdict = f"A is {'higher' if mean > 0 else 'lower'} by {in_words(mean)[1:]}"
        if low <= 0 <= high:
            verdict = "no significant difference"
    else:
        verdict = "one pair of seeds decides nothing"
        for name, side, numbers in zip("AB", sides, values):
            if len(numbers) > 1:
                deviation = stdev([math.log(x) if relative else x for x in numbers.values()])
                verdict += f"\nstandard deviation of the {len(numbers)} seeds of {name}: {in_words(deviation)[1:]}"
            else:
                verdict += f"\nmore seeds of {name}: {command(script, side, min(side))}"
    for name, (value, form) in COSTS.items():
        costs = [[x for x in map(value, (run.result for run in side.values())) if x is not None] for side in sides]
        if any(costs):
            rows.append([name, *(f"{fmean(x):{form}}" if x else "" for x in costs), ""])
    table = [["", "A", "B", f"A - B, {words}"], *rows]
    print(f"\n{markdown_table(table[0], rows)}\n\npairs of seeds: {len(differences)}\n{words}: {verdict}")
    shared.save(compare, options, drawing, {"table": table, "verdict": verdict, "records": records})


def find_seeds(folder: str) -> dict[int, TrainedRun]:
    """{seed: finished run} of the runs beside a run's folder that differ only in their seed, itself included."""
    config, runs = read_json(Path(folder, "config.json")), {}
    if "seed" not in config:
        raise ValueError(f"{folder} has no config.json of a run: pass the folder of a run")
    for file in sorted(Path(folder).absolute().parent.glob("*/config.json")):
        other = read_json(file)
        if "seed" not in other or unequal(config, other):
            continue
        if file.with_name("result.json").exists():
            runs[other["seed"]] = shared.read_run(str(file.parent))
        else:
            print(f"{file.parent.name} (seed {other['seed']}) is not finished: left out")
    if not runs:
        raise ValueError(f"{folder} has no finished run: repeat its command to finish it")
    return dict(sorted(runs.items()))


def unequal(config: dict, other: dict) -> dict[str, tuple]:
    """{constant: both values} of those that differ, except the seed and what depends on it."""
    by_seed = {"seed", "data_checksum"} if "task" in config else {"seed"}  # of new weights, in fine-tuning
    both = {name: (config.get(name, "-"), other.get(name, "-")) for name in config | other if name not in by_seed}
    return {name: (x, y) for name, (x, y) in both.items() if x != y}


def check_comparable(folders: tuple, sides: list[dict]) -> str:
    """Says what differs -> the script of both. Raises ValueError for different scripts or data, or equal constants."""
    (a, first), (b, second) = ((folder, next(iter(side.values()))) for folder, side in zip(folders, sides))
    scripts = [*map(shared.script_of, (first, second))]
    if scripts[0] != scripts[1] or "" in scripts:
        raise ValueError(f"{a} is a run of {scripts[0]}.py, {b} of {scripts[1]}.py: pass runs of one script")
    differ = unequal(first.config, second.config)
    for name in differ.keys() & {"data_checksum", "tokenizer_checksum", "task"}:
        raise ValueError(f"{a} and {b} differ in {name}: pass runs on the same data")
    if not differ:
        raise ValueError(f"{a} and {b} differ only in their seed: pass runs of two experiments")
    print(f"A: {a}, {len(sides[0])} finished\nB: {b}, {len(sides[1])} finished\nA and B differ in:")
    print("\n".join(f"  {name}: {x}, {y}" for name, (x, y) in differ.items()))
    return scripts[0]


def command(script: ModuleType, runs: dict[int, TrainedRun], seed: int) -> str:
    """The command that trains three seeds of an experiment: the closest preset and what differs from it."""
    run, changes = next(iter(runs.values())), {}
    config = run.config | {"seed": seed, "out_dir": os.path.relpath(Path(run.folder).parent)}
    for preset, constants in script.PRESETS.items():
        known = from_json(to_json(vars(script.Config(**{"preset": preset} | constants))))
        changes[preset] = [*differing(known, config)]
    preset = min(changes, key=lambda name: len(changes[name]))
    words = ["python", f"{script.__name__}.py", "--preset", preset, "--seeds", "3"]
    for name in changes[preset]:
        value = config[name]
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def curves(sides: list[dict[int, TrainedRun]]) -> list[Panel]:
    """The training loss, and the score of each evaluation."""
    records, score = [], "held out"
    for name, side in zip("AB", sides):
        for seed, run in side.items():
            for line in run.log:
                record = {"run": seed, "side": name, "step": line["step"], "training loss": line["train_loss"]}
                scores = line.get("held_out", {}).get("sentences", line)
                score = next(key for key in ("generator", "bleu", "ppl", "f1", "accuracy") if key in scores)
                records.append(record | {"held out": scores[score]})
    return [
        Panel("training", records, "side", "step", "training loss"),
        Panel(f"evaluations: {score}", records, "side", "step", "held out"),
    ]
