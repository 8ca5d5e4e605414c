"""Making data: splits share nothing, and a prepared folder is whole, or not there at all."""

import gettext
import gzip
import json
import lzma
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from filelock import FileLock

from data import corpora, docstrings
from data import prepare as preparing
from data.corpora import CORPORA
from data.files import SPLITS, read_catalog, read_documents, read_lines, split_of
from data.prepare import prepare, ready
from data.tokenizers import XLMR, SentencePiece, load_tokenizer, train_sentencepiece

ROOT = Path(__file__).parent.parent


def own_code() -> list[str]:
    return [path.read_text() for path in sorted((ROOT / "data").glob("*.py"))]


def lines_of(name: str, count: int) -> list[str]:
    """Texts that are different in every language and every place."""
    rng = np.random.default_rng(list(name.encode()))
    return [f"{name} {i} " + " ".join(map(str, rng.integers(99, size=1 + i % 5))) for i in range(count)]


def refusal(name: str, *arguments, **options) -> str:
    """The one line with which a preparation refuses."""
    with pytest.raises((ValueError, OSError, ImportError)) as error:
        prepare(name, *arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def meta_of(folder: Path) -> dict:
    return json.loads((folder / "meta.json").read_text())


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A small SentencePiece model, learned from this repository's Python."""
    return train_sentencepiece(own_code(), vocab_size=600).save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def spm(tmp_path_factory) -> Path:
    """The same under XLM-R's ids."""
    return train_sentencepiece(own_code(), vocab_size=500, kind=XLMR).save(tmp_path_factory.mktemp("spm"))


class FakeHub:
    """Stands in for the `datasets` package; counts the rows that were read."""

    def __init__(self):
        self.rows, self.read = {}, Counter()

    def load_dataset(self, *name, split, **options):
        assert options["streaming"]
        key = (options.get("data_files", name[-1]), split)
        if key not in self.rows:
            raise ConnectionError("no route\nto host")
        for row in self.rows[key]:
            self.read[key] += 1
            yield {"text": row} if isinstance(row, str) else row

    def get_dataset_split_names(self, *name):
        return [split for key, split in self.rows if key == name[-1]]

    def get_dataset_config_names(self, repository):
        return list(dict.fromkeys(key for key, _ in self.rows))


@pytest.fixture
def hub(monkeypatch) -> FakeHub:
    hub = FakeHub()
    monkeypatch.setitem(sys.modules, "datasets", hub)
    return hub


# ---------------------------------------------------------------------------------------------------------------------
# files


def test_split_shares():
    splits = [split_of(f"text {i}", valid=0.1, test=0.2) for i in range(4000)]
    assert [splits.count(name) / 4000 for name in SPLITS] == pytest.approx([0.7, 0.1, 0.2], abs=0.02)


def test_text_files_of_every_kind(tmp_path):
    (tmp_path / "a.md").write_text("one\nmore of one\n\n \n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"text": "three\\n\\nstill three"}\n\n{"id": 4, "text": "four"}\n')
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write('{"text": "five"}\n')
    with lzma.open(tmp_path / "d.txt.xz", "wt") as file:
        file.write("six\n")
    (tmp_path / "e.json").write_text('{"text": "seven", "url": "x"}\n')
    (tmp_path / ".git").mkdir()
    for name in (".hidden.txt", ".git/config"):
        (tmp_path / name).write_text("not read")
    documents = sorted(text for _, text in corpora.text(tmp_path))
    assert documents == sorted(["one\nmore of one", "two", "three\n\nstill three", "four", "five", "six", "seven"])


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table({"text": ["one", "", "two"]}), tmp_path / "a.parquet"
    )
    assert list(read_documents(tmp_path / "a.parquet")) == ["one", "", "two"]
    pyarrow.parquet.write_table(pyarrow.table({"words": ["one"]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet has no 'text' column"):
        list(read_documents(tmp_path / "b.parquet"))
    (tmp_path / "c.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"c\.parquet cannot be read"):
        list(read_documents(tmp_path / "c.parquet"))


def test_splits_named_by_files(tmp_path):
    for name in ("train-0001.txt", "my.validation.txt", "test/a.txt", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    expected = [("valid", "my.validation.txt"), ("test", "test/a.txt"), ("train", "train-0001.txt")]
    assert list(corpora.text(tmp_path)) == expected


def test_a_mark_of_utf8_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntw\xef\xbb\xbfo\n")
    assert list(read_lines(tmp_path / "a.txt")) == ["one\n", "tw\ufeffo\n"]
    (tmp_path / "empty.txt").write_bytes(b"\xef\xbb\xbf")
    assert list(read_documents(tmp_path / "empty.txt")) == []
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}')
    assert list(read_documents(tmp_path / "a.jsonl")) == ["one"]


def test_texts_that_two_splits_have_are_counted(tmp_path, capsys):
    for name, text in {"train": "a\nb\nc\nb\n", "valid": "b\nd\n", "test": "c\n"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    assert len(list(corpora.text(tmp_path))) == 7  # none is left out
    assert capsys.readouterr().err == "warning: 3 training texts stand in valid or test, too\n"
    (tmp_path / "train.txt").write_text("a\na\n")
    list(corpora.text(tmp_path))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("line", ["{", "[1]", '{"text": 3}', '{"words": "a"}', "[" * 100_000])
def test_bad_jsonl_names_file_and_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2"):
        list(corpora.text(tmp_path))


@pytest.mark.parametrize(
    "lines, blank, documents",
    [
        (3, None, 3),
        (3, 1, 2),
        (1, None, 1),
        (1200, None, 1200),
        (1200, 1100, 1200),  # the first 1,000 lines tell
        (1200, 900, 2),
    ],
)
def test_documents_are_blocks_or_lines(tmp_path, lines, blank, documents):
    text = [f"line {i}\n" for i in range(lines)]
    if blank is not None:
        text.insert(blank, "\n")
    (tmp_path / "a.txt").write_text("".join(text))
    found = list(read_documents(tmp_path / "a.txt"))
    assert len(found) == documents and "\n".join(found).split() == "".join(text).split()


# ---------------------------------------------------------------------------------------------------------------------
# corpora of one language


def test_prose_of_definitions_and_of_compiled_functions(tmp_path):
    source = """
'A module that documents many things.'
add_docstr(torch.abs, r'''abs(input) -> Tensor

    The absolute value of {input}.'''.format(**common) + " And a longer tail.")
add_newdoc("numpy", "ndarray", ("T", '''A view of the transposed array.'''))
Adam.__doc__ = '''The optimizer that is called Adam.''' + more
topics = {"if": '''The "if" statement is used for conditional execution.'''}
other = '''Not documentation, only a longer string.'''
print('''Not documentation, only a longer string.''')
class A:
    '''Too short.'''
    if True:
        async def method(self):
            '''Indented text of a method,
            over two lines.'''
try:
    import fast
except ImportError:
    @add_docstr('''Given to a function by a decorator.''')
    def slow(): pass
"""
    (tmp_path / "a.py").write_text(source)
    assert docstrings.paragraphs(tmp_path / "a.py") == [
        "A module that documents many things.",
        "The absolute value of {input}. And a longer tail.",
        "A view of the transposed array.",
        "The optimizer that is called Adam.",
        'The "if" statement is used for conditional execution.',
        "Indented text of a method, over two lines.",
        "Given to a function by a decorator.",
    ]
    (tmp_path / "b.py").write_text("def broken(:\n")
    assert docstrings.paragraphs(tmp_path / "b.py") == []


PROSE = {  # a docstring, and its paragraphs
    "Returns what :func:`~torch.abs` and :py:class:`the class <a.B>` make of it.": [
        "Returns what torch.abs and the class make of it."
    ],
    "This ``list`` is **never** sorted, `sometimes` even *rather* long.": [
        "This list is never sorted, sometimes even rather long."
    ],
    "All of it stands in `the manual <https://a.org/b>`_ and in `another one`_ too.": [
        "All of it stands in the manual and in another one too."
    ],
    "The area is one side * the other, of two * that are equal a square.": [
        "The area is one side * the other, of two * that are equal a square."
    ],
    "- The first of two points.\n\n2. The second of two points.\n\n.. note:: This must be known, too.": [
        "The first of two points.",
        "The second of two points.",
        "This must be known, too.",
    ],
    "A sentence that goes\n    over two lines.\n  \nIt is used like this::\n\n    >>> f(3)\n    9": [
        "A sentence that goes over two lines.",
        "It is used like this:",
    ],
    "Args:\n    value: What is given to the function.\n\nReturns: What the function makes of it.": [
        "What the function makes of it."
    ],
    "Parameters\n----------\nX, Y : array_like\n    Values that are to be sorted.\n\nThe order of equals is kept.": [
        "The order of equals is kept."
    ],
    ">>> Print the words of it.\n\nAdd(input, other, *, alpha=1) -> Tensor\n\nY = X W^T + b, Z = (Y - mu) / sigma.": [],
    "One two three four 5.\n\nOne two three 4 5.": ["One two three four 5."],
    "without a capital it is none.\n\nAnd without a mark neither\n\nToo few words here.": [],
}


@pytest.mark.parametrize("text", PROSE)
def test_prose_is_whole_sentences_without_markup(text):
    assert list(docstrings.prose(text)) == PROSE[text]


def test_installed_documentation_is_found():
    files = corpora.python_files({"torch": corpora.package("torch"), "python": Path(json.__file__).parent.parent})
    assert list(files) == sorted(files)
    assert not [name for name in files if {"tests", "test", "site-packages"}.intersection(name.split("/"))]
    expected = {
        "torch/_torch_docs.py": "Matrix product of two tensors.",
        "python/pydoc_data/topics.py": 'The "if" statement is used for conditional execution:',
    }
    for name, phrase in expected.items():
        assert phrase in "\n".join(docstrings.paragraphs(files[name]))


def test_pydocs_keeps_a_paragraph_once(tmp_path):
    for i in range(60):
        shared = "The same words in every file."
        text = f'"""Module number {i} of the whole package."""\ndef f():\n    """{shared}\n\n    {shared}"""\n'
        (tmp_path / f"m{i:02}.py").write_text(text)
    documents = list(corpora.pydocs(tmp_path))
    assert len(documents) == 60 and sum("same words" in text for _, text in documents) == 1
    assert documents[0][1] == "Module number 0 of the whole package.\n\nThe same words in every file."
    assert documents == list(corpora.pydocs(tmp_path))
    assert {split for split, _ in documents} > {"train"}


def test_articles_are_cut_at_top_level_headings(tmp_path):
    blank = " \n"
    first = [" = One = \n", blank, " Text with x = y = z . \n", " = not a heading = \n", blank]
    first += [" = = Section = = \n", blank]
    second = [" = Two @-@ fold = \n", blank, " More text . \n"]
    for split in ("valid", "test"):
        (tmp_path / f"wiki.{split}.raw").write_text("".join([blank, *first, *second]))
    with gzip.open(tmp_path / "wiki.train.tokens.gz", "wt") as file:
        file.write("".join(second))
    documents = list(corpora.wikitext103(tmp_path))
    assert [split for split, _ in documents] == ["valid", "valid", "test", "test", "train"]
    assert documents[0][1] == blank + "".join(first) and documents[1][1] == documents[4][1] == "".join(second)
    (tmp_path / "wiki.test.raw").unlink()
    with pytest.raises(FileNotFoundError, match=r"wiki\.test\.raw"):
        list(corpora.wikitext103(tmp_path))


def test_the_hub_gives_what_local_files_give(tmp_path, hub, monkeypatch):
    lines = [" \n", " = One = \n", " \n", " Text . \n", " \n", " = Two = \n", " \n", " Text . \n"]
    for split in SPLITS:
        (tmp_path / f"wiki.{split}.raw").write_text("".join(lines))
    rows = [line if line.strip() else "" for line in lines]  # as the hub has them
    hub.rows = {("wikitext-103-raw-v1", split): rows for split in ("train", "validation", "test")}
    assert list(corpora.wikitext103()) == list(corpora.wikitext103(tmp_path))
    hub.rows = {("Skylion007/openwebtext", "train"): ["a page", "another page"]}
    assert [text for _, text in corpora.openwebtext()] == ["a page", "another page"]
    with pytest.raises(OSError, match="no route") as error:
        list(corpora.wikitext103())
    assert "\n" not in str(error.value) and "--source" in str(error.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(OSError, match="pip install datasets"):
        list(corpora.openwebtext())


# ---------------------------------------------------------------------------------------------------------------------
# catalogs


def write_mo(path: Path, texts: dict[str, str]) -> Path:
    header = "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=3; plural=n==1 ? 0 : n==2 ? 1 : 2;\n"
    texts = {"": header} | texts
    encoded = [text.encode() for text in [*texts, *texts.values()]]
    place, tables, body = 28 + 16 * len(texts), [], b""
    for text in encoded:
        tables += [len(text), place + len(body)]
        body += text + b"\0"
    head = struct.pack("<7I", 0x950412DE, 0, len(texts), 28, 28 + 8 * len(texts), 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + struct.pack(f"<{len(tables)}I", *tables) + body)
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


def test_a_catalog_holds_what_gettext_reads(tmp_path):
    path = write_mo(tmp_path / "a.mo", CATALOG)
    with path.open("rb") as file:
        reader = gettext.GNUTranslations(file)
    assert sorted(read_catalog(path)) == sorted(
        [
            ("Save", "Save", reader.gettext("Save")),
            ("May", "May", reader.pgettext("month name", "May")),
            ("%d item", "%d item", reader.ngettext("%d item", "%d items", 1)),
            ("%d item", "%d items", reader.ngettext("%d item", "%d items", 9)),
            ("%d page", "%d pages", reader.npgettext("verb", "%d page", "%d pages", 9)),
            ("ſ", "ſ", reader.gettext("ſ")),
        ]
    )


def test_damaged_catalogs(tmp_path):
    path = write_mo(tmp_path / "a.mo", CATALOG)
    whole = path.read_bytes()
    latin = whole.replace("ß".encode(), b"\xdf ")
    for content in (whole[:-1], whole[:40], whole[:36], whole[:10], b"", b"MO" + whole[2:], latin):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.mo is damaged") as error:
            list(read_catalog(path))
        assert "\n" not in str(error.value)


@pytest.fixture
def django(tmp_path, monkeypatch) -> Path:
    """A folder in Django's place, and languages of any size."""
    monkeypatch.setattr(corpora, "MIN_MESSAGES", 1)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "django")])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec if name == "django" else None)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
    return tmp_path / "django" / "conf" / "locale"


def test_messages_are_sorted_split_by_english_and_never_leak(django, tmp_path):
    english = {split: [] for split in SPLITS}
    for i in range(200):
        english[split_of(f"message {i}", valid=0.05, test=0.05)].append(f"message {i}")
    held_out, other = english["valid"][:2], english["train"][:3]
    single, plural = english["valid"][2], english["train"][3]
    german = {text: f"de {text}" for text in [*held_out, *other]} | {f"{single}\0{plural}": "eins\0zwei\0viele"}
    # one German text for English texts of two splits, and English that stands for another message of another split
    german |= {other[1]: "doppelt", held_out[1]: "doppelt", other[2]: held_out[0]}
    write_mo(django / "de" / "LC_MESSAGES" / "a.mo", german)
    write_mo(django / "de" / "LC_MESSAGES" / "b.mo", {other[0]: f"de {other[0]}", plural: "allein"})
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
    assert corpora.messages() == sorted(expected)
    assert corpora.messages(tmp_path / "more") == sorted([*expected, ("sw", held_out[0], "moja", "valid")])
    documents = corpora.catalogs(tmp_path / "more")
    assert sorted(documents) == ["de", "en", "en_GB", "sw"] and documents["sw"] == [("valid", "moja")]
    valid = {("valid", text) for text in (held_out[0], single, plural)}
    assert len(documents["en"]) == 4 and set(documents["en"]) == {("train", other[0])} | valid
    with pytest.raises(FileNotFoundError, match=r"no LANGUAGE/LC_MESSAGES/\*\.mo under"):
        corpora.messages(tmp_path / "more" / "deep" / "er" / "sw" / "LC_MESSAGES")


def test_a_language_of_few_messages_is_left_out(django, monkeypatch):
    monkeypatch.setattr(corpora, "MIN_MESSAGES", 3)
    for language, count in (("af", 2), ("be", 3)):
        texts = {f"{i}": f"{language} {i}" for i in range(count)}
        write_mo(django / language / "LC_MESSAGES" / "a.mo", texts)
    assert {language for language, *_ in corpora.messages()} == {"be"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install django"):
        corpora.messages()


def test_the_installed_catalogs():
    pytest.importorskip("django")
    messages = corpora.messages()
    counts = Counter(language for language, *_ in messages)
    assert len(messages) > 60_000 and len(counts) > 90 and {"de", "pt_BR", "zh_Hans", "sw"} <= set(counts)
    assert min(counts.values()) >= 100 and "en" not in counts and messages == sorted(set(messages))
    splits = {}
    for _, english, message, split in messages:
        assert splits.setdefault(english, split) == splits.setdefault(message, split) == split


def test_catalogs_train_one_tokenizer_on_the_training_text_of_all_languages(django, tmp_path, monkeypatch):
    words = own_code()[0].split() + own_code()[1].split()
    phrases = sorted({" ".join(words[i : i + 4]) for i in range(0, 1600, 2)})
    for language in ("de", "sw", "es", "es_AR"):
        write_mo(django / language / "LC_MESSAGES" / "a.mo", {text: f"{language} {text}" for text in phrases})
    trained = []

    def train(texts, kind):
        trained.append(sorted(texts))
        return train_sentencepiece(trained[-1], 400, kind)

    monkeypatch.setattr(preparing, "train_sentencepiece", train)
    one = prepare("catalogs", languages="sw", out=tmp_path / "one")
    assert list(meta_of(one)["languages"]) == ["sw"] and meta_of(one)["tokenizer"]["vocab_size"] == 400
    prefixes = ("", "de ", "sw ", "es ", "es_AR ")
    train_texts = [text for text in phrases if split_of(text, valid=0.05, test=0.05) == "train"]
    assert trained == [sorted(prefix + text for text in train_texts for prefix in prefixes)]
    two = prepare("catalogs-pairs", out=tmp_path / "two")
    assert trained[1] == trained[0] and meta_of(one)["tokenizer"] == meta_of(two)["tokenizer"]
    assert list(meta_of(two)["languages"]) == ["de-en", "es-en", "es_AR-en", "sw-en"]
    held_out = held_out_of(two, "valid")
    assert len(held_out) == 4 * sum(split_of(text, 0.05, 0.05) == "valid" for text in phrases)
    assert all(first.removeprefix(first.split()[0] + " ") == second for first, second in held_out)


# ---------------------------------------------------------------------------------------------------------------------
# prepared folders of one language


@pytest.fixture(scope="session")
def paragraphs() -> list[str]:
    return lines_of("document", 600)


@pytest.fixture(scope="session")
def folder(tmp_path_factory, model, paragraphs) -> Path:
    """A prepared corpus, never written to by a test."""
    base = tmp_path_factory.mktemp("corpus")
    (base / "mine.txt").write_text("\n\n".join(paragraphs))
    return prepare("text", source=base / "mine.txt", tokenizer=model, out=base / "prepared")


def documents_of(folder: Path, split: str, language: str | None = None) -> list[str]:
    """The documents of a split (of a language), decoded."""
    meta, tokenizer = meta_of(folder), load_tokenizer(folder)
    counts = meta["languages"][language][split] if language else {"first": 0} | meta["splits"][split]
    ids = np.fromfile(folder / f"{split}.bin", meta["dtype"])[counts["first"] :][: counts["tokens"]]
    parts = np.split(ids, np.flatnonzero(ids == tokenizer.eot) + 1)
    assert len(parts.pop()) == 0  # the last one ends too
    return [tokenizer.decode(part[:-1].tolist()) for part in parts]


def test_prepared_text_is_the_text(folder, paragraphs):
    found = {split: documents_of(folder, split) for split in SPLITS}
    assert sorted(text.strip() for texts in found.values() for text in texts) == sorted(paragraphs)
    assert all(found.values())
    for split, texts in found.items():
        counts = meta_of(folder)["splits"][split]
        assert counts["documents"] == len(texts) and counts["bytes"] == sum(map(len, texts))
        assert counts["words"] == sum(len(text.split()) for text in texts)
        assert counts["tokens"] * 2 == (folder / f"{split}.bin").stat().st_size
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["meta.json", "test.bin", "tokenizer.model", "train.bin", "valid.bin"]
    )


def test_the_checksum_is_of_the_data_not_of_its_place(folder, paragraphs, model, tmp_path):
    (tmp_path / "elsewhere.txt").write_text("\n\n".join(paragraphs))
    same = prepare("text", tmp_path / "elsewhere.txt", model, out=tmp_path / "same")
    assert meta_of(same)["checksum"] == meta_of(folder)["checksum"]
    (tmp_path / "elsewhere.txt").write_text("\n\n".join(paragraphs[:-1]))
    other = prepare("text", tmp_path / "elsewhere.txt", model, out=tmp_path / "other")
    assert meta_of(other)["checksum"] != meta_of(folder)["checksum"]


def test_lone_surrogates_do_not_stop_a_preparation(tmp_path, model):
    for split in SPLITS:
        (tmp_path / f"{split}.jsonl").write_text('{"text": "half \\ud800 of a pair"}')
    assert documents_of(prepare("text", tmp_path, model, out=tmp_path / "out"), "train") == ["half ? of a pair"]


def test_max_tokens_ends_the_training_split(tmp_path, model, paragraphs, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH_CHARS", 500)
    (tmp_path / "source").mkdir()
    for split in SPLITS:
        (tmp_path / "source" / f"{split}.txt").write_text("\n\n".join(paragraphs[:50]))
    counts = meta_of(prepare("text", tmp_path / "source", model, 200, tmp_path / "out"))["splits"]
    longest = max(map(len, load_tokenizer(model).encode_batch(paragraphs[:50]))) + 2
    assert 200 <= counts["train"]["tokens"] < 200 + longest
    assert counts["valid"]["documents"] == counts["test"]["documents"] == 50


def test_what_is_there_is_never_replaced(folder, tmp_path, model):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "thesis.txt").write_text("precious")
    for out in (folder, tmp_path):
        line = refusal("text", source=tmp_path / "thesis.txt", tokenizer=model, out=out)
        assert line == f"--out {out} is not empty: remove what is there, or give another folder"
    refusal("text", source=tmp_path / "thesis.txt", tokenizer=model, out=tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_bad_text_is_one_line(tmp_path, model):
    (tmp_path / "empty").mkdir()
    options = {"tokenizer": model, "out": tmp_path / "out"}
    assert "split 'train' is empty" in refusal("text", tmp_path / "empty", **options)
    (tmp_path / "latin.txt").write_bytes("déjà vu\n".encode() + b"caf\xe9\n")
    assert "latin.txt is not UTF-8: byte 13" in refusal("text", tmp_path / "latin.txt", **options)
    (tmp_path / "one.txt").write_text("a single document")
    assert "'valid' is empty" in refusal("text", tmp_path / "one.txt", **options)
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text " * 999)[:-9])
    assert "cut.txt.gz is damaged" in refusal("text", tmp_path / "cut.txt.gz", **options)
    assert not (tmp_path / "out").exists()


def test_bad_options_are_one_line(tmp_path, spm):
    out = {"out": tmp_path / "out"}
    assert "unknown corpus 'pydoc'; there are pydocs, wikitext103, " in refusal("pydoc", **out)
    for name in ("text", "bitext", "wmt23-uk"):
        assert f"corpus '{name}' needs --source" in refusal(name, tokenizer=spm, **out)
    assert "max_tokens must be positive, not 0" in refusal("pydocs", max_tokens=0, **out)
    assert "does not exist" in refusal("text", source=tmp_path / "absent", **out)
    assert "--languages is for" in refusal("pydocs", languages="en", **out)
    needs = "needs --tokenizer PATH: a SentencePiece model such as XLM-R's"
    assert refusal("cc100", **out).endswith(needs)
    write_pairs(tmp_path / "pairs", "de-en", {"train": 5, "valid": 1, "test": 1})
    assert f"{needs}, or --pieces N" in refusal("opus100", source=tmp_path / "pairs", **out)
    for name in ("pydocs", "cc100"):
        assert "--pieces is for translation pairs" in refusal(name, pieces=400, **out)
    assert "without --tokenizer" in refusal("bitext", source=tmp_path, pieces=400, tokenizer=spm, **out)
    assert "pieces must be positive, not 0" in refusal("bitext", source=tmp_path, pieces=0, **out)
    assert not (tmp_path / "out").exists()


def test_the_command_writes_and_reports_or_refuses(tmp_path, model, paragraphs):
    def command(*arguments) -> subprocess.CompletedProcess:
        words = [sys.executable, "-m", "data.prepare", *map(str, arguments)]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)

    (tmp_path / "mine.txt").write_text("\n\n".join(paragraphs))
    out = tmp_path / "out"
    done = command("text", "--source", tmp_path / "mine.txt", "--tokenizer", model, "--out", out)
    counts = [f"{meta_of(out)['splits'][split]['tokens']:,}" for split in SPLITS]
    assert done.stdout == f"{out}: {' / '.join(counts)} tokens (train / valid / test)\n"
    done = command("text", "--source", tmp_path / "absent")
    assert done.returncode == 1 and done.stderr == f"error: --source {tmp_path / 'absent'} does not exist\n"
    done = command("text", "--sourse", "x")
    assert done.returncode == 2 and "--sourse" in done.stderr


def test_wikipedia_is_split_by_article_and_learns_from_the_first(tmp_path, monkeypatch):
    (tmp_path / "train.txt").write_text("\n\n".join(f"= {n} =\nThe article number {n}.\nMore." for n in range(300)))
    (tmp_path / "valid.txt").write_text("= A =\nOne\n\n= B =\nTwo\n\n= C =\nThree\n")
    learned = []

    def train(texts, kind):
        learned.extend(texts)
        return train_sentencepiece(learned, 300, kind)

    monkeypatch.setattr(preparing, "train_sentencepiece", train)
    monkeypatch.setitem(CORPORA, "enwiki", CORPORA["enwiki"]._replace(learn_from=200))
    folder = prepare("enwiki", tmp_path, out=tmp_path / "out")
    assert learned == [f"= {n} =\nThe article number {n}.\nMore." for n in range(200)]
    assert len(documents_of(folder, "train")) == 300 and documents_of(folder, "test") == ["= B =\nTwo"]
    assert documents_of(folder, "valid") == ["= A =\nOne", "= C =\nThree"]


# ---------------------------------------------------------------------------------------------------------------------
# preparations that are stopped, killed, or at work twice


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_preparation_after_the_batch_that_is_encoded(number, model, tmp_path, monkeypatch, capsys):
    encode, encoded = SentencePiece.encode_batch, []

    def interrupted(self, texts):
        os.kill(os.getpid(), number)
        encoded.append(encode(self, texts))
        return encoded[-1]

    (tmp_path / "a.txt").write_text("\n\n".join(f"text number {n}" for n in range(1500)))
    monkeypatch.setattr(SentencePiece, "encode_batch", interrupted)
    monkeypatch.setattr(preparing, "stop_signals", [])
    words = ["text", "--source", tmp_path / "a.txt", "--tokenizer", model, "--out", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["prepare", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        preparing.main()
    assert stop.value.code == 128 + number and capsys.readouterr().err == "stopped: nothing was written\n"
    assert len(encoded) == 1 and {path.name for path in tmp_path.iterdir()} == {"a.txt", ".out.lock"}
    assert signal.getsignal(number) == signal.SIG_DFL  # a second one acts at once


def test_what_a_killed_preparation_left_is_removed_by_the_next(model, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("\n\n".join(map(str, range(2000))))
    hang = "import sys, time; from pathlib import Path; from data import prepare as p\n"
    hang += "p.write = lambda to, *_: ((to / 'train.bin').touch(), print(to, flush=True), time.sleep(600))\n"
    hang += "p.prepare('text', *map(Path, sys.argv[1:3]), out=Path(sys.argv[3]))"
    command = [sys.executable, "-c", hang, tmp_path / "a.txt", model, tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as killed:
        left = Path(killed.stdout.readline().strip())
        killed.kill()
    assert [path.name for path in left.iterdir()] == ["train.bin"] and not (tmp_path / "out").exists()
    other = tmp_path / ".out.more.new.partial"  # of another name
    other.mkdir()
    folder = prepare("text", tmp_path / "a.txt", model, out=tmp_path / "out")
    assert not left.exists() and other.is_dir()
    shutil.rmtree(folder)
    monkeypatch.setattr(preparing, "stop_signals", [signal.SIGTERM])
    with pytest.raises(KeyboardInterrupt):  # the reading of documents stops before a batch is full
        prepare("text", tmp_path / "a.txt", model, out=folder)
    assert not folder.exists() and not left.exists()


def test_a_second_preparation_waits_for_the_first(model, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one")
    monkeypatch.setattr(preparing, "PREPARED", tmp_path)
    with ThreadPoolExecutor() as pool:
        with FileLock(tmp_path / ".pydocs.lock"):
            waiting = pool.submit(prepare, "text", tmp_path / "a.txt", model, out=tmp_path / "pydocs")
            training = pool.submit(ready, "pydocs")  # as a script does
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.5)
            (tmp_path / "pydocs").mkdir()
            (tmp_path / "pydocs" / "meta.json").touch()
        with pytest.raises(ValueError, match="is not empty"):
            waiting.result()
        assert training.result() == tmp_path / "pydocs"
    monkeypatch.setattr(preparing, "PREPARED", tmp_path / "full")
    (tmp_path / "full").touch()  # no folder
    with pytest.raises(OSError, match="full"):
        ready("catalogs")


def test_what_is_ready(tmp_path, monkeypatch, folder):
    monkeypatch.setattr(preparing, "PREPARED", tmp_path)
    made = []
    monkeypatch.setattr(preparing, "prepare", lambda name, out: made.append((name, out)) or out.mkdir())
    assert ready("pydocs", make=False) == tmp_path / "pydocs" and made == []
    assert ready("pydocs") == ready("pydocs") == tmp_path / "pydocs"
    assert made == [("pydocs", tmp_path / "pydocs")]
    monkeypatch.chdir(folder.parent)
    assert ready(folder.name) == Path(folder.name)
    assert ready(str(folder)) == folder and ready("wikitext103") == tmp_path / "wikitext103" and len(made) == 1


# ---------------------------------------------------------------------------------------------------------------------
# prepared folders of many languages

SIZES = {"de": 500, "sw": 300, "zh-Hans": 20}


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """Three languages in three formats, the last in two files."""
    base = tmp_path_factory.mktemp("languages")
    (base / "de.txt").write_text("\n\n".join(lines_of("de", 500)))
    with gzip.open(base / "sw.part.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in lines_of("sw", 300))
    for part in range(2):
        (base / f"zh-Hans.{part}.txt").write_text("\n\n".join(lines_of("zh-Hans", 20)[10 * part : 10 * part + 10]))
    (base / "README.md").write_text("no language")
    return base


def test_a_folder_of_languages(source, spm, tmp_path):
    folder = prepare("cc100", source, tokenizer=spm, out=tmp_path / "out")
    meta = meta_of(folder)
    assert list(meta["languages"]) == sorted(SIZES) and meta["tokenizer"]["kind"] == "xlmr"
    for language, size in SIZES.items():
        expected = {split: [] for split in SPLITS}
        for text in lines_of(language, size):
            expected[split_of(text, valid=0.01, test=0.01)].append(text)
        assert {split: documents_of(folder, split, language) for split in SPLITS} == expected
    for split in SPLITS:
        for key in ("tokens", "words", "documents", "bytes"):
            assert meta["splits"][split][key] == sum(counts[split][key] for counts in meta["languages"].values())
        assert (folder / f"{split}.bin").stat().st_size == 2 * meta["splits"][split]["tokens"]


def test_languages_can_be_chosen_and_limited(source, spm, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH_CHARS", 500)
    folder = prepare("cc100", source, tokenizer=spm, languages="sw,de", max_tokens=900, out=tmp_path / "out")
    limited = meta_of(folder)["languages"]
    whole = meta_of(prepare("cc100", source, tokenizer=spm, languages="sw,de", out=tmp_path / "whole"))["languages"]
    longest = max(map(len, load_tokenizer(spm, "xlmr").encode_batch(lines_of("de", 500)))) + 2
    assert list(limited) == list(whole) == ["de", "sw"]
    for language, counts in limited.items():
        assert 900 <= counts["train"]["tokens"] < 900 + longest
        assert counts["valid"] == whole[language]["valid"]
    unknown = refusal("cc100", source, tokenizer=spm, languages="de,sv")
    assert "no language 'sv'; there are de, sw, zh-Hans" in unknown


def test_bad_languages_are_one_line(spm, tmp_path):
    def reason(**files: bytes) -> str:
        for path in tmp_path.glob("*.txt"):
            path.unlink()
        for name, content in files.items():
            (tmp_path / f"{name}.txt").write_bytes(content)
        line = refusal("cc100", tmp_path, tokenizer=spm, out=tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return line

    (tmp_path / "NOTES.md").write_text("no language")
    good = "\n\n".join(lines_of("de", 500)).encode()
    assert "'sw'" in reason(de=good, sw=b" \n\n") and "no training text" in reason(de=good, sw=b"")
    [held_out, *_] = [text for text in lines_of("sw", 500) if split_of(text, valid=0.01, test=0.01) == "test"]
    assert "no training text" in reason(de=good, sw=held_out.encode())
    assert "sw.txt is not UTF-8: byte 3" in reason(de=good, sw=b"caf\xe9")
    assert "'valid' is empty" in reason(de=lines_of("de", 1)[0].encode())
    assert "holds no LANGUAGE.txt" in reason()


def test_cc100_streams_what_local_files_hold(source, spm, hub, tmp_path):
    url = "https://data.statmt.org/cc-100/{}.txt.xz".format
    hub.rows = {(url(name), "train"): lines_of(name, size) for name, size in SIZES.items()}
    streamed = prepare("cc100", tokenizer=spm, languages=",".join(SIZES), out=tmp_path / "hub")
    local = prepare("cc100", source, tokenizer=spm, out=tmp_path / "local")
    # blocks of a file end in a line feed, paragraphs do not: the tokens are the same
    assert meta_of(streamed)["files"] == meta_of(local)["files"]
    line = refusal("cc100", tokenizer=spm, out=tmp_path / "all")
    assert line.startswith("cannot read https://data.statmt.org/cc-100/af.txt.xz (ConnectionError: no route)")
    assert "--source" in line


def test_a_limit_ends_the_reading_of_a_language(spm, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH_CHARS", 500)
    monkeypatch.setattr(preparing, "ENOUGH", 100)
    url = "https://data.statmt.org/cc-100/{}.txt.xz".format
    hub.rows = {(url(name), "train"): lines_of(name, 9000) for name in ("de", "sw")}
    folder = prepare("cc100", tokenizer=spm, languages="de,sw", max_tokens=2000, out=tmp_path / "out")
    for name, counts in meta_of(folder)["languages"].items():
        assert counts["train"]["tokens"] >= 2000 and min(counts[split]["tokens"] for split in SPLITS) >= 100
        assert hub.read[url(name), "train"] < 4000


# ---------------------------------------------------------------------------------------------------------------------
# prepared folders of translation pairs

PAIR_SIZES = {"de-en": 400, "en-zh-Hans": 150}


def pairs(name: str, count: int, split: str = "train") -> list[tuple[str, str]]:
    sides = name.split("-", 1)
    return list(zip(*(lines_of(f"{name} {split} {side}", count) for side in sides)))


@pytest.fixture(scope="session")
def pair_source(tmp_path_factory) -> Path:
    """One pair in two files for each of two parts, one as .gz; the other as .xz. Nothing else is read."""
    base = tmp_path_factory.mktemp("bitext")
    for side, texts in zip(("de", "en"), zip(*pairs("de-en", 400))):
        (base / f"de-en.a.{side}").write_text("".join(f"{text}\n" for text in texts[:200]))
        with gzip.open(base / f"de-en.b.{side}.gz", "wt") as file:
            file.write("\n".join(texts[200:]))
    for side, texts in zip(("en", "zh-Hans"), zip(*pairs("en-zh-Hans", 150))):
        with lzma.open(base / f"en-zh-Hans.{side}.xz", "wt") as file:
            file.writelines(f"{text}\n" for text in texts)
    (base / "README.md").write_text("no pair")
    return base


def pairs_of(folder: Path, split: str, name: str) -> list[tuple[str, str]]:
    """The pairs of a language pair, decoded from its tokens through the index."""
    tokenizer, counts = load_tokenizer(folder), meta_of(folder)["languages"][name][split]
    tokens, index = np.fromfile(folder / f"{split}.bin", "uint16"), np.fromfile(folder / f"{split}.idx", "int64")
    begin = 2 * counts["first"]
    assert index[begin + 2 * counts["pairs"]] == index[begin] + counts["tokens"]
    ends = index[begin : begin + 2 * counts["pairs"] + 1]
    texts = [tokenizer.decode(tokens[a : b - 1].tolist()) for a, b in zip(ends[:-1], ends[1:])]
    return list(zip(texts[::2], texts[1::2]))


def test_pairs_come_back(pair_source, spm, tmp_path):
    folder = prepare("bitext", pair_source, tokenizer=spm, out=tmp_path / "out")
    meta = meta_of(folder)
    assert meta["kind"] == "pairs" and list(meta["languages"]) == sorted(PAIR_SIZES)
    for name, size in PAIR_SIZES.items():
        expected = {split: [] for split in SPLITS}
        for texts in pairs(name, size):
            expected[split_of(texts[1], valid=0.01, test=0.01)].append(texts)
        assert {split: pairs_of(folder, split, name) for split in SPLITS} == expected
    for split in SPLITS:
        tokens, index = np.fromfile(folder / f"{split}.bin", "uint16"), np.fromfile(folder / f"{split}.idx", "int64")
        assert index[0] == 0 and index[-1] == len(tokens) and (tokens[index[1:] - 1] == 2).all()
        assert (tokens == 2).sum() == len(index) - 1 == 2 * meta["splits"][split]["pairs"]
    assert not (folder / "train.jsonl").exists()
    for split in ("valid", "test"):
        assert held_out_of(folder, split) == [pair for name in PAIR_SIZES for pair in pairs_of(folder, split, name)]


def held_out_of(folder: Path, split: str) -> list[tuple[str, str]]:
    return [tuple(json.loads(line)) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def write_pairs(folder: Path, name: str, sizes: dict[str, int]):
    """Files NAME.SPLIT.SIDE."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in sizes.items():
        for side, texts in zip(name.split("-"), zip(*pairs(name, count, split))):
            (folder / f"{name}.{split}.{side}").write_text("".join(f"{text}\r\n" for text in texts))


def test_pairs_in_a_table_are_those_of_two_files(spm, tmp_path):
    write_pairs(tmp_path / "two", "de-en", {"train": 60, "valid": 5, "test": 5})
    (tmp_path / "one").mkdir()
    for split in ("train", "valid", "test"):
        sides = [(tmp_path / "two" / f"de-en.{split}.{side}").read_text().splitlines() for side in ("de", "en")]
        (tmp_path / "one" / f"de-en.{split}.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in zip(*sides)))
    for name in ("one", "two"):
        prepare("bitext", tmp_path / name, tokenizer=spm, out=tmp_path / f"out-{name}")
    for file in ("train.bin", "train.idx", "test.bin"):
        assert (tmp_path / "out-one" / file).read_bytes() == (tmp_path / "out-two" / file).read_bytes()


def test_bad_pairs_are_one_line(spm, tmp_path):
    def reason(**files: bytes) -> str:
        shutil.rmtree(tmp_path / "in", ignore_errors=True)
        (tmp_path / "in").mkdir()
        for name, content in files.items():
            (tmp_path / "in" / f"de-en.{name}").write_bytes(content)
        (tmp_path / "in" / "NOTES.md").write_text("no pair")
        line = refusal("bitext", tmp_path / "in", tokenizer=spm, out=tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return line

    three, five = b"a\n" * 3, b"a\n" * 4 + b"a"
    for sizes in ({"de": three, "en": five}, {"de": five, "en": three}):
        assert "de-en.de and de-en.en in " in reason(**sizes) and ", line 4: not two texts" in reason(**sizes)
    assert ", line 2: not two texts" in reason(de=b"a\n \na\n", en=three)
    assert ", line 3: not two texts" in reason(de=three, en=b"a\na\n\n")
    for row in (b"one", b"one\ttwo\tthree", b"one\t "):
        assert "de-en.tsv in " in reason(tsv=b"a\tb\n" + row) and ", line 2: not two texts" in reason(
            tsv=b"a\tb\n" + row
        )
    assert "de-en.en is not UTF-8: byte 5" in reason(de=three, en=b"a\ncaf\xe9\n")
    assert "holds no file such as de-en.de, beside de-en.en" in reason()
    assert "no de-en.en (plain, .gz or .xz) in " in reason(de=three)
    assert "split 'valid' is empty" in reason(de=b"a\n", en=b"b\n")
    [held_out, *_] = [text for text in lines_of("x", 500) if split_of(text, 0.01, 0.01) == "valid"]
    assert "'de-en' of " in reason(de=b"a\n", en=held_out.encode())


def translations(*languages: str, rows: list[tuple[str, str]]) -> list[dict]:
    return [{"translation": dict(zip(languages, both))} for both in rows]


def test_opus100_streams_its_splits(spm, hub, tmp_path):
    for split in ("train", "validation", "test"):
        hub.rows["de-en", split] = translations("de", "en", rows=pairs("de-en", 9, split))
    hub.rows["an-en", "train"] = translations("an", "en", rows=pairs("an-en", 9))
    hub.rows["ar-de", "test"] = hub.rows["gone-en", "test"] = []
    rows = [(" ", "nothing"), ("\u200b", "without a token"), (None, "nothing at all")]
    hub.rows["de-en", "train"][3:3] = translations("de", "en", rows=rows)
    out = prepare("opus100", tokenizer=spm, languages="an-en,de-en", out=tmp_path / "out")
    for split, theirs in (("train", "train"), ("valid", "validation"), ("test", "test")):
        assert pairs_of(out, split, "de-en") == pairs("de-en", 9, theirs)
    assert len(pairs_of(out, "train", "an-en")) == 9 and pairs_of(out, "valid", "an-en") == []
    assert list(corpora.opus100()) == ["de-en", "an-en", "gone-en"]
    hub.rows["de-en", "train"] = [{"translation": {"en": "no German"}}]
    assert "cannot read Helsinki-NLP/opus-100 de-en (KeyError: 'de')" in refusal("opus100", tokenizer=spm)


def test_a_joint_bpe_is_trained_on_both_sides_of_the_training_pairs(tmp_path):
    sides = {"train": ("ä bär", "a bear"), "valid": ("zebra", "zebra"), "test": ("quokka", "quokka")}
    for split, both in sides.items():
        for language, text in zip(("de", "en"), both):
            (tmp_path / f"de-en.{split}.{language}").write_text("".join(f"{text} {i}\n" for i in range(40)))
    tokenizer = load_tokenizer(prepare("bitext", tmp_path, pieces=290, out=tmp_path / "out"))
    assert isinstance(tokenizer, XLMR) and tokenizer.vocab_size == 290 + XLMR.added
    pieces = {tokenizer.processor.id_to_piece(i) for i in range(290)}
    words = {piece for piece in pieces if not piece.startswith("<")}
    assert {"▁bär", "▁bear"} < pieces and not any(letter in word for word in words for letter in ("z", "k"))
    # BPE, not unigram: every piece is the merge of two others
    assert all(len(x) == 1 or any(x[:i] in pieces and x[i:] in pieces for i in range(1, len(x))) for x in words)


@pytest.mark.parametrize("limit, texts", [(None, 14), (3, 6)])
def test_a_joint_bpe_reads_no_more_pairs_than_it_needs(limit, texts, tmp_path, monkeypatch):
    """BPE_PAIRS in all, and no more of a pair of languages than its training text may have tokens."""
    for name in ("de-en", "fr-en"):
        write_pairs(tmp_path / "in", name, {"train": 60, "valid": 5, "test": 5})
    learned = []

    def train(texts, *_, **options):
        learned.extend(texts)
        return train_sentencepiece(own_code(), 500, XLMR)

    monkeypatch.setattr(preparing, "BPE_PAIRS", 7 * 2)
    monkeypatch.setattr(preparing, "train_sentencepiece", train)
    prepare("bitext", tmp_path / "in", pieces=498, max_tokens=limit, out=tmp_path / "out")
    expected = [text for name in ("de-en", "fr-en") for pair in pairs(name, texts // 2) for text in pair]
    assert learned == expected


def test_a_joint_bpe_that_cannot_be(tmp_path):
    write_pairs(tmp_path, "de-en", {"train": 60, "valid": 5, "test": 5})
    options = {"source": tmp_path, "out": tmp_path / "out"}
    assert "no vocabulary of 90,000 pieces from this text: Vocabulary size too high" in refusal(
        "bitext", pieces=90_000, **options
    )
    assert "no vocabulary of 260 pieces from this text: Vocabulary size is smaller than" in refusal(
        "bitext", pieces=260, **options
    )
    (tmp_path / "de-en.train.en").write_text("a\n\n")  # what is wrong with the text is said, not the trainer's error
    assert "de-en.train.en in " in refusal("bitext", pieces=400, **options)


def test_multi30k_reads_its_own_files_or_the_hub(tmp_path, hub):
    names = {"train": ("train", "train"), "valid": ("val", "validation"), "test": ("test_2016_flickr", "test")}
    for split, (name, theirs) in names.items():
        rows = pairs("de-en", 60, split)
        for side, lines in zip(("de", "en"), zip(*rows)):
            with gzip.open(tmp_path / f"{name}.{side}.gz", "wt") as file:
                file.writelines(f"{line}\n" for line in lines)
        hub.rows["bentrevett/multi30k", theirs] = [{"de": one, "en": two} for one, two in rows]
    local = prepare("multi30k-de", tmp_path, pieces=300, out=tmp_path / "local")
    streamed = prepare("multi30k-de", pieces=300, out=tmp_path / "hub")
    assert list(meta_of(local)["languages"]) == ["de-en"]
    assert held_out_of(local, "valid") == pairs("de-en", 60, "valid")
    assert meta_of(local)["files"] == meta_of(streamed)["files"]
    (tmp_path / "val.de.gz").unlink()
    assert "no val.de (plain, .gz or .xz) in " in refusal("multi30k-de", tmp_path, pieces=300)


def test_wmt10_has_ten_languages_and_halves_gujarati(tmp_path, hub):
    languages = sorted("fr cs de fi lv et ro hi tr gu".split())
    for language in languages:
        for split in ("train", "validation", "test"):
            rows = pairs(f"{language}-en", 40, split)
            hub.rows[f"{language}-en", split] = translations(language, "en", rows=rows)
    del hub.rows["gu-en", "test"]
    folder = prepare("wmt10", pieces=500, out=tmp_path / "wmt10")
    assert list(meta_of(folder)["languages"]) == [f"{language}-en" for language in languages]
    halves = [set(pairs_of(folder, split, "gu-en")) for split in ("valid", "test")]
    assert halves[0] | halves[1] == set(pairs("gu-en", 40, "validation")) and not halves[0] & halves[1]
    assert min(map(len, halves)) > 5 and pairs_of(folder, "test", "fr-en") == pairs("fr-en", 40, "test")


def test_every_corpus_reads_a_local_copy():
    assert len(CORPORA) == 18
    for name, corpus in CORPORA.items():
        assert corpus.kind in ("text", "languages", "pairs") and callable(corpus.local)
        assert (corpus.read is None) == (name in ("text", "bitext", "enwiki") or name.startswith("wmt23"))
