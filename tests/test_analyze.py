"""`analyze.py`: its commands, which runs are meant, how figures and tables are made of records."""

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
    """The one line of a command that cannot be carried out."""
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *line)
    error = capsys.readouterr().err
    assert stop.value.code == 1 and error.startswith("error: ") and error.count("\n") == 1, error
    return error


def lines(axes) -> list[tuple]:
    """(name, x, y) of every thick line or set of points."""
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


def test_a_table_has_means_over_records_that_are_alike():
    assert shared.table_of(RECORDS, ("kind", "x")) == [
        ["kind", "x", "y", "z"],
        ["one", 1, "3 ± 1.4142", "0.5"],
        ["one", 2, "3", "1.5"],
        ["two", 1, "123.46", ""],
    ]


def test_seeds_are_thin_lines_and_their_mean_is_a_thick_one():
    pytest.importorskip("matplotlib")
    other = [{"run": "c", "kind": "two", "x": 3, "y": 1.0}, {"run": "d", "kind": "three", "x": 3, "y": 2.0}]
    panels = [Panel("", RECORDS, "kind", "x", "y", {"chance": 3.0}), Panel("", other, "kind", "x", "y", joined=False)]
    figure = shared.draw([*panels, Panel("", [], "kind", "x", "y")])
    first, second = figure.axes
    key = [text.get_text() for text in figure.legends[0].get_texts()]
    assert key == ["chance", "one seed", "one", "two", "three"]
    # The seed that has one point less cuts the mean.
    assert lines(first) == [("one", [1], [3.0]), ("two", [1], [123.456])] and levels(first) == {"chance": 3.0}
    thin = [list(line.get_ydata()) for line in first.lines if line.get_linewidth() < 1]
    assert thin == [[2.0, 3.0], [4.0]]
    assert lines(second) == [("two", [3], [1.0]), ("three", [3], [2.0])]
    assert first.lines[-1].get_color() == second.lines[0].get_color() != second.lines[1].get_color()
    assert {line.get_linestyle() for line in second.lines} == {"None"}


def test_runs_are_told_apart_by_their_constants():
    """And by what evaluations log, as a result has it."""
    for script, constant in shared.SCRIPTS.items():
        found = []
        for name in (*shared.SCRIPTS, "train_mt"):
            constants = identity(importlib.import_module(name).Config())
            result = json.loads((ROOT / f"results/{name}.jsonl").read_text().splitlines()[0])
            found += [name] * (constant in constants | result.get("valid", result))
        assert found == [script]


def test_names_tell_what_runs_are():
    base, switch = identity(train_lm.Config()), identity(train_lm.Config(router="switch"))

    def names(*found: dict) -> list[str]:
        return [run.name for run in shared.named([shared.Trained("out/a", constants, []) for constants in found])]

    ours, theirs = "threshold 32 x 128", "switch 8 x 512"
    assert names(base, base | {"seed": 1, "eval_every": 9, "eval_tokens": 9}, switch) == [ours, ours, theirs]
    assert names(base, base | {"beta2": 0.5}, switch) == [f"{ours}, beta2 0.999", f"{ours}, beta2 0.5", theirs]
    for constant in ("n_embd", "steps"):  # in which no two runs may differ unseen
        told = f", {constant} {base[constant]}"
        assert names(base, switch | {constant: 8}) == [f"{ours}{told}", f"{theirs}, {constant} 8"]
    older = {name: value for name, value in base.items() if name != "beta2"}  # of a time without such a constant
    assert names(base, older) == [f"{ours}, beta2 0.999", ours]
    assert shared.in_words(identity(train_lm.Config(router="dense"))) == "dense"
    assert shared.in_words(identity(train_mlm.Config(experts=4, expert_size=6))) == "hypersphere 4 x 6"


def test_what_routers_are_is_asked_of_their_classes():
    for name, reads in {"dense": False, "hash": False, "threshold": True, "topk": False}.items():
        assert shared.reads(identity(train_lm.Config(router=name)), "threshold") is reads
    with pytest.raises(ValueError, match="routers.py does not have"):
        shared.router_of({"router": "of yesterday"})


@pytest.fixture
def folders(tmp_path) -> list:
    """Two runs, XLM-E and its baseline, with the log of a real run of XLM-E."""
    log = (ROOT / "tests/xlm-e.metrics.jsonl").read_text()
    made = []
    for objective in ("rtd", "mlm"):
        folder = tmp_path / objective
        folder.mkdir()
        config = identity(train_electra.Config(objective=objective, seed=3))
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "metrics.jsonl").write_text(log)
        (folder / "result.json").write_text("{}")
        made.append(folder)
    return made


def test_xlm_es_figure_1_is_drawn_from_the_logs(folders, draw):
    (found, right), numbers = draw("curve", *folders)
    log = [json.loads(line) for line in (folders[0] / "metrics.jsonl").read_text().splitlines()]
    scores, x = [record["held_out"] for record in log], [record["flops"] for record in log]
    retrieval = [own["retrieval"][3] for own in scores]  # of 4 layers
    assert lines(found) == [("XLM-E", x, retrieval), ("XLM", x, retrieval)]
    assert levels(found) == {"chance": scores[-1]["chance"]}
    assert lines(right)[1] == ("XLM", x, [own["sentences"]["generator"] for own in scores])
    assert (
        right.figure.get_suptitle()
        == "XLM-E's figure 1: scores against training FLOPs. Higher at the same FLOPs is better"
    )
    assert numbers["command"].startswith(f"python analyze.py curve {folders[0]}")
    assert numbers["records"][-1]["run"] == str(folders[1]) and len(numbers["table"]) == 1 + 2 * len(log)


def test_a_trial_of_a_few_steps_is_drawn_where_it_is_named(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder, steps in zip(folders, (3000, 20)):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"steps": steps}))
        shutil.copytree(folder, Path("out/train_electra", f"demo-{folder.name}"))
    chosen = shared.choose("train_electra", shared.Drawn())
    assert [Path(run.folder).name for run in chosen] == ["demo-rtd"]
    assert "demo-mlm is left out: " in capsys.readouterr().err
    given = tuple(map(str, folders))
    found = shared.choose("train_electra", shared.Drawn(given))
    assert [run.name for run in found] == ["XLM-E, steps 3000", "XLM, steps 20"]


def test_what_is_no_log_or_cannot_be_drawn_is_one_clear_line(folders, draw, tmp_path, monkeypatch, capsys):
    def told(*line) -> str:
        capsys.readouterr()
        return refused(monkeypatch, capsys, "curve", *line)

    monkeypatch.chdir(tmp_path)
    assert "no finished run of train_electra.py" in told()
    (tmp_path / "out" / "train_electra").mkdir(parents=True)
    (tmp_path / "out" / "train_electra" / "demo").symlink_to(folders[0])
    assert draw("curve")[1]["records"][0]["run"] == "out/train_electra/demo"
    assert f"{tmp_path} holds no finished run" in told(*folders, tmp_path)
    (tmp_path / "file").write_text("in the way")
    assert "file" in told(folders[0], "--out", tmp_path / "file")
    for text, error in {'{"seed": 1}': "holds no run of train_electra.py", "{": "is not readable JSON"}.items():
        (folders[1] / "config.json").write_text(text)
        assert error in told(folders[1])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        assert "pip install matplotlib" in told(folders[0])
    (folders[0] / "result.json").unlink()
    assert f"{folders[0]} holds no finished run" in told(folders[0])


def test_commands_that_are_none(monkeypatch, capsys):
    assert "'figure2' is no figure: python analyze.py activations | gamma | " in refused(monkeypatch, capsys, "figure2")
    for line in ((), ("--help",)):
        run(monkeypatch, *line)
        said = capsys.readouterr().out
        assert all(f"python analyze.py {figure.__name__} " in said for figure in analyze.ANALYSES)
