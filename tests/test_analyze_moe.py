"""`analyze.py`, XMoE's and X-MoE's figures: what is drawn against logs, results and literal loops, on tiny runs."""

import dataclasses
import json
import math
import shlex
import shutil
import sys
from pathlib import Path
from statistics import fmean, median, stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import TINY_LM, Script
from test_analyze import refused, run

import finetune_xtreme
import measures
import pretrained
import runs
import train_electra
import train_lm
import train_mlm
import train_mt
from data.batches import MaskedData, TokenData
from data.prepare import prepare
from data.tokenizers import XLMR, train_sentencepiece
from figures import collapse, crosslingual, experts, shared
from model import GPT, ModelConfig

pytest.importorskip("matplotlib")
LM_RUNS = {
    "threshold": {},  # 32 experts of width 8, beside FFNs of width 32
    "seed 1": {"seed": 1},
    "t = 0.3": {"threshold": 0.3},
    "switch": {"router": "switch"},
    "switch, seed 1": {"router": "switch", "seed": 1},
    "dense": {"router": "dense"},
    "split": dict(moe_every=1, threshold=1.0, num_experts=4, expert_size=8, capacity_factor=4.0),  # as in table 2
}
TINY_MLM = dict(n_layer=2, n_head=2, n_embd=16, ffn_size=32, block_size=16, micro_tokens=128, batch_tokens=128, steps=4)
TINY_MLM |= dict(num_experts=4, expert_size=16, moe_after=(1,), eval_every=2, eval_maskings=2, log_every=1)
TINY_MLM |= dict(device="cpu", dtype="float32", learning_rate=0.05)
MLM_RUNS = {"X-MoE": {}, "SMoE": {"router": "switch"}}
MLM_RUNS["dense"] = dict(router="dense", num_experts=32, expert_size=128, moe_after=(2,))  # the preset's, not read
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
    mlm = train(train_mlm, base, TINY_MLM | {"data": languages}, MLM_RUNS)
    return SimpleNamespace(base=base, lm=lm, mlm=mlm, text=corpora["a"], languages=languages)


@pytest.fixture
def place(trained, monkeypatch):
    """Where the runs are, as a user sees them."""
    monkeypatch.chdir(trained.base)
    return trained


@pytest.fixture
def draw(place, monkeypatch, tmp_path):
    """Runs a command -> the axes that it drew, and the numbers that it kept."""
    from matplotlib.figure import Figure

    figures, savefig = [], Figure.savefig

    def record(figure, *args, **more):
        figures.append(figure)
        savefig(figure, *args, **more)

    monkeypatch.setattr(Figure, "savefig", record)

    def command(name, *line):
        run(monkeypatch, name, *line, "--out", tmp_path)
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000
        return figures[-1].axes, json.loads((tmp_path / f"{name}.json").read_text())

    return command


def lines(axes) -> list[tuple]:
    """(label, x, y) of every line that is drawn."""
    return [(line.get_label(), [*map(float, line.get_xdata())], [*map(float, line.get_ydata())]) for line in axes.lines]


def read(folder: str, name: str = "result.json"):
    return json.loads(Path(folder, name).read_text())


def log(folder: str) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def literal(folder: str, text: Path, **changes) -> tuple[float, list[float]]:
    """Perplexity of the test text, window by window of a micro-batch, and rows served per token in each MoE layer."""
    model, _ = pretrained.load(folder, **changes)
    served, losses = {}, []

    def watch(moe, h, routing, kept):
        served.setdefault(id(moe), []).extend(kept.sum(dim=1).tolist())

    for moe in model.moe_layers:
        moe.watchers.append(watch)
    with torch.no_grad():
        for x, y in TokenData(text, 16, 64).eval_batches("test"):
            logp = model(x)[0].log_softmax(dim=2)
            losses += [-float(logp[b, t, y[b, t]]) for b in range(len(y)) for t in range(y.shape[1])]
    return math.exp(fmean(losses)), [fmean(rows) for rows in served.values()]


def one_layer(*args, **changes) -> tuple[float, float]:
    ppl, (served,) = literal(*args, **changes)
    return ppl, served


# ---------------------------------------------------------------------------------------------------------------------
# Which runs are meant


def test_runs_are_told_apart_by_their_constants():
    modules = train_lm, train_mlm, train_electra, train_mt, finetune_xtreme
    for module in modules:
        kept = runs.identity(module.Config())
        assert [script for script, own in shared.SCRIPTS.items() if own <= kept.keys()] == [module.__name__]


def test_names_tell_what_runs_are():
    base = runs.identity(train_lm.Config())
    found = {"out/a": base, "out/a-seed=1": base | {"seed": 1}, "out/b": base | {"router": "switch"}}
    names = {"out/a": "threshold 32 x 128", "out/a-seed=1": "threshold 32 x 128", "out/b": "switch 8 x 512"}
    assert shared.named(found) == names
    assert shared.listed(found) == "out/a, seed 0, 1; out/b, seed 0"
    found["out/a-steps=9-seed=1"] = base | {"steps": 9, "seed": 1}
    assert [*shared.named(found).values()] == ["a", "a", "switch 8 x 512", "a-steps=9"]
    other = {"x-model=y-seed=1-epochs=2-seed=1": {"seed": 1}, "x-model=y-seed=1-epochs=2": {"seed": 0}}
    assert shared.listed(other) == "x-model=y-seed=1-epochs=2, seed 1, 0"


def test_no_two_of_many_lines_look_alike():
    looks = shared.styles(map(str, range(21)))
    assert len({(look["color"], look["linestyle"]) for look in looks.values()}) == 21


# ---------------------------------------------------------------------------------------------------------------------
# XMoE


@pytest.mark.parametrize("name", LM_RUNS)
def test_a_run_tested_again_gives_its_result(name, place):
    folder = place.lm[name]
    opened = shared.open_runs({folder: read(folder, "config.json")}, experts.Gamma())
    again, before = experts.test(*opened[folder], 1 << 16), read(folder)["test"]
    assert again["ppl"] == before["ppl"] and again["layers"] == before["layers"]


def test_activations_are_those_of_results_and_of_a_loop(draw, place):
    (number, size), kept = draw("activations")
    for name in ("threshold", "switch", "split"):
        layers = [layer["positive"] for layer in read(place.lm[name])["test"]["layers"]]
        assert kept[place.lm[name]]["layers"] == layers
    model, _ = pretrained.load(place.lm["dense"])
    positive = units = 0
    with torch.no_grad():
        for x, _ in TokenData(place.text, 16, 64).eval_batches("test"):
            h, _ = model.blocks[0](model.wte(x) + model.wpe.weight[: x.shape[1]], x)
            h = h + model.blocks[1].attn(model.blocks[1].ln_1(h))  # where the sparse models have experts
            a = model.blocks[1].ffn.fc(model.blocks[1].ln_2(h))
            positive += sum(unit > 0 for unit in a.flatten().tolist())
            units += a.numel()
    assert kept[place.lm["dense"]]["layers"] == [positive / units]
    drawn = {(label, *x, *y) for label, x, y in lines(size)}
    means = {name: fmean(kept[folder]["layers"]) for name, folder in place.lm.items()}
    of_size = dict.fromkeys(("dense", "switch", "switch, seed 1"), FFN)
    assert drawn == {
        (read(folder, "config.json")["router"], of_size.get(name, WIDTH), 100 * means[name])
        for name, folder in place.lm.items()
    }
    full = {("switch", 8.0, 100 * means[name]) for name in ("switch", "switch, seed 1")}
    full.add(("dense", 1.0, 100 * means["dense"]))
    assert {(label, *x, *y) for label, x, y in lines(number)} == full


def test_gamma_is_what_is_left_of_a_dense_ffns_work(draw, place, capsys):
    names = "threshold", "switch", "dense", "split"
    (limit, spent), kept = draw("gamma", *(place.lm[name] for name in names), "--shares", 8, 0.5, 1)
    threshold, switch, dense, split = (kept[place.lm[name]] for name in names)
    for name, points in zip(names, (threshold, switch, dense, split)):
        (point,) = [point for point in points if point["limit"] == 1]
        assert point["ppl"] == read(place.lm[name])["test"]["ppl"]
    for name, points in (("threshold", threshold), ("switch", switch)):  # 8 x FFN: gamma = E
        assert points[2] == {
            "limit": 8,
            "spent": points[2]["spent"],
            "ppl": read(place.lm[name])["test_no_limit"]["ppl"],
        }
    assert [point["limit"] for point in threshold] == [0.5, 1, 8] and [point["limit"] for point in dense] == [1]
    ppl, served = literal(place.lm["threshold"], place.text, eval_capacity_factor=2.0)
    assert threshold[0]["ppl"] == pytest.approx(ppl, rel=1e-6)
    assert threshold[0]["spent"] == pytest.approx(fmean(served) * WIDTH / FFN)
    ppl, served = literal(place.lm["split"], place.text, eval_capacity_factor=2.0, eval_threshold=0.9)
    assert split[0]["ppl"] == pytest.approx(ppl, rel=1e-6)
    assert split[0]["spent"] == pytest.approx(fmean(served) / 4)
    assert dense[0]["spent"] == 1
    for axes, x in ((limit, "limit"), (spent, "spent")):
        drawn = [(xs, ys) for _, xs, ys in lines(axes)]
        wanted = [kept[place.lm[name]] for name in names]
        assert drawn == [([point[x] for point in points], [point["ppl"] for point in points]) for points in wanted]
    assert f"{threshold[0]['ppl']:.3f}" in capsys.readouterr().out


def test_runs_are_compared_by_seed_and_by_document(draw, place, capsys):
    runs_of = [[place.lm[name] for name in names] for names in (("switch", "switch, seed 1"), ("threshold", "seed 1"))]
    (axes,), kept = draw("compare", *runs_of[0], *runs_of[1])
    one, two = ([read(folder)["test"]["bpb"] for folder in own] for own in runs_of)
    first, other = f"switch 8 x {FFN}", f"threshold {E} x {WIDTH}"
    assert kept[first] == {"bits_per_byte": {"0": pytest.approx(one[0]), "1": pytest.approx(one[1])}}
    assert kept[other]["bits_per_byte"] == {"0": pytest.approx(two[0]), "1": pytest.approx(two[1])}
    of_seeds = [b - a for a, b in zip(one, two)]
    more = fmean(of_seeds)
    assert kept[other]["of_seeds"] == pytest.approx(of_seeds, abs=1e-6)
    assert kept[other]["more"] == pytest.approx(more, abs=1e-6)
    data, sums = TokenData(place.text, 16, 64), [[0.0, 0]]
    models = [[pretrained.load(folder)[0] for folder in own] for own in runs_of]
    with torch.no_grad():
        for x, y in data.eval_batches("test"):
            losses = [
                [F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten(), reduction="none").tolist() for model in own]
                for own in models
            ]
            for token, a, b in zip(y.flatten().tolist(), zip(*losses[0]), zip(*losses[1])):
                sums[-1][0] += fmean(b) - fmean(a)
                sums[-1][1] += 1
                if token == data.tokenizer.eot:
                    sums.append([0.0, 0])
    if not sums[-1][1]:
        sums.pop()
    counts = data.meta["splits"]["test"]
    assert len(sums) > 2
    ends = measures.bootstrap(*torch.tensor(sums, dtype=torch.float64).T)
    low, high = (measures.bits_per_byte(end, counts) for end in ends)
    assert kept[other]["interval"] == pytest.approx([low, high], abs=1e-6) and low < more < high
    assert [(x, y) for _, x, y in lines(axes)][:2] == [(kept[other]["interval"], [0, 0]), ([kept[other]["more"]], [0])]
    said = capsys.readouterr().out
    cell = f"{more:+.4f} ± {stdev(of_seeds):.4f} ({low:+.4f} to {high:+.4f})"
    assert cell in said and f" {sum(number > 0 for number in of_seeds)} of 2 " in said
    assert kept["command"] == shlex.join(["python", "analyze.py", "compare", *runs_of[0], *runs_of[1]])
    assert kept["table"][0][0] == "run" and len(kept["table"]) == 3


def test_a_table_is_of_means_over_seeds():
    names = {"a": "switch", "b": "switch", "c": "dense"}
    point = {"limit": 0.5, "spent": 0.4, "ppl": 1.0}
    rows = experts.gamma_table(names, {"a": [point], "b": [point | {"ppl": 3.0}], "c": [point | {"limit": 1.0}]})
    assert rows[1:] == [["switch", 0.5, "0.400 ± 0.000", "2.000 ± 1.414"], ["dense", 1.0, "0.400", "1.000"]]


def test_a_command_can_be_given_again():
    options = experts.Gamma(folders=("out/True north", "x"), shares=(0.5, 1.0), max_tokens=7, out="elsewhere")
    assert shared.command("gamma", options) == (
        "python analyze.py gamma 'out/True north' x --max_tokens 7 --shares 0.5 1.0"
    )
    assert shared.command("gamma", experts.Gamma()) == "python analyze.py gamma"
    whitened = crosslingual.Retrieval(folders=("x",), whiten=True)
    assert shared.command("retrieval", whitened) == "python analyze.py retrieval x --whiten true"


def test_runs_without_a_seed_in_common_are_not_compared(draw, place):
    _, kept = draw("compare", place.lm["switch"], place.lm["seed 1"], f"{place.lm['switch']}/")  # one run, twice
    assert kept[f"threshold {E} x {WIDTH}"].keys() == {"bits_per_byte"}


def test_experts_wanted_are_the_logs(draw, place):
    (first, second, third), kept = draw("experts")
    drawn = [(xs, ys) for axes in (first, second, third) for _, xs, ys in lines(axes)]
    expected = []
    for name in ("threshold", "seed 1", "t = 0.3", "split"):
        records = log(place.lm[name])
        for layer in range(len(records[0]["layers"])):
            expected.append(([2.0, 4.0], [record["layers"][layer]["wanted"] for record in records]))
    assert sorted(drawn) == sorted(expected)
    for axes in (first, second, third):  # nothing is cut off
        assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] >= max(max(ys) for _, _, ys in lines(axes))


def test_thresholds_in_training_and_at_test(draw, place):
    trained = [place.lm[name] for name in ("threshold", "seed 1", "t = 0.3")]
    (training, at_test, served), kept = draw("threshold", *trained, "--thresholds", 0.9, 0, 1)
    for folder in trained:
        t, result = read(folder, "config.json")["threshold"], read(folder)["test"]
        served_then = fmean(layer["served"] for layer in result["layers"])
        assert kept["in training"][folder] == {"threshold": t, "ppl": result["ppl"], "served": served_then}
    for point, free in zip(kept["at test"], kept["at test, no limit"]):
        again = one_layer(trained[0], place.text, eval_threshold=point["threshold"])
        assert (point["ppl"], point["served"]) == pytest.approx(again)
        again = one_layer(trained[0], place.text, eval_threshold=free["threshold"], eval_capacity_factor=math.inf)
        assert (free["ppl"], free["served"]) == pytest.approx(again)
    assert [point["threshold"] for point in kept["at test"]] == [0, 0.9, 1]
    assert [point["served"] for point in kept["at test, no limit"]][::2] == [1, E]
    ((_, t, y),), (own, free) = lines(training), lines(at_test)
    assert t == [0.3, 0.9, 0.9] and y[0] == kept["in training"][trained[2]]["ppl"]
    assert own[1:] == ([0, 0.9, 1], [point["ppl"] for point in kept["at test"]])
    assert free[1:] == ([0, 0.9, 1], [point["ppl"] for point in kept["at test, no limit"]])
    assert lines(served)[1][2] == [point["served"] for point in kept["at test"]]


def test_of_all_finished_runs_those_that_differ_by_t_and_seed_are_drawn(draw, place):
    _, kept = draw("threshold", "--thresholds", 0.5, "--max_tokens", 64)
    chosen = {place.lm[name] for name in ("threshold", "seed 1", "t = 0.3")}
    assert kept["in training"].keys() == chosen


def test_speed_is_the_median_of_many_turns(draw, place):
    folders = [place.lm[name] for name in ("threshold", "seed 1", "switch", "dense")]
    (axes,), kept = draw("speed", *folders, "--shares", 1, 0.5, "--rounds", 3)
    settings = kept["settings"]
    assert [(one["run"], one["limit"]) for one in settings] == [
        (place.lm["threshold"], 0.5),
        (place.lm["threshold"], 1),
        (place.lm["switch"], 0.5),
        (place.lm["switch"], 1),
        (place.lm["dense"], 1),
    ]  # seed 1 would take as long as seed 0
    assert all(len(one["ms"]) == 3 and min(one["ms"]) > 0 for one in settings)
    assert settings[-1]["spent"] == 1 and settings[0]["spent"] < settings[1]["spent"] <= 1
    drawn = [(x, y) for _, xs, ys in lines(axes) for x, y in zip(xs, ys)]
    assert drawn == [(one["spent"], median(one["ms"])) for one in settings]


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


def test_collapse_is_the_logs_and_that_of_the_hidden_states(draw, place, capsys):
    folders = [place.mlm["SMoE"], place.mlm["X-MoE"]]
    (rc, rf, spectrum), kept = draw("collapse", *folders)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| out/")]
    for number, folder in enumerate(folders):
        layers = [record["layers"][0] for record in log(folder)]
        assert lines(rc)[number][1:] == ([2, 4], [layer["rc"] for layer in layers])
        assert lines(rf)[number][1:] == ([4], [100 * layers[1]["rf"]])
        h, _, moe = entering(folder, place.languages)
        values = torch.linalg.svdvals(h - h.mean(dim=0))
        drawn = torch.tensor(lines(spectrum)[number][2])
        torch.testing.assert_close(drawn, (values / values[0]).float(), rtol=1e-3, atol=1e-5)
        share = (values.square() / values.square().sum()).tolist()
        used = math.exp(-sum(p * math.log(p) for p in share if p > 0))
        cells = [cell.strip() for cell in rows[number].split("|")]
        perplexities = ", ".join(f"{record['ppl']:.1f}" for record in log(folder))
        assert cells[3:6] == ["2, 4", perplexities, ", ".join(f"{layer['rc']:,.0f}" for layer in layers)]
        y, _ = moe(h[None], torch.zeros(1, len(h), dtype=torch.long))  # no capacity limit: each token for itself
        added = float((y[0].detach().norm(dim=1) / h.norm(dim=1)).mean())
        assert cells[6:10] == [f"{layers[1]['rf']:.1%}", f"{layers[1]['rc']:.1f}", f"{used:.1f}", f"{added:.1%}"]
    labels = [label for label, _, _ in lines(rc)]
    assert labels == ["switch 4 x 16, layer 1", "hypersphere 4 x 16, layer 1"]


def test_the_disk_keeps_hyperbolic_distances_and_has_its_points_around_its_middle():
    torch.manual_seed(0)
    x = 3 + 2 * torch.randn(20, 2, dtype=torch.float64)
    disk = collapse.poincare(x)
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
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        folder = str(place.mlm["X-MoE"])
        opened = collapse.open_runs({folder: runs.read_json(Path(folder, "config.json"))}, collapse.Umap())[folder]
        context = dataclasses.replace(opened[2], dtype=dtype)
        found.append(collapse.routed(folder, (*opened[:2], context), collapse.Umap(max_tokens=1 << 16))[0])
    assert found[1].dtype == torch.float32
    assert not torch.equal(*found)
    torch.testing.assert_close(*found, rtol=0.1, atol=0.1)


def test_umap_is_given_what_the_router_compares(draw, place, monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=Flat))
    folders = [place.mlm["SMoE"], place.mlm["X-MoE"]]
    axes, kept = draw("umap", *folders, "--max_tokens", 1 << 16)
    for folder, panel in zip(folders, axes):
        h, chosen, moe = entering(folder, place.languages)
        with torch.no_grad():
            seen = h if folder == folders[0] else h.float() @ moe.router.project.weight.t()  # h; W h
        disk = collapse.poincare(seen[:, :2].double())
        torch.testing.assert_close(torch.tensor(kept[folder]["points"]).double(), disk, rtol=1e-3, atol=1e-5)
        assert kept[folder]["experts"] == chosen
        *experts, circle = panel.lines
        looks = {(one.get_color(), one.get_marker()) for one in experts}
        assert len(looks) == len(experts) == len(set(chosen))
        for number, line in zip(sorted(set(chosen)), experts):
            own = [point for point, expert in zip(kept[folder]["points"], chosen) if expert == number]
            np.testing.assert_allclose(line.get_xydata(), own, rtol=1e-5)
        shares = [chosen.count(number) / len(chosen) for number in set(chosen)]
        assert kept[folder]["chance"] == pytest.approx(sum(share * share for share in shares))
    options = {"n_neighbors": 100, "min_dist": 1.0, "output_metric": "hyperboloid"}  # X-MoE 4.5
    assert all(options.items() <= made.items() for made in Flat.made)


def fine_tuned(folder: Path, loads, **constants) -> Path:
    """A folder such as finetune_xtreme.py leaves."""
    folder.mkdir(parents=True)
    config = runs.identity(finetune_xtreme.Config()) | constants
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text('{"step": 200}\n')
    (folder / "result.json").write_text(json.dumps({"loads": loads}))
    return folder


@pytest.fixture
def tuned(place):
    """Runs of two encoders: loads of two times 100 steps, one layer, three experts."""
    base = place.base / "out/finetune_xtreme"
    loads = {
        "demo": [[[1, 2, 3]], [[1, 2, 3]]],
        "demo-seed=1": [[[2, 4, 6]], [[3, 2, 1]]],
        "demo-seed=2": [[[5, 6, 7]], [[1, 2, 4]]],
    }
    for seed, (name, own) in enumerate(loads.items()):
        fine_tuned(base / name, own, seed=seed)
    yield base
    shutil.rmtree(base)


def test_consistency_is_the_mean_correlation(draw, tuned):
    fine_tuned(tuned / "demo-epochs=2", [[[1, 2, 3]]], epochs=2)  # alone of its kind
    fine_tuned(tuned / "demo-model=dense", [[], []], model="dense")
    (axes,), kept = draw("consistency")
    pearson = np.corrcoef([[1, 2, 3], [3, 2, 1], [1, 2, 4]])
    line, chance = lines(axes)
    assert line[1] == [100, 200] and line[2] == pytest.approx([1, pearson.mean()])
    assert chance[2] == pytest.approx([1 / 3] * 2)
    (own,) = [value for name, value in kept.items() if name not in ("caption", "command", "table")]
    assert own["layers"] == [line[2]] and [Path(folder).name for folder in own["runs"]] == [
        "demo",
        "demo-seed=1",
        "demo-seed=2",
    ]


def test_experts_of_several_layers_spend_as_many_times_more():
    width = dict(n_embd=16, ffn_size=32, expert_size=8, expert_layers=2)
    model = GPT(ModelConfig(vocab_size=40, block_size=16, n_layer=2, n_head=2, router="topk", **width))
    assert experts.spent(model, [{"served": 1.5}]) == pytest.approx(1.5 * 2 * 8 / 32)
    experts.limit(model, 0.5)
    assert model.moe_layers[0].eval_capacity_factor * 2 * 8 == pytest.approx(0.5 * 32)


# ---------------------------------------------------------------------------------------------------------------------
# What a user can get wrong


def test_runs_that_do_not_fit_are_one_clear_line(place, tmp_path, monkeypatch, capsys):
    lm, mlm = place.lm, place.mlm

    def told(*line) -> str:
        return refused(monkeypatch, capsys, *line, "--out", tmp_path)

    for name in ("activations", "gamma", "threshold", "speed", "experts"):
        assert f"{mlm['X-MoE']} holds no run of train_lm.py" in told(name, mlm["X-MoE"])
    for name in ("umap", "collapse"):
        assert f"{lm['switch']} holds no run of train_mlm.py" in told(name, lm["switch"])
    assert f"{mlm['dense']} has no experts" in told("collapse", mlm["X-MoE"], mlm["dense"])
    hashed = shutil.copytree(mlm["SMoE"], tmp_path / "hashed")
    (hashed / "config.json").write_text(json.dumps(read(mlm["SMoE"], "config.json") | {"router": "hash"}))
    for folder in (mlm["dense"], hashed):
        assert f"{folder} has no router that compares tokens" in told("umap", mlm["X-MoE"], folder)
    for name in ("threshold", "experts"):
        for other in ("switch", "dense"):
            assert f"{lm[other]} has no threshold router" in told(name, lm["threshold"], lm[other])
    stacks = shutil.copytree(lm["switch"], tmp_path / "stacks")
    (stacks / "config.json").write_text(json.dumps(read(lm["switch"], "config.json") | {"expert_layers": 2}))
    assert f"{stacks} has experts of several layers" in told("activations", lm["switch"], stacks)
    assert "differ by more than --threshold and --seed" in told("threshold", lm["threshold"], lm["split"])
    for shares in ((0,), (1, -1), ("nan",)):
        assert "--shares must be numbers over 0" in told("gamma", lm["switch"], "--shares", *shares)
        assert "--shares must be numbers over 0" in told("speed", lm["switch"], "--shares", *shares)
    for t in (1.5, -1, "nan"):
        assert "--thresholds must lie from 0 to 1" in told("threshold", lm["threshold"], "--thresholds", t)
    assert "max_tokens must be over 0" in told("gamma", lm["switch"], "--max_tokens", -1)
    assert "rounds must be over 0" in told("speed", lm["switch"], "--rounds", 0)
    assert "device nowhere" in told("gamma", lm["switch"], "--device", "nowhere")
    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=Flat))
    assert "has 1 sparse layers" in told("umap", mlm["X-MoE"], "--layer", 2)
    assert "100 neighbours" in told("umap", mlm["X-MoE"], "--max_tokens", 64)
    monkeypatch.setitem(sys.modules, "umap", None)
    assert "pip install umap-learn" in told("umap", mlm["X-MoE"])


def test_folders_without_finished_runs_are_one_clear_line(place, tmp_path, monkeypatch, capsys):
    for name in ("activations", "gamma", "threshold", "speed", "experts"):
        assert "nowhere holds no run" in refused(monkeypatch, capsys, name, "nowhere")
    copy = tmp_path / "copy"
    shutil.copytree(place.lm["threshold"], copy)
    whole = (copy / "metrics.jsonl").read_text()
    (copy / "metrics.jsonl").write_text(whole[:-20])
    assert "has a torn line" in refused(monkeypatch, capsys, "experts", copy)
    (copy / "metrics.jsonl").write_text(whole)
    (copy / "result.json").rename(copy / "result.json.tmp")
    assert f"{copy} is not finished" in refused(monkeypatch, capsys, "experts", copy)
    (copy / "result.json.tmp").rename(copy / "result.json")
    for file in copy.glob("ckpt*"):
        file.unlink()
    assert f"{copy} is neither the folder of a run" in refused(monkeypatch, capsys, "gamma", copy)
    monkeypatch.chdir(tmp_path)
    for name, script in {"gamma": "train_lm", "collapse": "train_mlm", "consistency": "finetune_xtreme"}.items():
        assert f"out/{script} holds no finished run of the demo" in refused(monkeypatch, capsys, name)


def test_data_that_is_gone_or_another_is_one_clear_line(place, corpora, tmp_path, monkeypatch, capsys):
    for source, figure in ((place.lm["threshold"], "gamma"), (place.mlm["X-MoE"], "collapse")):
        copy = tmp_path / figure
        shutil.copytree(source, copy)
        config = read(copy, "config.json")
        (copy / "config.json").write_text(json.dumps(config | {"data": str(tmp_path / "gone")}))
        assert "no prepared data" in refused(monkeypatch, capsys, figure, copy)
    config = read(place.lm["threshold"], "config.json")
    (tmp_path / "gamma/config.json").write_text(json.dumps(config | {"data": str(corpora["b"])}))
    assert f"has changed since {tmp_path / 'gamma'}" in refused(monkeypatch, capsys, "gamma", tmp_path / "gamma")
    result = read(tmp_path / "gamma") | {"data": TokenData(corpora["b"], 16, 64).checksum}
    (tmp_path / "gamma/result.json").write_text(json.dumps(result))
    assert "raise --max_tokens" in refused(monkeypatch, capsys, "compare", place.lm["threshold"], "--max_tokens", 16)
    again = shutil.copytree(place.lm["threshold"], tmp_path / "again")
    assert f"2 of the runs are threshold {E} x {WIDTH} with seed 0" in refused(
        monkeypatch, capsys, "compare", place.lm["threshold"], again
    )
    both = place.lm["threshold"], tmp_path / "gamma"
    assert "differ in their data or in block_size" in refused(monkeypatch, capsys, "compare", *both)


def test_what_chooses_among_later_tokens_is_no_language_model():
    config = runs.identity(train_lm.Config(router="expert_choice"))
    assert not shared.is_causal(config) and shared.is_causal(runs.identity(train_lm.Config()))


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
