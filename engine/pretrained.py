"""Models that were trained before: runs of these scripts, or GPT-2 and XLM-R in Hugging Face's format.

    model, tokenizer = load("out/train_mlm/demo")         the newest sound checkpoint of a run
    model, tokenizer = load("/models/xlm-roberta-base")   downloaded by hand: nothing is downloaded here
    python -m engine.pretrained export RUN FOLDER         a run as a folder that transformers loads, and `load` again

A run of train_lm.py gives a GPT; of train_mlm.py and train_electra.py an Encoder, without its head (of XLM-E the
discriminator's); of train_mt.py a Translator.
"""

import sys
import textwrap
import zipfile
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from data.tokenizers import GPT2, XLMR, SentencePiece, Tokenizer, load_tokenizer
from engine.device import clear_errors
from engine.run import check_zip, newest, read_json
from model import GPT, PAD, Encoder, Translator

Weights = dict[str, Tensor]  # by the names that model.py has for them

MODELS = {"GPT": GPT, "MaskedLM": Encoder, "Electra": Encoder, "Translator": Translator}  # trained, and loaded
# Files of a run: the best weights of a translator, or else the newest checkpoint, or the one before it.
CHECKPOINTS = "model.pt", "ckpt.pt", "ckpt.prev.pt"
HUGGING_FACE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"
TOKENIZERS = [each.filename for each in (SentencePiece, XLMR, GPT2)]


def load(path: str | Path, **changes) -> tuple[nn.Module, Tokenizer | None]:
    """The model in a folder, on the CPU and in evaluation mode, and its tokenizer, None where the folder holds none.

    changes: constants to replace, such as the dropout. Raises OSError or ValueError where no sound model is there.
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
    """As `load`, of a folder that must hold an encoder with XLM-R's kind of tokenizer."""
    if not Path(path).exists():
        raise ValueError(f"{path} does not exist: train it with train_mlm.py, or name another folder")
    encoder, tokenizer = load(path, **changes)
    if not isinstance(encoder, Encoder):
        raise ValueError(f"{path} is no encoder: give a run of train_mlm.py or train_electra.py")
    if not isinstance(tokenizer, XLMR):
        raise ValueError(f"{path} has no sentencepiece.bpe.model, the tokenizer of XLM-R")
    return encoder, tokenizer


def is_run(path: str | Path) -> bool:
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} does not exist")
    return any(Path(path, name).exists() for name in CHECKPOINTS)


def weights_of_run(folder: Path, kind: str, tokenizer: Tokenizer) -> tuple[dict, Weights]:
    """The constants that a run's weights depend on, and the weights. Raises ValueError for one of another script."""
    _, state = newest(folder, CHECKPOINTS)
    if state["class"] != kind or state["identity"]["tokenizer_checksum"] != tokenizer.sha256:
        raise ValueError(f"{folder} is no run of this script with the vocabulary of this corpus")
    constants = {"vocab_size": state["vocab_size"]} | state["constants"]
    shaping = constants.keys() & {*SIZES, "frequency_bias", "relative_bias"}
    return {name: constants[name] for name in shaping}, state["model"]


def load_run(folder: Path, state: dict, changes: dict) -> tuple[nn.Module, Tokenizer]:
    """From a run's checkpoint, and the tokenizer that lies beside it."""
    if state["class"] not in MODELS:
        raise ValueError(f"{folder} holds checkpoints of something else")
    kind, weights = MODELS[state["class"]], state["model"]
    if kind is Encoder:
        weights = part_of(weights, "encoder.")
    tokenizer = load_tokenizer(folder)
    if tokenizer.sha256 != state["identity"]["tokenizer_checksum"]:
        raise ValueError(f"{folder} was trained with another vocabulary than the tokenizer in it")
    model = make(kind, state["constants"] | changes, state["vocab_size"], folder)
    return fill(model, {}, weights, folder).eval(), tokenizer


def make(kind: type[nn.Module], constants: dict, V: int, path: Path) -> nn.Module:
    """A model with new weights. Raises ValueError where there is none with these constants, which a file gave."""
    try:
        return kind(SimpleNamespace(**constants), V)
    except Exception as error:  # wrong constants show themselves in a dozen ways
        raise ValueError(f"{path} describes no model: {short(error)}") from error


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
    return {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}


def short(error: Exception) -> str:
    return textwrap.shorten(str(error), 300)


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face's format


OTHERS = dict(router="dense", dropout=0.0, init_std=0.02, frequency_bias=False, relative_bias=False)
SIZES = "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "ffn_size"  # ours; theirs, in config.json:
GPT2_SIZES = "vocab_size", "n_positions", "n_layer", "n_head", "n_embd", "n_inner"
XLMR_SIZES = "vocab_size", "max_position_embeddings", "num_hidden_layers", "num_attention_heads"
XLMR_SIZES += "hidden_size", "intermediate_size"
# Values in config.json for which model.py has a model.
GPT2_FIXED = dict(
    model_type="gpt2",
    activation_function="gelu_new",
    layer_norm_epsilon=1e-5,
    scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False,
    tie_word_embeddings=True,
)
XLMR_FIXED = dict(
    model_type="xlm-roberta",
    hidden_act="gelu",
    layer_norm_eps=1e-5,
    pad_token_id=PAD,
    type_vocab_size=1,
    position_embedding_type="absolute",
    tie_word_embeddings=True,
)
# Parts of the tensors' names, theirs and ours, replaced in this order.
WRAPPED = {"_orig_mod.": "", "module.": ""}  # by torch.compile, and by DDP
GPT2_NAMES = {
    "transformer.": "",  # of models with a head
    "h.": "blocks.",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.proj",
    "mlp.c_fc": "ffn.fc",
    "mlp.c_proj": "ffn.proj",
}
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
    """GPT-2, the encoder of XLM-R, or a run that engine/export.py wrote, with its tokenizer where that is there."""
    config = read_json(folder / "config.json")
    if config.get("model_type") == "nanoxmoe":
        kind = GPT if "NanoXMoEForCausalLM" in config["architectures"] else Encoder
        weights = part_of(read_tensors(folder, {}), "model.")
        weights = part_of(weights, "encoder.") or weights  # of a masked language model
        model = make(kind, config["constants"] | changes, config["vocab_size"], folder)
        return fill(model, {}, weights, folder).eval(), load_tokenizer(folder)
    if config.get("model_type") == "gpt2":
        kind, (sizes, weights) = GPT, load_gpt2(folder)
    else:
        kind, (sizes, weights) = Encoder, load_xlmr(folder)
        weights = part_of(weights, "encoder.")
    pieces, tokenizer = folder / "sentencepiece.bpe.model", None
    if pieces.exists():
        tokenizer = load_tokenizer(pieces, kind="xlmr")
    elif any((folder / name).exists() for name in TOKENIZERS):
        tokenizer = load_tokenizer(folder)
    model = make(kind, OTHERS | sizes | changes, sizes["vocab_size"], folder)
    return fill(model, sizes, weights, folder).eval(), tokenizer


def load_gpt2(folder: str | Path, tokenizer: Tokenizer | None = None) -> tuple[dict, Weights]:
    """The constants of a GPT-2, or of a run of train_lm.py with this tokenizer, and its weights. Raises ValueError."""
    if tokenizer and is_run(folder):
        return weights_of_run(Path(folder), "GPT", tokenizer)
    sizes, weights = read_model(Path(folder), GPT2_SIZES, GPT2_FIXED, GPT2_NAMES)
    for name, tensor in weights.items():
        if name.startswith("blocks") and tensor.dim() == 2:
            weights[name] = tensor.t().contiguous()  # their linear layers are (in, out)
    return sizes | {"router": "dense", "frequency_bias": False}, weights


def load_xlmr(folder: str | Path, tokenizer: Tokenizer | None = None) -> tuple[dict, Weights]:
    """The same of an XLM-R, for `MaskedLM` but for a head that it has not, or of a run of train_mlm.py."""
    if tokenizer and is_run(folder):
        return weights_of_run(Path(folder), "MaskedLM", tokenizer)
    sizes, weights = read_model(Path(folder), XLMR_SIZES, XLMR_FIXED, XLMR_NAMES)
    sizes["block_size"] -= PAD + 1  # the first positions are not used
    for name in [name for name in weights if ".attn.query." in name]:
        parts = [weights.get(name.replace("query", part)) for part in ("query", "key", "value")]
        if all(part is not None and part.shape == parts[0].shape for part in parts):
            weights[name.replace("query", "qkv")] = torch.cat(parts)
    return sizes | {"relative_bias": False}, weights


def read_model(folder: Path, names: tuple[str, ...], fixed: dict, parts: dict[str, str]) -> tuple[dict, Weights]:
    """Sizes and weights by our names. Raises ValueError where model.py has no such model, or the weights are fewer."""
    config = read_json(folder / "config.json")
    if not config:
        raise FileNotFoundError(f"{folder} has no config.json: not a checkpoint in Hugging Face's format")
    for name, value in fixed.items():
        if config.get(name, value) != value:
            raise ValueError(f"{folder} has {name} {config[name]!s:.50}, not {value}: model.py has no such model")
    if "n_inner" in names and not config.get("n_inner") and type(config.get("n_embd")) is int:
        config["n_inner"] = 4 * config["n_embd"]
    sizes = {ours: config.get(theirs) for ours, theirs in zip(SIZES, names)}
    for theirs, size in zip(names, sizes.values()):
        if type(size) is not int or size < 1:
            raise ValueError(f"{folder}/config.json has {theirs} {size!r:.50}, not an integer over 0")
    weights = read_tensors(folder, parts)
    # A model of far larger sizes than its weights would fill the memory before they are found to be missing.
    widest = max(sizes[name] for name in ("vocab_size", "block_size", "n_embd", "ffn_size"))
    largest = max((tensor.numel() for tensor in weights.values()), default=0)
    if sizes["n_layer"] > len(weights) or sizes["n_embd"] * widest > largest:
        raise ValueError(f"{folder} has not the weights of the model in its config.json, which is a larger one")
    return sizes, weights


def read_tensors(folder: Path, names: dict[str, str]) -> Weights:
    """The tensors of one file, or of the shards in an index, under our names where model.py has such tensors."""
    file = next((folder / name for name in HUGGING_FACE if (folder / name).exists()), folder / HUGGING_FACE[0])
    try:
        shards, tensors, renamed = [file], {}, {}
        if file.suffix == ".json":
            shards = {folder / Path(name).name for name in read_json(file)["weight_map"].values()}
        for file in sorted(shards):
            if file.suffix == ".safetensors":
                from safetensors.torch import load_file

                tensors |= load_file(file)
            else:
                if zipfile.is_zipfile(file):
                    check_zip(file)
                tensors |= torch.load(file, map_location="cpu", weights_only=True)
        for name, tensor in tensors.items():
            for theirs, ours in (WRAPPED | names).items():
                name = name.replace(theirs, ours)
            renamed[name] = tensor.detach()  # what is no tensor has none
        return renamed
    except ImportError:
        raise ImportError(f"reading {file} needs one more library: pip install safetensors") from None
    except Exception as error:  # damage shows itself in a dozen ways
        raise ValueError(f"{file} cannot be read: {short(error)}") from None


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] != "export":
        sys.exit("usage: python -m engine.pretrained export RUN FOLDER")
    from engine.export import export

    with clear_errors():
        export(*sys.argv[2:])
