"""The corpora that `python -m data.prepare` knows: where their texts come from, and which text is in which split.

    text        rows (split, text), a document each
    languages   {language: rows (split, text)}
    pairs       {"de-en": rows (split, German text, English text)}

Rows are lists, or iterators that end after one pass. Held-out rows come first where a corpus has its own splits: a
limit can then end the reading.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from data import ciphers, files, messages
from data.english import pydocs
from data.files import Records, one_of, read_documents, read_lines, read_pairs, read_sides, split_of

Texts = Iterable[tuple[str, ...]]  # rows without the split
Groups = dict[str | None, Records]  # language or pair -> its rows; the one key of a corpus in one language is None
HELD_OUT = 100_000  # bytes for valid, and for test, but from 1% to 10% of a text
HUB_SPLITS = {"valid": "validation", "test": "test", "train": "train"}  # our names -> the Hugging Face hub's


class Corpus(NamedTuple):
    kind: str  # text, languages or pairs
    local: Callable | None = None  # reads a file or folder of the user's, given with --source
    read: Callable | None = None  # reads the network or installed packages; None: --source is needed
    form: Callable | None = None  # makes languages or pairs of what was read; None: it is rows
    packages: tuple[str, ...] = ()  # the installed packages that it is read from
    vocabulary: str | None = None  # learned from the training text of this corpus; "gpt2": GPT-2's; None: the user's
    learn_from: int | None = None  # as many of its documents; None: all
    learning: dict = {}  # how that vocabulary is learned, where not as others are
    pieces: int | None = None  # of a BPE; None: as many as fit the texts


def read(name: str, source: Path | None = None) -> Groups:
    """The rows of a corpus, from the files of the user where they are given."""
    corpus = CORPORA[name]
    rows = corpus.local(source) if source else corpus.read()
    if corpus.form:
        rows = corpus.form(rows)
    return {None: rows} if corpus.kind == "text" else rows


# ---------------------------------------------------------------------------------------------------------------------
# Splits


def hashed(texts: Texts, valid: float, test: float) -> Records:
    """A hash of the (second) text sends these shares of the texts to valid and to test."""
    for row in texts:
        yield split_of(row[-1], valid, test), *row


def labelled(splits: dict[str, Texts]) -> Records:
    """The texts of each split, held-out ones first."""
    for split, texts in splits.items():
        for row in texts:
            yield split, *row


def split_by_name(source: Path, contents: dict[Path, Texts], share: float = 0.01) -> Records:
    """The texts of files whose names say train, valid or test. Where none says train, those that say nothing are it.

    A hash splits off this share of the training texts for valid, and for test, where no name says it.
    """
    named = defaultdict(dict)  # split -> file -> its texts
    for path, texts in contents.items():
        named[files.named_split(path.relative_to(source))][path] = texts
    unnamed = named.pop(None, {})
    if "train" in named:
        files.say_unread(source, "their names say no split, and others' do", *[path.name for path in unnamed])
    train = chain.from_iterable(named.pop("train", unnamed).values())
    held_out = {split: chain.from_iterable(named[split].values()) for split in ("valid", "test") if split in named}
    shares = [0.0 if split in named else share for split in ("valid", "test")]
    return chain(labelled(held_out), hashed(train, *shares))


# ---------------------------------------------------------------------------------------------------------------------
# The user's files


def text(source: Path) -> Records:
    """`read_documents` says what a document is. Of a small text more is held out, about HELD_OUT bytes."""
    contents = {path: zip(read_documents(path)) for path in files.text_files(source)}
    size = sum(path.stat().st_size for path in contents)
    return split_by_name(source, contents, share=max(0.01, min(0.1, HELD_OUT / max(1, size))))


def language_files(source: Path) -> Groups:
    """LANGUAGE.txt, .jsonl or .parquet; a name may say more, as in sw.part1.txt.xz or C4's c4-sw.*."""
    contents = defaultdict(dict)  # language -> file -> its texts
    for path in files.text_files(source, ".txt", ".parquet", *files.JSON):
        language = path.name.removeprefix("c4-").split(".")[0]
        contents[language][path] = zip(read_documents(path))
    return groups_of(source, contents, "no LANGUAGE.txt, .jsonl or .parquet (or these as .gz, .xz)")


def bitext(source: Path) -> Groups:
    """de-en.de beside de-en.en, with a language each and lines that are aligned, or de-en.tsv with both.

    A name may say more between the pair and the ending, as in de-en.train.de.gz beside de-en.train.en.
    """
    contents = defaultdict(dict)  # pair -> file -> its pairs of texts
    seconds, every = set(), files.source_files(source)
    for path in every:
        stem, _, ending = files.uncompressed_name(path).rpartition(".")
        pair = stem.split(".")[0]
        if ending == "tsv" and "-" in pair:
            contents[pair][path] = read_pairs(path)
        elif pair.startswith(f"{ending}-"):  # the first side
            second = one_of(path.parent, f"{stem}.{pair.removeprefix(f'{ending}-')}")
            contents[pair][path] = read_pairs(path, second)
            seconds.add(second)
    known = seconds.union(*contents.values())
    others = [path.name for path in every if path not in known]
    files.say_unread(source, "they are no two sides of a pair, nor a table of one", *others)
    return groups_of(source, contents, "no file such as de-en.de, beside de-en.en, or de-en.tsv (plain, .gz or .xz)")


def groups_of(source: Path, contents: dict[str, dict[Path, Texts]], nothing: str) -> Groups:
    """The rows of each language or pair from its files; FileNotFoundError that says `nothing` where there are none."""
    if not contents:
        raise FileNotFoundError(f"--source {source} holds {nothing}")
    return {name: split_by_name(source, own) for name, own in contents.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The Hugging Face hub


@contextmanager
def network(what: str):
    """Whatever goes wrong with a download becomes an OSError of one line."""
    try:
        yield
    except Exception as error:  # datasets raises a dozen kinds of errors
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        needs = "it takes pip install datasets and the network, or a local copy, given with --source"
        raise OSError(f"cannot read {what} ({reason}); {needs}") from error


def hub_rows(name: str, split: str, *columns: str, **options) -> Texts:
    """These columns of `repository` or `repository configuration`, streamed. A missing value is an empty text."""
    with network(options.get("data_files", name)):
        from datasets import load_dataset

        for row in load_dataset(*name.split(), split=split, streaming=True, **options):
            texts = row.get("translation", row)
            yield tuple(texts[column] or "" for column in columns)


def hub_pairs(name: str, *columns: str) -> Records:
    """In those of its splits that the data set has."""
    with network(name):
        from datasets import get_dataset_split_names

        there = get_dataset_split_names(*name.split())
    for split, theirs in HUB_SPLITS.items():
        if theirs in there:
            yield from labelled({split: hub_rows(name, theirs, *columns)})


# ---------------------------------------------------------------------------------------------------------------------
# Corpora as they are published


def wikitext103(source: Path | None = None) -> Records:
    """Documents are articles, in the corpus's own splits."""
    splits = {}
    for split, theirs in HUB_SPLITS.items():
        if source:
            lines = read_lines(one_of(source, f"wiki.{split}.raw", f"wiki.{split}.tokens"))
        else:
            rows = hub_rows("Salesforce/wikitext wikitext-103-raw-v1", theirs, "text")
            lines = (line or " \n" for (line,) in rows)  # the hub has emptied the blank lines
        splits[split] = zip(articles(lines))
    return labelled(splits)


def articles(lines: Iterable[str]) -> Iterator[str]:
    """The lines from one top-level heading, ` = Title = ` after a blank line, to the next."""
    article = ""
    after_blank = True
    for line in lines:
        is_heading = after_blank and re.fullmatch(r" = .*(?<! =) = \n?", line)
        if is_heading and article.strip():
            yield article
            article = ""
        article += line
        after_blank = not line.strip()
    if article.strip():
        yield article


def openwebtext() -> Records:
    """Web pages; a hash of the text sends 0.05% to valid and 0.05% to test."""
    return hashed(hub_rows("Skylion007/openwebtext", "train", "text"), 0.0005, 0.0005)


def enwiki(source: Path) -> Records:
    """Articles of train.txt and valid.txt with a blank line between two; every second one of valid.txt is for test."""
    held_out = list(zip(read_documents(one_of(source, "valid.txt"), blocks=True)))
    train = zip(read_documents(one_of(source, "train.txt"), blocks=True))
    return labelled({"valid": held_out[::2], "test": held_out[1::2], "train": train})


CC100 = """
    af am ar as az be bg bn bn_rom br bs ca cs cy da de el en eo es et eu fa fi fr fy ga gd gl gu ha he hi hi_rom hr hu
    hy id is it ja jv ka kk km kn ko ku ky la lo lt lv mg mk ml mn mr ms my my_zaw ne nl no om or pa pl ps pt ro ru sa
    sd si sk sl so sq sr su sv sw ta ta_rom te te_rom th tl tr ug uk ur ur_rom uz vi xh yi zh-Hans zh-Hant
""".split()  # XLM-R's languages, by CC-100's names


def cc100() -> Groups:
    """Documents are the blocks between blank lines; a hash of the text sends 1% to valid and 1% to test."""
    rows = {}
    for language in CC100:
        url = f"https://data.statmt.org/cc-100/{language}.txt.xz"
        blocks = hub_rows("text", "train", "text", data_files=url, sample_by="paragraph")
        rows[language] = hashed(((block.strip(),) for (block,) in blocks), 0.01, 0.01)
    return rows


def opus100() -> Groups:
    """Sentences of English and of each of 99 languages."""
    repository = "Helsinki-NLP/opus-100"
    with network(repository):
        from datasets import get_dataset_config_names

        names = get_dataset_config_names(repository)
    with_english = [name for name in names if "en" in name.split("-")]  # others have nothing but a test set
    return {name: hub_pairs(f"{repository} {name}", *name.split("-")) for name in with_english}


def multi30k(source: Path | None = None) -> Groups:
    """Task 1, raw: captions in German and their English, tested on Flickr's pictures of 2016."""
    if source is None:
        return {"de-en": hub_pairs("bentrevett/multi30k", "de", "en")}
    names = {"valid": "val", "test": "test_2016_flickr", "train": "train"}
    splits = {split: read_sides(source, ("de", "en"), name) for split, name in names.items()}
    return {"de-en": labelled(splits)}


# ---------------------------------------------------------------------------------------------------------------------

PYDOCS = dict(read=pydocs, packages=("numpy", "torch"))
CIPHERS = PYDOCS | dict(vocabulary="ciphers", learning=ciphers.VOCABULARY)
CIPHERS_MT = PYDOCS | dict(vocabulary="ciphers-mt", learning=ciphers.HARDER_VOCABULARY)
CORPORA = {
    "pydocs": Corpus("text", **PYDOCS, vocabulary="pydocs"),
    "wikitext103": Corpus("text", wikitext103, wikitext103, vocabulary="gpt2"),
    "openwebtext": Corpus("text", text, openwebtext, vocabulary="gpt2"),
    "enwiki": Corpus("text", enwiki, vocabulary="enwiki", learn_from=4000),
    "text": Corpus("text", text),
    "messages": Corpus("languages", messages.by_language, vocabulary="messages"),
    "ciphers": Corpus("languages", form=ciphers.by_language, **CIPHERS),
    "ciphers-backwards": Corpus("languages", form=partial(ciphers.by_language, backwards=True), **CIPHERS),
    "cc100": Corpus("languages", language_files, cc100),
    "ciphers-pairs": Corpus("pairs", form=ciphers.by_pair, **CIPHERS),
    "ciphers-backwards-pairs": Corpus("pairs", form=partial(ciphers.by_pair, backwards=True), **CIPHERS),
    "ciphers-mt": Corpus("pairs", form=ciphers.to_english, **CIPHERS_MT),
    "multi30k-de": Corpus("pairs", multi30k, multi30k, pieces=8_000),
    "opus100": Corpus("pairs", bitext, opus100),
    "bitext": Corpus("pairs", bitext),
}
# The papers do not name their files, so these are the user's.
for name in "wmt10 wmt23-de wmt23-he wmt23-ru wmt23-uk wmt23-zh".split():
    CORPORA[name] = Corpus("pairs", bitext, pieces=32_000)
