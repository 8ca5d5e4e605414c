"""Figures, and tables that are measurements of models: what needs no training.

    python analyze.py curve                   XLM-E's figure 1, from the demo of train_electra.py and its baseline
    python analyze.py curve RUN RUN ...       from the logs in these folders of runs
    python analyze.py flops                   XLM-E's tables 3 and 4: parameters and FLOPs of the paper's sizes

A figure NAME is kept as NAME.png and NAME.svg in --out, with the numbers that are drawn in NAME.json.
`python analyze.py NAME --help` says what it shows, how to read it, and lists its options.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import nn

import common
import measures
import runs
from model import Encoder, ModelConfig

# ---------------------------------------------------------------------------------------------------------------------
# What the figures share

COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)  # told apart by any eye (Okabe-Ito)
# Of each script, a constant that no other has: whose run a folder is.
SCRIPTS = {"train_lm": "prompt", "train_mlm": "eval_maskings", "train_electra": "objective", "train_mt": "beam"}
SCRIPTS |= {"finetune_xtreme": "stride"}


@dataclass
class Drawn:
    """Options of every figure."""

    out: str = "out/figures"  # folder for NAME.png, NAME.svg and NAME.json


def canvas(columns: int = 1, rows: int = 1, width: float = 5, height: float = 4):
    """An empty figure, each of its axes so many inches wide and high."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a figure needs one more library: pip install matplotlib") from None
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    figure.subplots(rows, columns, squeeze=False)
    return figure


def save(figure, name: str, caption: str, numbers: dict, options: Drawn):
    """Keeps a figure with a caption, which names the runs, and the numbers that it shows."""
    figure.supxlabel(caption, fontsize=8, color="0.35", wrap=True)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    for ending in ("png", "svg"):
        figure.savefig(folder / f"{name}.{ending}", dpi=150)
    content = {"caption": caption} | numbers
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"drawn in {folder / name}.png and .svg; the numbers are in {name}.json")


def read_run(folder: str, *scripts: str) -> tuple[dict, list[dict]]:
    """The constants of a run and its evaluations. ValueError where there are none, or it is of another script."""
    log = Path(folder, "metrics.jsonl")
    text = log.read_text() if log.exists() else ""
    if not text:
        raise ValueError(f"{folder} holds no run with an evaluation: give folders such as out/{scripts[0]}/demo")
    config = runs.read_json(Path(folder, "config.json"))
    if not any(SCRIPTS[script] in config for script in scripts):
        raise ValueError(f"{folder} holds no run of {' or '.join(f'{script}.py' for script in scripts)}")
    try:
        return config, [json.loads(line) for line in text.splitlines()]
    except ValueError:
        raise ValueError(f"{log} has a torn line: the run was stopped there, and its command goes on with it") from None


# ---------------------------------------------------------------------------------------------------------------------
# XLM-E figure 1


@dataclass
class Curve(Drawn):
    """XLM-E's figure 1: a score against training FLOPs. Higher at the same FLOPs is better.

    At our scale: held-out translations found, and masked tokens of held-out sentences right.
    """

    # folders of runs of train_electra.py, of either objective
    folders: tyro.conf.Positional[tuple[str, ...]] = ("out/train_electra/demo", "out/train_electra/demo-objective=mlm")


def curve(options: Curve):
    figure = canvas(columns=2)
    found, right = figure.axes
    numbers = {}
    for number, folder in enumerate(options.folders):
        config, records = read_run(folder, "train_electra")
        color = COLORS[number % len(COLORS)]
        label = f"{'XLM-E' if config['objective'] == 'rtd' else 'XLM'}, seed {config['seed']}"
        layer = round(0.75 * config["n_layer"])  # the 9th of 12, as in section 4.6
        scores = [record["held_out"] for record in records]
        drawn = numbers[folder] = {
            "flops": [record["flops"] for record in records],
            "retrieval": [score["retrieval"][layer] for score in scores],
            "generator": [score["sentences"]["generator"] for score in scores],
        }
        found.plot(drawn["flops"], drawn["retrieval"], "o-", color=color, label=label)
        right.plot(drawn["flops"], drawn["generator"], "o-", color=color, label=label)
        if config["objective"] == "rtd":
            drawn["f1"] = [score["sentences"]["f1"] for score in scores]
            right.plot(drawn["flops"], drawn["f1"], "s:", color=color, label=f"{label}: F1 of replaced tokens")
        numbers["chance"] = scores[0]["chance"]
    found.axhline(numbers["chance"], color="gray", linestyle="--", label="chance")
    found.set(xlabel="training FLOPs (products)", ylabel="share", title="Held-out translations found")
    right.set(xlabel="training FLOPs (products)", ylabel="share", title="Masked tokens of held-out sentences right")
    found.legend()
    right.legend()
    save(figure, "curve", f"XLM-E figure 1 at our scale: {', '.join(options.folders)}", numbers, options)


# ---------------------------------------------------------------------------------------------------------------------
# XLM-E tables 3 and 4

SIZES = {  # appendix A. The text says a vocabulary of 500K, but only one of 2^19 gives the parameters of table 3.
    "base": dict(vocab_size=250_002, n_layer=12, n_head=12, n_embd=768, ffn_size=3072),
    "large": dict(vocab_size=1 << 19, n_layer=24, n_head=16, n_embd=1024, ffn_size=4096),
    "xl": dict(vocab_size=1 << 19, n_layer=48, n_head=24, n_embd=1536, ffn_size=6144),
}
PARAMETERS = {"base": "279M", "large": "840M", "xl": "2.2B"}  # table 3


@dataclass
class Flops:
    """No options."""


def flops(options: Flops):
    print(f"{table3()}\n\n{table4()}")


def encoder(**size) -> Encoder:
    """One of the paper's, of shapes without numbers."""
    with torch.device("meta"):
        return Encoder(ModelConfig(**{"block_size": 512, "router": "dense", "relative_bias": True} | size))


def table3() -> str:
    """Parameters of the discriminator with its head, ours beside the paper's."""
    rows = []
    for name, size in SIZES.items():
        D = size["n_embd"]
        head = nn.ModuleList([nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 1)])
        ours = measures.numel(encoder(**size)) + measures.numel(head)
        plain = measures.numel(encoder(**size, relative_bias=False)) + measures.numel(head)
        rows.append([name, f"{size['vocab_size']:,}", PARAMETERS[name], f"{ours:,}", f"{plain:,}"])
    table = runs.markdown_table(["preset", "vocabulary", "paper", "ours", "ours without the gated bias"], rows)
    return f"XLM-E table 3: parameters of the discriminator with its head\n\n{table}"


def table4() -> str:
    """Training FLOPs of the base model, counted in three ways, beside the paper's."""
    discriminator = encoder(**SIZES["base"])
    generator = encoder(**SIZES["base"] | {"n_layer": 4})
    config, small = discriminator.config, generator.config
    D, V = config.n_embd, config.vocab_size
    judging = 2 * D * D + 2 * D
    predicting = 0.15 * 2 * D * (D + V)  # the masked tokens alone
    ways = {  # FLOPs of a token in the discriminator and in the generator
        "ELECTRA's script": (
            measures.electra_flops(config, True, 30_522, lookup=True),
            measures.electra_flops(small, False, 30_522, lookup=True),
        ),
        "ELECTRA's, our vocabulary": (
            measures.electra_flops(config, True, V, lookup=False),
            measures.electra_flops(small, False, V, lookup=False),
        ),
        "products, backward twice": (
            3 * measures.flops_per_token(discriminator, config, judging)["total"],
            3 * measures.flops_per_token(generator, small, predicting)["total"],
        ),
    }
    rows = [
        ["discriminator, one batch", "6.3e19"],
        ["both networks, one batch", "9.5e19"],
        ["both networks, both batches", ""],
    ]
    tokens = 125_000 * 2048 * 512
    for one, other in ways.values():
        for row, cost in zip(rows, (one, one + other, 2 * (one + other))):
            row.append(f"{tokens * cost:.2e}")
    table = runs.markdown_table(["base", "paper", *ways], rows)
    return f"""XLM-E table 4: training FLOPs of 125,000 steps of batches of 2,048 x 512 tokens\n\n{table}

The paper's numbers follow exactly from neither way of counting. 6.3e19 (- TRTD) and 9.5e19 (XLM-E) are close to what
ELECTRA's script gives, with its vocabulary of 30,522, for the discriminator alone and for both networks on one batch;
by the text both rows train both networks, on one batch a step without TRTD and on two with it."""


# ---------------------------------------------------------------------------------------------------------------------
# The command line

ANALYSES = {"curve": (Curve, curve), "flops": (Flops, flops)}


def main():
    what, *options = sys.argv[1:] or [""]
    with common.clear_errors():
        if what not in ANALYSES:
            raise ValueError(f"say what to analyze: python analyze.py {' | '.join(ANALYSES)}, each with --help")
        default, analysis = ANALYSES[what]
        analysis(runs.parse(default(), options))


if __name__ == "__main__":
    main()
