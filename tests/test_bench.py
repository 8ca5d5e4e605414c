"""tools/bench.py as a user runs it, at tiny sizes. Timings are not tested, only what is computed from them."""

import json
import math
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import ROOT

import model
import train_lm
from metrics import timing
from routers import ROUTERS, RouterError
from tools import bench

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="python tools/bench.py check takes minutes on a GPU")
CPU = bench.CPU
MIXTRAL = "HF Mixtral, grouped_mm"


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Runs a command line without compiling -> its exit status, and the results in its file."""

    def run(*words) -> tuple[int, list[dict]]:
        file = tmp_path / "new" / "results.json"
        monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, words), "--out", str(file)])
        with torch.compiler.set_stance("force_eager"), pytest.raises(SystemExit) as stop:
            bench.main()
        content = json.loads(file.read_text())
        assert content["machine"]["processes"] == 1
        assert content["machine"]["commit"]
        return stop.value.code, content["results"]

    return run


def contender(run=list, gflops=1.0) -> bench.Contender:
    return run, {"gflops": gflops}


def test_contenders_run_in_turns(monkeypatch):
    """A record has the median, half the interquartile range, and the time over the first's at equal FLOPs."""
    now, calls = [0.0], []
    times = {"quick": iter([0, 99, 8, 9, 1, 9, 0]), "slow": iter([0, 99, 30, 30, 30, 30, 0])}
    monkeypatch.setattr(timing, "clock", lambda context: now[0])

    def maker(name: str):
        def run():
            calls.append(name)
            now[0] += next(times[name])

        return contender(run, {"quick": 1.0, "slow": 2.0}[name])

    makers = {name: lambda name=name: maker(name) for name in times}
    quick, slow = bench.measure(makers, bench.Config("layer", rounds=4), CPU)
    # After one run each to see that they work: warm up, then every second round in reverse order.
    assert calls[2:] == [*["quick", "slow", "slow", "quick"] * 2, "quick", "slow"]
    expected = {"impl": "quick", "ms": 8.5, "spread": 1.375, "gflops": 1.0, "ratio": 1.0}
    assert quick == quick | expected
    assert (slow["ms"], slow["spread"]) == (30, 0)
    assert slow["ratio"] == pytest.approx(30 / 8.5 / 2)


def test_a_missing_library_is_skipped_but_our_own_errors_are_raised(capsys):
    def missing():
        raise ImportError("no such library")

    makers = {"dense": contender, "HF": missing, "HF, other": lambda: contender(lambda: 1 / 0)}
    (record,) = bench.measure(makers, bench.Config("layer", rounds=1), CPU)
    assert record["impl"] == "dense"
    printed = capsys.readouterr().out
    assert "HF: skipped (ImportError: no such library)\n" in printed
    assert "HF, other: skipped (ZeroDivisionError: " in printed
    with pytest.raises(ImportError):
        bench.measure({"ours, base": missing}, bench.Config("layer"), CPU)


def test_a_router_that_refuses_a_shape_is_skipped_but_a_wrong_one_is_not(capsys):
    def raises(error):
        raise error

    makers = {"dense": contender, "ours, mine": partial(raises, ValueError("top_k must be at least 2"))}
    (record,) = bench.measure(makers, bench.Config("layer", rounds=1), CPU)
    assert record["impl"] == "dense"
    assert "ours, mine: skipped (ValueError: top_k must be" in capsys.readouterr().out
    makers["ours, mine"] = partial(raises, RouterError("MyRouter.choose returned indices"))
    with pytest.raises(RouterError):
        bench.measure(makers, bench.Config("layer"), CPU)


def test_one_more_run_on_a_gpu_has_peak_memory(monkeypatch):
    assert bench.peak_memory(list, CPU) == {}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", list)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**20)
    facts = bench.peak_memory(list, replace(CPU, device=torch.device("cuda")))
    assert facts == {"peak_mb": 2}


def test_layer_compares_every_router_and_mixtral_with_the_dense_layer(results, monkeypatch, capsys):
    monkeypatch.setattr(bench, "SHAPES", {"S2": bench.SHAPES["S2"]})
    status, records = results("layer", "--tokens", 64, "--rounds", 1, "--dtype", "bfloat16")
    assert status == 0
    assert {record["section"] for record in records} == {"S2"}
    records = {record["impl"]: record for record in records}
    variants = {*(ROUTERS.keys() - {"threshold"}), "threshold 0.9", "threshold 0.3", "topk, no limit"}
    variants |= {f"threshold {t}, weights in bfloat16" for t in (0.3, 0.9)}
    assert records.keys() - {MIXTRAL} == {"dense", *(f"ours, {variant}" for variant in variants)}
    printed = capsys.readouterr().out
    assert (MIXTRAL in records) != (f"{MIXTRAL}: skipped" in printed)
    assert "| ours, threshold 0.3 " in printed
    dense, ours, unlimited = records["dense"], records["ours, switch"], records["ours, topk, no limit"]
    assert unlimited["gflops"] == pytest.approx(3 * 4 * 256 * 1024 * 64 / 1e9)  # every token is served
    assert dense["gflops"] == unlimited["gflops"]
    rows = [records[f"ours, threshold {t}"]["rows_per_token"] for t in (0.3, 0.9)]
    assert 1 <= rows[0] < 0.5 * rows[1]
    assert dense["ratio"] == 1
    assert ours["ratio"] == pytest.approx(ours["ms"] / dense["ms"] * dense["gflops"] / ours["gflops"])


@pytest.mark.parametrize("name", bench.SHAPES)
def test_mixtral_has_as_many_flops_and_parameters_as_our_layer(name, monkeypatch):
    pytest.importorskip("transformers")
    blocks, shape = [], bench.SHAPES[name]
    monkeypatch.setattr(bench, "layer", lambda block, h, work, context: blocks.append(block) or work)
    with torch.device("meta"):
        h, ours = torch.zeros(1, 4, shape.n_embd), model.xmoe_layer(shape, 8, "tanh")
        work = bench.mixtral(shape, h, replace(CPU, device="meta"))
    E, K = ours.router.E, shape.split
    weights = sum(p.numel() for name, p in blocks[0].named_parameters() if "experts" in name)
    our_weights = sum(p.numel() for p in ours.experts.parameters() if p.dim() == 3)
    assert work == pytest.approx(2 * weights / E * K)  # K experts per token
    assert weights == pytest.approx(our_weights, rel=0.04)


@pytest.mark.parametrize("router, served", [("switch", 8), ("topk", 16), ("hypersphere", 16), ("base", 64)])
def test_flops_count_the_rows_that_are_served(router, served):
    """64 equal tokens request the same experts, whose capacity is 8; BASE assigns them evenly."""
    h = torch.ones(1, 64, 16)
    shape = train_lm.Config(n_embd=16, ffn_size=8, split=2, expert_ffns=4, capacity=0.5, router=router)
    _, ours = bench.our_layer(shape, h, CPU)  # 8 experts of width 4
    assert ours["gflops"] == pytest.approx(3 * 2 * 2 * 16 * 4 * served / 1e9)
    assert ours["rows_per_token"] == served / 64
    ffn = model.FFN(shape, "tanh")
    _, dense = bench.layer(ffn, h, bench.flops.matrix_flops(ffn), CPU)
    assert dense["gflops"] == pytest.approx(3 * 64 * 2 * 2 * 16 * 8 / 1e9)


@pytest.mark.parametrize("name", ["bias", "shared", "relu", "null", "noisy"])
def test_routers_with_constants_and_random_numbers_are_timed_and_checked(name):
    router = f"{ROOT / 'examples/routers_of_today.py'}:{name}"
    shape = train_lm.Config(n_embd=16, ffn_size=8, split=2, expert_ffns=4, capacity=0.5, router=router)
    _, facts = bench.our_layer(shape, torch.randn(1, 64, 16), CPU)
    assert 0 < facts["rows_per_token"] <= 1
    records = bench.against_the_cpu(router, bench.Config("check"), replace(CPU, dtype=torch.bfloat16))
    assert next(records)["right"]


def test_step_times_training_steps_of_equal_flops():
    config = bench.Config("step", tokens=70, rounds=1)  # 4 sequences and part of a fifth
    tiny = dict(n_head=4, n_embd=16, ffn_size=64, block_size=16)
    records = bench.time_steps("small", config, CPU, **tiny)
    assert [record["impl"] for record in records] == ["dense", "switch", "topk", "threshold"]
    for record in records:
        assert record["tokens"] == 64
        assert record["teraflops"] == pytest.approx(record["gflops"] / record["ms"])
        assert record["gflops"] == pytest.approx(records[0]["gflops"], rel=0.05)
    assert bench.sections_of("step", gpu=False).keys() == {"width 256", "width 768"}
    assert bench.sections_of("step", gpu=True).keys() == {"eager", "compiled"}


def test_check_passes_on_a_cpu(results):
    status, records = results("check")
    assert status == 0
    assert all(record["right"] for record in records)
    assert {record["section"] for record in records} == bench.sections_of("check", False).keys()


def test_results_are_written_after_each_section(results, monkeypatch, tmp_path):
    def fails(config, context):
        yield {"number": 1}
        raise RuntimeError("broken")

    def slow(config, context):
        written = json.loads((tmp_path / "new/results.json").read_text())["results"]
        assert [result.get("number") for result in written] == [1, None]
        yield {"right": True}

    sections = {"fails": fails, "slow": slow}
    monkeypatch.setattr(bench, "sections_of", lambda part, gpu: sections)
    status, (_, broken, last) = results("check")
    assert status == 1
    assert broken["error"] == "RuntimeError('broken')"
    assert "in fails" in str(broken["traceback"])
    assert last == {"section": "slow", "right": True}


@pytest.mark.parametrize("wrong", [1.1, math.nan], ids=["ten percent off", "NaN"])
def test_check_notices_a_wrong_layer(wrong, monkeypatch):
    forward = model.MoE.forward

    def wrong_forward(moe, h, *rest):
        y, balance = forward(moe, h, *rest)
        return y * (wrong if torch.is_autocast_enabled("cpu") else 1.0), balance

    monkeypatch.setattr(model.MoE, "forward", wrong_forward)
    records = bench.against_the_cpu("topk", bench.Config("check"), replace(CPU, dtype=torch.bfloat16))
    assert not any(record["right"] for record in records)
