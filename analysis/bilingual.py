"""What a model has learned of held-out translation pairs, measured in the course of training."""

from itertools import chain
from statistics import fmean

import torch

from analysis import measures
from data.batches import PairData
from model import Encoder, MaskedLM


@torch.no_grad()
def translation_effect(model: MaskedLM, pairs: PairData, config, context, maskings: int) -> dict[str, float]:
    """How often the model is right about one half of a pair, `with` the whole other half beside it and `without`.

    The same tokens are masked both times. Of at most `eval_tokens` tokens.
    """
    found = {}
    for name in ("with", "without"):
        sums = torch.zeros(2, dtype=torch.float64)  # masked tokens that are right, and all of them
        for half in (0, 1):
            shown = (0, 1) if name == "with" else (half,)
            limits = config.eval_tokens, context.rank, context.world
            batches = pairs.eval_batches("valid", maskings, *limits, masked=(half,), shown=shown)
            for *_, batch in batches:
                ids, masked, targets, real = context.send_all(*batch[:4])
                with context.autocast():
                    logits, _ = model(ids, masked, real)
                right = logits.argmax(dim=1) == targets  # (M,)
                sums += torch.tensor([int(right.sum()), len(right)])
        right, count = context.sum(sums).tolist()
        found[name] = right / count
    return found


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
