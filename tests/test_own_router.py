"""What a layer, a model, the FLOPs and train_lm.py know of a router of one's own."""

import re
import signal

import pytest
import torch
from helpers import ROOT, TINY_LM, Script, constants, lively, losses, saved, stopped, values_and_gradients

import model
import train_lm
from metrics.flops import moe_flops, served_rows
from model import xmoe_layer
from routers import NOT_CHOSEN, ROUTERS, Router, Routing, balance_loss, by_rank, one_hot, router

OWN = ("own_random", "own_soft", "own_id")


@pytest.fixture(scope="module", autouse=True)
def registered():
    """README's first one and the routers below, for this file alone."""
    before = dict(ROUTERS)
    [block] = re.findall(r'^(@router\("top1_random"\)\n.*?)^```', (ROOT / "README.md").read_text(), re.S | re.M)
    exec(block, globals() | {"router": lambda name: router("own_random")})

    @router("own_soft")
    class SoftThreshold(Router):
        """Every expert at least half as probable as the best one; the weights of the chosen sum to 1."""

        split, K = 4, None

        def choose(self, score, probs):
            enough = probs >= probs.max(dim=1, keepdim=True).values / 2
            return torch.where(enough, probs, NOT_CHOSEN)

        def forward(self, h, ids=None):
            routing = super().forward(h, ids)
            return routing._replace(weight=routing.weight / routing.weight.sum(dim=1, keepdim=True))

    @router("own_id")
    class ById(Router):
        """The expert of the token id modulo E, weighted by its probability."""

        reads = {"router_std"}

        def forward(self, h, ids=None):
            probs = self.scores(h.to(self.experts.dtype)).softmax(dim=1)
            chosen = one_hot(ids % self.E, self.E)
            priority = torch.where(chosen, probs.detach(), NOT_CHOSEN)
            return Routing(torch.where(chosen, probs, 0.0), priority, balance_loss(chosen, probs), probs)

    yield
    ROUTERS.clear()
    ROUTERS.update(before)


def layer(name: str, **changes):
    """XMoE's layer with this router: dense FFNs would have 32 units."""
    return lively(xmoe_layer(constants(router=name, ffn_size=32, **changes), 13, "tanh"))


def tokens(B: int, T: int):
    rng = torch.Generator().manual_seed(0)
    return torch.randn(B, T, 8, generator=rng, dtype=torch.float64), torch.randint(2, (B, T), generator=rng)


SIZES = {  # by hand: experts, units of an expert, experts that a token may choose, rows per token at full capacity
    "own_random": (8, 16, 2, 2),
    "own_soft": (16, 8, 16, 4),
    "own_id": (4, 32, 1, 1),
}


@pytest.mark.parametrize("name", OWN)
def test_its_split_says_experts_capacity_and_flops(name):
    moe, (E, F, most, served) = layer(name), SIZES[name]
    assert (moe.router.E, moe.experts.w_in.shape, moe.router.K) == (E, (E, F, 8), most)
    assert moe.capacity_factor == moe.eval_capacity_factor == E / 4 and moe.capacity(48) == 48 // 4  # gamma S / E
    assert served_rows(moe) == served
    assert moe_flops(moe) == 2 * (8 * E + 32 * 8 * 2)  # the router, and one dense FFN's work
    doubled = layer(name, capacity=2.0, split=1)
    assert (doubled.router.E, doubled.capacity_factor, doubled.experts.w_in.shape[1]) == (4, 2.0, 32)


@pytest.mark.parametrize("name", OWN)
def test_each_expert_keeps_the_first_of_those_that_choose_it(name, monkeypatch):
    """And a GPU makes room for what is chosen."""
    moe, (h, ids), seen, results = layer(name, capacity=0.5), tokens(2, 24), [], []
    moe.watchers.append(lambda moe, h, routing, kept: seen.append((routing, kept)))
    for may_sync in (True, False):
        monkeypatch.setattr(model, "may_sync", lambda x, may_sync=may_sync: may_sync)
        torch.manual_seed(5)  # own_random draws
        results.append(values_and_gradients(moe(h, ids), list(moe.parameters())))
    torch.testing.assert_close(results[0], results[1])
    routing, kept = seen[0]
    for wanted, priority, served in zip(routing.wanted.t(), routing.priority.t(), kept.t()):
        queue = sorted((-float(priority[s]), s) for s in wanted.nonzero().flatten().tolist())
        assert served.nonzero().flatten().tolist() == sorted(s for _, s in queue[: 48 // 8])  # half of S / 4
    assert kept.sum() < routing.wanted.sum()
    assert routing.balance_loss > 0


@pytest.mark.parametrize("name", OWN)
def test_it_trains_and_goes_on_bit_for_bit(name, corpora, tmp_path, monkeypatch, capsys):
    script, options = Script(train_lm), TINY_LM | {"router": name, "data": corpora["a"], "eval_every": 2}
    whole, parts = options | {"out_dir": tmp_path / "whole"}, options | {"out_dir": tmp_path / "parts"}
    script.run(whole, monkeypatch)
    stopped(script, 1, signal.SIGTERM, parts, capsys)
    script.run(parts, monkeypatch)
    assert "goes on from step 2" in capsys.readouterr().out
    assert losses(whole["out_dir"]) == losses(parts["out_dir"])
    ours, theirs = saved(whole)["model"], saved(parts)["model"]
    assert all(torch.equal(w, theirs[key]) for key, w in ours.items())


WRONG = {
    "indices": (
        lambda self, score, probs: probs.topk(2).indices,
        r"Own.choose returned \(64, 2\) torch.int64",
    ),
    "a mask": (
        lambda self, score, probs: probs > 0.2,
        r"Own.choose returned \(64, 8\) torch.bool",
    ),
    "nothing": (
        lambda self, score, probs: None,
        "Own.choose returned a .*NoneType.*; it should return float",
    ),
    "no choose": (Router.choose, r"Own needs `choose\(self, score, probs\)`, which returns priorities \(S, E\)"),
    "too many": (lambda self, score, probs: by_rank(probs.argsort(), probs, 3), "Own chose 3 experts .* K = 1"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_router_is_one_line_that_names_it(wrong, corpora, tmp_path, monkeypatch, capsys):
    choose, message = WRONG[wrong]
    monkeypatch.setitem(ROUTERS, "own", type("Own", (Router,), {"choose": choose, "__module__": __name__}))
    options = TINY_LM | {"router": "own", "data": corpora["a"], "out_dir": tmp_path}
    assert re.search(message, Script(train_lm).refused(options, monkeypatch, capsys))
