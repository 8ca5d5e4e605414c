"""Fills README.md and results/*.md with tables of what is committed in results/, and draws the pages' pictures.

    python tools/render.py             writes
    python tools/render.py --check     writes nothing, and exits with 1 where a page or a picture is not up to date

Under a line such as

    `python train_lm.py --table 1 --seeds 3` <!-- method | paper, OWT | bits/byte as here -->

stands that command's table, in these columns, made of results/train_lm/RUN.json, the runs' `result.json`. Rows that
have not been run are left out. With `<!-- bench/step: shape=encoder | impl | ms -->` the rows are those of
bench/step.json whose shape is `encoder`. `<!-- claims: claim | verdict -->` compares runs seed by seed, as
results/claims.json says. All else of a page is written by hand.
"""

import importlib
import json
import math
import re
import shlex
import statistics
import sys
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the project's modules are

from analysis.shared import LOG, Panel, canvas, draw
from engine.config import command_line, identity, run_name
from engine.device import clear_errors
from engine.table import Table, markdown_table, mean_cell, seeds_of

RESULTS = Path(__file__).parents[1] / "results"
LINE = re.compile(r"^(?:`python ([\w/]+)\.py([^`]*)`\s)?<!--\s(?:([\w/-]+):\s)?([^>]*)\s-->\n+(?:\|.*\n)*\n*", re.M)
SEEDS = ("", "-seed=1", "-seed=2", "-seed=3", "-seed=4")  # in a run's name, in place of its {}
UNITS = {  # of a claim: how a number is taken, so that the claim says that the difference of two is above 0
    "perplexity, % lower": lambda x: -100 * math.log(x),
    "points more of BLEU, F1 or accuracy": lambda x: x,
    "% more of masked tokens right, or of translations found": lambda x: 100 * x,
    "points of RF lower": lambda x: -100 * x,
    "doublings of RC": math.log2,
}
PICTURES = {  # of each panel: title, where its records are, and in these the name of a line, x and y
    "xmoe-work": [
        ("Half of the work costs little", "gamma", "experts", "FLOPs, limit", "perplexity"),
        ("More than four experts gain nothing", "threshold", "t is changed", "served", "perplexity"),
    ],
    "x-moe-collapse": [
        ("RC: X-MoE's is higher, and so is chance's", "collapse", "experts", "step", "RC"),
        ("RF, softmax gate: no lower", "collapse", "experts", "step", "RF"),
        ("RF, sigmoid gate: lower", "collapse-sigmoid", "experts", "step", "RF"),
    ],
    "xlm-e-layers": [
        ("Django's messages: XLM-E's upper layers find fewer", "demo: retrieval", "encoder", "layer", "found, %"),
        ("Ciphers, each language about its mean", "ciphers: centred", "encoder", "layer", "found, %"),
    ],
}


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def fill(page: str, folder: Path) -> str:
    """The page with its tables made anew."""

    def table(found: re.Match) -> str:
        script, options, file, columns = found.groups()
        rows = claims(folder) if file == "claims" else measured(folder, file) if file else runs(folder, script, options)
        line, headers = re.match(".*?-->", found[0], re.S)[0], {}  # headers: in the rows -> in the page
        for column in " ".join(columns.split()).split(" | "):
            name, _, value = column.partition("=")
            if value:
                rows = [row for row in rows if row[name] == value]
            else:
                name, _, shown = column.partition(" as ")
                headers[name] = shown or name
        if not rows or headers.keys() - rows[0].keys():
            raise ValueError(f"{line}: no such row or column; there are {', '.join(rows[0] if rows else ['no rows'])}")
        body = markdown_table([*headers.values()], [[row[name] for name in headers] for row in rows])
        if file == "claims":  # has whole sentences, which columns as wide as themselves would push out of sight
            body = re.sub(" +(?= )", "", re.sub("-+(?=---)", "", body))
        return f"{line}\n\n{body}\n\n"

    return LINE.sub(table, page)


def read(file: Path, take=lambda content: content):
    """take(content) of a file of JSON. Raises ValueError where it is missing, or is not what `take` takes."""
    try:
        return take(json.loads(file.read_text()))
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: measure it, or take it off its page") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is not what its script writes today ({error!r}): measure it again") from None


def runs(folder: Path, script: str, options: str) -> list[dict]:
    """The rows of a command that have been run, each the mean over its seeds.

    Raises ValueError where a run's constants are not those that the command means today.
    """
    module = importlib.import_module(script)
    config = command_line(module.Config, module.PRESETS, shlex.split(options))
    table = module.TABLES[config.table](config) if config.table else Table("", ("run",), [((config.preset,), {})])
    rows = []
    for labels, change in table.rows:
        found = []
        for one in seeds_of(config, change):
            name = run_name(one, module.PRESETS)
            if getattr(one, "eval_only", False):  # of train_lm.py: a trained model, routed otherwise
                name += f"-eval-t={one.eval_threshold}-capacity={one.eval_capacity}"
            file = folder / script / f"{name}.json"
            if not file.exists():
                continue
            cells, before = read(file, lambda result: (module.cells(result), result.get("config", {})))
            found.append(cells)
            for constant, value in identity(one).items():
                if before.get(constant, value) != value:
                    raise ValueError(f"{file} has {constant} {before[constant]}, its command {value}: run it again")
        if found:
            means = {name: mean_cell([cells[name] for cells in found]) for name in found[0]}
            rows.append(dict(zip(table.labels, labels)) | means)
    return rows


def measured(folder: Path, name: str) -> list[dict]:
    """{header: cell} of each row of what analyze.py or `tools/bench.py --json` wrote."""

    def take(content) -> list[dict]:
        if isinstance(content, list):
            return [{key: f"{x:.2f}" if type(x) is float else x for key, x in row.items()} for row in content]
        headers, *rows = content["table"]
        return [dict(zip(headers, row, strict=True)) for row in rows]

    return read(folder / f"{name}.json", take)


# ---------------------------------------------------------------------------------------------------------------------
# Claims


def claims(folder: Path) -> list[dict]:
    """Each claim with its effects, and what they say together."""
    rows = []
    for claim in read(folder / "claims.json"):
        effects = [effect(folder, pair) for pair in claim["pairs"]]
        verdicts = {found["verdict"] for found in effects}
        several = "in part" if "holds" in verdicts else "level or worse"
        verdict = claim.get("verdict") or (several if len(verdicts) > 1 else verdicts.pop())
        words = "<br>".join(found["words"] for found in effects)
        rows.append(claim | {"pairs": effects, "verdict": f"**{verdict}**", "effect": words})
    return rows


def effect(folder: Path, pair: dict) -> dict:
    """The mean of the differences between two runs of the same seed, with a 95% t-interval over seeds and its p."""
    from scipy import stats

    take = UNITS[pair["unit"]]
    ours, other = (values(folder, pair[side], pair["number"]) for side in ("ours", "other"))
    differences = [take(ours[seed]) - take(other[seed]) for seed in SEEDS if seed in ours and seed in other]
    if len(differences) < 2:
        raise ValueError(f"{pair['ours']} and {pair['other']} have no two seeds in common: no interval")
    test = stats.ttest_1samp(differences, 0)
    low, high = map(float, test.confidence_interval())
    middle = statistics.fmean(differences)
    words = f"{pair['where']}: {middle:+.2g} ({low:+.2g} to {high:+.2g}, p {test.pvalue:.2g})"
    verdict = "holds" if low > 0 else "the opposite" if high < 0 else "level"
    paper = take(pair["paper"][1]) - take(pair["paper"][0]) if "paper" in pair else None
    drawn = {"seeds": differences, "mean": [middle], "ends": [low, high], "paper": [] if paper is None else [paper]}
    rounded = {name: [round(x, 3) for x in numbers] for name, numbers in drawn.items()}  # the same on every machine
    return pair | rounded | {"words": words, "verdict": verdict}


def values(folder: Path, name: str, number: str) -> dict[str, float]:
    """{seed: a number of SCRIPT/RUN}: one of its cells, or of its record in an analysis (`FILE: NAME`)."""
    analysis, _, key = number.rpartition(": ")
    if analysis:
        seeds = {f"out/{name.format(seed)}": seed for seed in SEEDS}
        return {seeds[one["run"]]: one[key] for one in records(folder, analysis) if one["run"] in seeds}
    cells = importlib.import_module(name.partition("/")[0]).cells
    files = {seed: folder / f"{name.format(seed)}.json" for seed in SEEDS}
    return {seed: read(file, lambda result: cells(result)[key][0]) for seed, file in files.items() if file.exists()}


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def pictures(folder: Path) -> dict[str, tuple]:
    """{name: (how it is drawn, the numbers in it)}."""
    units = {unit: [] for unit in UNITS}
    for claim in claims(folder):
        for pair in claim["pairs"]:
            units[pair["unit"]].append(pair | {"claim": claim["short"]})
    found = {"verdicts": (forest, units)}
    for name, panels in PICTURES.items():
        found[name] = curves, [[title, records(folder, where), *axes] for title, where, *axes in panels]
    return found


def records(folder: Path, where: str) -> list[dict]:
    """Those of results/analyses/WHERE.json; of `PRESET: MEASURE` what each layer of train_electra.py's encoders has."""
    preset, _, measure = where.rpartition(": ")
    if not preset:
        return read(folder / f"analyses/{where}.json", lambda content: content["records"])
    found = []
    for file in sorted((folder / "train_electra").glob(f"{preset}*.json")):
        config, shares = read(file, lambda result: (result["config"], result["held_out"][measure]))
        xlm = "XLM with the bias" if config["relative_bias"] else "XLM"
        record = {"run": file.stem, "encoder": "XLM-E" if config["objective"] == "rtd" else xlm}
        for layer, share in enumerate(shares if config["tlm"] else []):
            found.append(record | {"layer": layer, "found, %": 100 * share})
    return found


def curves(panels: list[list]):
    return draw([Panel(*panel, more=LOG if panel[-1] == "RC" else {}) for panel in panels])


def forest(units: dict[str, list[dict]]):
    """A panel for each unit, and in it a row for each comparison: its seeds, their mean, its interval, the paper's."""
    figure = canvas(1, 9, 0.25 * sum(map(len, units.values())) + 0.7 * len(units))
    figure.clear()
    rows = figure.subplots(len(units), 1, height_ratios=[len(pairs) + 1.2 for pairs in units.values()])
    for axes, (unit, pairs) in zip(rows, units.items()):
        for y, pair in enumerate(pairs):
            color = {"holds": "#0072B2", "level": "0.55"}.get(pair["verdict"], "#D55E00")
            axes.plot(pair["ends"], [y, y], color=color, linewidth=2)
            axes.plot(pair["seeds"], [y] * len(pair["seeds"]), "|", color=color, markersize=9)
            axes.plot(pair["mean"], [y], "o", color=color)
            axes.plot(pair["paper"], [y] * len(pair["paper"]), "D", color="black", markerfacecolor="white")
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(pairs)), [f"{pair['claim']}: {pair['where']}" for pair in pairs], fontsize=8)
        axes.set_ylim(len(pairs) - 0.4, -0.6)
        axes.set_title(unit, fontsize=9, loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle("Right of 0 is what the paper says: blue holds, grey is level, red is the opposite", fontsize=10)
    return figure


def main(check: bool = False, root: Path = RESULTS.parent):
    """check: write nothing, and exit with 1 where something is not up to date; root: of README.md and results/."""
    folder, old = root / "results", []
    with clear_errors():
        for page in (root / "README.md", *sorted(folder.glob("*.md"))):
            new = fill(page.read_text(), folder)
            if new != page.read_text():
                old.append(page.name)
                if not check:
                    page.write_text(new)
        for name, (drawn, numbers) in pictures(folder).items():
            file, kept = folder / f"{name}.png", json.dumps(numbers)
            if not check:
                drawn(json.loads(kept)).savefig(file, dpi=120, metadata={"Description": kept})
            elif not file.exists() or kept.encode() not in file.read_bytes():
                old.append(file.name)
        if check and old:
            raise ValueError(f"not up to date: {', '.join(old)}: python tools/render.py")


if __name__ == "__main__":
    tyro.cli(main)
