"""soak.py: what it calls equal, and that it notices what goes wrong. The faults themselves are not a test's."""

import json

import soak
import torch


def test_equal_is_bit_for_bit():
    zero, ones = torch.tensor([0.0]), torch.ones(2)
    same = [(ones, torch.ones(2)), (torch.tensor(torch.nan), torch.tensor(torch.nan))]
    same.append(({"a": [1, ones]}, {"a": [1, torch.ones(2)]}))
    other = [(zero, -zero), (ones, torch.ones(2, 1)), (torch.zeros(2), torch.zeros(2, dtype=torch.int32))]
    other += [({"a": [1, ones]}, {"a": [1, torch.zeros(2)]}), ({"a": 1}, {"a": 1, "b": 1}), ((1, 2), (1, 2, 3))]
    assert all(soak.plain(a) == soak.plain(b) for a, b in same)
    assert all(soak.plain(a) != soak.plain(b) for a, b in other)


def test_an_outcome_leaves_out_what_measures_time_alone(tmp_path):
    found = []
    for name, speed, loss in (("a", 1.5, 2.0), ("b", 9.0, 2.0), ("c", 1.5, 2.1)):
        run = tmp_path / name
        run.mkdir()
        (run / "result.json").write_text(json.dumps({"loss": loss, "seconds": speed}))
        (run / "metrics.jsonl").write_text(json.dumps({"tokens_per_second": speed, "train_loss": loss}) + "\n")
        (run / "lock").touch()
        found.append(soak.outcome(run))
    assert set(found[0]) == {"result.json", "metrics.jsonl"}
    assert found[0] == found[1]
    assert all(found[0][name] != found[2][name] for name in found[0])


def test_an_end_is_judged_by_its_code_its_words_and_its_files(tmp_path):
    troubled = soak.Soak.__new__(soak.Soak)
    troubled.base, troubled.run, troubled.expected = tmp_path, tmp_path / "run", {"a": b"1"}
    troubled.run.mkdir()

    def judged(words: str, code: int, left: str = "1") -> str:
        (tmp_path / "words").write_text(words)
        (troubled.run / "a").write_text(left)
        return troubled.judge(code, {0, 143})

    assert judged("stopped at step 3; the same command goes on", 143) == ""
    assert judged("", 0) == ""
    assert judged("", 0, left="2") == "other a"
    assert judged("", 1) == "exit code 1"
    assert judged("", 143) == "0 lines"
    assert judged("stopped\nstopped", 143) == "2 lines"
    assert judged("Traceback (most recent call last)", 0) == "a traceback"
