"""Scores on held-out translation pairs, measured during training."""

from functools import lru_cache, partial
from itertools import chain
from statistics import fmean

import torch
import torch.nn.functional as F

from data.batches import PairData
from data.files import progress
from metrics import crosslingual
from model import Encoder, MaskedLM


@torch.no_grad()
def translation_effect(model: MaskedLM, pairs: PairData, config, context, maskings: int) -> dict[str, float]:
    """Accuracy on masked tokens of one half of a pair, `with` the unmasked other half in the input and `without` it.

    Both mask the same tokens, out of at most `eval_tokens`.
    """
    args = "valid", maskings, config.eval_tokens, context.rank, context.world
    counts = torch.zeros(2, 2, dtype=torch.float64)  # with and without the other half: correct and masked tokens
    for half in (0, 1):
        for row, shown in zip(counts, [(0, 1), (half,)]):
            batches = pairs.eval_batches(*args, masked=(half,), shown=shown)
            for _, _, batch in progress(batches, "translations"):
                ids, masked, targets, nonpad = context.send_all(*batch[:4])
                with context.autocast():
                    logits, _ = model(ids, masked, nonpad=nonpad)
                correct = logits.argmax(dim=1) == targets  # (M,)
                row += torch.tensor([int(correct.sum()), len(correct)])
    correct, masked = context.sum(counts).T
    return dict(zip(("with", "without"), (correct / masked).tolist()))


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
