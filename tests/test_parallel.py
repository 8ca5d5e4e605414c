"""Training on two processes must equal training on one.

The processes are real, with gloo (see played.py). Starting them takes longer than their work, so they run everything
once, and the test compares their files.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import played as played_by
import pytest
import test_train_electra
import test_train_mlm
import test_train_mt
import torch
from helpers import ROOT, TINY_LM, TORCHRUN, constants, metrics, only_run, result_of, words
from played import CURVES
from test_train_electra import corpora as electra_corpora
from test_train_mt import corpus as mt_corpus
from torch import nn

from engine import parallel, pretrained
from engine.device import Context
from engine.files import load_checkpoint
from model import xmoe_layer

__all__ = ["electra_corpora", "mt_corpus"]  # fixtures


@pytest.fixture(scope="session")
def commands(corpora, electra_corpora, mt_corpus) -> dict[str, tuple[str, dict]]:
    """Decoder, encoders and translator, with dropout and several micro-batches per process and step."""
    size = {"steps": 4, "eval_every": 2, "dtype": "float64", "dropout": 0.1}
    lm = TINY_LM | size | {"data": corpora["a"], "batch_tokens": 512, "router": "hypersphere", "capacity": 0.5}
    mlm = test_train_mlm.TINY | test_train_mlm.EXPERTS | size | {"data": electra_corpora["data"], "batch_tokens": 1024}
    mlm |= {"moe_after": (1, 2), "capacity_factor": 1.0, "learning_rate": 0.05}
    electra = test_train_electra.TINY | test_train_electra.EXPERTS | size | {"router": "topk", "batch_tokens": 1024}
    electra |= {"data": electra_corpora["data"], "pairs": electra_corpora["pairs"]}
    mt = test_train_mt.TINY | size | {"data": mt_corpus, "batch_tokens": 512, "micro_tokens": 64, "expert_ffns": 2}
    xlm = electra | {"objective": "mlm", "generator_layers": 4}  # the default: XLM has no generator
    encoders = {"mlm": ("train_mlm", mlm), "xlm": ("train_electra", xlm), "electra": ("train_electra", electra)}
    bias = lm | {"router": f"{ROOT}/examples/routers_of_today.py:bias", "bias_rate": 0.05}
    return {"lm": ("train_lm", lm), "bias": ("train_lm", bias), "mt": ("train_mt", mt)} | encoders


TOGETHER = {  # run of two processes -> its command and extra options
    "lm": ("lm", dict(recompute=True)),
    "mlm": ("mlm", {}),
    "xlm": ("xlm", {}),
    "lm, compiled": ("lm", dict(compile=True, recompute=True)),
    "bias": ("bias", dict(recompute=True)),  # a router with a state
    "bias, compiled": ("bias", dict(compile=True, recompute=True)),
    "electra": ("electra", {}),
    "mt": ("mt", {}),
}


def run_processes(out: Path, processes: int, commands: list):
    (out / "commands.json").write_text(json.dumps(commands))
    with open(out / "log.txt", "w") as log:
        if processes == 1:
            with pytest.MonkeyPatch.context() as patch, redirect_stdout(log):
                patch.setattr(sys, "argv", [])
                played_by.play(out)
            return
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run([*TORCHRUN, played_by.__file__, str(out)], env=env, stdout=log, stderr=subprocess.STDOUT)
    assert (out / "done").exists(), (out / "log.txt").read_text()


@pytest.fixture(scope="session")
def played(commands, tmp_path_factory) -> dict[int, Path]:
    """{number of processes: folder with their curves, runs and resumed runs}"""
    folders = {processes: tmp_path_factory.mktemp(f"of{processes}-") for processes in (1, 2)}

    def command(processes: int, name: str, extra: dict, begun: str | None = None) -> tuple:
        script, options = commands[TOGETHER.get(name, (name,))[0]]
        out = folders[processes] / (f"resumed {name}" if begun else name)
        return script, words(options | extra | {"out_dir": out}), begun

    todo = {2: [command(2, name, extra) for name, (_, extra) in TOGETHER.items()]}
    todo[1] = [command(1, name, {}) for name in commands]
    for processes in (2, 1):  # both resume a run of two processes
        todo[processes] += [command(processes, name, {}, str(folders[2] / name)) for name in ("lm", "bias")]
        run_processes(folders[processes], processes, todo[processes])
    return folders


def test_two_processes_compute_the_same_as_one(played):
    """A single test, because pytest-xdist would run the processes again for each test."""
    for case in CURVES:
        alone, together = (torch.load(played[number] / f"{number}, {case}.pt") for number in (1, 2))
        assert alone["losses"][-1] < alone["losses"][0] - 0.05
        assert together["losses"] == pytest.approx(alone["losses"], abs=1e-9), case
        torch.testing.assert_close(together["weights"], alone["weights"], rtol=1e-8, atol=1e-8)
        assert together["storages of gradients"] == 1 < alone["storages of gradients"]  # views of DDP's bucket
    assert metrics(played[1] / "lm")[-1]["layers"][0]["cut"] > 0  # some tokens are dropped
    for name, (script, _) in TOGETHER.items():
        check_same_end(played[2] / name, played[1] / script, 2)
    for layer in metrics(played[1] / "mlm")[-1]["layers"]:
        assert layer["cut"] > 0
        assert layer["rf"] > 0
    for processes in (1, 2):  # XLM-E's xl saves memory if DDP's gradients stay in its buckets
        to_none = json.loads((played[processes] / "done").read_text())
        assert to_none == {"train_lm": True, "train_mlm": True, "train_mt": True, "train_electra": processes == 1}
    for processes in (1, 2):  # a run resumes with any number of processes
        for name in ("lm", "bias"):
            folder = played[processes] / f"resumed {name}"
            check_same_end(folder, played[1] / name, processes)
            assert (only_run(folder) / "ckpt.prev.pt").exists()
        assert (played[processes] / "log.txt").read_text().count("goes on from step 3") == 2
    state = load_checkpoint(only_run(played[1] / "bias") / "ckpt.pt")["model"]
    assert state["blocks.1.ffn.router.bias"].abs().max() >= 0.05


def check_same_end(folder: Path, alone: Path, processes: int):
    """Compares all numbers of log and result, the weights and Adam's moments with those of one process."""
    assert result_of(folder)["machine"]["processes"] == processes
    assert only_run(folder).name == only_run(alone).name
    assert flat(metrics(folder)) == pytest.approx(flat(metrics(alone)), rel=1e-6, abs=1e-8)
    assert flat(result_of(folder)) == pytest.approx(flat(result_of(alone)), rel=1e-6, abs=1e-8)
    state, expected = (load_checkpoint(only_run(path) / "ckpt.pt") for path in (folder, alone))
    assert state["class"] == expected["class"]
    torch.testing.assert_close(state["model"], expected["model"], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(state["optimizer"]["state"], expected["optimizer"]["state"], rtol=1e-5, atol=1e-9)
    net, _ = pretrained.load(only_run(folder))
    assert len(net.moe_layers) > 0


def flat(record, path="") -> dict[str, float]:
    """{path: number} of a nested record, without times and process counts."""
    if not isinstance(record, dict | list):
        return {path: record} if isinstance(record, int | float) else {}
    numbers = {}
    for name, part in record.items() if isinstance(record, dict) else enumerate(record):
        if not re.search("second|processes", str(name)):
            numbers |= flat(part, f"{path}/{name}")
    return numbers


def test_processes_do_not_broadcast_buffers(tmp_path):
    """Each counts on its own until `after_step`."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        moe = xmoe_layer(constants(router="hash"), 13, "tanh")
        two = Context(0, 2, torch.device("cpu"), torch.float32)
        forward = parallel.wrap(nn.Sequential(moe, nn.Linear(8, 8)), SimpleNamespace(compile=False), two)
        assert len([*forward.buffers()]) == 1
        assert forward.modules_buffers == []
    finally:
        torch.distributed.destroy_process_group()
