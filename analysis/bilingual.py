"""What a model has learned of held-out translation pairs, measured in the course of training."""

from collections import Counter
from functools import lru_cache, partial
from itertools import chain
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis import measures
from data.batches import Masked, PairData
from model import Encoder, MaskedLM


def translation_effect(model: MaskedLM, pairs: PairData, config, context, maskings: int) -> dict:
    """How often the model is right about one half of a pair, `with` the whole other half beside it and `without`.

    The same tokens are masked both times, of at most `eval_tokens`. `effect`: the 95% interval of the difference, over
    pairs drawn anew.
    """
    how = model, pairs, config, context, maskings
    right, masked = right_by_pair(*how, beside=True)
    alone, _ = right_by_pair(*how, beside=False)
    total = masked.sum()
    return {
        "with": float(right.sum() / total),
        "without": float(alone.sum() / total),
        "effect": measures.bootstrap(right - alone, masked),
    }


def right_by_pair(model, pairs, config, context, maskings, beside) -> Tensor:
    """(2, R): of each held-out pair the tokens that are right, and all that are masked, of both halves."""
    read = "valid", maskings, config.eval_tokens, context.rank, context.world
    found, total = Counter(), Counter()  # (half, where a batch begins) -> its rows, added up over maskings
    for half in (0, 1):
        shown = (0, 1) if beside else (half,)
        batches = pairs.eval_batches(*read, masked=(half,), shown=shown)
        for _, first, batch in batches:
            found[half, first] += right_by_row(model, batch, context)
    for part in context.gather(found):
        total.update(part)
    rows = [total[key] for key in sorted(total)]  # (2, B) of each batch
    one, other = torch.cat(rows, dim=1).chunk(2, dim=1)
    return one + other


@torch.no_grad()
def right_by_row(model: MaskedLM, batch: Masked, context) -> Tensor:
    """(2, B): of each row the tokens that are right, and all that are masked."""
    ids, masked, targets, real = context.send_all(*batch[:4])
    with context.autocast():
        logits, _ = model(ids, masked, real=real)
    right = logits.argmax(dim=1) == targets  # (M,)
    both = torch.stack([right, torch.ones_like(right)])
    row = batch.masked // ids.shape[1]  # (M,) in which each stands
    rows = torch.zeros(2, len(ids), dtype=torch.float64)
    return rows.index_add_(1, row, both.cpu().double())


def retrieval(encoder: Encoder, pairs: PairData, config, context, most: int = 1000) -> dict:
    """How often the nearest of a language pair's held-out sentences is the translation, as in Tatoeba (XLM-E table 5).

    The mean over language pairs, of at most `most` sentences each, by layer (0: embeddings). `centred`: after the mean
    vector of each language was taken away, which hides in a cosine what tells its sentences apart; `chance`: a guess.
    """
    how = {"micro_tokens": config.micro_tokens, "context": context}
    # The ciphers' held-out pairs say the same in each two languages: a language's vectors are made once.
    vectors_of = lru_cache(maxsize=4)(partial(measures.sentence_vectors, encoder, pairs.tokenizer, **how))
    found = []
    for language in pairs.languages[context.rank :: context.world]:
        sides = pairs.texts("valid", language)
        if sides[0]:
            vectors = [vectors_of(tuple(side[:most])) for side in sides]
            plain = measures.retrieval(*vectors).tolist()
            moved = [own - own.mean(dim=1, keepdim=True) for own in vectors]
            centred = [F.normalize(own, dim=2) for own in moved]
            centred = measures.retrieval(*centred).tolist()
            chance = 1 / len(sides[0][:most])
            found.append((plain, centred, chance))
    *both, chance = zip(*chain(*context.gather(found)))
    plain, centred = torch.tensor(both, dtype=torch.float64).mean(dim=1).tolist()
    return {"retrieval": plain, "centred": centred, "chance": fmean(chance)}
