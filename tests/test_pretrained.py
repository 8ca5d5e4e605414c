"""`pretrained.load`: what it makes of a run's folder and of a checkpoint in Hugging Face's format.

That GPT-2 and XLM-R compute what Hugging Face's do is tested in test_model.py and test_encoder.py.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Script, only_run

import train_electra
import train_lm
import train_mlm
import train_mt
from data.prepare import prepare
from data.tokenizers import XLMR, train_sentencepiece
from engine.pretrained import load
from engine.run import load_checkpoint
from model import GPT, Encoder, Translator

TINY = dict(n_layer=2, n_head=2, n_embd=16, ffn_size=32, block_size=16, steps=4, eval_every=2)
TINY |= dict(batch_tokens=128, micro_tokens=128, device="cpu", dtype="float32")
MASKED = dict(experts=4, expert_size=16, moe_after=(1,), capacity_factor=1.5, eval_maskings=1)
SCRIPTS = {  # script, its constants, its kind of model
    "lm": (train_lm, dict(data="text", threshold=0.6, eval_capacity=0.375, sample_tokens=1), GPT),
    "mlm": (train_mlm, dict(data="languages") | MASKED, Encoder),
    "electra": (train_electra, dict(data="languages", pairs="pairs", generator_layers=1), Encoder),
    "xlm": (train_electra, dict(data="languages", pairs="pairs", objective="mlm"), Encoder),
    "mt": (train_mt, dict(data="pairs", decoder_layers=2, eval_sentences=4, beam=2), Translator),
}


@pytest.fixture(scope="session")
def corpora(tmp_path_factory) -> dict[str, Path]:
    """German and English as text of one language, of two, and as pairs, all under one vocabulary."""
    base = tmp_path_factory.mktemp("corpora")
    (base / "text").mkdir()
    (base / "pairs").mkdir()
    rng = np.random.default_rng(0)
    words = {"Hund": "dog", "Katze": "cat", "Haus": "house", "rot": "red", "blau": "blue", "und": "and"}
    german = [" ".join(rng.permutation(list(words))) for _ in range(400)]
    english = [" ".join(map(words.get, line.split())) for line in german]
    for split, part in {"train": slice(0, 360), "valid": slice(360, 380), "test": slice(380, 400)}.items():
        for side, texts in (("de", german[part]), ("en", english[part])):
            (base / "text" / f"{side}.{split}.txt").write_text("\n\n".join(texts))
            (base / "pairs" / f"de-en.{split}.{side}").write_text("".join(f"{text}\n" for text in texts))
    spm = train_sentencepiece(german + english, 290, XLMR).save(base)
    return {
        "spm": spm,
        "text": prepare("text", base / "text", tokenizer=spm, out=base / "prepared-text"),
        "languages": prepare("cc100", base / "text", tokenizer=spm, out=base / "prepared-languages"),
        "pairs": prepare("bitext", base / "pairs", tokenizer=spm, out=base / "prepared-pairs"),
    }


@pytest.fixture
def trained(corpora, tmp_path, monkeypatch):
    """Runs one of SCRIPTS -> the folder of its run."""

    def train(name: str) -> Path:
        script, constants, _ = SCRIPTS[name]
        folders = {key: corpora[constants[key]] for key in ("data", "pairs") if key in constants}
        Script(script).run(TINY | constants | folders | {"out_dir": tmp_path / "out"}, monkeypatch)
        return only_run(tmp_path / "out")

    return train


def test_a_masked_model_goes_on_from_another_run(trained, corpora, tmp_path, monkeypatch):
    script, constants, _ = SCRIPTS["mlm"]
    before = load_checkpoint(trained("mlm") / "ckpt.pt")["model"]
    options = TINY | constants | {"data": corpora["languages"], "learning_rate": 1e-12, "out_dir": tmp_path / "b"}
    Script(script).run(options | {"init_from": only_run(tmp_path / "out")}, monkeypatch)
    torch.testing.assert_close(load_checkpoint(only_run(tmp_path / "b") / "ckpt.pt")["model"], before)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_of_every_script_loads(name, trained, corpora):
    if name == "mt":
        pytest.importorskip("sacrebleu")  # it counts its scores while it trains
    folder = trained(name)
    model, tokenizer = load(folder)
    assert type(model) is SCRIPTS[name][2] and not model.training
    assert tokenizer.sha256 == XLMR(corpora["spm"].read_bytes()).sha256
    state = load_checkpoint(folder / ("model.pt" if name == "mt" else "ckpt.pt"))
    assert vars(model.config) == state["constants"]
    prefix = "encoder." if type(model) is Encoder else ""
    weights = {key: tensor for key, tensor in state["model"].items() if key.startswith(prefix)}
    assert {prefix + key for key in model.state_dict()} == weights.keys()
    assert all(torch.equal(tensor, weights[prefix + key]) for key, tensor in model.state_dict().items())
    assert load(folder, dropout=0.25)[0].dropout.p == 0.25


def one_line(folder: Path, error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        load(folder)
    line = str(caught.value)
    assert "\n" not in line.strip() and len(line) < 700
    return line


def test_other_bad_folders_of_runs_are_one_clear_line(trained, tmp_path):
    folder = trained("lm")
    file = folder / "ckpt.pt"
    (folder / "ckpt.prev.pt").unlink()
    state = load_checkpoint(file)
    bad = {
        "has not the weights of the model": {"model": {"wte.weight": torch.zeros(2, 2)}},
        "describes no model": {"constants": {}},
        "holds checkpoints of something else": {"class": "FineTuned"},
        "another vocabulary than the tokenizer in it": {"identity": {"tokenizer_checksum": "another"}},
    }
    for message, other in bad.items():
        torch.save(state | other, tmp_path / "bad.pt")
        (tmp_path / "bad.pt").replace(file)  # the state's tensors lie in the file that was here
        assert message in one_line(folder, ValueError)
    torch.save({"weights": 1}, file)
    assert "it holds something else" in one_line(folder, ValueError)
    for nothing in (tmp_path, tmp_path / "nowhere"):
        assert "neither the folder of a run nor of a model" in one_line(nothing, OSError)


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face's format


def save(folder: Path, kind: str):
    """A small model of Hugging Face's, with its head."""
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        shape = dict(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    else:
        shape = dict(vocab_size=290, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
        shape |= dict(max_position_embeddings=18, type_vocab_size=1, layer_norm_eps=1e-5)
        model = transformers.XLMRobertaForMaskedLM(transformers.XLMRobertaConfig(**shape))
    model.eval().save_pretrained(folder)
    return model


def as_older_ones(folder: Path):
    """The weights as GPT-2's are on the hub: a pickle, of a model without a head, whose names have no prefix."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    names = {name: name.removeprefix("transformer.").removeprefix("roberta.") for name in tensors}
    torch.save({names[name]: x for name, x in tensors.items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("layout", ["gpt2", "xlmr"])
def test_both_ways_of_writing_weights_give_one_model(layout, tmp_path):
    save(tmp_path, layout)
    one, tokenizer = load(tmp_path)
    assert not one.training and tokenizer is None
    as_older_ones(tmp_path)
    two, _ = load(tmp_path)
    assert type(one) is type(two) is {"gpt2": GPT, "xlmr": Encoder}[layout]
    torch.testing.assert_close(two.state_dict(), one.state_dict(), rtol=0, atol=0)


def test_xlmr_loads_with_its_tokenizer(tmp_path, corpora):
    theirs = save(tmp_path, "xlmr")
    assert load(tmp_path)[1] is None
    (tmp_path / "sentencepiece.bpe.model").write_bytes(corpora["spm"].read_bytes())
    model, tokenizer = load(tmp_path)
    assert type(model) is Encoder and not model.training
    assert isinstance(tokenizer, XLMR) and tokenizer.vocab_size == model.vocab_size
    ids = torch.tensor([[tokenizer.bos, *tokenizer.encode_batch(["Hund und"])[0], tokenizer.eos]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[0], theirs.roberta(ids).last_hidden_state, rtol=1e-5, atol=1e-5)


def change(folder: Path, **values):
    """Changes config.json; None takes a value away."""
    config = json.loads((folder / "config.json").read_text()) | values
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def cut(file: Path):
    file.write_bytes(file.read_bytes()[:-100])


BAD = {
    "another model": (lambda f: change(f, model_type="bert"), "has model_type bert, not xlm-roberta"),
    "another activation": (lambda f: change(f, hidden_act="relu"), "hidden_act relu, not gelu"),
    "no size": (lambda f: change(f, hidden_size=None), "config.json does not have all of vocab_size, "),
    "another size": (lambda f: change(f, intermediate_size=48), "has not the weights of the model"),
    "more layers": (lambda f: change(f, num_hidden_layers=3), "has not the weights of the model"),
    "torn configuration": (lambda f: cut(f / "config.json"), "config.json is not readable JSON"),
    "torn weights": (lambda f: cut(f / "model.safetensors"), "model.safetensors cannot be read"),
    "torn pickle": (lambda f: (as_older_ones(f), cut(f / "pytorch_model.bin")), "pytorch_model.bin cannot be read"),
    "another vocabulary": (lambda f: (f / "sentencepiece.bpe.model").write_bytes(b"?"), "is not a SentencePiece model"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_are_one_clear_line(case, tmp_path):
    save(tmp_path, "xlmr")
    spoil, message = BAD[case]
    spoil(tmp_path)
    assert message in one_line(tmp_path, (ValueError, OSError))
