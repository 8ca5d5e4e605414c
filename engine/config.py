"""The command line: a script's Config, changed by a preset, changed by what is given.

A Config is a flat dataclass. The comment behind a constant is its `--help`; what it may be stands in `LIMITS`.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import sys
from difflib import get_close_matches
from typing import Annotated

import tyro

from routers import ROUTERS

# Constants that say where and how to run, or what to do with a trained model: they make no other run.
WHERE = {"preset", "table", "seeds", "out_dir", "resume", "device", "log_every"}
WHERE |= {"compile", "recompute"}
WHERE |= {"eval_only", "prompt", "sample_tokens", "sample_temperature", "sample_top_k", "sample_seed"}
WHERE |= {"translate", "encoders", "source"}  # of the source it is what was read that counts, by a checksum

# Constants of sparse layers, which a dense model does not read.
SPARSE = {"moe_every", "expert_ffns", "split", "capacity", "eval_capacity", "decoder_moe"}  # XMoE's
SPARSE |= {"moe_after", "experts", "expert_size", "expert_layers", "capacity_factor", "balance_coef"}

# Constants that decide which others are read; a message that refuses one names them.
REASONS = ("router", "score", "objective", "tlm", "relative_bias", "task", "table", "translate")

# What options of other programs, and of other scripts of this one, are called here.
MEANT = {"lr": "learning_rate", "steps": "epochs", "epochs": "steps"}
MEANT |= {"batch_size": "batch_tokens", "batch_tokens": "batch_size"}

Texts = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]  # an option that may be given again and again

ANY = 2**62
LIMITS = {}  # the least and the most that a number may be; one that is not named here must be over 0 and finite
for low, high, names in (
    (1, 65535, "port"),
    (0, ANY, "seed routing_dim sample_tokens sample_seed"),
    (8, ANY, "block_size"),
    (0, 10_000, "expert_layers"),  # this and the next make lists of so many
    (1, 10_000, "n_layer decoder_layers generator_layers seeds"),
    (0, 1, "min_learning_rate weight_decay warmup threshold eval_threshold sampling_exponent"),
    (0, 1e9, "grad_clip balance_coef lambda_disc"),
    (0, 0.9999, "dropout label_smoothing"),
    (0, 0.999999, "beta2"),
    (1e-6, 1, "mask_share"),
    (1.0001, 1e9, "span"),
    (-10, 10, "length_penalty"),
    (1e-20, 1e9, "sample_temperature"),
    (1e-9, math.inf, "capacity eval_capacity capacity_factor"),
):
    LIMITS |= dict.fromkeys(names.split(), (low, high))


def check(config):
    """Raises ValueError where a word is empty or a number out of its limits, or where two do not go together."""
    for name, value in vars(config).items():
        if value == "" and name != "prompt":
            raise ValueError(f"--{name} is empty: leave it out, or name something")
        if name == "prompt" and value.encode(errors="ignore").decode() != value:
            raise ValueError(f"--prompt is no text: {value!r}")
        if type(value) not in (int, float):
            continue
        if name not in LIMITS and not 0 < value < ANY:
            raise ValueError(f"{name} must be over 0 and finite, not {value!r}")
        low, high = LIMITS.get(name, (0, ANY))
        if not low <= value <= high:
            raise ValueError(f"{name} must lie from {low:g} to {high:g}, not {value!r}")
    trains = getattr(config, "translate", None) is None
    for batch, micro in (("batch_tokens", "micro_tokens"), ("batch_size", "micro_size")):
        whole, part = getattr(config, batch, 0), getattr(config, micro, 1)
        if trains and whole % part:
            raise ValueError(f"{micro} = {part} does not divide {batch} = {whole}")
    router = getattr(config, "router", "dense")
    if router != "dense" and router not in ROUTERS:
        raise ValueError(f"router must be dense or one of {', '.join(ROUTERS)}, not {router!r}")


def command_line(Config: type, presets: dict, argv: list[str]):
    """-> the config that the command line makes, by tyro: `--name value`, `--help`.

    Raises ValueError for a value out of its limits, or an option that the chosen model does not read.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default=Config.preset)
    preset = first.parse_known_args(argv)[0].preset
    if preset not in presets:
        raise ValueError(f"preset must be one of {', '.join(presets)}, not {preset!r}")
    default = Config(**{"preset": preset} | presets[preset])
    config = parse(default, argv, sys.modules[Config.__module__].__doc__)
    check(config)
    if not config.table or getattr(config, "translate", None):  # a table's rows are other models
        refuse(config, presets, unread(config))
    return config


def parse(default, argv: list[str], description: str):
    """A dataclass with what argv changes in it. The comments behind its fields are the help, below a description.

    Raises ValueError for an option that there is not.
    """
    words = {"true": "True", "false": "False", "none": "None"}  # tyro wants Python's spelling
    fields, args = dataclasses.fields(default), []
    texts = {f"--{field.name}" for field in fields if field.type in (str, Texts)}
    for word in argv:
        args += word.split("=", 1) if word.startswith("--") else [word]
    for place, (before, word) in enumerate(zip([""] + args, args)):
        if before not in texts:
            args[place] = words.get(word, word)
            if word.startswith("--"):
                known(word.removeprefix("--").replace("-", "_"), {"help"} | {field.name for field in fields})
    return tyro.cli(
        type(default),
        args=args,
        default=default,
        description=description,
        config=(tyro.conf.FlagConversionOff,),
        use_underscores=True,
        console_outputs=int(os.environ.get("LOCAL_RANK", 0)) == 0,
    )


def known(option: str, names: set[str]):
    """Raises ValueError where it is none of the names, with the one that is perhaps meant."""
    if option not in names:
        near = [MEANT.get(option), *get_close_matches(option, names)]
        hint = next((f": perhaps you mean --{name}" for name in near if name in names), "")
        raise ValueError(f"there is no option --{option}{hint}; --help lists them all")


def changed(config, presets: dict) -> dict:
    """The constants that differ from their preset's."""
    default = vars(type(config)(**presets[config.preset]))
    return {name: value for name, value in vars(config).items() if value != default[name]}


def unread(config) -> set[str]:
    """The constants that a run of this kind does not read: the command line refuses them, and they name no run.

    A router says what it reads; what else a script leaves out is told by a method `unread` of its Config.
    """
    own = config.unread() if hasattr(config, "unread") else set()
    if not getattr(config, "relative_bias", True):
        own |= {"rel_bias_lr"}
    if not hasattr(config, "router"):
        return own
    of_routers = {name for router in ROUTERS.values() for name in router.reads}
    if config.router == "dense":
        return own | of_routers | SPARSE
    chosen = ROUTERS[config.router]
    unbalanced = set() if chosen.balanced else {"balance_coef"}
    return own | unbalanced | of_routers - chosen.reads_with(config.score)


def refuse(config, presets: dict, names: set[str]):
    """Raises ValueError where one of the names is given."""
    given = changed(config, presets).keys() & names
    if given:
        reasons = [(name, getattr(config, name, None)) for name in REASONS]
        words = [f"--{name} {value}" for name, value in reasons if value is not None and value is not True]
        raise ValueError(f"--{min(given)} is not read with {', '.join(words)}: leave it out")


def identity(config) -> dict:
    """The constants that make a run what it is, as JSON has them: those that it reads, but for WHERE."""
    dropped = WHERE | unread(config)
    if getattr(config, "eval_only", False):  # a trained model, whatever it was routed by at its own test
        dropped |= {"eval_threshold", "eval_capacity"}
    names = [name for name in vars(config) if name not in dropped]
    return json.loads(json.dumps({name: getattr(config, name) for name in names}))


def run_name(config, presets: dict, more: dict | None = None) -> str:
    """The preset, what differs from it, and more constants that tell this run from another, in at most 220 bytes."""
    ours, end = identity(config), in_name(more or {}, room=60)
    given = {name: ours[name] for name in changed(config, presets) if name in ours}
    return config.preset + in_name(given, room=160 - len(config.preset)) + end


def in_name(constants: dict, room: int) -> str:
    """Constants as a folder's name says them, cut to so many bytes."""
    words = ""
    for name, value in constants.items():
        words += f"-{name}={','.join(map(str, value)) if isinstance(value, list) else value}"
    words = re.sub(r"[^\w.,=+-]+", "_", words)
    return words.encode()[:room].decode(errors="ignore").rstrip("-")
