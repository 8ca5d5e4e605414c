"""`analyze.py tokens`: page, picture and numbers against routing by hand; texts and runs that will not do."""

import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import reference
import torch
from helpers import Script, in_chromium
from test_analyze import refused, run

import pretrained
import train_lm
from data.tokenizers import XLMR, SentencePiece, train_sentencepiece
from figures import tokens
from model import GPT, MaskedLM, ModelConfig

pytest.importorskip("matplotlib")

TEXT = "the cat & the <script> sat\n\ton the mat שלום 中文 x"
SIZE = dict(n_layer=4, n_head=2, n_embd=16, ffn_size=32, block_size=64, router_init_std=0.03)
DECODERS = {
    "threshold": dict(router="threshold", eval_threshold=0.7, eval_capacity_factor=2.0, num_experts=8),
    "topk": dict(router="topk", num_experts=8, top_k=3, capacity_factor=1.0),
    "switch": dict(router="switch", capacity_factor=0.1),
    "hash": dict(router="hash", capacity_factor=0.1),
    "base": dict(router="base"),
    "expert_choice": dict(router="expert_choice", num_experts=4, capacity_factor=1.0),
}
ENCODERS = {
    "hypersphere": dict(router="hypersphere", num_experts=8, moe_after=(1, 3)),
    "sigmoid": dict(router="hypersphere", num_experts=8, gate="sigmoid", moe_after=(2,), capacity_factor=1.0),
    "XLM-E": dict(router="topk", num_experts=8, top_k=2, relative_bias=True, moe_after=(2,), capacity_factor=0.5),
}


@pytest.fixture(scope="session")
def tokenizers() -> dict:
    text = [
        "the cat sat on the mat <script> <b> & שלום x y z",
        "the 中 the cat sat " * 3,
        "a quick brown fox jumps over",
    ]
    return {kind: train_sentencepiece(text, 296, kind) for kind in (SentencePiece, XLMR)}


@pytest.fixture
def made(tokenizers, tmp_path):
    """A run's folder with a random model: `made(GPT, router=...)`, or `made(MaskedLM, ...)`."""

    def make(kind, **constants):
        torch.manual_seed(0)
        tokenizer = tokenizers[SentencePiece if kind is GPT else XLMR]
        model = kind(ModelConfig(**SIZE | constants | {"vocab_size": tokenizer.vocab_size}))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3.0)  # far from the start, where all tokens are nearly alike
        arguments = dataclasses.asdict(model.config)
        state = {"step": 1, "class": kind.__name__, "arguments": arguments, "model": model.state_dict()}
        folder = tmp_path / "<b>run"
        folder.mkdir(exist_ok=True)
        torch.save(state | {"tokenizer": tokenizer.sha256}, folder / "ckpt.pt")
        tokenizer.save(folder)
        return folder

    return make


class Page(HTMLParser):
    """The tokens of tokens.html, a list for each line of text."""

    def __init__(self, html: str):
        super().__init__()
        self.lines, self.inside, self.unknown = [], "", []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if attributes.get("class") == "text":
            self.lines.append([])
            self.direction = attributes["dir"]
        elif tag == "span":
            said = {name: attributes[name] for name in ("class", "style", "title")}
            self.lines[-1].append(SimpleNamespace(**said, shown="", count=""))
        elif tag in ("script", "b"):
            self.unknown.append(tag)
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "bdi":
            self.lines[-1][-1].shown += data
        elif self.inside == "sub":
            self.lines[-1][-1].count += data


def by_hand(folder, text: str, limit: bool) -> list[tuple[dict, dict]]:
    """Of each sparse layer the experts that each token wants, and those that serve it with their gates."""
    model, tokenizer = pretrained.load(folder)
    ids = tokenizer.encode_batch([text])[0]
    if tokenizer.kind == "xlmr":
        ids = [0, *ids, 2]
    entered = []
    for moe in model.moe_layers:
        moe.router.register_forward_pre_hook(lambda router, given: entered.append((router, given[0])))
    if not limit:
        for moe in model.moe_layers:
            moe.eval_capacity_factor = math.inf
    with torch.no_grad():
        model(torch.tensor([ids]))
        layers = []
        for moe, (router, h) in zip(model.moe_layers, entered):
            S, E = len(ids), router.num_experts
            choices = reference.route(router, h, ids)
            C = reference.capacity(S, E, moe.eval_capacity_factor) if moe.eval_capacity_factor < math.inf else None
            kept = reference.serve(choices.turn, C, E)
            wanted = {s: [e for e in range(E) if (s, e) in choices.weight] for s in range(S)}
            served = {s: {e: float(choices.weight[s, e]) for e in range(E) if (s, e) in kept} for s in range(S)}
            layers.append((wanted, served))
    return layers


def served_in(title: str) -> dict[int, str]:
    """{expert: gate} of what a token says when it is pointed at."""
    words = title.partition("served by ")[2].partition(";")[0]
    return {int(expert): gate for expert, gate in re.findall(r"(\d+) \(gate ([\d.]+)\)", words)}


@pytest.mark.parametrize("limit", [True, False])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_page_and_numbers_are_the_routing(name, limit, made):
    constants, kind = (DECODERS[name], GPT) if name in DECODERS else (ENCODERS[name], MaskedLM)
    folder = made(kind, **constants)
    options = tokens.Tokens(run=str(folder), text=TEXT, no_limit=not limit)
    shown, found = tokens.route(options)
    page = Page(tokens.tokens_page(options, shown, found))
    layers = by_hand(folder, TEXT, limit)
    assert len(page.lines) == len(layers) == len(found) == (2 if name in (*DECODERS, "hypersphere") else 1)
    cut = sum(len(wanted[s]) - len(served[s]) for wanted, served in layers for s in wanted)
    assert bool(cut) == (limit and name != "hypersphere"), "the case shows nothing"
    assert len(set(found[0]["wanted"])) > 3 or name != "threshold"
    most = max(len(wanted[s]) for wanted, _ in layers for s in wanted)
    for line, layer, (wanted, served) in zip(page.lines, found, layers):
        assert len(line) == len(wanted) and [token.shown for token in line] == shown
        assert layer["wanted"] == [len(wanted[s]) for s in wanted] == [int(token.count) for token in line]
        for s, token in enumerate(line):
            assert f"wants {len(wanted[s])} of {layer['experts']} experts" in token.title
            assert dict(layer["served"][s]) == pytest.approx(served[s], abs=1e-5)
            gates = [gate for _, gate in layer["served"][s]]
            assert gates == sorted(gates, reverse=True)
            in_title = {expert: float(gate) for expert, gate in served_in(token.title).items()}
            assert in_title == pytest.approx(served[s], abs=0.0051)
            left = [e for e in wanted[s] if e not in served[s]]
            assert layer["cut"][s] == left
            assert (f"; not by {', '.join(map(str, left))}: " in token.title) == bool(left)
            assert token.__dict__["class"] == ("served" if not left else "cut" if served[s] else "unserved")
            shade = float(token.style.removeprefix("--n: "))
            assert shade == pytest.approx((len(wanted[s]) - 1) / max(1, most - 1), abs=0.0051)


def test_the_picture_has_a_dot_for_each_choice(made, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda *args, **more: (figures.append(args[0]), savefig(*args, **more)))
    folder = made(GPT, **DECODERS["threshold"])
    run(monkeypatch, "tokens", "--run", folder, "--text", TEXT, "--out", tmp_path / "drawn")
    assert (tmp_path / "drawn" / "tokens.png").stat().st_size > 5_000
    assert "<svg" in (tmp_path / "drawn" / "tokens.svg").read_text()
    numbers = json.loads((tmp_path / "drawn" / "tokens.json").read_text())
    panels = figures[0].axes[:2]
    labels = panels[0].get_yticklabels()
    assert [label.get_text() for label in labels] == numbers["tokens"]
    assert not any(label.get_parse_math() for label in labels)  # $ is a character
    for axes, layer in zip(panels, numbers["layers"]):
        hollow, full = axes.collections
        drawn = [(int(x), int(y), float(gate)) for (x, y), gate in zip(full.get_offsets(), full.get_array())]
        assert sorted(drawn) == sorted((e, s, gate) for s, row in enumerate(layer["served"]) for e, gate in row)
        empty = sorted((int(x), int(y)) for x, y in hollow.get_offsets())
        assert empty and empty == sorted((e, s) for s, row in enumerate(layer["cut"]) for e in row)
        assert [int(text.get_text()) for text in axes.texts] == layer["wanted"]
        low, high = axes.get_xlim()
        assert low < 0 and high >= layer["experts"]


# ---------------------------------------------------------------------------------------------------------------------
# How tokens are shown


def pieces(tokenizer, text: str) -> list[str]:
    return [tokens.written(tokenizer, token) for token in tokenizer.encode_batch([text])[0]]


def test_every_token_can_be_read(tokenizers):
    shown = pieces(tokenizers[SentencePiece], "the cat\n\tש中é\x00\u200f$")
    assert "".join(shown) == "the·cat⏎⇥ש中\\xc3\\xa9\\x00\\xe2\\x80\\x8f$"
    assert "⏎" in shown and "\\xc3" in shown
    shown = pieces(tokenizers[XLMR], "cat 中")
    assert "".join(shown) == "·cat·中"
    assert [tokens.written(tokenizers[XLMR], token) for token in (0, 2, 3)] == ["<s>", "</s>", "<unk>"]
    assert tokens.written(tokenizers[SentencePiece], tokenizers[SentencePiece].eot) == "</s>"


def test_bytes_of_gpt2_are_spelt():
    def bytes_of(token: int) -> bytes:
        return [b" cat", b"\n", "é".encode()[:1]][token]

    tokenizer = SimpleNamespace(kind="gpt2", encoding=SimpleNamespace(decode_single_token_bytes=bytes_of))
    assert [tokens.written(tokenizer, token) for token in range(3)] == ["·cat", "⏎", "\\xc3"]


def test_what_looks_like_html_is_text(made, tmp_path, monkeypatch):
    folder = made(GPT, **DECODERS["threshold"])
    run(monkeypatch, "tokens", "--run", folder, "--text", "<script>&lt;\"'", "--out", tmp_path / "drawn")
    html = (tmp_path / "drawn" / "tokens.html").read_text(encoding="utf-8")
    page = Page(html)
    assert "".join(token.shown for token in page.lines[0]) == "<script>&lt;\"'"
    assert page.unknown == ["script"]  # the page's own
    assert html.count("<b>") == 0 and html.count("&lt;b&gt;run") == 2  # the folder, in title and heading
    for token in page.lines[0]:
        assert token.title.startswith(f"{token.shown}  wants ")
    assert not re.search("https?:|url\\(|@import|src=|href=", html)


@pytest.mark.parametrize(
    "text, direction", [("the שלום", "ltr"), ("... שלום the", "rtl"), ("مرحبا", "rtl"), ("1", "ltr")]
)
def test_lines_run_as_their_text_does(text, direction, made, tmp_path, monkeypatch):
    run(monkeypatch, "tokens", "--run", made(GPT, **DECODERS["switch"]), "--text", text, "--out", tmp_path / "drawn")
    assert Page((tmp_path / "drawn" / "tokens.html").read_text(encoding="utf-8")).direction == direction


def test_other_fonts_are_taken_where_ours_lacks_a_character(monkeypatch, capsys):
    assert tokens.families("the cat · ⏎ ⇥") == ["DejaVu Sans"]
    tokens.families("\U0010ff00")  # no font has what is no character
    error = capsys.readouterr().err
    assert error.startswith("warning: no font here has ") and error.count("\n") == 1


def test_another_threshold(made, tmp_path, monkeypatch, capsys):
    theirs = made(GPT, **DECODERS["threshold"] | {"eval_threshold": 0.4})
    expected = tokens.route(tokens.Tokens(run=str(theirs), text=TEXT))
    folder = str(made(GPT, **DECODERS["threshold"]))
    assert tokens.route(tokens.Tokens(run=folder, text=TEXT, threshold=0.4)) == expected
    assert tokens.route(tokens.Tokens(run=folder, text=TEXT)) != expected
    run(monkeypatch, "tokens", "--run", folder, "--text", TEXT, "--threshold", "0.4", "--out", tmp_path / "drawn")
    numbers = json.loads((tmp_path / "drawn" / "tokens.json").read_text())
    assert numbers["layers"] == json.loads(json.dumps(expected[1])) and numbers["caption"].endswith("; t = 0.4")
    capsys.readouterr()  # which fonts are missing
    said = refused(monkeypatch, capsys, "tokens", "--run", made(GPT, **DECODERS["topk"]), "--threshold", "0.4")
    assert "has no threshold router: without --threshold" in said
    said = refused(monkeypatch, capsys, "tokens", "--run", folder, "--threshold", "-7")
    assert "threshold must be from 0 to 1, not -7.0" in said


# ---------------------------------------------------------------------------------------------------------------------
# What will not do


def test_texts_and_runs_that_will_not_do(made, tokenizers, tmp_path, monkeypatch, capsys):
    folder = made(GPT, **DECODERS["switch"])
    said = refused(monkeypatch, capsys, "tokens", "--run", folder, "--text", "")
    assert "the text is empty: say one with --text" in said
    said = refused(monkeypatch, capsys, "tokens", "--run", folder, "--text", "x y " * 40)
    length = len(tokenizers[SentencePiece].encode_batch(["x y " * 40])[0])
    assert f"the text has {length} tokens, {folder} reads at most 64: give a part of it" in said
    nothing = tmp_path / "nothing"
    assert f"{nothing} is neither the folder of a run" in refused(monkeypatch, capsys, "tokens", "--run", nothing)
    (tmp_path / "file").write_text("in the way")
    said = refused(monkeypatch, capsys, "tokens", "--run", folder, "--text", "x", "--out", tmp_path / "file")
    assert str(tmp_path / "file") in said


def test_the_longest_text_that_fits(made, tokenizers, tmp_path, monkeypatch, capsys):
    """An encoder reads two special tokens beside it."""
    text = "x" * 61
    folder, tokenizer = made(MaskedLM, **ENCODERS["hypersphere"]), tokenizers[XLMR]
    assert len(tokenizer.encode_batch([text])[0]) == 62  # with the space before it
    run(monkeypatch, "tokens", "--run", folder, "--text", text, "--out", tmp_path / "drawn")
    assert json.loads((tmp_path / "drawn" / "tokens.json").read_text())["tokens"][-1] == "</s>"
    assert "has 65 tokens" in refused(monkeypatch, capsys, "tokens", "--run", folder, "--text", text + "x")
    assert "is empty" in refused(monkeypatch, capsys, "tokens", "--run", folder, "--text", " \n ")


@pytest.mark.parametrize("kind", [GPT, MaskedLM])
def test_a_dense_model_has_nothing_to_show(kind, made, monkeypatch, capsys):
    folder = made(kind, router="dense")
    assert f"{folder} is a dense model" in refused(monkeypatch, capsys, "tokens", "--run", folder)


def test_a_translator_is_no_model_of_one_text(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pretrained, "load", lambda folder: (torch.nn.Linear(1, 1), None))
    assert "x is a translator: give a run of train_lm.py" in refused(monkeypatch, capsys, "tokens", "--run", "x")


def test_a_run_of_train_lm_is_shown(options, tmp_path, monkeypatch):
    """What that script leaves, as a user has it."""
    Script(train_lm).run(options | {"out_dir": tmp_path / "out", "steps": 2}, monkeypatch)
    (folder,) = (tmp_path / "out").iterdir()
    run(monkeypatch, "tokens", "--run", folder, "--text", "1 2 3", "--out", tmp_path / "drawn")
    numbers = json.loads((tmp_path / "drawn" / "tokens.json").read_text())
    assert "".join(numbers["tokens"]) == "1·2·3" and numbers["layers"][0]["name"] == "block 2"


def test_the_page_in_a_browser(made, tmp_path):
    options = tokens.Tokens(run=str(made(GPT, **DECODERS["threshold"])), text=TEXT)
    page = tokens.tokens_page(options, *tokens.route(options))
    (tmp_path / "tokens.html").write_text(page, encoding="utf-8")
    acts = """
        const found = {}, tokens = [...document.querySelectorAll(".text span")], said = document.getElementById("said")
        found.before = said.value
        tokens[3].focus(); found.reached = document.activeElement == tokens[3]
        tokens[3].dispatchEvent(new FocusEvent("focusin", {bubbles: true})); found.focus = said.value
        tokens[5].dispatchEvent(new MouseEvent("mouseover", {bubbles: true})); found.pointed = said.value
        found.colors = tokens.map(token => getComputedStyle(token).backgroundColor)
        found.wide = document.documentElement.scrollWidth - innerWidth
    """
    found = in_chromium(tmp_path / "tokens.html", acts, 400)
    spans = [token for line in Page(page).lines for token in line]
    assert found["errors"] == [] and found["wide"] <= 0 and found["before"].startswith("· is a space")
    assert found["reached"]  # the event is sent by hand: a window that has no focus of its own yet sends none
    assert (found["focus"], found["pointed"]) == (spans[3].title, spans[5].title)
    assert len(set(found["colors"])) == len({token.count for token in spans}) > 2
