"""A corpus in languages that differ only in their words: English and ciphers of it; and harder ciphers to translate.

English is cut into PIECES pieces. Each language writes a piece as one character (of Unicode's private use areas),
chosen by a permutation: no two languages share a character, and a sentence has the same length and order in every one.
Each document is in one language, except those that the pairs are cut from. Two of the languages are paired with the
others but never with each other.
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
PAIRED = 0.3  # share of the text for pairs; the languages get equal parts of the rest
SHORTEST, LONGEST = 3, 8  # pieces of a text in a pair
HELD_OUT = 300  # pairs in valid, and in test: the same texts in the same order for all language pairs
# SentencePiece options: for the pieces of English, and for the vocabulary of one token per character.
BOTH = dict(character_coverage=1.0, byte_fallback=False)
ENGLISH = BOTH | dict(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True, add_dummy_prefix=True)
ENGLISH |= dict(allow_whitespace_only_pieces=False, user_defined_symbols=[], eos_id=-1)
VOCABULARY = BOTH | dict(model_type="char", hard_vocab_limit=False)
VOCABULARY |= dict(normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False)

Pieces = list[int]
Document = tuple[str, list[Pieces]]  # (split, sentences)

ALPHABETS = {}  # language -> the character of each piece
for number, language in enumerate(LANGUAGES):
    first = 0xF0000 + number * PIECES
    ALPHABETS[language] = list(map(chr, range(first, first + PIECES)))
    random.Random(number).shuffle(ALPHABETS[language])
# For printing, as no font has these characters: Latin letters with accents, the same 128 for each language.
VISIBLE = {ord(character): 0x100 + ord(character) % PIECES for each in ALPHABETS.values() for character in each}


def encipher(pieces: Iterable[int], language, backwards=False) -> str:
    """The text in a language; backwards: reversed, except in English.

    Dufter and Schütze (EMNLP 2020) found that an encoder does not become multilingual if a language is reversed: a
    measure of multilinguality should show this.
    """
    text = "".join(ALPHABETS[language][piece] for piece in pieces)
    return text[::-1] if backwards and language != "en" else text


def by_language(english: Records, backwards=False) -> dict[str, Records]:
    """Each language's share of the documents, as rows (split, text)."""
    documents, _ = in_pieces(english)
    *shares, _ = deal_documents(documents)
    rows = defaultdict(list)
    for share, language in zip(shares, LANGUAGES):
        for split, sentences in [("train", [range(PIECES)]), *share]:  # first all pieces: rare ones have tokens, too
            text = encipher(chain.from_iterable(sentences), language, backwards)
            rows[language].append((split, text))
    return rows


def by_pair(english: Records, backwards=False) -> dict[str, Records]:
    """Texts of SHORTEST to LONGEST pieces for every two paired languages, in both orders."""
    documents, names = in_pieces(english)
    *_, paired = deal_documents(documents)
    rng = random.Random(0)
    split_texts = []
    for split, sentences in paired:
        for sentence in sentences:
            split_texts += [(tuple(text), split) for text in cut(sentence, names, rng)]
    rng.shuffle(split_texts)
    texts = defaultdict(list)
    for text, split in dict(split_texts).items():  # each text once, so that it is in one split only
        texts[split].append(text)
    pairs = [pair for pair in permutations(LANGUAGES, 2) if set(pair) != NEVER_PAIRED]
    rows = {}
    for pair, splits, pair_texts in deal_texts(pairs, texts):
        sides = ([encipher(text, language, backwards) for text in pair_texts] for language in pair)
        rows["-".join(pair)] = list(zip(splits, *sides))
    return rows


def deal_texts(names: Collection, texts: dict[str, list]) -> Iterator[tuple]:
    """(name, splits, texts) for each name: training texts are dealt out, held-out ones are the same for all."""
    held_out = [(split, text) for split in ("valid", "test") for text in texts[split][:HELD_OUT]]
    for number, name in enumerate(names):
        train = texts["train"][number :: len(names)]
        yield name, *zip(*held_out, *(("train", text) for text in train))


def in_pieces(english: Records) -> tuple[list[Document], list[str]]:
    """The documents in pieces, and the names of the pieces."""
    documents, model = learn_pieces(english)
    documents = [(split, model.encode_batch(sentences)) for split, sentences in documents]
    return documents, model.processor.id_to_piece(list(range(PIECES)))


def learn_pieces(english: Records) -> tuple[list, SentencePiece]:
    """Documents (split, sentences), in lower-case ASCII so that few pieces cover them, and their tokenizer."""
    documents = [(split, split_sentences(text.lower())) for split, text in english]
    train = chain.from_iterable(sentences for split, sentences in documents if split == "train")
    return documents, train_sentencepiece(train, PIECES, **ENGLISH)


def split_sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?:;]) ", " ".join(text.encode("ascii", "ignore").decode().split()))


def size(document: Document) -> int:
    return sum(map(len, document[1]))


def deal_documents(documents: list[Document]) -> list[list[Document]]:
    """The documents of each language and, last, for pairs: dealt longest first, each to the least filled share."""
    parts = [(1 - PAIRED) / len(LANGUAGES)] * len(LANGUAGES) + [PAIRED]
    shares = [[] for _ in parts]
    filled = {split: [0.0] * len(parts) for split in SPLITS}
    for document in sorted(documents, key=size, reverse=True):
        sizes = filled[document[0]]
        least = sizes.index(min(sizes))
        sizes[least] += size(document) / parts[least]
        shares[least].append(document)
    return shares


def cut(sentence: Pieces, names: list[str], rng) -> Iterator[Pieces]:
    """Texts of a random SHORTEST to LONGEST pieces, each shortened until the next one begins with a word."""
    begin = 0
    while len(sentence) - begin >= SHORTEST:
        end = min(begin + rng.randint(SHORTEST, LONGEST), len(sentence))
        while begin + SHORTEST < end < len(sentence) and not names[sentence[end]].startswith("\u2581"):
            end -= 1
        yield sentence[begin:end]
        begin = end


# ---------------------------------------------------------------------------------------------------------------------
# Pairs for a translator: readable English, and ciphers that need more than a dictionary
#
# A text is a few words of English in lower case. Each of three ciphers adds one difficulty:
#
#     x1    the text is reversed
#     x2    pieces 2k and 2k + 1 share a character: only the context can tell which one is meant
#     x3    after a piece with an odd k, pieces 2k and 2k + 1 swap characters (linguists call this sandhi)
#
# Pieces 2k and 2k + 1 are about equally frequent, so a dictionary of characters gets six of ten right in x2 and x3.
# Held-out texts are the same in all ciphers, and training has no text of their documents.


def homographs(pieces: Pieces) -> Iterable[int]:
    return (piece - piece % 2 for piece in pieces)


def sandhi(pieces: Pieces) -> Iterable[int]:
    previous = 0
    for piece in pieces:
        yield piece ^ previous // 2 % 2  # swaps 2k and 2k + 1; k stays, so a reader can infer the previous piece's k
        previous = piece


HARDER = {"x1": reversed, "x2": homographs, "x3": sandhi}  # language -> maps pieces to those that are written
# The vocabulary: PIECES pieces of English, learned for these texts, and one token per character of the ciphers.
CHARACTERS = [character for language in HARDER for character in ALPHABETS[language]]
HARDER_VOCABULARY = ENGLISH | dict(model_type="bpe", eos_id=2, user_defined_symbols=CHARACTERS)
HARDER_VOCABULARY |= dict(vocab_size=PIECES + len(CHARACTERS) + 4)  # and <s>, <pad>, </s> and <mask>
NARROWEST, WIDEST = 6, 20  # characters of a text in English


def to_english(english: Records) -> dict[str, Records]:
    """{"x1-en": rows (split, cipher, English)}."""
    rng = random.Random(0)
    texts, seen = {}, set()
    for split in ("valid", "test", "train"):  # training last, without any text of a held-out document
        split_texts = chain.from_iterable(phrases(text, rng) for name, text in english if name == split)
        texts[split] = [text for text in dict.fromkeys(split_texts) if text not in seen]
        seen.update(texts[split])
        rng.shuffle(texts[split])
    model = train_sentencepiece(texts["train"], PIECES, **ENGLISH)
    rows = {}
    for (language, rewrite), splits, plain in deal_texts(HARDER.items(), texts):
        ciphers = (encipher(rewrite(pieces), language) for pieces in model.encode_batch(plain))
        rows[f"{language}-en"] = list(zip(splits, ciphers, plain))
    return rows


def phrases(document: str, rng: random.Random) -> Iterator[str]:
    """The document's sentences, each wrapped at a random width into texts of about equal length."""
    for sentence in split_sentences(document.lower()):
        width = rng.randint(NARROWEST, WIDEST)
        for text in wrap(sentence, width, break_long_words=False, break_on_hyphens=False):
            if NARROWEST <= len(text) <= WIDEST:
                yield text
