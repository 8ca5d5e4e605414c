"""The routers: compared with the papers' equations (reference.py), and the papers' claims about routing."""

import itertools
import math
import signal

import pytest
import reference
import torch
from helpers import PAPERS, balance_of, constants, lively, values_and_gradients
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from model import Experts, MoE
from routers import NOT_CHOSEN, ROUTERS, Router, balanced_assignment, by_rank

D, V = 6, 11
SCORES, GATES = ("dot", "hypersphere"), ("softmax", "sigmoid")
COMBINATIONS = [*itertools.product({*PAPERS} - {"hash"}, SCORES, GATES), ("hash", None, None)]
COMBINATIONS.sort(key=str)
quick = settings(max_examples=60, deadline=None, derandomize=True)

every_combination = pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(filter(None, c)))
train_and_test = pytest.mark.parametrize("training", [True, False], ids=["training", "test"])


@pytest.fixture(autouse=True)
def in_time():
    """Turns an endless loop into a failure."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("still running after a minute"))
    signal.alarm(60)
    yield
    signal.alarm(0)


def make_router(name, E, K=1, x_moe=False, dtype=torch.float64, training=False, **changes) -> Router:
    """A router with parameters large enough for every choice to matter."""
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
    tokens = []
    for column in priority.t():
        order = column.argsort(descending=True, stable=True)
        tokens.append([int(s) for s in order if column[s] > NOT_CHOSEN])
    return tokens


def matrix(values, S, E, dtype):
    """{(s, e): scalar} -> (S, E), 0 where there is no value."""
    scalars = [torch.as_tensor(values.get((s, e), 0.0), dtype=dtype) for s in range(S) for e in range(E)]
    return torch.stack(scalars).view(S, E)


def assert_equal_up_to_rounding(fast, slow, dtype=torch.float64):
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(fast, slow, rtol=tolerance, atol=tolerance)


# --- Every combination of router, score and gate against the reference

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
    assigned = routing.priority.argmax(dim=1) if name == "base" and training else None  # BASE has separate tests below
    slow = reference.route(router, h, ids, assigned, over_chosen=x_moe and K > 1 and name != "switch")
    slow_weight = matrix(slow.weight, S, E, dtype)
    slow_balance = torch.as_tensor(slow.balance_loss, dtype=dtype)
    slow_probs = matrix({(s, e): x for s, p in slow.probs.items() for e, x in enumerate(p)}, S, E, dtype)

    assert_equal_up_to_rounding(routing.weight, slow_weight, dtype)
    assert_equal_up_to_rounding(routing.probs, slow_probs, dtype)
    assert_equal_up_to_rounding(balance_of(routing), slow_balance, dtype)
    assert queues(routing.priority) == reference.queues(slow.sort_key, E)
    assert {(s, e) for s, e in routing.wanted.nonzero().tolist()} == set(slow.weight)
    assert routing.wanted.sum(dim=1).max() <= router.K

    inputs = (h, *router.parameters())
    fast_outputs = (routing.weight, balance_of(routing) + 0 * h.sum())  # 0 * h: the loss may be a constant
    slow_outputs = (slow_weight, slow_balance + 0 * h.sum())
    fast_gradients, slow_gradients = (values_and_gradients(y, inputs)[2:] for y in (fast_outputs, slow_outputs))
    assert_equal_up_to_rounding(fast_gradients, slow_gradients, dtype)


# --- Selection and priority


def test_hash_is_the_same_in_every_run_and_uses_every_expert():
    tables = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        tables.append(ROUTERS["hash"](constants(), 4, V=1000).expert_of_id)
    assert torch.equal(*tables)
    assert torch.bincount(tables[0], minlength=4).min() > 200


# Router, K, t, and how many of four experts with probability 1/4 it chooses.
TIES = [("switch", 1, 1, 1), ("topk", 2, 1, 2), ("base", 1, 1, 1)]
TIES += [("threshold", 1, t, n) for t, n in ((0, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4), (1, 4))]


@pytest.mark.parametrize("name, K, t, chosen", TIES)
def test_lower_experts_win_ties_and_threshold_chooses_the_fewest(name, K, t, chosen):
    wanted = logit_router(name, 4, K=K, threshold=t)(torch.zeros(3, 4)).wanted
    assert wanted.tolist() == [[e < chosen for e in range(4)]] * 3


def test_a_non_finite_token_chooses_no_expert():
    """The residual stream keeps its NaN or inf, so the loss is not finite and the run stops."""
    h = torch.tensor([[0.0, 1.0, 2.0], [math.nan, 0.0, 0.0], [math.inf, math.inf, 0.0]], dtype=torch.float32)
    router = logit_router("threshold", 3, dtype=torch.float32, threshold=0.5)
    assert router(h).wanted.sum(dim=1).tolist() == [1, 0, 0]


@quick
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=9), st.floats(0, 1))
def test_threshold_chooses_the_fewest_experts_that_sum_to_t(logits, t):  # XMoE eq. 5, section 3.5
    h, E = torch.tensor([logits], dtype=torch.float64), len(logits)
    routing = logit_router("threshold", E, threshold=t)(h)
    chosen = routing.probs[routing.wanted].detach()
    if len(chosen) < E:
        assert float(chosen.sum()) >= t - 1e-12
    if len(chosen) > 1 and t < 1:
        assert float(chosen.sum() - chosen.min()) < t + 1e-12
    most_probable = routing.probs[0].argsort(descending=True, stable=True)[: len(chosen)]
    assert torch.equal(routing.wanted[0].nonzero()[:, 0], most_probable.sort().values)
    assert routing.wanted[logit_router("switch", E)(h).wanted].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threshold_1_chooses_every_expert(dtype):
    """Even if rounding keeps the sum below 1 or makes it reach 1 early."""
    far_apart = torch.tensor([[0.0, -1e30, -200.0, -104.0], [0.0, 0.0, 0.0, 3e38]], dtype=dtype)
    many = torch.randn(50, 64, generator=torch.Generator().manual_seed(0), dtype=dtype)
    for h in (far_apart, many):
        assert logit_router("threshold", h.shape[1], threshold=1.0, dtype=dtype)(h).wanted.all()


@pytest.mark.parametrize("name, K, t", [("topk", 3, 1), ("threshold", 1, 0.0), ("threshold", 1, 0.95)])
def test_priority_is_p_minus_i(name, K, t):  # XMoE A.1
    E, rng = 40, torch.Generator().manual_seed(0)
    h = torch.randn(400, E, generator=rng).mul(2).round()  # many ties
    routing = logit_router(name, E, K=K, threshold=t, dtype=torch.float32)(h)
    p, order = routing.probs.detach().sort(dim=1, descending=True, stable=True)
    count = torch.full((400,), K)
    if name == "threshold":
        count = 1 + (p[:, :-1].cumsum(dim=1) < t).sum(dim=1)
    rank = torch.arange(E)
    expected = torch.where(rank < count[:, None], p.double() - rank, NOT_CHOSEN)
    assert torch.equal(routing.priority.gather(1, order), expected)


def test_by_rank_accepts_negative_scores():
    score = torch.tensor([[-1.0, -2.0, -3.0, -0.5]])
    priority = by_rank(score.argsort(dim=1, descending=True), score, 2)
    assert priority.tolist() == [[-2.0, NOT_CHOSEN, NOT_CHOSEN, -0.5]]


RANKED = st.tuples(st.integers(0, 4095), st.floats(0, 1, width=32))


def priority_of(rank, p):
    """The priority of a token's choice at this rank, from 0, with probability p."""
    order = torch.arange(rank + 1)[None]
    return by_rank(order, torch.full((1, rank + 1), p), rank + 1)[0, rank].item()


@quick
@given(RANKED, RANKED)
@example((4095, 2**-18), (4095, 2**-18 + 2**-41))  # adjacent floats far below 1 / 4096, the largest p at this rank
@example((4095, 0.0), (0, 0.0))
@example((1, 1.0), (0, 0.0))  # a tie by p - i; in practice a first choice has p >= 1 / E
def test_priorities_order_by_rank_then_probability(a, b):
    """fp32 probabilities of at least 2^-18 stay distinct at ranks up to 4,095; smaller ones may tie."""
    (rank_a, p_a), (rank_b, p_b) = a, b
    priority_a, priority_b = priority_of(*a), priority_of(*b)
    assert min(priority_a, priority_b) > NOT_CHOSEN
    if (rank_a, -p_a) < (rank_b, -p_b):
        assert priority_a >= priority_b
    if rank_a == rank_b and p_a != p_b and min(p_a, p_b) >= 2**-18:
        assert priority_a != priority_b


# --- Balance loss (XMoE eq. 7, X-MoE eq. 9)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name, K", [("switch", 1), ("topk", 2), ("threshold", 1)])
def test_balance_loss_is_1_when_uniform_and_E_when_collapsed(name, K, gate):
    router = logit_router(name, 4, K=K, gate=gate, threshold=0.5)
    uniform, collapsed = 3 * torch.eye(4).double(), torch.tensor([[-1e3, -1e3, 1e3, -2e3]] * 5).double()
    undecided = torch.zeros(8, 4).double()  # all probabilities are 1/4 and all first choices expert 0
    for h, loss in ((uniform, 1), (undecided, 1), (collapsed, 4)):
        assert balance_of(router(h)).item() == pytest.approx(loss, rel=1e-14)


def test_balance_loss_counts_the_choice_of_highest_priority(monkeypatch):
    router = make_router("switch", 4)
    monkeypatch.setattr(router, "choose", lambda score, probs: by_rank(probs.argsort(dim=1), probs, 1))
    routing = router(make_tokens(1)[0])  # chooses the least probable expert
    assert balance_of(routing).item() == pytest.approx(4 * routing.probs.min().item())


def test_a_token_without_experts_has_weight_0(monkeypatch):
    router = make_router("topk", 4, K=2, x_moe=True)
    monkeypatch.setattr(router, "choose", lambda score, probs: torch.full_like(probs, NOT_CHOSEN))
    routing = router(make_tokens(3)[0])
    assert torch.equal(routing.weight, torch.zeros(3, 4).double())
    assert balance_of(routing) == 0


# --- BASE


def best_total(score):
    """The optimum, from scipy's linear_sum_assignment with one copy of an expert per seat."""
    seats = math.ceil(score.shape[0] / score.shape[1])
    copies = score.double().repeat_interleave(seats, dim=1).numpy()
    optimize = pytest.importorskip("scipy.optimize")
    return copies[optimize.linear_sum_assignment(copies, maximize=True)].sum()


def assert_balanced_and_nearly_optimal(score, epsilon=None):
    S, E = score.shape
    expert = balanced_assignment(score, epsilon)
    assert expert.shape == (S,)
    assert set(expert.tolist()) <= set(range(E))
    assert torch.bincount(expert).max() <= math.ceil(S / E)
    total = float(score.double().gather(1, expert[:, None]).sum())
    slack = S * (float(score.max() - score.min()) / 1000 if epsilon is None else epsilon)
    assert total >= best_total(score) - slack - 1e-5 * S * float(score.abs().max())


KINDS = {  # scale and offset of the scores, and what is added to the first expert's
    "random": (1, 0, 0),
    "skewed": (1, 0, 20),
    "constant": (0, 0.3, 0),
    "near a constant": (1e-6, 1, 0),
    "huge": (1e9, 0, 0),
    "tiny": (1e-9, 0, 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("S, E", [(61, 8), (5, 9), (1, 3), (12, 1), (100, 4)])
@pytest.mark.parametrize("scale, offset, bonus", KINDS.values(), ids=KINDS)
def test_balanced_assignment_is_balanced_and_nearly_optimal(scale, offset, bonus, S, E, dtype):
    score = torch.randn(S, E, generator=torch.Generator().manual_seed(0), dtype=dtype)
    score[:, 0] += bonus
    assert_balanced_and_nearly_optimal(score * scale + offset)
    repeated = score[torch.arange(S) % 3 % S]
    assert_balanced_and_nearly_optimal(repeated * scale + offset)


@quick
@given(st.data(), st.integers(1, 9), st.integers(1, 5), st.sampled_from([None, 1e-3, 0.5]))
def test_balanced_assignment_of_random_matrices(data, S, E, epsilon):
    values = st.one_of(st.sampled_from([0.0, 1.0, -3.0]), st.floats(-10, 10, width=16))
    rows = data.draw(st.lists(st.lists(values, min_size=E, max_size=E), min_size=S, max_size=S))
    assert_balanced_and_nearly_optimal(torch.tensor(rows), epsilon)


@pytest.mark.parametrize("score", SCORES)
@train_and_test
def test_base_balances_in_training_and_chooses_the_best_expert_at_test(score, training):
    router = make_router("base", 4, training=training, score=score, routing_dim=0)
    with torch.no_grad():
        router.experts[1:] *= -1
        router.experts[1:] += router.experts[0]
        h = make_tokens(42)[0] + 3 * router.experts[0]  # nearly all tokens prefer expert 0
    routing, scores = router(h), router.scores(h).detach()
    assert (routing.wanted.sum(dim=1) == 1).all()
    largest_load = int(routing.wanted.sum(dim=0).max())
    if training:
        slack = 42e-3 * float(scores.max() - scores.min())
        assert largest_load <= math.ceil(42 / 4)
        assert float(scores[routing.wanted].sum()) >= best_total(scores) - slack
    else:
        assert largest_load > math.ceil(42 / 4)
        assert torch.equal(routing.priority.argmax(dim=1), scores.argmax(dim=1))


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_accept_no_tokens(name):
    routing = make_router(name, 4, K=2, training=True)(*make_tokens(0))
    assert routing.weight.shape == (0, 4)
    assert name not in PAPERS or balance_of(routing) == 0


def test_the_auction_ends_if_scores_are_nan():
    some_nan = torch.randn(9, 4).where(torch.rand(9, 4) < 0.5, torch.nan)
    for score in (torch.full((9, 4), torch.nan), some_nan):
        assert balanced_assignment(score).bincount(minlength=4).max() == 3


# --- Initialization, and X-MoE's hypersphere


@pytest.mark.parametrize("name, x_moe", [("hypersphere", False), ("base", False), ("threshold", True)])
def test_expert_embeddings_start_orthogonal_with_norm_0_1(name, x_moe):
    experts = ROUTERS[name](constants(n_embd=16, routing_dim=0), 8, x_moe=x_moe).experts
    torch.testing.assert_close(experts @ experts.t(), 0.01 * torch.eye(8), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("routing_dim, d_e", [(None, 32), (0, 0), (8, 8)])
def test_routing_dim_sets_the_projection_and_router_std_the_initial_deviation(routing_dim, d_e):
    config = constants(n_embd=256, router_std=0.5, routing_dim=routing_dim)
    torch.manual_seed(0)
    sphere, dot = (ROUTERS[name](config, 64).requires_grad_(False) for name in ("hypersphere", "threshold"))
    assert sphere.experts.shape == (64, d_e or 256)
    if d_e:
        assert sphere.project.weight.shape == (d_e, 256)
        assert float(sphere.project.weight.std()) == pytest.approx(0.5, rel=0.05)
    assert dot.experts.shape == (64, routing_dim or 256)  # None: only a hypersphere projects
    assert float(dot.experts.std()) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("gate, option, tau", [("softmax", None, 0.3), ("sigmoid", None, 0.07), ("sigmoid", 0.5, 0.5)])
def test_temperature_starts_at_init_temperature_or_the_papers_value(gate, option, tau):
    router = ROUTERS["hypersphere"](constants(gate=gate, init_temperature=option), 4)
    assert router.temperature.item() == pytest.approx(tau)
    assert router.init_temperature == pytest.approx(tau)


def test_after_step_restores_norms_and_keeps_the_temperature_positive():
    router = make_router("hypersphere", 5)
    direction = normalize(router.experts.detach(), dim=1)
    for tau, clamped in ((-2.0, 1e-4), (0.5, 0.5)):
        torch.nn.init.constant_(router.temperature, tau)
        router.after_step()
        assert_equal_up_to_rounding(router.experts.detach(), 0.1 * direction)
        assert router.temperature.item() == pytest.approx(clamped)


def test_after_step_changes_nothing_without_a_hypersphere():
    router = make_router("switch", 5)
    before = router.experts.clone()
    router.after_step()
    assert torch.equal(router.experts, before)


@pytest.mark.parametrize("K", [1, 2, 3])
def test_the_jacobian_of_an_smoe_layer_equals_the_papers(K):  # X-MoE section 2.2, eqs. 1 to 6
    """Why representations collapse: J1 fits a token to its experts, J2 moves it towards a sum of N < d embeddings."""
    N = 4
    router = make_router("topk", N, K, x_moe=True).requires_grad_(False)
    ffn = Experts(N, D, 5, "tanh").double().requires_grad_(False)
    for p in ffn.parameters():
        torch.nn.init.normal_(p)
    layer, h, ids = MoE(router, ffn, math.inf, math.inf), make_tokens(1)[0][0].detach(), torch.zeros(1, 1).long()
    jacobian = torch.autograd.functional.jacobian(lambda h: h + layer(h.view(1, 1, D), ids)[0].view(D), h)  # eq. 2

    e = router.experts  # (N, d)
    s = [float(h @ e[i]) for i in range(N)]  # eq. 1
    k = sorted(range(N), key=s.__getitem__, reverse=True)[:K]
    compared = range(N) if K == 1 else k  # the softmax is over all experts (eq. 3), in top-K over the K chosen ones
    S = {j: math.exp(s[j]) / sum(math.exp(s[i]) for i in compared) for j in compared}
    J1, J2 = torch.eye(D, dtype=torch.float64), torch.zeros(D, D, dtype=torch.float64)
    gradient = torch.linspace(-1, 2, D, dtype=torch.float64)  # of the loss with respect to the layer's output
    c = dict.fromkeys(compared, 0.0)
    for i in k:

        def expert(h, i=i):
            return ffn.w_out[i].t() @ reference.expert_hidden(h, i, ffn.w_in, ffn.b_in) + ffn.b_out[i]

        h_ffn = expert(h)
        J1 = J1 + S[i] * torch.autograd.functional.jacobian(expert, h)  # eq. 4
        for j in compared:
            J2 = J2 + S[i] * ((i == j) - S[j]) * h_ffn.outer(e[j])
            c[j] += S[i] * ((i == j) - S[j]) * float(h_ffn @ gradient)
    assert_equal_up_to_rounding(jacobian, J1 + J2)
    assert J2.norm() > 0.1
    assert torch.linalg.matrix_rank(J2) <= K
    towards_experts = sum(c[j] * e[j] for j in compared)  # eqs. 5, 6
    assert_equal_up_to_rounding(J2.t() @ gradient, towards_experts)
    assert_equal_up_to_rounding(jacobian.t() @ gradient, J1.t() @ gradient + towards_experts)
