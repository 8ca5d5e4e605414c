"""Pairs for a translator: readable English, and ciphers that take more than a dictionary to read.

A text is a few words of English in lower case. Each of three languages writes its pieces (see data/ciphers.py) as
characters of its own, and differs from English in one thing more:

    x1    it stands backwards
    x2    pieces 2k and 2k + 1 are one character: which of the two is meant, what stands around it can tell
    x3    behind a piece with an odd k, pieces 2k and 2k + 1 change characters (linguists call it sandhi)

The two are about equally frequent, so a dictionary of characters is right with six of ten, in x2 as in x3. The held-out
texts are the same in all languages, and of documents that training has nothing of.
"""

import random
from collections.abc import Iterable, Iterator
from itertools import chain
from textwrap import wrap

from data.ciphers import ENGLISH, HELD_OUT, PIECES, Pieces, alphabets, sentences, written
from data.files import Records
from data.tokenizers import train_sentencepiece

SHORTEST, LONGEST = 6, 20  # characters of a text in English


# Each takes the pieces of a text, and returns those whose characters are written.


def backwards(pieces: Pieces) -> Iterable[int]:
    return reversed(pieces)


def homographs(pieces: Pieces) -> Iterable[int]:
    return (piece - piece % 2 for piece in pieces)


def sandhi(pieces: Pieces) -> Iterable[int]:
    before = 0  # its k is that of the character before, too: whoever reads can see it
    for piece in pieces:
        yield piece ^ before // 2 % 2  # 2k becomes 2k + 1, and that 2k
        before = piece


LANGUAGES = {"x1": backwards, "x2": homographs, "x3": sandhi}
ALPHABETS = alphabets()
# The vocabulary: English in PIECES pieces, which are learned anew, and a token a character of the ciphers.
CHARACTERS = [character for language in LANGUAGES for character in ALPHABETS[language]]
VOCABULARY = ENGLISH | dict(model_type="bpe", eos_id=2, user_defined_symbols=CHARACTERS)
VOCABULARY |= dict(vocab_size=PIECES + len(CHARACTERS) + 4)  # and <s>, <pad>, </s> and <mask>


def by_pair(english: Records) -> dict[str, Records]:
    """{"x1-en": rows}: the training texts are dealt out to the languages, the held-out ones given to all."""
    rng = random.Random(0)
    texts, seen = {}, set()
    for split in ("valid", "test", "train"):  # what held-out documents say is nowhere in training
        documents = [text for own, text in english if own == split]
        found = chain.from_iterable(phrases(text, rng) for text in documents)
        texts[split] = [text for text in dict.fromkeys(found) if text not in seen]
        seen.update(texts[split])
        rng.shuffle(texts[split])
    model = train_sentencepiece(texts["train"], PIECES, **ENGLISH)
    rows = {}
    for number, (language, form) in enumerate(LANGUAGES.items()):
        rows[f"{language}-en"] = own = []
        for split, every in texts.items():
            chosen = every[number :: len(LANGUAGES)] if split == "train" else every[:HELD_OUT]
            for text, pieces in zip(chosen, model.encode_batch(chosen)):
                own.append((split, written(form(pieces), ALPHABETS[language]), text))
    return rows


def phrases(document: str, rng: random.Random) -> Iterator[str]:
    """Its sentences, each broken between words into texts of about one length."""
    for sentence in sentences(document.lower()):
        width = rng.randint(SHORTEST, LONGEST)
        for text in wrap(sentence, width, break_long_words=False, break_on_hyphens=False):
            if SHORTEST <= len(text) <= LONGEST:
                yield text
