"""What the figures share: drawing and saving them, and loading the runs that they show.

A figure is a function of its options and of what analyze.py passes from a training script. Its name is the command, its
docstring the command's help, and the docstring's first line the title. It shows records: dicts with the same keys.
"""

import math
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill

import numpy as np
import tyro

from data.batches import MaskedData, Prepared, TokenData
from data.files import progress
from engine import pretrained
from engine.config import check
from engine.device import Context, setup, warn
from engine.files import from_json, read_json, write
from engine.table import markdown_table, mean_cell
from model import GPT, SparseModel
from routers import find_router


@dataclass
class FigureOptions:
    """Options of every figure."""

    folders: tyro.conf.Positional[tuple[str, ...]] = ()  # run folders; default: all suitable finished runs of the demo
    out: str = "out/figures"  # where to write NAME.png and NAME.json


@dataclass
class EvalOptions(FigureOptions):
    """Options of figures that evaluate trained models."""

    max_tokens: int = 1 << 16  # held-out tokens per point, at most
    device: str = "auto"  # cuda, mps or cpu


# ---------------------------------------------------------------------------------------------------------------------
# Drawing and saving

COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"  # Okabe and Ito's
THIN = {"linewidth": 0.7, "alpha": 0.6}
THICK = {"linewidth": 2, "markersize": 4}
KEY = {"loc": "outside lower center", "fontsize": 8, "frameon": False}


@dataclass
class Panel:
    """One plot, left out if it has no records. The keys x and y of the records are also the axis labels."""

    title: str
    records: list[dict]
    by: str  # the key whose values name the lines; runs with the same name are seeds
    x: str
    y: str
    levels: dict[str, float | tuple] = field(default_factory=dict)  # name -> y of a horizontal line, or both of a band
    joined: bool = True  # whether a line joins the points of a run
    from_zero: bool = False  # whether the y axis starts at 0


def show(figure: Callable, options, records: list[dict], keys: tuple, panels: list[Panel], rows=None):
    """Prints a table of `rows`, or of the records, and saves it with the drawing of the panels."""
    headers, *lines = table = table_of(rows or records, keys)
    print(markdown_table(headers, lines))
    save(figure, options, draw(panels), {"table": table, "records": records})


def table_of(records: list[dict], keys: tuple) -> list:
    """Headers and rows: one row for all records with equal `keys`, such as seeds, with the means of their numbers.

    Strings other than the keys are left out. A cell without numbers is empty.
    """
    numbers = [name for name, value in records[0].items() if name not in keys and not isinstance(value, str)]
    rows = [[*keys, *numbers]]
    for values, group in grouped(records, *keys).items():
        row = [f"{value:.5g}" if isinstance(value, float) else value for value in values]
        for name in numbers:
            row.append(mean_cell([(record.get(name), ".5g") for record in group]))
        rows.append(row)
    return rows


def grouped(records: list[dict], *names: str) -> dict[tuple, list[dict]]:
    """Groups records by their values of these keys."""
    groups = {}
    for record in records:
        values = tuple(record.get(name, "") for name in names)
        groups.setdefault(values, []).append(record)
    return groups


def save(figure: Callable, options, drawing, numbers: dict):
    """Writes a drawing, and its numbers together with the command that made it."""
    path = Path(options.out, figure.__name__)
    command = shlex.join(["python", "analyze.py", *sys.argv[1:]])
    write(Path(f"{path}.json"), {"command": command} | numbers)
    title, *_ = figure.__doc__.splitlines()
    drawing.suptitle(title.rstrip("."), wrap=True)
    drawing.savefig(f"{path}.png", dpi=150)
    print(f"Wrote {path}.png, and its numbers to {path}.json")


def canvas(panels: int, width=5.5, height=4.5):
    """An empty figure with this many axes of width x height inches, at most three in a row."""
    from matplotlib.figure import Figure  # not above: only figures need it

    columns = min(panels, 3)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    for number in range(1, panels + 1):
        figure.add_subplot(rows, columns, number)
    return figure


def draw(panels: list[Panel]):
    """A figure with the panels side by side above one legend.

    A name has the same colour in all panels. Thin lines are seeds, thick ones their means.
    """
    panels = [panel for panel in panels if panel.records]
    colors, key = {}, {}
    figure = canvas(len(panels))
    for axes, panel in zip(figure.axes, panels):
        axes.spines[["top", "right"]].set_visible(False)
        for name, height in panel.levels.items():
            if isinstance(height, tuple):
                key[name] = axes.axhspan(*height, color="0.9", label=name)
            else:
                key[name] = axes.axhline(height, color="0.6", linestyle="--" if height else "-", label=name)
        for name, runs in lines_of(panel).items():
            color = colors.setdefault(name, COLORS[len(colors) % len(COLORS)])
            for points in runs if len(runs) > 1 else []:
                [key["one seed"]] = axes.plot(*points.T, color=color, label="one seed", **THIN)
            shortest = min(map(len, runs))
            mean = np.mean([points[:shortest] for points in runs], axis=0)
            [key[name]] = axes.plot(*mean.T, "o-" if panel.joined else "o", color=color, label=name, **THICK)
        axes.set(title=fill(panel.title, 50), xlabel=panel.x, ylabel=panel.y)
        axes.locator_params(axis="x", integer=panel.x in ("layer", "seed"))
        if panel.from_zero:
            axes.set_ylim(bottom=0)
    characters = 15 * figure.get_figwidth()  # per line of the legend
    columns = max(1, int(characters / (15 + max(map(len, key)))))
    figure.set_figheight(figure.get_figheight() + 0.2 * len(key) / columns)
    figure.legend(handles=[*key.values()], ncols=columns, **KEY)
    return figure


def lines_of(panel: Panel) -> dict[str, list]:
    """name -> x and y of each run, (points, 2), or of all runs together if not joined; nan for None."""
    lines = {}
    by = (panel.by, "run") if panel.joined else (panel.by,)
    for (name, *_), group in grouped(panel.records, *by).items():
        points = [(record[panel.x], record[panel.y]) for record in group]
        lines.setdefault(name, []).append(np.array(points, dtype=float))
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# The runs that a figure shows

SCRIPTS = {  # script -> a constant or a metric that only its runs have, the number to compare, and what that is
    "train_lm": ("min_learning_rate", "perplexity", "test perplexity (lower is better)"),
    "train_mlm": ("predicted", "perplexity", "validation perplexity (lower is better)"),
    "train_mt": ("label_smoothing", "BLEU", "test BLEU (higher is better)"),
    "train_electra": ("objective", "masked tokens right", "held-out masked tokens right (higher is better)"),
    "finetune_xtreme": ("train_examples", "F1 or accuracy", "F1 or accuracy over languages (higher is better)"),
}
UNNAMED = {"eval_every", "eval_tokens", "eval_maskings"}  # runs of the same name may differ in these


@dataclass
class TrainedRun:
    folder: str
    config: dict  # its constants
    log: list[dict]  # its evaluations, from metrics.jsonl
    result: dict = field(default_factory=dict)  # from result.json
    script: str = ""  # that trained it
    name: str = ""  # such as "threshold 32 x 128"; shared only by seeds of the same experiment
    model: SparseModel | None = None  # this and the rest: only if it is evaluated again
    data: Prepared | None = None
    context: Context | None = None
    evaluate: Callable | None = None  # its script's

    @property
    def record(self) -> dict:
        return {"run": self.folder, "experts": self.name}


def read_run(folder: str, script: str = "") -> TrainedRun:
    """Raises ValueError if the folder has no finished run, or not one of the script."""
    if not Path(folder, "result.json").exists():
        raise ValueError(f"{folder} has no finished run: check the folder's name, or repeat its command to finish it")
    config, result = (read_json(Path(folder, name)) for name in ("config.json", "result.json"))
    log = [from_json(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    trained_by = next((name for name, (key, *_) in SCRIPTS.items() if key in config | log[-1]), "")
    if script not in ("", trained_by):
        raise ValueError(f"{folder} is not a run of {script}.py: pass one, such as out/{script}/demo")
    return TrainedRun(folder, config, log, result, trained_by)


def router_of(config: dict) -> type | None:
    """The router class of a run, None for a dense model. Raises ValueError if the router no longer exists."""
    return None if config["router"] == "dense" else find_router(config["router"])


def reads(config: dict, constant: str) -> bool:
    """Whether a run's router reads this constant."""
    router = router_of(config)
    return router is not None and constant in router.reads


def experts_of(config: dict) -> tuple[int, int]:
    """Number of experts per sparse layer, and the width of each; for a dense model 1 and its FFN's width."""
    router = router_of(config)
    if router is None:
        return 1, config["ffn_size"]
    if "experts" in config:  # X-MoE's sparse layers
        return config["experts"], config["expert_size"]
    split = config["split"] or router.split
    return config["expert_ffns"] * split, config["ffn_size"] // split


def in_words(config: dict) -> str:
    """A short description of a run, such as `threshold 32 x 128`."""
    if "objective" in config:  # of train_electra.py
        return {"rtd": "XLM-E", "mlm": "XLM"}[config["objective"]]
    if "model" in config:  # of finetune_xtreme.py
        return config["model"]
    experts, size = experts_of(config)
    return f"{config['router']} {experts} x {size}" if router_of(config) else "dense"


def unequal(ours: dict, other: dict) -> dict[str, tuple]:
    """{constant: both values} of those in which two runs differ, apart from the seed and what depends on it."""
    by_seed = {"seed", "data_checksum"} if "task" in ours else {"seed"}  # fine-tuning's checksum includes new weights
    both = {name: (ours.get(name, "-"), other.get(name, "-")) for name in ours | other if name not in by_seed}
    return {name: values for name, values in both.items() if values[0] != values[1]}


def named(runs: Iterable[TrainedRun]) -> list[TrainedRun]:
    """The runs with names: the description, and the constants in which runs of the same description differ.

    So only seeds of the same experiment share a name. Width and steps are added if any two runs differ in them.
    Constants of the evaluations during training are not.
    """
    runs = [*runs]
    for run in runs:
        words, differ = in_words(run.config), set()
        for other in runs:
            names = unequal(run.config, other.config).keys() - UNNAMED
            differ |= names if in_words(other.config) == words else names & {"n_embd", "steps"}
        run.name = ", ".join([words, *(f"{name} {value}" for name, value in run.config.items() if name in differ)])
    return runs


def select_runs(script: str, options: FigureOptions, fits=None, lacks="") -> list[TrainedRun]:
    """The runs in `options.folders`, or all finished runs of the script's demo.

    fits: constants -> whether a figure can show the run; lacks: why not, for the warning. Raises ValueError if a passed
    run is unfinished, or no run is left.
    """
    finished = sorted(file.parent for file in Path("out", script).glob("demo*/result.json"))
    runs = []
    for folder in dict.fromkeys(map(Path, options.folders or finished)):
        run = read_run(str(folder), script)
        if fits is None or fits(run.config):
            runs.append(run)
        elif options.folders:
            warn(f"{folder} is left out: it {lacks}")
    if not runs:
        raise ValueError(f"no suitable finished run of {script}.py: train one with python {script}.py, or pass folders")
    return named(runs)


def loaded(runs: list[TrainedRun], options: EvalOptions, evaluate: Callable | None = None) -> Iterable[TrainedRun]:
    """Loads the models and corpora of all runs -> the runs, with a progress bar.

    evaluate: that of the runs' script, if needed. Raises ValueError or OSError if a checkpoint or a corpus is missing,
    or the corpus has changed.
    """
    check(options)
    for run in runs:
        run.evaluate = evaluate
        run.context = setup(options.device, run.config["dtype"])
        model, _ = pretrained.load(run.folder)
        run.data = corpus_of(model, run.folder, run.config, run.context)
        run.model = run.context.place(model)
    return progress(runs, "runs")


def corpus_of(model: SparseModel, folder: str, constants: dict, context: Context) -> TokenData | MaskedData:
    """The corpus a run was trained on (XLM-E: the sentences). Raises ValueError or OSError if missing or changed."""
    config = model.config
    config.out_dir = Path(folder).parent
    if isinstance(model, GPT):
        data = TokenData.open(config.data, config, context)
    else:
        shares = {"exponent": config.sampling_exponent, "mask_share": config.mask_share}
        data = MaskedData.open(config.data, config, context, **shares)
    first, *_ = constants["data_checksum"].split("+")
    if data.checksum != first:
        raise ValueError(f"{data.folder} has changed since {folder} was trained on it")
    return data
