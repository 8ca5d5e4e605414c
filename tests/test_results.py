"""The pages of results: up to date, whole, with links that lead somewhere, and clear where a file is missing."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from helpers import ROOT

import train_electra
import train_lm
import train_mlm
import train_mt
from engine.config import identity
from tools import claims, render

RESULTS = render.RESULTS
PAGES = [ROOT / "README.md", *sorted(RESULTS.glob("*.md"))]
TABLE = "`python train_lm.py --table 1 --seeds 3` <!-- method | ours as here | unserved -->\n\n"


@pytest.fixture
def root(tmp_path):
    """A copy of the pages and of what they show, to break."""
    pytest.importorskip("scipy")
    pytest.importorskip("matplotlib")
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(RESULTS, tmp_path / "results")
    return tmp_path


def refused(capsys, root, **more) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        render.main(root=root, **more)
    error = capsys.readouterr().err
    assert stop.value.code == 1
    assert re.fullmatch("error: .*\n", error)
    return error


def write(file: Path, content):
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def test_committed_pages_are_up_to_date_and_show_all(monkeypatch):
    """A result whose run has another name today would be left out without a word."""
    pytest.importorskip("scipy")
    opened, read_text = set(), Path.read_text

    def read(file, **more):
        opened.add(file)
        return read_text(file, **more)

    monkeypatch.setattr(Path, "read_text", read)
    render.main(check=True)
    shown = {file for file in RESULTS.glob("*/*.json") if file.parent.name != "gpu"}
    assert not shown - opened
    assert len(shown) > 100


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_comment_asks_for_a_table_and_every_link_leads_somewhere(page):
    """Sections as GitHub names them: lower case, and no punctuation."""
    text = page.read_text()
    assert len(render.LINE.findall(text)) == text.count("<!--")
    for link, section in re.findall(r"\]\((?!http)([^#)]*)#?(.*?)\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        if section:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            names = Counter(re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
            assert names[section.replace("-", " ")] == 1, section


def test_check_says_which_page_and_which_picture_is_old(root, capsys):
    page = root / "results" / "xmoe.md"
    page.write_text(page.read_text().replace("19.49", "19.48"))
    file = root / "results" / "analyses" / "threshold.json"
    file.write_text(file.read_text().replace('"perplexity": 127.33', '"perplexity": 127.34'))
    error = refused(capsys, root, check=True)
    assert "not up to date: xmoe.md, xmoe-work.png: python tools/render.py" in error
    assert "19.48" in page.read_text()
    render.main(root=root)
    render.main(root=root, check=True)
    assert "19.48" not in page.read_text()


def test_a_table_has_the_rows_that_were_run_and_the_columns_that_are_asked_for(tmp_path):
    layers = [dict.fromkeys(train_lm.ROUTING, 0.25)]
    for seed, ppl in enumerate([10.0, 12.0, 14.0]):
        scores = {"ppl": ppl, "bpb": 2.0, "layers": layers}
        config = identity(train_lm.Config(router="switch", seed=seed))
        result = {"test": scores, "test_no_limit": scores, "config": config}
        result["parameters"] = {"total": 2e6}
        name = f"demo-seed={seed}-router=switch" if seed else "demo-router=switch"
        write(tmp_path / "train_lm" / f"{name}.json", result)
    filled = render.fill(f"{TABLE}Words.\n", tmp_path)
    row = "| Switch | 12.00 ± 2.00 | 25.00%   |\n"
    assert filled.startswith(f"{TABLE}| method | here         | unserved |\n")
    assert filled.endswith(f"|\n{row}\nWords.\n")
    assert filled == render.fill(filled, tmp_path)
    with pytest.raises(ValueError, match="no such row or column; there are method, experts, paper, OWT"):
        render.fill(TABLE.replace("ours", "theirs"), tmp_path)
    write(tmp_path / "train_lm" / "demo-router=switch.json", result)
    with pytest.raises(ValueError, match=r"demo-router=switch\.json has seed 2, its command 0: run it again"):
        render.fill(TABLE, tmp_path)


def test_rows_of_a_measurement_can_be_chosen(tmp_path):
    records = [{"shape": "S1", "ms": 1.5}, {"shape": "S2", "ms": 2.5}]
    write(tmp_path / "bench" / "step.json", {"machine": {}, "results": records})
    write(tmp_path / "analyses" / "gamma.json", {"table": [["shape", "ms"], ["S1", 1.5], ["S2", 2.5]]})
    chosen = render.fill("<!-- bench/step: shape=S2 | ms -->\n\n", tmp_path)
    assert "| ms   |\n|------|\n| 2.50 |\n" in chosen
    all_rows = render.fill("<!-- analyses/gamma: shape | ms -->\n\n", tmp_path)
    assert "| S1    | 1.5 |\n| S2    | 2.5 |\n" in all_rows


@pytest.mark.parametrize(
    "scores, ends, verdict",
    [
        ([2, 4, 6], [-0.484, 4.484], "level"),
        ([2, 3.1, 4.2], [0.852, 1.348], "holds"),
        ([0, 0.9, 2.1], [-1.248, -0.752], "the opposite"),
    ],
)
def test_an_effect_is_the_mean_difference_of_seeds_with_its_interval(tmp_path, monkeypatch, scores, ends, verdict):
    """Of three seeds the t-interval reaches 4.3027 standard errors; p of two degrees is 1 - t / sqrt(2 + t^2)."""
    pair = write_scores(tmp_path, monkeypatch, train_lm, zip(scores, [1, 2, 3]))
    since = claims.effect(tmp_path, pair | {"other": pair["ours"], "from": "F1 at first"})  # of the same runs
    assert since["mean"] == [round(sum(scores) / 3 - 1, 3)] and not since["differ"]
    (tmp_path / "train_lm" / f"demo{claims.SEEDS[3]}.json").write_text('{"F1": 9}')  # a seed that the other has not
    found = claims.effect(tmp_path, pair | {"paper": [70, 72]})
    assert found["differ"] == ["router"]
    assert found["ends"] == pytest.approx(ends, abs=1e-3)
    assert found["mean"] == pytest.approx([sum(ends) / 2], abs=1e-3)
    assert found["paper"] == [2]
    assert found["verdict"] == verdict
    if verdict == "level":
        assert found["words"] == "here: +2 (-0.48 to +4.5, p 0.074)"


def write_pair(folder: Path, script, ours: dict, other: dict, about=(), seeds=range(3), **results) -> dict:
    """A pair of runs, demo and demo-router=dense whatever their constants are, with so much of their results.

    What each of the two has of its own in a result is a pair of values in `results`.
    """
    for n, (name, constants) in enumerate({"": ours, "-router=dense": other}.items()):
        for seed in seeds:
            config = vars(script.Config(seed=seed)) | constants
            config = {key: value for key, value in config.items() if value is not None}
            result = {"config": config, "machine": {"dtype": "float32"}, "flops": 1e9}
            result |= {key: values[n] for key, values in results.items()}
            write(folder / script.__name__ / f"demo{claims.SEEDS[seed]}{name}.json", result)
    runs = {"ours": f"{script.__name__}/demo{{}}", "other": f"{script.__name__}/demo{{}}-router=dense"}
    return runs | {"about": about, "where": "here"}


def write_scores(folder: Path, monkeypatch, script, scores) -> dict:
    """A pair, with the F1 of ours and of the other, which is dense, for each seed."""
    pytest.importorskip("scipy")
    monkeypatch.setattr(script, "cells", lambda result: {"F1": (result["F1"], ""), "F1 at first": (1, "")})
    for seed, both in enumerate(scores):
        pair = write_pair(folder, script, {}, {"router": "dense"}, ["router", "split"], seeds=[seed], F1=both)
    return pair | {"number": "F1", "unit": "points more of BLEU, F1 or accuracy"}


XLM, SLOW = dict(objective="mlm", relative_bias=False), dict(learning_rate=1e-9)
LONGER = SLOW | dict(tlm=False, steps=10**6)
DIFFERENCES = {  # the script, the constants of two runs, their FLOPs, in what they differ
    # Pairs that once stood among the claims, of which each was said to differ in the first of these alone.
    "as many FLOPs": (train_electra, SLOW, XLM, (1.67e14, 9.19e13), "objective relative_bias FLOPs learning_rate"),
    "pairs, longer": (train_electra, {}, LONGER, (1, 2), "tlm FLOPs learning_rate steps tokens-a-step"),
    "pairs": (train_electra, {}, dict(tlm=False), (2, 1), "tlm FLOPs tokens-a-step"),
    "small experts": (train_lm, dict(split=8), dict(router="switch", split=1), (1, 1), "split router"),
    # What follows from constants, and what they are called in older files.
    "a seed": (train_lm, {}, dict(seed=7), (1, 1), "seed"),
    "text": (train_lm, dict(data_checksum="a"), dict(data_checksum="b"), (1, 1), "data_checksum"),
    "a constant of that day": (train_lm, dict(beta1=0.9), dict(beta1=0.8), (1, 1), "beta1"),
    "one that only one knew": (train_lm, dict(beta1=0.9), {}, (1, 1), ""),
    "unread": (train_lm, dict(router="dense", threshold=0.1), dict(router="dense", split=2), (1, 1), ""),
    "younger than a run": (train_lm, dict(beta2=None), dict(beta2=train_lm.Config.beta2), (1, 1), ""),
    "where it is kept": (train_lm, dict(out_dir="a", device="cpu"), dict(out_dir="b"), (1, 1), ""),
    "as many FLOPs in more steps": (train_electra, {}, dict(steps=10**6), (1, 1), "steps"),
    "no two routers cost the same": (train_electra, {}, {}, (1.019, 1), ""),
    "but nearly": (train_electra, {}, {}, (1.021, 1), "FLOPs"),
    "FLOPs a token": (train_mlm, dict(steps=2000), dict(steps=1000), (1, 2), "steps"),
    "FLOPs of experts": (train_lm, {}, {}, ({"total": 1, "moe": 0}, {"total": 1, "moe": 1}), ""),
    "tokens a step": (train_lm, dict(batch_tokens=9), dict(batch_tokens=18), (2, 1), "batch_tokens tokens-a-step"),
}


@pytest.mark.parametrize("script, ours, other, work, named", DIFFERENCES.values(), ids=DIFFERENCES)
def test_a_pair_may_differ_in_what_it_is_about_and_in_nothing_else(tmp_path, script, ours, other, work, named):
    named = [name.replace("-", " ") for name in named.split()]
    pair = write_pair(tmp_path, script, ours, other, about=named, flops=work)
    assert claims.differing(tmp_path, pair, "-seed=1") == sorted(named)
    for name in named:
        rest = [other for other in named if other != name]
        with pytest.raises(ValueError, match=rf"demo{{}} and .*/demo{{}}-router=dense: {name} is .*`about` must name"):
            claims.differing(tmp_path, pair | {"about": rest}, "-seed=1")


def test_numbers_are_compared_as_they_were_computed(tmp_path):
    """`auto` is what the machine made of it; the FLOPs of a translator are those of a pair."""
    for machines, named in (("float32", "float32"), []), (("float32", "bfloat16"), ["FLOPs", "dtype"]):
        more = {"machine": [{"dtype": dtype} for dtype in machines], "flops_per_pair": (1, 1 + len(named))}
        pair = write_pair(tmp_path, train_mt, dict(dtype="float32"), {}, named, **more)
        assert claims.differing(tmp_path, pair, "") == named


def test_each_of_eight_seeds_is_compared(tmp_path, monkeypatch):
    pair = write_scores(tmp_path, monkeypatch, train_lm, [(seed, 2 * seed) for seed in range(8)])
    assert claims.effect(tmp_path, pair)["seeds"] == [0, -1, -2, -3, -4, -5, -6, -7]
    write_pair(tmp_path, train_lm, {}, dict(learning_rate=1.0), seeds=[7], F1=(7, 14))
    with pytest.raises(ValueError, match="learning_rate is .* and 1.0; `about` must name it"):
        claims.effect(tmp_path, pair)


def test_a_run_is_compared_with_the_line_between_two(tmp_path, monkeypatch):
    """At the same number of experts that serve a token: 1.5, 2 and 1.75 of them, between 1 and 3."""
    pytest.importorskip("scipy")
    monkeypatch.setattr(train_lm, "cells", lambda result: {"F1": (result["F1"], ""), "served": (result["served"], "")})
    for seed, (x, y) in enumerate([(1.5, 12.0), (2.0, 15.5), (1.75, 14.0)]):
        for K, end in ((1, 10.0), (3, 20.0)):
            numbers = dict(F1=(y, end), served=(x, K))
            pair = write_pair(tmp_path, train_lm, {}, dict(router="topk", top_k=K), [], seeds=[seed], **numbers)
            file = tmp_path / f"train_lm/demo{claims.SEEDS[seed]}-router=dense.json"
            file.rename(str(file).replace("dense", str(K)))
    pair |= {"number": "F1", "unit": "points more of BLEU, F1 or accuracy", "about": ["router"]}
    pair["other"] = [f"train_lm/demo{{}}-router={K}" for K in (1, 3)]
    found = claims.effect(tmp_path, pair)
    assert sorted(found["seeds"]) == [-0.5, 0.25, 0.5] and found["differ"] == ["router"]


def test_of_translations_found_the_paper_decides_and_other_measures_stand_beside(tmp_path):
    """Of four layers the paper's is the third."""
    pytest.importorskip("scipy")
    ours = [[1.0, 0.1, 0.6, 0.3, 0], [0.1, 0.11, 0.61, 0.31, 0], [0.1, 0.13, 0.63, 0.33, 0]]
    other = [0.1, 0.5, 0.2, 0.1, 0]
    scores = {"sentences": {"generator": 0}, "pairs": {"generator": 0}, "translation": {"with": 0, "without": 0}}
    for seed, own in enumerate(ours):
        held_out = [scores | {"retrieval": plain, "centred": plain[::-1]} for plain in (own, other)]
        more = dict(held_out=held_out, parameters=[{"kept": 0}] * 2)
        pair = write_pair(tmp_path, train_electra, {}, {}, seeds=[seed], **more)
    pair |= {"number": "translations found", "unit": "points more of the translations found", "paper": [0.1, 0.3]}
    claim = {"claim": "XLM-E", "short": "it", "pairs": [pair, pair | {"layer": 1, "where": "first layer"}]}
    write(tmp_path / "claims.json", [claim])
    [found] = claims.claims(tmp_path)
    assert [one["mean"] for one in found["pairs"]] == [[21.333], [-38.667], [-38.667]]
    assert [one["paper"] for one in found["pairs"]] == [[20], [], [20]]
    names = ["here", "here, centred", "first layer"]
    assert [one["where"] for one in found["pairs"]] == names
    assert [words.partition(":")[0] for words in found["effect"].split("<br>")] == names
    assert found["verdict"] == "mixed" and found["differ"] == ""
    assert claims.effect(tmp_path, pair | {"number": "found, centred", "layer": 1})["mean"] == [21.333]
    write(tmp_path / "claims.json", [claim | {"pairs": [pair]}])
    assert claims.claims(tmp_path)[0]["verdict"] == "holds"


@pytest.mark.parametrize(
    "found, verdict",
    [
        (["holds"] * 2, "holds"),
        (["level"] * 2, "level"),
        (["the opposite"] * 2, "the opposite"),
        (["holds", "level"], "in part"),
        (["the opposite", "level"], "level or worse"),
        (["holds", "level", "the opposite"], "mixed"),
        ([], "not measured here"),
    ],
)
def test_a_verdict_is_defined_where_it_stands(tmp_path, monkeypatch, found, verdict):
    monkeypatch.setattr(claims, "effect", lambda folder, pair: pair | {"words": "", "differ": []})
    pairs = [{"verdict": one, "number": "ours"} for one in found]
    write(tmp_path / "claims.json", [{"verdict": "not measured here", "pairs": pairs}])
    [claim] = claims.claims(tmp_path)
    assert claim["verdict"] == verdict
    assert f"- *{verdict}*: " in (RESULTS / "README.md").read_text()


def test_claims_without_runs_say_so():
    for claim in json.loads((RESULTS / "claims.json").read_text()):
        assert claim.get("verdict") == (None if claim["pairs"] else "not measured here")


def test_what_is_missing_is_one_clear_line(root, capsys):
    file = root / "results" / "bench" / "layer.json"
    file.rename(root / "kept.json")
    assert "No such file or directory: " in refused(capsys, root)
    (root / "kept.json").rename(file)
    for file in root.glob("results/train_mlm/*seed=*"):
        file.unlink()
    assert "have no two seeds in common: no interval" in refused(capsys, root)
