"""Writes results/README.md from what is committed in that folder: results of runs, measurements, and notes by hand.

    python tools/render.py             writes the page
    python tools/render.py --check     writes nothing, and exits with 1 where the page is not up to date

A table of runs is the script's own, from results/SCRIPT/RUN.json, the runs' `result.json`; the row of a run that is not
there is empty. results/analyses has what analyze.py wrote, results/bench what `tools/bench.py --json` did. Every table
has a note: results/notes/SCRIPT-PRESET-GIVEN-NUMBER.md (but for what is the demo's), analysis-NAME.md, bench-NAME.md.
"""

import importlib
import json
import sys
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the project's modules are

from engine.config import identity, run_name
from engine.device import clear_errors
from engine.table import Table, cell, markdown_table, seeds_of

RESULTS = Path(__file__).parents[1] / "results"
SEEDS = 5  # a row is the mean over those of its first so many seeds that are there

SHORT = {"mask_share": 0.15, "steps": 4000, "eval_every": 1000}
WIKIPEDIA = {"data": "enwiki", "dropout": 0.0, "steps": 2500}
FAST = WIKIPEDIA | {"learning_rate": 1e-3}
HALF = {"n_embd": 64, "ffn_size": 256, "expert_size": 256}
TABLES = [  # script, preset, number of the table (None: the run of the preset itself), what else is given, in words
    ("train_lm", "demo", 1),
    ("train_lm", "demo", 1, {"router_std": 0.4}, "routers from 0.4"),
    ("train_lm", "demo", 2),
    ("train_lm", "small", 1, {"router_std": 0.28}, "routers from 0.28"),
    ("train_lm", "small", 1, WIKIPEDIA, "enwiki"),
    ("train_lm", "small", 1, FAST, "enwiki, rate 0.001"),
    ("train_lm", "small", 2, WIKIPEDIA, "enwiki"),
    ("train_lm", "small", 2, FAST, "enwiki, rate 0.001"),
    ("train_mlm", "demo", 2),
    ("train_mlm", "demo", 3),
    ("train_mlm", "demo", 5),
    ("train_mlm", "demo", None, {"router": "hash"}),
    ("train_mlm", "demo", None, {"router": "switch", "experts": 1}),
    ("train_mlm", "demo", None, {"router": "switch", "experts": 4}),
    ("train_mlm", "multilingual", 2),
    ("train_mlm", "multilingual", 2, HALF, "width 64"),
    ("train_mlm", "demo", 2, SHORT, "15% masked"),
    ("train_mlm", "demo", 2, {"relative_bias": False} | SHORT, "15% masked, learned positions alone"),
    ("train_electra", "demo", 2),
    ("train_electra", "multilingual", 2),
    ("train_electra", "ciphers", None, {"objective": "mlm", "dtype": "float32"}),
    ("train_electra", "ciphers", None, {"dtype": "float32"}),
    ("train_mt", "demo", None),
    ("train_mt", "multi30k", 3),
    ("finetune_xtreme", "demo", None),
    ("finetune_xtreme", "demo", None, {"frozen": False}),
    ("finetune_xtreme", "demo", "1"),
    ("finetune_xtreme", "demo", "xlme1"),
]
ANALYSES = {  # file: title
    "gamma": "Experts that do less at test (XMoE figure 4)",
    "threshold": "Another threshold at test (XMoE figure 7)",
    "collapse": "RC and RF in the course of training (X-MoE figures 2c and 3a)",
    "collapse-sigmoid": "RC and RF with a sigmoid gate (X-MoE figures 2c and 3a)",
    "collapse-multilingual": "RC and RF on real text (X-MoE figures 2c and 3a)",
    "consistency": "Loads of the experts, fine-tuning runs of three seeds (X-MoE figure 3b)",
    "retrieval": "Translations found, by the plain cosine (XLM-E table 5)",
    "retrieval-multilingual": "Translations found by encoders of real text (XLM-E table 5)",
    "alignment-multilingual": "Words aligned by encoders of real text (XLM-E table 6)",
    "part-of-speech": "Part of speech after fine-tuning, at equal FLOPs (XLM-E table 7)",
    "transfer-multilingual": "After fine-tuning on English, encoders of real text (XLM-E table 7)",
}
BENCHES = {  # file: title, and the columns of its table
    "layer": ("One layer, forward and backward", "shape impl runs ms spread ratio to_compiled peak_mb"),
    "step": ("Whole training steps", "shape impl ms spread tokens_per_second to_dense to_switch peak_mb"),
    "size": ("More tokens, and more experts", "shape S E F ms spread us_per_token rows_per_token peak_mb kb_per_token"),
    "translate": ("Beam search, with a cache and without", "shape impl runs ms spread tokens tokens_per_second ratio"),
    "scale": ("Several processes", "processes impl runs ms spread speedup communication state_mb"),
    "paper": (
        "Many GPUs, on paper",
        "model gpus expert_parallel state_gb exchange_kb gflops compute_ms exchange_ms gradients_ms communication",
    ),
}


def page(folder: Path = RESULTS) -> str:
    """The whole page. Raises ValueError where a note is missing or a result cannot be read."""
    parts = [note(folder, name) for name in ("introduction", "verdicts", "analysis-flops")]
    for table in TABLES:
        parts += table_of_runs(folder, *table)
    for name, title in ANALYSES.items():
        parts += [f"## {title}", read(folder / "analyses" / f"{name}.json", render_analysis)]
        parts.append(note(folder, f"analysis-{name}"))
    parts.append(note(folder, "bench"))
    for name, (title, columns) in BENCHES.items():
        parts += [f"### {title}", read(folder / "bench" / f"{name}.json", render_bench, columns.split())]
        parts.append(note(folder, f"bench-{name}"))
    parts += [note(folder, name) for name in ("soak", "unreproduced", "differences")]
    return "\n\n".join(parts) + "\n"


def note(folder: Path, name: str) -> str:
    file = folder / "notes" / f"{name}.md"
    if not file.exists():
        raise ValueError(f"{file} is missing: write there what was run, how to read it and what it does not show")
    return file.read_text().strip()


def read(file: Path, take, *more):
    """take(content, *more), of a file of JSON. Raises ValueError where it is missing, or is not what `take` takes."""
    if not file.exists():
        raise ValueError(f"{file} is missing: measure it, or take it out of tools/render.py")
    try:
        return take(json.loads(file.read_text()), *more)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is not what its script writes today ({error!r}): measure it again") from None


def render_analysis(found: dict) -> str:
    headers, *rows = found["table"]
    return f"`{found['command']}`\n\n{markdown_table(headers, rows)}"


def render_bench(records: list[dict], columns: list[str]) -> str:
    rows = []
    for record in records:
        rows.append([cell(record[column]) for column in columns])
    return markdown_table(columns, rows)


def table_of_runs(folder: Path, script: str, preset: str, number, given=None, words="") -> list[str]:
    """Title, command, table and note. Of a table for which more is given, only rows that were run are shown."""
    module, given = importlib.import_module(script), given or {}
    base = module.Config(**{"preset": preset, "seeds": SEEDS} | module.PRESETS[preset] | given)
    if number:
        table = module.TABLES[number](base)
    else:
        table = Table(f"{script}.py, {run_name(base, module.PRESETS)}", ("run",), [((preset,), {})])
    rows, results = [], []
    for row in table.rows:
        found = read_seeds(folder / script, seeds_of(base, row[1]), module)
        if found or not given:
            rows.append(row)
            results.append(found)
    shown = "" if preset == "demo" and (number or given) else preset
    name = "-".join(filter(None, [script, shown, *map(str, given.values()), str(number or "")]))
    title = [table.title, shown, words] if number else [table.title]
    seeds = max(map(len, results), default=1)
    return [
        f"## {', '.join(filter(None, title))}",
        f"`{command_of(script, preset, given, number, seeds)}`{effort(sum(results, []))}",
        table._replace(rows=rows).render(results, module.cells),
        note(folder, name),
    ]


def command_of(script: str, preset: str, given: dict, number, seeds: int) -> str:
    options = given | {"table": number}
    if preset != "demo":
        options = {"preset": preset} | options
    if script == "finetune_xtreme" and number:
        options["source"] = "XTREME_FOLDER"
    if seeds > 1:
        options["seeds"] = seeds
    words = [f"python {script}.py"]
    for name, value in options.items():
        if value is not None:
            words.append(f"--{name} {str(value).lower() if isinstance(value, bool) else value}")
    return " ".join(words)


def file_name(config, presets: dict[str, dict]) -> str:
    name = run_name(config, presets)
    if getattr(config, "eval_only", False):  # of train_lm.py: a trained model, routed otherwise
        name += f"-eval-t={config.eval_threshold}-capacity={config.eval_capacity}"
    return f"{name}.json"


def read_seeds(folder: Path, configs: list, script) -> list[dict]:
    """What was measured with these configs, as far as it is kept.

    Raises ValueError where the script can make no table of it, or where its constants are not the config's: those of a
    preset change.
    """
    found = []
    for config in configs:
        file = folder / file_name(config, script.PRESETS)
        if not file.exists():
            continue
        _, result = read(file, lambda result: (script.cells(result), result))
        for constant, value in identity(config).items():
            before = result.get("config", {}).get(constant, value)
            if before != value:
                raise ValueError(f"{file} has {constant} {before}, its row in the tables {value}: measure it again")
        found.append(result)
    return found


def effort(results: list[dict]) -> str:
    """How long runs took, and on what."""
    seconds = sum(result.get("seconds", 0.0) for result in results)
    machines = [result["machine"] for result in results if "machine" in result]
    words = {"{device}, threads {threads}, {dtype}, torch {torch}".format(**machine) for machine in machines}
    return f"; {seconds / 60:.0f} minutes of training; {'; '.join(sorted(words))}" if words else ""


def main(check: bool = False, folder: Path = RESULTS):
    """check: write nothing, and exit with 1 where the page is not up to date; folder: where results and notes are."""
    file = folder / "README.md"
    with clear_errors():
        new = page(folder)
        if not check:
            file.write_text(new)
        elif not file.exists() or file.read_text() != new:
            raise ValueError(f"{file} is not up to date: python tools/render.py")


if __name__ == "__main__":
    tyro.cli(main)
