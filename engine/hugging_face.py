"""Hugging Face's formats: loads GPT-2 and XLM-R, and exports a run as a folder that transformers loads.

The folder includes the code (model.py, routers.py and hf_model.py), which transformers runs if you pass
trust_remote_code=True. lm-eval can evaluate an exported decoder (pip install "lm-eval[hf]"):

    lm_eval run --model hf --model_args pretrained=FOLDER,trust_remote_code=True --tasks lambada_openai
"""

import math
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from data.tokenizers import load_tokenizer
from engine import one_line
from engine.files import read_json, write
from model import PAD

Weights = dict[str, Tensor]  # by their names in model.py


class SavedModel(NamedTuple):
    kind: str  # the class that was trained, or the kind of fine-tuning; a key of pretrained.MODELS
    constants: dict  # from which model.py builds it, and its vocab_size
    weights: Weights
    vocabulary: str  # checksum of its tokenizer; "" if unknown
    labels: Sequence[str] = ()  # of fine-tuning


SIZES = "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "ffn_size"  # our names


class Layout(NamedTuple):
    """How transformers stores a dense model of model.py."""

    sizes: str  # names of SIZES in its config.json
    required: dict  # values that its config.json must have for model.py to support it
    constants: dict  # our constants that describe the model
    names: dict[str, str]  # our module or tensor -> its name there, or several to concatenate; {}: number of the layer
    prefix: str  # of names in models with a head
    unused_positions: int = 0
    transposed: bool = False  # matrices are (in, out)

    def read(self, folder: Path) -> tuple[dict, Weights]:
        """Converts a folder to our constants and weights. Raises ValueError if model.py has no such model."""
        config = read_json(folder / "config.json")
        for name, value in self.required.items():
            if config.get(name, value) != value:
                raise ValueError(f"{folder} has {name} {config[name]!s:.50}, not {value}: model.py has no such model")
        if config.get("n_inner") is None:  # as in GPT-2 itself
            config["n_inner"] = 4 * config.get("n_embd", 0)
        sizes = {ours: config.get(name) for ours, name in zip(SIZES, self.sizes.split())}
        if not all(type(size) is int for size in sizes.values()):
            raise ValueError(f"{folder}/config.json does not have all of {', '.join(self.sizes.split())}")
        sizes["block_size"] -= self.unused_positions
        weights, tensors = {}, read_tensors(folder)
        tensors |= {self.prefix + name: x for name, x in tensors.items()}  # a model without a head has no prefix
        suffixes = "", ".weight", ".bias"
        for (ours, names), layer, suffix in product(self.names.items(), range(sizes["n_layer"]), suffixes):
            parts = [tensors.get(name.format(layer) + suffix) for name in names.split()]
            if all(x is not None for x in parts):
                x, name = torch.cat(parts), ours.format(layer) + suffix
                weights[name] = x.t() if self.transposed and x.dim() == 2 and "{}" in ours else x
        return self.constants | sizes, weights


GPT2 = Layout(
    sizes="vocab_size n_positions n_layer n_head n_embd n_inner",
    required={
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    },
    constants={"router": "dense", "frequency_bias": False},
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
    transposed=True,
)
LAYER = "roberta.encoder.layer.{}."
XLM_R = Layout(
    sizes="vocab_size max_position_embeddings num_hidden_layers num_attention_heads hidden_size intermediate_size",
    required={
        "model_type": "xlm-roberta",
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "pad_token_id": PAD,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        "type_vocab_size": 1,
    },
    constants={"relative_bias": False},
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
    unused_positions=PAD + 1,
)
WEIGHT_FILES = "model*.safetensors"  # one, or several shards
LAYOUTS = {"GPT": GPT2, "MaskedLM": XLM_R}  # by SavedModel.kind
DEFAULTS = {"router": "dense", "dropout": 0.0, "init_std": 0.02, "top_k": None}  # constants that may be missing


def read(folder: Path) -> SavedModel:
    """Reads GPT-2, XLM-R or an exported run."""
    if not any(folder.glob(WEIGHT_FILES)):
        raise FileNotFoundError(f"{folder} is neither the folder of a run nor of a model with a model.safetensors")
    config = read_json(folder / "config.json")
    if config.get("model_type") == "nanoxmoe":
        kind, constants = config["trained"], config["constants"] | {"vocab_size": config["vocab_size"]}
        part, tensors = "" if kind == "GPT" else "encoder.", read_tensors(folder).items()
        names = {name: re.sub(r"^(body\.)?model\.(encoder\.)?", part, name) for name, _ in tensors}
        weights = {names[name].removeprefix("lm_head."): x for name, x in tensors}
    else:
        kind = "GPT" if config.get("model_type") == "gpt2" else "MaskedLM"
        constants, weights = LAYOUTS[kind].read(folder)
    return SavedModel(kind, DEFAULTS | constants, weights, vocabulary="")


def read_tensors(folder: Path) -> Weights:
    from safetensors.torch import load_file

    tensors = {}
    for file in sorted(folder.glob(WEIGHT_FILES)):
        try:
            tensors |= load_file(file)
        except Exception as error:  # damaged files raise many kinds of errors
            raise ValueError(f"{file} cannot be read: {one_line(error):.300}") from None
    return tensors


CODE = {"model.py": "model.py", "routers.py": "routers.py", "hf_model.py": "engine/hf_model.py"}
FINE_TUNED = {"tags": "TokenClassification", "label": "SequenceClassification", "answer": "QuestionAnswering"}
TRAINED = {"GPT": "CausalLM", "MaskedLM": "MaskedLM", "Electra": "TokenClassification"} | FINE_TUNED
CARD = """# {name}

Trained with nanoXMoE. Experts have no capacity limit, even in fine-tuning, so no token depends on the rest of its
batch. Generation has no key-value cache: each new token recomputes the whole context. Before you smooth labels with
Trainer, set tokenizer.padding_side = "right". FOLDER is the path of this folder.

```python
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained(FOLDER, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
```
"""


def export(saved: SavedModel, run: Path, folder: Path):
    """Exports the model of the folder `run`. Raises ValueError, OSError or ImportError, with a message of one line."""
    from safetensors.torch import save_file

    from engine import hf_tokenizer

    if saved.kind not in TRAINED:
        raise ValueError(f"{run} holds a {saved.kind}: pass a run of another script than train_mt.py")
    if ":" in saved.constants["router"]:
        raise ValueError(f"{run} has a router from a file: append its class to routers.py, train again, then export")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: pass another folder")
    tokenizer = load_tokenizer(run)
    config, weights = convert(saved)
    config |= {f"{name}_id": token for name, token in hf_tokenizer.special_ids(tokenizer).items()}
    files = {"config.json": config} | hf_tokenizer.files_of(tokenizer, saved.constants["block_size"])
    for name, source in CODE.items():
        code = (Path(__file__).parents[1] / source).read_text()
        files[name] = code.replace("from routers import", "from .routers import")
    files["README.md"] = CARD.format(name=run.name, auto=f"AutoModelFor{TRAINED[saved.kind]}")
    for name, content in files.items():
        write(folder / name, content)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # like the other files
    tokenizer.save(folder)  # for pretrained.load
    print(f"{folder} has the model, its tokenizer and a README.md that shows how to load them")


def convert(saved: SavedModel) -> tuple[dict, Weights]:
    """The config.json and the tensors of a model of hf_model.py."""
    constants = {name: 1e300 if x == math.inf else x for name, x in saved.constants.items()}  # JSON has no infinity
    weights, decoder, trained = dict(saved.weights), saved.kind == "GPT", TRAINED[saved.kind]
    heads = [trained] if decoder else [trained, *FINE_TUNED.values()]
    config = {
        "model_type": "nanoxmoe",
        "trained": saved.kind,
        "architectures": [f"NanoXMoEFor{trained}"],
        "auto_map": {"AutoConfig": "hf_model.NanoXMoEConfig", "AutoModel": "hf_model.NanoXMoEModel"},
        "dtype": "float32",
        "use_cache": False,
        "vocab_size": constants.pop("vocab_size"),
        "max_position_embeddings": constants["block_size"],
        "hidden_size": constants["n_embd"],
        "num_hidden_layers": constants["n_layer"],
        "num_attention_heads": constants["n_head"],
        "constants": constants,
    }
    config["auto_map"] |= {f"AutoModelFor{head}": f"hf_model.NanoXMoEFor{head}" for head in heads}
    labels = ("original", "replaced") if saved.kind == "Electra" else saved.labels
    if labels:
        config |= {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    if saved.kind == "Electra":
        for name in ("out.weight", "out.bias"):  # softmax([0, logit]) is [1 - sigmoid(logit), sigmoid(logit)]
            logit = weights.pop(name)
            weights[f"tags_{name}"] = torch.cat([torch.zeros_like(logit), logit])
    tensors = {}
    for name, x in weights.items():
        if name == "bias":
            name = "lm_head.bias"
        elif decoder or name.startswith("encoder."):
            name = f"body.model.{name.removeprefix('encoder.')}"
        elif saved.kind in FINE_TUNED:
            name = f"{saved.kind}_{name}"
        if not name.startswith("generator."):  # needed for training alone
            tensors[name] = x.contiguous()
    return config, tensors
