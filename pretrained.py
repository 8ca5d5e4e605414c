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


def read_weights(folder: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """A folder with config.json and model.safetensors or pytorch_model.bin -> (its configuration, its tensors).

    Raises FileNotFoundError or ValueError, in one line, for a folder that lacks them.
    """
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} has no config.json: not a checkpoint in Hugging Face's format")
    config = json.loads((folder / "config.json").read_text())
    if (folder / "model.safetensors").exists():
        try:
            from safetensors.torch import load_file
        except ImportError:
            raise ValueError("reading model.safetensors needs one more library: pip install safetensors") from None
        return config, load_file(folder / "model.safetensors")
    if (folder / "pytorch_model.bin").exists():
        return config, torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    raise FileNotFoundError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


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
    if config.get("activation_function", "gelu_new") != "gelu_new":
        raise ValueError(f"{folder} uses {config['activation_function']}; this model has gelu_new (tanh)")
    names = {f"{n}.weight": f"{n}.weight" for n in ("wte", "wpe", "ln_f")} | {"ln_f.bias": "ln_f.bias"}
    for i in range(config["n_layer"]):
        for theirs, ours in GPT2_BLOCK.items():
            names |= {f"h.{i}.{theirs}.{part}": f"blocks.{i}.{ours}.{part}" for part in ("weight", "bias")}
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} tensors of a GPT-2, the first being {missing[0]}")
    weights = {ours: tensors[theirs] for theirs, ours in names.items()}
    linear = {ours: w.t().contiguous() for ours, w in weights.items() if w.dim() == 2 and ours.startswith("blocks")}
    return arguments, weights | linear
