"""Random command lines and damaged files: they give a result, or an error of one clear line.

By default, a few examples of each, the same every time; EXAMPLES=10000 runs about that many in total, new every time.
"""

import gzip
import io
import json
import lzma
import os
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path

import pytest
from helpers import constants, save_run, write_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import finetune_xtreme
import train_electra
import train_lm
import train_mlm
import train_mt
from data import bitext_sets, corpora, xtreme, xtreme_rows
from data.batches import PairData
from data.prepare import prepare
from data.tokenizers import XLMR, load_tokenizer, train_sentencepiece
from engine import pretrained
from engine.config import command_line, run_name
from engine.files import read_json
from model import GPT

TOTAL = int(os.environ.get("EXAMPLES", 0))
OFTEN = dict(max_examples=max(1, TOTAL // 25), print_blob=True) if TOTAL else dict(max_examples=8, derandomize=True)
profile = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), **OFTEN)


def answer(call: Callable, where: str = ""):
    """The result of a call, or None after an error whose single line must contain `where`."""
    try:
        return call()
    except (ValueError, OSError, ImportError) as error:
        check_line(str(error), where)
        return None


def check_line(text: str, where: str):
    line = " ".join(text.split())
    assert 10 < len(line) < 700 and where in line, line


# --- The command line

SCRIPTS = {module.__name__: module for module in (train_lm, train_mlm, train_electra, train_mt, finetune_xtreme)}
USUAL = st.sampled_from("0 1 2 8 64 0.5 1e-3 true false none text switch hypersphere sigmoid float64".split())
ODD = "nan inf -inf 1e400 1e-400 -1 -0.0 4 0x10 1e3 -- --help".split()
ODD += ["", " ", "9" * 30, "9" * 400, "a=b", "--preset demo", "a\nb"]
WORDS = USUAL | USUAL | st.sampled_from(ODD) | st.integers(-3, 300).map(str) | st.floats().map(str)
WORDS |= st.text(st.characters(exclude_characters="\0"), max_size=8)
WRITTEN = st.sampled_from(["--{0}\0{1}", "--{0}={1}", "{1}"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_random_command_line_is_a_config_or_refused_in_one_line(name):
    """Or it is refused by tyro, or prints the help."""
    script = SCRIPTS[name]
    names = st.sampled_from([*vars(script.Config()), "nonsense"])

    @profile
    @given(st.sampled_from([*script.PRESETS, "no such", None]), st.lists(st.tuples(WRITTEN, names, WORDS), max_size=5))
    def check(preset, options):
        line = ["--preset", preset] if preset else []
        for form, name, value in options:
            line += form.format(name, value).split("\0")
        output = io.StringIO()
        with redirect_stderr(output), redirect_stdout(output):
            try:
                config = answer(lambda: command_line(script.Config, script.PRESETS, line))
            except SystemExit as stop:
                assert stop.code in (0, 2)
                assert output.getvalue().strip()
                return
        assert not config or len(run_name(config, script.PRESETS).encode()) <= 255

    check()


# --- Damage


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """The bytes with a few replaced, and perhaps cut off there."""
    begin = draw(st.integers(0, len(content)))
    end = begin + draw(st.integers(0, 8))
    rest = draw(st.sampled_from([content[end:], content[end:], b""]))
    return content[:begin] + draw(st.binary(max_size=8)) + rest


REWRITTEN = [  # what other programs and people do to files
    lambda content: b"",
    lambda content: b"\xef\xbb\xbf" + content,
    lambda content: content.replace(b"\n", b"\r\n"),
    lambda content: content.replace(b"\n", b""),
    lambda content: content.replace(b"\t", b"  "),
    lambda content: content.replace(b'"', b"'"),
    lambda content: content.decode("utf-8", "replace").encode("utf-16"),
    lambda content: content.decode("utf-8", "replace").encode("latin-1", "replace"),
    lambda content: b"".join(content.splitlines(keepends=True)[1:]),
    gzip.compress,
]


def damages(name: str, content: bytes):
    """A strategy that damages a file of this name."""
    ways = damaged(content) | st.sampled_from(REWRITTEN).map(lambda rewrite: rewrite(content))
    if name.endswith((".gz", ".xz")):  # damages the uncompressed file, too
        module = gzip if name.endswith(".gz") else lzma
        ways |= damages(name[:-3], module.decompress(content)).map(module.compress)
    return ways


# --- Intact files, and what reads them after one of them is damaged


def lines(*texts: str) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


def rows(*records) -> bytes:
    return lines(*map(json.dumps, records))


@cache
def pieces() -> XLMR:
    """A tokenizer with a small vocabulary."""
    return train_sentencepiece([Path(__file__).read_text()], 400, XLMR)


def corpus(name: str, folder: Path):
    """Reads all texts of a corpus from a folder, and prepares it."""
    texts_of = corpora.CORPORA[name].local(folder)
    for texts in texts_of.values() if isinstance(texts_of, dict) else [texts_of]:
        for _ in texts:
            pass
    out = folder.with_name("out")
    shutil.rmtree(out, ignore_errors=True)
    pieces().save(folder.parent)
    answer(lambda: prepare(name, folder, folder.with_name("xlmr.model"), out=out))


def task(name: str, folder: Path):
    """Reads examples of a task's two splits, and makes rows of tokens."""
    kind, labels = xtreme.TASKS[name].kind, xtreme.TASKS[name].labels
    for split in ("train", xtreme.TASKS[name].test):
        examples, notes = xtreme.read(name, split, folder)
        for note in notes:
            check_line(note, str(folder))
        for language_examples in examples.values():
            xtreme_rows.rows_of(kind, language_examples, pieces(), 32, 8, list(labels))


TEXT = lines("A first text – Straße.", "漢字 and so on.", "", "The second one.", "", "Ein dritter.")
SENTENCES = lines("Der erste.", "The second.", "漢字")
TAGS = lines("The\tDET", "dog\tNOUN", "barks\tVERB", "", "It\tPRON", "barks\tVERB", "")
CONLLU = lines("# text = A dog", "1\tA\ta\tDET\t_\t_\t_\t_\t_\t_", "2\tdog\tdog\tNOUN\t_\t_\t_\t_\t_\t_", "")
QUESTION = {"id": "1", "question": "What is it?", "answers": [{"text": "blue", "answer_start": 6}]}
SQUAD = json.dumps({"data": [{"paragraphs": [{"context": "It is blue, so it is.", "qas": [QUESTION]}]}]}).encode()
NLI = lines("A\tB\tneutral", "C\tD\tx", "E\tF")


def use_tokenizer(path: Path):
    tokenizer = load_tokenizer(path)
    tokenizer.decode(tokenizer.encode_batch(["Ein Text, 漢字\n"])[0])


def make_data(folder: Path):
    """Prepares a corpus of pairs."""
    source = folder.with_name("source")
    texts = [f"text {number}, and so on" for number in range(30)]
    pairs = lines(*(f"{text}\t{text}" for text in texts))
    write_files(source, {f"de-en.{split}.tsv": pairs for split in ("train", "valid", "test")})
    pieces().save(folder.parent)
    folder.rmdir()
    prepare("bitext", source, folder.with_name("xlmr.model"), out=folder)


def use_data(folder: Path):
    data = PairData(folder, 8, 64)
    data.batch("train", 0)
    data.tokenizer.encode_batch(["text"])


TEXTS = {"a.txt": TEXT, "b.txt.gz": gzip.compress(TEXT), "c.txt.xz": lzma.compress(TEXT)}
TEXTS |= {"d.jsonl": rows({"text": "A"}, {"text": "B", "id": 1})}
LANGUAGES = {"de.txt": TEXT, "sw.1.jsonl.xz": lzma.compress(rows({"text": "A"}))}
PAIRS = {"de-en.de": SENTENCES, "de-en.en": SENTENCES, "sw-en.tsv": lines("moja\tone", "mbili\ttwo")}
LINKS = {"de-en.src-tgt": lines("ein Hund ||| a dog", "ja ||| yes"), "de-en.gold": lines("1-1 2p2", "1-1")}
CASES = {  # {file name: content}, or a function that makes a folder; a function that reads the folder
    "text": (TEXTS, partial(corpus, "text")),
    "languages": (LANGUAGES, partial(corpus, "cc100")),
    "bitext": (PAIRS, partial(corpus, "bitext")),
    "tags": ({"train-en.tsv": TAGS, "test-de.tsv": TAGS, "de-ud-test.conllu": CONLLU}, partial(task, "pos")),
    "xquad": ({"train-v1.1.json": SQUAD, "xquad.de.json": SQUAD}, partial(task, "xquad")),
    "xnli": ({"train-en.tsv": NLI, "test-de.tsv": NLI}, partial(task, "xnli")),
    "links": (LINKS, bitext_sets.word_alignments),
    "tatoeba": ({"deu-eng.deu": SENTENCES, "deu-eng.eng": SENTENCES}, bitext_sets.tatoeba),
    "tokenizer": (lambda folder: pieces().save(folder), use_tokenizer),
    "prepared data": (make_data, use_data),
    "run": (lambda folder: save_run(folder, GPT(constants(router="dense"), 40), pieces()), pretrained.load),
    "record": ({"it.json": rows({"seed": 0, "gamma": "Infinity"})}, lambda folder: read_json(folder / "it.json")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_read_or_refused_in_one_line(name, tmp_path):
    (make, read), folder = CASES[name], tmp_path / "folder"
    folder.mkdir()
    make(folder) if callable(make) else write_files(folder, make)
    intact = {path: path.read_bytes() for path in sorted(folder.rglob("*.*")) if path.is_file()}
    read(folder)

    @profile
    @given(st.data())
    def check(data):
        shutil.rmtree(folder)
        for path, content in intact.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        file = data.draw(st.sampled_from(sorted(intact)))
        file.write_bytes(data.draw(damages(file.name, intact[file])))
        with redirect_stderr(io.StringIO()):
            answer(lambda: read(folder), str(folder))

    check()
