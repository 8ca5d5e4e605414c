"""`train_mt.py` as a user runs it, on two small pairs of languages and tiny models."""

import json
import math
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import ROOT, TORCHRUN, Script, finish, flip_a_byte, losses, metrics, only_run, table_rows, words

import common
import train_mt
from data.prepare import prepare

MT = Script(train_mt)
run, refused, script = MT.run, MT.refused, MT.start
TINY = dict(n_layer=2, decoder_layers=2, n_head=2, n_embd=16, ffn_size=32, block_size=32, micro_tokens=128, steps=4)
TINY |= dict(batch_tokens=256, expert_ffns=2, eval_every=2, warmup_steps=2, average=2, beam=2, log_every=1, dropout=0.0)
TINY |= dict(eval_sentences=4, device="cpu", dtype="float32")
WORDS = {"Hund": "dog", "Katze": "cat", "Haus": "house", "rot": "red", "blau": "blue", "läuft": "runs", "und": "and"}


def sentences(count: int, seed: int, words: dict[str, str] = WORDS) -> list[tuple[str, str]]:
    """Texts of three to six words and a full stop, translated word by word."""
    rng = np.random.default_rng(seed)
    drawn = [rng.choice(list(words), rng.integers(3, 7)) for _ in range(count)]
    return [(" ".join(text) + ".", " ".join(words[word] for word in text) + ".") for text in drawn]


def write(folder: Path, pairs: dict[str, list[tuple[str, str]]], name: str = "de-en"):
    folder.mkdir(exist_ok=True)
    for split, own in pairs.items():
        for side, lines in zip(name.split("-"), zip(*own)):
            (folder / f"{name}.{split}.{side}").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture(scope="session")
def corpora(tmp_path_factory) -> dict[str, Path]:
    """a: two pairs of languages; b: other pairs under a's vocabulary; c: a under another vocabulary."""
    base = tmp_path_factory.mktemp("pairs")
    for name, seed in (("a", 0), ("b", 10)):
        for language in ("de", "ru"):
            splits = zip(("train", "valid", "test"), (120, 12, 9))
            pairs = {split: sentences(count, seed + i) for i, (split, count) in enumerate(splits)}
            write(base / f"text-{name}", pairs, f"{language}-en")
    folders = {"a": prepare("bitext", base / "text-a", pieces=270 + 40, out=base / "a")}
    folders["b"] = prepare("bitext", base / "text-b", spm=folders["a"] / "xlmr.model", out=base / "b")
    folders["c"] = prepare("bitext", base / "text-a", pieces=270 + 30, out=base / "c")
    return folders


@pytest.fixture
def options(corpora, tmp_path) -> dict:
    return TINY | {"data": corpora["a"], "out_dir": tmp_path / "out"}


ROWS = {
    "dense": {"router": "dense"},
    "switch": {"router": "switch"},
    "topk": {"router": "topk"},
    "threshold": {},
    "encoder alone": {"decoder_moe": False},
    "expert choice": {"router": "expert_choice", "decoder_moe": False},
    "X-MoE": {"router": "hypersphere", "moe_after": "1", "num_experts": 4},
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_trains_translates_and_reports(row, options, monkeypatch, capsys):
    run(options | ROWS[row], monkeypatch)
    out, folder = capsys.readouterr().out, only_run(options["out_dir"])
    result = json.loads((folder / "result.json").read_text())
    layers = {"dense": 0, "encoder alone": 1, "expert choice": 1, "X-MoE": 1}.get(row, 2)
    for where in ("test", "test_no_limit"):
        scores = result[where]
        assert list(scores["pairs"]) == ["de-en", "ru-en"] and scores["sentences"] == 18
        assert scores["bleu"] == pytest.approx(np.mean([pair["bleu"] for pair in scores["pairs"].values()]))
        assert f"BLEU {scores['bleu']:.2f}  chrF2++ {scores['chrf']:.2f}" in out
        assert len(scores["layers"]) == layers
        pair = scores["pairs"]["de-en"]
        assert f"BLEU {pair['bleu_signature']}" in out and f"chrF2++ {pair['chrf_signature']}" in out
        assert "nrefs:1" in pair["bleu_signature"] and "tok:13a" in pair["bleu_signature"]
        assert "nc:6" in pair["chrf_signature"] and "nw:2" in pair["chrf_signature"]
    assert out.count("reference: ") == out.count("ours:      ") == 5
    served = [layer["served"] for layer in result["test"]["layers"]]
    if row in ("switch", "topk", "threshold"):
        assert max(served) <= result["config"]["capacity_factor"] + 0.5
        assert any(layer["cut"] > 0 for layer in result["test"]["layers"])
        assert all(layer["cut"] == 0 for layer in result["test_no_limit"]["layers"])
        more = ", ".join(f"{layer['served']:.2f}" for layer in result["test_no_limit"]["layers"])
        assert f"rows kept per token: {more}" in out
    if row in ("dense", "expert choice", "X-MoE"):  # these have no limit, or nothing but one
        assert result["test"] == result["test_no_limit"] and "without a limit" not in out
    for record in metrics(options["out_dir"]):
        assert record["ppl"] == pytest.approx(math.exp(record["loss"])) and record["bleu"] >= 0
    assert {p.name for p in folder.iterdir()} >= {"ckpt.pt", "model.pt", "step2.pt", "step4.pt", "xlmr.model"}
    assert len(torch.load(folder / "model.pt", weights_only=True)["model"]) > 10


def test_32_pairs_are_learned_by_heart(tmp_path, monkeypatch, capsys):
    """BLEU 100 of the very pairs that it was trained on."""
    pairs = sentences(32, 5, {f"{a}{b}": f"{b}o{a}" for a in "bdfgklmn" for b in ("at", "er", "il", "ut", "op")})
    write(tmp_path / "text", {"train": pairs, "valid": pairs, "test": pairs})
    folder = prepare("bitext", tmp_path / "text", pieces=300, out=tmp_path / "data")
    options = TINY | {"data": folder, "out_dir": tmp_path / "out", "n_embd": 64, "ffn_size": 128, "steps": 400}
    options |= {"eval_every": 100, "average": 1, "learning_rate": 5e-3, "warmup_steps": 100, "label_smoothing": 0.0}
    options["eval_capacity_factor"] = 16.0  # the default cuts tokens of so small batches, which may cost a word
    run(options, monkeypatch)
    result = json.loads((only_run(tmp_path / "out") / "result.json").read_text())
    assert result["test"]["bleu"] == result["test_no_limit"]["bleu"] == pytest.approx(100)
    assert all(layer["served"] == layer["wanted"] for layer in result["test"]["layers"])
    capsys.readouterr()
    (tmp_path / "in.txt").write_text("".join(f"{one}\n" for one, _ in pairs))
    run(options | {"translate": tmp_path / "in.txt"}, monkeypatch)
    assert capsys.readouterr().out == "".join(f"{two}\n" for _, two in pairs)


# Formulas


def test_the_smoothed_loss_is_its_formula():
    logits, labels = torch.randn(5, 7, dtype=torch.float64), torch.tensor([0, 3, 6, 2, 3])
    for s in (0.0, 0.1, 0.5):
        by_hand = 0.0
        for row, label in zip(logits, labels):
            p = row.exp() / row.exp().sum()
            by_hand += float(-(1 - s) * p[label].log() - s * p.log().mean()) / 5
        assert float(train_mt.smoothed_loss(logits, labels, s)) == pytest.approx(by_hand)
    assert train_mt.smoothed_loss(logits.bfloat16(), labels, 0.1).dtype == torch.float32


def test_the_schedule_is_its_formula():
    rates = [common.inverse_sqrt(step, 512, 5e-4) for step in range(5000)]
    for update in (1, 100, 511, 512, 513, 2048, 5000):  # counted from 1, as fairseq does
        expected = 5e-4 * update / 512 if update < 512 else 5e-4 * 512**0.5 / update**0.5
        assert rates[update - 1] == pytest.approx(expected)
    assert max(rates) == rates[511] and rates[2047] == pytest.approx(2.5e-4)


def test_every_step_has_its_learning_rate_and_the_mean_gradient(options, monkeypatch):
    seen, rates = [], []

    def step(self, *_, f=torch.optim.AdamW.step):
        seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        rates.extend(group["lr"] for group in self.param_groups)
        return f(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    options |= {"dtype": "float64", "balance_coef": 0.5, "learning_rate": 1e-3}
    run(options | {"steps": 3}, monkeypatch)
    assert rates[::2] == pytest.approx([5e-4, 1e-3, 1e-3 * math.sqrt(2 / 3)])
    config, context, data, model = opened(options)
    for micro in range(2):
        batch = data.batch("train", 0, micro)
        logits, balance = model(batch.source, batch.target, batch.source_real, batch.target_real)
        ((train_mt.smoothed_loss(logits, batch.labels, 0.1) + 0.5 * balance) / 2).backward()
    groups = common.adamw(model, 1.0, (0.9, 0.98), 0.0).param_groups
    torch.testing.assert_close(seen[0], [p.grad for group in groups for p in group["params"]])


def opened(options):
    given = common.parse(train_mt.Config, words(options))
    config = common.configure(train_mt.Config, train_mt.PRESETS, given)[0]
    context = common.setup("cpu", config.dtype)
    data = train_mt.open_data(config, context)
    common.seed_all(config.seed)
    model = train_mt.Translator(config).to(dtype=context.dtype)
    return config, context, data, model


def test_scores_are_of_texts_as_people_write_them():
    """Tokenised or lowercased text would score otherwise; sacrebleu does the tokenising."""
    reference = ["He said: “it isn't red, is it?” (Not yet.)", "The U.S. house costs $1,000.50."]
    same = train_mt.score(reference, reference)
    assert same["bleu"] == pytest.approx(100) and same["chrf"] == pytest.approx(100)
    tokenised = ["He said : “ it is n't red , is it ? ” ( Not yet . )", "The U . S . house costs $ 1 , 000.50 ."]
    assert train_mt.score(tokenised, reference)["bleu"] < 80
    assert train_mt.score([text.lower() for text in reference], reference)["bleu"] < 90


def test_what_is_scored_is_what_was_written_not_pieces(options, monkeypatch):
    """A model that translates perfectly gets 100, though its vocabulary knows neither the ½ nor double spaces."""
    config, context, data, model = opened(options)
    texts = {"de-en": (["eins", "zwei"], ["The  red dog… ½", "One"]), "ru-en": (["раз"], ["Two　red houses run."])}
    monkeypatch.setattr(data, "texts", lambda split, name: texts[name])
    known = {one: two for sides in texts.values() for one, two in zip(*sides)}
    monkeypatch.setattr(train_mt, "translate_texts", lambda model, texts, *rest: [known[text] for text in texts])
    scores = train_mt.bleu(model, data, "test", config, context)
    assert [pair["bleu"] for pair in scores["pairs"].values()] == pytest.approx([100, 100])
    assert scores["examples"] == [
        ("de-en", "eins", known["eins"], known["eins"]),
        ("ru-en", "раз", known["раз"], known["раз"]),
        ("de-en", "zwei", known["zwei"], known["zwei"]),
    ]
    known["раз"] = "Three dogs are here."
    scores = train_mt.bleu(model, data, "test", config, context)
    assert [pair["bleu"] < 50 for pair in scores["pairs"].values()] == [False, True]


def test_text_comes_out_detokenised_in_the_order_it_came(options):
    """Of ids whose pieces are parts of words and punctuation; longest first inside."""
    config, context, data, model = opened(options)
    texts = ["rot.", "", "Hund und Katze und Haus.", "\u200b", "Katze  läuft."]
    model.translate = lambda source, real, **_: [[i for i in row if i not in (1, 2)] for row in source.tolist()]
    found = train_mt.translate_texts(model, texts, data.tokenizer, config, context)
    assert found == ["rot.", "", "Hund und Katze und Haus.", "", "Katze läuft."]
    newline = data.tokenizer.processor.piece_to_id("<0x0A>") + 1
    model.translate = lambda source, real, **_: [[*data.tokenizer.encode_batch(["a b"])[0], newline, 5]] * len(source)
    assert "\n" not in train_mt.translate_texts(model, ["rot"], data.tokenizer, config, context)[0]


def test_evaluation_is_its_literal_definition(options):
    config, context, data, model = opened(options | {"dtype": "float64", "capacity_factor": math.inf})
    scores, total, count = train_mt.evaluate(model, data, "valid", config, context), 0.0, 0
    model.eval()
    for name in data.languages:
        for one, two in zip(*data.texts("valid", name)):
            source, target = data.tokenizer.encode_batch([one, two])
            with torch.no_grad():
                logits, _ = model(torch.tensor([[*source, 2]]), torch.tensor([[0, *target]]))
            for row, label in zip(logits.log_softmax(dim=1), [*target, 2]):
                total, count = total - float(row[label]), count + 1
    assert scores["tokens"] == count and scores["loss"] == pytest.approx(total / count)


def test_the_mean_of_weights_and_the_choice_by_validation(options, monkeypatch):
    states = [
        {"w": torch.tensor([1.0, 3.0]), "n": torch.tensor([1])},
        {"w": torch.tensor([3.0, 7.0]), "n": torch.tensor([2])},
    ]
    mean = train_mt.mean_weights(states)
    assert mean["w"].tolist() == [2.0, 5.0] and mean["n"].tolist() == [2]
    scores = iter([5.0, 9.0, 7.0, 8.0])  # of steps 2, 4, 6, and of the mean of 4 and 6

    def bleu(model, data, split, *rest, f=train_mt.bleu, **kw):
        return f(model, data, split, *rest, **kw) | ({"bleu": next(scores)} if split == "valid" else {})

    monkeypatch.setattr(train_mt, "bleu", bleu)
    run(options | {"steps": 6}, monkeypatch)
    folder = only_run(options["out_dir"])
    saved = {file.name: torch.load(file, weights_only=True)["model"] for file in folder.glob("*.pt")}
    assert sorted(saved) == ["ckpt.prev.pt", "ckpt.pt", "model.pt", "step4.pt", "step6.pt"]
    assert all(torch.equal(saved["model.pt"][name], w) for name, w in saved["step4.pt"].items())
    assert json.loads((folder / "result.json").read_text())["weights"] == "weights of step 4"
    assert torch.load(folder / "model.pt", weights_only=True)["step"] == "weights of step 4"
    scores = iter([5.0, 6.0, 7.0, 8.0])
    run(options | {"steps": 6, "resume": False}, monkeypatch)
    saved = {file.name: torch.load(file, weights_only=True)["model"] for file in folder.glob("*.pt")}
    for name, w in saved["model.pt"].items():
        torch.testing.assert_close(w, (saved["step4.pt"][name] + saved["step6.pt"][name]) / 2)
    assert json.loads((folder / "result.json").read_text())["weights"] == "mean of the weights of steps 4, 6"
    scores = iter([9.0, 6.0, 7.0, 8.0])  # the best one is older than those of the mean, and is kept
    run(options | {"steps": 6, "resume": False}, monkeypatch)
    assert sorted(file.name for file in folder.glob("step*.pt")) == ["step2.pt", "step4.pt", "step6.pt"]
    assert json.loads((folder / "result.json").read_text())["weights"] == "weights of step 2"


# Resuming and processes


def test_a_killed_run_ends_with_the_numbers_of_one_that_was_not(options, tmp_path):
    options |= {"steps": 120, "dropout": 0.1, "eval_every": 5, "eval_sentences": 4, "average": 3}
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
    for name in ("ckpt.pt", "model.pt"):
        ours, theirs = (torch.load(only_run(o["out_dir"]) / name, weights_only=True) for o in (killed, whole))
        assert all(torch.equal(ours["model"][key], w) for key, w in theirs["model"].items())
    assert losses(killed["out_dir"]) == losses(whole["out_dir"])
    ours, theirs = (json.loads((only_run(o["out_dir"]) / "result.json").read_text()) for o in (killed, whole))
    assert all(ours[key] == theirs[key] for key in ("weights", "valid", "test", "test_no_limit"))


def test_a_run_that_lost_only_its_result_writes_the_same_again(options, monkeypatch):
    run(options, monkeypatch)
    file = only_run(options["out_dir"]) / "result.json"
    before = json.loads(file.read_text())
    file.unlink()
    run(options, monkeypatch)
    assert json.loads(file.read_text()) == before


def test_a_corrupt_checkpoint_gives_way_to_the_previous_one(options, monkeypatch, capsys):
    run(options, monkeypatch)
    folder = only_run(options["out_dir"])
    before = json.loads((folder / "result.json").read_text())
    (folder / "result.json").unlink()
    flip_a_byte(folder / "ckpt.pt")
    run(options, monkeypatch)
    assert "ckpt.pt is corrupt" in (err := capsys.readouterr()).err and "goes on from step 2" in err.out
    after = json.loads((folder / "result.json").read_text())
    assert all(after[key] == before[key] for key in ("weights", "valid", "test", "test_no_limit"))


def test_the_best_checkpoint_of_the_previous_one_is_still_there(options, monkeypatch):
    """A run that falls back to it may find another one the best, where it is not repeated bit by bit."""
    scores = iter([5.0, 9.0, 9.0, 1.0, 1.0])  # of steps 2 and 4 and of the mean; then of step 4 and of the mean again

    def bleu(model, data, split, *rest, f=train_mt.bleu, **kw):
        return f(model, data, split, *rest, **kw) | ({"bleu": next(scores)} if split == "valid" else {})

    monkeypatch.setattr(train_mt, "bleu", bleu)
    run(options | {"average": 1}, monkeypatch)
    folder = only_run(options["out_dir"])
    (folder / "result.json").unlink()
    flip_a_byte(folder / "ckpt.pt")
    run(options | {"average": 1}, monkeypatch)
    assert json.loads((folder / "result.json").read_text())["weights"] == "weights of step 2"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_trains(dtype, options, monkeypatch):
    run(options | {"dtype": dtype, "steps": 30, "eval_every": 15, "learning_rate": 1e-2}, monkeypatch)
    first, last = losses(options["out_dir"])
    assert last < first - 0.2


def test_a_few_sentences_are_enough_for_a_score(options, monkeypatch):
    run(options | {"eval_sentences": 1}, monkeypatch)


@pytest.mark.parametrize("capacity_factor", [1.0, math.inf], ids=["drops", "no-drops"])
def test_two_processes_compute_what_one_does(options, tmp_path, capacity_factor):
    options |= {"steps": 8, "eval_every": 4, "dtype": "float64", "dropout": 0.1, "capacity_factor": capacity_factor}
    runs = [options | {"out_dir": tmp_path / name} for name in ("one", "two")]
    processes = script(runs[0]), script(runs[1], *TORCHRUN)
    for process, given in zip(processes, runs):
        finish(process, given)
    for a, b in zip(*(metrics(o["out_dir"]) for o in runs)):
        for key in ("train_loss", "loss", "balance", "bleu", "chrf"):
            assert a[key] == pytest.approx(b[key], abs=1e-5)
    one, two = (json.loads((only_run(o["out_dir"]) / "result.json").read_text()) for o in runs)
    assert one["test"]["examples"] == two["test"]["examples"]
    for ours, theirs in zip(one["test"]["layers"], two["test"]["layers"]):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


# Tables


def test_table_3_has_every_row_and_runs_none_twice(options, monkeypatch, capsys):
    options |= {"table": 3, "steps": 2, "seeds": 2}
    run(options, monkeypatch)
    table = capsys.readouterr().out.split("\n\n")[-1]
    rows = table_rows(table)
    assert [row[0] for row in rows] == ["dense", "Switch", "top-2", "top-4", "XMoE", "XMoE"]
    assert [row[1] for row in rows] == ["", "2 x 32", "4 x 16", "8 x 8", "4 x 16", "8 x 8"]
    assert [row[-1] for row in rows] == [
        "25.3 / 50.9",
        "26.7 / 52.0",
        "27.4 / 53.5",
        "27.8 / 53.5",
        "28.4 / 54.0",
        "28.5 / 53.9",
    ]
    assert all(row[3].count("±") == 2 for row in rows) and rows[0][7:9] == ["", ""]
    assert all(float(row[7]) <= float(row[8]) + 1e-9 for row in rows[4:])
    configs = [json.loads(path.read_text())["config"] for path in options["out_dir"].glob("*/result.json")]
    assert len(configs) == 12 and {c["capacity_factor"] for c in configs if c["router"] == "threshold"} == {2.0, 4.0}
    monkeypatch.setattr(train_mt, "smoothed_loss", None)  # whoever trains or evaluates now fails
    run(options, monkeypatch)
    assert capsys.readouterr().out.split("\n\n")[-1] == table


def test_at_the_papers_scale_every_pair_has_its_own_model(monkeypatch):
    asked = []

    def fake(given, row, context):
        config, _ = common.configure(train_mt.Config, train_mt.PRESETS, given, row)
        asked.append(
            (config.data, config.router, config.num_experts, config.expert_size, config.top_k, config.capacity_factor)
        )
        pair = {f"{config.data.removeprefix('wmt23-')}-en": {"bleu": 1.0 + len(asked), "chrf": 2.0}}
        score = {"pairs": pair, "layers": []}
        return config, [{"test": score, "test_no_limit": score, "parameters": {"total": 1}}]

    monkeypatch.setattr(train_mt, "results_of", fake)
    given = {"preset": "wmt23", "table": 3}
    base, _ = common.configure(train_mt.Config, train_mt.PRESETS, given)
    rows = table_rows(train_mt.table3(base, given, None))
    assert len(asked) == 30 and [name for name, *_ in asked[:5]] == [f"wmt23-{x}" for x in train_mt.LANGUAGES]
    shapes = list(dict.fromkeys(tuple(shape) for _, *shape in asked))
    assert shapes == [
        ("dense", 1, 2048, 1, math.inf),
        ("switch", 32, 2048, 1, 1.0),
        ("topk", 64, 1024, 2, 2.0),
        ("topk", 128, 512, 4, 4.0),
        ("threshold", 64, 1024, 1, 2.0),
        ("threshold", 128, 512, 1, 4.0),
    ]
    assert rows[0][3:9] == ["2.00 / 2.00", "3.00 / 2.00", "4.00 / 2.00", "5.00 / 2.00", "6.00 / 2.00", "4.00 / 2.00"]
    assert rows[5][-6:] == ["32.0 / 55.7", "29.2 / 53.2", "28.5 / 53.9", "35.5 / 60.1", "18.0 / 45.4", "28.7 / 53.7"]


def test_table_4_has_x_moes_layer_in_the_encoder(options, monkeypatch, capsys):
    run(options | {"table": 4, "steps": 1, "eval_every": 1, "num_experts": 4}, monkeypatch)
    rows = table_rows(capsys.readouterr().out.split("\n\n")[-1])
    assert [row[0] for row in rows] == ["dense", "SMoE", "X-MoE"]
    configs = [json.loads(path.read_text())["config"] for path in options["out_dir"].glob("*/result.json")]
    assert sorted(c["router"] for c in configs) == ["dense", "hypersphere", "switch"]
    assert {(c["moe_after"], c["orthogonal"], c["expert_layers"]) for c in configs if c["router"] != "dense"} == {
        ("1", True, 3)
    }


# Translating files


@pytest.fixture
def trained(options, monkeypatch, capsys) -> dict:
    options = {name: value for name, value in options.items() if name != "beam"}
    run(options, monkeypatch)
    capsys.readouterr()
    return options


def test_a_file_or_standard_input_is_translated_line_by_line(trained, tmp_path, monkeypatch, capsys):
    lines = ["Hund rot.", "", "Katze\x0cund\u2028Haus.", "   ", "blau " * 60, "rot"]
    (tmp_path / "in.txt").write_bytes("\r\n".join(lines).encode())
    run(trained | {"translate": tmp_path / "in.txt"}, monkeypatch)
    out, err = capsys.readouterr()
    found = out.split("\n")
    assert len(found) == len(lines) + 1 and found[1] == found[3] == found[6] == ""
    assert "warning: 1 of 6 texts are cut to block_size - 1 = 31 tokens" in err
    assert "experts served per token: encoder block 2 " in err
    command = [sys.executable, str(ROOT / "train_mt.py"), *words(trained | {"translate": "-"})]
    for launcher in ([], list(TORCHRUN[1:])):
        whole = [command[0], *launcher, *command[1:]]
        done = subprocess.run(whole, input="\n".join(lines).encode(), capture_output=True)
        assert done.returncode == 0 and done.stdout.decode() == out, done.stderr.decode()
    run(trained | {"translate": tmp_path / "in.txt", "beam": 1}, monkeypatch)  # the same run, searched otherwise
    assert capsys.readouterr().out.count("\n") == len(lines)


def test_what_cannot_be_translated_is_one_clear_line(trained, corpora, tmp_path, monkeypatch, capsys):
    nowhere = refused(trained | {"translate": tmp_path / "nowhere"}, monkeypatch, capsys)
    assert "nowhere" in nowhere
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    assert "is not UTF-8: byte 3" in refused(trained | {"translate": tmp_path / "latin"}, monkeypatch, capsys)
    (tmp_path / "in").write_text("rot\n")
    given = trained | {"translate": tmp_path / "in"}
    assert "does not exist: train first" in refused(given | {"seed": 7}, monkeypatch, capsys)
    folder = only_run(trained["out_dir"])
    (folder / "xlmr.model").write_bytes((corpora["c"] / "xlmr.model").read_bytes())
    assert "another vocabulary than the tokenizer beside it" in refused(given, monkeypatch, capsys)
    flip_a_byte(folder / "model.pt")
    assert "model.pt is corrupt" in refused(given, monkeypatch, capsys)


# What a user can get wrong

BAD = {
    "unknown option": ({"lenght_penalty": 1}, "did you mean length_penalty?"),
    "unknown router": ({"router": "xmoe"}, "router must be one of"),
    "no such table": ({"table": 1}, "tables 3, 4"),
    "no data": ({"data": "wmt24"}, "python -m data.prepare"),
    "unprepared": ({"data": "wmt23-de"}, "python -m data.prepare wmt23-de"),
    "language": ({"target": "fr"}, "pairs without the language 'fr'"),
    "vocabulary": ({"vocab_size": 999}, "the model's vocabulary is 999"),
    "another table's layers": ({"table": 3, "moe_after": "1"}, "not with moe_after, nor with preset wmt10"),
    "a table of translations": ({"table": 3, "translate": "-"}, "--translate takes one trained model"),
    "beam": ({"beam": 0}, "beam must be positive"),
    "smoothing": ({"label_smoothing": 1.0}, "label_smoothing must lie in [0, 1)"),
    "not causal": ({"router": "expert_choice"}, "cannot translate: add --decoder_moe false"),
    "micro-batches": ({"batch_tokens": 300}, "does not divide batch_tokens = 300"),
    "small micro-batches": ({"micro_tokens": 32, "batch_tokens": 32}, "must hold a pair of two times block_size 32"),
    "warm-up": ({"warmup_steps": 0}, "warmup_steps must be positive"),
    "long sentences": ({"block_size": 8}, "are longer than block_size 8 tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(case, options, monkeypatch, capsys):
    given, message = BAD[case]
    assert message in refused(options | given, monkeypatch, capsys)


def test_a_corpus_that_is_not_pairs_is_refused(options, tmp_path, monkeypatch, capsys, corpora):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("\n\n".join(f"document {i} of many" for i in range(400)))
    folder = prepare("text", tmp_path / "text", corpora["a"] / "xlmr.model", out=tmp_path / "one")
    assert "not translation pairs" in refused(options | {"data": folder}, monkeypatch, capsys)


def test_data_of_another_run_and_another_vocabulary(options, corpora, tmp_path, monkeypatch, capsys):
    link = tmp_path / "data"
    options |= {"data": link}
    link.symlink_to(corpora["a"])
    run(options, monkeypatch)
    for other, message in (("b", "another data"), ("c", "another vocab_size (312 there, 302 now)")):
        link.unlink()
        link.symlink_to(corpora[other])
        capsys.readouterr()
        assert message in refused(options, monkeypatch, capsys)


def test_long_pairs_are_named(options, monkeypatch, capsys):
    run(options | {"block_size": 16, "steps": 1, "eval_every": 1, "average": 1}, monkeypatch)
    out = capsys.readouterr().out
    assert "left out of training and of the loss, longer than block_size = 16 tokens: " in out


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(options, monkeypatch, capsys):
    step, schedule = [0], common.inverse_sqrt
    broken = lambda *args, f=train_mt.smoothed_loss: f(*args) * (math.nan if step[0] >= 6 else 1)  # noqa: E731
    monkeypatch.setattr(common, "inverse_sqrt", lambda s, *rest: (step.__setitem__(0, s), schedule(s, *rest))[1])
    monkeypatch.setattr(train_mt, "smoothed_loss", broken)
    assert "not finite at step 7" in refused(options | {"steps": 40, "eval_every": 4}, monkeypatch, capsys)
    state = torch.load(only_run(options["out_dir"]) / "ckpt.pt", weights_only=True)
    assert state["step"] == 4 and all(w.isfinite().all() for w in state["model"].values())


def test_without_sacrebleu_one_line_says_how_to_get_it(options, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    assert "pip install sacrebleu" in refused(options, monkeypatch, capsys)
