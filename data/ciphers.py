"""A text in languages that differ in nothing but their words: English, and ciphers of it.

English is cut into PIECES pieces. Each language writes a piece as one character of its own (of Unicode's private use),
chosen by a permutation: no two languages share a character, and a sentence has one length and one order in all.
No document is told in two languages, but for those that the pairs are cut from; of the pairs, two languages are paired
with the others and never with each other.
"""

import io
import random
import re
from collections.abc import Iterable, Iterator
from itertools import chain

import sentencepiece

LANGUAGES = ("en", "x1", "x2", "x3")
NEVER_PAIRED = {"x2", "x3"}
PIECES = 256
PAIRED = 0.3  # of the text is for pairs, the rest for the languages in equal parts
SHORTEST, LONGEST = 3, 8  # pieces of a text in a pair
HELD_OUT = 300  # pairs in valid, and in test: the same ones, in the same order, for every two languages
FIRST = 0xF0000
VOCABULARY = dict(model_type="char", character_coverage=1.0, byte_fallback=False, hard_vocab_limit=False)
VOCABULARY |= dict(normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False)

Rows = Iterable[tuple[str, ...]]  # as in data.corpora
Pieces = list[int]


def alphabets() -> dict[str, list[str]]:
    """Language -> the character that stands for each piece."""
    found = {}
    for number, language in enumerate(LANGUAGES):
        found[language] = [chr(FIRST + number * PIECES + piece) for piece in range(PIECES)]
        random.Random(number).shuffle(found[language])
    return found


def written(pieces: Iterable[int], alphabet: list[str]) -> str:
    return "".join(alphabet[piece] for piece in pieces)


def by_language(english: Rows) -> dict[str, Rows]:
    """Each language's share of the documents (split, text) behind its alphabet: rare characters have tokens too."""
    shares, _ = dealt_out(english)
    rows = {}
    for (language, alphabet), documents in zip(alphabets().items(), shares):
        texts = [(split, written(chain.from_iterable(sentences), alphabet)) for split, sentences in documents]
        rows[language] = [("train", "".join(alphabet)), *texts]
    return rows


def by_pair(english: Rows) -> dict[str, Rows]:
    """The training pairs are dealt out to every two languages in both orders, the held-out ones given to all."""
    (*_, documents), names = dealt_out(english)
    cuts = random.Random(0)
    texts = []  # (split, pieces)
    for split, sentences in documents:
        for sentence in sentences:
            texts += [(split, text) for text in cut(sentence, names, cuts)]
    cuts.shuffle(texts)
    texts = {tuple(text): split for split, text in texts}  # each once: none of one split is in another
    held_out = {split: [text for text in texts if texts[text] == split][:HELD_OUT] for split in ("valid", "test")}
    train = [text for text in texts if texts[text] == "train"]
    pairs = [(a, b) for a in LANGUAGES for b in LANGUAGES if a != b and {a, b} != NEVER_PAIRED]
    rows = {}
    for number, pair in enumerate(pairs):
        one, other = (alphabets()[language] for language in pair)
        own = held_out | {"train": train[number :: len(pairs)]}
        told = [(split, written(text, one), written(text, other)) for split in own for text in own[split]]
        rows["-".join(pair)] = told
    return rows


def dealt_out(english: Rows) -> tuple[list[list[tuple[str, list[Pieces]]]], list[str]]:
    """The documents (split, pieces of each sentence) for each language and, last, for pairs; and the pieces' names.

    In each split the longest document that is left goes to whom most of its share is missing.
    """
    documents = [(split, sentences(text)) for split, text in english]
    names, encode = learn(text for split, own in documents if split == "train" for text in own)
    documents = [(split, encode(own)) for split, own in documents]
    documents.sort(key=lambda document: sum(map(len, document[1])), reverse=True)
    parts = [(1 - PAIRED) / len(LANGUAGES)] * len(LANGUAGES) + [PAIRED]
    shares = [[] for _ in parts]
    have = {split: [0.0] * len(parts) for split, _ in documents}
    for split, own in documents:
        least = min(range(len(parts)), key=have[split].__getitem__)
        have[split][least] += sum(map(len, own)) / parts[least]
        shares[least].append((split, own))
    return shares, names


def sentences(text: str) -> list[str]:
    """In ASCII alone, so that 256 pieces hold more than characters."""
    text = " ".join(text.encode("ascii", "ignore").decode().split())
    return re.split(r"(?<=[.!?:;]) ", text)


def learn(texts: Iterable[str]):
    """The names of the pieces of a BPE, and its function from texts to pieces."""
    file = io.BytesIO()
    options = dict(model_type="bpe", vocab_size=PIECES, character_coverage=1.0, bos_id=-1, eos_id=-1, unk_id=0)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=file, num_threads=2, minloglevel=2, **options
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    return [model.id_to_piece(piece) for piece in range(PIECES)], model.encode


def cut(sentence: Pieces, names: list[str], lengths: random.Random) -> Iterator[Pieces]:
    """Texts of SHORTEST to LONGEST pieces by chance, each but the first shortened until the next begins with a word."""
    begin = 0
    while len(sentence) - begin >= SHORTEST:
        end = min(begin + lengths.randint(SHORTEST, LONGEST), len(sentence))
        while end < len(sentence) and end - begin > SHORTEST and not names[sentence[end]].startswith("\u2581"):
            end -= 1
        yield sentence[begin:end]
        begin = end
