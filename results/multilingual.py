"""Makes the text and the translation pairs of the presets `multilingual`: four languages, real text.

    python -m results.multilingual DOWNLOADS TESTED --out data/prepared

DOWNLOADS holds, each as its authors give it, plain, .gz or .xz: `ntrex` (NTREX-128, with DOCUMENT_IDS.tsv), `udhr`
(udhr.jsonl: lang, text), `multi30k`, `tatoeba-en-de`, `tatoeba-en-zh` (train and valid pairs) and `enwiki-2021`
(train.txt and valid.txt); Django's messages are added. A document, or its translation, is in one split alone. What
holds a sentence of a set that is scored is left out, on either side of a pair: of XTREME's tasks in the folder TESTED,
and of `tatoeba`, `wordalign` and multi30k's tests in DOWNLOADS. Exact matches, after NFKC.

-> multilingual, multilingual-pairs: prepared with one vocabulary of 16,384 pieces, learned from the training text.
A hundred languages can be had, but an encoder of the demos' size learns little of each.
"""

import itertools
import json
import re
import shutil
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import tyro

from data import bitext_sets, corpora, xtreme
from data.files import one_of, read_documents, read_lines, read_pairs, split_of
from data.prepare import prepare
from data.tokenizers import XLMR, train_sentencepiece

NTREX = """arb:ar ben:bn bul:bg ces:cs deu:de est:et fas:fa fin:fi fra:fr heb:he hin:hi hun:hu ind:id ita:it jpn:ja
    lav:lv lit:lt nld:nl pol:pl por:pt ron:ro rus:ru spa:es swa:sw swe:sv tam:ta tha:th ukr:uk urd:ur vie:vi
    zho-CN:zh_Hans"""
NTREX = dict(pair.split(":") for pair in NTREX.split())
LANGUAGES = "en,de,fr,zh_Hans"  # those with 20,000 pairs or more
WORDS_OF_WIKIPEDIA = 2_000_000  # at most, or English would be most of the text
CHARACTERS = 500_000  # of a language, at most, for the vocabulary


class Text(NamedTuple):
    """A document in one language, or a sentence with its translation in English."""

    source: str
    split: str
    language: str
    texts: tuple[str, ...]


def normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())


def sentences(text: str) -> Iterator[str]:
    """A text's sentences, and itself."""
    yield normal(text)
    for sentence in re.split(r"(?<=[.!?])\s+|(?<=[。！？।])|\n", text):
        yield normal(sentence)


def scored(downloads: Path, tested: Path) -> set[str]:
    """Every sentence on which a number is reported."""
    found = set()
    for name, task in xtreme.TASKS.items():
        if name == "apps":
            continue
        for examples in xtreme.read_examples(name, str(tested), None, None, None).test.values():
            for example in examples:
                texts = example.texts
                if task.kind == "tags":
                    texts = " ".join(texts), "".join(texts)  # of scripts without spaces
                for text in texts:
                    found.update(sentences(text))
    pairs = [pair for own in bitext_sets.tatoeba(downloads / "tatoeba").values() for pair in own]
    aligned, _ = bitext_sets.word_alignments(downloads / "wordalign")
    for own in aligned.values():
        pairs += [(" ".join(sentence), "".join(sentence)) for two in own for sentence in (two.one, two.two)]
    for path in sorted((downloads / "multi30k").glob("test*")):
        pairs += [(line,) for line in read_lines(path)]
    for pair in pairs:
        for text in pair:
            found.update(sentences(text))
    return found - {""}


def read(downloads: Path) -> Iterator[Text]:
    """Everything, with every document or pair in one split."""
    messages = corpora.catalogs()
    for groups in (messages, corpora.catalogs_pairs()):
        for language, rows in groups.items():
            for split, *texts in rows:
                yield Text("Django", split, language, tuple(texts))
    yield from ntrex(downloads / "ntrex")
    known = {*messages, *NTREX.values()}
    for line in read_lines(one_of(downloads / "udhr", "udhr.jsonl")):
        row = json.loads(line)
        language = {"zh-Hans": "zh_Hans", "zh-Hant": "zh_Hant"}.get(row["lang"], row["lang"])
        if language in known:
            yield Text("UDHR", "train", language, (row["text"],))
    for name, folder, languages in (
        ("Multi30k", "multi30k", ("de", "fr", "cs")),
        ("Tatoeba", "tatoeba-en-de", ("de",)),
        ("Tatoeba", "tatoeba-en-zh", ("zh",)),
    ):
        for language in languages:
            yield from bitext(name, downloads / folder, language)
    for split in ("train", "valid"):
        words = 0
        for article in read_documents(one_of(downloads / "enwiki-2021", f"{split}.txt")):
            words += len(article.split())
            if words > WORDS_OF_WIKIPEDIA:
                break
            yield Text("Wikipedia", split, "en", (article,))


def ntrex(folder: Path) -> Iterator[Text]:
    """A news article in 32 languages, whole, and its sentences beside their English."""
    articles = [line.strip() for line in read_lines(folder / "DOCUMENT_IDS.tsv")]
    english = [line.strip() for line in read_lines(one_of(folder, "newstest2019-src.eng.txt"))]
    columns = {"en": english}
    for name, language in NTREX.items():
        columns[language] = [line.strip() for line in read_lines(one_of(folder, f"newstest2019-ref.{name}.txt"))]
    for language, column in columns.items():
        whole = defaultdict(list)
        for article, text, source in zip(articles, column, english, strict=True):
            whole[article].append(text)
            if language != "en":
                yield Text("NTREX", split_of(article, 0.03, 0.03), f"{language}-en", (text, source))
        for article, lines in whole.items():
            yield Text("NTREX", split_of(article, 0.03, 0.03), language, ("\n".join(lines),))


def bitext(name: str, folder: Path, language: str) -> Iterator[Text]:
    """Pairs, and what stands on either side of them, once."""
    ours = {"zh": "zh_Hans"}.get(language, language)
    for split, files in (("train", ("train",)), ("valid", ("valid", "val"))):
        paths = [one_of(folder, *(f"{file}.{side}" for file in files)) for side in (language, "en")]
        texts = {ours: {}, "en": {}}
        for pair in read_pairs(*paths):
            yield Text(name, split, f"{ours}-en", pair)
            for side, text in zip(texts, pair):
                texts[side][text] = None
        for side, own in texts.items():
            for text in sorted(own, key=corpora.scattered):
                yield Text(name, split, side, (text,))


def select(texts: Iterable[Text], banned: set[str]) -> list[Text]:
    """Every text once, without those with a sentence that is scored, or that is held out as well."""
    kept, held_out, dropped = [], set(), Counter()
    for text in dict.fromkeys(texts):
        if any(sentence in banned for one in text.texts for sentence in sentences(one)):
            dropped[text.source, "with a sentence that is scored"] += 1
            continue
        kept.append(text)
        if text.split != "train":
            held_out.update(map(normal, text.texts))
    found = []
    for text in kept:
        if text.split == "train" and not held_out.isdisjoint(map(normal, text.texts)):
            dropped[text.source, "that is held out, too"] += 1
        else:
            found.append(text)
    for (source, why), count in sorted(dropped.items()):
        print(f"{source}: {count:,} texts or pairs left out, {why}")
    return found


def write(folder: Path, groups: dict[tuple[str, str], list]):
    """Files that data.prepare reads: text/de.train.jsonl, pairs/de-en.train.de and so on."""
    for (language, split), rows in groups.items():
        if "-" in language:
            for side, column in zip(language.split("-"), zip(*rows)):
                lines = [" ".join(text.split()) + "\n" for text in column]
                (folder / "pairs" / f"{language}.{split}.{side}").write_text("".join(lines))
        else:
            lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for (text,) in rows]
            (folder / "text" / f"{language}.{split}.jsonl").write_text("".join(lines))


def sample(groups: dict[tuple[str, str], list]) -> Iterator[str]:
    """Training text for the vocabulary, a little of each language."""
    for (language, split), rows in groups.items():
        if split == "train" and "-" not in language:
            ends = itertools.accumulate(len(text) for (text,) in rows)
            for (text,), end in zip(rows, ends):
                if end > CHARACTERS:
                    break
                yield text


def main(
    downloads: tyro.conf.Positional[Path],
    tested: tyro.conf.Positional[Path],
    out: Path = Path("data/prepared"),
    languages: str = LANGUAGES,
    pieces: int = 16_384,
):
    """See the head of this file."""
    banned = scored(downloads, tested)
    print(f"{len(banned):,} sentences are scored")
    groups = defaultdict(list)  # (language or pair, split) -> texts
    wanted = {*languages.split(",")}
    for text in select((text for text in read(downloads) if {*text.language.split("-")} <= wanted), banned):
        groups[text.language, text.split].append(text.texts)
    folder = out / "multilingual.source"
    shutil.rmtree(folder, ignore_errors=True)  # what a killed call left
    for kind in ("text", "pairs"):
        (folder / kind).mkdir(parents=True)
    write(folder, groups)
    tokenizer = train_sentencepiece(sample(groups), pieces, XLMR).save(folder)
    prepare("cc100", folder / "text", tokenizer, out=out / "multilingual")
    prepare("bitext", folder / "pairs", tokenizer, out=out / "multilingual-pairs")


if __name__ == "__main__":
    tyro.cli(main)
