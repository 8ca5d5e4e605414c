"""Tables of runs beside the paper's numbers, and the `main` of a script."""

import dataclasses
import os
import shlex
import signal
import statistics
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from engine.config import changed, command_line, refuse, run_name, unread
from engine.device import clear_errors, fail, setup
from engine.run import SIGNALS, stop
from routers import RouterError


class Table(NamedTuple):
    title: str
    labels: tuple[str, ...]  # headers of the columns known before a run: the method, the paper's numbers
    rows: list[tuple[tuple[str, ...], dict]]  # cells under these headers, and the constants that the row changes
    average: Callable | None = None  # rows with the same first label, as in `lines` -> a row below them

    def lines(self, scored: list[tuple]) -> list[dict]:
        """-> {header: cell} of each row.

        scored: the labels of each row, and `cells` of each of its seeds: {header: (number or None, format)}.
        """
        rows = []
        for _, group in groupby(scored, key=lambda row: row[0][0]):
            group = [*group]
            if self.average:
                group.append(self.average(group))
            for labels, seeds in group:
                cells = {name: mean_cell([seed[name] for seed in seeds]) for name in seeds[0]}
                rows.append(dict(zip(self.labels, labels)) | cells)
        return rows

    def render(self, results: list[list], cells: Callable) -> str:
        """Markdown of the results, a list of seeds for each row."""
        rows = self.lines([(labels, [*map(cells, seeds)]) for (labels, _), seeds in zip(self.rows, results)])
        return markdown_table([*rows[0]], [[*row.values()] for row in rows])


def mean_cell(numbers: list[tuple]) -> str:
    """Mean over seeds of (number or None, format), with the standard deviation if they differ; "" without numbers."""
    values = [value for value, _ in numbers if value is not None]
    if not values:
        return ""
    form = numbers[0][1]
    deviation = f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len({*values}) > 1 else ""
    return f"{statistics.fmean(values):{form}}{deviation}"


def markdown_table(headers: list[str], rows: list[list]) -> str:
    """A table with aligned columns, readable in a terminal too."""
    columns = []
    for column in zip(headers, *rows):
        width = max(len(str(cell)) for cell in column)
        head, *cells = [f" {cell!s:{width}} " for cell in column]
        columns.append([head, "-" * (width + 2), *cells])
    return "\n".join(f"|{'|'.join(line)}|" for line in zip(*columns))


def seeds_of(config, change: dict) -> list:
    """One config per seed, with the changes of a row."""
    return [dataclasses.replace(config, **change, seed=config.seed + i) for i in range(config.seeds)]


def start(Config: type, presets: dict):
    """-> the config of the command line, and the context of this process. Errors are one line."""
    # A stream that is closed at startup is None.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    script = sys._getframe(1).f_globals
    if script["__name__"] == "__main__" and vars(sys.modules["__main__"]) is not script:  # as under cProfile
        sys.modules["__main__"] = ModuleType("__main__")
        vars(sys.modules["__main__"]).update(script)
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: stop(number))
    with clear_errors():
        config = command_line(Config, presets, sys.argv[1:])
        return config, setup(config.device, config.dtype)


def carry_out(config, presets: dict, context, tables: dict, train, report, cells) -> list[list[dict]]:
    """Runs the rows of a table, or one config and its report, for each seed -> results, a list of seeds for each row.

    train(config, context) -> result; report(config, result) -> text; cells: see `Table.lines`.
    """
    with clear_errors():
        table = table_of(config, presets, tables)
    results = []
    with clear_errors(kinds=(RouterError,)):
        for _, change in table.rows:
            results.append([train(run, context) for run in seeds_of(config, change)])
    try:
        for result in results[0] if not config.table else []:
            context.say(report(config, result))
        if config.table or config.seeds > 1:
            rows = table.render(results, cells)
            context.say(f"\n{table.title}, preset {config.preset}, seeds: {config.seeds}\n\n{rows}")
        command = config.seeds > 1 and not config.table and comparison(config, presets, results[0][0]["name"])
        if command:
            context.say(f"\n{command}")
    except (LookupError, TypeError, AttributeError) as error:  # written by an older version
        fail(f"a result.json in {config.out_dir} is not what this script writes ({error!r}): delete it")
    # Processes exit together, after a collective without tensors: a gloo thread that releases a tensor during Python's
    # shutdown would terminate the process.
    context.barrier()
    return results


def comparison(config, presets: dict, name: str) -> str | None:
    """The command that compares a run with one of the preset's router, or with the preset if it has that router."""
    options = changed(config, presets)
    routing = options.keys() & ({"router"} | unread(dataclasses.replace(config, router="dense")))
    reset = routing or options.keys() - {"data", "pairs", "seed", "seeds", "dtype", "out_dir"}
    kept = {"preset": config.preset} | {field: options[field] for field in options if field not in reset}
    folder = Path(config.out_dir, run_name(type(config)(**presets[config.preset] | kept), presets))
    if folder.name == name:
        return None
    command = shlex.join(["python", "analyze.py", "compare", str(folder.with_name(name)), str(folder)])
    if not (folder / "result.json").exists():
        train = ["python", Path(sys.argv[0]).name]
        for field, value in kept.items():
            train += [f"--{field}", str(value)]  # lists are layers with experts, which are never kept
        command = f"{shlex.join(train)} && {command}"
    return f"compare seed by seed: {command}"


def table_of(config, presets: dict, tables: dict) -> Table:
    """The table that the config names, or one with a single row. Raises ValueError if an option contradicts it."""
    if not config.table:
        return Table(config.preset, ("run",), [((run_name(config, presets),), {})])
    if config.table not in tables:
        raise ValueError(f"table must be one of {', '.join(map(str, tables))}, not {config.table}")
    table = tables[config.table](config)
    allowed = {"data", "experts", "moe_after", "preset", "steps"}  # rows derive their values from the command line's
    set_by_rows = {name for _, change in table.rows for name in change}
    conflicts = changed(config, presets).keys() & set_by_rows - allowed
    if conflicts:
        raise ValueError(f"the rows of this table set --{min(conflicts)}: leave it out")
    rows = [dataclasses.replace(config, **change) for _, change in table.rows]
    refuse(config, presets, set.intersection(*map(unread, rows)))
    return table
