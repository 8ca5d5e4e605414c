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
import re
import sys
import sysconfig
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from data.docstrings import paragraphs
from data.files import (
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

Texts = Iterator[tuple[str, ...]]  # (split, text), or (split, first text, second text)
HUB_SPLITS = {"valid": "validation", "test": "test", "train": "train"}  # ours -> the hub's


class Corpus(NamedTuple):
    kind: str  # text, languages or pairs
    local: Callable  # reads a file or folder of the user's
    read: Callable | None = None  # reads the network, or installed packages; None: it needs a local copy
    packages: tuple[str, ...] = ()  # the installed packages; such a corpus trains its own tokenizer
    vocabulary: str | None = None  # the corpus whose tokenizer it shares; None: its own
    pieces: int | None = None  # of a BPE that both sides of its translation pairs share, trained on them


@contextmanager
def network(what: str, package: str):
    """Turns all that can go wrong with a download through this package into an OSError of one line."""
    try:
        yield
    except (Exception, SystemExit) as error:  # these packages raise a dozen kinds, and sacrebleu exits
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        needs = f"it takes pip install {package} and the network, or a local copy, given with --source"
        raise OSError(f"cannot read {what} ({reason}); {needs}") from error


def hub_rows(repository: str, config: str | None, split: str, *columns: str, **options) -> Iterator[tuple[str, ...]]:
    """These columns of a data set on the Hugging Face hub, streamed. What is empty there is an empty text."""
    what = options.get("data_files") or " ".join(filter(None, (repository, config)))
    with network(what, "datasets"):
        from datasets import load_dataset

        for row in load_dataset(repository, config, split=split, streaming=True, **options):
            texts = row.get("translation", row)
            yield tuple(texts[name] or "" for name in columns)


def hashed(rows: Iterable[tuple[str, ...]], share: float) -> Texts:
    """A hash of the (second) text sends that share of the rows to valid, and as many to test."""
    for row in rows:
        yield split_of(row[-1], valid=share, test=share), *row


def labelled(splits: dict[str, Iterable[tuple[str, ...]]]) -> Texts:
    for split, rows in splits.items():
        for row in rows:
            yield split, *row


def named_or_hashed(source: Path, files: dict[Path, Iterable[tuple[str, ...]]]) -> Texts:
    """Where names inside the folder speak of train, valid and test, those files are the splits, the others not read.

    Otherwise a hash of the (second) text sends 1% of the rows to valid and as many to test. `files`: path -> its rows.
    """
    named = defaultdict(list)  # split -> the rows of each of its files
    for path, rows in files.items():
        named[named_split(path.relative_to(source))].append(rows)
    if list(named) == [None]:
        return hashed(chain.from_iterable(named[None]), 0.01)
    return watched(labelled({split: chain.from_iterable(named[split]) for split in HUB_SPLITS}))


def watched(texts: Texts) -> Texts:
    """The same, training texts behind the others; in the end a line says how many of them are held out, too."""
    held_out, twice = set(), 0  # hashes
    try:
        for split, *row in texts:
            if split != "train":
                held_out.add(hash(tuple(row)))
            elif hash(tuple(row)) in held_out:
                twice += 1
            yield split, *row
    finally:
        if twice:
            print(f"warning: {twice:,} training texts stand in valid or test, too", file=sys.stderr)


def documents(path: Path) -> Iterator[tuple[str]]:
    for text in read_documents(path):
        yield (text,)


# ---------------------------------------------------------------------------------------------------------------------
# pydocs


def pydocs(source: Path | None = None) -> Texts:
    """Documents are source files: the prose of their docstrings, each paragraph where it first appears.

    With `source` the .py files of that folder take the place of the installed packages.
    """
    files = python_files({source.name: source} if source else installed_roots())
    seen: set[str] = set()
    for name, path in tqdm(files.items(), desc="reading", disable=None):
        new = [text for text in dict.fromkeys(paragraphs(path)) if text not in seen]
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


# ---------------------------------------------------------------------------------------------------------------------
# wikitext103, openwebtext, text


def wikitext103(source: Path | None = None) -> Texts:
    """Documents are articles, cut at the top-level headings ` = Title = `; the splits are the corpus's own."""
    for split, theirs in HUB_SPLITS.items():
        if source:
            lines = read_lines(one_of(source, f"wiki.{split}.raw", f"wiki.{split}.tokens"))
        else:
            rows = hub_rows("Salesforce/wikitext", "wikitext-103-raw-v1", theirs, "text")
            lines = (line or " \n" for (line,) in rows)  # the hub's rows are the file's lines, its blank ones emptied
        for article in articles(lines):
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


def openwebtext() -> Texts:
    """Documents are web pages; a hash of the text sends 0.05% to valid and as many to test."""
    return hashed(hub_rows("Skylion007/openwebtext", None, "train", "text"), 0.0005)


def text(source: Path) -> Texts:
    """Documents are rows (.jsonl, .parquet), or blocks between blank lines or lines (anything else)."""
    return named_or_hashed(source, {path: documents(path) for path in source_files(source)})


# ---------------------------------------------------------------------------------------------------------------------
# catalogs, catalogs-pairs, catalogs-en

MIN_MESSAGES = 100  # of a language


def catalogs(source: Path | None = None) -> dict[str, Texts]:
    """Documents are the messages of a language; those of `en` are the English texts that have a translation."""
    texts: dict[str, dict[str, str]] = defaultdict(dict)  # language -> {text: split}
    for language, english, message, split in messages(source):
        texts["en"][english] = split
        texts[language][message] = split
    found = {}
    for language, own in texts.items():
        found[language] = [(own[text], text) for text in sorted(own, key=scattered)]
    return found


def scattered(text: str) -> tuple[int, str]:
    """Sorts by a checksum rather than the alphabet: one window should not hold the variants of one phrase."""
    return zlib.crc32(text.encode()), text


def catalogs_pairs(source: Path | None = None) -> dict[str, Texts]:
    """Message and English, split by the English text."""
    pairs = defaultdict(list)
    # scattered here too: a limit then takes all kinds of messages
    for language, english, message, split in sorted(messages(source), key=lambda row: (scattered(row[1]), row[2])):
        pairs[f"{language}-en"].append((split, message, english))
    return pairs


def catalogs_en(source: Path | None = None) -> dict[str, Texts]:
    """catalogs-pairs in the languages of XMoE's table 3: some 800 short pairs each."""
    pairs = catalogs_pairs(source)
    return {name: pairs[name] for name in ("de-en", "he-en", "ru-en", "uk-en", "zh_Hans-en")}


def messages(source: Path | None = None) -> list[tuple[str, str, str, str]]:
    """(language, English, message, split) of every translation in Django's catalogs and under `source`, sorted.

    A hash of the English text, of its singular where it has a plural, sends 5% to valid and as many to test. A message
    that translates English texts of two splits is left out, so that no text, on either side, is in two of them.
    """
    found = set()  # (language, English, message)
    singulars: dict[str, set[str]] = defaultdict(set)  # English text -> those it is the plural of, and itself
    for path in catalog_files(source):
        for singular, english, message in read_catalog(path):
            found.add((path.parent.parent.name, english, message))
            singulars[english] |= {singular, english}
    splits = {}
    for english, forms in singulars.items():
        key = min(forms - {english} or forms)
        splits[english] = split_of(key, valid=0.05, test=0.05)
    uses = defaultdict(set)  # text -> the splits in which it stands
    for _, english, message in found:
        uses[english].add(splits[english])
        uses[message].add(splits[english])
    kept = sorted(entry for entry in found if len(uses[entry[2]]) == 1)
    counts = Counter(language for language, _, _ in kept)
    return [(*entry, splits[entry[1]]) for entry in kept if counts[entry[0]] >= MIN_MESSAGES]


def catalog_files(source: Path | None) -> list[Path]:
    """Every LANGUAGE/LC_MESSAGES/*.mo of the installed Django and under `source`, English (its own text) left out."""
    files = []
    for root in filter(None, (package("django"), source)):
        here = [path for path in root.rglob("*/LC_MESSAGES/*.mo") if path.parent.parent.name != "en"]
        if not here:
            raise FileNotFoundError(f"no LANGUAGE/LC_MESSAGES/*.mo under {root}")
        files += here
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


def cc100() -> dict[str, Texts]:
    """Documents are the blocks between blank lines; a hash of the text sends 1% to valid and as many to test."""
    return {name: hashed(cc100_language(name), 0.01) for name in CC100}


def cc100_language(name: str) -> Iterator[tuple[str]]:
    url = f"https://data.statmt.org/cc-100/{name}.txt.xz"
    for (block,) in hub_rows("text", None, "train", "text", data_files=url, sample_by="paragraph"):
        yield (block.strip(),)  # as those of a local copy


def mc4() -> dict[str, Texts]:
    """Documents are web pages; valid and test are halves of mC4's own validation split, by a hash of the text."""
    return {name: mc4_language(name) for name in MC4}


def mc4_language(name: str) -> Texts:
    """One page held out after every 49 of training, as long as there are any: a limit then ends the reading of both."""
    held_out = hashed(hub_rows("allenai/c4", name, "validation", "text"), 0.5)
    for number, (page,) in enumerate(hub_rows("allenai/c4", name, "train", "text")):
        if number % 49 == 0:
            yield from islice(held_out, 1)
        yield "train", page
    yield from held_out


def language_files(source: Path) -> dict[str, Texts]:
    """The documents of LANGUAGE.txt, .jsonl or .parquet, perhaps with more between dots (sw.part1.txt.xz)."""
    files = defaultdict(dict)
    for path in source_files(source):
        if uncompressed_name(path).endswith((".txt", ".jsonl", ".parquet")):
            files[path.name.split(".")[0]][path] = documents(path)
    if not files:
        raise FileNotFoundError(f"--source {source} holds no LANGUAGE.txt, .jsonl or .parquet (or these as .gz, .xz)")
    return {language: named_or_hashed(source, own) for language, own in files.items()}


# ---------------------------------------------------------------------------------------------------------------------
# opus100, bitext

# the languages that OPUS-100 has beside English
OPUS100 = """
    af am an ar as az be bg bn br bs ca cs cy da de dz el eo es et eu fa fi fr fy ga gd gl gu ha he hi hr hu hy id ig is
    it ja ka kk km kn ko ku ky li lt lv mg mk ml mn mr ms mt my nb ne nl nn no oc or pa pl ps pt ro ru rw se sh si sk sl
    sq sr sv ta te tg th tk tr tt ug uk ur uz vi wa xh yi yo zh zu
""".split()
TRAIN_ONLY = {"an-en", "dz-en", "en-hy", "en-mn", "en-yo"}


def opus100() -> dict[str, Texts]:
    """Sentences, in OPUS-100's own splits; five of its pairs have nothing but training text."""
    pairs = {}
    for language in OPUS100:
        name = "-".join(sorted((language, "en")))
        splits = ["train"] if name in TRAIN_ONLY else HUB_SPLITS
        pairs[name] = hub_pairs("Helsinki-NLP/opus-100", name, name.split("-"), splits)
    return pairs


def hub_pairs(repository: str, config: str | None, columns: list[str], splits: Iterable[str] = HUB_SPLITS) -> Texts:
    return labelled({split: hub_rows(repository, config, HUB_SPLITS[split], *columns) for split in splits})


def bitext(source: Path) -> dict[str, Texts]:
    """Lines of two files, PAIR.FIRST and PAIR.SECOND, or of PAIR.tsv, perhaps with more between dots."""
    pairs = {}
    for name, files in aligned_files(source).items():
        pairs[name] = named_or_hashed(source, {both[0]: read_pairs(*both) for both in files})
    return pairs


# ---------------------------------------------------------------------------------------------------------------------
# translation: multi30k and multi30k-XX, wmt23-XX, wmt10

MULTI30K = {"valid": "val", "test": "test_2016_flickr", "train": "train"}  # split -> name of its files
CCMATRIX = "sentence-transformers/parallel-sentences-ccmatrix"
# language -> its training pairs on the hub: repository, configuration, columns. The paper does not name its files: here
# WMT's own, the newest there are, and CCMatrix for Ukrainian and Hebrew, which WMT collected later.
WMT23 = {
    "de": ("wmt/wmt19", "de-en", ["de", "en"]),
    "ru": ("wmt/wmt19", "ru-en", ["ru", "en"]),
    "zh": ("wmt/wmt19", "zh-en", ["zh", "en"]),
    "he": (CCMATRIX, "en-he", ["non_english", "english"]),
    "uk": (CCMATRIX, "en-uk", ["non_english", "english"]),
}
FLORES = {"he": "heb_Hebr", "uk": "ukr_Cyrl", "en": "eng_Latn"}
# the newest WMT with pairs and a test set of that language on the hub; Gujarati has no test set there
WMT10 = {"cs": 18, "de": 18, "et": 18, "fi": 18, "fr": 15, "gu": 19, "hi": 14, "lv": 17, "ro": 16, "tr": 18}


def multi30k() -> dict[str, Texts]:
    """Task 1, raw, of which the hub has German alone."""
    return {"de-en": hub_pairs("bentrevett/multi30k", None, ["de", "en"])}


def multi30k_files(languages: str, source: Path) -> dict[str, Texts]:
    """train.XX, val.XX and test_2016_flickr.XX of each language beside their English (plain, .gz or .xz)."""
    pairs = {}
    for language in languages.split():
        splits = {}
        for split, name in MULTI30K.items():
            splits[split] = read_pairs(one_of(source, f"{name}.{language}"), one_of(source, f"{name}.en"))
        pairs[f"{language}-en"] = labelled(splits)
    return pairs


def wmt23(language: str) -> dict[str, Texts]:
    """Validated on WMT21 and tested on WMT22 (sacrebleu), or FLORES-200's dev and devtest, as FLORES+ has them."""
    name = f"{language}-en"
    repository, config, columns = WMT23[language]
    if language in FLORES:
        splits = {"valid": flores(language, "dev"), "test": flores(language, "devtest")}
    else:
        splits = {"valid": sacrebleu_pairs("wmt21", name), "test": sacrebleu_pairs("wmt22", name)}
    return {name: labelled(splits | {"train": hub_rows(repository, config, "train", *columns)})}


def flores(language: str, split: str) -> Iterator[tuple[str, str]]:
    sides = [hub_rows("openlanguagedata/flores_plus", FLORES[side], split, "text") for side in (language, "en")]
    for (first,), (second,) in zip(*sides, strict=True):
        yield first, second


def sacrebleu_pairs(test_set: str, name: str) -> Iterator[tuple[str, str]]:
    """The source and the first reference, downloaded by sacrebleu."""
    with network(f"{test_set} {name}", "sacrebleu"):
        from sacrebleu.utils import get_reference_files, get_source_file

        files = get_source_file(test_set, name), get_reference_files(test_set, name)[0]
    yield from read_pairs(*map(Path, files))


def wmt10() -> dict[str, Texts]:
    """Validated and tested on the sets that WMT gave with the pairs; of Gujarati's one set a hash makes both."""
    pairs = {}
    for language, year in WMT10.items():
        pairs[f"{language}-en"] = hub_pairs(f"wmt/wmt{year}", f"{language}-en", [language, "en"])
    held_out, train = (hub_rows("wmt/wmt19", "gu-en", split, "gu", "en") for split in ("validation", "train"))
    pairs["gu-en"] = chain(hashed(held_out, 0.5), labelled({"train": train}))
    return pairs


# ---------------------------------------------------------------------------------------------------------------------
# the table

CORPORA = {
    "pydocs": Corpus("text", pydocs, pydocs, packages=("numpy", "torch")),
    "wikitext103": Corpus("text", wikitext103, wikitext103),
    "openwebtext": Corpus("text", text, openwebtext),
    "text": Corpus("text", text),
    "catalogs": Corpus("languages", catalogs, catalogs, packages=("django",)),
    "cc100": Corpus("languages", language_files, cc100),
    "mc4": Corpus("languages", language_files, mc4),
    "catalogs-pairs": Corpus("pairs", catalogs_pairs, catalogs_pairs, packages=("django",), vocabulary="catalogs"),
    "catalogs-en": Corpus("pairs", catalogs_en, catalogs_en, packages=("django",), pieces=4_000),
    "opus100": Corpus("pairs", bitext, opus100),
    "bitext": Corpus("pairs", bitext),
    "multi30k": Corpus("pairs", partial(multi30k_files, "de fr cs"), pieces=8_000),
    "multi30k-de": Corpus("pairs", partial(multi30k_files, "de"), multi30k, pieces=8_000),
    "multi30k-fr": Corpus("pairs", partial(multi30k_files, "fr"), pieces=8_000),
    "multi30k-cs": Corpus("pairs", partial(multi30k_files, "cs"), pieces=8_000),
    "wmt10": Corpus("pairs", bitext, wmt10, pieces=32_000),
}
for language in WMT23:
    CORPORA[f"wmt23-{language}"] = Corpus("pairs", bitext, partial(wmt23, language), pieces=32_000)
