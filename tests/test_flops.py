"""metrics/flops.py: parameters and FLOPs against the papers, by hand, and against torch's FLOP counter."""

from types import SimpleNamespace

import pytest
import torch
from helpers import CONSTANTS, PAPERS, constants, lively, table_rows
from test_analyze import run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import train_electra
from analysis import xlm_e
from metrics import flops
from metrics.routing import RoutingStats
from model import GPT, Encoder, MaskedLM, Translator

V = 23
SMALL = CONSTANTS | dict(block_size=12, init_std=0.02, decoder_layers=4, decoder_moe=True, moe_after=())
SMALL |= dict(expert_ffns=2, split=2, expert_layers=3)  # 4 experts of width 8


def small(router: str, **changes) -> SimpleNamespace:
    return constants(**SMALL | {"router": router} | changes)


def on_meta(kind: type, config, size: int) -> torch.nn.Module:
    with torch.device("meta"):
        return kind(config, size)


PAPER = dict(block_size=512, n_layer=12, n_head=12, n_embd=768, ffn_size=3072, experts=32, expert_size=3072)
PAPER |= dict(expert_ffns=8, split=None)
FFN = 2 * 768 * 3072 + 3072 + 768
STACKS = 3 * (FFN + 2 * 768)  # X-MoE's expert: three FFNs, each with a norm
X_MOE_ENCODER = 277_453_056 + 32 * STACKS + 16 * 768 + 32 * 16 + 1


@pytest.mark.parametrize(
    "kind, router, changes, total, active",
    [
        (Encoder, "dense", {"relative_bias": True}, 277_453_056 + 2_064, 277_453_056 + 2_064),
        (MaskedLM, "dense", {}, 278_295_186, 278_295_186),
        (Encoder, "hypersphere", {"moe_after": (6,)}, X_MOE_ENCODER, X_MOE_ENCODER - 31 * STACKS),
        (Encoder, "switch", {"moe_after": (6,)}, 730_978_560, 730_978_560 - 31 * STACKS),
    ],
)
def test_parameters_of_the_papers_encoders(kind, router, changes, total, active):
    model = on_meta(kind, small(router, **PAPER | changes), 250_002)
    counts = flops.count_parameters(model)
    assert (counts["total"], counts["active"]) == (total, active)


@pytest.mark.parametrize("router, served", [("switch", 1), ("topk", 2), ("threshold", 2.5), ("hash", 1), ("base", 1)])
@pytest.mark.parametrize("gamma", [0.5, 2.5, 9.0])
def test_active_parameters_are_those_a_token_uses(router, served, gamma):
    model = GPT(small(router, capacity=gamma / 2), V)
    served = {0.5: 0.5, 9.0: 4 if router == "threshold" else served}.get(gamma, served)  # at most K, gamma and E
    expert = 2 * 8 * 8 + 8 + 8
    total = sum(p.numel() for p in model.parameters())
    counts = flops.count_parameters(model)
    assert counts["active"] == total - (4 - served) * expert
    assert counts["total"] == total
    assert flops.served_rows(model.moe_layers[0]) == served


@pytest.mark.parametrize("K", [1, 2, 4, 8])
def test_rows_of_table_1_cost_the_same(K):  # XMoE eq. 6
    model = on_meta(GPT, small("topk", **PAPER | dict(block_size=1024, split=K)), 50_257)
    E = 8 * K
    assert flops.count_parameters(model)["active"] == 124_439_808 + 6 * 768 * (E + K - 1)  # routers, output biases
    assert sum(map(flops.moe_flops, model.moe_layers)) == 6 * 2 * (768 * E + 2 * 768 * 3072)


def counted(model: torch.nn.Module, *inputs) -> tuple[int, float]:
    """-> FLOPs of a forward pass by torch's counter, including products with b_out; rows that experts served."""
    watches = [RoutingStats(moe) for moe in model.moe_layers]
    model(*inputs)
    rows = sum(float(watch.rows[1].sum()) for watch in watches)
    for watch in watches:
        watch.finish()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(*inputs)
    return counter.get_total_flops(), rows


@pytest.mark.parametrize("router", ["dense", *PAPERS])
def test_flops_of_the_decoder_equal_torchs_count(router):
    model = lively(GPT(small(router, capacity=0.5), V)).eval()  # gamma = 1
    count, rows = counted(model, torch.randint(V, (2, 12)))
    work = flops.flops_per_token(model, model.config, head=2 * 8 * V)
    dense = 2 * (2 * 4 * 8 * 8 + 2 * 8 * 16 * (1 + (router == "dense"))) + 4 * 2 * 12 * 8 + 2 * 8 * V  # by hand
    per_router = {"dense": 0, "hash": 0, "hypersphere": 2 * (8 * 2 + 4 * 2)}.get(router, 2 * 4 * 8)
    experts = 0 if router == "dense" else 2 * 2 * 8 * 8  # one row of one expert
    assert work == dense + per_router + experts
    biases = 24 * 2 * 4 * 8 * (router != "dense")
    assert count == 24 * (dense + per_router) + biases + rows * experts


def test_flops_of_the_encoder_equal_torchs_count():
    model = lively(MaskedLM(small("hypersphere", moe_after=(1, 2)), V)).eval()
    count, rows = counted(model, torch.randint(4, V, (2, 12)), torch.arange(0, 24, 4))
    head = 0.25 * 2 * (8 * 8 + 8 * V)  # a quarter of the tokens is masked
    work = flops.flops_per_token(model.encoder, model.config, 0.25 * flops.masked_head_flops(model))
    router, row = 2 * (8 * 2 + 2 * 4), 3 * 2 * 2 * 8 * 8
    dense = 2 * 2 * (4 * 8 * 8 + 2 * 8 * 16) + 4 * 2 * 12 * 8 + head
    assert work == dense + 2 * (router + row)
    assert rows == 2 * 24
    assert count == 24 * (dense + 2 * router) + rows * row


@pytest.mark.parametrize("changes", [{}, {"decoder_moe": False}, {"moe_after": (1,)}, {"router": "dense"}], ids=str)
def test_flops_of_the_translator_equal_torchs_count(changes):
    config = small(**{"router": "switch", "capacity": 0.5, "capacity_factor": 1.0} | changes)
    model = lively(Translator(config, V)).eval()
    count, rows = counted(model, torch.randint(4, V, (2, 12)), None, torch.randint(4, V, (2, 5)), None)
    work = flops.translation_flops(model, 12, 5)
    stack = 3 if "moe_after" in changes else 1
    passes = {"{}": 24 + 2 * 10, "{'router': 'dense'}": 0}.get(str(changes), 24)  # tokens through sparse layers
    row = stack * 2 * 2 * 8 * 8
    biases = 0 if "moe_after" in changes else passes * 2 * 4 * 8
    assert count == 2 * work - passes * row + biases + rows * row


def test_flops_served_by_hand():
    """0.5 and 2.25 experts per token in two sparse layers, instead of 1; an expert is a stack of three FFNs."""
    model = MaskedLM(small("hypersphere", moe_after=(1, 2)), V)
    layers = [{"served": 0.5}, {"served": 2.25}]
    row = 3 * 2 * 2 * 8 * 8
    assert flops.as_served(model, 10_000.0, layers) == 10_000 - 0.5 * row + 1.25 * row
    assert flops.as_served(model, 10_000.0, layers, tokens=7) == 10_000 + 7 * 0.75 * row
    assert flops.as_served(model, 10_000.0, []) == 10_000


@pytest.mark.parametrize("router", ["dense", *PAPERS])
def test_flops_served_equal_torchs_count(router):
    model = lively(GPT(small(router, capacity=0.25), V)).eval()  # experts drop tokens
    ids = torch.randint(V, (2, 12))
    count, rows = counted(model, ids)
    watches = [RoutingStats(moe) for moe in model.moe_layers]
    model(ids)
    layers = [watch.finish() for watch in watches]
    work = flops.flops_per_token(model, model.config, head=2 * 8 * V)
    biases = 24 * 2 * 4 * 8 * len(layers)
    assert count - biases == pytest.approx(24 * flops.as_served(model, work, layers))


@pytest.mark.parametrize("preset, paper", [("base", 279e6), ("large", 840e6), ("xl", 2.2e9)])
def test_parameters_of_table_3(preset, paper, monkeypatch, capsys):
    """Counted on train_electra.py's model under its preset."""
    config = train_electra.Config(**train_electra.PRESETS[preset])
    model = on_meta(train_electra.Electra, config, xlm_e.TABLE3[preset][0])
    total = sum(flops.numel(part) for part in (model.encoder, model.dense, model.ln_h, model.out))
    assert total == pytest.approx(paper, rel=0.02)
    assert preset != "base" or total == 278_048_017
    run(monkeypatch, "flops")
    (row,) = [row for row in table_rows(capsys.readouterr().out.split("\n\n")[1]) if row[0] == preset]
    assert row[3] == f"{total:,}"


def test_flops_of_table_4(monkeypatch, capsys):  # the paper: 6.3e19 and 9.5e19
    run(monkeypatch, "flops")
    rows = table_rows(capsys.readouterr().out.split("\n\n")[3])
    assert [row[1] for row in rows] == ["9.5e19", "6.3e19"]  # XLM-E, and XLM-E - TRTD
    T, D, L, vocabulary = 512, 768, 12, 250_002
    discriminator = L * (24 * D * D + 4 * T * D) + 2 * D * D + 2 * D
    generator = 4 * (24 * D * D + 4 * T * D) + 0.15 * 2 * D * (D + vocabulary)
    batch = 3 * 125_000 * 2048 * 512 * (discriminator + generator)
    ours = [2 * batch, batch]
    assert [row[2] for row in rows] == [f"{cost:.2e}" for cost in ours]
