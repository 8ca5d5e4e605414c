"""`analyze.py`, XMoE's and X-MoE's figures: drawings against logs, results and literal loops, on tiny runs."""

import json
import math
import shutil
import sys
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT, TINY_LM, Script
from test_analyze import levels, lines, run
from test_train_electra import corpora as electra_corpora

import train_lm
import train_mlm
from analysis import x_moe, xmoe
from data.batches import MaskedData, TokenData
from engine import pretrained
from engine.config import SPARSE
from metrics import timing

__all__ = ["electra_corpora"]  # a fixture
pytest.importorskip("matplotlib")
LM_RUNS = {
    "threshold": {"threshold": 0.9},  # 32 experts of width 8; FFNs have 32
    "seed 1": {"threshold": 0.9, "seed": 1},
    "t = 0.3": {},
    "switch": {"router": "switch"},
    "dense": {"router": "dense"},
    "null": {"router": "today.py:null"},
    "split": dict(moe_every=1, threshold=1.0, expert_ffns=1, split=4),  # as in table 2
}
TINY_MLM = dict(n_layer=2, n_head=2, n_embd=16, ffn_size=32, block_size=16, micro_tokens=128, batch_tokens=128, steps=4)
TINY_MLM |= dict(experts=4, expert_size=16, moe_after=(1,), eval_every=2, eval_maskings=2, log_every=1)
TINY_MLM |= dict(device="cpu", dtype="float32", learning_rate=0.05)
MLM_RUNS = {"X-MoE": {}, "SMoE": {"router": "switch"}}
E, WIDTH, FFN = 32, 8, 32
NULL = "today.py:null 32 x 8"  # a run of a router from a file


def train(script, base: Path, constants: dict, changes: dict) -> dict[str, str]:
    """name -> folder of each run, relative to `base`"""
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        for name, change in changes.items():
            before = {*Path("out", script.__name__).glob("demo*")}
            Script(script).run(constants | change, patch)
            ((folders[name]),) = {*Path("out", script.__name__).glob("demo*")} - before
    return {name: str(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def trained(corpora, electra_corpora, tmp_path_factory) -> SimpleNamespace:
    """Tiny language models and encoders of three languages, alone in a folder."""
    base = tmp_path_factory.mktemp("analyzed")
    (base / "a").symlink_to(corpora["a"])  # short, so that run names are not truncated
    (base / "today.py").symlink_to(ROOT / "examples/routers_of_today.py")
    small = {name: value for name, value in TINY_LM.items() if name not in ("n_head", "eval_tokens")}
    languages = electra_corpora["data"]
    lm = train(train_lm, base, small | {"data": "a", "learning_rate": 0.03}, LM_RUNS)
    mlm = train(train_mlm, base, TINY_MLM | {"data": languages}, MLM_RUNS)
    dense = {name: value for name, value in TINY_MLM.items() if name not in SPARSE} | {"router": "dense"}
    mlm |= train(train_mlm, base, dense | {"data": languages}, {"dense": {}})
    return SimpleNamespace(base=base, lm=lm, mlm=mlm, text=corpora["a"], languages=languages)


@pytest.fixture(autouse=True)
def place(trained, monkeypatch):
    """Changes to the folder of the runs."""
    monkeypatch.chdir(trained.base)
    return trained


def read(folder: str, name: str = "result.json"):
    return json.loads(Path(folder, name).read_text())


def log(folder: str) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def points(kept: dict, *names: str) -> list[tuple]:
    return [tuple(record[name] for name in names) for record in kept["records"]]


def literal(folder: str, text: Path, **changes) -> tuple[float, float]:
    """Test perplexity, and experts that serve a token per MoE layer, by a loop over tokens."""
    model, _ = pretrained.load(folder, **changes)
    served, losses = [], []
    for moe in model.moe_layers:
        moe.watchers.append(lambda moe, h, routing, kept: served.extend(kept.sum(dim=1).tolist()))
    with torch.no_grad():
        for x, y in TokenData(text, 16, 64).eval_batches("test"):
            logp = model(x)[0].log_softmax(dim=2)
            losses += [-float(logp[b, t, y[b, t]]) for b in range(len(y)) for t in range(y.shape[1])]
    return math.exp(fmean(losses)), fmean(served)


def test_activations_equal_the_results_and_a_loop(draw, place):
    (number, size), kept = draw("activations")
    positive = {record["run"]: record["share of positive activations"] for record in kept["records"]}
    for name in ("threshold", "switch", "split", "null"):
        layers = read(place.lm[name])["test"]["layers"]
        assert positive[place.lm[name]] == fmean(layer["positive"] for layer in layers)
    model, _ = pretrained.load(place.lm["dense"])
    units = []
    with torch.no_grad():
        for x, _ in TokenData(place.text, 16, 64).eval_batches("test"):
            h, *_ = model.blocks[0](model.wte(x) + model.wpe.weight[: x.shape[1]], x)
            h = h + model.blocks[1].attn(model.blocks[1].ln_1(h))[0]  # where the sparse models have experts
            units += model.blocks[1].ffn.fc(model.blocks[1].ln_2(h)).flatten().tolist()
    assert positive[place.lm["dense"]] == sum(unit > 0 for unit in units) / len(units)
    by_number = {(name, x) for name, xs, _ in lines(number) for x in xs}
    assert by_number == {("switch 8 x 32", 8), ("dense", 1)}
    small = "threshold 32 x 8, threshold 0.3", "threshold 32 x 8, threshold 0.9", "threshold 4 x 8", NULL
    widths = {"switch 8 x 32": FFN, "dense": FFN} | dict.fromkeys(small, WIDTH)
    assert {(name, x) for name, xs, _ in lines(size) for x in xs} == {*widths.items()}
    assert sorted(row[0] for row in kept["table"][1:]) == sorted(widths)  # one per threshold
    drawn = [y for _, _, ys in lines(size) for y in ys]
    assert sorted(drawn) == sorted(positive.values())


def test_tokens_are_grouped_by_rarity_and_by_the_loss_of_the_next(draw, place):
    axes, drawing = draw("tokens", *(place.lm[name] for name in ("threshold", "t = 0.3", "null")))
    model, _ = pretrained.load(place.lm["threshold"])
    data, served = TokenData(place.text, 16, 64), []
    seen = []  # per token: its count in training, the loss of the next token, its experts
    train = data.tokens["train"].tolist()
    model.moe_layers[0].watchers.append(lambda moe, h, routing, kept: served.extend(kept.sum(dim=1).tolist()))
    with torch.no_grad():
        for x, y in data.eval_batches("test"):
            logp = model(x)[0].log_softmax(dim=2).flatten(0, 1)
            for row, token, following in zip(logp, x.flatten().tolist(), y.flatten().tolist()):
                seen.append((train.count(token), -float(row[following]), served[len(seen)]))
    for title, key in (("rarity", lambda token: -token[0]), ("the loss of the next token", lambda token: token[1])):
        expected = [fmean(token[2] for token in group) for group in np.array_split(sorted(seen, key=key), 10)]
        drawn = [record[xmoe.SERVED] for record in drawing["records"] if record["sorted by"] == title]
        assert drawn[:10] == pytest.approx(expected, rel=1e-5)
    names = [f"threshold 32 x 8, threshold {t}, block 2" for t in (0.9, 0.3)] + [f"{NULL}, block 2"]
    assert [[name for name, _, _ in lines(panel)] for panel in axes] == [names, names]


def test_gamma_limits_the_compute_of_experts_in_dense_ffns(draw, place, monkeypatch):
    monkeypatch.setattr(xmoe, "SHARES", (0.5, 1.0, 8.0))
    names = "threshold", "switch", "dense", "split"
    axes, kept = draw("gamma", *(place.lm[name] for name in names))
    by_name = {name: {} for name in names}
    for record in kept["records"]:
        (name,) = (name for name in names if place.lm[name] == record["run"])
        by_name[name][record[xmoe.LIMIT]] = record
    for name, by_limit in by_name.items():
        assert list(by_limit) == ([1] if name == "dense" else [0.5, 1, 8])
        assert by_limit[1]["perplexity"] == read(place.lm[name])["test"]["ppl"]
    for name in ("threshold", "switch"):  # 8 x FFN: gamma = E
        assert by_name[name][8]["perplexity"] == read(place.lm[name])["test_no_limit"]["ppl"]
    for name in ("threshold", "split"):
        ppl, served = literal(place.lm[name], place.text, eval_capacity=0.5)
        assert by_name[name][0.5]["perplexity"] == pytest.approx(ppl, rel=1e-6)
        assert by_name[name][0.5][xmoe.SPENT] == pytest.approx(served * WIDTH / FFN)
    assert by_name["dense"][1][xmoe.SPENT] == 1
    for panel, x in zip(axes, (xmoe.LIMIT, xmoe.SPENT)):
        drawn = [list(zip(xs, ys)) for _, xs, ys in lines(panel)]
        assert [point for line in drawn for point in line] == points(kept, x, "perplexity")


def test_experts_are_those_in_the_logs(draw, place):
    (axes,), kept = draw("experts")
    wanted = {}  # line -> the mean over its seeds
    for name, runs in {"t = 0.3": 1, "threshold": 2, "split": 1, "switch": 1, "null": 1}.items():
        logs = [log(place.lm[run]) for run in (name, "seed 1")[:runs]]
        for i in range(len(logs[0][0]["layers"])):
            numbers = [[record["layers"][i]["wanted"] for record in records] for records in logs]
            wanted[name, i] = [fmean(seeds) for seeds in zip(*numbers)]
    drawn = lines(axes)
    assert sorted(xy for _, *xy in drawn) == sorted([[2, 4], numbers] for numbers in wanted.values())
    assert [name[-9:] for name, _, _ in drawn].count(", block 2") == 5
    assert [row[1] for row in kept["table"][1:]] == len(wanted) * [4]  # every layer, once


def test_threshold_changes_t_in_training_and_at_test(draw, place, monkeypatch, capsys):
    monkeypatch.setattr(xmoe, "THRESHOLDS", (0.0, 0.9, 1.0))
    trained = [place.lm[name] for name in ("threshold", "seed 1", "t = 0.3")]
    (training, at_test, cost), kept = draw("threshold", *trained, place.lm["split"])
    assert f"{place.lm['split']} is left out" in capsys.readouterr().err  # it differs in more than t and the seed
    by_kind = {}
    for record in kept["records"]:
        point = record["threshold t"], record["perplexity"], record["experts that serve a token"]
        by_kind.setdefault(record["t is changed"], []).append(point)
    for folder, point in zip(trained, by_kind["in training"], strict=True):
        t, result = read(folder, "config.json")["threshold"], read(folder)["test"]
        assert point == (t, result["ppl"], fmean(layer["served"] for layer in result["layers"]))
    for name, changes in {"at test": {}, "at test, no limit": {"eval_capacity": 1e9}}.items():
        assert [t for t, _, _ in by_kind[name]] == [0, 0.9, 1]
        for t, *numbers in by_kind[name]:
            assert numbers == pytest.approx(literal(trained[0], place.text, eval_threshold=t, **changes))
    assert [served for _, _, served in by_kind["at test, no limit"]][::2] == [1, E]
    assert lines(training)[0][1] == [0.9, 0.9, 0.3]
    for i, panel in enumerate((at_test, cost), 1):
        drawn = {name: ys for name, _, ys in lines(panel)}
        assert {*drawn} == {"at test", "at test, no limit"}
        assert drawn == {name: [point[i] for point in by_kind[name]] for name in drawn}


def test_speed_is_the_median_over_rounds(draw, place, monkeypatch):
    """test_bench.py tests the rounds."""
    threshold, dense = place.lm["threshold"], place.lm["dense"]

    def in_turns(calls, context, rounds):
        for call in calls.values():
            call()
        return {name: [99.0, 9.0 + name, 1.0] for name in calls}

    monkeypatch.setattr(timing, "in_turns", in_turns)
    monkeypatch.setattr(xmoe, "SHARES", (0.5, 1.0))
    (axes,), kept = draw("speed", threshold, dense)
    medians = [(threshold, 0.5, 9), (threshold, 1, 10), (dense, 1, 11)]
    assert points(kept, "run", xmoe.LIMIT, "ms per batch") == medians
    *limited, of_dense = (record[xmoe.SPENT] for record in kept["records"])
    assert limited[0] < limited[1] <= of_dense == 1
    drawn = [point for _, xs, ys in lines(axes) for point in zip(xs, ys)]
    assert drawn == points(kept, xmoe.SPENT, "ms per batch")


def entering(folder: str, languages: Path) -> tuple[torch.Tensor, list[int], torch.nn.Module]:
    """Each token's hidden state as it enters the sparse layer, under the first masking; its expert; the layer."""
    model, _ = pretrained.load(folder)
    states, chosen = [], []

    def watch(moe, h, routing, kept):
        states.extend(h.double())
        chosen.extend(row.index(max(row)) for row in routing.priority.tolist())

    (moe,) = model.moe_layers
    moe.watchers.append(watch)
    with torch.no_grad():
        for _, _, batch in MaskedData(languages, 16, 128, mask_share=0.4).eval_batches("valid", 1):
            model(batch.ids, batch.nonpad)
    return torch.stack(states), chosen, moe


def test_collapse_is_read_from_the_logs(draw, place, tmp_path):
    folders = [place.mlm["SMoE"], place.mlm["X-MoE"]]
    (rc, rf), kept = draw("collapse", *folders)
    for number, folder in enumerate(folders):
        records = log(folder)
        layers = [record["layers"][0] for record in records]
        assert lines(rc)[number][1:] == ([2, 4], [layer["rc"] for layer in layers])
        assert lines(rf)[number][2][1:] == [layer["rf"] for layer in layers[1:]]
        drawn = [record["perplexity"] for record in kept["records"] if record["run"] == folder]
        assert drawn == [record["ppl"] for record in records]
    names = [name for name, _, _ in lines(rc)]
    assert names == ["switch 4 x 16, layer 1", "hypersphere 4 x 16, layer 1"]
    config = read(folders[0], "config.json") | {"moe_after": [2, 1]}  # the log has them in the encoder's order
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "result.json").write_text("{}")
    layers = [{"rc": 1.0, "rf": 0.1}, {"rc": 2.0, "rf": 0.2}]
    log_of = [json.dumps({"step": step, "ppl": 9.0, "predicted": 1, "layers": layers}) for step in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(log_of))
    _, kept = draw("collapse", tmp_path)
    rows = [(row[0][-7:], row[1], row[3]) for row in kept["table"][1:]]
    assert rows == [(f"layer {depth}", step, str(depth)) for depth in (1, 2) for step in range(1, 7)]


def test_the_disk_keeps_hyperbolic_distances_and_is_centred():
    torch.manual_seed(0)
    x = 3 + 2 * torch.randn(20, 2, dtype=torch.float64)
    disk = x_moe.poincare(x)
    z, room = (1 + x.square().sum(dim=1)).sqrt(), 1 - disk.square().sum(dim=1)
    cosh = z.outer(z) - x @ x.t()  # of the distance between each two points
    torch.testing.assert_close(cosh, 1 + 2 * torch.cdist(disk, disk).square() / room.outer(room))
    assert disk.mean(dim=0).norm() < 0.2 < disk.norm(dim=1).max() < 1


class Flat:
    """A stand-in for UMAP, which compiles for a minute: the first two coordinates of each point."""

    def __init__(self, **options):
        paper = {"n_neighbors": 100, "min_dist": 1.0, "output_metric": "hyperboloid"}  # X-MoE 4.5
        assert paper.items() <= options.items()

    def fit_transform(self, x):
        return np.ascontiguousarray(x[:, :2])


def test_umap_embeds_what_the_router_compares(draw, place, monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=Flat))
    folders = [place.mlm["SMoE"], place.mlm["X-MoE"]]
    axes, kept = draw("umap", *folders, "--max_tokens", 1 << 16)
    for folder, panel in zip(folders, axes):
        h, chosen, moe = entering(folder, place.languages)
        with torch.no_grad():
            compared = h if folder == folders[0] else h.float() @ moe.router.project.weight.t()  # h; W h
        disk = x_moe.poincare(compared[:, :2].double())
        run = kept["runs"][folder]
        torch.testing.assert_close(torch.tensor(run["points"]).double(), disk, rtol=1e-3, atol=1e-5)
        assert run["experts"] == chosen
        np.testing.assert_allclose(panel.collections[0].get_offsets(), run["points"], rtol=1e-5)
        assert panel.collections[0].get_array().tolist() == chosen


def test_the_gradient_through_the_gate_is_a_sum_of_embeddings(draw, place):
    """X-MoE eqs. 4 to 6. Here E is 4, d_e 2 and D 16; the rest spans all 16 dimensions."""
    folders = [place.mlm["SMoE"], place.mlm["X-MoE"]]
    (gate, rest), kept = draw("gradient", *folders, "--max_tokens", 256)
    for folder, (_, _, sizes), (_, _, others), row in zip(folders, lines(gate), lines(rest), kept["table"][1:]):
        run = x_moe.TrainedRun(folder, read(folder, "config.json"), [])
        [run] = x_moe.shared.loaded([run], x_moe.EvalOptions(device="cpu"))
        through_gate, other = x_moe.gradients(run, 256)
        router = run.model.moe_layers[0].router
        spanned = router.project.weight if router.on_sphere else router.experts
        dimensions = len(spanned)
        residual = through_gate.t() - spanned.t() @ torch.linalg.lstsq(spanned.t(), through_gate.t()).solution
        assert residual.norm() < 1e-5 * through_gate.norm()
        assert torch.linalg.matrix_rank(through_gate, rtol=1e-4) == int(row[1]) <= dimensions
        assert min(others) > -6
        assert sizes[dimensions] < -6 < sizes[int(row[1]) - 1]
        assert float(row[2]) == pytest.approx(float(through_gate.norm() / (through_gate + other).norm()), rel=1e-3)


def test_consistency_is_the_mean_correlation(draw, tmp_path, monkeypatch, capsys):
    """On folders like those of finetune_xtreme.py: loads of 3 x 100 steps, one layer, three experts."""
    monkeypatch.chdir(tmp_path)

    def fine_tuned(name: str, loads, **constants) -> Path:
        folder = Path("out/finetune_xtreme", name)
        folder.mkdir(parents=True)
        config = {"model": "out/train_mlm/demo", "frozen": True, "train_examples": None, "epochs": 3, "seed": 0}
        config |= {"task": "tags", "data_checksum": name}  # which includes the new head's weights
        (folder / "config.json").write_text(json.dumps(config | constants))
        (folder / "metrics.jsonl").write_text('{"step": 200}\n')
        (folder / "result.json").write_text(json.dumps({"loads": loads}))
        return folder

    loads = [[[1, 2, 3]] * 3, [[2, 4, 6], [3, 2, 1], [1, 2, 3]], [[5, 6, 7], [1, 2, 4], [1, 2, 3]]]
    first, *_ = [fine_tuned(f"demo {seed}", [[span] for span in run], seed=seed) for seed, run in enumerate(loads)]
    fine_tuned("demo, alone of its kind", [[[1, 2, 3]]], epochs=2)
    fine_tuned("demo, dense", [[], []], model="dense")
    fine_tuned("no demo", [[[3, 2, 1]]] * 3, seed=9)
    (axes,), kept = draw("consistency")
    pearson = np.corrcoef([[1, 2, 3], [3, 2, 1], [1, 2, 4]])
    ((_, steps, values),) = lines(axes)
    assert steps == [100, 200, 300]
    assert values == pytest.approx([1, pearson.mean(), 1])
    assert levels(axes) == {"3 runs with unrelated loads": pytest.approx(1 / 3)}
    assert [row[1] for row in kept["table"][1:]] == [100, 300]
    warnings = capsys.readouterr().err
    assert "demo, epochs 2 is left out" in warnings
    assert "demo, dense is left out: it has no experts" in warnings
    short = fine_tuned("short", [], epochs=1)
    with pytest.raises(SystemExit):
        run(monkeypatch, "consistency", first, short)
    error = capsys.readouterr().err
    assert f"{short} is left out: it is shorter than 100 steps" in error
    assert "no two finished runs" in error


def test_unsuitable_runs_are_refused_in_one_line(place, tmp_path, monkeypatch, capsys):
    """A warning may come before the error, if a run is left out."""

    def messages(*line) -> str:
        with pytest.raises(SystemExit) as stop:
            run(monkeypatch, *line, "--out", tmp_path)
        *warnings, error = capsys.readouterr().err.splitlines()
        assert stop.value.code == 1
        assert error.startswith("error: ")
        assert [warning.split()[0] for warning in warnings] in ([], ["warning:"])
        return "\n".join([*warnings, error])

    def changed(folder: str, missing=(), **changes) -> str:
        copy = shutil.copytree(folder, tmp_path / f"copy {len([*tmp_path.iterdir()])}")
        (copy / "config.json").write_text(json.dumps(read(folder, "config.json") | changes))
        for file in missing:
            (copy / file).unlink()
        return str(copy)

    lm, sphere, dense = place.lm, place.mlm["X-MoE"], place.mlm["dense"]
    checkpoints = [file.name for file in Path(lm["threshold"]).glob("ckpt*")]
    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=Flat))
    for line, error in {
        ("collapse", lm["switch"]): f"{lm['switch']} is not a run of train_mlm.py",
        ("threshold", lm["switch"]): f"{lm['switch']} is left out: it has no threshold router",
        ("experts", lm["dense"]): "no suitable finished run of train_lm.py",
        ("gamma", changed(lm["threshold"], checkpoints)): "is neither the folder of a run",
        ("gamma", changed(lm["threshold"], data_checksum="another")): "was trained on it",
        ("gamma", lm["switch"], "--max_tokens", -1): "max_tokens must be over 0",
        ("gamma", lm["switch"], "--device", "nowhere"): "device nowhere",
        ("collapse", dense): f"{dense} is left out: it has no experts",
        ("collapse", changed(sphere, router="of yesterday")): "router must be dense, FILE.py:NAME, or one of",
        ("umap", dense): "has no router that compares tokens",
        ("umap", changed(sphere, router="hash")): "has no router that compares tokens",
        ("umap", sphere, "--max_tokens", 64): "100 neighbours",
    }.items():
        assert error in messages(*line), line
    monkeypatch.setitem(sys.modules, "umap", None)
    assert "umap is not installed: pip install -r requirements-dev.txt" in messages("umap", sphere)
