"""Readers of files and command lines under what chance brings: a result, or one clear line, and nothing else.

A few examples of each, the same every time; with EXAMPLES=10000 so many of all together, others every time.
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
    """What a call gives, or None where it ends in an error that `clear_errors` turns into a line.

    where: a name that the line must hold.
    """
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
def test_a_command_line_makes_a_run_or_is_refused(name):
    """It is refused in a line, or by tyro, or asks for help."""
    script = SCRIPTS[name]
    names = st.sampled_from([*vars(script.Config()), "nonsense"])

    @profile
    @given(st.sampled_from([*script.PRESETS, "no such", None]), st.lists(st.tuples(WRITTEN, names, WORDS), max_size=5))
    def check(preset, options):
        line = ["--preset", preset] if preset else []
        for form, name, value in options:
            line += form.format(name, value).split("\0")
        said = io.StringIO()
        with redirect_stderr(said), redirect_stdout(said):
            try:
                config = answer(lambda: command_line(script.Config, script.PRESETS, line))
            except SystemExit as stop:
                assert stop.code in (0, 2) and said.getvalue().strip()
                return
        assert not config or len(run_name(config, script.PRESETS).encode()) <= 255

    check()


# --- Damage


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    """The bytes with a few of them taken out, others put in, and perhaps cut off there."""
    begin = draw(st.integers(0, len(whole)))
    end = begin + draw(st.integers(0, 8))
    rest = draw(st.sampled_from([whole[end:], whole[end:], b""]))
    return whole[:begin] + draw(st.binary(max_size=8)) + rest


REWRITTEN = [  # ways in which other programs leave a file, and in which people do
    lambda whole: b"",
    lambda whole: b"\xef\xbb\xbf" + whole,
    lambda whole: whole.replace(b"\n", b"\r\n"),
    lambda whole: whole.replace(b"\n", b""),
    lambda whole: whole.replace(b"\t", b"  "),
    lambda whole: whole.replace(b'"', b"'"),
    lambda whole: whole.decode("utf-8", "replace").encode("utf-16"),
    lambda whole: whole.decode("utf-8", "replace").encode("latin-1", "replace"),
    lambda whole: b"".join(whole.splitlines(keepends=True)[1:]),
    gzip.compress,
]


def damages(name: str, whole: bytes):
    """Ways to damage a file of that name."""
    ways = damaged(whole) | st.sampled_from(REWRITTEN).map(lambda rewrite: rewrite(whole))
    if name.endswith((".gz", ".xz")):  # what is inside, too
        module = gzip if name.endswith(".gz") else lzma
        ways |= damages(name[:-3], module.decompress(whole)).map(module.compress)
    return ways


# --- Readers: sound files, one of which is damaged, and what reads them


def lines(*each: str) -> bytes:
    return "".join(f"{line}\n" for line in each).encode()


def rows(*each) -> bytes:
    return lines(*map(json.dumps, each))


@cache
def pieces() -> XLMR:
    """A small vocabulary."""
    return train_sentencepiece([Path(__file__).read_text()], 400, XLMR)


def corpus(name: str, folder: Path):
    """All that a corpus reads from a folder, and the folder that is made of it."""
    found = corpora.CORPORA[name].local(folder)
    for texts in found.values() if isinstance(found, dict) else [found]:
        for _ in texts:
            pass
    out = folder.with_name("out")
    shutil.rmtree(out, ignore_errors=True)
    pieces().save(folder.parent)
    answer(lambda: prepare(name, folder, folder.with_name("xlmr.model"), out=out))


def task(name: str, folder: Path):
    """Examples of a task's two splits, and rows of tokens from them."""
    kind, labels = xtreme.TASKS[name].kind, xtreme.TASKS[name].labels
    for split in ("train", xtreme.TASKS[name].test):
        examples, notes = xtreme.read(name, split, folder)
        for note in notes:
            check_line(note, str(folder))
        for own in examples.values():
            xtreme_rows.rows_of(kind, own, pieces(), 32, 8, list(labels))


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
    """A prepared corpus of pairs."""
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
CASES = {  # files by name, or what writes them into a folder; what reads them there
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
def test_a_damaged_file_is_read_or_refused_in_a_line(name, tmp_path):
    (make, read), folder = CASES[name], tmp_path / "folder"
    folder.mkdir()
    make(folder) if callable(make) else write_files(folder, make)
    sound = {path: path.read_bytes() for path in sorted(folder.rglob("*.*")) if path.is_file()}
    read(folder)

    @profile
    @given(st.data())
    def check(data):
        shutil.rmtree(folder)
        for path, content in sound.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        file = data.draw(st.sampled_from(sorted(sound)))
        file.write_bytes(data.draw(damages(file.name, sound[file])))
        with redirect_stderr(io.StringIO()):
            answer(lambda: read(folder), str(folder))

    check()
