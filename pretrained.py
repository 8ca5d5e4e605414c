"""Weights of public checkpoints in Hugging Face's format, under model.py's names. Nothing is downloaded."""

import json
from pathlib import Path

import torch
from torch import Tensor

# Hugging Face's GPT-2 stores linear layers as (in, out): those are transposed.
GPT2_BLOCK = {
    "ln_1": "ln_1",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.proj",
    "ln_2": "ln_2",
    "mlp.c_fc": "ffn.fc",
    "mlp.c_proj": "ffn.proj",
}


XLMR_EMBEDDINGS = {
    "word_embeddings.weight": "wte.weight",
    "position_embeddings.weight": "wpe.weight",
    "token_type_embeddings.weight": "token_type",
    "LayerNorm.weight": "ln_e.weight",
    "LayerNorm.bias": "ln_e.bias",
}
# XLM-R's query, key and value become one matrix.
XLMR_LAYER = {
    "attention.output.dense": "attn.proj",
    "attention.output.LayerNorm": "ln_1",
    "intermediate.dense": "ffn.fc",
    "output.dense": "ffn.proj",
    "output.LayerNorm": "ln_2",
}


def read_weights(folder: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """A folder with config.json and model.safetensors or pytorch_model.bin -> (its configuration, its tensors).

    Raises FileNotFoundError or ValueError, in one line, for a folder that lacks them.
    """
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} has no config.json: not a checkpoint in Hugging Face's format")
    file = next((f for n in ("model.safetensors", "pytorch_model.bin") if (f := folder / n).exists()), None)
    if file is None:
        raise FileNotFoundError(f"{folder} has neither model.safetensors nor pytorch_model.bin")
    try:
        config = json.loads((folder / "config.json").read_text())
        if file.suffix == ".bin":
            return config, torch.load(file, map_location="cpu", weights_only=True)
        from safetensors.torch import load_file

        return config, load_file(file)
    except ImportError:
        raise ValueError(f"reading {file} needs one more library: pip install safetensors") from None
    except Exception as error:  # damage shows itself in a dozen ways
        raise ValueError(f"{folder} cannot be read: {str(error).splitlines()[0]}") from None


def load_gpt2(folder: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """A GPT-2 checkpoint -> (arguments of `ModelConfig`, state dict of `GPT`). Raises ValueError for another model."""
    config, tensors = read_weights(folder)
    if config.get("model_type") != "gpt2":
        raise ValueError(f"{folder} holds a {config.get('model_type')} checkpoint, not gpt2")
    arguments = {
        "router": "dense",
        "vocab_size": config["vocab_size"],
        "block_size": config["n_positions"],
        "n_layer": config["n_layer"],
        "n_head": config["n_head"],
        "n_embd": config["n_embd"],
        "ffn_size": config.get("n_inner") or 4 * config["n_embd"],
    }
    ours = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True}
    ours |= {"scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True}
    refuse_others(folder, config, ours)
    names = {f"{n}.weight": f"{n}.weight" for n in ("wte", "wpe", "ln_f")} | {"ln_f.bias": "ln_f.bias"}
    for i in range(config["n_layer"]):
        for theirs, ours in GPT2_BLOCK.items():
            names |= {f"h.{i}.{theirs}.{part}": f"blocks.{i}.{ours}.{part}" for part in ("weight", "bias")}
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    weights = rename(folder, tensors, names)
    linear = {ours: w.t().contiguous() for ours, w in weights.items() if w.dim() == 2 and ours.startswith("blocks")}
    return arguments, weights | linear


def load_xlmr(folder: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """An XLM-R checkpoint -> (arguments of `EncoderConfig`, state dict of `MaskedLM`, without a head if it has none).

    Raises ValueError for another model.
    """
    config, tensors = read_weights(folder)
    if config.get("model_type") not in ("xlm-roberta", "roberta"):
        raise ValueError(f"{folder} holds a {config.get('model_type')} checkpoint, not xlm-roberta")
    arguments = {
        "vocab_size": config["vocab_size"],
        "block_size": config["max_position_embeddings"] - 2,
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "n_embd": config["hidden_size"],
        "ffn_size": config["intermediate_size"],
    }
    ours = {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "pad_token_id": 1, "type_vocab_size": 1}
    refuse_others(folder, config, ours | {"position_embedding_type": "absolute", "tie_word_embeddings": True})
    tensors = {name.removeprefix("roberta."): tensor for name, tensor in tensors.items()}
    names = {f"embeddings.{theirs}": f"encoder.{ours}" for theirs, ours in XLMR_EMBEDDINGS.items()}
    for i in range(config["num_hidden_layers"]):
        attention = f"encoder.layer.{i}.attention.self"
        for part in ("weight", "bias"):
            qkv = [tensors.pop(f"{attention}.{x}.{part}", None) for x in ("query", "key", "value")]
            if not any(x is None for x in qkv):
                tensors[f"{attention}.qkv.{part}"] = torch.cat(qkv)
            names[f"{attention}.qkv.{part}"] = f"encoder.layers.{i}.attn.qkv.{part}"
            for theirs, ours in XLMR_LAYER.items():
                names[f"encoder.layer.{i}.{theirs}.{part}"] = f"encoder.layers.{i}.{ours}.{part}"
    if "lm_head.bias" in tensors:
        names |= {f"lm_head.dense.{part}": f"dense.{part}" for part in ("weight", "bias")} | {"lm_head.bias": "bias"}
        names |= {f"lm_head.layer_norm.{part}": f"ln_h.{part}" for part in ("weight", "bias")}
    return arguments, rename(folder, tensors, names)


def refuse_others(folder, config: dict, ours: dict):
    """ValueError where a checkpoint's architecture is one that model.py does not have."""
    differ = [f"{k} {config[k]}, not {v}" for k, v in ours.items() if config.get(k, v) != v]
    if differ:
        raise ValueError(f"{folder} is a {config['model_type']} with {', '.join(differ)}, which model.py does not have")


def rename(folder, tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} tensors of its model, the first being {missing[0]}")
    return {ours: tensors[theirs] for theirs, ours in names.items()}
