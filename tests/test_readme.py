"""What README.md shows of writing a router works as it stands there."""

import re
import textwrap

import pytest
import torch
from helpers import ROOT, constants

from model import in_place_of_ffn
from routers import ROUTERS


def block_of(text: str, what: str) -> str:
    """The first block of Python that holds this, fenced or indented."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M)
    indented = re.findall(r"(?:^(?: {4}.*)?\n)+", text, re.M)
    blocks = [block for language, block in fenced if language in ("", "py", "python")]
    for block in blocks + [textwrap.dedent(block) for block in indented]:
        if what in block:
            return block
    pytest.fail(f"README.md has no block of Python with {what}")


@pytest.mark.parametrize("own", ["top1_random", "by_position"])
def test_the_routers_of_the_readme_route(own):
    before = dict(ROUTERS)
    ROUTERS.pop(own, None)  # of a reader who has it
    names = {}  # that the block may take for granted
    exec("import torch\nfrom routers import Router, by_rank, router\n", names)
    try:
        exec(block_of((ROOT / "README.md").read_text(encoding="utf-8"), f'@router("{own}")'), names)
        moe = in_place_of_ffn(constants(router=own, expert_ffns=8), 13, "tanh")
        y, balance = moe(torch.randn(2, 16, 8), torch.randint(13, (2, 16)))  # more choices than `most` are an error
        (y.square().sum() + balance).backward()
        assert all(p.grad is not None and p.grad.any() for p in moe.router.parameters())
    finally:
        ROUTERS.clear()
        ROUTERS.update(before)
