"""Making data: splits share nothing, and a prepared folder is whole, or not there at all."""

import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from helpers import ROOT, write_files

from data import bitext_sets, corpora, english, messages, tokenizers, xtreme
from data import folder as prepared
from data import prepare as preparing
from data.files import SPLITS, has_words, named_split, read_documents, source_files, split_of
from data.folder import ready
from data.prepare import prepare
from data.tokenizers import XLMR, load_tokenizer, train_sentencepiece


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


def texts_of(folder: Path) -> list[str]:
    """What the corpus `text` reads from a folder."""
    return sorted(text for _, text in corpora.text(folder))


@pytest.fixture(scope="session")
def model(bpe, tmp_path_factory) -> Path:
    return bpe.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def spm(xlmr, tmp_path_factory) -> Path:
    return xlmr.save(tmp_path_factory.mktemp("spm"))


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
# Files


def test_text_files_of_every_kind(tmp_path):
    files = {"a.md": "one\nmore of one\n\n \n\ntwo\n", "b.txt.xz": "\ufeffthree\nf\ufeffour\n", "c": "five\n"}
    rows = {"d.jsonl": "6\n\n6", "e.json": "7", "f.ndjson": "8", "g.JSONL": "9"}
    rows |= {"c4-en.00000-of-00512.json.gz": "10", "h.JSON.GZ": "11"}
    for name, text in rows.items():
        files[name] = "\n" + json.dumps({"text": text, "url": "x"}) + "\n"
    write_files(tmp_path, files)
    assert texts_of(tmp_path) == sorted(["one\nmore of one", "two", "three", "f\ufeffour", "five", *rows.values()])
    del files["c"], files["a.md"]
    assert sorted(corpora.language_files(tmp_path)) == ["b", "d", "e", "en", "f", "g", "h"]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    write_table = pytest.importorskip("pyarrow.parquet").write_table
    write_table(pyarrow.table({"text": ["one", None, "two"]}), tmp_path / "a.parquet")
    assert list(read_documents(tmp_path / "a.parquet")) == ["one", "", "two"]
    write_table(pyarrow.table({"words": ["one"]}), tmp_path / "b.parquet")
    write_table(pyarrow.table({"text": [["one"]]}), tmp_path / "c.parquet")
    (tmp_path / "d.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    for name, reason in {"b": 'Field "text" does not exist', "c": "Unsupported cast from list", "d": ""}.items():
        with pytest.raises(ValueError, match=rf"{name}\.parquet cannot be read: .*{reason}"):
            list(read_documents(tmp_path / f"{name}.parquet"))


def test_splits_named_by_files(tmp_path, capsys):
    texts = {"train-0001.txt": "a\nb\nc\nb\n", "my.validation.txt": "b\nd\n", "test/a.txt": "c\n", "other.txt": "e"}
    write_files(tmp_path, texts)
    expected = [("valid", "b"), ("valid", "d"), ("test", "c"), *(("train", text) for text in "abcb")]
    assert list(corpora.text(tmp_path)) == expected
    assert f"not read in {tmp_path}: 1 files (other.txt), as their names say no split" in capsys.readouterr().err


@pytest.mark.parametrize(
    "names, of_their_own",
    [
        ("a.txt b.txt", ""),
        ("train-00000-of-00001.txt", ""),  # as the hub names it
        ("train.txt val.txt", "valid"),
        ("a.txt b.txt test.txt", "test"),
        ("train.txt dev.txt test.txt", "valid test"),
    ],
)
def test_what_no_name_says_is_split_off_by_a_hash(tmp_path, names, of_their_own):
    """From train, or from all that say nothing; of a small text a tenth, of a large one a hundredth."""
    texts = {name: [f"{name} {i}" for i in range(500)] for name in names.split()}
    write_files(tmp_path, {name: "\n".join(own) for name, own in texts.items()})
    for share, more in ((0.1, 0), (0.01, 10**7)):
        with (tmp_path / next(iter(texts))).open("a") as file:
            file.write(" " * more + "\n")
        shares, expected = [0 if held_out in of_their_own else share for held_out in ("valid", "test")], []
        for name, own in texts.items():
            split = named_split(Path(name)) or "train"
            expected += [(split_of(text, *shares) if split == "train" else split, text) for text in own]
        found = list(corpora.text(tmp_path))
        assert sorted(found) == sorted(expected) and {split for split, _ in found} == set(SPLITS)


READERS = {  # a reader, and the lines of each file that it reads
    corpora.text: {"train.txt": "one,two,,three", "valid.txt": "four,five", "test.jsonl": '{"text": "six"}'},
    corpora.enwiki: {"train.txt": "= A =,x,,= B =,y", "valid.txt": "= C =,x,,= D =,y"},
    corpora.wikitext103: {f"wiki.{split}.raw": " , = A = , , x , , = B = , , y " for split in SPLITS},
    corpora.multi30k: {f"{n}.{side}": "x,y" for n in ("train", "val", "test_2016_flickr") for side in ("de", "en")},
    corpora.bitext: {"de-en.train.de": "x,y", "de-en.train.en": "a,b", "de-en.valid.tsv": "x\ty,z\tw"},
    bitext_sets.tatoeba: {"deu-eng.deu": "x,y", "deu-eng.eng": "a,b"},
    bitext_sets.word_alignments: {"de-en.src-tgt": "a b ||| c,d ||| e", "de-en.gold": "1-1 2p1,1-1"},
    partial(xtreme.read, "ner", "test"): {"test-de.tsv": "Ein\tO,Hund\tB-PER,,Ja\tO"},
    partial(xtreme.read, "pos", "test"): {"de-test.conllu": "# x,1\tJa\t_\tX\t_\t_\t_\t_\t_\t_,"},
    partial(xtreme.read, "pawsx", "test"): {"test-de.tsv": "Ja\tNein\t1,Ja\tJa\t0"},
}


@pytest.mark.parametrize("read", READERS)
def test_line_ends_of_all_systems_and_a_mark_at_the_beginning_change_nothing(read, tmp_path):
    found = []
    for number, (mark, end) in enumerate([("", "\n"), ("", "\r\n"), ("", "\r"), ("\ufeff", "\n"), ("\ufeff", "\r\n")]):
        files = {name: mark + lines.replace(",", end) + end for name, lines in READERS[read].items()}
        rows = read(write_files(tmp_path / str(number), files))
        if isinstance(rows, dict):
            rows = {name: list(own) for name, own in rows.items()}
        found.append(rows if isinstance(rows, dict | tuple) else list(rows))
    assert found[0] and all(rows == found[0] for rows in found), found


def test_a_lone_cr_between_line_feeds_is_text(tmp_path):
    write_files(tmp_path, {"de-en.valid.de": "a\rb\nc\rd", "de-en.valid.en": "x\r\ny"})
    assert list(corpora.bitext(tmp_path)["de-en"]) == [("valid", "a\rb", "x"), ("valid", "c\rd", "y")]


@pytest.mark.parametrize(
    "lines, blanks, documents",
    [(3, [], 3), (3, [1], 2), (1, [], 1), (1200, [5], 1200), (1200, [1100], 1200)]
    + [(1200, range(0, 1200, 300), 1200), (1200, range(20, 1200, 20), 60), (1200, range(20, 620, 20), 30 + 2)],
)
def test_documents_are_lines_but_where_blank_lines_are_regular(tmp_path, monkeypatch, lines, blanks, documents):
    monkeypatch.setattr("data.files.LONGEST_BLOCK", 590)
    text = [f"line {i}\n" for i in range(lines)]
    for place in reversed(blanks):
        text.insert(place, " \n\n")
    write_files(tmp_path, {"a.txt": "".join(text)})
    found = list(read_documents(tmp_path / "a.txt"))
    assert len(found) == documents and "\n".join(found).split() == "".join(text).split()


def test_what_is_read_is_data_once_and_what_is_not_is_said(tmp_path, monkeypatch, capsys):
    inside, elsewhere, locked = tmp_path / "in", tmp_path / "elsewhere", tmp_path / "in" / "locked"
    names = (
        "in/.git/config in/.hidden.txt in/deep/a.txt in/README.md in/photo.JPG in/locked/c.txt elsewhere/b.txt".split()
    )
    names += [f"in/x.{ending}" for ending in "avi ckpt db h5 idx mp3 mp4 so sqlite svg wav webp".split()]
    write_files(tmp_path, {name: name for name in names})
    links = {"first": elsewhere, "second": elsewhere, "deep/parent": inside, "again.txt": inside / "deep" / "a.txt"}
    links |= {"loop": inside / "loop", "broken.txt": inside / "absent.txt"}
    for name, to in links.items():
        (inside / name).symlink_to(to)
    os.mkfifo(inside / "pipe.txt")

    def scandir(path, scandir=os.scandir):
        if Path(path) == locked:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert texts_of(inside) == ["elsewhere/b.txt", "in/deep/a.txt"]
    said = capsys.readouterr().err
    assert f"not read in {inside}: 1 files ({locked}), as they may not be opened\n" in said
    assert f"not read in {inside}: 14 files (README.md, photo.JPG, x.avi), as by their names they hold no text" in said
    assert source_files(inside / "README.md") == [inside / "README.md"]


def test_scripts_whose_blanks_part_words():
    assert has_words("The quick brown fox") and has_words("Donaudampfschifffahrt ist lang") and not has_words("")
    assert has_words("    x = 1\n" * 9) and not has_words("我们在这里学习语言和数学的知识。")
    assert not has_words("ผมไปตลาดกับเพื่อนของผม แล้วกลับบ้านตอนเย็น")


# ---------------------------------------------------------------------------------------------------------------------
# Corpora of one language

PYTHON = """
'A module that documents many things.'
add_docstr(torch.abs, r'''abs(input) -> Tensor

    The absolute value of {input}.'''.format(**common) + " And a longer tail.")
add_newdoc("numpy", "ndarray", ("T", '''A view of the transposed array.'''))
topics = {"if": '''The "if" statement is used for conditional execution.'''}
other = '''Not documentation, only a longer string.'''
class A:
    '''Too short.'''
    if True:
        async def method(self):
            '''Indented text of a method,
            over two lines.'''
"""


def test_prose_of_definitions_and_of_compiled_functions(tmp_path, monkeypatch):
    write_files(tmp_path, {"a.py": PYTHON, "b.py": "def broken(:\n"})
    monkeypatch.setattr(english, "ROOTS", {tmp_path.name: tmp_path})
    found = {name: list(paragraphs) for name, paragraphs in english.python_files()}
    assert found[f"{tmp_path.name}/a.py"] == [
        "A module that documents many things.",
        "The absolute value of {input}. And a longer tail.",
        "A view of the transposed array.",
        'The "if" statement is used for conditional execution.',
        "Indented text of a method, over two lines.",
    ]
    assert found[f"{tmp_path.name}/b.py"] == []


PROSE = {  # a docstring -> its paragraphs
    "Returns what :py:class:`the class <a.B>` makes of it.": ["Returns what the class makes of it."],
    "This ``list`` is **never** sorted, even *rather* long.": ["This list is never sorted, even rather long."],
    "It all stands in `the manual <https://a.org>`_ too.": ["It all stands in the manual too."],
    "The area is one side * the other * a square.": ["The area is one side * the other * a square."],
    "- The first of the two.\n\n2. The second of the two.": ["The first of the two.", "The second of the two."],
    "A sentence that goes\n    over two lines.\n\n>>> Print the words.": ["A sentence that goes over two lines."],
    "Args:\n    value: What is given to it.\n\nReturns: What it makes of it.": ["What it makes of it."],
    "Notes\n-----\nX, Y : array_like\n    Values to sort.\n\nThe order of them stays.": ["The order of them stays."],
    "Add(input, other, *, alpha=1) -> Tensor\n\nY = X W^T + b, Z = (Y - mu) / sigma.": [],
    "One two three four 5.\n\nOne two three 4 5.": ["One two three four 5."],
    "without a capital it is none.\n\nAnd without a mark neither\n\nToo few words here.": [],
}


def test_prose_is_whole_sentences_without_markup():
    assert {text: list(english.sentences(text)) for text in PROSE} == PROSE


def test_pydocs_keeps_a_paragraph_once(tmp_path, monkeypatch):
    monkeypatch.setattr(english, "ROOTS", {"own": tmp_path})
    english.pydocs.cache_clear()
    for i in range(60):
        shared = "The same words in every file."
        text = f'"""Module number {i} of the whole package."""\ndef f():\n    """{shared}\n\n    {shared}"""\n'
        (tmp_path / f"m{i:02}.py").write_text(text)
    (tmp_path / "tests").mkdir()
    shutil.copy(tmp_path / "m00.py", tmp_path / "tests")  # is not read
    documents = english.pydocs()
    assert english.pydocs() is documents  # of three that need it, the first reads it
    english.pydocs.cache_clear()
    assert len(documents) == 60 and sum("same words" in text for _, text in documents) == 1
    assert documents[0][1] == "Module number 0 of the whole package.\n\nThe same words in every file."
    assert {split for split, _ in documents} > {"train"}


def test_articles_of_wikitext_are_cut_at_top_level_headings(tmp_path, hub, monkeypatch):
    blank = " \n"
    one = [" = One = \n", blank, " Text with x = y = z . \n", " = no heading = \n", blank, " = = Part = = \n", blank]
    two = [" = Two @-@ fold = \n", blank, " More text . \n"]
    lines = [blank, *one, *two]
    write_files(tmp_path, {f"wiki.{split}.raw": "".join(lines) for split in ("valid", "test")})
    write_files(tmp_path, {"wiki.train.tokens.gz": "".join(lines)})
    articles = [blank + "".join(one), "".join(two)]
    expected = [(split, article) for split in ("valid", "test", "train") for article in articles]
    assert list(corpora.wikitext103(tmp_path)) == expected
    rows = [line if line.strip() else "" for line in lines]  # as the hub has them
    hub.rows = {("wikitext-103-raw-v1", split): rows for split in ("train", "validation", "test")}
    assert list(corpora.wikitext103()) == expected
    with pytest.raises(OSError, match=r"no route\)[^\n]*--source[^\n]*$"):
        list(corpora.openwebtext())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(OSError, match="pip install datasets"):
        list(corpora.openwebtext())


def test_wikipedia_is_split_by_article(tmp_path, monkeypatch):
    train = "\n\n".join(f"= {n} =\nThe article number {n}.\nMore." for n in range(300))
    write_files(tmp_path, {"train.txt": train, "valid.txt": "= A =\nOne\n\n= B =\nTwo\n\n= C =\nThree\n"})
    learn = partial(train_sentencepiece, vocab_size=300)
    monkeypatch.setattr(preparing, "train_sentencepiece", lambda texts, kind: learn(list(texts), kind=kind))
    folder = prepare("enwiki", tmp_path, out=tmp_path / "out")
    assert len(documents_of(folder, "train")) == 300 and documents_of(folder, "test") == ["= B =\nTwo"]
    assert documents_of(folder, "valid") == ["= A =\nOne", "= C =\nThree"]


# ---------------------------------------------------------------------------------------------------------------------
# Prepared folders


@pytest.fixture(scope="session")
def paragraphs() -> list[str]:
    return lines_of("document", 600)


@pytest.fixture(scope="session")
def folder(tmp_path_factory, model, paragraphs) -> Path:
    """A prepared corpus, never written to by a test."""
    base = write_files(tmp_path_factory.mktemp("corpus"), {"mine.txt": "\n\n".join(paragraphs)})
    return prepare("text", source=base / "mine.txt", tokenizer=model, out=base / "prepared")


def documents_of(folder: Path, split: str, language: str | None = None) -> list[str]:
    """The documents of a split (of a language), decoded."""
    meta, tokenizer = meta_of(folder), load_tokenizer(folder)
    counts = meta["languages"][language][split] if language else {"first": 0} | meta["splits"][split]
    ids = np.fromfile(folder / f"{split}.bin", meta["dtype"])[counts["first"] :][: counts["tokens"]]
    parts = np.split(ids, np.flatnonzero(ids == tokenizer.eot) + 1)
    assert len(parts.pop()) == 0  # the last one ends too
    return [tokenizer.decode(part[:-1].tolist()) for part in parts]


def test_long_documents_are_whole_and_lone_surrogates_stop_nothing(tmp_path, spm, monkeypatch):
    monkeypatch.setattr(tokenizers, "PART", 100)
    text = "def return self " * 50
    rows = json.dumps({"text": text}) + '\n{"text": "half \\ud800 of a pair"}'
    write_files(tmp_path, {f"{split}.jsonl": rows for split in SPLITS})
    folder = prepare("text", tmp_path, spm, out=tmp_path / "out")
    assert documents_of(folder, "train") == [text.strip(), "half ? of a pair"]
    assert meta_of(folder)["splits"]["train"]["words"] == 155


def test_what_is_there_is_never_replaced(folder, tmp_path, model):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_files(tmp_path, {"thesis.txt": "precious"})
    for out in (folder, tmp_path):
        line = refusal("text", source=tmp_path / "thesis.txt", tokenizer=model, out=out)
        assert line == f"--out {out} is not empty: remove what is there, or give another folder"
    refusal("text", source=folder.parent / "mine.txt", tokenizer=model, out=tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def command(*arguments, **options) -> subprocess.CompletedProcess:
    words = [sys.executable, *map(str, arguments)]
    return subprocess.run(words, **dict(cwd=ROOT, capture_output=True, text=True, check=False) | options)


def test_the_command_writes_and_reports_or_refuses(tmp_path, model, paragraphs):
    write_files(tmp_path, {"mine.txt": "\n\n".join(paragraphs)})
    out, prepare_text = tmp_path / "out", ("-m", "data.prepare", "text")
    done = command(*prepare_text, "--source", tmp_path / "mine.txt", "--tokenizer", model, "--out", out)
    assert done.stderr == f"{tmp_path}: every block between blank lines is a document\n"
    counts = [f"{meta_of(out)['splits'][split]['tokens']:,}" for split in SPLITS]
    assert done.stdout == f"{out}: {' / '.join(counts)} tokens (train / valid / test)\n"
    done = command(*prepare_text, "--source", tmp_path / "absent")
    assert done.returncode == 1 and done.stderr == f"error: --source {tmp_path / 'absent'} does not exist\n"
    done = command(*prepare_text, "--sourse", "x")
    assert done.returncode == 2 and "--sourse" in done.stderr


OPTIONS = {  # corpus, options -> what is said. Their source, where it is none, is a folder with pairs
    "pydoc": ({}, "unknown corpus 'pydoc'; there are pydocs, wikitext103, "),
    "wmt23-uk": ({"source": None}, "corpus 'wmt23-uk' needs --source"),
    "ciphers-mt": ({}, "corpus 'ciphers-mt' is read from installed packages: leave out --source"),
    "enwiki": ({"source": Path("absent")}, "--source absent does not exist"),
    "wikitext103": ({"max_tokens": 0}, "--max_tokens and --pieces must be positive"),
    "text": ({"pieces": -5}, "--max_tokens and --pieces must be positive"),
    "pydocs": ({"source": None, "languages": "en"}, "--languages is for"),
    "cc100": ({"source": None}, "needs --tokenizer PATH: a SentencePiece model such as XLM-R's"),
    "opus100": ({"source": None}, "needs --tokenizer PATH: a SentencePiece model such as XLM-R's; or --pieces N"),
    "wmt10": ({"pieces": 400, "tokenizer": Path("x")}, "--pieces learns a tokenizer: leave it out, or --tokenizer"),
    "multi30k-de": ({}, "no val.de (plain, .gz or .xz) in "),
    "wmt23-de": ({"pieces": 90_000}, "no vocabulary of 90,000 pieces from this text: Vocabulary size too high"),
    "wmt23-ru": ({"languages": "de-en,ru-en"}, "no language 'ru-en'; there are de-en"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_bad_options_are_one_line(name, tmp_path):
    table = "".join(f"{one}\t{two}\n" for one, two in pairs("de-en", 60))
    write_files(tmp_path / "pairs", {f"de-en.{split}.tsv": table for split in SPLITS})
    options, line = OPTIONS[name]
    assert line in refusal(name, **{"source": tmp_path / "pairs", "out": tmp_path / "out"} | options)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_without_an_end_is_refused_in_one_line(tmp_path):
    write_files(tmp_path, {"a.txt": "\n".join(lines_of("de", 500))})
    tokenizer = train_sentencepiece(lines_of("de", 50), 300, eos_id=-1).save(tmp_path)
    refused = refusal("text", tmp_path / "a.txt", tokenizer, out=tmp_path / "out")
    assert refused == f"{tokenizer} has no token that ends a text"


THREE, FIVE, GOOD = "a\n" * 3, "a\n" * 4 + "a", "\n\n".join(lines_of("de", 500))
[HELD_OUT, *_] = [text for text in lines_of("x", 500) if split_of(text, 0.01, 0.01) == "valid"]
UNREAD_FORMS = ("jsonl.zst", "rar", "feather", "avro", "orc", "tfrecord")
BAD = [  # corpus, files, what is said
    ("text", {}, "split 'train' is empty"),
    ("text", {"a.txt": "déjà vu\n".encode() + b"caf\xe9\n"}, "a.txt is not UTF-8: invalid continuation byte"),
    ("text", {"a.txt": "déjà vu\n".encode("utf-16-le")}, "a.txt is not UTF-8: "),
    ("text", {"a.txt": "plain\nwords\n".encode("utf-16-le")}, "a.txt is not UTF-8: line 1 has bytes of 0, as UTF-16"),
    ("text", {"a.txt": "a single document"}, "'valid' is empty"),
    ("text", {"a.csv.gz": "id,text\n1,one\n"}, "a.csv.gz is not read: give its text as "),
    *[("text", {f"a.{form}": "x"}, f"a.{form} is not read: give its text as ") for form in UNREAD_FORMS],
    ("text", {"a.json": '[{"text": "one"}, {"text": "two"}]'}, "a.json, line 1: no JSON object"),
    ("text", {"a.jsonl": '{"text": "fine"}\n{"text": 3}'}, "a.jsonl, line 2: no JSON object with a string named"),
    ("text", {"a.jsonl": '{"text": "fine"}\n' + "[" * 100_000}, "a.jsonl, line 2: no JSON object"),
    ("text", {"a.txt.gz": gzip.compress(b"text " * 999)[:-9]}, "a.txt.gz is damaged"),
    ("cc100", {"NOTES.md": "no language"}, "holds no LANGUAGE.txt"),
    ("cc100", {"de.txt": GOOD, "sw.txt": " \n\n"}, "language 'sw' of "),
    ("cc100", {"de.txt": GOOD, "sw.txt": HELD_OUT}, "has no training text"),
    ("bitext", {"NOTES.md": "no pair"}, "holds no file such as de-en.de, beside de-en.en"),
    ("bitext", {"de-en.de": THREE, "de-en.en": FIVE}, ", line 4: not two texts"),
    ("bitext", {"de-en.de": "a\n \na\n", "de-en.en": THREE}, ", line 2: not two texts"),
    ("bitext", {"de-en.tsv": "a\tb\none\ttwo\tthree"}, ", line 2: not two texts"),
    ("bitext", {"de-en.de": THREE}, "no de-en.en (plain, .gz or .xz) in "),
    ("bitext", {"de-en.de": "a\n", "de-en.en": "b\n"}, "split 'valid' is empty"),
]


@pytest.mark.parametrize("name, contents, line", BAD)
def test_bad_files_are_one_line(name, contents, line, spm, tmp_path):
    (tmp_path / "in").mkdir()
    write_files(tmp_path / "in", contents)
    assert line in refusal(name, tmp_path / "in", spm, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_language_of_nothing_that_the_tokenizer_keeps_has_no_text(spm, tmp_path):
    write_files(tmp_path / "in", {"de.txt": GOOD, "sw.txt": "\u200b"})
    assert "language 'sw' of " in refusal("cc100", tmp_path / "in", tokenizer=spm, out=tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------------------
# Preparations that are stopped, killed, or at work twice

SLOW = """
import sys, time
from pathlib import Path
from data import prepare
from data.tokenizers import SentencePiece

def encode(self, texts):
    print("begun", flush=True)
    time.sleep(600)

SentencePiece.encode_short = encode
prepare.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_preparation_that_is_stopped_leaves_no_obstacle(number, model, tmp_path):
    write_files(tmp_path, {"a.txt": "\n\n".join(map(str, range(2000))), ".out.more.new.partial/of": "another"})
    words = ["text", "--source", tmp_path / "a.txt", "--tokenizer", model, "--out", tmp_path / "out"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", SLOW, *map(str, words)], cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        process.communicate(timeout=20)
    assert process.returncode == -number and (tmp_path / ".out.new.partial" / "train.bin").exists()
    kept = {"a.txt", ".out.lock", ".out.more.new.partial"}
    prepare("text", tmp_path / "a.txt", model, out=tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == kept | {"out"}


def test_a_second_preparation_waits_for_the_first(model, tmp_path, monkeypatch):
    write_files(tmp_path, {"a.txt": "one"})
    monkeypatch.setattr(prepared, "PREPARED", tmp_path)
    with ThreadPoolExecutor() as pool:
        with FileLock(tmp_path / ".pydocs.lock"):
            waiting = pool.submit(prepare, "text", tmp_path / "a.txt", model, out=tmp_path / "pydocs")
            training = pool.submit(ready, "pydocs")  # as a script does
            time.sleep(0.5)
            assert not waiting.done() and not training.done()
            write_files(tmp_path, {"pydocs/meta.json": ""})
        with pytest.raises(FileExistsError, match="is not empty"):
            waiting.result()
        assert training.result() == tmp_path / "pydocs"


def test_what_is_ready(tmp_path, monkeypatch, folder):
    monkeypatch.setattr(prepared, "PREPARED", tmp_path)
    made = []
    monkeypatch.setattr(preparing, "prepare", lambda name, out: made.append((name, out)) or out.mkdir())
    assert ready("pydocs", make=False) == tmp_path / "pydocs" and made == []
    assert ready("pydocs") == ready("pydocs") == tmp_path / "pydocs"
    assert made == [("pydocs", tmp_path / "pydocs")]
    monkeypatch.chdir(folder.parent)
    assert ready(folder.name) == Path(folder.name)
    assert ready(str(folder)) == folder and ready("wikitext103") == tmp_path / "wikitext103" and len(made) == 1
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))  # is not taken for texts
    (damaged / "meta.json").unlink()
    assert ready(str(damaged)) == damaged


OWN = {  # kind -> what the user gives
    None: {"a.txt": "\n".join(f"number {i}" for i in range(900))},
    "languages": {f"{name}.txt": "\n".join(lines_of(name, 300)) for name in ("de", "sw")},
    "pairs": {f"de-en.{side}": "\n".join(lines_of(side, 500)) for side in ("de", "en")},
}


@pytest.mark.parametrize("kind", OWN)
def test_ones_own_texts_are_prepared_once_for_each_state_of_their_files(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "PREPARED", tmp_path / "prepared")
    source = write_files(tmp_path / "mine", OWN[kind])
    monkeypatch.chdir(tmp_path)
    assert not ready("mine", kind, make=False).exists()
    folder = ready("mine", kind)
    assert folder.parent == tmp_path / "prepared" and folder.name.startswith("mine-")
    assert meta_of(folder)["kind"] == (kind or "text") and meta_of(folder)["tokenizer"]["kind"] != "gpt2"
    before = (folder / "meta.json").stat().st_mtime_ns
    assert ready(str(source), kind) == ready("mine", kind, make=False) == folder
    assert (folder / "meta.json").stat().st_mtime_ns == before
    file = next(source.iterdir())
    os.utime(file, ns=(1, 1))
    again = ready("mine", kind)
    assert again != folder and meta_of(again)["checksum"] == meta_of(folder)["checksum"]
    file.write_text(file.read_text().replace("1", "2"))
    assert meta_of(ready("mine", kind))["checksum"] != meta_of(folder)["checksum"]


# ---------------------------------------------------------------------------------------------------------------------
# Many languages

SIZES = {"de": 500, "sw": 300, "zh-Hans": 20}
CC100 = "https://data.statmt.org/cc-100/{}.txt.xz".format


def test_a_folder_of_languages_holds_what_cc100_streams(spm, hub, tmp_path):
    """Three languages in three formats, the last in two files."""
    texts = {name: lines_of(name, size) for name, size in SIZES.items()}
    files = {"de.txt": "\n\n".join(texts["de"]), "README.md": "no language"}
    files["sw.part.jsonl.gz"] = "\n".join(json.dumps({"text": text}) for text in texts["sw"])
    files |= {f"zh-Hans.{i}.txt": "\n\n".join(texts["zh-Hans"][10 * i : 10 * i + 10]) for i in range(2)}
    folder = prepare("cc100", write_files(tmp_path / "in", files), tokenizer=spm, out=tmp_path / "out")
    meta = meta_of(folder)
    assert list(meta["languages"]) == sorted(SIZES) and meta["tokenizer"]["kind"] == "xlmr"
    for language in SIZES:
        expected = {split: [] for split in SPLITS}
        for text in texts[language]:
            expected[split_of(text, valid=0.01, test=0.01)].append(text)
        assert {split: documents_of(folder, split, language) for split in SPLITS} == expected
        for split, own in expected.items():
            counts = meta["languages"][language][split]
            assert (counts["documents"], counts["bytes"]) == (len(own), sum(map(len, own)))
            assert counts["words"] == sum(len(text.split()) for text in own)
    for split in SPLITS:
        for key, count in meta["splits"][split].items():
            assert count == sum(counts[split][key] for counts in meta["languages"].values())
        assert (folder / f"{split}.bin").stat().st_size == 2 * meta["splits"][split]["tokens"]
    hub.rows = {(CC100(name), "train"): own for name, own in texts.items()}
    streamed = prepare("cc100", tokenizer=spm, languages=",".join(SIZES), out=tmp_path / "hub")
    assert meta_of(streamed)["files"] == meta["files"]


def test_a_limit_ends_the_reading_of_a_language(spm, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH_CHARS", 500)
    monkeypatch.setattr(preparing, "ENOUGH", 100)
    hub.rows = {(CC100(name), "train"): lines_of(name, 9000) for name in ("de", "sw")}
    folder = prepare("cc100", tokenizer=spm, languages="sw,de", max_tokens=2000, out=tmp_path / "out")
    assert list(meta_of(folder)["languages"]) == ["de", "sw"]
    for name, counts in meta_of(folder)["languages"].items():
        assert 2000 <= counts["train"]["tokens"] < 2100 and min(counts[split]["tokens"] for split in SPLITS) >= 100
        assert hub.read[CC100(name), "train"] < 4000


def test_a_vocabulary_is_learned_from_so_much_of_each_language(monkeypatch):
    monkeypatch.setattr(preparing, "LEARNED", 20)
    groups = {"a": [("train", "12345"), ("valid", "x"), ("train", "67890ab"), ("train", "c")], "b": [("train", "123")]}
    assert list(preparing.training_texts(groups)) == ["12345", "67890", "123"]
    assert list(preparing.training_texts(groups, 1)) == ["12345", "123"]


# ---------------------------------------------------------------------------------------------------------------------
# Translation pairs


def pairs(name: str, count: int, split: str = "train") -> list[tuple[str, str]]:
    sides = name.split("-", 1)
    return list(zip(*(lines_of(f"{name} {split} {side}", count) for side in sides)))


def pairs_of(folder: Path, split: str, name: str) -> list[tuple[str, str]]:
    """The pairs of a language pair, decoded from its tokens through the index."""
    tokenizer, counts = load_tokenizer(folder), meta_of(folder)["languages"][name][split]
    tokens, index = np.fromfile(folder / f"{split}.bin", "uint16"), np.fromfile(folder / f"{split}.idx", "int64")
    begin = 2 * counts["first"]
    assert index[begin + 2 * counts["pairs"]] == index[begin] + counts["tokens"]
    ends = index[begin : begin + 2 * counts["pairs"] + 1]
    assert index[0] == 0 and index[-1] == len(tokens) and (tokens[ends[1:] - 1] == tokenizer.eot).all()
    texts = [tokenizer.decode(tokens[a : b - 1].tolist()) for a, b in zip(ends[:-1], ends[1:])]
    return list(zip(texts[::2], texts[1::2]))


def held_out_of(folder: Path, split: str) -> list[tuple[str, str]]:
    return [tuple(json.loads(line)) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def test_pairs_come_back(spm, tmp_path, capsys):
    """One pair of languages in two files, and as a table; the other as .xz."""
    texts = {"de-en": pairs("de-en", 400), "en-zh-Hans": pairs("en-zh-Hans", 150)}
    german, english = zip(*texts["de-en"][:200])
    files = {"README.md": "no pair", "de-en.a.de": "\r\n".join(german), "de-en.a.en.gz": "\n".join(english)}
    files["de-en.b.tsv"] = "".join(f"{one}\t{two}\n" for one, two in texts["de-en"][200:])
    for side, own in zip(("en", "zh-Hans"), zip(*texts["en-zh-Hans"])):
        files[f"en-zh-Hans.{side}.xz"] = "\n".join(own)
    files["ru-en.en"] = "no first side\n"
    source = write_files(tmp_path / "in", files)
    folder = prepare("bitext", source, tokenizer=spm, out=tmp_path / "out")
    assert capsys.readouterr().err.count(f"in {source}: 2 files (README.md, ru-en.en), as they are no two sides") == 1
    meta = meta_of(folder)
    assert meta["kind"] == "pairs" and list(meta["languages"]) == list(texts)
    for name in texts:
        expected = {split: [] for split in SPLITS}
        for pair in texts[name]:
            expected[split_of(pair[1], valid=0.01, test=0.01)].append(pair)
        assert {split: pairs_of(folder, split, name) for split in SPLITS} == expected
    assert not (folder / "train.jsonl").exists()
    for split in ("valid", "test"):
        assert held_out_of(folder, split) == [pair for name in texts for pair in pairs_of(folder, split, name)]


def test_pairs_of_the_hub_have_its_splits(spm, hub, tmp_path):
    def translations(name: str, rows: list[tuple]) -> list[dict]:
        return [{"translation": dict(zip(name.split("-"), both))} for both in rows]

    for split in ("train", "validation", "test"):
        hub.rows["de-en", split] = translations("de-en", pairs("de-en", 9, split))
    hub.rows["an-en", "train"] = translations("an-en", pairs("an-en", 9))
    hub.rows["ar-de", "test"] = []
    rows = [(" ", "nothing"), ("\u200b", "without a token"), (None, "nothing at all")]
    hub.rows["de-en", "train"][3:3] = translations("de-en", rows)
    out = prepare("opus100", tokenizer=spm, out=tmp_path / "out")
    for split, theirs in (("train", "train"), ("valid", "validation"), ("test", "test")):
        assert pairs_of(out, split, "de-en") == pairs("de-en", 9, theirs)
    assert list(meta_of(out)["languages"]) == ["an-en", "de-en"]
    assert len(pairs_of(out, "train", "an-en")) == 9 and pairs_of(out, "valid", "an-en") == []
    hub.rows["de-en", "train"] = [{"translation": {"en": "no German"}}]
    assert "cannot read Helsinki-NLP/opus-100 de-en (KeyError: 'de')" in refusal("opus100", tokenizer=spm)


def test_multi30k_reads_its_own_files_or_the_hub(tmp_path, hub):
    names = {"train": ("train", "train"), "valid": ("val", "validation"), "test": ("test_2016_flickr", "test")}
    for split, (name, theirs) in names.items():
        rows = pairs("de-en", 60, split)
        for side, lines in zip(("de", "en"), zip(*rows)):
            write_files(tmp_path, {f"{name}.{side}": "\n".join(lines)})
        hub.rows["bentrevett/multi30k", theirs] = [{"de": one, "en": two} for one, two in rows]
    local = prepare("multi30k-de", tmp_path, pieces=300, out=tmp_path / "local")
    streamed = prepare("multi30k-de", pieces=300, out=tmp_path / "hub")
    assert held_out_of(local, "valid") == pairs("de-en", 60, "valid")
    assert meta_of(local)["files"] == meta_of(streamed)["files"]


def test_a_joint_bpe_is_trained_on_both_sides_of_the_training_pairs(tmp_path):
    sides = {"train": ("ä bär", "a bear"), "valid": ("zebra", "zebra"), "test": ("quokka", "quokka")}
    for split, both in sides.items():
        for language, text in zip(("de", "en"), both):
            write_files(tmp_path, {f"de-en.{split}.{language}": "".join(f"{text} {i}\n" for i in range(40))})
    tokenizer = load_tokenizer(prepare("bitext", tmp_path, pieces=290, out=tmp_path / "out"))
    assert isinstance(tokenizer, XLMR) and tokenizer.vocab_size == 290 + XLMR.added
    pieces = {tokenizer.processor.id_to_piece(i) for i in range(290)}
    words = {piece for piece in pieces if not piece.startswith("<")}
    assert {"▁bär", "▁bear"} < pieces and not any(letter in word for word in words for letter in ("z", "k"))
    # BPE, not unigram: every piece is the merge of two others
    assert all(len(x) == 1 or any(x[:i] in pieces and x[i:] in pieces for i in range(1, len(x))) for x in words)


# ---------------------------------------------------------------------------------------------------------------------
# Messages from a package that is not installed


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
    monkeypatch.setattr(preparing, "PREPARED", folder / "prepared")
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
    assert {language: set(rows) for language, rows in messages.by_language(None).items()} == {
        "de": {("valid", f"de {held_out[0]}"), ("train", f"de {other[0]}")},
        "en_GB": {("train", other[0]), ("train", other[1])},
        "en": {("train", other[0]), ("train", other[1]), ("valid", held_out[0])},
    }


def test_meta_says_what_was_read(wheel, monkeypatch):
    changed = corpora.CORPORA["messages"]._replace(learning=dict(vocab_size=300))
    monkeypatch.setitem(corpora.CORPORA, "messages", changed)
    meta = meta_of(prepare("messages", wheel, languages="de"))
    assert list(meta["languages"]) == ["de"] and list(meta["versions"]) == ["python"]


def test_another_wheel_is_refused(wheel):
    wheel.write_bytes(wheel.read_bytes()[:-1])
    assert "is not the wheel of homeassistant==2026.2.3 that PyPI has" in refusal("messages", wheel)
