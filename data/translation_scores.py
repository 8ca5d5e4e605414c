"""BLEU and chrF2++ of translations: of a model's, and of a memory that knows the training pairs by heart."""

import re
from statistics import fmean

from data import counting


def score(translations: list[str], references: list[str], language: str) -> dict[str, float | str]:
    """BLEU and chrF2++ of a corpus. Both sides are texts as people write them: sacrebleu finds the words itself.

    Raises ImportError where sacrebleu, or what it needs for a language, is not installed.
    """
    try:
        from sacrebleu import BLEU, CHRF

        code, *_ = re.split("[-_]", language)  # zh of zh_Hans
        metrics = {"bleu": BLEU(trg_lang=code), "chrf": CHRF(word_order=2)}
    except (ImportError, RuntimeError) as error:  # the second is for Japanese and Korean
        raise ImportError(f"BLEU and chrF2++ need sacrebleu: pip install sacrebleu ({error})") from error
    scores = {}
    for name, metric in metrics.items():
        scores[name] = metric.corpus_score(translations, [references]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores


def mean(scores: list[dict]) -> dict[str, float]:
    """BLEU and chrF2++, the means over pairs of languages; {} where there are none."""
    return {metric: fmean(pair[metric] for pair in scores) for metric in ("bleu", "chrf") if scores}


def score_memory(data) -> dict[str, float]:
    """Mean scores of a translation memory on the test set; {} where there is too much text to search it."""
    scores = []
    for name in data.languages:
        remembered = counting.remembered(data, name)
        if remembered:
            _, references = data.texts("test", name)
            scores.append(score(remembered, references, data.target))
    return mean(scores)
