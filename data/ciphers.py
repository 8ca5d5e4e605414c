"""A text in languages that differ in nothing but their words: English, and ciphers of it; and harder ones to translate.

English is cut into PIECES pieces. Each language writes a piece as one character of its own (of Unicode's private use),
chosen by a permutation: no two languages share a character, and a sentence has one length and one order in all.
No document is told in two languages, but for those that the pairs are cut from; of the pairs, two languages are paired
with the others and never with each other.
"""

import random
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, permutations
from textwrap import wrap

from data.files import SPLITS, Records
from data.tokenizers import SentencePiece, train_sentencepiece

LANGUAGES = ("en", "x1", "x2", "x3")
NEVER_PAIRED = {"x2", "x3"}
PIECES = 128
PAIRED = 0.3  # of the text is for pairs, the rest for the languages in equal parts
SHORTEST, LONGEST = 3, 8  # pieces of a text in a pair
HELD_OUT = 300  # pairs in valid, and in test: the same ones, in the same order, for every two languages
# How the pieces of English are learned, and the vocabulary: a token a character.
BOTH = dict(character_coverage=1.0, byte_fallback=False)
ENGLISH = BOTH | dict(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True, add_dummy_prefix=True)
ENGLISH |= dict(allow_whitespace_only_pieces=False, user_defined_symbols=[], eos_id=-1)
VOCABULARY = BOTH | dict(model_type="char", hard_vocab_limit=False)
VOCABULARY |= dict(normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False)

Pieces = list[int]
Document = tuple[str, list[Pieces]]  # its split and its sentences

ALPHABETS = {}  # language -> the character that stands for each piece
for number, language in enumerate(LANGUAGES):
    first = 0xF0000 + number * PIECES
    ALPHABETS[language] = list(map(chr, range(first, first + PIECES)))
    random.Random(number).shuffle(ALPHABETS[language])


def written(pieces: Iterable[int], language, backwards=False) -> str:
    """backwards: but for English, from the end of a text to its beginning.

    Dufter and Schütze (EMNLP 2020) found that an encoder does not become multilingual then: who measures whether one
    is, should see that.
    """
    text = "".join(ALPHABETS[language][piece] for piece in pieces)
    return text[::-1] if backwards and language != "en" else text


def by_language(english: Records, backwards=False) -> dict[str, Records]:
    """Each language's share of the documents (split, text)."""
    documents, _ = in_pieces(english)
    *shares, _ = dealt_out(documents)
    rows = {}
    for share, language in zip(shares, LANGUAGES):
        every = written(range(PIECES), language, backwards)  # so that rare characters have tokens too
        rows[language] = [("train", every)]
        for split, sentences in share:
            text = written(chain.from_iterable(sentences), language, backwards)
            rows[language].append((split, text))
    return rows


def by_pair(english: Records, backwards=False) -> dict[str, Records]:
    """Texts of SHORTEST to LONGEST pieces in every two languages and in both orders."""
    documents, names = in_pieces(english)
    *_, paired = dealt_out(documents)
    rng = random.Random(0)
    found = []
    for split, sentences in paired:
        for sentence in sentences:
            for text in cut(sentence, names, rng):
                found.append((tuple(text), split))
    rng.shuffle(found)
    texts = defaultdict(list)
    for text, split in dict(found).items():  # each once: none of one split is in another
        texts[split].append(text)
    pairs = [pair for pair in permutations(LANGUAGES, 2) if set(pair) != NEVER_PAIRED]
    rows = {}
    for pair, splits, own in dealt_to(pairs, texts):
        said = ([written(text, language, backwards) for text in own] for language in pair)
        rows["-".join(pair)] = list(zip(splits, *said))
    return rows


def dealt_to(names: Collection, texts: dict[str, list]) -> Iterator[tuple]:
    """(name, the split of each of its texts, its texts): train's are dealt out, the held-out ones given to all."""
    held_out = [(split, text) for split in ("valid", "test") for text in texts[split][:HELD_OUT]]
    for number, name in enumerate(names):
        train = texts["train"][number :: len(names)]
        yield name, *zip(*held_out, *(("train", text) for text in train))


def in_pieces(english: Records) -> tuple[list[Document], list[str]]:
    """The documents in pieces, the longest first, and the names of the pieces."""
    documents, model = learned(english)
    documents = [(split, model.encode_batch(own)) for split, own in documents]
    documents.sort(key=size, reverse=True)
    return documents, model.processor.id_to_piece(list(range(PIECES)))


def learned(english: Records) -> tuple[list, SentencePiece]:
    """Documents (split, sentences) in lower case and ASCII, so that few pieces hold more, and the PIECES of train's."""
    documents = [(split, sentences(text.lower())) for split, text in english]
    train = chain.from_iterable(own for split, own in documents if split == "train")
    return documents, train_sentencepiece(train, PIECES, **ENGLISH)


def sentences(text: str) -> list[str]:
    text = text.encode("ascii", "ignore").decode()
    text = " ".join(text.split())
    return re.split(r"(?<=[.!?:;]) ", text)


def size(document: Document) -> int:
    return sum(map(len, document[1]))


def dealt_out(documents: list[Document]) -> list[list[Document]]:
    """The documents for each language and, last, those for pairs.

    In each split the longest document that is left goes to whom most of its share is missing.
    """
    part = (1 - PAIRED) / len(LANGUAGES)
    parts = [part] * len(LANGUAGES) + [PAIRED]
    shares = [[] for _ in parts]
    have = {split: [0.0] * len(parts) for split in SPLITS}
    for document in documents:
        own = have[document[0]]
        least = own.index(min(own))
        own[least] += size(document) / parts[least]
        shares[least].append(document)
    return shares


def cut(sentence: Pieces, names: list[str], rng) -> Iterator[Pieces]:
    """Texts of SHORTEST to LONGEST pieces by chance, each shortened until the next begins with a word."""
    begin = 0
    while len(sentence) - begin >= SHORTEST:
        end = min(begin + rng.randint(SHORTEST, LONGEST), len(sentence))
        while begin + SHORTEST < end < len(sentence):
            if names[sentence[end]].startswith("\u2581"):
                break
            end -= 1
        yield sentence[begin:end]
        begin = end


# ---------------------------------------------------------------------------------------------------------------------
# Pairs for a translator: readable English, and ciphers that take more than a dictionary to read
#
# A text is a few words of English in lower case. Each of three languages differs from English in one thing more:
#
#     x1    it stands backwards
#     x2    pieces 2k and 2k + 1 are one character: which of the two is meant, what stands around it can tell
#     x3    behind a piece with an odd k, pieces 2k and 2k + 1 change characters (linguists call it sandhi)
#
# The two are about equally frequent, so a dictionary of characters is right with six of ten, in x2 as in x3. The
# held-out texts are the same in all languages, and of documents that training has nothing of.


def homographs(pieces: Pieces) -> Iterable[int]:
    return (piece - piece % 2 for piece in pieces)


def sandhi(pieces: Pieces) -> Iterable[int]:
    before = 0  # its k is that of the character before, too: whoever reads can see it
    for piece in pieces:
        yield piece ^ before // 2 % 2  # 2k becomes 2k + 1, and that 2k
        before = piece


HARDER = {"x1": reversed, "x2": homographs, "x3": sandhi}  # language -> the pieces whose characters are written
# The vocabulary: English in PIECES pieces, which are learned anew, and a token a character of the ciphers.
CHARACTERS = [character for language in HARDER for character in ALPHABETS[language]]
HARDER_VOCABULARY = ENGLISH | dict(model_type="bpe", eos_id=2, user_defined_symbols=CHARACTERS)
HARDER_VOCABULARY |= dict(vocab_size=PIECES + len(CHARACTERS) + 4)  # and <s>, <pad>, </s> and <mask>
NARROWEST, WIDEST = 6, 20  # characters of a text in English


def to_english(english: Records) -> dict[str, Records]:
    """{"x1-en": rows (split, cipher, English)}."""
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
    for (language, form), splits, own in dealt_to(HARDER.items(), texts):
        ciphers = (written(form(pieces), language) for pieces in model.encode_batch(own))
        rows[f"{language}-en"] = list(zip(splits, ciphers, own))
    return rows


def phrases(document: str, rng: random.Random) -> Iterator[str]:
    """Its sentences, each broken between words into texts of about one length."""
    for sentence in sentences(document.lower()):
        width = rng.randint(NARROWEST, WIDEST)
        for text in wrap(sentence, width, break_long_words=False, break_on_hyphens=False):
            if NARROWEST <= len(text) <= WIDEST:
                yield text
