"""The papers' routers and sparse layer, written literally as slow loops over tokens and experts.

Tests compare the fast code with these functions. Nothing is shared with it: `route` reads a router's parameters and
constants, but calls none of its methods. A choice is a pair (s, e): token s chose expert e. Values are torch scalars,
so tests can compare gradients too.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import torch


class Choices(NamedTuple):
    weight: dict  # (s, e) -> scalar g: the weight of expert e's output in token s's sum
    sort_key: dict  # (s, e) -> (rank from 1, -p, s): an expert serves the smallest key first
    balance_loss: torch.Tensor | float
    probs: dict  # s -> E scalars


# --- Scores and gates


def similarity(h, e, project, on_sphere):
    """XMoE eq. 1, X-MoE section 3.1; on a sphere, the cosine (X-MoE eq. 7)"""
    h = h if project is None else project @ h
    product = (h * e).sum()
    return product / ((h * h).sum().sqrt() * (e * e).sum().sqrt()) if on_sphere else product


def softmax(scores):
    largest = max(s.item() for s in scores)  # avoids overflow
    exponentials = [torch.exp(s - largest) for s in scores]
    return [x / sum(exponentials) for x in exponentials]


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


# --- Selection: one token's E probabilities or scores -> its experts, best first


def best_first(p):
    return sorted(range(len(p)), key=lambda e: (-p[e].item(), e))


def algorithm_1(p, t):
    """XMoE appendix A.1. t = 1 chooses every expert, even if rounding makes the sum reach 1 early."""
    if t >= 1:
        return best_first(p)
    chosen, total = [], 0.0
    for e in best_first(p):
        total = total + p[e].item()
        chosen.append(e)
        if total >= t:
            break
    return chosen


# --- Routers


def route(router, h, ids=None, assigned=None, over_chosen=False):
    """h (S, D) -> Choices.

    assigned (S,): the balanced assignment, for BASE in training. over_chosen: as in X-MoE's layers with K > 1, the
    softmax gate is normalized over the chosen experts and the balance loss counts all of them.
    """
    kind, E = type(router).__name__, router.E
    if kind == "Hash":
        pairs = [(s, int(router.expert_of_id[ids[s]])) for s in range(len(h))]
        probs = {}
        for s in range(len(h)):
            probs[s] = [float((s, e) in pairs) for e in range(E)]
        return Choices(dict.fromkeys(pairs, 1.0), {(s, e): (1, 0.0, s) for s, e in pairs}, 0.0, probs)

    project, experts, gate = getattr(router.project, "weight", None), router.experts.unbind(0), router.gate
    on_sphere = router.score == "hypersphere"
    tau, tau0 = (router.temperature, router.init_temperature) if on_sphere else (1.0, 1.0)
    t = router.config.threshold
    if not router.training and router.config.eval_threshold is not None:
        t = router.config.eval_threshold

    weight, sort_key, probs_at_tau0, probs, counted = {}, {}, {}, {}, []
    for s in range(len(h)):
        score = [similarity(h[s], e, project, on_sphere) for e in experts]
        p = probs[s] = softmax([x / tau for x in score])
        probs_at_tau0[s] = softmax([x / tau0 for x in score])
        if kind in ("TopK", "Hypersphere"):
            chosen = best_first(p)[: router.K]
        elif kind == "Switch":
            chosen = best_first(p)[:1]
        elif kind == "Threshold":
            chosen = algorithm_1(p, t)
        elif kind == "Base":
            chosen = best_first(score)[:1] if assigned is None else [int(assigned[s])]
        else:
            raise NotImplementedError(f"add to tests/reference.py how {kind} chooses experts")
        for i, e in enumerate(chosen):
            g = p[e] if gate == "softmax" else sigmoid(score[e] / tau)  # X-MoE eq. 8
            if gate == "softmax" and over_chosen:  # X-MoE section 2.2, top-K
                g = g / sum(p[j] for j in chosen)
            weight[s, e] = g
            sort_key[s, e] = (i + 1, -p[e].item(), s)  # XMoE A.1: p - i
            if kind == "Base":  # all choices are first choices
                sort_key[s, e] = (1, -score[e].item(), s)
        counted += chosen if over_chosen else chosen[:1]
    loss = 0.0
    if kind != "Base":
        loss = balance(counted, probs_at_tau0, E)
    return Choices(weight, sort_key, loss, probs)


def balance(counted, probs, E):
    """E * sum_e f_e P_e: XMoE eq. 7 with Switch's P_e; X-MoE eq. 9. counted: the expert of each counted choice."""
    loss = 0.0
    for e in range(E):
        f = counted.count(e) / len(counted)
        P = sum(p[e] for p in probs.values()) / len(probs)
        loss = loss + E * f * P
    return loss


# --- Capacity, experts, layer


def capacity(tokens, experts, gamma):
    """XMoE eq. 3 in exact arithmetic, rounded up: at least 4, at most all tokens."""
    rounded = math.ceil(Fraction(str(gamma)) * tokens / experts)
    return min(tokens, max(4, rounded))


def queues(sort_key, E):
    """Each expert's tokens, in the order in which it serves them."""
    tokens = []
    for e in range(E):
        queue = sorted((key, s) for (s, expert), key in sort_key.items() if expert == e)
        tokens.append([s for _, s in queue])
    return tokens


def serve(sort_key, capacity, E):
    """The served choices: each expert takes tokens in order until it is full (XMoE A.1). capacity None: no limit."""
    return {(s, e) for e, queue in enumerate(queues(sort_key, E)) for s in queue[:capacity]}


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def expert_hidden(h, e, w_in, b_in):
    return gelu(w_in[e] @ h + b_in[e])


def moe(h, weight, served, w_in, b_in, w_out, b_out):
    """XMoE eq. 2: y_s = sum of g E(h_s) over the experts that serve s. w_in and w_out (E, F, D)"""
    rows = []
    for s in range(len(h)):
        y = torch.zeros_like(h[s])
        for e in range(len(w_in)):
            if (s, e) in served:
                y = y + weight[s, e] * (w_out[e].t() @ expert_hidden(h[s], e, w_in, b_in) + b_out[e])
        rows.append(y)
    return torch.stack(rows)


def layer_norm(u, gain, shift):
    return (u - u.mean()) / (u.var(unbiased=False) + 1e-5).sqrt() * gain + shift


def stacks(h, weight, served, layers):
    """X-MoE eq. 2, 4.1: an expert starts from u = h, repeats u <- u + FFN(LN(u)), and adds g (u - h).

    layers: for each FFN of the stack, w_in, b_in, w_out, b_out, and the norm's gain and shift (E, D)
    """
    rows = []
    for s in range(len(h)):
        y = torch.zeros_like(h[s])
        for e in range(len(layers[0][0])):
            if (s, e) in served:
                u = h[s]
                for w_in, b_in, w_out, b_out, gain, shift in layers:
                    a = w_in[e] @ layer_norm(u, gain[e], shift[e]) + b_in[e]
                    u = u + w_out[e].t() @ (a * 0.5 * (1 + torch.erf(a / math.sqrt(2)))) + b_out[e]
                y = y + weight[s, e] * (u - h[s])
        rows.append(y)
    return torch.stack(rows)
