"""Where texts come from: a table of corpora, and the functions that read them.

What a function gives goes by the kind of the corpus:

    text        an iterator of documents (split, text)
    languages   {language: iterator of documents}
    pairs       {pair of languages such as "de-en": iterator of (split, first text, second text)}

A language is read when it is asked for, one document after the other. Valid and test come before train where the corpus
has them apart, so that a limit on the training tokens can end the reading. Only what is inside installed packages is
ever held in memory whole.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from data.files import (
    HEAD,
    aligned_files,
    named_split,
    one_of,
    read_catalog,
    read_documents,
    read_lines,
    read_pairs,
    source_files,
    split_of,
    uncompressed_name,
)

Documents = Iterator[tuple[str, str]]  # (split, text)
Pairs = Iterator[tuple[str, str, str]]  # (split, first text, second text)
HUB_SPLITS = {"valid": "validation", "test": "test", "train": "train"}  # ours -> the hub's


class Corpus(NamedTuple):
    kind: str  # text, languages or pairs
    local: Callable  # reads a file or folder of the user's
    read: Callable | None = None  # reads the network, or installed packages; None: it needs a local copy
    origin: str | None = None  # what that is
    packages: tuple[str, ...] = ()  # the installed packages; such a corpus trains its own tokenizer
    vocabulary: str | None = None  # the corpus whose tokenizer it shares; None: its own
    pieces: int | None = None  # of a BPE that both sides of its translation pairs share, trained on them


def hub_rows(repository: str, config: str | None, split: str, *columns: str, **options) -> Iterator[tuple[str, ...]]:
    """These columns of a data set on the Hugging Face hub, streamed; "translation.de" is a column inside a column.

    What is empty there is an empty text. OSError and ImportError say what to do when it cannot be read.
    """
    what = options.get("data_files") or " ".join(filter(None, (repository, config)))
    try:
        from datasets import load_dataset
    except ImportError as error:
        hint = "pip install datasets, or pass a local copy with --source"
        raise ImportError(f"{what} needs Hugging Face datasets: {hint}") from error
    try:
        for row in load_dataset(repository, config, split=split, streaming=True, **options):
            yield tuple(cell(row, name) for name in columns)
    except Exception as error:  # the hub's client raises a dozen kinds
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise OSError(f"cannot read {what} ({reason}); a local copy goes in with --source") from error


def cell(row: dict, name: str) -> str:
    for part in name.split("."):
        row = row[part]
    return row or ""


def hub_texts(repository: str, config: str | None, split: str, **options) -> Iterator[str]:
    for (text,) in hub_rows(repository, config, split, "text", **options):
        yield text


def hashed(texts: Iterable[str], share: float) -> Documents:
    """A hash of the text sends that share of the documents to valid, and as many to test."""
    for text in texts:
        yield split_of(text, valid=share, test=share), text


# ---------------------------------------------------------------------------------------------------------------------
# pydocs


def pydocs(source: Path | None = None) -> Documents:
    """Documents are source files, their docstrings joined by blank lines; a docstring is kept where it first appears.

    With `source` the .py files of that folder take the place of the installed packages.
    """
    roots = {source.name: source} if source else installed_roots()
    files = python_files(roots)
    if not files:
        raise FileNotFoundError(f"no .py file in {source}")
    seen: set[str] = set()
    for name, texts in zip(files, read_docstrings(list(files.values())), strict=True):
        new = [text for text in dict.fromkeys(texts) if text not in seen]
        seen.update(new)
        if new:
            yield split_of(f"split/{name}", valid=0.045, test=0.045), "\n\n".join(new)


def installed_roots() -> dict[str, Path]:
    """Package name -> folder, found without importing anything."""
    return {"python": Path(sysconfig.get_path("stdlib")), "numpy": package("numpy"), "torch": package("torch")}


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"this corpus is read from the package {name}: pip install {name}")
    return Path(spec.submodule_search_locations[0])


def python_files(roots: dict[str, Path]) -> dict[str, Path]:
    """package/relative/path.py -> path, of every source file under the roots, sorted, tests left out."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = {}
    for name, root in roots.items():
        for path in root.rglob("*.py"):
            inside = path.relative_to(root)
            if not skipped.intersection(inside.parts):
                files[f"{name}/{inside.as_posix()}"] = path
    return dict(sorted(files.items()))


def read_docstrings(paths: list[Path]) -> Iterator[list[str]]:
    """docstrings.docstrings of every path, in order, by helper processes that import neither torch nor this package."""
    helper = [sys.executable, "-I", "-S", str(Path(__file__).with_name("docstrings.py"))]

    def read(shard: list[Path]) -> list[list[str]]:
        request = json.dumps([str(path) for path in shard])
        done = subprocess.run(helper, input=request, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout)

    shards = [paths[start : start + 64] for start in range(0, len(paths), 64)]
    with ThreadPoolExecutor(os.cpu_count()) as pool, tqdm(total=len(paths), desc="reading", disable=None) as bar:
        for texts in pool.map(read, shards):
            bar.update(len(texts))
            yield from texts


# ---------------------------------------------------------------------------------------------------------------------
# wikitext103, openwebtext, text


def wikitext103() -> Documents:
    """Documents are articles, cut at the top-level headings ` = Title = `; the splits are the corpus's own."""
    for split, theirs in HUB_SPLITS.items():
        rows = hub_texts("Salesforce/wikitext", "wikitext-103-raw-v1", theirs)
        lines = (row or " \n" for row in rows)  # the hub's rows are the file's lines, its blank ones emptied
        for article in articles(lines):
            yield split, article


def wikitext103_files(source: Path) -> Documents:
    for split in HUB_SPLITS:
        path = one_of(source, f"wiki.{split}.raw", f"wiki.{split}.tokens")
        for article in articles(line for _, line in read_lines(path)):
            yield split, article


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Join the lines between two top-level headings; a heading is one only after a blank line."""
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


def openwebtext() -> Documents:
    """Documents are web pages; a hash of the text sends 0.05% to valid and as many to test."""
    return hashed(hub_texts("Skylion007/openwebtext", None, "train"), 0.0005)


def text(source: Path) -> Documents:
    """Documents are rows (.jsonl, .parquet) or blocks between blank lines (anything else).

    Where names inside a folder speak of train, valid and test, those files are the splits and the others are not read.
    Otherwise a hash of the text sends 1% of the documents to valid and as many to test.
    """
    files = source_files(source)
    named = {path: named_split(path.relative_to(source)) for path in files}
    if source.is_file() or not any(named.values()):
        yield from hashed(all_documents(files), 0.01)
        return
    for split in HUB_SPLITS:
        for document in all_documents(path for path in files if named[path] == split):
            yield split, document


def all_documents(paths: Iterable[Path], least: int = HEAD) -> Iterator[str]:
    for path in paths:
        yield from read_documents(path, least)


# ---------------------------------------------------------------------------------------------------------------------
# catalogs, catalogs-pairs, catalogs-en

MIN_MESSAGES = 100  # of a language


class Message(NamedTuple):
    language: str
    english: str
    message: str
    split: str


def catalogs(source: Path | None = None) -> dict[str, Documents]:
    """Documents are the messages of a language; those of `en` are the English texts that have a translation."""
    texts: dict[str, dict[str, str]] = defaultdict(dict)  # language -> {text: split}
    for language, english, message, split in messages(source):
        texts["en"][english] = split
        texts[language][message] = split
    documents = {}
    for language in sorted(texts):
        own = texts[language]
        documents[language] = [(own[text], text) for text in sorted(own, key=scattered)]
    return documents


def scattered(text: str) -> tuple[int, str]:
    """Sorts by a checksum rather than the alphabet: one window should not hold the variants of one phrase."""
    return zlib.crc32(text.encode()), text


def catalogs_pairs(source: Path | None = None) -> dict[str, Pairs]:
    """Message and English, split by the English text."""
    pairs = defaultdict(list)
    for language, english, message, split in messages(source):
        pairs[f"{language}-en"].append((split, message, english))
    # scattered here too: a limit then takes all kinds of messages
    return {name: sorted(pairs[name], key=lambda pair: (scattered(pair[2]), pair[1])) for name in sorted(pairs)}


def catalogs_en(source: Path | None = None) -> dict[str, Pairs]:
    """catalogs-pairs in the languages of XMoE's table 3: some 800 short pairs each."""
    pairs = catalogs_pairs(source)
    return {name: pairs[name] for name in ("de-en", "he-en", "ru-en", "uk-en", "zh_Hans-en")}


def messages(source: Path | None = None) -> list[Message]:
    """Every translation in Django's catalogs and in those under the folder `source`, sorted, each once.

    A hash of the English text, of its singular where it has a plural, sends 5% to valid and as many to test. A message
    that translates English texts of two splits is left out, so that no text, on either side, is in two of them.
    """
    found = set()  # (language, English, message)
    forms: dict[str, set[str]] = defaultdict(set)  # English text -> what it is the plural or the singular of
    plurals = set()
    for path in catalog_files(source):
        for singular, english, message in read_catalog(path):
            found.add((path.parent.parent.name, english, message))
            forms[english].add(singular)
            forms[singular].add(english)
            if singular != english:
                plurals.add(english)
    splits = {}
    for english in forms:
        alike = connected(english, forms)
        key = min(alike - plurals or alike)
        splits[english] = split_of(key, valid=0.05, test=0.05)
    uses = defaultdict(set)  # text -> the splits in which it stands
    for _, english, message in found:
        uses[english].add(splits[english])
        uses[message].add(splits[english])
    kept = sorted(entry for entry in found if len(uses[entry[2]]) == 1)
    counts = Counter(language for language, _, _ in kept)
    return [Message(*entry, splits[entry[1]]) for entry in kept if counts[entry[0]] >= MIN_MESSAGES]


def connected(text: str, forms: dict[str, set[str]]) -> set[str]:
    """The text and all that hangs together with it."""
    found = {text}
    waiting = [text]
    while waiting:
        new = forms[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def catalog_files(source: Path | None) -> list[Path]:
    """Every LANGUAGE/LC_MESSAGES/*.mo of the installed Django and under `source`, English (its own text) left out."""
    roots = [package("django")]
    if source:
        roots.append(source)
    files = []
    for root in roots:
        here = sorted(root.rglob("*/LC_MESSAGES/*.mo"))
        if not here:
            raise FileNotFoundError(f"no LANGUAGE/LC_MESSAGES/*.mo under {root}")
        files += [path for path in here if path.parent.parent.name != "en"]
    return files


# ---------------------------------------------------------------------------------------------------------------------
# cc100, mc4

# XLM-R's languages, by CC-100's names for them
CC100 = """
    af am ar as az be bg bn bn_rom br bs ca cs cy da de el en eo es et eu fa fi fr fy ga gd gl gu ha he hi hi_rom hr hu
    hy id is it ja jv ka kk km kn ko ku ky la lo lt lv mg mk ml mn mr ms my my_zaw ne nl no om or pa pl ps pt ro ru sa
    sd si sk sl so sq sr su sv sw ta ta_rom te te_rom th tl tr ug uk ur ur_rom uz vi xh yi zh-Hans zh-Hant
""".split()
# those that mC4 has, by its names
MC4 = """
    af am ar az be bg bn ca cs cy da de el en eo es et eu fa fi fil fr fy ga gd gl gu ha hi hi-Latn hu hy id is it iw ja
    jv ka kk km kn ko ku ky la lo lt lv mg mk ml mn mr ms my ne nl no pa pl ps pt ro ru sd si sk sl so sq sr su sv sw ta
    te th tr uk ur uz vi xh yi zh
""".split()


def cc100() -> dict[str, Documents]:
    """Documents are the blocks between blank lines; a hash of the text sends 1% to valid and as many to test."""
    documents = {}
    for name in CC100:
        url = f"https://data.statmt.org/cc-100/{name}.txt.xz"
        texts = hub_texts("text", None, "train", data_files=url, sample_by="paragraph")
        documents[name] = hashed(map(str.strip, texts), 0.01)  # as those of a local copy
    return documents


def mc4() -> dict[str, Documents]:
    """Documents are web pages; valid and test are halves of mC4's own validation split, by a hash of the text."""
    return {name: mc4_language(name) for name in MC4}


def mc4_language(name: str) -> Documents:
    """One page held out after every 49 of training, as long as there are any: a limit then ends the reading of both."""
    held_out = hashed(hub_texts("allenai/c4", name, "validation"), 0.5)
    for number, page in enumerate(hub_texts("allenai/c4", name, "train")):
        if number % 49 == 0:
            yield from islice(held_out, 1)
        yield "train", page
    yield from held_out


def language_files(source: Path) -> dict[str, Documents]:
    """The documents of LANGUAGE.txt, .jsonl or .parquet, perhaps with more between dots (sw.part1.txt.xz)."""
    files = defaultdict(list)
    for path in source_files(source):
        if uncompressed_name(path).endswith((".txt", ".jsonl", ".parquet")):
            files[path.name.split(".")[0]].append(path)
    if not files:
        raise FileNotFoundError(f"--source {source} holds no LANGUAGE.txt, .jsonl or .parquet (or these as .gz, .xz)")
    documents = {}
    for language in sorted(files):
        # stripped, because a block read from a file ends in a line feed and one from the hub does not
        stripped = map(str.strip, all_documents(files[language], least=2))
        documents[language] = hashed(stripped, 0.01)
    return documents


# ---------------------------------------------------------------------------------------------------------------------
# opus100, bitext

# the languages that OPUS-100 has beside English
OPUS100 = """
    af am an ar as az be bg bn br bs ca cs cy da de dz el eo es et eu fa fi fr fy ga gd gl gu ha he hi hr hu hy id ig is
    it ja ka kk km kn ko ku ky li lt lv mg mk ml mn mr ms mt my nb ne nl nn no oc or pa pl ps pt ro ru rw se sh si sk sl
    sq sr sv ta te tg th tk tr tt ug uk ur uz vi wa xh yi yo zh zu
""".split()
TRAIN_ONLY = {"an-en", "dz-en", "en-hy", "en-mn", "en-yo"}


def opus100() -> dict[str, Pairs]:
    """Sentences, in OPUS-100's own splits; five of its pairs have nothing but training text."""
    pairs = {}
    for name in sorted("-".join(sorted((language, "en"))) for language in OPUS100):
        splits = ["train"] if name in TRAIN_ONLY else list(HUB_SPLITS)
        columns = [f"translation.{language}" for language in name.split("-")]
        pairs[name] = hub_pairs("Helsinki-NLP/opus-100", name, columns, splits)
    return pairs


def hub_pairs(repository: str, config: str | None, columns: list[str], splits: Iterable[str] = HUB_SPLITS) -> Pairs:
    for split in splits:
        for first, second in hub_rows(repository, config, HUB_SPLITS[split], *columns):
            yield split, first, second


def bitext(source: Path) -> dict[str, Pairs]:
    """Lines of two files, PAIR.FIRST and PAIR.SECOND, or of PAIR.tsv, perhaps with more between dots.

    Where names inside a folder speak of train, valid and test, those files are the splits and the others are not read.
    Otherwise a hash of the second text sends 1% of the pairs to valid and as many to test.
    """
    groups = aligned_files(source)
    splits = {stem: named_split(stem.relative_to(source)) if source.is_dir() else None for stem in groups}
    read = named_pairs if any(splits.values()) else hashed_pairs
    pairs = {}
    for name in sorted({stem.name.split(".")[0] for stem in groups}):
        pairs[name] = read([(splits[stem], paths) for stem, paths in groups.items() if stem.name.split(".")[0] == name])
    return pairs


def named_pairs(files: list[tuple[str | None, list[Path]]]) -> Pairs:
    for split in HUB_SPLITS:
        for named, paths in files:
            if named == split:
                for first, second in read_pairs(paths):
                    yield split, first, second


def hashed_pairs(files: list[tuple[str | None, list[Path]]]) -> Pairs:
    for _, paths in files:
        for first, second in read_pairs(paths):
            yield split_of(second, valid=0.01, test=0.01), first, second


# ---------------------------------------------------------------------------------------------------------------------
# translation: multi30k-XX, wmt23-XX, wmt10

MULTI30K = {"valid": "val", "test": "test_2016_flickr", "train": "train"}  # split -> name of its files
CCMATRIX = "sentence-transformers/parallel-sentences-ccmatrix"
# language -> its training pairs on the hub: repository, configuration, columns. The paper does not name its files: here
# WMT's own, the newest there are, and CCMatrix for Ukrainian and Hebrew, which WMT collected later.
WMT23 = {
    "de": ("wmt/wmt19", "de-en", ["translation.de", "translation.en"]),
    "ru": ("wmt/wmt19", "ru-en", ["translation.ru", "translation.en"]),
    "zh": ("wmt/wmt19", "zh-en", ["translation.zh", "translation.en"]),
    "he": (CCMATRIX, "en-he", ["non_english", "english"]),
    "uk": (CCMATRIX, "en-uk", ["non_english", "english"]),
}
FLORES = {"he": "heb_Hebr", "uk": "ukr_Cyrl", "en": "eng_Latn"}
# the newest WMT with pairs and a test set of that language on the hub; Gujarati has no test set there
WMT10 = {"cs": 18, "de": 18, "et": 18, "fi": 18, "fr": 15, "gu": 19, "hi": 14, "lv": 17, "ro": 16, "tr": 18}


def multi30k(language: str) -> dict[str, Pairs]:
    """Task 1, raw. The hub has German alone."""
    if language != "de":
        raise ValueError(f"multi30k-{language} needs --source DIR with train.{language}, train.en and so on")
    return {"de-en": hub_pairs("bentrevett/multi30k", None, ["de", "en"])}


def multi30k_files(language: str, source: Path) -> dict[str, Pairs]:
    """train.XX, val.XX and test_2016_flickr.XX beside their English (plain, .gz or .xz)."""
    files = []
    for split, name in MULTI30K.items():
        files.append((split, [one_of(source, f"{name}.{language}"), one_of(source, f"{name}.en")]))
    return {f"{language}-en": named_pairs(files)}


def wmt23(language: str) -> dict[str, Pairs]:
    """Validated on WMT21 and tested on WMT22 (sacrebleu), or FLORES-200's dev and devtest, as FLORES+ has them."""
    return {f"{language}-en": wmt23_pairs(language)}


def wmt23_pairs(language: str) -> Pairs:
    for split, year, flores in (("valid", "wmt21", "dev"), ("test", "wmt22", "devtest")):
        if language in FLORES:
            pairs = flores_pairs(language, flores)
        else:
            pairs = read_pairs(sacrebleu_files(year, f"{language}-en"))
        for first, second in pairs:
            yield split, first, second
    repository, config, columns = WMT23[language]
    yield from hub_pairs(repository, config, columns, ["train"])


def wmt23_files(language: str, source: Path) -> dict[str, Pairs]:
    """As bitext; other pairs in the folder are not read."""
    name = f"{language}-en"
    pairs = bitext(source)
    if name not in pairs:
        raise FileNotFoundError(f"--source {source} holds no {name}.{language} and {name}.en, and no {name}.tsv")
    return {name: pairs[name]}


def flores_pairs(language: str, split: str) -> Iterator[tuple[str, str]]:
    repository = "openlanguagedata/flores_plus"
    sides = [hub_rows(repository, FLORES[side], split, "id", "text") for side in (language, "en")]
    for (number, first), (other, second) in zip_longest(*sides, fillvalue=("", "")):
        if number != other:
            what = f"{FLORES[language]} and {FLORES['en']} have other sentences ({number}, {other})"
            raise ValueError(f"{repository}: {what}")
        yield first, second


def sacrebleu_files(test_set: str, pair: str) -> list[Path]:
    """The source and the first reference, downloaded by sacrebleu."""
    try:
        from sacrebleu.utils import get_reference_files, get_source_file
    except ImportError as error:
        raise ImportError(f"{test_set} needs sacrebleu: pip install sacrebleu, or pass files with --source") from error
    try:
        return [Path(get_source_file(test_set, pair)), Path(get_reference_files(test_set, pair)[0])]
    except (Exception, SystemExit) as error:  # it raises many kinds, and exits
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        hint = f"name local files {pair}.valid.* and {pair}.test.* and give --source"
        raise OSError(f"cannot download {test_set} {pair} ({reason}); {hint}") from error


def wmt10() -> dict[str, Pairs]:
    """Validated and tested on the sets that WMT gave with the pairs."""
    pairs = {}
    for language, year in WMT10.items():
        where = f"wmt/wmt{year}", f"{language}-en", [f"translation.{language}", "translation.en"]
        pairs[f"{language}-en"] = gujarati(*where) if language == "gu" else hub_pairs(*where)
    return pairs


def gujarati(repository: str, config: str, columns: list[str]) -> Pairs:
    """Its validation set is halved by a hash: it has no test set."""
    for _, first, second in hub_pairs(repository, config, columns, ["valid"]):
        yield split_of(second, valid=0.5, test=0.5), first, second
    yield from hub_pairs(repository, config, columns, ["train"])


# ---------------------------------------------------------------------------------------------------------------------
# the table

DJANGO = "the message catalogs of Django"
CORPORA = {
    "pydocs": Corpus(
        "text", pydocs, pydocs, "docstrings of the installed Python, NumPy and PyTorch", packages=("numpy", "torch")
    ),
    "wikitext103": Corpus("text", wikitext103_files, wikitext103, "Salesforce/wikitext, wikitext-103-raw-v1"),
    "openwebtext": Corpus("text", text, openwebtext, "Skylion007/openwebtext"),
    "text": Corpus("text", text),
    "catalogs": Corpus("languages", catalogs, catalogs, DJANGO, packages=("django",)),
    "cc100": Corpus("languages", language_files, cc100, "https://data.statmt.org/cc-100"),
    "mc4": Corpus("languages", language_files, mc4, "allenai/c4"),
    "catalogs-pairs": Corpus(
        "pairs", catalogs_pairs, catalogs_pairs, DJANGO, packages=("django",), vocabulary="catalogs"
    ),
    "opus100": Corpus("pairs", bitext, opus100, "Helsinki-NLP/opus-100"),
    "bitext": Corpus("pairs", bitext),
    "catalogs-en": Corpus("pairs", catalogs_en, catalogs_en, DJANGO, packages=("django",), pieces=4_000),
    "wmt10": Corpus("pairs", bitext, wmt10, "wmt/wmt14 to wmt/wmt19", pieces=32_000),
}
for language in ("de", "fr", "cs"):
    ways = partial(multi30k_files, language), partial(multi30k, language)
    CORPORA[f"multi30k-{language}"] = Corpus("pairs", *ways, "Multi30k, task 1", pieces=8_000)
for language, (repository, config, _) in WMT23.items():
    ways = partial(wmt23_files, language), partial(wmt23, language)
    CORPORA[f"wmt23-{language}"] = Corpus("pairs", *ways, f"{repository}, {config}", pieces=32_000)
