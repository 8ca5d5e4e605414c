"""Two experiments compared seed by seed. tools/claims.py uses the same arithmetic."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from textwrap import shorten
from types import ModuleType

from analysis.shared import SCRIPTS, FigureOptions, Panel, TrainedRun, read_run, show, unequal
from metrics.routing import mean_over_layers

RELATIVE = {"perplexity", "no limit", "RC", "RC at first"}  # differences are in %


@dataclass
class Compare(FigureOptions):
    number: str | None = None  # a column of the script's table or a routing statistic; None: the script's main measure


def number_of(name: str, result: dict, cells: Callable) -> float | None:
    """A column of the script's table, or the mean of a routing statistic over the sparse layers."""
    columns = cells(result)
    layers = (result.get("test") or result.get("valid") or {}).get("layers", [])
    known = columns | dict(*layers[:1])
    if name not in known:
        raise ValueError(f"there is no number {name!r}: choose from {', '.join(known)}")
    return columns[name][0] if name in columns else mean_over_layers(name, layers)


def flops_of(result: dict, kind="flops") -> float | None:
    """Forward FLOPs per token, or per pair of sentences; of XLM-E, those of the whole training."""
    flops = result.get(f"{kind}_per_pair") or result.get(kind)
    return flops["total"] if isinstance(flops, dict) else flops


def paired(ours: dict, other: dict, scale: Callable) -> dict:
    """{seed: scale(ours) - scale(other)} for the seeds that have both numbers."""
    return {seed: scale(x) - scale(other[seed]) for seed, x in ours.items() if None not in (x, other.get(seed))}


def interval(differences: Iterable[float]) -> tuple[float, float, float, float]:
    """-> the mean of two or more differences, the ends of its 95% t-interval, and p for a mean of 0."""
    from scipy.stats import ttest_1samp

    differences = [*differences]
    if len({*differences}) == 1:  # no variance
        return *differences[:1] * 3, float(differences[0] == 0)
    test = ttest_1samp(differences, 0)
    return fmean(differences), *test.confidence_interval(), test.pvalue


def signed(x: float) -> str:
    return f"{float(f'{x:.2g}'):+g}"  # two digits, and no exponent


def compare(options: Compare, scripts: dict[str, ModuleType]):
    """Two experiments, A and B, compared seed by seed: the mean of A - B with its 95% interval.

    Pass a run of each, of the same script and data. Their other seeds are found automatically in the same folder. A
    seed affects both runs of a pair alike, so differences vary less than scores. If the interval contains 0, the
    difference is not significant.
    """
    if len(options.folders) != 2:
        raise ValueError("pass two runs, such as out/train_lm/demo-router=topk out/train_lm/demo")
    sides = [*map(find_seeds, options.folders)]
    script, *names = check_comparable(options.folders, sides)
    _, number, words = SCRIPTS[script]
    if options.number:
        number = words = options.number
    values, records, losses = [], [], []
    for letter, name, side in zip("AB", names, sides):
        values.append({seed: number_of(number, run.result, scripts[script].cells) for seed, run in side.items()})
        for seed, run in side.items():
            key = {"side": letter, "run": f"seed {seed}"}
            records.append(key | {words: values[-1][seed]} | costs(run.result))
            key["side"] += f": {name}"
            losses += [key | {"step": line["step"], "training loss": line["train_loss"]} for line in run.log]
    scale, size, unit = (math.log, lambda d: 100 * math.expm1(d), "%") if number in RELATIVE else (float, float, "")
    differences = paired(*values, scale)
    if not differences:
        raise ValueError(f"no seed of both has {words}: train more seeds with --seeds 3")
    pairs = [{"side": f"A - B {unit}", "seed": seed, words: size(d)} for seed, d in differences.items()]
    levels, verdict = {"no difference": 0}, "one pair of seeds decides nothing: train more with --seeds 3"
    if len(pairs) > 1:
        *ends, p = interval(differences.values())
        mean, low, high = map(size, ends)
        levels |= {"mean of A - B": mean, "its 95% interval": (low, high)}
        records.append({"side": f"A - B {unit}", "mean": mean, "low": low, "high": high, "p": p})
        verdict = f"A is {'higher' if mean > 0 else 'lower'}"
        if "is better" in words:
            verdict = "A is better" if (mean > 0) == ("higher" in words) else "A is worse"
        if low <= 0 <= high:
            verdict = "no significant difference"
        verdict += f", {signed(mean)}{unit} ({signed(low)}{unit} to {signed(high)}{unit}, p {p:.2g})"
    panels = [
        Panel("Training", losses, "side", "step", "training loss"),
        Panel("By seed", pairs, "side", "seed", words, levels, joined=False),
    ]
    show(compare, options, records + pairs, ("side",), panels)
    print("A - B by seed:", ", ".join(f"{pair['seed']}: {signed(pair[words])}{unit}" for pair in pairs))
    print(f"{words}: {verdict}")


def costs(result: dict) -> dict[str, float | None]:
    """FLOPs and minutes, and whether routing is healthy: tokens without an expert, and the busiest expert's load."""
    layers = (result.get("test") or result.get("valid") or {}).get("layers", [])
    routing = {name: mean_over_layers(name, layers) for name in ("unserved", "imbalance") if name in dict(*layers[:1])}
    served = flops_of(result, "flops_served")
    return {"FLOPs, nominal": flops_of(result), "FLOPs, served": served, "minutes": result["seconds"] / 60} | routing


def find_seeds(folder: str) -> dict[int, TrainedRun]:
    """{seed: run} of a finished run and of those beside it that differ only in their seed."""
    config = read_run(folder).config
    runs = [read_run(str(file.parent)) for file in Path(folder).absolute().parent.glob("*/result.json")]
    seeds = {run.config["seed"]: run for run in runs if not unequal(config, run.config)}
    return dict(sorted(seeds.items()))


def check_comparable(folders: tuple, sides: list[dict]) -> list[str]:
    """Prints seeds and what differs -> the script, names of A and B. ValueError if the runs cannot be compared."""
    ours, other = (next(iter(side.values())) for side in sides)
    differ = unequal(ours.config | {"script": ours.script}, other.config | {"script": other.script})
    fixed = differ.keys() & {"script", "task", "tokenizer_checksum", "data_checksum"}
    if fixed:
        raise ValueError(f"A and B differ in {', '.join(fixed)}: pass runs of one script on the same data")
    if not differ:
        raise ValueError("A and B differ only in their seed: pass runs of two experiments")
    for name, folder, side in zip("AB", folders, sides):
        print(f"{name}: {folder}, seeds {', '.join(map(str, side))}")
    print("A and B differ in:", *(f"{name} {x}, {y}" for name, (x, y) in differ.items()), sep="\n  ")
    sides = ([f"{name} {x[i]}" for name, x in differ.items() if x[i] not in ("-", None)] for i in (0, 1))
    return [ours.script, *(shorten(", ".join(side), 60) for side in sides)]
