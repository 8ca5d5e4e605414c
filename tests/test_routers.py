"""routers.py against the papers' equations, and the claims that the papers make about routing."""

import itertools
import math
import signal

import pytest
import reference
import torch
from helpers import constants, lively, values_and_gradients
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from model import Experts, MoE
from routers import NOT_CHOSEN, ROUTERS, Router, balanced_assignment, by_rank

D, V = 6, 11
SCORES, GATES = ("dot", "hypersphere"), ("softmax", "sigmoid")
COMBINATIONS = [*itertools.product(ROUTERS.keys() - {"hash"}, SCORES, GATES), ("hash", None, None)]
COMBINATIONS.sort(key=str)
quick = settings(max_examples=60, deadline=None, derandomize=True)

every_combination = pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(filter(None, c)))
train_and_test = pytest.mark.parametrize("training", [True, False], ids=["training", "test"])


@pytest.fixture(autouse=True)
def in_time():
    """Turns an endless loop into a failure."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("not done after a minute"))
    signal.alarm(60)
    yield
    signal.alarm(0)


def make_router(name, E, K=1, x_moe=False, dtype=torch.float64, training=False, **changes) -> Router:
    """A router whose parameters are large enough for every choice to matter."""
    router = ROUTERS[name](constants(**{"n_embd": D} | changes), E, top_k=K, V=V, x_moe=x_moe)
    return lively(router, dtype).train(training)


def logit_router(name, E, **changes) -> Router:
    """A router whose logits are h itself."""
    router = make_router(name, E, n_embd=E, **changes)
    torch.nn.init.eye_(router.experts)
    return router


def make_tokens(S, dtype=torch.float64):
    rng = torch.Generator().manual_seed(100)
    h = torch.randn(S, D, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    return h, torch.randint(V, (S,), generator=rng)


def queues(priority):
    """Each expert's tokens, in the order in which it serves them."""
    found = []
    for column in priority.t():
        order = column.argsort(descending=True, stable=True)
        found.append([int(s) for s in order if column[s] > NOT_CHOSEN])
    return found


def assert_same(fast, slow, dtype=torch.float64):
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(fast, slow, rtol=tolerance, atol=tolerance)


# --- Every combination against the reference

CASES = {  # S, E, K, x_moe, constants
    "top-2 of a projection": (6, 4, 2, False, {"routing_dim": 3}),
    "fewer tokens than experts": (3, 5, 3, True, {"routing_dim": 0}),
    "one choice": (5, 3, 1, True, {"routing_dim": 0}),
    "one expert": (5, 1, 1, False, {"routing_dim": 0}),
    "one token": (1, 5, 5, False, {"threshold": 1.0, "eval_threshold": 0.0}),
    "all options": (7, 5, 2, True, dict(threshold=0.8, eval_threshold=0.5, routing_dim=2, init_temperature=0.7)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("case", CASES)
@train_and_test
@every_combination
def test_router_follows_the_equations(combination, training, case, dtype):
    (name, score, gate), (S, E, K, x_moe, options) = combination, CASES[case]
    router = make_router(name, E, K, x_moe, dtype, training, score=score, gate=gate, **options)
    h, ids = make_tokens(S, dtype)
    routing = router(h, ids)
    assigned = routing.priority.argmax(dim=1) if name == "base" and training else None  # the auction has its own tests
    slow = reference.route(router, h, ids, assigned, several=x_moe and K > 1 and name != "switch")

    slow_weight = reference.table(slow.weight, S, E, h)
    assert_same(routing.weight, slow_weight, dtype)
    assert queues(routing.priority) == reference.queues(slow.turn, E)
    assert {(s, e) for s, e in routing.wanted.nonzero().tolist()} == set(slow.weight)
    assert routing.wanted.sum(dim=1).max() <= router.K
    assert_same(routing.balance_loss, torch.as_tensor(slow.balance_loss, dtype=dtype), dtype)
    for s, p in slow.probs.items():
        assert_same(routing.probs[s], torch.stack([torch.as_tensor(x, dtype=dtype) for x in p]), dtype)

    inputs = (h, *router.parameters())
    fast_loss = (*routing[:1], routing.balance_loss + 0 * h.sum())
    slow_loss = (slow_weight, slow.balance_loss + 0 * h.sum())
    found, expected = (values_and_gradients(loss, inputs)[2:] for loss in (fast_loss, slow_loss))
    assert_same(found, expected, dtype)


# --- Selection and priority


def test_hash_is_the_same_in_every_run_and_uses_every_expert():
    tables = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        tables.append(ROUTERS["hash"](constants(), 4, V=1000).expert_of_id)
    assert torch.equal(*tables)
    assert torch.bincount(tables[0], minlength=4).min() > 200


FEWEST = [("switch", 1, 1, 1), ("topk", 2, 1, 2), ("base", 1, 1, 1)]  # router, K, t, how many it takes
FEWEST += [("threshold", 1, t, n) for t, n in ((0, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4), (1, 4))]


@pytest.mark.parametrize("name, K, t, chosen", FEWEST)
def test_of_equal_experts_the_lower_ones_win_and_threshold_takes_the_fewest(name, K, t, chosen):
    wanted = logit_router(name, 4, K=K, threshold=t)(torch.zeros(3, 4)).wanted  # four times exactly 1/4
    assert wanted.tolist() == [[e < chosen for e in range(4)]] * 3


def test_a_token_that_is_not_finite_chooses_no_expert():
    """It stays not finite on the residual stream, so the loss is not finite and the run stops."""
    h = torch.tensor([[0.0, 1.0, 2.0], [math.nan, 0.0, 0.0], [math.inf, math.inf, 0.0]], dtype=torch.float32)
    router = logit_router("threshold", 3, dtype=torch.float32, threshold=0.5)
    assert router(h).wanted.sum(dim=1).tolist() == [1, 0, 0]


@quick
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=9), st.floats(0, 1))
def test_threshold_is_minimal_and_holds_the_top1_choice(logits, t):  # XMoE eq. 5, section 3.5
    h, E = torch.tensor([logits], dtype=torch.float64), len(logits)
    routing = logit_router("threshold", E, threshold=t)(h)
    assert routing.wanted[logit_router("switch", E)(h).wanted].all()
    chosen = routing.probs[routing.wanted].detach()
    assert t == 1 or len(chosen) == 1 or float(chosen.sum() - chosen.min()) < t + 1e-12
    assert len(chosen) == E or float(chosen.sum()) >= t - 1e-12
    favourites = routing.probs[0].argsort(descending=True, stable=True)[: len(chosen)]
    assert torch.equal(routing.wanted[0].nonzero()[:, 0], favourites.sort().values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threshold_1_reaches_every_expert(dtype):
    """Also where rounding makes the sum stop short of 1, or reach it early."""
    far = torch.tensor([[0.0, -1e30, -200.0, -104.0], [0.0, 0.0, 0.0, 3e38]], dtype=dtype)
    many = torch.randn(50, 64, generator=torch.Generator().manual_seed(0), dtype=dtype)
    for h in (far, many):
        assert logit_router("threshold", h.shape[1], threshold=1.0, dtype=dtype)(h).wanted.all()


@pytest.mark.parametrize("name, K, t", [("topk", 3, 1), ("threshold", 1, 0.0), ("threshold", 1, 0.95)])
def test_priority_is_p_minus_i(name, K, t):  # XMoE A.1
    E, rng = 40, torch.Generator().manual_seed(0)
    h = torch.randn(400, E, generator=rng).mul(2).round()  # with many ties
    routing = logit_router(name, E, K=K, threshold=t, dtype=torch.float32)(h)
    p, order = routing.probs.detach().sort(dim=1, descending=True, stable=True)
    count = torch.full((400,), K)
    if name == "threshold":
        count = 1 + (p[:, :-1].cumsum(dim=1) < t).sum(dim=1)
    rank = torch.arange(E)
    expected = torch.where(rank < count[:, None], p.double() - rank, NOT_CHOSEN)
    assert torch.equal(routing.priority.gather(1, order), expected)


def test_experts_rank_by_negative_scores_too():
    score = torch.tensor([[-1.0, -2.0, -3.0, -0.5]])
    order = score.argsort(dim=1, descending=True)
    priority = by_rank(order, score, 2)
    assert priority.tolist() == [[-2.0, NOT_CHOSEN, NOT_CHOSEN, -0.5]]


RANKED = st.tuples(st.integers(0, 4095), st.floats(0, 1, width=32))


def priorities(*ranked):
    """The priorities of (rank, p), each of a token of its own."""
    found = []
    for rank, p in ranked:
        order = torch.arange(rank + 1)[None]
        found.append(by_rank(order, torch.full((1, rank + 1), p), rank + 1)[0, rank].item())
    return found


@quick
@given(RANKED, RANKED)
@example((4095, 2**-18), (4095, 2**-18 + 2**-41))  # neighbouring floats, far below the largest p at this rank, 1 / 4096
@example((4095, 0.0), (0, 0.0))
@example((1, 1.0), (0, 0.0))  # as equal as p - i says; a first choice has at least 1 / E
def test_priorities_order_by_rank_then_probability(a, b):
    """All fp32 probabilities from 2^-18 on stay distinct at ranks up to 4,095; smaller ones may tie."""
    first, second = priorities(a, b)
    exact = [(rank, -p) for rank, p in (a, b)]
    assert min(first, second) > NOT_CHOSEN
    if exact[0] < exact[1]:
        assert first >= second
    if a[0] == b[0] and a[1] != b[1] and min(a[1], b[1]) >= 2**-18:
        assert first != second


# --- Balance loss (XMoE eq. 7, X-MoE eq. 9)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name, K", [("switch", 1), ("topk", 2), ("threshold", 1)])
def test_balance_loss_is_1_when_uniform_and_E_when_collapsed(name, K, gate):
    router = logit_router(name, 4, K=K, gate=gate, threshold=0.5)
    uniform, collapsed = 3 * torch.eye(4).double(), torch.tensor([[-1e3, -1e3, 1e3, -2e3]] * 5).double()
    nothing_known = torch.zeros(8, 4).double()  # probabilities 1/4, all first choices on expert 0
    for h, loss in ((uniform, 1), (nothing_known, 1), (collapsed, 4)):
        assert router(h).balance_loss.item() == pytest.approx(loss, rel=1e-14)


# --- BASE


def best_total(score):
    """By the Hungarian method, on as many copies of each expert as it has seats."""
    seats = math.ceil(score.shape[0] / score.shape[1])
    copies = score.double().repeat_interleave(seats, dim=1).numpy()
    optimize = pytest.importorskip("scipy.optimize")
    return copies[optimize.linear_sum_assignment(copies, maximize=True)].sum()


def assert_balanced_and_best(score, epsilon=None):
    S, E = score.shape
    expert = balanced_assignment(score, epsilon)
    assert expert.shape == (S,) and expert.min() >= 0 and expert.max() < E
    assert torch.bincount(expert).max() <= math.ceil(S / E)
    total = float(score.double().gather(1, expert[:, None]).sum())
    slack = S * (float(score.max() - score.min()) / 1000 if epsilon is None else epsilon)
    assert total >= best_total(score) - slack - 1e-5 * S * float(score.abs().max())


KINDS = {  # scale, offset, of which the first expert has more
    "random": (1, 0, 0),
    "skewed": (1, 0, 20),
    "constant": (0, 0.3, 0),
    "near a constant": (1e-6, 1, 0),
    "huge": (1e9, 0, 0),
    "tiny": (1e-9, 0, 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("S, E", [(61, 8), (5, 9), (1, 3), (12, 1), (100, 4)])
@pytest.mark.parametrize("scale, offset, more", KINDS.values(), ids=KINDS)
def test_balanced_assignment_is_balanced_and_nearly_the_best(scale, offset, more, S, E, dtype):
    score = torch.randn(S, E, generator=torch.Generator().manual_seed(0), dtype=dtype)
    score[:, 0] += more
    assert_balanced_and_best(score * scale + offset)
    assert_balanced_and_best(score[torch.arange(S) % 3 % S] * scale + offset)  # many are alike


@quick
@given(st.data(), st.integers(1, 9), st.integers(1, 5), st.sampled_from([None, 1e-3, 0.5]))
def test_balanced_assignment_of_small_scores(data, S, E, epsilon):
    values = st.one_of(st.sampled_from([0.0, 1.0, -3.0]), st.floats(-10, 10, width=16))
    rows = data.draw(st.lists(st.lists(values, min_size=E, max_size=E), min_size=S, max_size=S))
    assert_balanced_and_best(torch.tensor(rows), epsilon)


@pytest.mark.parametrize("score", SCORES)
@train_and_test
def test_base_balances_in_training_and_takes_the_best_expert_at_test(score, training):
    router = make_router("base", 4, training=training, score=score, routing_dim=0)
    with torch.no_grad():
        router.experts[1:] *= -1
        router.experts[1:] += router.experts[0]
        h = make_tokens(42)[0] + 3 * router.experts[0]  # everyone's favourite
    routing, scores = router(h), router.scores(h).detach()
    most = int(routing.wanted.sum(dim=0).max())
    assert (routing.wanted.sum(dim=1) == 1).all() and (most <= math.ceil(42 / 4)) == training
    if training:
        assert float(scores[routing.wanted].sum()) >= best_total(scores) - 42e-3 * float(scores.max() - scores.min())
    else:
        assert torch.equal(routing.priority.argmax(dim=1), scores.argmax(dim=1))


def test_nothing_real_and_nothing_finite_end_too():
    for name in ROUTERS:
        routing = make_router(name, 4, training=True)(*make_tokens(0))
        assert routing.weight.shape == (0, 4) and routing.balance_loss == 0
    holes = torch.randn(9, 4).where(torch.rand(9, 4) < 0.5, torch.nan)
    for score in (torch.full((9, 4), torch.nan), holes):
        assert balanced_assignment(score).bincount(minlength=4).max() == 3


# --- Where routers start, and X-MoE's hypersphere


@pytest.mark.parametrize("name, x_moe", [("hypersphere", False), ("base", False), ("threshold", True)])
def test_no_more_expert_embeddings_than_dimensions_start_orthogonal_with_norm_0_1(name, x_moe):
    experts = ROUTERS[name](constants(n_embd=16, routing_dim=0), 8, x_moe=x_moe).experts
    torch.testing.assert_close(experts @ experts.t(), 0.01 * torch.eye(8), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("routing_dim, d_e", [(None, 32), (0, 0), (8, 8)])
def test_the_projection_is_as_narrow_and_all_starts_as_wide_as_told(routing_dim, d_e):
    config = constants(n_embd=256, router_std=0.5, routing_dim=routing_dim)
    torch.manual_seed(0)
    sphere, dot = (ROUTERS[name](config, 64).requires_grad_(False) for name in ("hypersphere", "threshold"))
    assert sphere.experts.shape == (64, d_e or 256)
    if d_e:
        assert sphere.project.weight.shape == (d_e, 256)
        assert float(sphere.project.weight.std()) == pytest.approx(0.5, rel=0.05)
    assert dot.experts.shape == (64, routing_dim or 256)  # None projects on a hypersphere alone
    assert float(dot.experts.std()) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("gate, told, tau", [("softmax", None, 0.3), ("sigmoid", None, 0.07), ("sigmoid", 0.5, 0.5)])
def test_temperature_starts_as_in_the_paper_or_as_told(gate, told, tau):
    router = ROUTERS["hypersphere"](constants(gate=gate, init_temperature=told), 4)
    assert router.temperature.item() == pytest.approx(tau) == pytest.approx(router.init_temperature)


def test_after_step_restores_norms_and_keeps_the_temperature_positive():
    router = make_router("hypersphere", 5)
    direction = normalize(router.experts.detach(), dim=1)
    for tau, after in ((-2.0, 1e-4), (0.5, 0.5)):
        torch.nn.init.constant_(router.temperature, tau)
        router.after_step()
        assert_same(router.experts.detach(), 0.1 * direction)
        assert router.temperature.item() == pytest.approx(after)
    other = make_router("switch", 5)
    before = other.experts.clone()
    other.after_step()
    assert torch.equal(other.experts, before)


@pytest.mark.parametrize("K", [1, 2, 3])
def test_the_jacobian_of_an_smoe_layer_is_that_of_the_paper(K):  # X-MoE section 2.2, eqs. 1 to 6
    """Why states collapse: J1 fits the token to its experts, J2 moves it towards a sum of N embeddings, N < d."""
    N = 4
    router = make_router("topk", N, K, x_moe=True).requires_grad_(False)
    ffn = Experts(N, D, 5, "tanh").double().requires_grad_(False)
    for p in ffn.parameters():
        torch.nn.init.normal_(p)
    layer, h, ids = MoE(router, ffn, math.inf, math.inf), make_tokens(1)[0][0].detach(), torch.zeros(1, 1).long()
    whole = torch.autograd.functional.jacobian(lambda h: h + layer(h.view(1, 1, D), ids)[0].view(D), h)  # eq. 2

    e = router.experts  # (N, d)
    s = [float(h @ e[i]) for i in range(N)]  # eq. 1
    k = sorted(range(N), key=s.__getitem__, reverse=True)[:K]
    compared = range(N) if K == 1 else k  # the softmax of eq. 3 is over all experts, of top-K over those K
    S = {j: math.exp(s[j]) / sum(math.exp(s[i]) for i in compared) for j in compared}
    J1, J2 = torch.eye(D, dtype=torch.float64), torch.zeros(D, D, dtype=torch.float64)
    gradient = torch.linspace(-1, 2, D, dtype=torch.float64)  # of the loss, where the layer's output is
    c = dict.fromkeys(compared, 0.0)
    for i in k:

        def expert(h, i=i):
            return ffn.w_out[i].t() @ reference.expert_hidden(h, i, ffn.w_in, ffn.b_in) + ffn.b_out[i]

        h_ffn = expert(h)
        J1 = J1 + S[i] * torch.autograd.functional.jacobian(expert, h)  # eq. 4
        for j in compared:
            J2 = J2 + S[i] * ((i == j) - S[j]) * h_ffn.outer(e[j])
            c[j] += S[i] * ((i == j) - S[j]) * float(h_ffn @ gradient)
    assert_same(whole, J1 + J2)
    assert J2.norm() > 0.1 and torch.linalg.matrix_rank(J2) <= K
    assert_same(J2.t() @ gradient, sum(c[j] * e[j] for j in compared))  # eqs. 5, 6
    assert_same(whole.t() @ gradient, J1.t() @ gradient + sum(c[j] * e[j] for j in compared))
