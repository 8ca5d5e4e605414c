"""Files of runs: which folder belongs to a run, atomic writes, and checkpoints that are verified when read."""

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
from routers import find_router

CHECKPOINTS = "ckpt.pt", "ckpt.prev.pt"  # the newest and the previous one
WEIGHTS = "model.pt", *CHECKPOINTS  # model.pt: the best weights in translation or fine-tuning
MADE = *WEIGHTS, "metrics.jsonl", "result.json", "eval-*.json"  # deleted by --resume false
HOLDS = {"model", "class", "constants", "vocab_size", "step", "identity"}  # keys of every checkpoint


def folder_of(config, presets: dict, constants: dict) -> tuple[Path, str]:
    """-> the folder of the run with these constants, and why it does not have the plain name ("" if it does).

    The plain name is `run_name`. If another run has taken it, for example before a default was edited, eight digits of
    a hash of the constants are appended. To resume a run in a folder with any other name, rename the folder.
    """
    plain = Path(config.out_dir, run_name(config, presets))
    if not any((plain / name).exists() for name in ("config.json", "result.json", *WEIGHTS)):
        return plain, ""
    recorded = read_json(plain / "config.json")
    names = [*differing(recorded, constants)]
    if "data_checksum" in recorded and not names:
        return plain, ""
    reason = f"{plain} differs in {', '.join(names)}" if names else f"{plain} has no config.json of a run"
    known = {name: value for name, value in constants.items() if value is not None}  # --eval_only omits some None
    digits = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:8]
    return plain.with_name(f"{plain.name}-{digits}"), reason


def differing(recorded: dict | None, current: dict) -> Iterator[str]:
    """The names in both whose values differ."""
    recorded = recorded if isinstance(recorded, dict) else {}
    return (name for name, value in current.items() if recorded.get(name, value) != value)


def code_of(config) -> dict[str, str]:
    """Checksums of model.py, the run's router and the script, without comments, docstrings and the script's Config."""
    Config = type(config)
    router = getattr(config, "router", "") or read_json(Path(config.model, "config.json")).get("router", "dense")
    used = set() if router == "dense" else {cls.__name__ for cls in find_router(router).__mro__}
    modules = {"model": "model.py", "routers": "routers.py", Config.__module__: "the script"}
    python = ".".join(platform.python_version_tuple()[:2])  # ast.unparse depends on it
    checksums = {}
    sources = {name: inspect.getsource(sys.modules[module]) for module, name in modules.items()}
    file, _, _ = router.rpartition(":")
    if file:  # a router in a file of its own
        sources[file] = Path(file).read_text()
    for name, source in sources.items():
        tree, note = ast.parse(source), ""
        if name == "the script":
            code = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
            tree.body = [node for node in code if node.name != Config.__name__]
        elif name != "model.py":
            other = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name not in used]
            tree.body = [node for node in tree.body if node not in other or not node.decorator_list]
            note = ", without other routers"
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        checksums[f"{name} (Python {python}{note})"] = hashlib.sha256(ast.unparse(tree).encode()).hexdigest()
    return checksums


def read_json(file: Path) -> dict:
    """The content of a file, {} if it does not exist. Raises ValueError if that is not a JSON object."""
    if not file.exists():
        return {}
    try:
        return dict(**from_json(file.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is not readable JSON, or not an object ({error}): delete it or restore it") from None


NOT_JSON = "-?Infinity|NaN"  # Python's json writes them bare; JSON has no such numbers, so we write strings
STRING = r'"(?:[^"\\]|\\.)*"'  # text within strings is left as it is


def to_json(content, indent: int | None = 1) -> str:
    text = json.dumps(content, indent=indent)
    return re.sub(f"{STRING}|({NOT_JSON})", lambda match: f'"{match[1]}"' if match[1] else match[0], text)


def from_json(text: str):
    """Reads what `to_json` or json.dumps wrote."""
    return json.loads(re.sub(rf'"({NOT_JSON})"(?!\s*:)', r"\1", text))


def write(file: Path, content: dict | str | bytes):
    """Writes weights, JSON, text or bytes, and renames the file into place once it is on disk. Errors are one line."""
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
        with suppress(OSError):  # the disk may be gone
            part.unlink()
        cause = error.__context__ or error  # torch hides the cause
        fail(f"{file} cannot be written ({cause}): what was saved before is intact")


def load_checkpoint(file: Path) -> dict:
    """Raises ValueError if the file is damaged, which torch alone may miss, or is not a checkpoint of ours."""
    try:
        with zipfile.ZipFile(file) as z:
            if z.testzip():
                raise ValueError("a checksum differs")
        shared = os.name == "posix"  # processes of a node share the pages; Windows cannot rename a mapped file
        state = torch.load(file, "cpu", weights_only=True, mmap=shared)
        if not state.keys() >= HOLDS:
            raise ValueError("it holds something else")
        return state
    except Exception as error:  # damage raises many kinds of errors
        raise ValueError(f"checkpoint {file} is corrupt ({error})") from None


def newest(folder: Path, names=CHECKPOINTS) -> tuple[str, dict]:
    """-> name and content of the first intact checkpoint; "" and {} if none exists, ValueError if all are damaged."""
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
        hint = ": --resume false trains from the start" if names is CHECKPOINTS else ""
        raise ValueError(f"{damaged}no other is left{hint}")
    return "", {}
