"""The decoder language model around its sparse layers, and what the constants of sparse layers mean."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, constants, lively

from model import GPT, Encoder, Experts, MaskedLM, Stacks, Translator
from routers import ROUTERS

V = 13
VARIANTS = {name: {"router": name} for name in ROUTERS}
VARIANTS |= {"topk": {"router": "topk", "split": 2}, "threshold": {"router": "threshold", "split": 2}}
VARIANTS |= {"x-moe": {"router": "switch", "score": "hypersphere"}}
VARIANTS |= {"x-moe-sigmoid": {"router": "switch", "score": "hypersphere", "gate": "sigmoid", "routing_dim": 0}}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def make_gpt(variant="switch", training=False, **options) -> GPT:
    """A decoder with parameters large enough for every choice to matter."""
    model = lively(GPT(constants(**{"block_size": 8, "expert_ffns": 3} | VARIANTS[variant] | options), V))
    model.wte.weight.data = 3 * F.normalize(model.wte.weight.data, dim=1)  # no token is everyone's guess
    model.wpe.weight.data *= 0.3
    return model.train(training)


def make_ids(B, T, seed=0):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


# --- The language model


def test_the_outputs_bias_is_added_to_all_logits():
    model, ids = make_gpt("threshold", frequency_bias=True), make_ids(3, 8)
    assert make_gpt().bias is None
    assert not GPT(constants(frequency_bias=True), V).bias.any()  # until a script fills it in
    more = 3 * torch.randn(13, dtype=torch.float64)
    with torch.no_grad():
        before, _ = model(ids)
        model.bias += more
        torch.testing.assert_close(model(ids)[0], before + more)


def test_balance_loss_is_summed_over_layers():
    model, losses = make_gpt("x-moe", n_layer=4), []
    for moe in model.moe_layers:
        moe.register_forward_hook(lambda _, __, out: losses.append(out[1]))
    _, total = model(make_ids(2, 8))
    assert len(losses) == 2 and min(losses) > 0
    torch.testing.assert_close(total, sum(losses))


TRANSLATOR = dict(router="dense", moe_after=(), decoder_moe=True)
STARTS = [  # a model, its constants, and the deviation of what writes to the residual stream: in GPT-2 by the depth
    (GPT, dict(n_layer=8), 0.02 / 4),
    (Translator, TRANSLATOR | dict(n_layer=8, decoder_layers=2), 0.02 / 4),
    (Translator, TRANSLATOR | dict(n_layer=2, decoder_layers=8), 0.02 / 4),
    (MaskedLM, dict(router="dense", relative_bias=True), 0.02),
]


@pytest.mark.parametrize("kind, changes, written", STARTS, ids=str)
def test_weights_start_from_the_normal_that_was_asked_for(kind, changes, written):
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


def test_dropout_follows_embeddings_and_is_in_attention_weights():
    """That behind attention and FFN is tested in test_translator.py, of the same blocks."""
    model, reached = make_gpt(dropout=1.0, training=True), []
    assert all(block.attn.dropout == 1.0 for block in model.blocks)
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: reached.append(inputs[0]))
    model(make_ids(2, 8))
    assert (reached[0] == 0).all()


@pytest.mark.parametrize("kind", [GPT, Encoder])
def test_too_long_a_sequence_is_refused(kind):
    with pytest.raises(ValueError, match="a sequence of 17 tokens is longer than block_size = 16"):
        kind(constants(), V)(torch.full((1, 17), 5))


@every_variant
def test_without_drops_no_logit_depends_on_a_later_token(variant, at=4):
    model, ids = make_gpt(variant, n_layer=4, capacity=0.5), make_ids(3, 8)
    changed = ids.clone()
    changed[:, at:] = (changed[:, at:] + 5) % V
    with model.no_limit(), torch.no_grad():
        before, after = model(ids)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :at], after[:, :at])
    assert (before[:, at:] - after[:, at:]).abs().max() > 1e-3


def test_no_limit_holds_inside_and_is_undone_after():
    model = make_gpt(n_layer=4, capacity=2.0, eval_capacity=1.5)
    limits = lambda: [(moe.capacity_factor, moe.eval_capacity_factor) for moe in model.moe_layers]  # noqa: E731
    assert model.limited_at_test and not make_gpt(capacity=3.0).limited_at_test  # 3 experts: as many places as tokens
    with model.no_limit():
        assert not model.limited_at_test and limits() == [(2.0, math.inf)] * 2
    assert limits() == [(2.0, 1.5)] * 2
    with pytest.raises(KeyError), model.no_limit():
        raise KeyError
    assert limits() == [(2.0, 1.5)] * 2


# --- Generation


def greedy(model, ids, new_tokens):
    with torch.no_grad():
        for _ in range(new_tokens):
            best = model(ids[:, -model.config.block_size :])[0][:, -1].argmax(dim=1, keepdim=True)
            ids = torch.cat([ids, best], dim=1)
    return ids


@every_variant
def test_top_k_1_is_the_greedy_loop_also_beyond_block_size(variant):
    """Whatever else is in the batch, and with the output's bias, which decides much of it."""
    model, ids = make_gpt(variant, n_layer=4, capacity=0.25, frequency_bias=True), make_ids(8, 3)
    model.bias.data = 3 * torch.randn(13, dtype=torch.float64)
    out = model.generate(ids, 8, top_k=1)
    assert out.shape == (8, 11) and torch.equal(out[:, :3], ids)
    assert not torch.equal(out, greedy(model, ids, 8))  # drops would have shown
    assert torch.equal(out[:2], model.generate(ids[:2], 8, temperature=1e-6))
    with model.no_limit():
        assert torch.equal(out, greedy(model, ids, 8))


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
    assert model.generate(ids, 1, top_k=100).shape == (1, 5)  # more than there are is all


def test_generation_stops_where_every_row_has_had_the_end():
    model, ids = make_gpt(), make_ids(2, 4)
    whole = model.generate(ids, 8, top_k=1)
    end = int(whole[0, 6])
    first = [4 + row[4:].tolist().index(end) if end in row[4:] else 11 for row in whole]
    assert torch.equal(model.generate(ids, 8, top_k=1, end=end), whole[:, : 1 + max(first)])


@pytest.mark.parametrize("training", [True, False])
def test_generation_leaves_the_model_as_it_was(training):
    model, ids = make_gpt(training=training, dropout=0.5), make_ids(1, 2)
    assert torch.equal(model.generate(ids, 4, top_k=1), model.generate(ids, 4, top_k=1))  # no dropout
    assert all(m.training == training for m in model.modules())
    assert [moe.eval_capacity_factor for moe in model.moe_layers] == [1.0]


# --- What the constants mean

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
def test_constants_that_make_no_model_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(constants(**options), V)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("split", [None, 1, 2, 8])
def test_every_split_of_an_xmoe_layer_keeps_parameters_and_flops(router, split):  # XMoE eq. 6
    moe = GPT(constants(router=router, split=split, ffn_size=32, capacity=1.5, eval_capacity=0.5), V).moe_layers[0]
    k = split or {"topk": 4, "threshold": 4}.get(router, 1)
    assert moe.router.E == 4 * k and moe.experts.w_in.shape == (4 * k, 32 // k, 8)
    assert (moe.capacity_factor, moe.eval_capacity_factor) == (1.5 * k, 0.5 * k)
    assert moe.router.K == {"topk": k, "hypersphere": k, "threshold": 4 * k}.get(router, 1)
    assert moe.capacity(64) == 64 * 1.5 * k / (4 * k) and moe.eval().capacity(64) == 64 * 0.5 * k / (4 * k)


def test_top_k_is_apart_from_the_split():
    """As many experts, of the same size, with the same places: but a token chooses so many."""
    for k in (1, 3):
        usual, own = (GPT(constants(router="topk", split=4, top_k=K), V).moe_layers[0] for K in (None, k))
        assert own.router.K == k and usual.router.K == 4
        assert own.experts.w_in.shape == usual.experts.w_in.shape and own.capacity(64) == usual.capacity(64)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_an_x_moe_layer_has_the_experts_that_are_named(layers):  # X-MoE 4.1
    given = dict(router="topk", top_k=2, expert_size=6, expert_layers=layers, capacity_factor=1.5)
    moe = Encoder(constants(**given), V).moe_layers[0]
    assert (moe.router.E, moe.router.K, type(moe.experts)) == (4, 2, Stacks if layers else Experts)
    ffns, norms = (moe.experts.ffns, moe.experts.norms) if layers else ([moe.experts], [])
    assert len(ffns) == max(1, layers) and len(norms) == layers
    assert all(ffn.w_in.shape == (4, 6, 8) for ffn in ffns)
    assert moe.capacity_factor == moe.eval_capacity_factor == 1.5
    start = moe.router.experts
    torch.testing.assert_close(start.norm(dim=1), torch.full((4,), 0.1))
    assert all((ffn.w_out == 0).all() == bool(layers) for ffn in ffns)  # a stack changes nothing at first
    assert all((norm.weight == 1).all() and (norm.bias == 0).all() for norm in norms)


OTHER = dict(threshold=0.3, init_temperature=0.9, routing_dim=3, eval_threshold=0.2, score="hypersphere")
OTHER |= dict(gate="sigmoid", router_std=0.7)


@pytest.mark.parametrize("router", ROUTERS)
def test_constants_that_a_router_does_not_read_change_nothing(router):
    kind = ROUTERS[router]
    for name, value in OTHER.items():
        if value == getattr(kind, name, None):
            value = {"sigmoid": "softmax", "hypersphere": "dot"}[value]
        outputs = []
        for given in ({}, {name: value}):
            torch.manual_seed(0)
            model = GPT(constants(**{"router": router, "router_std": 1.0, "threshold": 0.8} | given), V)
            outputs.append(model.eval()(make_ids(2, 16)))
        same = torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(outputs[0][1], outputs[1][1])
        if name not in kind.reads:
            assert same, name
        elif name not in ("init_temperature", "router_std"):  # the one is of a sphere, the other not of all it draws
            assert not same, name


def test_a_step_of_a_sparse_decoder_enters_few_functions():
    """How much a reader must know: the project's functions that a forward and a backward pass enter."""
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
    assert 20 < len(entered) <= 31  # two of them check choices, in tests alone
