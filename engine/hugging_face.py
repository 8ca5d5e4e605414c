"""Hugging Face's formats: GPT-2 and XLM-R are read, and a run is written as a folder that transformers loads.

A run takes its code along (model.py, routers.py and hf_model.py), which transformers runs where it is told
trust_remote_code=True. A decoder's folder can be scored by lm-eval (pip install "lm-eval[hf]"):

    lm_eval run --model hf --model_args pretrained=FOLDER,trust_remote_code=True --tasks lambada_openai
"""

import math
import shutil
import sys
import textwrap
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from data.tokenizers import load_tokenizer
from engine.files import read_json, write
from model import PAD

Weights = dict[str, Tensor]  # by the names that model.py has for them


class Found(NamedTuple):
    """The model that a folder holds."""

    kind: str  # the class that was trained, of pretrained.MODELS
    constants: dict  # by which model.py makes it, with its vocab_size
    weights: Weights
    vocabulary: str  # the checksum of its tokenizer; "" where nobody knows


def short(error: Exception) -> str:
    return textwrap.shorten(str(error), 300)


# ---------------------------------------------------------------------------------------------------------------------
# Dense models in transformers' own layouts

SIZES = "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "ffn_size"  # constants of ours


class Layout(NamedTuple):
    """How transformers writes a dense model of model.py down."""

    sizes: tuple[str, ...]  # SIZES in their config.json
    fixed: dict  # values there for which model.py has a model
    ours: dict  # constants of ours that describe it
    names: dict[str, str]  # of a module or tensor: ours -> theirs, or several that are one of ours; {}: the layer
    prefix: str  # which theirs have only in a model with a head
    unused: int = 0  # positions that no token has
    turned: bool = False  # their matrices are (in, out)

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
        every = product(self.names.items(), range(sizes["n_layer"]), ("", ".weight", ".bias"))
        for (ours, theirs), layer, end in every:
            parts = [tensors.get(name.format(layer) + end) for name in theirs.split()]
            if all(x is not None for x in parts):
                x, name = torch.cat(parts), ours.format(layer) + end
                weights[name] = x.t() if self.turned and x.dim() == 2 and "{}" in ours else x
        return self.ours | sizes, weights


GPT2 = Layout(
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
OTHERS = {"router": "dense", "dropout": 0.0, "init_std": 0.02, "top_k": None}  # which no weight depends on


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read(folder: Path) -> Found:
    """GPT-2, XLM-R, or a run that `export` wrote."""
    if not weight_files(folder):
        raise FileNotFoundError(f"{folder} is neither the folder of a run nor of a model: it holds no weights")
    config = read_json(folder / "config.json")
    if config.get("model_type") == "nanoxmoe":
        kind = config["trained"]
        constants = config["constants"] | {"vocab_size": config["vocab_size"]}
        weights = {name.removeprefix("model."): x for name, x in read_tensors(folder).items()}
    else:
        kind = "GPT" if config.get("model_type") == "gpt2" else "MaskedLM"
        constants, weights = LAYOUTS[kind].read(folder)
    return Found(kind, OTHERS | constants, weights, vocabulary="")


def weight_files(folder: Path) -> list[Path]:
    """The parts of a model: safetensors, or the pickles of older models."""
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def read_tensors(folder: Path) -> Weights:
    """All tensors, by their names."""
    tensors = {}
    for file in weight_files(folder):
        try:
            if file.suffix == ".bin":
                tensors |= torch.load(file, "cpu", weights_only=True)
            else:
                from safetensors.torch import load_file

                tensors |= load_file(file)
        except Exception as error:  # damage shows itself in a dozen ways
            raise ValueError(f"{file} cannot be read: {short(error)}") from None
    return tensors


# ---------------------------------------------------------------------------------------------------------------------
# Writing

CODE = {"model.py": "model.py", "routers.py": "routers.py", "hf_model.py": "engine/hf_model.py"}
CLASSES = {  # class of a run's model -> transformers' classes for it, and ours in hf_model.py; the first is its own
    "GPT": {"AutoModelForCausalLM": "NanoXMoEForCausalLM"},
    "MaskedLM": {"AutoModelForMaskedLM": "NanoXMoEForMaskedLM"},
    "Electra": {"AutoModelForTokenClassification": "NanoXMoEForTokenClassification"},
}
for own in ("MaskedLM", "Electra"):  # encoders
    CLASSES[own] |= {"AutoModel": "NanoXMoEModel"} | CLASSES["Electra"]
CARD = """# {name}

Trained with nanoXMoE. What it was trained with, and what it scored, is in result.json if the run was finished.

No expert has a limit, in fine-tuning neither, so no token depends on its batch-mates. Generation keeps nothing: for
each new token it reads again what stands before.

```python
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained(FOLDER, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```
"""
MOST = sys.float_info.max  # JSON has no infinity


def export(found: Found, run: Path, folder: Path):
    """Writes what was found in the folder `run`. Raises ValueError, OSError or ImportError of one line."""
    from safetensors.torch import save_file

    from engine import hf_tokenizer

    if found.kind not in CLASSES:
        raise ValueError(f"{run} holds a {found.kind}: give a run of train_lm.py, train_mlm.py or train_electra.py")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give another folder")
    tokenizer = load_tokenizer(run)
    config, weights = theirs(found)
    config |= {f"{name}_id": token for name, token in hf_tokenizer.special_ids(tokenizer).items()}
    files = {"config.json": config} | hf_tokenizer.files_of(tokenizer, found.constants["block_size"])
    for name, here in CODE.items():
        code = (Path(__file__).parents[1] / here).read_text()
        files[name] = code.replace("from routers import", "from .routers import")
    auto, *_ = CLASSES[found.kind]
    files["README.md"] = CARD.format(name=run.name, auto=auto)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # as the other files
    for name, content in files.items():
        write(folder / name, content)
    tokenizer.save(folder)  # for `load`
    if (run / "result.json").exists():
        shutil.copy(run / "result.json", folder)
    print(f"{folder} has the model, its tokenizer and a card that says how transformers loads them")


def theirs(found: Found) -> tuple[dict, Weights]:
    """The config and the tensors of a model of hf_model.py."""
    constants = {name: MOST if x == math.inf else x for name, x in found.constants.items()}
    weights, classes = dict(found.weights), CLASSES[found.kind]
    config = {
        "model_type": "nanoxmoe",
        "trained": found.kind,
        "architectures": [*classes.values()][:1],
        "auto_map": {"AutoConfig": "hf_model.NanoXMoEConfig"},
        "dtype": "float32",
        "use_cache": False,
        "vocab_size": constants.pop("vocab_size"),
        "max_position_embeddings": constants["block_size"],
        "hidden_size": constants["n_embd"],
        "num_hidden_layers": constants["n_layer"],
        "num_attention_heads": constants["n_head"],
        "constants": constants,
    }
    config["auto_map"] |= {auto: f"hf_model.{name}" for auto, name in classes.items()}
    if found.kind == "Electra":
        config["id2label"] = {0: "original", 1: "replaced"}
        for name in ("out.weight", "out.bias"):  # a softmax of 0 and a logit is the logit's sigmoid
            weights[name] = torch.cat([torch.zeros_like(weights[name]), weights[name]])
    tensors = {}
    for name, x in weights.items():
        if not name.startswith("generator."):  # it has done its work
            inside = found.kind == "GPT" or name.startswith("encoder.")
            tensors["model." * inside + name] = x.contiguous()
    return config, tensors
