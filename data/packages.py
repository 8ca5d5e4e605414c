"""Packages that corpora are read from and none is imported: installed ones, and a wheel that pip only downloads."""

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

DOWNLOADS = Path(__file__).parent / "downloads"
PIP = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries=1"]
PIP += ["--no-deps", "--only-binary=:all:"]
PIP += ["--python-version=3.14"]  # the package is read, not run: it need not be one for this Python
HOMEASSISTANT = "homeassistant==2026.2.3"
SHA256 = "8167820cac4b8defe895fd2c36ac23402a445d1fe6028e8cde24caabb935282c"  # of the one file that will do


def package(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    return Path(importlib.util.find_spec(name).submodule_search_locations[0])


def wheel_file(source: Path | None = None) -> Path:
    """Home Assistant's wheel: the file `source`, or that in the folder, or in DOWNLOADS, where pip puts it. OSError,
    ValueError: no such."""
    path = source or DOWNLOADS
    if not path.is_file():
        path /= HOMEASSISTANT.replace("==", "-") + "-py3-none-any.whl"
    if not source:
        DOWNLOADS.mkdir(parents=True, exist_ok=True)
        with FileLock(DOWNLOADS / ".lock"):  # a second preparation waits
            if not path.exists() or not is_whole(path):  # cut, where a download was killed
                path.unlink(missing_ok=True)
                download()
    if not is_whole(path):
        raise ValueError(f"{path} is not the wheel of {HOMEASSISTANT} that PyPI has: its sha256 differs")
    return path


def is_whole(path: Path) -> bool:
    return hashlib.sha256(path.read_bytes()).hexdigest() == SHA256


def download():
    print(f"downloading {HOMEASSISTANT} into {DOWNLOADS}", file=sys.stderr)
    done = subprocess.run([*PIP, "--dest", str(DOWNLOADS), HOMEASSISTANT], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.splitlines() or ["no reason given"])[-1].removeprefix("ERROR: ")
        needs = "it takes pip and the network, or the wheel in a folder, given with --source"
        raise OSError(f"cannot download {HOMEASSISTANT} ({reason}); {needs}")
