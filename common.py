"""The plumbing that every script would repeat: command line, processes, precision, checkpoints, schedules, tables.

Nothing here knows about the papers.
"""

import atexit
import ctypes
import dataclasses
import difflib
import hashlib
import inspect
import json
import math
import os
import platform
import re
import statistics
import sys
import types
import typing
import zipfile
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

# Constants that say where and how to run, not what to compute: they do not name a run, and may differ when it resumes.
# A script's Config adds its own as `not_identity`.
NOT_IDENTITY = {"preset", "table", "seeds", "out_dir", "resume", "device", "log_every"}

# ---------------------------------------------------------------------------------------------------------------------
# Command line


def parse(Config: type, argv: list[str] | None = None) -> dict:
    """`--name value`, `--name=value` or a bare `--flag`, for the fields of a dataclass -> the values that were given.

    The comment behind a field is its help. Raises ValueError, in one line, for a name or a value that is not right.
    """
    argv, hints, given = list(sys.argv[1:] if argv is None else argv), typing.get_type_hints(Config), {}
    while argv:
        arg = argv.pop(0)
        if arg in ("-h", "--help"):
            print_help(Config)
            sys.exit(0)
        if not arg.startswith("--"):
            raise ValueError(f"{arg!r} is not an option: write --name value")
        name, equals, text = arg[2:].partition("=")
        if name not in hints:
            raise ValueError(f"unknown option --{name}{nearest(name, hints)}")
        if not equals:
            bare = hints[name] is bool and (not argv or argv[0].startswith("--"))
            if not bare and not argv:
                raise ValueError(f"--{name} needs a value")
            text = "true" if bare else argv.pop(0)
        given[name] = convert(name, text, hints[name])
    return given


def convert(name: str, text: str, hint) -> object:
    """Text -> a value of the field's type; `none` where the type allows it."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if text.lower() == "none" and types.NoneType in kinds:
        return None
    kind = kinds[0]
    try:
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise ValueError(f"--{name} takes a value of type {kind.__name__}, not {text!r}") from None


def nearest(name: str, known) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else f": one of {', '.join(known)}"


def print_help(Config: type):
    """The script's docstring, then every constant with its default and its comment."""
    print(sys.modules[Config.__module__].__doc__)
    defaults, comments = {f.name: f.default for f in dataclasses.fields(Config)}, {}
    for cls in [c for c in Config.__mro__ if dataclasses.is_dataclass(c)]:  # the script's own come first
        for name, comment in re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), re.M):
            comments.setdefault(name, comment)
    for name in (name for name in comments if name in defaults):
        print(f"  --{name:22} {str(defaults[name]):14} {comments[name]}")


def configure(Config: type, presets: dict[str, dict], given: dict, row: dict | None = None):
    """Config < preset < table row < command line -> (config, the run's name: the preset plus what differs from it)."""
    preset = given.get("preset", next(iter(presets)))
    if preset not in presets:
        raise ValueError(f"unknown preset {preset!r}{nearest(preset, presets)}")
    chosen = {**(row or {}), **given}
    config = Config(**presets[preset] | chosen)
    named = {f.name: chosen[f.name] for f in dataclasses.fields(Config) if f.name in chosen}
    for name in list(named):  # drop what the others imply, so that a run has one name however it is written
        fewer = {k: v for k, v in named.items() if k != name}
        try:
            named = fewer if Config(**presets[preset] | fewer) == config else named
        except ValueError:
            pass
    slug = [f"{k}={v}" for k, v in named.items() if k not in NOT_IDENTITY | config.not_identity]
    name = re.sub(r"[^\w.,=+-]+", "_", "-".join([preset, *slug]))
    if len(name) > 160:  # a folder's name has limits; config.json says the rest
        name = f"{name[:150]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return config, name


def check_run(config):
    """ValueError where constants of the same name in every script do not go together."""
    for name in ("steps", "batch_tokens", "micro_tokens", "eval_every", "eval_tokens", "log_every", "seeds"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be positive, not {getattr(config, name)}")
    if not 0 <= getattr(config, "warmup", 0) <= 1:
        raise ValueError(f"warmup is a share of the steps, from 0 to 1, not {config.warmup}")
    for whole, part in (("micro_tokens", "block_size"), ("batch_tokens", "micro_tokens")):
        if getattr(config, whole) % getattr(config, part):
            values = getattr(config, part), getattr(config, whole)
            raise ValueError(f"{part} = {values[0]} does not divide {whole} = {values[1]}")


def results_of(Config: type, presets: dict, given: dict, row: dict, run) -> tuple[object, list[dict]]:
    """One result a seed of a table's row -> the row's config, its results. `run(config, name)` skips finished runs."""
    results = []
    for seed in range(given.get("seed", Config.seed), given.get("seed", Config.seed) + given.get("seeds", 1)):
        with clear_errors():
            config, name = configure(Config, presets, {**given, "seed": seed}, row)
        results.append(run(config, name))
    return config, results


def spread(values: list[float], form: str = ".2f") -> str:
    """The mean of one number a seed, with the deviation where there are several; empty where there is none."""
    if not values:
        return ""
    return f"{statistics.fmean(values):{form}}" + (f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else "")


def start(Config: type, presets: dict) -> tuple[dict, object, "Context"]:
    """What the command line gave, the config that it makes, and where this process stands; or one clear line."""
    with clear_errors():
        given = parse(Config)
        config, _ = configure(Config, presets, given)
        return given, config, setup(config.device, config.dtype)


def check_weights(path: str, arguments: dict, config):
    """ValueError where a checkpoint's arguments are not those of the config."""
    differ = [f"{k} {v}, not {getattr(config, k)}" for k, v in arguments.items() if getattr(config, k) != v]
    if differ:
        raise ValueError(f"{path} has {'; '.join(differ)}")


def fail(message: str):
    """One line on stderr, from one process a node, and a non-zero exit."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(1)


@contextmanager
def clear_errors():
    """Turns what a user can cause (ValueError, OSError, ImportError) into one line. For set-up, not for the loop."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        fail(" ".join(str(error).split()))


# ---------------------------------------------------------------------------------------------------------------------
# Processes, devices, precision


@dataclasses.dataclass
class Context:
    """Where this process stands: its rank among `world`, its device, its precision."""

    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype
    allocator: str = "default"

    def autocast(self):
        half = self.dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self.device.type, self.dtype) if half else nullcontext()

    def send(self, x: Tensor) -> Tensor:
        """x on the device; the host does not wait for the copy."""
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x.to(self.device)

    def send_all(self, *xs: Tensor | None) -> list[Tensor | None]:
        return [x if x is None else self.send(x) for x in xs]

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all processes, on every one of them, where x was."""
        if self.world == 1:
            return x
        y = x.to(self.device, copy=True)
        dist.all_reduce(y)
        return y.to(x.device)

    def gather(self, x) -> list:
        """What every process has, by rank, on every one of them; anything that can be pickled."""
        if self.world == 1:
            return [x]
        everyone = [None] * self.world
        dist.all_gather_object(everyone, x)
        return everyone

    def barrier(self):
        if self.world > 1:
            dist.barrier()


def setup(device: str = "auto", dtype: str = "auto", keep_memory: bool = True) -> Context:
    """Joins the processes that torchrun started (NCCL on CUDA, gloo elsewhere), and picks device and precision.

    `keep_memory`: on a CPU with glibc, freed memory stays with the process.

    Raises ValueError for a device that is not there and for an unknown dtype.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device == "cuda" else device
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device}: {str(error).splitlines()[0]}") from None
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if dtype == "auto":
        cuda = device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bfloat16" if cuda or (device == "cpu" and cpu_has_amx()) else "float32"
    if dtype not in dtypes:
        raise ValueError(f"unknown dtype {dtype!r}{nearest(dtype, ['auto', *dtypes])}")
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    if world > 1 and not dist.is_initialized():
        cuda = device.startswith("cuda")
        dist.init_process_group("nccl" if cuda else "gloo", device_id=torch.device(device) if cuda else None)
        atexit.register(dist.destroy_process_group)
    allocator = "default"
    if keep_memory and device == "cpu" and platform.libc_ver()[0] == "glibc":
        # Mapping and faulting in the memory of large temporaries anew at every call takes a third of a step.
        libc, allocator = ctypes.CDLL("libc.so.6"), "glibc, mallopt"
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
    return Context(rank, world, torch.device(device), dtypes[dtype], allocator)


def deal(config, context: Context) -> range:
    """The micro-batches of every step that are this process's. ValueError where they cannot be dealt evenly."""
    micros = config.batch_tokens // config.micro_tokens
    if micros % context.world:
        raise ValueError(
            f"batch_tokens / micro_tokens = {micros} micro-batches a step cannot be dealt to "
            f"{context.world} processes: change batch_tokens"
        )
    return range(context.rank, micros, context.world)


def parallel(model: torch.nn.Module, config, context: Context) -> torch.nn.Module:
    """What to call in training: the model, compiled where the config says so, its gradients averaged over processes."""
    forward = torch.compile(model) if config.compile else model
    if context.world == 1:
        return forward
    devices = [context.device] if context.device.type == "cuda" else None
    return DistributedDataParallel(forward, device_ids=devices, broadcast_buffers=False)


def check_data(data, config, context: Context):
    """Verifies prepared data, and gives its vocabulary to the config. ValueError where the two do not fit."""
    if context.rank == 0:
        data.verify()
    if config.vocab_size not in (None, data.vocab_size):
        raise ValueError(
            f"the model's vocabulary is {config.vocab_size}, that of {data.folder} is {data.vocab_size}: "
            "--vocab_size none takes the data's"
        )
    config.vocab_size = data.vocab_size


def cpu_has_amx() -> bool:
    """Whether bf16 products pay on this CPU. With AVX512-BF16 alone they are native, and slower than fp32 (0.6 x)."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def seed_all(*key: int):
    """Seeds torch from any number of integers, such as (seed, step, micro-batch)."""
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))


# Dense bf16 / fp16 peak of a card, FLOP/s, by a part of its name; the first match counts.
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
PEAK_FLOPS |= {"L4": 121e12, "A10": 125e12, "V100": 125e12, "T4": 65e12, "4090": 165e12, "3090": 71e12}


def peak_flops(context: Context) -> float | None:
    """Of all processes together; None where it is not known."""
    if context.device.type != "cuda" or context.dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(context.device)
    return next((peak * context.world for part, peak in PEAK_FLOPS.items() if re.search(rf"\b{part}\b", name)), None)


def machine(context: Context) -> dict:
    """What a result was measured on."""
    name = platform.processor() or platform.machine()
    if context.device.type == "cuda":
        name = torch.cuda.get_device_name(context.device)
    elif Path("/proc/cpuinfo").exists():
        name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text() + "model name : unknown")[1]
    return {
        "device": name,
        "processes": context.world,
        "threads": torch.get_num_threads(),
        "allocator": context.allocator,
        "dtype": str(context.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Optimisation


NOT_DECAYED = ("bias", "b_in", "b_out", "ln_weight")


def adamw(model: torch.nn.Module, learning_rate: float, betas: tuple[float, float], weight_decay: float, eps=1e-8):
    """AdamW that decays matrices and embeddings, not norms, biases or scalars (stacked ones are matrices)."""
    decayed, free = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (free if p.dim() < 2 or name.endswith(NOT_DECAYED) else decayed).append(p)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True)


def cosine(step: int, steps: int, warmup: float, peak: float, floor: float) -> float:
    """Learning rate of `step` (from 0): a line up for the `warmup` share of the steps, a cosine down to `floor`."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return peak * (step + 1) / rising
    return floor + (peak - floor) * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising))) / 2


def linear(step: int, steps: int, warmup: float, peak: float) -> float:
    """Learning rate of `step` (from 0): a line up for the `warmup` share of the steps, a line down to 0 at `steps`."""
    rising = max(1, round(warmup * steps))
    return peak * min((step + 1) / rising, (steps - step) / max(1, steps - rising))


def inverse_sqrt(step: int, warmup: int, peak: float) -> float:
    """Learning rate of `step` (from 0): a line up to `peak` in `warmup` steps, then falling as 1 / sqrt(step)."""
    return peak * min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))


def not_finite(bar, step: int):
    """Ends a run whose loss is not finite."""
    bar.close()
    fail(f"the loss is not finite at step {step} or just before (not saved): change --learning_rate or --seed")


# ---------------------------------------------------------------------------------------------------------------------
# A run's folder


class RunFolder:
    """`config.json`, `metrics.jsonl`, `ckpt.pt` (and the one before it) and `result.json` of one run.

    Raises ValueError where the folder belongs to a run with other constants. Only rank 0 writes.
    """

    def __init__(self, path: Path, config, context: Context, fresh: bool = False):
        self.path, self.context, self.fresh, self.broken = Path(path), context, fresh, []
        self.data = {}  # what it is trained on, for its checkpoints
        # Through JSON, so that what was written and what is compared are the same kind of values.
        constants = json.loads(json.dumps(dataclasses.asdict(config)))
        self.config = {k: v for k, v in constants.items() if k not in NOT_IDENTITY | config.not_identity}
        file = self.path / "config.json"
        if file.exists() and not fresh:
            old = read_json(file)
            differ = [f"{k} ({old[k]} there, {v} now)" for k, v in self.config.items() if old.get(k, v) != v]
            if differ:
                raise ValueError(f"{self.path} holds a run with another {', '.join(differ)}: choose another --out_dir")
        context.barrier()  # nobody writes before all have read

    @property
    def writes(self) -> bool:
        return self.context.rank == 0

    def begin(self, tokenizer):
        """Makes the folder ready to be written to: a fresh run forgets the one before it."""
        if self.writes:
            self.path.mkdir(parents=True, exist_ok=True)
            if self.fresh:
                for file in [*self.path.glob("*.pt"), *self.path.glob("*.json"), self.path / "metrics.jsonl"]:
                    file.unlink(missing_ok=True)
            write_atomic(self.path / "config.json", json.dumps(self.config, indent=1))
            tokenizer.save(self.path)

    def result(self, name: str = "result", /, **same) -> dict | None:
        """What `finish` wrote, if it has these values."""
        file = self.path / f"{name}.json"
        result = read_json(file) if file.exists() and not self.fresh else {}
        return result if result and all(result.get(k) == v for k, v in same.items()) else None

    def finish(self, result: dict, name: str = "result"):
        if self.writes:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path / f"{name}.json", json.dumps(result, indent=1))

    def log(self, record: dict):
        if self.writes:
            with open(self.path / "metrics.jsonl", "a") as f:
                f.write(json.dumps(record) + "\n")

    def cut_log(self, step: int):
        """Forgets evaluations after `step`, and a torn last line: a resumed run will write them again."""
        file = self.path / "metrics.jsonl"
        if self.writes and file.exists():
            whole = re.findall(r'^(\{"step": (\d+),.*\}\n)', file.read_text(), re.M)
            write_atomic(file, "".join(line for line, at in whole if int(at) <= step))

    def save(self, state: dict):
        """Written beside, flushed, then renamed; the previous one is kept. At every moment one of the two is whole."""
        last = self.path / "ckpt.pt"
        # a damaged one must not take the place of the sound one before it
        self.save_as(last.name, state, None if self.broken else last.with_name("ckpt.prev.pt"))
        self.broken = []

    def save_as(self, name: str, state: dict, previous: Path | None = None):
        """A file of tensors; the one of that name before it becomes `previous`, if given."""
        if not self.writes:
            return
        new, file = self.path / "ckpt.tmp", self.path / name
        with open(new, "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        if previous and file.exists():
            file.replace(previous)
        new.replace(file)

    def load(self, **same) -> dict | None:
        """The newest readable checkpoint, on the CPU; None if there is none.

        Raises ValueError if none can be read, if processes see different ones, or if its values are not `same`.
        """
        state = None
        for file in [] if self.fresh else (self.path / "ckpt.pt", self.path / "ckpt.prev.pt"):
            try:
                state = load_checkpoint(file) if file.exists() and not state else state
            except ValueError as error:
                self.broken.append(str(error))
        if self.broken and not state:
            raise ValueError(f"{'; '.join(self.broken)}: nothing to go on from; --resume false starts again")
        step = state["step"] if state else 0
        if self.broken and self.writes:
            print(f"warning: {self.broken[0]}; using the one before it, of step {step}", file=sys.stderr)
        world = self.context.world
        if self.context.sum(torch.tensor([step, step**2])).tolist() != [step * world, step**2 * world]:
            raise ValueError(f"the processes see different checkpoints in {self.path}: it must be on a shared disk")
        for what, ours in same.items():
            if state and state[what] != ours:
                raise ValueError(f"{self.path} was trained with another {what}: choose another --out_dir")
        return state


def open_run(config, name: str, context: Context, *data) -> tuple[RunFolder, dict | None, dict | None]:
    """The folder of a run, and what it holds: its result if it is finished, else the checkpoint to go on from.

    It is trained on one or several corpora under one tokenizer.
    """
    folder = RunFolder(Path(config.out_dir, name), config, context, fresh=not config.resume)
    folder.data = {"tokenizer": data[0].meta["tokenizer"]["sha256"], "data": "+".join(d.checksum for d in data)}
    result = folder.result(data=folder.data["data"])
    if result and folder.writes:
        tqdm.write(f"{name}: finished before, in {folder.path} (--resume false trains it again)")
    return folder, result, None if result else folder.load(**folder.data)


def restore(checkpoint: dict | None, optimizer, scaler, folder: RunFolder) -> tuple[int, float]:
    """-> the step to go on from, and the seconds that were spent on those before it."""
    step = checkpoint["step"] if checkpoint else 0
    if checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
        if folder.writes:
            tqdm.write(f"{folder.path.name}: goes on from step {step}")
    folder.cut_log(step)
    return step, checkpoint["seconds"] if checkpoint else 0.0


def load_checkpoint(file: Path) -> dict:
    """Raises ValueError where the file is damaged. Its checksums are looked at first: torch misses a flipped byte."""
    try:
        with zipfile.ZipFile(file) as z:
            bad = z.testzip()
        if bad is None:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # processes of a node share it
    except Exception as error:  # damage shows itself in a dozen ways
        bad = error
    raise ValueError(f"checkpoint {file} is corrupt ({bad})")


def read_json(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not readable JSON ({error}): delete it or restore it") from None


def write_atomic(file: Path, text: str):
    part = file.with_name(file.name + ".tmp")
    with open(part, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    part.replace(file)


def markdown_table(headers: list[str], rows: list[list]) -> str:
    """A table that reads well in a terminal and in a README."""
    cells = [[str(c) for c in row] for row in [headers, *rows]]
    width = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, width)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in width) + "|", *lines[1:]])
