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
def folder(tmp_path):
    """A copy of results/ to break, with two results alone, which nobody measured: the first rows of XMoE's table 1."""
    copy = shutil.copytree(render.RESULTS, tmp_path / "results")
    for file in copy.glob("train_*/*.json"):
        file.unlink()
    base, scores = train_lm.Config(), {"ppl": 50.0, "bpb": 2.0, "layers": []}
    for _, change in train_lm.table1(base).rows[:2]:
        config = dataclasses.replace(base, **change)
        result = {"test": scores, "test_no_limit": scores, "parameters": {"total": 2e6}}
        result["config"] = identity(config)
        (copy / "train_lm" / render.file_name(config, train_lm.PRESETS)).write_text(json.dumps(result))
    return copy


def dense_row(page: str) -> list[str]:
    section = page[page.index("## XMoE table 1") :]
    line = next(line for line in section.splitlines() if line.startswith("| dense "))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def refused(capsys, folder, **more) -> str:
    with pytest.raises(SystemExit) as stop:
        render.main(folder=folder, **more)
    error = capsys.readouterr().err
    assert stop.value.code == 1 and error.startswith("error: ") and error.count("\n") == 1
    return error


def test_the_committed_page_is_up_to_date_and_whole(monkeypatch):
    """A result whose run has another name today would be left out without a word."""
    opened, read_text = set(), Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda file, *rest: opened.add(file) or read_text(file, *rest))
    render.main(check=True)
    unshown = {render.RESULTS / "analyses" / f"{name}.json" for name in ("compare", "compare-wikipedia")}
    unshown.add(render.RESULTS / "analyses" / "retrieval-whitened.json")
    assert opened >= {*render.RESULTS.glob("*/*.json"), *render.RESULTS.glob("notes/*.md")} - unshown


def test_check_says_where_the_page_is_old(folder, capsys):
    (folder / "README.md").write_text("an old page")
    assert "not up to date: python tools/render.py" in refused(capsys, folder, check=True)
    assert (folder / "README.md").read_text() == "an old page"
    render.main(folder=folder)
    render.main(check=True, folder=folder)


def test_an_analysis_shows_its_command_and_table(folder):
    file = folder / "analyses" / "gamma.json"
    command, table = "python analyze.py gamma X", [["experts", "limit"], ["dense", 0.5]]
    file.write_text(json.dumps({"command": command, "table": table}))
    page = render.page(folder)
    assert f"`{command}`\n\n| experts | limit |" in page and "\n| dense   | 0.5   |\n" in page
    for damaged in ("{}", json.dumps({"table": table}), json.dumps({"command": command, "table": None})):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=r"gamma\.json is not what its script writes today"):
            render.page(folder)


def test_a_row_is_the_mean_of_what_its_files_say(folder):
    result = json.loads((folder / "train_lm" / DENSE).read_text())
    for seed, ppl in enumerate([10.0, 12.0, 14.0]):
        result["test"]["ppl"] = ppl
        result["config"]["seed"] = seed
        name = f"demo-seed={seed}-router=dense.json" if seed else DENSE
        (folder / "train_lm" / name).write_text(json.dumps(result))
    assert "12.00 ± 2.00" in dense_row(render.page(folder))
    for file in folder.glob("train_lm/*dense.json"):
        file.unlink()
    cells = dense_row(render.page(folder))
    assert cells[:4] == ["dense", "1 x 512", "22.61", "22.24"] and len(cells) > 4 and not any(cells[4:])


def test_what_is_damaged_or_missing_is_one_clear_line(folder, capsys):
    file = folder / "train_lm" / DENSE
    result = json.loads(file.read_text())
    result["config"]["learning_rate"] = 0.5
    for text in ('{"test": {', "[]", '{"name": "demo"}', json.dumps(result)):
        file.write_text(text)
        error = refused(capsys, folder)
        assert DENSE in error
    assert "has learning_rate 0.5, its row in the tables 0.003" in error
    file.unlink()
    (folder / "notes" / "train_lm-1.md").unlink()
    assert "train_lm-1.md" in refused(capsys, folder)


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


def test_a_model_that_is_routed_otherwise_has_a_file_of_its_own():
    """XMoE table 2: rows with fewer FLOPs at test are evaluations of the row with all of them."""
    changes = [change for labels, change in train_lm.table2(train_lm.Config()).rows if labels[1].startswith("8 x")]
    configs = [dataclasses.replace(train_lm.Config(), **change) for change in changes]
    limits = ["", *(f"-eval-t=0.9-capacity={share}" for share in (0.75, 0.5, 0.25))]
    trained = "demo-moe_every=1-expert_ffns=1-split=8-threshold=1.0"
    names = [render.file_name(config, train_lm.PRESETS) for config in configs]
    assert names == [f"{trained}{limit}.json" for limit in limits]


def test_the_line_above_a_table_has_the_command_and_the_time():
    expected = "python train_lm.py --preset small --frozen false --learning_rate 0.001 --table 2 --seeds 3"
    assert render.command_of("train_lm", "small", {"frozen": False, "learning_rate": 1e-3}, 2, 3) == expected
    assert render.command_of("train_lm", "demo", {}, None, 1) == "python train_lm.py"
    machine = {"device": "a CPU", "threads": 1, "dtype": "float32", "torch": "2", "numpy": "2"}
    result = {"seconds": 90.0, "machine": machine}
    said = "; 4 minutes of training; a CPU, threads 1, float32, torch 2; a CPU, threads 2, float32, torch 2"
    assert render.effort([result, {}, result, {"seconds": 60.0, "machine": machine | {"threads": 2}}]) == said
    assert render.effort([{}]) == ""
