"""metrics/: routing statistics, RC, transport and word alignment against loops, and by hand."""

import io
import math
import time

import pytest
import reference
import reference_scores
import torch
import torch.nn.functional as F
from helpers import lively
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flops import small

from data.files import progress
from engine.device import Context
from metrics import bits_per_byte, crosslingual, perplexity
from metrics.routing import RoutingStats, describe_routing, mean_over_layers, representation_collapse
from model import MoE, x_moe_layer, xmoe_layer
from routers import NOT_CHOSEN, ROUTERS

CPU = Context(0, 1, torch.device("cpu"), torch.float32)
V = 23


def layer(router: str, **changes) -> MoE:
    """XMoE's layer with 4 experts of width 8."""
    return lively(xmoe_layer(small(router, **changes), V, "tanh")).eval()


def test_perplexity_and_bits_per_byte_by_hand():
    """10 tokens of 3 bits each, 15 bytes."""
    assert perplexity(math.log(1e300)) == pytest.approx(1e300)
    assert math.isfinite(perplexity(1e9))
    counts = {"tokens": 10, "bytes": 15, "words": 4}
    assert bits_per_byte(3 * math.log(2), counts) == pytest.approx(2)


@pytest.mark.parametrize("rank, terminal", [(0, True), (1, True), (0, False)])
def test_only_the_terminal_of_rank_0_shows_a_bar(rank, terminal, monkeypatch):
    """It is shown if the measurement takes more than a second, and removed at the end."""
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("RANK", str(rank))
    for step in progress(range(3), "evaluating"):
        time.sleep(1.2 if step == 0 else 0)
    shown = "evaluating:  33%" in stream.getvalue()
    assert shown == (rank == 0 and terminal)
    assert not stream.getvalue().split("\r")[-1].strip()
    stream.truncate(stream.seek(0))
    list(progress(range(3), "evaluating"))
    assert "evaluating" not in stream.getvalue()


def test_the_middle_layer_and_means_over_layers():
    assert [crosslingual.middle_layer(L) for L in (2, 4, 6, 12, 24)] == [2, 3, 4, 9, 18]
    layers = [{"rc": 0.0, "rf": None}, {"rc": 3.0, "rf": None}, {"rc": None, "rf": None}]
    assert mean_over_layers("rc", layers) == 1.5
    assert mean_over_layers("rf", layers) is None


def literal_stats(moe: MoE, calls: list) -> dict:
    """calls: h (S, D) and ids (S,) of each forward pass. test_routers.py tests what routers choose."""
    E, ffn = moe.router.E, moe.experts
    tokens, wanted, served, unserved, entropy, positive, units, load, kept_by = 0, 0, 0, 0, 0.0, 0, 0, [], []
    losses = {}
    for h, ids in calls:
        routing = moe.router(h, ids)
        turn = {(s, e): (-routing.priority[s, e].item(), s) for s, e in routing.wanted.nonzero().tolist()}
        kept = reference.serve(turn, reference.capacity(len(h), E, moe.eval_capacity_factor), E)
        tokens, wanted, served = tokens + len(h), wanted + len(turn), served + len(kept)
        for name, (_, loss) in routing.losses.items():
            losses[name] = losses.get(name, 0.0) + len(h) * float(loss)
        unserved += sum(not any((s, e) in kept for e in range(E)) for s in range(len(h)))
        entropy -= sum(p * math.log(p) for p in routing.probs.flatten().tolist() if p > 0)
        load += [e for _, e in turn]
        kept_by += [e for _, e in kept]
        for s, e in kept:
            a = reference.expert_hidden(h[s], e, ffn.w_in, ffn.b_in)
            positive, units = positive + int((a > 0).sum()), units + len(a)
    return {
        "wanted": wanted / tokens,
        "served": served / tokens,
        "cut": (wanted - served) / wanted,
        "unserved": unserved / tokens,
        "imbalance": max(load.count(e) for e in range(E)) / (wanted / E),
        "load": [kept_by.count(e) / served for e in range(E)],
        "dead": sum(kept_by.count(e) == 0 for e in range(E)),
        "entropy": entropy / tokens,
        "positive": positive / units,
        "losses": {name: total / tokens for name, total in losses.items()},
    }


@torch.no_grad()
@pytest.mark.parametrize("router", ROUTERS)
def test_statistics_are_literal_counts_without_padding(router):
    moe = layer(router, capacity=0.25, threshold=0.7)
    batches = [(torch.randn(3, 8, 8).double(), torch.randint(23, (3, 8)), None) for _ in range(2)]
    nonpad = (torch.arange(24) % 5 != 2).nonzero().squeeze(1)
    batches.append((torch.randn(3, 8, 8).double(), torch.randint(23, (3, 8)), nonpad))  # a batch with padding
    moe(*batches[0])  # not watched yet
    watch = RoutingStats(moe)
    for batch in batches:
        moe(*batch)
    flat = [(h.flatten(0, 1), ids.flatten()) for h, ids, _ in batches]
    flat[2] = flat[2][0][nonpad], flat[2][1][nonpad]
    expected = literal_stats(moe, flat)
    assert expected["cut"] > 0
    stats = watch.finish()
    assert stats.pop("load") == pytest.approx(expected.pop("load"), abs=5e-6)  # five digits
    assert stats.pop("losses") == pytest.approx(expected.pop("losses"))
    assert stats == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert not moe.watchers


def test_statistics_of_stacks_and_of_no_tokens():
    moe = lively(x_moe_layer(small("switch", moe_after=(1,)), V, "none")).eval()
    watch = RoutingStats(moe)
    moe(torch.randn(1, 8, 8).double(), torch.zeros(1, 8, dtype=torch.int64))
    stats = watch.finish()
    assert stats["positive"] is None
    assert stats["wanted"] == 1
    nothing = RoutingStats(moe).finish()
    assert nothing["wanted"] == nothing["unserved"] == nothing["imbalance"] == 0
    assert nothing["load"] == [0, 0, 0, 0]


def test_experts_that_serve_no_token_are_dead(monkeypatch):
    """All tokens choose expert 2 of 4."""
    moe = layer("switch", capacity=4.0)
    third = torch.tensor([NOT_CHOSEN, NOT_CHOSEN, 1.0, NOT_CHOSEN], dtype=torch.float64)
    monkeypatch.setattr(moe.router, "choose", lambda score, probs: third.expand_as(probs))
    watch = RoutingStats(moe)
    moe(torch.randn(1, 8, 8).double(), torch.zeros(1, 8, dtype=torch.int64))
    stats = watch.finish()
    assert (stats["load"], stats["dead"]) == ([0, 0, 1, 0], 3)
    assert "load imbalance 4.00, 3 of 4 experts dead, entropy" in describe_routing(stats)
    assert "dead" not in describe_routing(stats | {"dead": 0})
    older = {name: value for name, value in stats.items() if name not in ("load", "dead")}  # an older result
    assert "load imbalance 4.00, entropy" in describe_routing(older)


def literal_rc(h: torch.Tensor, chosen: torch.Tensor) -> float:
    classes = sorted(set(chosen.tolist()))
    mu, n, D = h.mean(dim=0), len(h), h.shape[1]
    within, between = torch.zeros(D, D, dtype=torch.float64), torch.zeros(D, D, dtype=torch.float64)
    for k in classes:
        members = h[chosen == k]
        mu_k = members.mean(dim=0)
        for x in members:
            within += torch.outer(x - mu_k, x - mu_k) / n
        between += len(members) / n * torch.outer(mu_k - mu, mu_k - mu)
    # rank at most K - 1: other eigenvalues are rounding errors
    values, vectors = torch.linalg.eigh(between)
    inverse = torch.zeros(D, D, dtype=torch.float64)
    for i in values.argsort(descending=True)[: len(classes) - 1]:
        if values[i] > 1e-15 * values.max():
            inverse += torch.outer(vectors[:, i], vectors[:, i]) / values[i]
    return float(torch.trace(within @ inverse))


def rc(h: torch.Tensor, chosen: torch.Tensor, experts: int) -> float:
    one_hot = F.one_hot(chosen, experts).double()
    return representation_collapse(one_hot.sum(dim=0), one_hot.t() @ h, h.t() @ h)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(5, 40), st.integers(2, 6), st.integers(2, 6))
def test_rc_equals_its_formula(seed, n, D, E):
    rng = torch.Generator().manual_seed(seed)
    h = torch.randn(n, D, generator=rng, dtype=torch.float64) + 5
    chosen = torch.randint(E, (n,), generator=rng)
    assert rc(h, chosen, E) == pytest.approx(literal_rc(h, chosen), rel=1e-6, abs=1e-9)


def test_rc_is_stable_if_the_mean_is_far_from_0():
    """Sigma_B of K classes has rank K - 1; rounding of large means must not add a direction."""
    h = torch.randn(30, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chosen = torch.arange(30) % 3
    assert rc(h + 1e5, chosen, 3) == pytest.approx(literal_rc(h, chosen), rel=1e-3)


def test_rc_of_points_of_one_expert_of_nan_and_by_hand():
    chosen = torch.tensor([0, 0, 2, 2, 2, 3])
    points = torch.randn(4, 5, dtype=torch.float64)[chosen]  # all tokens of an expert are equal
    assert rc(points, chosen, 4) == pytest.approx(0, abs=1e-9)
    assert rc(points, chosen * 0, 4) == 0
    assert math.isnan(rc(points * math.nan, chosen, 4))
    # two experts at -1 and 1, each with tokens at -0.5 and 0.5 from it: Sigma_W = 0.25, Sigma_B = 1
    line = torch.tensor([[-1.5], [-0.5], [0.5], [1.5]], dtype=torch.float64)
    assert rc(line, torch.tensor([0, 0, 1, 1]), 2) == pytest.approx(0.25)
    # a direction counts as much if experts and tokens are 1e-4 times as far apart in it
    scale = torch.tensor([1, 1e-4], dtype=torch.float64)
    means = torch.tensor([[-1, -1], [-1, 1], [1, -1], [1, 1]], dtype=torch.float64)
    square = torch.cat([means - 0.5, means + 0.5]) * scale
    assert rc(square, torch.arange(8) % 4, 4) == pytest.approx(0.25 + 0.25)


def plans(m: int, n: int, count: int = 60) -> torch.Tensor:
    """(count, m, n) similarities with ties and negative values."""
    rng = torch.Generator().manual_seed(100 * m + n)
    return (4 * torch.randn(count, m, n, generator=rng, dtype=torch.float64)).round() / 4


SHAPES = [(1, 1), (1, 5), (2, 6), (3, 3), (4, 9), (9, 4), (12, 11)]


@pytest.mark.parametrize("m, n", SHAPES)
def test_sinkhorn_equals_a_loop_over_columns_and_rows(m, n):
    similarity = plans(m, n, 5)
    before = similarity.clone()
    for rounds in (1, 2, 3):
        for plan, S in zip(crosslingual.sinkhorn(similarity, rounds), similarity.tolist(), strict=True):
            torch.testing.assert_close(plan.tolist(), reference_scores.sinkhorn(S, rounds))
    assert torch.equal(similarity, before)


@pytest.mark.parametrize("m, n", SHAPES)
def test_itermax_equals_a_loop_and_simaligns(m, n):
    similarity = plans(m, n).relu()
    for ratio in (0.9, 0.3):
        aligned = crosslingual.itermax(similarity, ratio)
        for links, plan in zip(aligned, similarity.tolist(), strict=True):
            assert set(map(tuple, links.nonzero().tolist())) == reference_scores.itermax(plan, 2, ratio)
    SentenceAligner = pytest.importorskip("simalign").SentenceAligner
    for plan, links in zip(similarity + 0.01, crosslingual.itermax(similarity + 0.01)):
        assert torch.equal(links, torch.from_numpy(SentenceAligner.iter_max(plan.numpy(), 2)) > 0)
