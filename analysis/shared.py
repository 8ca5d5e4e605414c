"""What the figures share: their options, how they are drawn and kept, and the trained runs that they read."""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import tyro

from data.batches import MaskedData, Prepared, TokenData
from engine import pretrained
from engine.config import check
from engine.device import Context, setup
from engine.run import read_json
from engine.table import markdown_table, mean_cell
from model import GPT, SparseModel
from routers import ROUTERS


@dataclass
class Drawn:
    """Options of every figure."""

    folders: tyro.conf.Positional[tuple[str, ...]] = ()  # folders of runs; none: all finished ones of the demo that fit
    out: str = "out/figures"  # folder for NAME.png, NAME.svg and NAME.json


@dataclass
class Measured(Drawn):
    """Options of figures for which trained models are run again."""

    max_tokens: int = 1 << 16  # held-out tokens that are read for each point, at most
    device: str = "auto"  # cuda, mps or cpu


# ---------------------------------------------------------------------------------------------------------------------
# What a figure shows: records, which are dicts with the same names. Its lines and its table are made of them.

COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"  # Okabe and Ito's
MARKERS = "osD^vXP"
FROM_ZERO, LOG = {"ylim": (0, None)}, {"yscale": "log"}  # for Panel.more


@dataclass
class Panel:
    """One set of axes: a line for each value of `by`, through its records' x and y."""

    title: str
    records: list[dict]
    by: str
    x: str
    y: str
    levels: dict[str, float] = field(default_factory=dict)  # name -> height of a dashed line across
    joined: bool = True  # whether the points of a line are joined
    more: dict = field(default_factory=dict)  # scales and limits, as Axes.set takes them


def show(name: str, options, records: list, panels: list, keys: tuple, rows=None):
    """Prints a table, of `rows` or else of the records, draws the panels, and keeps all."""
    headers, *lines = table = table_of(rows or records, keys)
    print(markdown_table(headers, lines))
    keep(name, options, draw(panels), {"table": table, "records": records})


def table_of(records: list[dict], keys: tuple) -> list[list]:
    """Headers and rows: one row for all records with the same `keys`, as of seeds, with the means of their numbers.

    Texts that are no keys are left out.
    """
    names = [name for name in records[0] if name not in keys]
    numbers = [name for name in names if not isinstance(records[0][name], str)]
    kinds = {}
    for record in records:
        kind = tuple(record[key] for key in keys)
        kinds.setdefault(kind, []).append(record)
    rows = [[*keys, *numbers]]
    for kind, alike in kinds.items():
        row = list(kind)
        for name in numbers:
            values = [(record[name], ".5g") for record in alike]
            row.append(mean_cell(values))
        rows.append(row)
    return rows


def keep(name: str, options, figure, numbers: dict):
    """Writes a figure, and the numbers in it with the command that drew it."""
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=150)
    figure.savefig(folder / f"{name}.svg")
    command = shlex.join(["python", "analyze.py", *sys.argv[1:]])
    text = json.dumps({"command": command} | numbers, indent=1)
    (folder / f"{name}.json").write_text(text + "\n")
    print(f"{folder / name}.json has the numbers, .png and .svg the figure")


def canvas(columns: int = 1, width: float = 5.5, height: float = 4.5):
    """An empty figure with a row of axes, each so many inches wide and high."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a figure needs one more library: pip install matplotlib") from None
    figure = Figure(figsize=(columns * width, height), layout="constrained")
    figure.subplots(1, columns, squeeze=False)
    return figure


def draw(panels: list[Panel]):
    """A figure with the panels side by side. A name looks the same in all of them, and a run has lines of its own."""
    figure, looks = canvas(len(panels)), {}
    for axes, panel in zip(figure.axes, panels):
        lines, line = {}, "-" if panel.joined else ""
        for record in panel.records:
            key = record[panel.by], record.get("run")
            lines.setdefault(key, []).append((record[panel.x], record[panel.y]))
        for (name, _), points in lines.items():
            style = looks.setdefault(name, look(len(looks)))
            axes.plot(*zip(*points), label=name, linestyle=line, **style)
        for name, level in panel.levels.items():
            axes.axhline(level, color="0.6", linestyle="--", label=name)
        axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y, **panel.more)
        handles, labels = axes.get_legend_handles_labels()
        entries = dict(zip(labels, handles))  # one entry for each name
        axes.legend(entries.values(), entries.keys(), fontsize=8)
    return figure


def look(number: int) -> dict[str, str]:
    """Of a line or of points; the first 49 are unlike each other."""
    turn, place = divmod(number, len(COLORS))
    return {"color": COLORS[place], "marker": MARKERS[(place + turn) % len(MARKERS)]}


# ---------------------------------------------------------------------------------------------------------------------
# Which runs are meant

Runs = dict[str, dict]  # folder -> constants

# Each script's runs have these constants, and no other script's runs have them all.
SCRIPTS = {
    "train_lm": {"min_learning_rate"},
    "train_mlm": {"mask_share", "init_from"},
    "train_electra": {"objective"},
    "finetune_xtreme": {"train_examples"},
}


def read_run(folder: str, script: str) -> tuple[dict, list]:
    """The constants of a run and its evaluations. Raises ValueError where the folder holds no run of the script."""
    config = read_json(Path(folder, "config.json"))
    log = Path(folder, "metrics.jsonl")
    ours = config.keys() >= SCRIPTS[script]
    if not ours or not log.exists():
        raise ValueError(f"{folder} holds no run of {script}.py with an evaluation: give such as out/{script}/demo")
    lines = log.read_text().splitlines()
    return config, [json.loads(line) for line in lines]


def choose(script: str, folders: tuple, fits: Callable[[dict], bool] | None = None, lacks: str = "") -> Runs:
    """folder -> constants of the runs that were named, or of all finished runs of the script's demo.

    fits: constants -> whether a figure can show the run; lacks: what is said of a named run that does not fit.
    Raises ValueError where a named run is not finished or does not fit, or no run is left.
    """
    results = Path("out", script).glob("demo*/result.json")
    finished = sorted(file.parent for file in results)
    found = {}
    for folder in [str(Path(folder)) for folder in folders or finished]:
        config, _ = read_run(folder, script)
        if not Path(folder, "result.json").exists():
            raise ValueError(f"{folder} is not finished: the command that began the run finishes it")
        if fits is None or fits(config):
            found[folder] = config
        elif folders:
            raise ValueError(f"{folder} {lacks}")
    if not found:
        raise ValueError(f"out/{script} holds no finished run of the demo that fits: train one, or name folders")
    return found


def is_sparse(config: dict) -> bool:
    """Whether a run has experts. Raises ValueError where routers.py has no such router."""
    name = config["router"]
    if name != "dense" and name not in ROUTERS:
        raise ValueError(f"a run has the router {name!r}, which routers.py does not have")
    return name != "dense"


def reads(config: dict, constant: str) -> bool:
    """Whether the router of a run reads a constant."""
    return is_sparse(config) and constant in ROUTERS[config["router"]].reads


def experts_of(config: dict) -> tuple[int, int]:
    """How many experts a sparse layer of a run has, and the width of one."""
    if "experts" in config:  # X-MoE's layers
        return config["experts"], config["expert_size"]
    split = config["split"] or ROUTERS[config["router"]].split
    return config["expert_ffns"] * split, config["ffn_size"] // split


def describe(config: dict) -> str:
    """A run in a few words, such as `threshold 32 x 128`."""
    if not is_sparse(config):
        return "dense"
    experts, size = experts_of(config)
    return f"{config['router']} {experts} x {size}"


def all_but(config: dict, *names: str) -> dict:
    """The constants of a run without some of them. Seeds of one experiment are alike but for `seed`."""
    return {name: value for name, value in config.items() if name not in names}


def named(found: Runs, describe: Callable[[dict], str] = describe) -> dict[str, str]:
    """folder -> what the run is in a few words, with the constants in which runs of the same words differ.

    So only seeds of one experiment have the same name.
    """
    words = {folder: describe(config) for folder, config in found.items()}
    names = dict(words)
    for folder, config in found.items():
        alike = [found[other] for other in found if words[other] == words[folder]]
        for name, value in all_but(config, "seed").items():
            if any(other.get(name) != value for other in alike):
                names[folder] += f", {name} {value}"
    return names


class Opened(NamedTuple):
    """A trained run that can be measured."""

    model: SparseModel
    data: Prepared
    context: Context


def open_runs(found: Runs, options: Measured) -> dict[str, Opened]:
    """folder -> the run's model, its corpus, and the device. All are opened before the first is measured.

    Raises ValueError or OSError where a checkpoint or a corpus is gone, or the corpus has changed.
    """
    check(options)
    opened = {}
    for folder, constants in found.items():
        context = setup(options.device, constants["dtype"])
        model, _ = pretrained.load(folder)
        data = corpus_of(model, folder, constants, context)
        opened[folder] = Opened(context.place(model), data, context)
    return opened


def corpus_of(model: SparseModel, folder: str, constants: dict, context: Context) -> TokenData | MaskedData:
    """What a run was trained on, of XLM-E's two the sentences. Raises ValueError or OSError where it is gone."""
    config = model.config
    if isinstance(model, GPT):
        data = TokenData.open(config.data, config, context)
    else:
        shares = {"exponent": config.sampling_exponent, "mask_share": config.mask_share}
        data = MaskedData.open(config.data, config, context, **shares)
    first, *_ = constants["data_checksum"].split("+")
    if data.checksum != first:
        raise ValueError(f"{data.folder} has changed since {folder} was trained on it")
    return data
