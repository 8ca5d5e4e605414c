"""Whose tokens a step predicts makes no difference: two processes have the gradient that one has."""

import json
import os
import subprocess
import sys

import gradients
import torch
from helpers import ROOT, TORCHRUN, words
from test_edits import commands, electra_corpora, encoders, mt_corpus, source

__all__ = ["commands", "electra_corpora", "encoders", "mt_corpus", "source"]  # fixtures


def test_the_first_gradient_of_two_processes_is_that_of_one(commands, tmp_path):
    """What it is on one process is said by hand in each script's own tests."""
    found = []
    for launcher in ((sys.executable,), TORCHRUN):
        out = tmp_path / str(len(found))
        out.mkdir()
        lines = {}
        for name, options in commands.items():
            more = {"task": "pos"} if name == "finetune_xtreme" else {}
            lines[name] = words(options | more | {"dtype": "float64", "out_dir": out / name})
        (out / "commands.json").write_text(json.dumps(lines))
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run([*launcher, gradients.__file__, str(out)], env=env, check=True)
        found.append(torch.load(out / "gradients.pt"))
    assert found[0].keys() == commands.keys() and all(found[0].values())
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
