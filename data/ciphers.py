"""A text in languages that differ in nothing but their words: English, and ciphers of it.

English is cut into PIECES pieces. Each language writes a piece as one character of its own (of Unicode's private use),
chosen by a permutation: no two languages share a character, and a sentence has one length and one order in all.
No document is told in two languages, but for those that the pairs are cut from; of the pairs, two languages are paired
with the others and never with each other.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, permutations

from data.files import Records
from data.tokenizers import SentencePiece, train_sentencepiece

LANGUAGES = ("en", "x1", "x2", "x3")
NEVER_PAIRED = {"x2", "x3"}
PIECES = 128
PAIRED = 0.3  # of the text is for pairs, the rest for the languages in equal parts
SHORTEST, LONGEST = 3, 8  # pieces of a text in a pair
HELD_OUT = 300  # pairs in valid, and in test: the same ones, in the same order, for every two languages
FIRST = 0xF0000
# How the pieces of English are learned, and the vocabulary: a token a character.
BOTH = dict(character_coverage=1.0, byte_fallback=False)
ENGLISH = BOTH | dict(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True, add_dummy_prefix=True)
ENGLISH |= dict(allow_whitespace_only_pieces=False, user_defined_symbols=[], eos_id=-1)
VOCABULARY = BOTH | dict(model_type="char", hard_vocab_limit=False)
VOCABULARY |= dict(normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False)

Pieces = list[int]
Document = tuple[str, list[Pieces]]  # its split and its sentences


def alphabets() -> dict[str, list[str]]:
    """Language -> the character that stands for each piece."""
    found = {}
    for number, language in enumerate(LANGUAGES):
        first = FIRST + number * PIECES
        found[language] = list(map(chr, range(first, first + PIECES)))
        random.Random(number).shuffle(found[language])
    return found


def written(pieces: Iterable[int], alphabet: list[str]) -> str:
    return "".join(alphabet[piece] for piece in pieces)


def by_language(english: Records) -> dict[str, Records]:
    """Each language's share of the documents (split, text)."""
    documents, _ = in_pieces(english)
    *shares, _ = dealt_out(documents)
    rows = {}
    for share, (language, alphabet) in zip(shares, alphabets().items()):
        rows[language] = [("train", "".join(alphabet))]  # so that rare characters have tokens too
        for split, sentences in share:
            text = written(chain.from_iterable(sentences), alphabet)
            rows[language].append((split, text))
    return rows


def by_pair(english: Records) -> dict[str, Records]:
    """The training pairs are dealt out to every two languages in both orders, the held-out ones given to all."""
    documents, names = in_pieces(english)
    *_, paired = dealt_out(documents)
    rng = random.Random(0)
    found = []
    for split, sentences in paired:
        for sentence in sentences:
            for text in cut(sentence, names, rng):
                found.append((tuple(text), split))
    rng.shuffle(found)
    texts = {"valid": [], "test": [], "train": []}
    for text, split in dict(found).items():  # each once: none of one split is in another
        texts[split].append(text)
    pairs = [pair for pair in permutations(LANGUAGES, 2) if set(pair) != NEVER_PAIRED]
    rows = {}
    for number, pair in enumerate(pairs):
        one, other = (alphabets()[language] for language in pair)
        rows["-".join(pair)] = own = []
        for split in texts:
            chosen = texts[split][:HELD_OUT]
            if split == "train":
                chosen = texts[split][number :: len(pairs)]
            for text in chosen:
                own.append((split, written(text, one), written(text, other)))
    return rows


def backwards(form: Callable) -> Callable:
    """`by_language` or `by_pair`, but with the ciphers written from the end of a text to its beginning.

    Dufter and Schütze (EMNLP 2020) found that an encoder does not become multilingual then: who measures whether one
    is, should see that.
    """

    def rows_of(english: Records) -> dict[str, Records]:
        found = {}
        for name, rows in form(english).items():
            steps = [1 if language == "en" else -1 for language in name.split("-")]
            found[name] = [(split, *(text[::step] for text, step in zip(texts, steps))) for split, *texts in rows]
        return found

    return rows_of


def in_pieces(english: Records) -> tuple[list[Document], list[str]]:
    """The documents in pieces, the longest first, and the names of the pieces."""
    documents = [(split, sentences(text.lower())) for split, text in english]  # so that few pieces hold more
    model = train_pieces(documents)
    documents = [(split, model.encode_batch(own)) for split, own in documents]
    documents.sort(key=size, reverse=True)
    return documents, [model.processor.id_to_piece(piece) for piece in range(PIECES)]


def train_pieces(documents: list[tuple[str, list[str]]]) -> SentencePiece:
    """The PIECES of English, learned from the sentences of train."""
    train = chain.from_iterable(own for split, own in documents if split == "train")
    return train_sentencepiece(train, PIECES, **ENGLISH)


def sentences(text: str) -> list[str]:
    """In ASCII alone, so that few pieces hold more than characters."""
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
    have = {split: [0.0] * len(parts) for split, _ in documents}
    for document in documents:
        own = have[document[0]]
        least = own.index(min(own))
        own[least] += size(document) / parts[least]
        shares[least].append(document)
    return shares


def cut(sentence: Pieces, names: list[str], rng: random.Random) -> Iterator[Pieces]:
    """Texts of SHORTEST to LONGEST pieces by chance, each but the first shortened until the next begins with a word."""
    begin = 0
    while len(sentence) - begin >= SHORTEST:
        end = begin + rng.randint(SHORTEST, LONGEST)
        end = min(end, len(sentence))
        while begin + SHORTEST < end < len(sentence):
            name = names[sentence[end]]
            if name.startswith("\u2581"):
                break
            end -= 1
        yield sentence[begin:end]
        begin = end
