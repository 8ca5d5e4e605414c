"""Writes results/README.md from what is committed here: results of runs, records of bench.py, and notes by hand.

    python -m results.render            writes the page
    python -m results.render --check    writes nothing, and exits with 1 where the page is not up to date

A table of runs is the script's own, as its `--table` prints it. The `result.json` of a run is kept as
results/SCRIPT/RUN.json, each seed's in a file of its own; a row that has none is shown empty. What `bench.py --json`
writes is kept in results/bench, and caption, command and table of what `analyze.py` measures in results/analyses. Every
table has a note: results/notes/SCRIPT-PRESET-GIVEN-NUMBER.md (without what is the demo's, or not there),
analysis-NAME.md or bench-NAME.md.
"""

import importlib
from pathlib import Path
from types import ModuleType

import tyro

import common
import runs
from figures import flops
from figures.shared import flags

RESULTS = Path(__file__).parent
SEEDS = 5  # a row is the mean over those of its first so many seeds that are there

SHORT = {"mask_share": 0.15, "steps": 4000, "eval_every": 1000}
TABLES = [  # script, preset, number of the table (None: the run of the preset itself), and what else is given
    ("train_lm", "demo", 1),
    ("train_lm", "demo", 1, {"router_init_std": 0.4}),
    ("train_lm", "demo", 2),
    ("train_lm", "small", 1, {"router_init_std": 0.28}),
    ("train_lm", "small", 1, {"data": "enwiki", "dropout": 0.0, "steps": 2500}),
    ("train_lm", "small", 1, {"data": "enwiki", "dropout": 0.0, "steps": 2500, "learning_rate": 1e-3}),
    ("train_lm", "small", 2, {"data": "enwiki", "dropout": 0.0, "steps": 2500}),
    ("train_lm", "small", 2, {"data": "enwiki", "dropout": 0.0, "steps": 2500, "learning_rate": 1e-3}),
    ("train_mlm", "demo", 2),
    ("train_mlm", "demo", 3),
    ("train_mlm", "demo", 5),
    ("train_mlm", "demo", None, {"router": "hash"}),
    ("train_mlm", "demo", None, {"router": "switch", "num_experts": 1}),
    ("train_mlm", "demo", None, {"router": "switch", "num_experts": 4}),
    ("train_mlm", "multilingual", 2),
    ("train_mlm", "multilingual", 2, {"n_embd": 64, "ffn_size": 256, "expert_size": 256}),
    ("train_mlm", "demo", 2, SHORT),
    ("train_mlm", "demo", 2, {"relative_bias": False} | SHORT),
    ("train_electra", "demo", 2),
    ("train_electra", "multilingual", 2),
    ("train_mt", "demo", None),
    ("train_mt", "multi30k", 3),
    ("finetune_xtreme", "demo", None),
    ("finetune_xtreme", "demo", None, {"frozen": False}),
    ("finetune_xtreme", "demo", "1"),
    ("finetune_xtreme", "demo", "xlme1"),
]
IN_TITLES = {  # constant: what a table's title says of it, where it is given
    "data": "{}",
    "mask_share": "{:.0%} masked",
    "relative_bias": "learned positions alone",  # it is given where it is off
    "router_init_std": "routers from {}",
    "n_embd": "width {}",
    "learning_rate": "rate {}",
}
ANALYSES = {  # file: title
    "compare": "Differences of routers (XMoE table 1)",
    "compare-wikipedia": "Differences of routers, small, on English Wikipedia (XMoE table 1)",
    "gamma": "Experts that do less at test (XMoE figure 4)",
    "threshold": "Another threshold at test (XMoE figure 7)",
    "collapse": "RC and RF in the course of training (X-MoE figures 2c and 3a)",
    "collapse-sigmoid": "RC and RF with a sigmoid gate (X-MoE figures 2c and 3a)",
    "collapse-multilingual": "RC and RF on real text (X-MoE figures 2c and 3a)",
    "consistency": "Loads of the experts, fine-tuning runs of three seeds (X-MoE figure 3b)",
    "retrieval-whitened": "Translations found, whitened (XLM-E table 5)",
    "retrieval": "Translations found, by the plain cosine (XLM-E table 5)",
    "retrieval-multilingual": "Translations found by encoders of real text (XLM-E table 5)",
    "alignment-multilingual": "Words aligned by encoders of real text (XLM-E table 6)",
    "part-of-speech": "Part of speech after fine-tuning, at equal FLOPs (XLM-E table 7)",
    "transfer-multilingual": "After fine-tuning on English, encoders of real text (XLM-E table 7)",
}
BENCHES = {  # file: title, and the columns of its tables
    "layer": ("One layer, forward and backward", "shape impl runs ms spread ratio to_compiled peak_mb"),
    "step": ("Whole training steps", "shape impl ms spread tokens_per_second to_dense to_switch peak_mb"),
    "size": ("More tokens, and more experts", "shape S E F ms spread us_per_token rows_per_token peak_mb kb_per_token"),
    "translate": ("Beam search, with a cache and without", "shape impl runs ms spread tokens tokens_per_second ratio"),
    "scale": (
        "Several processes, and many GPUs on paper",
        "processes impl runs ms spread speedup communication state_mb",
        "model gpus expert_parallel state_gb exchange_kb gflops compute_ms exchange_ms gradients_ms communication",
    ),
}


def page(folder: Path = RESULTS) -> str:
    """The whole page. ValueError where a note is missing or a result cannot be read."""
    parts = [note(folder, "introduction"), note(folder, "verdicts")]
    parts += [f"## {flops.gpu_hours(flops.Flops())}", note(folder, "analysis-flops")]
    for table in TABLES:
        parts += table_of_runs(folder, *table)
    for name, title in ANALYSES.items():
        command, headers, rows = read_analysis(folder / "analyses" / f"{name}.json")
        parts += [f"## {title}", f"`{command}`", runs.markdown_table(headers, rows), note(folder, f"analysis-{name}")]
    parts.append(note(folder, "bench"))
    for name, (title, *tables) in BENCHES.items():
        file = folder / "bench" / f"{name}.json"
        if file.exists():
            tables = [table_of_records(file, columns.split()) for columns in tables]
            parts += [f"### {title}", *tables, note(folder, f"bench-{name}")]
    parts += [note(folder, "soak"), note(folder, "unreproduced"), note(folder, "differences")]
    return "\n\n".join(parts) + "\n"


def note(folder: Path, name: str) -> str:
    file = folder / "notes" / f"{name}.md"
    if not file.exists():
        raise ValueError(f"{file} is missing: write there what was run, how to read it and what it does not show")
    return file.read_text().strip()


def table_of_runs(folder: Path, script: str, preset: str, number: int | str | None, given: dict | None = None) -> list:
    """Title, command, table, what it took, note. A table for which more is given shows what was run of it alone."""
    module, given = importlib.import_module(script), given or {}
    base = module.Config(**{"preset": preset, "seeds": SEEDS} | module.PRESETS[preset] | given)
    shown = preset if preset != "demo" or not (number or given) else ""
    options = ({"preset": preset} if preset != "demo" else {}) | given | ({"table": number} if number else {})
    command = " ".join([f"python {script}.py", *flags(options)])
    if number:
        table = module.TABLES[number](base)
        if script == "finetune_xtreme":
            command += " --source XTREME_FOLDER"
    else:
        table = runs.Table(f"{script}.py, {runs.run_name(base, module.PRESETS)}", ("run",), [((preset,), {})])
    rows = []
    for _, change in table.rows:
        configs = runs.seeds_of(base, change)
        found = [read_result(folder / script, config, module) for config in configs]
        rows.append([result for result in found if result])
    if given:
        kept = [row for row, found in zip(table.rows, rows) if found]
        table, rows = table._replace(rows=kept), list(filter(None, rows))
    name = "-".join(filter(None, (script, shown, *map(str, given.values()), str(number or ""))))
    title = table.title
    if number:
        scale = [says.format(given[constant]) for constant, says in IN_TITLES.items() if constant in given]
        title = ", ".join(filter(None, [title, shown, *scale]))
    seeds = max(map(len, rows), default=1)
    command += f" --seeds {seeds}" if seeds > 1 else ""
    return [f"## {title}", f"`{command}`{effort(rows)}", table.render(rows, module.cells), note(folder, name)]


def file_name(config, presets: dict[str, dict]) -> str:
    name = runs.run_name(config, presets)
    if getattr(config, "eval_only", False):  # of train_lm.py: a trained model, routed otherwise
        name += f"-eval-t={config.eval_threshold}-gamma={config.eval_capacity_factor}"
    return f"{name}.json"


def read_result(folder: Path, config, script: ModuleType) -> dict | None:
    """What was measured with that config; None where nothing is kept.

    Raises ValueError where no table can be made of it, or its constants are not the config's: those of a preset change.
    """
    file = folder / file_name(config, script.PRESETS)
    if not file.exists():
        return None
    result = runs.read_json(file)
    try:
        script.cells(result)
        found = difference(result, config)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a result that its script writes today ({error!r}): measure it again") from None
    if found:
        raise ValueError(f"{file} {found}: measure it again, or remove it")
    return result


def difference(result: dict, config) -> str:
    """What a result says of the first of its constants that is not the config's; empty where there is none.

    A constant that the config leaves open (None) may have any value.
    """
    measured = result.get("config", {})
    for constant, value in runs.identity(config).items():
        before = measured.get(constant, value)
        if value is not None and before != value:
            return f"has {constant} {before}, its row in the tables {value}"
    return ""


def read_analysis(file: Path) -> tuple[str, list, list[list]]:
    """Command, headers and rows of what analyze.py has measured. ValueError where that is not there."""
    if not file.exists():
        raise ValueError(f"{file} is missing: measure it, or take it out of ANALYSES")
    try:
        found = runs.read_json(file)
        headers, *rows = found["table"]
        return found["command"], headers, rows
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not what analyze.py leaves today ({error!r}): measure it again") from None


def effort(rows: list[list[dict]]) -> str:
    """How long the runs of a table took, and on what."""
    trained = [result for seeds in rows for result in seeds if "machine" in result]
    machines = set()
    for result in trained:
        machine = result["machine"]
        machines.add(f"{machine['device']}, threads {machine['threads']}, {machine['dtype']}, torch {machine['torch']}")
    if not trained:
        return ""
    minutes = sum(result["seconds"] for result in trained) / 60
    return f"; {minutes:.0f} minutes of training; {'; '.join(sorted(machines))}"


def table_of_records(file: Path, columns: list[str]) -> str:
    try:
        return runs.markdown_table(columns, rows_of_records(runs.read_json(file), columns))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is not what bench.py writes today ({error!r}): measure it again") from None


def rows_of_records(records: list[dict], columns: list[str]) -> list[list[str]]:
    """Of the records that have the first of the columns: a file may hold two kinds. KeyError where none has."""
    rows = [[runs.cell(record[column]) for column in columns] for record in records if columns[0] in record]
    if not rows:
        raise KeyError(columns[0])
    return rows


def main(check: bool = False, folder: Path = RESULTS):
    """check: only say whether the page is up to date; folder: where results and notes are."""
    file = folder / "README.md"
    with common.clear_errors():
        new = page(folder)
        if not check:
            file.write_text(new)
        elif not file.exists() or file.read_text() != new:
            raise ValueError(f"{file} is not up to date: python -m results.render")


if __name__ == "__main__":
    tyro.cli(main)
