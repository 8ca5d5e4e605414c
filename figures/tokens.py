"""What a model does with your text: how many experts each token wants, and which serve it."""

import contextlib
import html
import string
import unicodedata
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

import common
import pretrained
import runs
from figures.shared import Drawn, canvas, save
from model import GPT, Encoder, sizes


@dataclass
class Tokens(Drawn):
    """How many experts each token of a text wants, layer by layer, and which serve it. XMoE: easy ones want few.

    tokens.html has a line of text for each sparse layer: the stronger a token's colour, the more experts it wants
    (the small number); point at it to see which serve it, with what gate. In the picture every row is a token, every
    column an expert: full where it serves the token, hollow where the token wants it and its capacity is used up.
    """

    run: str = "out/train_lm/demo"  # folder of a run of train_lm.py, train_mlm.py or train_electra.py
    text: str = "Return the sum of all elements. If the list is empty, raise a ValueError instead of returning zero."
    threshold: float | None = None  # t of a threshold router, in place of the run's at test
    no_limit: bool = False  # experts serve all who want them; false: the evaluation's capacity, for this text alone


def tokens(options: Tokens):
    shown, layers = route(options)
    (Path(options.out) / "tokens.html").parent.mkdir(parents=True, exist_ok=True)
    page = tokens_page(options, shown, layers)
    (Path(options.out) / "tokens.html").write_text(page, encoding="utf-8")
    caption = (
        f"{options.run}: full, the expert serves the token; hollow, its capacity is used up; right, experts wanted"
    )
    if options.threshold is not None:
        caption += f"; t = {options.threshold}"
    numbers = {"run": options.run, "text": options.text, "tokens": shown, "layers": layers}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # `families` has said so
        save(tokens_figure(shown, layers), "tokens", caption, numbers, options)
    print(f"to read: {Path(options.out) / 'tokens.html'}")


@torch.no_grad()
def route(options: Tokens) -> tuple[list[str], list[dict]]:
    """The T tokens as they are shown, and of each sparse layer what it does with every one of them:

    wanted: how many experts it chose; served: [expert, gate] of those that keep it, the largest gate first; cut: the
    experts whose capacity is used up. ValueError for a text or a model that has nothing to show.
    """
    runs.check(options)
    model, tokenizer = pretrained.load(options.run)
    if not isinstance(model, GPT | Encoder):
        raise ValueError(f"{options.run} is a translator: give a run of train_lm.py, train_mlm.py or train_electra.py")
    if not model.moe_layers:
        raise ValueError(f"{options.run} is a dense model, no token chooses: give a --run with another router")
    if options.threshold is not None:
        if sizes(model.config).select != "threshold":
            raise ValueError(f"{options.run} has no threshold router: without --threshold")
        for moe in model.moe_layers:
            moe.router.eval_threshold = options.threshold
    ids = tokenizer.encode_batch([options.text])[0]
    if not ids:
        raise ValueError("the text is empty: say one with --text")
    names = [f"behind layer {depth}" for depth in getattr(model, "moe_after", ())]
    if isinstance(model, Encoder):
        ids = [tokenizer.bos, *ids, tokenizer.eos]
    else:
        names = [f"block {depth}" for depth, block in enumerate(model.blocks, 1) if block.sparse]
    longest = model.config.block_size
    if len(ids) > longest:
        raise ValueError(f"the text has {len(ids)} tokens, {options.run} reads at most {longest}: give a part of it")
    seen = []
    for moe in model.moe_layers:
        moe.watchers.append(lambda moe, h, routing, kept: seen.append((routing, kept)))
    with model.no_limit() if options.no_limit else contextlib.nullcontext():
        model(torch.tensor([ids]))
    layers = []
    for name, (routing, kept) in zip(names, seen):
        layer = {"name": name, "experts": kept.shape[1], "wanted": routing.wanted.sum(dim=1).tolist()}
        layer |= {"served": [], "cut": []}
        for gates, wanted, keep in zip(routing.weight, routing.wanted, kept):
            served = [[expert, float(gates[expert])] for expert in keep.nonzero().flatten().tolist()]
            layer["served"].append(sorted(served, key=lambda pair: -pair[1]))
            layer["cut"].append((wanted & ~keep).nonzero().flatten().tolist())
        layers.append(layer)
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
    marks, shown = {" ": "·", "\u2581": "·", "\n": "⏎", "\t": "⇥"}, ""
    for char in text.decode(errors="backslashreplace"):
        shown += marks.get(char, char if char.isprintable() else repr(char)[1:-1])
    return shown


TOKENS_PAGE = string.Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>What $run does with a text</title>
<style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; background: light-dark(#fff, #17191c);
  color: light-dark(#1b1d20, #e9e9e7); --much: light-dark(#ff9d45, #a44e00); --gray: light-dark(#5c6066, #a5a8ad); }
body { max-width: 60rem; margin: 3rem auto 8rem; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 2.5rem 0 .5rem; }
small, sub, #said { color: var(--gray); }
.text span { display: inline-block; white-space: pre; margin: 1px; padding: 0 .2em; border-radius: .25em;
  background: color-mix(in srgb, var(--much) calc(100% * var(--n)), transparent); border-bottom: 3px transparent; }
.text sub { font-size: .65em; line-height: 0; margin-inline-start: .2em; color: inherit; }
.text .cut { border-bottom: 3px dotted; }
.text .unserved { border-bottom: 3px solid; }
.text span:hover, .text span:focus { outline: 2px solid; }
#said { position: fixed; inset: auto 0 0; padding: .7rem 1.2rem; min-height: 3rem; overflow-wrap: anywhere;
  background: light-dark(#f1f2f4, #24272b); }
</style>
<h1>What $run does with a text</h1>
<p>The stronger the colour of a token, the more experts it wants: the small number, here at most $most. Dotted: some of
them do not serve it, since their capacity is used up; underlined: none does. Point at a token, or reach it with the tab
key, to see which experts serve it, with what gate.</p>
$lines
<output id="said">· is a space, ⏎ the end of a line.</output>
<script>
const said = document.getElementById("said"), say = ({target}) => { if (target.title) said.value = target.title }
document.addEventListener("mouseover", say)
document.addEventListener("focusin", say)
</script>
</html>
""")


def tokens_page(options: Tokens, shown: list[str], layers: list[dict]) -> str:
    """A page of HTML that needs nothing else: a line of text for each sparse layer."""
    most = max(max(layer["wanted"]) for layer in layers)
    strong = [unicodedata.bidirectional(char) for char in options.text]
    first = next((kind for kind in strong if kind in ("L", "R", "AL")), "L")
    lines = []
    for layer in layers:
        spans = []
        for token, wanted, served, cut in zip(shown, layer["wanted"], layer["served"], layer["cut"]):
            said = f"{token}  wants {wanted} of {layer['experts']} experts"
            if served:
                said += "; served by " + ", ".join(f"{expert} (gate {gate:.2f})" for expert, gate in served)
            if cut:
                said += f"; not by {', '.join(map(str, cut))}: capacity used up"
            kind = ("cut" if served else "unserved") if cut else "served"
            dark = max(0, wanted - 1) / max(1, most - 1)
            span = f'<span class="{kind}" style="--n: {dark:.2f}" title="{html.escape(said)}" tabindex="0">'
            spans.append(f"{span}<bdi>{html.escape(token)}</bdi><sub>{wanted}</sub></span>")
        mean, kept = sum(layer["wanted"]) / len(shown), sum(map(len, layer["served"])) / len(shown)
        lines.append(f"<h2>{layer['name']} <small>{mean:.2f} experts wanted, {kept:.2f} served a token</small></h2>")
        lines.append(f'<div class="text" dir="{"ltr" if first == "L" else "rtl"}">{"".join(spans)}</div>')
    return TOKENS_PAGE.substitute(run=html.escape(options.run), most=most, lines="\n".join(lines))


def tokens_figure(shown: list[str], layers: list[dict]):
    """Tokens by experts, an axes for each sparse layer."""
    figure = canvas(columns=len(layers), width=4.6, height=0.23 * len(shown) + 1)
    for axes, layer in zip(figure.axes, layers):
        cut, served = [], []
        for row in range(len(shown)):
            cut += [(expert, row) for expert in layer["cut"][row]]
            served += [(expert, row, gate) for expert, gate in layer["served"][row]]
            axes.text(layer["experts"] + 0.5, row, layer["wanted"][row], ha="left", va="center", fontsize=8)
        x, y = zip(*cut) if cut else ((), ())
        axes.scatter(x, y, s=34, facecolors="none", edgecolors="0.55", linewidths=0.8)
        x, y, gates = zip(*served) if served else ((), (), ())
        points = axes.scatter(x, y, s=38, c=gates, cmap="viridis_r", vmin=0, vmax=1)
        axes.set_yticks(range(len(shown)), [])
        axes.set(xlabel="expert", title=layer["name"], xlim=(-1, layer["experts"]), ylim=(len(shown) - 0.5, -0.5))
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
    style = dict(fontsize=9, fontfamily=families("".join(shown)), parse_math=False, va="center_baseline")
    figure.axes[0].set_yticks(range(len(shown)), shown, **style)
    figure.colorbar(points, ax=figure.axes, label="gate", pad=0.06, fraction=0.03, aspect=40)
    return figure


def families(text: str) -> list[str]:
    """Fonts that have the characters of a text: matplotlib's own, and where it lacks some, others of this machine."""
    from matplotlib import font_manager, ft2font

    found, missing = ["DejaVu Sans"], set(map(ord, text))
    missing -= ft2font.FT2Font(font_manager.findfont("DejaVu Sans")).get_charmap().keys()
    for font in font_manager.fontManager.ttflist if missing else ():
        if font.name.startswith("Last Resort"):  # which has a box for every character
            continue
        has = missing & ft2font.FT2Font(font.fname).get_charmap().keys()
        if has:
            found.append(font.name)
            missing -= has
    if missing:
        common.warn(f"no font here has {' '.join(map(chr, sorted(missing)))}: the picture has boxes, the page is right")
    return found
