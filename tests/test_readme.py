"""The example router and the commands of README.md work as written."""

import importlib
import re
import shlex

import pytest
import torch
from helpers import ROOT, constants

import routers
from engine.config import command_line
from model import xmoe_layer

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?:python|torchrun .*|sbatch .*) (train_\w+|finetune_xtreme)\.py([^#\n]*)", README, re.M)


def test_the_example_router_routes_and_learns(monkeypatch):
    [example] = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)
    monkeypatch.setitem(routers.ROUTERS, "top1_random", None)  # leaves with the test
    exec(example, dict(vars(routers)))  # as if appended to routers.py
    layer = xmoe_layer(constants(router="top1_random", expert_ffns=8), 13, "tanh")
    y, balance = layer(torch.randn(2, 16, 8), torch.randint(13, (2, 16)))
    (y.square().sum() + balance).backward()
    for parameter in layer.router.parameters():
        assert parameter.grad.any()


@pytest.mark.parametrize("script, options", COMMANDS)
def test_every_command_is_accepted(script, options):
    module = importlib.import_module(script)
    command_line(module.Config, module.PRESETS, shlex.split(options))
