"""`pretrained.load` of runs and of models in Hugging Face's format.

test_train_lm.py and test_train_mlm.py test that GPT-2 and XLM-R compute what Hugging Face's models do.
"""

import json
from pathlib import Path

import pytest
import torch
from helpers import Script, only_run
from test_train_electra import corpora as electra_corpora

import train_electra
import train_lm
import train_mlm
from data.tokenizers import load_tokenizer
from engine.files import load_checkpoint
from engine.pretrained import load
from model import GPT, Encoder

__all__ = ["electra_corpora"]  # a fixture

TINY = dict(n_layer=2, n_head=2, n_embd=16, ffn_size=32, block_size=16, steps=4, eval_every=2)
TINY |= dict(batch_tokens=128, micro_tokens=128, device="cpu", dtype="float32")
MASKED = dict(experts=4, expert_size=16, moe_after=(1,), capacity_factor=1.5, eval_maskings=1)
SCRIPTS = {  # scripts whose models load as encoders, and their constants
    "mlm": (train_mlm, MASKED),
    "electra": (train_electra, dict(generator_layers=1)),
    "xlm": (train_electra, dict(objective="mlm")),
}


@pytest.fixture
def trained(electra_corpora, tmp_path, monkeypatch):
    """Runs one of SCRIPTS -> the folder of its run."""

    def train(name: str, **more) -> Path:
        script, constants = SCRIPTS[name]
        corpora = {key: electra_corpora[key] for key in ("data", "pairs") if hasattr(script.Config, key)}
        out = tmp_path / f"out{len(more)}"
        Script(script).run(TINY | constants | corpora | more | {"out_dir": out}, monkeypatch)
        return only_run(out)

    return train


def test_init_from_starts_a_masked_model_from_another_run(trained, capsys):
    first = trained("mlm")
    with pytest.raises(SystemExit):
        trained("mlm", relative_bias=False, init_from=first)
    assert "has relative_bias True, not False" in capsys.readouterr().err
    second = trained("mlm", learning_rate=1e-12, init_from=first)
    before, after = (load_checkpoint(folder / "ckpt.pt")["model"] for folder in (first, second))
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_of_every_script_loads_as_an_encoder(name, trained, electra_corpora):
    folder = trained(name)
    model, tokenizer = load(folder)
    assert type(model) is Encoder
    assert not model.training
    assert tokenizer.sha256 == load_tokenizer(electra_corpora["data"]).sha256
    state = load_checkpoint(folder / "ckpt.pt")
    assert vars(model.config) == state["constants"]
    weights = {key: tensor for key, tensor in state["model"].items() if key.startswith("encoder.")}
    loaded = {f"encoder.{key}": tensor for key, tensor in model.state_dict().items()}
    torch.testing.assert_close(loaded, weights, rtol=0, atol=0)
    assert load(folder, dropout=0.25)[0].dropout.p == 0.25


def one_line(folder: Path, error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        load(folder)
    line = str(caught.value)
    assert "\n" not in line.strip() and len(line) < 700
    return line


def test_a_folder_without_an_intact_run_is_refused_in_one_line(options, tmp_path, monkeypatch):
    options["out_dir"] = tmp_path / "out"
    Script(train_lm).run(options, monkeypatch)
    folder = only_run(options["out_dir"])
    file = folder / "ckpt.pt"
    (folder / "ckpt.prev.pt").unlink()
    state = load_checkpoint(file)
    bad = {
        "does not have the weights of the model": {"model": {"wte.weight": torch.zeros(2, 2)}},
        "does not describe a model": {"constants": {}},
        "holds checkpoints of another kind of model": {"class": "FineTuned"},
        "another vocabulary than that of its tokenizer": {"identity": {"tokenizer_checksum": "another"}},
    }
    for message, changes in bad.items():
        torch.save(state | changes, tmp_path / "bad.pt")
        (tmp_path / "bad.pt").replace(file)  # not overwritten: the tensors of `state` are mapped from the old file
        assert message in one_line(folder, ValueError)
    torch.save({"weights": 1}, file)
    assert "it holds something else" in one_line(folder, ValueError)
    assert "neither the folder of a run nor of a model" in one_line(tmp_path, OSError)
    assert "does not exist: train it first" in one_line(tmp_path / "nowhere", OSError)


@pytest.mark.parametrize("is_zip", [True, False])
def test_fairseqs_format_is_named(is_zip, tmp_path):
    content = {"args": None, "model": {"decoder.sentence_encoder.embed_tokens.weight": torch.zeros(9, 4)}}
    torch.save(content, tmp_path / "model.pt", _use_new_zipfile_serialization=is_zip)
    (tmp_path / "dict.txt").write_text("a 1\n")
    assert "has a model in fairseq's format: pass one in Hugging Face's" in one_line(tmp_path, ValueError)


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face's format


def save(folder: Path, kind: str):
    """Saves a small Hugging Face model, with its head."""
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


def without_head(folder: Path):
    """Stores the weights as the hub stores GPT-2: those of a model without a head, whose names have no prefix."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    names = {name: name.removeprefix("transformer.").removeprefix("roberta.") for name in tensors}
    save_file({names[name]: x for name, x in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("layout", ["gpt2", "xlmr"])
def test_one_file_shards_and_names_without_prefix_load_the_same_model(layout, tmp_path):
    model = save(tmp_path, layout)
    loaded = [load(tmp_path)]
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size=5000)
    shard, *others = sorted(tmp_path.glob("*.safetensors"))
    assert others
    loaded.append(load(tmp_path))
    shard.unlink()
    assert "does not have the weights of the model" in one_line(tmp_path, ValueError)
    for shard in others:
        shard.unlink()
    model.save_pretrained(tmp_path)
    without_head(tmp_path)
    loaded.append(load(tmp_path))
    first, _ = loaded[0]
    for net, tokenizer in loaded:
        assert type(net) is {"gpt2": GPT, "xlmr": Encoder}[layout]
        assert not net.training
        assert tokenizer is None
        torch.testing.assert_close(net.state_dict(), first.state_dict(), rtol=0, atol=0)


def change(folder: Path, **values):
    """Changes config.json; None removes a value."""
    config = json.loads((folder / "config.json").read_text()) | values
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def truncate(file: Path):
    file.write_bytes(file.read_bytes()[:-100])


BAD = {
    "another model": (lambda f: change(f, model_type="bert"), "has model_type bert, not xlm-roberta"),
    "another activation": (lambda f: change(f, hidden_act="relu"), "hidden_act relu, not gelu"),
    "untied embeddings": (lambda f: change(f, tie_word_embeddings=False), "tie_word_embeddings False, not"),
    "other positions": (lambda f: change(f, position_embedding_type="relative_key"), "relative_key, not absolute"),
    "another padding": (lambda f: change(f, pad_token_id=0), "pad_token_id 0, not 1"),
    "no size": (lambda f: change(f, hidden_size=None), "config.json does not have all of vocab_size, "),
    "another size": (lambda f: change(f, intermediate_size=48), "does not have the weights of the model"),
    "more layers": (lambda f: change(f, num_hidden_layers=3), "does not have the weights of the model"),
    "truncated configuration": (lambda f: truncate(f / "config.json"), "config.json is not readable JSON"),
    "truncated weights": (lambda f: truncate(f / "model.safetensors"), "model.safetensors cannot be read"),
    "a pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "with a model.safetensors"),
    "another vocabulary": (lambda f: (f / "sentencepiece.bpe.model").write_bytes(b"?"), "is not a SentencePiece model"),
    "damaged vocabulary": (lambda f: (f / "tokenizer.model").write_bytes(b"?"), "is not a SentencePiece model"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_model_is_refused_in_one_line(case, tmp_path):
    save(tmp_path, "xlmr")
    damage, message = BAD[case]
    damage(tmp_path)
    assert message in one_line(tmp_path, (ValueError, OSError))
