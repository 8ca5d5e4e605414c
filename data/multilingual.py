"""Makes the text and the pairs of the presets `multilingual`: python -m data.multilingual DOWNLOADS TESTED

DOWNLOADS holds, each as its authors give it, plain, .gz or .xz: `ntrex` (NTREX-128, with DOCUMENT_IDS.tsv), `udhr`
(udhr.jsonl: lang, text), `multi30k`, `tatoeba-en-de`, `tatoeba-en-zh` (train and valid pairs) and `enwiki-2021`
(train.txt and valid.txt). Django's messages are added. A document and its translations are in one split. What holds a
sentence of a set that is scored is left out: of XTREME's tasks in the folder TESTED, and of `tatoeba`, `wordalign` and
multi30k's tests in DOWNLOADS. Only exact matches are found, after NFKC.

The result is data/prepared/multilingual and data/prepared/multilingual-pairs, under one vocabulary.
"""

import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import tyro
from tyro.conf import Positional

from data import bitext_sets, corpora, messages, xtreme
from data.files import one_of, read_documents, read_lines, read_pairs, split_of
from data.prepare import PREPARED, clear_errors, prepare
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
    scored = set()
    for text in scored_texts(downloads, tested):
        scored.update(sentences(text))
    groups = defaultdict(list)  # (language or pair, split) -> texts
    for text in select(read(downloads), scored - {""}):
        groups[text.language, text.split].append(text.texts)
    with TemporaryDirectory() as folder:
        folder = Path(folder)
        write(folder, groups)
        tokenizer = train_sentencepiece(sample(groups), pieces, XLMR).save(folder)
        prepare("cc100", folder / "text", tokenizer, out=out / "multilingual")
        prepare("bitext", folder / "pairs", tokenizer, out=out / "multilingual-pairs")


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
    aligned, _ = bitext_sets.word_alignments(downloads / "wordalign")
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
    for language, rows in (corpora.catalogs() | corpora.catalogs_pairs()).items():
        if LANGUAGES.issuperset(language.split("-")):
            for split, *texts in rows:
                yield Text("Django", split, language, tuple(texts))
    yield from ntrex(downloads / "ntrex")
    for line in read_lines(one_of(downloads / "udhr", "udhr.jsonl")):
        declaration = json.loads(line)
        language = declaration["lang"].replace("-", "_")
        if language in LANGUAGES:
            yield Text("UDHR", "train", language, (declaration["text"],))
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
        for article, text, english in zip(articles, lines, columns["en"], strict=True):
            whole[article].append(text)
            if language != "en":
                yield Text("NTREX", splits[article], f"{language}-en", (text, english))
        for article, own in whole.items():
            yield Text("NTREX", splits[article], language, ("\n".join(own),))


def bitext(source: str, folder: Path, language: str, ending: str) -> Iterator[Text]:
    """Pairs, and each text on either side of them once."""
    for split, other in (("train", "train"), ("valid", "val")):
        paths = [one_of(folder, f"{split}.{side}", f"{other}.{side}") for side in (ending, "en")]
        pairs = list(read_pairs(*paths))
        for pair in pairs:
            yield Text(source, split, f"{language}-en", pair)
        for side, texts in zip((language, "en"), zip(*pairs)):
            for text in sorted(set(texts), key=messages.scattered):
                yield Text(source, split, side, (text,))


def select(texts: Iterable[Text], scored: set[str]) -> Iterator[Text]:
    """Every text once, without those with a sentence that is scored, and training texts that are held out as well."""
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


def write(folder: Path, groups: dict[tuple[str, str], list]):
    """Files that data.prepare reads: text/de.train.jsonl, pairs/de-en.train.tsv and so on."""
    (folder / "text").mkdir()
    (folder / "pairs").mkdir()
    for (language, split), rows in groups.items():
        if "-" in language:
            path = folder / "pairs" / f"{language}.{split}.tsv"
            lines = [f"{' '.join(one.split())}\t{' '.join(two.split())}" for one, two in rows]
        else:
            path = folder / "text" / f"{language}.{split}.jsonl"
            lines = [json.dumps({"text": text}, ensure_ascii=False) for (text,) in rows]
        path.write_text("".join(f"{line}\n" for line in lines))


def sample(groups: dict[tuple[str, str], list]) -> Iterator[str]:
    """Training text for the vocabulary, a little of each language."""
    for (language, split), rows in groups.items():
        if split != "train" or "-" in language:
            continue
        characters = 0
        for (text,) in rows:
            characters += len(text)
            if characters <= CHARACTERS:
                yield text


if __name__ == "__main__":
    with clear_errors():
        tyro.cli(main, prog="python -m data.multilingual", description=__doc__)
