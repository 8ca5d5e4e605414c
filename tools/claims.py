"""What tools/render.py compares and draws: claims as differences between runs, seed by seed, and the pages' pictures.

Both are listed in results/. In the names of runs {} is where a seed stands. claims.json has pairs of runs, `ours` and
`other`, and what a pair is `about`: the constants in which its runs may differ. Any other difference is an error, also
of what follows from constants, `tokens a step` and `FLOPs`. What is compared is a number of a script's table or of its
sparse layers; `from` names another number of the other side, such as the one that the same runs began with. Where
`other` names two runs, it is the number on the line between them, where as many experts serve a token as in ours. Of
translations it is the layer of the script's table, or another `layer`. pictures.json has the panels of pictures, of
records in results/analyses/, or of what each layer of runs finds.
"""

import importlib
import math
from itertools import starmap
from pathlib import Path
from statistics import fmean

from analysis.measures import mean_over_layers
from analysis.shared import KEY, Panel, canvas, draw
from engine.config import identity
from engine.files import from_json

SEEDS = ("", *(f"-seed={seed}" for seed in range(1, 8)))  # in the names of runs
BY_LAYER = {"translations found": "retrieval", "found, centred": "centred"}  # a number -> of all layers, in `held_out`
UNITS = {  # how a number is taken, so that the claim says that the difference of two is above 0; 100 log is about 1%
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


def read(file: Path):
    """What a file of JSON holds."""
    return from_json(file.read_text())


# ---------------------------------------------------------------------------------------------------------------------
# Claims


def claims(folder: Path) -> list[dict]:
    """Each claim with its effects, and what those say together that are measured as in the paper."""
    rows = read(folder / "claims.json")
    for claim in rows:
        pairs, found, differ = [], set(), {}
        for pair in claim["pairs"]:
            pairs.append(effect(folder, pair))
            found.add(pairs[-1]["verdict"])
            differ |= dict.fromkeys(pairs[-1]["differ"])
            if pair["number"] == "translations found" and "layer" not in pair:
                beside = pair | {"number": "found, centred"}  # shown, decides nothing
                pairs.append(effect(folder, beside, ", centred"))
        claim |= {"pairs": pairs, "differ": ", ".join(differ)}
        claim["effect"] = "<br>".join(pair["words"] for pair in pairs)
        if len(found) == 1:
            claim["verdict"] = found.pop()
        elif {"holds", "the opposite"} <= found:
            claim["verdict"] = "mixed"
        elif found:
            claim["verdict"] = "in part" if "holds" in found else "level or worse"
    return rows


def effect(folder: Path, pair: dict, how="") -> dict:
    """The mean of the differences between two runs of the same seed, with a 95% t-interval over seeds and its p."""
    from scipy import stats

    take, where = UNITS[pair["unit"]], pair["where"] + how
    ours = values(folder, pair, pair["ours"])
    before = {"number": pair.get("from", pair["number"])}
    if isinstance(pair["other"], list):
        runs, other = pair["other"], between(folder, pair)
    else:
        runs, other = [pair["other"]], values(folder, pair | before, pair["other"])
    seeds = [seed for seed in ours if seed in other]
    differences = [take(ours[seed]) - take(other[seed]) for seed in seeds]
    if len(differences) < 2:
        raise ValueError(f"{pair['ours']} and {pair['other']} have no two seeds in common: no interval")
    test = stats.ttest_1samp(differences, 0)
    mean = fmean(differences)
    low, high = test.confidence_interval()
    verdict = "holds" if low > 0 else "the opposite" if high < 0 else "level"
    said = [float(f"{x:.2g}") for x in (mean, low, high)]  # two digits, and no exponent
    words = "{}: {:+g} ({:+g} to {:+g}, p {:.2g})".format(where, *said, test.pvalue)
    drawn = {"seeds": differences, "mean": [mean], "ends": [low, high], "paper": []}
    if "paper" in pair and not how:
        before, after = map(take, pair["paper"])
        drawn["paper"] = [after - before]
    for name, numbers in drawn.items():
        drawn[name] = [round(float(x), 3) for x in numbers]  # the same on every machine
    sides = [pair | {"other": run} for run in runs]
    differ = {name for side in sides for seed in seeds for name in differing(folder, side, seed)}
    found = {"where": where, "words": words, "verdict": verdict}
    return pair | drawn | found | {"differ": sorted(differ)}


def between(folder: Path, pair: dict) -> dict[str, float]:
    """{seed: the number on the line between the other side's two runs, where as many experts serve as in ours}."""
    served = pair | {"number": "served"}
    x = values(folder, served, pair["ours"])
    ends = [(values(folder, served, run), values(folder, pair, run)) for run in pair["other"]]
    found = {}
    for seed in set.intersection(*map(set, (x, *(y for _, y in ends)))):
        (x0, y0), (x1, y1) = ((experts[seed], numbers[seed]) for experts, numbers in ends)
        share = (x[seed] - x0) / (x1 - x0)
        found[seed] = y0 + share * (y1 - y0)
    return found


def differing(folder: Path, pair: dict, seed: str) -> list[str]:
    """In what the runs of a seed differ. Raises ValueError where that is more than the pair is about."""
    ours = facts(folder, pair["ours"].format(seed))
    other = facts(folder, pair["other"].format(seed))
    if math.isclose(ours.get("FLOPs", 0), other.get("FLOPs", 0), rel_tol=0.02):  # no two routers cost the same
        ours.pop("FLOPs", None)
    both = sorted(ours.keys() & other.keys())
    found = [name for name in both if ours[name] != other[name]]
    for name in found:
        if name not in pair["about"]:
            values = f"{name} is {ours[name]} and {other[name]}"
            raise ValueError(f"{pair['ours']} and {pair['other']}: {values}; `about` must name it")
    return found


def facts(folder: Path, run: str) -> dict:
    """All in which SCRIPT/RUN may differ from others: the constants that it reads, and what follows from them."""
    Config = importlib.import_module(Path(run).parent.name).Config
    result = read(folder / f"{run}.json")
    constants, fields = result["config"], Config.__dataclass_fields__.keys()
    known = {name: constants[name] for name in fields & constants}
    others = {name: constants[name] for name in constants.keys() - fields}  # checksums, and constants of that day
    found = identity(Config(**known)) | others | {"dtype": result["machine"]["dtype"]}
    if "task" in constants:  # fine-tuning, whose checksum of the data is of the encoder's weights as well
        del found["data_checksum"]
        return found
    tokens = constants["batch_tokens"]
    work = result.get("flops_per_pair") or result["flops"]
    if isinstance(work, dict):
        work = work["total"]
    if "tlm" not in constants:  # XLM-E's is that of the whole training
        work *= tokens * constants["steps"]
    elif constants["tlm"]:  # pairs are a batch, too
        tokens *= 2
    return found | {"tokens a step": tokens, "FLOPs": work}


def values(folder: Path, pair: dict, run: str) -> dict[str, float]:
    """{seed: what is compared} of SCRIPT/RUN, which is one side of a pair."""
    script = importlib.import_module(Path(run).parent.name)
    layer, key, found = pair.get("layer"), pair["number"], {}
    for seed, result in of_seeds(folder, run).items():
        cells = script.cells(result)
        if layer is not None:
            found[seed] = result["held_out"][BY_LAYER[key]][layer]
        elif key in cells:
            found[seed], _ = cells[key]
        else:
            found[seed] = mean_over_layers(key, result["test"]["layers"])
    return found


def of_seeds(folder: Path, run: str) -> dict[str, dict]:
    """{seed: result} of SCRIPT/RUN, as far as the results are there."""
    files = {seed: folder / f"{run.format(seed)}.json" for seed in SEEDS}
    return {seed: read(file) for seed, file in files.items() if file.exists()}


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
        found[name] = lambda panels: draw(starmap(Panel, panels)), numbers
    return found


def panel_of(folder: Path, panel: dict) -> list:
    """What a Panel is made of."""
    if "records" in panel:
        shown = read(folder / f"analyses/{panel['records']}.json")["records"]
        return [panel["title"], shown, panel["by"], panel["x"], panel["y"]]
    shown = []
    for name, run in panel["runs"].items():
        for seed, result in of_seeds(folder, run).items():
            for layer, share in enumerate(result["held_out"][panel["held_out"]]):
                record = {"run": Path(run).name.format(seed), "encoder": name}
                shown.append(record | {"layer": layer, FOUND: 100 * share})
    return [panel["title"], shown, "encoder", "layer", FOUND]


def forest(units: dict[str, list[dict]]):
    """A panel for each unit, and in it a row for each comparison: its seeds, their mean, its interval, the paper's."""
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
        names = [pair["name"] for pair in pairs]
        axes.set_yticks(range(len(pairs)), names, fontsize=8)
        axes.set_ylim(len(pairs) - 0.4, -0.6)
        axes.set_title(unit, fontsize=9, loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle("Right of 0 is what the paper says: blue holds, grey is level, orange is the opposite", fontsize=10)
    figure.legend(handles=[*key.values()], ncols=len(key), **KEY)
    return figure
