"""What a model has learned of held-out translation pairs, measured in the course of training."""

from collections import Counter
from itertools import chain
from statistics import fmean

import torch
from torch import Tensor

from analysis import measures
from data.batches import PairData
from model import Encoder, MaskedLM


@torch.no_grad()
def translation_effect(model: MaskedLM, pairs: PairData, config, context, maskings: int) -> dict:
    """How often the model is right about one half of a pair, `with` the whole other half beside it and `without`.

    The same tokens are masked both times, of at most `eval_tokens`. `effect`: the 95% interval of the difference, over
    pairs drawn anew.
    """
    right, masked = right_by_pair(model, pairs, config, context, maskings, beside=True)
    alone, _ = right_by_pair(model, pairs, config, context, maskings, beside=False)
    shares = {"with": float(right.sum() / masked.sum()), "without": float(alone.sum() / masked.sum())}
    return shares | {"effect": measures.bootstrap(right - alone, masked)}


def right_by_pair(model: MaskedLM, pairs: PairData, config, context, maskings: int, beside: bool) -> Tensor:
    """(2, R): of each held-out pair the tokens that are right, and all that are masked, one half after the other."""
    found = Counter()
    limits = config.eval_tokens, context.rank, context.world
    for half in (0, 1):
        shown = (0, 1) if beside else (half,)
        for _, first, batch in pairs.eval_batches("valid", maskings, *limits, masked=(half,), shown=shown):
            ids, masked, targets, real = context.send_all(*batch[:4])
            with context.autocast():
                logits, _ = model(ids, masked, real)
            right = (logits.argmax(dim=1) == targets).cpu().double()  # (M,)
            both = torch.stack([right, torch.ones_like(right)])
            pair = batch.masked // ids.shape[1]  # (M,) the row of each
            rows = torch.zeros(2, len(ids), dtype=torch.float64).index_add_(1, pair, both)
            found.update({(half, first): rows})  # adds up maskings
    total = Counter()
    for part in context.gather(found):
        total.update(part)
    first_half, second_half = ([total[key] for key in sorted(total) if key[0] == half] for half in (0, 1))
    return torch.cat(first_half, dim=1) + torch.cat(second_half, dim=1)


def retrieval(encoder: Encoder, pairs: PairData, config, context, most: int = 1000) -> dict:
    """How often the nearest of a language pair's held-out sentences is the translation, as in Tatoeba (XLM-E table 5).

    The mean over language pairs, of at most `most` sentences each, by layer (0: embeddings). `centred`: after the mean
    vector of each language was taken away, which hides in a cosine what tells its sentences apart; `chance`: a guess.
    """
    how = dict(micro_tokens=config.micro_tokens, context=context)
    found = []
    for language in pairs.languages[context.rank :: context.world]:
        texts = [side[:most] for side in pairs.texts("valid", language)]
        if texts[0]:
            vectors = [measures.sentence_vectors(encoder, pairs.tokenizer, side, **how) for side in texts]
            plain = measures.retrieval(*vectors)
            centred = measures.retrieval(*map(measures.centred, vectors))
            found.append((plain.tolist(), centred.tolist(), 1 / len(texts[0])))
    plain, centred, chance = zip(*chain(*context.gather(found)))

    def mean(rows: tuple) -> list[float]:
        return torch.tensor(rows, dtype=torch.float64).mean(dim=0).tolist()

    return {"retrieval": mean(plain), "centred": mean(centred), "chance": fmean(chance)}
