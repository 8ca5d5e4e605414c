"""The command line that all scripts share, shown on train_lm.py: options, errors, and names of runs."""

import dataclasses
import math
from functools import partial

import pytest
from helpers import ROOT, Script

import finetune_xtreme
import train_electra
import train_lm
import train_mlm
import train_mt
from data.files import PREPARED
from engine.config import LIMITS, check, command_line, headings, identity, run_name, with_constants
from routers import ROUTERS

LM = Script(train_lm)


def parse(*line: str) -> train_lm.Config:
    return command_line(train_lm.Config, train_lm.PRESETS, list(line))


def test_a_value_of_the_wrong_type_is_rejected(options, monkeypatch, capsys):
    assert "--steps INT" in LM.rejected(options | {"steps": "many"}, monkeypatch, capsys)


def test_none_and_false_are_ordinary_words_in_a_text():
    config = parse("--prompt", "none", "--resume", "false", "--init_from", "none")
    assert (config.prompt, config.resume, config.init_from) == ("none", False, None)


REFUSED = {  # options, error message
    "unknown": ({"treshold": 0.5}, "there is no option --treshold: did you mean --threshold? --help lists all"),
    "elsewhere's": ({"lr": 0.5}, "there is no option --lr: did you mean --learning_rate?"),
    "of another script": ({"moe_after": 2}, "there is no option --moe_after: did you mean --moe_every?"),
    "nobody's": ({"xyz": 2}, "there is no option --xyz; --help lists all options"),
    "router": ({"router": "topp"}, r"router must be dense, FILE.py:NAME, or one of topk, switch, hypersphere"),
    "preset": ({"preset": "wikitext103-323"}, "preset must be one of demo, small, wikitext103-124M"),
    "table": ({"table": 3}, "table must be one of 1, 2, not 3"),
    "what the rows say": ({"table": 1, "split": 8}, "the rows of this table set --split: leave it out"),
    "no text": ({"prompt": "\udcff"}, "--prompt is not valid text: '\\udcff'"),
    "no folder": ({"out_dir": ""}, "--out_dir is empty: pass a value, or leave it out"),
    "device": ({"device": "nonsense"}, "device nonsense: "),
    "data": ({"data": "wikitext103x"}, "python -m data.prepare"),
    "a list of 2^31": ({"n_layer": 1 << 31}, "n_layer must be between 1 and 10000, not 2147483648"),
    "far too wide": ({"n_embd": 1 << 40, "n_head": 1}, "out of memory: make the model or its batches smaller"),
    "micro-batches": ({"batch_tokens": 100}, "micro_tokens = 64 does not divide batch_tokens = 100"),
    "beyond 1": ({"threshold": 1.5}, "threshold must be between 0 and 1, not 1.5"),
    "dense experts": ({"router": "dense", "split": 8}, "--split is not read with --router dense: leave it out"),
    "balance of BASE": ({"router": "base", "balance_coef": 0.2}, "--balance_coef is not read with --router base"),
    "tau_0 without a sphere": (
        {"router": "hypersphere", "score": "dot", "init_temperature": 0.5},
        "--init_temperature is not read with --router hypersphere, --score dot",
    ),
    "t of top-1": ({"router": "switch", "threshold": 0.5}, "--threshold is not read with --router switch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_options_are_refused_in_one_line(case, options, monkeypatch, capsys):
    given, message = REFUSED[case]
    assert message in LM.refused(options | given, monkeypatch, capsys)


RANGES = [  # names, valid values, invalid values
    ("steps n_layer experts top_k", (1,), (0, -1)),
    ("learning_rate eps", (1e-12, 5.0), (0.0, -1.0, math.nan, math.inf)),
    ("batch_tokens", (1, 10**9), (0, -1, 10**400)),
    ("seed routing_dim", (0, 1 << 60), (-1,)),
    ("expert_layers", (0, 3), (-1, 1 << 31)),
    ("grad_clip", (0.0, 50.0), (-1.0, math.nan, math.inf)),
    ("threshold warmup", (0.0, 1.0, 0.5), (-0.1, 1.1, math.nan)),
    ("dropout beta2", (0.0, 0.99), (-0.1, 1.0, math.nan)),
    ("capacity eval_capacity", (0.1, math.inf), (0.0, -1.0, math.nan)),
]


@pytest.mark.parametrize("script", [train_lm, train_mlm, train_electra, train_mt, finetune_xtreme])
def test_every_number_of_a_script_has_limits(script):
    number = (int, float, int | None, float | None)
    numbers = {field.name for field in dataclasses.fields(script.Config) if field.type in number}
    assert numbers <= LIMITS.keys()


@dataclasses.dataclass
class WithJitter(train_lm.Config):
    """A script's Config with a constant that the author of a router has added."""

    jitter: float = 0.0


@pytest.mark.parametrize("router", ["dense", *ROUTERS])
@pytest.mark.parametrize("jitter", [0.0, -1.0, 1e30, math.inf])
def test_a_constant_of_your_own_has_no_limits_and_counts(router, jitter):
    config = command_line(WithJitter, train_lm.PRESETS, ["--router", router, "--jitter", str(jitter)])
    assert config.jitter == jitter
    assert identity(config)["jitter"] == jitter
    assert ("jitter" in run_name(config, train_lm.PRESETS)) == (jitter != 0)


def test_a_constant_that_only_another_router_reads_is_refused(monkeypatch):
    reads = ROUTERS["switch"].reads | {"jitter"}
    monkeypatch.setitem(ROUTERS, "jittered", type("Jittered", (ROUTERS["switch"],), {"reads": reads}))
    parse_jitter = partial(command_line, WithJitter, train_lm.PRESETS)
    assert parse_jitter(["--router", "jittered", "--jitter", "1"]).jitter == 1
    with pytest.raises(ValueError, match="^--jitter is not read with --router switch: leave it out$"):
        parse_jitter(["--router", "switch", "--jitter", "1"])


def test_values_out_of_range_are_refused():
    for names, good, bad in RANGES:
        for name in names.split():
            Constants = dataclasses.make_dataclass("Constants", dict.fromkeys(["batch_tokens", "micro_tokens", name]))
            sound = {"batch_tokens": 10**9, "micro_tokens": 1}
            for value in good:
                check(Constants(**sound | {name: value}))
            for value in bad:
                with pytest.raises(ValueError, match=f"^{name} must .*, not {value!r}$"):
                    check(Constants(**sound | {name: value}))


def test_help_shows_every_constant_with_its_comment(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        LM.run({"help": ""}, monkeypatch)
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert stop.value.code == 0 and "--moe_after" not in out
    out = out.split(" options ")[1]  # after the commands in the script's docstring
    names = [field.name for field in dataclasses.fields(train_lm.Config)]
    for name, after in zip(names, [*names[1:], None]):
        text = out.split(f" --{name} ")[1].split(f" --{after} ")[0]  # INT optimizer steps (default: 500)
        assert not text.split()[1].startswith("(default"), text


@pytest.mark.parametrize("script", [train_lm, train_mlm, train_mt, train_electra, finetune_xtreme])
def test_help_lists_constants_below_the_headings_of_the_source(script, monkeypatch, capsys):
    """In order, from the first heading on; also with a router's constants, which are below none."""
    with pytest.raises(SystemExit):
        Script(script).run({"help": ""}, monkeypatch)
    help_text, shown = " ".join(capsys.readouterr().out.split()), headings(script.Config)
    names = [name for line in shown for name in line.rpartition(": ")[2].split(", ")]
    assert names == [field.name for field in dataclasses.fields(script.Config)][-len(names) :]
    assert len(names) > 15
    for line in shown:
        assert line in help_text
    own = with_constants(script.Config, f"{ROOT / 'examples/routers_of_today.py'}:bias")
    assert headings(own) == shown


def test_options_may_be_written_in_several_ways():
    config = parse("--steps", "3", "--learning_rate=1", "--eval_only", "true", "--resume", "False", "--split", "none")
    assert (config.steps, config.learning_rate, config.eval_only, config.resume) == (3, 1.0, True, False)
    assert config.split is None
    assert parse("--preset=openwebtext-556M", "--steps", "9") == parse("--steps", "9", "--preset", "openwebtext-556M")
    assert parse("--prompt", "give --preset big").preset == "demo"
    assert parse("--preset=small", "--preset", "openwebtext-556M").n_embd == 1024  # the last one counts
    assert parse("--prompt=a=b").prompt == "a=b"


@pytest.mark.parametrize("text", ["--abc def", "--ab=cd", "-h", "--", "-", "true", "--promptly", "a=b"])
def test_a_text_may_look_like_an_option(text):
    """In both forms; what follows is read as usual."""
    for line in ([f"--prompt={text}"], ["--prompt", text]):
        config = parse(*line, "--steps", "3", "--resume", "false")
        assert (config.prompt, config.steps, config.resume) == (text, 3, False)


def test_an_option_is_not_the_missing_text_of_another(capsys):
    with pytest.raises(SystemExit):
        parse("--prompt", "--steps=3")
    assert "--prompt" in capsys.readouterr().err


def test_a_rate_never_rises_after_the_warm_up():
    for preset in train_lm.PRESETS:
        config = parse("--preset", preset)
        assert config.min_learning_rate < config.learning_rate
    message = "^min_learning_rate exceeds learning_rate = 1e-05: pass --min_learning_rate 1e-07$"
    with pytest.raises(ValueError, match=message):
        parse("--learning_rate", "1e-5")
    assert parse("--learning_rate", "1e-5", "--min_learning_rate", "1e-7").learning_rate == 1e-5
    assert parse("--learning_rate", "3e-5").min_learning_rate == 3e-5  # constant after the warm-up


MARGIN = """
from routers import ROUTERS, router

@router("margin")
class Margin(ROUTERS["topk"]):
    constants = {CONSTANTS}

    def choose(self, score, probs):
        return super().choose(score + self.config.slope, probs)
"""


def test_a_routers_own_constant_that_it_never_reads_is_refused(tmp_path):
    line = ["--router", f"{tmp_path}/sound.py:margin"]
    (tmp_path / "sound.py").write_text(MARGIN.replace("CONSTANTS", "'slope': 2"))
    assert parse(*line, "--slope", "3").slope == 3
    assert "slope" in identity(parse(*line))
    (tmp_path / "mine.py").write_text(MARGIN.replace("CONSTANTS", "'slope': 2, 'margin': 0.1"))
    with pytest.raises(ValueError, match="^Margin never reads its constant 'margin': use self.config.margin$"):
        parse("--router", f"{tmp_path}/mine.py:margin")


def test_only_one_process_of_a_node_prints_the_error(options, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    for wrong in ({"threshold": 1.5}, {"treshold": 0.5}):
        with pytest.raises(SystemExit):
            LM.run(options | wrong, monkeypatch)
        assert capsys.readouterr() == ("", "")


# ---------------------------------------------------------------------------------------------------------------------
# A run's name


def name(*line: str) -> str:
    return run_name(parse(*line), train_lm.PRESETS)


def test_a_run_is_named_by_what_differs_from_its_preset():
    assert name() == "demo"
    assert name("--preset", "openwebtext-323M") == "openwebtext-323M"
    assert name("--steps", "5", "--seed", "1") == name("--seed", "1", "--steps", "5") == "demo-seed=1-steps=5"
    assert name("--learning_rate", "3e-3", "--threshold", "0.3") == "demo"  # the defaults
    for here in ("--device cpu", "--out_dir x", "--log_every 3", "--resume false", "--prompt a", "--sample_tokens 3"):
        assert name(*here.split()) == "demo"
    masked = command_line(train_mlm.Config, train_mlm.PRESETS, ["--eval_maskings", "3"])
    assert run_name(masked, train_mlm.PRESETS) == "demo-eval_maskings=3"  # it changes the result
    at_test = ("--eval_threshold", "0.5", "--eval_capacity", "2")
    assert name("--eval_only", "true", *at_test) == "demo" != name(*at_test)
    switch = dataclasses.replace(parse(), router="switch", threshold=0.5)  # as a row of a table may do
    assert run_name(switch, train_lm.PRESETS) == "demo-router=switch" == name("--router", "switch")


@pytest.mark.parametrize(
    "module, option",
    [(train_lm, "data"), (train_lm, "init_from"), (train_electra, "pairs"), (finetune_xtreme, "model")],
)
def test_a_path_is_the_same_however_it_is_spelled(module, option, tmp_path, monkeypatch):
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "x")
    monkeypatch.chdir(tmp_path)
    found = set()
    for path in ("x/y", "./x/y", "x/y/", "x//y", "link/y", "x/../x/y", tmp_path / "x/y"):
        config = command_line(module.Config, module.PRESETS, [f"--{option}", str(path)])
        found.add((run_name(config, module.PRESETS), identity(config)[option]))
    assert found == {(f"demo-{option}=x_y", "x/y")}
    default = getattr(module.Config, option)
    if default:
        config = command_line(module.Config, module.PRESETS, [f"--{option}", f"./{default}/"])
        assert run_name(config, module.PRESETS) == "demo"


def test_a_prepared_corpus_has_the_same_name_as_its_folder():
    assert name("--data", str(PREPARED / "wikitext103")) == name("--data", "wikitext103") == "demo-data=wikitext103"


def test_names_are_valid_folder_names():
    odd, long = name("--data", "/home/me/my text"), name("--data", "x" * 300)
    assert odd == "demo-data=_home_me_my_text"
    assert len(long) == 160
    assert long == name("--data", "x" * 301)
    config = command_line(train_mlm.Config, train_mlm.PRESETS, ["--moe_after", "1", "2"])
    assert "moe_after=1,2" in run_name(config, train_mlm.PRESETS)
    assert identity(config)["moe_after"] == [1, 2]  # as in JSON
