"""Three small tasks like XTREME's, made from held-out documents of `pydocs`, which no language is trained on.

    tags     tag each word: NAME, CODE, NUMBER, or O for none of them
    pairs    two texts: does the second one continue the first (1), or do bits from elsewhere alternate with it (0)?
    spans    the beginning of a text, and its continuation with a bit of another document inserted: find the bit

Every example exists in every language, with a character for each piece. Tags are read from the text before it is
lower-cased, so only the context distinguishes `tensor` from `Tensor`. The wrong text of a pair is as long as the right
one, and its bits come from the same document; answers of spans vary in length and position. Texts of pairs and spans
may begin and end within a word.
"""

import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import starmap

from data.ciphers import Pieces, encipher, learn_pieces, split_sentences
from data.english import pydocs
from data.files import PREPARED, Records, say

DEVELOPMENT = 8  # one in this many documents of valid is for development, the others are for training
MOST = {"train": 4000, "valid": 400, "test": 1000}  # examples of a task
TAGGED = (10, 28)  # tags: minimum and maximum pieces of a text
HALF, BIT = (6, 13), (2, 5)  # pairs: of each text, and of each bit of the wrong one
START, REST = (2, 4), (12, 16)  # spans: of the beginning, and of the continuation
STRANGE = (3, 7)  # spans: of the inserted bit

Text = list[tuple[Pieces, str]]  # (pieces, tag) of each word
# An example: the pieces of each text (tags: of each word), and the tags, a label or the (begin, end) of the answer.
Plain = tuple[list[Pieces], list[str] | str | tuple[int, int]]
Sets = dict[str, list[Plain]]  # split -> its examples


def read(task: str) -> Sets:
    """Makes the examples the first time, in about 20 s, and keeps them in data/prepared."""
    from data.prepare import new_folder  # not above: nothing else needs what it imports

    folder = PREPARED / "ciphers-examples"
    if not folder.exists():
        say(f"making the tasks in ciphers once, in {folder}")
        with suppress(FileExistsError), new_folder(folder) as new:  # another process may be faster
            for name, sets in make(pydocs()).items():
                (new / f"{name}.json").write_text(json.dumps(sets))
    return json.loads((folder / f"{task}.json").read_text())


def in_language(example: Plain, language: str) -> tuple[tuple, list | str]:
    """The example's texts and gold in a language, as in data/xtreme.py."""
    pieces, gold = example
    texts = tuple(encipher(text, language) for text in pieces)
    if isinstance(gold[0], int):  # a piece is a character
        begin, end = gold
        gold = [(texts[1][begin:end], begin)]
    return texts, gold


def make(english: Records) -> dict[str, Sets]:
    """task -> split -> examples"""
    held_out = documents(english)
    tasks = {}
    for task, examples_of in {"tags": tagged, "pairs": paired, "spans": inserted}.items():
        tasks[task] = {}
        for split, texts in held_out.items():
            rng = random.Random("dev" if split == "valid" else split)  # "dev": as in published results
            examples = list(examples_of(texts, rng))
            rng.shuffle(examples)
            tasks[task][split] = examples[: MOST[split]]
    return tasks


def documents(english: Records) -> dict[str, list[Text]]:
    """split -> documents without sentences of the training text; those of valid are divided into train and valid."""
    all_sentences, model = learn_pieces(english)
    known = set().union(*(sentences for split, sentences in all_sentences if split == "train"))
    texts = {"valid": [], "test": []}
    for split, text in (row for row in english if row[0] in texts):
        words = []  # (word, whether it begins a sentence)
        for sentence in split_sentences(text):
            if sentence.lower() not in known:
                words += [(word, place == 0) for place, word in enumerate(sentence.split())]
        pieces = model.encode_batch([word.lower() for word, _ in words])
        texts[split].append(list(zip(pieces, starmap(tag_of, words))))
    valid = texts["valid"][DEVELOPMENT - 1 :: DEVELOPMENT]
    del texts["valid"][DEVELOPMENT - 1 :: DEVELOPMENT]
    return {"train": texts["valid"], "valid": valid, "test": texts["test"]}


def tag_of(word: str, first: bool) -> str:
    """first: the word begins a sentence, where a capital letter means nothing."""
    core = word.strip(".,;:!?()[]{}'\"`")
    if re.search(r"\d", core):
        return "NUMBER"
    if re.search(r"[_.]|[a-z][A-Z]", core) or "()" in word:
        return "CODE"
    return "NAME" if core[:1].isupper() and not first else "O"


def pieces_of(text: Text) -> Pieces:
    return [piece for pieces, _ in text for piece in pieces]


def tagged(held_out: list[Text], rng) -> Iterator[Plain]:
    """Consecutive texts of whole words; those without any tag but O are skipped."""
    for document in held_out:
        text, room = [], 0
        for word in document:
            if len(pieces_of([*text, word])) > room:
                if {tag for _, tag in text} - {"O"}:
                    words, tags = zip(*text)
                    yield words, tags
                text, room = [], rng.randint(*TAGGED)
            if len(word[0]) <= room:
                text.append(word)


def paired(held_out: list[Text], rng) -> Iterator[Plain]:
    """A right and a wrong example from every two consecutive texts."""
    for pieces in map(pieces_of, held_out):
        for one, two, elsewhere in cut(pieces, HALF, HALF, rng):
            if len(elsewhere) >= len(two):
                place = rng.randint(0, len(elsewhere) - len(two))
                wrong = woven(two, elsewhere[place:], rng)
                if wrong != two:
                    yield [one, two], "1"
                    yield [one, wrong], "0"


def cut(pieces: Pieces, one: tuple, two: tuple, rng) -> Iterator[tuple]:
    """Consecutive pairs of texts with random sizes in the ranges one and two, each with the rest of the document."""
    end = 0
    while len(pieces) >= end + one[1] + two[1]:
        begin, middle = end, end + rng.randint(*one)
        end = middle + rng.randint(*two)
        yield pieces[begin:middle], pieces[middle:end], pieces[:begin] + pieces[end:]


def woven(one: Pieces, two: Pieces, rng) -> Pieces:
    """Alternating bits of both texts, each at its original place; as long as the first text."""
    mixture, texts = [], [one, two]
    rng.shuffle(texts)
    while len(mixture) < len(one):
        mixture += texts[0][len(mixture) : len(mixture) + rng.randint(*BIT)]
        texts.reverse()
    return mixture[: len(one)]


def inserted(held_out: list[Text], rng) -> Iterator[Plain]:
    """The beginning of a text, and its continuation with the inserted bit, which is the answer."""
    documents = list(map(pieces_of, held_out))
    for pieces in documents:
        others = [other for other in documents if other is not pieces and len(other) > STRANGE[1]]
        for start, rest, _ in cut(pieces, START, REST, rng):
            place = rng.randint(0, len(rest))
            other, size = rng.choice(others), rng.randint(*STRANGE)
            first = rng.randint(0, len(other) - size)
            strange = other[first : first + size]
            yield [start, rest[:place] + strange + rest[place:]], (place, place + size)
