"""Messages beside their English: Home Assistant's, from its wheel, which is read and need not be installed.

No text of one split, in any language, is in another.
"""

import json
import re
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from data.files import Records, sha256, split_of

MIN_MESSAGES = 100  # of a language that is kept
HOMEASSISTANT = "homeassistant==2026.2.3"
SHA256 = "8167820cac4b8defe895fd2c36ac23402a445d1fe6028e8cde24caabb935282c"  # of the one file that will do


def by_language(source: Path) -> dict[str, Records]:
    """Documents are messages, each once in a language; those of `en` are the English texts that have a translation.

    A hash of the English sends 5% to valid and 5% to test. A message that translates English texts of two splits is
    left out, and so are languages of few messages.
    """
    found = sorted(home_messages(source))
    split = {}  # English text -> its split
    uses = defaultdict(set)  # text -> the splits in which it stands
    for _, english, message in found:
        split[english] = split_of(english, valid=0.05, test=0.05)
        uses[english].add(split[english])
        uses[message].add(split[english])
    kept = [row for row in found if len(uses[row[2]]) == 1]
    counts = Counter(language for language, *_ in kept)
    splits = defaultdict(dict)  # language -> text -> split
    for language, english, message in kept:
        if counts[language] >= MIN_MESSAGES:
            splits["en"][english] = splits[language][message] = split[english]
    rows = {}
    for language, own in splits.items():
        # not by the alphabet, which would put the variants of one phrase into one window
        texts = sorted(own, key=lambda text: (zlib.crc32(text.encode()), text))
        rows[language] = [(own[text], text) for text in texts]
    return rows


def home_messages(source: Path) -> set[tuple[str, str, str]]:
    """(language as in zh_Hans, English, message), aligned by key, in single spaces.

    Left out is what is the English itself, or has other {placeholders}.
    """
    texts = defaultdict(dict)  # language -> component and JSON key path -> text
    if sha256(source) != SHA256:
        raise ValueError(f"{source} is not the wheel of {HOMEASSISTANT} that PyPI has: its sha256 differs")
    with zipfile.ZipFile(source) as archive:
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
    return found


def leaves(node, keys: tuple) -> Iterator[tuple]:
    """(key path, text) of every text in JSON; the path begins with `keys`."""
    if isinstance(node, str):
        yield keys, " ".join(node.split())
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from leaves(child, (*keys, key))


def placeholders(text: str) -> list[str]:
    return sorted(re.findall(r"\{[^{}]*\}", text))
