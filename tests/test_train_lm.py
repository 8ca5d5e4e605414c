"""`train_lm.py` as a user runs it, on a small corpus and tiny models. What all scripts share: test_runs.py."""

import dataclasses
import json
import math
from collections import Counter
from statistics import fmean

import numpy as np
import pytest
import reference
import torch
from helpers import Script, losses, metrics, only_run, result_of, table_rows, words

import common
import measures
import runs
import train_lm
from data import counting
from data.batches import TokenData
from data.tokenizers import load_tokenizer
from routers import NOT_CHOSEN

ROUTERS = ("dense", "switch", "topk", "threshold", "hypersphere", "hash", "base", "expert_choice")
LM = Script(train_lm)


def opened(options: dict):
    """-> config, data, new model"""
    config = runs.command_line(train_lm.Config, train_lm.PRESETS, words(options))
    context = common.setup("cpu", config.dtype)
    data = TokenData.open(config.data, config, context)
    return config, data, train_lm.build(runs.with_vocabulary(config, data), data, None, context)


def last_table(out: str) -> list[list[str]]:
    return table_rows(out.split("\n\n")[-1])


# ---------------------------------------------------------------------------------------------------------------------
# One run


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_trains_and_reports(router, options, monkeypatch, capsys):
    LM.run(options | {"router": router}, monkeypatch)
    out, result = capsys.readouterr().out, result_of(options["out_dir"])
    scores, unlimited = result["test"], result["test_no_limit"]
    assert all(f"{of['bpb']:.3f} bits per byte, perplexity {of['ppl']:.2f}" in out for of in (scores, unlimited))
    assert scores["ppl"] == pytest.approx(math.exp(scores["loss"]))
    counts = json.loads((options["data"] / "meta.json").read_text())["splits"]["test"]
    nats = scores["loss"] * counts["tokens"]  # of the whole split, shared out among its bytes
    assert scores["bpb"] == pytest.approx(nats / counts["bytes"] / math.log(2))
    assert scores["word_ppl"] == pytest.approx(math.exp(min(700, nats / counts["words"])))
    assert ("tokens unserved" in out) == (router != "dense")
    assert len(scores["layers"]) == (router != "dense") and scores["balance"] >= 0
    sees_later = router == "expert_choice"
    assert ("not causal" in out) == sees_later and ("\n\nsample" in out) != sees_later
    logged = metrics(options["out_dir"])
    assert [(record["step"], record["tokens"]) for record in logged] == [(2, 128), (4, 128)]
    if router == "hypersphere":  # X-MoE 3.1: after each step the embeddings are back on their sphere
        weights = torch.load(only_run(options["out_dir"]) / "ckpt.pt", weights_only=True)["model"]
        norms = weights["blocks.1.ffn.router.experts"].norm(dim=1)
        torch.testing.assert_close(norms, torch.full_like(norms, 0.1))
    limited = router in ("switch", "topk", "threshold", "hypersphere", "hash", "base")
    assert ("without a limit" in out) == ("under the limit" in out) == (unlimited != scores) == limited
    if limited:
        assert unlimited["layers"][0]["cut"] == 0 and scores["layers"][0]["cut"] > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_precisions_train(dtype, options, monkeypatch):
    LM.run(options | {"dtype": dtype}, monkeypatch)
    state = torch.load(only_run(options["out_dir"]) / "ckpt.pt", weights_only=True)
    kept_in = torch.float64 if dtype == "float64" else torch.float32
    assert all(w.dtype == kept_in for w in state["model"].values())
    assert result_of(options["out_dir"])["test"]["layers"][0]["served"] > 0


def test_learning_happens(options, monkeypatch):
    """Of numbers drawn by chance there is nothing to learn but how often each token comes."""
    options |= {"steps": 60, "learning_rate": 1e-2, "eval_every": 30, "frequency_bias": False}
    LM.run(options, monkeypatch)
    first, last = losses(options["out_dir"])
    assert last < first - 0.3


def test_every_step_has_its_learning_rate(options, monkeypatch):
    rates = []
    monkeypatch.setattr(common, "set_learning_rate", lambda optimizer, rate: rates.append(rate))
    LM.run(options | {"steps": 20, "learning_rate": 1.0, "min_learning_rate": 0.1, "warmup": 0.25}, monkeypatch)
    assert rates == [common.cosine(step, 20, 0.25, 1.0, 0.1) for step in range(20)]


@pytest.mark.parametrize("router", ["threshold", "hypersphere"])
def test_every_weight_has_a_gradient(router, options):
    config, data, model = opened(options | {"router": router, "dtype": "float64", "capacity_factor": 32.0})
    logits, balance = model(data.batch("train", 0)[0])
    loss = common.cross_entropy(logits.flatten(0, 1), data.batch("train", 0)[1].flatten())
    (loss + config.balance_coef * balance).backward()
    still = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    assert still == set()


def test_evaluation_takes_so_many_tokens_in_order(options):
    config, data, model = opened(options | {"dtype": "float64", "dropout": 0.5})
    context = common.setup("cpu", "float64")
    some, whole = (train_lm.evaluate(model, data, "valid", context, most) for most in (64, None))
    assert some["tokens"] == 64 < whole["tokens"] and whole["tokens"] == (len(data.tokens["valid"]) - 1) // 16 * 16
    assert model.training and some == train_lm.evaluate(model, data, "valid", context, 64)  # no dropout
    total, balances = 0.0, 0.0
    model.eval().requires_grad_(False)
    for x, y in data.eval_batches("valid", None):  # the last one is smaller
        logits, balance = model(x)
        total -= float(logits.log_softmax(dim=2).gather(2, y.unsqueeze(2)).sum())
        balances += float(balance) * y.numel()
    assert whole["loss"] == pytest.approx(total / whole["tokens"])
    assert whole["balance"] == pytest.approx(balances / whole["tokens"])


@pytest.mark.parametrize("yes", [True, False])
def test_the_outputs_bias_starts_at_the_log_frequencies(yes, options):
    _, data, model = opened(options | {"frequency_bias": yes})
    assert ("bias" in model.state_dict()) == yes
    if yes:
        torch.testing.assert_close(model.bias.data, data.log_frequencies())


def test_counting_is_its_literal_definition(options, monkeypatch, capsys):
    config, data, _ = opened(options)
    train, test = data.tokens["train"][:300].tolist(), data.tokens["test"][:60].tolist()
    data.tokens |= {"train": data.tokens["train"][:300], "test": data.tokens["test"][:60]}
    pairs, V = list(zip(train, train[1:])), data.vocab_size
    seen = data.seen(2).tolist()
    assert 100 < sum(seen) < 250
    trained = [pair for place, pair in enumerate(pairs, 1) if seen[place]]
    losses = {"unigrams": 0.0, "bigrams": 0.0, "all bigrams": 0.0}
    single = reference.interpolated(train, [1 / V] * V)
    losses["unigrams"] = -fmean(math.log(single[token]) for token in test)
    for name, known in {"bigrams": trained, "all bigrams": pairs}.items():
        found = [reference.bigrams(known, one, V)[two] for one, two in zip(test, test[1:])]
        losses[name] = -fmean(map(math.log, found))
    found = counting.text_losses(data, 2)
    assert found == pytest.approx(losses) and len(set(losses.values())) == 3
    LM.run(options, monkeypatch)
    out, kept = capsys.readouterr().out, result_of(options["out_dir"])["counting"]
    _, data, _ = opened(options)
    counts = data.meta["splits"]["test"]
    for name, loss in counting.text_losses(data, 4).items():
        assert kept[name] == pytest.approx(loss * counts["tokens"] / counts["bytes"] / math.log(2))
    said = f"counting reaches {kept['unigrams']:.3f} bits per byte of the test text by tokens, {kept['bigrams']:.3f} "
    said += f"by pairs of them that training sees, {kept['all bigrams']:.3f} by all pairs of the training text\n"
    assert out.count(said) == 2  # before training, and beside its scores


def test_a_large_text_is_not_counted(options):
    _, data, _ = opened(options)
    data.tokens["train"] = np.zeros(2**24 + 1, dtype="uint16")
    assert counting.text_losses(data, 2) == {}
    assert "counting: not done" in train_lm.describe_counting({})


def test_tokens_are_ordered_by_the_experts_they_want(options, monkeypatch, capsys):
    """By a router that wants 1 + id % 8 experts for a token."""
    config, data, model = opened(options | {"expert_size": 32, "n_layer": 4})
    context = common.setup("cpu", "float32")
    router = model.moe_layers[-1].router
    E, forward = router.num_experts, router.forward

    def by_id(h, ids):
        wanted = torch.arange(E) < 1 + ids.unsqueeze(1) % E
        return forward(h, ids)._replace(priority=torch.where(wanted, 0, NOT_CHOSEN))

    monkeypatch.setattr(router, "forward", by_id)
    counts = Counter(token for x, _ in data.eval_batches("test", 1 << 16) for token in x.flatten().tolist())
    often = sorted(token for token, count in counts.items() if count >= 3)
    order = sorted(often, key=lambda token: token % E)
    batches = [x for x, _ in data.eval_batches("test", 1 << 16)]
    easy, hard = measures.easy_and_hard(model, batches, context, occurs=3)
    assert (easy, hard) == (order[:8], order[:-9:-1]) and len(often) < len(counts)
    assert order[0] % E == 0 and order[-1] % E == E - 1 and not router.training
    assert not model.moe_layers[-1].watchers
    few = measures.easy_and_hard(model, batches, context, occurs=1, most=3)
    assert len(few[0]) == len(few[1]) == 3 and few[0] != easy[:3]
    result = {"name": "a run", "test": None, "test_no_limit": None, "easy": [" of", "\n"], "hard": ["tensor"]}
    monkeypatch.setattr(train_lm, "describe", lambda scores: "")
    assert "wanted by: of \\n\nmany by: tensor" in train_lm.report(config, result)


@pytest.mark.parametrize("router", ["switch", "dense", "threshold"])
def test_only_a_threshold_gives_tokens_what_they_want(router, options, monkeypatch):
    LM.run(options | {"router": router}, monkeypatch)
    assert ("easy" in result_of(options["out_dir"])) == (router == "threshold")


def test_the_sample_goes_on_from_the_prompt(options, monkeypatch, capsys):
    LM.run(options, monkeypatch)
    given = options | {"eval_only": True, "prompt": "12 34", "sample_tokens": 6, "sample_top_k": 1}
    capsys.readouterr()
    samples = []
    # With top 1 nothing is drawn. A finished run takes another prompt, too.
    for change in ({}, {"eval_only": False}, {"sample_tokens": 0}, {"seed": 0, "sample_temperature": 5.0}):
        LM.run(given | change, monkeypatch)
        samples.append(capsys.readouterr().out.split("served per token):\n")[1].rstrip("\n"))
    assert samples[0] == samples[1] == samples[3] and samples[2].strip() == "12 34"
    LM.run(options | {"prompt": "56"}, monkeypatch)  # of a finished run, and nothing else is changed
    assert capsys.readouterr().out.split("served per token):\n")[1].strip().startswith("56")
    tokenizer = load_tokenizer(options["data"])
    _, data, model = opened(options)
    model.load_state_dict(torch.load(only_run(options["out_dir"]) / "ckpt.pt", weights_only=True)["model"])
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode_batch(["12 34"])[0]]])
    expected = tokenizer.decode(model.generate(ids, 6, top_k=1)[0, 1:].tolist())
    assert samples[0].strip() == expected.strip()


def test_a_prompt_that_is_no_text_is_refused_of_a_finished_run_too(options, monkeypatch, capsys):
    LM.run(options, monkeypatch)
    capsys.readouterr()
    for more in ({}, {"eval_only": True}):
        assert "surrogates not allowed" in LM.refused(options | {"prompt": "\udcff"} | more, monkeypatch, capsys)


def test_each_token_of_the_sample_is_counted_once(options, monkeypatch):
    config, data, model = opened(options | {"sample_tokens": 5, "eval_capacity_factor": 0.1})
    stats, watch = [], measures.RoutingStats
    monkeypatch.setattr(measures, "RoutingStats", lambda moe: stats.append(watch(moe)) or stats[-1])
    served = train_lm.sample(config, model, data, common.setup("cpu", config.dtype))["sample_served"]
    assert [own.sums["tokens"] for own in stats] == [1 + 5] * len(served) and not model.training
    assert served == [own.sums["wanted"] / 6 for own in stats]  # without a limit, though there is one


# ---------------------------------------------------------------------------------------------------------------------
# A trained model, and weights from elsewhere


def test_evaluation_under_another_routing_leaves_the_run_alone(options, monkeypatch, capsys):
    at_test = {"eval_only": True, "eval_threshold": 0.0, "eval_capacity_factor": 0.5}
    assert "has no checkpoint: train first" in LM.refused(options | at_test, monkeypatch, capsys)
    LM.run(options, monkeypatch)
    folder = only_run(options["out_dir"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    LM.run(options | at_test, monkeypatch)
    record = json.loads((folder / "eval-t=0.0-gamma=0.5.json").read_text())
    assert record["test"]["layers"][0]["wanted"] == 1
    assert record["test"]["layers"][0]["served"] < 1 == record["test_no_limit"]["layers"][0]["served"]
    assert {name: (folder / name).read_bytes() for name in before} == before
    out = capsys.readouterr().out
    assert f"perplexity {record['test']['ppl']:.2f}" in out
    monkeypatch.setattr(common, "cross_entropy", None)  # whoever evaluates now fails
    LM.run(options | at_test, monkeypatch)
    assert capsys.readouterr().out.split("\n\n")[-2:] == out.split("\n\n")[-2:]


def test_evaluating_needs_no_even_deal_of_micro_batches(options, monkeypatch, capsys):
    LM.run(options, monkeypatch)
    context = common.Context(0, 3, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(common, "setup", lambda *_: context)
    monkeypatch.setattr(common.Context, "barrier", lambda self: None)
    monkeypatch.setattr(common.Context, "gather", lambda self, own: [own])
    monkeypatch.setattr(common.Context, "sum", lambda self, own: own)
    assert "cannot be dealt to 3" in LM.refused(options | {"seed": 1}, monkeypatch, capsys)
    LM.run(options | {"eval_only": True, "eval_capacity_factor": 0.5}, monkeypatch)
    out = capsys.readouterr().out
    assert "under the limit" in out and "--resume" not in out


def test_an_evaluation_is_done_again_after_more_training(options, monkeypatch):
    at_test = options | {"eval_only": True, "eval_capacity_factor": 0.5}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(common, "cosine", lambda step, *rest: 1e-2 / (3 - step))  # the run ends before its last step
        LM.run(options, patch)
    found = []
    for _ in range(2):
        LM.run(at_test, monkeypatch)
        file = only_run(options["out_dir"]) / "eval-t=None-gamma=0.5.json"
        found.append(json.loads(file.read_text()))
        LM.run(options, monkeypatch)
    assert [result["step"] for result in found] == [2, 4] and found[0]["test"]["loss"] != found[1]["test"]["loss"]


def test_gpt2_weights_are_evaluated_and_trained_on(options, tmp_path, monkeypatch, capsys):
    options |= {"router": "dense", "init_from": tmp_path / "gpt2", "out_dir": tmp_path / "out"}
    options |= {"frequency_bias": False, "learning_rate": 1e-9, "min_learning_rate": 0}
    evaluated = options | {"eval_only": True}
    assert "has no config.json" in LM.refused(evaluated, monkeypatch, capsys)
    for wrong in ({"router": "switch"}, {"frequency_bias": True}):
        assert "--init_from loads GPT-2: give --router dense" in LM.rejected(evaluated | wrong, monkeypatch, capsys)
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = dict(vocab_size=320, n_positions=16, n_layer=2, n_head=2, n_embd=16, n_inner=32, initializer_range=0.3)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    theirs.save_pretrained(options["init_from"])
    capsys.readouterr()
    assert "has n_layer 2, not 3" in LM.refused(evaluated | {"n_layer": 3}, monkeypatch, capsys)
    LM.run(evaluated, monkeypatch)
    (file,) = only_run(options["out_dir"]).glob("eval-*.json")
    data = opened(options)[1]
    total = count = 0
    with torch.no_grad():
        for x, y in data.eval_batches("test"):
            total -= float(theirs(x).logits.log_softmax(dim=2).gather(2, y.unsqueeze(2)).sum())
            count += y.numel()
    scores = json.loads(file.read_text())["test"]
    assert scores["loss"] == pytest.approx(total / count, rel=1e-5) and scores["tokens"] == count
    LM.run(options, monkeypatch)  # training starts there, too
    assert result_of(options["out_dir"])["test"]["loss"] == pytest.approx(scores["loss"], rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Presets and tables

SIZES = {  # XMoE table 1: parameters of 8 x 3072, 16 x 1536, 32 x 768 and 64 x 384
    "323M": (322_818_816, 322_892_544, 323_040_000, 323_334_912),
    "556M": (556_254_208, 556_352_512, 556_549_120, 556_942_336),
}


@pytest.mark.parametrize("corpus", ["openwebtext", "wikitext103"])
@pytest.mark.parametrize("size", SIZES)
def test_rows_of_table_1_have_the_papers_parameters_and_figures(corpus, size):
    preset = f"{corpus}-{size}"
    base = train_lm.Config(**{"preset": preset} | train_lm.PRESETS[preset])
    assert base.steps == {"openwebtext": 60_000, "wikitext103": 4_000}[corpus]
    assert (base.block_size, base.batch_tokens, base.micro_tokens) == (1024, 256 * 1024, 16 * 1024)
    whole, half, quarter, eighth = SIZES[size]
    hashed = whole - 6 * 8 * base.n_embd  # it has no router
    expected = [whole, hashed, whole, half, quarter, eighth, half, quarter, eighth]
    totals, factors = [], []
    table = train_lm.table1(base)
    for _, change in table.rows:
        with torch.device("meta"):
            model = train_lm.GPT(dataclasses.replace(base, **change))
        totals.append(measures.count_parameters(model)["total"])
        factors.append(model.moe_layers[0].capacity_factor if model.moe_layers else 0)
    assert totals[1:] == expected and factors == [0, 1, 1, 1, 2, 4, 8, 2, 4, 8]
    if size == "323M":
        assert totals[0] == 124_439_808
    rows = [labels for labels, _ in table.rows]
    width = base.ffn_size
    sizes = [f"{8 * k} x {width // k}" for k in (1, 1, 1, 2, 4, 8, 2, 4, 8)]
    assert [row[:2] for row in rows[:2]] == [("dense", f"1 x {width}"), ("Switch", f"8 x {width}")]
    assert [row[1] for row in rows[1:]] == sizes
    papers = {"323M": [("22.61", "22.24"), ("19.46", "19.97")], "556M": [("", ""), ("18.72", "19.10")]}
    assert [row[2:] for row in (rows[0], rows[9])] == papers[size]


def test_the_124M_presets_are_dense():
    for corpus in ("openwebtext", "wikitext103"):
        with torch.device("meta"):
            model = train_lm.GPT(train_lm.Config(**train_lm.PRESETS[f"{corpus}-124M"]))
        assert measures.count_parameters(model) == {"total": 124_439_808, "active": 124_439_808, "moe": 0}


def test_table_1_has_every_row_and_runs_none_twice(options, monkeypatch, capsys):
    options |= {"table": 1, "steps": 2, "ffn_size": 64, "sample_tokens": 1}
    LM.run(options, monkeypatch)
    out = capsys.readouterr().out
    assert "XMoE table 1: test perplexity of every router at equal FLOPs, preset demo, seeds: 1\n" in out
    rows = last_table(out)
    assert [row[1] for row in rows] == ["1 x 64", *["8 x 64"] * 3, *["16 x 32", "32 x 16", "64 x 8"] * 2]
    assert rows[0][2:4] == ["22.61", "22.24"] and rows[9][2:4] == ["19.46", "19.97"]
    found = [json.loads(path.read_text()) for path in options["out_dir"].glob("*/result.json")]
    assert sorted(row[5] for row in rows) == sorted(f"{result['test']['bpb']:.3f}" for result in found)
    assert sorted(row[6] for row in rows) == sorted(f"{result['test']['ppl']:.2f}" for result in found)
    assert rows[0][8:] == [""] * 4 and all(float(row[6]) > 1 and row[8] and row[9] for row in rows[1:])
    monkeypatch.setattr(common, "cross_entropy", None)
    LM.run(options, monkeypatch)
    assert last_table(capsys.readouterr().out) == rows


def test_table_2_says_what_share_was_really_kept(options, monkeypatch, capsys):
    options |= {"table": 2, "steps": 2, "sample_tokens": 1}
    LM.run(options, monkeypatch)
    rows = last_table(capsys.readouterr().out)
    assert [row[2] for row in rows] == ["1.00x"] + ["1.00x", "0.75x", "0.50x", "0.25x"] * 2
    assert [row[1] for row in rows] == [""] + ["8 x 4"] * 4 + ["16 x 2"] * 4
    for row in rows[1:]:
        flops, experts, wanted, served = float(row[2][:-1]), int(row[1].split()[0]), float(row[9]), float(row[10])
        assert served <= flops * experts + 0.6  # the last micro-batch is small, and its capacity rounded up
        assert (wanted == served == experts) == (flops == 1)
    LM.run(options | {"resume": False}, monkeypatch)  # trains again, and comes to the same
    out = capsys.readouterr().out
    assert last_table(out) == rows and out.count("step 2: train") == 3
    monkeypatch.setattr(common, "cross_entropy", None)
    LM.run(options, monkeypatch)
    assert last_table(capsys.readouterr().out) == rows
