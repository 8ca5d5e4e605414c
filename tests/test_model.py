"""The decoder language model, its generation, and the constants that define sparse layers."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import PAPERS, ROOT, constants, lively

from model import GPT, Encoder, Experts, MaskedLM, Stacks, Translator
from routers import ROUTERS

V = 13
VARIANTS = {name: {"router": name} for name in ROUTERS}
VARIANTS |= {"topk": {"router": "topk", "split": 2}, "threshold": {"router": "threshold", "split": 2}}
VARIANTS |= {"x-moe": {"router": "switch", "score": "hypersphere"}}
VARIANTS |= {"x-moe-sigmoid": {"router": "switch", "score": "hypersphere", "gate": "sigmoid", "routing_dim": 0}}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def make_gpt(variant="switch", training=False, **options) -> GPT:
    """A decoder with parameters large enough for every routing choice to matter."""
    model = lively(GPT(constants(**{"block_size": 8, "expert_ffns": 3} | VARIANTS[variant] | options), V))
    model.wte.weight.data = 3 * F.normalize(model.wte.weight.data, dim=1)  # no token is predicted everywhere
    model.wpe.weight.data *= 0.3
    return model.train(training)


def make_ids(B, T, seed=0):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


# --- The language model


def test_the_output_bias_is_added_to_all_logits():
    model, ids = make_gpt("threshold", frequency_bias=True), make_ids(3, 8)
    change = 3 * torch.randn(13, dtype=torch.float64)
    with torch.no_grad():
        before, _ = model(ids)
        model.bias += change
        torch.testing.assert_close(model(ids)[0], before + change)


def test_the_output_bias_is_optional_and_starts_at_0():
    assert make_gpt().bias is None
    assert not GPT(constants(frequency_bias=True), V).bias.any()


def test_the_loss_is_the_mean_cross_entropy_over_targets_that_count():
    model, ids, targets = make_gpt(frequency_bias=True), make_ids(2, 8), make_ids(2, 8, seed=1)
    model.bias.data = torch.linspace(-2, 2, V).double()
    targets[0, :5] = -100
    logits, balance = model(ids)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(ids, targets), (expected, balance))
    assert model(ids, torch.full_like(targets, -100))[0] == 0


def test_balance_loss_is_summed_over_layers():
    model, losses = make_gpt("x-moe", n_layer=4), []
    for moe in model.moe_layers:
        moe.register_forward_hook(lambda _, __, out: losses.append(out[1]))
    _, total = model(make_ids(2, 8))
    assert len(losses) == 2
    assert min(losses) > 0
    torch.testing.assert_close(total, sum(losses))


TRANSLATOR = dict(router="dense", moe_after=(), decoder_moe=True)
STARTS = [  # model, constants, deviation of matrices that write to the residual stream (GPT-2: smaller if deeper)
    (GPT, dict(n_layer=8), 0.02 / 4),
    (Translator, TRANSLATOR | dict(n_layer=8, decoder_layers=2), 0.02 / 4),
    (Translator, TRANSLATOR | dict(n_layer=2, decoder_layers=8), 0.02 / 4),
    (MaskedLM, dict(router="dense", relative_bias=True), 0.02),
]


@pytest.mark.parametrize("kind, changes, written", STARTS, ids=str)
def test_matrices_start_normal_biases_at_0_and_norms_at_1(kind, changes, written):
    torch.manual_seed(0)
    size = dict(n_embd=64, ffn_size=256, init_std=0.02, router_std=0.02)
    for name, p in kind(constants(**size | changes), 60).named_parameters():
        if name.rpartition(".")[2].startswith("b"):
            assert (p == 0).all(), name
        elif "ln_" in name or "gate_w" in name:
            assert (p == 1).all(), name
        else:
            expected = written if name.endswith(("proj.weight", "w_out")) else 0.02
            assert p.std().item() == pytest.approx(expected, rel=0.25), name


def test_embeddings_and_attention_weights_have_dropout():
    """test_translator.py tests the dropout after attention and FFN, in the same blocks."""
    model, block_inputs = make_gpt(dropout=1.0, training=True), []
    assert all(block.attn.dropout == 1.0 for block in model.blocks)
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: block_inputs.append(inputs[0]))
    model(make_ids(2, 8))
    assert (block_inputs[0] == 0).all()


@pytest.mark.parametrize("kind", [GPT, Encoder])
def test_a_sequence_longer_than_block_size_is_refused(kind):
    with pytest.raises(ValueError, match="a sequence of 17 tokens is longer than block_size = 16"):
        kind(constants(), V)(torch.full((1, 17), 5))


@every_variant
def test_without_drops_no_logit_depends_on_a_later_token(variant, at=4):
    model, ids = make_gpt(variant, n_layer=4, capacity=0.5), make_ids(3, 8)
    changed_ids = ids.clone()
    changed_ids[:, at:] = (ids[:, at:] + 5) % V
    with model.no_limit(), torch.no_grad():
        before, after = model(ids)[0], model(changed_ids)[0]
    torch.testing.assert_close(before[:, :at], after[:, :at])
    assert (before[:, at:] - after[:, at:]).abs().max() > 1e-3


def capacity_factors(model):
    return [(moe.capacity_factor, moe.eval_capacity_factor) for moe in model.moe_layers]


def test_no_limit_lifts_the_limit_at_test_and_restores_it():
    model = make_gpt(n_layer=4, capacity=2.0, eval_capacity=1.5)
    with model.no_limit():
        assert capacity_factors(model) == [(2.0, math.inf)] * 2
        assert not model.limited_at_test
    assert capacity_factors(model) == [(2.0, 1.5)] * 2
    with pytest.raises(KeyError), model.no_limit():
        raise KeyError
    assert capacity_factors(model) == [(2.0, 1.5)] * 2


def test_capacity_limits_only_below_the_number_of_experts():
    assert make_gpt(capacity=2.9).limited_at_test
    assert not make_gpt(capacity=3.0).limited_at_test  # each expert has room for every token


# --- Generation


def greedy(model, ids, new_tokens):
    with torch.no_grad():
        for _ in range(new_tokens):
            best = model(ids[:, -model.config.block_size :])[0][:, -1].argmax(dim=1, keepdim=True)
            ids = torch.cat([ids, best], dim=1)
    return ids


@every_variant
def test_generating_with_top_k_1_is_greedy_also_beyond_block_size(variant):
    """Without a capacity limit, for any batch, and with an output bias that matters."""
    model, ids = make_gpt(variant, n_layer=4, capacity=0.25, frequency_bias=True), make_ids(8, 3)
    model.bias.data = 3 * torch.randn(13, dtype=torch.float64)
    out = model.generate(ids, 8, top_k=1)
    assert out.shape == (8, 11)
    assert torch.equal(out[:, :3], ids)
    assert torch.equal(out[:2], model.generate(ids[:2], 8, temperature=1e-6))
    with model.no_limit():
        assert torch.equal(out, greedy(model, ids, 8))
    limit_matters = not torch.equal(out, greedy(model, ids, 8))
    assert limit_matters or model.moe_layers[0].router.beside  # a shared expert may decide the tokens


def test_samples_come_from_the_top_k_and_follow_the_temperature():
    model, ids = make_gpt(), make_ids(1, 4)
    with torch.no_grad(), model.no_limit():
        logits = model(ids)[0][0, -1]
    torch.manual_seed(0)
    drawn = model.generate(ids.expand(4000, -1), 1, temperature=3.0, top_k=3)[:, -1]
    share = torch.bincount(drawn, minlength=13) / 4000
    expected = torch.zeros(13).double()
    best = logits.topk(3).indices
    expected[best] = (logits[best] / 3.0).softmax(dim=0)
    assert ((share > 0) == (expected > 0)).all()
    assert (share - expected).abs().max() < 0.04
    assert model.generate(ids, 1, top_k=100).shape == (1, 5)  # a top_k above V means all tokens


def test_generation_stops_once_every_row_has_the_end_token():
    model, ids = make_gpt(), make_ids(2, 4)
    full = model.generate(ids, 8, top_k=1)
    end = int(full[0, 6])
    end_places = [4 + row[4:].tolist().index(end) if end in row[4:] else 11 for row in full]
    assert torch.equal(model.generate(ids, 8, top_k=1, end=end), full[:, : 1 + max(end_places)])


def test_generation_restores_the_limit():
    model = make_gpt()
    model.generate(make_ids(1, 2), 4)
    assert [moe.eval_capacity_factor for moe in model.moe_layers] == [1.0]


# --- The constants of sparse layers

MT = dict(decoder_layers=1, decoder_moe=True)
REFUSED = [
    (GPT, dict(n_head=3), "n_head = 3 does not divide n_embd = 8"),
    (GPT, dict(split=3), "split = 3 does not divide ffn_size = 16"),
    (GPT, dict(split=32), "split = 32 does not divide ffn_size = 16"),
    (GPT, dict(moe_every=5), "moe_every = 5 leaves no block of 2 with experts"),
    (Translator, dict(moe_after=(), moe_every=2, **MT), "moe_every = 2 leaves no block of 1 with experts"),
    (Encoder, dict(moe_after=()), r"moe_after must name layers from 1 to n_layer = 2, not \(\)"),
    (Encoder, dict(moe_after=(0,)), r"moe_after must name layers from 1 to n_layer = 2, not \(0,\)"),
    (Encoder, dict(moe_after=(2, 5)), r"moe_after must name layers from 1 to n_layer = 2, not \(2, 5\)"),
    (Encoder, dict(router="topk", top_k=5), r"top_k must be in \[1, experts = 4\], not 5"),
    (Encoder, dict(router="topk", top_k=0), r"top_k must be in \[1, experts = 4\], not 0"),
]


@pytest.mark.parametrize("kind, options, message", REFUSED, ids=str)
def test_invalid_constants_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(constants(**options), V)


@pytest.mark.parametrize("router", PAPERS)
@pytest.mark.parametrize("split", [None, 1, 2, 8])
def test_split_changes_neither_parameters_nor_flops_of_an_xmoe_layer(router, split):  # XMoE eq. 6
    moe = GPT(constants(router=router, split=split, ffn_size=32, capacity=1.5, eval_capacity=0.5), V).moe_layers[0]
    k = split or {"topk": 4, "threshold": 4}.get(router, 1)
    assert moe.router.E == 4 * k
    assert moe.router.K == {"topk": k, "hypersphere": k, "threshold": 4 * k}.get(router, 1)
    assert moe.experts.w_in.shape == (4 * k, 32 // k, 8)
    assert (moe.capacity_factor, moe.eval_capacity_factor) == (1.5 * k, 0.5 * k)
    assert moe.capacity(64) == 64 * 1.5 / 4
    assert moe.eval().capacity(64) == 64 * 0.5 / 4


@pytest.mark.parametrize("top_k", [1, 3])
def test_top_k_changes_neither_experts_nor_capacity(top_k):
    by_split, moe = (GPT(constants(router="topk", split=4, top_k=k), V).moe_layers[0] for k in (None, top_k))
    assert by_split.router.K == 4
    assert moe.router.K == top_k
    assert moe.experts.w_in.shape == by_split.experts.w_in.shape
    assert moe.capacity(64) == by_split.capacity(64)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_an_x_moe_layer_follows_its_constants(layers):  # X-MoE 4.1
    options = dict(router="topk", top_k=2, expert_size=6, expert_layers=layers, capacity_factor=1.5)
    moe = Encoder(constants(**options), V).moe_layers[0]
    ffns, norms = (moe.experts.ffns, moe.experts.norms) if layers else ([moe.experts], [])
    assert (moe.router.E, moe.router.K) == (4, 2)
    assert type(moe.experts) is (Stacks if layers else Experts)
    assert [ffn.w_in.shape for ffn in ffns] == [(4, 6, 8)] * max(1, layers)
    assert (moe.capacity_factor, moe.eval_capacity_factor) == (1.5, 1.5)
    torch.testing.assert_close(moe.router.experts.norm(dim=1), torch.full((4,), 0.1))
    assert all((ffn.w_out == 0).all() == bool(layers) for ffn in ffns)  # stacks start as the identity
    assert len(norms) == layers
    assert all((norm.weight == 1).all() for norm in norms)
    assert all((norm.bias == 0).all() for norm in norms)


OPTIONS = dict(threshold=0.3, init_temperature=0.9, routing_dim=3, eval_threshold=0.2, score="hypersphere")
OPTIONS |= dict(gate="sigmoid", router_std=0.7)


@pytest.mark.parametrize("router", ROUTERS)
def test_only_constants_in_reads_change_a_router(router):
    kind = ROUTERS[router]
    for name, value in OPTIONS.items():
        if value == getattr(kind, name, None):
            value = {"sigmoid": "softmax", "hypersphere": "dot"}[value]
        outputs = []
        for changes in ({}, {name: value}):
            torch.manual_seed(0)
            model = GPT(constants(**{"router": router, "router_std": 1.0, "threshold": 0.8} | changes), V)
            outputs.append(model.eval()(make_ids(2, 16)))
        (logits, balance), (changed_logits, changed_balance) = outputs
        same = torch.equal(logits, changed_logits) and torch.equal(balance, changed_balance)
        if name not in kind.reads:
            assert same, name
        elif name not in ("init_temperature", "router_std"):  # read only on a hypersphere, or without one
            assert not same, name


def test_a_training_step_of_a_sparse_decoder_enters_few_functions():
    """Limits how many of the project's functions one must read to follow a forward and a backward pass."""
    model, entered, before = make_gpt("threshold"), set(), sys.getprofile()

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and Path(code.co_filename).parent == ROOT:
            entered.add((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    try:
        loss, balance = model(make_ids(2, 8), make_ids(2, 8))
        (loss + 0.01 * balance).backward()
    finally:
        sys.setprofile(before)
    assert 20 < len(entered) <= 31  # check_priority and check_choices are two of them
