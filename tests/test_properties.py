"""Readers of files and command lines under what chance brings: a result, or one clear line, and nothing else.

    python -m pytest tests/test_properties.py                              a few examples of each, the same every time
    HYPOTHESIS_PROFILE=soak python -m pytest tests/test_properties.py      more than 10,000, others every time

The last line but one says how many there were.
"""

import base64
import copy
import gzip
import io
import json
import lzma
import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, fields
from functools import cache, partial, wraps
from pathlib import Path
from typing import NamedTuple

import bench
import common
import pretrained
import pytest
import runs
import torch
from figures import report
from figures.shared import read_run
from helpers import ROOT
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from test_data import CATALOG, write_mo

import analyze
import data.prepare
import finetune_xtreme
import train_electra
import train_lm
import train_mlm
import train_mt
from data import bitext_sets, corpora, xtreme, xtreme_rows
from data.batches import MaskedData, PairData, TokenData
from data.files import read_catalog, read_documents, read_lines, read_mo, read_pairs
from data.prepare import prepare
from data.tokenizers import GPT2_RANKS, XLMR, load_tokenizer, train_sentencepiece
from model import GPT, Encoder, ModelConfig, expert_capacity, sizes

COMMON = dict(deadline=None, database=None, suppress_health_check=list(HealthCheck))
settings.register_profile("few", max_examples=8, derandomize=True, **COMMON)
settings.register_profile("soak", max_examples=320, print_blob=True, **COMMON)
profile = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))
fewer = settings(profile, max_examples=profile.max_examples // 2)  # of what takes long
drawn = Counter()  # examples


@pytest.fixture(scope="module", autouse=True)
def count(request):
    yield
    each = ", ".join(f"{count:,} {what}" for what, count in drawn.items())
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{drawn.total():,} examples: {each}")


def answer(call: Callable, where: str = ""):
    """What a call gives, or None where it ends in an error that `common.clear_errors` turns into a line.

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


# ---------------------------------------------------------------------------------------------------------------------
# The command line

SCRIPTS = {module.__name__: module for module in (train_lm, train_mlm, train_electra, train_mt, finetune_xtreme)}
ODD = "nan inf -inf 1e400 -1e400 1e308 1e-400 -1 -0.0 0 1 2 4 1_0 ٣ 0x10 1e3 none true false ∞ -- --help".split()
ODD += ["", " ", "9" * 30, "9" * 400, "9" * 5000, "-" + "9" * 400, "a=b", "--preset demo", "\udce4", "a\nb"]
WORDS = st.one_of(
    st.sampled_from(ODD),
    st.integers(-3, 300).map(str),
    st.integers().map(str),
    st.floats(0, 1).map(str),
    st.floats().map(str),
    st.text(st.characters(exclude_characters="\0"), max_size=8),
)


USUAL = {"int": "1 2 8 64", "float": "0.5 1 1e-3", "bool": "true false", "str": "text", "None": "none"}


def usual(field) -> list[str]:
    """Words that a constant of this type may be."""
    kind = str(field.type)
    if "Literal" in kind:
        return re.findall(r"'(\w+)'", kind)
    return " ".join(words for name, words in USUAL.items() if name in kind).split()


@st.composite
def command_lines(draw, default) -> list[str]:
    """Up to five options for this dataclass, most of them with values of the right kind."""
    options = {field.name: usual(field) for field in fields(default)} | {"nonsense": ["1"]}
    line = []
    for name in draw(st.lists(st.sampled_from([*options]), max_size=5)):
        value = draw(WORDS if draw(st.integers(0, 3)) == 0 else st.sampled_from(options[name]))
        line += draw(st.sampled_from([[f"--{name}", value], [f"--{name}", value], [f"--{name}={value}"], [value]]))
    return [word.replace("\0", "") for word in line]


def parsed(call: Callable):
    """The config that a command line makes; None where it is refused in a line, or by tyro, or asks for help."""
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(said):
        try:
            return answer(call)
        except SystemExit as stop:
            assert stop.code in (0, 2) and said.getvalue().strip()
            return None


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_command_line_makes_a_run_or_is_refused(name):
    script = SCRIPTS[name]

    @fewer
    @given(st.data())
    def check(data):
        drawn["command lines"] += 1
        preset = data.draw(st.sampled_from([*script.PRESETS, "no such", None]))
        line = ["--preset", preset] * bool(preset) + data.draw(command_lines(script.Config()))
        take(script, line)

    check()


def take(script, line: list[str]):
    """Parses a command line, and computes what follows from its config before there is a model."""
    config = parsed(lambda: runs.command_line(script.Config, script.PRESETS, line))
    if config is None:
        return
    assert len(runs.run_name(config, script.PRESETS).encode()) <= 255
    if config.table in script.TABLES and config.seeds < 5:
        table = answer(lambda: script.TABLES[config.table](config))
        for _, change in table.rows if table else []:
            answer(lambda change=change: runs.seeds_of(config, change))
    if not isinstance(config, ModelConfig):
        return
    common.linear(0, config.steps, getattr(config, "warmup", 0.1), config.learning_rate)
    if config.router != "dense":
        size = sizes(config)
        for gamma in (size.capacity_factor, size.eval_capacity_factor):
            assert 0 < expert_capacity(config.micro_tokens, size.num_experts, gamma) <= config.micro_tokens


TOO_MUCH = {  # once: script, command line
    "a large FFN": (train_lm, ["--ffn_size", "9" * 400, "--expert_size", "1"]),
    "a large step": (train_lm, ["--batch_tokens", "9" * 400, "--micro_tokens", "9" * 400]),
    "many steps": (train_mlm, ["--steps", "9" * 400]),
    "many experts": (train_mt, ["--expert_ffns", "9" * 400]),
    "a large capacity": (train_lm, ["--capacity_factor", "1e308"]),
    "two presets": (train_lm, ["--preset", "demo", "--preset", "x"]),
    "no preset": (finetune_xtreme, ["--preset="]),
    "a long name": (train_electra, ["--data", "漢" * 120]),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_was_too_much_stays_mended(name):
    take(*TOO_MUCH[name])


OTHERS = {f"bench {name}": (default, bench.__doc__, bench.check) for name, (_, default) in bench.BENCHES.items()}
for name, (Options, _) in analyze.ANALYSES.items():
    OTHERS[f"analyze {name}"] = Options(), Options.__doc__, runs.check


@pytest.mark.parametrize("name", OTHERS)
def test_options_of_bench_and_analyze_are_taken_or_refused(name, tmp_path, monkeypatch):
    default, words, test = OTHERS[name]
    monkeypatch.chdir(tmp_path)  # --json makes its file

    @fewer
    @given(command_lines(default))
    def check(line):
        drawn["options"] += 1
        config = parsed(lambda: runs.parse(default, line, words))
        if config is not None:
            answer(lambda: test(config))

    check()


OPTIONS = "--source --tokenizer --max_tokens --out --languages --pieces --nonsense".split()


@fewer
@given(st.sampled_from([*corpora.CORPORA, "nothing"]), st.lists(st.tuples(st.sampled_from(OPTIONS), WORDS), max_size=4))
@example("text", [("--source", "a\nb")])
def test_a_preparation_is_told_what_to_do_or_refused(name, options):
    @wraps(prepare)
    def asked(name, source=None, tokenizer=None, max_tokens=None, out=None, languages=None, pieces=None):
        data.prepare.check_options(name, source, tokenizer, max_tokens, languages, pieces)
        return Path(out or name)

    drawn["preparations"] += 1
    line = [word for option in options for word in option]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.prepare, "prepare", asked)
        patch.setattr(data.prepare, "summary", str)
        patch.setattr(sys, "argv", ["data.prepare", name, *line])
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            try:
                data.prepare.main()
            except SystemExit as stop:
                assert stop.code in (0, 2) or stop.code.startswith("error: ") and "\n" not in stop.code


# ---------------------------------------------------------------------------------------------------------------------
# Damage


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    """The bytes with a few of them taken out, others put in, and perhaps cut off there."""
    begin = draw(st.integers(0, len(whole)))
    end = begin + draw(st.integers(0, 8))
    return whole[:begin] + draw(st.binary(max_size=8)) + draw(st.sampled_from([whole[end:], whole[end:], b""]))


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=6)  # lone surrogates, too
SCALARS = st.none() | st.booleans() | st.integers() | st.integers(-2, 30) | st.floats() | ANY_TEXT
SCALARS |= st.sampled_from([math.inf, 10**400, 10**12, 2**63, "", "\ud800", [], {}])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3), max_leaves=4
)


@st.composite
def changed(draw, value):
    """The value with one of those inside it replaced by any, or taken out."""
    value = copy.copy(value)
    places = []
    if isinstance(value, dict | list):
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not places or draw(st.integers(0, 5)) == 0:
        return draw(VALUES)
    place = draw(st.sampled_from(places))
    if draw(st.integers(0, 5)) == 0:
        del value[place]
    else:
        value[place] = draw(changed(value[place]))
    return value


DEEP = b"[" * 100_000


@st.composite
def damaged_json(draw, whole: bytes, by_line: bool) -> bytes:
    """JSON, or JSON lines, with one value that is another."""
    parts = whole.splitlines() if by_line else [whole]
    place = draw(st.integers(0, len(parts) - 1))
    value = draw(changed(json.loads(parts[place])))
    parts[place] = json.dumps(value, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    return b"\n".join(parts)


@st.composite
def damaged_torch(draw, whole: bytes) -> bytes:
    """A file of torch.save with one value that is another, and sound checksums."""
    value = torch.load(io.BytesIO(whole))
    value[draw(st.sampled_from(list(value)))] = draw(VALUES)
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def damages(name: str, whole: bytes):
    """Ways to damage a file of that name."""
    ways = damaged(whole) | st.binary(max_size=200)
    if name.endswith((".gz", ".xz")):  # what is inside, too
        module = gzip if name.endswith(".gz") else lzma
        ways |= damages(name[:-3], module.decompress(whole)).map(module.compress)
    if name.endswith((".json", ".jsonl")):
        ways |= damaged_json(whole, name.endswith("l")) | st.just(DEEP)
    if name.endswith((".pt", "pytorch_model.bin")):
        ways |= damaged_torch(whole)
    return ways


# ---------------------------------------------------------------------------------------------------------------------
# Readers: sound files, one of which is damaged, and what reads them


class Case(NamedTuple):
    make: Callable[[Path], None]  # writes the files into a folder
    read: Callable[[Path], object]


def files(contents: dict[str, bytes]) -> Callable[[Path], None]:
    def make(folder: Path):
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    return make


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
    kind, labels, _, scored = xtreme.TASKS[name]
    for split in ("train", scored):
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
NLI = rows({"sentence1": "A", "sentence2": "B", "label": "neutral"}, {"premise": "C", "hypothesis": "D", "label": "x"})
PYTHON = b'''"""The first line says what this module does.\n\nAnd the second one says it again.\n"""


class A:
    """This class has no methods of its own."""


add_docstr(A, "It is said" + " here, too, what it does.")
'''


def make_parquet(folder: Path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": ["A first text.", "", None, "Ein dritter."]})
    pyarrow.parquet.write_table(table, folder / "a.parquet")


def make_ranks(folder: Path):
    """As many tokens as GPT-2's vocabulary has: single bytes, and pairs of them."""
    tokens = [bytes([one]) for one in range(256)] + [bytes([one, two]) for one in range(196) for two in range(256)]
    ranks = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens[:GPT2_RANKS])]
    (folder / "tokenizer.tiktoken").write_bytes(lines(*ranks))


def use_tokenizer(path: Path):
    tokenizer = load_tokenizer(path)
    tokenizer.decode(tokenizer.encode_batch(["Ein Text, 漢字\n"])[0])


def make_data(name: str, folder: Path):
    """A prepared corpus of text or of pairs."""
    source = folder.with_name("source")
    source.mkdir(exist_ok=True)
    for split in ("train", "valid", "test"):
        texts = [f"{split} {number}, and so on" for number in range(30)]
        (source / f"de-en.{split}.tsv").write_bytes(lines(*(f"{text}\t{text}" for text in texts)))
        (source / f"de.{split}.txt").write_bytes(lines(*texts))
    pieces().save(folder.parent)
    folder.rmdir()
    prepare(name, source, folder.with_name("xlmr.model"), out=folder)


def use_data(Data: type, folder: Path):
    data = Data(folder, 8, 64)
    data.batch("train", 0)
    data.tokenizer.encode_batch(["text"])


SIZE = dict(vocab_size=40, block_size=8, n_layer=1, n_head=2, n_embd=4, ffn_size=8)


def make_run(folder: Path):
    """What train_lm.py leaves behind."""
    model = GPT(ModelConfig(**SIZE, router="dense"))
    constants = runs.identity(train_lm.Config())
    tokenizer = pieces()
    tokenizer.save(folder)
    state = {"model": model.state_dict(), "step": 1, "class": "GPT", "arguments": asdict(model.config)}
    state |= {"constants": constants, "data": "d", "tokenizer": tokenizer.sha256, "optimizer": {}, "scaler": {}}
    torch.save(state | {"seconds": 1.0, "log": "", "part": {}}, folder / "ckpt.pt")
    result = {"name": "demo", "data": "d", "test": {"loss": 1.5, "layers": []}}
    (folder / "result.json").write_bytes(json.dumps(result | {"sha256": runs.digest(result)}).encode())
    (folder / "config.json").write_text(json.dumps(constants, indent=1))
    (folder / "metrics.jsonl").write_bytes(rows({"step": 1, "train_loss": 2.5}, {"step": 2, "train_loss": 2.0}))


def use_run(folder: Path):
    run = runs.Run.__new__(runs.Run)  # that goes on in the folder
    run.config, run.context, run.folder = train_lm.Config(), common.Context(0, 1, torch.device("cpu"), None), folder
    run.constants, run.checksums = runs.identity(run.config), {"tokenizer": pieces().sha256, "data": "other"}
    run.name = "demo"
    answer(run.find, str(folder))
    answer(lambda: read_run(str(folder), "train_lm"), str(folder))
    pretrained.load(folder)


def make_gpt2(folder: Path):
    from safetensors.torch import save_file

    config = dict(model_type="gpt2", n_positions=8, vocab_size=40, n_layer=1, n_head=2, n_embd=4, n_inner=8)
    weights = {}
    for name, tensor in GPT(ModelConfig(**SIZE, router="dense")).state_dict().items():
        if name.startswith("blocks") and tensor.dim() == 2:
            tensor = tensor.t().contiguous()
        for theirs, ours in pretrained.GPT2_NAMES.items():
            name = name.replace(ours, theirs) if ours else name
        weights[name] = tensor
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")


def make_xlmr(folder: Path):
    from safetensors.torch import save_file

    config = dict(model_type="xlm-roberta", max_position_embeddings=10, vocab_size=40, num_hidden_layers=1)
    config |= dict(num_attention_heads=2, hidden_size=4, intermediate_size=8)
    weights = {}
    for name, tensor in Encoder(ModelConfig(**SIZE, router="dense")).state_dict().items():
        name = f"encoder.{name}"
        for theirs, ours in [*pretrained.XLMR_NAMES.items()][1:12]:
            name = name.replace(ours, theirs)
        if ".qkv" in name:
            for part, third in zip(("query", "key", "value"), tensor.chunk(3)):
                weights[name.replace("qkv", part)] = third.contiguous()
        else:
            weights[name] = tensor
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    (folder / "sentencepiece.bpe.model").write_bytes(pieces().file)


def make_pickled(folder: Path):
    from safetensors.torch import load_file

    make_gpt2(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def make_results(folder: Path):
    """Two runs, a benchmark and a note, as a report shows them."""
    kept = "train_lm/demo train_mt/demo bench/layer"
    for name in kept.split():
        (folder / name).parent.mkdir()
        shutil.copy(ROOT / "results" / f"{name}.json", folder / f"{name}.json")
    (folder / "train_lm" / "demo.metrics.jsonl").write_bytes(rows({"step": 1, "train_loss": 2.5}))
    (folder / "notes").mkdir()
    (folder / "notes" / "a.md").write_text("A note.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")


def use_results(folder: Path):
    page = folder.with_name("report.html")
    with redirect_stdout(io.StringIO()):
        report.write(report.Report(str(folder / "none"), str(folder), str(page)))
    assert page.read_text(encoding="utf-8").rstrip().endswith("</html>")


def make_wikitext(folder: Path):
    for split in ("train", "valid", "test"):
        (folder / f"wiki.{split}.raw").write_bytes(lines(" ", " = A = ", " ", "b c"))


def make_multi30k(folder: Path):
    for name in corpora.MULTI30K.values():
        for language in ("de", "en"):
            (folder / f"{name}.{language}").write_bytes(SENTENCES)


CASES = {
    "text": Case(
        files({"a.txt": TEXT, "b.txt.gz": gzip.compress(TEXT), "c.txt.xz": lzma.compress(TEXT)}),
        partial(corpus, "text"),
    ),
    "jsonl": Case(files({"train.jsonl": rows({"text": "A"}, {"text": "B", "id": 1})}), partial(corpus, "text")),
    "parquet": Case(make_parquet, partial(corpus, "text")),
    "languages": Case(
        files({"de.txt": TEXT, "sw.1.jsonl.xz": lzma.compress(rows({"text": "A"}))}), partial(corpus, "cc100")
    ),
    "wikitext": Case(make_wikitext, partial(corpus, "wikitext103")),
    "bitext": Case(
        files({"de-en.de": SENTENCES, "de-en.en": SENTENCES, "sw-en.tsv": lines("moja\tone", "mbili\ttwo")}),
        partial(corpus, "bitext"),
    ),
    "multi30k": Case(make_multi30k, partial(corpus, "multi30k-de")),
    "python": Case(files({"a.py": PYTHON}), partial(corpus, "pydocs")),
    "catalog": Case(lambda folder: write_mo(folder / "a.mo", CATALOG), lambda f: list(read_catalog(f / "a.mo"))),
    "tags": Case(files({"train-en.tsv": TAGS, "test-de.tsv": TAGS, "de-ud-test.conllu": CONLLU}), partial(task, "pos")),
    "xquad": Case(files({"train-v1.1.json": SQUAD, "xquad.de.json": SQUAD}), partial(task, "xquad")),
    "tydiqa": Case(files({"tydiqa.en.train.json": SQUAD, "tydiqa.sw.dev.json": SQUAD}), partial(task, "tydiqa")),
    "xnli": Case(files({"train-en.tsv": lines("A\tB\tneutral"), "test-de.jsonl": NLI}), partial(task, "xnli")),
    "links": Case(
        files({"de-en.src-tgt": lines("ein Hund ||| a dog", "ja ||| yes"), "de-en.gold": lines("1-1 2p2", "1-1")}),
        bitext_sets.word_alignments,
    ),
    "tatoeba": Case(files({"deu-eng.deu": SENTENCES, "deu-eng.eng": SENTENCES}), bitext_sets.tatoeba),
    "pieces": Case(lambda folder: pieces().save(folder), use_tokenizer),
    "ranks": Case(make_ranks, use_tokenizer),
    "text data": Case(partial(make_data, "text"), partial(use_data, TokenData)),
    "language data": Case(partial(make_data, "cc100"), partial(use_data, MaskedData)),
    "pair data": Case(partial(make_data, "bitext"), partial(use_data, PairData)),
    "held out": Case(partial(make_data, "bitext"), bitext_sets.held_out),
    "run": Case(make_run, use_run),
    "report": Case(make_results, use_results),
    "GPT-2": Case(make_gpt2, pretrained.load),
    "XLM-R": Case(make_xlmr, pretrained.load),
    "GPT-2, pickled": Case(make_pickled, pretrained.load),
}


def in_folder(name: str, tmp_path: Path) -> Path:
    """The sound files of a case."""
    folder = tmp_path / "folder"
    folder.mkdir()
    CASES[name].make(folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_read_or_refused_in_a_line(name, tmp_path):
    case, folder = CASES[name], in_folder(name, tmp_path)
    sound = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.*"))}
    case.read(folder)

    @profile
    @given(st.data())
    def check(data):
        drawn["damaged files"] += 1
        file = data.draw(st.sampled_from(sorted(sound)))
        (folder / file).write_bytes(data.draw(damages(file, sound[file])))
        with redirect_stderr(io.StringIO()):
            answer(lambda: case.read(folder), str(folder))
        (folder / file).write_bytes(sound[file])

    check()


FOUND = {  # once: case, file, what stands in it, what is replaced
    "deep answers": ("xquad", "xquad.de.json", None, DEEP),
    "no number": ("xquad", "xquad.de.json", b": 6}", b": 1e400}"),
    "half a character in a text": ("xquad", "xquad.de.json", b"It is", b"\\ud800 is"),
    "half a character in a question": ("tydiqa", "tydiqa.en.train.json", b"What is", b"\\uDFFF is"),
    "half a character in a sentence": ("xnli", "test-de.jsonl", b'"A"', b'"\\udce4"'),
    "deep labels": ("xnli", "test-de.jsonl", None, DEEP),
    "deep counts": ("text data", "meta.json", None, DEEP),
    "a long number": ("links", "de-en.gold", b"2p2", b"9" * 5000 + b"-1"),
    "a long sum": ("python", "a.py", b' + " here', b' + "" ' * 1500 + b' + " here'),
    "many branches": ("python", "a.py", b"class A:", b"if 1: pass\n" + b"elif 1: pass\n" * 1500 + b"class A:"),
    "a list of settings": ("GPT-2", "config.json", None, b"[1]"),
    "no integer": ("GPT-2", "config.json", b'"n_embd": 4', b'"n_embd": "4"'),
    "a width that does not fit": ("GPT-2", "config.json", b'"n_head": 2', b'"n_head": 3'),
    "endless layers": ("GPT-2", "config.json", b'"n_layer": 1', b'"n_layer": 1000000000000'),
    "more than the memory": ("GPT-2", "config.json", b'"vocab_size": 40', b'"vocab_size": 1000000000000'),
    "a wide FFN": ("GPT-2", "config.json", b'"n_inner": 8', b'"n_inner": 1000000000000'),
    "no positions": ("XLM-R", "config.json", b": 10,", b": null,"),
    "constants of a list": ("run", "config.json", None, b"[1]"),
    "a history of bytes": ("run", "metrics.jsonl", None, b"\xff"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name, tmp_path):
    case, file, old, new = FOUND[name]
    path = in_folder(case, tmp_path) / file
    whole = path.read_bytes()
    assert old is None or old in whole
    path.write_bytes(whole.replace(old, new) if old else new)
    answer(lambda: CASES[case].read(path.parent), str(path.parent))


def test_strange_parquet_is_read_or_refused_in_a_line(tmp_path):
    import pyarrow
    import pyarrow.parquet

    half = pyarrow.StringArray.from_buffers(1, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff"))
    for number, column in enumerate([[1, 2], [b"a"], [["a"]], half]):
        path = tmp_path / f"{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
        with pytest.raises(ValueError, match=f"{path} (has a 'text' that is no string|cannot be read)"):
            list(read_documents(path))


def test_a_tokenizer_learns_from_half_a_character():
    assert train_sentencepiece(["some words \ud800 of a text"] * 9, 290).vocab_size == 290


@pytest.mark.parametrize("key, value", {"class": [], "arguments": {}, "constants": 5, "model": 5}.items())
def test_a_checkpoint_with_another_value_is_refused_in_a_line(key, value, tmp_path):
    folder = in_folder("run", tmp_path)
    state = torch.load(folder / "ckpt.pt")
    torch.save(state | {key: value}, folder / "ckpt.pt")
    answer(lambda: use_run(folder), str(folder))


# ---------------------------------------------------------------------------------------------------------------------
# Folders of any files

ANY_NAME = """a.txt de.txt de.train.txt b.jsonl c.parquet d.txt.gz de-en.de de-en.en de-en.tsv de-en.train.tsv train.de
    train.en val.de val.en test_2016_flickr.de test_2016_flickr.en wiki.train.raw wiki.valid.tokens wiki.test.raw.xz
    x.py de/LC_MESSAGES/a.mo .hidden train-en.tsv test-de.tsv en-ud-train.conllu squad.train.json xquad.en.json
    train-en.jsonl de-en.src-tgt de-en.gold tatoeba.deu-eng.deu tatoeba.deu-eng.eng""".split()
ANY_CONTENT = [TEXT, SENTENCES, TAGS, CONLLU, SQUAD, NLI, PYTHON, rows({"text": "A"}), b"", b"\n", b"\xef\xbb\xbf"]
ANY_CONTENT = st.sampled_from([*ANY_CONTENT, DEEP]) | st.binary(max_size=60) | st.text().map(str.encode)
LOCAL = "text cc100 bitext multi30k-de wikitext103 pydocs catalogs catalogs-pairs".split()
READERS = {name: partial(corpus, name) for name in LOCAL}
READERS |= {name: partial(task, name) for name in ("pos", "mlqa", "pawsx")}
READERS |= {"links": bitext_sets.word_alignments, "tatoeba": bitext_sets.tatoeba}


@pytest.mark.parametrize("name", READERS)
def test_a_folder_of_any_files_is_read_or_refused_in_a_line(name, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    write_mo(tmp_path / "django" / "de" / "LC_MESSAGES" / "a.mo", CATALOG)
    monkeypatch.setattr(corpora, "package", lambda name: tmp_path / "django")
    monkeypatch.setattr(corpora, "MIN_MESSAGES", 1)

    @fewer
    @given(st.dictionaries(st.sampled_from(ANY_NAME), ANY_CONTENT, max_size=6))
    def check(contents):
        drawn["folders"] += 1
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for file, content in contents.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        with redirect_stderr(io.StringIO()):
            answer(lambda: READERS[name](folder), str(folder))

    check()


# ---------------------------------------------------------------------------------------------------------------------
# What was written is read

LINES = st.text(st.characters(codec="utf-8", exclude_characters="\n\t\ufeff")).map(str.strip).filter(bool)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("place")


@profile
@given(texts=st.lists(LINES), ending=st.sampled_from(["", ".gz", ".xz"]))
def test_lines_come_back(place, texts, ending):
    drawn["round trips"] += 1
    path = place / f"a.txt{ending}"
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[ending]
    path.write_bytes(pack(lines(*texts)))
    assert list(read_lines(path)) == [f"{text}\n" for text in texts]
    path.write_bytes(pack(b"\xef\xbb\xbf" + "\n\n \n".join(texts).encode()))
    assert list(read_documents(path)) == texts


@profile
@given(texts=st.lists(st.text()), ascii=st.booleans())
def test_json_lines_come_back(place, texts, ascii):
    drawn["round trips"] += 1
    text = "".join(json.dumps({"text": text}, ensure_ascii=ascii) + "\n" for text in texts)
    (place / "a.jsonl").write_bytes(text.encode())
    assert list(read_documents(place / "a.jsonl")) == texts


@profile
@given(pairs=st.lists(st.tuples(LINES, LINES)))
def test_pairs_come_back(place, pairs):
    drawn["round trips"] += 1
    paths = place / "de-en.tsv", place / "de-en.de", place / "de-en.en"
    paths[0].write_bytes(lines(*("\t".join(pair) for pair in pairs)))
    for path, side in zip(paths[1:], zip(*pairs) if pairs else ((), ())):
        path.write_bytes(lines(*side))
    assert list(read_pairs(paths[0])) == list(read_pairs(*paths[1:])) == pairs


@profile
@given(sentences=st.lists(st.lists(st.tuples(LINES, st.sampled_from(xtreme.UPOS)), min_size=1)))
def test_tags_come_back(place, sentences):
    drawn["round trips"] += 1
    expected = [(tuple(word for word, _ in each), [tag for _, tag in each]) for each in sentences]
    assume(all(set(words) != {"_"} for words, _ in expected))
    texts = {"tsv": "", "conllu": "# text\n"}
    for sentence in sentences:
        for number, (word, tag) in enumerate(sentence, 1):
            texts["tsv"] += f"{word}\t{tag}\n"
            texts["conllu"] += f"{number}\t{word}\t_\t{tag}\t_\t_\t_\t_\t_\t_\n"
        texts = {ending: text + "\n" for ending, text in texts.items()}
    for ending, text in texts.items():
        (place / f"a.{ending}").write_bytes(text.encode())
        problems = Counter()
        found = list(xtreme.read_tags(place / f"a.{ending}", xtreme.UPOS, problems))
        assert [one[1:] for one in found] == expected and not problems


@profile
@given(
    texts=st.lists(st.tuples(st.text(), LINES, st.integers(0, 5))),
    ascii=st.booleans(),
)
def test_answers_come_back(place, texts, ascii):
    drawn["round trips"] += 1
    articles, expected = [], []
    for number, (question, context, start) in enumerate(texts):
        start = min(start, len(context) - 1)
        assume(context[start:].strip())
        answers = [{"text": context[start:], "answer_start": start}]
        questions = [{"id": f"{number}", "question": question, "answers": answers}]
        articles.append({"paragraphs": [{"context": context, "qas": questions}]})
        expected.append(xtreme.Example(f"{number}", (question, context), [(context[start:], start)]))
    (place / "a.json").write_bytes(json.dumps({"data": articles}, ensure_ascii=ascii).encode())
    problems = Counter()
    assert list(xtreme.read_answers(place / "a.json", (), problems)) == expected and not problems


@profile
@given(examples=st.lists(st.tuples(LINES, LINES, st.sampled_from(xtreme.NLI))))
def test_labels_come_back(place, examples):
    drawn["round trips"] += 1
    expected = [xtreme.Example(f"{number}", (one, two), label) for number, (one, two, label) in enumerate(examples)]
    (place / "a.tsv").write_bytes(lines(*map("\t".join, examples)))
    keys = "sentence1", "sentence2", "label"
    (place / "a.jsonl").write_bytes(rows(*(dict(zip(keys, each)) for each in examples)))
    for name in ("a.tsv", "a.jsonl"):
        assert list(xtreme.read_labels(place / name, xtreme.NLI, Counter())) == expected


@profile
@given(texts=st.dictionaries(st.text(min_size=1), st.text()))
def test_catalogs_come_back(place, texts):
    drawn["round trips"] += 1
    whole = write_mo(place / "a.mo", texts).read_bytes()
    assert read_mo(whole)[1:] == list(texts.items())


@fewer
@given(pairs=st.lists(st.tuples(LINES, LINES), min_size=1, max_size=5))
def test_a_prepared_folder_holds_what_was_read(place, pairs):
    drawn["round trips"] += 1
    texts = [text for pair in pairs for text in pair]
    found = pieces().encode_batch(texts)
    assume(all(found))  # none is of characters that the tokenizer drops
    source, out = place / "source", place / "out"
    source.mkdir(exist_ok=True)
    for split in ("train", "valid", "test"):
        (source / f"de-en.{split}.tsv").write_bytes(lines(*map("\t".join, pairs)))
    shutil.rmtree(out, ignore_errors=True)
    with redirect_stderr(io.StringIO()):
        prepare("bitext", source, pieces().save(place), out=out)
    data = PairData(out, 8, 64)
    expected = [[*ids, data.tokenizer.eot] for ids in found]
    for split in ("train", "valid", "test"):
        starts = data.index[split]
        assert [data.tokens[split][a:b].tolist() for a, b in zip(starts, starts[1:])] == expected
    assert list(zip(*data.texts("valid", "de-en"))) == pairs
