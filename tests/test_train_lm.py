"""`train_lm.py` as a user runs it, on a small corpus and tiny models."""

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

import common
import train_lm
from data.prepare import prepare
from data.tokenizers import train_sentencepiece

ROUTERS = ("dense", "switch", "topk", "threshold", "hash", "base", "expert_choice")
TINY = dict(n_layer=2, n_head=2, n_embd=16, ffn_size=32, block_size=16, micro_tokens=64, batch_tokens=128, steps=4)
TINY |= dict(eval_every=2, eval_tokens=128, log_every=1, sample_tokens=4, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def corpora(tmp_path_factory) -> dict[str, Path]:
    """Two prepared corpora that share a tokenizer, and one with another vocabulary."""
    base = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(0)
    texts = ["\n\n".join(" ".join(map(str, rng.integers(200, size=20))) for _ in range(500)) for _ in range(2)]
    spm = []
    for size in (320, 330):
        (base / str(size)).mkdir()
        spm.append(train_sentencepiece(texts, vocab_size=size).save(base / str(size)))
    folders = {}
    for name, text, tokenizer in (("a", texts[0], spm[0]), ("b", texts[1], spm[0]), ("c", texts[0], spm[1])):
        (base / f"{name}.txt").write_text(text)
        folders[name] = prepare("text", base / f"{name}.txt", tokenizer, out=base / name)
    return folders


@pytest.fixture
def options(corpora, tmp_path) -> dict:
    return TINY | {"data": corpora["a"], "out_dir": tmp_path}


LM = Script(train_lm)
run, refused, script = LM.run, LM.refused, LM.start


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_trains_and_reports(router, options, monkeypatch, capsys):
    run(options | {"router": router}, monkeypatch)
    out = capsys.readouterr().out
    result = json.loads((only_run(options["out_dir"]) / "result.json").read_text())
    assert f"{result['test']['ppl']:.2f} per token" in out and f"{result['test_no_limit']['ppl']:.2f} per token" in out
    assert result["test"]["ppl"] == pytest.approx(math.exp(result["test"]["loss"]))
    counts = json.loads((options["data"] / "meta.json").read_text())["splits"]["test"]
    nats = result["test"]["loss"] * counts["tokens"]  # of the whole split, shared out among its words
    assert result["test"]["word_ppl"] == pytest.approx(math.exp(nats / counts["words"]))
    assert ("tokens unserved" in out) == (router != "dense")
    assert ("not causal" in out) == (router == "expert_choice") and ("\n\nsample" in out) != (router == "expert_choice")
    assert {p.name for p in only_run(options["out_dir"]).iterdir()} >= {
        "config.json",
        "metrics.jsonl",
        "tokenizer.model",
    }


def test_learning_happens(options, monkeypatch):
    run(options | {"steps": 60, "learning_rate": 1e-2, "eval_every": 30}, monkeypatch)
    first, last = losses(options["out_dir"])
    assert last < first - 0.3


def test_the_gradient_is_the_mean_over_the_micro_batches(options, monkeypatch):
    """Adam and clipping would hide a wrong scale: look at the gradient before them."""
    seen = []
    record = lambda parameters, limit: seen.append([p.grad.clone() for p in parameters])  # noqa: E731
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", record)
    run(options | {"steps": 1, "dtype": "float64", "balance_coef": 0.5}, monkeypatch)
    given = common.parse(train_lm.Config, words(options | {"dtype": "float64"}))
    config, context = common.configure(train_lm.Config, train_lm.PRESETS, given)[0], common.setup("cpu", "float64")
    data = train_lm.open_data(config, context)
    model = train_lm.build(config, None, context)
    for micro in range(2):
        x, y = data.batch("train", 0, micro)
        logits, balance = model(x)
        ((torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.5 * balance) / 2).backward()
    torch.testing.assert_close(seen[0], [p.grad for p in model.parameters()])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_weights_in_fp32_and_scales_the_loss_of_fp16(dtype, options, monkeypatch):
    run(options | {"dtype": dtype}, monkeypatch)
    state = torch.load(only_run(options["out_dir"]) / "ckpt.pt", weights_only=True)
    assert all(w.dtype == torch.float32 for w in state["model"].values())
    assert bool(state["scaler"]) == (dtype == "float16")
    (layer,) = json.loads((only_run(options["out_dir"]) / "result.json").read_text())["test"]["layers"]
    assert layer["served"] > 0


# Resuming


def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(options, tmp_path):
    options |= {"steps": 300, "dropout": 0.1, "eval_every": 5, "eval_tokens": 64}
    whole, killed = (options | {"out_dir": tmp_path / name} for name in ("whole", "killed"))
    processes = script(whole), script(killed)
    while not list(killed["out_dir"].glob("*/ckpt.prev.pt")):
        assert processes[1].poll() is None, (killed["out_dir"] / "log.txt").read_text()
        time.sleep(0.02)
    time.sleep(random.uniform(0, 1))
    processes[1].send_signal(signal.SIGKILL)
    processes[1].wait()
    folder = only_run(killed["out_dir"])
    assert not (folder / "result.json").exists(), "the run ended before it could be killed"
    with open(folder / "metrics.jsonl", "a") as f:
        f.write('{"step": 299, "torn')
    assert "goes on from step" in finish(script(killed), killed)
    finish(processes[0], whole)
    ours, theirs = (torch.load(only_run(o["out_dir"]) / "ckpt.pt", weights_only=True) for o in (killed, whole))
    assert ours["step"] == theirs["step"] == 300
    assert all(torch.equal(ours["model"][name], w) for name, w in theirs["model"].items())
    assert losses(killed["out_dir"]) == losses(whole["out_dir"])


def test_a_finished_run_is_not_run_again(options, monkeypatch, capsys):
    run(options, monkeypatch)
    report = capsys.readouterr().out.split("\n\n", 1)[1]
    monkeypatch.setattr(train_lm, "token_loss", None)  # whoever trains or evaluates now fails
    run(options, monkeypatch)
    assert capsys.readouterr().out.split("\n\n", 1)[1] == report


def test_a_corrupt_checkpoint_gives_way_to_the_previous_one(options, monkeypatch, capsys):
    run(options, monkeypatch)
    folder = only_run(options["out_dir"])
    whole = torch.load(folder / "ckpt.pt", weights_only=True)["model"]
    (folder / "result.json").unlink()
    flip_a_byte(folder / "ckpt.pt")
    run(options, monkeypatch)
    assert "ckpt.pt is corrupt" in (err := capsys.readouterr()).err and "goes on from step 2" in err.out
    again = torch.load(folder / "ckpt.pt", weights_only=True)["model"]
    assert all(torch.equal(w, again[name]) for name, w in whole.items())
    assert common.load_checkpoint(folder / "ckpt.prev.pt")["step"] == 2  # the damaged one did not take its place

    (folder / "result.json").unlink()
    flip_a_byte(folder / "ckpt.pt")
    (folder / "ckpt.prev.pt").write_bytes(b"not a checkpoint")
    assert "corrupt" in refused(options, monkeypatch, capsys)


# Processes


@pytest.mark.parametrize("capacity_factor", [1.0, math.inf], ids=["drops", "no-drops"])
def test_two_processes_compute_what_one_does(options, tmp_path, capacity_factor):
    options |= {"steps": 20, "eval_every": 1, "dtype": "float64", "dropout": 0.1, "capacity_factor": capacity_factor}
    options |= {"batch_tokens": 256, "eval_tokens": 128}
    runs = [options | {"out_dir": tmp_path / name} for name in ("one", "two")]
    processes = script(runs[0]), script(runs[1], *TORCHRUN)
    for process, given in zip(processes, runs):
        finish(process, given)
    one, two = (metrics(o["out_dir"]) for o in runs)
    assert len(one) == 20 and one[-1]["train_loss"] < one[0]["train_loss"]
    for a, b in zip(one, two):
        assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-5)
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5) and a["balance"] == pytest.approx(b["balance"], abs=1e-5)
        for ours, theirs in zip(a["layers"], b["layers"]):
            assert ours == pytest.approx(theirs, abs=1e-5)
    dropped = any(layer["cut"] > 0 for layer in one[-1]["layers"])
    assert dropped == (capacity_factor == 1.0)


# Evaluation and tables


def test_evaluation_under_another_routing_leaves_the_run_alone(options, monkeypatch, capsys):
    run(options, monkeypatch)
    folder = only_run(options["out_dir"])
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    capsys.readouterr()
    run(options | {"eval_only": True, "eval_threshold": 0.0, "eval_capacity_factor": 0.5}, monkeypatch)
    record = json.loads((folder / "eval-t=0.0-gamma=0.5.json").read_text())
    assert record["test"]["layers"][0]["wanted"] == 1
    assert record["test"]["layers"][0]["served"] < 1 == record["test_no_limit"]["layers"][0]["served"]
    assert {n: (folder / n).read_bytes() for n in before} == before
    assert "with gamma 0.5" in capsys.readouterr().out


def test_table_1_has_every_row_and_runs_none_twice(options, monkeypatch, capsys):
    options |= {"table": 1, "steps": 2, "ffn_size": 64, "sample_tokens": 1}
    run(options, monkeypatch)
    table = capsys.readouterr().out.split("\n\n")[-1]
    rows = table_rows(table)
    experts = ["1 x 64", *["8 x 64"] * 3, *["16 x 32", "32 x 16", "64 x 8"] * 2]
    assert [row[1] for row in rows if row] == experts and rows[0][3:5] == ["22.61", "22.24"]
    assert rows[9][3:5] == ["19.46", "19.97"] and all(float(row[5]) > 1 for row in rows[:10])
    monkeypatch.setattr(train_lm, "token_loss", None)
    run(options, monkeypatch)
    assert capsys.readouterr().out.split("\n\n")[-1] == table


def test_table_2_says_what_share_was_really_kept(options, monkeypatch, capsys):
    options |= {"table": 2, "steps": 2, "sample_tokens": 1}
    run(options, monkeypatch)
    table = capsys.readouterr().out.split("\n\n")[-1]
    rows = table_rows(table)
    assert [row[2] for row in rows] == ["1.00x"] + ["1.00x", "0.75x", "0.50x", "0.25x"] * 2
    kept = [float(row[3].rstrip("%")) / 100 for row in rows]
    assert kept[0] == kept[1] == kept[5] == 1
    assert all(k <= float(row[2].rstrip("x")) + 0.02 for k, row in zip(kept, rows))
    before = table
    run(options | {"resume": False}, monkeypatch)  # trains again, and comes to the same
    assert capsys.readouterr().out.split("\n\n")[-1] == before
    monkeypatch.setattr(train_lm, "token_loss", None)
    run(options, monkeypatch)
    assert capsys.readouterr().out.split("\n\n")[-1] == before


def test_seeds_give_mean_and_deviation(options, monkeypatch, capsys):
    run(options | {"seeds": 2}, monkeypatch)
    assert len(list(options["out_dir"].iterdir())) == 2 and "2 seeds: test perplexity" in (
        out := capsys.readouterr().out
    )
    assert " ± " in out


# What a user can get wrong


BAD = {
    "unknown option": ({"treshold": 0.5}, "did you mean threshold?"),
    "unknown preset": ({"preset": "wikitext103-323"}, "did you mean wikitext103-323M?"),
    "unknown router": ({"router": "topp"}, "router must be one of"),
    "wrong type": ({"steps": "many"}, "--steps takes a value of type int, not 'many'"),
    "threshold above 1": ({"threshold": 1.5}, "threshold must lie in [0, 1]"),
    "threshold at test": ({"eval_threshold": -0.1}, "eval_threshold must lie in [0, 1]"),
    "top_k": ({"router": "topk", "top_k": 33}, "top_k must lie in [1, num_experts = 32]"),
    "expert size": ({"expert_size": 12}, "expert_size = 12 does not divide ffn_size = 32"),
    "micro-batches": ({"batch_tokens": 100}, "does not divide batch_tokens = 100"),
    "no such table": ({"table": 3}, "tables 1, 2"),
    "no such device": ({"device": "cuda"}, "device cuda:0: "),
    "no data": ({"data": "wikitext103x"}, "python -m data.prepare"),
    "vocabulary": ({"vocab_size": 300}, "the model's vocabulary is 300"),
    "sparse init_from": ({"init_from": "."}, "dense"),
    "nothing trained": ({"eval_only": True}, "has no checkpoint"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(case, options, monkeypatch, capsys):
    if case == "no such device" and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    given, message = BAD[case]
    assert message in refused(options | given, monkeypatch, capsys)


def test_processes_that_do_not_divide_the_micro_batches(options, monkeypatch, capsys):
    context = common.Context(0, 3, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(common, "setup", lambda *_: context)
    assert "cannot be dealt to 3 processes" in refused(options, monkeypatch, capsys)


def test_truncated_and_missing_tokens(options, corpora, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "cut"
    folder.mkdir()
    for file in corpora["a"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-10])
    assert "train.bin" in refused(options | {"data": folder}, monkeypatch, capsys)
    (folder / "train.bin").unlink()
    assert "train.bin is missing" in refused(options | {"data": folder}, monkeypatch, capsys)


def test_data_of_another_run(options, corpora, tmp_path, monkeypatch, capsys):
    """The folder's name is the same; what is in it is not."""
    link = tmp_path / "data"
    options |= {"data": link, "out_dir": tmp_path / "out"}
    link.symlink_to(corpora["a"])
    run(options, monkeypatch)
    for other, message in (
        ("b", "was trained with another data"),
        ("c", "another vocab_size (320 there, 330 now)"),
    ):
        link.unlink()
        link.symlink_to(corpora[other])
        capsys.readouterr()
        assert message in refused(options, monkeypatch, capsys)


def test_a_folder_of_other_constants_is_not_resumed(options, monkeypatch, capsys):
    run(options, monkeypatch)
    file = only_run(options["out_dir"]) / "config.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 7'))
    capsys.readouterr()
    assert "another seed (7 there, 0 now)" in refused(options, monkeypatch, capsys)


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(options, monkeypatch, capsys):
    options |= {"steps": 40, "eval_every": 4}
    broken = lambda logits, y, loss=train_lm.token_loss: loss(logits, y) * (math.nan if step[0] >= 6 else 1)  # noqa: E731
    step, cosine = [0], common.cosine
    monkeypatch.setattr(common, "cosine", lambda s, *rest: (step.__setitem__(0, s), cosine(s, *rest))[1])
    monkeypatch.setattr(train_lm, "token_loss", broken)
    assert "not finite at step 7" in refused(options, monkeypatch, capsys)
    state = torch.load(only_run(options["out_dir"]) / "ckpt.pt", weights_only=True)
    assert state["step"] == 4 and all(w.isfinite().all() for w in state["model"].values())


def test_gpt2_weights_in_another_shape_or_nowhere(options, tmp_path, monkeypatch, capsys):
    options |= {"router": "dense", "eval_only": True, "init_from": tmp_path}
    assert "has no config.json" in refused(options, monkeypatch, capsys)
    transformers = pytest.importorskip("transformers")
    shape = dict(vocab_size=320, n_positions=16, n_layer=2, n_head=2, n_embd=16, n_inner=32)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).save_pretrained(tmp_path)
    capsys.readouterr()
    assert "n_layer 2, not 3" in refused(options | {"n_layer": 3}, monkeypatch, capsys)
    run(options | {"out_dir": tmp_path / "out"}, monkeypatch)
    assert "per word" in capsys.readouterr().out


def test_weights_that_the_last_update_broke_are_not_saved(options, monkeypatch, capsys):
    """Every training loss was finite; only the evaluation can tell."""
    updates = []

    def after_step(model):
        updates.append(1)
        if len(updates) == 8:
            model.ln_f.weight.data.fill_(math.inf)

    monkeypatch.setattr(train_lm.GPT, "after_step", after_step)
    assert "not finite at step 8" in refused(options | {"steps": 40, "eval_every": 4}, monkeypatch, capsys)
    assert common.load_checkpoint(only_run(options["out_dir"]) / "ckpt.pt")["step"] == 4


# Plumbing


def test_a_run_has_one_name_however_it_is_written():
    def name(*words, **row):
        return common.configure(train_lm.Config, train_lm.PRESETS, common.parse(train_lm.Config, list(words)), row)[1]

    switch = name("--router", "switch")
    assert switch == "demo-router=switch" == name("--router", "switch", "--expert_size", "1024", "--num_experts", "8")
    assert switch == name(router="switch", expert_size=1024) == name("--router", "switch", "--device", "cpu")
    assert name("--steps", "5", "--seed", "1") == name("--seed", "1", "--steps", "5") == "demo-seed=1-steps=5"
    others = [["--capacity_factor", "4"], ["--expert_size", "256"], ["--num_experts", "32"], ["--threshold", "0.5"]]
    assert len({switch, *(name("--router", "switch", *words) for words in others)}) == 5
    assert name() == name("--router", "threshold", "--expert_size", "256") == "demo"
    routed = ["--eval_threshold", "0.5", "--eval_capacity_factor", "2"]
    assert name("--eval_only", *routed) == "demo" != name(*routed)


def test_help_lists_every_constant_with_its_comment(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        run({"help": ""}, monkeypatch)
    out = capsys.readouterr().out
    assert stop.value.code == 0
    for name in (field.name for field in dataclasses.fields(train_lm.Config)):
        (line,) = [line for line in out.splitlines() if line.strip().startswith(f"--{name} ")]
        assert len(line.split()) > 2


def test_options_may_be_written_in_three_ways():
    given = common.parse(train_lm.Config, ["--steps", "3", "--learning_rate=1", "--eval_only", "--top_k", "none"])
    assert given == {"steps": 3, "learning_rate": 1.0, "eval_only": True, "top_k": None}
    with pytest.raises(ValueError, match="--steps needs a value"):
        common.parse(train_lm.Config, ["--steps"])


def test_learning_rate_rises_in_a_line_and_falls_in_a_cosine():
    rates = [common.cosine(step, 100, 0.1, 1.0, 0.01) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[55] == pytest.approx((1 + 0.01) / 2) and rates[99] < 0.0115 and rates[10] == 1.0


def test_weight_decay_spares_norms_and_biases():
    model = train_lm.GPT(
        train_lm.Config(vocab_size=10, **{k: TINY[k] for k in ("n_layer", "n_head", "n_embd", "ffn_size")})
    )
    decayed, free = (group["params"] for group in common.adamw(model, 1.0, (0.9, 0.95), 0.1).param_groups)
    named = {id(p): name for name, p in model.named_parameters()}
    assert {named[id(p)].rpartition(".")[2] for p in decayed} == {"weight", "experts", "w_in", "w_out"}
    assert {named[id(p)].rpartition(".")[2] for p in free} == {"weight", "bias", "b_in", "b_out"}
    assert all(p.dim() >= 2 for p in decayed) and len(decayed) + len(free) == len(named)
