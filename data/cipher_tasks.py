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
from pathlib import Path

from data.ciphers import LANGUAGES, Pieces, alphabets, sentences, train_pieces, written
from data.english import pydocs
from data.files import PREPARED, Records

FOLDER = "ciphers-tasks"  # of data/prepared
DEVELOPMENT = 8  # one of so many documents of valid is for development, the others are to train on
MOST = {"train": 4000, "dev": 400, "test": 1000}  # examples of a task
TAGGED, HALF, BIT = (10, 28), (6, 13), (2, 5)  # pieces of a text with tags, of one of a pair, and of a bit of that
START, REST, STRANGE = (2, 4), (12, 16), (3, 7)  # pieces of a text's beginning, of the rest, of what is put into it

Text = list[tuple[Pieces, str]]  # the pieces of each word, and its tag


def ready() -> Path:
    """The folder of the tasks, written now where there is none: about 20 s."""
    from data.prepare import new_folder  # not above: others need none of what it reads

    folder = PREPARED / FOLDER
    if not folder.exists():
        try:
            with new_folder(folder) as partial:
                write(partial, pydocs())
        except (OSError, ValueError):
            if not folder.exists():  # it exists where another process was faster
                raise
    return folder


def write(folder: Path, english: Records):
    """The files of all tasks: English ones to train on and to choose by, those to be scored in every language."""
    makers = {"tags": (tagged, in_tsv), "pairs": (paired, in_tsv_of_pairs), "spans": (mixed, in_json)}
    held_out = documents(list(english))
    for task, (make, form) in makers.items():
        (folder / task).mkdir()
        for split, own in held_out.items():
            rng = random.Random(split)
            examples = list(make(own, rng))
            rng.shuffle(examples)
            for language, alphabet in alphabets().items():
                if language == LANGUAGES[0] or split == "test":
                    ending = "json" if task == "spans" else "tsv"
                    file = folder / task / f"{split}-{language}.{ending}"
                    file.write_text(form(examples[: MOST[split]], alphabet), encoding="utf-8")


def documents(english: list) -> dict[str, list[Text]]:
    """Those of valid, which are for train and dev, and of test; without sentences that training text has, too."""
    in_sentences = [(split, sentences(text.lower())) for split, text in english]
    model = train_pieces(in_sentences)
    known = {sentence for split, own in in_sentences if split == "train" for sentence in own}
    found = {"train": [], "dev": [], "test": []}
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
        part = "test" if split == "test" else "train" if valid % DEVELOPMENT else "dev"
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


def tagged(held_out: list[Text], rng: random.Random) -> Iterator[Text]:
    """Texts of whole words, one after another, that have a tag."""
    for document in held_out:
        text, room = [], 0
        for word in document:
            if len(pieces_of([*text, word])) > room:
                if {tag for _, tag in text} - {"O"}:
                    yield text
                text, room = [], rng.randint(*TAGGED)
            if len(word[0]) <= room:
                text.append(word)


def paired(held_out: list[Text], rng: random.Random) -> Iterator[tuple[Pieces, Pieces, str]]:
    """Of each two texts that follow one another a right example and a wrong one."""
    for pieces in map(pieces_of, held_out):
        for begin, middle, end in places(len(pieces), HALF, HALF, rng):
            one, two = pieces[begin:middle], pieces[middle:end]
            elsewhere = pieces[:begin] + pieces[end:]
            if len(elsewhere) >= len(two):
                place = rng.randint(0, len(elsewhere) - len(two))
                wrong = woven(two, elsewhere[place:], rng)
                if wrong != two:
                    yield one, two, "1"
                    yield one, wrong, "0"


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


def mixed(held_out: list[Text], rng: random.Random) -> Iterator[tuple[Pieces, ...]]:
    """How a text begins; what stands before the strange bit, this, and what stands behind it."""
    documents = list(map(pieces_of, held_out))
    for number, pieces in enumerate(documents):
        others = [own for own in documents[:number] + documents[number + 1 :] if len(own) > STRANGE[1]]
        for begin, middle, end in places(len(pieces), START, REST, rng) if others else ():
            place = rng.randint(middle, end)
            other, size = rng.choice(others), rng.randint(*STRANGE)
            first = rng.randint(0, len(other) - size)
            yield pieces[begin:middle], pieces[middle:place], other[first : first + size], pieces[place:end]


# ---------------------------------------------------------------------------------------------------------------------
# Files


def in_tsv(examples: list[Text], alphabet: list[str]) -> str:
    """PAN-X: `word TAB tag` lines, with a blank line between two sentences."""
    blocks = []
    for text in examples:
        blocks.append("".join(f"{written(pieces, alphabet)}\t{tag}\n" for pieces, tag in text))
    return "\n".join(blocks)


def in_tsv_of_pairs(examples: list, alphabet: list[str]) -> str:
    """PAWS-X: `text TAB text TAB label` lines."""
    lines = []
    for one, two, label in examples:
        lines.append(f"{written(one, alphabet)}\t{written(two, alphabet)}\t{label}\n")
    return "".join(lines)


def in_json(examples: list, alphabet: list[str]) -> str:
    """SQuAD 1.1."""
    paragraphs = []
    for number, texts in enumerate(examples):
        start, before, strange, behind = (written(text, alphabet) for text in texts)
        answer = {"text": strange, "answer_start": len(before)}
        question = {"id": str(number), "question": start, "answers": [answer]}
        paragraphs.append({"context": before + strange + behind, "qas": [question]})
    whole = {"version": "1.1", "data": [{"title": FOLDER, "paragraphs": paragraphs}]}
    return json.dumps(whole, ensure_ascii=False)
