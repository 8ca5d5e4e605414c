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

Whatever the choice, the answer is the same two (S, E) tensors of a `Routing`; `dispatch` needs no more.
S tokens, D model width, E experts, K experts per token.
"""

import math
from typing import NamedTuple

import numpy as np
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
SCORES = ("dot", "hypersphere")
GATES = ("softmax", "sigmoid")
SELECTS = ("top1", "topk", "threshold", "hash", "base", "expert_choice")

NOT_CHOSEN = torch.iinfo(torch.int64).min
EMBEDDING_NORM = 0.1  # X-MoE 3.1: sets how fast an expert's angle can turn


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

    `renormalize` makes the softmax gate run over the K chosen only (X-MoE, K > 1); XMoE weighs by the plain
    probability. `balance_choices` is what f_e counts: each token's "first" choice (XMoE), or "all" (X-MoE, K > 1).
    `routing_dim` is d_e, the width that W projects h to (X-MoE 3.1, typically E / 2); 0 is no projection. `orthogonal`:
    expert embeddings start orthogonal and of norm 0.1, which the hypersphere and BASE always do.

    Raises ValueError for options that do not go together.
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
        for name, value, known in (("score", score, SCORES), ("gate", gate, GATES), ("select", select, SELECTS)):
            if value not in known and not (select == "hash" and value is None):
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        if select == "hash" and (score or gate):
            raise ValueError("hash chooses by the token id alone: it has no score and no gate")
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold must lie in [0, 1], not {threshold}")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must lie in [1, num_experts = {num_experts}], not {top_k}")
        if balance_choices not in ("first", "all"):
            raise ValueError(f"balance_choices must be first or all, not {balance_choices!r}")
        self.num_experts, self.score, self.gate, self.select = num_experts, score, gate, select
        self.top_k = top_k if select == "topk" else 1
        # The most experts that a token may choose: what a host that must not ask the device knows of their number.
        self.most = num_experts if select in ("threshold", "expert_choice") else self.top_k
        self.threshold, self.eval_threshold = threshold, threshold if eval_threshold is None else eval_threshold
        self.renormalize, self.balance_choices = renormalize, balance_choices

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
            self.init_temperature = init_temperature or {"softmax": 0.3, "sigmoid": 0.07}[gate]
            self.temperature = nn.Parameter(torch.tensor(float(self.init_temperature)))

    def forward(self, h: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """h (S, D); ids (S,), which only `hash` reads; mask (S,) bool, True for a real token, None if all are.

        A masked token has weight 0 and no choice, and counts in no mean.
        """
        if self.select == "hash":
            chosen = self.expert_of_id[ids].unsqueeze(1) == torch.arange(self.num_experts, device=h.device)  # (S, E)
            priority = torch.where(chosen, 0, NOT_CHOSEN)  # all equal: the earlier token first
            probs, balance = chosen.to(torch.promote_types(h.dtype, torch.float32)), h.new_zeros(())
            return Routing(*masked(probs, priority, mask), balance, probs)

        with torch.autocast(h.device.type, enabled=False):
            h = h.to(self.experts.dtype)
            h = h if mask is None else torch.where(mask.unsqueeze(1), h, 0.0)  # not even an overflow may leak out
            score = self.scores(h)  # (S, E)
            logits = score / self.temperature if self.score == "hypersphere" else score
            probs = logits.softmax(dim=1)  # XMoE eq. 1
            gate = probs if self.gate == "softmax" else logits.sigmoid()  # X-MoE eq. 8
            priority, first = self.choose(score.detach(), probs.detach(), mask)
            weight, priority = masked(gate, priority, mask)
            if self.renormalize and self.gate == "softmax":
                weight = weight / weight.sum(dim=1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
            balance = h.new_zeros((), dtype=probs.dtype)
            if first is not None:
                counted = priority > NOT_CHOSEN
                if self.balance_choices == "first":
                    counted = torch.zeros_like(counted).scatter_(1, first, True)
                tau0 = (score / self.init_temperature).softmax(dim=1) if self.score == "hypersphere" else probs
                balance = balance_loss(counted, tau0, mask)
        return Routing(weight, priority, balance, probs)

    def scores(self, h: Tensor) -> Tensor:
        """(S, D) -> (S, E)"""
        h, experts = self.project(h), self.experts
        if self.score == "hypersphere":  # X-MoE eq. 7
            h, experts = F.normalize(h, dim=1), F.normalize(experts, dim=1)
        return h @ experts.t()

    def choose(self, score: Tensor, probs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """-> priority (S, E), and each token's first choice (S, 1) where a balance loss needs it."""
        if self.select == "expert_choice":  # every token offers itself to every expert; capacity does the choosing
            return priority_key(probs), None
        if self.select in ("base", "top1"):
            value = score if self.select == "base" else probs
            best = value.argmax(dim=1, keepdim=True)  # equal scores: the lower expert
            if self.select == "base" and self.training:
                real = slice(None) if mask is None else mask
                best[real] = balanced_assignment(score[real]).unsqueeze(1)
            priority = torch.full_like(value, NOT_CHOSEN, dtype=torch.int64)
            priority.scatter_(1, best, priority_key(value.gather(1, best)))
            return priority, None if self.select == "base" else best
        # The most probable expert comes first; of equal ones, the lower. One number says both: its upper half is the
        # key (of the probability in fp32), its lower half the expert.
        rank = expert = torch.arange(self.num_experts, device=probs.device)
        ordered = sort_rows((~priority_key(probs) << 32) | expert)
        key, order = ~(ordered >> 32), ordered & 0xFFFFFFFF
        count = self.top_k
        if self.select == "threshold":
            # XMoE eq. 5. In fp32 the sum of all probabilities may stop short of 1: t = 1 means all, by decree.
            t = self.threshold if self.training else self.eval_threshold
            p = probs.gather(1, order[:, :-1])
            count = 1 + (p.cumsum(dim=1) < t).sum(dim=1, keepdim=True) if t < 1 else self.num_experts  # (S, 1)
        priority = torch.where(rank < count, key - (rank << 32), NOT_CHOSEN)  # `priority_key` with the rank
        return torch.empty_like(priority).scatter_(1, order, priority), order[:, :1]

    @torch.no_grad()
    def after_step(self):
        """Puts expert embeddings back on their sphere (X-MoE 3.1) and keeps the temperature positive."""
        if self.score == "hypersphere":
            self.experts.mul_(EMBEDDING_NORM / self.experts.norm(dim=1, keepdim=True))
            self.temperature.clamp_(min=1e-4)


def masked(gate: Tensor, priority: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """-> weight, priority: nothing chosen by a masked token, and weight 0 wherever nothing is chosen."""
    if mask is not None:
        priority = priority.masked_fill(~mask.unsqueeze(1), NOT_CHOSEN)
    return torch.where(priority > NOT_CHOSEN, gate, 0.0), priority


def priority_key(value: Tensor, rank: Tensor | int = 0) -> Tensor:
    """One int64 that sorts by (rank ascending, value descending): XMoE's p - i (A.1), exactly.

    Formed in fp32, p - i would keep 65 distinct values of p at rank 512 and 2 at rank 4,096. The bits of a float,
    read as an integer, are already in order; those of negative floats in the reverse one. float64 is compared as fp32.
    """
    bits = (value.float() + 0.0).contiguous().view(torch.int32)  # + 0.0: -0.0 equals 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() - (rank << 32)


@torch.library.custom_op("nanoxmoe::sort_rows", mutates_args=())
def sort_rows(x: Tensor) -> Tensor:
    """(S, E) int64 -> each row ascending. On a CPU numpy takes a sixth of torch's time."""
    return torch.from_numpy(np.sort(x.numpy(), axis=1)) if x.device.type == "cpu" else x.sort(dim=1).values


@sort_rows.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def balance_loss(counted: Tensor, probs: Tensor, mask: Tensor | None) -> Tensor:
    """E * sum_e f_e P_e (XMoE eq. 7, X-MoE eq. 9; Switch's definition).

    f_e is the share of the counted (S, E) choices that fall on expert e, before any drop; P_e the mean of probs[:, e].
    """
    if mask is not None:
        counted, probs = counted & mask.unsqueeze(1), torch.where(mask.unsqueeze(1), probs, 0.0)
    tokens = probs.shape[0] if mask is None else mask.sum().clamp(min=1)
    load = counted.sum(dim=0).to(probs.dtype)  # (E,)
    return probs.shape[1] * (load / load.sum().clamp(min=1) * (probs.sum(dim=0) / tokens)).sum()


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
    value = F.pad(score, (0, 0, 0, seats * E - S))  # (N, E)
    last = max(spread / 1000 if epsilon is None else epsilon, 1e-6 * spread, 1e-30) * S / (seats * E)
    price, step = value.new_zeros(E), max(spread / 4, last)
    place = torch.arange(seats * E, device=score.device)
    while True:
        expert = torch.full_like(place, E)  # E: no seat
        paid = value.new_zeros(seats * E)
        while len(standing := (expert == E).nonzero().squeeze(1)):
            (best, second), (choice, _) = (x.unbind(1) for x in (value[standing] - price).topk(2, dim=1))
            expert[standing], paid[standing] = choice, price[choice] + best - second + step
            order = paid.argsort(descending=True)
            order = order[expert[order].argsort(stable=True)]  # by expert, the highest bid first
            count = torch.bincount(expert, minlength=E)
            start = count.cumsum(0) - count
            expert[order[place - start[expert[order]] >= seats]] = E
            full = count >= seats
            price[full] = paid[order[(start + seats - 1)[full]]]
        if step <= last:
            return expert[:S]
        step = max(step / 4, last)


def representation_collapse(count: Tensor, total: Tensor, outer: Tensor) -> float:
    """RC = Tr(Sigma_W pinv(Sigma_B)), the smaller, the more collapsed (X-MoE eq. 11); 0 where one expert has all,
    nan where h is not finite.

    Of n tokens h (D,), each in the class of its chosen expert, from sums in float64: count (E,) tokens, total (E, D)
    the sum of h, and outer (D, D) the sum of h h^T over all. Sigma_W is the mean covariance around class means mu_k,
    Sigma_B = sum_k n_k / n (mu_k - mu)(mu_k - mu)^T over non-empty classes, whose rank is one less than their number.
    """
    count, total = count[count > 0], total[count > 0]
    share, mean = count / count.sum(), total / count.unsqueeze(1)  # (K,), (K, D)
    within = outer / count.sum() - (share * mean.t()) @ mean  # (D, D)
    between = share.sqrt().unsqueeze(1) * (mean - share @ mean)  # (K, D); its square is Sigma_B
    if not (within.isfinite().all() and between.isfinite().all()):
        return math.nan
    _, size, direction = torch.linalg.svd(between, full_matrices=False)
    size, direction = size[: len(count) - 1], direction[: len(count) - 1]
    sound = size > 1e-12 * size.max() if len(size) else size > 0
    return float((((direction @ within) * direction).sum(dim=1) / size.square())[sound].sum())
