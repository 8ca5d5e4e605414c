"""Experts on several processes and weights in pieces, held against one process that has everything.

The exchange alone is played by threads. The rest is done by real processes on gloo, see played.py: starting them takes
longer than what they do, so they do everything at once and the tests look at what they leave behind.
"""

import copy
import json
import math
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import played as played_by
import pytest
import test_train_electra
import test_train_mlm
import test_train_mt
import torch
from helpers import ROOT, TINY_LM, TORCHRUN, Script, metrics, only_run, result_of, values_and_gradients, words
from played import CURVES, SOME, WAYS
from test_train_electra import corpora as electra_corpora
from test_train_mt import corpus as mt_corpus
from torch import nn

import model
import train_lm
from engine import parallel, pretrained
from engine.files import load_checkpoint
from engine.run import numbers
from model import MoE
from routers import ROUTERS

__all__ = ["electra_corpora", "mt_corpus"]  # fixtures


class Played(parallel.Exchange):
    """The exchange of one of N threads; what they send each other stays differentiable."""

    def __init__(self, rank: int, N: int, R: int, hall: SimpleNamespace):
        super().__init__(SimpleNamespace(size=lambda: N), R)
        self.rank, self.hall = rank, hall

    def to_all(self, x):
        N = self.mesh.size()
        assert len(x) % N == 0
        self.hall.sent[self.rank] = x.split(len(x) // N)
        self.hall.barrier.wait(60)
        got = torch.cat([self.hall.sent[other][self.rank] for other in range(N)])
        self.hall.barrier.wait(60)
        assert len(got) == len(x)  # equal parts
        return got


def layer(name: str, gamma: float, K: int = 1, layers: int = 0) -> MoE:
    """Eight experts of 8 units for tokens of width 16."""
    config = train_lm.Config(n_embd=16, router=name)
    chooser = ROUTERS[name](config, E=8, K=K, V=50, x_moe=layers > 0)
    moe = MoE(chooser, 16, 8, "tanh", gamma=gamma, eval_gamma=gamma, layers=layers)
    for p in moe.parameters():
        nn.init.normal_(p, std=0.5)
    return moe


def piece(moe: MoE, rank: int, N: int) -> MoE:
    """A layer with the same router, and the rank's part of the same experts."""
    part = copy.deepcopy(moe)
    part.router = moe.router
    for mine, whole in zip([*part.experts, *part.norms], [*moe.experts, *moe.norms]):
        for name, p in whole.named_parameters():
            delattr(mine, name)
            setattr(mine, name, p.chunk(N)[rank])
    return part


LAYERS = {
    "threshold, drops": dict(name="threshold", gamma=1.0),
    "threshold, no limit": dict(name="threshold", gamma=math.inf),
    "topk": dict(name="topk", gamma=1.5, K=3),
    "stacks, drops": dict(name="hypersphere", gamma=0.5, layers=2),
    "hash": dict(name="hash", gamma=1.0),
    "expert_choice": dict(name="expert_choice", gamma=2.0),
}


@pytest.mark.parametrize("asks", [True, False], ids=["asks", "asks nobody"])
@pytest.mark.parametrize("N", [2, 4])
@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_exchange_changes_nothing(case, N, asks, dtype, unwritten_is_nan, monkeypatch):
    """Outputs and all gradients, of micro-batches of different sizes; with spare rows, as on a GPU, too."""
    monkeypatch.setattr(model, "may_ask", lambda x: asks)
    torch.manual_seed(0)
    moe = layer(**LAYERS[case]).to(dtype)
    inputs, ids = [], []
    for S in [24, 17, 9, 1][:N]:
        inputs.append(torch.randn(1, S, 16, dtype=dtype).requires_grad_())
        ids.append(torch.randint(50, (1, S)))
    given = [*inputs, *moe.parameters()]
    alone = values_and_gradients([moe(h, own)[0] for h, own in zip(inputs, ids)], given)

    hall = SimpleNamespace(sent=[None] * N, barrier=threading.Barrier(N))
    parts = [piece(moe, rank, N) for rank in range(N)]
    for rank, part in enumerate(parts):
        part.exchange = Played(rank, N, moe.most_rows(24, 8 // N), hall)

    def forward(rank):
        return parts[rank](inputs[rank], ids[rank])[0]

    with ThreadPoolExecutor(N) as pool:
        together = values_and_gradients(list(pool.map(forward, range(N))), given)
    near = 1e-9 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(together, alone, rtol=near, atol=near)


@pytest.fixture(scope="session")
def commands(corpora, electra_corpora, mt_corpus) -> dict[str, tuple[str, dict]]:
    """A decoder, two encoders and both, with two micro-batches a process and step, and dropout."""
    size = {"steps": 4, "eval_every": 2, "dtype": "float64", "dropout": 0.1}
    lm = TINY_LM | size | {"data": corpora["a"], "batch_tokens": 512, "router": "hypersphere", "capacity": 0.5}
    mlm = test_train_mlm.TINY | test_train_mlm.EXPERTS | size | {"data": electra_corpora["data"], "batch_tokens": 1024}
    mlm |= {"moe_after": (1, 2), "capacity_factor": 1.0, "learning_rate": 0.05}
    electra = test_train_electra.TINY | test_train_electra.EXPERTS | size | {"router": "topk", "batch_tokens": 1024}
    electra |= {"data": electra_corpora["data"], "pairs": electra_corpora["pairs"]}
    mt = test_train_mt.TINY | size | {"data": mt_corpus, "batch_tokens": 512, "micro_tokens": 64, "expert_ffns": 2}
    xlm = electra | {"objective": "mlm", "generator_layers": 2}  # the last is its default: nothing reads it
    found = {"lm": ("train_lm", lm), "mlm": ("train_mlm", mlm), "xlm": ("train_electra", xlm)}
    return found | {"electra": ("train_electra", electra), "mt": ("train_mt", mt)}


TOGETHER = {  # run of four processes -> its command, and how
    "lm, whole": ("lm", {}),
    "mlm": ("mlm", {}),
    "xlm": ("xlm", {}),
    "electra, whole": ("electra", {}),
    "lm": ("lm", dict(expert_parallel=4)),
    "lm, shard": ("lm", dict(shard=True, recompute=True)),
    "electra": ("electra", dict(expert_parallel=2, shard=True)),
    "mt": ("mt", dict(expert_parallel=4, shard=True)),
}
RESUMED = {  # processes -> the run of four processes that they go on with, and how
    1: [("lm, shard", {})],
    2: [("lm, shard", {}), ("lm", dict(shard=True)), ("lm, shard", dict(expert_parallel=2))],
    4: [("lm, shard", dict(expert_parallel=2, shard=True))],
}


def let_play(out: Path, processes: int, commands: list):
    (out / "commands.json").write_text(json.dumps(commands))
    with open(out / "log.txt", "w") as log:
        if processes == 1:
            with pytest.MonkeyPatch.context() as patch, redirect_stdout(log):
                patch.setattr(sys, "argv", [])
                played_by.play(out)
            return
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [*TORCHRUN[:-1], str(processes), played_by.__file__, str(out)]
        subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    assert (out / "done").exists(), (out / "log.txt").read_text()


@pytest.fixture(scope="session")
def played(commands, tmp_path_factory) -> dict[int, Path]:
    """Processes -> the folder of what so many of them did: their curves, their runs and what they went on with."""
    folders = {processes: tmp_path_factory.mktemp(f"of{processes}-") for processes in (1, 2, 4)}

    def given(processes: int, name: str, how: dict, begun: str | None = None) -> tuple:
        script, options = commands[TOGETHER.get(name, (name,))[0]]
        out = folders[processes] / (f"resumed {name} {how}" if begun else name)
        return script, words(options | how | {"out_dir": out}), begun

    todo = {1: [given(1, name, {}) for name in commands], 2: [], 4: []}
    todo[4] = [given(4, name, how) for name, (_, how) in TOGETHER.items()]
    for processes, resumed in RESUMED.items():
        todo[processes] += [given(processes, name, how, str(folders[4] / name)) for name, how in resumed]
    for processes in (4, 2, 1):
        let_play(folders[processes], processes, todo[processes])
    return folders


def test_processes_compute_what_one_does(played):
    """One test, since what they did is shared: pytest-xdist would have it done again for each that looks at it."""
    for processes in (2, 4):
        for name in WAYS[processes]:
            for case in SOME.get(name, CURVES):
                same_curve(played, processes, name, case)
    assert metrics(played[1] / "lm")[-1]["layers"][0]["cut"] > 0  # under a limit that drops
    for name, (script, _) in TOGETHER.items():
        same_end(played[4] / name, played[1] / script, 4)
    for layer in metrics(played[1] / "mlm")[-1]["layers"]:
        assert layer["cut"] > 0 and layer["rf"] > 0
    for processes, resumed in RESUMED.items():  # a run goes on with any number of them
        for name, how in resumed:
            folder = played[processes] / f"resumed {name} {how}"
            same_end(folder, played[1] / TOGETHER[name][0], processes)
            assert (only_run(folder) / "ckpt.prev.pt").exists()
        assert (played[processes] / "log.txt").read_text().count("goes on from step 2") == len(resumed)


def same_curve(played, processes: int, name: str, case: str):
    """Every loss, the weights in the end, and what a process holds."""
    alone = torch.load(played[1] / f"alone, {case}.pt")
    together = torch.load(played[processes] / f"{name}, {case}.pt")
    assert alone["losses"][-1] < alone["losses"][0] - 0.05
    assert together["losses"] == pytest.approx(alone["losses"], abs=1e-9), (name, case)
    torch.testing.assert_close(together["weights"], alone["weights"], rtol=1e-8, atol=1e-8)
    assert together["weights"].keys() == alone["weights"].keys()
    way = WAYS[processes][name]
    (experts, everything), (all_experts, whole) = together["bytes"], alone["bytes"]
    parts = way.get("expert_parallel", 1)
    if parts > 1:
        assert experts == all_experts / parts
        everything, whole = everything - experts, whole - all_experts
    if "shard" in way:  # routers are whole everywhere
        assert everything < 1.3 * whole / processes


def same_end(folder: Path, alone: Path, processes: int):
    """Every number of the log and the result, the weights and Adam's moments are those of one process."""
    assert result_of(folder)["machine"]["processes"] == processes
    assert only_run(folder).name == only_run(alone).name
    assert flat(metrics(folder)) == pytest.approx(flat(metrics(alone)), rel=1e-6, abs=1e-8)
    assert flat(result_of(folder)) == pytest.approx(flat(result_of(alone)), rel=1e-6, abs=1e-8)
    ours, theirs = (load_checkpoint(only_run(path) / "ckpt.pt") for path in (folder, alone))
    assert ours["class"] == theirs["class"]
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(ours["optimizer"]["state"], theirs["optimizer"]["state"], rtol=1e-5, atol=1e-9)
    net, _ = pretrained.load(only_run(folder))
    assert len(net.moe_layers) > 0 and all(moe.exchange is None for moe in net.moe_layers)


def flat(record) -> dict[str, float]:
    """Its numbers, but those of time and of who did it."""
    others = "second|processes|expert_parallel|shard"
    return {name: x for name, x in numbers(record) if not re.search(others, name)}


def test_one_line_says_what_cannot_be_shared_out(corpora, tmp_path, monkeypatch, capsys):
    options = TINY_LM | {"data": corpora["a"], "out_dir": tmp_path}
    script = Script(train_lm)
    alone = script.refused(options | {"expert_parallel": 4}, monkeypatch, capsys)
    assert "expert_parallel = 4 does not divide the number of processes, 1" in alone
    dense = script.refused(options | {"expert_parallel": 4, "router": "dense"}, monkeypatch, capsys)
    assert "--expert_parallel is not read with --router dense" in dense
    mesh = {"expert": SimpleNamespace(size=lambda: 3)}
    net = train_lm.GPT(train_lm.Config(**options), 40)
    with pytest.raises(ValueError, match="expert_parallel = 3 does not divide the number of experts, 32"):
        parallel.share_experts(net, mesh, 64)
