"""`train_mlm.py` as a user runs it, on three small languages and tiny models: what is particular to it.

What all scripts share is tested in test_run.py.
"""

import dataclasses
import json
import math
import signal
from collections import Counter, defaultdict
from statistics import fmean

import numpy as np
import pytest
import reference_scores
import torch
from helpers import Script, metrics, result_of, saved, stopped, table_rows
from test_metrics import literal_rc
from test_train_electra import EXPERTS, corpora

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
    """What a run of these options has before its first step."""
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
    out, scores = capsys.readouterr().out, result_of(options["out_dir"])["valid"]
    assert f"valid perplexity {scores['ppl']:.2f} ({scores['predicted']:,} masked tokens)" in out
    assert tuple(scores["languages"]) == LANGUAGES
    assert all(f"{language} {ppl:.2f}" in out for language, ppl in scores["languages"].items())
    assert len(scores["layers"]) == sparse
    for i, layer in enumerate(scores["layers"]):
        assert layer["rc"] > 0 and layer["imbalance"] >= 1 and (layer["wanted"] == 2 or row != "X-MoE top-2")
        assert f"sparse layer {i + 1}: RC {layer['rc']:.2f}, RF {layer['rf']:.1%}" in out
        assert (layer["temperature"] is not None) == (row not in ("SMoE", "threshold"))
        if layer["temperature"]:  # it learns
            learned = saved(options)["model"][f"encoder.moes.{i}.router.temperature"]
            assert layer["temperature"] == pytest.approx(float(learned)) and layer["temperature"] not in (0.3, 0.07)
    first, last = metrics(options["out_dir"])
    assert all(layer["rf"] is None for layer in first["layers"])
    assert first["predicted"] < last["predicted"]  # the final perplexity is over several maskings
    _, _, data, model = opened(options | ROWS[row])
    head = 0.4 * 2 * 16 * (16 + data.vocab_size)  # of masked tokens
    work = flops.flops_per_token(model.encoder, model.config, head)
    assert result_of(options["out_dir"])["flops"] == pytest.approx(work)


def test_evaluation_is_its_literal_definition(options):
    """Perplexities by hand, RC by its formula on all validation tokens, RF by comparing every choice."""
    config, context, data, model = opened(options | {"dtype": "float64", "moe_after": (1, 2), "dropout": 0.5})
    draws = []
    model.moe_layers[0].watchers.append(lambda *_: draws.append(float(torch.rand(()))))  # as a router might
    for _ in range(2):
        scores, chosen = train_mlm.evaluate(model.train(), data, config, context, 2, None)
    half = len(draws) // 2
    assert model.training and draws[:half] == draws[half:] and len(set(draws)) == half
    seen = {moe: [] for moe in model.moe_layers}
    for moe in model.moe_layers:
        moe.watchers.append(lambda moe, h, routing, kept: seen[moe].append((h, routing.priority.argmax(dim=1))))
    batches = list(data.eval_batches("valid", 2))
    loss, count = dict.fromkeys(LANGUAGES, 0.0), dict.fromkeys(LANGUAGES, 0)
    balance_sum = 0.0
    model.eval().requires_grad_(False)
    for _, _, batch in batches:
        logits, balance = model(batch.ids, batch.masked, nonpad=batch.nonpad)
        balance_sum += float(balance) * len(batch.targets)
        for row, target, language in zip(logits.log_softmax(dim=1), batch.targets, batch.language):
            loss[data.languages[language]] -= float(row[target])
            count[data.languages[language]] += 1
    total = sum(count.values())
    assert scores["predicted"] == total
    assert scores["loss"] == pytest.approx(sum(loss.values()) / total)
    assert scores["balance"] == pytest.approx(balance_sum / total)
    assert scores["languages"] == pytest.approx({name: math.exp(loss[name] / count[name]) for name in loss})
    for layer, choices, looks in zip(scores["layers"], chosen, seen.values()):
        first = looks[: len(batches) // 2]  # of the first masking
        h, experts = (torch.cat(parts) for parts in zip(*first))
        assert torch.equal(choices, experts.int()) and len(experts) == scores["tokens"]
        assert layer["rc"] == pytest.approx(literal_rc(h, experts), rel=1e-6)
        assert layer["rf"] is None
    moved = []
    for choices in chosen:
        every_fourth = torch.arange(len(choices)) % 4 == 0
        moved.append((choices + every_fourth) % 4)
    again, _ = train_mlm.evaluate(model, data, config, context, 1, moved)
    for layer in again["layers"]:
        assert layer["rf"] == pytest.approx(math.ceil(len(chosen[0]) / 4) / len(chosen[0]))


def test_counting_is_its_literal_definition(options, monkeypatch, capsys):
    """Each language's counts and pairs, with those of all behind the counts; printed beside the model's perplexity."""
    config, _, data, _ = opened(options | {"eval_tokens": 150})
    V, train = data.vocab_size, data.tokens["train"].tolist()
    of_all = reference_scores.interpolated(train, [1 / V] * V)
    texts = [train[first : first + count] for first, count in data.streams["train"]]
    # The last token of a language stands beside the first of the next: counted as what follows it, and what precedes.
    after = [text + train[sum(map(len, texts[: i + 1])) :][:1] for i, text in enumerate(texts)]
    before = [train[: sum(map(len, texts[:i]))][-1:] + text for i, text in enumerate(texts)]
    singles = [reference_scores.interpolated(text, of_all) for text in texts]
    losses, right, seen = {"tokens": defaultdict(list), "neighbours": defaultdict(list)}, Counter(), Counter()
    for _, _, batch in data.eval_batches("valid", 1, 150):
        T, first = batch.ids.shape[1], int(batch.ids[0, 0])
        for place, language, token in zip(batch.masked.tolist(), batch.language.tolist(), batch.targets.tolist()):
            row = [*batch.ids[place // T].tolist(), first]
            left, there, following = row[place % T - 1 : place % T + 2]
            single = singles[language]
            behind = list(zip(after[language], after[language][1:]))
            ahead = list(zip(before[language], before[language][1:]))
            beside = reference_scores.between(behind, ahead, left, following, single)
            for what, p in (("tokens", single), ("neighbours", beside)):
                if there != data.tokenizer.mask:
                    p = reference_scores.given_input(p, there, 0.1, 0.1 / (V - len(data.tokenizer.special)))
                    seen[there == token] += 1
                losses[what][data.languages[language]].append(-math.log(p[token]))
                right[what] += token == np.argmax(p)
    assert min(seen.values()) > 1  # of both kinds
    found = counting.masked_scores(data, 150)
    for what, own in losses.items():
        each = sum(own.values(), [])
        scores = {name: found[what][name] for name in ("ppl", "right")}
        assert scores == pytest.approx({"ppl": math.exp(fmean(each)), "right": right[what] / len(each)})
        by_language = {name: math.exp(fmean(each)) for name, each in own.items()}
        assert found[what]["languages"] == pytest.approx(by_language) and len(own) > 1
    MLM.run(options | {"eval_tokens": 150}, monkeypatch)
    result, out = result_of(options["out_dir"]), capsys.readouterr().out
    assert result["counting"] == found and out.count(counting.in_words(found)) == 2  # before training, and after
    ahead = [name for name, ppl in by_language.items() if result["valid"]["languages"][name] < ppl]
    assert f"beats counting by neighbours in {len(ahead)} of {len(by_language)} languages" in out
    data.tokens["train"] = np.zeros(2**24 + 1, dtype="uint16")
    assert counting.in_words(counting.masked_scores(data)) == "counting: not done, the training text is large"


def test_a_stopped_run_ends_with_the_numbers_of_one_that_was_not(options, tmp_path, monkeypatch, capsys):
    """It is stopped between two evaluations: RF needs the choices of the one before."""
    options |= {"steps": 5, "dropout": 0.1, "learning_rate": 0.05}
    whole, ended = (options | {"out_dir": tmp_path / name} for name in ("whole", "ended"))
    assert "stopped at step 3" in stopped(MLM, 2, signal.SIGTERM, ended, capsys)
    chosen, evaluate = [], train_mlm.evaluate

    def record(*args, **more):
        chosen.append(evaluate(*args, **more))
        return chosen[-1]

    MLM.run(ended, monkeypatch)
    monkeypatch.setattr(train_mlm, "evaluate", record)
    MLM.run(whole, monkeypatch)
    torch.testing.assert_close(saved(ended)["model"], saved(whole)["model"], rtol=0, atol=0)
    assert result_of(ended["out_dir"])["valid"] == result_of(whole["out_dir"])["valid"]
    _, (_, [before]), (scores, [now]) = chosen
    assert scores["layers"][0]["rf"] == float((before != now).double().mean()) > 0


def test_table_2_has_every_row(options, monkeypatch, capsys):
    options |= {"table": 2, "steps": 2}
    assert "its rows have a --gate of their own" in MLM.refused(options | {"gate": "softmax"}, monkeypatch, capsys)
    MLM.run(options, monkeypatch)
    rows = table_rows(capsys.readouterr().out.split("\n\n")[-1])
    assert [row[1] for row in rows] == ["23.51", "", "", "19.02", "18.72", "19.59", "19.12"]
    assert all(float(row[2]) >= 0 and float(row[3]) > 1 for row in rows)
    assert [bool(row[9]) for row in rows] == [0, 0, 0, 0, 1, 0, 1]  # temperature
    configs = [json.loads(path.read_text()) for path in options["out_dir"].glob("*/config.json")]
    ours = [(config["gate"], config["experts"]) for config in configs if config["router"] == "switch"]
    assert len(configs) == 7 and sorted(ours) == [("sigmoid", 1), ("sigmoid", 4), ("softmax", 4)]


def test_the_report_says_since_when_it_beats_counting_and_how_rc_changed(options, monkeypatch, capsys):
    losses = iter([3.0, 2.0, 2.5, 3.0])
    evaluate = train_mlm.evaluate

    def fixed(*args, **more):
        found, chosen = evaluate(*args, **more)
        return found | {"ppl": next(losses)}, chosen

    scores = {"ppl": 2.7, "right": 0.1, "languages": {"aa": 1.0, "bb": 1e9}}
    counted = {"tokens": scores, "neighbours": scores}
    monkeypatch.setattr(train_mlm, "evaluate", fixed)
    monkeypatch.setattr(train_mlm.counting, "masked_scores", lambda *_: counted)
    MLM.run(options | {"steps": 8}, monkeypatch)
    out, result = capsys.readouterr().out, result_of(options["out_dir"])
    assert result["since_step"] == 4
    assert "beats counting by neighbours in 1 of 2 languages, and overall since step 4" in out
    [first], [last] = result["first"], result["valid"]["layers"]
    assert f"RC was {first['rc']:.0f} at the first evaluation and is {last['rc']:.0f} at the last" in out
    assert "since" not in train_mlm.report(train_mlm.Config(), result | {"since_step": None})


@pytest.mark.parametrize("number, dims", [(3, [2, 0, 2, 0]), (5, [1, 2, 4, 8, 16])])
def test_tables_3_and_5_change_what_they_say(number, dims):
    routers = ["hypersphere", "hypersphere", "switch", "switch"] if number == 3 else ["hypersphere"] * 5
    base = train_mlm.Config(**TINY | EXPERTS)
    for (_, change), dim, router in zip(train_mlm.TABLES[number](base).rows, dims, routers, strict=True):
        config = dataclasses.replace(base, **change)
        moe = MaskedLM(config, 300).moe_layers[0]
        assert (config.router, config.gate, moe.router.experts.shape[1]) == (router, "sigmoid", dim or 16)
        assert ("project.weight" in moe.router.state_dict()) == (dim > 0)


def test_the_base_preset_is_the_papers_model():
    config = train_mlm.Config(**train_mlm.PRESETS["base"])
    with torch.device("meta"):
        counts = flops.count_parameters(MaskedLM(config, 250_002))
    assert (counts["total"], counts["active"]) == (731_808_915, 292_479_891)  # of them 842,130 in the head


def test_xlmr_weights_start_a_sparse_model(options, tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    shape = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    shape |= dict(max_position_embeddings=34, type_vocab_size=1, layer_norm_eps=1e-5)
    for name, size in (("wider", 310), ("xlmr", 300)):
        theirs = transformers.XLMRobertaForMaskedLM(transformers.XLMRobertaConfig(vocab_size=size, **shape)).eval()
        theirs.save_pretrained(tmp_path / name)
    options |= {"init_from": tmp_path / "xlmr", "relative_bias": False}
    capsys.readouterr()
    for given, message in (
        ({"n_layer": 3}, "n_layer 2, not 3"),
        ({"block_size": 64}, "size mismatch for encoder.wpe.weight"),
        ({"relative_bias": True}, "has relative_bias False, not True"),
        ({"init_from": tmp_path / "wider"}, "vocab_size 310, not 300"),
    ):
        assert message in MLM.refused(options | given, monkeypatch, capsys)
    _, _, data, model = opened(options)
    batch = data.batch("train", 0, 0)
    with torch.no_grad():  # the inserted experts change nothing yet
        expected = theirs(batch.ids).logits.flatten(0, 1)[batch.masked]
        torch.testing.assert_close(model.eval()(batch.ids, batch.masked)[0], expected, rtol=1e-5, atol=1e-5)
    theirs.roberta.save_pretrained(tmp_path / "bare")  # without a head
    MLM.run(options | {"init_from": tmp_path / "bare"}, monkeypatch)
    assert "masked tokens" in capsys.readouterr().out
