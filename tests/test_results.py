"""The results, the pages that show them, and tools/render.py, which adds results and fills the pages."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

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
TABLE = "`python train_lm.py --table 1 --seeds 3` <!-- method | perplexity as here | unserved -->\n\n"
NOT_A_RESULT = "is not a SCRIPT/RUN/result.json as today's scripts write it"


@pytest.fixture
def root(tmp_path):
    """A copy of the pages and the results."""
    pytest.importorskip("scipy")
    pytest.importorskip("matplotlib")
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(RESULTS, tmp_path / "results")
    return tmp_path


def refused(capsys, root, **options) -> str:
    """The error line of tools/render.py."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        render.main(root=root, **options)
    error = capsys.readouterr().err
    assert stop.value.code == 1
    assert re.fullmatch("error: .*\n", error)
    return error


def write_json(file: Path, content) -> Path:
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text(json.dumps(content))
    return file


def names_in(file: Path) -> list[str]:
    return [json.loads(line)["name"] for line in file.read_text().splitlines()]


def write_result(folder: Path, path: str, result: dict):
    """Writes or replaces the line of KIND/NAME."""
    kind, name = path.split("/")
    file = folder / f"{kind}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    lines = [line for line in lines if json.loads(line)["name"] != name]
    lines.append(json.dumps(result | {"name": name}))
    file.write_text("\n".join(lines))
    claims.results_of.cache_clear()


# ---------------------------------------------------------------------------------------------------------------------
# Pages


def test_committed_pages_are_up_to_date_and_show_every_result(monkeypatch):
    """A result whose run is named differently today would silently be left out."""
    pytest.importorskip("scipy")
    shown = set()

    class Recorded(dict):
        def __getitem__(self, name):
            shown.add(name)
            return super().__getitem__(name)

    results = claims.results_of(RESULTS)
    recorded = Mock(return_value=Recorded(results))
    monkeypatch.setattr(claims, "results_of", recorded)
    monkeypatch.setattr(render, "results_of", recorded)
    render.main(check=True)
    hidden = {name for name in results if not name.startswith("gpu/")} - shown
    assert not hidden
    assert len(shown) > 100


@pytest.mark.parametrize("file", [*RESULTS.glob("**/*.jsonl")], ids=str)
def test_lines_of_a_file_of_results_are_sorted_by_their_names(file):
    names = names_in(file)
    assert names == sorted(set(names))


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_comment_of_a_page_has_a_table(page):
    text = page.read_text()
    assert len(render.LINE.findall(text)) == text.count("<!--")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_of_a_page_lead_to_files_and_sections(page):
    """GitHub writes the name of a section in lower case, without punctuation."""
    for link, section in re.findall(r"\]\((?!http)([^#)]*)#?(.*?)\)", page.read_text()):
        target = page.parent / link if link else page
        assert target.exists(), link
        if section:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            names = Counter(re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
            assert names[section.replace("-", " ")] == 1, section


def test_check_names_outdated_pages_and_pictures_and_leaves_them(root, capsys):
    page = root / "results/xmoe.md"
    page.write_text(page.read_text().replace("19.49", "19.48"))
    file = root / "results/analyses.jsonl"
    file.write_text(file.read_text().replace('"perplexity": 127.33', '"perplexity": 127.34'))
    error = refused(capsys, root, check=True)
    assert "not up to date: xmoe.md, xmoe-work.png: python tools/render.py" in error
    assert "19.48" in page.read_text()
    render.main(root=root)
    render.main(root=root, check=True)
    assert "19.48" not in page.read_text()


def test_missing_results_are_one_clear_line(root, capsys):
    (root / "results/bench.jsonl").rename(root / "bench.jsonl")
    assert "results has no bench/" in refused(capsys, root)
    (root / "bench.jsonl").rename(root / "results/bench.jsonl")
    (root / "results/train_mlm.jsonl").unlink()
    assert "results has no train_mlm/" in refused(capsys, root)


def test_a_missing_analysis_is_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match="has no analyses/gamma"):
        claims.panel_of(tmp_path, {"records": "gamma"})


def demo_result(perplexity: float, **constants) -> dict:
    """A result of train_lm.py's demo with the Switch router."""
    layers = [dict.fromkeys(train_lm.ROUTING, 0.25)]
    scores = {"ppl": perplexity, "bpb": 2.0, "layers": layers}
    config = identity(train_lm.Config(router="switch", **constants))
    return {"test": scores, "test_no_limit": scores, "config": config, "parameters": {"total": 2e6}}


@pytest.fixture
def three_seeds(tmp_path):
    """A folder of results of three seeds."""
    for seed, perplexity in enumerate([10.0, 12.0, 14.0]):
        name = f"demo-seed={seed}-router=switch" if seed else "demo-router=switch"
        write_result(tmp_path, f"train_lm/{name}", demo_result(perplexity, seed=seed))
    return tmp_path


def test_a_table_has_the_rows_with_results_and_the_chosen_columns(three_seeds):
    filled = render.fill(f"{TABLE}Words.\n", three_seeds)
    row = "| Switch | 12.00 ± 2.00 | 25.00%   |\n"
    assert filled.startswith(f"{TABLE}| method | here         | unserved |\n")
    assert filled.endswith(f"|\n{row}\nWords.\n")


def test_filling_a_page_twice_changes_nothing(three_seeds):
    filled = render.fill(f"{TABLE}Words.\n", three_seeds)
    assert render.fill(filled, three_seeds) == filled


def test_an_unknown_column_is_refused(three_seeds):
    with pytest.raises(ValueError, match="no such row or column; there are method, experts, paper, OWT"):
        render.fill(TABLE.replace("perplexity", "theirs"), three_seeds)


def test_a_result_with_other_constants_than_its_command_is_refused(three_seeds):
    write_result(three_seeds, "train_lm/demo-router=switch", demo_result(10.0, seed=2))
    with pytest.raises(ValueError, match="train_lm/demo-router=switch has seed 2, its command 0: run it again"):
        render.fill(TABLE, three_seeds)


def test_rows_of_a_measurement_can_be_chosen(tmp_path):
    records = [{"shape": "S1", "ms": 1.5}, {"shape": "S2", "ms": 2.5}]
    write_result(tmp_path, "bench/step", {"machine": {}, "results": records})
    filled = render.fill("<!-- bench/step: shape=S2 | ms -->\n\n", tmp_path)
    assert "| ms   |\n|------|\n| 2.50 |\n" in filled


def test_a_table_of_an_analysis_is_shown_as_written(tmp_path):
    write_result(tmp_path, "analyses/gamma", {"table": [["shape", "ms"], ["S1", 1.5], ["S2", 2.5]]})
    filled = render.fill("<!-- analyses/gamma: shape | ms -->\n\n", tmp_path)
    assert "| S1    | 1.5 |\n| S2    | 2.5 |\n" in filled


# ---------------------------------------------------------------------------------------------------------------------
# Adding results


def line_of(file: Path, name: str) -> dict:
    [line] = [line for line in file.read_text().splitlines() if json.loads(line)["name"] == name]
    return json.loads(line)


def test_a_run_is_added_to_its_script_and_shown_by_one_command(root, capsys):
    file = root / "results/train_lm.jsonl"
    before = file.read_text()
    result = line_of(file, "demo-seed=1-router=dense-dtype=float32")
    result["test"]["ppl"] += 50
    run = write_json(root / "out/train_lm/a folder/result.json", result).parent
    render.main(add=(run,), root=root)
    old, new = before.splitlines(), file.read_text().splitlines()
    changed = [json.loads(line) for line in new if line not in old]
    assert changed == [result]
    assert len(new) == len(old)
    assert names_in(file) == sorted(names_in(file))
    assert (root / "results/xmoe.md").read_text() != (RESULTS / "xmoe.md").read_text()
    render.main(check=True, root=root)


def test_several_runs_are_added_and_sorted_by_name(three_seeds):
    for name in ("demo-router=base", "demo"):
        run = three_seeds / "train_lm" / name
        write_json(run / "result.json", {"name": name} | demo_result(1.0))
        render.add_result(three_seeds, run)
    names = ["demo", "demo-router=base", "demo-router=switch"]
    assert names_in(three_seeds / "train_lm.jsonl")[:3] == names


def test_an_evaluation_is_added_under_the_name_its_table_looks_for(three_seeds):
    result = demo_result(8.0)
    del result["config"]
    file = three_seeds / "out/train_lm/demo/eval-t=0.9-capacity=0.5.json"
    render.add_result(three_seeds, write_json(file, {"name": "demo"} | result))
    name = "demo-eval-t=0.9-capacity=0.5"
    assert line_of(three_seeds / "train_lm.jsonl", name)["test"]["ppl"] == 8.0
    claims.results_of.cache_clear()
    config = train_lm.Config(eval_only=True, eval_threshold=0.9, eval_capacity=0.5)
    assert render.cells_of(three_seeds, config, train_lm)["perplexity"][0] == 8.0


@pytest.mark.parametrize(
    "kind, content",
    [
        ("analyses", {"command": "python analyze.py tokens", "table": [["x"], [1]], "records": [{"x": 1}]}),
        ("bench", {"machine": {"device": "a card"}, "results": [{"ms": 1.0}]}),
    ],
)
def test_analyses_and_measurements_are_added_under_the_name_of_their_file(tmp_path, kind, content):
    write_result(tmp_path, f"{kind}/other", {})
    render.add_result(tmp_path, write_json(tmp_path / "out/new.json", content))
    assert line_of(tmp_path / f"{kind}.jsonl", "new") == {"name": "new"} | content
    assert names_in(tmp_path / f"{kind}.jsonl") == ["new", "other"]


def test_infinity_is_written_as_json_has_it(three_seeds):
    run = three_seeds / "out/train_lm/demo"
    write_json(run / "result.json", {"name": "demo"} | demo_result(float("inf")))
    render.add_result(three_seeds, run)
    claims.results_of.cache_clear()
    assert line_of(three_seeds / "train_lm.jsonl", "demo")["test"]["ppl"] == "Infinity"
    assert claims.results_of(three_seeds)["train_lm/demo"]["test"]["ppl"] == float("inf")


@pytest.mark.parametrize(
    "name, text, error",
    [
        ("train_lm/demo/config.json", "{}", "demo/result.json does not exist: pass the folder of a finished run"),
        ("train_lm/demo/result.json", "{", "result.json is not readable JSON"),
        ("train_lm/demo/result.json", '{"name": "demo", "test": {}}', NOT_A_RESULT),
        ("runs/demo/result.json", '{"name": "demo"}', NOT_A_RESULT),
        ("data/demo/result.json", '{"name": "demo"}', NOT_A_RESULT),
    ],
    ids=["unfinished", "damaged", "of another version", "in no folder of a script", "in the folder of another module"],
)
def test_what_is_not_a_result_is_refused_and_changes_nothing(root, capsys, name, text, error):
    file = root / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert error in refused(capsys, root, add=(file.parent,))
    for lines in RESULTS.glob("*.jsonl"):
        assert (root / "results" / lines.name).read_text() == lines.read_text()


# ---------------------------------------------------------------------------------------------------------------------
# Claims


@pytest.mark.parametrize("scores, ends", [([2, 4, 6], [-0.484, 4.484]), ([0, 0.9, 2.1], [-1.248, -0.752])])
def test_an_effect_is_the_mean_difference_of_seeds_with_its_interval(tmp_path, monkeypatch, scores, ends):
    """With three seeds the t-interval is 4.3027 standard errors wide on each side."""
    pair = write_scores(tmp_path, monkeypatch, train_lm, zip(scores, [1, 2, 3]))
    effect = claims.effect(tmp_path, pair | {"paper": [70, 72]})
    assert effect["ends"] == pytest.approx(ends, abs=1e-3)
    assert effect["mean"] == pytest.approx([sum(ends) / 2], abs=1e-3)
    assert effect["differ"] == "router, side"
    assert effect["paper"] == [2]


def test_an_effect_in_words_has_its_interval_and_its_seeds(tmp_path, monkeypatch):
    pair = write_scores(tmp_path, monkeypatch, train_lm, zip([2, 4, 6], [1, 2, 3]))
    assert claims.effect(tmp_path, pair)["words"] == "here: +2 points (-0.48 to +4.5, 3 seeds)"


def test_p_is_corrected_by_holms_method():
    """The smallest p times the number of claims, the next one times one less, and so on, never decreasing."""
    pairs = [{"p": p, "notes": []} for p in (0.03, 0.01, 0.02, 0.5)]
    claims.correct([*pairs, {"p": 0.0001, "notes": ["[loses]"]}], 4)
    assert [pair["corrected"] for pair in pairs] == pytest.approx([0.06, 0.04, 0.06, 0.5])
    claims.correct(pairs, 6)  # two are not measured yet
    assert [pair["corrected"] for pair in pairs] == pytest.approx([0.12, 0.06, 0.1, 1.0])


@pytest.mark.parametrize(
    "p, mean, notes, verdict, words",
    [
        (0.01, 1, [], "holds", "it; p 0.01, corrected 0.03"),
        (0.01, -1, [], "the opposite", "it; p 0.01, corrected 0.03"),
        (0.02, 1, [], "not significant", "it; p 0.02, corrected 0.06"),
        (0.01, 1, ["[the second model loses]"], "undecided", "it; [the second model loses]"),
    ],
)
def test_the_primary_comparison_decides_a_claim(tmp_path, monkeypatch, p, mean, notes, verdict, words):
    """Two other claims of the papers triple p, one of them not measured; our own questions do not count."""
    worse = {"p": 0.9, "mean": [-1], "words": "worse", "notes": [], "differ": ""}
    pairs = {"first": worse | {"p": p, "mean": [mean], "words": "it", "notes": notes}, "worse": worse}
    pairs["loser"] = worse | {"notes": ["[loses]"]}
    monkeypatch.setattr(claims, "effect", lambda folder, pair: dict(pairs[pair]))
    rows = [{"paper": "XMoE", "primary": "first", "also": ["worse", "loser"]}, {"paper": "X-MoE", "needs": "a day"}]
    rows += [{"paper": paper, "primary": "worse"} for paper in ("X-MoE", "ours", "ours")]
    write_json(tmp_path / "claims.json", rows)
    claim, *_ = claims.claims(tmp_path)
    assert [claim["verdict"], claim["effect"], claim["also"]] == [verdict, words, "worse<br>worse [loses]"]


def test_a_claim_without_a_primary_comparison_says_what_it_needs(tmp_path):
    write_json(tmp_path / "claims.json", [{"paper": "XMoE", "needs": "80 minutes"}])
    [claim] = claims.claims(tmp_path)
    assert claim == claim | {"verdict": "not measured", "effect": "would take 80 minutes", "also": "", "differ": ""}


def test_the_page_explains_every_verdict():
    page = (RESULTS / "README.md").read_text()
    for verdict in (*claims.COLORS, claims.UNDECIDED, "not measured"):
        assert f"| *{verdict}* | " in page


def test_a_run_can_be_compared_with_its_own_start(tmp_path, monkeypatch):
    pair = write_scores(tmp_path, monkeypatch, train_lm, zip([2, 4, 6], [1, 2, 3]))
    effect = claims.effect(tmp_path, pair | {"other": pair["ours"], "from": "EM at first"})
    assert effect["mean"] == [3]
    assert effect["differ"] == ""


def test_a_seed_that_only_one_run_has_is_left_out(tmp_path, monkeypatch):
    pair = write_scores(tmp_path, monkeypatch, train_lm, zip([2, 4, 6], [1, 2, 3]))
    write_result(tmp_path, "train_lm/demo-seed=3", {"EM": 9, "config": identity(train_lm.Config(seed=3))})
    assert claims.effect(tmp_path, pair)["seeds"] == [1, 2, 3]


def write_pair(
    folder: Path, script, ours: dict, other: dict, about=(), seeds=range(3), suffix="-router=dense", **results
):
    """A pair of runs, demo and demo-router=dense, with any constants. -> an entry of claims.json

    The runs always differ in `side`. results: keys of the runs' results, with the values of ours and of the other.
    """
    for n, (name, constants) in enumerate({"": ours, suffix: other}.items()):
        for seed in seeds:
            known = {key: value for key, value in constants.items() if key in vars(script.Config())}
            config = identity(script.Config(seed=seed, **known)) | constants | {"side": n}
            config = {key: value for key, value in config.items() if value != "absent"}
            result = {"config": config, "machine": {"dtype": "float32", "device": "a CPU"}, "flops": 1e9, "code": {}}
            result |= {key: values[n] for key, values in results.items()}
            write_result(folder, f"{script.__name__}/{9 - seed}{name}", result)  # names of runs do not matter
    runs = {"ours": f"{script.__name__}/{9 - seed}", "other": f"{script.__name__}/{9 - seed}{suffix}"}
    return runs | {"about": [*about, "side"], "where": "here"}


def write_scores(folder: Path, monkeypatch, script, scores) -> dict:
    """A pair of threshold and dense routers with these F1, (ours, other) for each seed."""
    pytest.importorskip("scipy")
    monkeypatch.setattr(script, "cells", lambda result: {"EM": (result["EM"], ""), "EM at first": (1, "")})
    monkeypatch.setattr(claims, "loses_to_counting", lambda folder, run: False)
    for seed, both in enumerate(scores):
        pair = write_pair(folder, script, {}, {"router": "dense"}, ["router", "split"], seeds=[seed], EM=both)
    return pair | {"number": "EM"}


XLM, SLOW = dict(objective="mlm", relative_bias=False), dict(learning_rate=1e-9)
LONGER = SLOW | dict(tlm=False, steps=10**6)
DIFFERENCES = {  # script, constants of both runs, their FLOPs, what they differ in
    # Former claims, each of which named only the first of these differences.
    "as many FLOPs": (train_electra, SLOW, XLM, (1.67e14, 9.19e13), "objective relative_bias FLOPs learning_rate"),
    "pairs, longer": (train_electra, {}, LONGER, (1, 2), "tlm FLOPs learning_rate steps tokens-a-step"),
    "pairs": (train_electra, {}, dict(tlm=False), (2, 1), "tlm FLOPs tokens-a-step"),
    "small experts": (train_lm, dict(split=8), dict(router="switch", split=1), (1, 1), "split router"),
    # Consequences of constants, and constants of older versions.
    "text": (train_lm, dict(data_checksum="a"), dict(data_checksum="b"), (1, 1), "data_checksum"),
    "an old constant": (train_lm, dict(beta1=0.9), dict(beta1=0.8), (1, 1), "beta1"),
    "a constant that one router does not read": (train_lm, dict(threshold=0.1), dict(router="topk"), (1, 1), "router"),
    "as many FLOPs in more steps": (train_electra, {}, dict(steps=10**6), (1, 1), "steps"),
    "2% more FLOPs": (train_electra, {}, {}, (1.019, 1), ""),
    "over 2% more FLOPs": (train_electra, {}, {}, (1.021, 1), "FLOPs"),
    "FLOPs a token": (train_mlm, dict(steps=2000), dict(steps=1000), (1, 2), "steps"),
    "FLOPs of experts": (train_lm, {}, {}, ({"total": 1, "moe": 0}, {"total": 1, "moe": 1}), ""),
    "tokens a step": (train_lm, dict(batch_tokens=9), dict(batch_tokens=18), (2, 1), "batch_tokens tokens-a-step"),
}


@pytest.mark.parametrize("script, ours, other, flops, names", DIFFERENCES.values(), ids=DIFFERENCES)
def test_every_difference_of_a_pair_must_be_named(tmp_path, script, ours, other, flops, names):
    names = [name.replace("-", " ") for name in names.split()]
    pair = write_pair(tmp_path, script, ours, other, about=names, flops=flops)
    assert claims.differing(tmp_path, pair) == sorted([*names, "side"])
    for name in names:
        rest = [other for other in pair["about"] if other != name]
        with pytest.raises(ValueError, match=rf"/7 and .*/7-router=dense: {name} is .*`about` must name it"):
            claims.differing(tmp_path, pair | {"about": rest})


@pytest.mark.parametrize(
    "constants, name",
    [({"beta2": "absent"}, "beta2"), ({"old": 1}, "old")],
    ids=["newer than one run", "of an older version"],
)
def test_a_constant_that_one_run_lacks_is_refused_if_it_reads_it(tmp_path, constants, name):
    """A run that lacks the constant may have had another value of it."""
    pair = write_pair(tmp_path, train_lm, constants, {})
    with pytest.raises(ValueError, match=f" has no constant {name}, as in another version: run it again"):
        claims.differing(tmp_path, pair)


def test_seeds_without_recorded_code_are_counted(tmp_path):
    pair = write_pair(tmp_path, train_lm, {}, {})
    for name, changes in {pair["ours"]: {}, pair["other"]: {"code": {}}}.items():
        result = {key: value for key, value in claims.results_of(tmp_path)[name].items() if key != "code"}
        write_result(tmp_path, name, result | changes)
    assert claims.differing(tmp_path, pair) == ["side", "unrecorded code in 1 of 3 seeds"]


def test_seeds_on_other_processors_or_with_other_code_are_counted(tmp_path):
    """A file that only one run uses, such as a router's, is no difference in code."""
    versions = {"model.py": "a", "mine.py": "a"}, {"model.py": "a"}
    pair = write_pair(tmp_path, train_lm, {}, {}, code=versions)
    assert claims.differing(tmp_path, pair) == ["side"]
    machines = [{"dtype": "float32", "device": device} for device in ("a CPU", "another")]
    code = {"model.py": "a"}, {"model.py": "b"}
    pair = write_pair(tmp_path, train_lm, {}, {}, seeds=[2], machine=machines, code=code)
    assert claims.differing(tmp_path, pair) == ["side", "processor in 1 of 3 seeds", "code in 1 of 3 seeds"]


MARGINS = {  # script -> a result whose score is higher than that of counting by `margin`
    "train_lm": lambda margin: {"test": {"bpb": 2 - margin}, "counting": {"bigrams": 2}},
    "train_mlm": lambda margin: {"valid": {"ppl": 9 - margin}, "counting": {"neighbours": {"ppl": 9}}},
    "train_electra": lambda margin: {
        "held_out": {"sentences": {"generator": 0.5 + margin}},
        "counting": {"neighbours": {"right": 0.5}},
    },
    "train_mt": lambda margin: {"test": {"bleu": 9 + margin}, "memory": {"bleu": 9}},
    "finetune_xtreme": lambda margin: {
        "languages": {"en": {"f1": 0, "em": 9 + margin}, "x1": {"f1": 0, "em": 0}},
        "counted": {"en": {"f1": 1, "em": 9}, "x1": {"f1": 1, "em": 9}},
        "guesses": {"en": {"f1": 1, "em": 8}},
    },
}


@pytest.mark.parametrize("script", MARGINS)
@pytest.mark.parametrize("margins, loses", [((-0.1, 0.1, 0.1), False), ((0.5, -0.1, 0, 0.5), True), ((0, 0), True)])
def test_a_model_loses_to_counting_if_half_of_its_seeds_do(tmp_path, script, margins, loses):
    for seed, margin in enumerate(margins):
        config = {"seed": seed} | ({"task": "spans"} if script == "finetune_xtreme" else {})
        write_result(tmp_path, f"{script}/{seed}", MARGINS[script](margin) | {"config": config})
    random = {"languages": {"en": {"f1": 1, "em": 7}}, "config": {"seed": 0, "random_weights": True}}
    write_result(tmp_path, "finetune_xtreme/ciphers-spans-random_weights=True", random)
    assert claims.loses_to_counting(tmp_path, f"{script}/0") == loses


@pytest.mark.parametrize("trivial", ["guesses", "random weights"])
def test_a_fine_tuned_encoder_must_also_beat_a_constant_and_random_weights(tmp_path, trivial):
    result = MARGINS["finetune_xtreme"](1) | {"config": {"seed": 0, "task": "spans"}}
    random = {"languages": {"en": {"f1": 1, "em": 11 if trivial == "random weights" else 7}}}
    random["config"] = {"seed": 0, "random_weights": True}
    if trivial == "guesses":
        result["guesses"] = {"en": {"f1": 1, "em": 11}}
    write_result(tmp_path, "finetune_xtreme/ciphers-spans-random_weights=True", random)
    write_result(tmp_path, "finetune_xtreme/0", result)
    assert claims.loses_to_counting(tmp_path, "finetune_xtreme/0")


def test_the_pre_training_of_fine_tuned_encoders_is_compared(tmp_path):
    """Without the constants that only one of them reads, here the rate of the relative bias."""
    encoders = write_pair(tmp_path, train_electra, {}, {"relative_bias": False, "rel_bias_lr": "absent"})
    models = [f"out/{encoders[side]}" for side in ("ours", "other")]
    for name, model in zip("ab", models):
        config = {"task": "tags", "model": model, "seed": 0}
        machine = {"dtype": "float32", "device": "a CPU"}
        write_result(tmp_path, f"finetune_xtreme/{name}", {"config": config, "machine": machine, "code": {}})
    pair = {"ours": "finetune_xtreme/a", "other": "finetune_xtreme/b", "about": ["model"]}
    assert claims.differing(tmp_path, pair) == ["encoder's relative_bias", "encoder's side", "model"]


@pytest.mark.parametrize(
    "dtypes, flops, names",
    [
        (("float32", "float32"), (1, 1), []),
        (("float32", "bfloat16"), (1, 1), ["dtype"]),
        (("float32", "float32"), (1, 3), ["FLOPs"]),
    ],
)
def test_runs_of_the_translator_are_compared_by_their_dtype_and_flops_per_pair(tmp_path, dtypes, flops, names):
    """The dtype is that of the machine: the constant may be `auto`."""
    results = {"machine": [{"dtype": dtype, "device": "a CPU"} for dtype in dtypes], "flops_per_pair": flops}
    pair = write_pair(tmp_path, train_mt, dict(dtype="float32"), {}, names, **results)
    assert claims.differing(tmp_path, pair) == [*names, "side"]


def test_all_eight_seeds_are_compared(tmp_path, monkeypatch):
    pair = write_scores(tmp_path, monkeypatch, train_lm, [(seed, 2 * seed) for seed in range(8)])
    assert claims.effect(tmp_path, pair)["seeds"] == [0, -1, -2, -3, -4, -5, -6, -7]


def test_a_run_with_another_constant_is_not_a_seed(tmp_path, monkeypatch):
    pair = write_scores(tmp_path, monkeypatch, train_lm, [(seed, 2 * seed) for seed in range(8)])
    write_pair(tmp_path, train_lm, {}, dict(router="dense", learning_rate=1.0), seeds=[3], EM=(3, 6))
    assert claims.effect(tmp_path, pair)["seeds"] == [0, -1, -2, -4, -5, -6, -7]


@pytest.mark.parametrize("number", claims.BY_LAYER)
@pytest.mark.parametrize("layer, differences", [(1, [85, 0, -20]), ("best", [5, 10, -20])])
def test_translations_found_are_those_of_a_layer(tmp_path, monkeypatch, number, layer, differences):
    """The best layer of the other seeds: always 1 for the second run, and 3, 2, 1 for the first.

    Layer 0, the embeddings, is no candidate.
    """
    pytest.importorskip("scipy")
    monkeypatch.setattr(claims, "loses_to_counting", lambda folder, run: False)
    ours = [0.9, 0.9, 0.6, 0.1, 0.0], [0.9, 0.2, 0.3, 0.4, 0.0], [0.9, 0.1, 0.6, 0.9, 0.0]
    other = [0.9, 0.05, 0.0, 0.0, 0.0], [0.9, 0.2, 0.1, 0.0, 0.0], [0.9, 0.3, 0.0, 0.0, 0.0]
    for seed, shares in enumerate(zip(ours, other)):
        held_out = [{claims.BY_LAYER[number]: layers} for layers in shares]
        pair = write_pair(tmp_path, train_electra, {}, {}, seeds=[seed], held_out=held_out)
    effect = claims.effect(tmp_path, pair | {"number": number, "layer": layer})
    assert effect["seeds"] == pytest.approx(differences)


def test_a_number_can_be_the_mean_over_the_records_of_an_analysis(tmp_path):
    """RF over training, without the first evaluation, which has none; or the records of one step."""
    rows = [("demo", 1, None), ("demo", 2, 0.5), ("demo", 3, 0.3), ("demo-seed=1", 1, None), ("demo-seed=1", 2, 0.2)]
    records = [{"run": f"out/train_mlm/{run}", "step": step, "RF": share} for run, step, share in rows]
    write_result(tmp_path, "analyses/collapse", {"records": records})
    for seed, name in enumerate(["demo", "demo-seed=1"]):
        write_result(tmp_path, f"train_mlm/{name}", {"config": {"seed": seed, "gate": "softmax"}})
    pair = {"analysis": "collapse", "number": "RF", "ours": "train_mlm/demo"}
    assert claims.values(tmp_path, pair, "ours") == {0: 0.4, 1: 0.2}
    assert claims.values(tmp_path, pair | {"at": {"ours": {"step": 2}}}, "ours") == {0: 0.5, 1: 0.2}
