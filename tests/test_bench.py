"""bench.py as a user runs it, at tiny sizes; what is measured is not tested, only what is made of it."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT

import analyze
import bench
import common
import model
from translator import Translator

CPU = common.Context(0, 1, torch.device("cpu"), torch.float32)


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


@pytest.fixture
def time_passes(monkeypatch):
    """A function: so many milliseconds pass, by the bench's clock."""
    now = [0.0]
    monkeypatch.setattr(bench, "clock", lambda context: now[0])

    def pass_by(ms: float):
        now[0] += ms

    return pass_by


def test_contenders_take_turns_until_their_patience_is_used_up(time_passes):
    calls = []

    def runs_for(name: str, ms: float):
        def run(context) -> dict:
            calls.append(name)
            time_passes(ms)
            return {"call": len(calls)}

        return bench.Contender(run, {})

    contenders = {"quick": runs_for("quick", 1), "slow": runs_for("slow", 30)}
    samples = bench.take_turns("", contenders, bench.TurnsConfig(rounds=4, patience=0.02), CPU)
    # once each for warming up, then backwards, and then there is only one
    assert calls == ["quick", "slow", "slow", "quick", "quick", "quick", "quick"]
    assert samples["slow"] == [{"call": 3, "ms": 30}]
    assert samples["quick"] == [{"call": call, "ms": 1} for call in (4, 5, 6, 7)]


def test_a_record_has_medians_and_half_the_range_between_quartiles(time_passes):
    times, tokens = iter([99, 1, 2, 10, 4, 6, 0]), iter(range(70, 80))

    def run(context) -> dict:
        time_passes(next(times))
        return {"tokens": next(tokens)}

    one = bench.Contender(run, {"S": 5})
    (record,) = bench.measure("group", {"one": one}, bench.TurnsConfig(rounds=5), CPU)
    assert record.pop("peak_mb") is None or sys.platform == "linux"
    assert record == {
        "shape": "group",
        "impl": "one",
        "runs": 5,
        "S": 5,
        "ms": 4,
        "tokens": 73,
        "all_ms": [1, 2, 10, 4, 6],
        "spread": (6 - 2) / 2,
    }
    assert bench.spread([3.0]) is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_peak_memory_is_that_of_what_is_freed_again():
    def use(floats: int):
        return bench.Contender(lambda context: {"sum": float(torch.ones(floats).sum())}, {})

    much, little = bench.measure("", {"much": use(16 << 20), "little": use(1)}, bench.TurnsConfig(rounds=1), CPU)
    assert much["peak_mb"] == pytest.approx(64, abs=8) and little["peak_mb"] < 8


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_where_memory_cannot_be_measured_the_allocator_stays_as_it_is(monkeypatch):
    """In a container /proc/self/clear_refs may not be written."""
    set_to = []
    libc = SimpleNamespace(malloc_trim=lambda pad: 1, mallopt=lambda what, value: set_to.append(value))
    monkeypatch.setattr(bench.ctypes, "CDLL", lambda name: libc)
    contender = bench.Contender(lambda context: {}, {})
    assert bench.peak_memory(contender, CPU) is not None and set_to == [1 << 20, 1 << 30]

    def refuse(path, text):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(bench.Path, "write_text", refuse)
    assert bench.peak_memory(contender, CPU) is None and len(set_to) == 2


# ---------------------------------------------------------------------------------------------------------------------
# layer


def test_layer_as_a_user_runs_it(tmp_path):
    words = "layer --shapes S1 --tokens 64 --rounds 2 --patience 1 --all_routers false --peers false --device cpu"
    file = tmp_path / "layer.json"
    command = [sys.executable, "bench.py", *words.split(), "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "allocator" in done.stdout and "router='switch'" in done.stdout
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows == ["impl", "dense", "dense, compiled GELU", "ours"]
    found = json.loads(file.read_text())
    assert len(found) == 3 and all(record["machine"]["allocator"] for record in found)


def test_layer_measures_every_router_and_peer_against_the_dense_ones(records, capsys):
    found = {r["impl"]: r for r in records("layer", "--shapes", "S1", "--tokens", 64, "--rounds", 2, "--patience", 1)}
    others = ["topk", "threshold", "hypersphere", "hash", "base", "expert_choice", "no limit"]
    assert list(found)[:10] == ["dense", "dense, compiled GELU", "ours", *(f"ours, {other}" for other in others)]
    assert found["ours, no limit"]["gflops"] == pytest.approx(3 * 4 * 256 * 1024 * 64 / 1e9)  # of every token
    out = capsys.readouterr().out
    for peer in bench.PEERS:  # there, or said why not
        assert (peer in found) != (f"{peer}: skipped" in out)
    dense, compiled, ours = found["dense"], found["dense, compiled GELU"], found["ours"]
    assert (ours["shape"], ours["S"], ours["runs"], ours["machine"]["dtype"]) == ("S1", 64, 2, "float32")
    assert ours["gflops"] == pytest.approx(dense["gflops"], rel=0.01)
    assert dense["ratio"] == compiled["to_compiled"] == 1
    for record in found.values():
        each = record["ms"] / record["gflops"]
        assert record["ratio"] == pytest.approx(each / dense["ms"] * dense["gflops"])
        assert record["to_compiled"] == pytest.approx(each / compiled["ms"] * compiled["gflops"])
        assert record["ms"] == pytest.approx(statistics.median(record["all_ms"]))
        assert 0 < record["forward_ms"] < record["ms"] and 0 < record["backward_ms"] < record["ms"]


@pytest.mark.parametrize("name", bench.SHAPES)
def test_mixtral_has_as_many_flops_and_parameters_as_our_layer(name, monkeypatch):
    shape, h = bench.SHAPES[name], torch.zeros(1, 4, bench.SHAPES[name].D)
    blocks = []
    monkeypatch.setattr(bench, "draw", lambda block, router: blocks.append(block) or block)
    with torch.device("meta"):
        flops = bench.hf_mixtral("eager", shape, h.to("meta")).facts["gflops"] * 1e9
    weights = sum(p.numel() for name, p in blocks[0].named_parameters() if "experts" in name)
    assert flops == pytest.approx(3 * 2 * weights / shape.E * shape.K * 4)  # there and twice back, of K experts a token
    assert weights == pytest.approx(2 * shape.D * shape.F * shape.E, rel=0.04)


@pytest.mark.parametrize("router, kept", [("switch", 8), ("hash", 8), ("topk", 24), ("hypersphere", 24), ("base", 64)])
def test_flops_are_those_of_the_rows_that_are_kept(router, kept):
    """64 tokens that are all alike want the same experts, which have room for 8."""
    shape = bench.Shape(16, 8, 4, router, 3, 1.0)
    h, ids = torch.ones(1, 64, 16), torch.zeros(1, 64, dtype=torch.int64)
    ours = bench.our_layer(model, shape, h, ids).facts
    assert ours["gflops"] == pytest.approx(3 * 2 * 2 * 16 * 4 * kept / 1e9)
    assert ours["rows_per_token"] == kept / 64
    for dense in bench.dense_layers(h, 100_000.0).values():
        assert dense.facts == {"S": 24, "gflops": pytest.approx(3 * 24 * 2 * 2 * 16 * 64 / 1e9)}


def test_one_pass_leaves_no_gradient_and_reaches_every_weight():
    h, ids = bench.random_tokens(64, 16, CPU.device)
    contender = bench.our_layer(model, bench.Shape(16, 8, 4, "threshold", 1, 8.0), h, ids)
    moe, reached = contender.run.args[0], set()
    for name, p in moe.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: reached.add(name))
    contender.run(CPU)
    assert reached == {name for name, _ in moe.named_parameters()}
    assert all(p.grad is None for p in moe.parameters())


def test_the_compiled_gelu_is_ours(monkeypatch):
    calls = []

    def compiled(*arguments):
        calls.append(arguments)
        return model.activation(*arguments)

    monkeypatch.setattr(model, "compiled_activation", lambda device: compiled)
    h = torch.randn(1, 128, 256)
    for enough in (10**9, 1):
        monkeypatch.setattr(model, "WORTH_COMPILING", enough)
        outputs = []
        for contender in bench.dense_layers(h, 1e8).values():
            _, call, tokens = contender.run.args
            outputs.append(call(tokens)[0])
        torch.testing.assert_close(*outputs)
        assert len(calls) == (enough == 1)


def test_an_earlier_version_takes_turns_with_ours(records, tmp_path, capsys):
    """Its modules go by the names of ours."""
    for file in ("model.py", "routers.py"):
        (tmp_path / file).write_text((ROOT / file).read_text())
    path = list(sys.path)
    earlier = bench.earlier_version(str(tmp_path))
    assert sys.modules["model"] is model and sys.path == path
    assert earlier.Router is not model.Router
    assert Path(earlier.Router.forward.__code__.co_filename) == tmp_path / "routers.py"
    found = records("layer", "--shapes", "S2", "--tokens", 64, "--rounds", 2, "--peers", "false", "--against", tmp_path)
    ours, before = (next(r for r in found if r["impl"] == impl) for impl in ("ours", "ours, before"))
    assert before["gflops"] == ours["gflops"]  # they choose alike
    quotient = statistics.median(now / old for now, old in zip(ours["all_ms"], before["all_ms"]))
    assert f"ours / before, by rounds: {quotient:.3f} ± " in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# step and size


SIZE = dict(n_layer=4, n_head=4, n_embd=16, vocab_size=64, block_size=16)
TINY = {"width 16": (model.GPT, bench.decoders(**SIZE)), "encoder": (model.MaskedLM, bench.encoders(16, **SIZE))}


def test_step_measures_whole_steps(records, monkeypatch):
    monkeypatch.setitem(bench.STEPS, "demo", TINY)
    monkeypatch.setattr(common, "peak_flops", lambda context: 1e12)
    found = records("step", "--tokens", 70, "--rounds", 2)  # 4 sequences and a part of one
    encoders = ["dense,", "SMoE", "X-MoE"]
    assert [r["impl"].split()[0] for r in found] == ["dense", "switch", "topk", "threshold", *encoders]
    assert found[3]["impl"] == "threshold 64 x 8" and found[6]["impl"] == "X-MoE 32 x 3 x 16"
    for r in found:
        dense, switch, *_ = (other for other in found if other["shape"] == r["shape"])
        assert r["tokens_per_second"] == pytest.approx(64 / r["ms"] * 1e3)
        assert r["to_dense"] == pytest.approx(r["ms"] / dense["ms"])
        assert r["to_switch"] == pytest.approx(r["ms"] / switch["ms"])
        assert r["S"] == 64 and 0 < r["mfu"] < 1
        assert r["mfu"] == pytest.approx(1e9 * r["gflops"] / (r["ms"] / 1e3) / 1e12)


@pytest.mark.parametrize("kind, configs", TINY.values(), ids=TINY)
def test_a_step_trains(kind, configs):
    for config in configs.values():
        trainee = bench.trainee(kind, config, 64, CPU.device)
        net = trainee.run.args[0]
        before = [p.clone() for p in net.parameters()]
        trainee.run(CPU)
        changed = [not torch.equal(p, old) for p, old in zip(net.parameters(), before)]
        assert sum(changed) > 0.8 * len(changed)  # not: positions of longer texts, experts that nobody chose


@pytest.mark.parametrize("scale, group", [(scale, group) for scale in bench.STEPS for group in bench.STEPS[scale]])
def test_models_that_are_compared_cost_the_same(scale, group, monkeypatch):
    monkeypatch.setattr(torch.optim, "AdamW", lambda *parameters, **options: None)  # it takes none without values
    kind, configs = bench.STEPS[scale][group]
    with torch.device("meta"):
        dense, *sparse = (bench.trainee(kind, config, 1, torch.device("meta")) for config in configs.values())
    flops = dense.facts["gflops"]
    assert [trainee.facts["gflops"] for trainee in sparse] == pytest.approx([flops] * len(sparse), rel=0.01)
    net = dense.run.args[0]
    T, D, V = net.config.block_size, net.config.n_embd, net.config.vocab_size
    encoder = kind is model.MaskedLM
    body = net.encoder if encoder else net
    products = sum(module.weight.numel() for module in body.modules() if isinstance(module, torch.nn.Linear))
    products += 2 * net.config.n_layer * T * D + (0.15 * D * (D + V) if encoder else D * V)
    assert flops == pytest.approx(3 * 2 * products * T / 1e9)


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


def test_translate_measures_beam_search_with_a_cache_and_without(records, monkeypatch):
    translate, ways = Translator.translate, []

    def watched(self, *source, **options):
        ways.append((options["beam"], options["cache"]))
        return translate(self, *source, **options)

    monkeypatch.setattr(Translator, "translate", watched)
    found = {(r["shape"], r["impl"]): r for r in records("translate", "--tokens", 48, "--rounds", 1)}
    assert set(ways) == {(5, True), (5, False), (1, True), (1, False)}
    assert list(found) == [(beam, way) for beam in ("beam 5", "beam 1") for way in ("cache", "no cache")]
    for beam in ("beam 5", "beam 1"):
        cache, plain = found[beam, "cache"], found[beam, "no cache"]
        assert cache["ratio"] == 1 and plain["ratio"] == pytest.approx(plain["ms"] / cache["ms"])
        assert cache["tokens"] == plain["tokens"] > 3 * 16  # longer than the sources
        assert cache["sentences_per_second"] == pytest.approx(1e3 * 3 / cache["ms"])


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
        ("layer --device quantum", "device quantum"),
        ("layer --json nowhere/x.json", "No such file or directory: 'nowhere/x.json'"),
        ("layer --against nowhere", "no checkout"),
    ],
)
def test_bad_input_is_one_clear_line(words, message, refused, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert message in refused(*words.split())


@pytest.mark.parametrize("asked", ["-h", "--help"])
@pytest.mark.parametrize("script", [bench, analyze])
def test_help_says_what_there_is(script, asked, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script.py", asked])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert not ended.value.code
    assert capsys.readouterr().out.strip() == script.__doc__.strip()


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


# ---------------------------------------------------------------------------------------------------------------------
# python bench.py scale


@pytest.mark.parametrize("tokens, micro_tokens", [(100, 256), (4096, 1024), (5000, 1024), (5120, 1280)])
def test_a_step_is_of_whole_sequences(tokens, micro_tokens):
    assert bench.micro_tokens_of(bench.ScaleConfig(tokens=tokens)) == micro_tokens


def test_processes_share_a_step_and_hold_less_each(records):
    """Two of them; with a cluster on paper behind it."""
    found = records("scale", "--processes", 2, "--rounds", 2, "--tokens", 1024)
    ours, paper = found[:5], found[5:]
    names = ["no communication", "data parallel", "expert parallel", "shard", "both"]
    assert [record["impl"] for record in ours] == names and len(paper) == 14
    held = {record["impl"]: record["state_mb"] for record in ours}
    net = model.GPT(model.ModelConfig(**bench.SMALL))
    total = sum(p.numel() for p in net.parameters())
    experts = sum(p.numel() for moe in net.moe_layers for p in moe.layers.parameters())
    assert held["data parallel"] == held["no communication"] == pytest.approx(16 * total / 2**20)
    assert held["expert parallel"] == pytest.approx(16 * (total - experts / 2) / 2**20)
    assert held["shard"] == pytest.approx(held["both"], rel=0.01) == pytest.approx(8 * total / 2**20, rel=0.02)
    for record in ours:
        assert record["runs"] == 2 and record["steps_per_second"] == pytest.approx(1e3 / record["ms"])
        assert record["communication"] == pytest.approx(1 - ours[0]["ms"] / record["ms"])


def test_the_paper_model_by_hand():
    """XMoE's 556M row: 6 layers, gamma 4, width 1024; 32 experts of 1024 units."""
    (row,) = [row for row in bench.on_paper() if (row["model"], row["gpus"], row["expert_parallel"]) == TWO_NODES]
    rows = 6 * 4 * 4  # of a token: layers, rows, ways
    assert row["exchange_kb"] == pytest.approx(rows * 1024 * 2 * 31 / 32 / 1024)
    far = 4096 * rows * 1024 * 2 * 24 / 32 / 50e9  # to the 24 of 32 that are in other nodes
    assert row["exchange_ms"] == pytest.approx(1e3 * far)
    experts = 6 * 32 * (2 * 1024 * 1024 + 1024 + 1024)
    dense = 50_257 * 1024 + 1024 * 1024 + 12 * (4 * 1024 * 1024 + 4 * 1024 + 4 * 1024) + 2 * 1024
    dense += 6 * (2 * 4 * 1024 * 1024 + 5 * 1024 + 32 * 1024)
    assert row["state_gb"] == pytest.approx(16 * (dense + experts / 32) / 2**30)
    reduced = 8 * dense * 63 / 64 / 400e9 + 8 * experts / 32 / 2 / 50e9
    assert row["gradients_ms"] == pytest.approx(1e3 * reduced)
    busy = row["exchange_ms"] + row["gradients_ms"]
    assert row["communication"] == pytest.approx(busy / (busy + row["compute_ms"]))
    assert row["compute_ms"] == pytest.approx(1e12 * row["gflops"] * 4096 / (0.4 * 989e12))


TWO_NODES = ("XMoE 32 x 1024", 64, 32)


def test_processes_that_cannot_share_a_step_are_refused(refused):
    assert "3 processes cannot share out 4 micro-batches evenly" in refused("scale", "--processes", 3)
