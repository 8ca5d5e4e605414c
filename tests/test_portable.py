"""Scripts need nothing that Windows or macOS lack, and the requirements are exactly what the project needs."""

import os
import re
import subprocess
import sys
import tomllib

from helpers import ROOT

HIDE = """
import os, platform, signal, sys

import torch.distributed.checkpoint.state_dict  # imported first, since torch checks the name of the system
for name in ("resource", "fcntl"):
    sys.modules[name] = None  # importing it raises ImportError
for module, names in {os: ["fork"], signal: ["SIGKILL", "SIGPIPE", "SIGALRM"]}.items():
    for name in names:
        delattr(module, name)
platform.libc_ver = lambda *_: ("", "")  # no mallopt
sys.path.insert(0, ".")
"""
SCRIPTS = "train_lm train_mlm train_electra train_mt finetune_xtreme analyze data.prepare".split()
SCRIPTS += "tools.bench tools.render tests.soak engine.pretrained".split()


def test_every_script_imports_without_unix_modules():
    code = f"{HIDE}import {', '.join(SCRIPTS)}; sys.argv = ['train_lm.py', '--help']; train_lm.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--steps INT" in done.stdout


def requirements(text: str) -> dict[str, str]:
    """{name: its line}"""
    return {re.match(r"[\w-]+", line)[0]: line for line in text.splitlines() if line and line[0] not in "#-"}


def test_the_readme_command_without_torch_installs_everything_else(tmp_path):
    [line] = re.findall(r"^(grep .*) && python train_lm.py$", (ROOT / "README.md").read_text(), re.M)
    (tmp_path / "pip").write_text(f'#!/bin/sh\ncat "$3" > {tmp_path}/installed\n')
    (tmp_path / "pip").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", line], cwd=ROOT, env=env, check=True)
    core = requirements((ROOT / "requirements.txt").read_text())
    del core["torch"]
    assert requirements((tmp_path / "installed").read_text()) == core


def test_requirements_files_and_pyproject_list_the_same_packages():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    core = pyproject["project"]["dependencies"]
    extras = pyproject["project"]["optional-dependencies"].values()
    for file, names in {"requirements.txt": core, "requirements-dev.txt": sum(extras, [])}.items():
        assert requirements((ROOT / file).read_text()).keys() == requirements("\n".join(names)).keys()
    assert pyproject["tool"]["setuptools"] == {"packages": []}
