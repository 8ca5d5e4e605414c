"""train_lm.py, run as a user runs it, on a small corpus with tiny models: its report, evaluation, sample and tables.

What all training scripts share is tested in test_scripts.py and test_run.py.
"""

import dataclasses
import json
import math
from itertools import groupby
from statistics import fmean

import numpy as np
import pytest
import reference_scores
import torch
from helpers import PAPERS, Script, losses, metrics, only_run, result_of, saved, table_rows, words

import train_lm
from data.batches import TokenData
from data.tokenizers import load_tokenizer
from engine import pretrained
from engine.config import command_line
from engine.device import setup
from metrics import bits_per_byte, counting, flops
from metrics.routing import RoutingStats
from routers import ROUTERS

LM = Script(train_lm)


def opened(options: dict):
    """-> config, data, new model"""
    config = command_line(train_lm.Config, train_lm.PRESETS, words(options))
    context = setup("cpu", config.dtype)
    data = TokenData.open(config.data, config, context)
    return config, data, train_lm.build(config, data, context)


# --- One run


@pytest.mark.parametrize("name", ["dense", *ROUTERS])
def test_every_router_trains_and_reports(name, options, monkeypatch, capsys):
    sparse = name != "dense"
    LM.run(options | {"router": name, "dtype": "bfloat16" if name == "topk" else "float32"}, monkeypatch)
    out, result = capsys.readouterr().out, result_of(options["out_dir"])
    limited, unlimited = result["test"], result["test_no_limit"]
    for scores in (limited, unlimited):
        assert f"{scores['bpb']:.3f} bits per byte, perplexity {scores['ppl']:.2f}" in out
    assert limited["ppl"] == pytest.approx(math.exp(limited["loss"]))
    assert len(limited["layers"]) == sparse
    assert name not in PAPERS or all(layer["losses"].keys() <= {"balance"} for layer in limited["layers"])
    assert "\n\nsample:" in out
    logged = metrics(options["out_dir"])
    assert [(record["step"], record["tokens"]) for record in logged] == [(2, 128), (4, 128)]
    # Every sparse layer drops tokens under its limit, and is tested again without one.
    assert (unlimited != limited) == sparse
    assert ("under the limit" in out) == sparse
    assert ("without a limit" in out) == sparse
    assert all(layer["cut"] > 0 for layer in limited["layers"])
    assert all(layer["cut"] == 0 for layer in unlimited["layers"])
    dtypes = {weight.dtype for weight in saved(options)["model"].values()}
    assert dtypes <= {torch.float32, torch.int64}  # int64: Hash's table
    # FLOPs with the experts that served, by hand: a row of an expert is a product with both its matrices.
    _, _, net = opened(options | {"router": name})
    head = 2 * 16 * net.vocab_size
    expected = flops.flops_per_token(net, net.config, head)
    for moe, layer in zip(net.moe_layers, limited["layers"]):
        E, F, D = moe.experts.w_in.shape
        expected += (layer["served"] - flops.served_rows(moe)) * 2 * 2 * F * D
        assert len(layer["load"]) == E
        assert sum(layer["load"]) == pytest.approx(1, abs=E * 5e-6)
    assert result["flops_served"] == pytest.approx(expected)
    assert ("forward MFLOPs per token used" in out) == (result["flops_served"] != result["flops"])


def test_training_lowers_the_loss(options, monkeypatch):
    """Without a frequency bias, the model learns how often each token of the random text occurs."""
    changes = {"steps": 40, "learning_rate": 2e-2, "eval_every": 20, "frequency_bias": False}
    LM.run(options | changes, monkeypatch)
    first, last = losses(options["out_dir"])
    assert last < first - 0.3


def test_evaluation_matches_a_literal_loop(options, monkeypatch):
    """On a whole split and on its first tokens; routers that sample do so from the same seeds every time."""
    _, data, net = opened(options | {"dtype": "float64", "dropout": 0.5, "micro_tokens": 112, "batch_tokens": 112})
    context, draws = setup("cpu", "float64"), []
    net.moe_layers[0].watchers.append(lambda *_: draws.append(float(torch.rand(()))))  # as a router might
    full, repeated, part = (train_lm.evaluate(net, data, "valid", context, limit) for limit in (None, None, 112))
    assert net.training
    assert full == repeated
    assert full["tokens"] == (len(data.tokens["valid"]) - 1) // 16 * 16
    assert part["tokens"] == 112 < full["tokens"]
    total, balances = 0.0, 0.0
    net.eval().requires_grad_(False)
    batches = list(data.eval_batches("valid", None))
    n = len(batches)
    assert draws[:n] == draws[n : 2 * n]
    assert len(set(draws)) == n
    monkeypatch.setattr(type(context), "sum", lambda self, x: x)
    monkeypatch.setattr(type(context), "gather", lambda self, x: [x])
    for rank in (0, 1):  # each of two processes draws what one process draws for the same batches
        del draws[n:]
        train_lm.evaluate(net, data, "valid", dataclasses.replace(context, rank=rank, world=2))
        assert draws[n:] == draws[rank:n:2]
    net.eval()
    assert batches[-1][1].numel() < 112 == batches[0][1].numel()
    for x, y in batches:
        logits, balance = net(x)
        total -= float(logits.log_softmax(dim=2).gather(2, y.unsqueeze(2)).sum())
        balances += float(balance) * y.numel()
    assert full["loss"] == pytest.approx(total / full["tokens"])
    balance = sum(layer["losses"]["balance"] for layer in full["layers"])
    assert net.config.balance_coef * balance == pytest.approx(balances / full["tokens"])
    eot = data.tokenizer.eot
    for scores in (full, part):  # bytes and words of the evaluated tokens, not of the whole split
        ids = data.tokens["valid"][1 : 1 + scores["tokens"]].tolist()
        texts = [data.tokenizer.decode([*text]) for end, text in groupby(ids, eot.__eq__) if not end]
        size, words = sum(map(len, texts)), sum(len(text.split()) for text in texts)
        nats = scores["loss"] * scores["tokens"]
        assert scores["bpb"] == pytest.approx(nats / size / math.log(2))
        assert scores["word_ppl"] == pytest.approx(math.exp(min(700, nats / words)))
    monkeypatch.setattr("data.batches.has_words", lambda text: False)  # as for Chinese
    scores = train_lm.evaluate(net, data, "valid", context, 112)
    assert scores["word_ppl"] is None
    assert "per word" not in train_lm.describe(scores)


def test_counting_baselines_match_literal_loops(options, monkeypatch, capsys):
    _, data, _ = opened(options)
    text = data.meta["splits"]["test"]
    losses_of_run = counting.text_losses(data, options["steps"])
    train, test = data.tokens["train"][:300].tolist(), data.tokens["test"][:60].tolist()
    data.tokens |= {"train": data.tokens["train"][:300], "test": data.tokens["test"][:60]}
    pairs, V = list(zip(train, train[1:])), data.vocab_size
    seen = data.seen(2).tolist()
    assert 100 < sum(seen) < 250
    trained = [pair for position, pair in enumerate(pairs, 1) if seen[position]]
    single = reference_scores.interpolated(train, [1 / V] * V)
    expected = {"unigrams": -fmean(math.log(single[token]) for token in test)}
    for name, counted in {"bigrams": trained, "all bigrams": pairs}.items():
        probabilities = [reference_scores.bigrams(counted, first, V)[second] for first, second in zip(test, test[1:])]
        expected[name] = -fmean(map(math.log, probabilities))
    assert counting.text_losses(data, 2) == pytest.approx(expected)
    assert len(set(expected.values())) == 3
    data.tokens["train"] = np.zeros(2**24 + 1, dtype="uint16")
    assert counting.text_losses(data, 2) == {}  # a large text would take long
    LM.run(options, monkeypatch)
    out, result = capsys.readouterr().out, result_of(options["out_dir"])["counting"]
    expected = {name: bits_per_byte(loss, text) for name, loss in losses_of_run.items()}
    assert result == pytest.approx(expected)
    assert f"counting baselines, bits per byte: unigrams {result['unigrams']:.3f}, " in out


def test_a_test_of_an_interrupted_training_says_so(options, monkeypatch, capsys):
    LM.run(options | {"prompt": "the"}, monkeypatch)
    assert "the prompt is continued after the training, which is not finished\n" in capsys.readouterr().out
    LM.run(options | {"prompt": "the"}, monkeypatch)
    LM.run(options | {"eval_only": True}, monkeypatch)
    out = capsys.readouterr().out
    assert "the prompt is continued" not in out
    assert " steps" not in out
    (file,) = only_run(options["out_dir"]).glob("eval-*.json")
    result, config = json.loads(file.read_text()), train_lm.Config(steps=options["steps"] + 1)
    [_, title, *_] = train_lm.report(config, result | {"flops_served": None}).splitlines()
    assert title == f"{result['name']}, test after {options['steps']} of {config.steps} steps"


def test_a_finished_run_continues_a_prompt(options, monkeypatch, capsys):
    """Without a capacity limit, and without another test; a token counts once in the mean of served experts."""
    options |= {"prompt": "12 34", "sample_tokens": 6, "sample_top_k": 1}
    LM.run(options, monkeypatch)
    tokenizer, (net, _) = load_tokenizer(options["data"]), pretrained.load(only_run(options["out_dir"]))
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode_batch(["12 34"])[0]]])
    written = net.generate(ids, 6, top_k=1, end=tokenizer.eot)
    assert written.shape[1] == ids.shape[1] + 6  # the leading end-of-text token does not end the sample
    watches = [RoutingStats(moe) for moe in net.moe_layers]
    with torch.no_grad(), net.no_limit():
        net(written[:, -net.config.block_size :])
    served = watches[0].finish()["served"]
    text = tokenizer.decode(written[0, 1:].tolist())
    assert text.startswith("12 34")
    assert served > 1
    sample = f"sample:\n{text}\n({served:.1f} experts served per token)\n"
    assert capsys.readouterr().out.endswith(sample)
    with monkeypatch.context() as patch:
        patch.setattr(train_lm.GPT, "forward", None)  # training or testing would fail
        LM.run(options, patch)
    assert capsys.readouterr().out.endswith(sample)
    LM.run(options | {"eval_only": True, "eval_threshold": 0.0}, monkeypatch)  # the sample uses this threshold, too
    assert capsys.readouterr().out.endswith("\n(1.0 experts served per token)\n")


def test_a_sample_depends_only_on_its_seed(options, monkeypatch, capsys):
    options |= {"sample_temperature": 5.0, "sample_tokens": 12, "sample_top_k": 300}
    samples = []
    for seed in (0, 1, 0):
        LM.run(options | {"sample_seed": seed}, monkeypatch)
        samples.append(capsys.readouterr().out.split("\n\nsample:\n")[1])
    assert samples[0] == samples[2]
    assert samples[0] != samples[1]


def test_a_sample_stops_at_the_end_of_a_text(options, monkeypatch, capsys):
    tokenizer = load_tokenizer(options["data"])
    continuation = [*tokenizer.encode_batch(["7é"])[0], tokenizer.eot]

    def generate(self, ids, *sampling, end):
        assert end == tokenizer.eot
        return torch.cat([ids, torch.tensor([continuation])], dim=1)

    monkeypatch.setattr(train_lm.GPT, "generate", generate)
    LM.run(options | {"steps": 2, "prompt": "5"}, monkeypatch)
    assert "\n\nsample:\n57é\n" in capsys.readouterr().out


# --- Evaluating a trained model, and weights of GPT-2


def test_evaluation_with_other_routing_leaves_the_run_unchanged(options, monkeypatch, capsys):
    at_test = options | {"eval_only": True, "eval_threshold": 0.0, "eval_capacity": 0.125}
    assert "first train with all constants but eval_ ones, or pass --init_from RUN" in LM.refused(
        at_test, monkeypatch, capsys
    )
    LM.run(options, monkeypatch)
    folder = only_run(options["out_dir"])
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    LM.run(at_test, monkeypatch)
    assert {name: (folder / name).read_bytes() for name in files} == files
    file = folder / "eval-t=0.0-capacity=0.125.json"
    record = json.loads(file.read_text())
    (limited,), (unlimited,) = (record[test]["layers"] for test in ("test", "test_no_limit"))
    assert limited["wanted"] == 1
    assert limited["served"] < 1
    assert unlimited["served"] == 1
    out = capsys.readouterr().out
    assert f"perplexity {record['test']['ppl']:.2f}" in out
    monkeypatch.setattr(train_lm.GPT, "forward", None)  # evaluating raises TypeError
    with pytest.raises(TypeError):
        LM.run(at_test | {"resume": False}, monkeypatch)
    LM.run(at_test, monkeypatch)
    assert capsys.readouterr().out.split("\n\n")[-2:] == out.split("\n\n")[-2:]
    for change in ({"step": 3}, {"code": {}}):  # evaluates again after more steps, or with other code
        file.write_text(json.dumps(record | change))
        with pytest.raises(TypeError):
            LM.run(at_test, monkeypatch)
    (folder / "config.json").write_text('{"data_checksum": "of other data"}')
    for resume in (True, False):
        message = LM.refused(at_test | {"resume": resume}, monkeypatch, capsys)
        assert f"{folder} differs in data_checksum" in message


@pytest.mark.parametrize(
    "change",
    [
        {"router": "topk", "top_k": 1},
        {"router": "topk", "data": "text"},
        {"router": "switch", "split": 4, "capacity": 0.1},
    ],
    ids=lambda change: str([*change]),
)
def test_a_run_can_be_tested_with_other_constants_and_on_another_text(change, options, monkeypatch, capsys):
    monkeypatch.setattr("data.folder.PREPARED", options["out_dir"] / "prepared")
    LM.run(options | {"router": "topk", "out_dir": options["out_dir"] / "trained"}, monkeypatch)
    run = only_run(options["out_dir"] / "trained")
    files = {path.name: path.read_bytes() for path in run.iterdir()}
    if "data" in change:
        text = options["out_dir"] / "other.txt"
        text.write_text("\n\n".join(" ".join(map(str, range(i, i + 20))) for i in range(400)))
        change = change | {"data": text}
    tested = options | change | {"eval_only": True, "init_from": run, "out_dir": options["out_dir"] / "tested"}
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(train_lm.Run, "steps", None)  # training would fail
        LM.run(tested, patch)
    out = capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in run.iterdir()} == files
    (file,) = only_run(tested["out_dir"]).glob("eval-*.json")
    record = json.loads(file.read_text())
    assert f"perplexity {record['test']['ppl']:.2f}" in out
    for name, value in change.items():
        assert record["config"][name] == (str(value) if name == "data" else value)
    names = {name for name in change if name != "router" or change["router"] != "topk"}
    assert record["trained"].keys() == names
    assert all(f"{name} {change[name]} (trained with {record['trained'][name]})" in out for name in names)
    # The same as evaluating the run's weights in a model with these constants
    config = command_line(train_lm.Config, train_lm.PRESETS, words(tested))
    context = setup("cpu", config.dtype)
    data = TokenData.open(config.data, config, context)
    assert data.tokenizer.sha256 == load_tokenizer(run).sha256
    net = train_lm.GPT(config, data.vocab_size)
    net.load_state_dict(saved({"out_dir": options["out_dir"] / "trained"})["model"])
    assert train_lm.evaluate(net, data, "test", context)["loss"] == pytest.approx(record["test"]["loss"])


def test_a_prepared_corpus_with_another_tokenizer_cannot_test_a_run(options, corpora, monkeypatch, capsys):
    LM.run(options, monkeypatch)
    run = only_run(options["out_dir"])
    tested = options | {"eval_only": True, "init_from": run, "data": corpora["c"]}
    line = LM.refused(tested, monkeypatch, capsys)
    assert line.endswith(
        "another tokenizer than the corpus: pass --data a text file or folder, "
        f"or prepare the corpus with --tokenizer {run}"
    )


def test_an_exported_run_can_be_routed_differently_like_the_run_itself(options, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    LM.run(options, monkeypatch)
    run = only_run(options["out_dir"])
    pretrained.export(run, tmp_path / "exported")
    losses = []
    for name in (run, tmp_path / "exported"):
        folder = tmp_path / f"from {name.name}"
        LM.run(options | {"router": "topk", "eval_only": True, "init_from": name, "out_dir": folder}, monkeypatch)
        (file,) = only_run(folder).glob("eval-*.json")
        losses.append(json.loads(file.read_text())["test"]["loss"])
    assert losses[0] == losses[1]


def test_gpt2_weights_can_be_evaluated_and_trained_further(options, tmp_path, monkeypatch):
    options |= {"router": "dense", "init_from": tmp_path / "gpt2", "out_dir": tmp_path / "out"}
    options |= {"frequency_bias": False, "learning_rate": 1e-9, "min_learning_rate": 0}
    evaluate = options | {"eval_only": True}
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = dict(vocab_size=320, n_positions=16, n_layer=2, n_head=2, n_embd=16, n_inner=32, initializer_range=0.3)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    theirs.save_pretrained(options["init_from"])
    LM.run(evaluate, monkeypatch)
    (file,) = only_run(options["out_dir"]).glob("eval-*.json")
    file.write_text(file.read_text().replace('"test"', '"weights of another day"'))
    LM.run(evaluate, monkeypatch)  # evaluates again, since the weights may have changed
    _, data, _ = opened(options)
    total = count = 0
    with torch.no_grad():
        for x, y in data.eval_batches("test"):
            total -= float(theirs(x).logits.log_softmax(dim=2).gather(2, y.unsqueeze(2)).sum())
            count += y.numel()
    scores = json.loads(file.read_text())["test"]
    assert scores["loss"] == pytest.approx(total / count, rel=1e-5)
    assert scores["tokens"] == count
    LM.run(options, monkeypatch)  # training starts from these weights
    assert result_of(options["out_dir"])["test"]["loss"] == pytest.approx(scores["loss"], rel=1e-5)


# --- Presets and tables

PAPER = {  # XMoE table 1: parameters of 8 x 3072, 16 x 1536, 32 x 768 and 64 x 384
    "323M": (322_818_816, 322_892_544, 323_040_000, 323_334_912),
    "556M": (556_254_208, 556_352_512, 556_549_120, 556_942_336),
}
V = 50257  # GPT-2's


@pytest.mark.parametrize("preset", ["openwebtext-323M", "wikitext103-323M", "openwebtext-556M", "wikitext103-556M"])
def test_rows_of_table_1_have_the_papers_parameters_and_perplexities(preset):
    corpus, size = preset.split("-")
    base = train_lm.Config(**{"preset": preset} | train_lm.PRESETS[preset])
    assert base.steps == {"openwebtext": 60_000, "wikitext103": 4_000}[corpus]
    assert (base.block_size, base.batch_tokens, base.micro_tokens) == (1024, 256 * 1024, 16 * 1024)
    unsplit, half, quarter, eighth = PAPER[size]
    hashed = unsplit - 6 * 8 * base.n_embd  # no router weights
    expected = [unsplit, hashed, half, quarter, eighth, half, quarter, eighth]
    totals, factors = [], []
    table = train_lm.table1(base)
    for _, change in table.rows:
        with torch.device("meta"):
            net = train_lm.GPT(dataclasses.replace(base, **change), V)
        totals.append(flops.count_parameters(net)["total"])
        factors.append(int(net.moe_layers[0].capacity_factor) if net.moe_layers else 0)
    assert totals[1:] == expected
    assert factors == [0, 1, 1, 2, 4, 8, 2, 4, 8]
    assert "without BASE" in table.title  # too slow on a GPU
    perplexities = {"323M": [("22.61", "22.24"), ("19.46", "19.97")], "556M": [("", ""), ("18.72", "19.10")]}
    assert [table.rows[row][0][2:] for row in (0, 8)] == perplexities[size]
    if size == "323M":
        assert totals[0] == 124_439_808
        dense = train_lm.PRESETS[f"{corpus}-124M"] | {"router": "threshold"}
        assert dense == train_lm.PRESETS[preset] | {"router": "threshold"}


def test_table_1_has_every_row_and_trains_each_once(options, monkeypatch, capsys):
    options |= {"table": 1, "steps": 1, "eval_every": 1, "ffn_size": 64, "sample_tokens": 1}
    LM.run(options, monkeypatch)
    out = capsys.readouterr().out
    assert "XMoE table 1: test perplexity of every router at equal FLOPs, preset demo, seeds: 1\n" in out
    rows = table_rows(out.split("\n\n")[-1])
    assert [row[1] for row in rows] == ["1 x 64", *["8 x 64"] * 3, *["16 x 32", "32 x 16", "64 x 8"] * 2]
    assert rows[0][2:4] == ["22.61", "22.24"]
    assert rows[9][2:4] == ["19.46", "19.97"]
    tests = [json.loads(path.read_text())["test"] for path in options["out_dir"].glob("*/result.json")]
    assert sorted(row[5] for row in rows) == sorted(f"{test['bpb']:.3f}" for test in tests)
    assert sorted(row[6] for row in rows) == sorted(f"{test['ppl']:.2f}" for test in tests)
    assert all(float(row[6]) > 1 for row in rows)
    assert rows[0][8:12] == [""] * 4  # a dense model has no routing statistics
    assert all(float(row[12]) >= 0 for row in rows)  # MFLOPs served
    assert all(all(row[8:10]) for row in rows[1:])
    monkeypatch.setattr(train_lm.GPT, "forward", None)  # training or testing would fail
    LM.run(options, monkeypatch)
    assert table_rows(capsys.readouterr().out.split("\n\n")[-1]) == rows


def test_table_2_reports_served_experts_within_each_capacity(options, monkeypatch, capsys):
    """With `--resume false` each of the three models is trained again, but only once."""
    LM.run(options | {"table": 2, "steps": 2, "sample_tokens": 1, "resume": False}, monkeypatch)
    out = capsys.readouterr().out
    rows = table_rows(out.split("\n\n")[-1])
    assert out.count("step 2: train") == 3
    assert [row[2] for row in rows] == ["1.00x"] + ["1.00x", "0.75x", "0.50x", "0.25x"] * 2
    assert [row[1] for row in rows] == [""] + ["8 x 4"] * 4 + ["16 x 2"] * 4
    for row in rows[1:]:
        experts, capacity = int(row[1].split()[0]), float(row[2][:-1])
        wanted, served = float(row[9]), float(row[10])
        assert served <= capacity * experts + 0.6  # the last micro-batch is small: its capacity is rounded up
        assert (wanted == served == experts) == (capacity == 1)
