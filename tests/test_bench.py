"""bench.py as a user runs it, at tiny sizes."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from flops import flops_per_token

ROOT = Path(__file__).parent.parent


def run(*args):
    return subprocess.run([sys.executable, "bench.py", *map(str, args)], cwd=ROOT, capture_output=True, text=True)


def test_layer_measures_every_router_and_writes_records(tmp_path):
    file = tmp_path / "layer.json"
    done = run("layer", "--shapes", "S1", "--tokens", 64, "--rounds", 2, "--patience", 1, "--json", file)
    assert done.returncode == 0, done.stderr
    records = {r["impl"]: r for r in json.loads(file.read_text())}
    assert {"dense", "ours", "its products alone", "ours, topk", "ours, threshold", "ours, hash", "ours, base"} <= set(
        records
    )
    assert records["dense"]["ratio"] == pytest.approx(1)
    ours, dense = records["ours"], records["dense"]
    assert ours["selection"] == "ours, switch" and ours["shape"] == "S1" and ours["dtype"] == "float32"
    assert ours["gflops"] == pytest.approx(dense["gflops"], rel=0.01) and ours["gflops"] > 0
    expected = ours["ms"] / dense["ms"] * dense["gflops"] / ours["gflops"]
    assert ours["ratio"] == pytest.approx(expected, rel=0.01)
    assert all(r["ms"] > 0 and r["forward_ms"] < r["ms"] and r["machine"]["allocator"] for r in records.values())
    assert "| ours, threshold" in done.stdout and "allocator" in done.stdout


def test_step_measures_whole_steps(tmp_path):
    file = tmp_path / "step.json"
    done = run("step", "--tokens", 256, "--rounds", 1, "--patience", 0.1, "--json", file)
    assert done.returncode == 0, done.stderr
    records = json.loads(file.read_text())
    encoders = ["dense,", "SMoE", "X-MoE"]
    assert [r["impl"].split()[0] for r in records] == 2 * ["dense", "switch", "topk", "threshold"] + encoders
    for r in records:
        assert r["tokens_per_second"] == pytest.approx(256 / r["ms"] * 1e3)
    assert records[1]["to_switch"] == 1 and records[0]["to_dense"] == 1


def test_size_goes_down_to_experts_of_width_1(tmp_path):
    file = tmp_path / "size.json"
    done = run("size", "--tokens", 1024, "--rounds", 1, "--patience", 0.1, "--json", file)
    assert done.returncode == 0, done.stderr
    records = json.loads(file.read_text())
    assert [(r["S"], r["E"], r["F"]) for r in records][-1] == (1024, 4096, 1)
    assert all(math.isfinite(r["ms"]) and r["rows_per_token"] > 0 for r in records)


def test_translate_measures_beam_search_with_a_cache_and_without(tmp_path):
    file, nowhere = tmp_path / "translate.json", tmp_path / "model.pt"
    given = ["--sentences", 7, "--model", nowhere, "--rounds", 1, "--patience", 0.1, "--json", file]
    done = run("translate", *given)
    assert done.returncode == 0, done.stderr
    records = {(r["shape"], r["impl"]): r for r in json.loads(file.read_text())}
    assert len(records) == 4 and "7 sentences of " in done.stdout and "random weights" in done.stdout
    for shape in ("beam 5", "beam 1"):
        cache, plain = records[shape, "cache"], records[shape, "no cache"]
        assert cache["ratio"] == 1 and plain["ratio"] == pytest.approx(plain["ms"] / cache["ms"])
        assert cache["tokens"] == plain["tokens"] > 7
    nowhere.write_bytes(b"nothing")
    done = run("translate", *given)
    assert done.returncode == 1 and "model.pt is corrupt" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "say what to measure"),
        (["sise"], "'sise' is not an option"),
        (["layer", "--shapes", "S1,S9"], "unknown shape 'S9'"),
        (["layer", "--rounds", "0"], "must be positive"),
        (["layer", "--dtype", "float8"], "unknown dtype"),
        (["size", "--token", "4"], "did you mean tokens?"),
        (["step", "--tokens", "100"], "multiple of 256"),
    ],
)
def test_bad_input_is_one_clear_line(args, message):
    done = run(*args)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


def test_encoders_that_are_compared_cost_the_same():
    import bench

    size = dict(n_embd=256, n_head=4, n_layer=4, block_size=128, vocab_size=8192)
    dense, smoe, xmoe = (flops_per_token(model.config)["total"] for model in bench.encoders(size).values())
    assert smoe == pytest.approx(dense, rel=0.01) and xmoe == pytest.approx(dense, rel=0.01)
