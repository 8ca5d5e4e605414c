"""`train_lm.py` as a user runs it, on a small corpus and tiny models: what is particular to it."""

import dataclasses
import json
import math
from collections import Counter
from itertools import groupby
from statistics import fmean

import numpy as np
import pytest
import reference
import torch
from helpers import Script, losses, metrics, only_run, result_of, saved, table_rows, words

import train_lm
from data.batches import TokenData
from data.tokenizers import load_tokenizer
from engine import pretrained
from engine.config import command_line
from engine.device import setup
from metrics import bits_per_byte, counting, flops
from metrics.routing import RoutingStats, easy_and_hard
from routers import NOT_CHOSEN, ROUTERS

LM = Script(train_lm)


def opened(options: dict):
    """-> config, data, new model"""
    config = command_line(train_lm.Config, train_lm.PRESETS, words(options))
    context = setup("cpu", config.dtype)
    data = TokenData.open(config.data, config, context)
    return config, data, train_lm.build(config, data, context)


# ---------------------------------------------------------------------------------------------------------------------
# One run


@pytest.mark.parametrize("name", ["dense", *ROUTERS])
def test_every_router_trains_and_reports(name, options, monkeypatch, capsys):
    LM.run(options | {"router": name, "dtype": "bfloat16" if name == "topk" else "float32"}, monkeypatch)
    out, result = capsys.readouterr().out, result_of(options["out_dir"])
    scores, unlimited = result["test"], result["test_no_limit"]
    assert all(f"{of['bpb']:.3f} bits per byte, perplexity {of['ppl']:.2f}" in out for of in (scores, unlimited))
    assert scores["ppl"] == pytest.approx(math.exp(scores["loss"]))
    assert len(scores["layers"]) == (name != "dense") and scores["balance"] >= 0
    assert "\n\nsample:" in out
    logged = metrics(options["out_dir"])
    assert [(record["step"], record["tokens"]) for record in logged] == [(2, 128), (4, 128)]
    limited = name != "dense"
    assert ("without a limit" in out) == ("under the limit" in out) == (unlimited != scores) == limited
    if limited:
        assert unlimited["layers"][0]["cut"] == 0 and scores["layers"][0]["cut"] > 0
    assert {w.dtype for w in saved(options)["model"].values()} <= {torch.float32, torch.int64}  # the last are Hash's
    # Only a router whose tokens choose how many experts they get says which tokens are easy and which are hard.
    assert ("easy" in result) == ("many: " in out) == (name == "threshold")


def test_learning_happens(options, monkeypatch):
    """Of numbers drawn by chance there is nothing to learn but how often each token comes."""
    given = {"steps": 40, "learning_rate": 2e-2, "eval_every": 20, "frequency_bias": False}
    LM.run(options | given, monkeypatch)
    first, last = losses(options["out_dir"])
    assert last < first - 0.3


def test_evaluation_is_its_literal_definition(options, monkeypatch):
    """On all of a split or on its first tokens; what a router draws, and so the score, is the same every time."""
    _, data, net = opened(options | {"dtype": "float64", "dropout": 0.5, "micro_tokens": 112, "batch_tokens": 112})
    context, draws = setup("cpu", "float64"), []
    net.moe_layers[0].watchers.append(lambda *_: draws.append(float(torch.rand(()))))  # as a router might
    whole, again, some = (train_lm.evaluate(net, data, "valid", context, most) for most in (None, None, 112))
    assert net.training and whole == again
    assert some["tokens"] == 112 < whole["tokens"] and whole["tokens"] == (len(data.tokens["valid"]) - 1) // 16 * 16
    total, balances = 0.0, 0.0
    net.eval().requires_grad_(False)
    batches = list(data.eval_batches("valid", None))
    assert draws[: len(batches)] == draws[len(batches) : 2 * len(batches)] and len(set(draws)) == len(batches)
    monkeypatch.setattr(type(context), "sum", lambda self, x: x)
    for rank in (0, 1):  # of two processes each draws for its batches what a single one does
        del draws[len(batches) :]
        train_lm.evaluate(net, data, "valid", dataclasses.replace(context, rank=rank, world=2))
        assert draws[len(batches) :] == draws[rank : len(batches) : 2]
    net.eval()
    assert batches[-1][1].numel() < 112 == batches[0][1].numel()
    for x, y in batches:
        logits, balance = net(x)
        total -= float(logits.log_softmax(dim=2).gather(2, y.unsqueeze(2)).sum())
        balances += float(balance) * y.numel()
    assert whole["loss"] == pytest.approx(total / whole["tokens"])
    assert whole["balance"] == pytest.approx(balances / whole["tokens"])
    eot = data.tokenizer.eot
    for scores in (whole, some):  # the text that was read, and no more of the split
        ids = data.tokens["valid"][1 : 1 + scores["tokens"]].tolist()
        texts = [data.tokenizer.decode([*own]) for end, own in groupby(ids, eot.__eq__) if not end]
        size, words = sum(map(len, texts)), sum(len(text.split()) for text in texts)
        nats = scores["loss"] * scores["tokens"]
        assert scores["bpb"] == pytest.approx(nats / size / math.log(2))
        assert scores["word_ppl"] == pytest.approx(math.exp(min(700, nats / words)))
    monkeypatch.setattr("data.batches.has_words", lambda text: False)  # as of Chinese
    scores = train_lm.evaluate(net, data, "valid", context, 112)
    assert scores["word_ppl"] is None and "per word" not in train_lm.describe(scores)


def test_counting_is_its_literal_definition(options, monkeypatch, capsys):
    _, data, _ = opened(options)
    counts = data.meta["splits"]["test"]
    expected = counting.text_losses(data, 4)
    train, test = data.tokens["train"][:300].tolist(), data.tokens["test"][:60].tolist()
    data.tokens |= {"train": data.tokens["train"][:300], "test": data.tokens["test"][:60]}
    pairs, V = list(zip(train, train[1:])), data.vocab_size
    seen = data.seen(2).tolist()
    assert 100 < sum(seen) < 250
    trained = [pair for place, pair in enumerate(pairs, 1) if seen[place]]
    single = reference.interpolated(train, [1 / V] * V)
    by_hand = {"unigrams": -fmean(math.log(single[token]) for token in test)}
    for name, known in {"bigrams": trained, "all bigrams": pairs}.items():
        found = [reference.bigrams(known, one, V)[two] for one, two in zip(test, test[1:])]
        by_hand[name] = -fmean(map(math.log, found))
    assert counting.text_losses(data, 2) == pytest.approx(by_hand) and len(set(by_hand.values())) == 3
    data.tokens["train"] = np.zeros(2**24 + 1, dtype="uint16")
    assert counting.text_losses(data, 2) == {}  # it would take long
    LM.run(options, monkeypatch)
    out, kept = capsys.readouterr().out, result_of(options["out_dir"])["counting"]
    assert kept == pytest.approx({name: bits_per_byte(loss, counts) for name, loss in expected.items()})
    assert f"counting baselines, bits per byte: unigrams {kept['unigrams']:.3f}, " in out


def test_tokens_are_ordered_by_the_experts_they_want(options, monkeypatch):
    """By a router that wants 1 + id % E experts for a token."""
    _, data, net = opened(options | {"n_layer": 4, "split": 1})
    chooser = net.moe_layers[-1].router
    E, forward = chooser.E, chooser.forward

    def by_id(h, ids):
        wanted = torch.arange(E) < 1 + ids.unsqueeze(1) % E
        return forward(h, ids)._replace(priority=torch.where(wanted, 0, NOT_CHOSEN))

    monkeypatch.setattr(chooser, "forward", by_id)
    batches = [x for x, _ in data.eval_batches("test", 1 << 16)]
    counts = Counter(torch.cat([x.flatten() for x in batches]).tolist())
    often = sorted(token for token, count in counts.items() if count >= 3)
    order = sorted(often, key=lambda token: token % E)
    easy, hard = easy_and_hard(net, batches, setup("cpu", "float32"), occurs=3)
    assert (easy, hard) == (order[:8], order[:-9:-1]) and len(often) < len(counts)
    assert order[0] % E == 0 and order[-1] % E == E - 1
    assert not net.training and not net.moe_layers[-1].watchers


def test_a_report_names_easy_and_hard_tokens(options, monkeypatch, capsys):
    _, data, _ = opened(options)
    one, two, three = (data.tokenizer.encode_batch([digit])[0][-1] for digit in "123")
    monkeypatch.setattr(train_lm, "easy_and_hard", lambda *_: ([one, two], [three]))
    LM.run(options, monkeypatch)
    out = capsys.readouterr().out
    assert "few experts of the last MoE layer: 1 2\n" in out and "many: 3\n" in out


def test_a_finished_run_goes_on_from_any_prompt(options, monkeypatch, capsys):
    """Without a limit and without testing again; experts are counted once a token that was read."""
    options |= {"prompt": "12 34", "sample_tokens": 6, "sample_top_k": 1}
    LM.run(options, monkeypatch)
    tokenizer, (net, _) = load_tokenizer(options["data"]), pretrained.load(only_run(options["out_dir"]))
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode_batch(["12 34"])[0]]])
    written = net.generate(ids, 6, top_k=1, end=tokenizer.eot)
    assert written.shape[1] == ids.shape[1] + 6  # the text's first token is the end of another, and ends nothing
    watches = [RoutingStats(moe) for moe in net.moe_layers]
    with torch.no_grad(), net.no_limit():
        net(written[:, -net.config.block_size :])
    served = watches[0].finish()["served"]
    text = tokenizer.decode(written[0, 1:].tolist())
    report = f"sample:\n{text}\n({served:.1f} experts served per token)\n"
    assert capsys.readouterr().out.endswith(report) and text.startswith("12 34") and served > 1
    with monkeypatch.context() as patch:
        patch.setattr(train_lm.GPT, "forward", None)  # whoever trains or tests now fails
        LM.run(options, patch)
    assert capsys.readouterr().out.endswith(report)
    LM.run(options | {"eval_only": True, "eval_threshold": 0.0}, monkeypatch)  # routed as it is asked for
    assert capsys.readouterr().out.endswith("\n(1.0 experts served per token)\n")


def test_the_sample_is_drawn_from_its_seed(options, monkeypatch, capsys):
    found = []
    for seed in (0, 1, 0):
        given = {"sample_seed": seed, "sample_temperature": 5.0, "sample_tokens": 12, "sample_top_k": 300}
        LM.run(options | given, monkeypatch)
        found.append(capsys.readouterr().out.split("\n\nsample:\n")[1])
    assert found[0] == found[2] != found[1]


def test_a_sample_ends_before_the_end_of_a_text(options, monkeypatch, capsys):
    tokenizer = load_tokenizer(options["data"])
    more = [*tokenizer.encode_batch(["7é"])[0], tokenizer.eot]

    def write(self, ids, *rest, end):
        assert end == tokenizer.eot
        return torch.cat([ids, torch.tensor([more])], dim=1)

    monkeypatch.setattr(train_lm.GPT, "generate", write)
    LM.run(options | {"steps": 2, "prompt": "5"}, monkeypatch)
    assert "\n\nsample:\n57é\n" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# A trained model, and weights from elsewhere


def test_evaluation_under_another_routing_leaves_the_run_alone(options, monkeypatch, capsys):
    at_test = {"eval_only": True, "eval_threshold": 0.0, "eval_capacity": 0.125}
    assert "train with the same constants but eval_ ones first" in LM.refused(options | at_test, monkeypatch, capsys)
    LM.run(options, monkeypatch)
    folder = only_run(options["out_dir"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    LM.run(options | at_test, monkeypatch)
    file = folder / "eval-t=0.0-capacity=0.125.json"
    record = json.loads(file.read_text())
    assert record["test"]["layers"][0]["wanted"] == 1
    assert record["test"]["layers"][0]["served"] < 1 == record["test_no_limit"]["layers"][0]["served"]
    assert {name: (folder / name).read_bytes() for name in before} == before
    out = capsys.readouterr().out
    assert f"perplexity {record['test']['ppl']:.2f}" in out
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(train_lm.GPT, "forward", None)  # whoever evaluates now fails
        LM.run(options | at_test | {"resume": False}, patch)
    monkeypatch.setattr(train_lm.GPT, "forward", None)
    LM.run(options | at_test, monkeypatch)
    assert capsys.readouterr().out.split("\n\n")[-2:] == out.split("\n\n")[-2:]
    for before in ({"step": 3}, {"code": {}}):  # since then it has trained on, or the code is another
        file.write_text(json.dumps(record | before))
        with pytest.raises(TypeError):
            LM.run(options | at_test, monkeypatch)
    (folder / "config.json").write_text('{"data_checksum": "of other data"}')
    for resume in (True, False):
        given = options | at_test | {"resume": resume}
        assert "has other data, or other constants" in LM.refused(given, monkeypatch, capsys)


def test_gpt2_weights_are_evaluated_and_trained_on(options, tmp_path, monkeypatch):
    options |= {"router": "dense", "init_from": tmp_path / "gpt2", "out_dir": tmp_path / "out"}
    options |= {"frequency_bias": False, "learning_rate": 1e-9, "min_learning_rate": 0}
    evaluated = options | {"eval_only": True}
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = dict(vocab_size=320, n_positions=16, n_layer=2, n_head=2, n_embd=16, n_inner=32, initializer_range=0.3)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    theirs.save_pretrained(options["init_from"])
    LM.run(evaluated, monkeypatch)
    (file,) = only_run(options["out_dir"]).glob("eval-*.json")
    file.write_text(file.read_text().replace('"test"', '"weights of another day"'))
    LM.run(evaluated, monkeypatch)  # whether the weights are still those, nobody knows
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

PAPER = {  # XMoE table 1: parameters of 8 x 3072, 16 x 1536, 32 x 768 and 64 x 384
    "323M": (322_818_816, 322_892_544, 323_040_000, 323_334_912),
    "556M": (556_254_208, 556_352_512, 556_549_120, 556_942_336),
}
V = 50257  # GPT-2's


@pytest.mark.parametrize("preset", ["openwebtext-323M", "wikitext103-323M", "openwebtext-556M", "wikitext103-556M"])
def test_rows_of_table_1_have_the_papers_parameters_and_figures(preset):
    base, (corpus, size) = train_lm.Config(**{"preset": preset} | train_lm.PRESETS[preset]), preset.split("-")
    assert base.steps == {"openwebtext": 60_000, "wikitext103": 4_000}[corpus]
    assert (base.block_size, base.batch_tokens, base.micro_tokens) == (1024, 256 * 1024, 16 * 1024)
    whole, half, quarter, eighth = PAPER[size]
    hashed = whole - 6 * 8 * base.n_embd  # it has no router
    expected = [whole, hashed, whole, half, quarter, eighth, half, quarter, eighth]
    totals, factors = [], []
    table = train_lm.table1(base)
    for _, change in table.rows:
        with torch.device("meta"):
            net = train_lm.GPT(dataclasses.replace(base, **change), V)
        totals.append(flops.count_parameters(net)["total"])
        factors.append(int(net.moe_layers[0].capacity_factor) if net.moe_layers else 0)
    assert totals[1:] == expected and factors == [0, 1, 1, 1, 2, 4, 8, 2, 4, 8]
    papers = {"323M": [("22.61", "22.24"), ("19.46", "19.97")], "556M": [("", ""), ("18.72", "19.10")]}
    assert [table.rows[row][0][2:] for row in (0, 9)] == papers[size]
    if size == "323M":
        assert totals[0] == 124_439_808
        dense = train_lm.PRESETS[f"{corpus}-124M"] | {"router": "threshold", "recompute": True}
        assert dense == train_lm.PRESETS[preset] | {"router": "threshold"}


def test_table_1_has_every_row_and_runs_none_twice(options, monkeypatch, capsys):
    options |= {"table": 1, "steps": 1, "eval_every": 1, "ffn_size": 64, "sample_tokens": 1}
    LM.run(options, monkeypatch)
    out = capsys.readouterr().out
    assert "XMoE table 1: test perplexity of every router at equal FLOPs, preset demo, seeds: 1\n" in out
    rows = table_rows(out.split("\n\n")[-1])
    assert [row[1] for row in rows] == ["1 x 64", *["8 x 64"] * 3, *["16 x 32", "32 x 16", "64 x 8"] * 2]
    assert rows[0][2:4] == ["22.61", "22.24"] and rows[9][2:4] == ["19.46", "19.97"]
    found = [json.loads(path.read_text()) for path in options["out_dir"].glob("*/result.json")]
    assert sorted(row[5] for row in rows) == sorted(f"{result['test']['bpb']:.3f}" for result in found)
    assert sorted(row[6] for row in rows) == sorted(f"{result['test']['ppl']:.2f}" for result in found)
    assert rows[0][8:] == [""] * 4 and all(float(row[6]) > 1 and row[8] and row[9] for row in rows[1:])
    monkeypatch.setattr(train_lm.GPT, "forward", None)
    LM.run(options, monkeypatch)
    assert table_rows(capsys.readouterr().out.split("\n\n")[-1]) == rows


def test_table_2_says_what_share_was_really_kept(options, monkeypatch, capsys):
    """With `--resume false` each of the three models is trained again, and only once."""
    LM.run(options | {"table": 2, "steps": 2, "sample_tokens": 1, "resume": False}, monkeypatch)
    out = capsys.readouterr().out
    rows = table_rows(out.split("\n\n")[-1])
    assert out.count("step 2: train") == 3
    assert [row[2] for row in rows] == ["1.00x"] + ["1.00x", "0.75x", "0.50x", "0.25x"] * 2
    assert [row[1] for row in rows] == [""] + ["8 x 4"] * 4 + ["16 x 2"] * 4
    for row in rows[1:]:
        share, experts, wanted, served = float(row[2][:-1]), int(row[1].split()[0]), float(row[9]), float(row[10])
        assert served <= share * experts + 0.6  # the last micro-batch is small, and its capacity rounded up
        assert (wanted == served == experts) == (share == 1)
