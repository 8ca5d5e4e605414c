"""`analyze.py tokens`: picture and numbers against routing by hand; texts and runs that will not do."""

import math
from types import SimpleNamespace

import pytest
import reference
import torch
from helpers import Script
from test_analyze import refused, run
from test_flops import SMALL

import train_lm
from analysis import tokens
from data.tokenizers import XLMR, SentencePiece, train_sentencepiece
from engine import pretrained
from model import GPT, MaskedLM, Translator

pytest.importorskip("matplotlib")

TEXT = "the cat & the <script> sat\n\ton the mat שלום 中文 $x$"
SIZE = SMALL | dict(n_layer=4, n_embd=16, ffn_size=32, block_size=64, router_std=0.03)
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
        model = kind(SimpleNamespace(**SIZE | constants), tokenizer.vocab_size)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3.0)  # far from the start, where all tokens are nearly alike
        folder = tmp_path / f"run-{kind.__name__}"
        folder.mkdir(exist_ok=True)
        state = {"step": 1, "class": kind.__name__, "constants": vars(model.config), "vocab_size": model.vocab_size}
        state |= {"identity": {"tokenizer_checksum": tokenizer.sha256}, "model": model.state_dict()}
        torch.save(state, folder / "ckpt.pt")
        tokenizer.save(folder)
        return folder

    return make


def by_hand(folder, text: str) -> list[tuple[list, dict]]:
    """Of each sparse layer the experts that tokens want, and of those that serve it the gates."""
    model, tokenizer = pretrained.load(folder)
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


def test_another_threshold(made, draw, monkeypatch, capsys):
    expected = tokens.route(tokens.Tokens(run=str(made(GPT, router="threshold", eval_threshold=0.4)), text=TEXT))
    folder = str(made(GPT, **DECODERS["threshold"]))
    assert tokens.route(tokens.Tokens(run=folder, text=TEXT)) != expected
    _, found = draw("tokens", "--run", folder, "--text", TEXT, "--threshold", "0.4")
    assert (found["tokens"], found["layers"]) == expected
    capsys.readouterr()
    said = refused(monkeypatch, capsys, "tokens", "--run", folder, "--threshold", "-7")
    assert "threshold must lie from 0 to 1, not -7.0" in said
    said = refused(monkeypatch, capsys, "tokens", "--run", made(GPT, **DECODERS["topk"]), "--threshold", "0.4")
    assert "has no threshold router: leave out --threshold" in said


def test_texts_and_runs_that_will_not_do(made, tokenizers, tmp_path, monkeypatch, capsys):
    def told(*line) -> str:
        return refused(monkeypatch, capsys, "tokens", "--run", *line)

    folder = made(GPT, **DECODERS["topk"])
    assert "the text is empty: give one with --text" in told(folder, "--text", "")
    length = len(tokenizers[SentencePiece].encode_batch(["x y " * 40])[0])
    assert f"the text has {length} tokens, {folder} reads at most 64" in told(folder, "--text", "x y " * 40)
    assert "is neither the folder of a run" in told(tmp_path / "nothing")
    for kind in (GPT, MaskedLM, Translator):
        folder = made(kind, router="dense" if kind is not Translator else "topk")
        assert f"{folder} is no language model or encoder with experts" in told(folder)
    encoder = made(MaskedLM, **ENCODERS["top-2"])
    run(monkeypatch, "tokens", "--run", encoder, "--text", "x" * 61, "--out", tmp_path)  # 62 pieces, and <s> and </s>
    assert "has 65 tokens" in told(encoder, "--text", "x" * 62)


def test_a_run_of_train_lm_is_shown(options, tmp_path, monkeypatch, draw):
    """What that script leaves, as a user has it."""
    Script(train_lm).run(options | {"out_dir": tmp_path / "out", "steps": 2}, monkeypatch)
    (folder,) = (tmp_path / "out").iterdir()
    _, found = draw("tokens", "--run", folder, "--text", "1 2 3")
    assert "".join(found["tokens"]) == "1·2·3" and found["layers"][0]["name"] == "block 2"
