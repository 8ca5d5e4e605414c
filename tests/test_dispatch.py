"""The experts' work, however it is done: expert by expert, or as grouped products in a buffer of fixed size."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import dispatch as dispatching
from dispatch import dispatch, equal_runs, expert_capacity, rows_by_run, within_capacity
from model import GPT, ModelConfig, MoE
from routers import NOT_CHOSEN, Routing, priority_key

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_case(S, E, F_, D, chosen, dtype=torch.float64, seed=0):
    """h, routing and expert weights; of all (token, expert) pairs, the share `chosen` is wanted, by expert 1 never."""
    rng = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)  # noqa: E731
    wanted = torch.rand(S, E, generator=rng) < chosen
    wanted[:, 1:2] = False
    p = torch.rand(S, E, generator=rng).to(dtype)
    priority = priority_key(p, torch.randint(3, (S, E), generator=rng)).masked_fill(~wanted, NOT_CHOSEN)
    gate = (p * wanted).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    weights = [x.requires_grad_() for x in (draw(E, F_, D), draw(E, F_), draw(E, D, F_), draw(E, D))]
    return draw(S, D).requires_grad_(), Routing(gate, priority, gate.sum(), gate), weights


def plain(h, routing, capacity, weights):
    """Every expert on every token, then what is not kept is left out (XMoE eq. 2)."""
    w_in, b_in, w_out, b_out = weights
    a = torch.einsum("sd,efd->sef", h, w_in) + b_in
    y = torch.einsum("sef,edf->sed", F.gelu(a, approximate="tanh"), w_out) + b_out
    return ((routing.weight * within_capacity(routing.priority, capacity)).unsqueeze(2) * y).sum(dim=1)


def values_and_gradients(y, h, routing, weights):
    arrow = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(y.dtype)
    return y, *torch.autograd.grad((y * arrow.to(y.device)).sum(), (h, routing.weight, *weights))


@pytest.fixture
def unwritten_is_nan():
    """Memory that nobody wrote is NaN, so that none of it can be used unseen."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


CASES = {  # S, E, F, D, share of the pairs that are wanted, capacity
    "drops": (9, 4, 3, 5, 0.9, 3),
    "full experts side by side": (12, 5, 3, 5, 0.95, 2),
    "no drops": (9, 4, 3, 5, 0.5, None),
    "one expert": (6, 1, 3, 4, 1.0, 4),
    "S smaller than E": (3, 8, 2, 4, 0.6, 2),
    "nothing is chosen": (4, 3, 2, 3, 0.0, 2),
    "one token": (1, 5, 3, 4, 0.7, 1),
    "expert size 1": (7, 6, 1, 4, 0.5, 3),
}


@pytest.mark.parametrize("at_once, threads", [(1, 2), (20, 2), (1 << 18, 1), (1 << 18, 2)])
@pytest.mark.parametrize("S, E, F_, D, chosen, capacity", CASES.values(), ids=CASES)
def test_gradcheck(monkeypatch, unwritten_is_nan, at_once, threads, S, E, F_, D, chosen, capacity):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # which only says what is batched
    monkeypatch.setattr(dispatching.few_at_a_time, "__defaults__", (at_once,))
    monkeypatch.setattr(dispatching.few_rows, "__kwdefaults__", {"most": at_once})
    h, routing, weights = make_case(S, E, F_, D, chosen)

    def layer(h, gate, *weights):
        return dispatch(h, routing._replace(weight=gate), capacity, weights)[0]

    assert torch.autograd.gradcheck(layer, (h, routing.weight, *weights))
    found, expected = (
        values_and_gradients(f(h, routing, capacity, weights), h, routing, weights)
        for f in (lambda *args: dispatch(*args)[0], plain)
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_gradcheck_where_a_gate_is_zero():
    h, routing, weights = make_case(5, 3, 2, 4, 1.0)
    gate = torch.where(routing.weight > 0.5, routing.weight, 0.0).detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda gate: dispatch(h, routing._replace(weight=gate), 4, weights)[0], (gate,), raise_exception=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("gate", [0.0, 1e-30, 1e-12])
def test_a_gate_that_is_almost_nothing_has_its_gradient(dtype, gate):
    h, routing, weights = make_case(20, 4, 8, 8, 1.0, dtype)
    routing = routing._replace(weight=(routing.weight > 0).float().mul(gate).requires_grad_())
    found = values_and_gradients(dispatch(h, routing, 20, weights)[0], h, routing, weights)
    wide = [x.detach().double().requires_grad_() for x in (h, routing.weight, *weights)]
    routing = routing._replace(weight=wide[1])
    expected = values_and_gradients(plain(wide[0], routing, 20, wide[2:]), wide[0], routing, wide[2:])
    for x, y in zip(found, expected):
        assert (x.double() - y).norm() <= (1e-5 if dtype == torch.float32 else 0.02) * y.norm() + 1e-15


def test_experts_of_as_many_rows_share_their_products(monkeypatch):
    h, routing, weights = make_case(12, 5, 3, 5, 1.0)
    batches, batched = [], torch.baddbmm

    def spy(*args, **options):
        batches.append(len(args[0]))
        return batched(*args, **options)

    monkeypatch.setattr(torch, "baddbmm", spy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(dispatching.few_at_a_time, "__defaults__", (20,))
    counts = dispatch(h, routing, 2, weights)[1].tolist()
    assert counts == [2, 0, 2, 2, 2] and batches == [2, 2]  # the first three differ; two products of the other two


@pytest.mark.parametrize(
    "threads, runs",
    [
        (1, [(2, 7), (1, 0), (5, 3), (3, 0)]),
        (2, [(2, 7), (1, 0), (4, 3), (1, 3), (2, 0), (1, 0)]),
        (4, [(2, 7), (1, 0), (4, 3), (1, 3), (3, 0)]),
    ],
)
def test_a_thread_has_whole_experts_or_all_share_the_last(threads, runs):
    counts = [7, 7, 0, 3, 3, 3, 3, 3, 0, 0, 0]
    assert equal_runs(counts, threads) == runs
    rows = torch.arange(2.0 * sum(counts)).view(-1, 2)
    parts = rows_by_run(rows, runs)
    assert torch.cat([part.reshape(-1, 2) for part in parts]).equal(rows)
    assert [part.shape[-2] for part in parts] == [n for _, n in runs]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_full_experts_give_the_plain_sum(monkeypatch, unwritten_is_nan, dtype, threads):
    """Large enough for a processor's own batched products."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    h, routing, weights = make_case(80, 6, 48, 32, 1.0, dtype)
    y, counts = dispatch(h, routing, 40, weights)
    assert counts.tolist() == [40, 0, 40, 40, 40, 40]
    full = [w[2:].detach().requires_grad_() for w in weights]
    routing = Routing(*(x[:, 2:].detach() for x in routing[:2]), routing.balance_loss, routing.probs)
    routing.weight.requires_grad_()
    found = values_and_gradients(dispatch(h, routing, 40, full)[0], h, routing, full)
    wide = [x.detach().double().requires_grad_() for x in (h, routing.weight, *full)]
    routing = routing._replace(weight=wide[1])
    y = plain(wide[0], routing, 40, wide[2:])
    for x, expected in zip(found, values_and_gradients(y, wide[0], routing, wide[2:])):
        assert (x.double() - expected).norm() <= (1e-5 if dtype == torch.float32 else 0.02) * expected.norm()


def test_a_second_backward_pass_finds_what_the_first_one_found():
    h, routing, weights = make_case(9, 4, 3, 5, 0.9)
    y = dispatch(h, routing, 3, weights)[0].square().sum()
    first, second = (torch.autograd.grad(y, (h, routing.weight, *weights), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_what_only_the_backward_pass_needs_is_not_kept_without_one(monkeypatch):
    h, routing, weights = make_case(9, 4, 3, 5, 0.9)
    asked, activate = [], dispatching.activate
    monkeypatch.setattr(
        dispatching, "activate", lambda *args, slope: asked.append(slope) or activate(*args, slope=slope)
    )
    expected = dispatch(h, routing, 3, weights)[0]
    with torch.no_grad():
        assert torch.equal(dispatch(h, routing, 3, weights)[0], expected)
    weights, routing = [w.detach() for w in weights], routing._replace(weight=routing.weight.detach())
    assert torch.equal(dispatch(h.detach(), routing, 3, weights)[0], expected)
    assert asked == [True, False, False]


def test_4096_experts_of_size_1_train():  # the paper could not run it
    config = ModelConfig(n_embd=256, expert_size=1, num_experts=4096, capacity_factor=64.0, threshold=0.1)
    moe = MoE(config)
    torch.manual_seed(0)
    weights = moe.layers[0].weights()
    for p in weights:
        torch.nn.init.normal_(p, std=0.5)
    torch.nn.init.normal_(moe.router.experts, std=0.1)
    h = torch.randn(1, 64, 256)
    y, _ = moe(h, torch.zeros(1, 64, dtype=torch.int64))
    routing, parameters = moe.router(h[0]), (*weights, moe.router.experts)
    expected = plain(h[0], routing, expert_capacity(64, 4096, 64.0), weights)
    assert (routing.wanted.sum(dim=1) > 8).any()
    torch.testing.assert_close(y[0], expected, rtol=1e-4, atol=1e-4)
    found, expected = (torch.autograd.grad(x.square().mean(), parameters) for x in (y, expected))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


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


def test_memory_is_linear_in_the_tokens(monkeypatch):
    monkeypatch.setattr(dispatching.few_at_a_time, "__defaults__", (1,))
    E, F_, D = 8, 4, 16
    for S in (512, 4096):
        h, routing, weights = make_case(S, E, F_, D, 0.9, torch.float32)
        with Largest() as largest:
            dispatch(h, routing, S // 4, weights)[0].sum().backward()
        assert largest.numel <= S * max(D, E)  # E * C * D is twice as much, S * E * C far more


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 20), st.integers(1, 3))
def test_experts_are_taken_in_order_and_few_at_a_time(counts, most_rows, width):
    spans = dispatching.few_at_a_time(counts, width, width, most_rows * width)
    for some, _, runs in spans:
        assert [n for experts, n in runs for _ in range(experts)] == counts[some]
    spans = [span[:2] for span in spans]
    assert [e for some, _ in spans for e in range(len(counts))[some]] == list(range(len(counts)))
    assert [r for _, rows in spans for r in range(sum(counts))[rows]] == list(range(sum(counts)))
    for some, rows in spans:
        assert sum(counts[some]) == rows.stop - rows.start
        assert sum(counts[some]) <= most_rows or some.stop - some.start == 1
    for (some, _), (after, _) in zip(spans, spans[1:]):  # none is smaller than it must be
        assert sum(counts[some]) + counts[after.start] > most_rows


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


# --- Grouped products: what CUDA runs, here on the CPU's grouped_mm


@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("capacity", [None, 2, 5, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("grouped", [False, True], ids=["streamed", "grouped"])
def test_both_ways_give_the_plain_sum(monkeypatch, unwritten_is_nan, grouped, dtype, capacity, most):
    monkeypatch.setattr(dispatching, "has_grouped_mm", lambda h, w_in: grouped)
    h, routing, weights = make_case(20, 6, 8, 16, 0.5, dtype)
    choices = routing.priority > NOT_CHOSEN
    few = choices & (choices.cumsum(dim=1) <= 4)  # at most 4 a token
    routing = routing._replace(
        priority=routing.priority.masked_fill(~few, NOT_CHOSEN),
        weight=(routing.weight * few).detach().requires_grad_(),
    )
    found = values_and_gradients(dispatch(h, routing, capacity, weights, most)[0], h, routing, weights)
    wide = [x.detach().double().requires_grad_() for x in (h, routing.weight, *weights)]
    routing = routing._replace(weight=wide[1])
    y = plain(wide[0], routing, capacity, wide[2:])
    for x, expected in zip(found, values_and_gradients(y, wide[0], routing, wide[2:])):
        assert x.isfinite().all()
        assert (x.double() - expected).norm() <= (1e-5 if dtype == torch.float32 else 0.02) * expected.norm()


def test_both_ways_show_the_same_activations(monkeypatch, unwritten_is_nan):
    h, routing, weights = make_case(20, 6, 8, 16, 0.5, torch.float32)
    positive = []
    for grouped in (False, True):
        monkeypatch.setattr(dispatching, "has_grouped_mm", lambda h, w_in, grouped=grouped: grouped)

        def observe(kept, hidden):
            assert all(a.isfinite().all() for a in hidden)  # unused rows too
            positive.append(sum(int((a > 0).sum()) for a in hidden))

        dispatch(h, routing, 5, weights, None, observe)
    assert positive[0] == positive[1] > 0


def train_step(forward, ids):
    logits, balance = forward(ids)
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()) + 0.01 * balance


def make_gpt(router, **options):
    config = ModelConfig(vocab_size=32, block_size=16, n_layer=2, n_head=2, n_embd=16, ffn_size=32, router=router)
    torch.manual_seed(0)
    return GPT(ModelConfig(**{**vars(config), **options}))


steps_without_drops_too = pytest.mark.parametrize(
    "router, gamma",
    [*((r, None) for r in ("dense", "switch", "topk", "threshold", "hash")), ("switch", math.inf), ("threshold", 32.0)],
)


@steps_without_drops_too
def test_a_step_asks_the_device_nothing(monkeypatch, router, gamma):
    """Tensors without values: a host read, such as int(x), tolist() or nonzero(), raises."""
    monkeypatch.setattr(dispatching, "has_grouped_mm", lambda h, w_in: True)
    with FakeTensorMode():
        gpt = make_gpt(router, **({} if gamma is None else {"capacity_factor": gamma}))
        with torch.autocast("cpu", torch.bfloat16):
            loss = train_step(gpt, torch.randint(32, (2, 16)))
        loss.backward()


@steps_without_drops_too
def test_a_step_compiles_in_one_graph(monkeypatch, router, gamma):
    monkeypatch.setattr(dispatching, "has_grouped_mm", lambda h, w_in: True)
    gpt, ids = make_gpt(router, **({} if gamma is None else {"capacity_factor": gamma})), torch.randint(32, (2, 16))
    compiled = torch.compile(gpt, backend="aot_eager", fullgraph=True, dynamic=False)
    results = []
    for forward in (gpt, compiled):
        with torch.autocast("cpu", torch.bfloat16):
            loss = train_step(forward, ids)
        results.append((loss, *torch.autograd.grad(loss, list(gpt.parameters()), materialize_grads=True)))
    torch.testing.assert_close(results[1], results[0], rtol=0.02, atol=1e-3)


@on_cuda
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("router", ["switch", "topk", "threshold"])
def test_a_step_on_cuda_asks_the_device_nothing_and_agrees_with_the_cpu(router, compiled):
    gpt, ids = make_gpt(router, n_embd=64, ffn_size=128), torch.randint(32, (4, 16))
    expected = train_step(gpt, ids)
    gpt, ids = gpt.cuda(), ids.cuda()
    forward = torch.compile(gpt, fullgraph=True, dynamic=False) if compiled else gpt
    for _ in range(2):  # the first one compiles
        with torch.autocast("cuda", torch.bfloat16):
            loss = train_step(forward, ids)
        loss.backward()
        gpt.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", torch.bfloat16):
            again = train_step(forward, ids)
        again.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(again.cpu(), expected, rtol=0.02, atol=0.02)
    assert all(p.grad.isfinite().all() for p in gpt.parameters())


def test_infinite_capacity_is_no_limit():
    h, routing, weights = make_case(9, 4, 3, 5, 0.9)
    y, counts = dispatch(h, routing, expert_capacity(9, 4, math.inf), weights)
    assert counts.sum() == (routing.priority > NOT_CHOSEN).sum()
