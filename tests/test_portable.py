"""What Windows or macOS lack is needed by no script: they are imported, and say what they can do, without it."""

import subprocess
import sys

from helpers import ROOT

HIDE = """
import os, platform, signal, sys

for name in ("resource", "fcntl"):
    sys.modules[name] = None  # whoever imports it has an ImportError
for module, names in {os: ["fork"], signal: ["SIGKILL", "SIGPIPE", "SIGALRM"]}.items():
    for name in names:
        delattr(module, name)
platform.libc_ver = lambda *_: ("", "")  # and so no mallopt
sys.path.insert(0, ".")
import torch
"""
SCRIPTS = "train_lm train_mlm train_electra train_mt finetune_xtreme analyze data.prepare".split()
SCRIPTS += "tools.bench tools.render tests.soak engine.pretrained".split()


def test_every_script_is_imported_and_train_lm_helps():
    code = f"{HIDE}import {', '.join(SCRIPTS)}; sys.argv = ['train_lm.py', '--help']; train_lm.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--steps INT" in done.stdout
