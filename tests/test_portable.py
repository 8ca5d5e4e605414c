"""What Windows or macOS lack is needed by no script, and what is installed is what the project needs, no more."""

import os
import re
import subprocess
import sys
import tomllib

from helpers import ROOT

HIDE = """
import os, platform, signal, sys

import torch.distributed.checkpoint.state_dict  # torch knows Windows and macOS by their names
for name in ("resource", "fcntl"):
    sys.modules[name] = None  # whoever imports it has an ImportError
for module, names in {os: ["fork"], signal: ["SIGKILL", "SIGPIPE", "SIGALRM"]}.items():
    for name in names:
        delattr(module, name)
platform.libc_ver = lambda *_: ("", "")  # and so no mallopt
sys.path.insert(0, ".")
"""
SCRIPTS = "train_lm train_mlm train_electra train_mt finetune_xtreme analyze data.prepare".split()
SCRIPTS += "tools.bench tools.render tests.soak engine.pretrained".split()


def test_every_script_is_imported_and_train_lm_helps():
    code = f"{HIDE}import {', '.join(SCRIPTS)}; sys.argv = ['train_lm.py', '--help']; train_lm.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--steps INT" in done.stdout


def requirements(text: str) -> dict[str, str]:
    """{name: its line}"""
    return {re.match(r"[\w-]+", line)[0]: line for line in text.splitlines() if line and line[0] not in "#-"}


def test_a_torch_that_is_there_is_kept(tmp_path):
    """What README says to type then gives pip all the rest."""
    [line] = re.findall(r"^(grep .*) && python train_lm.py$", (ROOT / "README.md").read_text(), re.M)
    (tmp_path / "pip").write_text(f'#!/bin/sh\ncat "$3" > {tmp_path}/given\n')
    (tmp_path / "pip").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", line], cwd=ROOT, env=env, check=True)
    core = requirements((ROOT / "requirements.txt").read_text())
    assert core.pop("torch") and requirements((tmp_path / "given").read_text()) == core


def test_what_pip_installs_is_what_the_project_needs():
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())
    core, extras = said["project"]["dependencies"], said["project"]["optional-dependencies"].values()
    for file, names in {"requirements.txt": core, "requirements-dev.txt": sum(extras, [])}.items():
        assert requirements((ROOT / file).read_text()).keys() == requirements("\n".join(names)).keys()
    assert said["tool"]["setuptools"] == {"packages": []}
