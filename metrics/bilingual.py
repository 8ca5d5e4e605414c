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

    Both mask the same tokens, out of at most `eval_tokens`. `effect`: the 95% interval of the difference, for a ratio
    of sums over pairs.
    """
    args = "valid", maskings, config.eval_tokens, context.rank, context.world
    local, total = Counter(), Counter()  # first row of a batch -> counts (4, B), summed over halves and maskings
    for half in (0, 1):
        both_shown = pairs.eval_batches(*args, masked=(half,))
        one_shown = pairs.eval_batches(*args, masked=(half,), shown=(half,))
        batches = progress(zip(both_shown, one_shown), "translations")
        for (_, first, both), (_, _, one) in batches:
            local[first] += torch.cat([correct_by_row(model, batch, context) for batch in (both, one)])
    for counts in context.gather(local):
        total.update(counts)
    rows = [total[first] for first in sorted(total)]
    correct, masked, correct_alone, _ = torch.cat(rows, dim=1)  # (R,) each
    n, gain = masked.sum(), correct - correct_alone
    mean = gain.sum() / n
    error = (gain - mean * masked).square().sum().sqrt() / n
    return {
        "with": float(correct.sum() / n),
        "without": float(correct_alone.sum() / n),
        "effect": [float(mean - 1.96 * error), float(mean + 1.96 * error)],
    }


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
