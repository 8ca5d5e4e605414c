"""Fills README.md and results/*.md with tables of what is committed in results/, and draws the pages' pictures.

    python tools/render.py             writes
    python tools/render.py --check     writes nothing, and exits with 1 where a page or a picture is not up to date

Under a line such as

    `python train_lm.py --table 1 --seeds 3` <!-- method | paper, OWT | bits/byte as here -->

stands that command's table, in these columns, made of results/train_lm/RUN.json, the runs' `result.json`. Rows that
have not been run are left out. Several commands in a line give one table, a row each. With

    <!-- bench/step: shape=encoder | impl | ms -->

the rows are those of bench/step.json whose shape is `encoder`, and `<!-- claims: claim | verdict -->` asks for the
claims of tools/claims.py. All else of a page is written by hand.
"""

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the project's modules are

from engine.config import command_line, identity, run_name
from engine.device import clear_errors
from engine.table import markdown_table, seeds_of, table_of
from tools.claims import claims, pictures, read

RESULTS = Path(__file__).parents[1] / "results"
COMMAND = r"`python ([\w/]+)\.py([^`]*)`\s"
COLUMNS = r"<!--\s(?:(?P<file>[\w/-]+):\s)?(?P<columns>[^>]*)\s-->"
LINE = re.compile(rf"^(?P<line>(?:{COMMAND})*{COLUMNS})\n+(?:\|.*\n)*\n*", re.M)  # with the table below it


def fill(page: str, folder: Path) -> str:
    """The page with its tables made anew."""
    return LINE.sub(lambda found: f"{found['line']}\n\n{table(folder, **found.groupdict())}\n\n", page)


def table(folder: Path, line: str, file: str | None, columns: str) -> str:
    """The table that a line of a page asks for. Raises ValueError where there is no such row or column."""
    if file == "claims":
        rows = claims(folder)
    elif file:
        rows = measured(folder, file)
    else:
        rows = []
        for script, options in re.findall(COMMAND, line):
            rows += runs(folder, script, options)
    headers = {}  # in the rows -> in the page
    for column in " ".join(columns.split()).split(" | "):
        name, _, value = column.partition("=")
        if value:
            rows = [row for row in rows if row[name] == value]
            continue
        name, _, shown = column.partition(" as ")
        headers[name] = shown or name
    if not rows or headers.keys() - rows[0].keys():
        known = ", ".join(rows[0]) if rows else "no rows"
        raise ValueError(f"{line}: no such row or column; there are {known}")
    cells = [[row[name] for name in headers] for row in rows]
    body = markdown_table(list(headers.values()), cells)
    if file == "claims":  # has whole sentences, which columns as wide as themselves would push out of sight
        body = re.sub(" +(?= )|-+(?=---)", "", body)
    return body


def runs(folder: Path, script: str, options: str) -> list[dict]:
    """The rows of a command that have been run, each the mean over its seeds."""
    module = importlib.import_module(script)
    config = command_line(module.Config, module.PRESETS, shlex.split(options))
    table = table_of(config, module.PRESETS, module.TABLES)
    rows = []
    for labels, change in table.rows:
        seeds = [cells_of(folder, one, module) for one in seeds_of(config, change)]
        found = [cells for cells in seeds if cells]
        if found:
            rows.append((labels, found))
    return table.lines(rows)


def cells_of(folder: Path, config, module) -> dict | None:
    """Of one run, None where it was not run. Raises ValueError where its constants are not today's."""
    name = run_name(config, module.PRESETS)
    if getattr(config, "eval_only", False):  # of train_lm.py: a trained model, routed otherwise
        name += f"-eval-t={config.eval_threshold}-capacity={config.eval_capacity}"
    file = folder / module.__name__ / f"{name}.json"
    if not file.exists():
        return None
    result = read(file)
    for constant, value in identity(config).items():
        was = result.get("config", {}).get(constant, value)
        if was != value:
            raise ValueError(f"{file} has {constant} {was}, its command {value}: run it again")
    return module.cells(result)


def measured(folder: Path, name: str) -> list[dict]:
    """{header: cell} of each row of what analyze.py or tools/bench.py wrote."""
    content = read(folder / f"{name}.json")
    if "table" in content:
        headers, *rows = content["table"]
        return [dict(zip(headers, row, strict=True)) for row in rows]
    for record in content["results"]:
        for key, value in record.items():
            record[key] = f"{value:.2f}" if isinstance(value, float) else value
    return content["results"]


def main(check: bool = False, root: Path = RESULTS.parent):
    """check: write nothing, and exit with 1 where something is not up to date; root: of README.md and results/."""
    folder, old = root / "results", []
    with clear_errors():
        for page in (root / "README.md", *sorted(folder.glob("*.md"))):
            new = fill(page.read_text(), folder)
            if new != page.read_text():
                old.append(page.name)
                if not check:
                    page.write_text(new)
        for name, (draw, numbers) in pictures(folder).items():
            file, kept = folder / f"{name}.png", json.dumps(numbers)
            if not check:
                draw(json.loads(kept)).savefig(file, dpi=120, metadata={"Description": kept})
            elif not file.exists() or kept.encode() not in file.read_bytes():
                old.append(file.name)
        if check and old:
            raise ValueError(f"not up to date: {', '.join(old)}: python tools/render.py")


if __name__ == "__main__":
    tyro.cli(main)
