"""One page of HTML with all that was found: tables beside the papers' numbers, curves, figures, benchmarks, notes.

    python analyze.py report              out/report.html, from what is under out/ and results/

The page needs no other file and no network; what it looks like is in report.html. What cannot be read is named on it,
and stops nothing.
"""

import base64
import importlib
import json
import math
import re
import string
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from xml.etree import ElementTree

import measures
import runs
from results import render

PAGE = string.Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
# Of each script, what is drawn over the steps: a title, and where it stands in a line of metrics.jsonl.
CURVES = {
    "train_lm": {"training loss": "train_loss", "validation, bits per byte": "bpb"},
    "train_mlm": {"training loss": "train_loss", "validation perplexity": "ppl"},
    "train_electra": {
        "training loss": "train_loss",
        "masked tokens of held-out sentences right": "held_out.sentences.generator",
        "loss saved on replaced tokens": "held_out.sentences.saved",
        "held-out translations found": "held_out.retrieval",
    },
    "train_mt": {"training loss": "train_loss", "validation perplexity": "ppl", "validation BLEU": "bleu"},
    "finetune_xtreme": {"training loss": "train_loss", "English accuracy": "accuracy", "English F1": "f1"},
}
LARGE = 2 << 20  # bytes of an SVG, from which its PNG is shown
STYLES = ("", "6 3", "2 3")  # of lines, when all colours are used


class Run(NamedTuple):
    """What a run has left, of `place`, one of the two folders."""

    place: str
    name: str
    result: dict
    records: list[dict]  # evaluations


class Left:
    """Files that cannot be read, or are no part of the project, with the reason."""

    def __init__(self):
        self.out = {}  # (file, reason): None, each once

    @contextmanager
    def reading(self, file: Path):
        try:
            yield
        except Exception as error:  # damage shows itself in a dozen ways
            words = " ".join(str(error).split())
            known = isinstance(error, ValueError | OSError)
            self.add(file, words if known else f"not what its script writes today ({error!r})")

    def add(self, file: Path, reason: str):
        self.out[str(file), reason.removeprefix(f"{file} ").removeprefix("is ")] = None


@dataclass
class Report:
    """One page of HTML with all that was found: tables beside the papers', curves, figures, benchmarks and notes."""

    folder: str = "out"  # runs, figures and benchmarks
    results: str = "results"  # results that are kept, and notes
    out: str = "out/report.html"  # the page, which needs no other file and no network


def write(options: Report):
    """Writes the page. ValueError where neither folder has anything to show."""
    sections, left = [], Left()
    folder, results, out = options.folder, options.results, options.out
    places = [Path(folder), Path(results)]
    if not any(place.is_dir() for place in places):
        raise ValueError(f"neither {folder} nor {results} is a folder: train first, such as by python train_lm.py")
    for script in CURVES:
        sections += script_section(script, *places, left)
    sections += figures_section(places[0] / "figures", left)
    sections += analyses_section(places[1], left)
    sections += bench_section(*places, left)
    sections += notes_section(places[1] / "notes", left)
    known = {*CURVES, "figures", "bench", "report.html", Path(out).name}
    for path in sorted(places[0].iterdir()) if places[0].is_dir() else ():
        if path.name not in known and path.suffix != ".json":
            left.add(path, "not of this project")
    if left.out:
        items = [f"<li><code>{escape(file)}</code>: {escape(reason)}</li>" for file, reason in left.out]
        sections.append(("left-out", "Left out", f"<ul>{''.join(items)}</ul>"))
    if not sections:
        raise ValueError(f"{folder} and {results} hold nothing to show: train first, such as by python train_lm.py")
    contents, bodies = [], []
    for name, title, body in sections:
        contents.append(f'<li><a href="#{name}">{escape(title)}</a></li>')
        bodies.append(f'<section id="{name}">\n<h2>{escape(title)}</h2>\n{body}\n</section>')
    folders = " and ".join(f"<code>{escape(str(place))}</code>" for place in places if place.is_dir())
    page = PAGE.substitute(folders=folders, contents="\n".join(contents), sections="\n".join(bodies))
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(page, encoding="utf-8", errors="backslashreplace")
    print(f"written to {out}: {', '.join(title for _, title, _ in sections)}")


# ---------------------------------------------------------------------------------------------------------------------
# Runs of a script


def script_section(script: str, folder: Path, results: Path, left: Left) -> list[tuple[str, str, str]]:
    """[name, title, HTML] of a script; [] where it has no runs."""
    module = importlib.import_module(script)
    found = [run for run in find_runs(script, folder, results, left) if sound(run, module, left)]
    if not found:
        return []
    parts = [f"<p>{escape(module.__doc__.splitlines()[0])}</p>"]
    for place in dict.fromkeys(run.place for run in found):
        parts += paper_tables(script, module, place, {run.name: run for run in found if run.place == place}, left)
    parts += ["<h3>Over the steps</h3>", *curves(script, found)]
    parts += ["<h3>All runs</h3>", all_runs(found, module)]
    for file in sorted((results / "notes").glob(f"{script}-*.md")):
        parts.append(note(file, left))
    return [(script, f"{script}.py", "\n".join(parts))]


def find_runs(script: str, folder: Path, results: Path, left: Left) -> Iterator[Run]:
    for path in sorted((folder / script).glob("*")):
        evaluated = sorted(path.glob("eval-*.json"))  # of train_lm.py: a trained model, routed otherwise
        log, file = path / "metrics.jsonl", path / "result.json"
        if not any(part.exists() and part.stat().st_size for part in (log, file, *evaluated)):
            left.add(path, "no run that has been evaluated")
            continue
        yield Run(str(folder), path.name, read_result(file, left), read_log(log, left))
        for file in evaluated:
            yield Run(str(folder), f"{path.name}-{file.stem}", read_result(file, left), [])
    for file in sorted((results / script).glob("*.json")):
        yield Run(str(results), file.stem, read_result(file, left), read_log(file.with_suffix(".metrics.jsonl"), left))


def read_result(file: Path, left: Left) -> dict:
    """{} where there is none."""
    with left.reading(file):
        result = runs.read_json(file)
        if not isinstance(result, dict) or file.exists() and not result:
            raise ValueError("is not a result")
        return result
    return {}


def read_log(file: Path, left: Left) -> list[dict]:
    """The evaluations that can be read."""
    records = []
    if file.exists():
        with left.reading(file):
            for line in file.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                record["step"] / 1
                records.append(record)
    return records


def sound(run: Run, module: ModuleType, left: Left) -> bool:
    """Whether there is something to show of it: evaluations, or a result that its script reads."""
    if run.result:
        with left.reading(Path(run.place, module.__name__, run.name)):
            row_of(run, module)
            render.effort([[run.result]])
            return True
        return False
    return bool(run.records)


def row_of(run: Run, module: ModuleType) -> dict[str, str]:
    """{header: cell} of a finished run."""
    return {header: runs.mean_cell([cell]) for header, cell in module.cells(run.result).items()}


def paper_tables(script: str, module: ModuleType, place: str, found: dict[str, Run], left: Left) -> Iterator[str]:
    """Tables of the script that show what `found`, {name: run} of one place, has, beside the paper's numbers."""
    shown, numbers = set(), set()
    for preset, constants in module.PRESETS.items():
        base = module.Config(**{"preset": preset, "seeds": render.SEEDS} | constants)
        for number, make in module.TABLES.items():
            try:
                paper = make(base)
            except ValueError:  # not a table of this preset's kind of model
                continue
            rows, used = [], []
            for _, change in paper.rows:
                names = {}
                for config in runs.seeds_of(base, change):
                    name = render.file_name(config, module.PRESETS).removesuffix(".json")
                    if name in found and found[name].result and measured_with(config, found[name], script, left):
                        names[name] = found[name].result
                rows.append(list(names.values()))
                used += names
            alone = sum(map(bool, rows)) == 1  # a baseline, say, which is a row of several tables
            if set(used) - shown or used and number not in numbers and not alone:
                shown.update(used)
                numbers.add(number)
                given = "" if preset == "demo" else f" --preset {preset}"
                yield f"<h3>{escape(paper.title)}</h3>"
                said = f"<code>python {script}.py --table {number}{given}</code>, runs in <code>{escape(place)}</code>"
                yield f'<p class="of">{said}{escape(render.effort(rows))}</p>'
                yield table_of_markdown(paper.render(rows, module.cells), paper.title)


def measured_with(config, run: Run, script: str, left: Left) -> bool:
    """Whether a run of that name has that config's constants: those of a preset change."""
    difference = render.difference(run.result, config)
    if difference:
        left.add(Path(run.place, script, run.name), f"{difference}: measure it again")
    return not difference


def all_runs(found: list[Run], module: ModuleType) -> str:
    """A row for each run, finished or not."""
    cells = [row_of(run, module) if run.result else {} for run in found]
    headers = list(next(filter(None, cells), {}))
    rows = []
    for run, row in zip(found, cells):
        state = "finished" if run.result else f"at step {run.records[-1]['step']}"
        minutes = f"{run.result['seconds'] / 60:.1f}" if "seconds" in run.result else ""
        rows.append([run.name, run.place, state, *(row.get(header, "") for header in headers), minutes])
    return table(["run", "in", "state", *headers, "minutes"], rows, f"all runs of {module.__name__}.py")


# ---------------------------------------------------------------------------------------------------------------------
# Tables and curves


def table(headers: list[str], rows: list[list[str]], name: str) -> str:
    """A table that can be sorted by any column, in a box of its own that scrolls."""
    head = "".join(f'<th scope="col"><button type="button">{escape(header)}</button></th>' for header in headers)
    lines = []
    for row in rows:
        cells = []
        for cell in row:
            number = re.match(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?", cell)
            value = f' data-value="{number[0].replace(",", "")}"' if number else ""
            cells.append(f"<td{value}>{escape(cell)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    box = f'<div class="box" tabindex="0" role="region" aria-label="{escape(name)}">'
    return f"{box}<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"


def table_of_markdown(text: str, name: str) -> str:
    headers, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return table(headers, rows, name)


def curves(script: str, found: list[Run]) -> Iterator[str]:
    """A chart for each of the script's CURVES, and which line is whose."""
    logged = [run for run in found if run.records]
    if not logged:
        return
    yield '<div class="curves">'
    for title, path in CURVES[script].items():
        lines = []
        for number, run in enumerate(logged):
            points = [(record["step"], value_at(record, path)) for record in run.records]
            lines.append((number, run.name, [(x, y) for x, y in points if y is not None]))
        yield chart(title, [line for line in lines if line[2]])
    yield '</div>\n<ul class="legend">'
    for number, run in enumerate(logged):
        key = f'<svg viewBox="0 0 30 10"><path class="key" {style(number)} d="M0 5H30"/></svg>'
        yield f"<li>{key}{escape(run.name)} <small>in {escape(run.place)}</small></li>"
    yield "</ul>"


def value_at(record: dict, path: str) -> float | None:
    """A finite number of an evaluation; of a list by layers that of the middle one."""
    for name in path.split("."):
        record = record.get(name) if isinstance(record, dict) else None
    if isinstance(record, list) and record:
        record = record[measures.middle_layer(len(record) - 1)]
    return record if type(record) in (int, float) and math.isfinite(record) else None


def style(number: int) -> str:
    """Seven colours, then the same dashed."""
    color = f"var(--{number % 7})"
    return f'stroke="{color}" fill="{color}" stroke-dasharray="{STYLES[number // 7 % len(STYLES)]}"'


def chart(title: str, lines: list[tuple[int, str, list[tuple[float, float]]]]) -> str:
    """A figure of (number of the style, name, points) against the steps; "" where there are none."""
    if not lines:
        return ""
    every = [point for *_, points in lines for point in points]
    last, values = max(max(x for x, _ in every), 1), [y for _, y in every]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    parts = []
    for part in range(5):
        y = 180 - 42 * part
        parts.append(f'<path class="rule" d="M52 {y}H352"/>')
        parts.append(f'<text x="46" y="{y + 4}" text-anchor="end">{low + (high - low) * part / 4:.4g}</text>')
    for part in range(3):
        parts.append(f'<text x="{52 + 150 * part}" y="198" text-anchor="middle">{last * part / 2:,.0f}</text>')
    for number, name, points in lines:
        places = [(52 + 300 * x / last, 180 - 168 * (y - low) / (high - low)) for x, y in points]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in places)
        said = f"<title>{escape(name)}: {points[-1][1]:.4g} at step {points[-1][0]:,}</title>"
        parts.append(f'<g {style(number)}>{said}<polyline points="{drawn}"/>{dots}</g>')
    label = escape(title)
    svg = f'<svg viewBox="0 0 372 204" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f"<figure>{svg}<figcaption>{label}</figcaption></figure>"


# ---------------------------------------------------------------------------------------------------------------------
# Figures, benchmarks, notes


def figures_section(folder: Path, left: Left) -> list[tuple[str, str, str]]:
    parts = []
    stems = {file.with_suffix("") for file in folder.glob("*") if file.suffix in (".svg", ".png")}
    for stem in sorted(stems):
        for file in pictures(stem):
            with left.reading(file):
                parts.append(figure(file, left))
                break
    for file in sorted(folder.glob("*")):
        if file.suffix not in (".svg", ".png", ".json", ".html"):
            left.add(file, "no figure")
    return [("figures", "Figures", "\n".join(parts))] if parts else []


def pictures(stem: Path) -> list[Path]:
    """The files of a figure that are there, the better one first: an SVG is sharp at any size, a large one is slow."""
    svg, png = (stem.parent / f"{stem.name}{ending}" for ending in (".svg", ".png"))
    order = (png, svg) if svg.exists() and svg.stat().st_size > LARGE else (svg, png)
    return [file for file in order if file.exists()]


def figure(file: Path, left: Left) -> str:
    """An image inside the page, with the caption that analyze.py keeps. Raises an error where the file is damaged."""
    data, kind = file.read_bytes(), "png"
    if file.suffix == ".svg":
        ElementTree.fromstring(data)
        kind = "svg+xml"
    elif not (data.startswith(b"\x89PNG") and data.endswith(b"IEND\xaeB`\x82")):
        raise ValueError("is not a whole PNG")
    numbers, caption = file.with_suffix(".json"), ""
    with left.reading(numbers):
        caption = str(runs.read_json(numbers).get("caption", ""))
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    image = f'<img class="figure" alt="{escape(caption or file.stem)}" src="{source}">'
    return f"<h3>{escape(file.stem)}</h3>\n<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def bench_section(folder: Path, results: Path, left: Left) -> list[tuple[str, str, str]]:
    """What `bench.py --json` has written: in `folder`, or in a folder bench of either."""
    parts = []
    for file in [*sorted(folder.glob("*.json")), *sorted(folder.glob("bench/*")), *sorted(results.glob("bench/*"))]:
        with left.reading(file):
            records = runs.read_json(file)
            if not isinstance(records, list) or not records:
                raise ValueError("is no list of records of bench.py")
            title, *tables = render.BENCHES.get(file.stem, (file.stem, ""))
            plain = [name for name, value in records[0].items() if isinstance(value, str | int | float)]
            shown = []
            for columns in [words.split() or plain for words in tables]:
                shown.append(table(columns, render.rows_of_records(records, columns), title))
            parts.append(f'<h3>{escape(title)}</h3>\n<p class="of"><code>{escape(str(file))}</code></p>')
            parts += shown
    if parts:
        parts += [note(file, left) for file in sorted((results / "notes").glob("bench*.md"))]
    return [("bench", "Benchmarks", "\n".join(parts))] if parts else []


def analyses_section(results: Path, left: Left) -> list[tuple[str, str, str]]:
    """Tables of what analyze.py has measured, as they are kept."""
    parts = []
    for name, title in render.ANALYSES.items():
        file = results / "analyses" / f"{name}.json"
        with left.reading(file):
            if file.exists():
                command, headers, rows = render.read_analysis(file)
                parts.append(f'<h3>{escape(title)}</h3>\n<p class="of"><code>{escape(command)}</code></p>')
                parts.append(table(headers, [[*map(str, row)] for row in rows], title))
                parts.append(note(results / "notes" / f"analysis-{name}.md", left))
    return [("analyses", "Trained models, measured again", "\n".join(parts))] if parts else []


def notes_section(folder: Path, left: Left) -> list[tuple[str, str, str]]:
    """The notes that are about no script alone."""
    of = (*(f"{script}-" for script in CURVES), *(f"analysis-{name}." for name in render.ANALYSES), "bench")
    parts = [note(file, left) for file in sorted(folder.glob("*.md")) if not file.name.startswith(of)]
    return [("notes", "Notes", "\n".join(parts))] if parts else []


def note(file: Path, left: Left) -> str:
    """A note as the text it is, but for tables, and lines that are as long as the page is wide."""
    parts = []
    with left.reading(file):
        for block in file.read_text(encoding="utf-8").strip().split("\n\n"):
            if block.startswith("| ") and block.count("\n") > 1:
                parts.append(table_of_markdown(block, file.stem))
            else:
                text = re.sub(r"\n(?!- )\s*", " ", block)
                parts.append(f'<p class="note">{escape(text)}</p>')
    return f"<details><summary>Note: {escape(file.stem)}</summary>\n{''.join(parts)}</details>"
