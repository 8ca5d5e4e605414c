"""What a model does with your text: how many experts each token wants, and which ones serve it."""

from dataclasses import dataclass

import torch

from analysis.shared import canvas, keep
from engine import pretrained
from engine.config import check
from model import GPT, Encoder


@dataclass
class Tokens:
    """How many experts each token of a text wants, layer by layer, and which ones serve it. XMoE: easy ones want few.

    A row is a token, a column an expert. A full dot: the expert serves the token, the darker, the larger its gate. A
    hollow one: the token wants the expert, whose capacity is used up. At the right is how many experts a token wants.
    The capacity is the evaluation's, for this text alone.
    """

    run: str = "out/train_lm/demo"  # folder of a run of train_lm.py, train_mlm.py or train_electra.py
    text: str = "Return the sum of all elements. If the list is empty, raise a ValueError instead of returning zero."
    threshold: float | None = None  # t of a threshold router, in place of the run's at test
    out: str = "out/figures"  # folder for tokens.png, tokens.svg and tokens.json


def tokens(options: Tokens):
    shown, layers = route(options)
    figure = draw_tokens(shown, layers)
    keep("tokens", options, figure, {"text": options.text, "tokens": shown, "layers": layers})


@torch.no_grad()
def route(options: Tokens) -> tuple[list, list]:
    """The tokens as they are shown, and what each sparse layer does with every one of them:

    wanted: how many experts each token chose; served: [token, expert, gate] where it is kept; cut: [token, expert]
    where the capacity is used up. Raises ValueError for a text or a model that has nothing to show.
    """
    check(options)
    model, tokenizer = pretrained.load(options.run)
    if not isinstance(model, GPT | Encoder) or not model.moe_layers:
        raise ValueError(f"{options.run} is no language model or encoder with experts: give another --run")
    if options.threshold is not None:
        if "threshold" not in model.moe_layers[0].router.reads:
            raise ValueError(f"{options.run} has no threshold router: leave out --threshold")
        model.config.eval_threshold = options.threshold
    ids = tokenizer.encode_batch([options.text])[0]
    if not ids:
        raise ValueError("the text is empty: give one with --text")
    if isinstance(model, Encoder):
        ids = [tokenizer.bos, *ids, tokenizer.eos]
        names = [f"behind layer {depth}" for depth in model.moe_after]
    else:
        every = model.config.moe_every
        depths = range(every, 1 + len(model.blocks), every)
        names = [f"block {depth}" for depth in depths]
    longest = model.config.block_size
    if len(ids) > longest:
        raise ValueError(f"the text has {len(ids)} tokens, {options.run} reads at most {longest}: give a part of it")
    layers = []

    def watch(moe, h, routing, kept):
        served, cut = [], []
        for token, expert in routing.wanted.nonzero().tolist():
            if kept[token, expert]:
                gate = float(routing.weight[token, expert])
                served.append([token, expert, gate])
            else:
                cut.append([token, expert])
        layer = {"name": names[len(layers)], "experts": moe.router.E}
        layer["wanted"] = routing.wanted.sum(dim=1).tolist()
        layers.append(layer | {"served": served, "cut": cut})

    for moe in model.moe_layers:
        moe.watchers.append(watch)
    model(torch.tensor([ids]))
    return [written(tokenizer, token) for token in ids], layers


def written(tokenizer, token: int) -> str:
    """A token as it is shown: a space is ·, the end of a line ⏎; what is invisible or part of a character is spelt."""
    if tokenizer.kind == "xlmr" and token <= tokenizer.unk:
        return ("<s>", "<pad>", "</s>", "<unk>")[token]
    if tokenizer.kind == "gpt2":
        text = tokenizer.encoding.decode_single_token_bytes(token)
    else:
        piece = token - 1 if tokenizer.kind == "xlmr" else token
        text = tokenizer.processor.id_to_piece(piece).encode()
        if tokenizer.processor.is_byte(piece):  # <0xE4>
            text = bytes([int(text[3:5], 16)])
    marks = {" ": "·", "\u2581": "·", "\n": "⏎", "\t": "⇥"}
    shown = ""
    for char in text.decode(errors="backslashreplace"):
        if char not in marks and not char.isprintable():
            char = repr(char)[1:-1]
        shown += marks.get(char, char)
    return shown


def draw_tokens(shown: list[str], layers: list[dict]):
    """Tokens by experts, one set of axes for each sparse layer."""
    T = len(shown)
    figure = canvas(columns=len(layers), width=4.6, height=0.23 * T + 1)
    for axes, layer in zip(figure.axes, layers):
        E = layer["experts"]
        for row, wanted in enumerate(layer["wanted"]):
            axes.text(E + 0.5, row, wanted, va="center")
        cut = torch.tensor(layer["cut"]).reshape(-1, 2)
        axes.scatter(cut[:, 1], cut[:, 0], facecolors="none", edgecolors="0.55")
        y, x, gates = torch.tensor(layer["served"]).reshape(-1, 3).t()
        points = axes.scatter(x, y, c=gates, cmap="viridis_r", vmin=0, vmax=1)
        axes.set(xlabel="expert", title=layer["name"], xlim=(-1, E))
        axes.set(yticks=range(T), yticklabels=[], ylim=(T - 0.5, -0.5))
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
    figure.axes[0].set_yticks(range(T), shown, parse_math=False)
    figure.colorbar(points, ax=figure.axes, label="gate", pad=0.06)
    return figure
