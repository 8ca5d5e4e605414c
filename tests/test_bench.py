"""tools/bench.py as a user runs it, at tiny sizes; what is measured is not tested, only what is made of it."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import ROOT, TORCHRUN

import model
from engine.device import Context
from tools import bench

CPU = Context(0, 1, torch.device("cpu"), torch.float32)


@pytest.fixture
def records(monkeypatch, tmp_path):
    """A function: the words of a command line -> the records that it writes."""

    def run(*words) -> list[dict]:
        file = tmp_path / "records.json"
        monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, words), "--device", "cpu", "--json", str(file)])
        bench.main()
        return json.loads(file.read_text())

    return run


def test_contenders_take_turns_until_their_patience_is_used_up(monkeypatch):
    """A record has the median, and half the range between the quartiles, of the slowest of several processes."""

    class Two(Context):
        def barrier(self):
            pass

        def gather(self, x):
            return [x, 7.0]

    now, calls = [0.0], []
    times = {"quick": iter([99, 8, 9, 1, 9]), "slow": iter([99, 30])}
    monkeypatch.setattr(bench, "clock", lambda context: now[0])

    def contender(name: str) -> bench.Contender:
        def run():
            calls.append(name)
            now[0] += next(times[name])

        return bench.Contender(run, {"S": 5})

    both, config = {name: contender(name) for name in times}, bench.Config(rounds=4, patience=0.029)
    quick, slow = bench.measure("group", both, config, Two(0, 2, torch.device("cpu"), torch.float32))
    # Once each for warming up, then backwards, and then there is only one.
    assert calls == ["quick", "slow", "slow", "quick", "quick", "quick", "quick"]
    expected = {"shape": "group", "impl": "quick", "runs": 4, "S": 5, "ms": 8.5, "spread": 0.625, "peak_mb": None}
    assert quick == expected | {"all_ms": [8, 9, 7, 9]}
    assert (slow["ms"], slow["spread"], slow["runs"]) == (30, 0, 1)


def test_layer_measures_every_router_and_peer_against_the_dense_ones(records, capsys):
    found = {r["impl"]: r for r in records("layer", "--shapes", "S1", "--tokens", 64, "--rounds", 2)}
    others = ["topk", "hypersphere", "threshold", "base", "expert_choice", "hash", "no limit"]
    ours = ["dense", "dense, compiled GELU", "ours", *(f"ours, {other}" for other in others)]
    assert [name for name in found if name not in bench.PEERS] == ours
    assert found["ours, no limit"]["gflops"] == pytest.approx(3 * 4 * 256 * 1024 * 64 / 1e9)  # of every token
    out = capsys.readouterr().out
    for peer in bench.PEERS:  # there, or said why not
        assert (peer in found) != (f"{peer}: skipped" in out)
    dense, compiled, ours = found["dense"], found["dense, compiled GELU"], found["ours"]
    assert (ours["shape"], ours["S"], ours["runs"], ours["machine"]["processes"]) == ("S1", 64, 2, 1)
    assert ours["gflops"] == pytest.approx(dense["gflops"], rel=0.01)
    for record in found.values():
        each = record["ms"] / record["gflops"]
        assert record["ratio"] == pytest.approx(each / dense["ms"] * dense["gflops"])
        assert record["to_compiled"] == pytest.approx(each / compiled["ms"] * compiled["gflops"])


@pytest.mark.parametrize("name", bench.SHAPES)
def test_mixtral_has_as_many_flops_and_parameters_as_our_layer(name, monkeypatch):
    shape = bench.SHAPES[name]
    blocks = []
    monkeypatch.setattr(bench, "layer", lambda block, call, h, gflops, context: blocks.append(block) or gflops)
    with torch.device("meta"):
        gflops = bench.hf_mixtral("eager", shape, torch.zeros(1, 4, shape.D), replace(CPU, device="meta"))
    weights = sum(p.numel() for name, p in blocks[0].named_parameters() if "experts" in name)
    assert gflops == pytest.approx(2e-9 * weights / shape.E * shape.K * 4)  # of K experts a token
    assert weights == pytest.approx(2 * shape.D * shape.F * shape.E, rel=0.04)


@pytest.mark.parametrize("router, kept", [("switch", 8), ("topk", 24), ("hypersphere", 24), ("base", 64)])
def test_flops_are_those_of_the_rows_that_are_kept(router, kept):
    """64 tokens that are all alike want the same experts, which have room for 8; BASE deals them out."""
    h = torch.ones(1, 64, 16)
    ours = bench.our_layer(bench.Shape(16, 8, 4, router, 3, 1.0), h, CPU).facts
    assert ours["gflops"] == pytest.approx(3 * 2 * 2 * 16 * 4 * kept / 1e9)
    assert ours["rows_per_token"] == kept / 64
    for dense in bench.dense_layers(h, 8 * 3 * 16e-9 * 16**2, CPU).values():
        assert dense.facts == {"S": 8, "gflops": pytest.approx(3 * 8 * 2 * 2 * 16 * 64 / 1e9)}


def test_the_compiled_gelu_is_ours(monkeypatch):
    calls = []

    def compiled(*arguments):
        calls.append(arguments)
        return model.activation(*arguments)

    monkeypatch.setattr(model, "compiled_activation", lambda device: compiled)
    monkeypatch.setattr(bench, "layer", lambda module, call, h, gflops, context: call(h)[0])
    for enough in (10**9, 1):
        monkeypatch.setattr(model, "WORTH_COMPILING", enough)
        torch.testing.assert_close(*bench.dense_layers(torch.randn(1, 128, 64), 1e-2, CPU).values())
        assert len(calls) == (enough == 1)


TINY = {"width 16": bench.decoders("small", n_head=4, n_embd=16, ffn_size=64, block_size=16)}


def test_step_measures_whole_steps(records, monkeypatch):
    monkeypatch.setitem(bench.STEPS, "cpu", TINY)
    monkeypatch.setattr(bench, "peak_flops", lambda context: 1e12)
    found = records("step", "--tokens", 70, "--rounds", 2)  # 4 sequences and a part of one
    dense, switch, *_ = found
    assert [r["impl"] for r in found] == ["dense 1 x 64", "switch 8 x 64", "topk 64 x 8", "threshold 64 x 8"]
    for r in found:
        assert r["tokens_per_second"] == pytest.approx(64 / r["ms"] * 1e3)
        assert r["to_dense"] == pytest.approx(r["ms"] / dense["ms"])
        assert r["to_switch"] == pytest.approx(r["ms"] / switch["ms"])
        assert r["gflops"] == pytest.approx(dense["gflops"], rel=0.05)  # models that are compared cost the same
        assert r["S"] == 64 and r["mfu"] == pytest.approx(1e9 * r["gflops"] / (r["ms"] / 1e3) / 1e12)


def test_processes_share_a_step_and_hold_less_each(tmp_path):
    words = "scale --rounds 1 --tokens 1024 --device cpu --json"
    command = [*TORCHRUN, ROOT / "tools/bench.py", *words.split(), tmp_path / "scale.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {record["impl"]: record for record in json.loads((tmp_path / "scale.json").read_text())}
    one, alone, *_ = found.values()
    names = ["one process", "no communication", "data parallel", "expert parallel", "shard", "both"]
    assert list(found) == names and [r["processes"] for r in found.values()] == [1, 2, 2, 2, 2, 2]
    *_, constants = bench.decoders("small").values()
    net = model.GPT(constants, bench.VOCABULARY)
    total = sum(p.numel() for p in net.parameters()) * 16 / 2**20
    experts = sum(p.numel() for moe in net.moe_layers for p in moe.experts.parameters()) * 16 / 2**20
    held = {name: record["state_mb"] for name, record in found.items()}
    assert held["data parallel"] == held["one process"] == pytest.approx(total)
    assert held["expert parallel"] == pytest.approx(total - experts / 2)
    assert held["shard"] == pytest.approx(held["both"], rel=0.01) == pytest.approx(total / 2, rel=0.02)
    assert one["S"] == 1024 and alone["S"] == 512 and one["communication"] == 0
    for name in names[1:]:
        assert found[name]["speedup"] == pytest.approx(one["ms"] / found[name]["ms"])
        assert found[name]["communication"] == pytest.approx(1 - alone["ms"] / found[name]["ms"])


@pytest.mark.parametrize(
    "words, message",
    [
        ("sise", "'sise' is nothing to measure: python tools/bench.py layer | step | scale"),
        ("layer --rounds 0", "rounds must be over 0"),
        ("layer --patience -1", "patience must be over 0"),
        ("layer --device quantum", "device quantum"),
        ("layer --json nowhere/x.json", "No such file or directory: 'nowhere/x.json'"),
    ],
)
def test_bad_input_is_one_clear_line(words, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench.py", *words.split()])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 1 and line.startswith("error: ") and message in line


def test_processes_that_cannot_share_a_step_are_refused():
    with pytest.raises(ValueError, match="3 processes cannot share out 4 micro-batches evenly"):
        bench.bench_scale(bench.Config(), replace(CPU, world=3))
