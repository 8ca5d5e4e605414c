"""Makes the text and the pairs of the presets `multilingual`: python -m data.multilingual DOWNLOADS TESTED

DOWNLOADS holds, each as its authors give it, plain, .gz or .xz: `ntrex` (NTREX-128, with DOCUMENT_IDS.tsv), `udhr`
(udhr.jsonl: lang, text), `multi30k`, `tatoeba-en-de`, `tatoeba-en-zh` (train and valid pairs) and `enwiki-2021`
(train.txt and valid.txt). Django's messages are added. A document and its translations are in one split. What holds a
sentence of a set that is scored is left out: of XTREME's tasks in the folder TESTED, and of `tatoeba`, `wordalign` and
multi30k's tests in DOWNLOADS. Only exact matches are found, after NFKC.

The result is data/prepared/multilingual and data/prepared/multilingual-pairs, under one vocabulary.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import tyro
from tyro.conf import Positional

from data import bitext_sets, corpora, xtreme
from data.corpora import Groups
from data.files import PREPARED, json_object, one_of, read_documents, read_lines, read_sides, split_of
from data.messages import scattered
from data.prepare import errors_in_a_line, new_folder, write_corpus
from data.tokenizers import XLMR, train_sentencepiece

LANGUAGES = {"en", "de", "fr", "zh_Hans"}  # those with 20,000 pairs or more, by Django's names
NTREX = {"en": "src.eng", "de": "ref.deu", "fr": "ref.fra", "zh_Hans": "ref.zho-CN"}  # language -> its name of the file
BITEXT = [  # source, folder, language beside English, and the ending of its files
    ("Multi30k", "multi30k", "de", "de"),
    ("Multi30k", "multi30k", "fr", "fr"),
    ("Tatoeba", "tatoeba-en-de", "de", "de"),
    ("Tatoeba", "tatoeba-en-zh", "zh_Hans", "zh"),
]
PIECES = 16_384  # of the vocabulary
WORDS_OF_WIKIPEDIA = 2_000_000  # at most, or English would be most of the text
CHARACTERS = 500_000  # of a language, at most, for the vocabulary


class Text(NamedTuple):
    """A document in one language, or a sentence with its translation in English."""

    source: str
    split: str
    language: str  # de, or de-en
    texts: tuple[str, ...]


def main(downloads: Positional[Path], tested: Positional[Path], out: Path = PREPARED, pieces: int = PIECES):
    scored = set(chain.from_iterable(map(sentences, scored_texts(downloads, tested))))
    rows = defaultdict(list)  # language or pair -> (split, *texts)
    for text in select(read(downloads), scored - {""}):
        texts = text.texts
        if len(texts) > 1:  # a pair is two lines
            texts = [" ".join(one.split()) for one in texts]
        rows[text.language].append((text.split, *texts))
    pairs = {name: rows.pop(name) for name in sorted(rows) if "-" in name}
    tokenizer = train_sentencepiece(sample(rows), pieces, XLMR)
    texts = dict(sorted(rows.items()))
    meta = {"source": str(downloads), "versions": {}}
    with new_folder(out / "multilingual") as folder:
        write_corpus(folder, meta | {"name": "multilingual", "kind": "languages"}, texts, tokenizer)
    with new_folder(out / "multilingual-pairs") as folder:
        write_corpus(folder, meta | {"name": "multilingual-pairs", "kind": "pairs"}, pairs, tokenizer)


def sample(groups: Groups) -> Iterator[str]:
    """Training text for the vocabulary, a little of each language."""
    for rows in groups.values():
        characters = 0
        for split, text in rows:
            if split == "train":
                characters += len(text)
                if characters <= CHARACTERS:
                    yield text


def sentences(text: str) -> Iterator[str]:
    yield normal(text)
    for sentence in re.split(r"(?<=[.!?])\s+|(?<=[。！？।])|\n", text):
        yield normal(sentence)


def normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())


def scored_texts(downloads: Path, tested: Path) -> Iterator[str]:
    """Every text on which a number is reported."""
    for name, task in xtreme.TASKS.items():
        if name == "apps":
            continue
        tests = xtreme.read_examples(name, str(tested)).test
        for example in chain.from_iterable(tests.values()):
            yield from joined(example.texts) if task.kind == "tags" else example.texts
    for pairs in bitext_sets.tatoeba(downloads / "tatoeba").values():
        yield from chain.from_iterable(pairs)
    aligned = bitext_sets.word_alignments(downloads / "wordalign")
    for pair in chain.from_iterable(aligned.values()):
        yield from joined(pair.one)
        yield from joined(pair.two)
    for path in sorted((downloads / "multi30k").glob("test*")):
        yield from read_lines(path)


def joined(words: Iterable[str]) -> tuple[str, str]:
    """A sentence from its words: some scripts are written without spaces."""
    return " ".join(words), "".join(words)


def read(downloads: Path) -> Iterator[Text]:
    """Everything, with every document or pair in one split."""
    django = corpora.read("catalogs") | corpora.read("catalogs-pairs")
    for language, rows in django.items():
        if LANGUAGES.issuperset(language.split("-")):
            for split, *texts in rows:
                yield Text("Django", split, language, tuple(texts))
    yield from ntrex(downloads / "ntrex")
    udhr = one_of(downloads / "udhr", "udhr.jsonl")
    for number, line in enumerate(read_lines(udhr), start=1):
        declaration = json_object(line)
        language, text = declaration.get("lang"), declaration.get("text")
        if not isinstance(language, str) or not isinstance(text, str):
            raise ValueError(f"{udhr}, line {number}: no JSON object with the strings 'lang' and 'text'")
        language = language.replace("-", "_")
        if language in LANGUAGES:
            yield Text("UDHR", "train", language, (text,))
    for source, folder, language, ending in BITEXT:
        yield from bitext(source, downloads / folder, language, ending)
    for split in ("train", "valid"):
        words = 0
        for article in read_documents(one_of(downloads / "enwiki-2021", f"{split}.txt"), blocks=True):
            words += len(article.split())
            if words > WORDS_OF_WIKIPEDIA:
                break
            yield Text("Wikipedia", split, "en", (article,))


def ntrex(folder: Path) -> Iterator[Text]:
    """News articles, whole, and their sentences beside their English."""

    def column(name: str) -> list[str]:
        lines = read_lines(one_of(folder, name))
        return list(map(str.strip, lines))

    articles = column("DOCUMENT_IDS.tsv")
    splits = {article: split_of(article, valid=0.03, test=0.03) for article in articles}
    columns = {language: column(f"newstest2019-{name}.txt") for language, name in NTREX.items()}
    for language, lines in columns.items():
        whole = defaultdict(list)  # article -> its sentences
        rows = zip(articles, lines, columns["en"], strict=True)
        for article, text, english in rows:
            whole[article].append(text)
            if language != "en":
                yield Text("NTREX", splits[article], f"{language}-en", (text, english))
        for article, own in whole.items():
            yield Text("NTREX", splits[article], language, ("\n".join(own),))


def bitext(source: str, folder: Path, language: str, ending: str) -> Iterator[Text]:
    """Pairs, and each text on either side of them once."""
    for split, *names in (("train", "train"), ("valid", "valid", "val")):
        pairs = list(read_sides(folder, (ending, "en"), *names))
        for pair in pairs:
            yield Text(source, split, f"{language}-en", pair)
        for side, texts in zip((language, "en"), zip(*pairs)):
            for text in sorted(set(texts), key=scattered):
                yield Text(source, split, side, (text,))


def select(texts: Iterable[Text], scored: set[str]) -> Iterator[Text]:
    """Every text of a source once, but none with a sentence that is scored, and in training none that is held out."""
    kept, held_out = [], set()
    every = list(dict.fromkeys(texts))
    for text in every:
        if all(scored.isdisjoint(sentences(one)) for one in text.texts):
            kept.append(text)
            if text.split != "train":
                held_out.update(map(normal, text.texts))
    print(f"left out: {len(every) - len(kept):,} texts or pairs with a sentence that is scored")
    for text in kept:
        if text.split != "train" or held_out.isdisjoint(map(normal, text.texts)):
            yield text


if __name__ == "__main__":
    with errors_in_a_line():
        tyro.cli(main, prog="python -m data.multilingual", description=__doc__)
