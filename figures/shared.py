"""What the figures share: how they are drawn, files, runs."""

import json
import shlex
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import common
import pretrained
import runs
from data.batches import MaskedData, TokenData
from data.prepare import ready
from model import GPT, ModelConfig, Sizes, sizes

# ---------------------------------------------------------------------------------------------------------------------
# Drawing

# Told apart by any eye (Okabe-Ito).
COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"
MARKERS = "osD^vXP"


def canvas(columns: int = 1, rows: int = 1, width: float = 5, height: float = 4):
    """An empty figure, each of its axes so many inches wide and high."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a figure needs one more library: pip install matplotlib") from None
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    figure.subplots(rows, columns, squeeze=False)
    return figure


def styles(names: Iterable[str]) -> dict[str, dict]:
    """name -> how its lines are drawn; runs of one name look the same."""
    found = {}
    for number, name in enumerate(dict.fromkeys(names)):
        place, turn = number % len(COLORS), number // len(COLORS)
        found[name] = dict(label=name, color=COLORS[place], marker=MARKERS[place], linestyle=("-", "--", ":")[turn % 3])
    return found


def from_zero(axes):
    """The y axis begins at 0, and nothing touches its end."""
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def legend(axes, **options):
    """An entry for each name, of however many lines."""
    lines, names = axes.get_legend_handles_labels()
    entries = dict(zip(names, lines))
    axes.legend(entries.values(), entries.keys(), **options)


# ---------------------------------------------------------------------------------------------------------------------
# Files

# Of each script, constants that no run of another has: whose run a folder is.
SCRIPTS = {"train_lm": {"min_learning_rate"}, "train_mlm": {"mask_share", "init_from"}, "train_mt": {"beam"}}
SCRIPTS |= {"train_electra": {"objective"}, "finetune_xtreme": {"train_examples"}}


@dataclass
class Drawn:
    """Options of every figure."""

    out: str = "out/figures"  # folder for NAME.png, NAME.svg and NAME.json


def save(figure, name: str, caption: str, numbers: dict, options: Drawn, table: list = ()):
    """Keeps a figure with a caption, which names the runs, and the numbers that it shows; prints its table, if any.

    A table is its headers and its rows, and kept with the command, so that results/README.md can show it.
    """
    if table:
        print(runs.markdown_table(table[0], table[1:]))
    lines = textwrap.fill(caption, int(14 * figure.get_figwidth()), break_on_hyphens=False)
    figure.supxlabel(lines, fontsize=8, color="0.35")
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    for ending in ("png", "svg"):
        figure.savefig(folder / f"{name}.{ending}", dpi=150)
    content = {"caption": caption, "command": command(name, options), "table": list(table)} | numbers
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"drawn in {folder / name}.png and .svg; the numbers are in {name}.json")


def command(name: str, options: Drawn) -> str:
    """The line that draws a figure, with every option that was changed; but --out, where it is kept."""
    own = [option for option in fields(options) if option.name not in ("folders", "out")]
    values = {option.name: getattr(options, option.name) for option in own}
    changed = {option.name: values[option.name] for option in own if values[option.name] != option.default}
    return shlex.join(["python", "analyze.py", name, *getattr(options, "folders", ()), *flags(changed)])


def flags(options: dict) -> list[str]:
    """Options as words of a command: {"whiten": True, "shares": (0.5, 1.0)} is --whiten true --shares 0.5 1.0."""
    words = []
    for name, value in options.items():
        values = value if isinstance(value, tuple) else [value]
        words += [f"--{name}", *(str(one).lower() if isinstance(one, bool) else str(one) for one in values)]
    return words


def read_run(folder: str, *scripts: str) -> tuple[dict, list[dict]]:
    """The constants of a run and its evaluations. ValueError where there are none, or it is of another script."""
    log = Path(folder, "metrics.jsonl")
    try:
        records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    except (ValueError, RecursionError):
        raise ValueError(f"{log} has a torn line: the run was stopped there, and its command goes on with it") from None
    if not records:
        raise ValueError(f"{folder} holds no run with an evaluation: give folders such as out/{scripts[0]}/demo")
    config = runs.read_json(Path(folder, "config.json"))
    if not isinstance(config, dict) or not any(SCRIPTS[script] <= config.keys() for script in scripts):
        raise ValueError(f"{folder} holds no run of {' or '.join(f'{script}.py' for script in scripts)}")
    return config, records


# ---------------------------------------------------------------------------------------------------------------------
# Trained runs


@dataclass
class Measured(Drawn):
    """Options of figures for which trained models are run again."""

    max_tokens: int = 1 << 16  # held-out tokens that are read for each point, at most
    device: str = "auto"  # cuda, mps or cpu


def size_of(config: dict) -> Sizes:
    """Of the sparse layers of a run."""
    known = {field.name for field in fields(ModelConfig)}
    return sizes(ModelConfig(**{name: config[name] for name in known & config.keys()}))


def is_sparse(config: dict) -> bool:
    return config["router"] != "dense"


def has_scores(config: dict) -> bool:
    return is_sparse(config) and size_of(config).select != "hash"


def has_threshold(config: dict) -> bool:
    return is_sparse(config) and size_of(config).select == "threshold"


def has_bare_ffns(config: dict) -> bool:
    return not is_sparse(config) or size_of(config).expert_layers == 0


def is_causal(config: dict) -> bool:
    return not is_sparse(config) or size_of(config).select != "expert_choice"


LACKS = {  # what a run is that does not fit
    is_sparse: "has no experts: give runs with another router than dense",
    has_scores: "has no router that compares tokens with experts (dense, hash)",
    has_threshold: "has no threshold router",
    has_bare_ffns: "has experts of several layers, whose activations are not one share",
    is_causal: "chooses among later tokens too (expert_choice): its perplexity is no language model's",
}


def choose(script: str, folders: tuple[str, ...], fits: Callable[[dict], bool] | None = None) -> dict[str, dict]:
    """folder -> constants: of the runs named, or of all finished ones of the script's demo that fit (a key of LACKS).

    ValueError where a run that was named is not finished or does not fit, or none is left.
    """
    found = {}
    every = sorted(file.parent for file in Path("out", script).glob("demo*/result.json"))
    for folder in map(str, map(Path, folders or every)):
        config, _ = read_run(folder, script)
        if not Path(folder, "result.json").exists():
            raise ValueError(f"{folder} is not finished: the command that began it goes on with it")
        if fits is None or fits(config):
            found[folder] = config
        elif folders:
            raise ValueError(f"{folder} {LACKS[fits]}")
    if not found:
        raise ValueError(
            f"out/{script} holds no finished run of the demo that fits: train one, or give folders of runs"
        )
    return found


def router_of(config: dict) -> str:
    if not is_sparse(config):
        return "dense"
    size = size_of(config)
    return f"{config['router']} {size.num_experts} x {size.expert_size}"


def but_for_seed(folder: str, seed: int) -> str:
    """The name that a run has with seed 0."""
    if not seed:
        return folder
    before, _, behind = folder.rpartition(f"-seed={seed}")
    return before + behind


def named(found: dict[str, dict], describe: Callable[[dict], str] = router_of) -> dict[str, str]:
    """folder -> what the run is; of runs that only look alike, and differ not by seed alone, their folders' names."""
    names = {folder: describe(config) for folder, config in found.items()}
    kinds = {}
    for folder, name in names.items():
        kinds.setdefault(name, []).append(all_but_seed(found[folder]))
    for folder, name in names.items():
        if any(kind != kinds[name][0] for kind in kinds[name]):
            names[folder] = but_for_seed(Path(folder).name, found[folder]["seed"])
    return names


def all_but_seed(config: dict) -> dict:
    """What makes two runs seeds of one. A constant left open is none: another version may not have known it.

    Nor is what a version before may have kept, though it makes no other run.
    """
    unlike = {"seed"} | runs.NOT_IDENTITY
    return {name: value for name, value in config.items() if name not in unlike and value is not None}


def listed(found: dict[str, dict]) -> str:
    """Runs, with their seeds, for a caption."""
    seeds = {}
    for folder, config in found.items():
        seeds.setdefault(but_for_seed(folder, config["seed"]), []).append(str(config["seed"]))
    return "; ".join(f"{run}, seed {', '.join(own)}" for run, own in seeds.items())


def open_runs(found: dict[str, dict], options: Measured) -> dict[str, tuple]:
    """folder -> the run's model, its corpus, and where to run it, of all runs before the first is measured.

    ValueError or OSError where a checkpoint or a corpus is gone, or the corpus is another.
    """
    runs.check(options)
    opened = {}
    for folder, config in found.items():
        context = common.setup(options.device, config["dtype"])
        model, _ = pretrained.load(folder)
        corpus = ready(config["data"], make=False)
        rows = config["block_size"], config["micro_tokens"]
        if isinstance(model, GPT):
            data = TokenData(corpus, *rows)
        else:
            data = MaskedData(corpus, *rows, exponent=config["sampling_exponent"], mask_share=config["mask_share"])
        if data.checksum != runs.read_json(Path(folder, "result.json"))["data"]:
            raise ValueError(f"{data.folder} has changed since {folder} was trained on it")
        opened[folder] = common.place(model, context), data, context
    return opened
