"""How experts are used: load, drops, entropy, and X-MoE's RC and RF. Letters as in model.py."""

import math
from collections import Counter
from statistics import fmean

import torch
from torch import Tensor, nn

from model import kept_rows


def mean_over_layers(name: str, layers: list[dict]) -> float | None:
    """The mean over the layers where it is not None; None if there are none."""
    values = [layer[name] for layer in layers if layer[name] is not None]
    return fmean(values) if values else None


class RoutingStats:
    """Accumulates routing statistics of one MoE layer until `finish`; a call sees S tokens."""

    def __init__(self, moe: nn.Module):
        self.moe = moe
        self.sums = dict.fromkeys(("tokens", "unserved", "entropy", "positive", "units"), 0.0)
        self.rows = torch.zeros(2, moe.router.E, dtype=torch.float64)  # each expert's requests, and tokens served
        self.losses = Counter()  # the router's, by name
        moe.watchers.append(self)

    def __call__(self, moe, h: Tensor, routing, kept: Tensor):
        """h (S, D); kept (S, E) bool."""
        self.rows += torch.stack([routing.wanted.sum(dim=0), kept.sum(dim=0)]).cpu()
        entropy = torch.special.entr(routing.probs.detach())
        sums = {"tokens": len(kept), "unserved": (~kept.any(dim=1)).sum(), "entropy": entropy.sum()}
        if hasattr(moe.experts, "activations"):  # experts that are single FFNs
            rows = kept_rows(kept, kept)
            a = moe.experts.activations(h.index_select(0, rows.token), rows)
            sums["units"] = a.numel()
            sums["positive"] = (a > 0).sum()
        for name, number in sums.items():
            self.sums[name] += float(number)
        for name, (_, loss) in routing.losses.items():
            self.losses[name] += len(kept) * float(loss.detach())

    def finish(self, gather=lambda x: [x]) -> dict:
        """Stops watching -> the statistics; `gather` returns the objects of all processes.

        wanted, served: experts per token, before and after the capacity limit. cut: share of requests dropped.
        unserved: share of tokens that no expert served. imbalance: requests to the busiest expert over the mean.
        load: each expert's share of the choices that were kept. dead: number of experts that served no token.
        entropy: of the router's probabilities, in nats. positive: share of activations above 0, None for stacks.
        losses: the router's, by name, without their weights.
        """
        self.moe.watchers.remove(self)
        sums, losses, rows = Counter(), Counter(), torch.zeros_like(self.rows)
        for process_sums, process_losses, process_rows in gather((self.sums, self.losses, self.rows)):
            sums.update(process_sums)  # adding Counters would drop NaN
            losses.update(process_losses)
            rows += process_rows
        tokens, unserved, entropy, positive, units = sums.values()
        requests, kept = rows  # (E,)
        wanted, served = float(requests.sum()), float(kept.sum())
        tokens, choices = max(tokens, 1), max(wanted, 1)
        return {
            "wanted": wanted / tokens,
            "served": served / tokens,
            "cut": (wanted - served) / choices,
            "unserved": unserved / tokens,
            "imbalance": float(requests.max()) * len(requests) / choices,
            "load": [round(share, 5) for share in (kept / max(served, 1)).tolist()],
            "dead": int((kept == 0).sum()),
            "entropy": entropy / tokens,
            "positive": positive / units if units else None,
            "losses": {name: loss / tokens for name, loss in losses.items()},
        }


def losses_in_words(layers: list[dict]) -> str:
    """The routers' losses by name, summed over layers."""
    sums = Counter()
    for layer in layers:
        sums.update(layer["losses"])
    return ", ".join(f"{name} {loss:.3f}" for name, loss in sums.items())


def describe_routing(layer: dict) -> str:
    """The statistics of `RoutingStats.finish` in one line."""
    dead = f", {layer['dead']} of {len(layer['load'])} experts dead" if layer.get("dead") else ""
    positive = "" if layer["positive"] is None else f", positive {layer['positive']:.1%}"
    return (
        f"experts wanted {layer['wanted']:.2f}, served {layer['served']:.2f} per token; "
        f"choices cut {layer['cut']:.1%}, tokens unserved {layer['unserved']:.2%}; "
        f"load imbalance {layer['imbalance']:.2f}{dead}, entropy {layer['entropy']:.2f}{positive}"
    )


class Collapse:
    """Accumulates the router inputs and first choices of one sparse layer, for RC (X-MoE eq. 11) and RF (figure 3a).

    tokens: their number in the evaluation. `place`: index of the next call's first token; None: ignore the call.
    """

    def __init__(self, moe: nn.Module, tokens: int):
        self.moe, self.place = moe, None
        E, weight = moe.router.E, next(moe.experts.parameters())
        D = weight.shape[-1]
        self.device = "cuda" if weight.is_cuda else "cpu"  # MPS has no float64
        wide = dict(dtype=torch.float64, device=self.device)
        self.count = torch.zeros(E, **wide)
        self.total = torch.zeros(E, D, **wide)  # sum of h over the tokens of each expert
        self.outer = torch.zeros(D, D, **wide)  # sum of h h^T over all tokens
        self.chosen = torch.zeros(tokens, dtype=torch.int32)  # first choices
        moe.watchers.append(self)

    def __call__(self, moe, h: Tensor, routing, kept: Tensor):
        if self.place is None:
            return
        h = h.to(self.device).double()  # (S, D)
        chosen = routing.priority.argmax(dim=1).to(self.device)  # (S,)
        self.count += torch.bincount(chosen, minlength=len(self.count))
        self.total.index_add_(0, chosen, h)
        self.outer.addmm_(h.t(), h)
        self.chosen[self.place : self.place + len(chosen)] = chosen.int().cpu()

    def finish(self, before: Tensor | None, reduce=torch.clone) -> dict:
        """Stops watching -> rc, and rf: the share of tokens whose expert differs from `before` (tokens,), or None."""
        self.moe.watchers.remove(self)
        self.chosen = reduce(self.chosen)
        rf = None if before is None else float((before != self.chosen).double().mean())
        return {"rc": representation_collapse(*map(reduce, (self.count, self.total, self.outer))), "rf": rf}


def count_choices(moe: nn.Module, counts: Tensor):
    """Adds each training step's first choices to counts (E,) from now on (X-MoE figure 3b)."""

    def watch(moe, h, routing, kept):
        if moe.training:
            first = routing.priority.argmax(dim=1)  # (S,)
            counts.scatter_add_(0, first, torch.ones_like(first))  # bincount would sync

    moe.watchers.append(watch)


def representation_collapse(count: Tensor, total: Tensor, outer: Tensor) -> float:
    """RC = Tr(Sigma_W pinv(Sigma_B)); smaller means more collapsed (X-MoE eq. 11).

    The classes of the n tokens h (D,) are their chosen experts. Sums in float64: count (E,) of tokens, total (E, D) of
    h, and outer (D, D) of h h^T over all tokens. Sigma_W is the mean covariance around the class means mu_k; Sigma_B =
    sum_k n_k / n (mu_k - mu)(mu_k - mu)^T over the K non-empty classes, of rank at most K - 1.
    0 if one expert has all tokens, nan if h is not finite.
    """
    count, total = count[count > 0], total[count > 0]
    n = count.sum()
    share = count / n  # (K,)
    mean = total / count.unsqueeze(1)  # (K, D)
    within = outer / n - (share * mean.t()) @ mean  # (D, D)
    if not within.isfinite().all():
        return math.nan
    between = share.sqrt().unsqueeze(1) * (mean - share @ mean)  # (K, D), R; Sigma_B = R^T R
    inverse = torch.linalg.pinv(between, rtol=1e-9)  # (D, K); pinv(Sigma_B) = pinv(R) pinv(R)^T
    return float((inverse * (within @ inverse)).sum())
