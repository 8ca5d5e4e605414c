"""Runs that are exported, and what people do with them in transformers; all that is said must be ours."""

import base64
import hashlib
import random
import re
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import save_run

import data.tokenizers
import train_electra
import train_lm
import train_mlm
from data.ciphers import VOCABULARY
from data.tokenizers import GPT2, XLMR, SentencePiece, train_sentencepiece
from engine import pretrained
from engine.files import write
from engine.pretrained import export
from model import GPT, MaskedLM

transformers = pytest.importorskip("transformers")
LINES = Path(__file__).read_text().splitlines()
SMALL = dict(n_layer=2, n_head=2, n_embd=32, ffn_size=64, block_size=24)
STACK = dict(experts=4, expert_size=16, moe_after=(1,))
KINDS = {  # what is trained, its config; decoders with and without experts, encoders, an encoder with a verdict
    "dense decoder": (GPT, train_lm.Config(router="dense", frequency_bias=False, **SMALL)),
    **{router: (GPT, train_lm.Config(router=router, **SMALL)) for router in ("threshold", "topk", "hash", "base")},
    "dense encoder": (MaskedLM, train_mlm.Config(router="dense", relative_bias=False, **SMALL)),
    "hypersphere": (MaskedLM, train_mlm.Config(**SMALL | STACK)),
    "limited": (MaskedLM, train_mlm.Config(router="switch", capacity_factor=0.5, **SMALL | STACK)),
    "discriminator": (train_electra.Electra, train_electra.Config(**SMALL)),
}
AUTO = {GPT: "AutoModelForCausalLM", MaskedLM: "AutoModelForMaskedLM"}
AUTO[train_electra.Electra] = "AutoModelForTokenClassification"
PIPELINES = {
    "text-generation": ["dense decoder", "threshold", "topk", "hash", "base"],
    "fill-mask": ["dense encoder", "hypersphere", "limited"],
    "feature-extraction": ["dense encoder", "hypersphere", "limited", "discriminator"],
    "token-classification": ["discriminator"],
}


def of(*names):
    return pytest.mark.parametrize("exported", names, indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def exported(request, tmp_path_factory):
    """Its name, our model, the folders of the run and the export, and transformers' model and tokenizer."""
    kind, config = KINDS[request.param]
    base = tmp_path_factory.mktemp("export")
    tokenizer = train_sentencepiece(LINES, 420, SentencePiece if kind is GPT else XLMR)
    torch.manual_seed(0)
    model = kind(config, tokenizer.vocab_size).eval()
    for p in model.parameters():  # biases, too
        p.data += 0.1 * torch.randn_like(p)
    save_run(base / "run", model, tokenizer)
    export(base / "run", base / "folder")
    theirs, words = load(base / "folder", AUTO[kind])
    return SimpleNamespace(name=request.param, kind=kind, ours=model, run=base / "run", folder=base / "folder",
                           theirs=theirs, words=words, own=tokenizer)  # fmt: skip


def load(folder, auto: str, **options):
    theirs = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, **options)
    return theirs.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def said(model, ids):
    """Our logits (B, T, V), without a capacity limit; the verdict's beside a 0."""
    with torch.no_grad(), model.no_limit():
        if isinstance(model, GPT):
            return model(ids)[0]
        if isinstance(model, MaskedLM):
            return model(ids, torch.arange(ids.numel()))[0].view(*ids.shape, -1)
        h, _ = model.encoder(ids)
        verdict = model.out(model.ln_h(F.gelu(model.dense(h))))
        return torch.cat([torch.zeros_like(verdict), verdict], dim=2)


def some_ids(model, *shape) -> torch.Tensor:
    return torch.randint(4, model.vocab_size, shape, generator=torch.Generator().manual_seed(1))


# --- The model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_are_ours(exported, dtype):
    kind, ids = getattr(torch, dtype), some_ids(exported.ours, 3, 24)
    theirs = exported.theirs
    if dtype != "float32":
        theirs, _ = load(exported.folder, AUTO[exported.kind], dtype=kind)
    own = said(exported.ours.to(kind), ids)
    exported.ours.float().load_state_dict(torch.load(exported.run / "ckpt.pt", weights_only=True)["model"])
    found = theirs(ids).logits
    assert found.dtype == kind
    away = (found - own).float().norm() / own.float().norm()
    assert away < {"float32": 1e-6, "bfloat16": 0.1, "float16": 0.01}[dtype]


@pytest.mark.parametrize("side", ["left", "right", "unsaid"])
def test_padding_changes_nothing(exported, side):
    """Neither values nor gradients. lm-eval pads a decoder's texts behind them, and gives no mask."""
    if side == "unsaid" and exported.kind is not GPT:
        return
    theirs, ids = exported.theirs, some_ids(exported.ours, 2, 12)
    mask, real = torch.ones_like(ids), slice(5, None) if side == "left" else slice(7)
    padding = slice(5) if side == "left" else slice(7, None)
    ids[1, padding], mask[1, padding] = XLMR.pad, 0
    given = {} if side == "unsaid" else {"attention_mask": mask}
    logits = theirs(ids, **given).logits
    own = said(exported.ours, ids[1:, real])[0]
    torch.testing.assert_close(logits[1, real], own, rtol=1e-4, atol=1e-5)

    def gradients(*rows):
        theirs.zero_grad()
        sum(row.float().square().sum() for row in rows).backward()
        return [p.grad.clone() for p in theirs.parameters() if p.grad is not None]

    together = gradients(logits[0], logits[1, real])
    apart = gradients(theirs(ids[:1]).logits[0], theirs(ids[1:, real]).logits[0])
    assert len(together) == len(apart) > 10
    for a, b in zip(together, apart):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()) + 1e-6)


def test_labels_give_the_loss(exported):
    """In training, too, where no expert has a limit either: rows alone have the loss that they have together."""
    theirs, ids = exported.theirs, some_ids(exported.ours, 2, 12)
    theirs.train()
    labels = ids % 2 if exported.kind is train_electra.Electra else ids.clone()
    labels[:, 6:] = -100
    found = theirs(ids, labels=labels)
    logits, after = (found.logits[:, :-1], labels[:, 1:]) if exported.kind is GPT else (found.logits, labels)
    torch.testing.assert_close(found.loss, F.cross_entropy(logits.flatten(0, 1), after.flatten()))
    found.loss.backward()
    alone = [theirs(ids[i : i + 1], labels=labels[i : i + 1]).loss for i in range(2)]
    if exported.name != "base":  # in training it deals tokens to experts
        torch.testing.assert_close(found.loss, sum(alone) / 2, rtol=1e-4, atol=1e-5)
    theirs.eval()


def test_hidden_states_tuples_and_embeddings(exported):
    ids = some_ids(exported.ours, 2, 12)
    own = exported.ours if exported.kind is GPT else exported.ours.encoder
    models = [exported.theirs]
    if exported.kind is not GPT:
        models.append(load(exported.folder, "AutoModel")[0])
        with torch.no_grad(), own.no_limit():
            h, _ = own(ids)
        torch.testing.assert_close(models[1](ids).last_hidden_state, h, rtol=1e-4, atol=1e-5)
    for theirs in models:
        assert torch.equal(theirs.get_input_embeddings().weight, own.wte.weight)
        [first] = theirs(ids, return_dict=False)
        found = theirs(ids, output_hidden_states=True)
        theirs.config.output_hidden_states = True
        assert torch.equal(theirs(ids).hidden_states[1], found.hidden_states[1])
        theirs.config.output_hidden_states = False
        assert torch.equal(first, found[0]) and theirs(ids).hidden_states is None
        assert [x.shape for x in found.hidden_states] == [(2, 12, 32)] * 3
        if exported.kind is not GPT:
            torch.testing.assert_close(found.hidden_states[-1], h, rtol=1e-4, atol=1e-5)
        else:  # padding in front, whatever it is
            mask = torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)
            padded = [theirs(ids * mask + pad * (1 - mask), mask, output_hidden_states=True) for pad in (1, 9)]
            short = theirs(ids[:, 1:], output_hidden_states=True)
            for a, b, c in zip(*(found.hidden_states for found in padded), short.hidden_states):
                assert torch.equal(a[:, 1:], b[:, 1:])
                torch.testing.assert_close(a[:, 1:], c, rtol=1e-4, atol=1e-5)


@of("threshold", "topk", "hash", "base")
def test_generation_is_ours(exported):
    """Also beyond what the model reads at once, and before padding."""
    theirs, how = exported.theirs, dict(do_sample=False, eos_token_id=None)
    prompt = torch.tensor([[exported.own.eot, *exported.own.encode_batch(["from"])[0]]])
    written = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, **how)
    assert torch.equal(written, exported.ours.generate(prompt, 30, top_k=1))
    texts = ["from model import", "def"]
    batch = exported.words(texts, padding=True, return_tensors="pt")
    assert batch["attention_mask"][1, 0] == 0
    both = theirs.generate(**batch, max_new_tokens=8, pad_token_id=1, **how)
    alone = exported.words(texts[1], return_tensors="pt")
    assert torch.equal(both[1, -8:], theirs.generate(**alone, max_new_tokens=8, pad_token_id=1, **how)[0, -8:])


def test_saved_and_loaded_again(exported, tmp_path):
    """By transformers, and by us: a folder of ours, and one that transformers has saved."""
    exported.theirs.save_pretrained(tmp_path)
    exported.words.save_pretrained(tmp_path)
    theirs, words = load(tmp_path, AUTO[exported.kind])
    ids, text = some_ids(exported.ours, 2, 12), LINES[30]
    assert torch.equal(theirs(ids).logits, exported.theirs(ids).logits)
    assert words(text) == exported.words(text) and words.padding_side == exported.words.padding_side
    own, tokenizer = pretrained.load(exported.run)
    for folder in (exported.folder, tmp_path):
        again, _ = pretrained.load(folder)
        assert type(again) is type(own) and again.state_dict().keys() == own.state_dict().keys()
        for weight, x in own.state_dict().items():
            torch.testing.assert_close(again.state_dict()[weight], x, rtol=0, atol=0)
    assert pretrained.load(exported.folder)[1].sha256 == tokenizer.sha256
    assert "Infinity" not in (exported.folder / "config.json").read_text()


@pytest.mark.parametrize("task, exported", [(t, n) for t, names in PIPELINES.items() for n in names],
                         indirect=["exported"])  # fmt: skip
def test_pipelines(exported, task):
    words, theirs = exported.words, exported.theirs
    if task == "feature-extraction":
        theirs, _ = load(exported.folder, "AutoModel")
    run = transformers.pipeline(task, model=theirs, tokenizer=words)
    if task == "text-generation":
        [found] = run("from model", max_new_tokens=4, do_sample=False)
        assert found["generated_text"].startswith("from model")
        return
    text = f"from model {words.mask_token} GPT, MaskedLM" if task == "fill-mask" else "from model import GPT"
    ids = torch.tensor([exported.own.encode_batch([text])[0]])
    if task == "fill-mask":
        before, after = exported.own.encode_batch(text.split(words.mask_token))
        ids = torch.tensor([[*before, exported.own.mask, *after]])
    ids = F.pad(F.pad(ids, (1, 0), value=XLMR.bos), (0, 1), value=XLMR.eos)
    if task == "feature-extraction":
        with torch.no_grad(), exported.ours.encoder.no_limit():
            h, _ = exported.ours.encoder(ids)
        torch.testing.assert_close(torch.tensor(run(text)), h, rtol=1e-3, atol=1e-4)
    elif task == "fill-mask":
        own = said(exported.ours, ids)[0, 1 + len(before)].softmax(dim=0)
        assert [found["token"] for found in run(text)] == own.topk(5).indices.tolist()
        assert [found["score"] for found in run(text)] == pytest.approx(own.topk(5).values.tolist(), rel=1e-3)
    else:
        replaced = said(exported.ours, ids)[0, 1:-1, 1].sigmoid()
        found = run(text, ignore_labels=[])
        assert [row["entity"] for row in found] == [("original", "replaced")[int(p > 0.5)] for p in replaced]
        scores = torch.maximum(replaced, 1 - replaced).tolist()
        assert [row["score"] for row in found] == pytest.approx(scores, rel=1e-3)
        assert (found[0]["start"], found[-1]["end"]) == (0, len(text))


@of("threshold", "hypersphere", "discriminator", "dense decoder")
def test_a_trainer_saves_and_goes_on(exported, tmp_path):
    pytest.importorskip("accelerate")
    words, auto = exported.words, AUTO[exported.kind]
    collate = transformers.DataCollatorForLanguageModeling(words, mlm=exported.kind is MaskedLM)
    rows = [words(text, truncation=True) for text in LINES[:40] if text]
    assert max(len(row["input_ids"]) for row in rows) == words.model_max_length == 24
    if exported.kind is train_electra.Electra:  # another task, with a head of its own
        collate = transformers.DataCollatorForTokenClassification(words)
        rows = [row | {"labels": [token % 3 for token in row["input_ids"]]} for row in rows]
        options = dict(num_labels=3, ignore_mismatched_sizes=True)
    else:
        options = {}

    def trainer(folder, steps):
        how = dict(max_steps=steps, save_steps=3, per_device_train_batch_size=3, gradient_accumulation_steps=2)
        how |= dict(use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, learning_rate=1e-3)
        args = transformers.TrainingArguments(str(tmp_path / "out"), **how)
        model, _ = load(folder, auto, **options)
        return transformers.Trainer(model, args, collate, rows, processing_class=words)

    first = trainer(exported.folder, 3)
    first.train()
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    assert len(losses) == 3 and all(0.1 < loss < 20 for loss in losses)
    options.clear()
    again, saved_words = load(tmp_path / "out" / "checkpoint-3", auto)
    ids = some_ids(exported.ours, 2, 12)
    assert torch.equal(again(ids).logits, first.model.eval()(ids).logits)
    assert saved_words(LINES[30]) == words(LINES[30])
    second = trainer(tmp_path / "out" / "checkpoint-3", 5)
    second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert second.state.global_step == 5


@of("threshold")
def test_what_cannot_be_exported_is_one_clear_line(exported, tmp_path):
    with pytest.raises(ValueError, match="is not empty"):
        export(exported.run, exported.folder)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        export(tmp_path, tmp_path / "new")
    state = torch.load(exported.run / "ckpt.pt", weights_only=True) | {"class": "Translator"}
    write(tmp_path / "ckpt.pt", state)
    with pytest.raises(ValueError, match="holds a Translator: give a run of"):
        export(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# --- The tokenizer

NORMALISED = dict(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True, add_dummy_prefix=True)
NORMALISED |= dict(user_defined_symbols=[])
TOKENIZERS = {
    "lossless": (SentencePiece, {}),
    "lossless, unknown ones": (SentencePiece, dict(byte_fallback=False)),
    "somebody's": (SentencePiece, NORMALISED | dict(model_type="unigram", byte_fallback=False)),
    "xlmr": (XLMR, {}),
    "xlmr, joint": (XLMR, dict(model_type="bpe", split_by_unicode_script=False, split_by_number=False)),
    "xlmr, ciphers": (XLMR, VOCABULARY),
    "gpt2": (GPT2, {}),
}


def made_up_ranks() -> bytes:
    """As many tokens as GPT-2 has: bytes, and others that join two of those before."""
    r, tokens = random.Random(0), [bytes([byte]) for byte in range(256)]
    common = [*b" abcdefghijklmnopqrstuvwxyz\n\xc3\xa9", *range(256)]
    known = set(tokens)
    while len(tokens) < 50_256:
        token = r.choice(tokens[r.choice([32, 97, 256]) % len(tokens) :]) + bytes([r.choice(common)])
        if token not in known and len(token) < 12:
            known.add(token)
            tokens.append(token)
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def odd_texts(r: random.Random) -> list[str]:
    alphabet = [*"ab cde  \n\t\r.,(){}[]<>=-_'\"0123456789ABCéß中文かガ한ـ🙂\u200b\u00a0\u3000\u2581\x00\x01ﬁＡ½"]
    alphabet += ["e\u0301", "👩\u200d💻", "न\u093f"]
    texts = ["".join(r.choices(alphabet, k=r.randint(0, 40))) for _ in range(1500)]
    blocks = (0x20, 0x250), (0x370, 0x600), (0x1E00, 0x1F00), (0x2010, 0x2300), (0x3040, 0xD7A4), (0x1F300, 0x1F700)
    for _ in range(500):
        drawn = [chr(r.randrange(*r.choice(blocks))) for _ in range(20)]
        texts.append("".join(c for c in drawn if not unicodedata.combining(c)))
    return texts


@pytest.mark.parametrize("which", TOKENIZERS)
def test_ids_are_ours_on_odd_texts(which, tmp_path, monkeypatch):
    from engine.hf_tokenizer import files_of

    kind, options = TOKENIZERS[which]
    r = random.Random(0)
    words = ["".join(r.choices("abcdefgh_.", k=r.randint(1, 7))) for _ in range(500)]
    words += [word + part for word in words for part in ("<0x41", "</s", ">")]
    known = [" ".join(r.choices(words, k=12)) for _ in range(1000)]
    if kind is GPT2:
        ranks = made_up_ranks()
        monkeypatch.setattr(data.tokenizers, "GPT2_SHA256", hashlib.sha256(ranks).hexdigest())
        own = GPT2(ranks)
    else:
        own = train_sentencepiece(known, 300, kind, **options)
    for name, content in files_of(own, 24).items():
        write(tmp_path / name, content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    like_tokens = ["a<0x41>", "ab\uff1c/s\uff1e"]  # a byte and a special token, and are none
    special = "|".join(map(re.escape, theirs.all_special_tokens))
    texts = [text for text in like_tokens + odd_texts(r) + known if not re.search(special, text)]
    assert len(theirs) == own.vocab_size
    ids = own.encode_batch(texts)
    assert theirs(texts, add_special_tokens=False)["input_ids"] == ids
    if "unknown" not in which and "body" not in which:
        assert theirs.batch_decode(ids[:200], skip_special_tokens=True) == [own.decode(row) for row in ids[:200]]
    inside = own.encode_batch(["ab", "cd e"])
    first, second = ([own.bos], [own.eos]) if kind is XLMR else ([], [])
    assert theirs("ab")["input_ids"] == [*first, *inside[0], *second]
    pair = [*first, *inside[0], *second, *second, *inside[1], *second]
    assert theirs("ab", "cd e")["input_ids"] == pair
    assert [*theirs("ab")] == ["input_ids", "attention_mask"]
    assert theirs("ab " * 99, truncation=True)["input_ids"][: len(first)] == first
    assert len(theirs("ab " * 99, truncation=True)["input_ids"]) == 24 == theirs.model_max_length
    batch = theirs(["ab " * 9, "ab"], padding=True)
    padded = batch["attention_mask"][1]
    assert padded[0] == int(kind is XLMR) and padded[-1] == int(kind is not XLMR)
    for name in theirs.all_special_tokens:
        at = theirs.convert_tokens_to_ids(name)
        assert theirs(f"ab{name}cd e", add_special_tokens=False)["input_ids"].count(at) == 1
    if kind is XLMR:
        before, after = own.encode_batch(["ab", " cd e"])
        assert theirs("ab <mask> cd e", add_special_tokens=False)["input_ids"] == [*before, own.mask, *after]
    for token in ("a word", "<99999999>", "<|endoftext|>"):
        i = theirs.convert_tokens_to_ids(token)
        assert i is None or 0 <= i < len(theirs)
    assert theirs.convert_tokens_to_ids(theirs.tokenize("cd e")) == inside[1]
    theirs.add_tokens(["<new>"])
    new = theirs.convert_tokens_to_ids("<new>")
    assert new == own.vocab_size and new in theirs("ab<new>")["input_ids"] and theirs.decode([new]) == "<new>"
