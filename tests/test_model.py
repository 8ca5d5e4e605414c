"""model.py against the papers' equations: capacity, dispatch, the MoE layer, and the language model around it."""

import copy
import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch import expert_capacity, within_capacity
from flops import count_parameters, flops_per_token
from model import FFN, GPT, ModelConfig, MoE
from routers import NOT_CHOSEN, ROUTERS, priority_key

SMALL = {"vocab_size": 13, "block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 8, "ffn_size": 16, "num_experts": 3}
SMALL |= {"top_k": 1, "capacity_factor": 1.0}
VARIANTS = {name: {"router": name} for name in ROUTERS} | {
    "topk-2": {"router": "topk", "top_k": 2},
    "x-moe": {"router": "switch", "score": "hypersphere"},
    "x-moe-2": {"router": "topk", "top_k": 2, "score": "hypersphere", "renormalize": True, "balance_choices": "all"},
    "x-moe-sigmoid": {"router": "switch", "score": "hypersphere", "gate": "sigmoid", "routing_dim": 0},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_causal_variant = pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "expert_choice"])
train_and_test = pytest.mark.parametrize("training", [True, False], ids=["training", "test"])


def lively(module, dtype=torch.float64, training=False):
    """The module with parameters large enough for every choice to matter."""
    torch.manual_seed(1)
    for name, p in module.named_parameters():
        if name.endswith("temperature"):
            torch.nn.init.constant_(p, 0.4)
        elif name == "wte.weight":  # of equal length: no token is everyone's guess
            p.data = 3 * torch.nn.functional.normalize(torch.randn_like(p), dim=1)
        elif p.dim() > 1:
            torch.nn.init.normal_(p, std=0.2 if name == "wpe.weight" else 0.7)
        else:
            p.data += 0.2 * torch.randn_like(p)
    return module.to(dtype).train(training)


def make_moe(variant="switch", training=False, dtype=torch.float64, **options) -> MoE:
    return lively(MoE(ModelConfig(**(SMALL | VARIANTS[variant] | options))), dtype, training)


def make_gpt(variant="switch", dtype=torch.float64, training=False, **options) -> GPT:
    return lively(GPT(ModelConfig(**(SMALL | VARIANTS[variant] | options))), dtype, training)


def make_batch(B, T, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    h = torch.randn(B, T, SMALL["n_embd"], generator=rng, dtype=dtype)
    return h, torch.randint(SMALL["vocab_size"], (B, T), generator=rng)


def crowd(moe, S):
    """S tokens that all prefer expert 0 (dot score), each by another margin."""
    h = torch.zeros(1, S, SMALL["n_embd"], dtype=torch.float64)
    h[0, :, 0] = 1 + torch.randperm(S, generator=torch.Generator().manual_seed(0)) / S
    with torch.no_grad():
        moe.router.experts.copy_(torch.eye(*moe.router.experts.shape))
    return h, torch.zeros(1, S, dtype=torch.int64)


def weights_of(moe):
    return moe.layers[0].weights()


def assert_same(fast, slow, tolerance=1e-9):
    torch.testing.assert_close(fast, slow, rtol=tolerance, atol=tolerance)


# --- Capacity (XMoE eq. 3)


@pytest.mark.parametrize(
    "tokens, experts, gamma, expected",
    [
        (100, 10, 1.0, 10),
        (100, 10, 1.1, 11),  # in floats 1.1 * 100 / 10 is more than 11
        (100, 10, 1.01, 11),
        (70, 7, 0.7, 7),  # in floats less than 7
        (30, 3, 2.3, 23),
        (100, 8, 1, 13),
        (2048, 64, 8.0, 256),
        (40, 8, 0.5, 4),  # at least 4
        (1000, 64, 1e-5, 4),
        (3, 8, 1.0, 3),  # at most all
        (5, 1, 1.0, 5),
        (64, 8, 8.0, 64),
        (64, 8, 9.5, 64),
        (64, 8, math.inf, None),
    ],
)
def test_capacity_by_hand(tokens, experts, gamma, expected):
    assert expert_capacity(tokens, experts, gamma) == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 3000), st.integers(1, 128), st.decimals("0.01", "20", places=2))
def test_capacity_is_the_exact_ceiling(tokens, experts, gamma):
    assert expert_capacity(tokens, experts, float(gamma)) == reference.capacity(tokens, experts, gamma)


@pytest.mark.parametrize(
    "capacity, kept", [(1, [1]), (2, [1, 4]), (3, [0, 1, 4]), (4, [0, 1, 2, 4]), (None, [0, 1, 2, 4])]
)
def test_an_expert_keeps_its_first_choices_then_higher_p_then_earlier_tokens(capacity, kept):
    p = torch.tensor([0.3, 0.6, 0.3, 0.9, 0.6, 0.8])
    rank = torch.tensor([0, 0, 0, 0, 0, 1])
    priority = torch.stack([priority_key(p, rank), torch.zeros(6, dtype=torch.int64)], dim=1)
    priority[3, 0] = priority[5, 0] = NOT_CHOSEN
    result = within_capacity(priority, capacity)
    assert result[:, 0].nonzero()[:, 0].tolist() == kept
    assert result[:, 1].nonzero()[:, 0].tolist() == list(range(6 if capacity is None else capacity))


def test_second_choices_are_dropped_before_first_ones_however_probable():
    p, rank = torch.tensor([0.49, 0.26, 0.48]), torch.tensor([1, 0, 1])
    assert within_capacity(priority_key(p, rank)[:, None], 2)[:, 0].tolist() == [True, True, False]


def test_dropped_tokens_get_exactly_zero():
    moe = make_moe(num_experts=2)
    h, ids = crowd(moe, 12)
    y, _ = moe(h, ids)
    served = (y[0] != 0).any(dim=1)
    assert served.sum() == 6  # 12 / 2 at gamma 1
    assert set(served.nonzero()[:, 0].tolist()) == set(h[0, :, 0].topk(6).indices.tolist())


@pytest.mark.parametrize("S", [1, 3, 17, 40])
@train_and_test
@every_variant
def test_capacity_factor_E_drops_nothing(variant, training, S):
    moe = make_moe(variant, training, num_experts=6)
    h, ids = make_batch(1, S)
    routing = moe.router(h[0] + 5, ids[0] * 0)  # crowded: all alike
    assert torch.equal(within_capacity(routing.priority, expert_capacity(S, 6, 6.0)), routing.wanted)


def test_order_of_tokens_of_equal_priority_does_not_matter_to_an_expert_with_room():
    moe = make_moe("hash", num_experts=4)
    h, ids = make_batch(1, 60)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    capacity, kept = 16, []
    for i in (ids[0], ids[0, order]):
        kept.append(within_capacity(moe.router(h[0], i).priority, capacity))
    wanted = moe.router(h[0], ids[0]).wanted.sum(dim=0)
    roomy = wanted <= capacity
    assert 0 < roomy.sum() < 4  # both kinds are there
    assert torch.equal(kept[0][order][:, roomy], kept[1][:, roomy])
    assert (kept[0][:, ~roomy].sum(dim=0) == capacity).all() and (kept[1][:, ~roomy].sum(dim=0) == capacity).all()


# --- The MoE layer against the reference


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("gamma", [0.5, 1.0, math.inf])
@every_variant
def test_moe_layer_follows_the_equations(variant, gamma, masked):
    moe = make_moe(variant, capacity_factor=gamma)
    h, ids = make_batch(2, 11)
    h.requires_grad_()
    mask = (torch.arange(22).view(2, 11) % 4 != 1) if masked else None
    y, balance = moe(h, ids, None if mask is None else mask.flatten().nonzero().squeeze(1))

    flat, real = h.flatten(0, 1), 22 if mask is None else int(mask.sum())
    slow = reference.route(moe.router, flat, ids.flatten(), None if mask is None else mask.flatten())
    limit = None if gamma == math.inf else reference.capacity(real, 3, gamma)
    served = reference.serve(slow.turn, limit, 3)
    assert gamma != 0.5 or len(served) < len(slow.turn)  # something is dropped
    slow_y = reference.moe(flat, slow.weight, served, *weights_of(moe)).view_as(h)
    assert_same(y, slow_y)
    assert_same(balance, torch.as_tensor(slow.balance_loss, dtype=h.dtype))
    arrow, parameters = torch.randn_like(y), (h, *moe.parameters())
    fast, slow = (
        torch.autograd.grad((arrow * out).sum() + loss, parameters, allow_unused=True, materialize_grads=True)
        for out, loss in ((y, balance), (slow_y, slow.balance_loss))
    )
    assert_same(fast, slow)


@pytest.mark.parametrize("junk", [0.0, -1e30, torch.finfo(torch.float64).max])
@train_and_test
@every_variant
def test_padding_changes_nothing_and_gets_exactly_zero(variant, training, junk):
    moe = make_moe(variant, training)
    h, ids = make_batch(1, 17)  # capacity 6; were padding counted, it would be 7
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0], mask[1, :7] = True, True
    wide, wide_ids = torch.full((2, 10, h.shape[2]), junk, dtype=h.dtype), torch.zeros(2, 10, dtype=torch.int64)
    wide[mask], wide_ids[mask] = h[0], ids[0]
    alone, among = moe(h, ids), moe(wide, wide_ids, mask.flatten().nonzero().squeeze(1))
    assert_same(among[0][mask], alone[0][0])
    assert (among[0][~mask] == 0).all()
    assert_same(among[1], alone[1])


def test_one_expert_is_an_ffn():
    config = ModelConfig(**(SMALL | {"num_experts": 1, "router": "switch"}))
    moe, ffn = lively(MoE(config)), FFN(config).double()
    w_in, b_in, w_out, b_out = weights_of(moe)
    for linear, weight, bias in ((ffn.fc, w_in, b_in), (ffn.proj, w_out, b_out)):
        linear.load_state_dict({"weight": weight[0].detach(), "bias": bias[0].detach()})
    h, ids = make_batch(2, 5)
    assert_same(moe(h, ids)[0], ffn(h))


@train_and_test
def test_eval_capacity_factor_holds_at_test_only(training):
    moe = make_moe(num_experts=2, training=training, capacity_factor=0.5, eval_capacity_factor=1.5)
    y, _ = moe(*crowd(moe, 32))
    assert (y[0] != 0).any(dim=1).sum() == (8 if training else 24)


def test_autocast_sums_the_experts_in_fp32_and_leaves_routing_alone():
    moe = make_moe("threshold", dtype=torch.float32)
    h, ids = make_batch(2, 9, torch.float32)
    y, balance = moe(h, ids)
    with torch.autocast("cpu", torch.bfloat16):
        cast_y, cast_balance = moe(h, ids)
    assert cast_y.dtype == torch.float32 and torch.equal(cast_balance, balance)
    assert torch.equal((cast_y == 0).all(dim=2), (y == 0).all(dim=2))
    assert 0 < (cast_y - y).norm() < 0.02 * y.norm()


# --- Parameter counts and FLOPs

GPT2 = {"vocab_size": 50257, "block_size": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768, "ffn_size": 3072}
LARGE = GPT2 | {"n_head": 16, "n_embd": 1024, "ffn_size": 4096}
TABLE_1 = [  # XMoE table 1
    (GPT2, "dense", None, 124_439_808),
    (GPT2, "switch", None, 322_818_816),
    (GPT2, "base", None, 322_818_816),
    (GPT2, "topk", 1536, 322_892_544),
    (GPT2, "threshold", 1536, 322_892_544),
    (GPT2, "threshold", 768, 323_040_000),
    (GPT2, "threshold", 384, 323_334_912),
    (LARGE, "switch", None, 556_254_208),
    (LARGE, "threshold", 2048, 556_352_512),
    (LARGE, "threshold", 1024, 556_549_120),
    (LARGE, "topk", 512, 556_942_336),
]


@pytest.mark.parametrize("size, router, expert_size, total", TABLE_1)
def test_parameter_counts_of_table_1(size, router, expert_size, total):
    config = ModelConfig(**size, router=router, expert_size=expert_size)
    with torch.device("meta"):
        assert count_parameters(GPT(config))["total"] == total


@pytest.mark.parametrize("router, served", [("dense", 1), ("switch", 1), ("topk", 2), ("threshold", 1.5), ("hash", 1)])
def test_active_parameters_are_those_a_token_passes(router, served):
    config = ModelConfig(**(SMALL | {"router": router, "top_k": 2 if router == "topk" else 1, "capacity_factor": 1.5}))
    model = GPT(config)
    served = min(served, 1.5)
    expert = 2 * 8 * config.expert_size + config.expert_size + 8
    idle = 0 if router == "dense" else (3 - served) * expert
    assert count_parameters(model)["active"] == sum(p.numel() for p in model.parameters()) - idle


@pytest.mark.parametrize("expert_size, K", [(3072, 1), (1536, 2), (768, 4), (384, 8)])
def test_rows_of_table_1_cost_the_same(expert_size, K):  # XMoE eq. 6
    config = ModelConfig(**GPT2, router="topk", expert_size=expert_size)
    E = 8 * K
    assert (config.num_experts, config.top_k, config.capacity_factor) == (E, K, K)
    with torch.device("meta"):
        active = count_parameters(GPT(config))["active"]
    assert active == 124_439_808 + 6 * 768 * (E + K - 1)  # routers and output biases
    assert flops_per_token(config)["moe"] == 6 * 2 * (768 * E + 2 * 768 * 3072)


# --- The language model


def test_every_second_block_is_sparse():
    model = make_gpt(n_layer=5)
    assert [block.sparse for block in model.blocks] == [False, True, False, True, False]
    assert [isinstance(block.ffn, MoE) for block in model.blocks] == [False, True, False, True, False]
    assert not GPT(ModelConfig(**(SMALL | {"router": "dense"}))).moe_layers


def test_balance_loss_is_summed_over_layers_and_steps_reach_every_router():
    model, losses = make_gpt("x-moe", n_layer=4), []
    for moe in model.moe_layers:
        moe.register_forward_hook(lambda _, __, out: losses.append(out[1]))
    _, total = model(make_batch(2, 8)[1])
    assert len(losses) == 2 and min(losses) > 0
    assert_same(total, sum(losses))
    model.after_step()
    for moe in model.moe_layers:
        assert_same(moe.router.experts.detach().norm(dim=1), torch.full((3,), 0.1).double(), 1e-7)


def test_what_writes_to_the_residual_stream_starts_smaller_with_depth():  # GPT-2
    model = GPT(ModelConfig(vocab_size=50, n_layer=8, n_embd=64, ffn_size=256, init_std=0.02))
    for name, p in model.named_parameters():
        last = name.rpartition(".")[2]
        if last.startswith("b"):
            assert (p == 0).all(), name
        elif "ln" not in name:
            expected = 0.02 / 4 if name.endswith(("proj.weight", "w_out")) else 0.02
            assert float(p.detach().std()) == pytest.approx(expected, rel=0.1), name


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="block_size"):
        make_gpt()(torch.zeros(1, 9, dtype=torch.int64))


def logits_before_and_after_a_change(model, at, gamma):
    ids = make_batch(3, 8)[1]
    changed = ids.clone()
    changed[:, at:] = (changed[:, at:] + 5) % SMALL["vocab_size"]
    with torch.no_grad(), model.test_routing(capacity_factor=gamma):
        return model(ids)[0], model(changed)[0]


@pytest.mark.parametrize("gamma", [math.inf, 3.0])  # E = 3
@every_causal_variant
def test_without_drops_no_logit_depends_on_a_later_token(variant, gamma):
    model = make_gpt(variant, n_layer=4, capacity_factor=0.5)
    for at in (1, 4, 7):
        before, after = logits_before_and_after_a_change(model, at, gamma)
        assert_same(before[:, :at], after[:, :at])
        assert (before[:, at:] - after[:, at:]).abs().max() > 1e-3


@pytest.mark.parametrize("variant, gamma", [("switch", 0.5), ("expert_choice", 1.0)])
def test_with_drops_and_in_expert_choice_logits_do_depend_on_later_tokens(variant, gamma):
    before, after = logits_before_and_after_a_change(make_gpt(variant, n_layer=4), 4, gamma)
    assert (before[:, :4] - after[:, :4]).abs().max() > 1e-3


# --- Generation


def greedy(model, ids, new_tokens, gamma=math.inf):
    with torch.no_grad(), model.test_routing(capacity_factor=gamma):
        for _ in range(new_tokens):
            best = model(ids[:, -model.config.block_size :])[0][:, -1].argmax(dim=1, keepdim=True)
            ids = torch.cat([ids, best], dim=1)
    return ids


@every_causal_variant
def test_top_k_1_is_the_greedy_loop_also_beyond_block_size(variant):
    model, ids = make_gpt(variant, n_layer=4, capacity_factor=0.25), make_batch(8, 3)[1]
    out = model.generate(ids, 12, top_k=1)
    assert out.shape == (8, 15) and torch.equal(out[:, :3], ids)
    assert torch.equal(out, greedy(model, ids, 12))
    assert not torch.equal(out, greedy(model, ids, 12, gamma=0.25))  # drops would have shown
    assert torch.equal(out, model.generate(ids, 12, temperature=1e-6))


@every_causal_variant
def test_batch_mates_do_not_change_a_greedy_continuation(variant):
    model, ids = make_gpt(variant, n_layer=4, capacity_factor=0.25), make_batch(12, 4)[1]
    together = model.generate(ids, 6, top_k=1)
    assert torch.equal(together, torch.cat([model.generate(row[None], 6, top_k=1) for row in ids]))


def test_samples_come_from_the_top_k_and_follow_the_temperature():
    model, ids = make_gpt(), make_batch(1, 4)[1]
    with torch.no_grad(), model.test_routing(capacity_factor=math.inf):
        logits = model(ids)[0][0, -1]
    torch.manual_seed(0)
    drawn = model.generate(ids.expand(4000, -1), 1, temperature=3.0, top_k=3)[:, -1]
    share = torch.bincount(drawn, minlength=13) / 4000
    expected = torch.zeros(13).double()
    best = logits.topk(3).indices
    expected[best] = (logits[best] / 3.0).softmax(dim=0)
    assert ((share > 0) == (expected > 0)).all()
    assert (share - expected).abs().max() < 0.04
    assert model.generate(ids, 1, top_k=100).shape == (1, 5)  # more than there are is all


def test_expert_choice_refuses_to_generate():
    with pytest.raises(ValueError, match="expert_choice"):
        make_gpt("expert_choice").generate(torch.zeros(1, 2, dtype=torch.int64), 1)


@train_and_test
def test_generation_leaves_the_model_as_it_was(training):
    model = make_gpt(training=training, dropout=0.5)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    assert torch.equal(model.generate(ids, 4, top_k=1), model.generate(ids, 4, top_k=1))  # no dropout
    assert all(m.training == training for m in model.modules())
    assert [moe.eval_capacity_factor for moe in model.moe_layers] == [1.0]


# --- Statistics


def literal_stats(moe, calls):
    """calls: (h (B, T, D), ids (B, T), real (S,) or None) of every forward pass"""
    (w_in, b_in, *_), E = weights_of(moe), moe.router.num_experts
    tokens, wanted, served, unserved, entropy, positive, hidden, load = 0, 0, 0, 0, 0.0, 0, 0, []
    for h, ids, real in calls:
        h, ids = h.flatten(0, 1), ids.flatten()
        mask = (
            torch.ones(len(h), dtype=torch.bool) if real is None else torch.zeros(len(h)).index_fill(0, real, 1).bool()
        )
        choices = reference.route(moe.router, h, ids, mask)
        real = [s for s in range(len(h)) if mask[s]]
        kept = reference.serve(choices.turn, reference.capacity(len(real), E, moe.eval_capacity_factor), E)
        tokens, wanted, served = tokens + len(real), wanted + len(choices.turn), served + len(kept)
        unserved += sum(not any((s, e) in kept for e in range(E)) for s in real)
        entropy -= sum(float(p) * math.log(p) for s in real for p in choices.probs[s] if p > 0)
        load += [e for _, e in choices.turn]
        for s, e in kept:
            units = reference.expert_hidden(h[s], e, w_in, b_in)
            positive, hidden = positive + int((units > 0).sum()), hidden + len(units)
    return {
        "wanted": wanted / tokens,
        "served": served / tokens,
        "cut": (wanted - served) / wanted,
        "unserved": unserved / tokens,
        "imbalance": max(load.count(e) for e in range(E)) / (wanted / E),
        "entropy": entropy / tokens,
        "positive": positive / hidden,
    }


@torch.no_grad()
@every_variant
def test_stats_are_literal_counts(variant):
    model = make_gpt(variant, n_layer=4, capacity_factor=0.5)
    calls = {moe: [] for moe in model.moe_layers}

    def remember(moe, arguments):
        calls[moe].append((*arguments, None)[:3])

    for moe in model.moe_layers:
        moe.register_forward_pre_hook(remember)
    model.start_stats()
    for seed in (0, 1):
        model(make_batch(3, 8, seed=seed)[1])
    for moe in model.moe_layers:  # a batch with padding
        moe(*make_batch(2, 8, seed=2), (torch.arange(16) % 5 != 2).nonzero().squeeze(1))
    tallies = copy.deepcopy([moe.tally for moe in model.moe_layers])
    stats = model.stats()
    for row, moe in zip(stats, model.moe_layers):
        assert row == pytest.approx(literal_stats(moe, calls[moe]), rel=1e-9, abs=1e-12)
        assert moe.tally is None
    assert stats[0]["cut"] > 0
    for moe, tally in zip(model.moe_layers, tallies):
        moe.tally = tally
    for row, same in zip(stats, model.stats(reduce=lambda sums: 2 * sums)):  # two processes that saw the same
        assert same == pytest.approx(row)


def test_stats_start_afresh():
    model, results = make_gpt(), []
    for _ in range(2):
        model.start_stats()
        model(make_batch(2, 8)[1])
        results.append(model.stats())
    assert results[0] == results[1]


# --- Configuration


@pytest.mark.parametrize(
    "options",
    [
        {"router": "best"},
        {"n_embd": 0},
        {"n_layer": 0},
        {"block_size": 0},
        {"ffn_size": 0},
        {"moe_every": 0},
        {"n_head": 0},
        {"n_head": 3},
        {"dropout": 1.0},
        {"dropout": -0.1},
        {"router": "dense", "score": "dot"},
        {"router": "dense", "select": "top1"},
        {"expert_size": 1000},
        {"expert_size": 2048},
        {"expert_size": 0},
        {"router": "topk", "num_experts": 8, "top_k": 9},
        {"router": "topk", "top_k": 0},
        {"num_experts": 0},
        {"capacity_factor": 0.0},
        {"capacity_factor": -1.0},
        {"capacity_factor": math.nan},
        {"eval_capacity_factor": 0.0},
        {"threshold": 1.5},
        {"threshold": -0.5},
        {"eval_threshold": 2.0},
        {"eval_threshold": math.nan},
    ],
    ids=str,
)
def test_configurations_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError):
        ModelConfig(**options)


@pytest.mark.parametrize("options", [{"router": "switch", "select": "hash"}, {"router": "hash", "gate": "softmax"}])
def test_hash_with_a_score_or_a_gate_is_refused(options):
    with pytest.raises(ValueError, match="hash"):
        GPT(ModelConfig(**(SMALL | options)))


def test_an_odd_expert_size_is_fine_where_nothing_has_to_be_derived():
    config = ModelConfig(router="topk", expert_size=1000, num_experts=5, top_k=2, capacity_factor=1.5)
    assert (config.expert_size, config.num_experts, config.top_k, config.capacity_factor) == (1000, 5, 2, 1.5)


@pytest.mark.parametrize("router", [r for r in ROUTERS])
def test_defaults_keep_parameters_and_flops(router):
    config = ModelConfig(router=router, ffn_size=3072)
    k = 4 if router in ("topk", "threshold") else 1
    assert (config.score, config.gate, config.select) == ROUTERS[router]
    assert (config.expert_size, config.num_experts, config.capacity_factor) == (3072 // k, 8 * k, k)
    assert config.top_k == (4 if router == "topk" else 1)
    assert (config.eval_capacity_factor, config.eval_threshold) == (k, 0.9)
    assert config.routing_dim == (4 if router == "hypersphere" else 0)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_dividing_the_expert_size_multiplies_experts_choices_and_capacity(k):
    config = ModelConfig(router="topk", ffn_size=1024, expert_size=1024 // k)
    assert (config.num_experts, config.top_k, config.capacity_factor) == (8 * k, k, k)


def test_given_constants_win_over_the_derived_ones():
    given = {"score": "hypersphere", "gate": "sigmoid", "num_experts": 6, "capacity_factor": 1.25, "threshold": 0.7}
    config = ModelConfig(router="threshold", **given)
    assert all(getattr(config, name) == value for name, value in given.items())
    assert (config.routing_dim, config.eval_capacity_factor, config.eval_threshold) == (3, 1.25, 0.7)
    config = ModelConfig(**given, routing_dim=4, eval_capacity_factor=math.inf, eval_threshold=0.0)
    assert (config.routing_dim, config.eval_capacity_factor, config.eval_threshold) == (4, math.inf, 0.0)
    assert ModelConfig(router="topk", select="threshold").select == "threshold"


def settings_of(model):
    return [(moe.router.eval_threshold, moe.eval_capacity_factor) for moe in model.moe_layers]


def test_test_routing_holds_inside_and_is_undone_after():
    model = make_gpt("threshold", n_layer=4, threshold=0.6, capacity_factor=2.0)
    with model.test_routing(threshold=0.0) as same:
        assert same is model and settings_of(model) == [(0.0, 2.0)] * 2
        with model.test_routing(capacity_factor=math.inf):
            assert settings_of(model) == [(0.0, math.inf)] * 2
        assert settings_of(model) == [(0.0, 2.0)] * 2
    assert settings_of(model) == [(0.6, 2.0)] * 2
    with pytest.raises(KeyError), model.test_routing(1.0, 1.0):
        raise KeyError
    assert settings_of(model) == [(0.6, 2.0)] * 2


@pytest.mark.parametrize("training, t, wanted", [(False, None, 3), (False, 0.0, 1), (True, None, 1), (True, 1.0, 1)])
def test_test_routing_and_eval_threshold_hold_at_test_only(training, t, wanted):
    model = make_gpt("threshold", training=training, threshold=0.0, eval_threshold=1.0)
    model.start_stats()
    with model.test_routing(threshold=t):
        model(make_batch(2, 8)[1])
    assert model.stats()[0]["wanted"] == wanted


# --- Parity with another implementation


def test_logits_equal_those_of_hugging_face_gpt2(tmp_path):
    transformers = pytest.importorskip("transformers")
    from pretrained import load_gpt2

    torch.manual_seed(0)
    shape = {"vocab_size": 29, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)  # biases and norms too
    theirs.save_pretrained(tmp_path)
    arguments, state = load_gpt2(tmp_path)
    ours = GPT(ModelConfig(**arguments)).eval()
    ours.load_state_dict(state)
    ids = torch.randint(29, (3, 16))
    with torch.no_grad():
        assert_same(ours(ids)[0], theirs(ids).logits, 1e-5)
