"""Models that were trained before: a run of these scripts, or GPT-2's and XLM-R's weights in Hugging Face's format.

    model, tokenizer = load("out/train_mlm/demo")         the newest sound checkpoint of a run
    model, tokenizer = load("/models/xlm-roberta-base")   downloaded by hand: nothing is downloaded here

A run of train_lm.py is a GPT, of train_mlm.py or train_electra.py an Encoder (without its head; of XLM-E's the
discriminator), of train_mt.py a Translator.
"""

import dataclasses
import sys
import textwrap
from pathlib import Path

import torch
from torch import Tensor, nn

from data.tokenizers import Tokenizer, load_tokenizer
from model import GPT, PAD, Encoder, ModelConfig
from runs import load_checkpoint, read_json
from translator import Translator

MODELS = {"lm": GPT, "encoder": Encoder, "encdec": Translator}
# Of a run: the translator that was best, or else the newest checkpoint and the one before it.
CHECKPOINTS = "model.pt", "ckpt.pt", "ckpt.prev.pt"
HUGGING_FACE = "model.safetensors", "pytorch_model.bin"


def load(path: str | Path) -> tuple[nn.Module, Tokenizer | None]:
    """The model of a folder, on the CPU and in evaluation mode, and its tokenizer, None if the folder holds none.

    Raises OSError or ValueError, in one line, for a folder that holds no model, or a damaged one.
    """
    folder = Path(path)
    if any((folder / name).exists() for name in CHECKPOINTS):
        return load_run(folder)
    if any((folder / name).exists() for name in HUGGING_FACE):
        return load_hugging_face(folder)
    wanted = ", ".join(CHECKPOINTS + HUGGING_FACE)
    raise FileNotFoundError(f"{folder} is neither the folder of a run nor of a model: it has none of {wanted}")


def load_run(folder: Path) -> tuple[nn.Module, Tokenizer]:
    state = newest(folder)
    if state.get("kind") not in MODELS:
        raise ValueError(f"{folder} holds checkpoints of something else")
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    arguments = {name: state["arguments"][name] for name in known & state["arguments"].keys()}
    model = MODELS[state["kind"]](ModelConfig(**arguments))
    weights = state["model"]
    if state["kind"] == "encoder":
        weights = under("encoder.", weights)
    return fill(model, weights, folder).eval(), load_tokenizer(folder)


def newest(folder: Path) -> dict:
    """The first of CHECKPOINTS that is sound. ValueError if none is."""
    damaged = []
    for file in [folder / name for name in CHECKPOINTS if (folder / name).exists()]:
        try:
            state = load_checkpoint(file)
        except ValueError as error:
            damaged.append(str(error))
            continue
        if damaged:
            print(f"warning: {'; '.join(damaged)}; using {file.name}", file=sys.stderr)
        return state
    raise ValueError("; ".join(damaged))


def under(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A part's weights, under the names that it has for them."""
    names = [name for name in weights if name.startswith(prefix)]
    return {name.removeprefix(prefix): weights[name] for name in names}


def fill(model: nn.Module, weights: dict[str, Tensor], path: str | Path) -> nn.Module:
    """The model with all its weights. ValueError where they are another model's."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = textwrap.shorten(str(error), 300)
        raise ValueError(f"{path} has not the weights of the model that it describes: {reason}") from None
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face's format

# Names of linear layers and norms, each with a weight and a bias: theirs, ours.
GPT2_BLOCK = {
    "ln_1": "ln_1",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.proj",
    "ln_2": "ln_2",
    "mlp.c_fc": "ffn.fc",
    "mlp.c_proj": "ffn.proj",
}
XLMR_LAYER = {
    "attention.self.qkv": "attn.qkv",  # three matrices, which `join_qkv` makes one
    "attention.output.dense": "attn.proj",
    "attention.output.LayerNorm": "ln_1",
    "intermediate.dense": "ffn.fc",
    "output.dense": "ffn.proj",
    "output.LayerNorm": "ln_2",
}
XLMR_HEAD = {"lm_head.dense": "dense", "lm_head.layer_norm": "ln_h"}
XLMR_EMBEDDINGS = {
    "word_embeddings.weight": "wte.weight",
    "position_embeddings.weight": "wpe.weight",
    "token_type_embeddings.weight": "token_type",
    "LayerNorm.weight": "ln_e.weight",
    "LayerNorm.bias": "ln_e.bias",
}
# Their configuration: what each of our constants is called there, and what model.py has no other value for.
GPT2_SIZES = {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")} | {"block_size": "n_positions"}
GPT2_FIXED = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True}
GPT2_FIXED |= {"scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True}
XLMR_SIZES = dict(vocab_size="vocab_size", block_size="max_position_embeddings", n_layer="num_hidden_layers")
XLMR_SIZES |= dict(n_head="num_attention_heads", n_embd="hidden_size", ffn_size="intermediate_size")
XLMR_FIXED = {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "pad_token_id": PAD, "type_vocab_size": 1}
XLMR_FIXED |= {"position_embedding_type": "absolute", "tie_word_embeddings": True}
XLMR_TYPES = "xlm-roberta", "roberta"


def load_hugging_face(folder: Path) -> tuple[nn.Module, Tokenizer | None]:
    """GPT-2, or the encoder of XLM-R, with its tokenizer where sentencepiece.bpe.model is there."""
    if read_config(folder).get("model_type") == "gpt2":
        arguments, weights = load_gpt2(folder)
        return fill(GPT(ModelConfig(**arguments)), weights, folder).eval(), None
    arguments, weights = load_xlmr(folder)
    model = fill(Encoder(ModelConfig(router="dense", **arguments)), under("encoder.", weights), folder)
    pieces = folder / "sentencepiece.bpe.model"
    return model.eval(), load_tokenizer(pieces, kind="xlmr") if pieces.exists() else None


def load_gpt2(folder: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """A GPT-2 checkpoint -> (arguments of `ModelConfig`, state dict of `GPT`). ValueError for another model."""
    config = read_config(folder)
    arguments = sizes_of(folder, config, ("gpt2",), GPT2_SIZES, GPT2_FIXED)
    arguments |= {"router": "dense", "ffn_size": config.get("n_inner") or 4 * arguments["n_embd"]}
    names = {"wte.weight": "wte.weight", "wpe.weight": "wpe.weight"} | both_parts({"ln_f": "ln_f"})
    for i in range(arguments["n_layer"]):
        names |= both_parts(GPT2_BLOCK, f"h.{i}.", f"blocks.{i}.")
    weights = rename(folder, read_tensors(folder, "transformer."), names)
    for name, tensor in weights.items():
        if name.startswith("blocks") and tensor.dim() == 2:
            weights[name] = tensor.t().contiguous()  # their linear layers are (in, out)
    return arguments, weights


def load_xlmr(folder: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """An XLM-R checkpoint -> (arguments of `ModelConfig` but the router, state dict of `MaskedLM`, without a head if it
    has none). ValueError for another model.
    """
    arguments = sizes_of(folder, read_config(folder), XLMR_TYPES, XLMR_SIZES, XLMR_FIXED)
    arguments["block_size"] -= PAD + 1  # the first positions are not used
    tensors = read_tensors(folder, "roberta.")
    names = {f"embeddings.{theirs}": f"encoder.{ours}" for theirs, ours in XLMR_EMBEDDINGS.items()}
    for i in range(arguments["n_layer"]):
        join_qkv(tensors, f"encoder.layer.{i}.attention.self.")
        names |= both_parts(XLMR_LAYER, f"encoder.layer.{i}.", f"encoder.layers.{i}.")
    if "lm_head.bias" in tensors:
        names |= both_parts(XLMR_HEAD) | {"lm_head.bias": "bias"}
    return arguments, rename(folder, tensors, names)


def both_parts(names: dict[str, str], theirs: str = "", ours: str = "") -> dict[str, str]:
    """Names of modules -> names of their weights and biases, behind a prefix."""
    found = {}
    for part in ("weight", "bias"):
        found |= {f"{theirs}{a}.{part}": f"{ours}{b}.{part}" for a, b in names.items()}
    return found


def join_qkv(tensors: dict[str, Tensor], prefix: str):
    """Query, key and value become one matrix, where they are there."""
    for part in ("weight", "bias"):
        names = [f"{prefix}{name}.{part}" for name in ("query", "key", "value")]
        if tensors.keys() >= set(names):
            tensors[f"{prefix}qkv.{part}"] = torch.cat([tensors.pop(name) for name in names])


def rename(folder: str | Path, tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """The tensors under our names. ValueError where one is missing."""
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} tensors of its model, the first being {missing[0]}")
    return {ours: tensors[theirs] for theirs, ours in names.items()}


def sizes_of(folder: str | Path, config: dict, types: tuple[str, ...], sizes: dict[str, str], fixed: dict) -> dict:
    """Arguments of `ModelConfig` from a configuration. ValueError where model.py has no such model."""
    if config.get("model_type") not in types:
        raise ValueError(f"{folder} holds a {config.get('model_type')} checkpoint, not {types[0]}")
    missing = [theirs for theirs in sizes.values() if theirs not in config]
    if missing:
        raise ValueError(f"{folder}/config.json lacks {', '.join(missing)}")
    for name, value in fixed.items():
        if config.get(name, value) != value:
            raise ValueError(f"{folder} has {name} {config[name]}, not {value}: model.py has no such {types[0]}")
    return {ours: config[theirs] for ours, theirs in sizes.items()}


def read_config(folder: str | Path) -> dict:
    file = Path(folder, "config.json")
    if not file.exists():
        raise FileNotFoundError(f"{folder} has no config.json: not a checkpoint in Hugging Face's format")
    return read_json(file)


def read_tensors(folder: str | Path, prefix: str) -> dict[str, Tensor]:
    """The tensors of model.safetensors or pytorch_model.bin, without a prefix that only models with a head have."""
    safe, pickled = (Path(folder, name) for name in HUGGING_FACE)
    file = safe if safe.exists() else pickled
    if not file.exists():
        raise FileNotFoundError(f"{folder} has neither {' nor '.join(HUGGING_FACE)}")
    try:
        if file == safe:
            from safetensors.torch import load_file

            tensors = load_file(file)
        else:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except ImportError:
        raise ImportError(f"reading {file} needs one more library: pip install safetensors") from None
    except Exception as error:  # damage shows itself in a dozen ways
        raise ValueError(f"{file} cannot be read: {textwrap.shorten(str(error), 300)}") from None
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
