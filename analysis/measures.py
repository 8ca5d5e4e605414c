"""What is measured of models: routing, collapse and fluctuation, retrieval, alignment. Letters as in model.py."""

import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from model import kept_rows


def perplexity(loss: float) -> float:
    """Of a mean cross entropy in nats; that of a model that has diverged stays a number."""
    return math.exp(min(loss, 700))


def in_perplexity(loss: float) -> str:
    return f"perplexity {perplexity(loss):.2f}"


def bits_per_byte(loss: float, counts: dict) -> float:
    """Of a mean cross entropy in nats a token; counts: the `tokens` and `bytes` of the text. It compares tokenizers."""
    nats = loss * counts["tokens"] / counts["bytes"]
    return nats / math.log(2)


def bootstrap(totals: Tensor, sizes: Tensor) -> list[float]:
    """The 95% interval of sum(totals) / sum(sizes), (R,) each, over samples of R rows drawn with replacement."""
    rng, R = torch.Generator().manual_seed(0), len(sizes)
    ratios = []
    for _ in range(1000):
        rows = torch.randint(R, (R,), generator=rng)
        ratio = totals[rows].sum() / sizes[rows].sum()
        ratios.append(ratio.double())
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    return torch.stack(ratios).quantile(ends).tolist()


def in_turns(calls: dict[object, Callable], context, rounds: int, patience: float = math.inf) -> dict[object, list]:
    """Milliseconds of each call, one after the other, round by round.

    The first round warms up and does not count. Every other round goes backwards, so that nobody always follows the
    same neighbour. A call drops out when its times add up to the patience, in seconds.
    """
    times = {name: [] for name in calls}
    order = list(calls)
    for turn in tqdm(range(1 + rounds), desc="timing", unit="round", leave=False, disable=None):
        for name in order:
            if sum(times[name]) > 1e3 * patience:
                continue
            start = clock(context)
            calls[name]()
            if turn > 0:
                times[name].append(clock(context) - start)
        order.reverse()
    return times


def clock(context) -> float:
    """Milliseconds, read when the device has done all that it was asked for."""
    if context.device.type != "cpu":
        torch.accelerator.synchronize()
    return 1e3 * time.perf_counter()


def mean_over_layers(name: str, layers: list[dict]) -> float | None:
    """Of the layers that have one; None where none has."""
    values = [layer[name] for layer in layers if layer[name] is not None]
    return fmean(values) if values else None


class RoutingStats:
    """Watches one MoE layer until `finish`, and adds up what it does with S tokens a call."""

    def __init__(self, moe: nn.Module):
        self.moe = moe
        names = "tokens", "wanted", "served", "unserved", "entropy", "positive", "units"
        self.sums = dict.fromkeys(names, 0.0)
        self.load = torch.zeros(moe.router.E, dtype=torch.float64)  # choices of each expert
        moe.watchers.append(self)

    def __call__(self, moe, h: Tensor, routing, kept: Tensor):
        """h (S, D); kept (S, E) bool."""
        load = routing.wanted.sum(dim=0).cpu()
        entropy = torch.special.entr(routing.probs.detach())  # of the router's probabilities
        passed_by = ~kept.any(dim=1)
        found = {"tokens": len(kept), "wanted": load.sum(), "entropy": entropy.sum()}
        found |= {"served": kept.sum(), "unserved": passed_by.sum()}
        if hasattr(moe.experts, "activations"):  # of bare FFNs, and those above 0
            rows = kept_rows(kept, kept)
            a = moe.experts.activations(h.index_select(0, rows.token), rows)
            found["units"] = a.numel()
            found["positive"] = (a > 0).sum()
        for name, number in found.items():
            self.sums[name] += float(number)
        self.load += load

    def finish(self, reduce=torch.clone) -> dict:
        """Stops watching -> what was seen; `reduce` sums a tensor over processes.

        wanted, served: experts per token, before and after the capacity. cut: share of the choices that were over
        capacity. unserved: share of the tokens that no expert kept. imbalance: choices of the busiest expert over the
        mean. entropy: in nats. positive: share of activations above 0, None where experts are stacks.
        """
        self.moe.watchers.remove(self)
        sums = torch.tensor(list(self.sums.values()), dtype=torch.float64)
        tokens, wanted, served, unserved, entropy, positive, units = reduce(sums).tolist()
        load = reduce(self.load)
        tokens, choices = max(tokens, 1), max(wanted, 1)
        return {
            "wanted": wanted / tokens,
            "served": served / tokens,
            "cut": (wanted - served) / choices,
            "unserved": unserved / tokens,
            "imbalance": float(load.max()) * len(load) / choices,
            "entropy": entropy / tokens,
            "positive": positive / units if units else None,
        }


def describe_routing(layer: dict[str, float]) -> str:
    """What `finish` found, in words."""
    positive = "" if layer["positive"] is None else f", positive {layer['positive']:.1%}"
    return (
        f"experts wanted {layer['wanted']:.2f}, served {layer['served']:.2f} per token; "
        f"choices cut {layer['cut']:.1%}, tokens unserved {layer['unserved']:.2%}; "
        f"load imbalance {layer['imbalance']:.2f}, entropy {layer['entropy']:.2f}{positive}"
    )


@torch.no_grad()
def easy_and_hard(model, batches, context, occurs: int = 20) -> tuple[list, list]:
    """The 8 tokens that want the fewest experts of the last MoE layer, and the most, of those that occur so often.

    batches: ids (B, T), of which none is padding.
    """
    V, moe = model.vocab_size, model.moe_layers[-1]
    count, wanted = torch.zeros(V), torch.zeros(V)

    def watch(moe, h, routing, kept):
        experts = routing.wanted.sum(dim=1).to(wanted)
        count.add_(torch.bincount(ids, minlength=V))
        wanted.index_add_(0, ids, experts)

    model.eval()
    moe.watchers.append(watch)
    for batch in batches:
        ids = batch.flatten()
        with context.autocast():
            model(*context.send_all(batch))
    moe.watchers.remove(watch)
    often = (count >= occurs).nonzero().squeeze(1)
    mean = wanted[often] / count[often]
    order = often[mean.argsort(stable=True)].tolist()
    return order[:8], order[::-1][:8]


class Collapse:
    """Watches what enters one sparse layer's router and what it chooses, for RC (X-MoE eq. 11) and RF (figure 3a).

    `place`: where the next tokens stand among all `tokens` of the evaluation; None: they are not looked at.
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
        end = self.place + len(chosen)
        self.chosen[self.place : end] = chosen.int().cpu()

    def finish(self, before: Tensor | None, reduce=torch.clone) -> dict:
        """Stops watching -> rc, and rf: the share of tokens with another expert than `before` (tokens,), or None."""
        self.moe.watchers.remove(self)
        self.chosen = reduce(self.chosen)
        sums = map(reduce, (self.count, self.total, self.outer))
        rc = representation_collapse(*sums)
        rf = None if before is None else float((before != self.chosen).double().mean())
        return {"rc": rc, "rf": rf}


def count_choices(moe: nn.Module, counts: Tensor):
    """From now on adds to counts (E,) how many training tokens have each expert as first choice (X-MoE figure 3b)."""

    def watch(moe, h, routing, kept):
        if moe.training:
            first = routing.priority.argmax(dim=1)  # (S,)
            counts.scatter_add_(0, first, torch.ones_like(first))  # bincount would wait for the device

    moe.watchers.append(watch)


def representation_collapse(count: Tensor, total: Tensor, outer: Tensor) -> float:
    """RC = Tr(Sigma_W pinv(Sigma_B)), the smaller, the more collapsed (X-MoE eq. 11).

    Of n tokens h (D,), each in the class of its chosen expert, from sums in float64: count (E,) tokens, total (E, D)
    the sum of h, and outer (D, D) the sum of h h^T over all. Sigma_W is the mean covariance around class means mu_k,
    Sigma_B = sum_k n_k / n (mu_k - mu)(mu_k - mu)^T over non-empty classes, whose rank is one less than their number.
    0 where one expert has all tokens, nan where h is not finite.
    """
    count, total = count[count > 0], total[count > 0]
    n = count.sum()
    share = count / n  # (K,)
    mean = total / count.unsqueeze(1)  # (K, D)
    within = outer / n - (share * mean.t()) @ mean  # (D, D)
    if not within.isfinite().all():
        return math.nan
    centred = mean - share @ mean
    between = share.sqrt().unsqueeze(1) * centred  # (K, D), R; Sigma_B = R^T R
    inverse = torch.linalg.pinv(between, rtol=1e-9)  # (D, K); pinv(Sigma_B) = pinv(R) pinv(R)^T
    return float((inverse * (within @ inverse)).sum())


@torch.no_grad()
def hidden_states(encoder: nn.Module, rows: list[list], context) -> tuple[list, Tensor]:
    """One forward pass over B rows of ids -> a list of the hidden states by layer (0: embeddings), (B, T, D) each, and
    where they are real (B, T) bool."""
    texts = [torch.tensor(row) for row in rows]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-1)  # (B, T)
    keep = ids >= 0
    real = keep.flatten().nonzero().squeeze(1)
    ids, real, keep = context.send_all(ids.clamp(min=0), real, keep)
    states = []
    with context.autocast(), encoder.no_limit():  # a text's states do not depend on those beside it
        encoder(ids, real, states)
    return [state.float() for state in states], keep


def middle_layer(L: int) -> int:
    """Of an encoder with L layers that whose sentence vectors are shown, the 9th of 12 (XLM-E 4.6); 0: embeddings."""
    return round(0.75 * L)


def sentence_vectors(encoder, tokenizer, texts: Sequence[str], micro_tokens: int, context) -> Tensor:
    """(L + 1, n, D): means over the tokens of each text, of length 1, by layer (0: embeddings), as in XLM-E 4.6.

    A text stands between <s> and </s>, which count, and is cut where the encoder has no more positions. A forward pass
    has at most micro_tokens or one text.
    """
    config = encoder.config
    room = config.block_size - 2
    ids = tokenizer.encode_batch(list(texts))
    rows = [[tokenizer.bos, *own[:room], tokenizer.eos] for own in ids]
    lengths = [len(row) for row in rows]
    order = sorted(range(len(rows)), key=lengths.__getitem__, reverse=True)
    shape = config.n_layer + 1, len(rows), config.n_embd
    vectors = torch.empty(shape, device=context.device)
    while order:
        size = max(1, micro_tokens // lengths[order[0]])
        chunk, order = order[:size], order[size:]
        own = [rows[i] for i in chunk]
        states, keep = hidden_states(encoder, own, context)
        for layer, state in zip(vectors, states):
            total = (state * keep.unsqueeze(2)).sum(dim=1)
            layer[chunk] = F.normalize(total, dim=1)  # as long as that of the mean
    return vectors


def both_directions(one: Tensor, two: Tensor) -> Tensor:
    """How often the nearest of n sentences is the translation, by layer: (2, L + 1), from one to two, and back.

    one, two (L + 1, n, D), of length 1: row i of one is the translation of row i of the other (XLM-E table 5).
    """
    near = one @ two.mT  # (L + 1, n, n)
    here = torch.arange(one.shape[1], device=one.device)  # (n,)
    forth = near.argmax(dim=2) == here  # (L + 1, n)
    back = near.argmax(dim=1) == here
    return torch.stack([forth, back]).float().mean(dim=2)


def retrieval(one: Tensor, two: Tensor) -> Tensor:
    """(L + 1,): the mean of both directions."""
    return both_directions(one, two).mean(dim=0)


def sinkhorn(similarity: Tensor, rounds: int = 2) -> tuple[Tensor, Tensor]:
    """(..., m, n) similarities of the pieces of two sentences -> pi and xi, plans of transport, as in XLM-Align.

    What is not above 0 becomes 1e-6; a round scales first the columns, then the rows, to a sum of 1. xi is the plan
    before its rows were last scaled.
    """
    pi = torch.where(similarity > 0, similarity, 1e-6)
    for _ in range(rounds):
        xi = pi / pi.sum(dim=-2, keepdim=True)
        pi = xi / xi.sum(dim=-1, keepdim=True)
    return pi, xi


def itermax(plan: Tensor, ratio: float = 0.9) -> Tensor:
    """(..., m, n) -> bool, which pieces are aligned, by two rounds of SimAlign's Itermax (Jalili Sabet et al., 2020).

    Those that are each other's best, then also those that are once `ratio` is on what has a partner on one side and 0
    on what has one on both. No second round where every piece of a side has a partner, or a side has only one or two.
    """
    aligned = each_others_best(plan)
    if min(plan.shape[-2:]) <= 2:
        return aligned
    row = aligned.any(dim=-1, keepdim=True)  # (..., m, 1) whether a piece has a partner
    column = aligned.any(dim=-2, keepdim=True)
    all_have = row.all(dim=-2, keepdim=True) | column.all(dim=-1, keepdim=True)
    free = ~(row & column)  # (..., m, n)
    left = free * torch.where(row | column, ratio * plan, plan)
    more = each_others_best(left) & free & ~all_have
    return aligned | more


def each_others_best(plan: Tensor) -> Tensor:
    """(..., m, n) -> bool: the largest of their row and of their column, of equal ones the first."""
    none = torch.zeros_like(plan, dtype=torch.bool)
    best = plan.argmax(dim=-1, keepdim=True)
    of_row = none.scatter(-1, best, True)
    best = plan.argmax(dim=-2, keepdim=True)
    return of_row & none.scatter(-2, best, True)


def word_links(aligned: Tensor, one: list[int], two: list[int]) -> list[set]:
    """Of each layer the pairs (word, word) any of whose pieces are aligned.

    aligned (L + 1, m, n) bool; one (m,), two (n,): the word that each piece is of.
    """
    links = [set() for _ in aligned]
    for layer, i, j in aligned.nonzero().tolist():
        links[layer].add((one[i], two[j]))
    return links


def alignment_error(found: list[set], sure: list[set], possible: list[set]) -> float:
    """AER over all sentences together: 1 - (|A & S| + |A & P|) / (|A| + |S|), XLM-E eq. 10.

    Of each sentence the links (word, word) that were found, the sure ones and the possible ones, which hold the sure.
    """
    right = total = 0
    for own, S, P in zip(found, sure, possible, strict=True):
        right += len(own & S) + len(own & P)
        total += len(own) + len(S)
    return 1 - right / total
