"""Imports go one way, from top to bottom: scripts, figures, measures, engine/ and data/, model.py, routers.py."""

import ast
import json
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import helpers
import pytest
from helpers import ROOT, save_run, write_files

from model import MaskedLM

FOLDERS = "engine", "data", "metrics", "analysis", "tools"
FILES = [*ROOT.glob("*.py"), *(file for folder in FOLDERS for file in (ROOT / folder).glob("[!_]*.py"))]
MODULES = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in FILES}
HEIGHTS = {"routers": 0, "model": 1, "engine": 2, "data": 2, "metrics": 3, "analysis": 4}  # scripts: 5
LOADED = """
import sys
from torch._dynamo import config as dynamo
from torch._functorch import config as functorch
from torch._inductor import config as inductor

before = [config.get_config_copy() for config in (dynamo, functorch, inductor)]
import train_lm

after = [config.get_config_copy() for config in (dynamo, functorch, inductor)]
assert after == before, "an import changes how torch compiles in the whole program"
print(*(getattr(module, "__file__", None) for module in list(sys.modules.values())), sep="\\n")
"""


def height(name: str) -> int:
    folder, *_ = name.split(".")
    return HEIGHTS.get(name, HEIGHTS.get(folder, 5))


def imports(name: str) -> set[str]:
    """The modules of this project that a module imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = f"{name.rsplit('.', node.level)[0]}." * bool(node.level) + (node.module or "")
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names & MODULES.keys()


def test_no_import_goes_up():
    up = [(name, other) for name in MODULES for other in imports(name) if height(other) > height(name)]
    assert not up
    assert "engine.run" in imports("train_lm")
    assert "data.prepare" in imports("data.folder")


def test_there_are_no_circular_imports():
    graph = {name: imports(name) for name in MODULES}
    assert {*TopologicalSorter(graph).static_order()} == MODULES.keys()


REQUIRED = """
import re, sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

queue, required = re.findall(r"^([\\w-]+)==", open("requirements.txt").read(), re.M), set()
while queue:
    name = re.sub("[-_.]+", "-", queue.pop().lower())
    if name not in required:
        required.add(name)
        try:
            lines = [line for line in requires(name) or () if "extra ==" not in line]
        except PackageNotFoundError:  # for another system
            continue
        queue += [re.match(r"[\\w.-]+", line)[0] for line in lines]
modules = {}
for module, packages in packages_distributions().items():
    modules[module] = {re.sub("[-_.]+", "-", package.lower()) for package in packages} & required


def find_spec(name, path=None, target=None, find_spec=PathFinder.find_spec):
    return find_spec(name, path, target) if modules.get(name.partition(".")[0], True) else None


PathFinder.find_spec = find_spec
"""
RUN = f"""{REQUIRED}
import runpy

sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory, xlmr) -> dict[str, str]:
    """A run, a model in Hugging Face's format, and a folder of parquet files."""
    base = tmp_path_factory.mktemp("folders")
    model = MaskedLM(helpers.constants(router="dense", recompute=False), xlmr.vocab_size)
    save_run(base / "run", model, xlmr)
    config = {"model_type": "nanoxmoe", "trained": "GPT", "constants": {}, "vocab_size": 9}
    write_files(base / "hf", {"config.json": json.dumps(config), "model.safetensors": b"?"})
    write_files(base / "texts", {f"{split}.parquet": b"?" for split in ("train", "valid", "test")})
    return {path.name: str(path) for path in base.iterdir()} | {"out": str(base / "new")}


MISSING = {  # commands that need more than requirements.txt -> the module that they miss
    "engine.pretrained export {run} {out}": "safetensors",
    "finetune_xtreme --model {hf} --preset ciphers-tags --device cpu": "safetensors",
    "finetune_xtreme --model {run} --preset xlme-pos": "datasets",
    "data.prepare openwebtext --out {out} --tokenizer {run}": "datasets",
    "data.prepare opus100 --out {out} --tokenizer {run}": "datasets",
    "data.prepare text --source {texts} --out {out}": "pyarrow",
}


@pytest.mark.parametrize("command", MISSING)
def test_a_missing_package_is_one_error_that_names_the_command(command, folders):
    line = [word.format(**folders) for word in command.split()]
    done = subprocess.run([sys.executable, "-c", RUN, *line], cwd=ROOT, capture_output=True, text=True)
    module = MISSING[command]
    message = rf"error: {module}[.\w]* is not installed: pip install -r requirements-dev\.txt"
    assert re.fullmatch(message, done.stderr.splitlines()[-1]), done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


def test_every_module_imports_under_the_requirements_alone():
    names = sorted(MODULES.keys() - {"engine.hf_model", "engine.hf_tokenizer"})
    code = f"{REQUIRED}\nimport importlib\nfor name in {names}:\n    importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)


def test_a_script_loads_only_what_it_needs():
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {*done.stdout.splitlines()} & {*map(str, FILES)}
    assert str(ROOT / "model.py") in loaded
    assert len(loaded) <= 20, sorted(loaded)


@pytest.mark.parametrize("name", [name for name in MODULES if "__main__" in MODULES[name].read_text()])
def test_a_script_imports_engine_before_torch(name):
    lines = re.findall(r"^(?:import|from) (\w+)", MODULES[name].read_text(), re.M)
    first, *_ = [line for line in lines if line not in {"tyro"} | sys.stdlib_module_names]
    assert first == "engine" or height(first) == 5


@pytest.mark.parametrize(
    "variables, load, count",
    [
        ({}, "(0.5, 0, 0)", "30000"),
        ({}, "(1e5, 0, 0)", "1000"),
        ({}, "open('')", "30000"),  # OSError: the system has no load average
        ({"GOMP_SPINCOUNT": "7"}, "(1e5, 0, 0)", "7"),
        ({"OMP_WAIT_POLICY": "active"}, "(1e5, 0, 0)", "30000000000"),
    ],
)
def test_the_spin_count_depends_on_the_load_unless_the_user_sets_it(variables, load, count):
    code = f"import os; os.getloadavg = lambda: {load}; import train_lm"
    env = {name: os.environ[name] for name in os.environ if not name.startswith(("OMP_", "GOMP_"))}
    env |= variables | {"OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    counts = {*re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)}
    if not counts:
        pytest.skip("this torch does not use GNU OpenMP")
    assert counts == {count}
