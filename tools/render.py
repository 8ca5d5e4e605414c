"""Fills the tables of README.md and results/*.md with results/*.jsonl, and draws the pages' pictures.

    python tools/render.py                            update pages and pictures
    python tools/render.py --add out/train_lm/demo    add a finished run to results/train_lm.jsonl, then update
    python tools/render.py --check                    exit with status 1 if a page or picture is out of date

--add also takes the JSON files of `train_lm.py --eval_only true`, analyze.py and tools/bench.py; the last two are named
after their file. An earlier result of the same name is replaced. In a page,

    `python train_lm.py --table 1 --seeds 3` <!-- method | paper, OWT | bits/byte as here -->

is followed by that command's table with these columns, without the rows that have no results. Several commands in a
line share a table, one row each. `<!-- bench/step: shape=encoder | impl | ms -->` shows the rows of `step` in
bench.jsonl whose shape is `encoder`, and `<!-- claims: claim | verdict -->` the claims of tools/claims.py. Everything
else in a page is written by hand.
"""

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's modules

from engine.config import command_line, identity, run_name
from engine.device import clear_errors
from engine.files import from_json, read_json, to_json, write
from engine.table import markdown_table, seeds_of, table_of
from tools.claims import claims, pictures, result_of, results_of

RESULTS = Path(__file__).parents[1] / "results"
COMMAND = r"`python ([\w/]+)\.py([^`]*)`\s"
COLUMNS = r"<!--\s(?:(?P<source>[\w/-]+):\s)?(?P<columns>[^>]*)\s-->"
LINE = re.compile(rf"^(?P<line>(?:{COMMAND})*{COLUMNS})\n+(?:\|.*\n)*\n*", re.M)  # with the table below it


def add_result(folder: Path, path: Path):
    """Adds a run's folder or a JSON file to folder/*.jsonl. Raises ValueError if it holds no result."""
    file = path / "result.json" if path.is_dir() else path
    if not file.exists():
        raise ValueError(f"{file} does not exist: pass the folder of a finished run, or a JSON file")
    result, name = read_json(file), file.stem
    if "command" in result:
        kind = "analyses"
    elif "machine" in result and "results" in result:
        kind = "bench"
    else:
        kind = file.resolve().parent.parent.name
        try:
            importlib.import_module(kind).cells(result)
            name = f"{result['name']}-{name}" if name.startswith("eval-") else result["name"]
        except (ValueError, ImportError, LookupError, TypeError, AttributeError):
            raise ValueError(f"{file} is not a SCRIPT/RUN/result.json as today's scripts write it") from None
    target = folder / f"{kind}.jsonl"
    lines = {from_json(line)["name"]: line for line in target.read_text().splitlines()}
    lines[name] = to_json({"name": name} | result | {"name": name}, indent=None)
    write(target, "".join(f"{lines[key]}\n" for key in sorted(lines)))
    print(f"{name} is in {target}")


def fill(page: str, folder: Path) -> str:
    """The page with up-to-date tables."""
    return LINE.sub(lambda match: f"{match['line']}\n\n{table(folder, **match.groupdict())}\n\n", page)


def table(folder: Path, line: str, source: str | None, columns: str) -> str:
    """The table for a line of a page. Raises ValueError if there is no such row or column."""
    if source == "claims":
        rows = claims(folder)
    elif source:
        rows = measured(folder, source)
    else:
        rows = []
        for script, options in re.findall(COMMAND, line):
            rows += runs(folder, script, options)
    headers = {}  # column of the rows -> header in the page
    for column in " ".join(columns.split()).split(" | "):
        name, _, value = column.partition("=")
        if value:
            rows = [row for row in rows if row[name] == value]
            continue
        name, _, header = column.partition(" as ")
        headers[name] = header or name
    if not rows or headers.keys() - rows[0].keys():
        known = ", ".join(rows[0]) if rows else "no rows"
        raise ValueError(f"{line}: no such row or column; there are {known}")
    cells = [[row[name] for name in headers] for row in rows]
    body = markdown_table([*headers.values()], cells)
    # Claims are sentences: padding them would make very wide lines.
    return re.sub(" +(?= )|-+(?=---)", "", body) if source == "claims" else body


def runs(folder: Path, script: str, options: str) -> list[dict]:
    """The rows of a command that have results, averaged over seeds."""
    module = importlib.import_module(script)
    config = command_line(module.Config, module.PRESETS, shlex.split(options))
    table, rows = table_of(config, module.PRESETS, module.TABLES), []
    for labels, change in table.rows:
        seeds = [*filter(None, (cells_of(folder, one, module) for one in seeds_of(config, change)))]
        if seeds:
            rows.append((labels, seeds))
    return table.lines(rows)


def cells_of(folder: Path, config, module) -> dict | None:
    """The cells of a run, None if it has no result. Raises ValueError if its constants have changed since."""
    name = run_name(config, module.PRESETS)
    if getattr(config, "eval_only", False):  # train_lm.py: a trained model with other constants of evaluation
        name += f"-eval-t={config.eval_threshold}-capacity={config.eval_capacity}"
    run, results = f"{module.__name__}/{name}", results_of(folder)
    if run not in results:
        return None
    for constant, value in identity(config).items():
        recorded = results[run].get("config", {}).get(constant, value)
        if recorded != value:
            raise ValueError(f"{run} has {constant} {recorded}, its command {value}: run it again")
    return module.cells(results[run])


def measured(folder: Path, name: str) -> list[dict]:
    """{header: cell} of each row that analyze.py or tools/bench.py measured."""
    result = result_of(folder, name)
    if "table" in result:
        headers, *rows = result["table"]
        return [dict(zip(headers, row, strict=True)) for row in rows]
    rows = []
    for record in result["results"]:
        rows.append({key: f"{value:.2f}" if isinstance(value, float) else value for key, value in record.items()})
    return rows


def main(add: tuple[Path, ...] = (), check: bool = False, root: Path = RESULTS.parent):
    """add: finished runs; check: only say what is out of date; root: the folder of README.md and results/."""
    folder, outdated = root / "results", []
    with clear_errors():
        for path in add:
            add_result(folder, path)
        results_of.cache_clear()
        claims.cache_clear()
        for page in (root / "README.md", *sorted(folder.glob("*.md"))):
            text = page.read_text()
            filled = fill(text, folder)
            if filled != text:
                outdated.append(page.name)
                if not check:
                    page.write_text(filled)
        for name, (draw, numbers) in pictures(folder).items():
            file, description = folder / f"{name}.png", json.dumps(numbers)
            if not check:
                draw(json.loads(description)).savefig(file, dpi=120, metadata={"Description": description})
            elif not file.exists() or description.encode() not in file.read_bytes():
                outdated.append(file.name)
        if check and outdated:
            raise ValueError(f"not up to date: {', '.join(outdated)}: python tools/render.py")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
