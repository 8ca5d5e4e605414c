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
    """What a notebook prints in this folder, once each of these lines of its code has been changed."""
    pytest.importorskip("matplotlib")
    cells = json.loads((EXAMPLES / name).read_text())["cells"]
    assert len(cells) <= 30
    outputs = [output for cell in cells for output in cell.get("outputs", ())]  # for who reads it on the web
    assert sum("image/png" in output.get("data", ()) for output in outputs) >= 3
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs)
    setup, *sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "git clone" in setup and "github.com" not in setup  # which address it is, whoever has a copy knows
    assert all(len(source.splitlines()) <= 20 for source in sources)
    code = "\n".join(sources)
    for old, new in changes.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    environment = os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_hour(options, tmp_path):
    """Also where another run of its router, with other constants, was left before."""
    (tmp_path / "a").symlink_to(options["data"])  # so that no name of a run is long enough to be cut
    other = tmp_path / "out/train_lm/demo-seed=1-router=unsure"
    other.mkdir(parents=True)
    (other / "config.json").write_text(json.dumps({"data_checksum": "", "seed": 1, "router": "unsure"}))
    (other / "result.json").write_text("{}")
    given = words({name: options[name] for name in ("device", "dtype")} | {"data": "a"})
    asked = {"--steps 200 --eval_every 100": f"{SHORT} {' '.join(given)}"}
    printed = run("first_hour.ipynb", asked, tmp_path)
    assert "[0, 1]" in printed and "experts wanted" in printed


@pytest.fixture
def two_languages(english, tmp_path, monkeypatch) -> Path:
    """Small corpora of ciphers, prepared as the notebooks do it."""
    for name, languages in {"ciphers": "en,x1", "ciphers-pairs": "en-x1,x1-en"}.items():
        monkeypatch.setitem(corpora.CORPORA, name, corpora.CORPORA[name]._replace(read=lambda: english))
        prepare(name, languages=languages, out=tmp_path / f"{name}-two")
    return tmp_path


def test_collapse(two_languages):
    changes = {"STEPS = 800": "STEPS = 16", 'data="ciphers"': 'data="ciphers-two"'}
    printed = run("collapse.ipynb", changes, two_languages)
    assert "as by the formula: True" in printed and "X-MoE: RC " in printed


def test_multilingual(two_languages):
    changes = {"STEPS = 1500": "STEPS = 15", "HOME = PREPARED": f"HOME = type(PREPARED)({str(two_languages)!r})"}
    printed = run("multilingual.ipynb", changes, two_languages)
    assert "step 15: right" in printed and "in the end" in printed
