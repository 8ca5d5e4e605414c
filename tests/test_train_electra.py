"""`train_electra.py`: its equations on tiny models, and the script as a user runs it, on three small languages.

What all scripts share is tested in test_run.py.
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
from helpers import Script, lively, metrics, result_of, saved, table_rows
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import train_electra
from data.batches import Masked, PairData
from data.prepare import prepare
from data.tokenizers import XLMR, train_sentencepiece
from engine.device import Context, setup
from engine.table import mean_cell
from metrics import bilingual, counting, crosslingual
from metrics.bilingual import bootstrap
from model import PAD, MaskedLM
from train_electra import Config, Electra, sample, score

ELECTRA = Script(train_electra)
TINY = dict(n_layer=2, n_head=2, n_embd=16, ffn_size=32, block_size=16, micro_tokens=128, batch_tokens=256, steps=4)
TINY |= dict(generator_layers=1, eval_every=2, eval_tokens=256, eval_maskings=2, log_every=1)
TINY |= dict(device="cpu", dtype="float32")
EXPERTS = dict(experts=4, expert_size=16, moe_after=(1,))
XLM = train_electra.XLM | dict(generator_layers=4)  # the last is its default: nothing reads it
HERE = Context(0, 1, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def corpora(tmp_path_factory) -> dict[str, Path]:
    """Sentences in three languages, which have letters of their own, and pairs of them; `other`: another vocabulary."""
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
            some = text[part][:: 5 if language == "aa" else 1]  # a small language
            (base / "text" / f"{language}.{split}.txt").write_text("\n\n".join(some))
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
    """What a run of these options has before its first step."""
    config = Config(**options)
    context = setup("cpu", config.dtype)
    data = train_electra.open_data(config, context)
    return config, context, data, train_electra.build(config, data, context)


# ---------------------------------------------------------------------------------------------------------------------
# The equations


def small(**changes) -> Electra:
    config = Config(**TINY | changes)
    return lively((Electra if config.objective == "rtd" else MaskedLM)(config, V=50)).eval()


def small_batch() -> tuple:
    """A batch under masks (49), the places of what is not padding, and the original ids (B, T)."""
    generator = torch.Generator().manual_seed(1)
    original = torch.full((3, 9), PAD)
    for row, length in zip(original, (9, 5, 7)):
        row[:length] = torch.randint(4, 49, (length,), generator=generator)
    nonpad = (original != PAD).flatten().nonzero().squeeze(1)
    masked = nonpad[torch.rand(len(nonpad), generator=generator) < 0.3]
    ids = original.flatten().index_fill(0, masked, 49).view_as(original)
    return Masked(ids, masked, original.flatten()[masked], nonpad, torch.zeros_like(masked)), nonpad, original


def test_losses_are_the_papers_equations(monkeypatch):
    """Eqs. 1 to 5, a token at a time; their gradients, which reach every parameter; and what is counted."""
    model, (batch, nonpad, original) = small(), small_batch()
    B, T = original.shape
    drawn = torch.where(torch.arange(len(batch.masked)) % 3 == 0, batch.targets, batch.targets.flip(0) - 1)
    monkeypatch.setattr(train_electra, "sample", lambda logits: drawn)
    mlm, _, rtd = model(*batch[:4])

    corrupt, guessed = original.clone(), 0
    for place, token in zip(batch.masked.tolist(), drawn.tolist()):  # eq. 2
        corrupt[place // T, place % T] = token
    hidden, slow_mlm = model.generator.encoder(batch.ids, nonpad)[0], 0
    for place in batch.masked.tolist():  # eq. 1
        x = model.generator.ln_h(F.gelu(model.generator.dense(hidden[place // T, place % T])))
        x = x @ model.encoder.wte.weight.t() + model.generator.bias
        token = original[place // T, place % T]
        slow_mlm = slow_mlm - (x.exp() / x.exp().sum()).log()[token] / len(batch.masked)
        guessed += int(x.argmax() == token)
    hidden, slow_rtd, called, truth = model.encoder(corrupt, nonpad)[0], 0, [], []
    for place in nonpad.tolist():  # eq. 3
        replaced = bool(corrupt[place // T, place % T] != original[place // T, place % T])
        z = model.out(model.ln_h(F.gelu(model.dense(hidden[place // T, place % T]))))[0]
        p = 1 / (1 + torch.exp(-z))  # that it was replaced
        slow_rtd = slow_rtd - torch.log(p if replaced else 1 - p) / len(nonpad)
        called.append(bool(p > 0.5))
        truth.append(replaced)
    assert 0 < sum(truth) < len(batch.masked) and 0 < sum(called) < len(nonpad)
    torch.testing.assert_close((mlm, rtd), (slow_mlm, slow_rtd))
    parameters = list(model.parameters())
    fast = torch.autograd.grad(mlm + 50 * rtd, parameters)
    torch.testing.assert_close(fast, torch.autograd.grad(slow_mlm + 50 * slow_rtd, parameters))
    assert all(g.abs().max() > 0 for g in fast)

    config, special = Config(**TINY), (49, *range(4, 12))
    scores = score(model, [(0, 0, batch)], special, config, HERE)
    expected = dict(mlm=float(mlm), rtd=float(rtd), masked=len(batch.masked), tokens=len(nonpad), balance=0)
    expected |= dict(generator=guessed / len(batch.masked), replaced=sum(truth) / len(nonpad))
    expected |= dict(accuracy=fmean(a == b for a, b in zip(called, truth)))
    masked, tokens = batch.masked.tolist(), original.flatten().tolist()
    certain = [place not in masked and tokens[place] in special for place in nonpad.tolist()]  # to be original
    share = sum(truth) / certain.count(False)
    blind = -sum(math.log(share if was else 1 - share) for was, sure in zip(truth, certain) if not sure) / len(truth)
    expected |= dict(saved=1 - float(rtd) / blind)
    assert scores == pytest.approx(expected) and any(certain)


def test_samples_follow_the_softmax_in_fp32_even_where_logits_are_not():
    torch.manual_seed(0)
    logits = torch.tensor([2.0, -1.0, 0.5, -math.inf, 0.0])
    counts = torch.bincount(sample(logits.expand(200_000, 5)), minlength=5)
    expected = 200_000 * logits.softmax(dim=0)
    assert counts[3] == 0
    chi_square = ((counts - expected) ** 2 / expected)[[0, 1, 2, 4]].sum()
    assert chi_square < 16.3  # 99.9% of the time, with 3 degrees of freedom
    # In bf16, noise near 8 has steps of 1/16: rare tokens would come too often or never.
    drawn = sample(torch.zeros(2_000, 1000, dtype=torch.bfloat16))
    assert drawn.dtype == torch.int64 and (drawn[:-1] == drawn[1:]).float().mean() < 0.01
    assert torch.bincount(drawn).max() <= 12  # of a mean of 2
    assert sample(torch.full((3, 5), math.nan)).shape == (3,)  # a NaN must reach the loss, which reports it


def test_padding_that_the_generator_draws_is_a_token_like_any_other(monkeypatch):
    """A row's answers do not change when it stands beside a longer one, even with a drawn <pad> inside."""
    model, (batch, nonpad, original) = small(), small_batch()
    monkeypatch.setattr(train_electra, "sample", lambda logits: torch.full((len(logits),), PAD))
    together = model.predict(*batch[:4])
    row, T, length = 1, original.shape[1], 5
    own, place = batch.masked // T == row, nonpad // T == row
    alone = model.predict(batch.ids[[row], :length], batch.masked[own] - row * T, batch.targets[own])
    torch.testing.assert_close(together[2][place], alone[2])
    assert own.any() and torch.equal(together[3][place], alone[3])


def test_networks_share_embeddings_and_no_experts():
    model = small(router="topk", top_k=2, **EXPERTS)
    ours, theirs = dict(model.encoder.named_parameters()), dict(model.generator.encoder.named_parameters())
    shared = {name for name in theirs if theirs[name] is ours.get(name)}
    assert shared == {"wte.weight", "wpe.weight", "rel_bias.table.weight"}
    assert len(model.moe_layers) == 1 and not model.generator.moe_layers
    _, balance, _ = model(*small_batch()[0][:4])
    assert balance > 0
    for given, gates in (({}, 3), ({"relative_bias": False}, 0), (XLM, 0)):  # in both networks, or in none
        names = [name for name, _ in small(**given).named_parameters()]
        assert sum(name.endswith("gate") for name in names) == gates


def test_a_step_asks_the_device_nothing():
    """On tensors without values, whatever the host would read raises."""
    batch = small_batch()[0]
    context = Context(0, 1, torch.device("cpu"), torch.bfloat16)
    with FakeTensorMode() as mode:
        batch = Masked(*(mode.from_tensor(x) for x in batch))
        model = Electra(Config(**TINY), V=50)
        with context.autocast():
            losses = model(*batch[:4])
        sum(losses).backward()


@pytest.mark.parametrize("given", [{}, {"tlm": False}, XLM], ids=["XLM-E", "sentences alone", "XLM"])
def test_products_are_those_that_torch_counts(given, options):
    """All rows full, and as many masked tokens as the share says."""
    config, _, _, model = opened(options | given)
    ids = torch.randint(4, 300, (config.batch_tokens // config.block_size, config.block_size))
    masked = torch.arange(round(config.mask_share * ids.numel()))
    batch = Masked(ids, masked, ids.flatten()[masked], None, masked)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # it knows no other on a CPU
        for _ in range(1 + config.tlm):
            mlm, _, *rtd = model(*batch[:4])
            (mlm + sum(rtd)).backward()
    assert counter.get_total_flops() == pytest.approx(train_electra.step_flops(model), rel=0.02)


# ---------------------------------------------------------------------------------------------------------------------
# The script


ROWS = {
    "XLM-E": {},
    "sentences alone, no gate": {"tlm": False, "relative_bias": False},
    "XLM": XLM,
    "MLM": XLM | {"tlm": False},
    "X-MoE discriminator": {"router": "hypersphere", **EXPERTS},
    "threshold discriminator, spans": {"router": "threshold", "span": 3.0, **EXPERTS},
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_trains_and_reports(row, options, monkeypatch, capsys):
    if "tlm" in ROWS[row]:
        monkeypatch.setattr(PairData, "batch", None)  # whoever trains on pairs now fails
    ELECTRA.run(options | ROWS[row], monkeypatch)
    out, result, records = capsys.readouterr().out, result_of(options["out_dir"]), metrics(options["out_dir"])
    rtd, sparse = ROWS[row].get("objective") != "mlm", "router" in ROWS[row]
    assert [record["step"] for record in records] == [2, 4]
    config, context, data, model = opened(options | ROWS[row] | {"masks": "all"})  # as evaluation has them
    untrained = bilingual.retrieval(model.eval().encoder, data["pairs"], config, context)["centred"]
    for held_out in (records[0]["held_out"], result["held_out"]):
        both = held_out["sentences"], held_out["pairs"]
        for scores in both:
            assert (scores["balance"] > 0) == sparse and 0 < scores["masked"] <= 0.5 * scores["tokens"]
            assert ("saved" in scores) == rtd
            assert not rtd or 0 < scores["replaced"] * scores["tokens"] <= scores["masked"]
        losses = [own["mlm"] + Config.lambda_disc * own.get("rtd", 0) for own in both]
        assert held_out["loss"] == pytest.approx(sum(losses)) and held_out["untrained"] == pytest.approx(untrained)
        assert len(held_out["layers"]) == sparse and len(held_out["retrieval"]) == 3 and 0 < held_out["chance"] < 0.2
    assert result["held_out"] == records[1]["held_out"]
    for kind in ("sentences", "pairs"):  # two maskings in the end, one on the way
        ours, theirs = result["held_out"][kind], records[0]["held_out"][kind]
        assert ours["tokens"] == 2 * theirs["tokens"] and ours["masked"] > 1.5 * theirs["masked"]
    assert (result["parameters"]["without_generator"] < result["parameters"]["total"]) == rtd
    assert records[0]["flops"] * 2 == records[1]["flops"] == result["flops"]
    checksums = [corpus.checksum for corpus in data.values()]  # neither may change under it
    assert saved(options)["identity"]["data_checksum"] == "+".join(checksums) and len(set(checksums)) == 2
    counted = counting.masked_scores(data["sentences"], 256)
    assert result["counting"] == counted and out.count(counting.in_words(counted)) == 2  # before training, and after
    assert ("sparse layer 1: " in out) == sparse
    last, own = out[out.rindex("held-out pairs: ") :].splitlines()[0], result["held_out"]["pairs"]
    assert f"perplexity {math.exp(own['mlm']):.2f}, {own['generator']:.1%} right" in last
    assert ("generator" in last) == rtd and ("above a blind" in last) == (own.get("saved", 0) < 0)


def test_retrieval_is_the_mean_over_language_pairs(options):
    options |= {"dtype": "float64", "block_size": 12, "micro_tokens": 120, "batch_tokens": 240}
    config, context, data, model = opened(options)
    encoder, pairs = model.encoder.eval(), data["pairs"]
    found, centred = [], []
    for languages in ("aa-en", "bb-en"):
        sides = [[], []]
        for pair in list(zip(*pairs.texts("valid", languages)))[:20]:
            for side, text in zip(sides, pairs.tokenizer.encode_batch(list(pair))):
                states = []
                encoder(torch.tensor([[pairs.tokenizer.bos, *text[:10], pairs.tokenizer.eos]]), None, states)
                side.append(torch.stack([F.normalize(state[0].mean(dim=0), dim=0) for state in states]))
        sides = [torch.stack(side, dim=1) for side in sides]  # (L + 1, n, D)
        found.append(crosslingual.retrieval(*sides))
        shifted = [side - side.sum(dim=1, keepdim=True) / side.shape[1] for side in sides]
        centred.append(crosslingual.retrieval(*(x / x.norm(dim=2, keepdim=True) for x in shifted)))
    scores = bilingual.retrieval(encoder, pairs, config, context, most=20)
    assert scores["retrieval"] == pytest.approx(torch.stack(found).mean(dim=0).tolist())
    assert scores["chance"] == pytest.approx(1 / 20) and max(scores["retrieval"]) > 0
    assert scores["centred"] == pytest.approx(torch.stack(centred).mean(dim=0).tolist())


def test_the_end_says_since_when_a_translation_helps(options, monkeypatch, capsys):
    """At the second evaluation it adds two points for the first time, and at the third it does no longer."""
    shares = iter([(0.31, 0.30), (0.35, 0.30), (0.30, 0.30)])

    def effect(*_):
        beside, alone = next(shares)
        return {"with": beside, "without": alone, "effect": [0.0, 0.1]}

    monkeypatch.setattr(bilingual, "translation_effect", effect)
    ELECTRA.run(options | {"steps": 6}, monkeypatch)
    assert result_of(options["out_dir"])["since_step"] == 4
    out = capsys.readouterr().out
    assert "translations help since step 4; in the end they raise the accuracy on masked tokens by 0.0 points" in out
    result = result_of(options["out_dir"]) | {"since_step": None}
    assert "translations do not help yet" in train_electra.report(Config(), result)


@pytest.mark.parametrize("masks, share", {"all": (1, 0), "bert": (0.8, 0.1), "electra": (0.85, 0)}.items())
def test_corpora_are_read_as_the_constants_say(masks, share, options, monkeypatch):
    """With the shares of masks and of other tokens in training alone: evaluation hides every one."""
    options |= {"masks": masks, "steps": 1, "span": 3.0, "mask_share": 0.25, "sampling_exponent": 0.3}
    for corpus in opened(options)[2].values():
        assert (corpus.replace, corpus.span, corpus.mask_share, corpus.exponent) == (share, 3.0, 0.25, 0.3)
    read = {"train": set(), "evaluate": set()}

    def batch(corpus, *where, old=PairData.batch):
        read["train"].add(corpus.replace)
        return old(corpus, *where)

    def evaluate(model, data, *rest, old=train_electra.evaluate):
        read["evaluate"] |= {corpus.replace for corpus in data.values()}
        return old(model, data, *rest)

    monkeypatch.setattr(PairData, "batch", batch)
    monkeypatch.setattr(train_electra, "evaluate", evaluate)
    ELECTRA.run(options, monkeypatch)
    assert read == {"train": {share}, "evaluate": {(1, 0)}}


@pytest.mark.parametrize("limit, size", {math.inf: 4096, 1.0: TINY["micro_tokens"]}.items())
def test_held_out_batches_are_larger_where_no_limit_counts_their_tokens(limit, size, options, monkeypatch):
    options |= EXPERTS | {"router": "topk", "capacity_factor": limit}
    monkeypatch.setattr(train_electra, "evaluate", lambda _, data, *more: pytest.fail(f"{data['pairs'].micro_tokens}"))
    with pytest.raises(pytest.fail.Exception, match=f"^{size}$"):
        ELECTRA.run(options, monkeypatch)


# Tokens in the vocabulary of each preset's corpora.
VOCABULARY = {"demo": 517, "captions": 4098, "base": 250_002, "large": 1 << 19, "xl": 1 << 19}


def training_flops(config: Config) -> float:
    """Of all steps, as a run counts them."""
    with torch.device("meta"):
        model = train_electra.NETWORKS[config.objective](config, VOCABULARY[config.preset])
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
    alone = ["XLM-E - TRTD, masks as ELECTRA's", "XLM-E - TRTD, 2 x the steps", "XLM-E - TRTD - bias"]
    with_pairs = ["XLM-E", "XLM-E - bias", "XLM-E, masks as ELECTRA's"]
    assert list(rows) == ["XLM", *longer, "XLM - TLM", *with_pairs, *alone]
    assert [bool(row[6]) for row in rows.values()] == [False] * 4 + [True] * 6
    assert rows["XLM-E"][3] == rows[alone[1]][3] != rows[alone[0]][3]  # FLOPs
    results = [json.loads(path.read_text()) for path in options["out_dir"].glob("*/result.json")]
    assert sorted(r["config"]["steps"] for r in results) == [2, 2, 2, 2, 2, 2, 2, 4, 4, 4]
    of = {"objective": "rtd", "tlm": True, "relative_bias": True, "masks": "all"}
    (whole,) = [r for r in results if of.items() <= r["config"].items()]
    cells = [mean_cell([cell]) for cell in train_electra.cells(whole).values()]
    assert rows["XLM-E"][2:] == cells and cells[0] == f"{whole['parameters']['without_generator'] / 1e6:.1f}"


def test_corpora_that_do_not_fit(options, corpora, monkeypatch, capsys):
    for given, message in (
        ({"pairs": corpora["other"]}, "different tokenizers: prepare both with the same --tokenizer"),
        ({"data": corpora["pairs"]}, "a corpus of pairs; MaskedData reads"),
        ({"pairs": corpora["data"]}, "of languages; PairData reads"),
    ):
        assert message in ELECTRA.refused(options | given, monkeypatch, capsys)


def test_what_a_translation_adds_is_counted_pair_by_pair(options):
    """Of the same masked tokens with the other half beside each half and without, in several maskings and batches."""
    config, context, data, model = opened(options | {"micro_tokens": 64, "batch_tokens": 64})
    read, generator = ("valid", 2, config.eval_tokens), model.generator.eval()
    right, total, begins, end = {True: Counter(), False: Counter()}, Counter(), set(), 0  # the first two of each pair
    with torch.no_grad():
        for p in generator.parameters():
            p += 0.5 * torch.randn_like(p)  # so that guesses differ, and some are right
        for half, beside in product((0, 1), (True, False)):
            shown = (0, 1) if beside else (half,)
            for _, first, batch in data["pairs"].eval_batches(*read, masked=(half,), shown=shown):
                guesses = generator(batch.ids, batch.masked, nonpad=batch.nonpad)[0].argmax(dim=1)
                begun = end if first else 0
                for place, hit in zip(batch.masked.tolist(), (guesses == batch.targets).tolist()):
                    pair = begun + place // batch.ids.shape[1]
                    right[beside][pair] += hit
                    total[pair] += beside
                end = begun + len(batch.ids)
                begins.add(first)
    beside, alone, masked = (torch.tensor([own[pair] for pair in range(end)]) for own in (*right.values(), total))
    found = bilingual.translation_effect(generator, data["pairs"], config, context, maskings=2)
    assert found["effect"] == bootstrap((beside - alone).double(), masked.double())
    shares = [float(own.sum() / masked.sum()) for own in (beside, alone)]
    assert [found["with"], found["without"]] == pytest.approx(shares) and shares[0] != shares[1]
    assert min(shares) > 0 and len(begins) > 2
