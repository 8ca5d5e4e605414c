"""BLEU and chrF2++, as sacrebleu computes them, of translations and of the counting baselines."""

import re
from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean

from metrics.counting import large, looked_up, remembered

Scores = dict[str, float]  # metric -> percent
# Codes of ISO 639-2 and 639-3 -> of 639-1, for the languages that sacrebleu tokenizes in their own way.
CODES = dict.fromkeys("zho chi cmn yue wuu nan hak lzh".split(), "zh") | {"jpn": "ja", "kor": "ko"}


def score_translations(translations: list, references: list, language: str) -> dict:
    """Corpus BLEU and chrF2++. Both sides are detokenized text: sacrebleu tokenizes it for `language`.

    Raises ImportError if sacrebleu's tokenizer for Japanese or Korean is not installed.
    """
    from sacrebleu import BLEU, CHRF  # not above: nothing else needs it

    code, *_ = re.split("[-_]", language.lower())  # zho_Hans -> zho
    try:
        bleu = BLEU(trg_lang=CODES.get(code, code))
    except RuntimeError as error:
        raise ImportError(f"BLEU for {language!r} needs another package: {error}") from error
    scores = {}
    for name, metric in {"bleu": bleu, "chrf": CHRF(word_order=2)}.items():
        scores[name] = metric.corpus_score(translations, [references]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores


def score_counting(data) -> dict[str, dict]:
    """Test scores of a translation memory and of a token-by-token lookup: their means, and the scores of each language
    pair in `pairs`; {} if the training text is too large to search."""
    baselines = {}
    for name, translate in {"memory": remembered, "lookup": looked_up}.items():
        pairs = {}
        for language in () if large(data) else data.languages:
            translations = translate(data, language)
            if translations:
                _, references = data.texts("test", language)
                pairs[language] = score_translations(translations, references, data.target)
        baselines[name] = mean(pairs.values()) | {"pairs": pairs} if pairs else {}
    return baselines


def mean(scores: Iterable[dict]) -> Scores:
    """The mean of each metric over languages or language pairs; {} if there are none."""
    values = defaultdict(list)
    for language in scores:
        for metric, value in language.items():
            if not isinstance(value, str):  # sacrebleu's signature
                values[metric].append(value)
    return {metric: fmean(numbers) for metric, numbers in values.items()}
