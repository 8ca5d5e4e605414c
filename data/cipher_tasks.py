"""XTREME in the laboratory: three tasks made of those documents of `pydocs` that no language is trained on.

    tags     what a word is: a NAME, CODE, a NUMBER, or none of them (O)
    pairs    two texts: does the second one go on from the first (1), or is every other bit of it from elsewhere (0)?
    spans    how a text begins, and how it goes on, with a bit of another document put into it: which one?

All is said in every language, a word as a string of its characters. Tags are read off the text before it is put into
lower case, so that `tensor` is told from `Tensor` by what stands around it. The wrong text of a pair is as long as the
right one, and its bits are of one document; answers of spans have any length and stand anywhere. Texts of pairs and
spans are cut anywhere, too, in the middle of a word.
"""

import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import starmap

from data.ciphers import Pieces, learned, sentences, written
from data.english import pydocs
from data.files import PREPARED, Records

DEVELOPMENT = 8  # one of so many documents of valid is for development, the others are to train on
MOST = {"train": 4000, "valid": 400, "test": 1000}  # examples of a task
TAGGED = (10, 28)  # pieces of a text with tags, at least and at most
HALF, BIT = (6, 13), (2, 5)  # of one text of a pair, and of a bit of it
START, REST = (2, 4), (12, 16)  # of how a text begins, and of how it goes on
STRANGE = (3, 7)  # of what is put into that

Text = list[tuple[Pieces, str]]  # the pieces of each word, and its tag
# The pieces of each text (of tags: of each word), and a tag for each word, a label, or the answer's begin and end.
Made = tuple[list[Pieces], list[str] | str | tuple[int, int]]
Sets = dict[str, list[Made]]  # split -> its examples


def read(task: str) -> Sets:
    """They are made once, in about 20 s, and kept in data/prepared."""
    from data.prepare import new_folder  # not above: others need none of what it reads

    folder = PREPARED / "ciphers-examples"
    if not folder.exists():
        with suppress(FileExistsError), new_folder(folder) as new:  # another process may be faster
            for name, examples in make(pydocs()).items():
                (new / f"{name}.json").write_text(json.dumps(examples))
    return json.loads((folder / f"{task}.json").read_text())


def said(made: Made, language: str) -> tuple[tuple, list | str]:
    """The texts and the gold of an example, as in data/xtreme.py, in a language."""
    pieces, gold = made
    texts = tuple(written(own, language) for own in pieces)
    if isinstance(gold[0], int):  # a piece is a character
        begin, end = gold
        gold = [(texts[1][begin:end], begin)]
    return texts, gold


def make(english: Records) -> dict[str, Sets]:
    """By task."""
    held_out = documents(english)
    found = {}
    for task, examples_of in {"tags": tagged, "pairs": paired, "spans": mixed}.items():
        found[task] = {}
        for split, own in held_out.items():
            rng = random.Random("dev" if split == "valid" else split)  # as those of the results were drawn
            examples = list(examples_of(own, rng))
            rng.shuffle(examples)
            found[task][split] = examples[: MOST[split]]
    return found


def documents(english: Records) -> dict[str, list[Text]]:
    """Those of valid, which are for train and valid, and of test; without sentences that training text has, too."""
    in_sentences, model = learned(english)
    known = set().union(*(own for split, own in in_sentences if split == "train"))
    found = {"valid": [], "test": []}
    for split, text in (row for row in english if row[0] in found):
        words = []  # and whether each begins a sentence
        for sentence in sentences(text):
            if sentence.lower() not in known:
                words += [(word, place == 0) for place, word in enumerate(sentence.split())]
        pieces = model.encode_batch([word.lower() for word, _ in words])
        found[split].append(list(zip(pieces, starmap(tag_of, words))))
    valid = found["valid"][DEVELOPMENT - 1 :: DEVELOPMENT]
    del found["valid"][DEVELOPMENT - 1 :: DEVELOPMENT]
    return {"train": found["valid"], "valid": valid, "test": found["test"]}


def tag_of(word: str, first: bool) -> str:
    """first: it begins a sentence, where a capital says nothing."""
    core = word.strip(".,;:!?()[]{}'\"`")
    if re.search(r"\d", core):
        return "NUMBER"
    if re.search(r"[_.]|[a-z][A-Z]", core) or "()" in word:
        return "CODE"
    return "NAME" if core[:1].isupper() and not first else "O"


def pieces_of(text: Text) -> Pieces:
    return [piece for pieces, _ in text for piece in pieces]


# ---------------------------------------------------------------------------------------------------------------------
# Examples of all languages


def tagged(held_out: list[Text], rng) -> Iterator[Made]:
    """Texts of whole words, one after another, that have a tag."""
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


def paired(held_out: list[Text], rng) -> Iterator[Made]:
    """Of each two texts that follow one another a right example and a wrong one."""
    for pieces in map(pieces_of, held_out):
        for one, two, elsewhere in cut(pieces, HALF, HALF, rng):
            if len(elsewhere) >= len(two):
                place = rng.randint(0, len(elsewhere) - len(two))
                wrong = woven(two, elsewhere[place:], rng)
                if wrong != two:
                    yield [one, two], "1"
                    yield [one, wrong], "0"


def cut(pieces: Pieces, one: tuple, two: tuple, rng) -> Iterator[tuple]:
    """A text and the next, with sizes by chance from these, as often as they fit; and all that is around both."""
    end = 0
    while len(pieces) >= end + one[1] + two[1]:
        begin, middle = end, end + rng.randint(*one)
        end = middle + rng.randint(*two)
        yield pieces[begin:middle], pieces[middle:end], pieces[:begin] + pieces[end:]


def woven(one: Pieces, two: Pieces, rng) -> Pieces:
    """Bits of both in turns, each from its place; as long as the first one."""
    found, texts = [], [one, two]
    rng.shuffle(texts)
    while len(found) < len(one):
        end = len(found) + rng.randint(*BIT)
        found += texts[0][len(found) : end]
        texts.reverse()
    return found[: len(one)]


def mixed(held_out: list[Text], rng) -> Iterator[Made]:
    """How a text begins, and how it goes on around the strange bit, which is the answer."""
    documents = list(map(pieces_of, held_out))
    for pieces in documents:
        others = [own for own in documents if own is not pieces and len(own) > STRANGE[1]]
        for start, rest, _ in cut(pieces, START, REST, rng):
            place = rng.randint(0, len(rest))
            other, size = rng.choice(others), rng.randint(*STRANGE)
            first = rng.randint(0, len(other) - size)
            strange = other[first : first + size]
            yield [start, rest[:place] + strange + rest[place:]], (place, place + size)
