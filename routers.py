"""How a token chooses its experts: score x gate x select -> (weight, priority).

score   how well token h fits expert e
          dot           h . e, or (W h) . e with a routing dimension                     XMoE eq. 1
          hypersphere   cos(W h, e), on a low-dimensional sphere                        X-MoE eq. 7
gate    how much of a chosen expert's output the token adds
          softmax       the probability over all experts                   XMoE eq. 2, X-MoE eq. 8
          sigmoid       each expert judged on its own                                   X-MoE eq. 8
select  which experts are chosen, and in what order an expert serves its tokens
          top1, topk    the most probable one / K                                 Switch, XMoE 3.5
          threshold     the fewest whose probabilities sum to t                         XMoE eq. 5
          hash          a fixed random expert per token id                             Hash Layers
          base          every expert gets equally many (training), best one (test)     BASE Layers
          expert_choice each expert takes the tokens it finds most probable    Expert Choice (2022)

Whatever the choice, the answer is the same two (S, E) tensors of a `Routing`; the dispatch in model.py needs no more.
S tokens, D model width, E experts, K experts per token.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The names people type -> (score, gate, select).
ROUTERS = {
    "switch": ("dot", "softmax", "top1"),
    "topk": ("dot", "softmax", "topk"),
    "threshold": ("dot", "softmax", "threshold"),
    "hypersphere": ("hypersphere", "softmax", "top1"),
    "hash": (None, None, "hash"),
    "base": ("dot", "sigmoid", "base"),
    "expert_choice": ("dot", "softmax", "expert_choice"),
}
NOT_CHOSEN = torch.iinfo(torch.int64).min
EMBEDDING_NORM = 0.1  # X-MoE 3.1: sets how fast an expert's angle can turn
TEMPERATURES = {"softmax": 0.3, "sigmoid": 0.07}  # X-MoE's tau_0 for each gate


class Routing(NamedTuple):
    """What a router decides about S tokens and E experts."""

    weight: Tensor  # (S, E) fp32, differentiable: the gate g of a chosen expert, 0 where not chosen
    priority: Tensor  # (S, E) int64: an expert serves larger ones first; NOT_CHOSEN where not chosen
    balance_loss: Tensor  # scalar: 1 when the experts are used uniformly, E when one does all; 0 if there is none
    probs: Tensor  # (S, E) fp32: softmax over the experts (hash: one-hot)

    @property
    def wanted(self) -> Tensor:
        """(S, E) bool: which experts each token chose, before any capacity."""
        return self.priority > NOT_CHOSEN


class Router(nn.Module):
    """Scores S tokens against E experts, and chooses.

    The router has no bias and computes in its parameters' type (fp32) whatever the autocast type. XMoE's released code
    ranks as here; X-MoE's leaves h unnormalised and learns no temperature, unlike eqs. 7 and 8.

    routing_dim: d_e, the width that W projects h to (X-MoE 3.1); 0 is no projection. orthogonal: expert embeddings
    start orthogonal and of norm 0.1, which the hypersphere and BASE always do. renormalize: the softmax gate runs over
    the K chosen only (X-MoE, K > 1); XMoE weighs by the plain probability. balance_choices: what f_e counts, each
    token's "first" choice (XMoE), or "all" (X-MoE, K > 1).
    """

    def __init__(
        self,
        n_embd: int,
        num_experts: int,
        score: str | None = "dot",
        gate: str | None = "softmax",
        select: str = "threshold",
        *,
        top_k: int = 1,
        threshold: float = 0.9,
        eval_threshold: float | None = None,
        routing_dim: int = 0,
        init_temperature: float | None = None,
        orthogonal: bool = False,
        renormalize: bool = False,
        balance_choices: str = "first",
        vocab_size: int = 0,
        init_std: float = 0.014,
    ):
        super().__init__()
        self.num_experts, self.score, self.gate, self.select = num_experts, score, gate, select
        self.top_k = top_k if select == "topk" else 1
        self.threshold = threshold
        self.eval_threshold = threshold if eval_threshold is None else eval_threshold
        self.renormalize = renormalize and (select == "threshold" or self.top_k > 1)  # one gate alone would be 1
        self.balance_choices = balance_choices
        # Bounds the rows that a GPU must make room for, without asking it how many were chosen.
        self.max_choices = num_experts if select in ("threshold", "expert_choice") else self.top_k
        if select == "hash":
            # One hash for all runs and layers: "fixed" must not depend on the seed or on how many numbers were drawn.
            rng = torch.Generator().manual_seed(0)
            self.register_buffer("expert_of_id", torch.randint(num_experts, (vocab_size,), generator=rng))
            return
        self.project = nn.Linear(n_embd, routing_dim, bias=False) if routing_dim else nn.Identity()
        self.experts = nn.Parameter(torch.empty(num_experts, routing_dim or n_embd))
        if routing_dim:
            nn.init.normal_(self.project.weight, std=init_std)
        if score == "hypersphere" or select == "base" or orthogonal:
            nn.init.orthogonal_(self.experts)
            self.experts.data = EMBEDDING_NORM * F.normalize(self.experts.data, dim=1)
        else:
            nn.init.normal_(self.experts, std=init_std)
        if score == "hypersphere":
            self.init_temperature = init_temperature or TEMPERATURES[gate]
            self.temperature = nn.Parameter(torch.tensor(float(self.init_temperature)))

    def forward(self, h: Tensor, ids: Tensor | None = None) -> Routing:
        """h (S, D), real tokens alone; ids (S,), which only `hash` reads."""
        if self.select == "hash":
            return self.by_hash(h, ids)
        with torch.autocast(h.device.type, enabled=False):
            score = self.scores(h.to(self.experts.dtype))  # (S, E)
            logits = score / self.temperature if self.score == "hypersphere" else score
            probs = logits.softmax(dim=1)  # XMoE eq. 1
            priority = self.choose(score.detach(), probs.detach())
            gate = probs if self.gate == "softmax" else logits.sigmoid()  # X-MoE eq. 8
            weight = torch.where(priority > NOT_CHOSEN, gate, 0.0)
            if self.renormalize and self.gate == "softmax":  # X-MoE 2.2, top-K
                total = weight.sum(dim=1, keepdim=True)  # (S, 1)
                weight = weight / total.clamp_min(torch.finfo(total.dtype).tiny)
            balance = weight.new_zeros(())
            if self.select in ("top1", "topk", "threshold"):
                # X-MoE eq. 9 has the constant tau_0 in place of tau.
                at_tau0 = (score / self.init_temperature).softmax(dim=1) if self.score == "hypersphere" else probs
                balance = balance_loss(self.counted(priority), at_tau0)
        return Routing(weight, priority, balance, probs)

    def by_hash(self, h: Tensor, ids: Tensor) -> Routing:
        chosen = F.one_hot(self.expert_of_id[ids], self.num_experts).bool()  # (S, E)
        weight = chosen.to(torch.promote_types(h.dtype, torch.float32))
        priority = torch.where(chosen, 0, NOT_CHOSEN)  # all equal: the earlier token first
        return Routing(weight, priority, weight.new_zeros(()), weight)

    def scores(self, h: Tensor) -> Tensor:
        """(S, D) -> (S, E)"""
        h, experts = self.project(h), self.experts
        if self.score == "hypersphere":  # X-MoE eq. 7
            h, experts = F.normalize(h, dim=1), F.normalize(experts, dim=1)
        return h @ experts.t()

    def choose(self, score: Tensor, probs: Tensor) -> Tensor:
        """-> priority (S, E)"""
        if self.select == "expert_choice":  # every token offers itself to every expert; capacity does the choosing
            return priority_key(probs, 0)
        if self.select == "base":
            expert = balanced_assignment(score) if self.training else score.argmax(dim=1)  # (S,)
            chosen = F.one_hot(expert, self.num_experts).bool()  # (S, E)
            return torch.where(chosen, priority_key(score, 0), NOT_CHOSEN)
        # The most probable expert comes first; of equal ones, the lower.
        p, order = probs.sort(dim=1, descending=True, stable=True)
        rank = torch.arange(self.num_experts, device=probs.device)
        count = self.top_k
        if self.select == "threshold":  # XMoE eq. 5
            t = self.threshold if self.training else self.eval_threshold
            count = 1 + (p[:, :-1].cumsum(dim=1) < t).sum(dim=1, keepdim=True)  # (S, 1)
            if t >= 1:  # by decree: in fp32 the sum of all probabilities may stop short of 1, or reach it early
                count = self.num_experts
        priority = torch.where(rank < count, priority_key(p, rank), NOT_CHOSEN)
        return torch.empty_like(priority).scatter_(1, order, priority)

    def counted(self, priority: Tensor) -> Tensor:
        """(S, E) bool: the choices that the balance loss counts."""
        if self.balance_choices == "all":
            return priority > NOT_CHOSEN
        return F.one_hot(priority.argmax(dim=1), self.num_experts).bool()  # a first choice has the highest priority

    @torch.no_grad()
    def after_step(self):
        """Puts expert embeddings back on their sphere (X-MoE 3.1) and keeps the temperature positive."""
        if self.score == "hypersphere":
            self.experts.mul_(EMBEDDING_NORM / self.experts.norm(dim=1, keepdim=True))
            self.temperature.clamp_(min=1e-4)


def priority_key(value: Tensor, rank: Tensor | int) -> Tensor:
    """One int64 that sorts by (rank ascending, value descending): XMoE's p - i (A.1), exactly.

    High 32 bits: minus the rank. Low 32 bits: those of the float, which read as an integer are in the order of floats
    once they are flipped for negative ones. Formed in fp32, p - i would keep 65 distinct values at rank 512, where p is
    at most 1 / 512, and 2 at rank 4,096. float64 is compared as fp32.
    """
    bits = (value.float() + 0.0).contiguous().view(torch.int32)  # + 0.0: -0.0 equals 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.long() - (rank << 32)


def balance_loss(counted: Tensor, probs: Tensor) -> Tensor:
    """E * sum_e f_e P_e (XMoE eq. 7 as its authors' code has it, X-MoE eq. 9; Switch's definition).

    f_e is the share of the counted (S, E) choices that fall on expert e, before any drop; P_e the mean of probs[:, e].
    """
    load = counted.sum(dim=0).to(probs.dtype)  # (E,)
    f = load / load.sum().clamp(min=1)
    P = probs.sum(dim=0) / max(1, len(probs))
    return probs.shape[1] * (f * P).sum()


@torch.no_grad()
def balanced_assignment(score: Tensor, epsilon: float | None = None) -> Tensor:
    """The assignment of S tokens to E experts, at most ceil(S / E) each, of the highest total score (BASE Layers).

    Bertsekas' auction for similar objects: each token without a seat bids for its best expert, net of prices, as much
    as it prefers that one to the second best, plus epsilon; an expert seats its highest bidders and its price is
    the lowest bid it seats. The total is within S * epsilon of the best one. Falling epsilons share their prices, which
    settles near-ties quickly. Each round asks the device whether anyone still stands.

    score (S, E) -> (S,) int64. epsilon is in units of score; None is 1/1000 of its range.
    """
    S, E = score.shape
    seats = math.ceil(S / E)
    if E == 1 or S == 0:
        return torch.zeros(S, dtype=torch.int64, device=score.device)
    # So that a small difference is not lost beside a large common part. NaN would bid for ever: the loss tells of it.
    score = (score - score.min()).nan_to_num(nan=0.0, posinf=0.0)
    spread = float(score.max())
    # Tokens that like all experts alike fill the empty seats: where every seat is taken, any starting price is fair.
    value = F.pad(score, (0, 0, 0, seats * E - S))  # (seats * E, E)
    everyone = torch.arange(len(value), device=score.device)
    final = spread / 1000 if epsilon is None else epsilon
    final = max(final, 1e-6 * spread, 1e-30) * S / len(value)  # each of len(value) bidders may miss by epsilon
    price, epsilon = value.new_zeros(E), max(spread / 4, final)
    while True:
        expert = torch.full_like(everyone, E)  # E: no seat
        paid = value.new_zeros(len(value))
        standing = everyone
        while len(standing):
            net, choices = (value[standing] - price).topk(2, dim=1)
            choice = choices[:, 0]
            expert[standing] = choice
            paid[standing] = price[choice] + net[:, 0] - net[:, 1] + epsilon
            bidder = paid.argsort(descending=True)
            bidder = bidder[expert[bidder].argsort(stable=True)]  # expert by expert, the highest bid first
            count = torch.bincount(expert, minlength=E)
            first = count.cumsum(0) - count  # where each expert's bidders begin
            place = everyone - first[expert[bidder]]  # 0 for an expert's highest bidder
            full = count >= seats
            price[full] = paid[bidder[first[full] + seats - 1]]  # the lowest bid that is seated
            expert[bidder[place >= seats]] = E  # the others stand up again
            standing = (expert == E).nonzero().squeeze(1)
        if epsilon <= final:
            return expert[:S]
        epsilon = max(epsilon / 4, final)
