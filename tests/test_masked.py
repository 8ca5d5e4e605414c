"""Corpora of many languages, XLM-R's ids, and masked batches: shares, windows, masks, and what they may depend on."""

import gettext
import gzip
import io
import json
import shutil
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
import torch

from data import masked, multilingual
from data import prepare as preparing
from data.corpora import SPLITS, split_of
from data.masked import Masked, MaskedData, mask_tokens
from data.prepare import prepare
from data.tokenizers import XLMR, load_tokenizer, train_sentencepiece
from data.tokens import TokenData

ROOT = Path(__file__).parent.parent
T, B = 16, 4


def refused(*arguments: str) -> str:
    """The one line with which the command refuses."""
    command = [sys.executable, "-m", "data.prepare", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# catalogs

HEADER = {"": "Content-Type: text/plain; charset={}\nPlural-Forms: nplurals=3; plural=n==1 ? 0 : n==2 ? 1 : 2;\n"}


def write_mo(path: Path, texts: dict[str, str], order: str = "<", charset: str = "UTF-8") -> Path:
    texts = {"": HEADER[""].format(charset)} | texts
    keys = [key.encode(charset) for key in texts]
    values = [value.encode(charset) for value in texts.values()]
    place, tables, body = 28 + 16 * len(texts), [], b""
    for text in keys + values:
        tables += [len(text), place + len(body)]
        body += text + b"\0"
    head = struct.pack(f"{order}7I", 0x950412DE, 0, len(texts), 28, 28 + 8 * len(texts), 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + struct.pack(f"{order}{len(tables)}I", *tables) + body)
    return path


CATALOG = {
    "Save": "Speichern",
    "month name\x04May": "Mai",
    "%d item\0%d items": "%d Ding\0%d Dinge (2)\0%d Dinge (n)",
    "verb\x04%d page\0%d pages": "\0%d Seiten (2)\0%d Seiten",
    "untranslated": "",
    "blank": " \n",
    "ſ": "ß – 漢字",
}


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_catalog_holds_what_gettext_reads(tmp_path, order):
    path = write_mo(tmp_path / "a.mo", CATALOG, order)
    with path.open("rb") as file:
        reader = gettext.GNUTranslations(file)
    assert sorted(multilingual.read_catalog(path)) == sorted(
        [
            ("Save", "Save", reader.gettext("Save")),
            ("May", "May", reader.pgettext("month name", "May")),
            ("%d item", "%d item", reader.ngettext("%d item", "%d items", 1)),
            ("%d item", "%d items", reader.ngettext("%d item", "%d items", 9)),
            ("%d page", "%d pages", reader.npgettext("verb", "%d page", "%d pages", 9)),
            ("ſ", "ſ", reader.gettext("ſ")),
        ]
    )


def test_catalogs_in_other_encodings_and_damaged_ones(tmp_path):
    path = write_mo(tmp_path / "a.mo", {"Save": "Sérialiser"}, charset="iso-8859-1")
    assert list(multilingual.read_catalog(path)) == [("Save", "Save", "Sérialiser")]
    whole = write_mo(path, CATALOG).read_bytes()
    no_charset = whole.replace(b"charset=UTF-8", b"charset=NOT-8")
    for content in (whole[:-1], whole[:40], whole[:10], b"", b"MO" + whole[2:], no_charset):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.mo is damaged") as error:
            list(multilingual.read_catalog(path))
        assert "\n" not in str(error.value)


@pytest.fixture
def django(tmp_path, monkeypatch) -> Path:
    """A folder in Django's place, and languages of any size."""
    monkeypatch.setattr(multilingual, "MIN_MESSAGES", 1)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "django")])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec if name == "django" else None)
    return tmp_path / "django" / "conf" / "locale"


def by_split(texts: list[str]) -> dict[str, list[str]]:
    found = {split: [] for split in SPLITS}
    for text in texts:
        found[split_of(text, valid=0.05, test=0.05)].append(text)
    return found


def test_pairs_are_sorted_split_by_english_and_never_leak(django, tmp_path):
    english = by_split([f"message {i}" for i in range(200)])
    held_out, other = english["valid"][:2], english["train"][:3]
    single, plural = english["valid"][2], english["train"][3]
    german = {text: f"de {text}" for text in [*held_out, *other]} | {f"{single}\0{plural}": "eins\0zwei\0viele"}
    # one German text for English texts of two splits, and English that stands for another message of another split
    german |= {other[1]: "doppelt", held_out[1]: "doppelt", other[2]: held_out[0]}
    write_mo(django / "de" / "LC_MESSAGES" / "a.mo", german)
    write_mo(django / "de" / "LC_MESSAGES" / "b.mo", {other[0]: f"de {other[0]}", plural: "allein"}, ">")
    write_mo(django / "en" / "LC_MESSAGES" / "a.mo", {"menu.title": "Title"})
    write_mo(django / "en_GB" / "LC_MESSAGES" / "a.mo", {other[0]: other[0]})
    write_mo(tmp_path / "more" / "deep" / "er" / "sw" / "LC_MESSAGES" / "x.mo", {held_out[0]: "moja"})
    expected = [
        ("de", held_out[0], f"de {held_out[0]}", "valid"),
        ("de", other[0], f"de {other[0]}", "train"),
        ("de", single, "eins", "valid"),
        ("de", plural, "viele", "valid"),
        ("de", plural, "allein", "valid"),
        ("en_GB", other[0], other[0], "train"),
    ]
    assert list(multilingual.catalog_pairs()) == sorted(expected)
    added = [*expected, ("sw", held_out[0], "moja", "valid")]
    assert list(multilingual.catalog_pairs(tmp_path / "more")) == sorted(added)
    documents = multilingual.catalogs(tmp_path / "more", False)
    assert list(documents) == ["de", "en", "en_GB", "sw"] and documents["sw"] == [("valid", "moja")]
    valid = {("valid", text) for text in (held_out[0], single, plural)}
    assert len(documents["en"]) == 4 and set(documents["en"]) == {("train", other[0])} | valid
    with pytest.raises(FileNotFoundError, match=r"no LANGUAGE/LC_MESSAGES/\*\.mo under"):
        list(multilingual.catalog_pairs(tmp_path / "more" / "deep" / "er" / "sw" / "LC_MESSAGES"))


def test_a_language_of_few_messages_is_left_out(django, monkeypatch):
    monkeypatch.setattr(multilingual, "MIN_MESSAGES", 3)
    for language, count in (("af", 2), ("be", 3)):
        texts = {f"{i}": f"{language} {i}" for i in range(count)}
        write_mo(django / language / "LC_MESSAGES" / "a.mo", texts)
    assert {pair.language for pair in multilingual.catalog_pairs()} == {"be"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install django"):
        list(multilingual.catalog_pairs())


def test_the_installed_catalogs():
    pytest.importorskip("django")
    pairs = list(multilingual.catalog_pairs())
    counts = Counter(pair.language for pair in pairs)
    assert len(pairs) > 60_000 and len(counts) > 90 and {"de", "pt_BR", "zh_Hans", "sw"} <= set(counts)
    assert min(counts.values()) >= 100 and "en" not in counts and pairs == sorted(set(pairs))
    splits: dict[str, set[str]] = {}
    for _, english, message, split in pairs:
        splits.setdefault(english, set()).add(split)
        splits.setdefault(message, set()).add(split)
    assert all(len(found) == 1 for found in splits.values())
    english = {(pair.english, pair.split) for pair in pairs}
    shares = [sum(split == name for _, split in english) / len(english) for name in SPLITS]
    assert shares == pytest.approx([0.9, 0.05, 0.05], abs=4 * (0.05 * 0.95 / len(english)) ** 0.5)
    assert ("de", "Please correct the error below.", "Bitte den unten aufgeführten Fehler korrigieren.") in {
        pair[:3] for pair in pairs
    }


# ---------------------------------------------------------------------------------------------------------------------
# XLM-R's ids


@pytest.fixture(scope="session")
def spm(tmp_path_factory) -> Path:
    """A small SentencePiece model for XLM-R's ids, learned from this repository's Python."""
    texts = [path.read_text() for path in sorted((ROOT / "data").glob("*.py"))]
    return train_sentencepiece(texts, vocab_size=500, kind=XLMR).save(tmp_path_factory.mktemp("spm"))


def test_ids_are_fairseqs(spm, tmp_path):
    spm = shutil.copy(spm, tmp_path / "any.model")
    tokenizer = load_tokenizer(spm, kind="xlmr")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    assert (tokenizer.bos, tokenizer.pad, tokenizer.eos, tokenizer.unk, tokenizer.mask) == (0, 1, 2, 3, 499)
    assert tokenizer.special == (0, 1, 2, 3, 499) and tokenizer.eot == 2 and tokenizer.kind == "xlmr"
    assert tokenizer.vocab_size == 500 == processor.vocab_size() + 2
    fairseq = ["<s>", "<pad>", "</s>", "<unk>", *(processor.id_to_piece(i) for i in range(3, 498)), "<mask>"]
    [ids] = tokenizer.encode_batch(["def split_of(key: str)  →\n a  ｆｕｌｌ width"])
    assert [fairseq[token] for token in ids] == processor.encode_as_pieces("def split_of(key: str) → a full width")
    assert tokenizer.decode([0, *ids, 2, 1, 3, 499]) == "def split_of(key: str) → a full width"
    assert min(ids) > 3 and load_tokenizer(spm).kind == "sentencepiece"


def test_unknown_characters_without_byte_fallback():
    model = io.BytesIO()
    lines = iter(["a b c d", "ab cd dc ba"] * 20)
    options = {"vocab_size": 9, "unk_id": 0, "bos_id": 1, "eos_id": 2, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **options)
    tokenizer = XLMR(model.getvalue())
    [ids] = tokenizer.encode_batch(["a漢b"])
    assert ids.count(3) == 1 and tokenizer.decode(ids).replace(" ", "") == "ab"


def test_training_gives_one_file_and_just_that_many_ids(spm):
    texts = [path.read_text() for path in sorted((ROOT / "data").glob("*.py"))]
    again = train_sentencepiece(texts, vocab_size=500, kind=XLMR)
    assert again.sha256 == load_tokenizer(spm, "xlmr").sha256 and again.vocab_size == 500
    assert again.decode(again.encode_batch(["emoji 🙂 in bytes"])[0]) == "emoji 🙂 in bytes"


def test_models_that_cannot_have_xlmrs_ids(tmp_path, spm):
    other = train_sentencepiece([path.read_text() for path in (ROOT / "data").glob("*.py")], 500).save(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer\.model: .* <unk> 0, <s> 1 and </s> 2"):
        load_tokenizer(other, kind="xlmr")
    for content in (b"", b"no model"):
        other.write_bytes(content)
        with pytest.raises(ValueError, match="not a SentencePiece model"):
            load_tokenizer(other, kind="xlmr")
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        load_tokenizer(tmp_path / "absent", kind="xlmr")


# ---------------------------------------------------------------------------------------------------------------------
# prepare


def texts_of(language: str, count: int) -> list[str]:
    rng = np.random.default_rng(list(language.encode()))
    return [f"{language} {i} " + " ".join(map(str, rng.integers(1000, size=9))) for i in range(count)]


SIZES = {"de": 500, "sw": 300, "zh-Hans": 20}


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """Three languages in three formats, the last in two files."""
    base = tmp_path_factory.mktemp("languages")
    (base / "de.txt").write_text("\n\n".join(texts_of("de", 500)))
    with gzip.open(base / "sw.part.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts_of("sw", 300))
    for part in range(2):
        (base / f"zh-Hans.{part}.txt").write_text("\n\n".join(texts_of("zh-Hans", 20)[10 * part : 10 * part + 10]))
    (base / "README.md").write_text("no language")
    return base


@pytest.fixture(scope="session")
def folder(tmp_path_factory, source, spm) -> Path:
    """A prepared corpus of three languages, never written to by a test."""
    return prepare("cc100", source, spm=spm, out=tmp_path_factory.mktemp("many") / "prepared")


def documents_of(folder: Path, split: str, language: str) -> list[str]:
    meta, tokenizer = json.loads((folder / "meta.json").read_text()), load_tokenizer(folder, kind="xlmr")
    counts = meta["languages"][language][split]
    ids = np.fromfile(folder / f"{split}.bin", dtype="uint16")[counts["start"] :][: counts["tokens"]]
    parts = np.split(ids, np.flatnonzero(ids == 2) + 1)
    assert len(parts[-1]) == 0 and len(parts) == counts["documents"] + 1
    texts = [tokenizer.decode(part.tolist()) for part in parts[:-1]]
    assert counts["words"] == sum(len(text.split()) for text in texts)
    return texts


def test_a_folder_of_languages(folder):
    meta = json.loads((folder / "meta.json").read_text())
    assert list(meta["languages"]) == sorted(SIZES) and meta["tokenizer"]["kind"] == "xlmr"
    for language, size in SIZES.items():
        expected = {split: [] for split in SPLITS}
        for text in texts_of(language, size):
            expected[split_of(text, valid=0.01, test=0.01)].append(text)
        assert {split: sorted(documents_of(folder, split, language)) for split in SPLITS} == {
            split: sorted(texts) for split, texts in expected.items()
        }
    for split in SPLITS:
        for key in ("tokens", "words", "documents", "bytes", "characters"):
            assert meta["splits"][split][key] == sum(counts[split][key] for counts in meta["languages"].values())
        assert (folder / f"{split}.bin").stat().st_size == 2 * meta["splits"][split]["tokens"]
    assert preparing.summary(folder).splitlines()[-2] == "3 languages"
    assert TokenData(folder, T, T * B).tokenizer.kind == "xlmr"  # causal models can read it too


def test_languages_can_be_chosen_and_limited(source, spm, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH_CHARS", 500)
    folder = prepare("cc100", source, spm=spm, languages=["sw", "de"], max_tokens=900, out=tmp_path / "out")
    languages = json.loads((folder / "meta.json").read_text())["languages"]
    assert list(languages) == ["de", "sw"]
    longest = max(map(len, load_tokenizer(spm, "xlmr").encode_batch(texts_of("de", 500)))) + 2
    assert all(900 <= counts["train"]["tokens"] < 900 + longest for counts in languages.values())
    whole = prepare("cc100", source, spm=spm, languages=["sw", "de"], out=tmp_path / "whole")
    assert all(
        counts["valid"] == languages[name]["valid"]
        for name, counts in json.loads((whole / "meta.json").read_text())["languages"].items()
    )


def test_catalogs_train_their_own_tokenizer(django, tmp_path, monkeypatch):
    words = Path(masked.__file__).read_text().split()
    phrases = sorted({" ".join(words[i : i + 4]) for i in range(0, len(words), 2)})
    for language in ("de", "sw"):
        write_mo(django / language / "LC_MESSAGES" / "a.mo", {text: f"{language} {text}" for text in phrases})
    trained = []

    def train(texts, kind):
        trained.append(sorted(texts))
        return train_sentencepiece(trained[-1], 400, kind)

    monkeypatch.setattr(preparing, "train_sentencepiece", train)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
    folder = prepare("catalogs", languages=["sw"], out=tmp_path / "out")
    meta = json.loads((folder / "meta.json").read_text())
    assert list(meta["languages"]) == ["sw"] and meta["tokenizer"]["vocab_size"] == 400
    # from the training text of all languages, so that it does not depend on --languages
    expected = [text for text in phrases if split_of(text, valid=0.05, test=0.05) == "train"]
    assert trained == [sorted(form for text in expected for form in (text, f"de {text}", f"sw {text}"))]


def test_bad_input_is_one_line(source, spm, tmp_path):
    common = ["--out", tmp_path / "out"]
    local = ["cc100", "--source", source, "--spm", spm, *common]
    assert "no language 'sv' among 3; did you mean 'sw'?" in refused(*local, "--languages", "de,sv")
    assert "needs --spm PATH" in refused("mc4", *common)
    assert "--spm instead of --tokenizer" in refused("catalogs", "--tokenizer", spm, *common)
    assert "takes --tokenizer" in refused("text", "--source", source, "--spm", spm, *common)
    assert "--languages is for" in refused("pydocs", "--languages", "en", *common)
    assert "did you mean --languages?" in refused(*local, "--langauges", "de")
    assert not (tmp_path / "out").exists()


def test_bad_text_is_one_line(source, spm, tmp_path):
    def reason(**files: bytes) -> str:
        for path in tmp_path.glob("*.txt"):
            path.unlink()
        for name, content in files.items():
            (tmp_path / f"{name}.txt").write_bytes(content)
        with pytest.raises((ValueError, OSError)) as error:
            prepare("mc4", tmp_path, spm=spm, out=tmp_path / "out")
        assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
        return str(error.value)

    (tmp_path / "NOTES.md").write_text("no language")
    good = "\n\n".join(texts_of("de", 500)).encode()
    assert "'sw'" in reason(de=good, sw=b" \n\n") and "no training text (0 documents" in reason(de=good, sw=b"")
    [held_out, *_] = [text for text in texts_of("sw", 500) if split_of(text, valid=0.01, test=0.01) == "test"]
    assert "no training text (1 documents" in reason(de=good, sw=held_out.encode())
    assert "sw.txt is not UTF-8: byte 3" in reason(de=good, sw=b"caf\xe9")
    assert "'valid' is empty" in reason(de=texts_of("de", 1)[0].encode())
    assert "holds no LANGUAGE.txt" in reason()


class FakeHub:
    """Stands in for the `datasets` package; counts the rows that were read."""

    def __init__(self, rows: dict[tuple, list[str]]):
        self.rows, self.asked, self.read = rows, [], Counter()

    def load_dataset(self, repository, config, split, **options):
        self.asked.append((repository, config, split, options))
        key = options.get("data_files", config), split
        if key not in self.rows:
            raise ConnectionError("no route\nto host")
        for text in self.rows[key]:
            self.read[key] += 1
            yield {"text": text}


def test_cc100_streams_what_local_files_hold(source, spm, tmp_path, monkeypatch):
    url = "https://data.statmt.org/cc-100/{}.txt.xz".format
    hub = FakeHub({(url(name), "train"): texts_of(name, size) for name, size in SIZES.items()})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    streamed = prepare("cc100", spm=spm, languages=list(SIZES), out=tmp_path / "hub")
    local = prepare("cc100", source, spm=spm, out=tmp_path / "local")
    # blocks of a file end in a line feed, paragraphs do not: the tokens are the same
    assert all((streamed / f"{split}.bin").read_bytes() == (local / f"{split}.bin").read_bytes() for split in SPLITS)
    options = {"data_files": url("de"), "sample_by": "paragraph", "streaming": True}
    assert hub.asked[0] == ("text", None, "train", options)
    with pytest.raises(OSError, match=r"cannot read https://data\.statmt\.org/cc-100/af\.txt\.xz .*no route") as error:
        prepare("cc100", spm=spm, out=tmp_path / "all")
    assert "\n" not in str(error.value) and "--source" in str(error.value)


def test_a_limit_ends_the_reading_of_a_language(spm, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH_CHARS", 500)
    monkeypatch.setattr(preparing, "ENOUGH", 100)
    both = [(name, split) for name in ("de", "sw") for split in ("train", "validation")]
    hub = FakeHub({(name, split): texts_of(name + split, 5000) for name, split in both})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    folder = prepare("mc4", spm=spm, languages=["de", "sw"], max_tokens=2000, out=tmp_path / "mc4")
    languages = json.loads((folder / "meta.json").read_text())["languages"]
    assert ("allenai/c4", "sw", "train", {"streaming": True}) in hub.asked
    assert set(hub.read) == set(both)
    for name, counts in languages.items():
        assert counts["train"]["tokens"] >= 2000 and min(counts[split]["tokens"] for split in ("valid", "test")) >= 100
        assert hub.read[name, "train"] < 1000 and hub.read[name, "validation"] < 50
        own = [text for split in ("valid", "test") for text in documents_of(folder, split, name)]
        assert own and all(text.startswith(f"{name}validation ") for text in own)
        assert all(text.startswith(f"{name}train ") for text in documents_of(folder, "train", name))


def test_mc4_reads_all_of_both_splits_without_a_limit(monkeypatch):
    hub = FakeHub({("de", "train"): texts_of("a", 100), ("de", "validation"): texts_of("b", 7)})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    documents = list(multilingual.mc4(None, True)["de"])
    assert [text for split, text in documents if split == "train"] == texts_of("a", 100)
    assert [text for split, text in documents if split != "train"] == texts_of("b", 7)
    assert len(set(multilingual.CC100)) == 100 and len(set(multilingual.MC4)) == len(multilingual.MC4)


# ---------------------------------------------------------------------------------------------------------------------
# masks

SPECIAL, MASK, V = (0, 1, 2, 3, 999), 999, 1000
ORDINARY = np.arange(4, 999)


def within(count: int, n: int, p: float) -> bool:
    """Five standard deviations of a binomial: off by chance once in two million."""
    return abs(count - n * p) < 5 * (n * p * (1 - p)) ** 0.5


def test_masking_is_15_percent_80_10_10():
    rng = np.random.default_rng(0)
    rows, width = 4000, 101
    ids = rng.choice(ORDINARY, (rows, width))
    ids[:, 0], ids[:, 40], ids[::2, 90:] = 0, 2, 1
    choosable = ~np.isin(ids, SPECIAL)
    hidden, positions = mask_tokens(ids, choosable, rng, 0.15, MASK, ORDINARY)
    assert (np.diff(positions) > 0).all() and choosable.ravel()[positions].all()
    chosen = np.zeros(rows * width, dtype=bool)
    chosen[positions] = True
    chosen = chosen.reshape(rows, width)
    assert (hidden[~chosen] == ids[~chosen]).all()
    n, count = choosable.sum(axis=1), chosen.sum(axis=1)
    assert set(n) == {88, 99} and set(count[n == 88]) == {13, 14} and set(count[n == 99]) == {14, 15}
    for size in (88, 99):  # 13.2 and 14.85 in the mean
        assert within((count[n == size] > int(size * 0.15)).sum(), rows // 2, size * 0.15 % 1)
    for place in (1, 39, 41, 89):
        assert within(chosen[:, place].sum(), rows, 0.15)
    assert within(chosen[1::2, 100].sum(), rows // 2, 0.15)
    new, old = hidden[chosen], ids[chosen]
    assert within((new == MASK).sum(), len(new), 0.8)
    drawn = (new != MASK) & (new != old)
    assert within(drawn.sum(), len(new), 0.1 * (1 - 1 / len(ORDINARY)))
    assert within((new == old).sum(), len(new), 0.1 + 0.1 / len(ORDINARY))
    assert not np.isin(new[drawn], SPECIAL).any()
    assert within((new[drawn] < 500).sum(), int(drawn.sum()), 496 / 995)


def test_always_mask_and_at_least_one():
    ids = np.full((3, 8), 7)
    choosable = np.zeros((3, 8), dtype=bool)
    choosable[1, 5] = choosable[2] = True
    for seed in range(20):
        rng = np.random.default_rng(seed)
        hidden, positions = mask_tokens(ids, choosable, rng, 0.15, MASK, ORDINARY, replace=(1.0, 0.0))
        assert positions[0] == 13 and (positions[1:] >= 16).all() and len(positions) in (2, 3)
        assert (hidden.ravel()[positions] == MASK).all() and (hidden == MASK).sum() == len(positions)
    _, positions = mask_tokens(ids, choosable, rng, 1.0, MASK, ORDINARY)
    assert positions.tolist() == [13, *range(16, 24)]


# ---------------------------------------------------------------------------------------------------------------------
# batches. In these folders no token comes twice in a split, so that it tells its own place.


def numbered(base: Path, sizes: dict[str, tuple[int, int]], **arguments) -> MaskedData:
    """Languages of (train and test, valid) tokens: ids from 4 on, in order, over all languages."""
    base.mkdir(parents=True, exist_ok=True)
    languages, total = {language: {} for language in sizes}, 0
    splits = {}
    for split in SPLITS:
        start = 0
        for language, size in sizes.items():
            tokens = size[split == "valid"]
            languages[language][split] = {"start": start, "tokens": tokens}
            start += tokens
        np.arange(4, 4 + start, dtype="uint32").tofile(base / f"{split}.bin")
        splits[split], total = {"tokens": start}, max(total, start)
    tokenizer = {"vocab_size": total + 5}
    meta = {"name": "numbered", "splits": splits, "dtype": "uint32", "languages": languages, "checksum": "none"}
    (base / "meta.json").write_text(json.dumps(meta | {"tokenizer": tokenizer}))

    class Numbered(MaskedData):
        tokenizer = SimpleNamespace(bos=0, pad=1, eos=2, unk=3, mask=total + 4, special=(0, 1, 2, 3, total + 4))

    return Numbered(base, **({"block_size": T, "micro_tokens": T * B} | arguments))


def restored(batch: Masked) -> torch.Tensor:
    """(B, T) ids before masking."""
    ids = batch.ids.clone()
    ids.view(-1)[batch.masked] = batch.targets
    return ids


def starts_of(data: MaskedData, batch: Masked, split: str = "train") -> list[tuple[int, int]]:
    """(language, place of the first token in its stream) of each row; checks that a row is `<s>` and one language."""
    found = []
    for row in restored(batch).numpy():
        text = row[1:][row[1:] != 1] - 4
        assert row[0] == 0 and (np.diff(text) == 1).all() and (row[1 + len(text) :] == 1).all()
        streams = data.streams[split].tolist()
        [language] = [j for j, (start, size) in enumerate(streams) if start <= text[0] < start + size]
        start, size = streams[language]
        assert text[-1] < start + size
        found.append((language, int(text[0] - start)))
    return found


def same(one: Masked, two: Masked) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, two))


def test_shares_are_the_smoothed_sizes(tmp_path):
    data = numbered(tmp_path / "a", {"a": (4096, 9), "b": (2048, 9), "c": (1024, 9), "d": (1024, 0)}, exponent=1)
    assert all(data.quotas("train", number).tolist() == [8192, 4096, 2048, 2048] for number in range(50))
    # a language without text in a split has no share of it: 4 : 2 : 1 of 16,384 is 9362.3 : 4681.1 : 2340.6
    assert all(data.quotas("valid", number)[3] == 0 for number in range(50))
    assert set(data.quotas("valid", number)[0] for number in range(50)) == {9362, 9363}
    # 1024 ** 0.7 is 128: shares of 128 and 1 in 129, 16257.0 and 127.0 samples
    data = numbered(tmp_path / "b", {"a": (102400, 9), "b": (100, 9)})
    quotas = np.array([data.quotas("train", number) for number in range(1000)])
    assert set(quotas[:, 1]) == {127, 128} and (quotas.sum(axis=1) == masked.ROUND).all()
    assert quotas[:, 1].sum() == pytest.approx(1000 * 16384 / 129, abs=2)
    assert data.quotas("valid", 0).tolist() != [8192, 8192]  # by the training tokens, here too
    # a sixteenth of a sample a round: once in about sixteen rounds, never by itself twice
    data = numbered(tmp_path / "c", {"a": (2**18 - 1, 9), "b": (1, 9)}, exponent=1)
    times = [number for number in range(1600) if data.quotas("train", number)[1]]
    assert len(times) == pytest.approx(100, abs=2) and max(np.diff(times)) < 40
    assert max(data.quotas("train", number)[1] for number in range(1600)) == 1


def test_batches_draw_the_quotas_shuffled(tmp_path, monkeypatch):
    monkeypatch.setattr(masked, "ROUND", 40)
    data = numbered(tmp_path, {"a": (4000, 90), "b": (2000, 90), "c": (77, 90)})
    rows = [language for step in range(30) for language, _ in starts_of(data, data.batch("train", step))]
    for number in range(3):
        part = rows[40 * number : 40 * number + 40]
        assert np.bincount(part, minlength=3).tolist() == data.quotas("train", number).tolist() and part != sorted(part)
    data = numbered(tmp_path / "even", {"a": (4000, 90), "b": (2000, 90), "c": (2000, 90)}, exponent=1)
    rows = [language for step in range(20) for language, _ in starts_of(data, data.batch("train", step))]
    assert np.bincount(rows[:40]).tolist() == np.bincount(rows[40:]).tolist() and rows[:40] != rows[40:]
    assert data.languages == ["a", "b", "c"]


@pytest.mark.parametrize("size", [15, 16, 29, 30, 31, 44, 45, 150, 1000])
def test_a_pass_repeats_nothing_and_the_next_is_another(tmp_path, monkeypatch, size):
    monkeypatch.setattr(masked, "ROUND", 50)  # a pass over 65 windows goes on from round to round
    data = numbered(tmp_path, {"a": (size, 9), "b": (1003, 9)}, exponent=0)
    found = [start for step in range(120) for start in starts_of(data, data.batch("train", step))]
    for language, total in enumerate((size, 1003)):
        starts, windows = [start for name, start in found if name == language], max(1, total // 15 - 1)
        passes = [starts[i : i + windows] for i in range(0, len(starts) - windows + 1, windows)]
        assert len(passes) > 1
        for one in passes:  # every window of one offset, so they touch and do not overlap
            assert sorted(one) == list(range(min(one), min(one) + 15 * windows, 15)) and max(one) + 15 <= total
        if windows > 10:
            assert passes[0] != sorted(passes[0]) and np.argsort(passes[0]).tolist() != np.argsort(passes[1]).tolist()
        if total > 15:
            assert len({min(one) for one in passes}) > 1


def test_batches_depend_on_seed_split_step_and_micro_alone(folder, monkeypatch):
    monkeypatch.setattr(masked, "ROUND", 64)
    one, two = (MaskedData(folder, T, T * B, 2, seed=1) for _ in range(2))
    asked = [(split, step, micro) for split in ("train", "valid") for step in (0, 9000, 50, 7, 0) for micro in (1, 0)]
    first = {key: one.batch(*key) for key in asked}
    assert all(same(two.batch(*key), first[key]) for key in reversed(asked))
    assert len({batch.ids.numpy().tobytes() for batch in first.values()}) == 16
    other = MaskedData(folder, T, T * B, 2, seed=2).batch("train", 0, 0)
    assert not torch.equal(restored(other), restored(first["train", 0, 0]))


def test_processes_share_the_data_of_one(folder):
    """Four micro-batches a step dealt to two processes are, together, one process's: none twice, none missing."""
    alone, *ranks = (MaskedData(folder, T, T * B, micros_per_step=4) for _ in range(3))
    whole = [alone.batch("train", step, micro) for step in range(3) for micro in range(4)]
    dealt = [ranks[micro % 2].batch("train", step, micro) for step in range(3) for micro in range(4)]
    assert all(map(same, whole, dealt))
    assert len(torch.cat([restored(batch) for batch in whole]).unique(dim=0)) == 3 * 4 * B
    # the same samples, whatever the micro-batch: twice the rows in half the micro-batches
    wide = MaskedData(folder, T, 2 * T * B, micros_per_step=2)
    both = [restored(wide.batch("train", step, micro)) for step in range(3) for micro in range(2)]
    assert torch.equal(torch.cat([restored(batch) for batch in whole]), torch.cat(both))
    # masks are drawn anew for every micro-batch
    assert len({tuple(batch.masked.tolist()) for batch in whole}) == 12


def test_a_batch_is_what_it_says(folder):
    data = MaskedData(folder, T, T * B + 5, mask_share=0.3)
    tokens = np.fromfile(folder / "train.bin", dtype="uint16")
    windows = np.lib.stride_tricks.sliding_window_view(tokens, T - 1)
    for step in range(20):
        batch = data.batch("train", step)
        assert batch.ids.shape == (B, T) and batch.real is None
        assert all(part.dtype == torch.int64 for part in batch if part is not None)
        assert len(batch.masked) == len(batch.targets) == len(batch.language)
        assert not np.isin(batch.targets, data.tokenizer.special).any()
        for number, row in enumerate(restored(batch).numpy()):
            [place, *_] = np.flatnonzero((windows == row[1:]).all(axis=1))
            [language] = set(batch.language[batch.masked // T == number].tolist())
            counts = data.meta["languages"][data.languages[language]]["train"]
            assert counts["start"] <= place <= counts["start"] + counts["tokens"] - (T - 1)
            n = int((~np.isin(row, data.tokenizer.special)).sum())
            assert int((batch.masked // T == number).sum()) in (int(n * 0.3), int(n * 0.3) + 1)


def test_a_language_shorter_than_a_window_is_padded(tmp_path):
    data = numbered(tmp_path, {"a": (5, 9), "b": (300, 9)}, exponent=0, mask_share=1)
    seen = set()
    for step in range(40):
        batch = data.batch("train", step)
        rows, lengths = starts_of(data, batch), [6 if language == 0 else T for language, _ in starts_of(data, batch)]
        seen.update(lengths)
        expected = [row * T + place for row, length in enumerate(lengths) for place in range(length)]
        assert (batch.real is None and min(lengths) == T) or batch.real.tolist() == expected
        assert batch.masked.tolist() == [position for position in expected if position % T]
        assert batch.language.tolist() == [rows[position // T][0] for position in batch.masked.tolist()]
    assert seen == {6, T}


# ---------------------------------------------------------------------------------------------------------------------
# evaluation

EVALUATED = {"a": (900, 100), "b": (900, 0), "c": (900, 47), "d": (900, 16), "e": (900, 15), "f": (900, 1)}


def reading(data: MaskedData, **arguments) -> dict[int, list[tuple[int, Masked]]]:
    found: dict[int, list] = {}
    for k, first, batch in data.eval_batches("valid", **arguments):
        found.setdefault(k, []).append((first, batch))
    return found


def spread(data: MaskedData, batches: list[tuple[int, Masked]], count: int) -> np.ndarray:
    """(3, count) ids before and after masking and language (-1 where not masked) of the real tokens, by number."""
    table = np.full((3, count), -1)
    for first, batch in batches:
        real = np.arange(batch.ids.numel()) if batch.real is None else batch.real.numpy()
        places = first + np.arange(len(real))
        assert (table[0, places] == -1).all()
        table[0, places], table[1, places] = restored(batch).flatten()[real], batch.ids.flatten()[real]
        table[2, first + np.searchsorted(real, batch.masked.numpy())] = batch.language
    return table


def test_evaluation_reads_every_token_once_per_masking(tmp_path):
    data = numbered(tmp_path, EVALUATED)
    count = data.eval_tokens("valid")
    assert count == 179 + 7 + 4 + 2 + 1 + 1  # the text and one <s> for each window
    turns = reading(data, maskings=3)
    assert list(turns) == [0, 1, 2]
    tables = []
    for batches in turns.values():
        assert [first for first, _ in batches] == sorted(first for first, _ in batches)
        table = spread(data, batches, count)
        assert sorted(table[0][table[0] != 0]) == list(range(4, 183)) and (table[0] == 0).sum() == 15
        tables.append(table)
        for _, batch in batches:
            starts_of(data, batch, "valid")
            lengths = (restored(batch) != 1).sum(dim=1)
            assert lengths.max() == batch.ids.shape[1] and (lengths.diff() >= 0).all()
            assert not np.isin(batch.targets, (0, 1)).any() and len(batch.masked)
    assert all((table[0] == tables[0][0]).all() for table in tables)
    assert not (tables[0][2] == tables[1][2]).all()
    chosen = tables[0][2] >= 0
    ends = np.cumsum([size for _, size in EVALUATED.values()]) + 4
    assert (tables[0][2][chosen] == np.searchsorted(ends, tables[0][0][chosen], side="right")).all()


@pytest.mark.parametrize("change", [{"seed": 5}, {"micro_tokens": 7 * T}, {"micro_tokens": T}, {"micros_per_step": 3}])
def test_evaluation_depends_on_neither_seed_nor_batch_size(tmp_path, change):
    plain, other = numbered(tmp_path / "a", EVALUATED), numbered(tmp_path / "b", EVALUATED, **change)
    count = plain.eval_tokens("valid")
    one, two = reading(plain, maskings=2), reading(other, maskings=2)
    for k in range(2):
        assert (spread(plain, one[k], count) == spread(other, two[k], count)).all()


def test_evaluation_is_dealt_to_processes(tmp_path):
    data = numbered(tmp_path, EVALUATED)
    whole = list(data.eval_batches("valid", maskings=2))
    ranks = [list(data.eval_batches("valid", maskings=2, rank=rank, world=3)) for rank in range(3)]
    assert sum(map(len, ranks)) == len(whole)
    for i, (k, first, batch) in enumerate(whole):
        other = ranks[i % 3][i // 3]
        assert other[:2] == (k, first) and same(other[2], batch)


def test_limited_evaluation_takes_all_languages_evenly(tmp_path):
    data = numbered(tmp_path, EVALUATED)
    full = {}
    for _, batch in reading(data, maskings=1)[0]:
        for row, original in zip(batch.ids, restored(batch)):
            full[int(original[1])] = row[original != 1].tolist()
    # the first windows of a, c, d, e, f: 16 + 16 + 16 + 16 + 2; then the second of a and of c
    for limit, windows in ((66, 5), (81, 5), (98, 7), (1, 1), (10**6, 15)):
        rows = []
        for _, batch in reading(data, maskings=1, max_tokens=limit)[0]:
            for row, original in zip(batch.ids, restored(batch)):
                rows.append(int(original[1]))
                assert full[rows[-1]] == row[original != 1].tolist()  # masked as in a full evaluation
        assert len(rows) == len(set(rows)) == windows
        if limit == 66:
            assert sorted(rows) == [4, 104, 151, 167, 182]
    assert data.eval_tokens("valid", max_tokens=66) == 66


def test_evaluation_masks_what_training_masks(tmp_path):
    data = numbered(tmp_path, {"a": (900, 15_000)}, block_size=101, micro_tokens=1010)
    tables = [spread(data, batches, data.eval_tokens("valid")) for batches in reading(data).values()]
    assert len(tables) == 10
    chosen = np.concatenate([table[2] for table in tables]) == 0
    old, new = (np.concatenate([table[i] for table in tables])[chosen] for i in (0, 1))
    assert within(len(old), 150_000, 0.15) and within((new == data.tokenizer.mask).sum(), len(new), 0.8)
    assert within((new == old).sum(), len(new), 0.1)


# ---------------------------------------------------------------------------------------------------------------------
# folders and arguments that do not do


def test_bad_folders_and_arguments(folder, tmp_path, spm):
    with pytest.raises(ValueError, match="block_size 7 must be at least 8"):
        MaskedData(folder, 7, 70)
    with pytest.raises(ValueError, match="micro_tokens 15 must be at least one block of 16"):
        MaskedData(folder, T, T - 1)
    with pytest.raises(ValueError, match="mask_share 1.5"):
        MaskedData(folder, T, T, mask_share=1.5)
    with pytest.raises(FileNotFoundError, match="data.prepare absent"):
        MaskedData(tmp_path / "absent", T, T)
    (tmp_path / "one.txt").write_text("\n\n".join(texts_of("de", 500)))
    alone = train_sentencepiece(texts_of("de", 500), 400).save(tmp_path)
    plain = prepare("text", tmp_path / "one.txt", alone, out=tmp_path / "plain")
    with pytest.raises(ValueError, match="holds 'text', a corpus of one language; .* data.prepare catalogs"):
        MaskedData(plain, T, T)
    numbered(tmp_path / "n", {"a": (100, 50)})
    path = tmp_path / "n" / "meta.json"
    whole = json.loads(path.read_text())
    for languages in ({}, {"a": {}}, {"a": {split: {"start": 60, "tokens": 50} for split in SPLITS}}, [1]):
        path.write_text(json.dumps(whole | {"languages": languages}))
        with pytest.raises(ValueError, match=r"meta\.json (is damaged|does not fit)"):
            MaskedData(tmp_path / "n", T, T)
    with pytest.raises(ValueError, match=r"valid\.bin holds no text"):
        numbered(tmp_path / "no", {"a": (100, 0)})


def test_the_tokenizer_of_the_folder_is_xlmrs(folder, spm):
    data = MaskedData(folder, T, T * B)
    data.verify()
    assert isinstance(data.tokenizer, XLMR) and data.vocab_size == 500 == data.tokenizer.vocab_size
    assert isinstance(load_tokenizer(folder), XLMR) and len(data.ordinary) == 495
