"""Models that were trained before: a run of these scripts, or GPT-2's and XLM-R's weights in Hugging Face's format.

    model, tokenizer = load("out/train_mlm/demo")         the newest sound checkpoint of a run
    model, tokenizer = load("/models/xlm-roberta-base")   downloaded by hand: nothing is downloaded here

A run of train_lm.py is a GPT, of train_mlm.py or train_electra.py an Encoder (without its head; of XLM-E's the
discriminator), of train_mt.py a Translator.
"""

import textwrap
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from data.tokenizers import XLMR, Tokenizer, load_tokenizer
from engine.run import newest, read_json
from model import GPT, PAD, Encoder, Translator

MODELS = {"GPT": GPT, "MaskedLM": Encoder, "Electra": Encoder, "Translator": Translator}  # trained, and loaded
# Of a run: the translator that was best, or else the newest checkpoint and the one before it.
CHECKPOINTS = "model.pt", "ckpt.pt", "ckpt.prev.pt"
HUGGING_FACE = "model.safetensors", "pytorch_model.bin"


def load(path: str | Path, **changes) -> tuple[nn.Module, Tokenizer | None]:
    """The model of a folder, on the CPU and in evaluation mode, and its tokenizer, None if the folder holds none.

    changes: constants that are to be others, such as dropout where it is to be trained again.
    Raises OSError or ValueError, in one line, for a folder that holds no model, or a damaged one.
    """
    folder = Path(path)
    _, state = newest(folder, CHECKPOINTS)
    if state:
        return load_run(folder, state, changes)
    if any((folder / name).exists() for name in HUGGING_FACE):
        return load_hugging_face(folder, changes)
    wanted = ", ".join(CHECKPOINTS + HUGGING_FACE)
    raise FileNotFoundError(f"{folder} is neither the folder of a run nor of a model: it has none of {wanted}")


def load_encoder(path: str | Path, **changes) -> tuple[Encoder, XLMR]:
    """The same of a folder that must hold an encoder with XLM-R's kind of tokenizer; else ValueError or OSError."""
    folder = Path(path)
    if not folder.exists():
        raise ValueError(f"{folder} does not exist: train it with train_mlm.py, or name another folder")
    encoder, tokenizer = load(folder, **changes)
    if not isinstance(encoder, Encoder):
        raise ValueError(f"{folder} is no encoder: give a run of train_mlm.py or train_electra.py")
    if not isinstance(tokenizer, XLMR):
        raise ValueError(f"{folder} has no sentencepiece.bpe.model, the tokenizer of XLM-R")
    return encoder, tokenizer


def load_run(folder: Path, state: dict, changes: dict) -> tuple[nn.Module, Tokenizer]:
    if state.get("class") not in MODELS:
        raise ValueError(f"{folder} holds checkpoints of something else")
    kind, weights = MODELS[state["class"]], state["model"]
    model = make(kind, state["constants"] | changes, state["vocab_size"], folder)
    if kind is Encoder:
        weights = under("encoder.", weights)
    tokenizer = load_tokenizer(folder)
    if tokenizer.sha256 != state["identity"]["tokenizer_checksum"]:
        raise ValueError(f"{folder} was trained with another vocabulary than the tokenizer in it")
    return fill(model, {}, weights, folder).eval(), tokenizer


def make(kind: type[nn.Module], constants: dict, V: int, path: Path) -> nn.Module:
    """The model that a file describes, with new weights. ValueError where there can be no such model."""
    try:
        return kind(SimpleNamespace(**constants), V)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path} describes no model: {textwrap.shorten(str(error), 300)}") from error


def under(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A part's weights, under the names that it has for them."""
    names = [name for name in weights if name.startswith(prefix)]
    return {name.removeprefix(prefix): weights[name] for name in names}


def fill(model: nn.Module, arguments: dict, weights: dict[str, Tensor], path: str | Path) -> nn.Module:
    """The model with all its weights; others are left out. ValueError where they are of another model.

    arguments: the constants that the weights are for.
    """
    for name, value in arguments.items():
        ours = model.vocab_size if name == "vocab_size" else getattr(model.config, name)
        if ours != value:
            raise ValueError(f"{path} has {name} {value}, not {ours}")
    try:
        model.load_state_dict({name: weights[name] for name in model.state_dict() if name in weights})
    except RuntimeError as error:
        reason = textwrap.shorten(str(error), 300)
        raise ValueError(f"{path} has not the weights of the model that it describes: {reason}") from None
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face's format. Of each kind of model: what our constants are called there; what model.py has no other value
# for; and parts of the names of tensors, theirs and ours, in the order in which they are replaced.

DEFAULTS = dict(router="dense", dropout=0.0, init_std=0.02, frequency_bias=False, relative_bias=False)
GPT2_SIZES = {"block_size": "n_positions"} | {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
GPT2_FIXED = {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
GPT2_FIXED |= {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True}
GPT2_NAMES = {
    "transformer.": "",  # of models with a head
    "h.": "blocks.",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.proj",
    "mlp.c_fc": "ffn.fc",
    "mlp.c_proj": "ffn.proj",
}
XLMR_SIZES = dict(vocab_size="vocab_size", block_size="max_position_embeddings", n_layer="num_hidden_layers")
XLMR_SIZES |= dict(n_head="num_attention_heads", n_embd="hidden_size", ffn_size="intermediate_size")
XLMR_FIXED = {"model_type": "xlm-roberta", "hidden_act": "gelu", "layer_norm_eps": 1e-5, "pad_token_id": PAD}
XLMR_FIXED |= {"type_vocab_size": 1, "position_embedding_type": "absolute", "tie_word_embeddings": True}
XLMR_NAMES = {
    "roberta.": "",  # of models with a head
    "embeddings.word_embeddings": "encoder.wte",
    "embeddings.position_embeddings": "encoder.wpe",
    "embeddings.token_type_embeddings.weight": "encoder.token_type",
    "embeddings.LayerNorm": "encoder.ln_e",
    "encoder.layer.": "encoder.layers.",
    "attention.self.": "attn.",
    "attention.output.dense": "attn.proj",
    "attention.output.LayerNorm": "ln_1",
    "intermediate.dense": "ffn.fc",
    "output.dense": "ffn.proj",
    "output.LayerNorm": "ln_2",
    "lm_head.dense": "dense",
    "lm_head.layer_norm": "ln_h",
    "lm_head.bias": "bias",
}


def load_hugging_face(folder: Path, changes: dict) -> tuple[nn.Module, Tokenizer | None]:
    """GPT-2, or the encoder of XLM-R, with its tokenizer where sentencepiece.bpe.model is there."""
    if read_config(folder).get("model_type") == "gpt2":
        arguments, weights = load_gpt2(folder)
        model = make(GPT, DEFAULTS | arguments | changes, arguments["vocab_size"], folder)
        return fill(model, arguments, weights, folder).eval(), None
    arguments, weights = load_xlmr(folder)
    model = make(Encoder, DEFAULTS | arguments | changes, arguments["vocab_size"], folder)
    fill(model, arguments, under("encoder.", weights), folder)
    pieces = folder / "sentencepiece.bpe.model"
    return model.eval(), load_tokenizer(pieces, kind="xlmr") if pieces.exists() else None


def load_gpt2(folder: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """A GPT-2 checkpoint -> constants, weights of `GPT` for `fill`. ValueError for another model."""
    config = read_config(folder)
    arguments = arguments_of(folder, config, GPT2_SIZES, GPT2_FIXED)
    inner = {"n_inner": config.get("n_inner") or 4 * arguments["n_embd"]}
    arguments |= {"router": "dense"} | arguments_of(folder, inner, {"ffn_size": "n_inner"}, {})
    weights = read_tensors(folder, GPT2_NAMES)
    check_sizes(folder, arguments, weights)
    for name, tensor in weights.items():
        if name.startswith("blocks") and tensor.dim() == 2:
            weights[name] = tensor.t().contiguous()  # their linear layers are (in, out)
    return arguments, weights


def load_xlmr(folder: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """An XLM-R checkpoint -> (constants but the router, weights of `MaskedLM`, for `fill`, without a
    head if it has none). ValueError for another model.
    """
    arguments = arguments_of(folder, read_config(folder), XLMR_SIZES, XLMR_FIXED)
    arguments["block_size"] -= PAD + 1  # the first positions are not used
    weights = read_tensors(folder, XLMR_NAMES)
    check_sizes(folder, arguments, weights)
    for query in [name for name in weights if ".attn.query." in name]:
        parts = [query.replace("query", part) for part in ("query", "key", "value")]
        if weights.keys() >= set(parts) and len({weights[part].shape for part in parts}) == 1:
            weights[query.replace("query", "qkv")] = torch.cat([weights[part] for part in parts])
    return arguments, weights


def read_config(folder: str | Path) -> dict:
    config = read_json(Path(folder, "config.json"))
    if not config or not isinstance(config, dict):
        raise FileNotFoundError(f"{folder} has no config.json: not a checkpoint in Hugging Face's format")
    return config


def arguments_of(folder: str | Path, config: dict, sizes: dict[str, str], fixed: dict) -> dict:
    """Constants from a configuration. ValueError where model.py has no such model."""
    for name, value in fixed.items():
        if config.get(name, value) != value:
            raise ValueError(f"{folder} has {name} {config[name]!s:.50}, not {value}: model.py has no such model")
    missing = [theirs for theirs in sizes.values() if theirs not in config]
    if missing:
        raise ValueError(f"{folder}/config.json lacks {', '.join(missing)}")
    for theirs in sizes.values():
        if type(config[theirs]) is not int or config[theirs] < 1:
            raise ValueError(f"{folder}/config.json has {theirs} {config[theirs]!r:.50}, not an integer over 0")
    return {ours: config[theirs] for ours, theirs in sizes.items()}


def check_sizes(folder: str | Path, arguments: dict, weights: dict[str, Tensor]):
    """ValueError where a model of these sizes would have far more weights than there are, and fill the memory."""
    widest = max(arguments[name] for name in ("vocab_size", "block_size", "n_embd", "ffn_size"))
    largest = max((tensor.numel() for tensor in weights.values()), default=0)
    if arguments["n_layer"] > len(weights) or arguments["n_embd"] * widest > largest:
        what = "has not the weights of the model that it describes: its config.json is of a larger one"
        raise ValueError(f"{folder} {what}")


def read_tensors(folder: str | Path, names: dict[str, str]) -> dict[str, Tensor]:
    """The tensors of model.safetensors or pytorch_model.bin, under our names where model.py has such tensors."""
    file, pickled = (Path(folder, name) for name in HUGGING_FACE)
    try:
        if file.exists():
            from safetensors.torch import load_file

            tensors = load_file(file)
        else:
            file = pickled
            tensors = torch.load(file, map_location="cpu", weights_only=True)
        renamed = {}
        for name, tensor in tensors.items():
            for theirs, ours in names.items():
                name = name.replace(theirs, ours)
            renamed[name] = tensor.detach()  # what is no tensor has none
    except ImportError:
        raise ImportError(f"reading {file} needs one more library: pip install safetensors") from None
    except Exception as error:  # damage shows itself in a dozen ways
        raise ValueError(f"{file} cannot be read: {textwrap.shorten(str(error), 300)}") from None
    return renamed
