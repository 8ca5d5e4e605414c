"""A run's folder, resuming, processes and tables: what all scripts share, shown on train_lm.py."""

import fcntl
import gc
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import TORCHRUN, Script, finish, flip_a_byte, losses, metrics, only_run, result_of, signal_at, stopped
from helpers import words as command

import train_lm
from data.batches import TokenData
from engine import run as engine_run
from engine import table
from engine.config import command_line
from engine.device import Context, setup
from engine.pretrained import load
from engine.run import Run, load_checkpoint, newest
from engine.table import Table, cell, markdown_table

LM = Script(train_lm)


class Stop(Exception):
    """What ends a run in the middle."""


def checkpoint(options: dict) -> dict:
    return torch.load(only_run(options["out_dir"]) / "ckpt.pt", weights_only=True)


def stop_in_the_middle(options: dict, step: int):
    """Ends a run while it takes this step, from 0, without a word to anybody."""

    def rate(now, *rest, cosine=train_lm.cosine):
        if now == step:
            raise Stop
        return cosine(now, *rest)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(train_lm, "cosine", rate)
        LM.run(options, patch)
    gc.collect()  # its lock with it


def kept_in(options: dict, *names: str) -> tuple[dict, ...]:
    """The same command with folders of these names."""
    return tuple(options | {"out_dir": options["out_dir"] / name} for name in names)


def assert_same_end(one: dict, two: dict):
    """Bit for bit: weights, optimizer, what was logged, what came out."""
    ours, theirs = checkpoint(one), checkpoint(two)
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)
    torch.testing.assert_close(ours["optimizer"]["state"], theirs["optimizer"]["state"], rtol=0, atol=0)
    found = []
    for options in (one, two):
        log = [record | {"tokens_per_second": 0} for record in metrics(options["out_dir"])]
        found.append((log, result_of(options["out_dir"]) | {"seconds": 0}))
    assert found[0] == found[1]


def wait_for(process: subprocess.Popen, out: Path, file: str, lines: int = 0) -> list[int]:
    """Until a run has this file, of so many lines -> the processes that torchrun has started for it."""
    while not any(path.read_bytes().count(b"\n") >= lines for path in out.glob(f"*/{file}")):
        assert process.poll() is None, (out / "log.txt").read_text()
        time.sleep(0.02)
    return [int(line) for line in subprocess.check_output(["pgrep", "-P", str(process.pid)]).split()]


def test_data_of_another_run_is_an_error(options, corpora, tmp_path, monkeypatch, capsys):
    """The path is the same; what is there is not."""
    options |= {"data": tmp_path / "data", "out_dir": tmp_path / "out"}
    options["data"].symlink_to(corpora["a"])
    LM.run(options, monkeypatch)
    options["data"].unlink()
    options["data"].symlink_to(corpora["b"])
    capsys.readouterr()
    assert "config.json is of a run with another data_checksum" in LM.refused(options, monkeypatch, capsys)


def test_a_run_leaves_behind_what_it_takes_to_make_the_model_again(options, monkeypatch):
    LM.run(options, monkeypatch)
    folder, state, result = only_run(options["out_dir"]), checkpoint(options), result_of(options["out_dir"])
    keys = "class step constants vocab_size identity model optimizer seconds log window kept"
    assert state.keys() == set(keys.split())
    assert state["class"] == "GPT" and state["vocab_size"] == 320 and state["step"] == 4
    model, tokenizer = load(folder)
    torch.testing.assert_close(model.state_dict(), state["model"], rtol=0, atol=0)
    assert tokenizer.vocab_size == 320
    assert result["config"] == state["identity"] == json.loads((folder / "config.json").read_text())
    assert {"name", "seconds", "machine", "test", "test_no_limit", "parameters", "flops"} < result.keys()
    files = "ckpt.prev.pt ckpt.pt config.json lock metrics.jsonl result.json tokenizer.model"  # and nothing temporary
    assert sorted(path.name for path in folder.iterdir()) == files.split()


@pytest.mark.parametrize("resume", [True, False])
def test_a_second_run_in_the_same_folder_is_refused_and_touches_nothing(resume, options, monkeypatch, capsys):
    """Whoever holds the folder goes on; the lock goes with the process, not with the file."""
    stop_in_the_middle(options, 3)
    folder = only_run(options["out_dir"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True)"
    command = [sys.executable, "-c", f"{hold}; time.sleep(600)", folder / "lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        line = LM.refused(options | {"resume": resume}, monkeypatch, capsys)
        assert "another process is training in" in line and str(folder) in line
        assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
        LM.run(options | {"eval_only": True}, monkeypatch)  # reads a checkpoint, and writes none
        holder.kill()
    LM.run(options, monkeypatch)
    assert len(metrics(options["out_dir"])) == 2


def test_a_run_holds_its_folder_to_the_end(options, monkeypatch):
    def due(self, done, due=Run.due):
        gc.collect()
        with open(self.folder / "lock") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return due(self, done)

    monkeypatch.setattr(Run, "due", due)
    LM.run(options, monkeypatch)
    with open(only_run(options["out_dir"]) / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_whenever_a_file_takes_its_name_a_run_may_stop(options, tmp_path, monkeypatch):
    whole = options | {"out_dir": tmp_path / "whole"}
    LM.run(whole, monkeypatch)
    renames = []

    def replace(file, target, rename=Path.replace):
        renames.append(target)
        if len(renames) == stop_at:
            raise Stop
        return rename(file, target)

    for stop_at in range(1, 9):
        renames.clear()
        stopped = options | {"out_dir": tmp_path / str(stop_at)}
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
            patch.setattr(Path, "replace", replace)
            LM.run(stopped, patch)
        LM.run(stopped, monkeypatch)
        assert_same_end(stopped, whole)
    names = "config.json tokenizer.model metrics.jsonl ckpt.pt metrics.jsonl ckpt.prev.pt ckpt.pt result.json"
    assert " ".join(Path(target).name for target in renames) == names


def test_a_file_is_on_the_disk_before_it_takes_its_name(options, monkeypatch):
    """What is killed is not the disk; what loses its power is."""
    done, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append("fsync"), fsync(number)))
    monkeypatch.setattr(Path, "replace", lambda file, target: (done.append(file.suffix), replace(file, target)))
    LM.run(options, monkeypatch)
    done.remove(".pt")  # the checkpoint that becomes the previous one
    assert done == ["fsync", ".tmp"] * 7


@pytest.mark.parametrize(
    "step, evaluations, number",
    [(0, 0, signal.SIGTERM), (2, 1, signal.SIGINT), (3, 2, signal.SIGTERM), (4, 3, signal.SIGINT)],
)
def test_a_signal_ends_a_run_behind_its_step(step, evaluations, number, options, tmp_path, monkeypatch, capsys):
    """The state is saved between two evaluations, too; none is added, and none is left out."""
    options |= {"steps": 5, "dropout": 0.1}
    whole, ended = kept_in(options, "whole", "ended")
    line = stopped(LM, step, number, ended, capsys)
    assert line == f"stopped at step {step + 1}; the same command goes on"
    log = only_run(ended["out_dir"]) / "metrics.jsonl"
    assert (len(metrics(ended["out_dir"])) if log.exists() else 0) == evaluations
    if step == 3:  # saved by its evaluation, and not once more
        assert load_checkpoint(log.with_name("ckpt.prev.pt"))["step"] == 2
    LM.run(ended, monkeypatch)
    assert f"goes on from step {step + 1}" in capsys.readouterr().out
    LM.run(whole, monkeypatch)
    assert_same_end(ended, whole)
    assert [record["step"] for record in metrics(whole["out_dir"])] == [2, 4, 5]  # the last one, too


def test_a_second_signal_ends_a_run_at_once(options, monkeypatch, capsys):
    """Here while it evaluates: the checkpoint of before is kept."""

    def evaluate(model, data, split, context, *most, old=train_lm.evaluate):
        if only_run(options["out_dir"]).joinpath("ckpt.pt").exists():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return old(model, data, split, context, *most)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(train_lm, "evaluate", evaluate)
        LM.run(options, patch)
    assert stop.value.code == 130 and "stopped; the same command goes on" in capsys.readouterr().err
    assert checkpoint(options)["step"] == 2


@pytest.mark.parametrize("where, number", [("build", signal.SIGTERM), ("test", signal.SIGINT)])
def test_a_signal_before_or_behind_the_steps_is_one_line(where, number, options, monkeypatch, capsys):
    whole, ended = kept_in(options, "whole", "ended")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(train_lm, where, lambda *_: os.kill(os.getpid(), number))
        LM.run(ended, patch)
    assert stop.value.code == 128 + number
    del stop  # it holds the run
    assert "\nstopped; the same command goes on\n" in "\n" + capsys.readouterr().err.replace("\r", "\n")
    for each in (ended, whole):
        LM.run(each, monkeypatch)
    assert_same_end(ended, whole)


def test_a_broken_state_is_not_saved_by_a_signal(options, monkeypatch, capsys):
    loss = train_lm.cross_entropy
    monkeypatch.setattr(train_lm, "cross_entropy", lambda *given: loss(*given) * math.nan)
    with pytest.raises(SystemExit) as stop:
        signal_at(0, signal.SIGTERM, monkeypatch)
        LM.run(options | {"log_every": 100}, monkeypatch)
    assert stop.value.code == 1 and "not finite at step 1" in capsys.readouterr().err
    assert not (only_run(options["out_dir"]) / "ckpt.pt").exists()


def test_one_process_that_is_sent_a_signal_stops_both(options):
    options |= {"steps": 100_000, "eval_every": 10, "dtype": "float64", "dropout": 0.1, "capacity": 0.5}
    process = LM.start(options, *TORCHRUN)
    workers = wait_for(process, options["out_dir"], "ckpt.pt")
    os.kill(workers[1], signal.SIGTERM)
    assert process.wait() == 1  # torchrun's own
    out = (options["out_dir"] / "log.txt").read_text()
    (step,) = re.findall(r"stopped at step (\d+); the same command goes on", out)
    assert "exitcode: 143" in out and "[rank" not in out and "Error: " not in out.split("ChildFailed")[0]
    state = checkpoint(options)
    window = state["window"]
    assert state["step"] == int(step) and window["since"] == int(step) // 10 * 10
    assert (window["loss_sum"] > 0) == (state["step"] > window["since"])


def test_torchrun_starts_again_what_lost_a_process(options, monkeypatch):
    """Twice, and the end is that of a run that was not disturbed."""
    options |= {"steps": 60, "eval_every": 4, "eval_tokens": 64, "dtype": "float64", "dropout": 0.1}
    whole, killed = kept_in(options, "whole", "killed")
    process = LM.start(killed, *TORCHRUN, "--max-restarts", "2")
    for evaluations in (3, 8):
        workers = wait_for(process, killed["out_dir"], "metrics.jsonl", evaluations)
        os.kill(workers[1], signal.SIGKILL)
    assert finish(process, killed).count("goes on from step") == 2
    LM.run(whole, monkeypatch)
    torch.testing.assert_close(checkpoint(whole)["model"], checkpoint(killed)["model"], rtol=1e-6, atol=1e-6)
    assert losses(killed["out_dir"]) == pytest.approx(losses(whole["out_dir"]), rel=1e-5)


def test_a_finished_run_is_not_run_again_unless_told_to(options, monkeypatch, capsys):
    LM.run(options, monkeypatch)
    report = capsys.readouterr().out.split("\n\n", 1)[1]
    folder, before = only_run(options["out_dir"]), result_of(options["out_dir"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_lm, "cross_entropy", None)  # whoever trains or evaluates now fails
        LM.run(options, patch)
    out = capsys.readouterr().out
    assert "finished before" in out and out.split("\n\n", 1)[1] == report
    assert "surrogates not allowed" in LM.refused(options | {"prompt": "\udcff"}, monkeypatch, capsys)
    evaluation = folder / "eval-t=0.5-capacity=1.json"
    evaluation.write_text("{}")
    LM.run(options | {"resume": False}, monkeypatch)
    assert "goes on" not in capsys.readouterr().out and len(metrics(options["out_dir"])) == 2
    assert result_of(options["out_dir"])["test"] == before["test"] and not evaluation.exists()


FOREIGN = {  # what stands in ckpt.pt, made of the run's own checkpoint, and what is said of it
    "weights alone": lambda state: state["model"],
    "no class": lambda state: {name: state[name] for name in state if name != "class"},
    "a list": lambda state: [1, 2],
    "a flipped byte": None,
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_checkpoint_that_is_not_the_runs_own_gives_way_to_the_one_before_it(case, options, monkeypatch, capsys):
    LM.run(options, monkeypatch)
    folder, whole = only_run(options["out_dir"]), checkpoint(options)

    def spoil():
        (folder / "result.json").unlink(missing_ok=True)
        if FOREIGN[case]:
            torch.save(FOREIGN[case](whole), folder / "ckpt.pt")
        else:
            flip_a_byte(folder / "ckpt.pt")

    spoil()
    capsys.readouterr()
    LM.run(options, monkeypatch)
    said = capsys.readouterr()
    assert "ckpt.pt is corrupt (" in said.err and "using ckpt.prev.pt" in said.err
    assert "goes on from step 2" in said.out
    torch.testing.assert_close(checkpoint(options)["model"], whole["model"], rtol=0, atol=0)
    assert load_checkpoint(folder / "ckpt.prev.pt")["step"] == 2  # the damaged one did not take its place
    spoil()
    (folder / "ckpt.prev.pt").write_bytes(b"not a checkpoint")
    line = LM.refused(options, monkeypatch, capsys)
    assert "ckpt.pt is corrupt (" in line and "--resume false starts again" in line
    assert "ckpt.pt is corrupt (" in LM.refused(options | {"eval_only": True}, monkeypatch, capsys)


@pytest.mark.parametrize("largest, name", [(60_000, "ckpt.pt"), (5_000, "tokenizer.model"), (100, "config.json")])
def test_a_disk_that_is_full_ends_the_run_in_one_line(largest, name, options, tmp_path, monkeypatch, capsys):
    """By a limit on a file's size, which the system reports in the same way; what was saved before stays."""
    whole, ended = kept_in(options, "whole", "ended")
    stopped(LM, 0, signal.SIGTERM, ended, capsys)
    folder, before = only_run(ended["out_dir"]), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        line = LM.refused(ended, monkeypatch, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"{name} cannot be written ([Errno 27] File too large): what was saved before is whole" in line
    assert not list(folder.glob("*.tmp")) and newest(folder)[1]["step"] == 1
    LM.run(ended, monkeypatch)
    LM.run(whole, monkeypatch)
    assert_same_end(ended, whole)


@pytest.mark.parametrize("name", "config.json result.json metrics.jsonl ckpt.pt ckpt.prev.pt ckpt.pt.tmp".split())
def test_a_folder_in_the_place_of_a_file_is_one_line(name, options, monkeypatch, capsys):
    stopped(LM, 0, signal.SIGTERM, options, capsys)
    file = only_run(options["out_dir"]) / name
    file.unlink(missing_ok=True)
    (file / "inside").mkdir(parents=True)
    assert file.name.removesuffix(".tmp") in LM.refused(options, monkeypatch, capsys)


def test_a_file_that_is_no_record_is_an_error(options, monkeypatch, capsys):
    stopped(LM, 0, signal.SIGTERM, options, capsys)
    for name in ("result.json", "config.json"):
        for content in ("", "[]", "null", '{"seed": 0', "[" * 100_000):
            (only_run(options["out_dir"]) / name).write_text(content)
            line = LM.refused(options, monkeypatch, capsys)
            assert re.search(f"{name} is no readable JSON object .*: delete it or restore it", line)
        (only_run(options["out_dir"]) / name).write_text("{}")


OTHERS = {  # what another run's identity says, and what is said of it
    "seed": ({"seed": 1}, "another seed (1 there, 0 now): choose another --out_dir"),
    "size": ({"n_embd": 8}, "another n_embd (8 there, 16 now)"),
    "data": ({"data_checksum": "0"}, "another data_checksum (0 there"),
}


@pytest.mark.parametrize("name", ["ckpt.pt", "result.json", "config.json"])
def test_a_file_of_another_run_is_an_error(name, options, monkeypatch, capsys):
    stopped(LM, 0, signal.SIGTERM, options, capsys)
    state, file = checkpoint(options), only_run(options["out_dir"]) / name
    for change, words in OTHERS.values():
        other = state["identity"] | change
        if name == "ckpt.pt":
            torch.save(state | {"identity": other}, file)
        else:
            file.write_text(json.dumps({"config": other} if name == "result.json" else other))
        assert f"{name} is of a run with {words}" in LM.refused(options, monkeypatch, capsys)


@pytest.mark.parametrize("change", [lambda old: old[:9] + b"\xff", lambda old: b"", lambda old: old + b'{"torn'])
def test_the_history_is_that_of_the_checkpoint(change, options, monkeypatch, capsys):
    stopped(LM, 2, signal.SIGTERM, options, capsys)
    file = only_run(options["out_dir"]) / "metrics.jsonl"
    before = file.read_bytes()
    file.write_bytes(change(before))
    stop_in_the_middle(options, 3)
    assert file.read_bytes() == before


@pytest.mark.parametrize("bad, log_every, ends, kept", [({6}, 1, 7, 4), ({5}, 100, 8, 4), ({2}, 100, 4, None)])
def test_a_loss_that_is_not_finite_ends_the_run(bad, log_every, ends, kept, options, monkeypatch, capsys):
    """Also where nobody looked at that step, and later losses would be finite again."""
    at = []
    monkeypatch.setattr(train_lm, "cosine", lambda step, *rest: at.append(step) or 0.0)
    loss = train_lm.cross_entropy
    monkeypatch.setattr(train_lm, "cross_entropy", lambda *given: loss(*given) * (math.nan if at[-1] in bad else 1))
    given = options | {"steps": 40, "eval_every": 4, "log_every": log_every}
    assert f"not finite at step {ends} " in LM.refused(given, monkeypatch, capsys)
    assert not kept or checkpoint(options)["step"] == kept
    assert (only_run(options["out_dir"]) / "ckpt.pt").exists() == bool(kept)


def test_weights_that_the_last_update_broke_are_not_saved(options, monkeypatch, capsys):
    """Every training loss was finite; only the evaluation can tell."""
    updates = []

    def after_step(model):
        updates.append(1)
        if len(updates) == 8:
            model.ln_f.weight.data.fill_(math.inf)

    monkeypatch.setattr(train_lm.GPT, "after_step", after_step)
    assert "not finite at step 8" in LM.refused(options | {"steps": 40, "eval_every": 4}, monkeypatch, capsys)
    assert checkpoint(options)["step"] == 4


def test_the_gradient_is_the_mean_over_the_micro_batches(options, monkeypatch):
    """Adam and clipping would hide a wrong scale: look at the gradient before them."""
    seen = []
    record = lambda model, limit: seen.extend(p.grad.clone() for p in model.parameters())  # noqa: E731
    options |= {"steps": 1, "balance_coef": 0.5, "dtype": "float64"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_lm.parallel, "clip_grad_norm_", record)
        LM.run(options, patch)
    config, context = command_line(train_lm.Config, train_lm.PRESETS, command(options)), setup("cpu", "float64")
    data = TokenData.open(config.data, config, context)
    model = train_lm.build(config, data, context)
    for micro in range(2):
        x, y = data.batch("train", 0, micro)
        logits, balance = model(x)
        ((torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.5 * balance) / 2).backward()
    torch.testing.assert_close(seen, [p.grad for p in model.parameters()])


def test_two_processes_compute_what_one_does(options, monkeypatch):
    """Under a limit that drops; here they go on with what one process has begun."""
    options |= {"steps": 6, "eval_every": 2, "dtype": "float64", "dropout": 0.1, "capacity": 0.5, "batch_tokens": 256}
    options |= {"frequency_bias": False}  # which is as far as so few steps come
    one, two = kept_in(options, "one", "two")
    stop_in_the_middle(two, 3)
    process = LM.start(two, *TORCHRUN)
    LM.run(one, monkeypatch)
    out = finish(process, two)
    assert "goes on from step 2" in out and out.count(", test\n") == 1
    alone, together = metrics(one["out_dir"]), metrics(two["out_dir"])
    assert len(alone) == len(together) == 3 and alone[-1]["train_loss"] < alone[0]["train_loss"]
    for a, b in zip(alone, together):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-6)  # it is added up in fp32
        for ours, theirs in zip([a, *a["layers"]], [b, *b["layers"]]):
            for key in ours.keys() - {"train_loss", "tokens_per_second", "layers"}:
                assert ours[key] == pytest.approx(theirs[key], abs=1e-9)
    assert any(layer["cut"] > 0 for layer in alone[-1]["layers"])
    torch.testing.assert_close(checkpoint(one)["model"], checkpoint(two)["model"], rtol=1e-6, atol=1e-6)


def test_the_bar_shows_bits_per_byte_and_the_log_the_share_of_the_peak(options, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(engine_run.tqdm, "set_postfix", lambda bar, words: shown.append(words["bits_per_byte"]))
    monkeypatch.setattr(engine_run, "peak_flops", lambda context: 1e9)
    LM.run(options, monkeypatch)
    counts = json.loads((options["data"] / "meta.json").read_text())["splits"]["train"]
    bits, log = counts["tokens"] / counts["bytes"] / math.log(2), metrics(options["out_dir"])
    assert shown[1::2] == [f"{bits * record['train_loss']:.3f}" for record in log]
    found = re.findall(r"MFU ([\d.]+)% at full capacity", capsys.readouterr().out)
    flops = result_of(options["out_dir"])["flops"]["total"]  # forward
    shares = [3 * flops * record["tokens_per_second"] / 1e7 for record in log]
    assert [float(share) for share in found] == pytest.approx(shares, rel=0.01)


def test_micro_batches_that_cannot_be_dealt(options, monkeypatch, capsys):
    monkeypatch.setattr(table, "setup", lambda *_: Context(0, 3, torch.device("cpu"), torch.float32))
    monkeypatch.setattr(Context, "barrier", lambda self: None)
    assert "cannot be dealt to 3 processes: change batch_tokens" in LM.refused(options, monkeypatch, capsys)


def test_processes_that_see_different_checkpoints(options, monkeypatch, capsys):
    stop_in_the_middle(options, 3)
    monkeypatch.setattr(Context, "gather", lambda self, mine: [mine, 0])  # the other one has no disk
    capsys.readouterr()
    assert "the processes see different files" in LM.refused(options, monkeypatch, capsys)


def test_a_table_gives_mean_deviation_and_gaps():
    def cells(result):
        return {"ppl": (result["ppl"], ".2f"), "cut": (result.get("cut"), ".1%")}

    rows = [(("dense", "22.61"), {}), (("Switch", "20.11"), {"router": "switch"}), (("XMoE", ""), {})]
    results = [[{"ppl": 10.0}], [{"ppl": 1.0, "cut": 0.5}, {"ppl": 3.0, "cut": 0.5}], []]
    text = Table("title", ("method", "paper"), rows).render(results, cells)
    assert text.splitlines() == [
        "| method | paper | ppl         | cut          |",
        "|--------|-------|-------------|--------------|",
        "| dense  | 22.61 | 10.00       |              |",
        "| Switch | 20.11 | 2.00 ± 1.41 | 50.0% ± 0.0% |",
        "| XMoE   |       |             |              |",
    ]
    numbers = [cell(value) for value in (None, 3, "S1", 1.0, 99.99, 100.0, 1234.5)]
    assert numbers == ["", "3", "S1", "1.00", "99.99", "100", "1,234"]
    assert markdown_table(["a"], [[1], [None]]).splitlines() == ["| a    |", "|------|", "| 1    |", "| None |"]


def test_seeds_give_mean_and_deviation(options, monkeypatch, capsys):
    LM.run(options | {"seeds": 2, "seed": 3}, monkeypatch)
    out = capsys.readouterr().out
    names = {json.loads((path / "config.json").read_text())["seed"] for path in options["out_dir"].iterdir()}
    assert names == {3, 4} and out.count("under the limit") == 2
    assert "demo, preset demo, seeds: 2" in out and " ± " in out
