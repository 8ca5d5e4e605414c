"""The command line: a script's Config, overridden by a preset, overridden by options.

A Config is a flat dataclass. The comment after a field is its --help text; `LIMITS` has the valid ranges.
"""

import argparse
import dataclasses
import inspect
import json
import math
import os
import re
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import tyro

from data.files import PREPARED
from routers import ROUTERS, Router, RouterError, find_router

# Constants that say where and how to run, or what to do with a trained model. They do not identify a run.
WHERE = {"preset", "table", "seeds", "out_dir", "resume", "device", "log_every"}
WHERE |= {"compile", "recompute"}
WHERE |= {"eval_only", "prompt", "sample_tokens", "sample_temperature", "sample_top_k", "sample_seed"}
WHERE |= {"translate", "encoders", "source"}  # data read from a source is identified by its checksum

# Constants of sparse layers, unused in a dense model.
SPARSE = {"moe_every", "expert_ffns", "split", "capacity", "eval_capacity", "decoder_moe"}  # XMoE's
SPARSE |= {"moe_after", "experts", "expert_size", "expert_layers", "capacity_factor"}

# Constants that decide which others are read; error messages name them.
REASONS = ("router", "score", "objective", "tlm", "relative_bias", "task", "table", "translate")

# Options of other programs, or of our other scripts -> their name here.
SYNONYMS = {"lr": "learning_rate", "steps": "epochs", "epochs": "steps"}
SYNONYMS |= {"batch_size": "batch_tokens", "batch_tokens": "batch_size"}

BATCHES = ("batch_tokens", "micro_tokens"), ("batch_size", "micro_size")
PATHS = {"data", "pairs", "model", "init_from", "router"}  # constants that may be paths

OVER_0, ANY = 5e-324, 2**62
OVER_0_NAMES = """
table batch_size batch_tokens micro_size micro_tokens steps epochs warmup_steps eval_every eval_tokens eval_maskings
eval_sentences max_tokens train_examples test_examples log_every stride longest_answer beam sample_top_k n_embd n_head
ffn_size moe_every split top_k experts expert_size expert_ffns init_std router_std init_temperature learning_rate
router_lr rel_bias_lr eps
"""
LIMITS = {}  # name -> (lowest, highest); a constant that is not listed has no limits
for low, high, names in (
    (OVER_0, ANY, OVER_0_NAMES),
    (1, 65535, "port"),
    (0, ANY, "seed routing_dim sample_tokens sample_seed"),
    (8, ANY, "block_size"),
    (0, 10_000, "expert_layers"),  # this and the next set lengths of lists of layers
    (1, 10_000, "n_layer decoder_layers generator_layers seeds"),
    (0, 1, "min_learning_rate weight_decay warmup threshold eval_threshold sampling_exponent"),
    (0, 1e9, "grad_clip balance_coef lambda_disc"),
    (0, 0.9999, "dropout label_smoothing"),
    (0, 0.999999, "beta2"),
    (1e-6, 1, "mask_share"),
    (-10, 10, "length_penalty"),
    (1e-20, 1e9, "sample_temperature"),
    (1e-9, math.inf, "capacity eval_capacity capacity_factor"),
):
    LIMITS |= dict.fromkeys(names.split(), (low, high))


def check(config):
    """Raises ValueError if a text is empty, a number is out of range, or a micro-batch does not divide its batch."""
    for name, value in vars(config).items():
        if value == "" and name != "prompt":
            raise ValueError(f"--{name} is empty: pass a value, or leave it out")
        if name == "prompt" and value.encode(errors="ignore").decode() != value:
            raise ValueError(f"--prompt is not valid text: {value!r}")
        if type(value) not in (int, float) or name not in LIMITS:
            continue
        low, high = LIMITS[name]
        if not low <= value <= high:
            valid = "over 0 and finite" if low == OVER_0 else f"between {low:g} and {high:g}"
            raise ValueError(f"{name} must be {valid}, not {value!r}")
    for batch, micro in BATCHES:
        size, micro_size = getattr(config, batch, 0), getattr(config, micro, 1)
        if getattr(config, "translate", None) is None and size % micro_size:
            raise ValueError(f"{micro} = {micro_size} does not divide {batch} = {size}")
    if getattr(config, "min_learning_rate", 0) > (peak := getattr(config, "learning_rate", math.inf)):
        raise ValueError(f"min_learning_rate exceeds learning_rate = {peak:g}: pass --min_learning_rate {peak / 100:g}")


def command_line(Config: type, presets: dict, argv: list[str]):
    """-> the config. Raises ValueError if a value is out of range, or the chosen model does not read an option."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", default=Config.preset)
    parser.add_argument("--router")
    preset, router = vars(parser.parse_known_args(argv)[0]).values()
    if preset not in presets:
        raise ValueError(f"preset must be one of {', '.join(presets)}, not {preset!r}")
    router = router or presets[preset].get("router", getattr(Config, "router", "dense"))
    Config = with_constants(Config, router)
    config = parse(Config(**{"preset": preset} | presets[preset]), argv, sys.modules[Config.__module__].__doc__)
    check(config)
    if not config.table or getattr(config, "translate", None):  # rows of a table are different models
        refuse(config, presets, unread(config))
    return config


def with_constants(Config: type, router: str) -> type:
    """The Config with a field for each of the router's own constants; the comment after an entry is its --help text."""
    if router == "dense":
        return Config
    cls, fields = find_router(router), []
    check_router(cls, Config)
    modules = dict.fromkeys(sys.modules[kind.__module__] for kind in cls.__mro__ if issubclass(kind, Router))
    in_files = all(hasattr(module, "__file__") for module in modules)  # not in a notebook, whose source is unknown
    source = "".join(map(inspect.getsource, modules)) if in_files else ""
    for name, value in cls.constants.items():
        if in_files and not re.search(rf"(\.|getattr\(.*){name}\b", source):
            raise RouterError(f"{cls.__name__} never reads its constant {name!r}: use self.config.{name}")
        comment = re.search(rf'"{name}": .*?# *(.+)', source)
        text = tyro.conf.arg(help=comment[1] if comment else f"constant of router {router}")
        fields.append((name, Annotated[type(value), text], value))
    module = {"__module__": Config.__module__}
    return dataclasses.make_dataclass(Config.__name__, fields, bases=(Config,), namespace=module) if fields else Config


def check_router(cls: type, Config: type):
    """Raises RouterError if the class defines something that would be ignored, such as a misspelled method."""
    fields = {field.name for field in dataclasses.fields(Config)}
    for name in cls.constants.keys() & fields:
        raise RouterError(f"{cls.__name__}.constants has {name!r}, whose default is in Config: move it to `reads`")
    for name in cls.reads - cls.__base__.reads - cls.constants.keys() - fields:
        raise RouterError(f"{cls.__name__}.reads has {name!r}: correct it, or add a line {name} to Config")
    hooks, defined = ({name for name in vars(kind) if not name.startswith("_")} for kind in (Router, cls))
    methods = {name for name in hooks if callable(getattr(Router, name))} | {"beside"}
    for name in defined:
        similar = methods if callable(getattr(cls, name)) else hooks - methods
        for hook in get_close_matches(name, similar - defined, 1, 0.8) if name not in similar else ():
            raise RouterError(f"{cls.__name__}.{name} overrides nothing: did you mean `{hook}`? If not, rename it")


def parse(default, argv: list[str], description: str):
    """A dataclass overridden by argv; ValueError for an unknown option. --help has the comments after the fields."""
    spellings = {"true": "True", "false": "False", "none": "None"}  # tyro expects Python's
    fields, args = dataclasses.fields(default), []
    names = {"help"} | {field.name for field in fields}
    texts = {f"--{field.name}" for field in fields if getattr(field.type, "__origin__", field.type) is str}
    for word in argv:
        option, *value = word.split("=", 1) if word.startswith("--") else [word]
        name = option.removeprefix("--").replace("-", "_")
        if args and args[-1] in texts and name not in names:
            args[-1] += f"={word}"  # a text may look like an option
            continue
        if option.startswith("--") and name not in names:
            similar = [SYNONYMS.get(name), *get_close_matches(name, names)]
            hint = next((f": did you mean --{other}?" for other in similar if other in names), ";")
            raise ValueError(f"there is no option --{name}{hint} --help lists all options")
        args += [word] if option in texts else [spellings.get(part, part) for part in (option, *value)]
    return tyro.cli(
        type(default),
        args=args,
        default=default,
        description="\n\n".join([description, *headings(type(default))]),
        config=(tyro.conf.FlagConversionOff,),
        use_underscores=True,
        console_outputs=int(os.environ.get("LOCAL_RANK", 0)) == 0,
    )


def headings(Config: type) -> list[str]:
    """A line for each heading in the source of the Config, with the options below it."""
    groups, heading = {}, None
    for line in inspect.getsource(Config.__mro__[-2]).splitlines():  # not of a class with a router's constants
        if line.startswith("    # "):
            heading = line.strip(" #")
        elif heading and (field := re.match(r"    (\w+): ", line)):
            groups.setdefault(heading, []).append(field[1])
    return [f"{heading}: {', '.join(names)}" for heading, names in groups.items()]


def constants_of(config) -> dict:
    """All constants, with paths in one spelling: ./x, x/, a link to x and its absolute path are the same data."""
    constants, here = dict(vars(config)), Path.cwd().as_posix()
    for name in filter(constants.get, PATHS):
        path = Path(constants[name]).resolve().as_posix()
        constants[name] = path.removeprefix(f"{PREPARED.resolve().as_posix()}/").removeprefix(f"{here}/")
    return constants


def changed(config, presets: dict) -> dict:
    """The constants that differ from the preset."""
    default = constants_of(type(config)(**presets[config.preset]))
    return {name: value for name, value in constants_of(config).items() if value != default[name]}


def unread(config) -> set[str]:
    """The constants that this run does not read: as options they are refused, and they do not identify the run."""
    unused = config.unread() if hasattr(config, "unread") else set()
    if not getattr(config, "relative_bias", True):
        unused |= {"rel_bias_lr"}
    if not hasattr(config, "router"):
        return unused
    of_routers = {name for router in ROUTERS.values() for name in router.reads}
    if config.router == "dense":
        return unused | of_routers | SPARSE
    return unused | of_routers - find_router(config.router).reads_with(config.score)


def refuse(config, presets: dict, names: set[str]):
    """Raises ValueError if one of these constants differs from the preset."""
    refused = changed(config, presets).keys() & names
    if refused:
        reasons = [(name, getattr(config, name, None)) for name in REASONS]
        options = [f"--{name} {value}" for name, value in reasons if value is not None and value is not True]
        raise ValueError(f"--{min(refused)} is not read with {', '.join(options)}: leave it out")


def identity(config) -> dict:
    """The constants that identify a run, as JSON values: those that it reads, except WHERE."""
    excluded = WHERE | unread(config)
    if getattr(config, "eval_only", False):  # a trained model may be routed differently at test
        excluded |= {"eval_threshold", "eval_capacity"}
    constants = {name: value for name, value in constants_of(config).items() if name not in excluded}
    return json.loads(json.dumps(constants))


def run_name(config, presets: dict) -> str:
    """The preset and the constants that differ from it, as a folder name of at most 160 bytes."""
    constants, text = identity(config), config.preset
    for name in changed(config, presets):
        if name in constants:
            value = constants[name]
            text += f"-{name}={','.join(map(str, value)) if isinstance(value, list) else value}"
    text = re.sub(r"[^\w.,=+-]+", "_", text)
    return text.encode()[:160].decode(errors="ignore").rstrip("-")
