"""A script that is edited and run again: a run of its own where a constant is another, and a word where the code is."""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest
import test_finetune_xtreme
import test_train_electra
import test_train_mlm
import test_train_mt
from helpers import ROOT, TINY_LM, Script, words, write_files
from test_finetune_xtreme import encoders, source
from test_train_electra import corpora as electra_corpora
from test_train_mt import corpus as mt_corpus

import model
import train_lm
from engine.config import command_line, identity
from engine.files import code_of, folder_of

__all__ = ["electra_corpora", "encoders", "mt_corpus", "source"]  # fixtures


@pytest.fixture(scope="session")
def commands(corpora, electra_corpora, mt_corpus, encoders, source) -> dict[str, dict]:
    """The options of each script."""
    sentences = {"data": electra_corpora["data"]}
    xtreme = {"model": encoders["switch"], "source": source, "task": "xnli", "train_examples": 8, "epochs": 1}
    return {
        "train_lm": TINY_LM | {"data": corpora["a"], "sample_tokens": 1},
        "train_mlm": test_train_mlm.TINY | test_train_mlm.EXPERTS | sentences,
        "train_electra": test_train_electra.TINY | sentences | {"pairs": electra_corpora["pairs"]},
        "train_mt": test_train_mt.TINY | {"data": mt_corpus},
        "finetune_xtreme": test_finetune_xtreme.TINY | xtreme,
    }


class Edited:
    """The scripts as they are after an edit, each in a folder of its own, since Python keeps what it has compiled."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.monkeypatch, self.edits = folder, monkeypatch, 0

    def file(self, name: str, pattern: str = "", replacement: str = "") -> Path:
        text = (ROOT / f"{name}.py").read_text()
        if pattern:
            text, count = re.subn(pattern, replacement, text, flags=re.M)
            assert count == 1, pattern
        self.edits += 1
        file = self.folder / str(self.edits) / f"{name}.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
        return file

    def script(self, name: str, *edit: str) -> Script:
        spec = importlib.util.spec_from_file_location(name, self.file(name, *edit))
        module = importlib.util.module_from_spec(spec)
        self.monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return Script(module)


@pytest.fixture
def edited(tmp_path, monkeypatch) -> Edited:
    return Edited(tmp_path / "edited", monkeypatch)


DECAY = r"^(    weight_decay: float = )\S+", r"\g<1>0.37"
LOOP = r"^        optimizer\.zero_grad\(\)$", "        optimizer.zero_grad(set_to_none=True)"
PRESET = r"^PRESETS = \{", 'PRESETS = {"mine": {}, '
COMMENT = r"^        optimizer\.zero_grad\(\)$", "        optimizer.zero_grad()  # and the next"


def kept(folder: Path) -> dict[Path, bytes]:
    names = "ckpt.pt", "ckpt.prev.pt", "model.pt", "result.json", "metrics.jsonl"
    return {file: file.read_bytes() for name in names for file in folder.glob(name)}


@pytest.mark.parametrize("name", ["train_lm", "train_mlm", "train_electra", "train_mt", "finetune_xtreme"])
def test_an_edit_is_followed(name, commands, edited, tmp_path, monkeypatch, capsys):
    options = commands[name] | {"out_dir": tmp_path / "out"}

    def run(*edit: str, **given) -> tuple[str, str, set]:
        capsys.readouterr()
        edited.script(name, *edit).run(options | given, monkeypatch)
        return *capsys.readouterr(), {file.parent for file in options["out_dir"].glob("*/result.json")}

    *_, (first,) = run()
    before = kept(first)
    out, _, folders = run(*DECAY)
    (second,) = folders - {first}
    assert re.search(rf"{second.name}: a run of its own, as {first} has weight_decay \S+\n", out)
    assert second.name.endswith("-weight_decay=0.37") and second.name.startswith(first.name[:40])
    assert json.loads((second / "result.json").read_text())["config"]["weight_decay"] == 0.37
    for edit, given, found in ((DECAY, {}, second), ((), {}, first), ((), {"weight_decay": 0.37}, second)):
        out, err, folders = run(*edit, **given)
        assert f"finished before, in {found} " in out and folders == {first, second} and "changed" not in err
    assert kept(first) == before
    for edit in (COMMENT, PRESET):
        _, err, _ = run(*edit)
        assert "changed" not in err
    out, err, _ = run(*LOOP)
    assert f"finished before, in {first} (--resume false trains it again)" in out
    assert f"warning: the script changed since {first.name} was trained" in err
    _, err, folders = run(*LOOP, resume=False)
    assert "changed" not in err and folders == {first, second} and kept(first) != before
    monkeypatch.setattr(model, "__file__", str(edited.file("model", "MIN_CAPACITY = 4", "MIN_CAPACITY = 5")))
    _, err, _ = run(*LOOP)
    assert "warning: model.py changed since" in err


def test_a_run_that_goes_on_with_other_code_says_so(commands, edited, tmp_path, monkeypatch, capsys):
    options = commands["train_lm"] | {"out_dir": tmp_path / "out"}
    with pytest.raises(ZeroDivisionError):
        edited.script("train_lm", r"^        optimizer\.step\(\)$", "        optimizer.step(), 1 / (3 - step)").run(
            options, monkeypatch
        )
    capsys.readouterr()
    for what in ("weights are", "numbers are"):
        edited.script("train_lm").run(options, monkeypatch)
        words = rf"warning: the script changed since \S+ was trained: its {what} of the code before; --resume false"
        assert re.search(words, capsys.readouterr().err)


def test_a_name_that_is_taken_in_this_moment_is_not_taken_twice(commands, edited, tmp_path, monkeypatch, capsys):
    """Another run has it when this one comes to make the folder; given again, the command has a folder of its own."""
    options = commands["train_lm"] | {"out_dir": tmp_path / "out"}
    config = command_line(train_lm.Config, train_lm.PRESETS, words(options))
    folder, _ = folder_of(config, train_lm.PRESETS)
    constants = json.dumps(identity(config) | {"data_checksum": "of other data"})
    build = train_lm.build

    def slow(*given):
        write_files(folder, {"config.json": constants})
        return build(*given)

    with monkeypatch.context() as patch:
        patch.setattr(train_lm, "build", slow)
        assert f"another run has taken {folder} meanwhile" in Script(train_lm).refused(options, patch, capsys)
    Script(train_lm).run(options, monkeypatch)
    assert [file.parent.name for file in options["out_dir"].glob("*/result.json")] == [f"{folder.name}-2"]
    assert (folder / "config.json").read_text() == constants


def write_constants(folder: Path, **constants):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"data_checksum": "d"} | constants))


def test_a_run_is_the_one_that_agrees_in_what_both_name(tmp_path):
    config = train_lm.Config(out_dir=str(tmp_path))
    ours = identity(config) | {"data_checksum": "d"}

    def found(**changes) -> str:
        return folder_of(config, train_lm.PRESETS, ours | changes)[0].name

    assert found() == "demo"
    # an older version named fewer constants, and others
    write_constants(tmp_path / "a", seed=0, n_layer=ours["n_layer"], an_old_one=3)
    write_constants(tmp_path / "b", seed=1)
    assert found() == "a"
    write_constants(tmp_path / "c", seed=0, n_head=ours["n_head"])
    os.utime(tmp_path / "a" / "config.json", (1, 1))
    assert found() == "c"  # the newest
    write_constants(tmp_path / "demo", **ours)
    os.utime(tmp_path / "demo" / "config.json", (0, 0))
    assert found() == "demo"
    (tmp_path / "e").mkdir()
    for content in ("{", "[]", "{}", '{"model_type": "gpt2"}'):  # of no run: nobody else's concern
        (tmp_path / "e" / "config.json").write_text(content)
        assert found() == "demo"
    assert found(data_checksum="another", threshold=0.7) == "demo-threshold=0.7"
    assert found(data_checksum="another") == "demo-2"
    write_constants(tmp_path / "demo-2", **ours | {"data_checksum": "third"})
    assert found(data_checksum="another") == "demo-3"
    other = dict.fromkeys(("n_layer", "n_head", "n_embd", "ffn_size"), 3)
    assert found(**other) == "demo-3"  # so many differences are no name
    (tmp_path / "demo-3").mkdir()
    (tmp_path / "demo-3" / "ckpt.pt").touch()  # of a run that nobody knows
    assert found(**other) == "demo-4"
    at_test = train_lm.Config(out_dir=str(tmp_path), eval_only=True, eval_threshold=0.5)
    assert folder_of(at_test, train_lm.PRESETS)[0].name == "demo"


def test_what_counts_as_code(tmp_path, monkeypatch):
    """Of a script all but what is set at its top, of the others that too; never comments, docstrings or empty lines."""
    text, before = (ROOT / "routers.py").read_text(), code_of(train_lm.Config())
    assert [name.partition(" (")[0] for name in sorted(before)] == ["model.py", "routers.py", "the script"]
    file = tmp_path / "routers.py"
    monkeypatch.setattr(sys.modules["routers"], "__file__", str(file))
    for edit, same in {
        ("EMBEDDING_NORM = 0.1  # X-MoE 3.1", "EMBEDDING_NORM = 0.1\n\n# X-MoE 3.2"): True,
        ('"""(S, D) -> (S, E)"""', '"""Scores."""'): True,
        ("EMBEDDING_NORM = 0.1", "EMBEDDING_NORM = 0.2"): False,
        ("1 + (total[:, :-1]", "2 + (total[:, :-1]"): False,
    }.items():
        assert text.count(edit[0]) == 1
        file.write_text(text.replace(*edit))
        assert (code_of(train_lm.Config()) == before) is same, edit
