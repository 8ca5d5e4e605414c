"""tools/gpu.py where there is no card: a rehearsal of its three parts, and what it makes of results."""

import json
import math
import sys
import warnings

import pytest
import torch

from tools import bench, gpu

pytestmark = pytest.mark.skipif(gpu.CUDA, reason="with a card it takes half an hour: python tools/gpu.py")


def run(part: str, file, monkeypatch, *words: str) -> tuple[int, list[dict]]:
    """-> the exit status, and the results in the file"""
    monkeypatch.setattr(sys, "argv", ["gpu.py", part, "--out", str(file), *words])
    with pytest.raises(SystemExit) as stop:
        gpu.main()
    content = json.loads(file.read_text())
    assert content["part"] == part and content["machine"]["dtype"] == "bfloat16"
    return stop.value.code, content["results"]


@pytest.mark.parametrize("part", gpu.PARTS)
def test_a_part_runs_through_without_a_card(part, monkeypatch, tmp_path, capsys):
    status, results = run(part, tmp_path / "new/results.json", monkeypatch)
    assert status == 0 and not [result for result in results if not result.get("right", True)]
    assert list(dict.fromkeys(result["section"] for result in results)) == list(gpu.PARTS[part])
    assert capsys.readouterr().out.count("\n") > len(results)
    for result in results:
        times = [value for name, value in result.items() if name.endswith("ms")]
        assert all(value > 0 for value in times)


def test_results_are_written_at_once_until_time_is_up(monkeypatch, tmp_path):
    file = tmp_path / "results.json"

    def fails():
        yield {"found": 1}
        assert json.loads(file.read_text())["results"][-1]["found"] == 1
        raise RuntimeError("broken")

    def endless():
        while True:
            yield {"right": True}

    def never():
        raise AssertionError("time is up")

    monkeypatch.setitem(gpu.PARTS, "check", {"fails": fails, "endless": endless, "never": never})
    status, results = run("check", file, monkeypatch, "--limit", "0.2")
    assert status == 1 and results[1]["error"] == "RuntimeError('broken')" and "in fails" in results[1]["traceback"]
    assert results[-1] == results[-1] | {"section": "endless", "stopped": "time is up"}


@pytest.mark.parametrize("wrong", [1.1, math.nan], ids=["ten percent off", "NaN"])
def test_a_layer_that_is_wrong_here_is_seen(wrong, monkeypatch):
    forward = gpu.MoE.forward

    def differs(moe, h, *rest):
        y, balance = forward(moe, h, *rest)
        return y * (wrong if torch.is_autocast_enabled("cpu") else 1.0), balance

    monkeypatch.setattr(gpu.MoE, "forward", differs)
    assert not any(result["right"] for result in gpu.against_the_cpu("topk"))


@pytest.mark.filterwarnings("ignore:called a sync", "ignore:something else")
def test_a_host_wait_is_noted_by_file_and_line(monkeypatch):
    def waits():
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    monkeypatch.setattr(bench, "trainee", lambda *rest: bench.Contender(waits, {}))
    monkeypatch.setattr(gpu, "CUDA", True)
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    (result,) = gpu.host_waits("switch")
    line = waits.__code__.co_firstlineno + 1
    assert result == {"waits": {f"tests/test_gpu_tool.py:{line} waits": 1}} and modes == ["warn", "default"]
