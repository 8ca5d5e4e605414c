"""`train_mlm.py` as a user runs it, on three small languages and tiny models."""

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
from runs import TORCHRUN, Script, finish, flip_a_byte, losses, metrics, only_run, table_rows, words
from test_encoder import literal_rc

import common
import train_mlm
from data.prepare import prepare
from data.tokenizers import XLMR, load_tokenizer, train_sentencepiece

MLM = Script(train_mlm)
run, refused, script = MLM.run, MLM.refused, MLM.start
TINY = dict(n_layer=2, n_head=2, n_embd=16, ffn_size=32, block_size=16, micro_tokens=128, batch_tokens=256, steps=4)
TINY |= dict(num_experts=4, expert_size=16, eval_every=2, eval_maskings=2, log_every=1, device="cpu", dtype="float32")
LANGUAGES = {"aa": "abcdefg", "bb": "hijklmnop", "cc": "qrstuv"}


@pytest.fixture(scope="session")
def corpora(tmp_path_factory) -> dict[str, Path]:
    """Two corpora of three languages under one vocabulary, one under another, and their SentencePiece models."""
    base = tmp_path_factory.mktemp("languages")
    rng = np.random.default_rng(0)
    folders = {}
    for name in "ab":
        (base / f"text-{name}").mkdir()
        for i, (language, letters) in enumerate(LANGUAGES.items()):
            draw = lambda: "".join(rng.choice(list(letters), rng.integers(2, 6)))  # noqa: B023, E731
            documents = "\n\n".join(" ".join(draw() for _ in range(12)) for _ in range(300 * (i + 1)))
            (base / f"text-{name}" / f"{language}.txt").write_text(documents)
    texts = [path.read_text() for path in sorted((base / "text-a").iterdir())]
    for size in (300, 310):
        (base / str(size)).mkdir()
        folders[size] = train_sentencepiece(texts, size, XLMR).save(base / str(size))
    for name, text, spm in (("a", "text-a", 300), ("b", "text-b", 300), ("c", "text-a", 310)):
        folders[name] = prepare("cc100", base / text, spm=folders[spm], out=base / name)
    return folders


@pytest.fixture
def options(corpora, tmp_path) -> dict:
    return TINY | {"data": corpora["a"], "out_dir": tmp_path}


ROWS = {
    "dense": {"router": "dense"},
    "SMoE": {"router": "switch"},
    "X-MoE": {},
    "X-MoE sigmoid": {"gate": "sigmoid"},
    "X-MoE top-2": {"router": "topk", "score": "hypersphere"},
    "threshold": {"router": "threshold"},
    "two layers": {"moe_after": "1,2", "expert_layers": 1},
    "a bare FFN": {"expert_layers": 0, "capacity_factor": 1.0},
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_trains_and_reports(row, options, monkeypatch, capsys):
    run(options | ROWS[row], monkeypatch)
    out, folder = capsys.readouterr().out, only_run(options["out_dir"])
    scores = json.loads((folder / "result.json").read_text())["valid"]
    assert scores["ppl"] == pytest.approx(math.exp(scores["loss"]))
    assert f"ppl {scores['ppl']:.2f} ({scores['predicted']:,} masked tokens)" in out
    assert list(scores["languages"]) == list(LANGUAGES)
    assert all(f"{language} {ppl:9.2f}" in out for language, ppl in scores["languages"].items())
    assert len(scores["layers"]) == {"dense": 0, "two layers": 2}.get(row, 1)
    for layer in scores["layers"]:
        assert layer["rc"] > 0 and 0 <= layer["rf"] <= 1 and layer["imbalance"] >= 1
        assert (layer["temperature"] is not None) == (row not in ("SMoE", "threshold"))
    assert metrics(options["out_dir"])[0]["layers"] == [] or metrics(options["out_dir"])[0]["layers"][0]["rf"] is None
    assert {p.name for p in folder.iterdir()} >= {"config.json", "metrics.jsonl", "xlmr.model", "ckpt.pt"}


def test_learning_happens(options, monkeypatch):
    run(options | {"steps": 80, "learning_rate": 1e-2, "eval_every": 40}, monkeypatch)
    first, last = losses(options["out_dir"])
    assert last < first - 0.2


def opened(options):
    given = common.parse(train_mlm.Config, words(options))
    config = common.configure(train_mlm.Config, train_mlm.PRESETS, given)[0]
    context = common.setup("cpu", config.dtype)
    data = train_mlm.open_data(config, context)
    return config, context, data, train_mlm.build(config, None, context)


def test_the_gradient_is_the_mean_over_the_micro_batches(options, monkeypatch):
    seen = []
    record = lambda parameters, limit: seen.append([p.grad.clone() for p in parameters])  # noqa: E731
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", record)
    options |= {"dtype": "float64", "balance_coef": 0.5}
    run(options | {"steps": 1}, monkeypatch)
    _, _, data, model = opened(options)
    for micro in range(2):
        batch = data.batch("train", 0, micro)
        logits, balance = model(batch.ids, batch.masked, batch.real)
        ((torch.nn.functional.cross_entropy(logits, batch.targets) + 0.5 * balance) / 2).backward()
    torch.testing.assert_close(seen[0], [p.grad for p in model.parameters()])


@pytest.mark.parametrize("moe_after", ["1", "1,2"])
def test_evaluation_is_its_literal_definition(moe_after, options):
    """Perplexities by hand, RC by its formula on all validation tokens, RF by comparing every choice."""
    config, context, data, model = opened(options | {"dtype": "float64", "moe_after": moe_after})
    scores, chosen = train_mlm.evaluate(model, data, config, context, 2)
    loss, count, seen = {}, {}, {i: [] for i in range(len(model.moe_layers))}
    model.eval()
    for i, moe in enumerate(model.moe_layers):
        look = lambda _, inputs, out, i=i: seen[i].append((inputs[0], out.priority.argmax(dim=1)))  # noqa: E731
        moe.router.register_forward_hook(look)
    batches = list(data.eval_batches("valid", 2))
    with torch.no_grad():
        for _, _, batch in batches:
            logits, _ = model(batch.ids, batch.masked, batch.real)
            for row, target, language in zip(logits.log_softmax(dim=1), batch.targets, batch.language):
                name = data.languages[language]
                loss[name] = loss.get(name, 0) - float(row[target])
                count[name] = count.get(name, 0) + 1
    assert scores["predicted"] == sum(count.values())
    assert scores["loss"] == pytest.approx(sum(loss.values()) / sum(count.values()))
    assert scores["languages"] == pytest.approx({name: math.exp(loss[name] / count[name]) for name in loss})
    for i, layer in enumerate(scores["layers"]):
        first = seen[i][: len(batches) // 2]  # of the first masking
        h, experts = (torch.cat(parts) for parts in zip(*first))
        assert torch.equal(chosen[i], experts) and len(experts) == scores["tokens"]
        assert layer["rc"] == pytest.approx(literal_rc(h, experts), rel=1e-6)
        assert layer["rf"] is None
    other = [(c + (torch.arange(len(c)) % 4 == 0)) % 4 for c in chosen]
    again, _ = train_mlm.evaluate(model, data, config, context, 1, other)
    for layer in again["layers"]:
        assert layer["rf"] == pytest.approx(math.ceil(len(chosen[0]) / 4) / len(chosen[0]))


# Resuming and processes


def test_a_killed_run_ends_with_the_numbers_of_one_that_was_not(options, tmp_path):
    options |= {"steps": 200, "dropout": 0.1, "eval_every": 5, "eval_tokens": 200}
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
    ours, theirs = (torch.load(only_run(o["out_dir"]) / "ckpt.pt", weights_only=True) for o in (killed, whole))
    assert all(torch.equal(ours["model"][name], w) for name, w in theirs["model"].items())
    assert losses(killed["out_dir"]) == losses(whole["out_dir"])
    ours, theirs = (json.loads((only_run(o["out_dir"]) / "result.json").read_text()) for o in (killed, whole))
    assert ours["valid"] == theirs["valid"]  # RF too, which needs the choices at the checkpoint before


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
    before = (folder / "result.json").read_text()
    (folder / "result.json").unlink()
    flip_a_byte(folder / "ckpt.pt")
    run(options, monkeypatch)
    assert "ckpt.pt is corrupt" in (err := capsys.readouterr()).err and "goes on from step 2" in err.out
    assert json.loads((folder / "result.json").read_text())["valid"] == json.loads(before)["valid"]


@pytest.mark.parametrize("capacity_factor", [1.0, math.inf], ids=["drops", "no-drops"])
def test_two_processes_compute_what_one_does(options, tmp_path, capacity_factor):
    options |= {"steps": 20, "eval_every": 4, "dtype": "float64", "dropout": 0.1, "capacity_factor": capacity_factor}
    runs = [options | {"out_dir": tmp_path / name} for name in ("one", "two")]
    processes = script(runs[0]), script(runs[1], *TORCHRUN)
    for process, given in zip(processes, runs):
        finish(process, given)
    one, two = (metrics(o["out_dir"]) for o in runs)
    assert len(one) == 5 and one[-1]["train_loss"] < one[0]["train_loss"]
    for record in one[0], two[0]:
        assert all(layer.pop("rf") is None for layer in record["layers"])
    for a, b in zip(one, two):
        for key in ("train_loss", "loss", "balance"):
            assert a[key] == pytest.approx(b[key], abs=1e-5)
        assert a["languages"] == pytest.approx(b["languages"], rel=1e-5)
        for ours, theirs in zip(a["layers"], b["layers"]):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert any(layer["cut"] > 0 for layer in one[-1]["layers"]) == (capacity_factor == 1.0)


# Tables


def test_table_2_has_every_row_and_runs_none_twice(options, monkeypatch, capsys):
    options |= {"table": 2, "steps": 2}
    run(options, monkeypatch)
    table = capsys.readouterr().out.split("\n\n")[-1]
    rows = table_rows(table)
    assert [row[2] for row in rows] == ["23.51", "19.02", "18.72", "19.59", "19.12"]
    assert all(float(row[3]) > 1 for row in rows) and [bool(row[7]) for row in rows] == [0, 0, 1, 0, 1]
    monkeypatch.setattr(train_mlm, "token_losses", None)  # whoever trains or evaluates now fails
    run(options, monkeypatch)
    assert capsys.readouterr().out.split("\n\n")[-1] == table


@pytest.mark.parametrize("number, dims", [(3, [2, 0, 2, 0]), (5, [1, 2, 4, 8, 16])])
def test_tables_3_and_5_change_what_they_say(number, dims, options, monkeypatch, capsys):
    run(options | {"table": number, "steps": 1, "eval_every": 1}, monkeypatch)
    rows = table_rows(capsys.readouterr().out.split("\n\n")[-1])
    assert len(rows) == len(dims)
    configs = [json.loads(path.read_text())["config"] for path in options["out_dir"].glob("*/result.json")]
    assert sorted(config["routing_dim"] for config in configs) == sorted(dims)
    assert all(config["gate"] == "sigmoid" for config in configs)
    scores = [config["score"] for config in configs]
    assert scores.count("dot") == (2 if number == 3 else 0)


def test_seeds_give_mean_and_deviation(options, monkeypatch, capsys):
    run(options | {"seeds": 2}, monkeypatch)
    assert len(list(options["out_dir"].iterdir())) == 2
    assert "2 seeds: perplexity" in (out := capsys.readouterr().out) and " ± " in out


# What a user can get wrong


BAD = {
    "unknown option": ({"temprature": 0.5}, "--temprature"),
    "unknown router": ({"router": "xmoe"}, "router must be one of"),
    "depth": ({"moe_after": "3"}, "moe_after must name layers from 1 to n_layer = 2"),
    "micro-batches": ({"batch_tokens": 300}, "does not divide batch_tokens = 300"),
    "no such table": ({"table": 4}, "tables 2, 3, 5"),
    "no data": ({"data": "cc100x"}, "python -m data.prepare"),
    "vocabulary": ({"vocab_size": 999}, "the model's vocabulary is 999"),
    "maskings": ({"eval_maskings": 0}, "eval_maskings must be positive"),
    "exponent": ({"sampling_exponent": "nan"}, "sampling_exponent must lie in [0, 1]"),
    "warm-up": ({"warmup": 2}, "warmup is a share of the steps"),
    "no such spm": ({"data": "catalogs", "spm": "nowhere.model"}, "--spm nowhere.model does not exist"),
    "mask share": ({"mask_share": 0.0}, "mask_share"),
    "nowhere": ({"init_from": "nowhere"}, "has no config.json"),
    "spm with prepared data": ({"spm": "x.model"}, "--spm is for catalogs"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(case, options, monkeypatch, capsys):
    given, message = BAD[case]
    assert message in refused(options | given, monkeypatch, capsys)


def test_a_corpus_of_one_language_is_refused(options, tmp_path, monkeypatch, capsys, corpora):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("\n\n".join(f"document {i} of many" for i in range(400)))
    folder = prepare("text", tmp_path / "text", corpora[300], out=tmp_path / "one")
    assert "corpus of one language" in refused(options | {"data": folder}, monkeypatch, capsys)


def test_data_of_another_run_and_another_vocabulary(options, corpora, tmp_path, monkeypatch, capsys):
    link = tmp_path / "data"
    options |= {"data": link, "out_dir": tmp_path / "out"}
    link.symlink_to(corpora["a"])
    run(options, monkeypatch)
    for other, message in (("b", "another data"), ("c", "another vocab_size (300 there, 310 now)")):
        link.unlink()
        link.symlink_to(corpora[other])
        capsys.readouterr()
        assert message in refused(options, monkeypatch, capsys)


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(options, monkeypatch, capsys):
    options |= {"steps": 40, "eval_every": 4}
    broken = lambda *args, f=train_mlm.token_losses: f(*args) * (math.nan if step[0] >= 6 else 1)  # noqa: E731
    step, linear = [0], common.linear
    monkeypatch.setattr(common, "linear", lambda s, *rest: (step.__setitem__(0, s), linear(s, *rest))[1])
    monkeypatch.setattr(train_mlm, "token_losses", broken)
    assert "not finite at step 7" in refused(options, monkeypatch, capsys)
    state = torch.load(only_run(options["out_dir"]) / "ckpt.pt", weights_only=True)
    assert state["step"] == 4 and all(w.isfinite().all() for w in state["model"].values())


def test_weights_that_the_last_update_broke_are_not_saved(options, monkeypatch, capsys):
    """Every training loss was finite; only the evaluation can tell."""
    updates = []

    def after_step(model):
        updates.append(1)
        if len(updates) == 8:
            model.encoder.ln_e.weight.data.fill_(math.inf)

    monkeypatch.setattr(train_mlm.MaskedLM, "after_step", after_step)
    assert "not finite at step 8" in refused(options | {"steps": 40, "eval_every": 4}, monkeypatch, capsys)
    assert common.load_checkpoint(only_run(options["out_dir"]) / "ckpt.pt")["step"] == 4


def test_the_run_keeps_a_tokenizer_that_knows_its_ids(options, monkeypatch):
    run(options | {"steps": 1, "eval_every": 1}, monkeypatch)
    ours, theirs = (load_tokenizer(folder) for folder in (only_run(options["out_dir"]), options["data"]))
    assert isinstance(ours, XLMR) and ours.encode_batch(["abc hij"]) == theirs.encode_batch(["abc hij"])


def test_xlmr_weights_start_a_sparse_model(options, tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    shape = dict(vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    shape |= dict(max_position_embeddings=34, type_vocab_size=1, layer_norm_eps=1e-5)
    folder = tmp_path / "xlmr"
    theirs = transformers.XLMRobertaForMaskedLM(transformers.XLMRobertaConfig(**shape)).eval()
    theirs.save_pretrained(folder)
    capsys.readouterr()
    options |= {"init_from": folder, "out_dir": tmp_path / "out"}
    assert "n_layer 2, not 3" in refused(options | {"n_layer": 3}, monkeypatch, capsys)
    assert "32 positions, fewer than block_size = 64" in refused(options | {"block_size": 64}, monkeypatch, capsys)
    assert "vocab_size 300, not 310" in refused(
        options | {"data": str(options["data"])[:-1] + "c"}, monkeypatch, capsys
    )
    _, _, data, model = opened(options)
    batch = data.batch("train", 0, 0)
    with torch.no_grad():  # the inserted experts change nothing yet
        expected = theirs(batch.ids).logits.flatten(0, 1)[batch.masked]
        torch.testing.assert_close(model.eval()(batch.ids, batch.masked)[0], expected, rtol=1e-5, atol=1e-5)
    run(options, monkeypatch)
    assert "masked tokens" in capsys.readouterr().out


# Plumbing


def test_learning_rate_rises_and_falls_in_lines():
    rates = [common.linear(step, 100, 0.1, 2.0) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10:] == pytest.approx([2.0 * (100 - i) / 90 for i in range(10, 100)])


def test_help_lists_every_constant_once(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        run({"help": ""}, monkeypatch)
    out = capsys.readouterr().out
    assert stop.value.code == 0
    for name in (field.name for field in dataclasses.fields(train_mlm.Config)):
        (line,) = [line for line in out.splitlines() if line.strip().startswith(f"--{name} ")]
        assert len(line.split()) > 2
    assert "X-MoE" in next(line for line in out.splitlines() if "--router " in line and "hypersphere (X" in line)


def test_norms_and_biases_of_experts_are_not_decayed(options):
    _, _, _, model = opened(options)
    decayed, free = (group["params"] for group in common.adamw(model, 1.0, (0.9, 0.98), 0.1).param_groups)
    named = {id(p): name for name, p in model.named_parameters()}
    assert not any(named[id(p)].endswith(("ln_weight", "ln_bias", "b_in", "b_out", "bias")) for p in decayed)
    assert any(named[id(p)].endswith("ln_weight") for p in free) and all(p.dim() >= 2 for p in decayed)
