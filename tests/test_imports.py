"""Imports go one way, from top to bottom: scripts, figures, measures, engine/ and data/, model.py, routers.py."""

import ast
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from helpers import ROOT

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
