"""What tools/render.py compares and draws: claims as differences between runs, seed by seed, and the pages' pictures.

claims.json pairs two runs, `ours` and `other`, each SCRIPT/RUN of any seed, and lists what the pair is `about`: the
constants in which its runs may differ. Any other difference is an error, also in the `tokens a step` and `FLOPs` that
follow from the constants. `number` is a column of a script's table or a statistic of its sparse layers; `from` names
another number of the other run, such as the one that the same run began with. If `other` names two runs, its number is
interpolated between them, at the number of experts that serve a token in ours. Translations found are those of the
layer in the script's table, or of `layer`. pictures.json lists the panels of each picture: the records of an analysis,
or the translations found in each layer of runs.
"""

import importlib
import math
from functools import cache
from itertools import starmap
from pathlib import Path
from types import ModuleType

from analysis.compare import flops_of, interval, number_of, paired, signed, unequal
from analysis.shared import KEY, Panel, canvas, draw
from engine.config import identity
from engine.files import from_json

BY_LAYER = {"translations found": "retrieval", "found, centred": "centred"}  # number -> its key in `held_out`
UNITS = {  # unit -> a scale on which a claim says that ours is higher; a step of 1 in 100 log is about 1%
    "perplexity, about % lower": lambda x: -100 * math.log(x),
    "points more of BLEU, F1 or accuracy": lambda x: x,
    "points more: masked tokens right, activations positive": lambda x: 100 * x,
    "points more of the translations found": lambda x: 100 * x,
    "points of RF lower": lambda x: -100 * x,
    "points of the gap to English lower": lambda x: -x,
    "doublings of RC": math.log2,
}
MARKS = {
    "ends": ("-", "95% interval of the mean"),
    "seeds": ("|", "a seed"),
    "mean": ("o", "mean of the seeds"),
    "paper": ("D", "the paper"),
}
FOUND = "translations found, %"
COLORS = {"holds": "#0072B2", "level": "0.55", "the opposite": "#D55E00"}


@cache
def results_of(folder: Path) -> dict[str, dict]:
    """{KIND/NAME: result} of the lines of folder/KIND.jsonl and of gpu/NAME.json."""
    results = {f"gpu/{file.stem}": from_json(file.read_text()) for file in folder.glob("gpu/*.json")}
    for file in folder.glob("*.jsonl"):
        for result in map(from_json, file.read_text().splitlines()):
            results[f"{file.stem}/{result['name']}"] = result
    return results


def claims(folder: Path) -> list[dict]:
    """Each claim with its effects, and a verdict on those measured as in the paper."""
    rows = from_json((folder / "claims.json").read_text())
    for claim in rows:
        pairs, verdicts, differ = [], set(), {}
        for pair in claim["pairs"]:
            pairs.append(effect(folder, pair))
            verdicts.add(pairs[-1]["verdict"])
            differ |= dict.fromkeys(pairs[-1]["differ"])
            if pair["number"] == "translations found" and "layer" not in pair:
                centred = pair | {"number": "found, centred"}  # shown, but not part of the verdict
                pairs.append(effect(folder, centred, ", centred"))
        claim |= {"pairs": pairs, "differ": ", ".join(differ)}
        claim["effect"] = "<br>".join(pair["words"] for pair in pairs)
        if len(verdicts) == 1:
            claim["verdict"] = verdicts.pop()
        elif {"holds", "the opposite"} <= verdicts:
            claim["verdict"] = "mixed"
        elif verdicts:
            claim["verdict"] = "in part" if "holds" in verdicts else "level or worse"
    return rows


def effect(folder: Path, pair: dict, suffix="") -> dict:
    """The mean difference between two runs of the same seed, with a 95% t-interval over seeds and its p."""
    scale, where = UNITS[pair["unit"]], pair["where"] + suffix
    ours = values(folder, pair, pair["ours"])
    if isinstance(pair["other"], list):
        runs, other = pair["other"], interpolated(folder, pair)
    else:
        number = pair.get("from", pair["number"])
        runs, other = [pair["other"]], values(folder, pair | {"number": number}, pair["other"])
    differences = paired(ours, other, scale)
    if len(differences) < 2:
        raise ValueError(f"{pair['ours']} and {pair['other']} share fewer than two seeds: no interval")
    mean, low, high, p = interval(differences.values())
    verdict = "holds" if low > 0 else "the opposite" if high < 0 else "level"
    words = f"{where}: {signed(mean)} ({signed(low)} to {signed(high)}, p {p:.2g})"
    marks = {"seeds": differences.values(), "mean": [mean], "ends": [low, high], "paper": []}
    if "paper" in pair and not suffix:
        before, after = map(scale, pair["paper"])
        marks["paper"] = [after - before]
    for name, numbers in marks.items():
        marks[name] = [round(float(x), 3) for x in numbers]  # the same on every machine
    differ = {name for run in runs for name in differing(folder, pair | {"other": run})}
    return pair | marks | {"where": where, "words": words, "verdict": verdict, "differ": sorted(differ)}


def interpolated(folder: Path, pair: dict) -> dict[int, float]:
    """{seed: the number of the other side, linear between its two runs, at the experts that serve a token in ours}."""
    served = pair | {"number": "served"}
    x = values(folder, served, pair["ours"])
    (x0, y0), (x1, y1) = ((values(folder, served, run), values(folder, pair, run)) for run in pair["other"])
    numbers = {}
    for seed in x.keys() & y0.keys() & y1.keys():
        share = (x[seed] - x0[seed]) / (x1[seed] - x0[seed])
        numbers[seed] = y0[seed] + share * (y1[seed] - y0[seed])
    return numbers


def differing(folder: Path, pair: dict) -> set[str]:
    """The facts in which two runs of any seed differ. Raises ValueError if the pair is not about one of them."""
    ours, other = by_seed(folder, pair["ours"]), by_seed(folder, pair["other"])
    names = set()
    for seed in ours.keys() & other.keys():
        differ = unequal(facts(pair["ours"], ours[seed]), facts(pair["other"], other[seed]))
        for name, (x, y) in differ.items():
            if "-" in (x, y) or (name == "FLOPs" and math.isclose(x, y, rel_tol=0.02)):  # routers add up to 2%
                continue
            if name not in pair["about"]:
                raise ValueError(f"{pair['ours']} and {pair['other']}: {name} is {x} and {y}; `about` must name it")
            names.add(name)
    return names


def facts(run: str, result: dict) -> dict:
    """What to compare of SCRIPT/RUN: the constants that it reads, and what follows from them."""
    Config, constants = script_of(run).Config, result["config"]
    known = {name: constants[name] for name in Config.__dataclass_fields__.keys() & constants}
    others = {name: constants[name] for name in constants.keys() - known}  # checksums, constants of older versions
    facts = identity(Config(**known)) | others | {"dtype": result["machine"]["dtype"]}
    if "task" in constants:
        return facts
    tokens, flops = constants["batch_tokens"], flops_of(result)
    if "tlm" not in constants:  # XLM-E's is already that of the whole training
        flops *= tokens * constants["steps"]
    elif constants["tlm"]:  # a step has a second batch, of pairs
        tokens *= 2
    return facts | {"tokens a step": tokens, "FLOPs": flops}


def values(folder: Path, pair: dict, run: str) -> dict[int, float]:
    """{seed: the pair's number} of one side of the pair."""
    results, layer, key = by_seed(folder, run), pair.get("layer"), pair["number"]
    if layer is not None:
        return {seed: result["held_out"][BY_LAYER[key]][layer] for seed, result in results.items()}
    return {seed: number_of(key, result, script_of(run).cells) for seed, result in results.items()}


def script_of(run: str) -> ModuleType:
    return importlib.import_module(Path(run).parent.name)


def result_of(folder: Path, name: str) -> dict:
    if name not in results_of(folder):
        raise ValueError(f"{folder} has no {name}")
    return results_of(folder)[name]


def by_seed(folder: Path, run: str) -> dict[int, dict]:
    """{seed: result} of SCRIPT/RUN and of the runs that differ from it only in their seed."""
    config = result_of(folder, run)["config"]
    results = [result for result in results_of(folder).values() if not unequal(config, result.get("config", {}))]
    return {result["config"]["seed"]: result for result in sorted(results, key=lambda x: x["config"]["seed"])}


def pictures(folder: Path) -> dict[str, tuple]:
    """{name: (the function that draws it, the numbers in it)}."""
    units = {unit: [] for unit in UNITS}
    for claim in claims(folder):
        for pair in claim["pairs"]:
            row = {name: pair[name] for name in (*MARKS, "verdict")}
            row["name"] = f"{claim['short']}: {pair['where']}"
            units[pair["unit"]].append(row)
    drawings = {"verdicts": (forest, units)}
    for name, panels in from_json((folder / "pictures.json").read_text()).items():
        numbers = [panel_of(folder, panel) for panel in panels]
        drawings[name] = lambda panels: draw(starmap(Panel, panels)), numbers
    return drawings


def panel_of(folder: Path, panel: dict) -> list:
    if "records" in panel:
        records = result_of(folder, f"analyses/{panel['records']}")["records"]
        return [panel["title"], records, panel["by"], panel["x"], panel["y"]]
    records = []
    for name, run in panel["runs"].items():
        for result in by_seed(folder, run).values():
            for layer, share in enumerate(result["held_out"][panel["held_out"]]):
                record = {"run": result["name"], "encoder": name}
                records.append(record | {"layer": layer, FOUND: 100 * share})
    return [panel["title"], records, "encoder", "layer", FOUND]


def forest(units: dict[str, list[dict]]):
    """A panel for each unit, with a row for each comparison: its seeds, their mean and interval, the paper's value."""
    rows = sum(map(len, units.values()))
    figure = canvas(1, width=9, height=0.25 * rows + 0.7 * len(units))
    figure.clear()
    heights = [len(pairs) + 1.2 for pairs in units.values()]
    panels = figure.subplots(len(units), 1, height_ratios=heights)
    key = {}
    for axes, (unit, pairs) in zip(panels, units.items()):
        for y, pair in enumerate(pairs):
            for name, (mark, words) in MARKS.items():
                x = pair[name]
                color = "black" if name == "paper" else COLORS[pair["verdict"]]
                [key[name]] = axes.plot(x, [y] * len(x), mark, color=color, linewidth=2, label=words)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(pairs)), [pair["name"] for pair in pairs], fontsize=8)
        axes.set_ylim(len(pairs) - 0.4, -0.6)
        axes.set_title(unit, fontsize=9, loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle("Right of 0 is what the paper says: blue holds, grey is level, orange is the opposite", fontsize=10)
    figure.legend(handles=[*key.values()], ncols=len(key), **KEY)
    return figure
