"""The corpora that `python -m data.prepare` knows: where their texts come from and how they are split.

    text        rows (split, text), one per document
    languages   {language: rows (split, text)}
    pairs       {"de-en": rows (split, German text, English text)}

Rows are lists or one-pass iterators. If the splits are predefined, held-out rows come first: a limit can stop early.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from data import ciphers, files
from data.english import pydocs
from data.files import Records, one_of, progress, read_documents, read_lines, read_pairs, read_sides, split_of

Texts = Iterable[tuple[str, ...]]  # rows without the split
Groups = dict[str | None, Records]  # language or pair -> its rows; a corpus in one language has the single key None
HELD_OUT = 100_000  # target bytes for valid and for test each, within 1% to 10% of the text
HUB_SPLITS = {"valid": "validation", "test": "test", "train": "train"}  # our name -> the Hugging Face hub's


class Corpus(NamedTuple):
    kind: str  # text, languages or pairs
    local: Callable | None = None  # reads the file or folder passed as --source
    read: Callable | None = None  # reads the network or installed packages; None: --source is required
    convert: Callable | None = None  # turns the rows read into languages or pairs
    packages: tuple[str, ...] = ()  # the installed packages it is read from
    vocabulary: str | None = None  # learned from this corpus's training text; "gpt2": GPT-2's; None: up to the user
    learn_from: int | None = None  # number of documents to learn the vocabulary from; None: all
    learn_options: dict = {}  # arguments of train_sentencepiece
    pieces: int | None = None  # size of the BPE; None: fits the text


def read(name: str, source: Path | None = None) -> Groups:
    """The rows of a corpus, from `source` if it is passed."""
    corpus = CORPORA[name]
    rows = corpus.local(source) if source else corpus.read()
    if corpus.convert:
        rows = corpus.convert(rows)
    return {None: rows} if corpus.kind == "text" else rows


# ---------------------------------------------------------------------------------------------------------------------
# Splits


def hashed(texts: Texts, valid: float, test: float, side: int = 0, held_out: dict | None = None) -> Records:
    """Splits texts, or pairs, by a hash of the text at index `side`, given the shares of valid and test.

    held_out: the split of each text in valid or test, recorded here. A pair with a text of another split is left out.
    """
    held_out = {} if held_out is None else held_out
    for row in texts:
        split = split_of(row[side], valid, test)
        if split != "train":
            for text in row:
                held_out.setdefault(text, split)
        if all(held_out.get(text, split) == split for text in row):
            yield split, *row


def labelled(splits: dict[str, Texts]) -> Records:
    """The texts of each split, in the order of `splits`: pass held-out ones first."""
    for split, texts in splits.items():
        for row in texts:
            yield split, *row


def split_by_name(source: Path, contents: dict[Path, Texts], share: float = 0.01, **pairs) -> Records:
    """Splits texts by file names that contain train, valid or test. Without a train file, the other files are train.

    Without a valid (or test) file, a hash splits off this share of the training texts; pairs: see `hashed`.
    """
    named = defaultdict(dict)  # split -> file -> its texts
    for path, texts in contents.items():
        named[files.named_split(path.relative_to(source))][path] = texts
    unnamed = named.pop(None, {})
    if "train" in named:
        files.say_skipped(source, "other files name their split, these do not", *[path.name for path in unnamed])
    train = chain.from_iterable(named.pop("train", unnamed).values())
    held_out = {split: chain.from_iterable(named[split].values()) for split in ("valid", "test") if split in named}
    shares = [0.0 if split in named else share for split in ("valid", "test")]
    return chain(labelled(held_out), hashed(train, *shares, **pairs))


# ---------------------------------------------------------------------------------------------------------------------
# The user's files


def text(source: Path) -> Records:
    """Documents as in `read_documents`. Small texts hold out a larger share, about HELD_OUT bytes."""
    contents = {path: zip(read_documents(path, source=source)) for path in files.text_files(source)}
    size = sum(path.stat().st_size for path in contents)
    return split_by_name(source, contents, share=max(0.01, min(0.1, HELD_OUT / max(1, size))))


def language_files(source: Path) -> Groups:
    """LANGUAGE.txt, .jsonl or .parquet; longer names such as sw.part1.txt.xz or C4's c4-sw.* also work."""
    contents = defaultdict(dict)  # language -> file -> its texts
    for path in files.text_files(source, ".txt", ".parquet", *files.JSON):
        language = path.name.removeprefix("c4-").split(".")[0]
        contents[language][path] = zip(read_documents(path, source=source))
    if not contents:
        raise FileNotFoundError(f"--source {source} contains no LANGUAGE.txt, .jsonl or .parquet (plain, .gz or .xz)")
    return {language: split_by_name(source, texts) for language, texts in contents.items()}


def bitext(source: Path) -> Groups:
    """Line-aligned files de-en.de and de-en.en, or de-en.tsv; longer names such as de-en.train.de.gz also work.

    The hash that chooses a split is of the English text, or else of the language whose code is last in the alphabet.
    """
    contents = defaultdict(dict)  # pair -> file -> itself, and the file of its second sides if that is another
    paths, held_out = files.source_files(source), {}
    for path in paths:
        stem, _, ending = files.uncompressed_name(path).rpartition(".")
        pair = stem.split(".")[0]
        if ending == "tsv" and "-" in pair:
            contents[pair][path] = [path]
        elif pair.startswith(f"{ending}-"):  # the first side
            contents[pair][path] = [path, one_of(path.parent, f"{stem}.{pair.removeprefix(f'{ending}-')}")]
    used = set(chain.from_iterable(chain.from_iterable(each.values()) for each in contents.values()))
    unused = [path.name for path in paths if path not in used]
    files.say_skipped(source, "neither a side of a language pair nor a .tsv of pairs", *unused)
    if not contents:
        raise FileNotFoundError(f"--source {source} contains no files such as de-en.de and de-en.en, or de-en.tsv")

    def groups() -> Groups:
        opened = {}
        for pair, sides in contents.items():
            one, two = ((code == "en", code) for code in re.split("-.*-|-", pair))
            texts = {path: read_pairs(*both) for path, both in sides.items()}
            opened[pair] = split_by_name(source, texts, side=int(two > one), held_out=held_out)
        return opened

    for _ in progress(chain.from_iterable(groups().values()), "splitting"):
        pass  # finds all held-out texts, before any pair is used
    return groups()


# ---------------------------------------------------------------------------------------------------------------------
# The Hugging Face hub


@contextmanager
def network(resource: str):
    """Turns any failure of a download into an OSError of one line."""
    try:
        yield
    except Exception as error:  # datasets raises a dozen kinds of errors
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        hint = "check the network, or pass a local copy with --source"
        raise OSError(f"cannot read {resource} ({reason}): {hint}") from error


def hub_rows(name: str, split: str, *columns: str, **options) -> Texts:
    """Streams columns of the data set `repository` or `repository configuration`. A missing value is an empty text."""
    from datasets import load_dataset

    with network(options.get("data_files", name)):
        for row in load_dataset(*name.split(), split=split, streaming=True, **options):
            yield tuple(row.get("translation", row)[column] or "" for column in columns)


def hub_pairs(name: str, *columns: str) -> Records:
    """The pairs of a data set, in whichever splits it has."""
    from datasets import get_dataset_split_names

    with network(name):
        available = get_dataset_split_names(*name.split())
    for split, hub_split in HUB_SPLITS.items():
        if hub_split in available:
            yield from labelled({split: hub_rows(name, hub_split, *columns)})


# ---------------------------------------------------------------------------------------------------------------------
# Published corpora


def wikitext103(source: Path | None = None) -> Records:
    """Documents are articles, in the published splits."""
    splits = {}
    for split, hub_split in HUB_SPLITS.items():
        if source:
            lines = read_lines(one_of(source, f"wiki.{split}.raw", f"wiki.{split}.tokens"))
        else:
            rows = hub_rows("Salesforce/wikitext wikitext-103-raw-v1", hub_split, "text")
            lines = (line or " \n" for (line,) in rows)  # on the hub, blank lines are empty
        splits[split] = zip(articles(lines))
    return labelled(splits)


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Splits lines at top-level headings, which are ` = Title = ` after a blank line."""
    article = ""
    after_blank = True
    for line in lines:
        if after_blank and article.strip() and re.fullmatch(r" = .*(?<! =) = \n?", line):
            yield article
            article = ""
        article += line
        after_blank = not line.strip()
    if article.strip():
        yield article


def openwebtext() -> Records:
    """Web pages, split by a hash of the text: 0.05% valid and 0.05% test."""
    return hashed(hub_rows("Skylion007/openwebtext", "train", "text"), 0.0005, 0.0005)


def enwiki(source: Path) -> Records:
    """Articles of train.txt and valid.txt, separated by blank lines; every second one of valid.txt is test."""
    held_out = list(zip(read_documents(one_of(source, "valid.txt"), blocks=True)))
    train = zip(read_documents(one_of(source, "train.txt"), blocks=True))
    return labelled({"valid": held_out[::2], "test": held_out[1::2], "train": train})


CC100 = """
    af am ar as az be bg bn bn_rom br bs ca cs cy da de el en eo es et eu fa fi fr fy ga gd gl gu ha he hi hi_rom hr hu
    hy id is it ja jv ka kk km kn ko ku ky la lo lt lv mg mk ml mn mr ms my my_zaw ne nl no om or pa pl ps pt ro ru sa
    sd si sk sl so sq sr su sv sw ta ta_rom te te_rom th tl tr ug uk ur ur_rom uz vi xh yi zh-Hans zh-Hant
""".split()  # XLM-R's languages, named as in CC-100


def cc100() -> Groups:
    """Documents are the blocks between blank lines, split by a hash of the text: 1% valid and 1% test."""
    rows = {}
    for language in CC100:
        url = f"https://data.statmt.org/cc-100/{language}.txt.xz"
        blocks = hub_rows("text", "train", "text", data_files=url, sample_by="paragraph")
        rows[language] = hashed(((block.strip(),) for (block,) in blocks), 0.01, 0.01)
    return rows


def opus100() -> Groups:
    """Sentence pairs of English and each of 99 languages."""
    from datasets import get_dataset_config_names

    repository = "Helsinki-NLP/opus-100"
    with network(repository):
        names = get_dataset_config_names(repository)
    with_english = [name for name in names if "en" in name.split("-")]  # the others have only a test set
    return {name: hub_pairs(f"{repository} {name}", *name.split("-")) for name in with_english}


def multi30k(source: Path | None = None) -> Groups:
    """Task 1, raw: German captions and their English, tested on the Flickr images of 2016."""
    if source is None:
        return {"de-en": hub_pairs("bentrevett/multi30k", "de", "en")}
    names = {"valid": "val", "test": "test_2016_flickr", "train": "train"}
    splits = {split: read_sides(source, ("de", "en"), name) for split, name in names.items()}
    return {"de-en": labelled(splits)}


PYDOCS = dict(read=pydocs, packages=("numpy", "torch"))
CIPHERS = PYDOCS | dict(vocabulary="ciphers", learn_options=ciphers.VOCABULARY)
CIPHERS_MT = PYDOCS | dict(vocabulary="ciphers-mt", learn_options=ciphers.HARDER_VOCABULARY)
CORPORA = {
    "pydocs": Corpus("text", **PYDOCS, vocabulary="pydocs"),
    "wikitext103": Corpus("text", wikitext103, wikitext103, vocabulary="gpt2"),
    "openwebtext": Corpus("text", text, openwebtext, vocabulary="gpt2"),
    "enwiki": Corpus("text", enwiki, vocabulary="enwiki", learn_from=4000),
    "text": Corpus("text", text),
    "ciphers": Corpus("languages", convert=ciphers.by_language, **CIPHERS),
    "ciphers-backwards": Corpus("languages", convert=partial(ciphers.by_language, backwards=True), **CIPHERS),
    "cc100": Corpus("languages", language_files, cc100),
    "ciphers-pairs": Corpus("pairs", convert=ciphers.by_pair, **CIPHERS),
    "ciphers-backwards-pairs": Corpus("pairs", convert=partial(ciphers.by_pair, backwards=True), **CIPHERS),
    "ciphers-mt": Corpus("pairs", convert=ciphers.to_english, **CIPHERS_MT),
    "multi30k-de": Corpus("pairs", multi30k, multi30k, pieces=8_000),
    "opus100": Corpus("pairs", bitext, opus100),
    "bitext": Corpus("pairs", bitext),
}
# The papers do not name their files, so the user passes them.
for name in "wmt10 wmt23-de wmt23-he wmt23-ru wmt23-uk wmt23-zh".split():
    CORPORA[name] = Corpus("pairs", bitext, pieces=32_000)
