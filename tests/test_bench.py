"""tools/bench.py as a user runs it, at tiny sizes; what is measured is not tested, only what is made of it."""

import json
import sys
from dataclasses import replace

import pytest
import torch

import train_lm
from analysis import measures
from engine.device import Context
from tools import bench

CPU = Context(0, 1, torch.device("cpu"), torch.float32)
MIXTRAL = "HF Mixtral, grouped_mm"


@pytest.fixture
def records(monkeypatch, tmp_path):
    """A function: the words of a command line -> the records that it writes. Nothing is compiled."""

    def run(*words) -> list[dict]:
        file = tmp_path / "records.json"
        monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, words), "--device", "cpu", "--json", str(file)])
        with torch.compiler.set_stance("force_eager"):
            bench.main()
        return json.loads(file.read_text())

    return run


def test_contenders_take_turns_until_their_patience_is_used_up(monkeypatch):
    """A record has the median, and half the range between the quartiles."""
    now, calls = [0.0], []
    times = {"quick": iter([99, 8, 9, 1, 9]), "slow": iter([99, 30])}
    monkeypatch.setattr(measures, "clock", lambda context: now[0])

    def contender(name: str) -> bench.Contender:
        def run():
            calls.append(name)
            now[0] += next(times[name])

        return bench.Contender(run, {"S": 5})

    monkeypatch.setattr(bench, "PATIENCE", 0.029)
    both, config = {name: contender(name) for name in times}, bench.Config("layer", rounds=4)
    quick, slow = bench.measure("group", both, config, CPU)
    # Once each for warming up, then backwards, and then there is only one.
    assert calls == ["quick", "slow", "slow", "quick", "quick", "quick", "quick"]
    expected = {"shape": "group", "impl": "quick", "runs": 4, "S": 5, "ms": 8.5, "spread": 1.375, "peak_mb": None}
    assert quick == expected | {"all_ms": [8, 9, 1, 9]}
    assert (slow["ms"], slow["spread"], slow["runs"]) == (30, 0, 1)


def test_layer_measures_every_router_and_peer_against_the_dense_ones(records, capsys):
    found = {record["impl"]: record for record in records("layer", "--shapes", "S1", "--tokens", 64, "--rounds", 2)}
    others = ["topk", "hypersphere", "threshold", "base", "expert_choice", "hash", "no limit"]
    ours = ["dense", "ours", *(f"ours, {other}" for other in others), "dense, compiled"]
    assert [name for name in found if name != MIXTRAL] == ours
    assert found["ours, no limit"]["gflops"] == pytest.approx(3 * 4 * 256 * 1024 * 64 / 1e9)  # of every token
    assert (MIXTRAL in found) != (f"{MIXTRAL}: skipped" in capsys.readouterr().out)
    dense, compiled, ours = found["dense"], found["dense, compiled"], found["ours"]
    assert (ours["shape"], ours["S"], ours["runs"], ours["machine"]["processes"]) == ("S1", 64, 2, 1)
    assert ours["gflops"] == pytest.approx(dense["gflops"], rel=0.01)
    for record in found.values():
        each = record["ms"] / record["gflops"]
        assert record["ratio"] == pytest.approx(each / dense["ms"] * dense["gflops"])
        assert record["to_compiled"] == pytest.approx(each / compiled["ms"] * compiled["gflops"])


def test_a_peer_that_cannot_run_here_is_left_out(capsys):
    def missing():
        raise ImportError("no such library")

    def broken():
        return bench.Contender(lambda: 1 / 0, {})

    sound = bench.Contender(list, {})
    makers = {"missing": missing, "broken": broken, "sound": lambda: sound}
    assert bench.those_that_run(makers, CPU) == {"sound": sound}
    said = "missing: skipped (ImportError: no such library)\nbroken: skipped (ZeroDivisionError: division by zero)\n"
    assert capsys.readouterr().out == said
    records = [{"impl": "dense", "ms": 2.0, "gflops": 1.0}, {"impl": "ours", "ms": 3.0, "gflops": 1.0}]
    assert [(r["ratio"], r["to_compiled"]) for r in bench.compare(records)] == [(1.0, None), (1.5, None)]


@pytest.mark.parametrize("name", bench.SHAPES)
def test_mixtral_has_as_many_flops_and_parameters_as_our_layer(name, monkeypatch):
    pytest.importorskip("transformers")
    blocks = []
    monkeypatch.setattr(bench, "layer", lambda block, call, h, gflops, context: blocks.append(block) or gflops)
    with torch.device("meta"):
        h, ours = torch.zeros(1, 4, bench.SHAPES[name].n_embd), bench.sparse_ffn(bench.SHAPES[name])
        gflops = bench.mixtral(bench.SHAPES[name], h, replace(CPU, device="meta"))
    E, K = ours.router.E, bench.SHAPES[name].split
    weights = sum(p.numel() for name, p in blocks[0].named_parameters() if "experts" in name)
    assert gflops == pytest.approx(2e-9 * weights / E * K * 4)  # of K experts a token
    assert weights == pytest.approx(sum(p.numel() for p in ours.experts.parameters() if p.dim() == 3), rel=0.04)


@pytest.mark.parametrize("router, kept", [("switch", 8), ("topk", 16), ("hypersphere", 16), ("base", 64)])
def test_flops_are_those_of_the_rows_that_are_kept(router, kept):
    """64 tokens that are all alike want the same experts, which have room for 8; BASE deals them out."""
    h = torch.ones(1, 64, 16)
    shape = train_lm.Config(n_embd=16, ffn_size=8, split=2, expert_ffns=4, capacity=0.5, router=router)
    ours = bench.our_layer(shape, h, CPU).facts  # 8 experts of width 4
    assert ours["gflops"] == pytest.approx(3 * 2 * 2 * 16 * 4 * kept / 1e9)
    assert ours["rows_per_token"] == kept / 64
    dense = bench.dense_layer(h, 8 * 3 * 16e-9 * 16**2, CPU).facts
    # 8 tokens in and out, both ways; two matrices and their biases read twice and their gradients written: 2 bytes each
    least = 2 * (4 * 8 * 16 + 3 * (2 * 16 * 64 + 64 + 16))
    flops = 3 * 8 * 2 * 2 * 16 * 64
    assert dense == {"S": 8, "gflops": pytest.approx(flops / 1e9), "least_mb": pytest.approx(least / 1e6)}


def test_step_measures_whole_steps(records, monkeypatch):
    monkeypatch.setattr(bench, "STEPS", {"width 16": bench.decoders(n_head=4, n_embd=16, ffn_size=64, block_size=16)})
    found = records("step", "--tokens", 70, "--rounds", 2)  # 4 sequences and a part of one
    dense, switch, *_ = found
    assert [r["impl"] for r in found] == ["dense 1 x 64", "switch 8 x 64", "topk 64 x 8", "threshold 64 x 8"]
    for r in found:
        assert r["tokens_per_second"] == pytest.approx(64 / r["ms"] * 1e3)
        assert r["to_dense"] == pytest.approx(r["ms"] / dense["ms"])
        assert r["to_switch"] == pytest.approx(r["ms"] / switch["ms"])
        assert r["gflops"] == pytest.approx(dense["gflops"], rel=0.05)  # models that are compared cost the same
        assert r["S"] == 64


def test_a_device_that_is_not_there_is_one_clear_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", "layer", "--device", "quantum"])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 1 and line.startswith("error: device quantum")
