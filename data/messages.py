"""Messages beside their English: Django's and Home Assistant's.

No text of one split, in any language, is in another.
"""

import json
import re
import struct
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from data.files import Records, split_of
from data.packages import HOMEASSISTANT, package, wheel_file

MIN_MESSAGES = 100  # of a language that is kept
Translated = tuple[str, str, str]  # language as in zh_Hans, English, message
Message = tuple[str, str, str, str]  # the same, and the split


def by_language(messages: list[Message]) -> dict[str, Records]:
    """Documents are messages, each once in a language; those of `en` are the English texts that have a translation."""
    splits = defaultdict(dict)  # language -> text -> split
    for language, english, message, split in messages:
        splits["en"][english] = split
        splits[language][message] = split
    rows = {}
    for language, own in splits.items():
        rows[language] = [(own[text], text) for text in sorted(own, key=scattered)]
    return rows


def by_pair(messages: list[Message]) -> dict[str, Records]:
    """A message and its English, split by the English text."""
    rows = defaultdict(list)
    in_order = sorted(messages, key=lambda row: (scattered(row[1]), row[2]))
    for language, english, message, split in in_order:
        rows[f"{language}-en"].append((split, message, english))
    return rows


def scattered(text: str) -> tuple[int, str]:
    """Sorts by a checksum in place of the alphabet, which would put the variants of one phrase into one window."""
    return zlib.crc32(text.encode()), text


def separated(found: set[Translated], singulars: dict[str, str] | None = None) -> list[Message]:
    """Translations with their split, sorted. A hash of the English sends 5% to valid and 5% to test.

    singulars: English text -> that whose hash is used, where it is not its own. A message that translates English texts
    of two splits is left out, and so are languages of few messages.
    """
    split = {}  # English text -> its split
    uses = defaultdict(set)  # text -> the splits in which it stands
    for _, english, message in found:
        key = (singulars or {}).get(english, english)
        split[english] = split_of(key, valid=0.05, test=0.05)
        uses[english].add(split[english])
        uses[message].add(split[english])
    kept = []
    for language, english, message in sorted(found):
        if len(uses[message]) == 1:
            kept.append((language, english, message, split[english]))
    counts = Counter(language for language, *_ in kept)
    messages = [row for row in kept if counts[row[0]] >= MIN_MESSAGES]
    if not messages:
        raise ValueError(f"no language has {MIN_MESSAGES} texts beside their English: is it the right source?")
    return messages


def django_messages() -> list[Message]:
    """Those of the installed package. A plural is in the split of its singular."""
    found = set()
    singulars = defaultdict(set)  # English text -> the other texts of which it is the plural
    for path in django_catalogs():
        for singular, english, message in read_catalog(path):
            found.add((path.parent.parent.name, english, message))
            singulars[english] |= {singular} - {english}
    return separated(found, {english: min(forms) for english, forms in singulars.items() if forms})


def django_catalogs() -> list[Path]:
    """LANGUAGE/LC_MESSAGES/*.mo, but for English itself."""
    found = package("django").rglob("*/LC_MESSAGES/*.mo")
    return [path for path in found if path.parent.parent.name != "en"]


def read_catalog(path: Path) -> Iterator[tuple[str, str, str]]:
    """(singular, English, message) of the translations in a .mo file; a plural gives its first and its last form.

    Python's gettext reads such files too, but does not give the English plural. A .mo file has two tables of lengths
    and offsets, one of keys and one of texts.
    """
    data = path.read_bytes()
    _, _, count, keys, texts = struct.unpack_from("<5I", data)

    def texts_of(table: int) -> Iterator[str]:
        for place in range(table, table + 8 * count, 8):
            length, offset = struct.unpack_from("<2I", data, place)
            yield data[offset : offset + length].decode()

    for key, text in zip(texts_of(keys), texts_of(texts)):
        english = key.split("\x04")[-1].split("\0")  # a context may stand before it
        forms = text.split("\0")
        for source, message in {(english[0], forms[0]), (english[-1], forms[-1])}:
            if source.strip() and message.strip():  # the file's header is the translation of nothing
                yield english[0], source, message


def home_messages(source: Path | None = None) -> list[Message]:
    """Aligned by key, in single spaces. Left out is what is the English itself, or has other {placeholders}."""
    texts = defaultdict(dict)  # language -> component and JSON key path -> text
    with zipfile.ZipFile(wheel_file(HOMEASSISTANT, source)) as archive:
        for name in archive.namelist():
            if match := re.fullmatch(r"(.+)/translations/([\w-]+)\.json", name):
                component, language = match.groups()
                messages = leaves(json.loads(archive.read(name)), (component,))
                texts[language.replace("-", "_")].update(messages)
    found = set()
    for language, own in texts.items():
        for key, text in own.items():
            english = texts["en"].get(key)
            if english and text not in ("", english) and placeholders(english) == placeholders(text):
                found.add((language, english, text))
    return separated(found)


def leaves(node, keys: tuple) -> Iterator[tuple]:
    """(key path, text) of every text in JSON; the path begins with `keys`."""
    if isinstance(node, str):
        yield keys, " ".join(node.split())
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from leaves(child, (*keys, key))


def placeholders(text: str) -> list[str]:
    return sorted(re.findall(r"\{[^{}]*\}", text))
