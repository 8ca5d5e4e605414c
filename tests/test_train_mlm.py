"""train_mlm.py, run as a user runs it, on three small languages with tiny models: its scores, baselines and tables.

What all training scripts share is tested in test_scripts.py and test_run.py.
"""

import dataclasses
import json
import math
import signal
from collections import Counter
from statistics import fmean

import numpy as np
import pytest
import reference_scores
import torch
from helpers import Script, losses, metrics, result_of, saved, stopped, table_rows
from test_metrics import literal_rc
from test_train_electra import EXPERTS, corpora, without_masked_tokens

import train_mlm
from data.batches import MaskedData
from engine.device import setup
from metrics import counting, flops
from model import MaskedLM

__all__ = ["corpora"]  # a fixture
MLM = Script(train_mlm)
TINY = dict(n_layer=2, n_head=2, n_embd=16, ffn_size=32, block_size=16, micro_tokens=128, batch_tokens=256, steps=4)
TINY |= dict(eval_every=2, eval_maskings=2, log_every=1, device="cpu", dtype="float32")
LANGUAGES = "aa", "bb", "en"


@pytest.fixture
def options(corpora, tmp_path) -> dict:
    return TINY | EXPERTS | {"data": corpora["data"], "out_dir": tmp_path / "out"}


def opened(options: dict) -> tuple:
    """-> config, context, data, new model"""
    config = train_mlm.Config(**options)
    context = setup("cpu", config.dtype)
    shares = {"exponent": config.sampling_exponent, "mask_share": config.mask_share}
    data = MaskedData.open(config.data, config, context, **shares)
    return config, context, data, train_mlm.build(config, data, context)


ROWS = {
    "dense": {"router": "dense"},
    "SMoE": {"router": "switch"},
    "X-MoE top-2": {"top_k": 2},
    "threshold": {"router": "threshold"},
    "two layers": {"moe_after": (1, 2), "expert_layers": 1},
    "a bare FFN": {"expert_layers": 0, "capacity_factor": 1.0},
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_trains_and_reports(row, options, monkeypatch, capsys):
    sparse = {"dense": 0, "two layers": 2}.get(row, 1)
    if row == "dense":
        options = {name: value for name, value in options.items() if name not in EXPERTS}
    MLM.run(options | ROWS[row], monkeypatch)
    out, result = capsys.readouterr().out, result_of(options["out_dir"])
    scores = result["valid"]
    assert f"valid perplexity {scores['ppl']:.2f} ({scores['predicted']:,} masked tokens)" in out
    assert tuple(scores["languages"]) == LANGUAGES
    assert all(f"{language} {ppl:.2f}" in out for language, ppl in scores["languages"].items())
    assert len(scores["layers"]) == sparse
    for i, layer in enumerate(scores["layers"]):
        assert layer["rc"] > 0
        assert layer["imbalance"] >= 1
        assert f"sparse layer {i + 1}: RC {layer['rc']:.2f}, RF {layer['rf']:.1%}" in out
        if row == "X-MoE top-2":
            assert layer["wanted"] == 2
        assert (layer["temperature"] is not None) == (row not in ("SMoE", "threshold"))
        if layer["temperature"]:
            weight = saved(options)["model"][f"encoder.moes.{i}.router.temperature"]
            assert layer["temperature"] == pytest.approx(float(weight))
            assert layer["temperature"] not in (0.3, 0.07)  # it is trained
    first, last = metrics(options["out_dir"])
    assert all(layer["rf"] is None for layer in first["layers"])
    assert first["predicted"] < last["predicted"]  # only the last evaluation averages over several maskings
    _, _, data, model = opened(options | ROWS[row])
    head = 0.4 * 2 * 16 * (16 + data.vocab_size)  # only masked tokens pass through it
    work = flops.flops_per_token(model.encoder, model.config, head)
    assert result["flops"] == pytest.approx(work)
    assert result["flops_served"] == pytest.approx(flops.as_served(model, work, scores["layers"]))
    assert all(len(layer["load"]) == moe.router.E for layer, moe in zip(scores["layers"], model.moe_layers))


def test_evaluation_matches_a_literal_loop(options):
    """RC by its formula on all validation tokens, RF by comparing every choice."""
    config, context, data, model = opened(options | {"dtype": "float64", "moe_after": (1, 2), "dropout": 0.5})
    draws = []
    model.moe_layers[0].watchers.append(lambda *_: draws.append(float(torch.rand(()))))  # as a router might
    for _ in range(2):
        scores, chosen = train_mlm.evaluate(model.train(), data, config, context, 2, None)
    half = len(draws) // 2
    assert model.training
    assert draws[:half] == draws[half:]
    assert len(set(draws)) == half
    seen = {moe: [] for moe in model.moe_layers}
    for moe in model.moe_layers:
        moe.watchers.append(lambda moe, h, routing, kept: seen[moe].append((h, routing.priority.argmax(dim=1))))
    batches = list(data.eval_batches("valid", 2))
    loss, count = dict.fromkeys(LANGUAGES, 0.0), dict.fromkeys(LANGUAGES, 0)
    balance_sum = 0.0
    model.eval().requires_grad_(False)
    for _, _, batch in batches:
        logits, balance = model(batch.ids, batch.masked, nonpad=batch.nonpad)
        balance_sum += float(balance) * batch.tokens
        for row, target, language in zip(logits.log_softmax(dim=1), batch.targets, batch.language):
            loss[data.languages[language]] -= float(row[target])
            count[data.languages[language]] += 1
    total = sum(count.values())
    assert scores["predicted"] == total
    assert scores["loss"] == pytest.approx(sum(loss.values()) / total)
    balance = config.balance_coef * sum(layer["losses"]["balance"] for layer in scores["layers"])
    assert balance == pytest.approx(balance_sum / sum(batch.tokens for _, _, batch in batches))
    assert scores["languages"] == pytest.approx({name: math.exp(loss[name] / count[name]) for name in loss})
    for layer, choices, inputs in zip(scores["layers"], chosen, seen.values()):
        first_masking = inputs[: len(batches) // 2]
        h, experts = (torch.cat(parts) for parts in zip(*first_masking))
        assert torch.equal(choices, experts.int())
        assert len(experts) == scores["tokens"]
        assert layer["rc"] == pytest.approx(literal_rc(h, experts), rel=1e-6)
        assert layer["rf"] is None
    moved = []
    for choices in chosen:
        every_fourth = torch.arange(len(choices)) % 4 == 0
        moved.append((choices + every_fourth) % 4)
    again, _ = train_mlm.evaluate(model, data, config, context, 1, moved)
    for layer in again["layers"]:
        assert layer["rf"] == pytest.approx(math.ceil(len(chosen[0]) / 4) / len(chosen[0]))


def test_counting_baselines_match_literal_loops(options, monkeypatch, capsys):
    """Each language's tokens and pairs, interpolated with the tokens of all; printed next to the model's perplexity."""
    config, _, data, _ = opened(options | {"eval_tokens": 150})
    V, train = data.vocab_size, data.tokens["train"].tolist()
    all_languages = reference_scores.interpolated(train, [1 / V] * V)
    texts = [train[first : first + count] for first, count in data.streams["train"]]
    # The last token of a language and the first of the next count as a pair in both languages.
    after = [text + train[sum(map(len, texts[: i + 1])) :][:1] for i, text in enumerate(texts)]
    before = [train[: sum(map(len, texts[:i]))][-1:] + text for i, text in enumerate(texts)]
    singles = [reference_scores.interpolated(text, all_languages) for text in texts]
    losses, right, seen = {"tokens": [], "neighbours": []}, Counter(), Counter()
    for _, _, batch in data.eval_batches("valid", 1, 150):
        T, first = batch.ids.shape[1], int(batch.ids[0, 0])
        for position, language, token in zip(batch.masked.tolist(), batch.language.tolist(), batch.targets.tolist()):
            row = [*batch.ids[position // T].tolist(), first]
            left, shown, following = row[position % T - 1 : position % T + 2]
            single = singles[language]
            pairs_after = list(zip(after[language], after[language][1:]))
            pairs_before = list(zip(before[language], before[language][1:]))
            both = reference_scores.between(pairs_after, pairs_before, left, following, single)
            for baseline, p in (("tokens", single), ("neighbours", both)):
                if shown != data.tokenizer.mask:
                    p = reference_scores.given_input(p, shown, 0.1, 0.1 / (V - len(data.tokenizer.special)))
                    seen[shown == token] += 1
                losses[baseline].append(-math.log(p[token]))
                right[baseline] += token == np.argmax(p)
    assert min(seen.values()) > 1  # the right token is shown more than once, and so is a random one
    counted = counting.masked_scores(data, 150)
    for baseline, each in losses.items():
        assert counted[baseline]["ppl"] == pytest.approx(math.exp(fmean(each)))
        assert counted[baseline]["right"] == pytest.approx(right[baseline] / len(each))
    MLM.run(options | {"eval_tokens": 150}, monkeypatch)
    result, out = result_of(options["out_dir"]), capsys.readouterr().out
    assert result["counting"] == counted
    assert out.count(counting.in_words(counted)) == 2  # before training and in the report
    data.tokens["train"] = np.zeros(2**24 + 1, dtype="uint16")
    line = counting.in_words(counting.masked_scores(data))
    assert line == "counting: not done, the training text is large"


def test_a_resumed_run_equals_an_uninterrupted_one(options, tmp_path, monkeypatch, capsys):
    """It is stopped between two evaluations, since RF compares the choices of the second with those of the first."""
    options |= {"steps": 5, "dropout": 0.1, "learning_rate": 0.05}
    uninterrupted, resumed = (options | {"out_dir": tmp_path / name} for name in ("uninterrupted", "resumed"))
    assert "stopped at step 3" in stopped(MLM, 2, signal.SIGTERM, resumed, capsys)
    evaluations, evaluate = [], train_mlm.evaluate

    def record(*args, **more):
        evaluations.append(evaluate(*args, **more))
        return evaluations[-1]

    MLM.run(resumed, monkeypatch)
    monkeypatch.setattr(train_mlm, "evaluate", record)
    MLM.run(uninterrupted, monkeypatch)
    torch.testing.assert_close(saved(resumed)["model"], saved(uninterrupted)["model"], rtol=0, atol=0)
    assert result_of(resumed["out_dir"])["valid"] == result_of(uninterrupted["out_dir"])["valid"]
    layers = ([record["layers"] for record in metrics(run["out_dir"])] for run in (resumed, uninterrupted))
    assert next(layers) == next(layers)  # at step 4, RF compares with the experts of step 2, before the stop
    _, (_, [before]), (scores, [after]) = evaluations
    assert scores["layers"][0]["rf"] == float((before != after).double().mean()) > 0


def test_a_step_without_masked_tokens_has_no_loss(options, monkeypatch):
    monkeypatch.setattr(MaskedData, "batch", without_masked_tokens)
    MLM.run(options, monkeypatch)
    assert losses(options["out_dir"]) == [0.0, 0.0]


def test_table_2_has_every_row(options, monkeypatch, capsys):
    options |= {"table": 2, "steps": 2}
    message = MLM.refused(options | {"gate": "softmax"}, monkeypatch, capsys)
    assert "the rows of this table set --gate" in message
    MLM.run(options, monkeypatch)
    rows = table_rows(capsys.readouterr().out.split("\n\n")[-1])
    assert [row[1] for row in rows] == ["23.51", "", "", "19.02", "18.72", "19.59", "19.12"]
    assert all(float(row[2]) >= 0 for row in rows)  # parameters
    assert all(float(row[3]) > 1 for row in rows)  # perplexity
    assert [bool(row[9]) for row in rows] == [0, 0, 0, 0, 1, 0, 1]  # temperature
    configs = [json.loads(path.read_text()) for path in options["out_dir"].glob("*/config.json")]
    assert len(configs) == 7
    switch = [(config["gate"], config["experts"]) for config in configs if config["router"] == "switch"]
    assert sorted(switch) == [("sigmoid", 1), ("sigmoid", 4), ("softmax", 4)]


def test_the_report_says_since_when_it_beats_counting_and_how_rc_changed(options, monkeypatch, capsys):
    perplexities = iter([3.0, 2.0, 2.5, 3.0])  # the second is the first below the baseline's 2.7
    evaluate = train_mlm.evaluate

    def with_fixed_perplexity(*args, **more):
        scores, chosen = evaluate(*args, **more)
        return scores | {"ppl": next(perplexities)}, chosen

    baseline = {"ppl": 2.7, "right": 0.1}
    counted = {"tokens": baseline | {"ppl": 9.0}, "neighbours": baseline}
    monkeypatch.setattr(train_mlm, "evaluate", with_fixed_perplexity)
    monkeypatch.setattr(train_mlm.counting, "masked_scores", lambda *_: counted)
    MLM.run(options | {"steps": 8}, monkeypatch)
    out, result = capsys.readouterr().out, result_of(options["out_dir"])
    assert result["since_step"] == 4
    assert "beats counting by neighbours since step 4" in out
    assert result["first"] == metrics(options["out_dir"])[0]["layers"]
    [first], [last] = result["first"], result["valid"]["layers"]
    assert f"RC was {first['rc']:.0f} at the first evaluation and is {last['rc']:.0f} at the last" in out
    assert "since" not in train_mlm.report(train_mlm.Config(), result | {"since_step": None})


@pytest.mark.parametrize("number, dims", [(3, [2, 0, 2, 0]), (5, [1, 2, 4, 8, 16])])
def test_tables_3_and_5_vary_router_and_dimension(number, dims):
    routers = ["hypersphere", "hypersphere", "switch", "switch"] if number == 3 else ["hypersphere"] * 5
    base = train_mlm.Config(**TINY | EXPERTS)
    for (_, change), dim, router in zip(train_mlm.TABLES[number](base).rows, dims, routers, strict=True):
        config = dataclasses.replace(base, **change)
        moe = MaskedLM(config, 300).moe_layers[0]
        assert (config.router, config.gate) == (router, "sigmoid")
        assert moe.router.experts.shape[1] == (dim or 16)
        assert ("project.weight" in moe.router.state_dict()) == (dim > 0)


def test_the_base_preset_is_the_papers_model():
    config = train_mlm.Config(**train_mlm.PRESETS["base"])
    with torch.device("meta"):
        counts = flops.count_parameters(MaskedLM(config, 250_002))
    assert (counts["total"], counts["active"]) == (731_808_915, 292_479_891)  # of which the head has 842,130


def test_xlmr_weights_initialize_a_sparse_model(options, tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    shape = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    shape |= dict(max_position_embeddings=34, type_vocab_size=1, layer_norm_eps=1e-5)
    for name, size in (("wider", 310), ("xlmr", 300)):
        theirs = transformers.XLMRobertaForMaskedLM(transformers.XLMRobertaConfig(vocab_size=size, **shape)).eval()
        theirs.save_pretrained(tmp_path / name)
    options |= {"init_from": tmp_path / "xlmr", "relative_bias": False}
    capsys.readouterr()
    for changes, message in (
        ({"n_layer": 3}, "n_layer 2, not 3"),
        ({"block_size": 64}, "size mismatch for encoder.wpe.weight"),
        ({"relative_bias": True}, "has relative_bias False, not True"),
        ({"init_from": tmp_path / "wider"}, "vocab_size 310, not 300"),
    ):
        assert message in MLM.refused(options | changes, monkeypatch, capsys)
    _, _, data, model = opened(options)
    batch = data.batch("train", 0, 0)
    with torch.no_grad():  # new sparse layers add 0 at first
        expected = theirs(batch.ids).logits.flatten(0, 1)[batch.masked]
        torch.testing.assert_close(model.eval()(batch.ids, batch.masked)[0], expected, rtol=1e-5, atol=1e-5)
    theirs.roberta.save_pretrained(tmp_path / "bare")  # without a head
    MLM.run(options | {"init_from": tmp_path / "bare"}, monkeypatch)
    assert "masked tokens" in capsys.readouterr().out
