"""What tools/render.py compares and draws: claims as differences between runs, seed by seed, and the pages' pictures.

Each claim of claims.json has a `primary` comparison, which decides its verdict, and others that are `also` measured. A
comparison pairs two runs, `ours` and `other`, each SCRIPT/RUN of any seed, and lists what the pair is `about`: the
constants in which its runs may differ. Any other difference is an error, also in the `tokens a step` and `FLOPs` that
follow from the constants. `number` is one of NUMBERS; `from` names another number of the other run, such as the one
that the same run began with. With `analysis`, it is the mean over the records of an analysis, those with the values of
`at`, if given. `layer` chooses the layer whose translations are found: "best" is the one that finds the most in the
other seeds. pictures.json lists the panels of each picture: the records of an analysis, or the translations found in
each layer of runs.
"""

import math
import operator
from collections import Counter, defaultdict
from functools import cache, partial, reduce
from itertools import starmap
from pathlib import Path
from statistics import fmean
from types import ModuleType

import numpy as np

from analysis.compare import flops_of, interval, number_of, paired, signed
from analysis.shared import KEY, Panel, canvas, draw, unequal
from analyze import SCRIPTS
from engine.config import identity, with_constants
from engine.files import from_json

OURS = "ours"  # in place of a paper, the questions that no paper asks
PERCENT = partial(operator.mul, 100)
BY_LAYER = {"translations found": "retrieval", "found, centred": "centred"}  # number -> its key in `held_out`
NUMBERS = {  # number -> the unit of its differences, and a scale on which higher is what the papers want
    "perplexity": ("% in perplexity", lambda x: -100 * math.log(x)),
    "BLEU": (" BLEU", float),
    "positive": (" points of positive activations", PERCENT),
    "RC": (" doublings of RC", math.log2),
    "RC at first": (" doublings of RC", math.log2),
    "RF": (" points of RF", lambda x: -100 * x),
    "translations found": (" points of translations found", PERCENT),
    "found, centred": (" points of translations found", PERCENT),
    "F1 or accuracy": (" points", float),
    "EM": (" points", float),
    "English ahead by": (" points of the gap to English", lambda x: -x),
}
COUNTING = {  # script -> 1 if higher is better, else -1; where a result has its score, and a trivial method's
    "train_lm": (-1, "test bpb", "counting bigrams"),
    "train_mlm": (-1, "valid ppl", "counting neighbours ppl"),
    "train_electra": (1, "held_out sentences generator", "counting neighbours right"),
    "train_mt": (1, "test bleu", "memory bleu"),
    "finetune_xtreme": (1, "languages en", "counted en"),  # see loses_to_counting
}
HOLDS, OPPOSITE, LEVEL, UNDECIDED = "holds", "the opposite", "not significant", "undecided"
COLORS = {HOLDS: "#0072B2", OPPOSITE: "#D55E00", LEVEL: "0.5"}
MARKS = {
    "ends": ("-", "95% interval of the mean"),
    "seeds": ("|", "a seed"),
    "mean": ("o", "mean of the seeds"),
    "paper": ("D", "the paper"),
}
FOUND = "translations found, %"


@cache
def results_of(folder: Path) -> dict[str, dict]:
    """{KIND/NAME: result} of the lines of folder/KIND.jsonl and of gpu/NAME.json."""
    results = {f"gpu/{file.stem}": from_json(file.read_text()) for file in folder.glob("gpu/*.json")}
    for file in folder.glob("*.jsonl"):
        for result in map(from_json, file.read_text().splitlines()):
            results[f"{file.stem}/{result['name']}"] = result
    return results


@cache
def claims(folder: Path) -> list[dict]:
    """Each claim with its effects in words and its verdict."""
    rows = from_json((folder / "claims.json").read_text())
    for claim in rows:
        others = [effect(folder, pair) for pair in claim.get("also", [])]
        claim["also"] = "<br>".join(" ".join([pair["words"], *pair["notes"]]) for pair in others)
        if "primary" in claim:
            claim["primary"] = effect(folder, claim["primary"])
        else:
            claim |= {"verdict": "not measured", "effect": f"would take {claim['needs']}", "differ": ""}
    measured = [claim for claim in rows if "primary" in claim]
    for family in (True, False):  # the papers' claims, and our questions; those not measured yet count, too
        ours = [claim for claim in rows if (claim["paper"] == OURS) == family]
        correct([claim["primary"] for claim in measured if claim in ours], len(ours))
    for claim in measured:
        primary = claim["primary"]
        if primary["notes"]:
            verdict, reason = UNDECIDED, " ".join(primary["notes"])
        else:
            verdict = LEVEL if primary["corrected"] >= 0.05 else HOLDS if primary["mean"][0] > 0 else OPPOSITE
            reason = f"p {primary['p']:.2g}, corrected {primary['corrected']:.2g}"
        claim |= {"verdict": verdict, "effect": f"{primary['words']}; {reason}", "differ": primary["differ"]}
    return rows


def correct(pairs: list[dict], m: int):
    """Adds Holm's correction of p for m claims, which bounds the chance that any true zero is called a difference."""
    largest = 0.0
    for rank, pair in enumerate(sorted((pair for pair in pairs if not pair["notes"]), key=lambda pair: pair["p"])):
        pair["corrected"] = largest = max(largest, min(1.0, (m - rank) * pair["p"]))


def effect(folder: Path, pair: dict) -> dict:
    """The mean difference between two runs of the same seed, with a 95% t-interval over seeds and its p."""
    unit, scale = NUMBERS[pair["number"]]
    begin = pair | {"number": pair.get("from", pair["number"])}
    differences = paired(values(folder, pair, "ours"), values(folder, begin, "other"), scale)
    if len(differences) < 2:
        raise ValueError(f"{pair['ours']} and {pair['other']} share fewer than two seeds: no interval")
    mean, low, high, p = interval(differences.values())
    difference = f"{signed(mean)}{unit} ({signed(low)} to {signed(high)}, {len(differences)} seeds)"
    paper = np.diff([scale(x) for x in pair.get("paper", ())])
    marks = {"seeds": differences.values(), "mean": [mean], "ends": [low, high], "paper": paper}
    for name, numbers in marks.items():
        marks[name] = [round(float(x), 3) for x in numbers]  # the same on every machine
    sides = ("first", pair["ours"]), ("second", pair["other"])
    notes = [f"[the {side} model loses to counting]" for side, run in sides if loses_to_counting(folder, run)]
    words = {"difference": difference, "words": f"{pair['where']}: {difference}", "notes": notes}
    return pair | marks | words | {"p": p, "differ": ", ".join(differing(folder, pair))}


def loses_to_counting(folder: Path, run: str) -> bool:
    """Whether at least half of the seeds of SCRIPT/RUN score no higher than a trivial method on what they learn.

    A fine-tuned encoder learns a task in English: counting, a constant answer and random weights are trivial there.
    """
    sign, *paths = COUNTING[Path(run).parent.name]
    losses = []
    for result in by_seed(folder, run).values():
        score, trivial = (reduce(operator.getitem, path.split(), result) for path in paths)
        if "task" in result["config"]:
            metric = [*score][-1]  # EM of answers
            random = result_of(folder, f"finetune_xtreme/ciphers-{result['config']['task']}-random_weights=True")
            others = [result["counted"]["en"], result["guesses"]["en"], random["languages"]["en"]]
            score, trivial = score[metric], max(other[metric] for other in others)
        losses.append(sign * (score - trivial) <= 0)
    return 2 * sum(losses) >= len(losses)


def differing(folder: Path, pair: dict) -> list[str]:
    """What differs between two runs of any seed: constants, processors and code.

    Raises ValueError for a constant that the pair is not about, and for one that only one run has although both read
    it, or none: they are of different versions.
    """
    ours, other = by_seed(folder, pair["ours"]), by_seed(folder, pair["other"])
    pairs = [(ours[seed], other[seed]) for seed in ours.keys() & other.keys()]
    names, notes = set(), Counter()
    for one, two in pairs:
        notes["processor"] += one["machine"]["device"] != two["machine"]["device"]
        notes["unrecorded code"] += "code" not in one or "code" not in two
        notes["code"] += any("-" not in both for both in unequal(one.get("code", {}), two.get("code", {})).values())
        for name, (x, y) in unequal(facts(one), facts(two)).items():
            for side, value, lacking, having in ("ours", x, one, two), ("other", y, two, one):
                script = SCRIPTS[Path(pair[side]).parent.name]
                if value == "-" and (name in read_by(script, lacking) or name not in read_by(script, having)):
                    raise ValueError(f"{pair[side]} has no constant {name}, as in another version: run it again")
            if "-" in (x, y) or (name == "FLOPs" and math.isclose(x, y, rel_tol=0.02)):  # routers add up to 2%
                continue
            if name == "model":
                encoders = (result_of(folder, f"train_electra/{Path(model).name}") for model in (x, y))
                differ = unequal(*map(facts, encoders)).items()
                names |= {f"encoder's {constant}" for constant, both in differ if "-" not in both}
            if name not in pair["about"]:
                raise ValueError(f"{pair['ours']} and {pair['other']}: {name} is {x} and {y}; `about` must name it")
            names.add(name)
    return sorted(names) + [f"{name} in {n} of {len(pairs)} seeds" for name, n in notes.items() if n]


def read_by(script: ModuleType, result: dict) -> dict:
    """The constants that today's script would read in place of this result's."""
    constants = result["config"]
    Config = with_constants(script.Config, constants.get("router", "dense"))
    return identity(Config(**{name: constants[name] for name in Config.__dataclass_fields__.keys() & constants}))


def facts(result: dict) -> dict:
    """What to compare of a run: its constants, and what follows from them."""
    constants = result["config"]
    facts = constants | {"dtype": result["machine"]["dtype"]}
    if "task" in constants:
        return facts
    tokens, flops = constants["batch_tokens"], flops_of(result)
    if "tlm" not in constants:  # XLM-E's is already that of the whole training
        flops *= tokens * constants["steps"]
    elif constants["tlm"]:  # a step has a second batch, of pairs
        tokens *= 2
    return facts | {"tokens a step": tokens, "FLOPs": flops}


def values(folder: Path, pair: dict, side: str) -> dict[int, float]:
    """{seed: the pair's number} of one side of the pair."""
    run, layer, key = pair[side], pair.get("layer"), pair["number"]
    results = by_seed(folder, run)
    if "analysis" in pair:
        at, numbers = pair.get("at", {}).get(side, {}), defaultdict(list)
        for record in result_of(folder, f"analyses/{pair['analysis']}")["records"]:
            if record[key] is not None and at.items() <= record.items():
                numbers[Path(record["run"]).name].append(record[key])
        return {seed: fmean(numbers[result["name"]]) for seed, result in results.items()}
    if layer is None:
        cells = SCRIPTS[Path(run).parent.name].cells
        return {seed: number_of(key, result, cells) for seed, result in results.items()}
    found = {seed: result["held_out"][BY_LAYER[key]] for seed, result in results.items()}
    if layer != "best":
        return {seed: layers[layer] for seed, layers in found.items()}
    best = {}
    for seed, layers in found.items():
        others = [found[other] for other in found if other != seed]
        best[seed] = layers[max(range(1, len(layers)), key=lambda i: sum(other[i] for other in others))]
    return best


def result_of(folder: Path, name: str) -> dict:
    if name not in results_of(folder):
        raise ValueError(f"{folder} has no {name}")
    return results_of(folder)[name]


def by_seed(folder: Path, run: str) -> dict[int, dict]:
    """{seed: result} of SCRIPT/RUN and of the runs that differ from it only in their seed."""
    config, kind = result_of(folder, run)["config"], Path(run).parent.name
    runs = [result for name, result in results_of(folder).items() if Path(name).parent.name == kind]
    results = [result for result in runs if not unequal(config, result.get("config", {}))]
    return {result["config"]["seed"]: result for result in sorted(results, key=lambda x: x["config"]["seed"])}


def pictures(folder: Path) -> dict[str, tuple]:
    """{name: (the function that draws it, the numbers in it)}."""
    rows = []
    for claim in claims(folder):
        if "primary" in claim:
            row = {name: claim["primary"][name] for name in (*MARKS, "difference")}
            rows.append(row | {"name": f"{claim['paper']}: {claim['short']}", "verdict": claim["verdict"]})
    drawings = {"verdicts": (forest, rows)}
    for name, panels in from_json((folder / "pictures.json").read_text()).items():
        numbers = [panel_of(folder, panel) for panel in panels]
        drawings[name] = lambda panels: draw(starmap(Panel, panels)), numbers
    return drawings


def panel_of(folder: Path, panel: dict) -> list:
    if "records" in panel:
        only = panel.get("only", {}).items()
        records = result_of(folder, f"analyses/{panel['records']}")["records"]
        records = [record for record in records if only <= record.items()]
        return [panel["title"], records, panel["by"], panel["x"], panel["y"]]
    records = []
    for name, run in panel["runs"].items():
        for result in by_seed(folder, run).values():
            for layer, share in enumerate(result["held_out"][panel["held_out"]]):
                records.append({"run": result["name"], "encoder": name, "layer": layer, FOUND: 100 * share})
    return [panel["title"], records, "encoder", "layer", FOUND]


def forest(rows: list[dict]):
    """A row per claim: its seeds, their mean and interval, and the paper's difference, on a scale of its own."""
    figure = canvas(1, width=9, height=0.3 * len(rows) + 1)
    [axes], key = figure.axes, {}
    for y, row in enumerate(rows):
        largest = max(abs(x) for name in MARKS for x in row[name])
        for name, (mark, words) in MARKS.items() if row["verdict"] != UNDECIDED else ():
            x = [value / largest for value in row[name]]
            color = "black" if name == "paper" else COLORS[row["verdict"]]
            [key[name]] = axes.plot(x, [y] * len(x), mark, color=color, linewidth=2, label=words)
        axes.text(1.05, y, f"{row['verdict']}: {row['difference']}", va="center", fontsize=8)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axes.set(xticks=[], ylim=(len(rows) - 0.4, -0.6))
    axes.spines[:].set_visible(False)
    title = "Right of 0 is what the paper says: blue holds, orange is the opposite, grey is not significant"
    figure.suptitle(title, fontsize=9)
    figure.legend(handles=[*key.values()], ncols=len(key), **KEY)
    return figure
