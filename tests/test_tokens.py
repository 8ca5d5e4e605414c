"""`analyze.py tokens`: picture and numbers against routing by hand; texts and runs that will not do."""

import math
from types import SimpleNamespace

import pytest
import reference
import torch
from test_analyze import refused, run
from test_analyze_xlme import save_model

from analysis import tokens
from data.tokenizers import XLMR, SentencePiece, train_sentencepiece
from engine import pretrained
from model import GPT, MaskedLM, Translator

pytest.importorskip("matplotlib")

TEXT = "the cat & the <script> sat\n\ton the mat שלום 中文 $x$"
SIZE = dict(n_layer=4, block_size=64, router_std=0.03)
DECODERS = {
    "threshold": dict(router="threshold", eval_threshold=0.7, capacity=1.0),
    "topk": dict(router="topk", split=4, capacity=0.25),
    "hash": dict(router="hash", capacity=0.05),
    "expert_choice": dict(router="expert_choice", capacity=0.5),
}
ENCODERS = {
    "hypersphere": dict(router="hypersphere", experts=8, moe_after=(1, 3)),
    "top-2": dict(router="topk", experts=8, top_k=2, relative_bias=True, moe_after=(2,), capacity_factor=0.5),
}


@pytest.fixture(scope="session")
def tokenizers() -> dict:
    text = ["the cat sat on the mat <script> <b> & שלום x y z", "the 中 cat sat " * 3, "a quick brown fox jumps over"]
    return {kind: train_sentencepiece(text, 296, kind) for kind in (SentencePiece, XLMR)}


@pytest.fixture
def made(tokenizers, tmp_path):
    """A run's folder with a random model: `made(GPT, router=...)`, or `made(MaskedLM, ...)`."""

    def make(kind, **constants):
        tokenizer = tokenizers[SentencePiece if kind is GPT else XLMR]
        folder = tmp_path / f"{kind.__name__}-{len(list(tmp_path.iterdir()))}"
        return save_model(folder, tokenizer, kind, **SIZE | constants)

    return make


def by_hand(folder, text: str, **changes) -> list[tuple[list, dict]]:
    """Of each sparse layer the experts that tokens want, and of those that serve it the gates."""
    model, tokenizer = pretrained.load(folder, **changes)
    ids = tokenizer.encode_batch([text])[0]
    if tokenizer.kind == "xlmr":
        ids = [0, *ids, 2]
    layers = []

    def look(router, given, routing):
        E, gamma = router.E, model.moe_layers[len(layers)].eval_gamma
        wanted = routing.wanted.nonzero().tolist()
        turn = {(s, e): (-int(routing.priority[s, e]), s) for s, e in wanted}
        kept = reference.serve(turn, reference.capacity(len(ids), E, gamma) if gamma < math.inf else None, E)
        layers.append((wanted, {(s, e): float(routing.weight[s, e]) for s, e in kept}))

    for moe in model.moe_layers:
        moe.router.register_forward_hook(look)
    with torch.no_grad():
        model(torch.tensor([ids]))
    return layers


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_numbers_are_the_routing(name, made):
    constants, kind = (DECODERS[name], GPT) if name in DECODERS else (ENCODERS[name], MaskedLM)
    folder = made(kind, **constants)
    shown, found = tokens.route(tokens.Tokens(run=str(folder), text=TEXT))
    names = {"hypersphere": ["behind layer 1", "behind layer 3"], "top-2": ["behind layer 2"]}
    assert [layer["name"] for layer in found] == names.get(name, ["block 2", "block 4"])
    assert bool(found[0]["cut"]) == (name != "hypersphere"), "the case shows nothing"
    assert len(set(found[0]["wanted"])) > 2 or name != "threshold"
    for layer, (wanted, kept) in zip(found, by_hand(folder, TEXT), strict=True):
        assert layer["wanted"] == [sum(s == token for s, _ in wanted) for token in range(len(shown))]
        assert {(s, e): gate for s, e, gate in layer["served"]} == pytest.approx(kept, abs=1e-6)
        assert layer["cut"] == [pair for pair in wanted if tuple(pair) not in kept]


def test_the_picture_has_a_dot_for_each_choice(made, draw):
    axes, found = draw("tokens", "--run", made(GPT, **DECODERS["threshold"]), "--text", TEXT)
    labels = axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == found["tokens"]
    assert not any(label.get_parse_math() for label in labels)  # $ is a character
    for panel, layer in zip(axes[:2], found["layers"], strict=True):
        hollow, full = panel.collections
        drawn = [[int(y), int(x), float(gate)] for (x, y), gate in zip(full.get_offsets(), full.get_array())]
        assert drawn == layer["served"]
        assert layer["cut"] == [[int(y), int(x)] for x, y in hollow.get_offsets()] != []
        assert [int(text.get_text()) for text in panel.texts] == layer["wanted"]


def test_every_token_can_be_read(tokenizers):
    def pieces(kind, text: str) -> list[str]:
        return [tokens.written(tokenizers[kind], token) for token in tokenizers[kind].encode_batch([text])[0]]

    shown = pieces(SentencePiece, "the cat\n\tש中é\x00\u200f$")
    assert "".join(shown) == "the·cat⏎⇥ש中\\xc3\\xa9\\x00\\xe2\\x80\\x8f$"
    assert "⏎" in shown and "\\xc3" in shown
    assert "".join(pieces(XLMR, "cat 中")) == "·cat·中"
    assert [tokens.written(tokenizers[XLMR], token) for token in (0, 2, 3)] == ["<s>", "</s>", "<unk>"]
    bytes_of = [b" cat", b"\n", "é".encode()[:1]].__getitem__
    gpt2 = SimpleNamespace(kind="gpt2", encoding=SimpleNamespace(decode_single_token_bytes=bytes_of))
    assert [tokens.written(gpt2, token) for token in range(3)] == ["·cat", "⏎", "\\xc3"]


def test_another_threshold(made, draw):
    folder = made(GPT, **DECODERS["threshold"])
    _, found = draw("tokens", "--run", folder, "--text", TEXT, "--threshold", "0.4")
    again, before = ([len(wanted) for wanted, _ in by_hand(folder, TEXT, eval_threshold=t)] for t in (0.4, 0.7))
    assert [sum(layer["wanted"]) for layer in found["layers"]] == again != before


def test_texts_and_runs_that_will_not_do(made, tokenizers, tmp_path, monkeypatch, capsys):
    def told(*line) -> str:
        return refused(monkeypatch, capsys, "tokens", "--run", *line)

    folder = made(GPT, **DECODERS["topk"])
    assert "threshold must lie from 0 to 1, not -7.0" in told(folder, "--threshold", "-7")
    assert "has no threshold router: leave out --threshold" in told(folder, "--threshold", "0.4")
    assert "the text is empty: give one with --text" in told(folder, "--text", "")
    length = len(tokenizers[SentencePiece].encode_batch(["x y " * 40])[0])
    assert f"the text has {length} tokens, {folder} reads at most 64" in told(folder, "--text", "x y " * 40)
    assert "is neither the folder of a run" in told(tmp_path / "nothing")
    for kind, router in ((GPT, "dense"), (MaskedLM, "dense"), (Translator, "topk")):
        assert "is no language model or encoder with experts" in told(made(kind, router=router))
    encoder = made(MaskedLM, **ENCODERS["top-2"])
    run(monkeypatch, "tokens", "--run", encoder, "--text", "x" * 61, "--out", tmp_path)  # 62 pieces, and <s> and </s>
    assert "has 65 tokens" in told(encoder, "--text", "x" * 62)
