"""`analyze.py`: its commands, the runs it selects, and figures and tables made from records."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
from helpers import ROOT

import analyze
import train_electra
import train_lm
import train_mlm
from analysis import shared
from analysis.shared import Panel
from engine.config import identity


def run(monkeypatch, *line):
    monkeypatch.setattr(sys, "argv", ["analyze.py", *map(str, line)])
    analyze.main()


def refused(monkeypatch, capsys, *line) -> str:
    """The one line with which a command is refused."""
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *line)
    error = capsys.readouterr().err
    assert stop.value.code == 1 and error.startswith("error: ") and error.count("\n") == 1, error
    return error


def lines(axes) -> list[tuple]:
    """(name, x, y) of each thick line or set of points."""
    thick = [line for line in axes.lines if line.get_linewidth() == 2]
    return [(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in thick]


def levels(axes) -> dict[str, float]:
    return {line.get_label(): line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"}


def kept(folder, name: str) -> dict:
    return json.loads((folder / "drawn" / f"{name}.json").read_text())


RECORDS = [
    {"run": "a", "kind": "one", "x": 1, "y": 2.0, "z": None},
    {"run": "b", "kind": "one", "x": 1, "y": 4.0, "z": 0.5},
    {"run": "a", "kind": "one", "x": 2, "y": 3.0, "z": 1.5},
    {"run": "c", "kind": "two", "x": 1, "y": 123.456, "z": None},
]


def test_a_table_averages_records_with_equal_keys():
    header, *rows = shared.table_of(RECORDS, ("kind", "x"))
    assert header == ["kind", "x", "y", "z"]
    assert rows == [["one", 1, "3 ± 1.4142", "0.5"], ["one", 2, "3", "1.5"], ["two", 1, "123.46", ""]]


def test_seeds_are_thin_lines_and_their_mean_is_a_thick_one():
    pytest.importorskip("matplotlib")
    other = [{"run": "c", "kind": "two", "x": 3, "y": 1.0}, {"run": "d", "kind": "three", "x": 3, "y": 2.0}]
    panels = [Panel("", RECORDS, "kind", "x", "y", {"chance": 3.0}), Panel("", other, "kind", "x", "y", joined=False)]
    figure = shared.draw([*panels, Panel("", [], "kind", "x", "y")])
    first, second = figure.axes
    key = [text.get_text() for text in figure.legends[0].get_texts()]
    assert key == ["chance", "one seed", "one", "two", "three"]
    # The mean is as long as the shortest seed.
    assert lines(first) == [("one", [1], [3.0]), ("two", [1], [123.456])]
    assert levels(first) == {"chance": 3.0}
    thin = [list(line.get_ydata()) for line in first.lines if line.get_linewidth() < 1]
    assert thin == [[2.0, 3.0], [4.0]]
    assert lines(second) == [("two", [3], [1.0]), ("three", [3], [2.0])]
    assert first.lines[-1].get_color() == second.lines[0].get_color() != second.lines[1].get_color()
    assert {line.get_linestyle() for line in second.lines} == {"None"}


def test_one_constant_or_metric_identifies_the_script_of_a_run():
    for script, (constant, *_) in shared.SCRIPTS.items():
        having = []
        for name in shared.SCRIPTS:
            constants = identity(importlib.import_module(name).Config())
            result = json.loads((ROOT / f"results/{name}.jsonl").read_text().splitlines()[0])
            having += [name] * (constant in constants | result.get("valid", result))
        assert having == [script]


def test_names_list_the_constants_in_which_runs_differ():
    base, switch = identity(train_lm.Config()), identity(train_lm.Config(router="switch"))

    def names(*configs: dict) -> list[str]:
        return [run.name for run in shared.named([shared.TrainedRun("out/a", config, []) for config in configs])]

    t, s = "threshold 32 x 128", "switch 8 x 512"
    seed = base | {"seed": 1, "eval_every": 9, "eval_tokens": 9}
    assert names(base, seed, switch) == [t, t, s]
    assert names(base, base | {"beta2": 0.5}, switch) == [f"{t}, beta2 0.999", f"{t}, beta2 0.5", s]
    for constant in ("n_embd", "steps"):  # named even if runs also differ in their description
        expected = [f"{t}, {constant} {base[constant]}", f"{s}, {constant} 8"]
        assert names(base, switch | {constant: 8}) == expected
    older = {name: value for name, value in base.items() if name != "beta2"}  # from before the constant existed
    assert names(base, older) == [f"{t}, beta2 0.999", t]
    assert shared.in_words(identity(train_lm.Config(router="dense"))) == "dense"
    assert shared.in_words(identity(train_mlm.Config(experts=4, expert_size=6))) == "hypersphere 4 x 6"


def test_router_classes_say_which_constants_they_read():
    for name, reads in {"dense": False, "hash": False, "threshold": True, "topk": False}.items():
        assert shared.reads(identity(train_lm.Config(router=name)), "threshold") is reads
    with pytest.raises(ValueError, match="router must be dense, FILE.py:NAME, or one of .*, not 'of yesterday'"):
        shared.router_of({"router": "of yesterday"})


@pytest.fixture
def folders(tmp_path) -> list:
    """XLM-E's log of a real run, as the log of an XLM-E and of an XLM run."""
    log = (ROOT / "tests/xlm-e.metrics.jsonl").read_text()
    folders = []
    for objective in ("rtd", "mlm"):
        folder = tmp_path / objective
        folder.mkdir()
        config = identity(train_electra.Config(objective=objective, seed=3))
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "metrics.jsonl").write_text(log)
        (folder / "result.json").write_text("{}")
        folders.append(folder)
    return folders


def test_xlm_es_figure_1_is_drawn_from_the_logs(folders, draw):
    (translations, accuracy), kept = draw("curve", *folders)
    log = [json.loads(line) for line in (folders[0] / "metrics.jsonl").read_text().splitlines()]
    scores, x = [record["held_out"] for record in log], [record["flops"] for record in log]
    retrieval = [score["retrieval"][3] for score in scores]  # of 4 layers
    assert lines(translations) == [("XLM-E", x, retrieval), ("XLM", x, retrieval)]
    assert levels(translations) == {"chance": scores[-1]["chance"]}
    assert lines(accuracy)[1] == ("XLM", x, [score["sentences"]["generator"] for score in scores])
    title = "XLM-E's figure 1: scores against training FLOPs. Higher at the same FLOPs is better"
    assert accuracy.figure.get_suptitle() == title
    assert kept["command"].startswith(f"python analyze.py curve {folders[0]}")
    assert kept["records"][-1]["run"] == str(folders[1])
    assert len(kept["table"]) == 1 + 2 * len(log)


def test_runs_of_other_lengths_are_named_by_their_steps(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, steps in zip(folders, (3000, 20)):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"steps": steps}))
        shutil.copytree(folder, Path("out/train_electra", f"demo-{folder.name}"))
    for passed in ((), (*map(str, folders), f"{folders[0]}/")):
        runs = shared.select_runs("train_electra", shared.FigureOptions(passed))
        assert sorted(run.name for run in runs) == ["XLM, steps 20", "XLM-E, steps 3000"]


def test_unusable_runs_are_refused_in_one_line(folders, draw, tmp_path, monkeypatch, capsys):
    def error(*line) -> str:
        capsys.readouterr()
        return refused(monkeypatch, capsys, "curve", *line)

    monkeypatch.chdir(tmp_path)
    assert "no suitable finished run of train_electra.py" in error()
    (tmp_path / "out" / "train_electra").mkdir(parents=True)
    (tmp_path / "out" / "train_electra" / "demo").symlink_to(folders[0])
    assert draw("curve")[1]["records"][0]["run"] == "out/train_electra/demo"
    assert f"{tmp_path} has no finished run" in error(*folders, tmp_path)
    (tmp_path / "file").write_text("in the way")
    assert "file" in error(folders[0], "--out", tmp_path / "file")
    for text, message in {'{"seed": 1}': "is not a run of train_electra.py", "{": "is not readable JSON"}.items():
        (folders[1] / "config.json").write_text(text)
        assert message in error(folders[1])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        assert "matplotlib.figure is not installed: pip install -r requirements-dev.txt" in error(folders[0])
    (folders[0] / "result.json").unlink()
    assert f"{folders[0]} has no finished run" in error(folders[0])


def test_unknown_commands_are_refused_and_help_lists_all_others(monkeypatch, capsys):
    error = refused(monkeypatch, capsys, "figure2")
    assert "'figure2' is not an analysis: python analyze.py activations | gamma | " in error
    for line in ((), ("--help",)):
        run(monkeypatch, *line)
        out = capsys.readouterr().out
        assert all(f"python analyze.py {figure.__name__} " in out for figure in analyze.ANALYSES)
