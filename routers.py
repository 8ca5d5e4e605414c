"""How a token chooses its experts. Each router is one class; yours needs `choose` and `@router("name")` above it.

A router returns two (S, E) tensors: `weight`, how much of an expert's output is added to a token, and `priority`, how
early the expert serves it. That is all the dispatch in model.py needs: each expert keeps the C tokens with the highest
priority. S tokens, D model width, E experts, K experts per token.
"""

import importlib.util
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOT_CHOSEN = -math.inf
EMBEDDING_NORM = 0.1  # X-MoE 3.1: sets how fast the angle of an expert's embedding can turn
TEMPERATURES = {"softmax": 0.3, "sigmoid": 0.07}  # X-MoE's tau_0 for each gate
ROUTERS = {}  # name on the command line -> class


def router(name: str):
    """Registers a class as `--router name`."""

    def register(cls):
        cls.reads = cls.reads | cls.constants.keys()
        ROUTERS[name] = cls
        return cls

    return register


def find_router(name: str) -> type["Router"]:
    """The class of a name in ROUTERS, or of FILE.py:NAME in a file of your own. Raises ValueError if missing."""
    file, _, _ = name.rpartition(":")
    if file.endswith(".py") and name not in ROUTERS:
        before = dict(ROUTERS)
        spec = importlib.util.spec_from_file_location(f"router_file_{Path(file).stem}", file)
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # torch.compile looks it up there
        try:
            spec.loader.exec_module(module)
        except (ImportError, OSError, SyntaxError) as error:
            raise ValueError(f"{file} cannot be imported: {error}") from error
        of_file = {f"{file}:{short}": cls for short, cls in ROUTERS.items() if before.get(short) is not cls}
        ROUTERS.clear()
        ROUTERS.update(before | of_file)
        if not of_file:
            raise ValueError(f"{file} registers no router: add @router(NAME) above its class")
    if name not in ROUTERS:
        raise ValueError(f"router must be dense, FILE.py:NAME, or one of {', '.join(ROUTERS)}, not {name!r}")
    return ROUTERS[name]


class RouterError(ValueError):
    """A router's class breaks its contract."""


class Routing(NamedTuple):
    """A router's decision about S tokens and E experts."""

    weight: Tensor  # (S, E) fp32, differentiable: the gate g of a chosen expert, 0 where not chosen
    priority: Tensor  # (S, E) float: an expert serves higher ones first; NOT_CHOSEN where not chosen
    losses: dict[str, tuple[float, Tensor]]  # name -> weight in the training loss, value (scalar)
    probs: Tensor  # (S, E) fp32: softmax over the experts (hash: one-hot)

    @property
    def wanted(self):
        """(S, E) bool: the experts that each token chose, before any capacity limit."""
        return self.priority > NOT_CHOSEN


class Router(nn.Module):
    """Scores S tokens against E experts; a subclass chooses.

    config  has n_embd and the routing constants; read your own as `self.config.name`
    top_k   experts per token that TopK takes: `--top_k`, by default `split` in XMoE's layer
    V       vocabulary size, for a router that looks at token ids
    x_moe   follows X-MoE's conventions: embeddings start orthogonal, and for top_k > 1 the softmax gate is normalized
            over the chosen experts and the balance loss counts all choices. XMoE weights by the plain probability
            (eq. 2) and counts first choices (eq. 7).

    A router has no bias and computes in the dtype of its parameters (fp32), even under autocast. XMoE's released code
    ranks as we do. X-MoE's leaves h unnormalized and does not learn the temperature, unlike its equations 7 and 8.
    """

    score = "dot"  # h . e (XMoE eq. 1), or "hypersphere": cos(W h, e) (X-MoE eq. 7)
    gate = "softmax"  # probability over all experts, or "sigmoid": each expert on its own (X-MoE eq. 8)
    split = 1  # cut the FFN width into this many parts, unless the config says otherwise
    K = 1  # the most experts a token may choose, None: all E. A GPU allocates this many rows per token
    balanced = True  # train with the balance loss
    orthogonal = False  # start expert embeddings orthogonal in every layer
    reads = {"score", "gate", "routing_dim", "init_temperature", "router_std", "router_lr", "balance_coef"}
    constants = {}  # name -> default of constants of your own: `--name value`, and `self.config.name`
    tallies = ()  # names of buffers that count over a training step
    beside = None  # a method (h, routing) -> (S, D), added to the experts' output of every token; None: nothing

    def __init__(self, config, E: int, top_k: int = 1, V: int = 0, x_moe: bool = False):
        super().__init__()
        self.config, self.E, self.K = config, E, self.K or E
        self.score = config.score or self.score
        self.gate = config.gate or self.gate
        self.on_sphere = self.score == "hypersphere"
        self.over_chosen = x_moe and top_k > 1
        d_e = config.routing_dim  # X-MoE 3.1: W projects h to d_e dimensions; 0: no W
        if d_e is None:
            d_e = E // 2 if self.on_sphere else 0
        self.project = nn.Linear(config.n_embd, d_e, bias=False) if d_e else nn.Identity()
        self.experts = nn.Parameter(torch.empty(E, d_e or config.n_embd))
        if d_e:
            nn.init.normal_(self.project.weight, std=config.router_std)
        if self.on_sphere or self.orthogonal or x_moe:
            nn.init.orthogonal_(self.experts)  # impossible if E exceeds the dimension: then columns are
            self.experts.data = EMBEDDING_NORM * F.normalize(self.experts.data, dim=1)
        else:
            nn.init.normal_(self.experts, std=config.router_std)
        if self.on_sphere:
            self.init_temperature = config.init_temperature or TEMPERATURES[self.gate]  # tau_0
            self.temperature = nn.Parameter(torch.tensor(float(self.init_temperature)))  # tau

    @classmethod
    def reads_with(cls, score: str | None) -> set[str]:
        """`reads` under `--score` (None: the class's own); only a hypersphere reads tau_0."""
        unused = set() if (score or cls.score) == "hypersphere" else {"init_temperature"}
        return cls.reads - unused - (set() if cls.balanced else {"balance_coef"})

    def choose(self, score, probs):
        """score (S, E), probs (S, E), both detached -> priority (S, E), see `by_rank`."""
        raise RouterError(f"{type(self).__name__} needs `choose(self, score, probs)`, which returns priorities (S, E)")

    def forward(self, h, ids=None) -> Routing:
        """h (S, D) and ids (S,) of the non-padding tokens."""
        with torch.autocast(h.device.type, enabled=False):
            score = self.scores(h.to(self.experts.dtype))  # (S, E)
            logits = score / self.temperature if self.on_sphere else score
            probs = logits.softmax(dim=1)  # XMoE eq. 1
            priority = self.choose(score.detach(), probs.detach())
            check_priority(self, priority, probs)
            weight = torch.where(priority > NOT_CHOSEN, self.gates(logits, probs), 0.0)
            if self.over_chosen and self.gate == "softmax":  # X-MoE 2.2
                total = weight.sum(dim=1, keepdim=True)  # (S, 1)
                weight = weight / total.clamp_min(torch.finfo(total.dtype).tiny)
            losses = self.losses(score, probs, priority)
            for loss in losses.values():
                if not isinstance(loss, tuple):
                    raise RouterError(f"{type(self).__name__}.losses must return {{name: (weight, value)}}")
        E = self.E  # further columns of `scores` are null experts, which a token may choose for nothing
        return Routing(weight[:, :E], priority[:, :E], losses, probs[:, :E])

    def gates(self, logits, probs):
        """(S, E), (S, E) -> (S, E): the weight of an expert's output, where it is chosen."""
        return probs if self.gate == "softmax" else logits.sigmoid()  # X-MoE eq. 8

    def losses(self, score, probs, priority) -> dict[str, tuple[float, Tensor]]:
        """What a layer adds to the training loss: {name: (weight, value)}. score and probs (S, E) have gradients."""
        if not self.balanced:
            return {}
        if self.on_sphere:  # X-MoE eq. 9 has the constant tau_0 in place of tau
            probs = (score / self.init_temperature).softmax(dim=1)
        counted = priority > NOT_CHOSEN
        if not self.over_chosen:
            counted = one_hot(priority.argmax(dim=1), probs.shape[1])  # the first choice has the highest priority
        return {"balance": (self.config.balance_coef, balance_loss(counted, probs))}

    def scores(self, h):
        """(S, D) -> (S, E)"""
        h, experts = self.project(h), self.experts
        if self.on_sphere:  # X-MoE eq. 7
            h = F.normalize(h, dim=1)
            experts = F.normalize(experts, dim=1)
        return h @ experts.t()

    def tally(self, name: str, *shape: int):
        """In `__init__`: registers a counter for `count`, which checkpoints do not save."""
        self.register_buffer(name, torch.zeros(shape), persistent=False)
        self.tallies += (name,)

    def count(self, name: str, number: Tensor | int):
        """Adds to a tally, in training. In `after_step` it holds the sum over all micro-batches and processes."""
        if name not in self.tallies:
            raise RouterError(f"{type(self).__name__} has no tally {name!r}: add self.tally({name!r}, E) to __init__")
        tally, shape = getattr(self, name), tuple(number.shape) if isinstance(number, Tensor) else ()
        if tally.shape != shape:
            raise RouterError(f"{type(self).__name__} counts shape {shape} in {name!r}, which has {tuple(tally.shape)}")
        recomputing = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if self.training and not recomputing:
            tally.add_(number)

    @torch.no_grad()
    def after_step(self):
        """Called after each optimizer step: puts expert embeddings back on their sphere (X-MoE 3.1), keeps tau > 0."""
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

    def __init__(self, config, E: int, top_k: int = 1, V: int = 0, x_moe: bool = False):
        super().__init__(config, E, top_k, V, x_moe)
        if not 1 <= top_k <= E:
            raise ValueError(f"top_k must be in [1, experts = {E}], not {top_k}")
        self.K = top_k

    def choose(self, score, probs):
        order = probs.argsort(dim=1, descending=True, stable=True)  # of equal ones the lower expert first
        return by_rank(order, probs, self.K)


@router("switch")
class Switch(TopK):
    """The most probable expert (Switch Transformers); in X-MoE's layers its baseline SMoE."""

    split, reads = 1, Router.reads

    def __init__(self, config, E: int, top_k: int = 1, V: int = 0, x_moe: bool = False):
        super().__init__(config, E, 1, V, x_moe)


@router("hypersphere")
class Hypersphere(TopK):
    """The nearest experts on a low-dimensional hypersphere (X-MoE)."""

    score, split = "hypersphere", 1


@router("threshold")
class Threshold(Router):
    """The fewest experts whose probabilities sum to at least t (XMoE eq. 5)."""

    split, K = 4, None
    reads = Router.reads | {"threshold", "eval_threshold"}

    def choose(self, score, probs):
        t = self.config.threshold
        if not self.training and self.config.eval_threshold is not None:
            t = self.config.eval_threshold
        p, order = probs.sort(dim=1, descending=True, stable=True)  # (S, E)
        if t >= 1:  # all experts: in fp32 the probabilities may sum to less than 1, or reach it early
            return by_rank(order, probs, self.E)
        total = p.cumsum(dim=1)  # (S, E)
        count = 1 + (total[:, :-1] < t).sum(dim=1)  # (S,): one more expert for each sum that stays below t
        return by_rank(order, probs, count)


@router("base")
class Base(Router):
    """In training every expert gets equally many tokens, at test a token gets its best expert (BASE Layers)."""

    gate, balanced, orthogonal = "sigmoid", False, True

    def choose(self, score, probs):
        expert = balanced_assignment(score) if self.training else score.argmax(dim=1)  # (S,)
        return torch.where(one_hot(expert, self.E), score, NOT_CHOSEN)


@router("hash")
class Hash(Router):
    """A fixed random expert for each token id, with weight 1 (Hash Layers). Nothing is learned."""

    balanced, reads = False, set()

    def __init__(self, config, E: int, top_k: int = 1, V: int = 0, x_moe: bool = False):
        nn.Module.__init__(self)
        self.E, self.on_sphere = E, False
        # One hash for all runs and layers, whatever the seed and however many numbers were drawn before.
        rng = torch.Generator().manual_seed(0)
        self.register_buffer("expert_of_id", torch.randint(E, (V,), generator=rng))

    def forward(self, h, ids):
        chosen = one_hot(self.expert_of_id[ids], self.E)  # (S, E)
        autocast = torch.is_autocast_enabled(h.device.type)  # h is rounded, but the residual stream is not
        weight = chosen.to(torch.float32 if autocast else h.dtype)
        priority = torch.where(chosen, 0.0, NOT_CHOSEN)  # all equal: the earlier token comes first
        return Routing(weight, priority, {}, weight)


# ---------------------------------------------------------------------------------------------------------------------
# Priorities and the balance loss


def one_hot(index, E: int):
    """(S,) -> (S, E) bool"""
    return index.unsqueeze(1) == torch.arange(E, device=index.device)


def check_priority(router: nn.Module, priority, probs):
    """Raises RouterError if `choose` returned something else than priorities, such as expert indices."""
    if isinstance(priority, Tensor) and priority.shape == probs.shape and priority.is_floating_point():
        return
    got = f"{tuple(priority.shape)} {priority.dtype}" if isinstance(priority, Tensor) else f"a {type(priority)}"
    wanted = f"float priorities (S, E) = {tuple(probs.shape)}, NOT_CHOSEN where a token does not choose an expert"
    raise RouterError(f"{type(router).__name__}.choose returned {got}; it should return {wanted}")


def by_rank(order, probs, count: Tensor | int):
    """Priorities (S, E) of tokens that choose the first `count` experts of their `order`: XMoE's p - i (A.1).

    order (S, E) or fewer columns: each token's experts, best first; probs (S, E); count: a number, or one per token
    (S,). So all first choices precede all second ones, and within rank i the more probable comes first. In float64:
    p - i in fp32 has only 65 distinct values at rank 512. MPS has no float64 and uses fp32.
    """
    rank = torch.arange(order.shape[1], device=probs.device)
    if isinstance(count, Tensor):
        count = count.reshape(-1, 1)  # (S, 1)
    dtype = torch.float32 if probs.device.type == "mps" else torch.float64
    priority = probs.gather(1, order).to(dtype) - rank  # (S, E)
    priority = torch.where(rank < count, priority, NOT_CHOSEN)
    return torch.full_like(probs, NOT_CHOSEN, dtype=dtype).scatter_(1, order, priority)


def balance_loss(counted, probs):
    """E * sum_e f_e P_e (XMoE eq. 7 as its authors' code has it, X-MoE eq. 9; Switch's definition).

    f_e is the share of the counted choices (S, E) that go to expert e, before drops; P_e is the mean of probs[:, e].
    """
    load = counted.sum(dim=0).to(probs.dtype)  # (E,)
    f = load / load.sum().clamp(min=1)
    P = probs.sum(dim=0) / max(1, len(probs))
    return probs.shape[1] * (f * P).sum()


# ---------------------------------------------------------------------------------------------------------------------
# BASE's balanced assignment


@torch.no_grad()
def balanced_assignment(score, epsilon: float | None = None):
    """Assigns S tokens to E experts, at most ceil(S / E) each, maximizing the total score (BASE Layers).

    score (S, E) -> (S,) int64. The mean score per token is within epsilon of the optimum; None: a thousandth of the
    range of scores. This is the auction algorithm with epsilon scaling (Bertsekas): an auction whose bids rise by at
    least epsilon ends within epsilon per token of the optimum, and a larger epsilon ends it sooner. So each auction
    starts from the prices of one with a larger epsilon.
    """
    S, E = score.shape
    seats = math.ceil(S / E)
    if E == 1 or S == 0:
        return torch.zeros(S, dtype=torch.int64, device=score.device)
    # Shift to 0, so that a large common part does not hide small differences. A NaN would bid forever.
    score = (score - score.min()).nan_to_num(nan=0.0, posinf=0.0)
    spread = float(score.max())
    # Dummy bidders, to whom every expert is worth 0, fill the seats up to E * seats: an auction may reuse the prices
    # of another only if every seat is taken in the end.
    value = F.pad(score, (0, 0, 0, seats * E - S))  # (seats * E, E)
    final = spread / 1000 if epsilon is None else epsilon
    final = max(final, 1e-6 * spread, 1e-30)  # bids that rise by less would not rise at all in fp32
    final = final * S / len(value)  # each of len(value) bidders may be off by epsilon
    price, step = value.new_zeros(E), max(spread / 4, final)
    while True:
        expert = auction(value, price, seats, epsilon=step)
        if step <= final:
            return expert[:S]
        step = max(step / 4, final)


def auction(value, price, seats: int, epsilon: float):
    """Bertsekas' auction for similar objects: N bidders for E experts with N / E seats each -> (N,) expert of each.

    value (N, E): what a seat is worth to a bidder. price (E,) is raised in place. Each round syncs with the device
    several times, for example to ask whether anyone is still unassigned: for 16,384 tokens and 64 experts that is
    4,000 syncs a layer on a GPU. BASE is the one router that is inherently slow there.
    """
    N, E = value.shape
    everyone = torch.arange(N, device=value.device)
    expert = torch.full_like(everyone, E)  # E: no seat
    paid = value.new_zeros(N)
    unassigned = everyone
    while len(unassigned):
        # Bid for the best expert: its price, plus its lead over the second best, plus epsilon.
        profit, choices = (value[unassigned] - price).topk(2, dim=1)
        choice = choices[:, 0]
        expert[unassigned] = choice
        paid[unassigned] = price[choice] + profit[:, 0] - profit[:, 1] + epsilon
        # Rank each expert's bidders, highest bid first.
        bidder = paid.argsort(descending=True)
        bidder = bidder[expert[bidder].argsort(stable=True)]
        count = torch.bincount(expert, minlength=E)
        start = count.cumsum(0) - count  # where each expert's bidders begin
        rank = everyone - start[expert[bidder]]  # 0 for an expert's highest bidder
        # A full expert's price is the lowest bid that it seats.
        full = count >= seats
        price[full] = paid[bidder[start[full] + seats - 1]]
        # Lower bidders lose their seats and bid again.
        expert[bidder[rank >= seats]] = E
        unassigned = (expert == E).nonzero().squeeze(1)
    return expert
