"""tools/bench.py as a user runs it, at tiny sizes; what is measured is not tested, only what is made of it."""

import json
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import ROOT, TORCHRUN, table_rows

import model
from engine import parallel
from engine.device import Context
from tools import bench

CPU = Context(0, 1, torch.device("cpu"), torch.float32)
BF16 = Context(0, 1, torch.device("cpu"), torch.bfloat16)


@pytest.fixture
def records(monkeypatch, tmp_path):
    """A function: the words of a command line -> the records that it writes."""

    def run(*words) -> list[dict]:
        file = tmp_path / "records.json"
        monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, words), "--device", "cpu", "--json", str(file)])
        bench.main()
        return json.loads(file.read_text())

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

    def contender(name: str, ms: float):
        def run():
            calls.append(name)
            time_passes(ms)

        return bench.Contender(run, {})

    contenders = {"quick": contender("quick", 1), "slow": contender("slow", 30)}
    times = bench.take_turns(contenders, bench.Config(rounds=4, patience=0.02), CPU)
    # Once each for warming up, then backwards, and then there is only one.
    assert calls == ["quick", "slow", "slow", "quick", "quick", "quick", "quick"]
    assert times == {"quick": [1, 1, 1, 1], "slow": [30]}


def test_a_record_has_the_median_and_half_the_range_between_quartiles(time_passes):
    times = iter([99, 1, 2, 10, 4, 6])
    one = bench.Contender(lambda: time_passes(next(times)), {"S": 5})
    (record,) = bench.measure("group", {"one": one}, bench.Config(rounds=5), CPU)
    expected = {"shape": "group", "impl": "one", "runs": 5, "S": 5, "ms": 4, "spread": (6 - 2) / 2}
    assert record == expected | {"all_ms": [1, 2, 10, 4, 6], "peak_mb": None}
    assert bench.spread([3.0]) is None


def test_of_several_processes_the_slowest_counts(time_passes):
    class Two(Context):
        def barrier(self):
            pass

        def gather(self, x):
            return [x, 7.0]

    two = Two(0, 2, torch.device("cpu"), torch.float32)
    one = bench.Contender(lambda: time_passes(3.0), {})
    assert bench.take_turns({"one": one}, bench.Config(rounds=2), two) == {"one": [7.0, 7.0]}


# ---------------------------------------------------------------------------------------------------------------------
# layer


def test_layer_as_a_user_runs_it(tmp_path):
    words = "layer --shapes S1 --tokens 64 --rounds 2 --others false --device cpu --json"
    command = [sys.executable, ROOT / "tools/bench.py", *words.split(), tmp_path / "layer.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "allocator" in done.stdout and "router='switch'" in done.stdout
    rows = table_rows(done.stdout[done.stdout.index("| impl") :])
    assert [row[0] for row in rows] == ["dense", "dense, compiled GELU", "ours"]
    found = json.loads((tmp_path / "layer.json").read_text())
    assert len(found) == 3 and all(record["machine"]["allocator"] for record in found)


def test_layer_measures_every_router_and_peer_against_the_dense_ones(records, capsys):
    found = {r["impl"]: r for r in records("layer", "--shapes", "S1", "--tokens", 64, "--rounds", 2, "--patience", 1)}
    others = ["topk", "hypersphere", "threshold", "base", "expert_choice", "hash", "no limit"]
    ours = ["dense", "dense, compiled GELU", "ours", *(f"ours, {other}" for other in others)]
    assert [name for name in found if name not in bench.PEERS] == ours
    assert found["ours, no limit"]["gflops"] == pytest.approx(3 * 4 * 256 * 1024 * 64 / 1e9)  # of every token
    out = capsys.readouterr().out
    for peer in bench.PEERS:  # there, or said why not
        assert (peer in found) != (f"{peer}: skipped" in out)
    dense, compiled, ours = found["dense"], found["dense, compiled GELU"], found["ours"]
    assert (ours["shape"], ours["S"], ours["runs"], ours["machine"]["processes"]) == ("S1", 64, 2, 1)
    assert ours["gflops"] == pytest.approx(dense["gflops"], rel=0.01)
    for record in found.values():
        each = record["ms"] / record["gflops"]
        assert record["ratio"] == pytest.approx(each / dense["ms"] * dense["gflops"])
        assert record["to_compiled"] == pytest.approx(each / compiled["ms"] * compiled["gflops"])
        assert record["ms"] == pytest.approx(statistics.median(record["all_ms"]))


@pytest.mark.parametrize("name", bench.SHAPES)
def test_mixtral_has_as_many_flops_and_parameters_as_our_layer(name, monkeypatch):
    shape = bench.SHAPES[name]
    blocks = []
    monkeypatch.setattr(bench, "layer", lambda block, call, h, gflops, context: blocks.append(block) or gflops)
    with torch.device("meta"):
        gflops = bench.hf_mixtral("eager", shape, torch.zeros(1, 4, shape.D), replace(CPU, device="meta"))
    weights = sum(p.numel() for name, p in blocks[0].named_parameters() if "experts" in name)
    assert gflops == pytest.approx(2e-9 * weights / shape.E * shape.K * 4)  # of K experts a token
    assert weights == pytest.approx(2 * shape.D * shape.F * shape.E, rel=0.04)


@pytest.mark.parametrize("context", [CPU, BF16])
@pytest.mark.parametrize("implementation", bench.PEERS.values())
def test_mixtral_has_weights_and_inputs_of_our_products_type(implementation, context, monkeypatch):
    """Autocast does not reach all of its products: fp32 weights would be multiplied in fp32."""
    pytest.importorskip("transformers")
    seen = []

    def watched(module, call, h, gflops, context):
        y, _ = call(h)
        seen.extend([h.dtype, y.dtype, *(p.dtype for p in module.parameters())])

    monkeypatch.setattr(bench, "layer", watched)
    shape = bench.Shape(16, 8, 24, "topk", 2, 8.0)
    bench.hf_mixtral(implementation, shape, torch.randn(1, 32, 16), context)
    assert len(seen) > 4 and set(seen) == {context.dtype}


@pytest.mark.parametrize("router, kept", [("switch", 8), ("topk", 24), ("hypersphere", 24), ("base", 64)])
def test_flops_are_those_of_the_rows_that_are_kept(router, kept):
    """64 tokens that are all alike want the same experts, which have room for 8; BASE deals them out."""
    h = torch.ones(1, 64, 16)
    ours = bench.our_layer(bench.Shape(16, 8, 4, router, 3, 1.0), h, CPU).facts
    assert ours["gflops"] == pytest.approx(3 * 2 * 2 * 16 * 4 * kept / 1e9)
    assert ours["rows_per_token"] == kept / 64
    for dense in bench.dense_layers(h, 8 * 3 * 16e-9 * 16**2, CPU).values():
        assert dense.facts == {"S": 8, "gflops": pytest.approx(3 * 8 * 2 * 2 * 16 * 64 / 1e9)}


def test_a_pass_reaches_every_weight_and_leaves_no_gradient(monkeypatch):
    modules, layer = [], bench.layer
    monkeypatch.setattr(bench, "layer", lambda module, *rest: modules.append(module) or layer(module, *rest))
    contender = bench.our_layer(bench.Shape(16, 8, 4, "threshold", 1, 8.0), torch.randn(1, 64, 16), CPU)
    (moe,), reached = modules, set()
    for name, p in moe.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: reached.add(name))
    contender.run()
    assert reached == {name for name, _ in moe.named_parameters()}
    assert all(p.grad is None for p in moe.parameters())


def test_the_compiled_gelu_is_ours(monkeypatch):
    calls = []

    def compiled(*arguments):
        calls.append(arguments)
        return model.activation(*arguments)

    monkeypatch.setattr(model, "compiled_activation", lambda device: compiled)
    monkeypatch.setattr(bench, "layer", lambda module, call, h, gflops, context: call(h)[0])
    for enough in (10**9, 1):
        monkeypatch.setattr(model, "WORTH_COMPILING", enough)
        torch.testing.assert_close(*bench.dense_layers(torch.randn(1, 128, 64), 1e-2, CPU).values())
        assert len(calls) == (enough == 1)


# ---------------------------------------------------------------------------------------------------------------------
# step and scale

SIZE = dict(n_head=4, n_embd=16, ffn_size=64, block_size=16)
TINY = {"width 16": bench.decoders("small", **SIZE), "encoder": bench.encoders("small", **SIZE, expert_size=16)}


def test_step_measures_whole_steps(records, monkeypatch):
    monkeypatch.setitem(bench.STEPS, "cpu", TINY)
    monkeypatch.setattr(bench, "peak_flops", lambda context: 1e12)
    found = records("step", "--tokens", 70, "--rounds", 2)  # 4 sequences and a part of one
    decoders = ["dense 1 x 64", "switch 8 x 64", "topk 64 x 8", "threshold 64 x 8"]
    assert [r["impl"] for r in found] == [*decoders, "dense, FFN 76", "SMoE 32 x 3 x 16", "X-MoE 32 x 3 x 16"]
    for r in found:
        dense, switch, *_ = (other for other in found if other["shape"] == r["shape"])
        assert r["steps_per_second"] == pytest.approx(1e3 / r["ms"])
        assert r["tokens_per_second"] == pytest.approx(64 / r["ms"] * 1e3)
        assert r["to_dense"] == pytest.approx(r["ms"] / dense["ms"])
        assert r["to_switch"] == pytest.approx(r["ms"] / switch["ms"])
        assert r["S"] == 64 and r["mfu"] == pytest.approx(1e9 * r["gflops"] / (r["ms"] / 1e3) / 1e12)


@pytest.mark.parametrize("group", TINY)
def test_a_step_trains(group, monkeypatch):
    nets, wrap = [], parallel.wrap
    monkeypatch.setattr(parallel, "wrap", lambda net, *rest: nets.append(net) or wrap(net, *rest))
    for constants in TINY[group].values():
        contender = bench.trainee(constants, 64, CPU)
        net = nets.pop()
        before = [p.clone() for p in net.parameters()]
        contender.run()
        changed = [not torch.equal(p, old) for p, old in zip(net.parameters(), before)]
        assert sum(changed) > 0.8 * len(changed)  # not positions of longer texts, nor experts that nobody chose
        total = sum(p.numel() for p in net.parameters())
        assert contender.facts["state_mb"] == pytest.approx(16 * total / 2**20)


@pytest.mark.parametrize("scale, group", [(scale, group) for scale in bench.STEPS for group in bench.STEPS[scale]])
def test_models_that_are_compared_cost_the_same(scale, group):
    costs = []
    for constants in bench.STEPS[scale][group].values():
        constants = replace(constants, micro_tokens=constants.block_size)
        with torch.device("meta"):
            net, _, _, work = bench.random_task(constants, torch.device("meta"))
        costs.append(work)
        if constants.router == "dense":
            T, D, V = constants.block_size, constants.n_embd, net.vocab_size
            body, head = net, D * V
            if group == "encoder":
                body, head = net.encoder, 0.15 * D * (D + V)
            products = sum(module.weight.numel() for module in body.modules() if isinstance(module, torch.nn.Linear))
            assert work == pytest.approx(2 * (products + 2 * constants.n_layer * T * D + head))
    assert costs == pytest.approx(costs[:1] * len(costs), rel=0.01)


def test_processes_share_a_step_and_hold_less_each(tmp_path):
    words = "scale --rounds 1 --tokens 1024 --device cpu --json"
    command = [*TORCHRUN, ROOT / "tools/bench.py", *words.split(), tmp_path / "scale.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {record["impl"]: record for record in json.loads((tmp_path / "scale.json").read_text())}
    one, alone, *_ = found.values()
    names = ["one process", "no communication", "data parallel", "expert parallel", "shard", "both"]
    assert list(found) == names and [r["processes"] for r in found.values()] == [1, 2, 2, 2, 2, 2]
    *_, constants = bench.decoders("small").values()
    net = model.GPT(constants, bench.VOCABULARY)
    total = sum(p.numel() for p in net.parameters()) * 16 / 2**20
    experts = sum(p.numel() for moe in net.moe_layers for p in moe.experts.parameters()) * 16 / 2**20
    held = {name: record["state_mb"] for name, record in found.items()}
    assert held["data parallel"] == held["one process"] == pytest.approx(total)
    assert held["expert parallel"] == pytest.approx(total - experts / 2)
    assert held["shard"] == pytest.approx(held["both"], rel=0.01) == pytest.approx(total / 2, rel=0.02)
    assert one["S"] == 1024 and alone["S"] == 512 and one["communication"] == 0
    for name in names[1:]:
        assert found[name]["speedup"] == pytest.approx(one["ms"] / found[name]["ms"])
        assert found[name]["communication"] == pytest.approx(1 - alone["ms"] / found[name]["ms"])


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    "words, message",
    [
        ("sise", "'sise' is nothing to measure: python tools/bench.py layer | step | scale"),
        ("layer --rounds 0", "rounds must be over 0"),
        ("layer --patience -1", "patience must be over 0"),
        ("layer --device quantum", "device quantum"),
        ("layer --json nowhere/x.json", "No such file or directory: 'nowhere/x.json'"),
    ],
)
def test_bad_input_is_one_clear_line(words, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench.py", *words.split()])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 1 and line.startswith("error: ") and message in line


def test_processes_that_cannot_share_a_step_are_refused():
    with pytest.raises(ValueError, match="3 processes cannot share out 4 micro-batches evenly"):
        bench.bench_scale(bench.Config(), replace(CPU, world=3))


def test_help_says_what_there_is(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--help"])
    bench.main()
    assert capsys.readouterr().out.strip() == bench.__doc__.strip()
