"""Files of runs: which folder is a run's, and what is in it, written whole and checked when it is read."""

import ast
import hashlib
import inspect
import json
import os
import platform
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from engine.config import run_name
from engine.device import fail, warn

CHECKPOINTS = "ckpt.pt", "ckpt.prev.pt"  # the newest, and the one before it
WEIGHTS = "model.pt", *CHECKPOINTS  # the first of them has the best weights of a translator, or of fine-tuning
MADE = *WEIGHTS, "metrics.jsonl", "result.json", "eval-*.json"  # what --resume false deletes
HOLDS = {"model", "class", "constants", "vocab_size", "step", "identity"}  # what every checkpoint has


# ---------------------------------------------------------------------------------------------------------------------
# Which folder is a run's


def folder_of(config, presets: dict, constants: dict) -> tuple[Path, str]:
    """-> the folder of the run with these constants, and why it does not have the plain name ("" if it does).

    The plain name is the preset and what differs from it. If another run has taken it, as after an edit of the script,
    eight digits of a hash of the constants follow. Nothing is searched: to resume a run in another folder, rename that.

    constants: those of `identity`, and checksums of the data. Raises ValueError if config.json is not readable.
    """
    plain = Path(config.out_dir, run_name(config, presets))
    if not any((plain / name).exists() for name in ("config.json", "result.json", *WEIGHTS)):
        return plain, ""
    theirs = read_json(plain / "config.json")
    differing = [*others(theirs, constants)]
    if "data_checksum" in theirs and not differing:
        return plain, ""
    reason = f"{plain} differs in {', '.join(differing)}" if differing else f"{plain} has no config.json of a run"
    known = {name: value for name, value in constants.items() if value is not None}  # without what --eval_only drops
    digits = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:8]
    return plain.with_name(f"{plain.name}-{digits}"), reason


def others(theirs: dict | None, ours: dict) -> Iterator[str]:
    """The names that both have with different values."""
    theirs = theirs if isinstance(theirs, dict) else {}
    return (name for name, value in ours.items() if theirs.get(name, value) != value)


def code_of(config) -> dict[str, str]:
    """Checksums of the code that a run's numbers come from: the script, model.py, routers.py.

    Comments, docstrings and constants at the top of the script do not count: constants are compared by their values.
    """
    kind = type(config)
    modules = {"model": "model.py", "routers": "routers.py", kind.__module__: "the script"}
    python = ".".join(platform.python_version_tuple()[:2])  # which decides how code is written out
    found = {}
    for module, name in modules.items():
        tree = ast.parse(inspect.getsource(sys.modules[module]))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            if isinstance(node, ast.ClassDef) and node.name == kind.__name__ and name == "the script":
                for constant in node.body:
                    if isinstance(constant, ast.AnnAssign):
                        constant.value = None
        if name == "the script":
            tree.body = [node for node in tree.body if not isinstance(node, ast.Assign | ast.AugAssign)]
        found[f"{name} (Python {python})"] = hashlib.sha256(ast.unparse(tree).encode()).hexdigest()
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Reading and writing


def read_json(file: Path) -> dict:
    """What a file holds; {} where there is none. Raises ValueError where it holds no JSON object."""
    if not file.exists():
        return {}
    try:
        return dict(**from_json(file.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is not readable JSON, or no object ({error}): delete it or restore it") from None


NO_NUMBER = "-?Infinity|NaN"  # in JSON: Python writes them all the same, and few others read them
TEXT = r'"(?:[^"\\]|\\.)*"'  # where it may be a word


def to_json(content, indent: int | None = 1) -> str:
    text = json.dumps(content, indent=indent)
    return re.sub(f"{TEXT}|({NO_NUMBER})", lambda found: f'"{found[1]}"' if found[1] else found[0], text)


def from_json(text: str):
    """What `to_json`, or Python's own, wrote."""
    return json.loads(re.sub(rf'"({NO_NUMBER})"(?!\s*:)', r"\1", text))


def write(file: Path, content: dict | str | bytes):
    """Weights, JSON, text or bytes; the file takes its name when it is whole and on disk. Errors end as one line."""
    part = file.with_name(f"{file.name}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as f:
            if file.suffix == ".pt":
                torch.save(content, f)
            elif isinstance(content, dict):
                f.write(to_json(content).encode())
            else:
                f.write(content if isinstance(content, bytes) else content.encode())
            f.flush()
            os.fsync(f.fileno())
        if file.name == CHECKPOINTS[0] and file.exists():
            file.replace(file.with_name(CHECKPOINTS[1]))
        part.replace(file)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):  # where the disk is gone for good
            part.unlink()
        cause = error.__context__ or error  # torch hides the reason
        fail(f"{file} cannot be written ({cause}): what was saved before is whole")


def load_checkpoint(file: Path) -> dict:
    """Raises ValueError where the file is damaged, which torch alone may miss, or holds something else."""
    try:
        with zipfile.ZipFile(file) as z:
            if z.testzip():
                raise ValueError("a checksum differs")
        shared = os.name == "posix"  # the processes of a node share it; Windows renames no file that is mapped
        state = torch.load(file, "cpu", weights_only=True, mmap=shared)
        if not state.keys() >= HOLDS:
            raise ValueError("it holds something else")
        return state
    except Exception as error:  # damage shows itself in a dozen ways
        raise ValueError(f"checkpoint {file} is corrupt ({error})") from None


def newest(folder: Path, names=CHECKPOINTS) -> tuple[str, dict]:
    """-> name and content of the first of these checkpoints that is sound, on the CPU; "" and {} if there are none.

    Raises ValueError if there are some, and none is sound.
    """
    damaged = ""
    for file in filter(Path.exists, map(folder.joinpath, names)):
        try:
            state = load_checkpoint(file)
        except ValueError as error:
            damaged += f"{error}; "
            continue
        if damaged:
            warn(f"{damaged}using {file.name}")
        return file.name, state
    if damaged:
        raise ValueError(f"{damaged}no other is left: training with --resume false starts again")
    return "", {}
