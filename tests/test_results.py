"""The pages of results: up to date, whole, with links that lead somewhere, and clear where a file is missing."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from helpers import ROOT

import train_lm
from engine.config import identity
from tools import render

PAGES = [ROOT / "README.md", *sorted(render.RESULTS.glob("*.md"))]
TABLE = "`python train_lm.py --table 1 --seeds 3` <!-- method | ours as here | unserved -->\n\n"


@pytest.fixture
def root(tmp_path):
    """A copy of the pages and of what they show, to break."""
    pytest.importorskip("scipy")
    pytest.importorskip("matplotlib")
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(render.RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("other"))
    return tmp_path


def refused(capsys, root, **more) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        render.main(root=root, **more)
    error = capsys.readouterr().err
    assert stop.value.code == 1 and error.startswith("error: ") and error.count("\n") == 1
    return error


def test_committed_pages_are_up_to_date_and_show_all(monkeypatch):
    """A result whose run has another name today would be left out without a word."""
    pytest.importorskip("scipy")
    opened, read_text = set(), Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda file, **more: opened.add(file) or read_text(file, **more))
    render.main(check=True)
    results = {file for file in render.RESULTS.glob("*/*.json") if file.parent.name not in ("gpu", "other")}
    assert opened >= results and len(results) > 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_comment_asks_for_a_table_and_every_link_leads_somewhere(page):
    """Sections as GitHub names them: lower case, no punctuation, and a number behind the second of a name."""
    text = page.read_text()
    assert len(render.LINE.findall(text)) == text.count("<!--")
    for link, section in re.findall(r"\]\((?!http)([^#)]*)#?(.*?)\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        if section:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            names = Counter(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)
            assert names[section] == 1, section


def test_check_says_which_page_and_which_picture_is_old(root, capsys):
    page = root / "results" / "xmoe.md"
    page.write_text(page.read_text().replace("19.49", "19.48"))
    file = root / "results" / "analyses" / "threshold.json"
    file.write_text(file.read_text().replace('"perplexity": 127.33', '"perplexity": 127.34'))
    assert "not up to date: xmoe.md, xmoe-work.png: python tools/render.py" in refused(capsys, root, check=True)
    assert "19.48" in page.read_text()
    render.main(root=root)
    render.main(root=root, check=True)
    assert "19.48" not in page.read_text()


def test_a_table_has_the_rows_that_were_run_and_the_columns_that_are_asked_for(tmp_path):
    folder = tmp_path / "train_lm"
    folder.mkdir()
    layers = [{name: 0.25 for name in train_lm.ROUTING}]
    for seed, ppl in enumerate([10.0, 12.0, 14.0]):
        scores = {"ppl": ppl, "bpb": 2.0, "layers": layers}
        config = identity(train_lm.Config(router="switch", seed=seed))
        result = {"test": scores, "test_no_limit": scores, "parameters": {"total": 2e6}, "config": config}
        (folder / f"demo{f'-seed={seed}' * (seed > 0)}-router=switch.json").write_text(json.dumps(result))
    filled = render.fill(f"{TABLE}Words.\n", tmp_path)
    assert filled.startswith(TABLE) and filled.endswith("|\n\nWords.\n") and filled == render.fill(filled, tmp_path)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in filled.splitlines() if line.startswith("|")]
    assert rows[::2] == [["method", "here", "unserved"], ["Switch", "12.00 ± 2.00", "25.00% ± 0.00%"]]
    with pytest.raises(ValueError, match="no such row or column; there are method, experts, paper, OWT"):
        render.fill(TABLE.replace("ours", "theirs"), tmp_path)
    result["config"]["learning_rate"] = 0.5
    (folder / "demo-router=switch.json").write_text(json.dumps(result))
    with pytest.raises(ValueError, match=r"demo-router=switch\.json has seed 2, its command 0: run it again"):
        render.fill(TABLE, tmp_path)


def test_rows_of_a_measurement_can_be_chosen(tmp_path):
    table = [["shape", "ms"], ["S1", 1.5], ["S2", 2.5]]
    (tmp_path / "layer.json").write_text(json.dumps([dict(zip(table[0], row)) for row in table[1:]]))
    (tmp_path / "gamma.json").write_text(json.dumps({"table": table}))
    assert "| ms   |\n|------|\n| 2.50 |\n" in render.fill("<!-- layer: shape=S2 | ms -->\n\n", tmp_path)
    assert "| S1    | 1.5 |\n| S2    | 2.5 |\n" in render.fill("<!-- gamma: shape | ms -->\n\n", tmp_path)


@pytest.mark.parametrize(
    "better, low, high, verdict",
    [
        ([2, 4, 6], -0.484, 4.484, "level"),
        ([2, 3.1, 4.2], 0.852, 1.348, "holds"),
        ([0, 0.9, 2.1], -1.248, -0.752, "the opposite"),
    ],
)
def test_an_effect_is_the_mean_difference_of_seeds_with_its_interval(tmp_path, better, low, high, verdict):
    """Of three seeds the t-interval reaches 4.3027 standard errors; p of two degrees is 1 - t / sqrt(2 + t^2)."""
    pytest.importorskip("scipy")
    names = ["train_lm/demo", "train_lm/demo-seed=1", "train_lm/demo-seed=2"]
    records = [{"run": f"out/{name}", "F1": x} for name, x in zip(names, better)]
    records += [{"run": f"out/{name}-router=dense", "F1": x} for name, x in zip(names, [1, 2, 3])]
    (tmp_path / "analyses").mkdir()
    (tmp_path / "analyses" / "a.json").write_text(json.dumps({"records": records}))
    runs = {"ours": "train_lm/demo{}", "other": "train_lm/demo{}-router=dense"}
    unit, *_ = [unit for unit in render.UNITS if unit.startswith("points more")]
    found = render.effect(tmp_path, runs | {"number": "a: F1", "unit": unit, "where": "here", "paper": [70, 72]})
    assert found["ends"] == pytest.approx([low, high], abs=1e-3) and found["verdict"] == verdict
    assert found["mean"] == pytest.approx([(low + high) / 2], abs=1e-3) and found["paper"] == [2]
    if verdict == "level":
        assert found["words"] == "here: +2 (-0.48 to +4.5, p 0.074)"


def test_what_is_damaged_or_missing_is_one_clear_line(root, capsys):
    file = root / "results" / "train_lm" / "demo-router=dense.json"
    for text in ('{"test": {', "[]", '{"name": "demo"}'):
        file.write_text(text)
        assert "demo-router=dense.json is not what its script writes today" in refused(capsys, root)
    shutil.copy(render.RESULTS / "train_lm" / file.name, file)
    (root / "results" / "bench" / "layer.json").unlink()
    assert "layer.json is missing: measure it" in refused(capsys, root)
    for file in root.glob("results/train_mlm/*seed=*"):
        file.unlink()
    assert "have no two seeds in common: no interval" in refused(capsys, root)
