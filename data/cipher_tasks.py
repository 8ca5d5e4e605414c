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

from data.ciphers import Pieces, sentences, train_pieces, written
from data.english import pydocs
from data.files import PREPARED, Records

DEVELOPMENT = 8  # one of so many documents of valid is for development, the others are to train on
MOST = {"train": 4000, "valid": 400, "test": 1000}  # examples of a task
TAGGED, HALF, BIT = (10, 28), (6, 13), (2, 5)  # pieces of a text with tags, of one of a pair, and of a bit of that
START, REST, STRANGE = (2, 4), (12, 16), (3, 7)  # pieces of a text's beginning, of the rest, of what is put into it

Text = list[tuple[Pieces, str]]  # the pieces of each word, and its tag
# The pieces of each text (of tags: of each word), and a tag for each word, a label, or the answer's begin and end.
Made = tuple[list[Pieces], list[str] | str | tuple[int, int]]


def read(task: str) -> dict[str, list[Made]]:
    """The examples of each split. They are made once, in about 20 s, and kept in data/prepared."""
    from data.prepare import new_folder  # not above: others need none of what it reads

    folder = PREPARED / "ciphers-examples"
    if not folder.exists():
        with suppress(FileExistsError), new_folder(folder) as new:  # another process may be faster
            for name, examples in make(pydocs()).items():
                (new / f"{name}.json").write_text(json.dumps(examples))
    return json.loads((folder / f"{task}.json").read_text())


def said(made: Made, language: str) -> tuple[tuple[str, ...], list | str]:
    """The texts and the gold of an example, as in data/xtreme.py, in a language."""
    pieces, gold = made
    texts = tuple(written(own, language) for own in pieces)
    if isinstance(gold[0], int):  # a piece is a character
        begin, end = gold
        gold = [(texts[1][begin:end], begin)]
    return texts, gold


def make(english: Records) -> dict[str, dict[str, list[Made]]]:
    """Task -> split -> examples."""
    held_out = documents(list(english))
    found = {}
    for task, examples_of in {"tags": tagged, "pairs": paired, "spans": mixed}.items():
        found[task] = {}
        for split, own in held_out.items():
            rng = random.Random("dev" if split == "valid" else split)  # as those of the results were drawn
            examples = list(examples_of(own, rng))
            rng.shuffle(examples)
            found[task][split] = examples[: MOST[split]]
    return found


def documents(english: list) -> dict[str, list[Text]]:
    """Those of valid, which are for train and valid, and of test; without sentences that training text has, too."""
    in_sentences = [(split, sentences(text.lower())) for split, text in english]
    model = train_pieces(in_sentences)
    known = {sentence for split, own in in_sentences if split == "train" for sentence in own}
    found = {"train": [], "valid": [], "test": []}
    valid = 0
    for split, text in (row for row in english if row[0] != "train"):
        valid += split == "valid"
        words, tags = [], []
        for sentence in sentences(text):
            if sentence.lower() not in known:
                own = sentence.split()
                words += own
                tags += [tag_of(word, place == 0) for place, word in enumerate(own)]
        pieces = model.encode_batch([word.lower() for word in words])
        part = "test" if split == "test" else "train" if valid % DEVELOPMENT else "valid"
        found[part].append(list(zip(pieces, tags)))
    return found


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


def tagged(held_out: list[Text], rng: random.Random) -> Iterator[Made]:
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


def paired(held_out: list[Text], rng: random.Random) -> Iterator[Made]:
    """Of each two texts that follow one another a right example and a wrong one."""
    for pieces in map(pieces_of, held_out):
        for begin, middle, end in places(len(pieces), HALF, HALF, rng):
            one, two = pieces[begin:middle], pieces[middle:end]
            elsewhere = pieces[:begin] + pieces[end:]
            if len(elsewhere) >= len(two):
                place = rng.randint(0, len(elsewhere) - len(two))
                wrong = woven(two, elsewhere[place:], rng)
                if wrong != two:
                    yield [one, two], "1"
                    yield [one, wrong], "0"


def places(length: int, one: tuple, two: tuple, rng: random.Random) -> Iterator[tuple[int, int, int]]:
    """Of one text and a next, with sizes by chance from these, as often as they fit: begin, middle and end."""
    end = 0
    while length >= end + one[1] + two[1]:
        begin, middle = end, end + rng.randint(*one)
        end = middle + rng.randint(*two)
        yield begin, middle, end


def woven(one: Pieces, two: Pieces, rng: random.Random) -> Pieces:
    """Bits of both in turns, each from its place; as long as the first one."""
    found, texts = [], [one, two]
    rng.shuffle(texts)
    while len(found) < len(one):
        end = min(len(one), len(found) + rng.randint(*BIT))
        found += texts[0][len(found) : end]
        texts.reverse()
    return found


def mixed(held_out: list[Text], rng: random.Random) -> Iterator[Made]:
    """How a text begins, and how it goes on around the strange bit, which is the answer."""
    documents = list(map(pieces_of, held_out))
    for number, pieces in enumerate(documents):
        others = [own for own in documents[:number] + documents[number + 1 :] if len(own) > STRANGE[1]]
        for begin, middle, end in places(len(pieces), START, REST, rng) if others else ():
            place = rng.randint(middle, end)
            other, size = rng.choice(others), rng.randint(*STRANGE)
            first = rng.randint(0, len(other) - size)
            rest = pieces[middle:place] + other[first : first + size] + pieces[place:end]
            yield [pieces[begin:middle], rest], (place - middle, place - middle + size)
