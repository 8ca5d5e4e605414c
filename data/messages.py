"""Home Assistant's messages and their English originals, read from its wheel, which need not be installed.

No text appears in two splits, in any language.
"""

import json
import re
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from data.files import Records, sha256, split_of

MIN_MESSAGES = 100  # languages with fewer are dropped
HOMEASSISTANT = "homeassistant==2026.2.3"
SHA256 = "8167820cac4b8defe895fd2c36ac23402a445d1fe6028e8cde24caabb935282c"  # of the only wheel accepted


def by_language(source: Path) -> dict[str, Records]:
    """Documents are messages, unique within a language; those of `en` are the English texts with a translation.

    A hash of the English chooses the split: 5% valid and 5% test. Messages that translate English texts of two splits
    are dropped, and so are languages with few messages.
    """
    messages = sorted(home_messages(source))
    split = {}  # English text -> its split
    uses = defaultdict(set)  # text -> the splits it appears in
    for _, english, message in messages:
        split[english] = split_of(english, valid=0.05, test=0.05)
        uses[english].add(split[english])
        uses[message].add(split[english])
    messages = [row for row in messages if len(uses[row[2]]) == 1]
    counts = Counter(language for language, *_ in messages)
    splits = defaultdict(dict)  # language -> text -> split
    for language, english, message in messages:
        if counts[language] >= MIN_MESSAGES:
            splits["en"][english] = splits[language][message] = split[english]
    rows = {}
    for language, split_by_text in splits.items():
        # alphabetical order would put variants of one phrase into the same window
        texts = sorted(split_by_text, key=lambda text: (zlib.crc32(text.encode()), text))
        rows[language] = [(split_by_text[text], text) for text in texts]
    return rows


def home_messages(source: Path) -> set[tuple[str, str, str]]:
    """(language as in zh_Hans, English, message), aligned by key, with single spaces.

    A message is dropped if it equals the English or has different {placeholders}.
    """
    texts = defaultdict(dict)  # language -> component and JSON key path -> text
    if sha256(source) != SHA256:
        raise ValueError(f"{source} is not PyPI's wheel of {HOMEASSISTANT}: its SHA-256 differs")
    with zipfile.ZipFile(source) as archive:
        for name in archive.namelist():
            if match := re.fullmatch(r"(.+)/translations/([\w-]+)\.json", name):
                component, language = match.groups()
                texts[language.replace("-", "_")].update(leaves(json.loads(archive.read(name)), (component,)))
    aligned = set()
    for language, by_key in texts.items():
        for key, text in by_key.items():
            english = texts["en"].get(key)
            if english and text not in ("", english) and placeholders(english) == placeholders(text):
                aligned.add((language, english, text))
    return aligned


def leaves(node, keys: tuple) -> Iterator[tuple]:
    """(key path, text) of every string in JSON; the path starts with `keys`."""
    if isinstance(node, str):
        yield keys, " ".join(node.split())
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from leaves(child, (*keys, key))


def placeholders(text: str) -> list[str]:
    return sorted(re.findall(r"\{[^{}]*\}", text))
