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
from tools import claims, render

RESULTS = render.RESULTS
PAGES = [ROOT / "README.md", *sorted(RESULTS.glob("*.md"))]
TABLE = "`python train_lm.py --table 1 --seeds 3` <!-- method | ours as here | unserved -->\n\n"


@pytest.fixture
def root(tmp_path):
    """A copy of the pages and of what they show, to break."""
    pytest.importorskip("scipy")
    pytest.importorskip("matplotlib")
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(RESULTS, tmp_path / "results")
    return tmp_path


def refused(capsys, root, **more) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        render.main(root=root, **more)
    error = capsys.readouterr().err
    assert stop.value.code == 1
    assert re.fullmatch("error: .*\n", error)
    return error


def write(file: Path, content):
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def test_committed_pages_are_up_to_date_and_show_all(monkeypatch):
    """A result whose run has another name today would be left out without a word."""
    pytest.importorskip("scipy")
    opened, read_text = set(), Path.read_text

    def read(file, **more):
        opened.add(file)
        return read_text(file, **more)

    monkeypatch.setattr(Path, "read_text", read)
    render.main(check=True)
    shown = {file for file in RESULTS.glob("*/*.json") if file.parent.name != "gpu"}
    assert not shown - opened
    assert len(shown) > 100


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_comment_asks_for_a_table_and_every_link_leads_somewhere(page):
    """Sections as GitHub names them: lower case, and no punctuation."""
    text = page.read_text()
    assert len(render.LINE.findall(text)) == text.count("<!--")
    for link, section in re.findall(r"\]\((?!http)([^#)]*)#?(.*?)\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        if section:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            names = Counter(re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
            assert names[section.replace("-", " ")] == 1, section


def test_check_says_which_page_and_which_picture_is_old(root, capsys):
    page = root / "results" / "xmoe.md"
    page.write_text(page.read_text().replace("19.49", "19.48"))
    file = root / "results" / "analyses" / "threshold.json"
    file.write_text(file.read_text().replace('"perplexity": 127.33', '"perplexity": 127.34'))
    error = refused(capsys, root, check=True)
    assert "not up to date: xmoe.md, xmoe-work.png: python tools/render.py" in error
    assert "19.48" in page.read_text()
    render.main(root=root)
    render.main(root=root, check=True)
    assert "19.48" not in page.read_text()


def test_a_table_has_the_rows_that_were_run_and_the_columns_that_are_asked_for(tmp_path):
    layers = [dict.fromkeys(train_lm.ROUTING, 0.25)]
    for seed, ppl in enumerate([10.0, 12.0, 14.0]):
        scores = {"ppl": ppl, "bpb": 2.0, "layers": layers}
        config = identity(train_lm.Config(router="switch", seed=seed))
        result = {"test": scores, "test_no_limit": scores, "config": config}
        result["parameters"] = {"total": 2e6}
        name = f"demo-seed={seed}-router=switch" if seed else "demo-router=switch"
        write(tmp_path / "train_lm" / f"{name}.json", result)
    filled = render.fill(f"{TABLE}Words.\n", tmp_path)
    row = "| Switch | 12.00 ± 2.00 | 25.00% ± 0.00% |\n"
    assert filled.startswith(f"{TABLE}| method | here         | unserved       |\n")
    assert filled.endswith(f"|\n{row}\nWords.\n")
    assert filled == render.fill(filled, tmp_path)
    with pytest.raises(ValueError, match="no such row or column; there are method, experts, paper, OWT"):
        render.fill(TABLE.replace("ours", "theirs"), tmp_path)
    write(tmp_path / "train_lm" / "demo-router=switch.json", result)
    with pytest.raises(ValueError, match=r"demo-router=switch\.json has seed 2, its command 0: run it again"):
        render.fill(TABLE, tmp_path)


def test_rows_of_a_measurement_can_be_chosen(tmp_path):
    write(tmp_path / "bench" / "layer.json", [{"shape": "S1", "ms": 1.5}, {"shape": "S2", "ms": 2.5}])
    write(tmp_path / "analyses" / "gamma.json", {"table": [["shape", "ms"], ["S1", 1.5], ["S2", 2.5]]})
    chosen = render.fill("<!-- bench/layer: shape=S2 | ms -->\n\n", tmp_path)
    assert "| ms   |\n|------|\n| 2.50 |\n" in chosen
    all_rows = render.fill("<!-- analyses/gamma: shape | ms -->\n\n", tmp_path)
    assert "| S1    | 1.5 |\n| S2    | 2.5 |\n" in all_rows


@pytest.mark.parametrize(
    "scores, ends, verdict",
    [
        ([2, 4, 6], [-0.484, 4.484], "level"),
        ([2, 3.1, 4.2], [0.852, 1.348], "holds"),
        ([0, 0.9, 2.1], [-1.248, -0.752], "the opposite"),
    ],
)
def test_an_effect_is_the_mean_difference_of_seeds_with_its_interval(tmp_path, scores, ends, verdict):
    """Of three seeds the t-interval reaches 4.3027 standard errors; p of two degrees is 1 - t / sqrt(2 + t^2)."""
    pytest.importorskip("scipy")
    records = []
    for seed, F1, dense in zip(claims.SEEDS, scores, [1, 2, 3]):
        records.append({"run": f"out/train_lm/demo{seed}", "F1": F1})
        records.append({"run": f"out/train_lm/demo{seed}-router=dense", "F1": dense})
    write(tmp_path / "analyses" / "tags.json", {"records": records})
    pair = {"ours": "train_lm/demo{}", "other": "train_lm/demo{}-router=dense"}
    pair |= {"number": "tags: F1", "unit": "points more of BLEU, F1 or accuracy"}
    found = claims.effect(tmp_path, pair | {"where": "here", "paper": [70, 72]})
    assert found["ends"] == pytest.approx(ends, abs=1e-3)
    assert found["mean"] == pytest.approx([sum(ends) / 2], abs=1e-3)
    assert found["paper"] == [2]
    assert found["verdict"] == verdict
    if verdict == "level":
        assert found["words"] == "here: +2 (-0.48 to +4.5, p 0.074)"


def test_what_is_damaged_or_missing_is_one_clear_line(root, capsys):
    file = root / "results" / "train_lm" / "demo-router=dense-dtype=float32.json"
    for text in ('{"test": {', "[]", '{"name": "demo"}'):
        file.write_text(text)
        assert "demo-router=dense-dtype=float32.json is not what its script writes today" in refused(capsys, root)
    shutil.copy(RESULTS / "train_lm" / file.name, file)
    (root / "results" / "bench" / "layer.json").unlink()
    assert "layer.json is missing: measure it" in refused(capsys, root)
    for file in root.glob("results/train_mlm/*seed=*"):
        file.unlink()
    assert "have no two seeds in common: no interval" in refused(capsys, root)
