"""examples/first_hour.ipynb: every cell runs, on a small corpus and for few steps."""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT, words

NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"
SHORT = "--steps 2 --eval_every 2 --block_size 100 --micro_tokens 100 --batch_tokens 100 --n_embd 16 --ffn_size 32"


def test_every_cell_runs(options, tmp_path):
    pytest.importorskip("matplotlib")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert len(cells) <= 25 and not any(cell.get("outputs") for cell in cells)
    setup, *sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "git clone" in setup
    code = "\n".join(sources)
    (tmp_path / "a").symlink_to(options["data"])  # so that no name of a run is long enough to be cut
    given = words({name: options[name] for name in ("device", "dtype")} | {"data": "a"})
    assert code.count("--steps 200 --eval_every 100") == 1
    code = code.replace("--steps 200 --eval_every 100", f"{SHORT} {' '.join(given)}")
    environment = os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[0, 1]" in done.stdout and "experts wanted" in done.stdout
