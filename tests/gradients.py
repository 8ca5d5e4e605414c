"""The gradient of each script's first step, as these processes make it: python gradients.py FOLDER."""

import importlib
import json
import sys
from pathlib import Path

import torch

from engine import parallel
from engine.config import command_line
from engine.device import setup


class Stepped(Exception):
    """The gradient is there, and that is all."""


def first_gradient(name: str, line: list[str]) -> dict[str, torch.Tensor]:
    found, script = {}, importlib.import_module(name)

    def keep(model, limit):
        found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        raise Stepped

    parallel.clip_grad_norm_ = keep
    config = command_line(script.Config, script.PRESETS, line)
    try:
        script.train(config, setup(config.device, config.dtype))
    except Stepped:
        return found


if __name__ == "__main__":
    out = Path(sys.argv[1])
    commands = json.loads((out / "commands.json").read_text())
    gradients = {name: first_gradient(name, line) for name, line in commands.items()}
    context = setup("cpu", "float64")
    if context.rank == 0:
        torch.save(gradients, out / "gradients.pt")
    context.barrier()
