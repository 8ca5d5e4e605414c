"""How a token chooses its experts. One class is one router. Yours needs `choose`, and `@router("name")` above it.

A router answers with two (S, E) tensors: `weight`, how much of an expert's output is added to the token, and
`priority`, how early the expert should serve it. The dispatch in model.py needs no more: each expert keeps the tokens
of its C highest priorities. S tokens, D model width, E experts, K experts per token.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOT_CHOSEN = torch.iinfo(torch.int64).min
FEW = 8  # experts of a token that are looked at first
EMBEDDING_NORM = 0.1  # X-MoE 3.1: it sets how fast the angle of an expert's embedding can turn
TEMPERATURES = {"softmax": 0.3, "sigmoid": 0.07}  # X-MoE's tau_0 for each gate
ROUTERS = {}  # the name that people type -> its class


def router(name: str):
    """Registers a class, so that `--router name` finds it."""

    def register(cls):
        ROUTERS[name] = cls
        return cls

    return register


class RouterError(ValueError):
    """What is wrong with a router's class."""


class Routing(NamedTuple):
    """What a router decides about S tokens and E experts."""

    weight: Tensor  # (S, E) fp32, differentiable: the gate g of a chosen expert, 0 where not chosen
    priority: Tensor  # (S, E) int64: an expert serves larger ones first; NOT_CHOSEN where not chosen
    balance_loss: Tensor  # scalar: 1 when the experts are used uniformly, E when one does all; 0 if there is none
    probs: Tensor  # (S, E) fp32: softmax over the experts (hash: one-hot)

    @property
    def wanted(self):
        """(S, E) bool: which experts each token chose, before any capacity."""
        return self.priority > NOT_CHOSEN


class Router(nn.Module):
    """Scores S tokens against E experts; a subclass chooses.

    config  has n_embd, and the constants that `reads` names, as far as the script has them
    K       how many experts TopK takes: `top_k`, without which XMoE's layer passes `split` (more parts, more choices).
            Switch, Base and Hash take one whatever K is, and Threshold as many as a token needs
    V       size of the vocabulary, for a router that looks at token ids
    x_moe   the conventions of X-MoE's layers: embeddings start from an orthogonal matrix, and with K > 1 the softmax
            gate runs over the K chosen experts and the balance loss counts all of them. XMoE weighs by the plain
            probability (eq. 2) and counts first choices (eq. 7).

    A router has no bias, and computes in its parameters' type (fp32) whatever the autocast type. XMoE's released code
    ranks as here. X-MoE's leaves h unnormalised and learns no temperature, unlike its equations 7 and 8.
    """

    score = "dot"  # h . e (XMoE eq. 1), or "hypersphere": cos(W h, e) (X-MoE eq. 7)
    gate = "softmax"  # the probability over all experts, or "sigmoid": each expert judged on its own (X-MoE eq. 8)
    split = 1  # parts that an FFN's width is cut into, where the config does not say
    most = 1  # experts that a token may choose at most; None: all. On a GPU there is room for so many rows a token
    balanced = True  # whether it is trained with the balance loss
    sees_later = False  # whether its choices depend on later tokens, so that it cannot generate
    orthogonal = False  # whether expert embeddings start from an orthogonal matrix whatever the layer
    reads = {"score", "gate", "routing_dim", "init_temperature", "router_std", "router_lr"}  # constants of the config

    def __init__(self, config, E: int, K: int = 1, V: int = 0, x_moe: bool = False):
        super().__init__()
        self.config, self.E = config, E
        self.score = config.score or self.score
        self.gate = config.gate or self.gate
        self.on_sphere = self.score == "hypersphere"
        self.over_chosen = x_moe and K > 1
        d_e = config.routing_dim  # X-MoE 3.1: W projects h to so many dimensions; 0: there is no W
        if d_e is None:
            d_e = E // 2 if self.on_sphere else 0
        self.project = nn.Linear(config.n_embd, d_e, bias=False) if d_e else nn.Identity()
        self.experts = nn.Parameter(torch.empty(E, d_e or config.n_embd))
        if d_e:
            nn.init.normal_(self.project.weight, std=config.router_std)
        if self.on_sphere or self.orthogonal or x_moe:
            nn.init.orthogonal_(self.experts)  # which more experts than dimensions cannot be
            self.experts.data = EMBEDDING_NORM * F.normalize(self.experts.data, dim=1)
        else:
            nn.init.normal_(self.experts, std=config.router_std)
        if self.on_sphere:
            self.init_temperature = config.init_temperature or TEMPERATURES[self.gate]  # tau_0
            self.temperature = nn.Parameter(torch.tensor(float(self.init_temperature)))  # tau

    @classmethod
    def reads_with(cls, score: str | None) -> set[str]:
        """`reads` under `--score`, None where it is not given: tau_0 is a hypersphere's alone."""
        on_sphere = (score or cls.score) == "hypersphere"
        return cls.reads if on_sphere else cls.reads - {"init_temperature"}

    @property
    def max_choices(self) -> int:
        return self.most or self.E

    def choose(self, score, probs):
        """score (S, E), probs (S, E), both without gradient -> priority (S, E), see `by_rank`."""
        raise RouterError(f"{type(self).__name__} has no `choose(self, score, probs)`, which returns priorities (S, E)")

    def forward(self, h, ids=None, position=None) -> Routing:
        """h (S, D) of real tokens alone, their ids (S,) and their positions in their sequences (S,)."""
        with torch.autocast(h.device.type, enabled=False):
            score = self.scores(h.to(self.experts.dtype))  # (S, E)
            logits = score / self.temperature if self.on_sphere else score
            probs = logits.softmax(dim=1)  # XMoE eq. 1
            priority = self.choose(score.detach(), probs.detach())
            check_priority(self, priority, probs)
            gate = probs if self.gate == "softmax" else logits.sigmoid()  # X-MoE eq. 8
            chosen = priority > NOT_CHOSEN
            weight = torch.where(chosen, gate, 0.0)
            if self.over_chosen and self.gate == "softmax":  # X-MoE 2.2
                total = weight.sum(dim=1, keepdim=True)  # (S, 1)
                weight = weight / total.clamp_min(torch.finfo(total.dtype).tiny)
            balance = weight.new_zeros(())
            if self.balanced:
                # X-MoE eq. 9 has the constant tau_0 in place of tau.
                at_tau0 = (score / self.init_temperature).softmax(dim=1) if self.on_sphere else probs
                # First choices, which have the highest priority, or all.
                counted = chosen if self.over_chosen else one_hot(priority.argmax(dim=1), self.E)
                balance = balance_loss(counted, at_tau0)
        return Routing(weight, priority, balance, probs)

    def scores(self, h):
        """(S, D) -> (S, E)"""
        h, experts = self.project(h), self.experts
        if self.on_sphere:  # X-MoE eq. 7
            h = F.normalize(h, dim=1)
            experts = F.normalize(experts, dim=1)
        return h @ experts.t()

    @torch.no_grad()
    def after_step(self):
        """To be called after an optimizer step: expert embeddings return to their sphere (X-MoE 3.1), tau stays > 0."""
        if self.on_sphere:
            self.experts.mul_(EMBEDDING_NORM / self.experts.norm(dim=1, keepdim=True))
            self.temperature.clamp_(min=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# The routers


@router("topk")
class TopK(Router):
    """The K most probable experts (XMoE 3.5)."""

    split = 4
    reads = Router.reads | {"top_k"}

    def __init__(self, config, E: int, K: int = 1, V: int = 0, x_moe: bool = False):
        super().__init__(config, E, K, V, x_moe)
        if config.top_k is not None and not 1 <= K <= E:
            raise ValueError(f"top_k must lie in [1, experts = {E}], not {K}")
        self.most = K

    def choose(self, score, probs):
        return by_rank(best_experts(probs, self.max_choices), probs, self.max_choices)


@router("switch")
class Switch(TopK):
    """The most probable expert (Switch Transformers); in X-MoE's layers its baseline SMoE."""

    split, reads = 1, Router.reads

    def __init__(self, config, E: int, K: int = 1, V: int = 0, x_moe: bool = False):
        super().__init__(config, E, 1, V, x_moe)


@router("hypersphere")
class Hypersphere(TopK):
    """The nearest experts on a sphere of few dimensions (X-MoE)."""

    score, split = "hypersphere", 1


@router("threshold")
class Threshold(Router):
    """The fewest experts whose probabilities sum to t (XMoE eq. 5)."""

    split, most = 4, None
    reads = Router.reads | {"threshold", "eval_threshold"}

    def choose(self, score, probs):
        t = self.config.threshold
        if not self.training and self.config.eval_threshold is not None:
            t = self.config.eval_threshold
        if t >= 1:  # every expert: in fp32 the sum of all probabilities may stop short of 1, or reach it early
            return by_rank(best_experts(probs, self.E), probs, self.E)
        # To look at few experts is faster where they are enough for all tokens, but a GPU would wait for the answer.
        one_look = probs.is_cuda or torch.compiler.is_compiling()
        for most in [self.E] if one_look else [min(FEW, self.E), self.E]:
            order = best_experts(probs, most)
            total = probs.gather(1, order).cumsum(dim=1)  # (S, most)
            if most == self.E or (total[:, -1] >= t).all():
                break
        # One more expert for each prefix that stays below t; the sum of all is left out, so at most E.
        count = 1 + (total[:, :-1] < t).sum(dim=1)  # (S,)
        return by_rank(order, probs, count)


@router("base")
class Base(Router):
    """In training every expert gets equally many tokens, at test a token gets its best expert (BASE Layers)."""

    gate, balanced, orthogonal = "sigmoid", False, True

    def choose(self, score, probs):
        expert = balanced_assignment(score) if self.training else score.argmax(dim=1)  # (S,)
        return torch.where(one_hot(expert, self.E), priority_key(score, 0), NOT_CHOSEN)


@router("expert_choice")
class ExpertChoice(Router):
    """Each expert takes the tokens that it finds most probable (Expert Choice, Zhou et al. 2022).

    Every token offers itself to every expert, and the capacity does the choosing.
    """

    most, balanced, sees_later = None, False, True

    def choose(self, score, probs):
        return priority_key(probs, 0)


@router("hash")
class Hash(Router):
    """A fixed random expert for each token id, of weight 1 (Hash Layers). Nothing is learned."""

    balanced, reads = False, set()

    def __init__(self, config, E: int, K: int = 1, V: int = 0, x_moe: bool = False):
        nn.Module.__init__(self)
        self.E, self.on_sphere = E, False
        # One hash for all runs and layers: "fixed" must not depend on the seed or on how many numbers were drawn.
        rng = torch.Generator().manual_seed(0)
        self.register_buffer("expert_of_id", torch.randint(E, (V,), generator=rng))

    def forward(self, h, ids, position=None):
        chosen = one_hot(self.expert_of_id[ids], self.E)  # (S, E)
        rounded = torch.is_autocast_enabled(h.device.type)  # h, and not what is added to the residual stream
        weight = chosen.to(torch.float32 if rounded else h.dtype)
        priority = torch.where(chosen, 0, NOT_CHOSEN)  # all are equal: the earlier token comes first
        return Routing(weight, priority, weight.new_zeros(()), weight)


# ---------------------------------------------------------------------------------------------------------------------
# Priorities and the balance loss


def one_hot(index, E: int):
    """(S,) -> (S, E) bool"""
    return index.unsqueeze(1) == torch.arange(E, device=index.device)


def check_priority(router: nn.Module, priority, probs):
    """Raises RouterError for what are no priorities, such as the numbers of the chosen experts."""
    if isinstance(priority, Tensor) and priority.shape == probs.shape and priority.dtype == torch.int64:
        return
    found = f"{tuple(priority.shape)} of {priority.dtype}" if isinstance(priority, Tensor) else f"a {type(priority)}"
    wanted = f"(S, E) = {tuple(probs.shape)} of torch.int64, made with by_rank or priority_key"
    raise RouterError(f"{type(router).__name__} chooses by {found}: `choose` should return priorities {wanted}")


def best_experts(probs, most: int):
    """(S, E) -> (S, most), each token's most probable experts, the best first; of equal ones the lower comes first."""
    E = probs.shape[1]
    if most >= E:
        return probs.argsort(dim=1, descending=True, stable=True)
    # Bits of what is not negative sort as it does; with the expert behind them no two numbers are equal.
    different = (probs.float().view(torch.int32).long() << 32) - torch.arange(E, device=probs.device)
    return different.topk(most, dim=1).indices  # a third of the time of sorting all


def by_rank(order, probs, count: Tensor | int):
    """Priorities (S, E) of tokens that choose the first `count` experts of their `order`: XMoE's p - i (A.1).

    order (S, E) or fewer columns: each token's experts, the best first, of which those after the first `count` do not
    matter; probs (S, E); count: a number, or one for each token (S,). All first choices come before all second ones; of
    equal rank i, the more probable comes first.
    """
    rank = torch.arange(order.shape[1], device=probs.device)
    if isinstance(count, Tensor):
        count = count.reshape(-1, 1)  # (S, 1)
    key = priority_key(probs.gather(1, order), rank)  # (S, E)
    in_order = torch.where(rank < count, key, NOT_CHOSEN)
    priority = torch.full_like(probs, NOT_CHOSEN, dtype=torch.int64)
    return priority.scatter_(1, order, in_order)


def priority_key(value, rank: Tensor | int):
    """One int64 that sorts by (rank ascending, value descending), exactly.

    Why not the float p - i: in fp32 it keeps 65 distinct values at rank 512, where p is at most 1 / 512, and 2 at rank
    4,096. So minus the rank stands in the high 32 bits, and the float in the low ones. A float's bits, read as int32,
    sort as the float does, but those of negative ones run backwards: where the sign is set, the other 31 bits are
    flipped. A float64 is compared as fp32.
    """
    bits = (value.float() + 0.0).contiguous().view(torch.int32)  # + 0.0: -0.0 equals 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.long() - (rank << 32)


def balance_loss(counted, probs):
    """E * sum_e f_e P_e (XMoE eq. 7 as its authors' code has it, X-MoE eq. 9; Switch's definition).

    f_e is the share of the counted (S, E) choices that fall on expert e, before any drop; P_e the mean of probs[:, e].
    """
    load = counted.sum(dim=0).to(probs.dtype)  # (E,)
    f = load / load.sum().clamp(min=1)
    P = probs.sum(dim=0) / max(1, len(probs))
    return probs.shape[1] * (f * P).sum()


# ---------------------------------------------------------------------------------------------------------------------
# BASE's balanced assignment


@torch.no_grad()
def balanced_assignment(score, epsilon: float | None = None):
    """The assignment of S tokens to E experts, at most ceil(S / E) each, of the highest total score (BASE Layers).

    score (S, E) -> (S,) int64. On average a token's score is at most epsilon below that in the best assignment; None is
    a thousandth of the range of the scores. It is the auction algorithm with epsilon scaling (Bertsekas): an auction in
    which bids rise by epsilon ends within epsilon a token of the optimum, and soon if epsilon is large. So each auction
    starts at the prices where one with a larger epsilon ended.
    """
    S, E = score.shape
    seats = math.ceil(S / E)
    if E == 1 or S == 0:
        return torch.zeros(S, dtype=torch.int64, device=score.device)
    # From 0, so that a small difference is not lost beside a large common part. NaN would bid for ever.
    score = (score - score.min()).nan_to_num(nan=0.0, posinf=0.0)
    spread = float(score.max())
    # Dummy bidders, to whom every expert is worth 0, fill the seats up to E * seats: an auction may start at the prices
    # of another only if every seat is taken in the end.
    value = F.pad(score, (0, 0, 0, seats * E - S))  # (seats * E, E)
    final = spread / 1000 if epsilon is None else epsilon
    final = max(final, 1e-6 * spread, 1e-30)  # by less than fp32 can tell apart, bids would not rise
    final = final * S / len(value)  # each of len(value) bidders may miss by epsilon
    price, step = value.new_zeros(E), max(spread / 4, final)
    while True:
        expert = auction(value, price, seats, epsilon=step)
        if step <= final:
            return expert[:S]
        step = max(step / 4, final)


def auction(value, price, seats: int, epsilon: float):
    """Bertsekas' auction for similar objects: N bidders for E experts of N / E seats each -> (N,) the expert of each.

    value (N, E): what a seat is worth to a bidder. price (E,) is raised in place. Each round asks the device
    several times, such as whether anyone is still unassigned: for 16,384 tokens and 64 experts a GPU waited for the
    host 4,000 times a layer. BASE is the one router that should be slow there.
    """
    N, E = value.shape
    everyone = torch.arange(N, device=value.device)
    expert = torch.full_like(everyone, E)  # E: has no seat
    paid = value.new_zeros(N)
    unassigned = everyone
    while len(unassigned):
        # Bid: for the best expert, as much over its price as it is better than the second best, and epsilon.
        profit, choices = (value[unassigned] - price).topk(2, dim=1)
        choice = choices[:, 0]
        expert[unassigned] = choice
        paid[unassigned] = price[choice] + profit[:, 0] - profit[:, 1] + epsilon
        # Rank: the bidders of each expert, the highest bid first.
        bidder = paid.argsort(descending=True)
        bidder = bidder[expert[bidder].argsort(stable=True)]
        count = torch.bincount(expert, minlength=E)
        start = count.cumsum(0) - count  # where each expert's bidders begin
        rank = everyone - start[expert[bidder]]  # 0 for an expert's highest bidder
        # Price: a full expert costs the lowest bid that it seats.
        full = count >= seats
        price[full] = paid[bidder[start[full] + seats - 1]]
        # Seat: who bid less than those loses the seat, and bids again.
        expert[bidder[rank >= seats]] = E
        unassigned = (expert == E).nonzero().squeeze(1)
    return expert
