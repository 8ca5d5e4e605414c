"""Exported runs in transformers: logits, losses, generation and token ids must equal ours."""

import hashlib
import random
import re
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import made_up_ranks, save_run

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
KINDS = {  # name -> class and config: decoders with and without experts, encoders, a discriminator
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
    """Our model and tokenizer, the folders of the run and of the export, and transformers' model and tokenizer."""
    kind, config = KINDS[request.param]
    base = tmp_path_factory.mktemp("export")
    tokenizer = train_sentencepiece(LINES, 420, SentencePiece if kind is GPT else XLMR)
    torch.manual_seed(0)
    model = kind(config, tokenizer.vocab_size).eval()
    for p in model.parameters():  # biases, too
        p.data += 0.1 * torch.randn_like(p)
    save_run(base / "run", model, tokenizer)
    export(base / "run", base / "folder")
    hf_model, hf_tokenizer = load(base / "folder", AUTO[kind])
    return SimpleNamespace(name=request.param, kind=kind, run=base / "run", folder=base / "folder", model=model,
                           tokenizer=tokenizer, hf_model=hf_model, hf_tokenizer=hf_tokenizer)  # fmt: skip


def load(folder, auto: str, **options):
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, **options)
    if not (folder / "tokenizer.json").exists():
        return model.eval(), None
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


def our_logits(model, ids):
    """(B, T, V) without a capacity limit; of a discriminator (B, T, 2), 0 and its logit."""
    with torch.no_grad(), model.no_limit():
        if isinstance(model, GPT):
            return model(ids)[0]
        if isinstance(model, MaskedLM):
            return model(ids, torch.arange(ids.numel()))[0].view(*ids.shape, -1)
        h, _ = model.encoder(ids)
        logit = model.out(model.ln_h(F.gelu(model.dense(h))))
        return torch.cat([torch.zeros_like(logit), logit], dim=2)


def some_ids(model, *shape) -> torch.Tensor:
    return torch.randint(4, model.vocab_size, shape, generator=torch.Generator().manual_seed(1))


# --- The model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_equal_ours(exported, dtype):
    torch_dtype, ids = getattr(torch, dtype), some_ids(exported.model, 3, 24)
    hf_model = exported.hf_model
    if dtype != "float32":
        hf_model, _ = load(exported.folder, AUTO[exported.kind], dtype=torch_dtype)
    expected = our_logits(exported.model.to(torch_dtype), ids)
    exported.model.float().load_state_dict(torch.load(exported.run / "ckpt.pt", weights_only=True)["model"])
    logits = hf_model(ids).logits
    assert logits.dtype == torch_dtype
    error = (logits - expected).float().norm() / expected.float().norm()
    assert error < {"float32": 1e-6, "bfloat16": 0.1, "float16": 0.01}[dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_trains_under_autocast(exported, dtype):
    """Also a row of padding alone."""
    hf_model, _ = load(exported.folder, AUTO[exported.kind], dtype=getattr(torch, dtype))
    ids = some_ids(exported.model, 3, 24)
    mask = torch.ones_like(ids)
    mask[1, :9] = mask[2] = 0
    with torch.autocast("cpu", getattr(torch, dtype)):
        logits = hf_model(ids, attention_mask=mask).logits
    expected = exported.hf_model(ids, attention_mask=mask).logits
    text = mask.bool()
    assert (logits - expected)[text].float().norm() / expected[text].norm() < {"bfloat16": 0.1, "float16": 0.01}[dtype]
    logits.float().square().mean().backward()
    gradients = [p.grad for p in hf_model.parameters() if p.grad is not None]
    assert len(gradients) > 10
    assert all(x.isfinite().all() for x in [logits, *gradients])


@of("hash")
def test_new_tokens_have_experts_and_known_ones_keep_theirs(exported, tmp_path):
    hf_model, _ = load(exported.folder, "AutoModelForCausalLM")
    ids = some_ids(exported.model, 2, 12)
    expected = hf_model(ids).logits
    hf_model.resize_token_embeddings(430)
    torch.testing.assert_close(hf_model(ids).logits[..., :420], expected)
    ids[0, 3] = 429
    hf_model.save_pretrained(tmp_path)
    again, _ = load(tmp_path, "AutoModelForCausalLM")
    assert torch.equal(again(ids).logits, hf_model(ids).logits)
    hf_model.to("meta").resize_token_embeddings(440, mean_resizing=False)
    assert all(x.is_meta for x in hf_model.buffers())  # they stay on the model's device


PADDED = [(name, side) for name in KINDS for side in ("left", "right")]
PADDED += [(name, "no mask") for name, (kind, _) in KINDS.items() if kind is GPT]


@pytest.mark.parametrize("exported, side", PADDED, indirect=["exported"])
def test_padding_changes_neither_values_nor_gradients(exported, side):
    """lm-eval pads a decoder's texts on the right, and passes no mask."""
    hf_model, ids = exported.hf_model, some_ids(exported.model, 2, 12)
    mask, text = torch.ones_like(ids), slice(5, None) if side == "left" else slice(7)
    padding = slice(5) if side == "left" else slice(7, None)
    ids[1, padding], mask[1, padding] = XLMR.pad, 0
    options = {} if side == "no mask" else {"attention_mask": mask}
    logits = hf_model(ids, **options).logits
    expected = our_logits(exported.model, ids[1:, text])[0]
    torch.testing.assert_close(logits[1, text], expected, rtol=1e-4, atol=1e-5)

    def gradients(*rows):
        hf_model.zero_grad()
        sum(row.float().square().sum() for row in rows).backward()
        return [p.grad.clone() for p in hf_model.parameters() if p.grad is not None]

    together = gradients(logits[0], logits[1, text])
    alone = gradients(hf_model(ids[:1]).logits[0], hf_model(ids[1:, text]).logits[0])
    assert len(together) == len(alone) > 10
    for a, b in zip(together, alone):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()) + 1e-6)


def test_labels_give_the_loss_of_each_row(exported):
    """In training, too, where experts have no capacity limit either."""
    hf_model, ids = exported.hf_model, some_ids(exported.model, 2, 12)
    hf_model.train()
    labels = ids % 2 if exported.kind is train_electra.Electra else ids.clone()
    labels[:, 6:] = -100
    output = hf_model(ids, labels=labels)
    logits, targets = output.logits, labels
    if exported.kind is GPT:
        logits, targets = logits[:, :-1], labels[:, 1:]
    torch.testing.assert_close(output.loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    output.loss.backward()
    alone = [hf_model(ids[i : i + 1], labels=labels[i : i + 1]).loss for i in range(2)]
    if exported.name != "base":  # in training, its assignment depends on all tokens of a batch
        torch.testing.assert_close(output.loss, sum(alone) / 2, rtol=1e-4, atol=1e-5)
    hf_model.eval()


def test_hidden_states_tuples_and_embeddings(exported):
    ids = some_ids(exported.model, 2, 12)
    body = exported.model if exported.kind is GPT else exported.model.encoder
    hf_models = [exported.hf_model]
    if exported.kind is not GPT:
        hf_models.append(load(exported.folder, "AutoModel")[0])
        with torch.no_grad(), body.no_limit():
            h, _ = body(ids)
        torch.testing.assert_close(hf_models[1](ids).last_hidden_state, h, rtol=1e-4, atol=1e-5)
    for hf_model in hf_models:
        assert torch.equal(hf_model.get_input_embeddings().weight, body.wte.weight)
        [first] = hf_model(ids, return_dict=False)
        output = hf_model(ids, output_hidden_states=True)
        hf_model.config.output_hidden_states = True
        assert torch.equal(hf_model(ids).hidden_states[1], output.hidden_states[1])
        hf_model.config.output_hidden_states = False
        assert torch.equal(first, output[0])
        assert hf_model(ids).hidden_states is None
        assert [x.shape for x in output.hidden_states] == [(2, 12, 32)] * 3
        if exported.kind is not GPT:
            torch.testing.assert_close(output.hidden_states[-1], h, rtol=1e-4, atol=1e-5)
        else:  # left padding, with any token id
            mask = torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)
            padded = [hf_model(ids * mask + pad * (1 - mask), mask, output_hidden_states=True) for pad in (1, 9)]
            short = hf_model(ids[:, 1:], output_hidden_states=True)
            for a, b, c in zip(*(output.hidden_states for output in padded), short.hidden_states):
                assert torch.equal(a[:, 1:], b[:, 1:])
                torch.testing.assert_close(a[:, 1:], c, rtol=1e-4, atol=1e-5)


@of("threshold", "topk", "hash", "base")
def test_generation_equals_ours(exported):
    """Beyond the context length, and with left padding."""
    hf_model, greedy = exported.hf_model, dict(do_sample=False, eos_token_id=None)
    prompt = torch.tensor([[exported.tokenizer.eot, *exported.tokenizer.encode_batch(["from"])[0]]])
    generated = hf_model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, **greedy)
    assert torch.equal(generated, exported.model.generate(prompt, 30, top_k=1))
    texts = ["from model import", "def"]
    batch = exported.hf_tokenizer(texts, padding=True, return_tensors="pt")
    assert batch["attention_mask"][1, 0] == 0
    together = hf_model.generate(**batch, max_new_tokens=8, pad_token_id=1, **greedy)
    row = exported.hf_tokenizer(texts[1], return_tensors="pt")
    alone = hf_model.generate(**row, max_new_tokens=8, pad_token_id=1, **greedy)
    assert torch.equal(together[1, -8:], alone[0, -8:])


def test_a_saved_export_loads_in_transformers_and_here(exported, tmp_path):
    exported.hf_model.save_pretrained(tmp_path)
    exported.hf_tokenizer.save_pretrained(tmp_path)
    hf_model, hf_tokenizer = load(tmp_path, AUTO[exported.kind])
    ids, text = some_ids(exported.model, 2, 12), LINES[30]
    assert torch.equal(hf_model(ids).logits, exported.hf_model(ids).logits)
    assert hf_tokenizer(text) == exported.hf_tokenizer(text)
    assert hf_tokenizer.padding_side == exported.hf_tokenizer.padding_side
    model, tokenizer = pretrained.load(exported.run)
    for folder in (exported.folder, tmp_path):
        loaded, _ = pretrained.load(folder)
        assert type(loaded) is type(model)
        torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert pretrained.load(exported.folder)[1].sha256 == tokenizer.sha256
    assert "Infinity" not in (exported.folder / "config.json").read_text()


@pytest.mark.parametrize("task, exported", [(t, n) for t, names in PIPELINES.items() for n in names],
                         indirect=["exported"])  # fmt: skip
def test_pipelines(exported, task):
    hf_tokenizer, hf_model, encode = exported.hf_tokenizer, exported.hf_model, exported.tokenizer.encode_batch
    if task == "feature-extraction":
        hf_model, _ = load(exported.folder, "AutoModel")
    run = transformers.pipeline(task, model=hf_model, tokenizer=hf_tokenizer)
    if task == "text-generation":
        [row] = run("from model", max_new_tokens=4, do_sample=False)
        assert row["generated_text"].startswith("from model")
        return
    text = f"from model {hf_tokenizer.mask_token} GPT, MaskedLM" if task == "fill-mask" else "from model import GPT"
    ids = torch.tensor(encode([text]))
    if task == "fill-mask":
        before, after = encode(text.split(hf_tokenizer.mask_token))
        ids = torch.tensor([[*before, exported.tokenizer.mask, *after]])
    ids = F.pad(F.pad(ids, (1, 0), value=XLMR.bos), (0, 1), value=XLMR.eos)
    if task == "feature-extraction":
        with torch.no_grad(), exported.model.encoder.no_limit():
            h, _ = exported.model.encoder(ids)
        torch.testing.assert_close(torch.tensor(run(text)), h, rtol=1e-3, atol=1e-4)
    elif task == "fill-mask":
        best = our_logits(exported.model, ids)[0, 1 + len(before)].softmax(dim=0).topk(5)
        assert [row["token"] for row in run(text)] == best.indices.tolist()
        assert [row["score"] for row in run(text)] == pytest.approx(best.values.tolist(), rel=1e-3)
    else:
        replaced = our_logits(exported.model, ids)[0, 1:-1, 1].sigmoid()
        rows = run(text, ignore_labels=[])
        assert [row["entity"] for row in rows] == ["replaced" if p > 0.5 else "original" for p in replaced]
        scores = torch.maximum(replaced, 1 - replaced).tolist()
        assert [row["score"] for row in rows] == pytest.approx(scores, rel=1e-3)
        assert (rows[0]["start"], rows[-1]["end"]) == (0, len(text))


@of("threshold", "hypersphere", "discriminator", "dense decoder")
def test_a_trainer_saves_and_resumes(exported, tmp_path):
    pytest.importorskip("accelerate")
    hf_tokenizer, auto, options = exported.hf_tokenizer, AUTO[exported.kind], {}
    collate = transformers.DataCollatorForLanguageModeling(hf_tokenizer, mlm=exported.kind is MaskedLM)
    rows = [hf_tokenizer(text, truncation=True) for text in LINES[:40] if text]
    assert max(len(row["input_ids"]) for row in rows) == hf_tokenizer.model_max_length == 24
    if exported.kind is train_electra.Electra:  # another task, with a new head
        collate = transformers.DataCollatorForTokenClassification(hf_tokenizer)
        rows = [row | {"labels": [token % 3 for token in row["input_ids"]]} for row in rows]
        options = dict(num_labels=3, ignore_mismatched_sizes=True)

    def trainer(folder, steps, **options):
        settings = dict(max_steps=steps, save_steps=3, per_device_train_batch_size=3, gradient_accumulation_steps=2)
        settings |= dict(use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, learning_rate=1e-3)
        args = transformers.TrainingArguments(str(tmp_path / "out"), **settings)
        model, _ = load(folder, auto, **options)
        return transformers.Trainer(model, args, collate, rows, processing_class=hf_tokenizer)

    first = trainer(exported.folder, 3, **options)
    first.train()
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    assert len(losses) == 3
    assert all(0.1 < loss < 20 for loss in losses)
    checkpoint = tmp_path / "out" / "checkpoint-3"
    loaded, loaded_tokenizer = load(checkpoint, auto)
    ids = some_ids(exported.model, 2, 12)
    assert torch.equal(loaded(ids).logits, first.model.eval()(ids).logits)
    assert loaded_tokenizer(LINES[30]) == hf_tokenizer(LINES[30])
    second = trainer(checkpoint, 5)
    second.train(resume_from_checkpoint=str(checkpoint))
    assert second.state.global_step == 5


@of("threshold")
def test_a_refused_export_says_why_in_one_line(exported, tmp_path):
    with pytest.raises(ValueError, match="is not empty"):
        export(exported.run, exported.folder)
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        export(tmp_path, tmp_path / "new")
    state = torch.load(exported.run / "ckpt.pt", weights_only=True) | {"class": "Translator"}
    write(tmp_path / "ckpt.pt", state)
    with pytest.raises(ValueError, match="holds a Translator: pass a run of"):
        export(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# --- The tokenizer

NORMALISED = dict(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True, add_dummy_prefix=True)
NORMALISED |= dict(user_defined_symbols=[])
TOKENIZERS = {
    "lossless": (SentencePiece, {}),
    "lossless, unknown pieces": (SentencePiece, dict(byte_fallback=False)),
    "lossy unigram": (SentencePiece, NORMALISED | dict(model_type="unigram", byte_fallback=False)),
    "xlmr": (XLMR, {}),
    "xlmr, joint": (XLMR, dict(model_type="bpe", split_by_unicode_script=False, split_by_number=False)),
    "xlmr, ciphers": (XLMR, VOCABULARY),
    "gpt2": (GPT2, {}),
}


def odd_texts(r: random.Random) -> list[str]:
    alphabet = [*"ab cde  \n\t\r.,(){}[]<>=-_'\"0123456789ABCéß中文かガ한ـ🙂\u200b\u00a0\u3000\u2581\x00\x01ﬁＡ½"]
    alphabet += ["e\u0301", "👩\u200d💻", "न\u093f"]
    texts = ["".join(r.choices(alphabet, k=r.randint(0, 40))) for _ in range(1500)]
    blocks = (0x20, 0x250), (0x370, 0x600), (0x1E00, 0x1F00), (0x2010, 0x2300), (0x3040, 0xD7A4), (0x1F300, 0x1F700)
    for _ in range(500):
        drawn = [chr(r.randrange(*r.choice(blocks))) for _ in range(20)]
        texts.append("".join(c for c in drawn if not unicodedata.combining(c)))
    return texts


@pytest.mark.parametrize("name", TOKENIZERS)
def test_token_ids_equal_ours(name, tmp_path, monkeypatch):
    from engine.hf_tokenizer import files_of

    kind, options = TOKENIZERS[name]
    r = random.Random(0)
    words = ["".join(r.choices("abcdefgh_.", k=r.randint(1, 7))) for _ in range(500)]
    words += [word + part for word in words for part in ("<0x41", "</s", ">")]
    training_texts = [" ".join(r.choices(words, k=12)) for _ in range(1000)]
    if kind is GPT2:
        ranks = made_up_ranks()
        monkeypatch.setattr(data.tokenizers, "GPT2_SHA256", hashlib.sha256(ranks).hexdigest())
        ours = GPT2(ranks)
    else:
        ours = train_sentencepiece(training_texts, 300, kind, **options)
    for file, content in files_of(ours, 24).items():
        write(tmp_path / file, content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    like_tokens = ["a<0x41>", "ab\uff1c/s\uff1e"]  # look like a byte and a special token, but are not
    special = "|".join(map(re.escape, theirs.all_special_tokens))
    texts = [text for text in like_tokens + odd_texts(r) + training_texts if not re.search(special, text)]
    assert len(theirs) == ours.vocab_size
    ids = ours.encode_batch(texts)
    assert theirs(texts, add_special_tokens=False)["input_ids"] == ids
    if "unknown" not in name and "lossy" not in name:
        decoded = theirs.batch_decode(ids[:200], skip_special_tokens=True)
        assert decoded == [ours.decode(row) for row in ids[:200]]

    inside = ours.encode_batch(["ab", "cd e"])
    begin, end = ([ours.bos], [ours.eos]) if kind is XLMR else ([], [])
    assert theirs("ab")["input_ids"] == [*begin, *inside[0], *end]
    assert theirs("ab", "cd e")["input_ids"] == [*begin, *inside[0], *end, *end, *inside[1], *end]
    assert [*theirs("ab")] == ["input_ids", "attention_mask"]
    truncated = theirs("ab " * 99, truncation=True)["input_ids"]
    assert truncated[: len(begin)] == begin
    assert len(truncated) == 24 == theirs.model_max_length
    mask = theirs(["ab " * 9, "ab"], padding=True)["attention_mask"][1]
    assert [mask[0], mask[-1]] == ([1, 0] if kind is XLMR else [0, 1])
    for token in theirs.all_special_tokens:
        row = theirs(f"ab{token}cd e", add_special_tokens=False)["input_ids"]
        assert row.count(theirs.convert_tokens_to_ids(token)) == 1
    if kind is XLMR:
        before, after = ours.encode_batch(["ab", " cd e"])
        row = theirs("ab <mask> cd e", add_special_tokens=False)["input_ids"]
        assert row == [*before, ours.mask, *after]
    for token in ("a word", "<99999999>", "<|endoftext|>"):
        i = theirs.convert_tokens_to_ids(token)
        assert i is None or 0 <= i < len(theirs)
    assert theirs.convert_tokens_to_ids(theirs.tokenize("cd e")) == inside[1]
    theirs.add_tokens(["<new>"])
    new = theirs.convert_tokens_to_ids("<new>")
    assert new == ours.vocab_size
    assert new in theirs("ab<new>")["input_ids"]
    assert theirs.decode([new]) == "<new>"
