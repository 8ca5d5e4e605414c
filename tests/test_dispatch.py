"""The sparse layer after the router: capacity, drops, experts and their sum, compared with the papers' equations."""

import math

import pytest
import reference
import torch
import torch.nn.functional as F
from helpers import PAPERS, constants, lively, values_and_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import model
from model import Experts, MoE, Stacks, within_capacity
from routers import NOT_CHOSEN, ROUTERS

D, V = 8, 13
VARIANTS = {name: (name, {}) for name in PAPERS}  # router, constants
VARIANTS |= {"topk": ("topk", {"K": 2}), "threshold": ("threshold", {"threshold": 0.7})}
VARIANTS |= {"x-moe-2": ("topk", {"K": 2, "score": "hypersphere", "x_moe": True})}
VARIANTS |= {"x-moe-sigmoid": ("switch", {"score": "hypersphere", "gate": "sigmoid", "routing_dim": 0})}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
ffn_and_stack = pytest.mark.parametrize("layers", [0, 2], ids=["ffn", "stack"])


def make_moe(variant="switch", dtype=torch.float64, training=False, layers=0, E=4, F_=8, gamma=1.0, **changes) -> MoE:
    """A layer with parameters large enough for every choice to matter."""
    name, options = VARIANTS[variant]
    options = options | changes
    K, x_moe = options.pop("K", 1), options.pop("x_moe", False)
    router = ROUTERS[name](constants(n_embd=D, **options), E, top_k=min(K, E), V=V, x_moe=x_moe)
    experts = Stacks(E, D, F_, "none", layers) if layers else Experts(E, D, F_, "tanh")
    moe = MoE(router, experts, gamma, gamma)
    return lively(moe, dtype).train(training)


def make_batch(B, T, dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)
    h = torch.randn(B, T, D, generator=rng, dtype=torch.float64)
    return h.to(dtype), torch.randint(V, (B, T), generator=rng)


def assert_close(tensors, expected, tolerance):
    """Compares each pair of tensors by the norm of the difference."""
    for x, y in zip(tensors, expected, strict=True):
        assert x.shape == y.shape
        assert x.isfinite().all()
        assert (x.double() - y.double()).norm() <= tolerance * (y.double().norm() + 1e-6)


# --- Capacity (XMoE eq. 3) and drops


CAPACITIES = [  # tokens, experts, gamma, C
    (100, 10, 1.0, 10),
    (100, 10, 1.1, 11),  # in floating point, 1.1 * 100 / 10 > 11
    (70, 7, 0.7, 7),  # in floating point, 0.7 * 70 / 7 < 7
    (100, 8, 1, 13),
    (1901, 128, 1.01, 16),  # 15 + 1 / 12,800, rounded up
    (2048, 64, 8.0, 256),
    (40, 8, 0.5, 4),  # at least 4
    (3, 8, 1.0, 3),  # at most all tokens
    (64, 8, 9.5, 64),
    (64, 8, math.inf, 64),
    (0, 8, 1.0, 0),
    (0, 8, math.inf, 0),
]


@pytest.mark.parametrize("tokens, experts, gamma, expected", CAPACITIES)
def test_capacity_by_hand(tokens, experts, gamma, expected):
    assert make_moe(E=experts, gamma=gamma).capacity(tokens) == expected


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_capacity_keeps_the_first_C_tokens_of_a_stable_sort(data):
    S, E = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    C = data.draw(st.integers(1, S))
    levels = st.sampled_from([NOT_CHOSEN, -1e300, -5.0, -5.0, 0.0, 3.0])  # many ties
    values = data.draw(st.lists(levels, min_size=S * E, max_size=S * E))
    priority = torch.tensor(values, dtype=torch.float64).view(S, E)
    order = priority.argsort(dim=0, descending=True, stable=True)[:C]
    expected = torch.zeros(S, E, dtype=torch.bool).scatter_(0, order, True) & (priority > NOT_CHOSEN)
    assert torch.equal(within_capacity(priority, C), expected)


# --- The layer against the reference


def literal_layer(moe, h, ids, x_moe):
    """h (S, D) -> (S, D), balance loss, the number of choices and of served choices."""
    slow = reference.route(moe.router, h, ids, over_chosen=x_moe)
    E, gamma = moe.router.E, moe.eval_capacity_factor
    capacity = None if gamma == math.inf else reference.capacity(len(h), E, gamma)
    served = reference.serve(slow.sort_key, capacity, E)
    if isinstance(moe.experts, Stacks):
        layers = []
        for ffn, norm in zip(moe.experts.ffns, moe.experts.norms, strict=True):
            layers.append((ffn.w_in, ffn.b_in, ffn.w_out, ffn.b_out, norm.weight, norm.bias))
        y = reference.stacks(h, slow.weight, served, layers)
    else:
        ffn = moe.experts
        y = reference.moe(h, slow.weight, served, ffn.w_in, ffn.b_in, ffn.w_out, ffn.b_out)
    return y, torch.as_tensor(slow.balance_loss, dtype=h.dtype), len(slow.sort_key), len(served)


LAYERS = {  # gamma, E, F, T, padding
    "drops": (0.5, 4, 8, 11, False),
    "padding and odd rows": (1.0, 4, 6, 11, True),
    "three rows per token": (3.0, 4, 8, 11, False),
    "no limit, padding": (math.inf, 4, 8, 11, True),
    "few tokens, experts of one unit": (math.inf, 8, 1, 3, False),
    "one expert": (1.0, 1, 8, 3, False),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("case", LAYERS)
@ffn_and_stack
@every_variant
def test_the_layer_follows_the_equations(monkeypatch, unwritten_is_nan, variant, layers, case, dtype):
    """With exactly the kept rows, as on a CPU, and with spare rows, as on a GPU; in bf16 too."""
    gamma, E, F_, T, padding = LAYERS[case]
    moe, (h, ids) = make_moe(variant, dtype, gamma=gamma, E=E, F_=F_, layers=layers), make_batch(2, T, dtype)
    S = 2 * T
    nonpad = (torch.arange(S) % 4 != 1).nonzero().squeeze(1) if padding else torch.arange(S)
    if padding:
        h.view(S, D)[1::4] = math.nan  # the layer must not read padding
    inputs = (h.requires_grad_(), *moe.parameters())
    slow = literal_layer(moe, h.flatten(0, 1)[nonpad], ids.flatten()[nonpad], variant == "x-moe-2")
    slow_y, slow_balance, choices, served = slow
    assert served < choices or gamma != 0.5
    slow_y = torch.zeros(S, D, dtype=dtype).index_copy(0, nonpad, slow_y).view_as(h)
    expected = values_and_gradients((slow_y, slow_balance), inputs)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    sizes, ids_and_nonpad = [], (ids, nonpad if padding else None)
    moe.experts.register_forward_pre_hook(lambda experts, inputs: sizes.append(len(inputs[0])))
    for syncs in (True, False):
        monkeypatch.setattr(model, "may_sync", lambda x, syncs=syncs: syncs)
        y, balance = moe(h, *ids_and_nonpad)
        assert_close(values_and_gradients((y, balance), inputs), expected, tolerance)
        if dtype == torch.float32:
            with torch.autocast("cpu", torch.bfloat16):
                bf16_y, bf16_balance = moe(h, *ids_and_nonpad)
                assert moe(h.bfloat16(), *ids_and_nonpad)[0].dtype == torch.float32
            assert bf16_y.dtype == torch.float32
            assert not torch.equal(bf16_y, y)
            assert torch.equal(bf16_balance, balance)  # autocast does not affect routing
            assert torch.equal((bf16_y == 0).all(dim=2), (y == 0).all(dim=2))
            outputs = values_and_gradients((bf16_y, bf16_balance), inputs)
            pairs = [pair for pair in zip(outputs, expected) if pair[0].dim()]  # a scalar may be all rounding error
            assert_close(*zip(*pairs), 0.05)
    upper_bound = min(len(nonpad) * moe.router.K, E * moe.capacity(len(nonpad)))
    assert sizes[0] == served
    assert sizes[-1] == (served if upper_bound == E * len(nonpad) else upper_bound)


@ffn_and_stack
def test_a_batch_may_be_empty_or_all_padding(layers):
    moe = make_moe("threshold", torch.float32, layers=layers)
    y, balance = moe(torch.zeros(0, 3, 8), torch.zeros(0, 3, dtype=torch.int64))
    assert y.shape == (0, 3, 8)
    assert balance == 0
    y, balance = moe(torch.ones(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert torch.equal(y, torch.zeros(2, 3, 8))
    (y.sum() + balance).backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in moe.parameters())


def test_4096_experts_of_size_1_train():  # XMoE's authors could not run this
    moe = make_moe("threshold", torch.float32, E=4096, F_=1, gamma=64.0, threshold=0.02)
    nn.init.normal_(moe.router.experts, std=0.3)
    h, experts = torch.randn(1, 64, D), moe.experts
    y, _ = moe(h, torch.zeros(1, 64, dtype=torch.int64))
    routing = moe.router(h[0])
    kept = within_capacity(routing.priority, moe.capacity(64))
    assert (kept.sum(dim=1) > 8).any()
    a = torch.einsum("sd,efd->sef", h[0], experts.w_in) + experts.b_in  # each token through every expert
    slow = torch.einsum("sef,efd->sed", F.gelu(a, approximate="tanh"), experts.w_out) + experts.b_out
    slow = ((routing.weight * kept).unsqueeze(2) * slow).sum(dim=1)
    inputs = (*experts.parameters(), moe.router.experts)
    assert_close(values_and_gradients([y[0]], inputs), values_and_gradients([slow], inputs), 1e-4)


# --- Cost


class Largest(TorchDispatchMode):
    """Records the size, in elements, of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("syncs", [True, False], ids=["exact", "spare"])
def test_memory_is_proportional_to_the_kept_rows(monkeypatch, syncs, S=1024):
    """A buffer of E * C rows would be 8 times as large, an (S, E, C) tensor at least S times."""
    monkeypatch.setattr(model, "may_sync", lambda x: syncs)
    moe = make_moe("switch", torch.float32, E=8, gamma=math.inf)
    h, ids = torch.randn(1, S, D, requires_grad=True), torch.zeros(1, S, dtype=torch.int64)
    with Largest() as largest:
        moe(h, ids)[0].sum().backward()
    assert largest.numel <= S * 8  # rows times the largest of D, F and E


# --- Compilation, as on CUDA but with a CPU backend


def test_on_a_cpu_grouped_mm_is_not_compiled(monkeypatch):
    """torch 2.13 would compute NaN gradients of stacks in bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.ones(8, 16, dtype=dtype), torch.ones(2, 16, 8, dtype=dtype)
        assert model.has_grouped_mm(x, w)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            assert not model.has_grouped_mm(x, w)


@pytest.mark.parametrize("variant, fullgraph", [("x-moe-sigmoid", True), ("threshold", False)])
def test_layers_compile_for_any_number_of_tokens(monkeypatch, variant, fullgraph):
    """Into one graph on a GPU; into several on a CPU, which breaks the graph to read the number of kept rows."""
    if fullgraph:
        monkeypatch.setattr(model, "may_sync", lambda x: False)
        monkeypatch.setattr(model, "has_grouped_mm", lambda x, w: True)
    torch.compiler.reset()
    moe, (h, ids) = make_moe(variant, torch.float32, gamma=math.inf), make_batch(2, 16, torch.float32)
    compiled = torch.compile(moe, backend="eager", fullgraph=fullgraph)
    with torch.autocast("cpu", torch.bfloat16, enabled=fullgraph):
        for S in (20, 17)[: 1 + fullgraph]:  # non-padding tokens
            inputs = h, ids, torch.arange(S)
            assert_close(compiled(*inputs), moe(*inputs), 0.02 if fullgraph else 1e-5)
