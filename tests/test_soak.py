"""soak.py compares runs bit for bit and notices errors. The faults themselves are not injected here."""

import json

import soak
import torch


def test_contents_are_compared_bit_for_bit():
    zero, ones = torch.tensor([0.0]), torch.ones(2)
    same = [(ones, torch.ones(2)), (torch.tensor(torch.nan), torch.tensor(torch.nan))]
    same.append(({"a": [1, ones]}, {"a": [1, torch.ones(2)]}))
    different = [(zero, -zero), (ones, torch.ones(2, 1)), (torch.zeros(2), torch.zeros(2, dtype=torch.int32))]
    different += [({"a": [1, ones]}, {"a": [1, torch.zeros(2)]}), ({"a": 1}, {"a": 1, "b": 1}), ((1, 2), (1, 2, 3))]
    assert all(soak.plain(a) == soak.plain(b) for a, b in same)
    assert all(soak.plain(a) != soak.plain(b) for a, b in different)


def test_an_outcome_leaves_out_only_timings(tmp_path):
    outcomes = []
    for name, speed, loss in (("a", 1.5, 2.0), ("b", 9.0, 2.0), ("c", 1.5, 2.1)):
        run = tmp_path / name
        run.mkdir()
        (run / "result.json").write_text(json.dumps({"loss": loss, "seconds": speed}))
        (run / "metrics.jsonl").write_text(json.dumps({"tokens_per_second": speed, "train_loss": loss}) + "\n")
        (run / "lock").touch()
        outcomes.append(soak.outcome(run))
    first, other_speed, other_loss = outcomes
    assert set(first) == {"result.json", "metrics.jsonl"}
    assert first == other_speed
    assert all(first[name] != other_loss[name] for name in first)


def test_a_run_is_judged_by_its_exit_code_output_and_files(tmp_path):
    troubled = soak.Soak.__new__(soak.Soak)
    troubled.base, troubled.run, troubled.expected = tmp_path, tmp_path / "run", {"a": b"1"}
    troubled.run.mkdir()

    def judged(output: str, code: int, content: str = "1") -> str:
        (tmp_path / "output").write_text(output)
        (troubled.run / "a").write_text(content)
        return troubled.judge(code, {0, 143})

    assert judged("stopped at step 3; the same command goes on", 143) == ""
    assert judged("", 0) == ""
    assert judged("", 0, content="2") == "different a"
    assert judged("", 1) == "exit code 1"
    assert judged("", 143) == "0 lines"
    assert judged("stopped\nstopped", 143) == "2 lines"
    assert judged("Traceback (most recent call last)", 0) == "a traceback"
