"""A script that is edited and run again: an edited constant makes a separate run, edited code gives a warning."""

import importlib.util
import json
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
    """Scripts after an edit, each in a separate folder, since Python caches what it has compiled."""

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
LOOP = r"^        optimizer\.step\(\)$", "        optimizer.step(closure=None)"
PRESET = r"^PRESETS = \{", 'PRESETS = {"mine": {}, '
LOOK = r"^(    log_every: int = )\d+", r"\g<1>7"  # identifies no run
COMMENT = r"^        optimizer\.step\(\)$", "        optimizer.step()  # and the next"


def contents(folder: Path) -> dict[Path, bytes]:
    names = "ckpt.pt", "ckpt.prev.pt", "model.pt", "result.json", "metrics.jsonl"
    return {file: file.read_bytes() for name in names for file in folder.glob(name)}


@pytest.mark.parametrize("name", ["train_lm", "train_mlm", "train_electra", "train_mt", "finetune_xtreme"])
def test_an_edited_constant_trains_a_separate_run_and_edited_code_is_reported(
    name, commands, edited, tmp_path, monkeypatch, capsys
):
    options = commands[name] | {"out_dir": tmp_path / "out"}

    def run(*edit: str, **given) -> tuple[str, str, set]:
        capsys.readouterr()
        edited.script(name, *edit).run(options | given, monkeypatch)
        return *capsys.readouterr(), {file.parent for file in options["out_dir"].glob("*/result.json")}

    *_, (first,) = run()
    files = contents(first)
    out, _, folders = run(*DECAY)
    (second,) = folders - {first}
    assert re.search(rf"{second.name}: a separate run, as {first} differs in weight_decay\n", out)
    assert re.fullmatch(re.escape(first.name) + r"-[0-9a-f]{8}", second.name)
    assert json.loads((second / "result.json").read_text())["config"]["weight_decay"] == 0.37
    for edit, folder in ((DECAY, second), ((), first)):
        out, err, folders = run(*edit)
        assert f"finished before, in {folder} " in out
        assert folders == {first, second}
        assert "changed" not in err
    assert contents(first) == files
    for edit in (COMMENT, PRESET, LOOK):
        _, err, _ = run(*edit)
        assert "changed" not in err
    out, err, _ = run(*LOOP)
    assert f"finished before, in {first} (--resume false trains it again)" in out
    assert f"warning: the script changed since {first.name} was trained" in err
    _, err, folders = run(*LOOP, resume=False)
    assert "changed" not in err
    assert folders == {first, second}
    assert contents(first) != files
    monkeypatch.setattr(model, "__file__", str(edited.file("model", "MIN_CAPACITY = 4", "MIN_CAPACITY = 5")))
    _, err, _ = run(*LOOP)
    assert "warning: model.py changed since" in err


def test_a_run_that_resumes_with_edited_code_warns(commands, edited, tmp_path, monkeypatch, capsys):
    options = commands["train_lm"] | {"out_dir": tmp_path / "out"}
    with pytest.raises(ZeroDivisionError):
        edited.script("train_lm", r"^        optimizer\.step\(\)$", "        optimizer.step(), 1 / (3 - step)").run(
            options, monkeypatch
        )
    capsys.readouterr()
    for _ in ("resumed", "finished"):
        edited.script("train_lm").run(options, monkeypatch)
        warning = r"warning: the script changed since \S+ was trained \(--resume false trains it again\)\n"
        assert re.search(warning, capsys.readouterr().err)


def test_two_runs_that_start_at_once_never_share_a_folder(commands, edited, tmp_path, monkeypatch, capsys):
    """Another run takes the name while this one builds its model; run again, the command takes the second name."""
    options = commands["train_lm"] | {"out_dir": tmp_path / "out"}
    config = command_line(train_lm.Config, train_lm.PRESETS, words(options))
    folder, _ = folder_of(config, train_lm.PRESETS, identity(config))
    constants = json.dumps(identity(config) | {"data_checksum": "of other data"})
    build = train_lm.build

    def slow(*given):
        write_files(folder, {"config.json": constants})
        return build(*given)

    with monkeypatch.context() as patch:
        patch.setattr(train_lm, "build", slow)
        assert f"another run has just taken {folder}" in Script(train_lm).refused(options, patch, capsys)
    Script(train_lm).run(options, monkeypatch)
    [result] = options["out_dir"].glob("*/result.json")
    assert re.fullmatch(re.escape(folder.name) + "-[0-9a-f]{8}", result.parent.name)
    assert (folder / "config.json").read_text() == constants


@pytest.fixture
def name_of(tmp_path):
    """The name and the reason of a run with these changes, and `name_of.constants`, those of the demo."""
    config = train_lm.Config(out_dir=str(tmp_path))
    constants = identity(config) | {"data_checksum": "d"}

    def name_of(**changes) -> tuple[str, str]:
        folder, reason = folder_of(config, train_lm.PRESETS, constants | changes)
        return folder.name, reason

    name_of.constants = constants
    return name_of


def test_a_run_has_the_plain_name_if_that_is_free_or_agrees(name_of, tmp_path):
    assert name_of() == ("demo", "")
    older = {"seed": 0, "n_layer": 4, "data_checksum": "d", "constant_of_an_older_version": 3}
    write_files(tmp_path, {"demo/config.json": json.dumps(older)})
    assert name_of() == ("demo", "")
    write_files(tmp_path, {"demo/config.json": json.dumps(name_of.constants)})
    assert name_of() == ("demo", "")


def test_else_a_hash_of_its_constants_is_appended(name_of, tmp_path):
    write_files(tmp_path, {"demo/config.json": json.dumps(name_of.constants)})
    name, reason = name_of(threshold=0.7)
    assert re.fullmatch("demo-[0-9a-f]{8}", name)
    assert reason == f"{tmp_path}/demo differs in threshold"
    assert name_of(threshold=0.7) == (name, reason)
    names = {name_of(**change)[0] for change in ({"threshold": 0.6}, {"data_checksum": "e"}, {"n_layer": 3})}
    assert len(names | {name, "demo"}) == 5


@pytest.mark.parametrize("file", ["config.json", "ckpt.pt", "model.pt", "result.json"])
def test_a_folder_without_a_config_of_a_run_is_left_alone(file, name_of, tmp_path):
    write_files(tmp_path, {f"demo/{file}": '{"model_type": "gpt2"}'})
    name, reason = name_of()
    assert re.fullmatch("demo-[0-9a-f]{8}", name)
    assert reason == f"{tmp_path}/demo has no config.json of a run"


def test_a_trained_model_is_found_however_it_is_routed_at_test(name_of, tmp_path):
    """By its plain name, and by the hash if that is taken."""
    at_test = train_lm.Config(out_dir=str(tmp_path), eval_only=True, eval_threshold=0.5)
    constants = identity(at_test) | {"data_checksum": "d"}
    for threshold in (0.3, 0.7):
        write_files(tmp_path, {"demo/config.json": json.dumps(name_of.constants | {"threshold": threshold})})
        folder, _ = folder_of(at_test, train_lm.PRESETS, constants)
        assert folder.name == name_of()[0]


def test_comments_and_docstrings_do_not_count_as_code(tmp_path, monkeypatch):
    """Nor do empty lines. Constants at the top count in routers.py and model.py, but not in a script."""
    text, before = (ROOT / "routers.py").read_text(), code_of(train_lm.Config())
    assert [name.partition(" (")[0] for name in sorted(before)] == ["model.py", "routers.py", "the script"]
    file = tmp_path / "routers.py"
    monkeypatch.setattr(sys.modules["routers"], "__file__", str(file))
    for edit, same in {
        ("EMBEDDING_NORM = 0.1  # X-MoE 3.1", "EMBEDDING_NORM = 0.1\n\n# X-MoE 3.2"): True,
        ('"""(S, D) -> (S, E)"""', '"""Scores."""'): True,
        ("EMBEDDING_NORM = 0.1", "EMBEDDING_NORM = 0.2"): False,
        ("1 + (total[:, :-1]", "2 + (total[:, :-1]"): False,
        ("order = probs.argsort(", "order = score.argsort("): True,  # of another router
        ("return self.priority > NOT_CHOSEN", "return self.priority >= 0"): False,  # of a class that is no router
        ('@router("base")', '@router("mine")\nclass Mine(TopK):\n    K = 2\n\n\n@router("base")'): True,
        ("self.E, self.K = config, E, self.K or E", "self.E, self.K = config, E, E"): False,  # of its base class
    }.items():
        assert text.count(edit[0]) == 1
        file.write_text(text.replace(*edit))
        assert (code_of(train_lm.Config()) == before) is same, edit


def test_the_code_of_a_router_in_a_file_counts(tmp_path):
    """Without comments and the file's other routers."""
    file = tmp_path / "mine.py"
    classes = [f'@router("{name}")\nclass {name.title()}(TopK):\n    split = 2\n' for name in ("mine", "other")]
    text = "\n".join(["from routers import TopK, router\n", *classes])
    file.write_text(text)
    config = train_lm.Config(router=f"{file}:mine")
    before = code_of(config)
    assert [name for name in before if name.startswith(f"{file} (")]
    for edit, same in {
        ("class Mine(TopK):\n    split = 2", "class Mine(TopK):\n    split = 3"): False,
        ("class Other(TopK):\n    split = 2", "class Other(TopK):\n    split = 3"): True,
        ("class Mine(TopK):", "class Mine(TopK):  # the best"): True,
    }.items():
        assert text.count(edit[0]) == 1
        file.write_text(text.replace(*edit))
        assert (code_of(config) == before) is same, edit
