"""Scores on held-out translation pairs, measured during training."""

from collections import Counter
from functools import lru_cache, partial
from itertools import chain
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from data.batches import Masked, PairData
from data.files import progress
from metrics import crosslingual
from model import Encoder, MaskedLM


def translation_effect(model: MaskedLM, pairs: PairData, config, context, maskings: int) -> dict:
    """Accuracy on masked tokens of one half of a pair, `with` the unmasked other half in the input and `without` it.

    Both mask the same tokens, out of at most `eval_tokens`. `effect`: the 95% interval of the difference, bootstrapped
    over pairs.
    """
    args = model, pairs, config, context, maskings
    correct, masked = correct_by_pair(*args, both_shown=True)
    correct_alone, _ = correct_by_pair(*args, both_shown=False)
    total = masked.sum()
    return {
        "with": float(correct.sum() / total),
        "without": float(correct_alone.sum() / total),
        "effect": bootstrap(correct - correct_alone, masked),
    }


def correct_by_pair(model, pairs, config, context, maskings, both_shown) -> Tensor:
    """(2, R): the correctly predicted and the masked tokens of each held-out pair, over both halves."""
    args = "valid", maskings, config.eval_tokens, context.rank, context.world
    local, total = Counter(), Counter()  # (half, first row of a batch) -> counts (2, B), summed over maskings
    for half in (0, 1):
        shown = (0, 1) if both_shown else (half,)
        for _, first, batch in progress(pairs.eval_batches(*args, masked=(half,), shown=shown), "translations"):
            local[half, first] += correct_by_row(model, batch, context)
    for counts in context.gather(local):
        total.update(counts)
    rows = [total[key] for key in sorted(total)]  # (2, B) each
    first_half, second_half = torch.cat(rows, dim=1).chunk(2, dim=1)
    return first_half + second_half


@torch.no_grad()
def correct_by_row(model: MaskedLM, batch: Masked, context) -> Tensor:
    """(2, B): the correctly predicted and the masked tokens of each row."""
    ids, masked, targets, nonpad = context.send_all(*batch[:4])
    with context.autocast():
        logits, _ = model(ids, masked, nonpad=nonpad)
    correct = logits.argmax(dim=1) == targets  # (M,)
    counts = torch.stack([correct, torch.ones_like(correct)])
    row = batch.masked // ids.shape[1]  # (M,)
    by_row = torch.zeros(2, len(ids), dtype=torch.float64)
    return by_row.index_add_(1, row, counts.cpu().double())


def retrieval(encoder: Encoder, pairs: PairData, config, context, most: int = 1000) -> dict:
    """Share of held-out sentences whose nearest neighbour is the translation, as in Tatoeba (XLM-E table 5).

    The mean over language pairs, with at most `most` sentences each, by layer (0: embeddings). `centred`: with each
    language's mean vector subtracted, as a large common component dominates the cosine; `chance`: random guessing.
    """
    options = {"micro_tokens": config.micro_tokens, "context": context}
    # The cipher languages share their held-out sentences: cache a language's vectors.
    vectors_of = lru_cache(maxsize=4)(partial(crosslingual.sentence_vectors, encoder, pairs.tokenizer, **options))
    scores = []
    for language in progress(pairs.languages[context.rank :: context.world], "retrieval"):
        sides = pairs.texts("valid", language)
        if sides[0]:
            vectors = [vectors_of(tuple(side[:most])) for side in sides]
            shifted = [F.normalize(side - side.mean(dim=1, keepdim=True), dim=2) for side in vectors]
            plain, centred = (crosslingual.both_directions(*both).mean(dim=0).tolist() for both in (vectors, shifted))
            scores.append((plain, centred, 1 / len(sides[0][:most])))
    *both, chance = zip(*chain(*context.gather(scores)))
    plain, centred = torch.tensor(both, dtype=torch.float64).mean(dim=1).tolist()
    return {"retrieval": plain, "centred": centred, "chance": fmean(chance)}


def bootstrap(totals: Tensor, sizes: Tensor) -> list[float]:
    """95% bootstrap interval of sum(totals) / sum(sizes), (R,) each, resampling rows with replacement."""
    rng, R = torch.Generator().manual_seed(0), len(sizes)
    ratios = []
    for _ in range(1000):
        rows = torch.randint(R, (R,), generator=rng)
        ratios.append((totals[rows].sum() / sizes[rows].sum()).double())
    return torch.stack(ratios).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
