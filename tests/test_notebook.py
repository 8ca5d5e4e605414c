"""examples/*.ipynb: every cell runs, on a small corpus and for few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, words
from test_ciphers import english

from data import corpora
from data.prepare import prepare

__all__ = ["english"]  # a fixture
EXAMPLES = ROOT / "examples"
SHORT = "--steps 2 --eval_every 2 --block_size 100 --micro_tokens 100 --batch_tokens 100 --n_embd 16 --ffn_size 32"


def run(name: str, changes: dict[str, str], folder: Path) -> str:
    """The output of a notebook run in this folder, after replacing these strings in its code."""
    pytest.importorskip("matplotlib")
    cells = json.loads((EXAMPLES / name).read_text())["cells"]
    setup, *sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "git clone" in setup
    assert "github.com" not in setup  # the reader enters the address
    assert len(cells) <= 30
    assert all(len(source.splitlines()) <= 20 for source in sources)
    code = "\n".join(sources)
    for old, new in changes.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    environment = os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["first_hour.ipynb", "collapse.ipynb", "multilingual.ipynb"])
def test_a_notebook_is_committed_with_its_plots_and_without_errors(name):
    cells = json.loads((EXAMPLES / name).read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    plots = [output for output in outputs if "image/png" in output.get("data", ())]
    assert len(plots) >= 3
    assert all(output["output_type"] != "error" for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)


def test_the_first_hour_runs_beside_an_older_run_of_its_router(options, tmp_path):
    (tmp_path / "a").symlink_to(options["data"])  # a short path, so that no run's name is cut
    other = tmp_path / "out/train_lm/demo-seed=1-router=unsure"
    other.mkdir(parents=True)
    (other / "config.json").write_text(json.dumps({"data_checksum": "", "seed": 1, "router": "unsure"}))
    (other / "result.json").write_text("{}")
    arguments = words({name: options[name] for name in ("device", "dtype")} | {"data": "a"})
    changes = {"--steps 200 --eval_every 100": f"{SHORT} {' '.join(arguments)}"}
    printed = run("first_hour.ipynb", changes, tmp_path)
    assert "[0, 1]" in printed
    assert "experts wanted" in printed


@pytest.fixture
def two_languages(english, tmp_path, monkeypatch) -> Path:
    """Small corpora of ciphers, prepared as in the notebooks."""
    for name, languages in {"ciphers": "en,x1", "ciphers-pairs": "en-x1,x1-en"}.items():
        monkeypatch.setitem(corpora.CORPORA, name, corpora.CORPORA[name]._replace(read=lambda: english))
        prepare(name, languages=languages, out=tmp_path / f"{name}-two")
    return tmp_path


def test_collapse_computes_the_gradient_and_trains_both_encoders(two_languages):
    changes = {"STEPS = 800": "STEPS = 16", 'data="ciphers"': 'data="ciphers-two"'}
    printed = run("collapse.ipynb", changes, two_languages)
    assert "equal to the formula: True" in printed
    assert "X-MoE: RC " in printed


def test_multilingual_trains_and_measures_to_the_last_step(two_languages):
    changes = {"STEPS = 1500": "STEPS = 15", "HOME = PREPARED": f"HOME = type(PREPARED)({str(two_languages)!r})"}
    printed = run("multilingual.ipynb", changes, two_languages)
    assert "step 15: " in printed
    assert "in the end" in printed
