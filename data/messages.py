"""Messages beside their English: Home Assistant's, from a wheel that pip downloads and that is never installed.

No text of one split, in any language, is in another.
"""

import json
import re
import subprocess
import sys
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from data.files import Records, sha256, split_of

MIN_MESSAGES = 100  # of a language that is kept
DOWNLOADS = Path(__file__).parent / "downloads"
PIP = [sys.executable, *"-m pip download --quiet --disable-pip-version-check --retries=1 --no-deps".split()]
PIP += ["--only-binary=:all:", "--python-version=3.14"]  # it is read, not run: it may be for another Python
HOMEASSISTANT = "homeassistant==2026.2.3"
SHA256 = "8167820cac4b8defe895fd2c36ac23402a445d1fe6028e8cde24caabb935282c"  # of the one file that will do


def by_language(source: Path | None = None) -> dict[str, Records]:
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
    if not splits:
        raise ValueError(f"no language has {MIN_MESSAGES} texts beside their English: is it the right source?")
    rows = {}
    for language, own in splits.items():
        # not by the alphabet, which would put the variants of one phrase into one window
        texts = sorted(own, key=lambda text: (zlib.crc32(text.encode()), text))
        rows[language] = [(own[text], text) for text in texts]
    return rows


def home_messages(source: Path | None = None) -> set[tuple[str, str, str]]:
    """(language as in zh_Hans, English, message), aligned by key, in single spaces.

    Left out is what is the English itself, or has other {placeholders}.
    """
    texts = defaultdict(dict)  # language -> component and JSON key path -> text
    with zipfile.ZipFile(wheel_file(source)) as archive:
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


def wheel_file(source: Path | None = None) -> Path:
    """Home Assistant's wheel: the file `source`, or that in the folder, or in DOWNLOADS, where pip puts it. OSError,
    ValueError: no such."""
    path = source or DOWNLOADS
    if not path.is_file():
        path /= HOMEASSISTANT.replace("==", "-") + "-py3-none-any.whl"
    if not source:
        DOWNLOADS.mkdir(parents=True, exist_ok=True)
        with FileLock(DOWNLOADS / ".lock"):  # a second preparation waits
            if not path.exists() or sha256(path) != SHA256:  # cut, where a download was killed
                path.unlink(missing_ok=True)
                download()
    if sha256(path) != SHA256:
        raise ValueError(f"{path} is not the wheel of {HOMEASSISTANT} that PyPI has: its sha256 differs")
    return path


def download():
    print(f"downloading {HOMEASSISTANT} into {DOWNLOADS}", file=sys.stderr)
    done = subprocess.run([*PIP, "--dest", str(DOWNLOADS), HOMEASSISTANT], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.splitlines() or ["no reason given"])[-1].removeprefix("ERROR: ")
        needs = "it takes pip and the network, or the wheel in a folder, given with --source"
        raise OSError(f"cannot download {HOMEASSISTANT} ({reason}); {needs}")
