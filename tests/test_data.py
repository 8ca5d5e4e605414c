"""Preparing data: splits share no text, and a prepared folder is complete or absent."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from filelock import FileLock
from helpers import ROOT, write_files

from data import bitext_sets, corpora, english, files, tokenizers, xtreme
from data import folder as prepared
from data import prepare as preparing
from data.files import SPLITS, has_words, named_split, read_documents, source_files, split_of
from data.folder import ready
from data.prepare import prepare
from data.tokenizers import XLMR, load_tokenizer, train_sentencepiece


def lines_of(name: str, count: int) -> list[str]:
    """Texts that differ between languages and between positions."""
    rng = np.random.default_rng(list(name.encode()))
    return [f"{name} {i} " + " ".join(map(str, rng.integers(99, size=1 + i % 5))) for i in range(count)]


def refusal(name: str, *arguments, **options) -> str:
    """The one-line error message of a preparation."""
    with pytest.raises((ValueError, OSError, ImportError)) as error:
        prepare(name, *arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def meta_of(folder: Path) -> dict:
    return json.loads((folder / "meta.json").read_text())


def texts_of(folder: Path) -> list[str]:
    """The texts that the corpus `text` reads from a folder."""
    return sorted(text for _, text in corpora.text(folder))


@pytest.fixture(scope="session")
def model(bpe, tmp_path_factory) -> Path:
    return bpe.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def spm(xlmr, tmp_path_factory) -> Path:
    return xlmr.save(tmp_path_factory.mktemp("spm"))


class FakeHub:
    """A fake `datasets` package that counts the rows read."""

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


def test_text_files_of_every_format_are_read(tmp_path):
    files = {"a.md": "one\nmore of one\n\n \n\ntwo\n", "b.txt.xz": "\ufeffthree\nf\ufeffour\n", "c": "five\n"}
    texts = ["one\nmore of one", "two", "three", "f\ufeffour", "five"]
    rows = {"d.jsonl": "6\n\n6", "e.json": "7", "f.ndjson": "8", "g.JSONL": "9"}
    rows |= {"c4-en.00000-of-00512.json.gz": "10", "h.JSON.GZ": "11"}
    for name, text in rows.items():
        files[name] = "\n" + json.dumps({"text": text, "url": "x"}) + "\n"
    write_files(tmp_path, files)
    assert texts_of(tmp_path) == sorted([*texts, *rows.values()])
    del files["c"], files["a.md"]
    assert sorted(corpora.language_files(tmp_path)) == ["b", "d", "e", "en", "f", "g", "h"]


def test_parquet_files_are_read_or_refused_by_name(tmp_path):
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


def test_file_names_choose_the_split(tmp_path, capsys):
    texts = {"train-0001.txt": "a\nb\nc\nb\n", "my.validation.txt": "b\nd\n", "test/a.txt": "c\n", "other.txt": "e"}
    write_files(tmp_path, texts)
    expected = [("valid", "b"), ("valid", "d"), ("test", "c"), *(("train", text) for text in "abcb")]
    assert list(corpora.text(tmp_path)) == expected
    skipped = f"skipped 1 file(s) in {tmp_path} (other.txt): other files name their split, these do not"
    assert skipped in capsys.readouterr().err


@pytest.mark.parametrize(
    "names, named",
    [
        ("a.txt b.txt", ""),
        ("train-00000-of-00001.txt", ""),  # as on the hub
        ("train.txt val.txt", "valid"),
        ("a.txt b.txt test.txt", "test"),
        ("train.txt dev.txt test.txt", "valid test"),
    ],
)
def test_splits_without_a_file_are_chosen_by_a_hash_of_the_text(tmp_path, names, named):
    """They take a tenth of a small training text each, and a hundredth of a large one."""
    texts = {name: [f"{name} {i}" for i in range(500)] for name in names.split()}
    write_files(tmp_path, {name: "\n".join(lines) for name, lines in texts.items()})
    for share, spaces in ((0.1, 0), (0.01, 10**7)):
        with (tmp_path / next(iter(texts))).open("a") as file:
            file.write(" " * spaces + "\n")
        shares, expected = [0 if held_out in named else share for held_out in ("valid", "test")], []
        for name, lines in texts.items():
            split = named_split(Path(name)) or "train"
            expected += [(split_of(text, *shares) if split == "train" else split, text) for text in lines]
        rows = list(corpora.text(tmp_path))
        assert sorted(rows) == sorted(expected)
        assert {split for split, _ in rows} == set(SPLITS)


READERS = {  # reader -> the files it reads, with "," for the end of a line
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
def test_line_endings_and_a_byte_order_mark_change_nothing(read, tmp_path):
    results = []
    for number, (mark, end) in enumerate([("", "\n"), ("", "\r\n"), ("\ufeff", "\n"), ("\ufeff", "\r\n")]):
        files = {name: mark + lines.replace(",", end) + end for name, lines in READERS[read].items()}
        rows = read(write_files(tmp_path / str(number), files))
        if isinstance(rows, dict):
            rows = {name: list(texts) for name, texts in rows.items()}
        results.append(rows if isinstance(rows, dict | tuple) else list(rows))
    assert results[0]
    assert results == [results[0]] * 4


def test_a_lone_cr_is_text(tmp_path):
    write_files(tmp_path, {"de-en.valid.de": "a\rb\nc\rd", "de-en.valid.en": "x\r\ny"})
    assert list(corpora.bitext(tmp_path)["de-en"]) == [("valid", "a\rb", "x"), ("valid", "c\rd", "y")]


@pytest.mark.parametrize(
    "lines, blanks, documents",
    [(3, [], 3), (3, [1], 2), (1, [], 1), (1200, [5], 1200), (1200, [1100], 1200)]
    + [(1200, range(0, 1200, 300), 1200), (1200, range(20, 1200, 20), 60), (1200, range(20, 620, 20), 30 + 2)],
)
def test_documents_are_lines_unless_blank_lines_are_regular(tmp_path, monkeypatch, lines, blanks, documents):
    monkeypatch.setattr("data.files.LONGEST_BLOCK", 590)
    text = [f"line {i}\n" for i in range(lines)]
    for position in reversed(blanks):
        text.insert(position, " \n\n")
    write_files(tmp_path, {"a.txt": "".join(text)})
    texts = list(read_documents(tmp_path / "a.txt"))
    assert len(texts) == documents
    assert "\n".join(texts).split() == "".join(text).split()


def test_each_text_file_is_read_once_and_skipped_files_are_reported(tmp_path, monkeypatch, capsys):
    inside, elsewhere, locked = tmp_path / "in", tmp_path / "elsewhere", tmp_path / "in" / "locked"
    names = (
        "in/.git/config in/.hidden.txt in/deep/a.txt in/README.md in/photo.JPG in/locked/c.txt elsewhere/b.txt".split()
    )
    names += [f"in/x.{ending}" for ending in "avi ckpt db h5 idx mp3 mp4 so sqlite svg wav webp".split()]
    write_files(tmp_path, {name: name for name in names})
    links = {"first": elsewhere, "second": elsewhere, "deep/parent": inside, "again.txt": inside / "deep" / "a.txt"}
    links |= {"loop": inside / "loop", "broken.txt": inside / "absent.txt"}
    for name, target in links.items():
        (inside / name).symlink_to(target)
    os.mkfifo(inside / "pipe.txt")

    def scandir(path, scandir=os.scandir):
        if Path(path) == locked:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert texts_of(inside) == ["elsewhere/b.txt", "in/deep/a.txt"]
    errors = capsys.readouterr().err
    assert f"skipped 1 file(s) in {inside} ({locked}): permission denied\n" in errors
    assert f"skipped 14 file(s) in {inside} (README.md, photo.JPG, x.avi): their names" in errors
    assert source_files(inside / "README.md") == [inside / "README.md"]


def test_scripts_with_spaces_between_words_are_recognised():
    for text in ("The quick brown fox", "Donaudampfschifffahrt ist lang", "    x = 1\n" * 9):
        assert has_words(text)
    for text in ("", "我们在这里学习语言和数学的知识。", "ผมไปตลาดกับเพื่อนของผม แล้วกลับบ้านตอนเย็น"):
        assert not has_words(text)


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


def test_docstrings_of_definitions_and_of_compiled_functions_are_found(tmp_path, monkeypatch):
    write_files(tmp_path, {"a.py": PYTHON, "b.py": "def broken(:\n"})
    monkeypatch.setattr(english, "ROOTS", {tmp_path.name: tmp_path})
    paragraphs = {name: list(texts) for name, texts in english.python_files()}
    assert paragraphs[f"{tmp_path.name}/a.py"] == [
        "A module that documents many things.",
        "The absolute value of {input}. And a longer tail.",
        "A view of the transposed array.",
        'The "if" statement is used for conditional execution.',
        "Indented text of a method, over two lines.",
    ]
    assert paragraphs[f"{tmp_path.name}/b.py"] == []


PROSE = {  # docstring -> its paragraphs of prose
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


def test_prose_is_sentences_without_markup():
    assert {text: list(english.sentences(text)) for text in PROSE} == PROSE


def test_pydocs_keeps_a_repeated_paragraph_once(tmp_path, monkeypatch):
    monkeypatch.setattr(english, "ROOTS", {"mine": tmp_path})
    english.pydocs.cache_clear()
    for i in range(60):
        shared = "The same words in every file."
        text = f'"""Module number {i} of the whole package."""\ndef f():\n    """{shared}\n\n    {shared}"""\n'
        (tmp_path / f"m{i:02}.py").write_text(text)
    (tmp_path / "tests").mkdir()
    shutil.copy(tmp_path / "m00.py", tmp_path / "tests")  # skipped
    documents = english.pydocs()
    assert english.pydocs() is documents  # cached
    english.pydocs.cache_clear()
    assert len(documents) == 60
    assert sum("same words" in text for _, text in documents) == 1
    assert documents[0][1] == "Module number 0 of the whole package.\n\nThe same words in every file."
    assert {split for split, _ in documents} > {"train"}


def test_nine_percent_of_pydocs_are_held_out(monkeypatch):
    """Published results depend on this split."""
    monkeypatch.setattr(english, "python_files", lambda: ((f"m{i}", [f"Text {i}."]) for i in range(10_000)))
    english.pydocs.cache_clear()
    counts = Counter(split for split, _ in english.pydocs())
    english.pydocs.cache_clear()
    assert counts == {"train": 9079, "valid": 432, "test": 489}


def test_wikitext_is_split_into_articles_at_top_level_headings(tmp_path, hub, monkeypatch):
    blank = " \n"
    one = [" = One = \n", blank, " Text with x = y = z . \n", " = no heading = \n", blank, " = = Part = = \n", blank]
    two = [" = Two @-@ fold = \n", blank, " More text . \n"]
    lines = [blank, *one, *two]
    write_files(tmp_path, {f"wiki.{split}.raw": "".join(lines) for split in ("valid", "test")})
    write_files(tmp_path, {"wiki.train.tokens.gz": "".join(lines)})
    articles = [blank + "".join(one), "".join(two)]
    expected = [(split, article) for split in ("valid", "test", "train") for article in articles]
    assert list(corpora.wikitext103(tmp_path)) == expected
    rows = [line if line.strip() else "" for line in lines]  # as on the hub
    hub.rows = {("wikitext-103-raw-v1", split): rows for split in ("train", "validation", "test")}
    assert list(corpora.wikitext103()) == expected
    with pytest.raises(OSError, match=r"no route\)[^\n]*--source[^\n]*$"):
        list(corpora.openwebtext())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError):
        list(corpora.openwebtext())


def test_every_second_held_out_article_of_wikipedia_is_test(tmp_path, monkeypatch):
    train = "\n\n".join(f"= {n} =\nThe article number {n}.\nMore." for n in range(300))
    write_files(tmp_path, {"train.txt": train, "valid.txt": "= A =\nOne\n\n= B =\nTwo\n\n= C =\nThree\n"})
    learn = partial(train_sentencepiece, vocab_size=300)
    monkeypatch.setattr(preparing, "train_sentencepiece", lambda texts, kind: learn(list(texts), kind=kind))
    folder = prepare("enwiki", tmp_path, out=tmp_path / "out")
    assert len(documents_of(folder, "train")) == 300
    assert documents_of(folder, "valid") == ["= A =\nOne", "= C =\nThree"]
    assert documents_of(folder, "test") == ["= B =\nTwo"]


# ---------------------------------------------------------------------------------------------------------------------
# Prepared folders


@pytest.fixture(scope="session")
def paragraphs() -> list[str]:
    return lines_of("document", 600)


@pytest.fixture(scope="session")
def folder(tmp_path_factory, model, paragraphs) -> Path:
    """A prepared corpus. Tests must not write to it."""
    base = write_files(tmp_path_factory.mktemp("corpus"), {"mine.txt": "\n\n".join(paragraphs)})
    return prepare("text", source=base / "mine.txt", tokenizer=model, out=base / "prepared")


def documents_of(folder: Path, split: str, language: str | None = None) -> list[str]:
    """The documents of a split (of a language), decoded."""
    meta, tokenizer = meta_of(folder), load_tokenizer(folder)
    counts = meta["languages"][language][split] if language else {"first": 0} | meta["splits"][split]
    ids = np.fromfile(folder / f"{split}.bin", meta["dtype"])[counts["first"] :][: counts["tokens"]]
    parts = np.split(ids, np.flatnonzero(ids == tokenizer.eot) + 1)
    assert len(parts.pop()) == 0  # the last document ends too
    return [tokenizer.decode(part[:-1].tolist()) for part in parts]


def test_long_documents_are_complete_and_lone_surrogates_become_question_marks(tmp_path, spm, monkeypatch):
    monkeypatch.setattr(tokenizers, "PART", 100)
    text = "def return self " * 50
    rows = json.dumps({"text": text}) + '\n{"text": "half \\ud800 of a pair"}'
    write_files(tmp_path, {f"{split}.jsonl": rows for split in SPLITS})
    folder = prepare("text", tmp_path, spm, out=tmp_path / "out")
    assert documents_of(folder, "train") == [text.strip(), "half ? of a pair"]
    assert meta_of(folder)["splits"]["train"]["words"] == 155


def test_existing_files_are_never_replaced(folder, tmp_path, model):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_files(tmp_path, {"thesis.txt": "precious"})
    for out in (folder, tmp_path):
        message = refusal("text", source=tmp_path / "thesis.txt", tokenizer=model, out=out)
        assert message == f"--out {out} is not empty: delete its files or pass another folder"
    refusal("text", source=folder.parent / "mine.txt", tokenizer=model, out=tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def command(*arguments, **options) -> subprocess.CompletedProcess:
    words = [sys.executable, *map(str, arguments)]
    return subprocess.run(words, **dict(cwd=ROOT, capture_output=True, text=True, check=False) | options)


def test_the_command_prints_token_counts_or_one_error(tmp_path, model, paragraphs):
    write_files(tmp_path, {"mine.txt": "\n\n".join(paragraphs)})
    out, prepare_text = tmp_path / "out", ("-m", "data.prepare", "text")
    done = command(*prepare_text, "--source", tmp_path / "mine.txt", "--tokenizer", model, "--out", out)
    assert done.stderr == f"{tmp_path / 'mine.txt'}: every block between blank lines is a document\n"
    counts = [f"{meta_of(out)['splits'][split]['tokens']:,}" for split in SPLITS]
    assert done.stdout == f"{out}: {' / '.join(counts)} tokens (train / valid / test)\n"
    done = command(*prepare_text, "--source", tmp_path / "absent")
    assert done.stderr == f"error: --source {tmp_path / 'absent'} does not exist\n"
    assert done.returncode == 1
    done = command(*prepare_text, "--sourse", "x")
    assert "--sourse" in done.stderr
    assert done.returncode == 2


OPTIONS = {  # corpus -> options, error message. The default source is a folder of pairs
    "pydoc": ({}, "unknown corpus 'pydoc'; choose from pydocs, wikitext103, "),
    "wmt23-uk": ({"source": None}, "corpus 'wmt23-uk' needs --source"),
    "ciphers-mt": ({}, "corpus 'ciphers-mt' is read from installed packages: omit --source"),
    "enwiki": ({"source": Path("absent")}, "--source absent does not exist"),
    "wikitext103": ({"max_tokens": 0}, "--max_tokens and --pieces must be positive"),
    "text": ({"pieces": -5}, "--max_tokens and --pieces must be positive"),
    "pydocs": ({"source": None, "languages": "en"}, "--languages is only for multilingual corpora, not for 'pydocs'"),
    "cc100": ({"source": None}, "needs --tokenizer PATH (a SentencePiece model such as XLM-R's)"),
    "opus100": ({"source": None}, "needs --tokenizer PATH (a SentencePiece model such as XLM-R's) or --pieces N"),
    "wmt10": ({"pieces": 400, "tokenizer": Path("x")}, "--pieces learns a tokenizer: do not combine it with"),
    "multi30k-de": ({}, "no val.de (plain, .gz or .xz) in "),
    "wmt23-de": ({"pieces": 90_000}, "cannot learn 90,000 pieces from this text: Vocabulary size too high"),
    "wmt23-ru": ({"languages": "de-en,ru-en"}, "unknown language 'ru-en'; choose from de-en"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_bad_options_are_refused_in_one_line(name, tmp_path):
    table = "".join(f"{one}\t{two}\n" for one, two in pairs("de-en", 60))
    write_files(tmp_path / "pairs", {f"de-en.{split}.tsv": table for split in SPLITS})
    options, message = OPTIONS[name]
    assert message in refusal(name, **{"source": tmp_path / "pairs", "out": tmp_path / "out"} | options)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_without_an_end_of_text_token_is_refused(tmp_path):
    write_files(tmp_path, {"a.txt": "\n".join(lines_of("de", 500))})
    tokenizer = train_sentencepiece(lines_of("de", 50), 300, eos_id=-1).save(tmp_path)
    message = refusal("text", tmp_path / "a.txt", tokenizer, out=tmp_path / "out")
    assert message == f"{tokenizer} has no end-of-text token"


THREE, FIVE, GOOD = "a\n" * 3, "a\n" * 4 + "a", "\n\n".join(lines_of("de", 500))
[HELD_OUT, *_] = [text for text in lines_of("x", 500) if split_of(text, 0.01, 0.01) == "valid"]
UNREAD_FORMS = ("jsonl.zst", "rar", "feather", "avro", "orc", "tfrecord")
BAD = [  # corpus, files, error message
    ("text", {}, "split 'train' is empty"),
    ("text", {"a.txt": "déjà vu\n".encode() + b"caf\xe9\n"}, "a.txt is not UTF-8: invalid continuation byte"),
    ("text", {"a.txt": "déjà vu\n".encode("utf-16-le")}, "a.txt is not UTF-8: "),
    ("text", {"a.txt": "plain\nwords\n".encode("utf-16-le")}, "a.txt is not UTF-8: line 1 has many zero bytes, as in"),
    ("text", {"a.txt": "a single document"}, "'valid' is empty"),
    ("text", {"a.csv.gz": "id,text\n1,one\n"}, "a.csv.gz: unsupported format; pass plain text"),
    *[("text", {f"a.{form}": "x"}, f"a.{form}: unsupported format; pass plain text") for form in UNREAD_FORMS],
    ("text", {"a.json": '[{"text": "one"}, {"text": "two"}]'}, "a.json, line 1: not a JSON object"),
    ("text", {"a.jsonl": '{"text": "fine"}\n{"text": 3}'}, "a.jsonl, line 2: not a JSON object with a string 'text'"),
    ("text", {"a.jsonl": '{"text": "fine"}\n' + "[" * 100_000}, "a.jsonl, line 2: not a JSON object"),
    ("text", {"a.txt.gz": gzip.compress(b"text " * 999)[:-9]}, "a.txt.gz is damaged"),
    ("cc100", {"NOTES.md": "no language"}, "contains no LANGUAGE.txt"),
    ("cc100", {"de.txt": GOOD, "sw.txt": " \n\n"}, "language 'sw' of "),
    ("cc100", {"de.txt": GOOD, "sw.txt": HELD_OUT}, "has no training text"),
    ("bitext", {"NOTES.md": "no pair"}, "contains no files such as de-en.de and de-en.en"),
    ("bitext", {"de-en.de": THREE, "de-en.en": FIVE}, ", line 4: expected two texts"),
    ("bitext", {"de-en.de": "a\n \na\n", "de-en.en": THREE}, ", line 2: expected two texts"),
    ("bitext", {"de-en.tsv": "a\tb\none\ttwo\tthree"}, ", line 2: expected two texts"),
    ("bitext", {"de-en.de": THREE}, "no de-en.en (plain, .gz or .xz) in "),
    ("bitext", {"de-en.de": "a\n", "de-en.en": "b\n"}, "split 'valid' is empty"),
]


@pytest.mark.parametrize("name, contents, message", BAD)
def test_bad_files_are_refused_in_one_line(name, contents, message, spm, tmp_path):
    (tmp_path / "in").mkdir()
    write_files(tmp_path / "in", contents)
    assert message in refusal(name, tmp_path / "in", spm, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name, kind", [("text", "bpe"), ("cc100", "unigram")])
def test_unknown_characters_are_counted_and_many_are_refused(name, kind, tmp_path, capsys):
    """Bits per byte of a text that is mostly <unk> mean nothing. With bytes, no character is unknown."""
    lines, other = lines_of("de", 900), " ".join(map(chr, range(0x400, 0x440)))
    cls, file = (XLMR, "de.txt") if name == "cc100" else (tokenizers.SentencePiece, "a.txt")
    options = dict(byte_fallback=False, model_type=kind, character_coverage=1.0)
    model = train_sentencepiece(lines, 60 + cls.added, cls, **options).save(tmp_path)

    def prepared_from(lines: list[str], out: str) -> str:
        write_files(tmp_path / "in", {file: "\n".join(lines)})
        prepare(name, tmp_path / "in", tokenizer=model, out=tmp_path / out)
        return capsys.readouterr().err

    assert "<unk>" not in prepared_from(lines, "known")
    assert re.search(r"\d\.\d% of the tokens of .* are <unk>, since", prepared_from([*lines, other], "some"))
    with pytest.raises(ValueError, match=r"^\d\d% of the tokens of .* would be <unk>: pass another --tokenizer"):
        prepared_from([f"{other} {line}" for line in lines], "many")
    assert not (tmp_path / "many").exists()
    model = train_sentencepiece(lines, 300, cls).save(tmp_path)
    assert "<unk>" not in prepared_from([f"{other} {line}" for line in lines], "bytes")


def test_a_language_whose_characters_the_tokenizer_drops_has_no_text(spm, tmp_path):
    write_files(tmp_path / "in", {"de.txt": GOOD, "sw.txt": "\u200b"})
    assert "language 'sw' of " in refusal("cc100", tmp_path / "in", tokenizer=spm, out=tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------------------
# Stopped, killed and concurrent preparations

SLOW = """
import sys, time
from pathlib import Path
from data import prepare
from data.tokenizers import SentencePiece

def encode(self, texts):
    print("encoding", flush=True)
    time.sleep(600)

SentencePiece.encode_short = encode
prepare.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stopped_preparation_can_be_repeated(number, model, tmp_path):
    write_files(tmp_path, {"a.txt": "\n\n".join(map(str, range(2000))), ".out.more.new.partial/of": "another"})
    words = ["text", "--source", tmp_path / "a.txt", "--tokenizer", model, "--out", tmp_path / "out"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", SLOW, *map(str, words)], cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == "encoding\n"
        process.send_signal(number)
        process.communicate(timeout=20)
    assert process.returncode == -number
    assert (tmp_path / ".out.new.partial" / "train.bin").exists()
    prepare("text", tmp_path / "a.txt", model, out=tmp_path / "out")
    assert set(os.listdir(tmp_path)) == {"a.txt", "out", ".out.lock", ".out.more.new.partial"}


def test_a_second_preparation_waits_for_the_first(model, tmp_path, monkeypatch, capsys):
    write_files(tmp_path, {"a.txt": "one"})
    monkeypatch.setattr(prepared, "PREPARED", tmp_path)
    with ThreadPoolExecutor() as pool:
        with FileLock(tmp_path / ".pydocs.lock"):
            waiting = pool.submit(prepare, "text", tmp_path / "a.txt", model, out=tmp_path / "pydocs")
            training = pool.submit(ready, "pydocs")  # as a script does
            time.sleep(0.5)
            assert not waiting.done()
            assert not training.done()
            assert f"waiting for the process that is preparing {tmp_path / 'pydocs'}\n" in capsys.readouterr().err
            write_files(tmp_path, {"pydocs/meta.json": ""})
        with pytest.raises(FileExistsError, match="is not empty"):
            waiting.result()
        assert training.result() == tmp_path / "pydocs"


def test_a_corpus_of_installed_packages_is_prepared_once(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "PREPARED", tmp_path)
    made = []
    monkeypatch.setattr(preparing, "prepare", lambda name, out: made.append((name, out)) or out.mkdir())
    assert ready("pydocs", make=False) == tmp_path / "pydocs"
    assert ready("wikitext103") == tmp_path / "wikitext103"  # not in a package
    assert made == []
    assert ready("pydocs") == ready("pydocs") == tmp_path / "pydocs"
    assert made == [("pydocs", tmp_path / "pydocs")]


def test_a_prepared_folder_is_found_by_its_path(tmp_path, monkeypatch, folder):
    monkeypatch.setattr(prepared, "PREPARED", tmp_path)
    assert ready(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert ready(folder.name) == Path(folder.name)
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    (damaged / "meta.json").unlink()
    assert ready(str(damaged)) == damaged  # not mistaken for texts


USER_FILES = {  # kind -> files
    None: {"a.txt": "\n".join(f"number {i}" for i in range(900))},
    "languages": {f"{name}.txt": "\n".join(lines_of(name, 300)) for name in ("de", "sw")},
    "pairs": {f"de-en.{side}": "\n".join(lines_of(side, 500)) for side in ("de", "en")},
}


@pytest.mark.parametrize("kind", USER_FILES)
def test_user_texts_are_prepared_again_only_when_a_file_changes(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "PREPARED", tmp_path / "prepared")
    source = write_files(tmp_path / "mine", USER_FILES[kind])
    monkeypatch.chdir(tmp_path)
    assert not ready("mine", kind, make=False).exists()
    folder = ready("mine", kind)
    meta = meta_of(folder)
    assert folder.parent == tmp_path / "prepared"
    assert folder.name.startswith("mine-")
    assert meta["kind"] == (kind or "text")
    assert meta["tokenizer"]["kind"] != "gpt2"
    before = (folder / "meta.json").stat().st_mtime_ns
    assert ready(str(source), kind) == ready("mine", kind, make=False) == folder
    assert len({ready("mine", other, make=False) for other in USER_FILES}) == len(USER_FILES)
    assert (folder / "meta.json").stat().st_mtime_ns == before
    file = next(source.iterdir())
    os.utime(file, ns=(1, 1))
    again = ready("mine", kind)
    assert again != folder
    assert meta_of(again)["checksum"] == meta["checksum"]
    file.write_text(file.read_text().replace("1", "2"))
    assert meta_of(ready("mine", kind))["checksum"] != meta["checksum"]


@pytest.mark.parametrize("name", ["text", "messages", "openwebtext", "bitext", "wmt23-de"])
def test_a_folder_of_the_users_may_have_the_name_of_a_corpus(name, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "PREPARED", tmp_path / "prepared")
    write_files(tmp_path / name, USER_FILES[None])
    monkeypatch.chdir(tmp_path)
    folder = ready(name)
    assert folder == ready(f"./{name}")
    assert meta_of(folder)["source"] == str(tmp_path / name)
    shutil.copytree(folder, tmp_path / "prepared" / name)
    assert ready(name) == tmp_path / "prepared" / name  # unless it has been prepared


@pytest.mark.parametrize("kind", USER_FILES)
def test_the_tokens_of_a_text_that_has_been_moved_are_found_by_its_run(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepared, "PREPARED", tmp_path / "prepared")
    source = write_files(tmp_path / "mine", USER_FILES[kind])
    folder = ready(str(source), kind)
    runs = write_files(tmp_path / "out", {"demo/config.json": json.dumps({"data_checksum": "+".join("ab")})})
    source.rename(tmp_path / "moved")
    assert not ready(str(source), kind, out_dir=runs).exists()
    checksums = f"{'0' * 64}+{meta_of(folder)['checksum']}"
    write_files(runs, {"other/config.json": json.dumps({"data_checksum": checksums})})
    monkeypatch.chdir(tmp_path / "moved")
    for name in (source, "mine", "elsewhere/mine"):
        assert ready(str(name), kind, out_dir=runs) == folder
    assert f"mine does not exist: using its tokens in {folder}\n" in capsys.readouterr().err
    assert not ready("yours", kind, out_dir=runs).exists()
    assert not ready("mine", kind).exists()


def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch, capsys):
    clock = iter(range(0, 10_000, 8))
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert list(files.progress(range(9), "counting")) == [*range(9)]
    assert list(files.progress(iter("abc"), "reading")) == [*"abc"]
    lines = [*(f"counting: {n} of 9" for n in (1, 3, 6, 9)), "reading: 1 so far", "reading: 3 so far"]
    assert capsys.readouterr().err.splitlines() == lines
    monkeypatch.setenv("RANK", "1")
    assert list(files.progress(range(9), "counting")) == [*range(9)]
    assert capsys.readouterr().err == ""


def test_the_command_runs_as_a_file_and_prints_any_name(tmp_path, model, paragraphs):
    """Also where the output's encoding lacks a character of the name."""
    write_files(tmp_path, {"a.txt": "\n\n".join(paragraphs)})
    words = ["text", "--source", tmp_path / "a.txt", "--tokenizer", model, "--out", tmp_path / "имя"]
    line = [sys.executable, ROOT / "data" / "prepare.py", *words]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(list(map(str, line)), capture_output=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert b"/???: " in done.stdout


@pytest.mark.parametrize("kind", [None, "pairs"])
def test_user_texts_are_prepared_with_the_tokenizer_of_a_run(kind, tmp_path, monkeypatch, bpe, xlmr):
    monkeypatch.setattr(prepared, "PREPARED", tmp_path / "prepared")
    source = write_files(tmp_path / "mine", USER_FILES[kind])
    tokenizer = xlmr if kind else bpe
    run, no_run = tmp_path / "run", tmp_path / "hugging-face"
    run.mkdir()
    no_run.mkdir()
    tokenizer.save(run)
    folder = ready(str(source), kind, run=run)
    assert meta_of(folder)["tokenizer"]["sha256"] == tokenizer.sha256
    assert ready(str(source), kind, make=False, run=run) == folder
    learned = ready(str(source), kind)
    assert ready(str(source), kind, run=no_run) == learned != folder
    assert meta_of(learned)["tokenizer"]["sha256"] != tokenizer.sha256


# ---------------------------------------------------------------------------------------------------------------------
# Many languages

SIZES = {"de": 500, "sw": 300, "zh-Hans": 20}
CC100 = "https://data.statmt.org/cc-100/{}.txt.xz".format


def test_a_folder_of_languages_gives_the_same_files_as_streaming_cc100(spm, hub, tmp_path):
    """Three languages in three formats; the last is in two files."""
    texts = {name: lines_of(name, size) for name, size in SIZES.items()}
    files = {"de.txt": "\n\n".join(texts["de"]), "README.md": "no language"}
    files["sw.part.jsonl.gz"] = "\n".join(json.dumps({"text": text}) for text in texts["sw"])
    files |= {f"zh-Hans.{i}.txt": "\n\n".join(texts["zh-Hans"][10 * i : 10 * i + 10]) for i in range(2)}
    folder = prepare("cc100", write_files(tmp_path / "in", files), tokenizer=spm, out=tmp_path / "out")
    meta = meta_of(folder)
    assert list(meta["languages"]) == sorted(SIZES)
    assert meta["tokenizer"]["kind"] == "xlmr"
    for language in SIZES:
        expected = {split: [] for split in SPLITS}
        for text in texts[language]:
            expected[split_of(text, valid=0.01, test=0.01)].append(text)
        assert {split: documents_of(folder, split, language) for split in SPLITS} == expected
        for split, documents in expected.items():
            counts = meta["languages"][language][split]
            assert counts["documents"] == len(documents)
            assert counts["bytes"] == sum(map(len, documents))
            assert counts["words"] == sum(len(text.split()) for text in documents)
    for split in SPLITS:
        for key, count in meta["splits"][split].items():
            assert count == sum(counts[split][key] for counts in meta["languages"].values())
        assert (folder / f"{split}.bin").stat().st_size == 2 * meta["splits"][split]["tokens"]
    hub.rows = {(CC100(name), "train"): rows for name, rows in texts.items()}
    streamed = prepare("cc100", tokenizer=spm, languages=",".join(SIZES), out=tmp_path / "hub")
    assert meta_of(streamed)["files"] == meta["files"]


def test_max_tokens_ends_the_reading_of_a_language(spm, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH_CHARS", 500)
    monkeypatch.setattr(preparing, "ENOUGH", 100)
    hub.rows = {(CC100(name), "train"): lines_of(name, 9000) for name in ("de", "sw")}
    folder = prepare("cc100", tokenizer=spm, languages="sw,de", max_tokens=2000, out=tmp_path / "out")
    assert list(meta_of(folder)["languages"]) == ["de", "sw"]
    for name, counts in meta_of(folder)["languages"].items():
        assert 2000 <= counts["train"]["tokens"] < 2100
        assert min(counts[split]["tokens"] for split in SPLITS) >= 100
        assert hub.read[CC100(name), "train"] < 4000


def test_a_vocabulary_is_learned_from_equal_shares_of_the_languages(monkeypatch):
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
    """The sentence pairs of a language pair, decoded from the token file through the index."""
    tokenizer, counts = load_tokenizer(folder), meta_of(folder)["languages"][name][split]
    tokens, index = np.fromfile(folder / f"{split}.bin", "uint16"), np.fromfile(folder / f"{split}.idx", "int64")
    begin = 2 * counts["first"]
    assert index[begin + 2 * counts["pairs"]] == index[begin] + counts["tokens"]
    ends = index[begin : begin + 2 * counts["pairs"] + 1]
    assert (index[0], index[-1]) == (0, len(tokens))
    assert (tokens[ends[1:] - 1] == tokenizer.eot).all()
    texts = [tokenizer.decode(tokens[a : b - 1].tolist()) for a, b in zip(ends[:-1], ends[1:])]
    return list(zip(texts[::2], texts[1::2]))


def held_out_of(folder: Path, split: str) -> list[tuple[str, str]]:
    return [tuple(json.loads(line)) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def test_pairs_are_decoded_unchanged(spm, tmp_path, capsys):
    """One language pair is in two files and a table, the other in .xz files."""
    texts = {"de-en": pairs("de-en", 400), "en-zh-Hans": pairs("en-zh-Hans", 150)}
    german, english = zip(*texts["de-en"][:200])
    files = {"README.md": "no pair", "de-en.a.de": "\r\n".join(german), "de-en.a.en.gz": "\n".join(english)}
    files["de-en.b.tsv"] = "".join(f"{one}\t{two}\n" for one, two in texts["de-en"][200:])
    for side, lines in zip(("en", "zh-Hans"), zip(*texts["en-zh-Hans"])):
        files[f"en-zh-Hans.{side}.xz"] = "\n".join(lines)
    files["ru-en.en"] = "no first side\n"
    source = write_files(tmp_path / "in", files)
    folder = prepare("bitext", source, tokenizer=spm, out=tmp_path / "out")
    skipped = f"skipped 2 file(s) in {source} (README.md, ru-en.en): neither a side of a language pair"
    assert capsys.readouterr().err.count(skipped) == 1
    meta = meta_of(folder)
    assert meta["kind"] == "pairs"
    assert list(meta["languages"]) == list(texts)
    for name in texts:
        expected = {split: [] for split in SPLITS}
        for pair in texts[name]:
            english = pair[name.split("-").index("en")]
            expected[split_of(english, valid=0.01, test=0.01)].append(pair)
        assert {split: pairs_of(folder, split, name) for split in SPLITS} == expected
    assert not (folder / "train.jsonl").exists()
    for split in ("valid", "test"):
        decoded = [pair for name in texts for pair in pairs_of(folder, split, name)]
        assert held_out_of(folder, split) == decoded


MULTIPARALLEL = {  # names of the pairs -> the language of each whose text chooses the split
    ("de-en", "fr-en"): ("en", "en"),
    ("en-de", "en-fr"): ("en", "en"),
    ("en-de", "fr-en", "de-fr"): ("en", "en", "fr"),
    ("fr-de", "it-fr"): ("fr", "it"),
    ("de-fr", "fr-it"): ("fr", "it"),
    ("en-zh-Hans",): ("en",),
    ("zh-Hans-en", "en-de"): ("en", "en"),
}


@pytest.mark.parametrize("names", MULTIPARALLEL, ids=" ".join)
def test_no_text_is_in_two_splits_whatever_the_names(names, tmp_path, capsys):
    """Some texts have two translations, and English has fewer different texts than the others."""
    spoken = {code: [f"{code} {i}" for i in range(4000)] for code in ("de", "fr", "it", "zh")}
    spoken["en"] = [f"en {i // 2}" for i in range(4000)]
    for name in names:
        codes = name.replace("-Hans", "").split("-")
        rows = [*zip(*map(spoken.get, codes)), *zip(spoken[codes[0]], reversed(spoken[codes[1]]))]
        write_files(tmp_path, {f"{name}.tsv": "".join(f"{one}\t{two}\n" for one, two in rows)})
    groups, splits = corpora.bitext(tmp_path), {}
    for name, chooser in zip(names, MULTIPARALLEL[names]):
        counts = Counter()
        for split, *texts in groups[name]:
            counts[split] += 1
            [key] = [text for text in texts if text.startswith(chooser)]
            assert split == split_of(key, valid=0.01, test=0.01)
            for text in texts:
                splits.setdefault(text, set()).add(split)
        assert counts["train"] > 7000 and min(counts.values()) > 20
    assert all(len(each) == 1 for each in splits.values())


def test_named_splits_are_kept_as_published(tmp_path):
    """Here a training pair repeats a text of the test set."""
    files = {f"de-en.{split}.tsv": f"a\t{split}\nJa.\tYes.\n" for split in SPLITS}
    rows = list(corpora.bitext(write_files(tmp_path, files))["de-en"])
    assert sorted(rows) == sorted((split, *row) for split in SPLITS for row in (("a", split), ("Ja.", "Yes.")))


def test_pairs_of_the_hub_keep_its_splits(spm, hub, tmp_path):
    def translations(name: str, rows: list[tuple]) -> list[dict]:
        return [{"translation": dict(zip(name.split("-"), both))} for both in rows]

    for split in ("train", "validation", "test"):
        hub.rows["de-en", split] = translations("de-en", pairs("de-en", 9, split))
    hub.rows["an-en", "train"] = translations("an-en", pairs("an-en", 9))
    hub.rows["ar-de", "test"] = []
    rows = [(" ", "nothing"), ("\u200b", "without a token"), (None, "nothing at all")]
    hub.rows["de-en", "train"][3:3] = translations("de-en", rows)
    out = prepare("opus100", tokenizer=spm, out=tmp_path / "out")
    for split, hub_split in (("train", "train"), ("valid", "validation"), ("test", "test")):
        assert pairs_of(out, split, "de-en") == pairs("de-en", 9, hub_split)
    assert list(meta_of(out)["languages"]) == ["an-en", "de-en"]
    assert len(pairs_of(out, "train", "an-en")) == 9
    assert pairs_of(out, "valid", "an-en") == []
    hub.rows["de-en", "train"] = [{"translation": {"en": "no German"}}]
    message = refusal("opus100", tokenizer=spm)
    assert "cannot read Helsinki-NLP/opus-100 de-en (KeyError: 'de')" in message


def test_multi30k_is_the_same_from_local_files_and_from_the_hub(tmp_path, hub):
    names = {"train": ("train", "train"), "valid": ("val", "validation"), "test": ("test_2016_flickr", "test")}
    for split, (name, hub_split) in names.items():
        rows = pairs("de-en", 60, split)
        for side, lines in zip(("de", "en"), zip(*rows)):
            write_files(tmp_path, {f"{name}.{side}": "\n".join(lines)})
        hub.rows["bentrevett/multi30k", hub_split] = [{"de": one, "en": two} for one, two in rows]
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
    assert isinstance(tokenizer, XLMR)
    assert tokenizer.vocab_size == 290 + XLMR.added
    pieces = {tokenizer.processor.id_to_piece(i) for i in range(290)}
    words = {piece for piece in pieces if not piece.startswith("<")}
    assert {"▁bär", "▁bear"} < pieces
    assert not set("zk") & set("".join(words))  # the letters of the held-out pairs
    for word in words:  # BPE, not unigram: every longer piece merges two others
        assert len(word) == 1 or any(word[:i] in pieces and word[i:] in pieces for i in range(1, len(word)))
