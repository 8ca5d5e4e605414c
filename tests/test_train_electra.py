"""`train_electra.py`: its equations on tiny models, and the script as a user runs it, on three small languages."""

import dataclasses
import json
import math
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import TORCHRUN, Script, finish, flip_a_byte, metrics, only_run, table_rows, words
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import common
import dispatch as dispatching
import train_electra
from data.masked import Masked
from data.prepare import prepare
from data.tokenizers import XLMR, load_tokenizer, train_sentencepiece
from flops import WAYS, electra_flops
from model import PAD, Encoder, EncoderConfig, MaskedLM
from train_electra import PRESETS, Config, Electra, sample

ELECTRA = Script(train_electra)
run, refused, script = ELECTRA.run, ELECTRA.refused, ELECTRA.start
TINY = dict(n_layer=2, n_head=2, n_embd=16, ffn_size=32, block_size=16, micro_tokens=128, batch_tokens=256, steps=4)
TINY |= dict(generator_layers=1, eval_every=2, eval_maskings=2, log_every=1, device="cpu", dtype="float32")
LETTERS = {"aa": "abcdefg", "bb": "hijklmnop", "en": "qrstuv"}


@pytest.fixture(scope="session")
def corpora(tmp_path_factory) -> dict[str, Path]:
    """Sentences in three languages and pairs of them, under one vocabulary and under another."""
    base = tmp_path_factory.mktemp("languages")
    rng = np.random.default_rng(0)
    meanings = rng.integers(40, size=(700, 6))  # the same in every language
    lines = {}
    for language, letters in LETTERS.items():
        vocabulary = ["".join(rng.choice(list(letters), rng.integers(2, 6))) for _ in range(40)]
        lines[language] = [" ".join(vocabulary[x] for x in row[: 2 + i % 5]) for i, row in enumerate(meanings)]
    (base / "text").mkdir()
    (base / "bitext").mkdir()
    for split, part in (("train", slice(0, 600)), ("valid", slice(600, 650)), ("test", slice(650, 700))):
        for language, text in lines.items():
            (base / "text" / f"{language}.{split}.txt").write_text("\n\n".join(text[part]))
        for language in ("aa", "bb"):
            pairs = zip(lines[language][part], lines["en"][part])
            (base / "bitext" / f"{language}-en.{split}.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    texts = [text for language in lines.values() for text in language]
    folders = {}
    for size, suffix in ((300, ""), (310, "-other")):
        (base / str(size)).mkdir()
        spm = train_sentencepiece(texts, size, XLMR).save(base / str(size))
        folders["data" + suffix] = prepare("cc100", base / "text", spm=spm, out=base / f"data{suffix}")
        folders["pairs" + suffix] = prepare("bitext", base / "bitext", spm=spm, out=base / f"pairs{suffix}")
    return folders


@pytest.fixture
def options(corpora, tmp_path) -> dict:
    return TINY | {"data": corpora["data"], "pairs": corpora["pairs"], "out_dir": tmp_path}


def opened(options):
    given = common.parse(Config, words(options))
    config = common.configure(Config, PRESETS, given)[0]
    context = common.setup("cpu", config.dtype)
    data = train_electra.open_data(config, context)
    common.seed_all(config.seed)
    model = (Electra if config.objective == "rtd" else MaskedLM)(config)
    return config, context, data, model.double() if config.dtype == "float64" else model


# ---------------------------------------------------------------------------------------------------------------------
# The equations


def small(seed=0, **changes) -> Electra:
    """A model in float64 whose weights are large enough that everything matters."""
    torch.manual_seed(seed)
    model = Electra(Config(**dict(TINY, vocab_size=50) | changes)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model.eval()


def small_batch(lengths=(9, 5, 7), seed=1):
    """ids (B, T) after masking (49 is the mask), masked, targets, real, and the original ids"""
    generator = torch.Generator().manual_seed(seed)
    original = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in enumerate(lengths):
        original[row, :length] = torch.randint(4, 49, (length,), generator=generator)
    real = (original != PAD).flatten().nonzero().squeeze(1)
    masked = real[torch.rand(len(real), generator=generator) < 0.3]
    ids = original.flatten().index_fill(0, masked, 49).view_as(original)
    return ids, masked, original.flatten()[masked], real, original


def test_losses_are_the_papers_equations(monkeypatch):
    """Eqs. 1 to 5, a token at a time, and their gradients."""
    model, (ids, masked, targets, real, original) = small(), small_batch()
    drawn = torch.where(torch.arange(len(masked)) % 3 == 0, targets, torch.randint(4, 49, (len(masked),)))
    monkeypatch.setattr(train_electra, "sample", lambda logits: drawn)
    logits, _, answers, replaced = model(ids, masked, real, targets)

    corrupt, labels = original.clone(), {}
    generator_loss = 0
    for place, token in zip(masked.tolist(), drawn.tolist()):  # eq. 2
        row, column = divmod(place, ids.shape[1])
        corrupt[row, column] = token
    hidden = model.generator.encoder(ids, real)[0]
    for place in masked.tolist():  # eq. 1
        row, column = divmod(place, ids.shape[1])
        x = torch.nn.functional.gelu(model.generator.dense(hidden[row, column]))
        x = model.generator.ln_h(x) @ model.encoder.wte.weight.t() + model.generator.bias
        generator_loss = generator_loss - (x.exp() / x.exp().sum()).log()[original[row, column]]
    hidden, discriminator_loss = model.encoder(corrupt, real)[0], 0
    for place in real.tolist():  # eq. 3
        row, column = divmod(place, ids.shape[1])
        labels[place] = bool(corrupt[row, column] != original[row, column])
        z = model.out(model.ln_h(torch.nn.functional.gelu(model.dense(hidden[row, column]))))[0]
        p_replaced = 1 / (1 + torch.exp(-z))
        discriminator_loss = discriminator_loss - torch.log(p_replaced if labels[place] else 1 - p_replaced)

    assert replaced.tolist() == list(labels.values()) and 0 < sum(labels.values()) < len(masked)
    mlm = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    rtd = torch.nn.functional.binary_cross_entropy_with_logits(answers, replaced.double(), reduction="sum")
    torch.testing.assert_close((mlm, rtd), (generator_loss, discriminator_loss))
    parameters = list(model.parameters())
    fast = torch.autograd.grad(mlm + 50 * rtd, parameters)
    slow = torch.autograd.grad(generator_loss + 50 * discriminator_loss, parameters)
    torch.testing.assert_close(fast, slow)
    assert all(g.abs().max() > 0 for g in fast)


def test_look_counts_what_it_says(options):
    config, context, data, model = opened(options | {"dtype": "float64"})
    batch = data["pairs"].batch("train", 0, 0)
    common.seed_all(5)
    sums, _ = train_electra.look(model, batch, True, context)
    common.seed_all(5)
    logits, _, answers, replaced = model(batch.ids, batch.masked, batch.real, batch.targets)
    called = [answer > 0 for answer in answers.tolist()]
    truth = replaced.tolist()
    tokens = batch.ids.numel() if batch.real is None else len(batch.real)
    found = train_electra.scores_of(sums)
    assert found["masked"] == len(batch.masked) and found["tokens"] == tokens == len(truth)
    assert found["mlm"] == pytest.approx(torch.nn.functional.cross_entropy(logits, batch.targets).item())
    assert found["generator"] == pytest.approx((logits.argmax(dim=1) == batch.targets).double().mean().item())
    loss = torch.nn.functional.binary_cross_entropy_with_logits(answers, replaced.double())
    assert found["rtd"] == pytest.approx(loss.item())
    assert found["accuracy"] == pytest.approx(sum(a == b for a, b in zip(called, truth)) / tokens)
    assert found["replaced"] == pytest.approx(sum(truth) / tokens)
    hits = sum(a and b for a, b in zip(called, truth))
    precision, recall = hits / max(1, sum(called)), hits / sum(truth)
    expected = 2 * precision * recall / (precision + recall) if hits else 0
    assert found["f1"] == pytest.approx(expected)


def test_f1_of_guessing_is_that_of_calling_everything_replaced():
    tokens, replaced = 1000, 137
    sums = torch.tensor([1.0, 150, 10, tokens, 0.0, 1.0, replaced, replaced, tokens, replaced], dtype=torch.float64)
    scores = train_electra.scores_of(sums)
    assert scores["blind_f1"] == pytest.approx(scores["f1"])
    shares = torch.linspace(0.01, 1, 100)  # of the tokens called replaced, blindly: precision p, recall the share
    p = replaced / tokens
    assert scores["blind_f1"] == pytest.approx(float((2 * p * shares / (p + shares)).max()))


def test_a_sample_equal_to_the_original_counts_as_original(monkeypatch):
    model, (ids, masked, targets, real, original) = small(), small_batch()
    monkeypatch.setattr(train_electra, "sample", lambda logits: targets)
    *_, answers, replaced = model(ids, masked, real, targets)
    assert not replaced.any()
    torch.testing.assert_close(answers, model(original, masked, real, targets)[2])


def test_samples_follow_the_softmax():
    torch.manual_seed(0)
    logits = torch.tensor([2.0, -1.0, 0.5, -math.inf, 0.0])
    counts = torch.bincount(sample(logits.expand(200_000, 5)), minlength=5)
    expected = 200_000 * logits.softmax(dim=0)
    assert counts[3] == 0
    chi_square = ((counts - expected) ** 2 / expected)[[0, 1, 2, 4]].sum()
    assert chi_square < 16.3  # 99.9% of the time, with 3 degrees of freedom


def test_samples_are_of_fp32_even_where_logits_are_not():
    """In bf16, noise near 8 has steps of 1/16: rare tokens would come too often or never."""
    torch.manual_seed(0)
    logits = torch.zeros(2_000, 1000, dtype=torch.bfloat16)
    drawn = sample(logits)
    counts = torch.bincount(drawn, minlength=1000)
    assert drawn.dtype == torch.int64 and (drawn[:-1] == drawn[1:]).float().mean() < 0.01
    assert counts.max() <= 12  # of a mean of 2
    assert sample(torch.full((3, 5), math.nan)).shape == (3,)  # a NaN must reach the loss, which reports it


def test_no_gradient_flows_through_sampling():
    model, (ids, masked, targets, real, _) = small(), small_batch()
    *_, answers, replaced = model(ids, masked, real, targets)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(answers, replaced.double())
    own = {
        name: p for name, p in model.generator.named_parameters() if not name.startswith(("encoder.wte", "encoder.wpe"))
    }
    grads = torch.autograd.grad(loss, own.values(), allow_unused=True, retain_graph=True)
    assert all(g is None for g in grads)
    shared = torch.autograd.grad(loss, (model.encoder.wte.weight, model.encoder.wpe.weight))
    assert all(g.abs().max() > 0 for g in shared)


def test_embeddings_are_one_tensor():
    model = small()
    for name in ("wte", "wpe"):
        assert getattr(model.encoder, name) is getattr(model.generator.encoder, name)
    assert model.encoder.ln_e is not model.generator.encoder.ln_e
    named = [name for name, _ in model.named_parameters() if name.endswith(("wte.weight", "wpe.weight"))]
    assert named == ["encoder.wte.weight", "encoder.wpe.weight"]
    other = small(seed=1)
    other.load_state_dict(model.state_dict())
    assert other.encoder.wte is other.generator.encoder.wte
    torch.testing.assert_close(other.encoder.wte.weight, model.encoder.wte.weight)


def test_padding_that_the_generator_draws_is_a_token_like_any_other(monkeypatch):
    """A row's answers do not change when it stands beside a longer one, even with a drawn <pad> inside."""
    model, (ids, masked, targets, real, _) = small(), small_batch()
    drawn = torch.full_like(targets, PAD)
    monkeypatch.setattr(train_electra, "sample", lambda logits: drawn[: len(logits)])
    together = model(ids, masked, real, targets)
    row, T = 1, ids.shape[1]
    own, length = (masked // T == row), 5
    alone = model(ids[row : row + 1, :length], masked[own] - row * T, None, targets[own])
    place = real // T == row
    torch.testing.assert_close(together[2][place], alone[2].flatten())
    assert own.any() and torch.equal(together[3][place], alone[3])


def test_the_gate_is_in_both_networks_or_in_none():
    for on in (True, False):
        names = [name for name, _ in small(relative_bias=on).named_parameters() if name.endswith("gate")]
        assert len(names) == (3 if on else 0)  # 2 layers and 1


@pytest.mark.parametrize("router", ["dense", "hypersphere"])
def test_a_step_asks_the_device_nothing(router, monkeypatch):
    """On tensors without values, whatever the host would read raises."""
    monkeypatch.setattr(dispatching, "has_grouped_mm", lambda h, w_in: True)
    ids, masked, targets, real, _ = small_batch()
    config = Config(**TINY, vocab_size=50, router=router, num_experts=4, expert_size=16)
    context = common.Context(0, 1, torch.device("cpu"), torch.bfloat16)
    with FakeTensorMode() as mode:
        batch = Masked(*(mode.from_tensor(x) for x in (ids, masked, targets, real, targets)))
        sums, balance = train_electra.look(Electra(config), batch, True, context)
        (sums[0] / sums[1] + sums[4] / sums[3] + balance).backward()


def test_steps_of_all_sizes_compile_in_one_graph():
    torch.compiler.reset()
    model = small().float().train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for lengths in ((9, 5, 7), (12, 3), (6, 6)):
        ids, masked, targets, real, _ = small_batch(lengths)
        for given in ((ids, masked, real, targets), (ids, masked, real)):
            logits, _, *answers = compiled(*given)
            torch.testing.assert_close(logits, model(*given)[0], rtol=1e-4, atol=1e-4)
        torch.nn.functional.binary_cross_entropy_with_logits(
            compiled(*given[:3], targets)[2], torch.rand(len(real))
        ).backward()


def test_sparse_layers_are_the_discriminators():
    model = small(router="topk", num_experts=4, expert_size=8, top_k=2)
    assert len(model.moe_layers) == 1 and not model.generator.moe_layers
    ids, masked, targets, real, _ = small_batch()
    _, balance, *_ = model(ids, masked, real, targets)
    assert balance > 0 and model(ids, masked, real)[1] == 0


# ---------------------------------------------------------------------------------------------------------------------
# Parameters and FLOPs


@pytest.mark.parametrize("preset, paper", [("base", 279e6), ("large", 840e6), ("xl", 2.2e9)])
def test_parameters_of_table_3(preset, paper):
    config = Config(**{"vocab_size": 250_002} | PRESETS[preset])
    with torch.device("meta"):
        model = Electra(config)
    kept = train_electra.kept_parameters(model)
    assert kept == pytest.approx(paper, rel=0.02)
    if preset == "base":
        assert kept == 278_045_953 + 2_064
    assert config.generator.n_layer == {"base": 4, "large": 6, "xl": 8}[preset]


def test_flops_of_table_4(monkeypatch, capsys):
    base = Config(**PRESETS["base"], vocab_size=250_002)
    tokens = 125_000 * 2_048 * 512
    disc = tokens * electra_flops(base, True, 30_522, lookup=True)
    both = disc + tokens * electra_flops(base.generator, False, 30_522, lookup=True)
    assert disc == pytest.approx(6.26e19, rel=1e-3) and both == pytest.approx(9.37e19, rel=1e-3)
    run({"flops": "true"}, monkeypatch)
    out = capsys.readouterr().out
    rows = table_rows(out.split("\n\n")[3])
    assert [row[2:5] for row in rows[:2]] == [["6.3e19", "6.26e+19", "5.03e+19"], ["9.5e19", "9.37e+19", "8.30e+19"]]
    assert rows[2][4] == "1.66e+20" and "278,045,953" in out


@pytest.mark.parametrize("given", [{}, {"tlm": False}, {"trtd": False}, {"objective": "mlm"}])
def test_products_are_those_that_torch_counts(given, options):
    """All rows full, and as many masked tokens as the share says."""
    config, context, _, model = opened(options | given)
    B, T = config.batch_tokens // config.block_size, config.block_size
    ids = torch.randint(4, 300, (B, T))
    masked = torch.arange(round(config.mask_share * B * T))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # it knows no other on a CPU
        for detect in config.tasks.values():
            logits, balance, *answers = (
                model(ids, masked, None, ids.flatten()[masked]) if detect else model(ids, masked)
            )
            sum([x.double().square().sum() for x in (logits, *answers[:1])]).backward()
    expected = train_electra.step_flops(config)[-1]
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


# ---------------------------------------------------------------------------------------------------------------------
# The script


ROWS = {
    "XLM-E": {},
    "no TRTD, TLM kept": {"trtd": False},
    "sentences alone": {"tlm": False},
    "no gate": {"relative_bias": False},
    "XLM": {"objective": "mlm"},
    "MLM": {"objective": "mlm", "tlm": False},
    "X-MoE discriminator": {"router": "hypersphere", "num_experts": 4, "expert_size": 16},
    "threshold discriminator": {"router": "threshold", "num_experts": 4, "expert_size": 16},
    "spans": {"span": 3.0},
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_trains_and_reports(row, options, monkeypatch, capsys):
    run(options | ROWS[row], monkeypatch)
    out, folder = capsys.readouterr().out, only_run(options["out_dir"])
    result = json.loads((folder / "result.json").read_text())
    records, rtd = metrics(options["out_dir"]), ROWS[row].get("objective") != "mlm"
    kinds = {"sentences"} if ROWS[row].get("tlm") is False else {"sentences", "pairs"}
    assert len(records) == 2 and records[-1]["held_out"] == result["held_out"]
    for record in records:
        assert set(record["seen"]) == kinds
        for kind, scores in [
            *record["seen"].items(),
            *((kind, record["held_out"][kind]) for kind in ("sentences", "pairs")),
        ]:
            detected = rtd and (row != "no TRTD, TLM kept" or kind == "sentences" or scores is record["held_out"][kind])
            assert ("f1" in scores) == detected
            assert 0 < scores["mlm"] < 20 and 0 <= scores["generator"] <= 1
            if detected:
                assert 0 < scores["replaced"] <= 0.25 and 0 < scores["rtd"] < 5 and scores["accuracy"] > 0
        assert set(record["held_out"]["translation"]) == {"with", "without"}
        assert len(record["held_out"]["retrieval"]) == 3 and 0 < record["held_out"]["chance"] < 0.2
    for kind in ("sentences", "pairs"):  # two maskings in the end, one on the way
        assert records[1]["held_out"][kind]["tokens"] == 2 * records[0]["held_out"][kind]["tokens"]
    for record in records:
        assert all(
            0.5 * 512 < scores["tokens"] <= 512 for scores in record["seen"].values()
        )  # of these two steps alone
        assert all((scores["balance"] > 0) == ("discriminator" in row) for scores in record["seen"].values())
    assert records[0]["flops"] * 2 == records[1]["flops"] == result["flops"][WAYS[-1]]
    assert len(result["held_out"]["layers"]) == ("discriminator" in row)
    assert ("sparse layer 1" in out) == ("discriminator" in row)
    assert "right with the translation beside it" in out and "held-out translations found" in out
    shown = table_rows(out[out.rindex("| text") :].split("\nmasked")[0])
    assert [cells[0] for cells in shown] == ["held out, sentences", "held out, pairs"]
    assert all(bool(cells[5]) == rtd for cells in shown)
    assert {p.name for p in folder.iterdir()} >= {"config.json", "metrics.jsonl", "xlmr.model", "ckpt.pt"}


def test_learning_happens(options, monkeypatch):
    """Both networks learn: words of three languages have letters of their own."""
    options |= {"steps": 200, "learning_rate": 3e-3, "eval_every": 100, "eval_maskings": 1}
    options |= {"n_embd": 64, "ffn_size": 64}
    run(options, monkeypatch)
    first, last = (record["held_out"] for record in metrics(options["out_dir"]))
    for kind in ("sentences", "pairs"):
        assert last[kind]["mlm"] < first[kind]["mlm"] and last[kind]["generator"] > 0.1
        share = last[kind]["replaced"]
        base_rate = -share * math.log(share) - (1 - share) * math.log(1 - share)  # the loss of one who knows no more
        assert last[kind]["rtd"] < 0.97 * base_rate


def test_the_gradient_is_the_mean_over_micro_batches_of_the_weighted_losses(options, monkeypatch):
    seen = []

    def record(parameters, limit):
        assert limit == 3.0
        seen.append([p.grad.clone() for p in parameters])

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", record)
    options |= {"dtype": "float64", "lambda_disc": 7.0, "router": "switch", "num_experts": 4, "balance_coef": 0.5}
    options |= {"grad_clip": 3.0}
    run(options | {"steps": 1}, monkeypatch)
    config, _, data, model = opened(options)
    for micro in range(2):
        for i, kind in enumerate(("pairs", "sentences")):
            common.seed_all(config.seed, 1, micro, 1 + i)
            batch = data[kind].batch("train", 0, micro)
            logits, balance, answers, replaced = model(batch.ids, batch.masked, batch.real, batch.targets)
            loss = torch.nn.functional.cross_entropy(logits, batch.targets) + 0.5 * balance
            loss = loss + 7 * torch.nn.functional.binary_cross_entropy_with_logits(answers, replaced.double())
            (loss / 2).backward()
    torch.testing.assert_close(seen[0], [p.grad for p in model.parameters()])


def test_special_tokens_are_never_masked_and_masks_are_always_the_mask_token(options):
    _, _, data, _ = opened(options)
    for source in data.values():
        special = torch.tensor(sorted(source.tokenizer.special))
        for step in range(20):
            batch = source.batch("train", step, 0)
            assert not torch.isin(batch.targets, special).any()
            assert (batch.ids.flatten()[batch.masked] == source.tokenizer.mask).all()


def test_both_halves_survive_where_a_pair_is_longer_than_the_positions(options):
    _, _, data, _ = opened(options | {"block_size": 8})
    lengths = []
    for step in range(20):
        batch = data["pairs"].batch("train", step, 0)
        eos = data["pairs"].tokenizer.eos
        assert batch.ids.shape[1] <= 8
        assert ((batch.ids == eos).sum(dim=1) == 2).all()
        for row in batch.ids:
            first, second = (row == eos).nonzero().flatten().tolist()
            assert first > 1 and second > first + 1  # a token of each half at least
            lengths.append(second + 1)
    assert max(lengths) == 8


def test_the_translation_comparison_masks_the_same_tokens(options, monkeypatch):
    config, context, data, model = opened(options | {"dropout": 0.5})  # which must be off
    seen = []
    look = train_electra.look
    monkeypatch.setattr(train_electra, "look", lambda m, batch, *rest: seen.append(batch) or look(m, batch, *rest))
    scores = train_electra.evaluate(model, data, config, context, 1)
    pairs = len(list(data["pairs"].eval_batches("valid", 1, config.eval_tokens)))
    beside, without = seen[-4 * pairs : -2 * pairs], seen[-2 * pairs :]
    for a, b in zip(beside, without):
        assert torch.equal(a.targets, b.targets) and a.ids.shape[1] > b.ids.shape[1]
    right = count = 0
    model.eval()
    with torch.no_grad():
        for batch in without:
            right += int((model(batch.ids, batch.masked, batch.real)[0].argmax(dim=1) == batch.targets).sum())
            count += len(batch.targets)
    assert scores["translation"]["without"] == pytest.approx(right / count)


def test_retrieval_is_its_literal_definition(options):
    config, context, data, model = opened(options | {"dtype": "float64"})
    model.eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
        found = train_electra.retrieval(model.encoder, data["pairs"], config, context)
        bos, eos = data["pairs"].tokenizer.bos, data["pairs"].tokenizer.eos
        expected, chances = [], []
        for pair in data["pairs"].languages:
            sides = list(zip(*data["pairs"].raw("valid", pair)))
            vectors = []
            for side in sides:
                states = [[] for _ in side]
                for text, into in zip(side, states):
                    model.encoder(torch.tensor([[bos, *text[: config.block_size - 2], eos]]), None, into)
                vectors.append([[layer[0].mean(dim=0) for layer in into] for into in states])
            n, layers = len(sides[0]), len(vectors[0][0])
            chances.append(1 / n)
            scores = []
            for layer in range(layers):
                right = 0
                for here, there in (vectors, vectors[::-1]):
                    for i in range(n):
                        like = [torch.cosine_similarity(here[i][layer], other[layer], dim=0).item() for other in there]
                        right += like.index(max(like)) == i
                scores.append(right / (2 * n))
            expected.append(scores)
    assert found["retrieval"] == pytest.approx(np.mean(expected, axis=0).tolist())
    assert found["chance"] == pytest.approx(np.mean(chances)) and max(found["retrieval"]) > 0


def test_the_discriminator_can_be_read_back(options, monkeypatch):
    """As fine-tuning and analysis do: `arguments` and the names that begin with `encoder.`."""
    run(options | {"steps": 2}, monkeypatch)
    state = common.load_checkpoint(only_run(options["out_dir"]) / "ckpt.pt")
    assert state["kind"] == "encoder"
    group = state["optimizer"]["param_groups"][0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.98), 1e-6, 0.01)
    assert (
        group["lr"] == pytest.approx(common.linear(1, 2, 0.2, 1.5e-3))
        and state["optimizer"]["param_groups"][1]["weight_decay"] == 0
    )
    encoder = Encoder(EncoderConfig(**state["arguments"]))
    names = [name for name in state["model"] if name.startswith("encoder.")]
    encoder.load_state_dict({name.removeprefix("encoder."): state["model"][name] for name in names})
    assert encoder.config.n_layer == 2 and encoder.distance is not None
    ours, theirs = (load_tokenizer(folder) for folder in (only_run(options["out_dir"]), options["data"]))
    assert ours.sha256 == theirs.sha256 == state["tokenizer"]


# Resuming and processes


def test_a_killed_run_ends_with_the_numbers_of_one_that_was_not(options, tmp_path):
    options |= {"steps": 150, "dropout": 0.1, "eval_every": 5, "eval_tokens": 200}
    whole, killed = (options | {"out_dir": tmp_path / name} for name in ("whole", "killed"))
    processes = script(whole), script(killed)
    while not list(killed["out_dir"].glob("*/ckpt.prev.pt")):
        assert processes[1].poll() is None, (killed["out_dir"] / "log.txt").read_text()
        time.sleep(0.02)
    time.sleep(random.uniform(0, 1))
    processes[1].send_signal(signal.SIGKILL)
    processes[1].wait()
    assert not (only_run(killed["out_dir"]) / "result.json").exists(), "the run ended before it could be killed"
    assert "goes on from step" in finish(script(killed), killed)
    finish(processes[0], whole)
    ours, theirs = (common.load_checkpoint(only_run(o["out_dir"]) / "ckpt.pt") for o in (killed, whole))
    assert all(torch.equal(ours["model"][name], w) for name, w in theirs["model"].items())
    ours, theirs = (metrics(o["out_dir"]) for o in (killed, whole))
    for record in ours + theirs:
        del record["tokens_per_second"]
    assert ours == theirs and len(ours) == 30


def test_a_corrupt_checkpoint_gives_way_to_the_previous_one(options, monkeypatch, capsys):
    run(options, monkeypatch)
    folder = only_run(options["out_dir"])
    before = (folder / "result.json").read_text()
    (folder / "result.json").unlink()
    flip_a_byte(folder / "ckpt.pt")
    run(options, monkeypatch)
    assert "ckpt.pt is corrupt" in (err := capsys.readouterr()).err and "goes on from step 2" in err.out
    assert json.loads((folder / "result.json").read_text())["held_out"] == json.loads(before)["held_out"]


@pytest.mark.parametrize("row", ["XLM-E", "no TRTD, TLM kept", "X-MoE discriminator", "XLM"])
def test_two_processes_compute_what_one_does(row, options, tmp_path):
    options |= {"steps": 12, "eval_every": 4, "dtype": "float64", "dropout": 0.1} | ROWS[row]
    runs = [options | {"out_dir": tmp_path / name} for name in ("one", "two")]
    processes = script(runs[0]), script(runs[1], *TORCHRUN)
    for process, given in zip(processes, runs):
        finish(process, given)
    one, two = (metrics(o["out_dir"]) for o in runs)
    assert len(one) == 3 and one[-1]["train_loss"] < one[0]["train_loss"]
    for a, b in zip(one, two):
        assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-5)
        for text in ("seen", "held_out"):
            for kind in a[text].keys() & {"sentences", "pairs"}:
                assert a[text][kind] == pytest.approx(b[text][kind], rel=1e-5, abs=1e-5)
        assert a["held_out"]["retrieval"] == pytest.approx(b["held_out"]["retrieval"], abs=1e-5)
        assert a["held_out"]["translation"] == pytest.approx(b["held_out"]["translation"], abs=1e-5)
        for ours, theirs in zip(a["held_out"]["layers"], b["held_out"]["layers"]):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


# Tables and figures


def test_table_2_has_every_row_and_runs_none_twice(options, monkeypatch, capsys):
    options |= {"table": 2, "steps": 2}
    run(options, monkeypatch)
    table = capsys.readouterr().out.split("\n\n")[-1]
    rows = table_rows(table)
    assert [row[0] for row in rows] == ["XLM", "XLM - TLM", "XLM-E", "XLM-E - TRTD", "XLM-E - TRTD - gate"]
    assert [bool(row[5]) for row in rows] == [0, 0, 1, 1, 1]
    results = [json.loads(path.read_text()) for path in options["out_dir"].glob("*/result.json")]
    assert len(results) == 5 and len({(r["config"]["steps"], r["data"]) for r in results}) == 1
    (whole,) = [r for r in results if r["config"]["trtd"]]
    scores, (params, flops, _, right, f1, found) = whole["held_out"], rows[2][1:]
    kinds = [scores[kind] for kind in ("sentences", "pairs")]
    assert right == " / ".join(f"{s['generator']:.1%}" for s in kinds) and found == f"{scores['retrieval'][2]:.1%}"
    assert f1 == " / ".join(f"{s['f1']:.3f}" for s in kinds) and flops == f"{whole['flops'][WAYS[-1]]:.2e}"
    assert params == f"{whole['parameters']['kept'] / 1e6:.1f}M"
    monkeypatch.setattr(train_electra, "look", None)  # whoever trains or evaluates now fails
    run(options, monkeypatch)
    assert capsys.readouterr().out.split("\n\n")[-1] == table


def test_figure_1_is_drawn_from_the_logs(options, monkeypatch, capsys):
    plt = pytest.importorskip("matplotlib.pyplot")
    figures = []
    subplots = plt.subplots
    monkeypatch.setattr(plt, "subplots", lambda *args, **more: figures.append(subplots(*args, **more)) or figures[-1])
    run(options | {"figure": 1}, monkeypatch)
    assert (options["out_dir"] / "figure1.png").stat().st_size > 5_000
    assert "figure1.png" in capsys.readouterr().out
    logs = {}
    for folder in (path for path in options["out_dir"].iterdir() if path.is_dir()):
        objective = json.loads((folder / "config.json").read_text())["objective"]
        logs[objective] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    left, right = figures[0][1]
    for axes, pick in ((left, lambda s: s["retrieval"][2]), (right, lambda s: s["sentences"]["generator"])):
        for line, objective in zip([line for line in axes.lines if line.get_linestyle() == "-"], ("rtd", "mlm")):
            x, y = line.get_data()
            assert list(x) == [record["flops"] for record in logs[objective]]
            assert list(y) == pytest.approx([100 * pick(record["held_out"]) for record in logs[objective]])
    (dotted,) = [line for line in right.lines if line.get_linestyle() == ":"]
    expected = [100 * record["held_out"]["sentences"]["f1"] for record in logs["rtd"]]
    assert list(dotted.get_ydata()) == pytest.approx(expected)


def test_seeds_give_mean_and_deviation(options, monkeypatch, capsys):
    run(options | {"seeds": 2, "steps": 1, "eval_every": 1}, monkeypatch)
    out = capsys.readouterr().out
    assert len(list(options["out_dir"].iterdir())) == 2
    assert "2 seeds, sentences / pairs: generator right" in out and out.count(" ± ") == 4
    run(options | {"seeds": 2, "table": 2, "steps": 1, "eval_every": 1}, monkeypatch)
    assert len(list(options["out_dir"].iterdir())) == 10
    assert " ± " in capsys.readouterr().out


# What a user can get wrong


BAD = {
    "unknown option": ({"lamda_disc": 0.5}, "--lamda_disc"),
    "objective": ({"objective": "electra"}, "objective must be rtd or mlm"),
    "TRTD without a discriminator": ({"objective": "mlm", "trtd": True}, "trtd needs --objective rtd"),
    "TRTD without TLM": ({"tlm": False, "trtd": True}, "and --tlm true"),
    "no generator": ({"generator_layers": 0}, "generator_layers must be positive"),
    "lambda": ({"lambda_disc": "nan"}, "lambda_disc must be positive"),
    "micro-batches": ({"batch_tokens": 300}, "does not divide batch_tokens = 300"),
    "no such table": ({"table": 3}, "has table 2, not 3"),
    "no such figure": ({"figure": 2}, "has figure 1, not 2"),
    "a table of another objective": ({"table": 2, "objective": "mlm"}, "--table has rows of its own for --objective"),
    "no data": ({"data": "cc100x"}, "python -m data.prepare"),
    "no pairs": ({"pairs": "opus"}, "python -m data.prepare"),
    "vocabulary": ({"vocab_size": 999}, "the model's vocabulary is 999"),
    "exponent": ({"sampling_exponent": "nan"}, "sampling_exponent must lie in [0, 1]"),
    "no such spm": ({"data": "catalogs", "spm": "nowhere.model"}, "--spm nowhere.model does not exist"),
    "mask share": ({"mask_share": 0.0}, "mask_share"),
    "span": ({"span": 0.5}, "span 0.5 must be at least 1"),
    "spm with prepared data": ({"spm": "x.model"}, "--spm is for catalogs"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(case, options, monkeypatch, capsys):
    given, message = BAD[case]
    assert message in refused(options | given, monkeypatch, capsys)


def test_corpora_that_do_not_fit(options, corpora, monkeypatch, capsys):
    other = options | {"pairs": corpora["pairs-other"]}
    assert "different tokenizers: prepare both with the same --spm" in refused(other, monkeypatch, capsys)
    assert "translation pairs" in refused(options | {"data": corpora["pairs"]}, monkeypatch, capsys)
    assert "not translation pairs" in refused(options | {"pairs": corpora["data"]}, monkeypatch, capsys)


def test_vocabularies_of_one_size_are_still_two(options, corpora, tmp_path, monkeypatch, capsys):
    (tmp_path / "spm").mkdir()
    texts = [" ".join(reversed(word)) for word in ("sentence piece learns", "something else", "zyxwvut")] * 40
    texts += ["".join(chr(ord("a") + (i * j) % 26) for j in range(30)) for i in range(200)]
    spm = train_sentencepiece(texts, 300, XLMR).save(tmp_path / "spm")
    source = corpora["data"].parent / "bitext"
    folder = prepare("bitext", source, spm=spm, out=tmp_path / "pairs")
    assert "have different tokenizers" in refused(options | {"pairs": folder}, monkeypatch, capsys)


def test_data_of_another_run(options, corpora, tmp_path, monkeypatch, capsys):
    """Either corpus may not change under a run."""
    link = tmp_path / "pairs"
    options |= {"pairs": link, "out_dir": tmp_path / "out"}
    link.symlink_to(corpora["pairs"])
    run(options, monkeypatch)
    few = tmp_path / "few"
    few.mkdir()
    for file in (corpora["data"].parent / "bitext").glob("aa-en.*"):
        (few / file.name).write_text(file.read_text())
    spm = corpora["data"] / "xlmr.model"
    link.unlink()
    link.symlink_to(prepare("bitext", few, spm=spm, out=tmp_path / "prepared"))
    capsys.readouterr()
    assert "another data" in refused(options, monkeypatch, capsys)


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(options, monkeypatch, capsys):
    options |= {"steps": 40, "eval_every": 4}
    step, linear, look = [0], common.linear, train_electra.look

    def broken(*args):
        sums, balance = look(*args)
        return sums * (math.nan if step[0] >= 6 else 1), balance

    monkeypatch.setattr(common, "linear", lambda s, *rest: (step.__setitem__(0, s), linear(s, *rest))[1])
    monkeypatch.setattr(train_electra, "look", broken)
    assert "not finite at step 7" in refused(options, monkeypatch, capsys)
    state = common.load_checkpoint(only_run(options["out_dir"]) / "ckpt.pt")
    assert state["step"] == 4 and all(w.isfinite().all() for w in state["model"].values())


@pytest.mark.parametrize("broken", ["encoder.ln_e.weight", "generator.ln_h.weight"])
def test_weights_that_the_last_update_broke_are_not_saved(broken, options, monkeypatch, capsys):
    """Every training loss was finite; only the evaluation can tell."""
    updates = []

    def after_step(model):
        updates.append(1)
        if len(updates) == 8:
            model.get_parameter(broken).data.fill_(math.inf)

    monkeypatch.setattr(Electra, "after_step", after_step)
    assert "not finite at step 8" in refused(options | {"steps": 40, "eval_every": 4}, monkeypatch, capsys)
    assert common.load_checkpoint(only_run(options["out_dir"]) / "ckpt.pt")["step"] == 4


def test_help_lists_every_constant_once(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        run({"help": ""}, monkeypatch)
    out = capsys.readouterr().out
    assert stop.value.code == 0
    for name in (field.name for field in dataclasses.fields(Config)):
        (line,) = [line for line in out.splitlines() if line.strip().startswith(f"--{name} ")]
        assert len(line.split()) > 2
