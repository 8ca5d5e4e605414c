"""`analyze.py compare`: runs paired by seed, the arithmetic of their differences, and what is refused."""

import json
import math
import shlex
import sys
from pathlib import Path

import pytest
from helpers import ROOT, TINY_LM, Script
from test_analyze import refused

import analyze
import train_lm
from analysis.compare import interval, number_of, paired
from engine.config import identity
from engine.files import from_json, to_json

MEASURE = "test perplexity (lower is better)"
LAYER = {"wanted": 2.0, "served": 1.5}
OURS, OTHERS = [88.37, 86.9, 89.9], [88.99, 87.4, 90.6]
LOGS = {  # script -> the record of an evaluation, without its step and training loss, and a result
    "train_lm": ({"ppl": 9.0}, {}),
    "train_mlm": (
        {"ppl": 9.0, "predicted": 5},
        {
            "valid": {"ppl": 9.0, "layers": [LAYER | dict.fromkeys(("rc", "rf", "imbalance", "temperature"), 1.0)]},
            "first": [],
        },
    ),
    "train_mt": (
        {"ppl": 9.0, "bleu": 40.0},
        {name: {"bleu": 41.0, "chrf": 60.0, "layers": [LAYER], "pairs": {}} for name in ("test", "test_no_limit")}
        | {"best": {"bleu": 42.0}, "flops_per_pair": 7e6},
    ),
    "finetune_xtreme": (
        {"accuracy": 70.0},
        {
            "mean": {"accuracy": 71.0},
            "languages": {"en": {"accuracy": 72.0}},
            "valid": {"accuracy": 73.0},
            "guess": {},
            "counting": {},
            "gap": {"accuracy": 1.0},
        },
    ),
}


def write_run(folder: Path, seed: int, ppl=9.0, script="train_lm", finished=True, served=1.5, **changes) -> Path:
    """The files of a finished run, whose constants are the defaults with changes."""
    record, result = LOGS[script]
    module = analyze.SCRIPTS[script]
    result = result or {
        name: {"ppl": ppl, "bpb": 1.0, "layers": [dict.fromkeys(train_lm.ROUTING, 1.0) | {"served": served}]}
        for name in ("test", "test_no_limit")
    }
    constants = {name: changes.pop(name) for name in {*changes} & {*module.Config.__dataclass_fields__}}
    config = identity(module.Config(seed=seed, **constants)) | {"data_checksum": "d", "tokenizer_checksum": "t"}
    config |= changes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(to_json(config))
    lines = [record | {"step": step, "train_loss": 5.0 / step} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {"parameters": {"total": 1e6}, "flops": {"total": 1e6}} | result | {"seconds": 90.0, "config": config}
    if finished:
        (folder / "result.json").write_text(to_json(result))
    return folder


@pytest.fixture
def experiments(tmp_path) -> tuple[Path, Path]:
    """Three seeds of top-k and four of the default router; the folders' names say nothing."""
    for seed, (ours, other) in enumerate(zip(OURS, OTHERS)):
        write_run(tmp_path / f"mine {seed}", seed, ours, router="topk")
        write_run(tmp_path / f"x{9 - seed}", seed, other)
    write_run(tmp_path / "another", 3, 80.0)
    write_run(tmp_path / "another steps", 0, 70.0, steps=7)
    write_run(tmp_path / "K", 0, 60.0, router="topk", top_k=2)
    write_run(tmp_path / "killed", 4, router="topk", finished=False)
    (tmp_path / "lock").write_text("")
    return tmp_path / "mine 1", tmp_path / "x9"


def compared(draw, capsys, *line) -> tuple:
    axes, kept = draw("compare", *line)
    return axes, kept, capsys.readouterr().out


def test_the_interval_and_p_are_those_of_a_paired_t_test():
    stats = pytest.importorskip("scipy.stats")
    differences = paired(dict(enumerate(OURS)), dict(enumerate(OTHERS)) | {7: 1.0}, math.log)
    assert [*differences] == [0, 1, 2]
    mean, low, high, p = interval(differences.values())
    test = stats.ttest_rel([*map(math.log, OURS)], [*map(math.log, OTHERS)])
    assert mean == pytest.approx(sum(differences.values()) / 3)
    assert (low, high) == pytest.approx(tuple(test.confidence_interval()))
    assert p == pytest.approx(test.pvalue)


def test_a_seed_without_the_number_on_either_side_is_left_out():
    assert paired({0: 5.0, 1: None, 2: 7.0, 3: 9.0}, {0: 4.0, 1: 4.0, 2: None}, float) == {0: 1.0}


@pytest.mark.parametrize("difference, p", [(0.0, 1.0), (0.5, 0.0)])
def test_equal_differences_have_an_interval_without_width(difference, p):
    pytest.importorskip("scipy")
    assert interval([difference] * 3) == (difference, difference, difference, p)


def test_seeds_are_found_by_their_constants_and_compared_in_pairs(experiments, draw, capsys):
    """Means of 88.39 and 89.00 with deviations of 1.5 look equal; by seed, the difference is significant."""
    pytest.importorskip("scipy")
    (training, by_seed), kept, out = compared(draw, capsys, *experiments)
    assert f"A: {experiments[0]}, seeds 0, 1, 2\nB: {experiments[1]}, seeds 0, 1, 2, 3\n" in out
    assert "A and B differ in:\n  router topk, " in out
    assert "A - B by seed: 0: -0.7%, 1: -0.57%, 2: -0.77%\n" in out
    assert "test perplexity (lower is better): A is better, -0.68% (-0.93% to -0.43%, p 0.0073)\n" in out
    costs = ["FLOPs, nominal", "FLOPs, served", "minutes", "unserved"]
    assert kept["table"][0] == ["side", MEASURE, *costs]
    assert kept["table"][1] == ["A", "88.39 ± 1.5001", "1e+06", "", "1.5", "1"]
    [effect] = [record for record in kept["records"] if "p" in record]
    assert [effect[name] for name in ("mean", "low", "high", "p")] == pytest.approx(
        [-0.68, -0.93, -0.43, 0.0073], abs=0.01
    )
    thick = [line for line in training.lines if line.get_linewidth() == 2]
    assert [list(line.get_ydata()) for line in thick] == [[5.0, 2.5]] * 2
    assert len(training.lines) == 2 + 3 + 4
    assert [line.get_label() for line in thick] == ["A: router topk", "B: router threshold, threshold 0.3"]
    *levels, points = by_seed.lines
    assert [line.get_ydata()[0] for line in levels] == pytest.approx([0, -0.68], abs=0.01)
    [band] = by_seed.patches
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((-0.93, -0.43), abs=0.01)
    assert list(points.get_ydata()) == pytest.approx([-0.697, -0.572, -0.773], abs=1e-3)


def test_any_number_of_the_table_or_of_the_routing_can_be_compared(experiments, draw, monkeypatch, capsys):
    pytest.importorskip("scipy")
    for seed, ours in enumerate((2.5, 3.5, 1.5)):
        file = experiments[0].parent / f"mine {seed}/result.json"
        result = from_json(file.read_text())
        result["test"]["layers"] = [{"served": ours, "entropy": ours}, {"served": 1.5, "entropy": 0.5}]
        file.write_text(to_json(result | {"flops_served": 7e5}))
    monkeypatch.setattr(train_lm, "ROUTING", {})
    _, kept, out = compared(draw, capsys, *experiments, "--number", "served")
    assert "A - B by seed: 0: +0.5, 1: +1, 2: +0\nserved: no significant difference, +0.5 (" in out
    assert [row[3] for row in kept["table"]] == ["FLOPs, served", "7e+05", "", ""]
    error = refused(monkeypatch, capsys, "compare", *experiments, "--number", "speed")
    assert "there is no number 'speed': choose from params, M, bits/byte, perplexity, no limit, " in error


def test_a_single_pair_of_seeds_decides_nothing(experiments, draw, capsys):
    _, kept, out = compared(draw, capsys, experiments[0].parent / "another steps", experiments[1])
    assert "one pair of seeds decides nothing: train more with --seeds 3" in out
    assert not any("p" in record for record in kept["records"])
    assert [row[1] for row in kept["table"][1:3]] == ["70", "86.748 ± 4.6842"]


@pytest.mark.parametrize("script", [name for name in LOGS if name != "train_lm"])
def test_each_script_has_a_measure_of_its_own(tmp_path, draw, capsys, script):
    pytest.importorskip("scipy")
    for seed in range(2):
        write_run(tmp_path / f"a{seed}", seed, script=script, learning_rate=1.0, data_checksum=f"d{seed}"[: seed + 1])
        write_run(tmp_path / f"b{seed}", seed, script=script, data_checksum=f"d{seed}"[: seed + 1])
    if script == "finetune_xtreme":  # the checksum includes the new weights, which depend on the seed
        pairs = 2
    else:
        pairs = 1
    _, kept, out = compared(draw, capsys, tmp_path / "a0", tmp_path / "b0")
    assert sum(record["side"].startswith("A - B") and "seed" in record for record in kept["records"]) == pairs
    values = {"train_mlm": "9", "train_mt": "41", "finetune_xtreme": "71"}
    assert [row[1] for row in kept["table"][1:3]] == [values[script]] * 2
    flops = kept["table"][0].index("FLOPs, nominal")
    assert [row[flops] for row in kept["table"][1:3]] == ["7e+06" if script == "train_mt" else "1e+06"] * 2


def test_the_demo_of_xlm_e_is_compared_by_its_masked_tokens(tmp_path, draw, capsys):
    pytest.importorskip("scipy")
    log = (ROOT / "tests/xlm-e.metrics.jsonl").read_text()
    lines = (ROOT / "results/train_electra.jsonl").read_text().splitlines()
    results = {result["name"]: result for result in map(from_json, lines)}
    for i, name in enumerate(("demo-masks=electra", "demo-objective=mlm-masks=bert-relative_bias=False")):
        for seed in range(3):
            full = name.replace("demo", f"demo-seed={seed}") if seed else name
            folder = tmp_path / f"{i} {seed}"
            folder.mkdir()
            (folder / "metrics.jsonl").write_text(log)
            (folder / "result.json").write_text(to_json(results[full]))
            (folder / "config.json").write_text(to_json(results[full]["config"]))
    _, kept, out = compared(draw, capsys, tmp_path / "0 0", tmp_path / "1 0")
    [effect] = [record for record in kept["records"] if "p" in record]
    assert effect["p"] < 0.05
    verdict = "A is better" if effect["mean"] > 0 else "A is worse"
    assert f"held-out masked tokens right (higher is better): {verdict}, " in out
    assert len([record for record in kept["records"] if "seed" in record]) == 3


def test_runs_that_cannot_be_compared_are_refused_in_one_line(experiments, tmp_path, monkeypatch, capsys):
    a, b = experiments

    def error(*folders) -> str:
        capsys.readouterr()
        return refused(monkeypatch, capsys, "compare", *folders)

    assert "pass two runs" in error(a)
    assert "differ only in their seed" in error(a, tmp_path / "mine 2")
    assert f"{tmp_path} has no finished run" in error(tmp_path, a)
    assert f"{tmp_path}/none has no finished run: check the folder's name" in error(tmp_path / "none", a)
    assert "has no finished run" in error(write_run(tmp_path / "n/new", 0, finished=False), a)
    for name in ("data_checksum", "tokenizer_checksum"):
        other = write_run(tmp_path / name, 0, **{name: "?"})
        assert f"A and B differ in {name}: pass runs of one script on the same data" in error(a, other)
    assert "script" in error(a, write_run(tmp_path / "m/encoder", 0, script="train_mlm"))
    late = write_run(tmp_path / "s/late", 5, steps=9)
    assert f"no seed of both has {MEASURE}: train more seeds with --seeds 3" in error(a, late)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "scipy.stats", None)
        assert "scipy.stats is not installed: pip install -r requirements-dev.txt" in error(a, b)


def test_a_run_of_several_seeds_ends_with_the_command_that_compares_it(options, draw, monkeypatch, capsys):
    pytest.importorskip("scipy")
    tiny = {name: TINY_LM[name] for name in TINY_LM if name not in ("device", "dtype", "sample_tokens", "log_every")}
    monkeypatch.setitem(train_lm.PRESETS, "tiny", tiny)
    rest = {name: options[name] for name in options if name not in tiny}
    script = Script(train_lm)

    def command(**changes) -> list[str]:
        capsys.readouterr()
        script.run(rest | {"preset": "tiny"} | changes, monkeypatch)
        lines = [line for line in capsys.readouterr().out.splitlines() if "compare seed by seed: " in line]
        return [line.partition(": ")[2] for line in lines]

    # A router is compared with the preset's, in runs that otherwise have the same options.
    mine = {"router": "topk", "top_k": 2, "eval_tokens": 64, "seeds": 2}
    [line] = command(**mine)
    train, line = line.split(" && ")
    _, file, *train = shlex.split(train)
    assert file == "train_lm.py" and train[:2] == ["--preset", "tiny"]
    assert "--router" not in train and "--top_k" not in train
    monkeypatch.setattr(sys, "argv", [file, *train])
    train_lm.main()
    assert command(**mine) == [line]
    assert "-eval_tokens=64" in shlex.split(line)[-1]
    # A constant is compared with the preset.
    assert command() == command(seeds=2) == command(router="topk") == []
    [line] = command(router="topk", seeds=2)
    _, _, name, *folders = shlex.split(line)
    assert name == "compare" and [Path(folder).name.count("router=topk") for folder in folders] == [1, 0]
    _, kept, out = compared(draw, capsys, *folders)
    assert f"\n{MEASURE}: " in out
    assert len([record for record in kept["records"] if "seed" in record]) == 2
    result = from_json((Path(folders[0]) / "result.json").read_text())
    assert kept["records"][0][MEASURE] == number_of("perplexity", result, train_lm.cells)
    [line] = command(weight_decay=0.5, seeds=2)
    assert shlex.split(line)[-1] == folders[1]
    [line] = command(weight_decay=0.5, seeds=2, seed=5)
    assert "--seeds 2" in line.partition(" && ")[0]  # trains the preset with as many
