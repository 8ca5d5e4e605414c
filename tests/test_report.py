"""`analyze.py report`: tables, curves, figures, notes and benchmarks; damaged files; the page in a browser."""

import base64
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers import in_chromium, table_rows
from test_analyze import refused, run

import runs
import train_lm
from figures import report
from results import render

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'
SIZE = {"ppl": 50.0, "bpb": 2.0, "layers": []}
RESULT = {"test": SIZE, "test_no_limit": SIZE, "parameters": {"total": 2e6}, "seconds": 90.0}
RESULT["machine"] = dict(device="a CPU", threads=1, dtype="float32", torch="2")


class Page(HTMLParser):
    """What is on a page: tables as {name: rows of (text, value)}, images, and the text of each section."""

    def __init__(self, html: str):
        super().__init__()
        self.html, self.tables, self.images, self.sections = html, [], [], {}
        self.tags, self.section, self.cell = [], "", None
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        if tag == "section":
            self.section = attributes["id"]
        elif tag == "div" and attributes.get("role") == "region":
            self.tables.append((attributes["aria-label"], []))
        elif tag == "tr":
            self.tables[-1][1].append([])
        elif tag in ("td", "th"):
            self.cell = ["", attributes.get("data-value")]
            self.tables[-1][1][-1].append(self.cell)
        elif tag == "img":
            self.images.append((attributes["src"], attributes["alt"]))

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.cell = None
        if tag == "section":
            self.section = ""

    def handle_data(self, data):
        self.sections[self.section] = self.sections.get(self.section, "") + data
        if self.cell:
            self.cell[0] += data

    def table(self, name: str) -> list[list[str]]:
        """Headers and rows of the first table of that name."""
        rows = next(rows for title, rows in self.tables if name in title)
        return [[text for text, _ in row] for row in rows]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def page(place, monkeypatch):
    """Writes the report of this folder, and reads it."""

    def write() -> Page:
        run(monkeypatch, "report")
        return Page((place / "out" / "report.html").read_text(encoding="utf-8"))

    return write


def keep(folder: Path, name: str, content) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def a_run(folder: Path, name: str, steps: int = 2, **changes) -> Path:
    """A finished run of train_lm.py that nobody has trained."""
    log = [{"step": 10 * i, "train_loss": 5.0 - i, "bpb": 3.0 - i / 2} for i in range(1, 1 + steps)]
    keep(folder, f"{name}/metrics.jsonl", "".join(json.dumps(record) + "\n" for record in log))
    config = runs.identity(train_lm.Config(**changes))
    return keep(folder, f"{name}/result.json", RESULT | {"config": config}).parent


# ---------------------------------------------------------------------------------------------------------------------
# Tables


@pytest.mark.parametrize("script, preset, number", [row for row in render.TABLES if row[2] and len(row) == 3])
def test_tables_are_those_of_the_results_page(script, preset, number, place, page):
    shutil.copytree(render.RESULTS, place / "results")
    title, _, table, _ = render.table_of_runs(render.RESULTS, script, preset, number)
    shown = []  # other presets may have a table of that title
    for of, rows in page().tables:
        if title.removeprefix("## ").startswith(of):
            shown.append([[text for text, _ in row] for row in rows])
    assert [[cell.strip() for cell in table.splitlines()[0].split("|")[1:-1]], *table_rows(table)] in shown


def test_runs_stand_beside_the_papers_numbers(place, page, monkeypatch):
    out = place / "out" / "train_lm"
    a_run(out, "demo-router=dense", router="dense")
    other = json.loads((a_run(out, "demo-router=dense-seed=1", router="dense", seed=1) / "result.json").read_text())
    other["test"]["ppl"] = 60.0
    keep(out, "demo-router=dense-seed=1/result.json", other)
    found = page()
    assert [name for name, _ in found.tables] == [train_lm.table1(train_lm.Config()).title, "all runs of train_lm.py"]
    headers, dense, switch, *_ = found.table("XMoE table 1")
    row = dict(zip(headers, dense))
    assert (row["method"], row["paper, OWT"], row["ours"], row["params, M"]) == (
        "dense",
        "22.61",
        "55.00 ± 7.07",
        "2.0 ± 0.0",
    )
    assert dict(zip(headers, switch))["paper, OWT"] == "20.11" and not dict(zip(headers, switch))["ours"]
    assert "python train_lm.py --table 1, runs in out; 3 minutes of training; a CPU" in found.sections["train_lm"]


def test_every_run_has_a_row(place, page):
    out = place / "out" / "train_lm"
    a_run(out, "demo-steps=500", steps=3)
    (a_run(out, "demo-steps=600", steps=2) / "result.json").unlink()
    keep(out, "demo-steps=500/eval-t=0.5-gamma=2.0.json", {"name": "demo-steps=500"} | RESULT)
    keep(place, "results/train_lm/demo-steps=700.json", RESULT)
    headers, *rows = page().table("all runs of train_lm.py")
    assert headers[:3] == ["run", "in", "state"] and headers[-1] == "minutes"
    assert [row[:3] for row in rows] == [
        ["demo-steps=500", "out", "finished"],
        ["demo-steps=500-eval-t=0.5-gamma=2.0", "out", "finished"],
        ["demo-steps=600", "out", "at step 20"],
        ["demo-steps=700", "results", "finished"],
    ]
    ours = headers.index("ours")
    assert [row[ours] for row in rows] == ["50.00", "50.00", "", "50.00"] and rows[0][-1] == "1.5"


def test_a_trained_model_that_is_routed_otherwise_has_its_row(place, page):
    """Of XMoE's table 2, whose rows below 1.00x are evaluations."""
    out, base = place / "out" / "train_lm", train_lm.Config()
    (_, change) = train_lm.table2(base).rows[2]
    (config,) = runs.seeds_of(base, change)
    a_run(out, runs.run_name(config, train_lm.PRESETS), **change | {"eval_only": False})
    file = render.file_name(config, train_lm.PRESETS).replace("-eval-", "/eval-")
    keep(out, file, RESULT | {"test": SIZE | {"ppl": 77.0}})
    headers, *rows = page().table("XMoE table 2")
    assert [dict(zip(headers, row))["ours"] for row in rows if row[1]][:3] == ["50.00", "77.00", ""]


def test_runs_of_finetuning_have_their_tables(place, page):
    import finetune_xtreme as script

    base = script.Config(**{"preset": "xmoe-xnli"} | script.PRESETS["xmoe-xnli"])
    labels, change = next(row for row in script.TABLES["1"](base).rows if row[0][:2] == ("X-MoE, softmax", "xnli"))
    (config,) = runs.seeds_of(base, change)
    result = {"mean": {"accuracy": 61.5}, "guess": {"accuracy": 33.3}, "languages": {"en": {"accuracy": 70.0}}}
    result |= {"counting": {}, "gap": {"accuracy": 8.5}, "valid": {"accuracy": 71.0}, "config": runs.identity(config)}
    keep(place, f"out/finetune_xtreme/{runs.run_name(config, script.PRESETS)}/result.json", result)
    found = page()
    headers, *rows = found.table("X-MoE table 1: XTREME")
    (row,) = [row for row in rows if row[:2] == ["X-MoE, softmax", "xnli"]]
    assert row[2:4] == [labels[2], "61.5"]
    assert len([name for name, _ in found.tables if name == "X-MoE table 1: XTREME"]) == 1  # not one for each task


def test_a_run_of_other_constants_is_in_no_paper_table(place, page):
    a_run(place / "out" / "train_lm", "demo", learning_rate=0.5)
    found = page()
    assert [name for name, _ in found.tables] == ["all runs of train_lm.py"]
    assert "out/train_lm/demo: has learning_rate 0.5, its row in the tables 0.003" in found.sections["left-out"]


def test_cells_are_sorted_by_their_numbers():
    cells = ["1,025", "-0.5", "9.1% ± 0.4%", "8.30e+19", "32 x 128", "XMoE", "", "1.00x", "<b>", "67.3/51.1", "inf"]
    (_, rows) = Page(report.table(["any"], [[cell] for cell in cells], "a <table>")).tables[0]
    values = ["1025", "-0.5", "9.1", "8.30e+19", "32", None, None, "1.00", None, "67.3", None]
    assert rows[1:] == [[[cell, value]] for cell, value in zip(cells, values)]


# ---------------------------------------------------------------------------------------------------------------------
# Curves, figures, notes, benchmarks


def test_curves_are_the_logs(place, page):
    a_run(place / "out" / "train_lm", "demo", steps=3)
    html = page().html
    loss, bits = re.findall(r'<polyline points="([^"]*)"', html)
    # 300 wide from 52 on, for steps 0 to 30; 168 high from 180 upwards, for losses 2 to 4
    assert loss == "152.0,12.0 252.0,96.0 352.0,180.0" == bits
    assert "<title>demo: 2 at step 30</title>" in html
    assert ">2</text>" in html and ">4</text>" in html and ">30</text>" in html


def test_what_is_no_number_is_not_drawn():
    record = {"a": {"b": 1.5, "layers": [1.0, 2.0, 3.0, 4.0, 5.0]}, "nan": float("nan"), "yes": True, "text": "1"}
    assert report.value_at(record, "a.b") == 1.5 and report.value_at(record, "a.layers") == 4.0
    for path in ("a", "a.c", "a.b.c", "nan", "yes", "text", "nothing"):
        assert report.value_at(record, path) is None
    assert report.chart("empty", []) == ""
    assert "nan" not in report.chart("flat", [(0, "x", [(0, 1.0)])])


def test_every_curve_is_in_what_scripts_log():
    log = (render.RESULTS / "train_electra" / "demo.metrics.jsonl").read_text().splitlines()
    for path in report.CURVES["train_electra"].values():
        assert all(report.value_at(json.loads(line), path) is not None for line in log)


def test_figures_are_inside_the_page(place, page):
    folder = place / "out" / "figures"
    keep(folder, "both.svg", SVG)
    keep(folder, "both.png", PNG)
    keep(folder, "both.json", {"caption": "what <both> show"})
    keep(folder, "large.svg", SVG.replace("<rect", " " * report.LARGE + "<rect"))
    keep(folder, "large.png", PNG)
    keep(folder, "one.2.png", PNG)
    found = page()
    data = [(kind, base64.b64decode(text)) for kind, text in (src.split(";base64,") for src, _ in found.images)]
    assert data == [("data:image/svg+xml", SVG.encode()), ("data:image/png", PNG), ("data:image/png", PNG)]
    assert [alt for _, alt in found.images] == ["what <both> show", "large", "one.2"]
    assert found.html.count("what &lt;both&gt; show") == 2


def test_benchmarks_and_notes(place, page):
    shutil.copytree(render.RESULTS, place / "results")
    record = {"shape": "S9", "impl": "a|b", "ms": 1234.5, "machine": {"device": "x"}}
    keep(place, "out/mine.json", [record])
    found = page()
    assert found.table("mine") == [["shape", "impl", "ms"], ["S9", "a|b", "1,234"]]
    for name, (title, *tables) in render.BENCHES.items():
        shown = [[[text for text, _ in row] for row in rows[1:]] for of, rows in found.tables if of == title]
        file = render.RESULTS / "bench" / f"{name}.json"
        assert shown == [table_rows(render.table_of_records(file, columns.split())) for columns in tables]
    for name, title in render.ANALYSES.items():
        _, headers, rows = render.read_analysis(render.RESULTS / "analyses" / f"{name}.json")
        assert found.table(title) == [headers, *([*map(str, row)] for row in rows)]
    text = " ".join("".join(found.sections.values()).split())
    for file in (render.RESULTS / "notes").glob("*.md"):
        for block in file.read_text().split("\n\n"):
            if not block.startswith("| "):
                assert " ".join(block.split()) in text, file
            else:
                shown = [rows[1:] for title, rows in found.tables if title == file.stem]
                assert table_rows(block) in [[[text for text, _ in row] for row in rows] for rows in shown]
    assert "train_lm-1" in found.sections["train_lm"] and "unreproduced" in found.sections["notes"]


# ---------------------------------------------------------------------------------------------------------------------
# What is damaged, foreign or hostile

SCALE = json.loads((render.RESULTS / "bench" / "scale.json").read_text())
DAMAGED = {  # a file, what is in it, what the page says
    "torn": ("train_lm/x/result.json", '{"test": {', "out/train_lm/x/result.json: not readable JSON"),
    "deep": ("train_lm/x/result.json", "[" * 100_000, "out/train_lm/x/result.json: not "),
    "a list": ("train_lm/x/result.json", "[]", "out/train_lm/x/result.json: not a result"),
    "empty": ("train_lm/x/result.json", "{}", "out/train_lm/x/result.json: not a result"),
    "no lines": ("train_lm/x/metrics.jsonl", "", "out/train_lm/x: no run that has been evaluated"),
    "of another script": ("train_lm/x/result.json", {"name": "x"}, "out/train_lm/x: not what its script writes today"),
    "no numbers": ("train_lm/x/result.json", RESULT | {"test": SIZE | {"ppl": "no"}}, "out/train_lm/x: "),
    "no time": ("train_lm/x/result.json", RESULT | {"seconds": None}, "out/train_lm/x: not what its script writes"),
    "log": ("train_lm/x/metrics.jsonl", b'{"step": 1}\n{"st\xff', "out/train_lm/x/metrics.jsonl: "),
    "no steps": ("train_lm/x/metrics.jsonl", "[1]\n", "out/train_lm/x/metrics.jsonl: not what its script writes"),
    "no run": ("train_lm/x/notes.txt", "a", "out/train_lm/x: no run that has been evaluated"),
    "no folder": ("train_lm/x", "a", "out/train_lm/x: no run that has been evaluated"),
    "folder": ("<b>mine/x", "a", "out/<b>mine: not of this project"),
    "SVG": ("figures/x.svg", SVG[:-9], "out/figures/x.svg: "),
    "PNG": ("figures/x.png", PNG[:-5], "out/figures/x.png: not a whole PNG"),
    "caption": ("figures/good.json", "{", "out/figures/good.json: not readable JSON"),
    "figure": ("figures/x.pdf", "a", "out/figures/x.pdf: no figure"),
    "bench": ("bench/layer.json", [{"shape": "S1"}], "out/bench/layer.json: not what its script writes"),
    "half of a bench": (
        "bench/scale.json",
        [record for record in SCALE if "processes" in record],
        "out/bench/scale.json: not what its script writes",
    ),
    "no bench": ("x.json", {"a": 1}, "out/x.json: no list of records"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_cannot_be_read_is_named_and_stops_nothing(case, place, page):
    name, content, said = DAMAGED[case]
    a_run(place / "out" / "train_lm", "demo")
    keep(place, "out/figures/good.svg", SVG)
    keep(place, f"out/{name}", content)
    found = page()
    assert said in found.sections["left-out"] and found.tags.count("li") == 5  # contents 3, legend 1, the file
    assert [row[0] for row in found.table("all runs")[1:]] == ["demo"] and len(found.images) == 1


def test_a_damaged_figure_gives_way_to_its_other_file(place, page):
    keep(place, "out/figures/x.svg", SVG[:-9])
    keep(place, "out/figures/x.png", PNG)
    found = page()
    assert [src[:14] for src, _ in found.images] == ["data:image/png"] and "out/figures/x.svg" in found.sections[
        "left-out"
    ]


def test_whole_lines_of_a_torn_log_are_drawn(place, page):
    log = a_run(place / "out" / "train_lm", "demo", steps=3) / "metrics.jsonl"
    log.write_text(log.read_text()[:-20])
    assert re.findall(r'<polyline points="([^"]*)"', page().html)[0] == "202.0,12.0 352.0,180.0"


def test_names_are_text(place, page):
    """What a folder is called, or a file says, is no HTML."""
    hostile = "<script>alert(1)<b> & \"'"
    a_run(place / "out" / "train_lm", "<b>")
    a_run(place / "out" / "train_lm", hostile.replace("/", ""))
    keep(place, "results/notes/<i>.md", hostile)
    keep(place, "out/bench/<i>.json", [{"<i>": hostile}])
    keep(place, "out/figures/<i>.svg", SVG)
    keep(place, "out/figures/<i>.json", {"caption": hostile})
    found = page()
    assert found.tags.count("script") == 1 and not {"b", "i"} & set(found.tags)
    assert [row[0] for row in found.table("all runs")[1:]] == ["<b>", hostile]
    assert found.table("<i>") == [["<i>"], [hostile]] and hostile in found.sections["notes"]
    assert found.images[0][1] == hostile


def test_a_name_that_is_no_text_is_shown_all_the_same(place, page):
    a_run(place / "out" / "train_lm", "demo")
    (place / "out" / "x\udcff").write_text("a name of bytes that are not UTF-8")
    assert "x\\udcff: not of this project" in page().sections["left-out"]


def test_nothing_is_fetched(place, page):
    shutil.copytree(render.RESULTS, place / "results")
    keep(place, "out/figures/x.png", PNG)
    found = page()
    assert not {"link", "iframe", "object", "base"} & set(found.tags)
    style, script = (re.search(rf"<{tag}>(.*?)</{tag}>", found.html, re.S)[1] for tag in ("style", "script"))
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch|XMLHttp", style + script.replace("// Numbers", ""))
    assert all(address.startswith("#") for address in re.findall(r'href="([^"]*)"', found.html))
    assert all(address.startswith("data:image/") for address in re.findall(r'src="([^"]*)"', found.html))
    for address in re.findall(r'href="#([^"]*)"', found.html):
        assert f'<section id="{address}">' in found.html


def test_nothing_to_show_is_one_clear_line(place, monkeypatch, capsys):
    assert "neither out nor results is a folder: train first" in refused(monkeypatch, capsys, "report")
    (place / "out").mkdir()
    assert "out and results hold nothing to show: train first" in refused(monkeypatch, capsys, "report")
    a_run(place / "elsewhere" / "train_lm", "demo")
    run(monkeypatch, "report", "--folder", "elsewhere", "--out", "new/page.html")
    assert "demo" in (place / "new" / "page.html").read_text()
    (place / "file").write_text("in the way")
    assert "file" in refused(monkeypatch, capsys, "report", "--folder", "elsewhere", "--out", "file/page.html")


def test_a_report_is_no_part_of_the_next_one(place, page):
    a_run(place / "out" / "train_lm", "demo")
    assert page().html == page().html


# ---------------------------------------------------------------------------------------------------------------------
# In a browser


ACTS = """
const found = {}
const table = document.querySelector("section table"), button = n => table.tHead.rows[0].cells[n].firstChild
const column = n => [...table.tBodies[0].rows].map(row => row.cells[n].textContent)
const back = () => getComputedStyle(document.body).backgroundColor
found.images = [...document.images].map(image => image.complete && image.naturalWidth > 0)
found.wide = document.documentElement.scrollWidth - innerWidth
found.before = column(2)
button(2).click(); found.up = column(2); found.sorted = table.tHead.rows[0].cells[2].ariaSort
button(2).click(); found.down = column(2); found.turned = table.tHead.rows[0].cells[2].ariaSort
button(0).click(); found.names = column(0); found.other = table.tHead.rows[0].cells[2].ariaSort
const ours = [...table.tHead.rows[0].cells].findIndex(cell => cell.textContent == "ours")
button(ours).click(); button(ours).click(); found.ours = column(ours)
button(1).focus(); found.focus = document.activeElement == button(1)
found.theme = back()
document.getElementById("theme").click(); found.switched = back()
document.getElementById("theme").click(); found.again = back()
"""


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_in_a_browser(width, place, page):
    shutil.copytree(render.RESULTS, place / "results")
    a_run(place / "out" / "train_lm", "demo-steps=500")
    keep(place, "out/figures/x.png", PNG)
    keep(place, "out/figures/y.svg", SVG)
    page()
    found = in_chromium(place / "out" / "report.html", ACTS, width)
    assert found["errors"] == [] and found["images"] == [True, True] and found["wide"] <= 0
    paper = ["22.61", "20.11", "21.27", "20.49", "19.81", "19.75", "19.79", "19.57", "19.49", "19.46"]
    assert found["before"] == paper and (found["sorted"], found["turned"]) == ("ascending", "descending")
    assert found["up"] == sorted(paper, key=float) and found["down"] == found["up"][::-1]
    assert found["names"] == sorted(found["names"], key=str.lower) and found["other"] is None
    filled = [float(cell.split()[0]) for cell in found["ours"] if cell]
    assert found["ours"][len(filled) :] == [""] * (len(paper) - len(filled)) and filled == sorted(filled, reverse=True)
    assert found["focus"] and found["theme"] == found["again"] != found["switched"]
