"""bench.py as a user runs it, at tiny sizes; what is measured is not tested, only what is made of it."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, flip_a_byte

import bench
import common
import model
from data.batches import TranslationData
from data.prepare import prepare
from data.tokenizers import load_tokenizer
from translator import Translator

CPU = SimpleNamespace(device=torch.device("cpu"))


@pytest.fixture
def records(monkeypatch, tmp_path):
    """A function: the words of a command line -> the records that it writes."""

    def run(*words) -> list[dict]:
        file = tmp_path / "records.json"
        monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, words), "--device", "cpu", "--json", str(file)])
        bench.main()
        return json.loads(file.read_text())

    return run


@pytest.fixture
def refused(monkeypatch, capsys):
    """A function: the words of a command line -> the one line that refuses them."""

    def run(*words) -> str:
        monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            bench.main()
        (line,) = capsys.readouterr().err.splitlines()
        assert stop.value.code == 1 and line.startswith("error: ")
        return line

    return run


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def test_contenders_take_turns_until_their_patience_is_used_up():
    calls, numbers = [], iter(range(100))

    def quick():
        calls.append("quick")
        return {"ms": next(numbers)}

    def slow():
        calls.append("slow")
        time.sleep(0.03)
        return {"ms": -1}

    samples = bench.take_turns("", {"quick": quick, "slow": slow}, bench.Config(rounds=4, patience=0.02))
    # once each for warming up, then backwards, and then there is only one
    assert calls == ["quick", "slow", "slow", "quick", "quick", "quick", "quick"]
    assert samples == {"quick": [{"ms": 1}, {"ms": 2}, {"ms": 3}, {"ms": 4}], "slow": [{"ms": -1}]}


def test_a_record_has_medians_and_half_the_range_between_quartiles():
    ms, tokens = iter([99, 1, 2, 10, 4, 6, 0]), iter(range(70, 80))
    runner = {"one": lambda: {"ms": next(ms), "tokens": next(tokens)}}
    (record,) = bench.measure("group", runner, bench.Config(rounds=5), CPU)
    assert record.pop("peak_mb") is None or sys.platform == "linux"
    assert record == {
        "shape": "group",
        "impl": "one",
        "dtype": "float32",
        "runs": 5,
        "ms": 4,
        "tokens": 73,
        "all_ms": [1, 2, 10, 4, 6],
        "spread": (6 - 2) / 2,
    }
    assert bench.spread([3.0]) is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_peak_memory_is_that_of_what_is_freed_again():
    def use(floats: int):
        return lambda: {"ms": float(torch.ones(floats).sum())}

    much, little = bench.measure("", {"much": use(16 << 20), "little": use(1)}, bench.Config(rounds=1), CPU)
    assert much["peak_mb"] == pytest.approx(64, abs=8) and little["peak_mb"] < 8


# ---------------------------------------------------------------------------------------------------------------------
# layer


def test_layer_as_a_user_runs_it(tmp_path):
    words = "layer --shapes S1 --tokens 64 --rounds 2 --patience 1 --all_routers false --peers false --device cpu"
    file = tmp_path / "layer.json"
    command = [sys.executable, "bench.py", *words.split(), "--json", str(file), "--threads", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "allocator" in done.stdout and "threads 1" in done.stdout and "router='switch'" in done.stdout
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows == ["impl", "dense", "dense, compiled GELU", "ours"]
    assert "compiling" not in done.stdout  # nothing is, at this size
    found = json.loads(file.read_text())
    assert len(found) == 3 and all(record["machine"]["allocator"] for record in found)


def test_layer_measures_every_router_and_peer_against_the_dense_ones(records, capsys):
    found = {r["impl"]: r for r in records("layer", "--shapes", "S1", "--tokens", 64, "--rounds", 2, "--patience", 1)}
    others = ["topk", "threshold", "hypersphere", "hash", "base", "expert_choice"]
    assert list(found)[:9] == ["dense", "dense, compiled GELU", "ours", *(f"ours, {router}" for router in others)]
    out = capsys.readouterr().out
    for peer in bench.PEERS:  # there, or said why not; S1 is top-1, and ST-MoE is not
        assert (peer in found) != (f"{peer}: skipped" in out or peer == "st-moe-pytorch")
    dense, compiled, ours = found["dense"], found["dense, compiled GELU"], found["ours"]
    assert (ours["shape"], ours["S"], ours["dtype"], ours["runs"]) == ("S1", 64, "float32", 2)
    assert ours["gflops"] == pytest.approx(dense["gflops"], rel=0.01)
    assert dense["ratio"] == compiled["to_compiled"] == 1
    for record in found.values():
        each = record["ms"] / record["gflops"]
        assert record["ratio"] == pytest.approx(each / dense["ms"] * dense["gflops"])
        assert record["to_compiled"] == pytest.approx(each / compiled["ms"] * compiled["gflops"])
        assert record["ms"] == pytest.approx(statistics.median(record["all_ms"]))
        assert 0 < record["forward_ms"] < record["ms"] and 0 < record["backward_ms"] < record["ms"]


@pytest.mark.parametrize("router, kept", [("switch", 8), ("hash", 8), ("topk", 24), ("hypersphere", 24), ("base", 64)])
def test_flops_are_those_of_the_rows_that_are_kept(router, kept):
    """64 tokens that are all alike want the same experts, which have room for 8."""
    shape = bench.Shape(16, 8, 4, router, 3, 1.0)
    h, ids = torch.ones(1, 64, 16), torch.zeros(1, 64, dtype=torch.int64)
    layer = bench.our_layer(model, shape, router, h, ids, seed=0)
    assert layer.flops == 2 * 2 * 16 * 4 * kept
    dense = bench.dense_layers(shape, 100_000.0, CPU.device)
    rows = 24  # of 4,096 FLOPs
    assert {one.flops for one in dense.values()} == {2 * 2 * 16 * 64 * rows}
    assert all(one.call(h)[0].shape == (1, rows, 16) for one in dense.values())


def test_one_pass_leaves_no_gradient_and_reaches_every_weight(monkeypatch):
    h, ids = torch.randn(1, 64, 16), torch.randint(99, (1, 64))
    layer = bench.our_layer(model, bench.Shape(16, 8, 4, "threshold", 1, 8.0), "threshold", h, ids, seed=0)
    reached = set()
    for name, p in layer.module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: reached.add(name))
    layer.measure(h, common.setup("cpu", "float32", keep_memory=False))
    assert reached == {name for name, _ in layer.module.named_parameters()}
    assert all(p.grad is None for p in layer.module.parameters())


def test_the_compiled_gelu_is_ours_and_its_compiling_is_said_once(records, monkeypatch, capsys):
    calls = []

    def compiled(*arguments):
        calls.append(arguments)
        return model.activation(*arguments)

    monkeypatch.setattr(model, "compiled_activation", lambda: compiled)
    x = torch.randn(1, 128, 256)
    for enough in (10**9, 1):
        monkeypatch.setattr(model, "WORTH_COMPILING", enough)
        dense = bench.dense_layers(bench.SHAPES["S1"], 1e8, CPU.device)
        one, other = (layer.call(x)[0] for layer in dense.values())
        torch.testing.assert_close(one, other)
        assert len(calls) == (enough == 1)
    few = ["--tokens", 16, "--rounds", 1, "--all_routers", "false", "--peers", "false"]
    records("layer", "--shapes", "S1", "S2", *few)
    assert capsys.readouterr().out.count("compiling the activation took ") == 1


def test_an_earlier_version_takes_turns_with_ours(records, tmp_path, capsys):
    """Whose MoE took its GELU from the config, and whose modules go by the names of ours."""
    for file in ("model.py", "routers.py"):
        (tmp_path / file).write_text((ROOT / file).read_text())
    (tmp_path / "beside.py").touch()  # a module that we do not have
    with open(tmp_path / "model.py", "a") as f:
        f.write("\n\nclass Before(MoE):\n    def __init__(self, config):\n        super().__init__(config, 'tanh')\n")
        f.write("\n\nimport beside\nMoE = Before\n")
    path = list(sys.path)
    earlier = bench.earlier_version(str(tmp_path))
    assert sys.modules["model"] is model and "beside" not in sys.modules and sys.path == path
    assert earlier.Router is not model.Router
    assert Path(earlier.Router.forward.__code__.co_filename) == tmp_path / "routers.py"
    found = records("layer", "--shapes", "S2", "--tokens", 64, "--rounds", 2, "--peers", "false", "--against", tmp_path)
    ours, before = (next(r for r in found if r["impl"] == impl) for impl in ("ours", "ours, before"))
    assert before["gflops"] == ours["gflops"]  # they choose alike
    quotient = statistics.median(now / old for now, old in zip(ours["all_ms"], before["all_ms"]))
    assert f"ours / before, by rounds: {quotient:.3f} ± " in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# step and size


def test_step_measures_whole_steps(records, monkeypatch):
    tiny = bench.DEMO | dict(n_embd=16, vocab_size=64, block_size=16)
    groups = {"width 16": (bench.decoders, tiny), "encoder": (bench.encoders, tiny)}
    monkeypatch.setitem(bench.STEPS, "demo", groups)
    monkeypatch.setattr(common, "peak_flops", lambda context: 1e12)
    found = records("step", "--tokens", 64, "--rounds", 2)
    encoders = ["dense,", "SMoE", "X-MoE"]
    assert [r["impl"].split()[0] for r in found] == ["dense", "switch", "topk", "threshold", *encoders]
    assert found[3]["impl"] == "threshold 64 x 8" and found[6]["impl"] == "X-MoE 32 x 3 x 16"
    for r in found:
        dense, switch, *_ = (other for other in found if other["shape"] == r["shape"])
        assert r["tokens_per_second"] == pytest.approx(64 / r["ms"] * 1e3)
        assert r["to_dense"] == pytest.approx(r["ms"] / dense["ms"])
        assert r["to_switch"] == pytest.approx(r["ms"] / switch["ms"])
        assert r["S"] == 64 and 0 < r["mfu"] < 1
    first = next(iter(bench.decoders(tiny, 64, CPU.device).values()))
    assert found[0]["mfu"] == pytest.approx(3 * first.flops * found[0]["tokens_per_second"] / 1e12)


def test_a_step_trains():
    tiny = bench.DEMO | dict(n_embd=16, vocab_size=64, block_size=16)
    context = common.setup("cpu", "float32", keep_memory=False)
    for trainee in (*bench.decoders(tiny, 64, CPU.device).values(), *bench.encoders(tiny, 64, CPU.device).values()):
        before = [p.clone() for p in trainee.net.parameters()]
        bench.make_step(trainee, context)()
        changed = [not torch.equal(p, old) for p, old in zip(trainee.net.parameters(), before)]
        assert sum(changed) > 0.8 * len(changed)  # not: positions of longer texts, experts that nobody chose


@pytest.mark.parametrize("scale, group", [(scale, group) for scale in bench.STEPS for group in bench.STEPS[scale]])
def test_models_that_are_compared_cost_the_same(scale, group):
    make, size = bench.STEPS[scale][group]
    with torch.device("meta"):
        trainees = make(size, size["block_size"], torch.device("meta"))
    dense, *sparse = trainees.values()
    assert [trainee.flops for trainee in sparse] == pytest.approx([dense.flops] * len(sparse), rel=0.01)
    D, V = dense.net.config.n_embd, dense.net.config.vocab_size
    encoder = make is bench.encoders
    body = dense.net.encoder if encoder else dense.net
    products = sum(module.weight.numel() for module in body.modules() if isinstance(module, torch.nn.Linear))
    products += 2 * size["n_layer"] * size["block_size"] * D + (0.15 * D * (D + V) if encoder else D * V)
    assert dense.flops == pytest.approx(2 * products)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_size_goes_down_to_experts_of_width_1(records):
    found = records("size", "--tokens", 16, "--rounds", 1)
    sizes = [(r["S"], r["E"], r["F"]) for r in found]
    assert sizes[:2] == [(16, 64, 128), (16, 8, 1024)] and sizes[-1] == (16, 4096, 1)
    assert all(r["ms"] > 0 and r["us_per_token"] == pytest.approx(1e3 * r["ms"] / 16) for r in found)
    gradients = 4 * 4096 * (2 * 256 + 1 + 256) / 1024  # KB
    assert found[-1]["kb_per_token"] == pytest.approx((1024 * found[-1]["peak_mb"] - gradients) / 16)
    rows = [r["rows_per_token"] for r in found]
    assert rows[1] < 2 and rows == [rows[0], *sorted(rows[1:])] and rows[0] == rows[4]


# ---------------------------------------------------------------------------------------------------------------------
# translate


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> Path:
    """A prepared corpus: English is second in one language pair and first in the other."""
    base = tmp_path_factory.mktemp("pairs")
    for name in ("de-en", "en-ru"):
        for split, count in {"train": 100, "valid": 8, "test": 8}.items():
            for side in name.split("-"):
                lines = [f"{side} {split} {i} and {7919 * i % 1009}" for i in range(count)]
                (base / f"{name}.{split}.{side}").write_text("\n".join(lines) + "\n")
    return prepare("bitext", base, pieces=300, out=base / "prepared")


def translator_run(pairs: Path, folder: Path):
    """The folder of a run that trained a translator."""
    tokenizer = load_tokenizer(pairs)
    arguments = dict(vocab_size=tokenizer.vocab_size, n_layer=1, decoder_layers=1, n_embd=16, n_head=2, router="dense")
    weights = Translator(model.ModelConfig(**arguments)).state_dict()
    folder.mkdir()
    tokenizer.save(folder)
    torch.save({"kind": "encdec", "step": 3, "arguments": arguments, "model": weights}, folder / "model.pt")


def test_translate_measures_beam_search_with_a_cache_and_without(records, pairs, tmp_path, monkeypatch, capsys):
    translate, ways = Translator.translate, []

    def watched(self, *source, **options):
        ways.append((options["beam"], options["cache"]))
        return translate(self, *source, **options)

    monkeypatch.setattr(Translator, "translate", watched)
    translator_run(pairs, tmp_path / "run")
    for weights in (tmp_path / "run", tmp_path / "nowhere"):
        words = ["translate", "--data", pairs, "--model", weights, "--tokens", 90, "--rounds", 1]
        found = {(r["shape"], r["impl"]): r for r in records(*words)}
        assert set(ways) == {(5, True), (5, False), (1, True), (1, False)}
        said = capsys.readouterr().out
        assert (str(weights) if weights.exists() else "random weights") in said
        batches = list(TranslationData(pairs, 128, 2048).eval_batches("train", 90))
        sentences = sum(len(batch.source) for batch in batches)
        assert sum(batch.tokens for batch in batches) <= 90 and f"{sentences} sentences of " in said
        assert list(found) == [(beam, way) for beam in ("beam 5", "beam 1") for way in ("cache", "no cache")]
        for beam in ("beam 5", "beam 1"):
            cache, plain = found[beam, "cache"], found[beam, "no cache"]
            assert cache["ratio"] == 1 and plain["ratio"] == pytest.approx(plain["ms"] / cache["ms"])
            assert cache["tokens"] == plain["tokens"] >= sentences
            assert cache["sentences_per_second"] == pytest.approx(1e3 * sentences / cache["ms"])


def test_translate_refuses_what_is_no_translator_of_the_data(pairs, tmp_path, refused):
    translator_run(pairs, tmp_path / "run")
    file = tmp_path / "run" / "model.pt"
    words = ["translate", "--model", file.parent, "--data"]
    other = prepare("bitext", pairs.parent, pieces=310, out=tmp_path / "other")
    assert "another vocabulary" in refused(*words, other)
    state = torch.load(file)
    gpt = model.GPT(model.ModelConfig(**state["arguments"]))
    torch.save(state | {"kind": "lm", "model": gpt.state_dict()}, file)
    assert "is no translator" in refused(*words, pairs)
    flip_a_byte(file)
    assert "model.pt is corrupt" in refused(*words, pairs)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "say what to measure: python bench.py layer | step | size | translate"),
        ("sise", "say what to measure"),
        ("layer --rounds 0", "rounds must be over 0, not 0"),
        ("layer --patience -1", "patience must be over 0"),
        ("translate --tokens 0", "tokens must be over 0"),
        ("size --threads 0", "threads must be over 0"),
        ("step --tokens 100", "multiple of 256"),
        ("layer --device quantum", "device quantum"),
        ("layer --json nowhere/x.json", "no such folder"),
        ("layer --against nowhere", "no checkout"),
        ("translate --data nowhere", "no prepared data in "),
    ],
)
def test_bad_input_is_one_clear_line(words, message, refused, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert message in refused(*words.split())


@pytest.mark.parametrize(
    "words, message",
    [
        ("layer --shapes S1 S9", "invalid choice 'S9'"),
        ("layer --dtype float8", "invalid choice 'float8'"),
        ("size --token 4", "--tokens"),
        ("size --shapes S1", "Unrecognized options: --shapes"),
    ],
)
def test_what_is_no_option_is_rejected(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", *words.split()])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    assert stop.value.code == 2 and message in capsys.readouterr().err
