"""From what a router wants to what experts compute: capacity, drops, and the layer against the papers' equations."""

import math
import shutil

import pytest
import reference
import torch
import torch.nn.functional as F
from helpers import constants, lively, values_and_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import model
from model import (
    FFN,
    GPT,
    ExpertNorm,
    Experts,
    MaskedLM,
    MoE,
    Rows,
    dispatch,
    dispatch_apart,
    expert_capacity,
    kept_rows,
    ragged_linear,
    within_capacity,
)
from routers import NOT_CHOSEN, ROUTERS, Switch, by_rank, priority_key

D, V = 8, 13
VARIANTS = {name: (name, {}) for name in ROUTERS}  # name of the router, constants
VARIANTS |= {"topk": ("topk", {"K": 2}), "threshold": ("threshold", {"threshold": 0.7})}
VARIANTS |= {"x-moe-2": ("topk", {"K": 2, "score": "hypersphere", "x_moe": True})}
VARIANTS |= {"x-moe-sigmoid": ("switch", {"score": "hypersphere", "gate": "sigmoid", "routing_dim": 0})}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
ffn_and_stack = pytest.mark.parametrize("layers", [0, 2], ids=["ffn", "stack"])
train_and_test = pytest.mark.parametrize("training", [True, False], ids=["training", "test"])
fp32_and_bf16 = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_moe(
    variant="switch",
    dtype=torch.float64,
    training=False,
    layers=0,
    E=4,
    F_=8,
    gamma=1.0,
    eval_gamma=None,
    K=1,
    x_moe=False,
    **changes,
) -> MoE:
    """A layer with parameters large enough for every choice to matter."""
    name, more = VARIANTS[variant]
    own = {"K": K, "x_moe": x_moe} | more | changes
    router = ROUTERS[name](constants(n_embd=D, **without(own)), E, K=own["K"], V=V, x_moe=own["x_moe"])
    gelu = "none" if layers else "tanh"
    moe = MoE(router, D, F_, gelu, gamma, gamma if eval_gamma is None else eval_gamma, layers)
    return lively(moe, dtype).train(training)


def without(own: dict) -> dict:
    return {name: value for name, value in own.items() if name not in ("K", "x_moe")}


def make_batch(B, T, dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)
    h = torch.randn(B, T, D, generator=rng, dtype=torch.float64)
    return h.to(dtype), torch.randint(V, (B, T), generator=rng)


def crowd(moe, S):
    """S tokens that all prefer expert 0 (dot score), each by another margin."""
    h = torch.zeros(1, S, D, dtype=torch.float64)
    h[0, :, 0] = 1 + torch.randperm(S, generator=torch.Generator().manual_seed(0)) / S
    with torch.no_grad():
        moe.router.experts.copy_(torch.eye(*moe.router.experts.shape))
    return h, torch.zeros(1, S, dtype=torch.int64)


def assert_close(found, expected, tolerance):
    """Each tensor, as a whole."""
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape and x.isfinite().all()
        assert (x.double() - y.double()).norm() <= tolerance * (y.double().norm() + 1e-6)


@pytest.fixture
def unwritten_is_nan():
    """Memory that nobody wrote is NaN, so that none of it can be used unseen."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def as_on_cuda(monkeypatch):
    """The host asks for nothing that the device has: not how many rows are kept, nor whether choices are too many."""
    monkeypatch.setattr(model, "may_ask", lambda x: False)


# --- Capacity (XMoE eq. 3) and drops


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
        (64, 8, math.inf, 64),
        (0, 8, 1.0, 0),
        (0, 8, math.inf, 0),
    ],
)
def test_capacity_by_hand(tokens, experts, gamma, expected):
    assert expert_capacity(tokens, experts, gamma) == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 3000), st.integers(1, 128), st.decimals("0.01", "20", places=2))
def test_capacity_is_the_exact_ceiling(tokens, experts, gamma):
    assert expert_capacity(tokens, experts, float(gamma)) == reference.capacity(tokens, experts, gamma)


@pytest.mark.parametrize(
    "capacity, kept", [(1, [1]), (2, [1, 4]), (3, [0, 1, 4]), (4, [0, 1, 2, 4]), (6, [0, 1, 2, 4])]
)
def test_an_expert_keeps_its_first_choices_then_higher_p_then_earlier_tokens(capacity, kept):
    p = torch.tensor([0.3, 0.6, 0.3, 0.9, 0.6, 0.8])
    rank = torch.tensor([0, 0, 0, 0, 0, 1])
    priority = torch.stack([priority_key(p, rank), torch.zeros(6, dtype=torch.int64)], dim=1)
    priority[3, 0] = priority[5, 0] = NOT_CHOSEN
    result = within_capacity(priority, capacity)
    assert result[:, 0].nonzero()[:, 0].tolist() == kept
    assert result[:, 1].nonzero()[:, 0].tolist() == list(range(capacity))


def test_second_choices_are_dropped_before_first_ones_however_probable():
    p, rank = torch.tensor([0.49, 0.26, 0.48]), torch.tensor([1, 0, 1])
    assert within_capacity(priority_key(p, rank)[:, None], 2)[:, 0].tolist() == [True, True, False]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_capacity_keeps_what_a_stable_sort_would(data):
    S, E = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    some = st.sampled_from([NOT_CHOSEN, NOT_CHOSEN + 1, -5, -5, 0, 3])  # many ties
    priority = torch.tensor(data.draw(st.lists(some, min_size=S * E, max_size=S * E))).view(S, E)
    C = data.draw(st.integers(1, S))
    order = priority.argsort(dim=0, descending=True, stable=True)[:C]
    expected = torch.zeros(S, E, dtype=torch.bool).scatter_(0, order, True) & (priority > NOT_CHOSEN)
    assert torch.equal(within_capacity(priority, C), expected)


def test_dropped_tokens_get_exactly_zero():
    moe = make_moe(E=2)
    h, ids = crowd(moe, 12)
    y, _ = moe(h, ids)
    served = (y[0] != 0).any(dim=1)
    assert served.sum() == 6  # 12 / 2 at gamma 1
    assert set(served.nonzero()[:, 0].tolist()) == set(h[0, :, 0].topk(6).indices.tolist())


@train_and_test
def test_the_capacity_of_evaluation_holds_at_test_only(training):
    moe = make_moe(E=2, training=training, gamma=0.5, eval_gamma=1.5)
    y, _ = moe(*crowd(moe, 32))
    assert (y[0] != 0).any(dim=1).sum() == (8 if training else 24)


@pytest.mark.parametrize("S", [1, 3, 17, 40])
@train_and_test
@every_variant
def test_capacity_factor_E_drops_nothing(variant, training, S):
    moe = make_moe(variant, training=training, E=6)
    h, ids = make_batch(1, S)
    routing = moe.router(h[0] + 5, ids[0] * 0)  # crowded: all alike
    assert torch.equal(within_capacity(routing.priority, expert_capacity(S, 6, 6.0)), routing.wanted)


# --- The layer against the reference


def literal_layer(moe, h, ids, x_moe):
    """h (S, D) -> (S, D), balance loss; and how many choices are made, and served."""
    slow = reference.route(moe.router, h, ids, x_moe=x_moe)
    E, gamma = moe.router.E, moe.eval_gamma
    limit = None if gamma == math.inf else reference.capacity(len(h), E, gamma)
    served = reference.serve(slow.turn, limit, E)
    weights = [(ffn.w_in, ffn.b_in, ffn.w_out, ffn.b_out) for ffn in moe.experts]
    if moe.norms:
        norms = [(norm.weight, norm.bias) for norm in moe.norms]
        y = reference.stacks(h, slow.weight, served, [ffn + norm for ffn, norm in zip(weights, norms)])
    else:
        y = reference.moe(h, slow.weight, served, *weights[0])
    return y, torch.as_tensor(slow.balance_loss, dtype=h.dtype), len(slow.turn), len(served)


LAYERS = {  # gamma, F, padding
    "drops": (0.5, 8, False),
    "padding and odd rows": (1.0, 6, True),
    "no limit, units of their own": (math.inf, 1, False),
    "no limit, padding": (math.inf, 8, True),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("gamma, F_, padding", LAYERS.values(), ids=LAYERS)
@ffn_and_stack
@every_variant
def test_the_layer_follows_the_equations(unwritten_is_nan, variant, layers, gamma, F_, padding, dtype):
    moe = make_moe(variant, dtype, gamma=gamma, F_=F_, layers=layers)
    h, ids = make_batch(2, 11, dtype)
    h.requires_grad_()
    real = (torch.arange(22) % 4 != 1).nonzero().squeeze(1) if padding else torch.arange(22)
    y, balance = moe(h, ids, real if padding else None)
    slow, slow_balance, choices, served = literal_layer(
        moe, h.flatten(0, 1)[real], ids.flatten()[real], variant == "x-moe-2"
    )
    assert gamma != 0.5 or served < choices
    slow = torch.zeros(22, D, dtype=dtype).index_copy(0, real, slow).view(2, 11, D)
    inputs = (h, *moe.parameters())
    found, expected = (values_and_gradients(out, inputs) for out in ((y, balance), (slow, slow_balance)))
    assert_close(found, expected, 1e-9 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("junk", [0.0, -1e30, torch.finfo(torch.float64).max, math.nan])
@train_and_test
@every_variant
def test_padding_changes_nothing_and_gets_exactly_zero(variant, training, junk):
    moe = make_moe(variant, training=training)
    h, ids = make_batch(1, 17)  # capacity 5; were padding counted, it would be 6
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0], mask[1, 2:7] = True, True
    wide, wide_ids = torch.full((2, 12, D), junk, dtype=h.dtype), torch.zeros(2, 12, dtype=torch.int64)
    wide[mask], wide_ids[mask] = h[0], ids[0]
    h.requires_grad_(), wide.requires_grad_()
    alone, among = moe(h, ids), moe(wide, wide_ids, mask.flatten().nonzero().squeeze(1))
    assert (among[0][~mask] == 0).all()
    expected = values_and_gradients((alone[0][0], alone[1]), (h, *moe.parameters()))
    found = list(values_and_gradients((among[0][mask], among[1]), (wide, *moe.parameters())))
    assert (found[2][~mask] == 0).all()
    found[2] = found[2][mask][None]
    assert_close(found, expected, 1e-9)


def test_one_expert_is_an_ffn():
    moe, ffn = make_moe(E=1, F_=16), FFN(constants(n_embd=D, ffn_size=16), "tanh").double()
    experts = moe.experts[0]
    ffn.fc.load_state_dict({"weight": experts.w_in[0].detach(), "bias": experts.b_in[0].detach()})
    ffn.proj.load_state_dict({"weight": experts.w_out[0].detach().t(), "bias": experts.b_out[0].detach()})
    h, ids = make_batch(2, 5)
    torch.testing.assert_close(moe(h, ids)[0], ffn(h))


@ffn_and_stack
def test_no_tokens(layers):
    moe = make_moe("threshold", torch.float32, layers=layers)
    y, balance = moe(torch.zeros(0, 3, 8), torch.zeros(0, 3, dtype=torch.int64))
    assert y.shape == (0, 3, 8) and balance == 0
    y, balance = moe(torch.ones(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert y.shape == (2, 3, 8) and (y == 0).all()
    (y.sum() + balance).backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in moe.parameters())


# --- The dispatch alone, with exactly as many rows as are kept or with some to spare

CASES = {  # S, E, F, D, share of the pairs that is kept
    "an empty expert": (9, 4, 8, 8, 0.8),
    "one expert": (6, 1, 8, 8, 1.0),
    "S smaller than E": (3, 8, 8, 16, 0.6),
    "nothing is kept": (4, 3, 8, 8, 0.0),
    "all are kept": (5, 3, 8, 8, 1.0),
    "one token": (1, 5, 8, 8, 0.7),
    "width 1": (7, 6, 1, 8, 0.5),
    "width 6": (9, 4, 6, 6, 0.7),
}


def make_case(S, E, F_, D, share, layers, dtype):
    """h, gates (some of them 0 although kept), kept and experts; expert 1 keeps nothing unless all is kept."""
    rng = torch.Generator().manual_seed(0)
    kept = torch.rand(S, E, generator=rng) < share
    if share < 1:
        kept[:, 1:2] = False
    gates = torch.rand(S, E, generator=rng) * kept
    gates = torch.where(gates < 0.2, 0.0, gates).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    h = torch.randn(S, D, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    experts = nn.ModuleList(Experts(E, D, F_, "tanh") for _ in range(max(1, layers)))
    norms = nn.ModuleList(ExpertNorm(E, D) for _ in range(layers))
    return h, gates, kept, lively(experts, dtype), lively(norms, torch.promote_types(dtype, torch.float32))


def send(h, gates, rows: Rows, experts, norms):
    """As a layer does with rows of its own making; of stacks in the gates' type."""
    if not norms:
        return dispatch(h, gates, rows, experts[0])
    layer = make_moe(layers=len(norms))
    layer.experts, layer.norms = experts, norms
    return dispatch_apart(h.to(gates.dtype), gates, rows, layer.unweighted)


def plain(h, gates, kept, experts, norms):
    """Every expert on every token, then what is not kept is left out (XMoE eq. 2)."""
    x = u = h.unsqueeze(1).expand(-1, kept.shape[1], -1)  # (S, E, D)
    for i, ffn in enumerate(experts):
        seen = F.layer_norm(u, u.shape[2:]) * norms[i].weight + norms[i].bias if norms else u
        a = torch.einsum("sed,efd->sef", seen, ffn.w_in) + ffn.b_in
        y = torch.einsum("sef,efd->sed", F.gelu(a, approximate="tanh"), ffn.w_out) + ffn.b_out
        u = u + y if norms else y
    y = u - x if norms else u
    return ((gates * kept).unsqueeze(2) * y).sum(dim=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("spare", [None, 0, 5], ids=["exact", "just enough", "spare"])
@pytest.mark.parametrize("layers", [0, 2], ids=["ffn", "stack"])
@pytest.mark.parametrize("case", CASES)
def test_dispatch_gives_the_plain_sum(unwritten_is_nan, case, layers, spare, dtype):
    h, gates, kept, experts, norms = make_case(*CASES[case], layers, dtype)
    kept_number = int(kept.sum())
    rows = kept_rows(gates, kept, None if spare is None else kept_number + spare)
    assert len(rows.token) == kept_number + (spare or 0)
    inputs = (h, gates, *experts.parameters(), *norms.parameters())
    found = list(values_and_gradients([send(h, gates, rows, experts, norms)], inputs))

    h, gates, experts, norms = (
        h.detach().double().requires_grad_(),
        gates.detach().double(),
        experts.double(),
        norms.double(),
    )
    inputs = (h, gates.requires_grad_(), *experts.parameters(), *norms.parameters())
    expected = list(values_and_gradients([plain(h, gates, kept, experts, norms)], inputs))
    found[2], expected[2] = found[2] * kept, expected[2] * kept  # gates that are not kept are constants 0
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    assert found[0].dtype == torch.promote_types(dtype, torch.float32)
    assert_close(found, expected, tolerance)


def test_rows_stand_expert_by_expert_and_spare_ones_come_last():
    kept = torch.tensor([[True, False, True], [True, False, False]])
    gates = torch.tensor([[0.5, 0.0, 0.25], [1.0, 0.0, 0.0]])
    for most in (3, 5):
        rows = kept_rows(gates, kept, most)
        assert rows.token[:3].tolist() == [0, 1, 0] and rows.expert[:3].tolist() == [0, 0, 2]
        assert rows.gate.squeeze(1).tolist() == [0.5, 1.0, 0.25, 0.0, 0.0][:most]
        assert rows.counts.tolist() == [2, 0, 1]
        assert rows.used.squeeze(1).tolist() == [True, True, True, False, False][:most]


@fp32_and_bf16
def test_spare_rows_are_neither_read_nor_written(unwritten_is_nan, dtype):
    kept = torch.tensor([[True, False], [True, True]])
    rows = kept_rows(kept.float(), kept, 6)
    x, w = torch.ones(6, 8, dtype=dtype), torch.ones(2, 8, 8, dtype=dtype, requires_grad=True)
    x[3:] = math.nan
    x.requires_grad_()
    y = ragged_linear(x, w, rows)
    assert (y[:3] == 8).all() and (y[3:] == 0).all()
    dx, dw = torch.autograd.grad((y * torch.ones_like(y).fill_(2)).sum(), (x, w))
    assert (dx[:3] == 16).all() and (dx[3:] == 0).all()
    assert (dw[0] == 4).all() and (dw[1] == 2).all()


def test_4096_experts_of_size_1_train():  # the paper could not run it
    moe = make_moe("threshold", torch.float32, E=4096, F_=1, gamma=64.0, threshold=0.02)
    nn.init.normal_(moe.router.experts, std=0.3)
    h, experts = torch.randn(1, 64, D), moe.experts[0]
    y, _ = moe(h, torch.zeros(1, 64, dtype=torch.int64))
    routing = moe.router(h[0])
    kept = within_capacity(routing.priority, expert_capacity(64, 4096, 64.0))
    assert (kept.sum(dim=1) > 8).any()
    inputs = (*experts.parameters(), moe.router.experts)
    slow = plain(h[0], routing.weight, kept, [experts], None)
    assert_close(values_and_gradients([y[0]], inputs), values_and_gradients([slow], inputs), 1e-4)


# --- Half precision and compiled activations


@ffn_and_stack
@every_variant
def test_autocast_sums_the_experts_in_fp32_and_leaves_routing_alone(variant, layers):
    moe = make_moe(variant, torch.float32, layers=layers)
    h, ids = make_batch(2, 9, torch.float32)
    h.requires_grad_()
    expected = values_and_gradients(moe(h, ids), (h, *moe.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        y, balance = moe(h, ids)
        coarse, _ = moe(h.bfloat16(), ids)
    assert y.dtype == coarse.dtype == torch.float32 and torch.equal(balance, expected[1])
    assert torch.equal((y == 0).all(dim=2), (expected[0] == 0).all(dim=2))
    assert not torch.equal(y, expected[0])
    assert_close(values_and_gradients((y, balance), (h, *moe.parameters())), expected, 0.05)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")
def test_compiled_activations_are_the_eager_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # other processes compile too
    compile, calls = model.compiled_activation, []
    monkeypatch.setattr(model, "compiled_activation", lambda device: calls.append(device) or compile(device))
    for layers in (0, 2):
        results = []
        for worth, times in ((model.WORTH_COMPILING, 0), (0, max(1, layers))):
            calls.clear()
            with monkeypatch.context() as patch:
                patch.setattr(model, "WORTH_COMPILING", worth)
                moe = make_moe("topk", torch.float32, layers=layers)
                h, ids = make_batch(2, 9, torch.float32)
                h.requires_grad_()
                results.append(values_and_gradients(moe(h, ids), (h, *moe.parameters())))
            assert calls == ["cpu"] * times
        assert_close(results[1], results[0], 1e-5)


# --- Cost


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "spare"])
@pytest.mark.parametrize("S", [512, 4096])
def test_memory_follows_the_kept_rows(request, S, exact):
    """A buffer of E * C rows would be 8 times as large, an (S, E, C) tensor S times and more."""
    if not exact:
        request.getfixturevalue("as_on_cuda")
    moe = make_moe("switch", torch.float32, E=8, gamma=math.inf)
    h, ids = torch.randn(1, S, D, requires_grad=True), torch.zeros(1, S, dtype=torch.int64)
    with Largest() as largest:
        moe(h, ids)[0].sum().backward()
    assert largest.numel <= S * 8  # rows times the widest of D, F and E


@ffn_and_stack
def test_products_follow_the_kept_rows(layers):
    moe = make_moe("threshold", gamma=0.5, layers=layers)
    kept, (h, ids) = [], make_batch(2, 40)
    moe.watchers.append(lambda moe, h, routing, kept_here: kept.append(int(kept_here.sum())))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        moe(h, ids)
    F_, E, S = 8, 4, 80
    router, biases = 2 * S * D * E, 0 if layers else 2 * S * E * D
    assert 0 < kept[0] <= 40
    assert counter.get_total_flops() == router + biases + max(1, layers) * kept[0] * 4 * D * F_


# --- What CUDA runs, as far as a CPU can run it


LIMITS = {  # gamma, padding
    "drops": (0.5, False),
    "drops and padding": (0.5, True),
    "two rows a token": (2.0, False),
    "three rows a token": (3.0, False),
    "no limit": (math.inf, False),
    "no limit, padding": (math.inf, True),
}


@fp32_and_bf16
@pytest.mark.parametrize("gamma, padding", LIMITS.values(), ids=LIMITS)
@ffn_and_stack
@every_variant
def test_a_layer_that_makes_room_computes_what_one_that_counts_does(
    monkeypatch, unwritten_is_nan, variant, layers, gamma, padding, dtype
):
    """On a GPU nobody asks how many rows are kept: there is room for the most that there can be."""
    moe = make_moe(variant, torch.float32, training=True, layers=layers, gamma=gamma)
    h, ids = make_batch(2, 11, torch.float32)
    real = (torch.arange(22) % 4 != 1).nonzero().squeeze(1) if padding else None
    inputs, results, sizes = (h.requires_grad_(), *moe.parameters()), [], []
    serve = moe.serve
    monkeypatch.setattr(moe, "serve", lambda h, gates, rows: sizes.append(len(rows.token)) or serve(h, gates, rows))
    for may_ask in (True, False):
        monkeypatch.setattr(model, "may_ask", lambda x, may_ask=may_ask: may_ask)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            outputs = moe(h, ids, real)
        results.append(values_and_gradients(outputs, inputs))
    assert_close(results[1], results[0], 1e-5 if dtype == torch.float32 else 0.02)
    kept, room = sizes
    S = 22 if real is None else len(real)
    assert kept <= room == moe.most_rows(S, 4) or room == kept  # where all may go to all, counting is cheaper


@pytest.mark.parametrize(
    "gamma, E, most, room", [(0.5, 8, 1, 64), (2.0, 8, 1, 64), (0.5, 8, 2, 32), (math.inf, 8, 3, 192)]
)
def test_room_is_as_little_as_is_sure(gamma, E, most, room):
    """Of the tokens' choices and the experts' places the fewer; of some of the experts, as many as they can have."""
    moe = make_moe("topk", E=E, gamma=gamma, K=most)
    moe.router.K = most
    assert moe.router.max_choices == most
    assert moe.most_rows(64, E) == min(64 * most, E * moe.capacity(64))
    assert moe.most_rows(64, 2) == min(64 * min(most, 2), 2 * moe.capacity(64))


class Greedy(Switch):
    """Says that a token chooses one expert, and chooses two."""

    def choose(self, score, probs):
        return by_rank(probs.argsort(dim=1, descending=True), probs, 2)


def test_a_router_that_chooses_more_than_it_says_is_caught():
    moe = make_moe("switch")
    greedy = Greedy(constants(n_embd=D), 4).double()
    greedy.load_state_dict(moe.router.state_dict())
    assert moe(*make_batch(2, 5))[0].isfinite().all()
    moe.router = greedy
    with pytest.raises(ValueError, match="Greedy chose 2 experts for a token, but its class says most = 1"):
        moe(*make_batch(2, 5))
    greedy.most = 2
    moe(*make_batch(2, 5))


STEPS = {
    "dense": (GPT, dict(router="dense")),
    "switch": (GPT, dict(router="switch")),
    "switch without a limit": (GPT, dict(router="switch", capacity=math.inf)),
    "topk": (GPT, dict(router="topk", split=2)),
    "threshold": (GPT, dict(router="threshold")),
    "hash": (GPT, dict(router="hash")),
    "expert_choice": (GPT, dict(router="expert_choice")),
    "x-moe": (MaskedLM, dict(router="hypersphere")),
    "x-moe with drops": (MaskedLM, dict(router="hypersphere", gate="sigmoid", capacity_factor=0.5)),
}
every_step = pytest.mark.parametrize("row", STEPS)


def make_step(row):
    """A model, and the function that makes its loss out of ids (2, 16) and the places of real tokens."""
    kind, options = STEPS[row]
    torch.manual_seed(0)
    net = kind(constants(**{"n_embd": 16, "ffn_size": 32} | options), V)

    def step(forward, ids, real):
        with torch.autocast(ids.device.type, torch.bfloat16):
            logits, balance = forward(ids) if kind is GPT else forward(ids, real[::3], real)
        target = ids.flatten() if kind is GPT else ids.flatten()[real[::3]]
        return F.cross_entropy(logits.flatten(0, -2).float(), target) + 0.01 * balance

    return net, step


@every_step
def test_a_step_asks_the_device_nothing(as_on_cuda, row):
    """Tensors without values: a host read, such as int(x), tolist() or nonzero(), raises."""
    with FakeTensorMode():
        net, step = make_step(row)
        step(net, torch.randint(V, (2, 16)), torch.arange(20)).backward()
    assert all(p.grad is not None for name, p in net.named_parameters() if "w_in" in name)


@pytest.mark.parametrize("row", ["threshold", "hash", "x-moe with drops"])
def test_a_step_compiles_in_one_graph(as_on_cuda, row):
    torch.compiler.reset()
    (net, step), results = make_step(row), []
    ids, real = torch.randint(V, (2, 16)), torch.arange(20)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=False)
    for forward in (net, compiled):
        results.append(values_and_gradients([step(forward, ids, real)], list(net.parameters())))
    assert_close(results[1], results[0], 0.03)


def test_batches_of_all_sizes_compile_in_one_graph(as_on_cuda):
    """As those of padded batches are, S being the number of real tokens."""
    torch.compiler.reset()
    moe = make_moe("x-moe-sigmoid", torch.float32, gamma=math.inf, layers=2)
    compiled, (h, ids) = torch.compile(moe, backend="eager", fullgraph=True), make_batch(2, 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for S in (20, 17, 30):
            real = torch.arange(S)
            assert_close(compiled(h, ids, real), moe(h, ids, real), 0.02)


def test_a_layer_in_fp32_compiles_on_a_cpu():
    """In several graphs: between them the host asks how many rows are kept."""
    torch.compiler.reset()
    moe, (h, ids) = make_moe("threshold", torch.float32), make_batch(2, 16, torch.float32)
    compiled, results = torch.compile(moe, backend="aot_eager"), []
    for layer in (moe, compiled):
        results.append(values_and_gradients(layer(h, ids), list(moe.parameters())))
    assert_close(results[1], results[0], 1e-5)


@on_cuda
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("row", ["switch", "topk", "threshold", "x-moe with drops"])
def test_a_step_on_cuda_asks_the_device_nothing_and_agrees_with_the_cpu(as_on_cuda, row, compiled):
    (net, step), ids, real = make_step(row), torch.randint(V, (2, 16)), torch.arange(20)
    expected = step(net, ids, real)
    net, ids, real = net.cuda(), ids.cuda(), real.cuda()
    forward = torch.compile(net, fullgraph=True, dynamic=False) if compiled else net
    for _ in range(2):  # the first one compiles
        step(forward, ids, real).backward()
        net.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = step(forward, ids, real)
        again.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(again.cpu(), expected, rtol=0.02, atol=0.02)
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)
