"""Metrics: routing statistics, collapse and fluctuation, retrieval, word alignment. Letters as in model.py."""

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
    """exp(loss) for a mean cross entropy in nats, finite even after divergence."""
    return math.exp(min(loss, 700))


def in_perplexity(loss: float) -> str:
    return f"perplexity {perplexity(loss):.2f}"


def bits_per_byte(loss: float, counts: dict) -> float:
    """From nats per token, comparable across tokenizers; counts: the `tokens` and `bytes` of the text."""
    nats = loss * counts["tokens"] / counts["bytes"]
    return nats / math.log(2)


def bootstrap(totals: Tensor, sizes: Tensor) -> list[float]:
    """95% bootstrap interval of sum(totals) / sum(sizes), (R,) each, resampling rows with replacement."""
    rng, R = torch.Generator().manual_seed(0), len(sizes)
    ratios = []
    for _ in range(1000):
        rows = torch.randint(R, (R,), generator=rng)
        ratio = totals[rows].sum() / sizes[rows].sum()
        ratios.append(ratio.double())
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    return torch.stack(ratios).quantile(ends).tolist()


def in_turns(calls: dict[object, Callable], context, rounds: int, patience: float = math.inf) -> dict[object, list]:
    """Times each call in turn, round by round -> milliseconds per call and round.

    The first round is a warm-up. The order reverses every round, so that no call always follows the same one. A call
    drops out once its times add up to `patience` seconds.
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
    """Milliseconds, read after the device has finished all queued work."""
    if context.device.type != "cpu":
        torch.accelerator.synchronize()
    return 1e3 * time.perf_counter()


def mean_over_layers(name: str, layers: list[dict]) -> float | None:
    """The mean over the layers where it is not None; None if there are none."""
    values = [layer[name] for layer in layers if layer[name] is not None]
    return fmean(values) if values else None


class RoutingStats:
    """Accumulates routing statistics of one MoE layer until `finish`; a call sees S tokens."""

    def __init__(self, moe: nn.Module):
        self.moe = moe
        names = "tokens", "wanted", "served", "unserved", "entropy", "positive", "units"
        self.sums = dict.fromkeys(names, 0.0)
        self.load = torch.zeros(moe.router.E, dtype=torch.float64)  # requests per expert
        moe.watchers.append(self)

    def __call__(self, moe, h: Tensor, routing, kept: Tensor):
        """h (S, D); kept (S, E) bool."""
        load = routing.wanted.sum(dim=0).cpu()
        entropy = torch.special.entr(routing.probs.detach())
        unserved = ~kept.any(dim=1)
        sums = {"tokens": len(kept), "wanted": load.sum(), "entropy": entropy.sum()}
        sums |= {"served": kept.sum(), "unserved": unserved.sum()}
        if hasattr(moe.experts, "activations"):  # experts that are single FFNs
            rows = kept_rows(kept, kept)
            a = moe.experts.activations(h.index_select(0, rows.token), rows)
            sums["units"] = a.numel()
            sums["positive"] = (a > 0).sum()
        for name, number in sums.items():
            self.sums[name] += float(number)
        self.load += load

    def finish(self, reduce=torch.clone) -> dict:
        """Stops watching -> the statistics; `reduce` sums a tensor over processes.

        wanted, served: experts per token, before and after the capacity limit. cut: share of requests dropped.
        unserved: share of tokens that no expert served. imbalance: requests to the busiest expert over the mean.
        entropy: of the router's probabilities, in nats. positive: share of activations above 0, None for stacks.
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
    """The statistics of `RoutingStats.finish` in one line."""
    positive = "" if layer["positive"] is None else f", positive {layer['positive']:.1%}"
    return (
        f"experts wanted {layer['wanted']:.2f}, served {layer['served']:.2f} per token; "
        f"choices cut {layer['cut']:.1%}, tokens unserved {layer['unserved']:.2%}; "
        f"load imbalance {layer['imbalance']:.2f}, entropy {layer['entropy']:.2f}{positive}"
    )


@torch.no_grad()
def easy_and_hard(model, batches, context, occurs: int = 20) -> tuple[list, list]:
    """The 8 tokens that request the fewest experts of the last MoE layer, and the 8 that request the most.

    batches: ids (B, T) without padding; occurs: tokens that are rarer are ignored.
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
    frequent = (count >= occurs).nonzero().squeeze(1)
    mean = wanted[frequent] / count[frequent]
    order = frequent[mean.argsort(stable=True)].tolist()
    return order[:8], order[::-1][:8]


class Collapse:
    """Accumulates the router inputs and first choices of one sparse layer, for RC (X-MoE eq. 11) and RF (figure 3a).

    tokens: how many the evaluation has. `place`: index of the next call's first token; None: ignore the call.
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
        """Stops watching -> rc, and rf: the share of tokens whose expert differs from `before` (tokens,), or None."""
        self.moe.watchers.remove(self)
        self.chosen = reduce(self.chosen)
        sums = map(reduce, (self.count, self.total, self.outer))
        rc = representation_collapse(*sums)
        rf = None if before is None else float((before != self.chosen).double().mean())
        return {"rc": rc, "rf": rf}


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
    centred = mean - share @ mean
    between = share.sqrt().unsqueeze(1) * centred  # (K, D), R; Sigma_B = R^T R
    inverse = torch.linalg.pinv(between, rtol=1e-9)  # (D, K); pinv(Sigma_B) = pinv(R) pinv(R)^T
    return float((inverse * (within @ inverse)).sum())


@torch.no_grad()
def hidden_states(encoder: nn.Module, rows: list[list], context) -> tuple[list, Tensor]:
    """One forward pass over B rows of ids -> hidden states by layer (0: embeddings), (B, T, D) each, and a mask (B, T),
    False at padding."""
    tensors = [torch.tensor(row) for row in rows]
    ids = nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=-1)  # (B, T)
    mask = ids >= 0
    nonpad = mask.flatten().nonzero().squeeze(1)
    ids, nonpad, mask = context.send_all(ids.clamp(min=0), nonpad, mask)
    states = []
    with context.autocast(), encoder.no_limit():  # so that a text's states do not depend on its batch
        encoder(ids, nonpad, states)
    return [state.float() for state in states], mask


def middle_layer(L: int) -> int:
    """The layer whose sentence vectors are reported, of an encoder with L: the 9th of 12 (XLM-E 4.6); 0: embeddings."""
    return round(0.75 * L)


def sentence_vectors(encoder, tokenizer, texts: Sequence[str], micro_tokens: int, context) -> Tensor:
    """(L + 1, n, D): normalized means over the tokens of each text, by layer (0: embeddings), as in XLM-E 4.6.

    The mean includes <s> and </s>; texts are cut to the encoder's block_size. A forward pass has at most micro_tokens,
    or one text.
    """
    config = encoder.config
    room = config.block_size - 2
    ids = tokenizer.encode_batch(list(texts))
    rows = [[tokenizer.bos, *text[:room], tokenizer.eos] for text in ids]
    lengths = [len(row) for row in rows]
    order = sorted(range(len(rows)), key=lengths.__getitem__, reverse=True)
    shape = config.n_layer + 1, len(rows), config.n_embd
    vectors = torch.empty(shape, device=context.device)
    while order:
        size = max(1, micro_tokens // lengths[order[0]])
        chunk, order = order[:size], order[size:]
        batch = [rows[i] for i in chunk]
        states, mask = hidden_states(encoder, batch, context)
        for layer, state in zip(vectors, states):
            total = (state * mask.unsqueeze(2)).sum(dim=1)
            layer[chunk] = F.normalize(total, dim=1)  # equal to the normalized mean
    return vectors


def both_directions(one: Tensor, two: Tensor) -> Tensor:
    """(2, L + 1): share of n sentences whose nearest neighbour is the translation, by layer, from one to two and back.

    one, two (L + 1, n, D), normalized: row i of one translates row i of the other (XLM-E table 5).
    """
    cosine = one @ two.mT  # (L + 1, n, n)
    translation = torch.arange(one.shape[1], device=one.device)  # (n,)
    forth = cosine.argmax(dim=2) == translation  # (L + 1, n)
    back = cosine.argmax(dim=1) == translation
    return torch.stack([forth, back]).float().mean(dim=2)


def retrieval(one: Tensor, two: Tensor) -> Tensor:
    """(L + 1,): the mean of both directions."""
    return both_directions(one, two).mean(dim=0)


def sinkhorn(similarity: Tensor, rounds: int = 2) -> tuple[Tensor, Tensor]:
    """(..., m, n) similarities of the pieces of two sentences -> transport plans pi and xi, as in XLM-Align.

    Values of 0 or less become 1e-6. Each round scales the columns, then the rows, to sum to 1; xi is the plan before
    the last scaling of its rows.
    """
    pi = torch.where(similarity > 0, similarity, 1e-6)
    for _ in range(rounds):
        xi = pi / pi.sum(dim=-2, keepdim=True)
        pi = xi / xi.sum(dim=-1, keepdim=True)
    return pi, xi


def itermax(plan: Tensor, ratio: float = 0.9) -> Tensor:
    """(..., m, n) -> bool, which pieces are aligned, by two rounds of SimAlign's Itermax (Jalili Sabet et al., 2020).

    Round 1 aligns mutual best matches. Round 2 does so again, with pairs weighted by `ratio` where one piece is aligned
    already, and by 0 where both are. It is skipped if all pieces of one side are aligned, or a side has at most two.
    """
    aligned = each_others_best(plan)
    if min(plan.shape[-2:]) <= 2:
        return aligned
    row = aligned.any(dim=-1, keepdim=True)  # (..., m, 1) whether a piece is aligned
    column = aligned.any(dim=-2, keepdim=True)
    complete = row.all(dim=-2, keepdim=True) | column.all(dim=-1, keepdim=True)
    free = ~(row & column)  # (..., m, n)
    weighted = free * torch.where(row | column, ratio * plan, plan)
    more = each_others_best(weighted) & free & ~complete
    return aligned | more


def each_others_best(plan: Tensor) -> Tensor:
    """(..., m, n) -> bool: the maxima of both their row and their column; ties go to the first."""
    none = torch.zeros_like(plan, dtype=torch.bool)
    in_row = none.scatter(-1, plan.argmax(dim=-1, keepdim=True), True)
    in_column = none.scatter(-2, plan.argmax(dim=-2, keepdim=True), True)
    return in_row & in_column


def word_links(aligned: Tensor, one: list[int], two: list[int]) -> list[set]:
    """By layer, the pairs (word, word) with at least one aligned pair of pieces.

    aligned (L + 1, m, n) bool; one (m,), two (n,): the word that each piece belongs to.
    """
    links = [set() for _ in aligned]
    for layer, i, j in aligned.nonzero().tolist():
        links[layer].add((one[i], two[j]))
    return links


def alignment_error(predicted: list[set], sure: list[set], possible: list[set]) -> float:
    """AER over all sentences: 1 - (|A & S| + |A & P|) / (|A| + |S|), XLM-E eq. 10.

    For each sentence, the links (word, word): predicted A, sure S, and possible P, a superset of S.
    """
    correct = total = 0
    for A, S, P in zip(predicted, sure, possible, strict=True):
        correct += len(A & S) + len(A & P)
        total += len(A) + len(S)
    return 1 - correct / total
