"""Runs that are exported and loaded by transformers, whose logits must be ours."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import save_run

import train_electra
import train_lm
import train_mlm
from data.tokenizers import XLMR, SentencePiece, train_sentencepiece
from engine import pretrained
from engine.files import write
from engine.pretrained import export
from model import GPT, MaskedLM

transformers = pytest.importorskip("transformers")
SMALL = dict(n_layer=2, n_head=2, n_embd=32, ffn_size=64, block_size=24)
STACK = dict(experts=4, expert_size=16, moe_after=(1,))
KINDS = {  # what is trained, its config, transformers' class
    "dense decoder": (GPT, train_lm.Config(router="dense", frequency_bias=False, **SMALL), "AutoModelForCausalLM"),
    "threshold": (GPT, train_lm.Config(**SMALL), "AutoModelForCausalLM"),
    "hash": (GPT, train_lm.Config(router="hash", **SMALL), "AutoModelForCausalLM"),
    "dense encoder": (MaskedLM, train_mlm.Config(router="dense", relative_bias=False, **SMALL), "AutoModelForMaskedLM"),
    "hypersphere": (MaskedLM, train_mlm.Config(**SMALL | STACK), "AutoModelForMaskedLM"),
    "discriminator": (train_electra.Electra, train_electra.Config(**SMALL), "AutoModelForTokenClassification"),
}
NATIVE = {"dense decoder": "GPT2LMHeadModel", "dense encoder": "XLMRobertaForMaskedLM"}


@pytest.fixture(scope="module", params=KINDS)
def exported(request, tmp_path_factory):
    """-> its name, our model, the folder of the run, and that of the export"""
    kind, config, _ = KINDS[request.param]
    base = tmp_path_factory.mktemp("export")
    lines = Path(__file__).read_text().splitlines()
    tokenizer = train_sentencepiece(lines, 420, SentencePiece if kind is GPT else XLMR)
    torch.manual_seed(0)
    model = kind(config, tokenizer.vocab_size).eval()
    for p in model.parameters():  # biases, too
        p.data += 0.1 * torch.randn_like(p)
    save_run(base / "run", model, tokenizer)
    export(base / "run", base / "folder")
    return request.param, model, base / "run", base / "folder"


def ours(model, ids):
    with torch.no_grad(), model.no_limit():
        if isinstance(model, GPT):
            return model(ids)[0]
        if isinstance(model, MaskedLM):
            return model(ids, torch.arange(ids.numel()))[0].view(*ids.shape, -1)
        h, _ = model.encoder(ids)
        return model.out(model.ln_h(F.gelu(model.dense(h))))


def test_transformers_loads_it_with_equal_logits(exported):
    name, model, run, folder = exported
    auto = getattr(transformers, KINDS[name][2])
    theirs = auto.from_pretrained(folder, trust_remote_code=name not in NATIVE).eval()
    assert type(theirs).__name__ == NATIVE.get(name, type(theirs).__name__)
    ids = torch.randint(4, model.vocab_size, (3, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(model, ids), rtol=1e-5, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    text = "from model import GPT, MaskedLM"
    _, own = pretrained.load(run)
    assert tokenizer(text)["input_ids"] == own.encode_batch([text])[0]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    if isinstance(model, GPT) and name not in NATIVE:
        prompt = torch.tensor([[own.eot, *own.encode_batch(["from"])[0]]])
        mask = torch.ones_like(prompt)
        written = theirs.generate(prompt, attention_mask=mask, max_new_tokens=30, do_sample=False, eos_token_id=None)
        assert torch.equal(written, model.generate(prompt, 30, top_k=1))  # also beyond what they read at once


def test_padding_changes_nothing(exported):
    """Behind a text, and before it where a decoder goes on from it."""
    name, model, _, folder = exported
    auto = getattr(transformers, KINDS[name][2])
    theirs = auto.from_pretrained(folder, trust_remote_code=True).eval()
    ids = torch.randint(4, model.vocab_size, (2, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    ids[1, 7:], mask[1, 7:] = XLMR.pad, 0
    with torch.no_grad():
        found = theirs(ids, attention_mask=mask).logits[1, :7]
    torch.testing.assert_close(found, ours(model, ids[1:, :7])[0], rtol=1e-4, atol=1e-5)
    if isinstance(model, GPT):
        how = dict(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=1)
        alone = theirs.generate(ids[1:, :7], attention_mask=mask[1:, :7], **how)[0, 7:]
        ids, mask = ids.roll(5, 1), mask.roll(5, 1)
        assert torch.equal(theirs.generate(ids, attention_mask=mask, **how)[1, 12:], alone)


def test_ours_loads_it_back(exported):
    name, model, run, folder = exported
    again, tokenizer = pretrained.load(folder)
    own, _ = pretrained.load(run)
    assert type(again) is type(own) and again.state_dict().keys() == own.state_dict().keys()
    for weight, x in own.state_dict().items():
        torch.testing.assert_close(again.state_dict()[weight], x, rtol=0, atol=0)
    assert tokenizer.sha256 == pretrained.load(run)[1].sha256
    card = (folder / "README.md").read_text()
    assert "from_pretrained(FOLDER" in card and ("trust_remote_code=True)\ntokenizer" in card) == (name not in NATIVE)


@pytest.mark.parametrize("exported", ["threshold"], indirect=True)
def test_what_cannot_be_exported_is_one_clear_line(exported, tmp_path):
    _, _, run, folder = exported
    with pytest.raises(ValueError, match="is not empty"):
        export(run, folder)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        export(tmp_path, tmp_path / "new")
    state = torch.load(run / "ckpt.pt", weights_only=True) | {"class": "Translator"}
    write(tmp_path / "ckpt.pt", state)
    with pytest.raises(ValueError, match="holds a Translator: give a run of"):
        export(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()
