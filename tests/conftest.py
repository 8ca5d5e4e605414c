"""Fixtures for tests of train_lm.py and of shared code. Other scripts' tests make their own corpora."""

import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import OWN_CODE, TINY_LM

from data.prepare import prepare
from data.tokenizers import XLMR, SentencePiece, train_sentencepiece
from engine.run import SIGNALS
from routers import ROUTERS


def pytest_addoption(parser):
    parser.addoption("--router", help="FILE.py:NAME, which tests/test_own_router.py then tests in place of its own")


modules = tempfile.TemporaryDirectory()
os.environ["HF_MODULES_CACHE"] = modules.name  # where transformers copies the code of exported models


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """A second thread only slows down such small tensors."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def known_routers() -> set[str]:
    return set(ROUTERS)


@pytest.fixture(autouse=True)
def forget_routers(known_routers):
    """Forgets the routers that a test defines or imports from a file."""
    yield
    for name in ROUTERS.keys() - known_routers:
        del ROUTERS[name]


@pytest.fixture(autouse=True)
def signals():
    """Restores the signal handlers that a script replaces, so that Ctrl-C ends the tests."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def bpe() -> SentencePiece:
    """A small vocabulary learned from Python code; other writing systems become bytes."""
    return train_sentencepiece(OWN_CODE, vocab_size=600)


@pytest.fixture(scope="session")
def xlmr() -> XLMR:
    """A smaller one, with XLM-R's ids."""
    return train_sentencepiece(OWN_CODE, vocab_size=500, kind=XLMR)


@pytest.fixture(scope="session")
def corpora(tmp_path_factory) -> dict[str, Path]:
    """Three prepared corpora of numbers: a and b share a tokenizer, c is the text of a with another vocabulary."""
    base = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(0)
    texts, tokenizers = [], []
    for _ in range(2):
        lines = [" ".join(map(str, rng.integers(200, size=20))) for _ in range(500)]
        texts.append("\n\n".join(lines))
    for size in (320, 330):
        (base / str(size)).mkdir()
        tokenizers.append(train_sentencepiece(texts, vocab_size=size).save(base / str(size)))
    folders = {}
    for name, text, tokenizer in zip("abc", (*texts, texts[0]), (*tokenizers[:1], *tokenizers)):
        (base / f"{name}.txt").write_text(text)
        folders[name] = prepare("text", base / f"{name}.txt", tokenizer, out=base / name)
    return folders


@pytest.fixture
def options(corpora, tmp_path) -> dict:
    return TINY_LM | {"data": corpora["a"], "out_dir": tmp_path}


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """Runs a command of analyze.py and returns the axes that it drew and the data that it saved."""
    from test_analyze import kept, run

    Figure = pytest.importorskip("matplotlib.figure").Figure
    figures, savefig = [], Figure.savefig

    def record(figure, *args, **kwargs):
        figures.append(figure)
        savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", record)

    def command(name, *line):
        run(monkeypatch, name, *line, "--out", tmp_path / "drawn")
        assert (tmp_path / "drawn" / f"{name}.png").stat().st_size > 5_000
        return figures[-1].axes, kept(tmp_path, name)

    return command


@pytest.fixture
def unwritten_is_nan():
    """Fills uninitialised memory with NaN, so that using it fails a test."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)
