"""`analyze.py`, XMoE's and X-MoE's figures: what is drawn against logs, results and literal loops, on tiny runs."""

import dataclasses
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
import torch.nn.functional as F
from helpers import TINY_LM, Script
from test_analyze import kept, lines, refused, run

import train_lm
import train_mlm
from analysis import measures, shared, x_moe, xmoe
from data.batches import MaskedData, TokenData
from data.prepare import prepare
from data.tokenizers import XLMR, train_sentencepiece
from engine import pretrained

pytest.importorskip("matplotlib")
LM_RUNS = {
    "threshold": {},  # 32 experts of width 8, beside FFNs of width 32
    "seed 1": {"seed": 1},
    "t = 0.3": {"threshold": 0.3},
    "switch": {"router": "switch"},
    "switch, seed 1": {"router": "switch", "seed": 1},
    "dense": {"router": "dense"},
    "split": dict(moe_every=1, threshold=1.0, expert_ffns=1, split=4),  # as in table 2
}
TINY_MLM = dict(n_layer=2, n_head=2, n_embd=16, ffn_size=32, block_size=16, micro_tokens=128, batch_tokens=128, steps=4)
TINY_MLM |= dict(experts=4, expert_size=16, moe_after=(1,), eval_every=2, eval_maskings=2, log_every=1)
TINY_MLM |= dict(device="cpu", dtype="float32", learning_rate=0.05)
MLM_RUNS = {"X-MoE": {}, "SMoE": {"router": "switch"}, "hash": {"router": "hash"}, "dense": {"router": "dense"}}
# What a dense model does not read is refused, where it is not the default.
DENSE = dict(experts=32, expert_size=128, moe_after=(2,))
E, WIDTH, FFN = 32, 8, 32


def train(script, base: Path, constants: dict, changes: dict) -> dict[str, str]:
    """name -> folder of each run, seen from `base`"""
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        for name, change in changes.items():
            before = {*Path("out", script.__name__).glob("*")}
            Script(script).run(constants | change, patch)
            ((folders[name]),) = {*Path("out", script.__name__).glob("*")} - before
    return {name: str(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def trained(corpora, tmp_path_factory) -> SimpleNamespace:
    """Tiny language models, and tiny encoders of three languages, in one place with nothing else in it."""
    base = tmp_path_factory.mktemp("analyzed")
    rng = np.random.default_rng(0)
    (base / "text").mkdir()
    texts = []
    for language, letters in {"aa": "abcdefg", "bb": "hijklmnop", "cc": "qrstuv"}.items():
        words = ["".join(rng.choice(list(letters), size=rng.integers(2, 6))) for _ in range(3000)]
        texts.append("\n\n".join(" ".join(words[at : at + 12]) for at in range(0, len(words), 12)))
        (base / "text" / f"{language}.txt").write_text(texts[-1])
    spm = train_sentencepiece(texts, 300, XLMR).save(base)
    languages = prepare("cc100", base / "text", tokenizer=spm, out=base / "languages")
    (base / "a").symlink_to(corpora["a"])  # so that no name of a run is long enough to be cut
    small = {name: value for name, value in TINY_LM.items() if name not in ("n_head", "eval_tokens")}
    lm = train(train_lm, base, small | {"data": "a", "learning_rate": 0.03}, LM_RUNS)
    changes = {name: change | (DENSE if name == "dense" else {}) for name, change in MLM_RUNS.items()}
    mlm = train(train_mlm, base, TINY_MLM | {"data": languages}, changes)
    return SimpleNamespace(base=base, lm=lm, mlm=mlm, text=corpora["a"], languages=languages)


@pytest.fixture(autouse=True)
def place(trained, monkeypatch):
    """Where the runs are, as a user sees them."""
    monkeypatch.chdir(trained.base)
    return trained


def read(folder: str, name: str = "result.json"):
    return json.loads(Path(folder, name).read_text())


def log(folder: str) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def of(found: dict, *folders: str) -> list[dict]:
    """The records of some runs."""
    return [record for record in found["records"] if record["run"] in folders]


def points(found: dict, *names: str) -> list[tuple]:
    return [tuple(record[name] for name in names) for record in found["records"]]


def literal(folder: str, text: Path, **changes) -> tuple[float, float]:
    """Perplexity of the test text, window by window of a micro-batch, and rows served per token and MoE layer."""
    model, _ = pretrained.load(folder, **changes)
    served, losses = [], []
    for moe in model.moe_layers:
        moe.watchers.append(lambda moe, h, routing, kept: served.extend(kept.sum(dim=1).tolist()))
    with torch.no_grad():
        for x, y in TokenData(text, 16, 64).eval_batches("test"):
            logp = model(x)[0].log_softmax(dim=2)
            losses += [-float(logp[b, t, y[b, t]]) for b in range(len(y)) for t in range(y.shape[1])]
    return math.exp(fmean(losses)), fmean(served)


# ---------------------------------------------------------------------------------------------------------------------
# XMoE


@pytest.mark.parametrize("name", LM_RUNS)
def test_a_run_tested_again_gives_its_result(name, place):
    folder = place.lm[name]
    opened = shared.open_runs({folder: read(folder, "config.json")}, xmoe.Gamma(device="cpu"))
    ppl, layers = xmoe.test(opened[folder], 1 << 16)
    before = read(folder)["test"]
    assert ppl == before["ppl"] and layers == before["layers"]


def test_activations_are_those_of_results_and_of_a_loop(draw, place):
    (number, size), found = draw("activations")
    positive = {record["run"]: record["positive"] for record in found["records"]}
    for name in ("threshold", "switch", "split"):
        layers = read(place.lm[name])["test"]["layers"]
        assert positive[place.lm[name]] == fmean(layer["positive"] for layer in layers)
    model, _ = pretrained.load(place.lm["dense"])
    above = units = 0
    with torch.no_grad():
        for x, _ in TokenData(place.text, 16, 64).eval_batches("test"):
            h, _ = model.blocks[0](model.wte(x) + model.wpe.weight[: x.shape[1]], x)
            h = h + model.blocks[1].attn(model.blocks[1].ln_1(h))  # where the sparse models have experts
            a = model.blocks[1].ffn.fc(model.blocks[1].ln_2(h))
            above += sum(unit > 0 for unit in a.flatten().tolist())
            units += a.numel()
    assert positive[place.lm["dense"]] == above / units
    full = {name: ("switch", 8) for name in ("switch", "switch, seed 1")} | {"dense": ("dense", 1)}
    drawn = sorted((label, *x, *y) for label, x, y in lines(number))
    assert drawn == sorted((*what, positive[place.lm[name]]) for name, what in full.items())
    small = {name: ("threshold", WIDTH) for name in ("threshold", "seed 1", "t = 0.3", "split")}
    every = {name: (router, FFN) for name, (router, _) in full.items()} | small
    drawn = sorted((label, *x, *y) for label, x, y in lines(size))
    assert drawn == sorted((*what, positive[place.lm[name]]) for name, what in every.items())


def test_gamma_is_what_is_left_of_a_dense_ffns_work(draw, place, capsys):
    names = "threshold", "switch", "dense", "split"
    axes, found = draw("gamma", *(place.lm[name] for name in names), "--shares", 8, 0.5, 1)
    by_name = {name: {one[xmoe.LIMIT]: one for one in of(found, place.lm[name])} for name in names}
    for name, own in by_name.items():
        assert list(own) == ([1] if name == "dense" else [0.5, 1, 8])
        assert own[1]["perplexity"] == read(place.lm[name])["test"]["ppl"]
    for name in ("threshold", "switch"):  # 8 x FFN: gamma = E
        assert by_name[name][8]["perplexity"] == read(place.lm[name])["test_no_limit"]["ppl"]
    ppl, served = literal(place.lm["threshold"], place.text, eval_capacity=0.5)
    assert by_name["threshold"][0.5]["perplexity"] == pytest.approx(ppl, rel=1e-6)
    assert by_name["threshold"][0.5][xmoe.SPENT] == pytest.approx(served * WIDTH / FFN)
    ppl, served = literal(place.lm["split"], place.text, eval_capacity=0.5, eval_threshold=0.9)
    assert by_name["split"][0.5]["perplexity"] == pytest.approx(ppl, rel=1e-6)
    assert by_name["split"][0.5][xmoe.SPENT] == pytest.approx(served / 4)
    assert by_name["dense"][1][xmoe.SPENT] == 1
    for panel, x in zip(axes, (xmoe.LIMIT, xmoe.SPENT)):
        drawn = [list(zip(xs, ys)) for _, xs, ys in lines(panel)]
        assert [point for line in drawn for point in line] == points(found, x, "perplexity")
    assert f"{ppl:.5g}" in capsys.readouterr().out


def test_a_limit_is_a_share_of_a_dense_ffns_flops(place):
    """Of what an expert's matrices cost, whatever they are; and a run's own threshold at test comes back."""
    model, _ = pretrained.load(place.lm["threshold"])
    config = read(place.lm["threshold"], "config.json") | {"eval_threshold": 0.4}
    xmoe.limit(model, config, 0.5)
    (moe,) = model.moe_layers
    assert moe.eval_gamma == 0.5 * FFN / WIDTH and model.config.eval_threshold == 0.4
    moe.experts[0].w_gate = torch.nn.Parameter(torch.zeros(E, WIDTH, 16))
    xmoe.limit(model, config, 0.5)
    assert moe.eval_gamma == pytest.approx(0.5 * FFN / WIDTH * 2 / 3)
    split = read(place.lm["split"], "config.json")
    for share, t in {0.5: 0.9, 1.0: None}.items():  # table 2
        xmoe.limit(model, split, share)
        assert model.config.eval_threshold == t


def test_runs_are_compared_by_seed_and_by_document(place, tmp_path, monkeypatch):
    runs_of = [[place.lm[name] for name in names] for names in (("switch", "switch, seed 1"), ("threshold", "seed 1"))]
    run(monkeypatch, "compare", *runs_of[0], *runs_of[1], "--out", tmp_path / "drawn")
    found = kept(tmp_path, "compare")
    one, two = ([read(folder)["test"]["bpb"] for folder in own] for own in runs_of)
    first, other = f"switch 8 x {FFN}", f"threshold {E} x {WIDTH}"
    more = f"more than {first}"
    assert points(found, "run", "seed", "bits/byte") == [
        (first, "0", pytest.approx(one[0])),
        (first, "1", pytest.approx(one[1])),
        (other, "0", pytest.approx(two[0])),
        (other, "1", pytest.approx(two[1])),
    ]
    of_seeds = [b - a for a, b in zip(one, two)]
    assert [record[more] for record in found["records"]] == [
        None,
        None,
        *(pytest.approx(d, abs=1e-6) for d in of_seeds),
    ]
    data, sums = TokenData(place.text, 16, 64), [[0.0, 0]]
    models = [[pretrained.load(folder)[0] for folder in own] for own in runs_of]
    with torch.no_grad():
        for x, y in data.eval_batches("test"):
            target, losses = y.flatten(), []
            for own in models:
                nats = [F.cross_entropy(model(x)[0].flatten(0, 1), target, reduction="none") for model in own]
                losses.append(torch.stack(nats).double().mean(dim=0).tolist())
            for token, a, b in zip(target.tolist(), *losses):
                sums[-1][0] += b - a
                sums[-1][1] += 1
                if token == data.tokenizer.eot:
                    sums.append([0.0, 0])
    if not sums[-1][1]:
        sums.pop()
    counts = data.meta["splits"]["test"]
    assert len(sums) > 2
    ends = measures.bootstrap(*torch.tensor(sums, dtype=torch.float64).T)
    low, high = (measures.bits_per_byte(end, counts) for end in ends)
    row = found["table"][2]
    assert row[:3] == [other, f"{low:+.4f} to {high:+.4f}", f"{sum(d > 0 for d in of_seeds)} of 2 seeds"]
    assert low < fmean(of_seeds) < high and row[4].startswith(f"{fmean(of_seeds):.3g}"[:6])


def test_runs_without_a_seed_in_common_are_not_compared(place, tmp_path, monkeypatch):
    folders = place.lm["switch"], place.lm["seed 1"], f"{place.lm['switch']}/"  # one of them twice
    run(monkeypatch, "compare", *folders, "--out", tmp_path / "drawn")
    found = kept(tmp_path, "compare")
    assert found["table"][2][0] == f"threshold {E} x {WIDTH}"
    assert found["table"][2][1:3] == ["", ""] and len(found["records"]) == 2


def test_experts_wanted_are_the_logs(draw, place):
    axes, found = draw("experts")
    expected = {}
    for name in ("threshold", "seed 1", "t = 0.3", "split"):
        records = log(place.lm[name])
        expected[name] = []
        for layer in range(len(records[0]["layers"])):
            expected[name].append(([2, 4], [record["layers"][layer]["wanted"] for record in records]))
    drawn = sorted([(xs, ys) for _, xs, ys in lines(panel)] for panel in axes)
    panels = expected["threshold"] + expected["seed 1"], expected["t = 0.3"], expected["split"]
    assert sorted(map(sorted, drawn)) == sorted(map(sorted, panels))
    assert [label for panel in axes for label, _, _ in lines(panel)].count("block 2") == 4
    assert all(panel.get_ylim()[0] == 0 for panel in axes)
    assert {row[2] for row in found["table"][1:]} == {4}


def test_thresholds_in_training_and_at_test(draw, place):
    trained = [place.lm[name] for name in ("threshold", "seed 1", "t = 0.3")]
    (training, at_test, served), found = draw("threshold", *trained, "--thresholds", 0.9, 0, 1)
    by_kind = {}
    for record in found["records"]:
        by_kind.setdefault(record["t is changed"], []).append(record)
    for folder, record in zip(trained, by_kind["in training"], strict=True):
        t, result = read(folder, "config.json")["threshold"], read(folder)["test"]
        served_then = fmean(layer["served"] for layer in result["layers"])
        assert (record["t"], record["perplexity"], record["served"]) == (t, result["ppl"], served_then)
    for name, changes in {"at test": {}, "at test, no limit": {"eval_capacity": 1e9}}.items():
        assert [record["t"] for record in by_kind[name]] == [0, 0.9, 1]
        for record in by_kind[name]:
            again = literal(trained[0], place.text, eval_threshold=record["t"], **changes)
            assert (record["perplexity"], record["served"]) == pytest.approx(again)
    assert [record["served"] for record in by_kind["at test, no limit"]][::2] == [1, E]
    assert sorted(t for _, (t,), _ in lines(training)) == [0.3, 0.9, 0.9]
    for line, name in zip(lines(at_test), ("at test", "at test, no limit")):
        assert line == (name, [0, 0.9, 1], [record["perplexity"] for record in by_kind[name]])
    assert lines(served)[-2][2] == [record["served"] for record in by_kind["at test"]]


def test_of_all_finished_runs_those_that_differ_by_t_and_seed_are_drawn(draw, place, tmp_path):
    line = "threshold", "--thresholds", 0.5, "--max_tokens", 64
    _, found = draw(*line)
    assert {record["run"] for record in found["records"]} == {place.lm["split"]}  # the first by its name
    hidden = Path(place.lm["split"], "result.json").rename(tmp_path / "result.json")
    _, found = draw(*line)
    hidden.rename(Path(place.lm["split"], "result.json"))
    assert {record["run"] for record in found["records"]} == {
        place.lm[name] for name in ("threshold", "seed 1", "t = 0.3")
    }


def test_speed_is_the_median_of_many_turns(draw, place, monkeypatch):
    times = iter(range(1, 100))
    monkeypatch.setattr(xmoe, "time_batch", lambda run: float(next(times)))
    folders = [place.lm[name] for name in ("threshold", "seed 1", "switch", "dense")]
    (axes,), found = draw("speed", *folders, "--shares", 1, 0.5, "--rounds", 3)
    threshold, switch, dense = (place.lm[name] for name in ("threshold", "switch", "dense"))
    assert points(found, "run", xmoe.LIMIT, "ms") == [  # the second round is in the other order
        (threshold, 0.5, median_of(1, 10, 11)),  # seed 1 would take as long as seed 0
        (threshold, 1, median_of(2, 9, 12)),
        (switch, 0.5, median_of(3, 8, 13)),
        (switch, 1, median_of(4, 7, 14)),
        (dense, 1, median_of(5, 6, 15)),
    ]
    spent = [record[xmoe.SPENT] for record in found["records"]]
    assert spent[-1] == 1 and spent[0] < spent[1] <= 1
    drawn = [point for _, xs, ys in lines(axes) for point in zip(xs, ys)]
    assert drawn == points(found, xmoe.SPENT, "ms")


def median_of(*three: int) -> int:
    return sorted(three)[1]


def test_a_batch_takes_time(place):
    folder = place.lm["dense"]
    opened = shared.open_runs({folder: read(folder, "config.json")}, xmoe.Speed(device="cpu"))
    assert 0 < xmoe.time_batch(opened[folder]) < 60_000


# ---------------------------------------------------------------------------------------------------------------------
# X-MoE


def entering(folder: str, languages: Path) -> tuple[torch.Tensor, list[int], torch.nn.Module]:
    """Of every token under the first masking the hidden state that enters the sparse layer, its expert; the layer."""
    model, _ = pretrained.load(folder)
    states, chosen = [], []

    def watch(moe, h, routing, kept):
        states.extend(h.double())
        chosen.extend(row.index(max(row)) for row in routing.priority.tolist())

    (moe,) = model.moe_layers
    moe.watchers.append(watch)
    with torch.no_grad():
        for _, _, batch in MaskedData(languages, 16, 128, mask_share=0.4).eval_batches("valid", 1):
            model(batch.ids, batch.real)
    return torch.stack(states), chosen, moe


def test_collapse_is_the_logs_and_what_layers_add(draw, place):
    folders = [place.mlm["SMoE"], place.mlm["X-MoE"]]
    (rc, rf), found = draw("collapse", *folders)
    for number, folder in enumerate(folders):
        layers = [record["layers"][0] for record in log(folder)]
        assert lines(rc)[number][1:] == ([2, 4], [layer["rc"] for layer in layers])
        assert lines(rf)[number][1:] == ([4], [layers[1]["rf"]])
        h, _, moe = entering(folder, place.languages)
        y, _ = moe(h[None], torch.zeros(1, len(h), dtype=torch.long))  # no capacity limit: each token for itself
        added = float((y[0].detach().norm(dim=1) / h.norm(dim=1)).mean())
        before, last = of(found, folder)
        assert before["adds"] is None and last["adds"] == pytest.approx(added, rel=1e-5)
        assert [one["perplexity"] for one in (before, last)] == [record["ppl"] for record in log(folder)]
    assert [label for label, _, _ in lines(rc)] == ["switch 4 x 16, layer 1", "hypersphere 4 x 16, layer 1"]


def test_the_disk_keeps_hyperbolic_distances_and_has_its_points_around_its_middle():
    torch.manual_seed(0)
    x = 3 + 2 * torch.randn(20, 2, dtype=torch.float64)
    disk = x_moe.poincare(x)
    for a, u in zip(x.tolist(), disk.tolist()):
        for b, v in zip(x.tolist(), disk.tolist()):
            z = math.sqrt(1 + a[0] ** 2 + a[1] ** 2), math.sqrt(1 + b[0] ** 2 + b[1] ** 2)
            cosh = z[0] * z[1] - a[0] * b[0] - a[1] * b[1]
            apart = (u[0] - v[0]) ** 2 + (u[1] - v[1]) ** 2
            room = (1 - u[0] ** 2 - u[1] ** 2) * (1 - v[0] ** 2 - v[1] ** 2)
            assert cosh == pytest.approx(1 + 2 * apart / room)
    back = 2 * disk / (1 - disk.square().sum(dim=1, keepdim=True))  # on the hyperboloid again
    assert back.mean(dim=0).abs().max() < 1e-9 < disk.abs().mean()


class Flat:
    """In place of UMAP, which compiles for a minute: the first two numbers of each point."""

    made = []

    def __init__(self, **options):
        self.made.append(options)

    def fit_transform(self, x):
        return np.ascontiguousarray(x[:, :2])


def test_umap_sees_what_the_router_does_in_any_type(place):
    """The router computes in fp32 where the layers around it do not."""
    found, folder = [], place.mlm["X-MoE"]
    for dtype in (torch.float32, torch.bfloat16):
        run = shared.open_runs({folder: read(folder, "config.json")}, x_moe.Umap(device="cpu"))[folder]
        run = run._replace(context=dataclasses.replace(run.context, dtype=dtype))
        found.append(x_moe.routed(folder, run, x_moe.Umap(max_tokens=1 << 16))[0])
    assert found[1].dtype == torch.float32
    assert not torch.equal(*found)
    torch.testing.assert_close(*found, rtol=0.1, atol=0.1)


def test_umap_is_given_what_the_router_compares(draw, place, monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=Flat))
    folders = [place.mlm["SMoE"], place.mlm["X-MoE"]]
    axes, found = draw("umap", *folders, "--max_tokens", 1 << 16)
    for folder, panel in zip(folders, axes):
        h, chosen, moe = entering(folder, place.languages)
        with torch.no_grad():
            seen = h if folder == folders[0] else h.float() @ moe.router.project.weight.t()  # h; W h
        disk = x_moe.poincare(seen[:, :2].double())
        own = found["runs"][folder]
        torch.testing.assert_close(torch.tensor(own["points"]).double(), disk, rtol=1e-3, atol=1e-5)
        assert own["experts"] == chosen
        *experts, circle = panel.lines
        looks = {(one.get_color(), one.get_marker()) for one in experts}
        assert len(looks) == len(experts) == len(set(chosen))
        for number, line in zip(sorted(set(chosen)), experts):
            points = [point for point, expert in zip(own["points"], chosen) if expert == number]
            np.testing.assert_allclose(line.get_xydata(), points, rtol=1e-5)
    options = {"n_neighbors": 100, "min_dist": 1.0, "output_metric": "hyperboloid"}  # X-MoE 4.5
    assert all(options.items() <= made.items() for made in Flat.made)


def fine_tuned(folder: Path, loads, **constants) -> Path:
    """A folder such as finetune_xtreme.py leaves."""
    folder.mkdir(parents=True)
    config = {"model": "out/train_mlm/demo", "frozen": True, "train_examples": None, "epochs": 3, "seed": 0}
    (folder / "config.json").write_text(json.dumps(config | constants))
    (folder / "metrics.jsonl").write_text('{"step": 200}\n')
    (folder / "result.json").write_text(json.dumps({"loads": loads}))
    return folder


@pytest.fixture
def tuned(place):
    """Runs of an encoder: loads of two times 100 steps, one layer, three experts."""
    base = place.base / "out/finetune_xtreme"
    loads = [[1, 2, 3], [1, 2, 3]], [[2, 4, 6], [3, 2, 1]], [[5, 6, 7], [1, 2, 4]]
    for seed, own in enumerate(loads):
        fine_tuned(base / ("demo" if seed == 0 else f"demo-seed={seed}"), [[layer] for layer in own], seed=seed)
    yield base
    shutil.rmtree(base)


def test_consistency_is_the_mean_correlation(draw, tuned):
    fine_tuned(tuned / "demo-epochs=2", [[[1, 2, 3]]], epochs=2)  # alone of its kind
    fine_tuned(tuned / "demo-model=dense", [[], []], model="dense")
    (axes,), found = draw("consistency")
    pearson = np.corrcoef([[1, 2, 3], [3, 2, 1], [1, 2, 4]])
    line, chance = lines(axes)
    assert line[1] == [100, 200] and line[2] == pytest.approx([1, pearson.mean()])
    assert chance[0].startswith("3 runs") and chance[2] == pytest.approx([1 / 3] * 2)
    assert [row[1] for row in found["table"][1:]] == [100, 200]
    assert "seed 0, 1, 2" in found["caption"] and "epochs" not in found["caption"]


# ---------------------------------------------------------------------------------------------------------------------
# What a user can get wrong


def test_runs_that_do_not_fit_are_one_clear_line(place, tmp_path, monkeypatch, capsys):
    lm, mlm = place.lm, place.mlm

    def told(*line) -> str:
        return refused(monkeypatch, capsys, *line, "--out", tmp_path)

    for name in ("activations", "gamma", "threshold", "speed", "experts"):
        assert f"{mlm['X-MoE']} holds no run of train_lm.py" in told(name, mlm["X-MoE"])
        assert "nowhere holds no run" in told(name, "nowhere")
    for name in ("umap", "collapse"):
        assert f"{lm['switch']} holds no run of train_mlm.py" in told(name, lm["switch"])
    assert f"{mlm['dense']} has no experts" in told("collapse", mlm["X-MoE"], mlm["dense"])
    for name in ("threshold", "experts"):
        for other in ("switch", "dense"):
            assert f"{lm[other]} has no threshold router" in told(name, lm["threshold"], lm[other])
    assert "differ by more than --threshold and --seed" in told("threshold", lm["threshold"], lm["split"])
    for shares in ((0,), (1, -1), ("nan",)):
        assert "--shares must be numbers over 0" in told("gamma", lm["switch"], "--shares", *shares)
        assert "--shares must be numbers over 0" in told("speed", lm["switch"], "--shares", *shares)
    for t in (1.5, -1, "nan"):
        assert "--thresholds must lie from 0 to 1" in told("threshold", lm["threshold"], "--thresholds", t)
    assert "max_tokens must be over 0" in told("gamma", lm["switch"], "--max_tokens", -1)
    assert "device nowhere" in told("gamma", lm["switch"], "--device", "nowhere")
    later = shutil.copytree(lm["switch"], tmp_path / "later")
    (later / "config.json").write_text(json.dumps(read(lm["switch"], "config.json") | {"router": "expert_choice"}))
    for name in ("gamma", "compare"):
        assert "choose among later tokens too" in told(name, later)
    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=Flat))
    for name in ("dense", "hash"):
        assert f"{mlm[name]} has no router that compares tokens" in told("umap", mlm["X-MoE"], mlm[name])
    assert "has 1 sparse layers" in told("umap", mlm["X-MoE"], "--layer", 2)
    assert "100 neighbours" in told("umap", mlm["X-MoE"], "--max_tokens", 64)
    monkeypatch.setitem(sys.modules, "umap", None)
    assert "pip install umap-learn" in told("umap", mlm["X-MoE"])


def test_runs_that_are_not_there_are_one_clear_line(place, tmp_path, monkeypatch, capsys):
    copy = shutil.copytree(place.lm["threshold"], tmp_path / "copy")
    result = (copy / "result.json").rename(tmp_path / "result.json")
    assert f"{copy} is not finished" in refused(monkeypatch, capsys, "experts", copy)
    result.rename(copy / "result.json")
    for file in copy.glob("ckpt*"):
        file.unlink()
    assert f"{copy} is neither the folder of a run" in refused(monkeypatch, capsys, "gamma", copy)
    monkeypatch.chdir(tmp_path)
    for name, script in {"gamma": "train_lm", "collapse": "train_mlm", "consistency": "finetune_xtreme"}.items():
        assert f"out/{script} holds no finished run of the demo" in refused(monkeypatch, capsys, name)


def test_data_that_is_another_is_one_clear_line(place, corpora, tmp_path, monkeypatch, capsys):
    folder = place.lm["threshold"]
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = read(folder, "config.json")
    (copy / "config.json").write_text(json.dumps(config | {"data_checksum": "another"}))
    assert f"has changed since {copy} was trained on it" in refused(monkeypatch, capsys, "gamma", copy)
    (copy / "config.json").write_text(json.dumps(config))
    assert f"2 of the runs are threshold {E} x {WIDTH} with seed 0" in refused(
        monkeypatch, capsys, "compare", folder, copy
    )
    assert "raise --max_tokens" in refused(monkeypatch, capsys, "compare", folder, "--max_tokens", 16)
    found = {name: SimpleNamespace(data=TokenData(corpora[name], 16, 64)) for name in "ab"}
    with pytest.raises(ValueError, match="a and b differ in their data or in block_size"):
        xmoe.documents(found, 64)


def test_fine_tuning_that_cannot_be_compared_is_one_clear_line(tuned, monkeypatch, capsys):
    def told(*line) -> str:
        return refused(monkeypatch, capsys, "consistency", *line)

    assert f"{tuned / 'demo'} is alone" in told(tuned / "demo")
    other = fine_tuned(tuned / "demo-epochs=2", [[[1, 2, 3]]], epochs=2)
    assert "is alone" in told(tuned / "demo", tuned / "demo-seed=1", other)
    dense = fine_tuned(tuned / "demo-model=dense", [[], []], model="dense")
    assert f"{dense} has no experts" in told(dense, tuned / "demo")
    short = fine_tuned(tuned / "demo-epochs=1", [], epochs=1)
    assert f"{short} is shorter than 100 steps" in told(short)
    for folder in ("demo-seed=1", "demo-seed=2"):
        shutil.rmtree(tuned / folder)
    assert "no two finished runs" in told()
