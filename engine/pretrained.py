"""Models that were trained before: runs of these scripts, or GPT-2 and XLM-R in Hugging Face's format.

    model, tokenizer = load("out/train_mlm/demo")         the best weights of a run, or its newest
    model, tokenizer = load("/models/xlm-roberta-base")   downloaded by hand: nothing is downloaded here
    python -m engine.pretrained export RUN FOLDER         a run as a folder that transformers loads, and `load` again

A run of train_lm.py gives a GPT; of train_mlm.py and train_electra.py an Encoder, without its head (of XLM-E the
discriminator's); of train_mt.py a Translator.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from data.tokenizers import KINDS, XLMR, Tokenizer, load_tokenizer
from engine.device import clear_errors
from engine.run import WEIGHTS, newest, read_json
from model import GPT, PAD, Encoder, Translator

Weights = dict[str, Tensor]  # by the names that model.py has for them

MODELS = {"GPT": GPT, "MaskedLM": Encoder, "Electra": Encoder, "Translator": Translator}  # trained, and loaded
HUGGING_FACE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"
PIECES = "sentencepiece.bpe.model"  # XLM-R's tokenizer


class Found(NamedTuple):
    """The model that a folder holds."""

    kind: str  # the class that was trained, of MODELS
    constants: dict  # by which model.py makes it, with its vocab_size
    weights: Weights
    vocabulary: str  # the checksum of its tokenizer; "" where nobody knows


def read(folder: Path) -> Found:
    """A run, or a model in Hugging Face's format. Raises OSError or ValueError where there is no sound one."""
    wanted = WEIGHTS + HUGGING_FACE
    if not has_one(folder, wanted):
        names = ", ".join(wanted)
        raise FileNotFoundError(f"{folder} is neither the folder of a run nor of a model: it has none of {names}")
    if not is_run(folder):
        return read_hugging_face(folder)
    _, state = newest(folder, WEIGHTS)
    if state["class"] not in MODELS:
        raise ValueError(f"{folder} holds checkpoints of something else")
    constants = state["constants"] | {"vocab_size": state["vocab_size"]}
    return Found(state["class"], constants, state["model"], state["identity"]["tokenizer_checksum"])


def is_run(folder: Path) -> bool:
    return has_one(folder, WEIGHTS)


def has_one(folder: Path, names) -> bool:
    return any((folder / name).exists() for name in names)


def load(path: str | Path, **changes) -> tuple[nn.Module, Tokenizer | None]:
    """The model in a folder, on the CPU and in evaluation mode, and its tokenizer, None where the folder holds none.

    changes: constants to replace, such as the dropout. Raises OSError or ValueError where no sound model is there.
    """
    folder = Path(path)
    found, tokenizer = read(folder), tokenizer_in(folder)
    if found.vocabulary and found.vocabulary != tokenizer.sha256:
        raise ValueError(f"{path} was trained with another vocabulary than the tokenizer in it")
    kind, weights = MODELS[found.kind], found.weights
    constants = found.constants | changes
    V = constants.pop("vocab_size")
    try:
        model = kind(SimpleNamespace(**constants), V)
    except Exception as error:  # wrong constants show themselves in a dozen ways
        raise ValueError(f"{path} describes no model: {short(error)}") from error
    if kind is Encoder:  # without the head that it was trained with
        weights = part_of(weights, "encoder.") or weights
    return fill(model, {}, weights, path).eval(), tokenizer


def tokenizer_in(folder: Path) -> Tokenizer | None:
    """That of a run, or XLM-R's; other models may have none."""
    if (folder / PIECES).exists():
        return load_tokenizer(folder / PIECES, kind="xlmr")
    if is_run(folder) or has_one(folder, [each.filename for each in KINDS.values()]):
        return load_tokenizer(folder)
    return None


def load_encoder(path: str | Path, **changes) -> tuple[Encoder, XLMR]:
    """As `load`, of a folder that must hold an encoder with XLM-R's kind of tokenizer."""
    if not Path(path).exists():
        raise ValueError(f"{path} does not exist: train it with train_mlm.py, or name another folder")
    encoder, tokenizer = load(path, **changes)
    if not isinstance(encoder, Encoder):
        raise ValueError(f"{path} is no encoder: give a run of train_mlm.py or train_electra.py")
    if not isinstance(tokenizer, XLMR):
        raise ValueError(f"{path} has no {PIECES}, the tokenizer of XLM-R")
    if tokenizer.vocab_size != encoder.vocab_size:
        raise ValueError(f"{path}: its tokenizer has {tokenizer.vocab_size:,} pieces, not those of its model")
    return encoder, tokenizer


def weights_of(path: str | Path, kind: str, vocabulary: str) -> tuple[dict, Weights]:
    """The constants that weights depend on, and the weights, of a folder with a model of this class to train on.

    Raises ValueError where it holds another class, or is known to have another vocabulary.
    """
    folder = Path(path)
    found = read(folder)
    if found.kind != kind or found.vocabulary not in ("", vocabulary):
        raise ValueError(f"{path} is no run of this script with the vocabulary of this corpus")
    shaping = {*SIZES, "frequency_bias", "relative_bias"}
    if not is_run(folder):
        shaping |= LAYOUTS[kind].ours.keys()
    sizes = {name: value for name, value in found.constants.items() if name in shaping}
    return sizes, found.weights


def fill(model: nn.Module, sizes: dict, weights: Weights, path: str | Path) -> nn.Module:
    """The model with these weights in it; it may need only some of them.

    sizes: the constants of the model that the weights are of. Raises ValueError where that is another model.
    """
    for name, size in sizes.items():
        ours = model.vocab_size if name == "vocab_size" else getattr(model.config, name)
        if ours != size:
            raise ValueError(f"{path} has {name} {size}, not {ours}")
    needed = model.state_dict().keys() & weights.keys()
    try:
        model.load_state_dict({name: weights[name] for name in needed})
    except RuntimeError as error:
        raise ValueError(f"{path} has not the weights of the model that it describes: {short(error)}") from None
    return model


def part_of(weights: Weights, prefix: str) -> Weights:
    """The weights of one part of a model, by the names that they have in that part."""
    names = [name for name in weights if name.startswith(prefix)]
    return {name.removeprefix(prefix): weights[name] for name in names}


def short(error: Exception) -> str:
    return textwrap.shorten(str(error), 300)


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face's format


SIZES = "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "ffn_size"  # constants of ours


class Layout(NamedTuple):
    """How transformers writes a dense model of model.py down. Its table of names is read in both directions."""

    architecture: str  # transformers' class
    sizes: tuple[str, ...]  # SIZES in their config.json
    fixed: dict  # values there for which model.py has a model
    ours: dict  # constants of ours that describe it
    names: dict[str, str]  # of a module or tensor: ours -> theirs, or several that are one of ours; {}: the layer
    prefix: str  # which theirs have only in a model with a head
    unused: int = 0  # positions that no token has
    turned: bool = False  # their matrices are (in, out)

    def pairs(self, layers: int) -> Iterator[tuple[str, list[str]]]:
        """Names of tensors that may be there, ours and theirs."""
        for ours, theirs in self.names.items():
            for layer in range(layers if "{}" in ours else 1):
                for end in ("", ".weight", ".bias"):
                    yield ours.format(layer) + end, [name.format(layer) + end for name in theirs.split()]

    def turn(self, name: str, x: Tensor) -> Tensor:
        """A tensor of this name of ours, from their axes to ours or back."""
        turned = self.turned and x.dim() == 2 and name.startswith("blocks.")
        return x.t().contiguous() if turned else x

    def read(self, folder: Path) -> tuple[dict, Weights]:
        """Their folder -> our constants and weights. Raises ValueError where model.py has no such model."""
        config = read_json(folder / "config.json")
        for name, value in self.fixed.items():
            if config.get(name, value) != value:
                raise ValueError(f"{folder} has {name} {config[name]!s:.50}, not {value}: model.py has no such model")
        if config.get("n_inner") is None:  # as in GPT-2 itself
            config["n_inner"] = 4 * config.get("n_embd", 0)
        sizes = {ours: config.get(theirs) for ours, theirs in zip(SIZES, self.sizes)}
        if not all(type(size) is int for size in sizes.values()):
            raise ValueError(f"{folder}/config.json does not have all of {', '.join(self.sizes)}")
        sizes["block_size"] -= self.unused
        weights, tensors = {}, read_tensors(folder)
        tensors |= {self.prefix + name: x for name, x in tensors.items()}  # of a model without a head
        for ours, theirs in self.pairs(sizes["n_layer"]):
            if tensors.keys() >= {*theirs}:
                x = torch.cat([tensors[name] for name in theirs])
                weights[ours] = self.turn(ours, x)
        return self.ours | sizes, weights

    def written(self, constants: dict, weights: Weights) -> tuple[dict, Weights] | None:
        """Our constants and weights -> their config and tensors; None where these have no room for all of ours."""
        names, tensors = dict(self.pairs(constants["n_layer"])), {}
        if not names.keys() >= weights.keys():
            return None
        config = {theirs: constants[ours] for ours, theirs in zip(SIZES, self.sizes)}
        config[self.sizes[1]] += self.unused
        for ours, x in weights.items():
            parts = self.turn(ours, x).chunk(len(names[ours]))
            tensors |= {theirs: part.clone() for theirs, part in zip(names[ours], parts)}
        return {"architectures": [self.architecture]} | self.fixed | config, tensors


GPT2 = Layout(
    "GPT2LMHeadModel",
    sizes=("vocab_size", "n_positions", "n_layer", "n_head", "n_embd", "n_inner"),
    fixed={
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    },
    ours={"router": "dense", "frequency_bias": False},
    names={
        "wte": "transformer.wte",
        "wpe": "transformer.wpe",
        "blocks.{}.ln_1": "transformer.h.{}.ln_1",
        "blocks.{}.attn.qkv": "transformer.h.{}.attn.c_attn",
        "blocks.{}.attn.proj": "transformer.h.{}.attn.c_proj",
        "blocks.{}.ln_2": "transformer.h.{}.ln_2",
        "blocks.{}.ffn.fc": "transformer.h.{}.mlp.c_fc",
        "blocks.{}.ffn.proj": "transformer.h.{}.mlp.c_proj",
        "ln_f": "transformer.ln_f",
    },
    prefix="transformer.",
    turned=True,
)
LAYER = "roberta.encoder.layer.{}."
XLM_R = Layout(
    "XLMRobertaForMaskedLM",
    sizes=(
        *("vocab_size", "max_position_embeddings", "num_hidden_layers"),
        *("num_attention_heads", "hidden_size", "intermediate_size"),
    ),
    fixed={
        "model_type": "xlm-roberta",
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "pad_token_id": PAD,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        "type_vocab_size": 1,
    },
    ours={"relative_bias": False},
    names={
        "encoder.wte": "roberta.embeddings.word_embeddings",
        "encoder.wpe": "roberta.embeddings.position_embeddings",
        "encoder.token_type": "roberta.embeddings.token_type_embeddings.weight",
        "encoder.ln_e": "roberta.embeddings.LayerNorm",
        "encoder.layers.{}.attn.qkv": " ".join(f"{LAYER}attention.self.{part}" for part in ("query", "key", "value")),
        "encoder.layers.{}.attn.proj": f"{LAYER}attention.output.dense",
        "encoder.layers.{}.ln_1": f"{LAYER}attention.output.LayerNorm",
        "encoder.layers.{}.ffn.fc": f"{LAYER}intermediate.dense",
        "encoder.layers.{}.ffn.proj": f"{LAYER}output.dense",
        "encoder.layers.{}.ln_2": f"{LAYER}output.LayerNorm",
        "dense": "lm_head.dense",
        "ln_h": "lm_head.layer_norm",
        "bias": "lm_head.bias",
    },
    prefix="roberta.",
    unused=PAD + 1,
)
LAYOUTS = {"GPT": GPT2, "MaskedLM": XLM_R}  # of a run's class
OTHERS = {"router": "dense", "dropout": 0.0, "init_std": 0.02}  # which no weight depends on


def read_hugging_face(folder: Path) -> Found:
    """GPT-2, XLM-R, or a run that engine/export.py wrote."""
    config = read_json(folder / "config.json")
    if config.get("model_type") == "nanoxmoe":
        kind = config["trained"]
        constants = config["constants"] | {"vocab_size": config["vocab_size"]}
        weights = part_of(read_tensors(folder), "model.")
    else:
        kind = "GPT" if config.get("model_type") == "gpt2" else "MaskedLM"
        constants, weights = LAYOUTS[kind].read(folder)
    return Found(kind, OTHERS | constants, weights, vocabulary="")


def read_tensors(folder: Path) -> Weights:
    """All tensors, by their names without what torch.compile and DataParallel put before them."""
    file = next(path for path in map(folder.joinpath, HUGGING_FACE) if path.exists())
    try:
        parts, tensors = [file], {}
        if file.suffix == ".json":  # it says which part a tensor is in
            names = read_json(file)["weight_map"].values()
            parts = [folder / Path(name).name for name in sorted(set(names))]
        for file in parts:
            tensors |= read_part(file)
    except Exception as error:  # damage shows itself in a dozen ways
        raise ValueError(f"{file} cannot be read: {short(error)}") from None
    return {re.sub(r"^(_orig_mod\.|module\.)+", "", name): x for name, x in tensors.items()}


def read_part(file: Path) -> Weights:
    """The tensors of one file: safetensors, or the pickle of older models."""
    if file.suffix == ".bin":
        return torch.load(file, map_location="cpu", weights_only=True)
    from safetensors.torch import load_file

    return load_file(file)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] != "export":
        sys.exit("usage: python -m engine.pretrained export RUN FOLDER")
    from engine.export import export

    with clear_errors():
        export(*sys.argv[2:])
