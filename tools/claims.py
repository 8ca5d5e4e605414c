"""What tools/render.py compares and draws: claims as differences between runs, seed by seed, and the pages' pictures.

Both are listed in results/. In the names of runs {} is where a seed stands. claims.json has pairs of runs, `ours` and
`other`; what is compared is a number of a script's table or of its sparse layers, or `FILE: NAME` of the records of
results/analyses/FILE.json. pictures.json has the panels of each picture. Their points are the records of such a file,
or the shares of translations that each layer of some runs finds.
"""

import importlib
import json
import math
from pathlib import Path
from statistics import fmean

from analysis.measures import mean_over_layers
from analysis.shared import Panel, canvas, draw

SEEDS = ("", "-seed=1", "-seed=2", "-seed=3", "-seed=4")  # in the names of runs
UNITS = {  # how a number is taken, so that the claim says that the difference of two is above 0; 100 log is about 1%
    "perplexity, about % lower": lambda x: -100 * math.log(x),
    "points more of BLEU, F1 or accuracy": lambda x: x,
    "points more: masked tokens right, activations positive": lambda x: 100 * x,
    "points more of the translations found": lambda x: 100 * x,
    "points of RF lower": lambda x: -100 * x,
    "doublings of RC": math.log2,
}
MARKS = {"ends": "-", "seeds": "|", "mean": "o", "paper": "D"}
COLORS = {"holds": "#0072B2", "level": "0.55", "the opposite": "#D55E00"}


def read(file: Path, take=lambda content: content):
    """take(content) of a file of JSON. Raises ValueError where it is missing, or is not what `take` takes."""
    try:
        return take(json.loads(file.read_text()))
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: measure it, or take it off its page") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is not what its script writes today ({error!r}): measure it again") from None


# ---------------------------------------------------------------------------------------------------------------------
# Claims


def claims(folder: Path) -> list[dict]:
    """Each claim with its effects, and what they say together."""
    rows = read(folder / "claims.json")
    for claim in rows:
        pairs = [effect(folder, pair) for pair in claim["pairs"]]
        claim["pairs"] = pairs
        claim["effect"] = "<br>".join(pair["words"] for pair in pairs)
        found = {pair["verdict"] for pair in pairs}
        if len(found) == 1:
            claim["verdict"] = found.pop()
        elif {"holds", "the opposite"} <= found:
            claim["verdict"] = "mixed"
        elif found:
            claim["verdict"] = "in part" if "holds" in found else "level or worse"
    return rows


def effect(folder: Path, pair: dict) -> dict:
    """The mean of the differences between two runs of the same seed, with a 95% t-interval over seeds and its p."""
    from scipy import stats

    take = UNITS[pair["unit"]]
    ours = values(folder, pair["ours"], pair["number"])
    other = values(folder, pair["other"], pair["number"])
    differences = []
    for seed in SEEDS:
        if seed in ours and seed in other:
            differences.append(take(ours[seed]) - take(other[seed]))
    if len(differences) < 2:
        raise ValueError(f"{pair['ours']} and {pair['other']} have no two seeds in common: no interval")
    test = stats.ttest_1samp(differences, 0)
    mean = fmean(differences)
    low, high = test.confidence_interval()
    verdict = "holds" if low > 0 else "the opposite" if high < 0 else "level"
    said = [f"{float(f'{x:.2g}'):+g}" for x in (mean, low, high)]  # two digits, and no exponent
    words = "{}: {} ({} to {}, p {:.2g})".format(pair["where"], *said, test.pvalue)
    drawn = {"seeds": differences, "mean": [mean], "ends": [low, high], "paper": []}
    if "paper" in pair:
        before, after = pair["paper"]
        drawn["paper"] = [take(after) - take(before)]
    for name, numbers in drawn.items():
        drawn[name] = [round(float(x), 3) for x in numbers]  # the same on every machine
    return pair | drawn | {"words": words, "verdict": verdict}


def values(folder: Path, run: str, number: str) -> dict[str, float]:
    """{seed: what is compared} of SCRIPT/RUN."""
    where, _, key = number.rpartition(": ")
    if where:
        seeds = {f"out/{run.format(seed)}": seed for seed in SEEDS}
        own = [record for record in records(folder, where) if record["run"] in seeds]
        return {seeds[record["run"]]: record[key] for record in own}
    script = importlib.import_module(run.partition("/")[0])

    def take(result: dict) -> float:
        cells = script.cells(result)
        return cells[key][0] if key in cells else mean_over_layers(key, result["test"]["layers"])

    return {seed: read(file, take) for seed, file in files_of(folder, run).items()}


def files_of(folder: Path, run: str) -> dict[str, Path]:
    """{seed: the result of SCRIPT/RUN}, as far as they are there."""
    files = {seed: folder / f"{run.format(seed)}.json" for seed in SEEDS}
    return {seed: file for seed, file in files.items() if file.exists()}


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def pictures(folder: Path) -> dict[str, tuple]:
    """{name: (how it is drawn, the numbers in it)}."""
    units = {unit: [] for unit in UNITS}
    for claim in claims(folder):
        for pair in claim["pairs"]:
            row = {name: pair[name] for name in (*MARKS, "verdict")}
            row["name"] = f"{claim['short']}: {pair['where']}"
            units[pair["unit"]].append(row)
    found = {"verdicts": (forest, units)}
    for name, panels in read(folder / "pictures.json").items():
        numbers = [panel_of(folder, panel) for panel in panels]
        found[name] = curves, numbers
    return found


def panel_of(folder: Path, panel: dict) -> list:
    """What a Panel is made of."""
    if "records" in panel:
        shown = records(folder, panel["records"])
        return [panel["title"], shown, panel["by"], panel["x"], panel["y"]]
    shown = []
    for name, run in panel["runs"].items():
        for file in files_of(folder, run).values():
            shares = read(file, lambda result: result["held_out"][panel["held_out"]])
            for layer, share in enumerate(shares):
                record = {"run": file.stem, "encoder": name, "layer": layer}
                shown.append(record | {"found, %": 100 * share})
    return [panel["title"], shown, "encoder", "layer", "found, %"]


def records(folder: Path, name: str) -> list[dict]:
    """Those of results/analyses/NAME.json."""
    return read(folder / f"analyses/{name}.json", lambda content: content["records"])


def curves(panels: list[list]):
    return draw([Panel(*panel) for panel in panels])


def forest(units: dict[str, list[dict]]):
    """A panel for each unit, and in it a row for each comparison: its seeds, their mean, its interval, the paper's."""
    rows = sum(map(len, units.values()))
    figure = canvas(1, width=9, height=0.25 * rows + 0.7 * len(units))
    figure.clear()
    heights = [len(pairs) + 1.2 for pairs in units.values()]
    panels = figure.subplots(len(units), 1, height_ratios=heights)
    for axes, (unit, pairs) in zip(panels, units.items()):
        for y, pair in enumerate(pairs):
            for name, mark in MARKS.items():
                x = pair[name]
                color = "black" if name == "paper" else COLORS[pair["verdict"]]
                axes.plot(x, [y] * len(x), mark, color=color, linewidth=2)
        axes.axvline(0, color="black", linewidth=0.8)
        names = [pair["name"] for pair in pairs]
        axes.set_yticks(range(len(pairs)), names, fontsize=8)
        axes.set_ylim(len(pairs) - 0.4, -0.6)
        axes.set_title(unit, fontsize=9, loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle("Right of 0 is what the paper says: blue holds, grey is level, red is the opposite", fontsize=10)
    return figure
