"""A run's folder, resuming, processes and tables: what all scripts share, shown on train_lm.py."""

import dataclasses
import functools
import gc
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock, Timeout
from helpers import (
    ROOT,
    TORCHRUN,
    Script,
    finish,
    flip_a_byte,
    losses,
    metrics,
    only_run,
    result_of,
    saved,
    signal_at,
    stopped,
)
from helpers import words as command

import train_lm
from engine import table
from engine.device import Context, setup
from engine.files import from_json, load_checkpoint, newest, read_json, to_json, write
from engine.pretrained import load
from engine.run import Run
from engine.table import Table, markdown_table

LM = Script(train_lm)


class Stop(Exception):
    """Ends a run in the middle."""


def kept_in(options: dict, *names: str) -> tuple[dict, ...]:
    """The same command with an out_dir of each of these names."""
    return tuple(options | {"out_dir": options["out_dir"] / name} for name in names)


def assert_same_end(one: dict, two: dict):
    """Weights, optimizer, log and result are equal bit for bit."""
    ours, theirs = saved(one), saved(two)
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)
    torch.testing.assert_close(ours["optimizer"]["state"], theirs["optimizer"]["state"], rtol=0, atol=0)
    found = []
    for options in (one, two):
        log = [record | {"tokens_per_second": 0} for record in metrics(options["out_dir"])]
        found.append((log, result_of(options["out_dir"]) | {"seconds": 0}))
    assert found[0] == found[1]


def wait_for(process: subprocess.Popen, out: Path, file: str, lines: int = 0) -> list[int]:
    """Waits until a run has this file with this many lines -> the processes that torchrun has started."""
    while not any(path.read_bytes().count(b"\n") >= lines for path in out.glob(f"*/{file}")):
        assert process.poll() is None, (out / "log.txt").read_text()
        time.sleep(0.02)
    return [int(line) for line in subprocess.check_output(["pgrep", "-P", str(process.pid)]).split()]


def test_the_folder_of_a_run_has_what_it_takes_to_rebuild_the_model(options, monkeypatch):
    LM.run(options, monkeypatch)
    folder, state, result = only_run(options["out_dir"]), saved(options), result_of(options["out_dir"])
    keys = "class step constants vocab_size identity precision code model optimizer seconds log window extra"
    assert state.keys() == set(keys.split())
    assert state["class"] == "GPT"
    assert state["vocab_size"] == 320
    assert state["step"] == 4
    model, tokenizer = load(folder)
    torch.testing.assert_close(model.state_dict(), state["model"], rtol=0, atol=0)
    assert tokenizer.vocab_size == 320
    assert result["config"] == state["identity"] == json.loads((folder / "config.json").read_text())
    assert {"name", "seconds", "machine", "test", "test_no_limit", "parameters", "flops"} < result.keys()
    assert result["code"] == state["code"]
    assert len(state["code"]) == 3  # train_lm.py, model.py, routers.py
    files = "ckpt.prev.pt ckpt.pt config.json lock metrics.jsonl result.json tokenizer.model"  # and nothing temporary
    assert sorted(path.name for path in folder.iterdir()) == files.split()


def test_a_second_process_in_the_same_folder_is_refused_and_changes_nothing(options, monkeypatch, capsys):
    """The process with the lock continues. The lock ends with the process, not with the file."""
    stopped(LM, 2, signal.SIGTERM, options, capsys)
    gc.collect()  # the lock of the run that was stopped
    folder = only_run(options["out_dir"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    hold = "import filelock, sys, time; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(1, flush=True)"
    command = [sys.executable, "-c", f"{hold}; time.sleep(600)", folder / "lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        for resume in (True, False):
            line = LM.refused(options | {"resume": resume}, monkeypatch, capsys)
            assert "another process is training in" in line
            assert str(folder) in line
        assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
        LM.run(options | {"eval_only": True}, monkeypatch)  # reads a checkpoint, and writes nothing
        holder.kill()

    def due(self, done, due=Run.due):
        gc.collect()
        with pytest.raises(Timeout):  # held to the end
            FileLock(folder / "lock").acquire(blocking=False)
        return due(self, done)

    monkeypatch.setattr(Run, "due", due)
    LM.run(options, monkeypatch)
    assert len(metrics(options["out_dir"])) == 2
    FileLock(folder / "lock").acquire(blocking=False)


def test_a_run_may_be_killed_at_any_rename_of_a_file(options, tmp_path, monkeypatch):
    whole = options | {"out_dir": tmp_path / "whole"}
    LM.run(whole, monkeypatch)
    renames = []

    def replace(file, target, rename=Path.replace):
        renames.append(target)
        if len(renames) == stop_at:
            raise Stop
        return rename(file, target)

    for stop_at in range(1, 13):
        renames.clear()
        stopped = options | {"out_dir": tmp_path / str(stop_at)}
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
            patch.setattr(Path, "replace", replace)
            LM.run(stopped, patch)
        LM.run(stopped, monkeypatch)
        assert_same_end(stopped, whole)
    names = "config.json tokenizer.model ckpt.pt metrics.jsonl ckpt.prev.pt ckpt.pt ckpt.prev.pt ckpt.pt metrics.jsonl "
    names += "ckpt.prev.pt ckpt.pt result.json"
    assert " ".join(Path(target).name for target in renames) == names


def test_a_file_is_synced_to_disk_before_it_is_renamed(options, monkeypatch):
    """A kill leaves the disk cache intact; a power failure does not."""
    done, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append("fsync"), fsync(number)))
    monkeypatch.setattr(Path, "replace", lambda file, target: (done.append(file.suffix), replace(file, target)))
    LM.run(options, monkeypatch)
    assert [each for each in done if each != ".pt"] == ["fsync", ".tmp"] * 9  # a .pt becomes the previous one


@pytest.mark.parametrize(
    "step, evaluations, number",
    [(0, 0, signal.SIGTERM), (2, 1, signal.SIGHUP), (3, 2, signal.SIGTERM), (4, 3, signal.SIGINT)],
)
def test_a_signalled_run_stops_after_its_step_and_resumes(step, evaluations, number, options, monkeypatch, capsys):
    """Also between two evaluations; no evaluation is added or left out."""
    options |= {"steps": 5, "dropout": 0.1}
    whole, ended = kept_in(options, "whole", "ended")
    line = stopped(LM, step, number, ended, capsys)
    assert line == f"stopped at step {step + 1}; run the same command to resume"
    log = only_run(ended["out_dir"]) / "metrics.jsonl"
    assert (len(metrics(ended["out_dir"])) if log.exists() else 0) == evaluations
    if step == 3:  # saved by its evaluation, and not again
        assert load_checkpoint(log.with_name("ckpt.prev.pt"))["step"] == 3
    LM.run(ended, monkeypatch)
    assert f"goes on from step {step + 1}" in capsys.readouterr().out
    LM.run(whole, monkeypatch)
    assert_same_end(ended, whole)
    assert [record["step"] for record in metrics(whole["out_dir"])] == [2, 4, 5]  # and after the last step


OUTSIDE = ("build", 1), ("test", 1), ("evaluate", 0), ("evaluate", 2)


@pytest.mark.parametrize("where, signals", OUTSIDE)
def test_a_run_that_ends_outside_its_steps_loses_at_most_one(where, signals, options, monkeypatch, capsys):
    """A kill, a signal, or in an evaluation a second signal, since the first waits for its end."""
    whole, ended = kept_in(options, "whole", "ended")
    number, old = signal.SIGTERM if where == "build" else signal.SIGINT, getattr(train_lm, where)

    def end(*given):
        if where == "evaluate" and saved(ended)["step"] != 3:
            return old(*given)
        if not signals:
            raise Stop
        for _ in range(signals):
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch, pytest.raises((SystemExit, Stop)) as stop:
        patch.setattr(train_lm, where, end)
        LM.run(ended, patch)
    if signals:
        assert stop.value.code == 128 + number
        assert "\nstopped; run the same command to resume\n" in "\n" + capsys.readouterr().err.replace("\r", "\n")
    del stop  # it holds the run
    LM.run(ended, monkeypatch)
    assert ("goes on from step 3" in capsys.readouterr().out) == (where == "evaluate")
    LM.run(whole, monkeypatch)
    assert_same_end(ended, whole)


def test_training_in_a_program_restores_its_signal_handlers_and_releases_the_folder(options):
    """So that it can be called repeatedly."""
    results, before = [], signal.getsignal(signal.SIGINT)
    for seed in (0, 0, 1):
        where = {name: str(options[name]) for name in ("data", "out_dir")}
        config = train_lm.Config(**options | where | {"seed": seed, "resume": False})
        results.append(train_lm.train(config, setup("cpu", "float32"))["test"]["loss"])
    assert signal.getsignal(signal.SIGINT) is before
    assert results[0] == results[1] != results[2]


def test_nohup_ignores_a_closed_terminal():
    code = "import signal; from engine.run import SIGNALS; print(signal.SIGHUP in SIGNALS)"
    for before, handled in (([], "True"), (["nohup"], "False")):
        line = [*before, sys.executable, "-c", code]
        done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL)
        assert done.stdout == f"{handled}\n"


def test_a_run_can_be_trained_in_a_thread(options):
    """As tuners and web applications do."""
    config = train_lm.Config(**options | {name: str(options[name]) for name in ("data", "out_dir")})
    thread = threading.Thread(target=train_lm.train, args=(config, setup("cpu", "float32")))
    thread.start()
    thread.join()
    assert result_of(options["out_dir"])["test"]["loss"] > 0


def test_a_profiled_script_is_the_same_script(options, monkeypatch):
    """Its --help has the comments, and its code has not changed."""
    LM.run(options, monkeypatch)
    profiler = [sys.executable, "-m", "cProfile", "-o", os.devnull, str(ROOT / LM.name)]
    done = subprocess.run([*profiler, *command(options)], capture_output=True, text=True, cwd=options["out_dir"])
    assert "finished before" in done.stdout, done.stderr
    assert "changed since" not in done.stderr
    done = subprocess.run([*profiler, "--help"], capture_output=True, text=True)
    assert "optimizer steps" in done.stdout
    assert "XMoE's language models" in done.stdout


def test_a_signal_to_one_process_stops_both(options):
    options |= {"steps": 100_000, "eval_every": 10, "dtype": "float64", "dropout": 0.1, "capacity": 0.5}
    process = LM.start(options, *TORCHRUN)
    workers = wait_for(process, options["out_dir"], "ckpt.pt")
    os.kill(workers[1], signal.SIGTERM)
    assert process.wait() == 1  # torchrun's own
    out = (options["out_dir"] / "log.txt").read_text()
    (step,) = re.findall(r"stopped at step (\d+); run the same command to resume", out)
    assert "exitcode: 143" in out
    assert "[rank" not in out
    assert "Error: " not in out.split("ChildFailed")[0]
    assert "Warning: " not in out  # users would take a library's warning for ours
    state = saved(options)
    window = state["window"]
    assert state["step"] == int(step)
    assert window["since"] == int(step) // 10 * 10
    assert (window["loss_sum"] > 0) == (state["step"] > window["since"])


def test_torchrun_restarts_a_run_that_lost_a_process(options, monkeypatch):
    """Twice, and the result equals that of an undisturbed run."""
    options |= {"steps": 150, "eval_every": 10, "eval_tokens": 64, "dtype": "float64", "dropout": 0.1}
    whole, killed = kept_in(options, "whole", "killed")
    process = LM.start(killed, *TORCHRUN, "--max-restarts", "2")
    for evaluations in (3, 8):
        workers = wait_for(process, killed["out_dir"], "metrics.jsonl", evaluations)
        os.kill(workers[1], signal.SIGKILL)
    assert finish(process, killed).count("goes on from step") == 2
    LM.run(whole, monkeypatch)
    torch.testing.assert_close(saved(whole)["model"], saved(killed)["model"], rtol=1e-6, atol=1e-6)
    assert losses(killed["out_dir"]) == pytest.approx(losses(whole["out_dir"]), rel=1e-5)


def test_a_finished_run_is_only_trained_again_by_resume_false(options, monkeypatch, capsys):
    LM.run(options, monkeypatch)
    report = capsys.readouterr().out.split("\n\n", 1)[1]
    folder, before = only_run(options["out_dir"]), result_of(options["out_dir"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_lm.GPT, "forward", None)  # training or evaluation would fail
        LM.run(options, patch)
    out = capsys.readouterr().out
    assert "finished before" in out
    assert out.split("\n\n", 1)[1] == report
    evaluation = folder / "eval-t=0.5-capacity=1.json"
    evaluation.write_text("{}")
    LM.run(options | {"resume": False}, monkeypatch)
    assert "goes on" not in capsys.readouterr().out
    assert len(metrics(options["out_dir"])) == 2
    assert result_of(options["out_dir"])["test"] == before["test"]
    assert not evaluation.exists()


@pytest.mark.parametrize("damage", ["weights alone", "a flipped byte"])
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(damage, options, monkeypatch, capsys):
    LM.run(options, monkeypatch)
    folder = only_run(options["out_dir"])
    whole = torch.load(folder / "ckpt.pt")

    def spoil():
        (folder / "result.json").unlink(missing_ok=True)
        if damage == "weights alone":
            torch.save(whole["model"], folder / "ckpt.pt")
        else:
            flip_a_byte(folder / "ckpt.pt")

    spoil()
    capsys.readouterr()
    LM.run(options, monkeypatch)
    said = capsys.readouterr()
    assert "ckpt.pt is corrupt (" in said.err
    assert "using ckpt.prev.pt" in said.err
    assert "goes on from step 3" in said.out
    torch.testing.assert_close(saved(options)["model"], whole["model"], rtol=0, atol=0)
    assert load_checkpoint(folder / "ckpt.prev.pt")["step"] == 3  # not replaced by the damaged one
    spoil()
    (folder / "ckpt.prev.pt").write_bytes(b"not a checkpoint")
    line = LM.refused(options, monkeypatch, capsys)
    assert "ckpt.pt is corrupt (" in line
    assert "--resume false trains from the start" in line
    assert "ckpt.pt is corrupt (" in LM.refused(options | {"eval_only": True}, monkeypatch, capsys)


def test_a_full_disk_is_one_line_and_the_run_resumes_later(options, monkeypatch, capsys):
    """Simulated by a limit on the file size, which is reported in the same way."""
    resource = pytest.importorskip("resource")
    whole, ended = kept_in(options, "whole", "ended")
    stopped(LM, 0, signal.SIGTERM, ended, capsys)
    folder, before = only_run(ended["out_dir"]), resource.getrlimit(resource.RLIMIT_FSIZE)
    for largest, name in {60_000: "ckpt.pt", 5_000: "tokenizer.model", 100: "config.json"}.items():
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
        try:
            line = LM.refused(ended, monkeypatch, capsys)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert f"{name} cannot be written ([Errno 27] File too large): what was saved before is intact" in line
        assert newest(folder)[1]["step"] == 1
        assert not list(folder.glob("*.tmp"))
    LM.run(ended, monkeypatch)
    LM.run(whole, monkeypatch)
    assert_same_end(ended, whole)


@pytest.mark.parametrize(
    "part, left, message",
    [
        (("model", "wte.weight"), None, 'Missing key(s) in state_dict: "wte.weight"'),
        (("model", "wte.weight"), torch.zeros(7, 7), "size mismatch for wte.weight"),
        (("optimizer", "state", "wte.weight"), None, "Missing optimizer state for parameter 'wte.weight'"),
        (("class",), None, "it holds something else"),
        (("identity", "seed"), 1, "ckpt.pt is of a run with another seed: delete it"),
        (("log",), 7, "ckpt.pt is not a complete checkpoint of this run"),
        (("seconds",), "x", "ckpt.pt is not a complete checkpoint of this run"),
        (("window",), {"a": 1}, "ckpt.pt is not a complete checkpoint of this run"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_line(part, left, message, options, monkeypatch, capsys):
    stopped(LM, 0, signal.SIGTERM, options, capsys)
    file = only_run(options["out_dir"]) / "ckpt.pt"
    state = torch.load(file)
    *way, last = part
    inside = functools.reduce(dict.get, way, state)
    if left is None:
        del inside[last]
    else:
        inside[last] = left
    torch.save(state, file)
    assert message in LM.refused(options, monkeypatch, capsys)


@pytest.mark.parametrize("error", [OSError(37, "No locks available"), NotImplementedError("no flock here")])
def test_a_folder_that_cannot_be_locked_is_named_in_the_error(error, options, monkeypatch, capsys):
    def acquire(self, **given):
        raise error

    monkeypatch.setattr(FileLock, "acquire", acquire)
    line = LM.refused(options, monkeypatch, capsys)
    assert re.search(r"demo\S* cannot be locked \(.*\): choose another --out_dir", line)


def test_resume_false_deletes_only_files_of_the_run(options, tmp_path, monkeypatch, capsys):
    """And only after config.json has been compared: --data x/y and x_y have the same plain name."""
    for name in ("x/y", "x_y"):
        (tmp_path / "x").mkdir(exist_ok=True)
        shutil.copytree(options["data"], tmp_path / name)
    one, two = (options | {"data": tmp_path / name, "out_dir": tmp_path / "out"} for name in ("x/y", "x_y"))
    LM.run(one, monkeypatch)
    capsys.readouterr()
    folder = only_run(one["out_dir"])
    for name in ("notes.json", "mine.pt", "mine.jsonl"):
        (folder / name).write_text("mine")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    LM.run(two | {"resume": False}, monkeypatch)
    assert f"a separate run, as {folder} differs in data\n" in capsys.readouterr().out
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    LM.run(one | {"resume": False}, monkeypatch)
    assert {path.name for path in folder.iterdir()} == before.keys()
    assert all((folder / name).read_text() == "mine" for name in ("notes.json", "mine.pt", "mine.jsonl"))
    (folder / "config.json").unlink()  # the owner is unknown now
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    LM.run(one | {"resume": False}, monkeypatch)
    assert f"a separate run, as {folder} has no config.json of a run\n" in capsys.readouterr().out
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_init_from_starts_from_the_weights_of_another_run(options, corpora, tmp_path, monkeypatch, capsys):
    """With more steps, on other data, from a moved folder; but not with another vocabulary or other sizes."""
    LM.run(options | {"out_dir": tmp_path / "first"}, monkeypatch)
    before = only_run(tmp_path / "first").rename(tmp_path / "moved")
    options |= {"init_from": before, "data": corpora["b"], "out_dir": tmp_path / "second"}
    tested = options | {"data": corpora["a"], "eval_only": True, "out_dir": tmp_path / "tested"}
    LM.run(tested, monkeypatch)
    (file,) = tested["out_dir"].glob("*/eval*.json")
    expected = json.loads((before / "result.json").read_text())["test"]
    assert json.loads(file.read_text())["test"]["loss"] == pytest.approx(expected["loss"])
    LM.run(tested | {"eval_only": False, "resume": False}, monkeypatch)  # the folder can be trained in
    LM.run(options | {"steps": 6, "learning_rate": 1e-12, "min_learning_rate": 0.0}, monkeypatch)
    torch.testing.assert_close(saved(options)["model"], load_checkpoint(before / "ckpt.pt")["model"])
    capsys.readouterr()
    for change, message in {
        "data": (corpora["c"], "was trained with another tokenizer than the corpus: pass --data a text file or folder"),
        "n_head": (4, "has n_head 2, not 4"),
        "frequency_bias": (False, "has frequency_bias True, not False"),
        "router": ("dense", "does not have the weights of the model that it describes"),
    }.items():
        assert message[1] in LM.refused(options | {change: message[0]}, monkeypatch, capsys)


def test_other_weights_at_the_same_path_are_another_run(options, tmp_path, monkeypatch, capsys):
    """The result of the first run is not shown for them, but it is while the weights are away."""
    parent, child = tmp_path / "parent", options | {"init_from": tmp_path / "parent", "out_dir": tmp_path / "child"}
    for seed in (0, 1):
        LM.run(options | {"seed": seed, "out_dir": tmp_path / str(seed)}, monkeypatch)
    shutil.copytree(only_run(tmp_path / "0"), parent)
    LM.run(child, monkeypatch)
    LM.run(child, monkeypatch)
    assert "finished before" in capsys.readouterr().out
    shutil.copy(only_run(tmp_path / "1") / "ckpt.pt", parent)
    LM.run(child, monkeypatch)
    out = capsys.readouterr().out
    assert "differs in init_from_checksum" in out and "finished before" not in out
    assert len({json.loads(file.read_text())["test"]["loss"] for file in child["out_dir"].glob("*/result.json")}) == 2
    parent.rename(tmp_path / "away")
    LM.run(child, monkeypatch)
    assert "finished before" in capsys.readouterr().out


def test_a_damaged_record_is_one_line(options, monkeypatch, capsys):
    stopped(LM, 0, signal.SIGTERM, options, capsys)
    broken = {'{"name": "x"}': "KeyError", '{"config": 3}': "KeyError", '{"test": 3, "test_no_limit": 3}': "TypeError"}
    for text, error in broken.items():
        (only_run(options["out_dir"]) / "result.json").write_text(text)
        line = LM.refused(options, monkeypatch, capsys)
        assert re.search(rf"a result.json in \S+ is not what this script writes \({error}\(", line)
    write(only_run(options["out_dir"]) / "result.json", {"config": saved(options)["identity"] | {"seed": 1}})
    assert "result.json is of a run with another seed: delete it" in LM.refused(options, monkeypatch, capsys)
    for name in ("result.json", "config.json"):
        for content in ("", "[]", '{"seed": 0', "[" * 100_000):
            (only_run(options["out_dir"]) / name).write_text(content)
            line = LM.refused(options, monkeypatch, capsys)
            assert re.search(f"{name} is not readable JSON, or not an object .*: delete it or restore it", line)
        (only_run(options["out_dir"]) / name).write_text("{}")


def test_infinity_and_nan_survive_strict_json(tmp_path):
    texts = ["Infinity, NaN", ' "NaN": \\', "-Infinity, "]
    numbers = {"inf": math.inf, "NaN": {"least": -math.inf, "texts": texts, "list": [0.5, math.inf]}, "none": None}
    write(tmp_path / "new.json", numbers)
    for text in ((tmp_path / "new.json").read_text(), to_json(numbers, indent=None)):
        json.loads(text, parse_constant=pytest.fail)
        assert from_json(text) == read_json(tmp_path / "new.json") == from_json(json.dumps(numbers)) == numbers
    assert to_json([math.nan], indent=None) == '["NaN"]'
    assert math.isnan(from_json('["NaN"]')[0])


def test_the_log_is_cut_back_to_the_checkpoint(options, monkeypatch, capsys):
    """And is strict JSON."""
    evaluate = train_lm.evaluate
    monkeypatch.setattr(train_lm, "evaluate", lambda *given: evaluate(*given) | {"far": math.inf})
    stopped(LM, 1, signal.SIGTERM, options, capsys)
    assert [record["far"] for record in metrics(options["out_dir"])] == ["Infinity"]
    file = only_run(options["out_dir"]) / "metrics.jsonl"
    before = file.read_bytes()
    file.write_bytes(before + b'{"step": 3, "torn')
    stopped(LM, 2, signal.SIGTERM, options, capsys)
    assert file.read_bytes() == before


BAD = ("loss", 6, 1, 7, 4), ("loss", 5, 100, 7, 4), ("loss", 7, 100, 8, 7), ("loss", 1, 100, 2, None)
BAD += ("weights", 6, 100, 7, 4), ("weights", 7, 100, 8, 7)


@pytest.mark.parametrize("what, bad, log_every, ends, kept", BAD)
def test_a_non_finite_loss_or_weight_ends_the_run(what, bad, log_every, ends, kept, options, monkeypatch, capsys):
    """Also if that step was not shown and later losses would be finite, if a signal wants to save, and if the update of
    a finite loss broke the weights."""
    at, forward = [], train_lm.GPT.forward
    monkeypatch.setattr(train_lm, "cosine", lambda step, *rest: at.append(step) or 0.0)
    if what == "loss":

        def broken(*given):
            loss, balance = forward(*given)
            return loss * (math.nan if at[-1] == bad else 1), balance

        monkeypatch.setattr(train_lm.GPT, "forward", broken)
    else:
        broken = lambda model, _: model.ln_f.weight.data.mul_(math.inf if at[-1] == bad else 1)  # noqa: E731
        monkeypatch.setattr(train_lm.GPT, "after_step", broken)
    given = options | {"steps": 40, "eval_every": 4, "log_every": log_every}
    if not kept:
        signal_at(ends - 1, signal.SIGTERM, monkeypatch)
    assert f"not finite at step {ends} " in LM.refused(given, monkeypatch, capsys)
    assert not kept or saved(options)["step"] == kept
    assert (only_run(options["out_dir"]) / "ckpt.pt").exists() == bool(kept)


def test_without_a_terminal_the_bar_is_lines_in_the_log(options, monkeypatch, capsys):
    LM.run(options | {"log_every": 2}, monkeypatch)
    said, log = capsys.readouterr(), metrics(options["out_dir"])
    counts = json.loads((options["data"] / "meta.json").read_text())["splits"]["train"]
    bpb = [record["train_loss"] * counts["tokens"] / counts["bytes"] / math.log(2) for record in log]
    lines = [f"step {record['step']}/4: {own:.3f} bits per byte" for record, own in zip(log, bpb)]
    assert [f"train {own:.3f} bits per byte, perplexity " in said.out for own in bpb] == [True, True]
    assert [line.split(",")[0] for line in said.err.splitlines()] == lines
    assert "TFLOP/s" not in said.out


def test_tokens_per_second_count_neither_the_steps_that_compile_nor_saving(options, monkeypatch, capsys):
    """The first two steps take 100 seconds each, the third 3, the others 1, and saving a checkpoint takes 1000."""
    now = [0.0]

    def save_model(self, *args, save_model=Run.save_model, **state):
        now[0] += 1000.0
        save_model(self, *args, **state)

    def due(self, done, due=Run.due):
        now[0] += {1: 100.0, 2: 100.0, 3: 3.0}.get(done, 1.0)
        return due(self, done)

    monkeypatch.setattr(Run, "due", due)
    monkeypatch.setattr(Run, "save_model", save_model)
    monkeypatch.setattr("engine.run.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(torch, "compile", lambda net: net)
    for compile, speed in ((True, 2 * 128 / 4), (False, 4 * 128 / 204)):
        out = options["out_dir"] / str(compile)
        LM.run(options | {"steps": 6, "eval_every": 4, "compile": compile, "out_dir": out}, monkeypatch)
        assert [record["tokens_per_second"] for record in metrics(out)] == pytest.approx([speed, 128.0])
        assert result_of(out)["seconds"] == 206
        assert capsys.readouterr().out.count("compiling") == compile


def begun(options: dict) -> Run:
    """A run before its first step."""
    texts = {name: str(options[name]) for name in ("data", "out_dir")}
    config, context = train_lm.Config(**options | texts), setup("cpu")
    run = Run(config, train_lm.PRESETS, context, train_lm.TokenData.open(config.data, config, context))
    model = train_lm.GPT(config, 40)
    run.resume(model, torch.optim.SGD(model.parameters()), 1.0)
    return run


def test_tokens_of_all_processes_are_counted(options):
    run = begun(options)
    run.context = dataclasses.replace(run.context, world=3)
    for _ in range(2):
        run.add(torch.tensor(1.0), tokens=8)
    assert run.tokens == 3 * 2 * 8


def test_a_thread_prepares_the_next_step(options):
    run = begun(options)
    ready = [threading.Event() for _ in range(4)]
    for step, prepared in run.steps_with(lambda step: ready[step].set() or -step):
        assert prepared == -step
        assert ready[min(step + 1, 3)].wait(timeout=60)
    assert step == 3
    with pytest.raises(ZeroDivisionError):
        next(run.steps_with(lambda step: 1 / 0))


def test_on_a_gpu_the_log_shows_tflops(options, monkeypatch, capsys):
    old = Run.save

    def save(self, *given):
        say = self.context.say
        with monkeypatch.context() as patch:
            patch.setattr(self.context, "device", torch.device("cuda"))
            patch.setattr(self.context, "say", lambda words: patch.undo() or say(words))
            old(self, *given)

    monkeypatch.setattr(Run, "save", save)
    monkeypatch.setattr(train_lm.flops, "flops_per_token", lambda *given: 1e9)  # forward
    LM.run(options, monkeypatch)
    found = [float(work) for work in re.findall(r"([\d.]+) TFLOP/s at full capacity", capsys.readouterr().out)]
    expected = [3e-3 * record["tokens_per_second"] for record in metrics(options["out_dir"])]
    assert found == pytest.approx(expected, abs=0.06)
    assert min(found) > 1


@pytest.mark.parametrize("streams", ["> /dev/full", "| true", ">&- 2>&-"])
def test_a_closed_or_full_stream_ends_no_run(streams, options):
    line = shlex.join(map(str, [sys.executable, ROOT / LM.name, *command(options)]))
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {line} {streams}"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Error" not in done.stderr
    assert result_of(options["out_dir"])


def test_micro_batches_that_cannot_be_dealt_are_refused(options, monkeypatch, capsys):
    monkeypatch.setattr(table, "setup", lambda *_: Context(0, 3, torch.device("cpu"), torch.float32))
    monkeypatch.setattr(Context, "barrier", lambda self: None)
    line = LM.refused(options, monkeypatch, capsys)
    assert "do not divide evenly over 3 processes: pass --batch_tokens 192, or a smaller --micro_tokens" in line
    fits = LM.refused(options | {"batch_tokens": 192, "n_head": 3}, monkeypatch, capsys)
    assert "processes" not in fits


DIFFER = ("false, 3]", "false, 0]"), ('"data_checksum": "', '"data_checksum": "0'), ('}, "float32"', '}, "bfloat16"')


@pytest.mark.parametrize("ours, theirs", DIFFER)
def test_processes_that_see_different_files_are_refused(ours, theirs, options, monkeypatch, capsys):
    stopped(LM, 2, signal.SIGTERM, options, capsys)
    replaced = lambda mine: mine.replace(ours, theirs) if isinstance(mine, str) else mine  # noqa: E731
    monkeypatch.setattr(Context, "gather", lambda self, mine: [mine, replaced(mine)])
    line = LM.refused(options, monkeypatch, capsys)
    where = only_run(options["out_dir"])
    assert f"the processes see different data, precision or files in {where}: use a shared disk" in line


def test_a_run_that_resumes_in_another_precision_warns(options, monkeypatch, capsys):
    stopped(LM, 2, signal.SIGTERM, options, capsys)
    file = only_run(options["out_dir"]) / "ckpt.pt"
    torch.save(torch.load(file) | {"precision": "bfloat16"}, file)
    LM.run(options, monkeypatch)
    assert "warning: it began in bfloat16, and resumes in float32" in capsys.readouterr().err


def test_a_table_shows_mean_deviation_and_empty_cells():
    def cells(result):
        return {"ppl": (result["ppl"], ".2f"), "cut": (result.get("cut"), ".1%")}

    rows = [(("dense", "22.61"), {}), (("Switch", "20.11"), {"router": "switch"})]
    results = [[{"ppl": 10.0}], [{"ppl": 1.0, "cut": 0.5}, {"ppl": 3.0, "cut": 0.5}]]
    text = Table("title", ("method", "paper"), rows).render(results, cells)
    assert text.splitlines() == [
        "| method | paper | ppl         | cut   |",
        "|--------|-------|-------------|-------|",
        "| dense  | 22.61 | 10.00       |       |",
        "| Switch | 20.11 | 2.00 ± 1.41 | 50.0% |",
    ]
    assert markdown_table(["a"], [[1], [None]]).splitlines() == ["| a    |", "|------|", "| 1    |", "| None |"]


def test_several_seeds_show_mean_and_deviation(options, monkeypatch, capsys):
    LM.run(options | {"seeds": 2, "seed": 3}, monkeypatch)
    out = capsys.readouterr().out
    names = {json.loads(path.read_text())["seed"] for path in options["out_dir"].glob("*/config.json")}
    assert names == {3, 4} and out.count("under the limit") == 2
    assert "demo, preset demo, seeds: 2" in out and " ± " in out
