"""Tables of runs beside the paper's numbers, and what a script's `main` does."""

import dataclasses
import os
import signal
import statistics
import sys
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

from engine.config import changed, command_line, refuse, run_name, unread
from engine.device import clear_errors, fail, setup
from engine.run import SIGNALS, stop
from routers import RouterError


class Table(NamedTuple):
    """Rows of runs beside the paper's numbers."""

    title: str
    labels: tuple[str, ...]  # headers of what is known before a run: the method, the paper's numbers
    rows: list[tuple[tuple[str, ...], dict]]  # the labels' cells, and what to change for the row
    average: Callable | None = None  # of rows with the same first label, as in `lines` -> one more below them

    def lines(self, found: list[tuple]) -> list[dict]:
        """{header: cell} of each row. found: of each row that was run the labels, and of each of its seeds what a
        script's `cells` says, {header: (number or None, format)}."""
        rows = []
        for _, group in groupby(found, key=lambda row: row[0][0]):
            own = [*group]
            if self.average:
                own.append(self.average(own))
            for labels, seeds in own:
                cells = {name: mean_cell([one[name] for one in seeds]) for name in seeds[0]}
                rows.append(dict(zip(self.labels, labels)) | cells)
        return rows

    def render(self, results: list[list], cells: Callable) -> str:
        """Markdown. results: of each row's seeds."""
        rows = self.lines([(labels, [*map(cells, seeds)]) for (labels, _), seeds in zip(self.rows, results)])
        return markdown_table([*rows[0]], [[*row.values()] for row in rows])


def mean_cell(numbers: list[tuple]) -> str:
    """The mean of (number or None, its format) over seeds, and the deviation if they differ; empty where none is."""
    values = [value for value, _ in numbers if value is not None]
    if not values:
        return ""
    form = numbers[0][1]
    deviation = f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len({*values}) > 1 else ""
    return f"{statistics.fmean(values):{form}}{deviation}"


def markdown_table(headers: list[str], rows: list[list]) -> str:
    """A table that reads well in a terminal and in a README."""
    columns = []
    for column in zip(headers, *rows):
        width = max(len(str(cell)) for cell in column)
        head, *cells = [f" {cell!s:{width}} " for cell in column]
        columns.append([head, "-" * (width + 2), *cells])
    return "\n".join(f"|{'|'.join(line)}|" for line in zip(*columns))


def seeds_of(config, change: dict) -> list:
    """The configs of one row, one for every seed."""
    seeds = range(config.seed, config.seed + config.seeds)
    return [dataclasses.replace(config, **change, seed=seed) for seed in seeds]


def start(Config: type, presets: dict):
    """-> the config of the command line, and where this process stands; or one clear line."""
    # A stream that was closed before is None; what it is told goes nowhere.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for each in SIGNALS:
        signal.signal(each, lambda number, frame: stop(number))
    with clear_errors():
        config = command_line(Config, presets, sys.argv[1:])
        return config, setup(config.device, config.dtype)


def carry_out(config, presets: dict, context, tables: dict, train, report, cells) -> list[list[dict]]:
    """A table, or one run a seed and its report -> the results of each row's seeds.

    train(config, context) -> result; report(config, result) -> text; cells: see `Table.lines`.
    """
    with clear_errors():
        table = table_of(config, presets, tables)
    results = []
    with clear_errors(kinds=(RouterError,)):
        for _, change in table.rows:
            results.append([train(one, context) for one in seeds_of(config, change)])
    try:
        for result in results[0] if not config.table else []:
            context.say(report(config, result))
        if config.table or config.seeds > 1:
            rows = table.render(results, cells)
            context.say(f"\n{table.title}, preset {config.preset}, seeds: {config.seeds}\n\n{rows}")
    except (LookupError, TypeError, AttributeError) as error:  # an older version wrote it
        fail(f"a result.json in {config.out_dir} is not what this script writes ({error!r}): delete it")
    # Processes leave together, after an exchange without tensors: where a thread of gloo's still lets go of a tensor
    # while Python shuts down, the process is terminated.
    context.barrier()
    return results


def table_of(config, presets: dict, tables: dict) -> Table:
    """The table that a config asks for, or one with a single row.

    Raises ValueError where there is no such table, or the command line gives what its rows give, or what none reads.
    """
    if not config.table:
        name = run_name(config, presets)
        return Table(config.preset, ("run",), [((name,), {})])
    if config.table not in tables:
        raise ValueError(f"table must be one of {', '.join(map(str, tables))}, not {config.table}")
    table = tables[config.table](config)
    of_both = {"data", "experts", "moe_after", "preset", "steps"}  # tables take them from the command line
    of_rows = {name for _, change in table.rows for name in change}
    given = changed(config, presets).keys() & of_rows - of_both
    if given:
        raise ValueError(f"its rows have a --{min(given)} of their own: leave it out")
    rows = [dataclasses.replace(config, **change) for _, change in table.rows]
    refuse(config, presets, set.intersection(*map(unread, rows)))
    return table
