"""Shared by the tests of the training scripts: running one as a user does, and reading its files."""

import base64
import gc
import gzip
import json
import lzma
import os
import random
import re
import struct
import subprocess
import sys
import zipfile
from collections import ChainMap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.files import load_checkpoint
from engine.run import Run
from routers import ROUTERS

ROOT = Path(__file__).parent.parent
OWN_CODE = [path.read_text() for path in sorted((ROOT / "data").glob("*.py"))]  # text to learn small vocabularies from
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
# The smallest run of train_lm.py with experts, two micro-batches per step and two evaluations.
TINY_LM = dict(n_layer=2, n_head=2, n_embd=16, ffn_size=32, block_size=16, micro_tokens=64, batch_tokens=128, steps=4)
TINY_LM |= dict(eval_every=2, eval_tokens=128, log_every=1, sample_tokens=4, device="cpu", dtype="float32")

# All constants that models and routers read, for even smaller models.
CONSTANTS = dict(n_layer=2, n_head=2, n_embd=8, ffn_size=16, block_size=16, dropout=0.0, init_std=0.1, moe_every=2)
CONSTANTS |= dict(frequency_bias=False, relative_bias=False, expert_ffns=4, split=None, capacity=1.0, moe_after=(1,))
CONSTANTS |= dict(experts=4, expert_size=8, expert_layers=2, top_k=None, capacity_factor=float("inf"), router="switch")
CONSTANTS |= dict(score=None, gate=None, threshold=0.9, routing_dim=None, init_temperature=None, router_std=0.1)
CONSTANTS |= dict(eval_capacity=None, eval_threshold=None, balance_coef=1.0)


PAPERS = "topk", "switch", "hypersphere", "threshold", "base", "hash"  # routers that tests know by heart


def constants(**changes) -> SimpleNamespace:
    """A config for models and routers, with the constants that registered routers define."""
    defined = [cls.constants for cls in ROUTERS.values()]
    return SimpleNamespace(**CONSTANTS | dict(ChainMap(*defined)) | changes)


def balance_of(routing) -> torch.Tensor:
    """The balance loss of a routing, without its weight; 0 if the router has none."""
    zero = torch.zeros((), dtype=routing.probs.dtype)
    return sum((value for _, value in routing.losses.values()), zero)


def lively(module: torch.nn.Module, dtype=torch.float64) -> torch.nn.Module:
    """Makes the parameters large enough for every routing choice to matter."""
    torch.manual_seed(1)
    for name, p in module.named_parameters():
        if name.endswith("temperature"):
            torch.nn.init.constant_(p, 0.4)
        elif p.dim() > 1:
            torch.nn.init.normal_(p, std=0.7)
        else:
            p.data += 0.2 * torch.randn_like(p)
    return module.to(dtype)


def values_and_gradients(outputs, inputs) -> tuple:
    """The outputs and the gradients of their randomly weighted sum."""
    loss = 0.0
    for y in outputs:
        rng = torch.Generator().manual_seed(9)
        weights = torch.randn(y.shape, generator=rng, dtype=torch.float64)
        loss = loss + (y.double() * weights).sum()
    return *outputs, *torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


def write_files(folder: Path, files: dict[str, str | bytes]) -> Path:
    """Writes files into the folder and returns it. Files named .gz or .xz are compressed."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            content = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix.lower(), bytes)(content.encode())
        path.write_bytes(content)
    return folder


def made_up_ranks() -> bytes:
    """As many tokens as GPT-2's: all bytes, then concatenations of an earlier token and a byte."""
    r, tokens = random.Random(0), [bytes([byte]) for byte in range(256)]
    common = [*b" abcdefghijklmnopqrstuvwxyz\n\xc3\xa9", *range(256)]
    known = set(tokens)
    while len(tokens) < 50_256:
        begin = r.choice([32, 97, 256]) % len(tokens)
        token = tokens[r.randrange(begin, len(tokens))] + bytes([r.choice(common)])
        if token not in known and len(token) < 12:
            known.add(token)
            tokens.append(token)
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def save_run(folder: Path, model: torch.nn.Module, tokenizer) -> Path:
    """Writes the checkpoint and tokenizer of a finished run and returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {"step": 1, "class": type(model).__name__, "constants": vars(model.config), "vocab_size": model.vocab_size}
    state |= {"identity": {"tokenizer_checksum": tokenizer.sha256}, "model": model.state_dict()}
    torch.save(state, folder / "ckpt.pt")
    tokenizer.save(folder)
    return folder


def words(options: dict) -> list[str]:
    """The command line of these options."""
    line = []
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        line += [f"--{name}", *map(str, values)]
    return line


def said(text: str) -> list[str]:
    """The lines of stderr without progress bars."""
    lines = re.sub(r"\x1b\[A|\r", "\n", text).splitlines()
    return [line for line in lines if line.strip() and not re.search(r"\d%\||\D/s\b|s/(step|batch)", line)]


class Script:
    """A training script, given as its module."""

    def __init__(self, module):
        self.module, self.name = module, f"{module.__name__}.py"

    def run(self, options: dict, monkeypatch):
        gc.collect()  # releases the lock of a run that was stopped in this process
        monkeypatch.setattr(sys, "argv", [self.name, *words(options)])
        self.module.main()

    def refused(self, options: dict, monkeypatch, capsys) -> str:
        """The one-line error of a run that must be refused."""
        with pytest.raises(SystemExit) as stop:
            self.run(options, monkeypatch)
        lines = said(capsys.readouterr().err)
        assert len(lines) == 1, lines
        assert lines[0].startswith("error: ")
        assert stop.value.code == 1
        return lines[0]

    def rejected(self, options: dict, monkeypatch, capsys) -> str:
        """tyro's message about an invalid command line, without its frame."""
        with pytest.raises(SystemExit) as stop:
            self.run(options, monkeypatch)
        printed = capsys.readouterr()
        assert stop.value.code == 2
        assert not printed.out
        return " ".join(re.sub("[╭╮╰╯│─]", " ", printed.err).split())

    def start(self, options: dict, *launcher: str) -> subprocess.Popen:
        """Starts the script in a separate process."""
        command = [*(launcher or (sys.executable,)), str(ROOT / self.name), *words(options)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        Path(options["out_dir"]).mkdir(exist_ok=True)
        log = open(Path(options["out_dir"], "log.txt"), "w")  # a full pipe would block the run
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, text=True)


def signal_at(step: int, number: int, patch):
    """Sends the run a signal during this step, counted from 0."""

    def due(self, done, due=Run.due):
        if done == step + 1:
            os.kill(os.getpid(), number)
        return due(self, done)

    patch.setattr(Run, "due", due)


def stopped(script: Script, step: int, number: int, options: dict, capsys) -> str:
    """Runs the script, stops it by a signal during this step and returns its stderr without progress bars."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        signal_at(step, number, patch)
        script.run(options, patch)
    assert stop.value.code == 128 + number
    return "\n".join(said(capsys.readouterr().err))


def finish(process: subprocess.Popen, options: dict) -> str:
    """Waits for the process, which must succeed, and returns its output."""
    code, out = process.wait(), Path(options["out_dir"], "log.txt").read_text()
    assert code == 0, out
    return out


def only_run(folder: Path) -> Path:
    (path,) = [path for path in folder.iterdir() if path.is_dir()]
    return path


def result_of(folder: Path) -> dict:
    """result.json of the only run, in strict JSON without Infinity or NaN."""
    return json.loads((only_run(folder) / "result.json").read_text(), parse_constant=pytest.fail)


def saved(options: dict, name: str = "ckpt.pt") -> dict:
    return load_checkpoint(only_run(options["out_dir"]) / name)


def metrics(folder: Path) -> list[dict]:
    lines = (only_run(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def losses(folder: Path) -> list[float]:
    return [record["train_loss"] for record in metrics(folder)]


def table_rows(table: str) -> list[list[str]]:
    rows = []
    for line in table.strip().splitlines()[2:]:
        rows.append([cell.strip() for cell in line.split("|")[1:-1]])
    return rows


def flip_a_byte(file: Path):
    """Flips the middle byte, in a checkpoint that of the largest tensor: padding between tensors has no checksum."""
    data = bytearray(file.read_bytes())
    position = len(data) // 2
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as z:
            largest = max(z.infolist(), key=lambda record: record.file_size)
        name, extra = struct.unpack_from("<2H", data, largest.header_offset + 26)
        position = largest.header_offset + 30 + name + extra + largest.file_size // 2
    data[position] ^= 0xFF
    file.write_bytes(data)
