"""The data package: tokenizers lose nothing, splits share nothing, batches depend on (seed, step, micro) alone."""

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import corpora
from data import prepare as preparing
from data.docstrings import docstrings
from data.prepare import prepare
from data.tokenizers import SentencePiece, gpt2, load_tokenizer, train_sentencepiece
from data.tokens import TokenData

ROOT = Path(__file__).parent.parent
T, B = 16, 4


def cli(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "data.prepare", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def refused(*arguments: str) -> str:
    """The one line with which the command refuses."""
    done = cli(*arguments)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A small SentencePiece model, learned from this repository's Python."""
    texts = [path.read_text() for path in sorted((ROOT / "data").glob("*.py"))]
    return train_sentencepiece(texts, vocab_size=600).save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def paragraphs() -> list[str]:
    rng = np.random.default_rng(0)
    return [f"document {i} " + " ".join(map(str, rng.integers(1000, size=12))) for i in range(600)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory, model, paragraphs) -> Path:
    """A prepared corpus, never written to by a test."""
    base = tmp_path_factory.mktemp("corpus")
    (base / "mine.txt").write_text("\n\n".join(paragraphs))
    return prepare("text", source=base / "mine.txt", tokenizer=model, out=base / "prepared")


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture(scope="session")
def gpt2_tokenizer():
    try:
        return gpt2()
    except OSError as error:
        pytest.skip(str(error))


def documents_of(folder: Path, split: str) -> list[str]:
    tokenizer, ids = load_tokenizer(folder), np.fromfile(folder / f"{split}.bin", dtype="uint16")
    assert ids[-1] == tokenizer.eot
    return [tokenizer.decode(part.tolist()[:-1]) for part in np.split(ids, np.flatnonzero(ids == tokenizer.eot) + 1)][
        :-1
    ]


# ---------------------------------------------------------------------------------------------------------------------
# tokenizers

# no lone surrogates: they have no UTF-8 form
unicode_text = st.text(st.characters(codec="utf-8") | st.sampled_from(" \n\t▁\r\0")) | st.sampled_from(
    ["</s>", "<unk>", "<0x41>", "  a   b \n\n  c ", "▁", "a▁ b▁▁", "<|endoftext|>"]
)


@given(st.lists(unicode_text, max_size=4))
@settings(max_examples=300, deadline=None)
def test_sentencepiece_round_trip(model, texts):
    tokenizer = load_tokenizer(model)
    encoded = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert all(0 <= token < tokenizer.vocab_size and token != tokenizer.eot for ids in encoded for token in ids)


@given(st.lists(unicode_text, max_size=4))
@settings(max_examples=100, deadline=None)
def test_gpt2_round_trip(gpt2_tokenizer, texts):
    encoded = gpt2_tokenizer.encode_batch(texts)
    assert [gpt2_tokenizer.decode(ids) for ids in encoded] == texts
    assert all(gpt2_tokenizer.eot not in ids for ids in encoded)


def test_gpt2_is_the_published_vocabulary(gpt2_tokenizer, tmp_path):
    assert gpt2_tokenizer.encode_batch(["Hello world"]) == [[15496, 995]]
    assert (gpt2_tokenizer.vocab_size, gpt2_tokenizer.eot) == (50257, 50256)
    gpt2_tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).sha256 == gpt2_tokenizer.sha256
    assert gpt2_tokenizer.sha256 == "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"


def test_gpt2_without_network_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: (_ for _ in ()).throw(ConnectionError("no route")))
    with pytest.raises(OSError, match="--tokenizer PATH"):
        gpt2()


def test_decode_survives_partial_utf8(model):
    tokenizer = load_tokenizer(model)
    [ids] = tokenizer.encode_batch(["🙂"])
    assert len(ids) == 4 and "\ufffd" in tokenizer.decode(ids[:2])


def test_training_is_deterministic_and_learns_merges(model):
    texts = [path.read_text() for path in sorted((ROOT / "data").glob("*.py"))]
    again, saved = train_sentencepiece(texts, vocab_size=600), load_tokenizer(model)
    assert again.sha256 == saved.sha256 and again.vocab_size == 600
    assert len(again.encode_batch(["return"])[0]) < len("return")
    with pytest.raises(ValueError, match="too small"):
        train_sentencepiece(["a b c"])


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.tiktoken"])
def test_bad_tokenizer_files(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / name).write_text("IQ== 0\nnot a tokenizer\n")
    with pytest.raises(ValueError, match=name):
        load_tokenizer(tmp_path)


def test_rank_file_of_another_vocabulary_is_refused(tmp_path):
    (tmp_path / "other.tiktoken").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ValueError, match="holds 2 ranks"):
        load_tokenizer(tmp_path / "other.tiktoken")


# ---------------------------------------------------------------------------------------------------------------------
# corpora


def test_docstrings_of_definitions_and_of_compiled_functions(tmp_path):
    source = '''
"""A module that documents things."""
add_docstr(torch.abs, r"""abs(input) -> Tensor

    Absolute value of {input}.""".format(**common) + " And a tail.")
add_newdoc("numpy", "ndarray", ("T", """View of the transposed array."""))
fft = _add_docstr(_fft.fft, """One dimensional transform.""")
Adam.__doc__ = """The optimizer called Adam.""" + more
print("""not documentation, only a string""")
class A:
    """short"""
    if True:
        async def method(self):
            """Indented text of a method,
            over two lines."""
    else:
        @add_docstr("""Given by a decorator.""")
        def other(self): pass
try:
    import fast
except ImportError:
    def slow():
        """Defined in an except clause."""
'''
    (tmp_path / "a.py").write_text(source)
    assert docstrings(tmp_path / "a.py") == [
        "A module that documents things.",
        "abs(input) -> Tensor\n\nAbsolute value of {input}. And a tail.",
        "View of the transposed array.",
        "One dimensional transform.",
        "The optimizer called Adam.",
        "Indented text of a method,\nover two lines.",
        "Given by a decorator.",
        "Defined in an except clause.",
    ]
    (tmp_path / "b.py").write_text("def broken(:\n")
    assert docstrings(tmp_path / "b.py") == []


def test_installed_documentation_is_found():
    roots = corpora.installed_roots()
    files = dict(corpora.python_files(roots))
    assert {name.split("/")[0] for name in files} == {"python", "numpy", "torch"}
    assert not [name for name in files if "/tests/" in name or "/test/" in name or "site-packages" in name]
    names = ["torch/_torch_docs.py", "numpy/_core/_add_newdocs.py", "python/json/__init__.py", "torch/optim/adam.py"]
    found = ["\n".join(texts) for texts in corpora.read_docstrings([files[name] for name in names])]
    expected = [
        "matmul(input, other, *, out=None) -> Tensor",
        "An array object represents a multidimensional, homogeneous array",
        "JSON (JavaScript Object Notation)",
        "Implements Adam algorithm",
    ]
    assert all(phrase in text for phrase, text in zip(expected, found, strict=True))
    assert len(found[0]) > 200_000  # torch's compiled functions, hundreds of them


def test_pydocs_keeps_a_docstring_once(tmp_path):
    for i in range(60):
        text = f'"""Module number {i} of the package."""\ndef f():\n    """The same words in every file."""\n'
        (tmp_path / f"m{i:02}.py").write_text(text)
    documents = list(corpora.pydocs(tmp_path, False))
    assert len(documents) == 60 and sum("same words" in text for _, text in documents) == 1
    assert documents[0][1] == "Module number 0 of the package.\n\nThe same words in every file."
    assert documents == list(corpora.pydocs(tmp_path, False))
    assert {split for split, _ in documents} > {"train"}


def test_split_shares():
    splits = [corpora.split_of(f"text {i}", valid=0.1, test=0.2) for i in range(4000)]
    assert [splits.count(name) / 4000 for name in corpora.SPLITS] == pytest.approx([0.7, 0.1, 0.2], abs=0.02)


def test_articles_are_cut_at_top_level_headings(tmp_path):
    blank = " \n"
    first = [
        " = One = \n",
        blank,
        " Text with x = y = z . \n",
        " = not a heading = \n",
        blank,
        " = = Section = = \n",
        blank,
    ]
    second = [" = Two @-@ fold = \n", blank, " More text . \n"]
    for split in ("valid", "test"):
        (tmp_path / f"wiki.{split}.raw").write_text("".join([blank, *first, *second]))
    with gzip.open(tmp_path / "wiki.train.tokens.gz", "wt") as file:
        file.write("".join(second))
    documents = list(corpora.wikitext103(tmp_path, False))
    assert [split for split, _ in documents] == ["valid", "valid", "test", "test", "train"]
    assert documents[0][1] == blank + "".join(first) and documents[1][1] == documents[4][1] == "".join(second)
    (tmp_path / "wiki.test.raw").unlink()
    with pytest.raises(FileNotFoundError, match=r"wiki\.test\.raw"):
        list(corpora.wikitext103(tmp_path, False))


class FakeHub:
    """Stands in for the `datasets` package: one row per line, blank lines emptied, as the hub has WikiText."""

    def __init__(self, splits: dict[str, list[str]]):
        self.splits, self.asked = splits, []

    def load_dataset(self, repository, config, split, streaming):
        self.asked.append((repository, config, split, streaming))
        if split not in self.splits:
            raise ConnectionError("no route\nto host")
        return ({"text": line if line.strip() else ""} for line in self.splits[split])


def test_the_hub_gives_what_local_files_give(tmp_path, monkeypatch):
    lines = [" \n", " = One = \n", " \n", " Text . \n", " \n", " = Two = \n", " \n", " Text . \n"]
    for split in corpora.SPLITS:
        (tmp_path / f"wiki.{split}.raw").write_text("".join(lines))
    hub = FakeHub({"train": lines, "validation": lines, "test": lines})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert list(corpora.wikitext103(None, True)) == list(corpora.wikitext103(tmp_path, False))
    assert hub.asked[0] == ("Salesforce/wikitext", "wikitext-103-raw-v1", "validation", True)
    hub.splits = {"train": ["a page", "another page"]}
    assert [text for _, text in corpora.openwebtext(None, False)] == ["a page", "another page"]
    with pytest.raises(OSError, match="no route") as error:
        list(corpora.wikitext103(None, False))
    assert "\n" not in str(error.value) and "--source" in str(error.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        list(corpora.openwebtext(None, False))


def test_text_files_of_every_kind(tmp_path):
    (tmp_path / "a.md").write_text("one\nmore of one\n\n \n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"text": "three\\n\\nstill three"}\n\n{"id": 4, "text": "four"}\n')
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write('{"text": "five"}\n')
    documents = sorted(text for _, text in corpora.text(tmp_path, False))
    assert documents == sorted(["one\nmore of one\n", "two\n", "three\n\nstill three", "four", "five"])


def test_splits_named_by_files(tmp_path):
    for name in ("train-0001.txt", "my.validation.txt", "test/a.txt", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    expected = [("valid", "my.validation.txt"), ("test", "test/a.txt"), ("train", "train-0001.txt")]
    assert list(corpora.text(tmp_path, False)) == expected


@pytest.mark.parametrize("line", ["{", "[1]", '{"text": 3}', '{"words": "a"}'])
def test_bad_jsonl_names_file_and_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2"):
        list(corpora.text(tmp_path, False))


# ---------------------------------------------------------------------------------------------------------------------
# prepare


def test_prepared_text_is_the_text(folder, paragraphs):
    found = {split: documents_of(folder, split) for split in corpora.SPLITS}
    assert sorted(text.strip() for texts in found.values() for text in texts) == sorted(paragraphs)
    assert all(found.values())
    meta = json.loads((folder / "meta.json").read_text())
    for split, texts in found.items():
        counts = meta["splits"][split]
        assert counts["documents"] == len(texts) and counts["bytes"] == sum(map(len, texts))
        assert counts["words"] == sum(len(text.split()) for text in texts)
        assert counts["tokens"] * 2 == (folder / f"{split}.bin").stat().st_size
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["meta.json", "test.bin", "tokenizer.model", "train.bin", "valid.bin"]
    )


def test_lone_surrogates_do_not_stop_a_preparation(tmp_path, model):
    for split in corpora.SPLITS:
        (tmp_path / f"{split}.jsonl").write_text('{"text": "half \\ud800 of a pair"}')
    assert documents_of(prepare("text", tmp_path, model, out=tmp_path / "out"), "train") == ["half ? of a pair"]


def test_max_tokens_ends_the_training_split(tmp_path, model, paragraphs, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH_CHARS", 500)
    (tmp_path / "source").mkdir()
    for split in corpora.SPLITS:
        (tmp_path / "source" / f"{split}.txt").write_text("\n\n".join(paragraphs[:50]))
    meta = json.loads((prepare("text", tmp_path / "source", model, 200, tmp_path / "out") / "meta.json").read_text())
    counts = meta["splits"]
    longest = max(map(len, load_tokenizer(model).encode_batch(paragraphs[:50]))) + 2
    assert 200 <= counts["train"]["tokens"] < 200 + longest
    assert counts["valid"]["documents"] == counts["test"]["documents"] == 50


def test_interrupted_preparation_keeps_old_data(copy, tmp_path, model, monkeypatch):
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    (tmp_path / "new.txt").write_text("\n\n".join(f"entirely other text {i}" for i in range(1500)))
    monkeypatch.setattr(preparing, "BATCH_CHARS", 1000)
    encode, calls = SentencePiece.encode_batch, []

    def interrupted(self, texts):
        calls.append(len(texts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(self, texts)

    monkeypatch.setattr(SentencePiece, "encode_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare("text", source=tmp_path / "new.txt", tokenizer=model, out=copy)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "new.txt"]
    monkeypatch.undo()
    prepare("text", source=tmp_path / "new.txt", tokenizer=model, out=copy)
    assert "entirely other" in documents_of(copy, "train")[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "new.txt"]


def test_a_folder_of_other_files_is_never_replaced(tmp_path, model):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match=r"thesis\.txt"):
        prepare("text", source=tmp_path / "thesis.txt", tokenizer=model, out=tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_bad_input_is_one_line(tmp_path, model):
    assert "did you mean 'pydocs'" in refused("pydoc")
    assert "needs --source" in refused("text")
    assert "--max_tokens" in refused("pydocs", "--max_tokens", "many")
    assert "does not exist" in refused("text", "--source", tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    common = ["--tokenizer", model, "--out", tmp_path / "out"]
    assert "holds no file" in refused("text", "--source", tmp_path / "empty", *common)
    (tmp_path / "latin.txt").write_bytes("déjà vu\n".encode() + b"caf\xe9\n")
    assert "latin.txt is not UTF-8: byte 13" in refused("text", "--source", tmp_path / "latin.txt", *common)
    (tmp_path / "one.txt").write_text("a single document")
    assert "'valid' is empty" in refused("text", "--source", tmp_path / "one.txt", *common)
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text " * 999)[:-9])
    assert "cut.txt.gz is damaged" in refused("text", "--source", tmp_path / "cut.txt.gz", *common)
    assert not (tmp_path / "out").exists()


def test_command_writes_and_reports(tmp_path, model, paragraphs):
    (tmp_path / "mine.txt").write_text("\n\n".join(paragraphs))
    done = cli("text", "--source", tmp_path / "mine.txt", "--tokenizer", model, "--out", tmp_path / "out")
    assert done.returncode == 0 and "valid" in done.stdout
    assert TokenData(tmp_path / "out", T, T * B).batch("train", 0)[0].shape == (B, T)


# ---------------------------------------------------------------------------------------------------------------------
# batches


def test_y_is_x_one_token_ahead(folder):
    data = TokenData(folder, T, T * B + 5)
    x, y = data.batch("train", 3)
    assert x.shape == y.shape == (B, T) and x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    tokens = np.fromfile(folder / "train.bin", dtype="uint16")
    windows = np.lib.stride_tricks.sliding_window_view(tokens, T + 1)
    for row in torch.cat([x, y[:, -1:]], dim=1).numpy():
        assert (windows == row).all(axis=1).any()


def test_batches_depend_on_seed_step_and_micro_alone(folder):
    one, two = TokenData(folder, T, T * B, 2, seed=1), TokenData(folder, T, T * B, 2, seed=1)
    asked = [(step, micro) for step in (0, 400, 7, 0) for micro in (1, 0)]
    first = {key: one.batch("train", *key)[0] for key in asked}
    for key in reversed(asked):
        assert torch.equal(two.batch("train", *key)[0], first[key])
    assert not torch.equal(TokenData(folder, T, T * B, 2, seed=2).batch("train", 0, 0)[0], first[0, 0])


def starts(data: TokenData, split: str, count: int) -> list[int]:
    return [data._start(split, index) for index in range(count)]


@pytest.mark.parametrize("split", ["train", "valid"])
def test_an_epoch_repeats_nothing_and_the_next_is_another(folder, split):
    data = TokenData(folder, T, T * B)
    windows = len(data.tokens[split]) // T - 1
    both = starts(data, split, 2 * windows)
    for epoch in (both[:windows], both[windows:]):
        assert len(set(epoch)) == windows and len({start % T for start in epoch}) == 1
        assert max(epoch) - min(epoch) == (windows - 1) * T and max(epoch) + T < len(data.tokens[split])
    assert both[:windows] != both[windows:] and both[:windows] != sorted(both[:windows])


def test_processes_share_the_data_of_one(folder):
    """Four micro-batches a step dealt to two processes are, together, one process's: none twice, none missing."""
    alone = TokenData(folder, T, T * B, micros_per_step=4)
    ranks = [TokenData(folder, T, T * B, micros_per_step=4) for _ in range(2)]
    whole = [alone.batch("train", step, micro)[0] for step in range(3) for micro in range(4)]
    dealt = [ranks[micro % 2].batch("train", step, micro)[0] for step in range(3) for micro in range(4)]
    assert all(map(torch.equal, whole, dealt))
    assert len(torch.cat(whole).unique(dim=0)) == 3 * 4 * B
    # the same samples, whatever the micro-batch: twice the rows in half the micro-batches
    wide = TokenData(folder, T, 2 * T * B, micros_per_step=2)
    assert torch.equal(torch.cat(whole), torch.cat([wide.batch("train", s, m)[0] for s in range(3) for m in range(2)]))


def test_evaluation_reads_the_split_once_in_order(folder):
    data = TokenData(folder, T, T * B)
    tokens = torch.from_numpy(np.fromfile(folder / "valid.bin", dtype="uint16").astype(np.int64))
    count = (len(tokens) - 1) // T * T
    batches = list(data.eval_batches("valid"))
    assert torch.equal(torch.cat([x for x, _ in batches]).flatten(), tokens[:count])
    assert torch.equal(torch.cat([y for _, y in batches]).flatten(), tokens[1 : count + 1])
    assert all(len(x) == B for x, _ in batches[:-1])
    ranks = [list(data.eval_batches("valid", rank=rank, world=3)) for rank in range(3)]
    assert sum(map(len, ranks)) == len(batches)
    assert all(torch.equal(ranks[i % 3][i // 3][0], x) for i, (x, _) in enumerate(batches))
    assert sum(x.numel() for x, _ in data.eval_batches("valid", max_tokens=5 * T)) == 5 * T


def test_a_split_of_exactly_one_window(copy):
    sizes = {
        split: counts["tokens"] for split, counts in json.loads((copy / "meta.json").read_text())["splits"].items()
    }
    split, size = min(sizes.items(), key=lambda item: item[1])
    x, y = TokenData(copy, size - 1, size - 1).batch(split, 9)
    assert x.shape == (1, size - 1) and torch.equal(x[0, 1:], y[0, :-1])
    assert len(list(TokenData(copy, size - 1, size - 1).eval_batches(split))) == 1
    with pytest.raises(ValueError, match=f"{split}.bin has {size} tokens and block_size {size} needs {size + 1}"):
        TokenData(copy, size, size)
    with pytest.raises(ValueError, match="micro_tokens"):
        TokenData(copy, T, T - 1)


def test_damaged_folders(copy, tmp_path):
    with pytest.raises(FileNotFoundError, match="data.prepare absent"):
        TokenData(tmp_path / "absent", T, T * B)
    content = (copy / "train.bin").read_bytes()
    (copy / "train.bin").write_bytes(content[:-2])
    with pytest.raises(
        ValueError, match=r"train\.bin has .* bytes instead of .* prepare it again: python -m data\.prepare text "
    ):
        TokenData(copy, T, T * B)
    (copy / "train.bin").write_bytes(content[:-2] + bytes([content[-2] ^ 1, content[-1]]))
    with pytest.raises(ValueError, match=r"train\.bin has changed"):
        TokenData(copy, T, T * B).verify()
    (copy / "train.bin").write_bytes(content)
    TokenData(copy, T, T * B).verify()
    (copy / "test.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"test\.bin is missing"):
        TokenData(copy, T, T * B)
    (copy / "meta.json").write_text("{")
    with pytest.raises(ValueError, match=r"meta\.json is damaged"):
        TokenData(copy, T, T * B)
    (copy / "meta.json").unlink()
    with pytest.raises(FileNotFoundError, match="no prepared data"):
        TokenData(copy, T, T * B)


def test_a_changed_tokenizer_is_noticed(copy, folder):
    train_sentencepiece([path.read_text() for path in (ROOT / "data").glob("*.py")], vocab_size=500).save(copy)
    with pytest.raises(ValueError, match="not the one that made its tokens"):
        _ = TokenData(copy, T, T * B).tokenizer
    assert TokenData(folder, T, T * B).tokenizer.vocab_size == 600


def test_unknown_option_offers_the_nearest():
    assert "did you mean --source?" in refused("text", "--sourse", "x")
    assert "--source" in refused("text", "--source", "")


@pytest.mark.parametrize(
    "lines, blank, least, documents",
    [
        (3, None, 1000, 1),  # a short file is one document
        (3, None, 2, 3),  # or one a line
        (3, 1, 2, 2),
        (1, None, 2, 1),
        (1200, None, 1000, 1200),  # long ones are one a line, where no blank line tells otherwise
        (1200, 1100, 1000, 1200),
        (1200, 900, 1000, 2),
    ],
)
def test_documents_are_blocks_or_lines(tmp_path, lines, blank, least, documents):
    text = [f"line {i}\n" for i in range(lines)]
    if blank is not None:
        text.insert(blank, "\n")
    (tmp_path / "a.txt").write_text("".join(text))
    found = list(corpora.read_documents(tmp_path / "a.txt", least))
    assert len(found) == documents and "".join(found) == "".join(line for line in text if line.strip())
