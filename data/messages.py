"""Messages beside their English: Home Assistant's.

No text of one split, in any language, is in another.
"""

import json
import re
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from data.files import Records, split_of
from data.packages import HOMEASSISTANT, wheel_file

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


def separated(found: set[Translated]) -> list[Message]:
    """Translations with their split, sorted. A hash of the English sends 5% to valid and 5% to test.

    A message that translates English texts of two splits is left out, and so are languages of few messages.
    """
    split = {}  # English text -> its split
    uses = defaultdict(set)  # text -> the splits in which it stands
    for _, english, message in found:
        split[english] = split_of(english, valid=0.05, test=0.05)
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
