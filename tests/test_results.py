"""The page of results: up to date, whole, and clear where a file is missing or damaged."""

import dataclasses
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

import train_lm
from engine.config import identity
from tools import render

DENSE = "demo-router=dense.json"


@pytest.fixture
def committed(tmp_path):
    """A copy of results/ to break."""
    return shutil.copytree(render.RESULTS, tmp_path / "results")


@pytest.fixture
def folder(committed):
    """The same with two results alone, which nobody measured: of XMoE table 1, the dense row and Switch's."""
    for file in committed.glob("train_*/*.json"):
        file.unlink()
    base, scores = train_lm.Config(), {"ppl": 50.0, "bpb": 2.0, "layers": []}
    for _, change in train_lm.table1(base).rows[:2]:
        config = dataclasses.replace(base, **change)
        result = {"test": scores, "test_no_limit": scores, "parameters": {"total": 2e6}}
        result["config"] = identity(config)
        (committed / "train_lm" / render.file_name(config, train_lm.PRESETS)).write_text(json.dumps(result))
    assert (committed / "train_lm" / DENSE).exists()
    return committed


def row(page: str, title: str, label: str) -> str:
    """The row of a table that begins with `label`, from the section with that title."""
    section = page[page.index(f"## {title}") :]
    return next(line for line in section.splitlines() if line.startswith(f"| {label} "))


def test_the_committed_page_is_up_to_date():
    render.main(check=True)


def test_check_says_where_the_page_is_old(folder, capsys):
    (folder / "README.md").write_text("an old page")
    with pytest.raises(SystemExit) as stop:
        render.main(check=True, folder=folder)
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "not up to date: python tools/render.py" in error
    assert (folder / "README.md").read_text() == "an old page"
    render.main(folder=folder)
    render.main(check=True, folder=folder)


def test_a_row_shows_what_its_file_says(folder):
    file = folder / "train_lm" / DENSE
    result = json.loads(file.read_text())
    result["test"]["ppl"] = 123.456
    file.write_text(json.dumps(result))
    assert "| 123.46 " in row(render.page(folder), "XMoE table 1", "dense")


def test_an_analysis_shows_its_command_and_table(folder, capsys):
    file = folder / "analyses" / "gamma.json"
    command, table = "python analyze.py gamma X", [["experts", "limit"], ["dense", 0.5]]
    file.write_text(json.dumps({"command": command, "table": table}))
    page = render.page(folder)
    assert f"`{command}`\n\n| experts | limit |" in page and "\n| dense   | 0.5   |\n" in page
    for damaged in ("{}", json.dumps({"table": table}), json.dumps({"command": command, "table": None})):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=r"gamma\.json is not what its script writes today"):
            render.page(folder)


def test_several_seeds_are_a_mean_and_a_deviation(folder):
    result = json.loads((folder / "train_lm" / DENSE).read_text())
    for seed, ppl in enumerate([10.0, 12.0, 14.0]):
        result["test"]["ppl"] = ppl
        result["config"]["seed"] = seed
        name = f"demo-seed={seed}-router=dense.json" if seed else DENSE
        (folder / "train_lm" / name).write_text(json.dumps(result))
    assert "| 12.00 ± 2.00 " in row(render.page(folder), "XMoE table 1", "dense")


def test_a_missing_file_gives_an_empty_row(folder):
    (folder / "train_lm" / DENSE).unlink()
    cells = row(render.page(folder), "XMoE table 1", "dense").split("|")[1:-1]
    assert [cell.strip() for cell in cells[:4]] == ["dense", "1 x 512", "22.61", "22.24"]
    assert len(cells) > 4 and not any(cell.strip() for cell in cells[4:])


@pytest.mark.parametrize("text", ['{"test": {', "[]", '{"name": "demo"}'])
def test_a_damaged_result_is_one_clear_line(folder, capsys, text):
    (folder / "train_lm" / DENSE).write_text(text)
    with pytest.raises(SystemExit) as stop:
        render.main(folder=folder)
    error = capsys.readouterr().err
    assert stop.value.code == 1
    assert error.startswith("error: ") and error.count("\n") == 1 and DENSE in error


def test_a_result_of_other_constants_is_one_clear_line(folder, capsys):
    file = folder / "train_lm" / DENSE
    result = json.loads(file.read_text())
    result["config"]["learning_rate"] = 0.5
    file.write_text(json.dumps(result))
    with pytest.raises(SystemExit):
        render.main(folder=folder)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert f"{DENSE} has learning_rate 0.5, its row in the tables 0.003" in error


def test_a_missing_note_is_one_clear_line(folder, capsys):
    (folder / "notes" / "train_lm-1.md").unlink()
    with pytest.raises(SystemExit):
        render.main(folder=folder)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "train_lm-1.md" in error


def test_every_committed_note_is_on_the_page(folder):
    page = render.page(folder)
    for file in (render.RESULTS / "notes").glob("*.md"):
        assert file.read_text().strip() in page, f"{file.name} belongs to no table"


def test_links_to_sections_lead_to_one():
    """As GitHub names them: lower case, no punctuation, and a number behind the second of a name."""
    page = (render.RESULTS / "README.md").read_text()
    names = Counter()
    for title in re.findall(r"^#+ (.*)$", page, re.M):
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        names[name] += 1
        names[f"{name}-{names[name] - 1}"] += names[name] > 1
    found = re.findall(r"\]\(#(.*?)\)", page)
    found += re.findall(r"\]\(results/README\.md#(.*?)\)", (render.RESULTS.parent / "README.md").read_text())
    assert len(found) > 5 and [link for link in found if not names[link]] == []


def test_every_committed_result_is_read(monkeypatch):
    """One whose run has another name today would be left out without a word."""
    opened, read_text = set(), Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda file, *rest: opened.add(file) or read_text(file, *rest))
    render.page()
    assert opened >= {*render.RESULTS.glob("*/*.json")}


def test_a_model_that_is_routed_otherwise_has_a_file_of_its_own(folder):
    """XMoE table 2: rows with fewer FLOPs at test are evaluations of the row with all of them."""
    rows = dict(train_lm.table2(train_lm.Config()).rows)
    names = []
    for labels, change in rows.items():
        if labels[1].startswith("8 x"):
            config = dataclasses.replace(train_lm.Config(), **change)
            names.append(render.file_name(config, train_lm.PRESETS))
    trained = "demo-moe_every=1-expert_ffns=1-split=8-threshold=1.0"
    limits = [f"-eval-t=0.9-capacity={share}" for share in (0.75, 0.5, 0.25)]
    assert names == [f"{trained}{limit}.json" for limit in ["", *limits]]


def test_a_command_has_what_is_not_the_default():
    options = {"preset": "small", "frozen": False, "learning_rate": 1e-3, "table": 2, "seeds": 3}
    expected = "python train_lm.py --preset small --frozen false --learning_rate 0.001 --table 2 --seeds 3"
    assert render.command_of("train_lm", options) == expected
    assert render.command_of("train_lm", {"preset": "demo", "table": None, "seeds": 1}) == "python train_lm.py"


def test_the_time_of_all_runs_is_added_up():
    machine = {"device": "a CPU", "threads": 1, "dtype": "float32", "torch": "2", "numpy": "2"}
    result = {"seconds": 90.0, "machine": machine}
    said = "; 4 minutes of training; a CPU, threads 1, float32, torch 2; a CPU, threads 2, float32, torch 2"
    assert render.effort([[result, {}], [result, {"seconds": 60.0, "machine": machine | {"threads": 2}}]]) == said
    assert render.effort([[], [{}]]) == ""
