"""The corpora of many languages, each a function (source, streaming) -> {language: its (split, text)}, sorted by name.

    catalogs      the message catalogs inside Django (nothing is downloaded), every message beside its English
    cc100         CC-100, the text of XLM-R
    mc4           mC4, for English C4

The documents of a language are read when they are asked for, one by one, and only catalogs is ever held in memory.
"""

import importlib.util
import re
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from data.corpora import Corpus, Documents, hub_rows, read_documents, source_files, split_of

MIN_MESSAGES = 100  # of a language in `catalogs`
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


# ---------------------------------------------------------------------------------------------------------------------
# catalogs


class Pair(NamedTuple):
    language: str
    english: str
    message: str
    split: str


def catalogs(source: Path | None, streaming: bool) -> dict[str, Documents]:
    """Documents are the messages of a language; those of `en` are the English texts that have a translation."""
    texts: dict[str, dict[str, str]] = defaultdict(dict)  # language -> {text: split}
    for language, english, message, split in catalog_pairs(source):
        texts["en"][english] = texts[language][message] = split
    # by a checksum rather than the alphabet: one window should not hold the variants of one phrase
    order = {text: (zlib.crc32(text.encode()), text) for found in texts.values() for text in found}
    return {name: [(texts[name][text], text) for text in sorted(texts[name], key=order.get)] for name in sorted(texts)}


def catalog_pairs(source: Path | None = None) -> Iterator[Pair]:
    """Every translation in Django's catalogs and in those under the folder `source`, sorted, each once.

    A hash of the English text, of its singular where it has a plural, sends 5% to valid and as many to test. A message
    that translates English texts of two splits is left out, so that no text, on either side, is in two of them.
    """
    found, forms = set(), set()
    for path in catalog_files(source):
        for singular, english, message in read_catalog(path):
            found.add((path.parent.parent.name, english, message))
            forms.add((singular, english))

    single: dict[str, str] = {}  # plural -> singular

    def root(text: str) -> str:
        while text in single:
            text = single[text]
        return text

    for singular, english in sorted(forms):
        if root(singular) != root(english):
            single[root(english)] = root(singular)
    splits = {english: split_of(root(english), valid=0.05, test=0.05) for _, english in forms}
    uses = defaultdict(set)  # text -> the splits in which it stands
    for _, english, message in found:
        uses[english].add(splits[english])
        uses[message].add(splits[english])
    kept = sorted(pair for pair in found if len(uses[pair[2]]) == 1)
    counts = Counter(language for language, _, _ in kept)
    for language, english, message in kept:
        if counts[language] >= MIN_MESSAGES:
            yield Pair(language, english, message, splits[english])


def catalog_files(source: Path | None) -> list[Path]:
    """Every LANGUAGE/LC_MESSAGES/*.mo of the installed Django and under `source`, English (its own text) left out."""
    django = importlib.util.find_spec("django")
    if django is None:
        raise ImportError("catalogs reads the message catalogs of Django: pip install django")
    files = []
    for root in [Path(django.submodule_search_locations[0]), *([source] if source else [])]:
        here = sorted(root.rglob("*/LC_MESSAGES/*.mo"))
        if not here:
            raise FileNotFoundError(f"no LANGUAGE/LC_MESSAGES/*.mo under {root}")
        files += [path for path in here if path.parent.parent.name != "en"]
    return files


def read_catalog(path: Path) -> Iterator[tuple[str, str, str]]:
    """(singular, English, message) of every translation in a .mo file; a plural gives its first and its last form.

    Context is dropped. ValueError when the file is damaged.
    """
    data = path.read_bytes()
    order = "<" if data[:4] == bytes.fromhex("de120495") else ">"
    try:
        magic, _, count, *tables = struct.unpack_from(f"{order}5I", data)
        if magic != 0x950412DE:
            raise ValueError("no .mo file")
        places = [struct.unpack_from(f"{order}{2 * count}I", data, table) for table in tables]  # length, offset, ...
        ids, messages = ([slice_of(data, *place) for place in zip(at[::2], at[1::2])] for at in places)
        header = dict(zip(ids, messages)).get(b"", b"")
        charset = re.search(rb"charset=([\w-]+)", header)
        charset = charset[1].decode() if charset else "utf-8"
        entries = [(key.decode(charset), text.decode(charset)) for key, text in zip(ids, messages)]
    except (struct.error, ValueError, LookupError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    for key, text in entries:
        english, forms = key.split("\x04")[-1].split("\0"), text.split("\0")
        for source, message in {(english[0], forms[0]), (english[-1], forms[-1])}:
            # the header is the translation of nothing
            if source.strip() and message.strip():
                yield english[0], source, message


def slice_of(data: bytes, length: int, offset: int) -> bytes:
    if data[offset + length : offset + length + 1] != b"\0":
        raise ValueError(f"no text of {length} bytes at byte {offset}")
    return data[offset : offset + length]


# ---------------------------------------------------------------------------------------------------------------------
# cc100, mc4


def cc100(source: Path | None, streaming: bool) -> dict[str, Documents]:
    """Documents are the blocks between blank lines; a hash of the text sends 1% to valid and as many to test."""
    if source:
        return language_files(source)
    url = "https://data.statmt.org/cc-100/{}.txt.xz"
    options = {"sample_by": "paragraph", "streaming": True}
    return {name: hashed(hub_rows("text", None, "train", data_files=url.format(name), **options)) for name in CC100}


def mc4(source: Path | None, streaming: bool) -> dict[str, Documents]:
    """Documents are web pages; valid and test are halves of mC4's own validation split, by a hash of the text."""
    return language_files(source) if source else {name: mc4_language(name) for name in MC4}


def mc4_language(name: str) -> Documents:
    """One page held out after every 49 of training, as long as there are any: a limit then ends the reading of both."""
    pages = hub_rows("allenai/c4", name, "validation", streaming=True)
    held_out = ((split_of(page, valid=0.5, test=0.5), page) for page in pages)
    for number, page in enumerate(hub_rows("allenai/c4", name, "train", streaming=True)):
        if number % 49 == 0 and (held := next(held_out, None)):
            yield held
        yield "train", page
    yield from held_out


def language_files(source: Path) -> dict[str, Documents]:
    """The documents of LANGUAGE.txt, .jsonl or .parquet, perhaps with more between dots (sw.part1.txt.xz)."""
    files = defaultdict(list)
    for path in source_files(source):
        if re.search(r"\.(txt|jsonl|parquet)(\.gz|\.xz)?$", path.name):
            files[path.name.split(".")[0]].append(path)
    if not files:
        raise FileNotFoundError(f"--source {source} holds no LANGUAGE.txt, .jsonl or .parquet (or these as .gz, .xz)")
    texts = {name: (text for path in paths for text in read_documents(path, least=2)) for name, paths in files.items()}
    return {name: hashed(texts[name]) for name in sorted(texts)}


def hashed(texts: Iterable[str]) -> Documents:
    # stripped, because a block read from a file ends in a line feed and one from the hub does not
    return ((split_of(text, valid=0.01, test=0.01), text) for text in map(str.strip, texts))


MULTILINGUAL = {
    "catalogs": Corpus(catalogs, "the message catalogs of Django", ("django",)),
    "cc100": Corpus(cc100, "https://data.statmt.org/cc-100"),
    "mc4": Corpus(mc4, "allenai/c4"),
}
