"""train_electra.py: the paper's equations on tiny models, and the script run as a user runs it, on small languages.

What all training scripts share is tested in test_scripts.py and test_run.py.
"""

import dataclasses
import json
import math
from collections import Counter
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Script, lively, losses, metrics, result_of, saved, table_rows
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import train_electra
from data.batches import Masked, MaskedData, PairData
from data.prepare import prepare
from data.tokenizers import XLMR, train_sentencepiece
from engine.device import Context, setup
from engine.run import Run
from engine.table import mean_cell
from metrics import bilingual, counting, crosslingual, flops
from model import PAD, MaskedLM
from train_electra import Config, Electra, sample, score

ELECTRA = Script(train_electra)
TINY = dict(n_layer=2, n_head=2, n_embd=16, ffn_size=32, block_size=16, micro_tokens=128, batch_tokens=256, steps=4)
TINY |= dict(generator_layers=1, eval_every=2, eval_tokens=256, eval_maskings=2, log_every=1)
TINY |= dict(device="cpu", dtype="float32")
EXPERTS = dict(experts=4, expert_size=16, moe_after=(1,))
XLM = train_electra.XLM | dict(generator_layers=4)  # the default, since XLM does not read it
HERE = Context(0, 1, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def corpora(tmp_path_factory) -> dict[str, Path]:
    """Sentences in three languages with different letters, and pairs of them; `other` has another vocabulary."""
    base = tmp_path_factory.mktemp("languages")
    rng = np.random.default_rng(0)
    meanings = rng.integers(40, size=(700, 6))  # the same in every language
    lines = {}
    for language, letters in {"aa": "abcdefg", "bb": "hijklmnop", "en": "qrstuv"}.items():
        vocabulary = ["".join(rng.choice(list(letters), rng.integers(2, 6))) for _ in range(40)]
        lines[language] = [" ".join(vocabulary[x] for x in row[: 2 + i % 5]) for i, row in enumerate(meanings)]
    for folder in ("text", "bitext"):
        (base / folder).mkdir()
    for split, part in {"train": slice(0, 600), "valid": slice(600, 650), "test": slice(650, 700)}.items():
        for language, text in lines.items():
            texts = text[part][:: 5 if language == "aa" else 1]  # aa is a small language
            (base / "text" / f"{language}.{split}.txt").write_text("\n\n".join(texts))
        for language in ("aa", "bb"):
            for side in (language, "en"):
                (base / "bitext" / f"{language}-en.{split}.{side}").write_text("\n".join(lines[side][part]))
    texts = [text for language in lines.values() for text in language]
    spm = train_sentencepiece(texts, 300, XLMR).save(base / "text")
    other = train_sentencepiece(texts[::-1] + texts[:700], 300, XLMR).save(base / "bitext")  # of the same size
    return {
        "data": prepare("cc100", base / "text", tokenizer=spm, out=base / "data"),
        "pairs": prepare("bitext", base / "bitext", tokenizer=spm, out=base / "pairs"),
        "other": prepare("bitext", base / "bitext", tokenizer=other, out=base / "other"),
    }


@pytest.fixture
def options(corpora, tmp_path) -> dict:
    return TINY | {"data": corpora["data"], "pairs": corpora["pairs"], "out_dir": tmp_path / "out"}


def opened(options) -> tuple:
    """-> config, context, data, new model"""
    config = Config(**options)
    context = setup("cpu", config.dtype)
    data = train_electra.open_data(config, context)
    return config, context, data, train_electra.build(config, data, context)


# --- The equations


def small(**changes) -> Electra:
    config = Config(**TINY | changes)
    return lively((Electra if config.objective == "rtd" else MaskedLM)(config, V=50)).eval()


def small_batch() -> tuple:
    """A masked batch (49 is the mask), flat indices of its non-padding tokens, and the original ids (B, T)."""
    generator = torch.Generator().manual_seed(1)
    original = torch.full((3, 9), PAD)
    for row, length in zip(original, (9, 5, 7)):
        row[:length] = torch.randint(4, 49, (length,), generator=generator)
    nonpad = (original != PAD).flatten().nonzero().squeeze(1)
    masked = nonpad[torch.rand(len(nonpad), generator=generator) < 0.3]
    ids = original.flatten().index_fill(0, masked, 49).view_as(original)
    return Masked(ids, masked, original.flatten()[masked], nonpad, torch.zeros_like(masked)), nonpad, original


def test_losses_and_scores_match_literal_loops(monkeypatch):
    """Eqs. 1 to 5, token by token; their gradients, which reach every parameter; and the scores of an evaluation."""
    model, (batch, nonpad, original) = small(), small_batch()
    B, T = original.shape
    drawn = torch.where(torch.arange(len(batch.masked)) % 3 == 0, batch.targets, batch.targets.flip(0) - 1)
    monkeypatch.setattr(train_electra, "sample", lambda logits: drawn)
    mlm, _, rtd = model(*batch[:4])

    corrupt, right = original.clone(), 0
    for index, token in zip(batch.masked.tolist(), drawn.tolist()):  # eq. 2
        corrupt[index // T, index % T] = token
    hidden, slow_mlm = model.generator.encoder(batch.ids, nonpad)[0], 0
    for index in batch.masked.tolist():  # eq. 1
        x = model.generator.ln_h(F.gelu(model.generator.dense(hidden[index // T, index % T])))
        x = x @ model.encoder.wte.weight.t() + model.generator.bias
        token = original[index // T, index % T]
        slow_mlm = slow_mlm - (x.exp() / x.exp().sum()).log()[token] / len(batch.masked)
        right += int(x.argmax() == token)
    hidden, slow_rtd, predicted, replaced = model.encoder(corrupt, nonpad)[0], 0, [], []
    for index in nonpad.tolist():  # eq. 3
        replaced.append(bool(corrupt[index // T, index % T] != original[index // T, index % T]))
        z = model.out(model.ln_h(F.gelu(model.dense(hidden[index // T, index % T]))))[0]
        p = 1 / (1 + torch.exp(-z))  # the probability that it was replaced
        slow_rtd = slow_rtd - torch.log(p if replaced[-1] else 1 - p) / len(nonpad)
        predicted.append(bool(p > 0.5))
    assert 0 < sum(replaced) < len(batch.masked)
    assert 0 < sum(predicted) < len(nonpad)
    torch.testing.assert_close((mlm, rtd), (slow_mlm, slow_rtd))
    parameters = list(model.parameters())
    fast = torch.autograd.grad(mlm + 50 * rtd, parameters)
    torch.testing.assert_close(fast, torch.autograd.grad(slow_mlm + 50 * slow_rtd, parameters))
    assert all(g.abs().max() > 0 for g in fast)

    config, special = Config(**TINY), (49, PAD, *range(4, 12))
    scores = score(model, [(0, 0, batch)], special, config, HERE)
    expected = dict(mlm=float(mlm), rtd=float(rtd), masked=len(batch.masked), tokens=len(nonpad))
    expected |= dict(generator=right / len(batch.masked), replaced=sum(replaced) / len(nonpad))
    expected |= dict(accuracy=fmean(a == b for a, b in zip(predicted, replaced)))
    masked, tokens = batch.masked.tolist(), original.flatten().tolist()
    maskable = [index in masked or tokens[index] not in special for index in nonpad.tolist()]
    assert not all(maskable)
    share = sum(replaced) / sum(maskable)
    guesses = [share if label else 1 - share for label, unsure in zip(replaced, maskable) if unsure]
    blind = -sum(map(math.log, guesses)) / len(nonpad)
    expected |= dict(saved=1 - float(rtd) / blind)
    assert scores == pytest.approx(expected)


def test_samples_follow_the_softmax_in_fp32_even_of_bf16_logits():
    torch.manual_seed(0)
    logits = torch.tensor([2.0, -1.0, 0.5, -math.inf, 0.0])
    counts = torch.bincount(sample(logits.expand(200_000, 5)), minlength=5)
    expected = 200_000 * logits.softmax(dim=0)
    assert counts[3] == 0
    chi_square = ((counts - expected) ** 2 / expected)[[0, 1, 2, 4]].sum()
    assert chi_square < 16.3  # 99.9% of the time, with 3 degrees of freedom
    # In bf16, noise near 8 has steps of 1/16: rare tokens would come too often or never.
    drawn = sample(torch.zeros(2_000, 1000, dtype=torch.bfloat16))
    assert drawn.dtype == torch.int64
    assert (drawn[:-1] == drawn[1:]).float().mean() < 0.01
    assert torch.bincount(drawn).max() <= 12  # the mean is 2
    assert sample(torch.full((3, 5), math.nan)).shape == (3,)  # a NaN must reach the loss, which reports it


def test_a_sampled_pad_token_does_not_count_as_padding(monkeypatch):
    """A row's predictions do not depend on longer rows in its batch, even if the generator sampled <pad> in it."""
    model, (batch, nonpad, original) = small(), small_batch()
    monkeypatch.setattr(train_electra, "sample", lambda logits: torch.full((len(logits),), PAD))
    together = model.predict(*batch[:4])
    row, T, length = 1, original.shape[1], 5
    masked_in_row, tokens_of_row = batch.masked // T == row, nonpad // T == row
    assert masked_in_row.any()
    masked = batch.masked[masked_in_row] - row * T
    alone = model.predict(batch.ids[[row], :length], masked, batch.targets[masked_in_row])
    torch.testing.assert_close(together[2][tokens_of_row], alone[2])
    assert torch.equal(together[3][tokens_of_row], alone[3])


def test_networks_share_embeddings_but_not_experts():
    model = small(router="topk", top_k=2, **EXPERTS)
    discriminator, generator = (dict(part.named_parameters()) for part in (model.encoder, model.generator.encoder))
    shared = {name for name in generator if generator[name] is discriminator.get(name)}
    assert shared == {"wte.weight", "wpe.weight", "rel_bias.table.weight"}
    assert len(model.moe_layers) == 1
    assert not model.generator.moe_layers
    _, balance, _ = model(*small_batch()[0][:4])
    assert balance > 0
    for changes, gates in (({}, 3), ({"relative_bias": False}, 0), (XLM, 0)):  # gates of 1 + 2 layers, or none
        names = [name for name, _ in small(**changes).named_parameters()]
        assert sum(name.endswith("gate") for name in names) == gates


def test_a_training_step_never_waits_for_the_device():
    """Fake tensors have no values, so reading one on the host raises."""
    batch = small_batch()[0]
    context = Context(0, 1, torch.device("cpu"), torch.bfloat16)
    with FakeTensorMode() as mode:
        batch = Masked(*(mode.from_tensor(x) for x in batch))
        model = Electra(Config(**TINY), V=50)
        with context.autocast():
            losses = model(*batch[:4])
        sum(losses).backward()


@pytest.mark.parametrize("changes", [{}, {"tlm": False}, XLM], ids=["XLM-E", "sentences only", "XLM"])
def test_flops_of_a_step_match_those_that_torch_counts(changes, options):
    """On full rows, with exactly the given share of masked tokens."""
    config, _, _, model = opened(options | changes)
    ids = torch.randint(4, 300, (config.batch_tokens // config.block_size, config.block_size))
    masked = torch.arange(round(config.mask_share * ids.numel()))
    batch = Masked(ids, masked, ids.flatten()[masked], None, masked)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the only one it counts on a CPU
        for _ in range(1 + config.tlm):
            mlm, _, *rtd = model(*batch[:4])
            (mlm + sum(rtd)).backward()
    assert counter.get_total_flops() == pytest.approx(train_electra.step_flops(model), rel=0.02)


# --- The script


ROWS = {
    "XLM-E": {},
    "sentences only, no bias": {"tlm": False, "relative_bias": False, "lambda_disc": 3.0},
    "XLM": XLM,
    "MLM": XLM | {"tlm": False},
    "X-MoE discriminator": {"router": "hypersphere", **EXPERTS},
    "threshold discriminator": {"router": "threshold", "threshold": 0.4, **EXPERTS},
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_trains_and_reports(row, options, monkeypatch, capsys):
    if "tlm" in ROWS[row]:
        monkeypatch.setattr(PairData, "batch", None)  # training on pairs would fail
    ELECTRA.run(options | ROWS[row], monkeypatch)
    out, result, records = capsys.readouterr().out, result_of(options["out_dir"]), metrics(options["out_dir"])
    rtd, sparse = ROWS[row].get("objective") != "mlm", "router" in ROWS[row]
    assert [record["step"] for record in records] == [2, 4]
    config, context, data, model = opened(options | ROWS[row] | {"masks": "all"})  # evaluation always shows the mask
    untrained = bilingual.retrieval(model.eval().encoder, data["pairs"], config, context)["centred"]
    first, last = (record["held_out"] for record in records)
    assert result["held_out"] == last
    for held_out in (first, last):
        assert [*held_out["layers"][0]["losses"]] == ["balance"] if sparse else not held_out["layers"]
        loss = 0.0
        for scores in (held_out["sentences"], held_out["pairs"]):
            loss += scores["mlm"] + config.lambda_disc * scores.get("rtd", 0)
            assert 0 < scores["masked"] <= 0.5 * scores["tokens"]
            assert ("saved" in scores) == rtd
            if rtd:
                assert 0 < scores["replaced"] * scores["tokens"] <= scores["masked"]
        assert held_out["loss"] == pytest.approx(loss)
        assert held_out["untrained"] == pytest.approx(untrained)
        assert len(held_out["layers"]) == sparse
        assert len(held_out["retrieval"]) == 3
        assert 0 < held_out["chance"] < 0.2
    for kind in ("sentences", "pairs"):  # the last evaluation has two maskings, the first has one
        assert last[kind]["tokens"] == 2 * first[kind]["tokens"]
        assert last[kind]["masked"] > 1.5 * first[kind]["masked"]
    assert (result["parameters"]["without_generator"] < result["parameters"]["total"]) == rtd
    assert records[0]["flops"] * 2 == records[1]["flops"] == result["flops"]
    batches = 3 * config.steps * (1 + config.tlm) * config.batch_tokens  # of sentences, and of pairs
    difference = flops.as_served(model, 0.0, last["layers"])
    assert (difference < 0) == (row == "threshold discriminator")  # the other tokens get all their experts
    assert result["flops_served"] == pytest.approx(result["flops"] + batches * difference)
    sentences, pairs = (corpus.checksum for corpus in data.values())
    assert sentences != pairs
    assert saved(options)["identity"]["data_checksum"] == f"{sentences}+{pairs}"
    counted = counting.masked_scores(data["sentences"], 256)
    assert result["counting"] == counted
    assert out.count(counting.in_words(counted)) == 2  # before training and in the report
    assert ("sparse layer 1: " in out) == sparse
    scores, line = last["pairs"], out[out.rindex("held-out pairs: ") :].splitlines()[0]
    assert f"perplexity {math.exp(scores['mlm']):.2f}, {scores['generator']:.1%} right" in line
    assert ("generator" in line) == rtd
    assert ("above a blind" in line) == (scores.get("saved", 0) < 0)


def without_masked_tokens(data, *where, old=MaskedData.batch):
    batch = old(data, *where)
    return batch._replace(masked=batch.masked[:0], targets=batch.targets[:0], language=batch.language[:0])


def test_a_step_without_masked_tokens_trains_the_discriminator_alone(options, monkeypatch):
    monkeypatch.setattr(MaskedData, "batch", without_masked_tokens)
    ELECTRA.run(options | {"tlm": False}, monkeypatch)
    assert all(0 < loss < math.log(2) + 0.1 for loss in losses(options["out_dir"]))


def test_retrieval_is_averaged_over_language_pairs(options):
    options |= {"dtype": "float64", "block_size": 12, "micro_tokens": 120, "batch_tokens": 240}
    config, context, data, model = opened(options)
    encoder, pairs = model.encoder.eval(), data["pairs"]
    plain, centred = [], []
    for languages in ("aa-en", "bb-en"):
        sides = [[], []]
        for pair in list(zip(*pairs.texts("valid", languages)))[:20]:
            for side, text in zip(sides, pairs.tokenizer.encode_batch(list(pair))):
                states = []
                encoder(torch.tensor([[pairs.tokenizer.bos, *text[:10], pairs.tokenizer.eos]]), None, states)
                side.append(torch.stack([F.normalize(state[0].mean(dim=0), dim=0) for state in states]))
        sides = [torch.stack(side, dim=1) for side in sides]  # (L + 1, n, D)
        plain.append(crosslingual.both_directions(*sides).mean(dim=0))
        shifted = [side - side.sum(dim=1, keepdim=True) / side.shape[1] for side in sides]
        shifted = [x / x.norm(dim=2, keepdim=True) for x in shifted]
        centred.append(crosslingual.both_directions(*shifted).mean(dim=0))
    scores = bilingual.retrieval(encoder, pairs, config, context, most=20)
    assert scores["retrieval"] == pytest.approx(torch.stack(plain).mean(dim=0).tolist())
    assert max(scores["retrieval"]) > 0
    assert scores["chance"] == pytest.approx(1 / 20)
    assert scores["centred"] == pytest.approx(torch.stack(centred).mean(dim=0).tolist())


def test_the_report_says_since_when_translations_help(options, monkeypatch, capsys):
    """They first add more than two points at the second evaluation, and not at every one after it."""
    accuracies = iter([(0.31, 0.30), (0.35, 0.30), (0.30, 0.30), (0.34, 0.30)])

    def effect(*_):
        return dict(zip(("with", "without"), next(accuracies)))

    monkeypatch.setattr(bilingual, "translation_effect", effect)
    ELECTRA.run(options | {"steps": 8}, monkeypatch)
    assert result_of(options["out_dir"])["since_step"] == 4
    out = capsys.readouterr().out
    assert "translations help since step 4" in out
    assert "in the end they raise the accuracy on masked tokens by 4.0 points" in out
    result = result_of(options["out_dir"]) | {"since_step": None}
    assert train_electra.report(Config(), result).endswith("\ntranslations do not help yet: increase --steps")


@pytest.mark.parametrize("masks, share", {"all": (1, 0), "bert": (0.8, 0.1), "electra": (0.85, 0)}.items())
def test_masks_apply_to_training_only(masks, share, options, monkeypatch):
    """Evaluation shows the mask in place of every masked token; the other constants of masking apply to both."""
    options |= {"masks": masks, "steps": 1, "mask_share": 0.25, "sampling_exponent": 0.3}
    for corpus in opened(options)[2].values():
        assert (corpus.replace, corpus.mask_share, corpus.exponent) == (share, 0.25, 0.3)
    in_training, in_evaluation, work = set(), set(), []

    def batch(corpus, *where, old=PairData.batch):
        in_training.add(corpus.replace)
        return old(corpus, *where)

    def evaluate(model, data, *rest, old=train_electra.evaluate):
        in_evaluation.update(corpus.replace for corpus in data.values())
        return old(model, data, *rest)

    def add(run, loss, tokens, old=Run.add):
        work.append(3 * tokens * run.flops_per_token)
        old(run, loss, tokens)

    monkeypatch.setattr(PairData, "batch", batch)
    monkeypatch.setattr(Run, "add", add)
    monkeypatch.setattr(train_electra, "evaluate", evaluate)
    ELECTRA.run(options, monkeypatch)
    assert sum(work) == pytest.approx(result_of(options["out_dir"])["flops"])  # TFLOP/s count every token
    assert in_training == {share}
    assert in_evaluation == {(1, 0)}


@pytest.mark.parametrize("limit, size", {math.inf: 4096, 1.0: TINY["micro_tokens"]}.items())
def test_held_out_batches_are_larger_without_a_capacity_limit(limit, size, options, monkeypatch):
    options |= EXPERTS | {"router": "topk", "capacity_factor": limit}
    monkeypatch.setattr(train_electra, "evaluate", lambda _, data, *more: pytest.fail(f"{data['pairs'].micro_tokens}"))
    with pytest.raises(pytest.fail.Exception, match=f"^{size}$"):
        ELECTRA.run(options, monkeypatch)


# Tokens in the vocabulary of each preset's corpora.
VOCABULARY = {"demo": 517, "captions": 4098, "base": 250_002, "large": 1 << 19, "xl": 1 << 19}


def training_flops(config: Config) -> float:
    """Of all steps, as a run counts them."""
    network = Electra if config.objective == "rtd" else MaskedLM
    with torch.device("meta"):
        model = network(config, VOCABULARY[config.preset])
    return config.steps * train_electra.step_flops(model)


@pytest.mark.parametrize("preset", train_electra.PRESETS)
def test_xlm_with_more_steps_has_the_flops_of_xlm_e(preset):
    base = Config(**{"preset": preset} | train_electra.PRESETS[preset])
    rows = {label: change for (label, _), change in train_electra.table2(base).rows}
    more = f"{train_electra.XLM_STEPS[preset]:.2f} x the steps"
    for label in (f"XLM, {more}", f"XLM with the bias, {more}"):
        xlm = dataclasses.replace(base, **rows[label])
        assert xlm.objective == "mlm"
        assert training_flops(xlm) == pytest.approx(training_flops(base), rel=1e-3)


def test_table_2_has_every_row(options, monkeypatch, capsys):
    options |= {"table": 2, "steps": 2, "eval_tokens": 64, "eval_maskings": 1}
    ELECTRA.run(options, monkeypatch)
    rows = {row[0]: row for row in table_rows(capsys.readouterr().out.split("\n\n")[-1])}
    longer = ["XLM, 1.95 x the steps", "XLM with the bias, 1.95 x the steps"]
    with_pairs = ["XLM-E", "XLM-E - bias", "XLM-E, masks as ELECTRA's"]
    without_pairs = ["XLM-E - TRTD, masks as ELECTRA's", "XLM-E - TRTD, 2 x the steps", "XLM-E - TRTD - bias"]
    assert list(rows) == ["XLM", *longer, "XLM - TLM", *with_pairs, *without_pairs]
    assert [bool(row[6]) for row in rows.values()] == [False] * 4 + [True] * 6  # loss saved
    work = {label: row[3] for label, row in rows.items()}
    assert work["XLM-E - TRTD, 2 x the steps"] == work["XLM-E"]
    assert work["XLM-E - TRTD, masks as ELECTRA's"] != work["XLM-E"]
    results = [json.loads(path.read_text()) for path in options["out_dir"].glob("*/result.json")]
    assert sorted(result["config"]["steps"] for result in results) == [2, 2, 2, 2, 2, 2, 2, 4, 4, 4]
    constants = {"objective": "rtd", "tlm": True, "relative_bias": True, "masks": "all"}
    (result,) = [result for result in results if constants.items() <= result["config"].items()]
    assert rows["XLM-E"][2] == f"{result['parameters']['without_generator'] / 1e6:.1f}"
    assert rows["XLM-E"][2:] == [mean_cell([cell]) for cell in train_electra.cells(result).values()]


def test_corpora_that_do_not_match_are_refused(options, corpora, monkeypatch, capsys):
    for changes, message in (
        ({"pairs": corpora["other"]}, "different tokenizers: prepare both with the same --tokenizer"),
        ({"data": corpora["pairs"]}, "a corpus of pairs; MaskedData reads"),
        ({"pairs": corpora["data"]}, "of languages; PairData reads"),
    ):
        assert message in ELECTRA.refused(options | changes, monkeypatch, capsys)


def test_the_effect_of_translations_equals_a_count_over_masked_tokens(options):
    """On the same masked tokens of each half, with the other half shown and without it, over maskings and batches."""
    config, context, data, model = opened(options | {"micro_tokens": 64, "batch_tokens": 64})
    split, generator = ("valid", 2, config.eval_tokens), model.generator.eval()
    right, targets, firsts = Counter(), {True: [], False: []}, set()  # by whether the translation is shown
    with torch.no_grad():
        for p in generator.parameters():
            p += 0.5 * torch.randn_like(p)  # so that guesses differ, and some are right
        for half, translated in product((0, 1), (True, False)):
            shown = (0, 1) if translated else (half,)
            for _, first, batch in data["pairs"].eval_batches(*split, masked=(half,), shown=shown):
                guesses = generator(batch.ids, batch.masked, nonpad=batch.nonpad)[0].argmax(dim=1)
                right[translated] += (guesses == batch.targets).sum().item()
                targets[translated] += batch.targets.tolist()
                firsts.add(first)
    assert len(firsts) > 2
    assert targets[True] == targets[False]
    scores = bilingual.translation_effect(generator, data["pairs"], config, context, maskings=2)
    assert scores["with"] == right[True] / len(targets[True])
    assert scores["without"] == right[False] / len(targets[True])
    assert 0 < scores["with"] != scores["without"] > 0
