"""The scores of XTREME's tasks, as the benchmark computes them, and those of translations, as sacrebleu does.

Beside them stands what needs no network: a guess, what counting words reaches, and a translation memory.
"""

import math
import re
import string
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import chain, pairwise
from operator import eq
from statistics import fmean, median, mode

from data.counting import large, looked_up, remembered
from data.xtreme import TASKS, Example

Scores = dict[str, float]  # metric -> percent
ASCII = dict.fromkeys(map(ord, string.punctuation))  # for `str.translate` to leave out
ARTICLES = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "ar": r"\sال^|ال",  # as in MLQA's script; its first half never matches, so this is ال anywhere
}


def score_task(task, language, gold: list, predicted: list) -> Scores:
    """gold: of each example, as in `Example`; predicted: tags, an answer or a label."""
    kind = TASKS[task].kind
    if kind == "tags":
        return {"f1": 100 * f1(entities(gold), entities(predicted))}
    if kind == "label":
        return {"accuracy": 100 * fmean(map(eq, gold, predicted))}
    words_of = {"mlqa": partial(mlqa_words, language=language), "spans": list}.get(task, squad_words)
    shared, exact = [], []
    for answers, answer in zip(gold, predicted):
        words = words_of(answer)
        right = [words_of(text) for text, _ in answers]
        shared.append(max(f1(words, one) for one in right))
        exact.append(words in right)
    return {"f1": 100 * fmean(shared), "em": 100 * fmean(exact)}


def score_translations(translations: list, references: list, language: str) -> dict:
    """BLEU and chrF2++ of a corpus. Both sides are texts as people write them: sacrebleu finds the words itself.

    Raises ImportError where what it needs for Japanese or Korean is not installed.
    """
    from sacrebleu import BLEU, CHRF  # not above: no other score needs it

    code, *_ = re.split("[-_]", language)  # zh of zh_Hans
    try:
        bleu = BLEU(trg_lang=code)
    except RuntimeError as error:
        raise ImportError(f"BLEU needs more for {language!r}: {error}") from error
    scores = {}
    for name, metric in {"bleu": bleu, "chrf": CHRF(word_order=2)}.items():
        scores[name] = metric.corpus_score(translations, [references]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores


def score_counting(data) -> dict[str, dict]:
    """Test scores of a translation memory and of a lookup, token by token: their means, and those of each pair of
    languages in `pairs`; {} where there is too much text to search it."""
    found = {}
    for name, method in {"memory": remembered, "lookup": looked_up}.items():
        pairs = {}
        for language in () if large(data) else data.languages:
            translations = method(data, language)
            if translations:
                _, references = data.texts("test", language)
                pairs[language] = score_translations(translations, references, data.target)
        found[name] = mean(pairs.values()) | {"pairs": pairs} if pairs else {}
    return found


def mean(scores: Iterable[dict]) -> Scores:
    """The mean of each metric over languages, or pairs of them; {} where there are none."""
    values = defaultdict(list)
    for own in scores:
        for metric, value in own.items():
            if not isinstance(value, str):  # sacrebleu's signature
                values[metric].append(value)
    return {metric: fmean(own) for metric, own in values.items()}


def gap(languages: dict[str, Scores]) -> Scores:
    """English minus the mean of the other languages (XLM-E table 7), of each metric; {} where there are not both."""
    others = languages.copy()
    english = others.pop("en", {})
    means = mean(others.values())
    return {metric: value - means[metric] for metric, value in english.items() if means}


def f1(one: Collection, two: Collection) -> float:
    """Of two bags of words or of entities; 0 where they share none, even if both are empty, as in SQuAD's script."""
    shared = Counter(one) & Counter(two)
    return 2 * shared.total() / max(1, len(one) + len(two))


def entities(sentences: list[list[str]]) -> set[tuple]:
    """(sentence, first word, last word, class) of every entity.

    Of tags without B- and I-, such as UPOS, a run of equal ones is an entity. That is how seqeval 0.0.12 read them,
    which XTREME used, and it took each SYM and SCONJ for an entity of its own (S- stood for a single).
    """
    found = set()
    for number, tags in enumerate(sentences):
        begin, before = 0, "O"  # of the present entity; the tag of the last word
        for place, tag in enumerate([*tags, "O"]):
            kind = tag.removeprefix("B-").removeprefix("I-")
            alone = tag.startswith(("B-", "S"))
            if alone or kind != before:
                if before != "O":
                    found.add((number, begin, place - 1, before))
                begin = place
            before = kind
    return found


def squad_words(text: str) -> list[str]:
    """SQuAD 1.1: lower case, without ASCII punctuation, then without English articles."""
    text = text.lower().translate(ASCII)
    return re.sub(ARTICLES["en"], " ", text).split()


def mlqa_words(text: str, language: str) -> list[str]:
    """MLQA: as SQuAD's, with Unicode's punctuation, the language's articles, and every Chinese character a word."""
    text = text.lower().translate(ASCII)
    text = "".join(letter for letter in text if unicodedata.category(letter)[0] != "P")
    if language in ARTICLES:
        text = re.sub(ARTICLES[language], " ", text)
    if language == "zh":
        text = re.sub(r"([\u4e00-\u9fa5])", r" \1 ", text)
    return text.split()


# ---------------------------------------------------------------------------------------------------------------------
# Tasks without a network

Predictor = Callable[[list[Example]], list]  # examples -> the prediction for each


def guess(kind: str, train: list[Example], examples: list[Example]) -> list:
    """The most frequent tag or label; of a text its first words, as many as answers have (the median).

    Words end at white space, so the guess is often a whole sentence or more in Chinese, Japanese, Thai and ciphers.
    """
    if kind == "label":
        return [mode(one.gold for one in train)] * len(examples)
    if kind == "tags":
        most = mode(chain.from_iterable(one.gold for one in train))
        return [[most] * len(one.gold) for one in examples]
    answers = chain.from_iterable(one.gold for one in train)
    size = round(median(len(text.split()) for text, _ in answers))
    words = [one.texts[1].split() for one in examples]
    return [" ".join(own[:size]) for own in words]


def tags_by_word(train: list[Example]) -> Predictor:
    """Tags each word with its most frequent tag in training, or with the most frequent of all where it is new."""
    counts = defaultdict(Counter)  # word -> tag -> how often
    for one in train:
        for word, tag in zip(one.texts, one.gold):
            counts[word.lower()][tag] += 1
            counts[None][tag] += 1
    tag_of = {word: max(own, key=own.get) for word, own in counts.items()}

    def tags(example: Example) -> list[str]:
        return [tag_of.get(word.lower(), tag_of[None]) for word in example.texts]

    return lambda examples: list(map(tags, examples))


def words_by_text(one: Example) -> set[tuple]:
    """Every word once, with the number of its text: in a premise it says something else than in a hypothesis."""
    return numbered(re.findall(r"\w+", text.lower()) for text in one.texts)


def neighbours_by_text(one: Example) -> set[tuple]:
    """As `words_by_text`, of texts without words: characters, neighbours, and the characters that both texts have."""
    shared = set.intersection(*map(set, one.texts))
    return numbered([*(chain(text, pairwise(text)) for text in one.texts), shared])


def numbered(texts: Iterable[Iterable]) -> set[tuple]:
    return {(number, part) for number, parts in enumerate(texts) for part in parts}


def labels_by_word(train: list[Example], words_of=words_by_text) -> Predictor:
    """Chooses the likeliest label by naive Bayes over the words that an example shares with training."""
    labels = Counter(one.gold for one in train)
    counts = defaultdict(Counter)  # word -> label -> examples
    for one in train:
        for word in words_of(one):
            counts[word][one.gold] += 1

    def likelihood(label: str, words: list[Counter]) -> float:
        examples = labels[label] + 2  # one more that has each word, and one that has it not
        shares = [(own[label] + 1) / examples for own in words]
        return math.log(labels[label]) + math.fsum(map(math.log, shares))  # exact: words of a set have no order

    def likeliest(example: Example) -> str:
        known = [counts[word] for word in words_of(example) if word in counts]
        return max(labels, key=partial(likelihood, words=known))

    return lambda examples: list(map(likeliest, examples))


def answers_by_place(train: list[Example]) -> Predictor:
    """Always the same characters of a text: as many as answers have (the median), where most of them stand."""
    answers = [answer for one in train for answer in one.gold[:1]]
    counts = Counter()  # of the answers over each place
    for text, begin in answers:
        counts.update(range(begin, begin + len(text)))
    size = round(median(len(text) for text, _ in answers))
    begin = max(range(max(counts) + 1), key=lambda begin: sum(counts[begin + place] for place in range(size)))
    return lambda examples: [one.texts[1][begin : begin + size] for one in examples]


# Kind of task, or task: what solves it by counting.
COUNTING = {"tags": tags_by_word, "label": labels_by_word, "spans": answers_by_place}
COUNTING["pairs"] = partial(labels_by_word, words_of=neighbours_by_text)
