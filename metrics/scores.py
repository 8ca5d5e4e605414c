"""The scores of XTREME's tasks, computed as the benchmark does, and baselines without a network: guessing, counting."""

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

from data.xtreme import TASKS, Example
from metrics.bleu import Scores, mean

ASCII = dict.fromkeys(map(ord, string.punctuation))  # a table for `str.translate` that deletes ASCII punctuation
ARTICLES = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "ar": r"\sال^|ال",  # as in MLQA's script; its first half never matches, so this is ال anywhere
}


def score_task(task, language, gold: list, predicted: list) -> Scores:
    """gold: `Example.gold` of each example; predicted: tags, an answer or a label for each."""
    kind = TASKS[task].kind
    if kind == "tags":
        return {"f1": 100 * f1(entities(gold), entities(predicted))}
    if kind == "label":
        return {"accuracy": 100 * fmean(map(eq, gold, predicted))}
    words_of = {"mlqa": partial(mlqa_words, language=language), "spans": list}.get(task, squad_words)
    overlaps, exact = [], []
    for answers, answer in zip(gold, predicted):
        words = words_of(answer)
        references = [words_of(text) for text, _ in answers]
        overlaps.append(max(f1(words, reference) for reference in references))
        exact.append(words in references)
    return {"f1": 100 * fmean(overlaps), "em": 100 * fmean(exact)}


def gap(languages: dict[str, Scores]) -> Scores:
    """English minus the mean of the other languages (XLM-E table 7), for each metric; {} without both."""
    others = languages.copy()
    english = others.pop("en", {})
    means = mean(others.values())
    return {metric: value - means[metric] for metric, value in english.items() if means}


def f1(one: Collection, two: Collection) -> float:
    """F1 of two bags of words or of entities; 0 if they share none, even if both are empty, as in SQuAD's script."""
    return 2 * (Counter(one) & Counter(two)).total() / max(1, len(one) + len(two))


def entities(sentences: list[list[str]]) -> set[tuple]:
    """(sentence, first word, last word, class) of every entity.

    If tags have no B- and I-, as in UPOS, an entity is a run of equal tags. This follows seqeval 0.0.12, which XTREME
    used; it reads a leading S as a single-token entity, so every SYM and SCONJ is one.
    """
    spans = set()
    for number, tags in enumerate(sentences):
        begin, before = 0, "O"  # of the current entity; the previous word's tag
        for word, tag in enumerate([*tags, "O"]):
            kind = tag.removeprefix("B-").removeprefix("I-")
            if kind != before or tag.startswith(("B-", "S")):
                if before != "O":
                    spans.add((number, begin, word - 1, before))
                begin = word
            before = kind
    return spans


def squad_words(text: str) -> list[str]:
    """SQuAD 1.1: lower case, without ASCII punctuation, then without English articles."""
    return re.sub(ARTICLES["en"], " ", text.lower().translate(ASCII)).split()


def mlqa_words(text: str, language: str) -> list[str]:
    """MLQA: also without Unicode punctuation, with the language's own articles; each Chinese character is a word."""
    text = "".join(letter for letter in text.lower().translate(ASCII) if unicodedata.category(letter)[0] != "P")
    if language in ARTICLES:
        text = re.sub(ARTICLES[language], " ", text)
    if language == "zh":
        text = re.sub(r"([\u4e00-\u9fa5])", r" \1 ", text)
    return text.split()


# ---------------------------------------------------------------------------------------------------------------------
# Baselines without a network

Predictor = Callable[[list[Example]], list]  # examples -> a prediction for each


def guess(kind: str, train: list[Example], examples: list[Example]) -> list:
    """Predicts the most frequent tag or label, or as many of the text's first words as the median answer has.

    Words end at white space, so a guess in Chinese, Japanese, Thai or a cipher is often a whole sentence or more.
    """
    if kind == "label":
        return [mode(example.gold for example in train)] * len(examples)
    if kind == "tags":
        tag = mode(chain.from_iterable(example.gold for example in train))
        return [[tag] * len(example.gold) for example in examples]
    answers = chain.from_iterable(example.gold for example in train)
    size = round(median(len(text.split()) for text, _ in answers))
    return [" ".join(example.texts[1].split()[:size]) for example in examples]


def tags_by_word(train: list[Example]) -> Predictor:
    """Tags each word with its most frequent tag in training, and a new word with the most frequent tag overall."""
    counts = defaultdict(Counter)  # word -> tag -> count; None counts all words
    for example in train:
        for word, tag in zip(example.texts, example.gold):
            counts[word.lower()][tag] += 1
            counts[None][tag] += 1
    tag_of = {word: max(tags, key=tags.get) for word, tags in counts.items()}
    return lambda examples: [[tag_of.get(word.lower(), tag_of[None]) for word in one.texts] for one in examples]


def words_by_text(example: Example) -> set[tuple]:
    """The distinct (number of the text, word): a word counts separately in a premise and in a hypothesis."""
    return numbered(re.findall(r"\w+", text.lower()) for text in example.texts)


def neighbours_by_text(example: Example) -> set[tuple]:
    """The same for texts in ciphers: characters, pairs of neighbours, and the characters that both texts share."""
    shared = set.intersection(*map(set, example.texts))
    return numbered([*(chain(text, pairwise(text)) for text in example.texts), shared])


def numbered(texts: Iterable[Iterable]) -> set[tuple]:
    return {(number, part) for number, parts in enumerate(texts) for part in parts}


def labels_by_word(train: list[Example], words_of=words_by_text) -> Predictor:
    """Predicts the most likely label by naive Bayes over the words that an example shares with training."""
    labels = Counter(example.gold for example in train)
    counts = defaultdict(Counter)  # word -> label -> examples
    for example in train:
        for word in words_of(example):
            counts[word][example.gold] += 1

    def likelihood(label: str, words: list[Counter]) -> float:
        examples = labels[label] + 2  # smoothing: one more with each word, and one without
        shares = [(word[label] + 1) / examples for word in words]
        return math.log(labels[label]) + math.fsum(map(math.log, shares))  # fsum: the order of the set does not matter

    def likeliest(example: Example) -> str:
        known = [counts[word] for word in words_of(example) if word in counts]
        return max(labels, key=partial(likelihood, words=known))

    return lambda examples: list(map(likeliest, examples))


def answers_by_place(train: list[Example]) -> Predictor:
    """Predicts the same range of characters in every text: the median answer's length, where most answers lie."""
    answers = [answer for example in train for answer in example.gold[:1]]
    counts = Counter()  # index of a character -> answers that contain it
    for text, begin in answers:
        counts.update(range(begin, begin + len(text)))
    size = round(median(len(text) for text, _ in answers))
    begin = max(range(max(counts) + 1), key=lambda begin: sum(counts[begin + i] for i in range(size)))
    return lambda examples: [example.texts[1][begin : begin + size] for example in examples]


# Task, or kind of task -> its counting baseline.
COUNTING = {"tags": tags_by_word, "label": labels_by_word, "spans": answers_by_place}
COUNTING["pairs"] = partial(labels_by_word, words_of=neighbours_by_text)
