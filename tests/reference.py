"""The papers' equations, literally: loops over tokens and experts, slow and plain. The fast code is held against these.

Nothing here comes from the fast code. `route` reads the parameters and the constants of a router object, none of its
methods. A choice is a pair (s, e): token s chose expert e. Values are torch scalars, so gradients can be compared too.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import torch


class Choices(NamedTuple):
    weight: dict  # (s, e) -> scalar g: how much of expert e's output token s adds
    turn: dict  # (s, e) -> (rank from 1, -p, s): an expert serves smaller ones first
    balance_loss: torch.Tensor | float
    probs: dict  # s -> E scalars


# --- Scores and gates


def similarity(h, e, project, on_sphere):
    """XMoE eq. 1, X-MoE section 3.1; on a sphere the cosine (X-MoE eq. 7)"""
    h = h if project is None else project @ h
    product = (h * e).sum()
    return product / ((h * h).sum().sqrt() * (e * e).sum().sqrt()) if on_sphere else product


def softmax(scores):
    largest = max(s.item() for s in scores)  # changes nothing but the range
    exponentials = [torch.exp(s - largest) for s in scores]
    return [x / sum(exponentials) for x in exponentials]


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


# --- Selection: probabilities or scores of one token -> its experts, favourite first


def best_first(p):
    return sorted(range(len(p)), key=lambda e: (-p[e].item(), e))


def algorithm_1(p, t):
    """XMoE appendix A.1; t = 1 is every expert, also where rounding makes the sum pass 1 early."""
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


def route(router, h, ids=None, assigned=None, several=False):
    """h (S, D) -> Choices. `assigned` (S,) is the balanced assignment, which BASE needs in training.

    several: X-MoE's layers divide by the sum over K > 1 chosen experts, and their balance loss counts all of them.
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

    weight, turn, first_probs, probs, counted = {}, {}, {}, {}, []
    for s in range(len(h)):
        score = [similarity(h[s], e, project, on_sphere) for e in experts]
        p = probs[s] = softmax([x / tau for x in score])
        first_probs[s] = softmax([x / tau0 for x in score])
        if kind in ("TopK", "Hypersphere"):
            chosen = best_first(p)[: router.K]
        elif kind == "Switch":
            chosen = best_first(p)[:1]
        elif kind == "Threshold":
            chosen = algorithm_1(p, t)
        elif kind == "Base":
            chosen = best_first(score)[:1] if assigned is None else [int(assigned[s])]
        else:
            raise NotImplementedError(f"tests/reference.py does not say yet how {kind} chooses")
        for i, e in enumerate(chosen):
            g = p[e] if gate == "softmax" else sigmoid(score[e] / tau)  # X-MoE eq. 8
            if gate == "softmax" and several:  # X-MoE section 2.2, top-K
                g = g / sum(p[j] for j in chosen)
            weight[s, e] = g
            turn[s, e] = (i + 1, -p[e].item(), s)  # XMoE A.1: p - i, as a pair
            if kind == "Base":  # all choices are first choices
                turn[s, e] = (1, -score[e].item(), s)
        counted += chosen if several else chosen[:1]
    loss = 0.0
    if kind != "Base":
        loss = balance(counted, first_probs, E)
    return Choices(weight, turn, loss, probs)


def balance(counted, probs, E):
    """E * sum_e f_e P_e: XMoE eq. 7 with Switch's P_e; X-MoE eq. 9. `counted`: an expert per choice that counts."""
    loss = 0.0
    for e in range(E):
        f = counted.count(e) / len(counted)
        P = sum(p[e] for p in probs.values()) / len(probs)
        loss = loss + E * f * P
    return loss


# --- Capacity, experts, layer


def capacity(tokens, experts, gamma):
    """XMoE eq. 3, rounded up exactly, at least 4, at most all tokens"""
    rounded = math.ceil(Fraction(str(gamma)) * tokens / experts)
    return min(tokens, max(4, rounded))


def queues(turn, E):
    """Each expert's tokens, in the order in which it serves them"""
    found = []
    for e in range(E):
        queue = sorted((key, s) for (s, expert), key in turn.items() if expert == e)
        found.append([s for _, s in queue])
    return found


def serve(turn, limit, E):
    """The choices that are served: each expert goes through its tokens in turn, until it is full (XMoE A.1)."""
    return {(s, e) for e, queue in enumerate(queues(turn, E)) for s in queue[:limit]}


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def expert_hidden(h, e, w_in, b_in):
    return gelu(w_in[e] @ h + b_in[e])


def moe(h, weight, served, w_in, b_in, w_out, b_out):
    """XMoE eq. 2: y_s = sum over the experts that serve s of g E(h_s). w_in and w_out (E, F, D)"""
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
    """X-MoE eq. 2, 4.1: an expert is u <- u + FFN(LN(u)) from u = h, and adds g (u - h).

    layers: w_in, b_in, w_out, b_out, and gain and shift (E, D) of the norm, for each FFN of the experts
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


# --- Counting


def interpolated(tokens, rest):
    """Witten and Bell (1991): V probabilities by the counts of tokens, what they leave shared out as `rest` (V,) is."""
    n, kinds = len(tokens), len(set(tokens))
    if n == 0:
        return rest
    return [n / (n + kinds) * tokens.count(v) / n + kinds / (n + kinds) * rest[v] for v in range(len(rest))]


def bigrams(pairs, first, V):
    """V probabilities of what follows `first`, by the pairs seen, and by all second tokens where these leave off."""
    single = interpolated([two for _, two in pairs], [1 / V] * V)
    return interpolated([two for one, two in pairs if one == first], single)


def between(behind, ahead, left, right, single):
    """V probabilities of what stands between two tokens: each neighbour on its own, by pairs seen, and `single`."""
    follow = interpolated([two for one, two in behind if one == left], single)
    precede = interpolated([one for one, two in ahead if two == right], single)
    both = [f * p / s for f, p, s in zip(follow, precede, single)]
    return [value / sum(both) for value in both]


def shown(p, token, kept, drawn):
    """Bayes: V probabilities of the right token, where `token` is seen: as it was with `kept`, or `drawn` at random."""
    both = [value * (kept * (v == token) + drawn) for v, value in enumerate(p)]
    return [value / sum(both) for value in both]


# --- For comparison: the same facts as tensors


def table(values, S, E, like):
    """{(s, e): scalar} -> (S, E), 0 where nothing is chosen"""
    zero, rows = like.new_zeros(()), []
    for s in range(S):
        rows.append(torch.stack([zero + values.get((s, e), 0.0) for e in range(E)]))
    return torch.stack(rows)


# --- Word alignment (XLM-E 4.6)


def transport(S, rounds):
    """S[i][j] -> a plan, as XLM-Align's section 3.1: first the columns are scaled to a sum of 1, then the rows."""
    m, n = len(S), len(S[0])
    A = []
    for row in S:
        A.append([s if s > 0 else 1e-6 for s in row])
    for _ in range(rounds):
        for j in range(n):
            total = sum(A[i][j] for i in range(m))
            for i in range(m):
                A[i][j] /= total
        for i in range(m):
            total = sum(A[i])
            A[i] = [a / total for a in A[i]]
    return A


def best_of_both(A):
    """Pairs (i, j): j is the best of i, and i of j."""
    m, n = len(A), len(A[0])
    found = set()
    for i in range(m):
        for j in range(n):
            if A[i].index(max(A[i])) == j and [row[j] for row in A].index(max(row[j] for row in A)) == i:
                found.add((i, j))
    return found


def iterative(A, rounds, ratio):
    """SimAlign's Itermax: more pairs in every round, of what the rounds before left open."""
    m, n = len(A), len(A[0])
    found = best_of_both(A)
    if min(m, n) <= 2:
        return found
    for _ in range(rounds - 1):
        rows, columns = {i for i, _ in found}, {j for _, j in found}
        if len(rows) == m or len(columns) == n:
            break
        weight = {0: 1.0, 1: ratio, 2: 0.0}  # of how many sides have a partner
        left = []
        for i in range(m):
            left.append([A[i][j] * weight[(i in rows) + (j in columns)] for j in range(n)])
        more = {(i, j) for i, j in best_of_both(left) if i not in rows or j not in columns}
        found = found | more
    return found


def aer(found, sure, possible):
    """XLM-E eq. 10, links counted one by one over all sentences."""
    both_sure = both_possible = predicted = certain = 0
    for A, S, P in zip(found, sure, possible):
        for link in A:
            predicted += 1
            both_sure += link in S
            both_possible += link in P or link in S
        certain += len(S)
    return 1 - (both_sure + both_possible) / (predicted + certain)
