"""tools/soak.py: what it calls equal, and that it notices what goes wrong. The faults themselves are not a test's."""

import json
import subprocess
import sys

import pytest
import torch
from helpers import ROOT

from tools import soak


@pytest.mark.parametrize(
    "one, two, equal",
    [
        (torch.tensor([1.0]), torch.tensor([1.0]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), True),
        ({"a": [1, torch.ones(2)]}, {"a": [1, torch.ones(2)]}, True),
        ({"a": [1, torch.ones(2)]}, {"a": [1, torch.zeros(2)]}, False),
        ({"a": 1}, {"a": 1, "b": 1}, False),
        ((1, 2), (1, 2, 3), False),
    ],
)
def test_equal_is_bit_for_bit(one, two, equal):
    assert soak.same(one, two) == equal


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


@pytest.fixture
def ended(tmp_path):
    """A function: what a command said and its exit code -> what the soak finds wrong with it."""
    troubled = soak.Soak.__new__(soak.Soak)
    run = tmp_path / "run"
    run.mkdir()
    troubled.base, troubled.run, troubled.expected = tmp_path, run, {"a": b"1"}

    def judge(words: str, code: int, left: str = "1") -> str:
        (tmp_path / "words").write_text(words)
        (run / "a").write_text(left)
        return troubled.judge(code, {0, 143})

    return judge


def test_an_end_is_judged_by_its_code_its_words_and_its_files(ended):
    assert ended("stopped at step 3; the same command goes on", 143) == ""
    assert ended("", 0) == ""
    assert ended("", 0, left="2") == "other a"
    assert ended("", 1) == "exit code 1"
    assert ended("", 143) == "0 lines"
    assert ended("stopped\nstopped", 143) == "2 lines"
    assert ended("Traceback (most recent call last)", 0) == "a traceback"


def test_an_unknown_script_is_refused():
    command = [sys.executable, ROOT / "tools/soak.py", "--scripts", "train_all"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: 'train_all' is none of the scripts: train_lm, ")
