"""`analyze.py`: figures from the logs of runs, tables that need no run, and what a user can get wrong."""

import json
import shutil
import sys

import pytest
import torch
from helpers import ROOT, table_rows

import analyze
import measures
import train_electra
from figures import flops, shared


def run(monkeypatch, *line):
    monkeypatch.setattr(sys, "argv", ["analyze.py", *map(str, line)])
    analyze.main()


def refused(monkeypatch, capsys, *line) -> str:
    """The one line of a command that cannot be carried out."""
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *line)
    error = capsys.readouterr().err
    assert stop.value.code == 1 and error.startswith("error: ") and error.count("\n") == 1
    return error


# ---------------------------------------------------------------------------------------------------------------------
# XLM-E figure 1


def evaluation(step: int, rtd: bool) -> dict:
    scores = {"generator": step / 10, "saved": step / 20} if rtd else {"generator": step / 10}
    held_out = {"sentences": scores, "retrieval": [0.1, 0.2, step / 5, 0.3], "chance": 0.05}  # 3 layers: the 2nd counts
    return {"step": step, "flops": step * 1e12, "held_out": held_out}


@pytest.fixture
def folders(tmp_path) -> list:
    """A run of XLM-E, and one of its baseline."""
    made = []
    for objective in ("rtd", "mlm"):
        folder = tmp_path / objective
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"objective": objective, "seed": 3, "n_layer": 3}))
        records = [evaluation(step, objective == "rtd") for step in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        made.append(folder)
    return made


def test_figure_1_is_drawn_from_the_logs(folders, tmp_path, monkeypatch, capsys):
    Figure = pytest.importorskip("matplotlib.figure").Figure
    figures, savefig = [], Figure.savefig

    def record(figure, *args, **more):
        figures.append(figure)
        savefig(figure, *args, **more)

    monkeypatch.setattr(Figure, "savefig", record)
    run(monkeypatch, "curve", *folders, "--out", tmp_path / "drawn")
    assert str(tmp_path / "drawn" / "curve.png") in capsys.readouterr().out
    assert (tmp_path / "drawn" / "curve.png").stat().st_size > 5_000
    assert "<svg" in (tmp_path / "drawn" / "curve.svg").read_text()
    numbers = json.loads((tmp_path / "drawn" / "curve.json").read_text())
    assert numbers[str(folders[0])]["saved"] == [0.05, 0.1] and str(folders[1]) in numbers["caption"]
    lines = {}
    for axes in figures[0].axes:
        for line in axes.lines:
            lines[axes.get_title(), line.get_label()] = [list(numbers) for numbers in line.get_data()]
    chance = lines.pop(("Held-out translations found", "chance"))
    assert chance[1] == [0.05, 0.05]
    x = [1e12, 2e12]
    assert lines == {
        ("Held-out translations found", "XLM-E, seed 3"): [x, [0.2, 0.4]],
        ("Held-out translations found", "XLM, seed 3"): [x, [0.2, 0.4]],
        ("Masked tokens of held-out sentences right", "XLM-E, seed 3"): [x, [0.1, 0.2]],
        ("Masked tokens of held-out sentences right", "XLM-E, seed 3: loss saved on replaced ones"): [x, [0.05, 0.1]],
        ("Masked tokens of held-out sentences right", "XLM, seed 3"): [x, [0.1, 0.2]],
    }


def test_figure_1_tells_runs_apart_that_only_look_alike(folders, tmp_path, monkeypatch):
    Figure = pytest.importorskip("matplotlib.figure").Figure
    labels = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **more: labels.append(figure.axes[0].lines))
    other = shutil.copytree(folders[0], tmp_path / "without-pairs")
    (other / "config.json").write_text(json.dumps({"objective": "rtd", "seed": 3, "n_layer": 3, "tlm": False}))
    run(monkeypatch, "curve", *folders, other, "--out", tmp_path / "drawn")
    names = [line.get_label() for line in labels[0]]
    assert names == ["rtd, seed 3", "XLM, seed 3", "without-pairs, seed 3", "chance"]


def test_what_is_no_log_is_one_clear_line(folders, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert "out/train_electra holds no run of the demo" in refused(monkeypatch, capsys, "curve")
    (tmp_path / "out" / "train_electra").mkdir(parents=True)
    (tmp_path / "out" / "train_electra" / "demo").symlink_to(folders[0])
    run(monkeypatch, "curve")
    assert json.loads((tmp_path / "out" / "figures" / "curve.json").read_text())["out/train_electra/demo"]["saved"]
    assert f"{tmp_path} holds no run" in refused(monkeypatch, capsys, "curve", *folders, tmp_path)
    log = folders[0] / "metrics.jsonl"
    whole = log.read_text()
    for torn in (whole[:-20], whole.replace("}\n", "\n", 1)):
        log.write_text(torn)
        assert f"{log} has a torn line" in refused(monkeypatch, capsys, "curve", *folders)
    log.write_text("")
    assert f"{folders[0]} holds no run" in refused(monkeypatch, capsys, "curve", *folders)
    (folders[1] / "config.json").write_text('{"seed": 1}')
    assert f"{folders[1]} holds no run of train_electra.py" in refused(monkeypatch, capsys, "curve", folders[1])
    (folders[1] / "config.json").write_text("{")
    assert "config.json is not readable JSON" in refused(monkeypatch, capsys, "curve", folders[1])


def test_a_figure_that_cannot_be_drawn_is_one_clear_line(folders, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        assert "pip install matplotlib" in refused(patch, capsys, "curve", *folders)
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("in the way")
    assert "file" in refused(monkeypatch, capsys, "curve", *folders, "--out", tmp_path / "file")


def test_a_run_leaves_what_the_figure_reads(tmp_path):
    """Names of train_electra.py's log and constants, as results/ keeps them of real runs."""
    log = (ROOT / "results/train_electra/demo.metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(log)
    (tmp_path / "config.json").write_text(json.dumps(vars(train_electra.Config())))
    config, records = shared.read_run(str(tmp_path), "train_electra")
    assert config["objective"] == "rtd" and len(records) == 8


# ---------------------------------------------------------------------------------------------------------------------
# XLM-E tables 3 and 4


@pytest.mark.parametrize("preset, paper", [("base", 279e6), ("large", 840e6), ("xl", 2.2e9)])
def test_parameters_of_table_3(preset, paper):
    with torch.device("meta"):
        model = train_electra.make(train_electra.Config(**{"vocab_size": 250_002} | train_electra.PRESETS[preset]))
    kept = sum(measures.numel(part) for part in (model.encoder, model.dense, model.ln_h, model.out))
    assert kept == pytest.approx(paper, rel=0.02)
    (row,) = [row for row in table_rows(flops.table3().split("\n\n")[1]) if row[0] == preset]
    assert row[3] == f"{kept:,}"
    assert preset != "base" or row[3:] == ["278,048,017", "278,045,953"]  # with and without the gated bias


def test_flops_of_table_4(monkeypatch, capsys):
    run(monkeypatch, "flops")
    _, _, _, table, *_ = capsys.readouterr().out.split("\n\n")
    rows = table_rows(table)
    assert [row[1:4] for row in rows[:2]] == [["6.3e19", "6.26e+19", "5.03e+19"], ["9.5e19", "9.37e+19", "8.30e+19"]]
    assert rows[2][3] == "1.66e+20"


def test_products_are_those_of_a_run():
    base = train_electra.Config(**{"vocab_size": 250_002} | train_electra.PRESETS["base"])
    with torch.device("meta"):
        model = train_electra.make(base)
    *_, both = table_rows(flops.table4().split("\n\n")[1])
    assert both[4] == f"{125_000 * train_electra.step_flops(model):.2e}"


def test_gpu_hours_are_those_of_the_matrix_products():
    rows = {row[0]: row[1:] for row in table_rows(flops.gpu_hours(flops.Flops(mfu=0.5)).split("\n\n")[1])}
    D, L, T, V, tokens = 768, 12, 1024, 50257, 60_000 * 256 * 1024
    total = 6 * tokens * (L * 12 * D * D + L * 2 * T * D + D * V)  # forward, and twice that backward
    hours = total / (0.5 * 989e12) / 3600
    assert rows["train_lm.py --preset openwebtext-124M"][:4] == ["124", "16", f"{total:.1e}", f"{hours:,.0f}"]
    assert rows["train_lm.py --preset openwebtext-323M"][0] == "323"
    T, V, ffn, d_e, E = 512, 250_002, 4 * D * 3072, 16, 32
    dense = L * (8 * D * D + ffn) + 4 * L * T * D + 0.15 * 2 * D * (D + V)
    total = 3 * 125_000 * 2048 * T * (dense + 3 * ffn + 2 * d_e * (D + E))  # a token has one expert, of three FFNs
    assert rows["train_mlm.py --preset base"][1:3] == ["131", f"{total:.1e}"]
    both = table_rows(flops.table4().split("\n\n")[1])[2][4]
    assert rows["train_electra.py --preset base"][1:3] == ["262", f"{float(both):.1e}"]
    twice = {row[0]: row[1:] for row in table_rows(flops.gpu_hours(flops.Flops(mfu=0.25)).split("\n\n")[1])}
    xl = "train_electra.py --preset xl"
    assert float(twice[xl][3].replace(",", "")) == pytest.approx(2 * float(rows[xl][3].replace(",", "")), rel=0.01)
    assert rows[xl][4].endswith(" days") and rows["train_mt.py --preset wmt10"][4].endswith(" h")


def test_gpus_that_are_not_known_are_refused(monkeypatch, capsys):
    assert "gpu must be one of B200, H200" in refused(monkeypatch, capsys, "flops", "--gpu", "abacus")
    assert "mfu must be over 0 and at most 1" in refused(monkeypatch, capsys, "flops", "--mfu", "1.5")


def test_commands_that_are_none(monkeypatch, capsys):
    for line in ((), ("figure2",)):
        assert "python analyze.py activations | gamma | " in refused(monkeypatch, capsys, *line)
