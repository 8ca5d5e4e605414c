"""What README.md shows of writing a router works as it stands there."""

import re

import pytest
import torch
from helpers import ROOT, constants

from model import xmoe_layer
from routers import ROUTERS


@pytest.mark.parametrize("own", ["top1_random", "by_position"])
def test_the_routers_of_the_readme_route(own, monkeypatch):
    monkeypatch.delitem(ROUTERS, own, raising=False)  # of a reader who has it
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    (block,) = [block for block in blocks if f'@router("{own}")' in block]
    exec(
        "import torch\nfrom routers import Router, by_rank, router\n" + block, {}
    )  # a block may take these for granted
    moe = xmoe_layer(constants(router=own, expert_ffns=8), 13, "tanh")
    ROUTERS.pop(own)
    y, balance = moe(torch.randn(2, 16, 8), torch.randint(13, (2, 16)))  # more choices than `most` are an error
    (y.square().sum() + balance).backward()
    assert all(p.grad is not None and p.grad.any() for p in moe.router.parameters())
