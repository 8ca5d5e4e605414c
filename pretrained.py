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
    differ = [f"{k} {config[k]}, not {v}" for k, v in ours.items() if config.get(k, v) != v]
    if differ:
        raise ValueError(f"{folder} is a GPT-2 with {', '.join(differ)}, which model.py does not have")
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
