"""What the figures share: how they are drawn and kept, and the trained runs that they read.

A figure is a function of its options, and of what analyze.py hands it of a training script. Its name is the command's,
and its docstring is the command's help, of which the first line is the title of the drawing. What it shows are records:
dicts with the same names.
"""

import importlib
import math
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill

import numpy as np
import tyro
from tqdm import tqdm

from data.batches import MaskedData, Prepared, TokenData
from engine import pretrained
from engine.config import check
from engine.device import Context, setup, warn
from engine.files import from_json, read_json, to_json
from engine.table import markdown_table, mean_cell
from model import GPT, SparseModel
from routers import ROUTERS


@dataclass
class Drawn:
    """Options of every figure."""

    folders: tyro.conf.Positional[tuple[str, ...]] = ()  # folders of runs; none: all finished ones of the demo that fit
    out: str = "out/figures"  # folder for NAME.png and NAME.json


@dataclass
class Measured(Drawn):
    """Options of figures for which trained models are run again."""

    max_tokens: int = 1 << 16  # held-out tokens that are read for each point, at most
    device: str = "auto"  # cuda, mps or cpu


# ---------------------------------------------------------------------------------------------------------------------
# How a figure is drawn and kept

COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"  # Okabe and Ito's
THIN = {"linewidth": 0.7, "alpha": 0.6}
THICK = {"linewidth": 2, "markersize": 4}
KEY = {"loc": "outside lower center", "fontsize": 8, "frameon": False}


@dataclass
class Panel:
    """One set of axes, if there are records. The names of x and y in them are the labels of the axes."""

    title: str
    records: list[dict]
    by: str  # what a line is called in the records; records of one name and several `run` are of seeds
    x: str
    y: str
    levels: dict[str, float] = field(default_factory=dict)  # name -> height of a dashed line across
    joined: bool = True  # whether the points of a run are joined
    from_zero: bool = False  # whether y begins at 0


def show(figure: Callable, options, records: list[dict], keys: tuple, panels: list[Panel], rows=None):
    """Prints a table, of `rows` or else of the records, draws the panels, and keeps all."""
    headers, *lines = table = table_of(rows or records, keys)
    print(markdown_table(headers, lines))
    keep(figure, options, draw(panels), {"table": table, "records": records})


def table_of(records: list[dict], keys: tuple) -> list:
    """Headers and rows: one row for all records with the same `keys`, as of seeds, with the means of their numbers.

    Texts that are no keys are left out. A cell is empty where the records have none.
    """
    others = [name for name in records[0] if name not in keys]
    numbers = [name for name in others if not isinstance(records[0][name], str)]
    rows = [[*keys, *numbers]]
    for kind, alike in grouped(records, *keys).items():
        row = [f"{key:.5g}" if isinstance(key, float) else key for key in kind]
        for name in numbers:
            values = [(record.get(name), ".5g") for record in alike]
            row.append(mean_cell(values))
        rows.append(row)
    return rows


def grouped(records: list[dict], *names: str) -> dict[tuple, list[dict]]:
    """The records that are alike in these names, by their values."""
    groups = {}
    for record in records:
        values = tuple(record.get(name, "") for name in names)
        groups.setdefault(values, []).append(record)
    return groups


def keep(figure: Callable, options, drawing, numbers: dict):
    """Writes a drawing, and the numbers in it with the command that drew it."""
    path = Path(options.out, figure.__name__)
    path.parent.mkdir(parents=True, exist_ok=True)
    title, *_ = figure.__doc__.splitlines()
    drawing.suptitle(title.rstrip("."), wrap=True)
    drawing.savefig(f"{path}.png", dpi=150)
    command = shlex.join(["python", "analyze.py", *sys.argv[1:]])
    Path(f"{path}.json").write_text(to_json({"command": command} | numbers) + "\n")
    print(f"{path}.json has the numbers, {path}.png the figure")


def canvas(panels: int, width=5.5, height=4.5):
    """An empty figure with so many axes, three in a row at most, each so many inches wide and high."""
    Figure = library("matplotlib.figure", "matplotlib").Figure
    columns = min(panels, 3)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    for place in range(panels):
        figure.add_subplot(rows, columns, 1 + place)
    return figure


def library(name: str, package: str):
    """A module that only a figure needs."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"a figure needs one more library: pip install {package}") from None


def draw(panels: list[Panel]):
    """A figure with the panels side by side, and below them what their lines are.

    A name has one colour. Seeds are thin lines, and their mean is a thick one.
    """
    panels = [panel for panel in panels if panel.records]
    colors, key = {}, {}
    figure = canvas(len(panels))
    for axes, panel in zip(figure.axes, panels):
        axes.spines[["top", "right"]].set_visible(False)
        for name, height in panel.levels.items():
            key[name] = axes.axhline(height, color="0.6", linestyle="--", label=name)
        for name, runs in lines_of(panel).items():
            following = COLORS[len(colors) % len(COLORS)]
            color = colors.setdefault(name, following)
            for points in runs if len(runs) > 1 else []:
                [key["one seed"]] = axes.plot(*points.T, color=color, label="one seed", **THIN)
            shortest = min(map(len, runs))
            mean = np.mean([points[:shortest] for points in runs], axis=0)
            [key[name]] = axes.plot(*mean.T, "o-" if panel.joined else "o", color=color, label=name, **THICK)
        axes.set(title=fill(panel.title, 50), xlabel=panel.x, ylabel=panel.y)
        axes.locator_params(axis="x", integer=panel.x == "layer")
        if panel.from_zero:
            axes.set_ylim(bottom=0)
    letters = 15 * figure.get_figwidth()  # that fit side by side
    columns = max(1, int(letters / (15 + max(map(len, key)))))
    figure.set_figheight(figure.get_figheight() + 0.2 * len(key) / columns)
    figure.legend(handles=[*key.values()], ncols=columns, **KEY)
    return figure


def lines_of(panel: Panel) -> dict[str, list]:
    """name -> of each run (points, 2) its x and y, or of all together if not joined; nan where a number is None."""
    lines = {}
    by = (panel.by, "run") if panel.joined else (panel.by,)
    for (name, *_), own in grouped(panel.records, *by).items():
        points = [(record[panel.x], record[panel.y]) for record in own]
        lines.setdefault(name, []).append(np.array(points, dtype=float))
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# Which runs are meant

SCRIPTS = {  # a constant, or a score, that no other script's runs have
    "train_lm": "min_learning_rate",
    "train_mlm": "predicted",
    "train_electra": "objective",
    "finetune_xtreme": "train_examples",
}
UNTOLD = {"seed", "eval_every", "eval_tokens", "eval_maskings"}  # in which runs of one name may differ


@dataclass
class Trained:
    """A run that figures show."""

    folder: str
    config: dict  # its constants
    log: list[dict]  # its evaluations
    name: str = ""  # what it is, in a few words; only seeds of one experiment have the same
    model: SparseModel | None = None  # this and what follows: where it is measured again
    data: Prepared | None = None
    context: Context | None = None
    evaluate: Callable | None = None  # that of its script

    @property
    def record(self) -> dict:
        return {"run": self.folder, "experts": self.name}


def read_run(folder: str, script: str) -> Trained:
    """Raises ValueError where the folder holds no finished run of the script."""
    if not Path(folder, "result.json").exists():
        raise ValueError(f"{folder} holds no finished run: the command that began a run finishes it")
    config = read_json(Path(folder, "config.json"))
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    log = [from_json(line) for line in lines]
    if SCRIPTS[script] not in config | log[-1]:
        raise ValueError(f"{folder} holds no run of {script}.py: give such as out/{script}/demo")
    return Trained(folder, config, log)


def router_of(config: dict) -> type | None:
    """The class of a run's router; None of a dense model. Raises ValueError where routers.py has no such router."""
    name = config["router"]
    if name != "dense" and name not in ROUTERS:
        raise ValueError(f"a run has the router {name!r}, which routers.py does not have")
    return ROUTERS.get(name)


def reads(config: dict, constant: str) -> bool:
    """Whether the router of a run reads a constant."""
    router = router_of(config)
    return router is not None and constant in router.reads


def experts_of(config: dict) -> tuple[int, int]:
    """How many experts a sparse layer of a run has, and the width of one; of a dense model its FFN."""
    router = router_of(config)
    if router is None:
        return 1, config["ffn_size"]
    if "experts" in config:  # X-MoE's layers
        return config["experts"], config["expert_size"]
    split = config["split"] or router.split
    return config["expert_ffns"] * split, config["ffn_size"] // split


def in_words(config: dict) -> str:
    """A run in a few words, such as `threshold 32 x 128`."""
    if "objective" in config:  # of train_electra.py
        return {"rtd": "XLM-E", "mlm": "XLM"}[config["objective"]]
    if "model" in config:  # of finetune_xtreme.py
        return config["model"]
    experts, size = experts_of(config)
    return f"{config['router']} {experts} x {size}" if router_of(config) else "dense"


def named(runs: Iterable[Trained]) -> list[Trained]:
    """The runs with their names: what each is, with the constants in which runs of the same words differ.

    So only seeds of one experiment have the same name. Width and steps are told where any runs differ in them, and how
    a run was evaluated in training is not.
    """
    runs, kinds = [*runs], {}
    for run in runs:
        kinds.setdefault(in_words(run.config), []).append(run)
    for kind, alike in kinds.items():
        for run in alike:
            run.name = kind
            for constant, value in run.config.items():
                compared = runs if constant in ("n_embd", "steps") else alike
                values = {repr(other.config.get(constant)) for other in compared}
                is_seed = constant == "data_checksum" and "task" in run.config  # fine-tuning's is of new weights, too
                if constant not in UNTOLD and len(values) > 1 and not is_seed:
                    run.name += f", {constant} {value}"
    return runs


def choose(script: str, options: Drawn, fits=None, lacks="") -> list[Trained]:
    """The runs that were named, or all finished runs of the script's demo, but for trials of a few steps.

    fits: constants -> whether a figure can show the run; lacks: what is said of a named run that is left out. Raises
    ValueError where a named run is not finished, or no run is left.
    """
    finished = sorted(file.parent for file in Path("out", script).glob("demo*/result.json"))
    found = {}
    for folder in map(str, map(Path, options.folders or finished)):
        run = read_run(folder, script)
        if fits is None or fits(run.config):
            found[folder] = run
        elif options.folders:
            warn(f"{folder} is left out: it {lacks}")
    longest = max((run.config.get("steps", 0) for run in found.values()), default=0)
    for folder, run in [*found.items()] if not options.folders else ():
        if 2 * run.config.get("steps", 0) < longest:
            warn(f"{found.pop(folder).folder} is left out: {longest} steps are others' length; name it to see it")
    if not found:
        raise ValueError(f"no finished run of {script}.py fits: python {script}.py trains one; or name folders")
    return named(found.values())


def opened(runs: list[Trained], options: Measured, evaluate: Callable | None = None) -> tqdm:
    """The runs with their models, corpora and the device, under a bar. All are opened before the first is measured.

    evaluate: that of the runs' script, where a figure needs it. Raises ValueError or OSError where a checkpoint or a
    corpus is gone, or the corpus has changed.
    """
    check(options)
    for run in runs:
        run.evaluate = evaluate
        run.context = setup(options.device, run.config["dtype"])
        model, _ = pretrained.load(run.folder)
        run.data = corpus_of(model, run.folder, run.config, run.context)
        run.model = run.context.place(model)
    return tqdm(runs, unit="run", disable=None)


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
