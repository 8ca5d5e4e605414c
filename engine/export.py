"""A run as a folder that transformers loads: `python -m engine.pretrained export RUN FOLDER`.

A dense decoder without an output bias is written in GPT-2's own layout, a dense encoder without a relative bias in
XLM-R's. All others, and the tokenizers, take their code along (model.py, routers.py, nanoxmoe_tokenizers.py and
hf_model.py), which transformers runs where it is told trust_remote_code=True.
"""

import json
from pathlib import Path

from data.tokenizers import XLMR, Tokenizer, load_tokenizer
from engine.pretrained import (
    CHECKPOINTS,
    GPT2_FIXED,
    GPT2_NAMES,
    GPT2_SIZES,
    SIZES,
    XLMR_FIXED,
    XLMR_NAMES,
    XLMR_SIZES,
    part_of,
)
from engine.run import newest, read_json
from model import PAD

CODE = {"model.py": "model.py", "routers.py": "routers.py", "hf_model.py": "engine/hf_model.py"}
CODE["nanoxmoe_tokenizers.py"] = "data/tokenizers.py"  # a name of its own: there is a library called tokenizers
CLASSES = {  # class of a run's model -> transformers' class for it, and ours in hf_model.py
    "GPT": ("AutoModelForCausalLM", "NanoXMoEForCausalLM"),
    "MaskedLM": ("AutoModelForMaskedLM", "NanoXMoEForMaskedLM"),
    "Electra": ("AutoModelForTokenClassification", "NanoXMoEForTokenClassification"),
}
LAYOUTS = {  # class of a run's model -> transformers', and how that is written down
    "GPT": ("GPT2LMHeadModel", GPT2_SIZES, GPT2_FIXED, GPT2_NAMES),
    "MaskedLM": ("XLMRobertaForMaskedLM", XLMR_SIZES, XLMR_FIXED, XLMR_NAMES),
}


def export(run: str | Path, folder: str | Path):
    """Writes the newest sound checkpoint of a run. Raises ValueError, OSError or ImportError of one line."""
    run, folder = Path(run), Path(folder)
    _, state = newest(run, CHECKPOINTS)
    if not state:
        raise FileNotFoundError(f"{run} holds no checkpoint: give the folder of a run")
    kind, constants = state["class"], state["constants"]
    if kind not in CLASSES:
        raise ValueError(f"{run} holds a {kind}: give a run of train_lm.py, train_mlm.py or train_electra.py")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give another folder")
    tokenizer = load_tokenizer(run)
    unlike = {"GPT": "frequency_bias", "MaskedLM": "relative_bias"}.get(kind)  # what their layout has no room for
    native = constants["router"] == "dense" and unlike is not None and not constants[unlike]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (in_their_layout if native else with_our_code)(kind, state, ids_of(tokenizer), folder)
    except ImportError as error:
        raise ImportError(f"an export needs more libraries: pip install transformers safetensors ({error})") from None
    for name, here in CODE.items():
        code = (Path(__file__).parents[1] / here).read_text()
        (folder / name).write_text(code.replace("from routers import", "from .routers import"))
    tokenizer.save(folder)
    write(folder / "tokenizer_config.json", tokenizer_options(tokenizer, constants["block_size"]))
    (folder / "README.md").write_text(card(run, kind, native))
    (folder / "model.safetensors").chmod(0o644)
    print(f"{folder} has the model, its tokenizer and a card that says how transformers loads them")


def write(file: Path, content: dict):
    file.write_text(json.dumps(content, indent=2) + "\n")


def in_their_layout(kind: str, state: dict, special: dict[str, int], folder: Path):
    import transformers

    name, their_sizes, fixed, parts = LAYOUTS[kind]
    ours, sizes = state["model"], state["constants"] | {"vocab_size": state["vocab_size"]}
    constants = {theirs: sizes[mine] for mine, theirs in zip(SIZES, their_sizes)} | fixed
    if kind == "MaskedLM":
        constants["max_position_embeddings"] += PAD + 1  # the first positions are not used
    constants.pop("model_type")
    Model = getattr(transformers, name)
    model = Model(Model.config_class(**constants | special))
    for name, theirs in model.state_dict().items():
        if name.startswith(("lm_head.decoder.", "lm_head.weight")):  # tied to the embeddings, and to the bias
            continue
        for part, mine in parts.items():
            name = name.replace(part, mine)
        found = ours.get(name)
        for i, part in enumerate(("query", "key", "value")):
            if f".{part}." in name:
                found = ours[name.replace(part, "qkv")].chunk(3)[i]
        transposed = kind == "GPT" and name.startswith("blocks") and theirs.dim() == 2  # their layers are (in, out)
        theirs.copy_(found.t() if transposed else found)
    model.save_pretrained(folder)


def with_our_code(kind: str, state: dict, special: dict[str, int], folder: Path):
    from safetensors.torch import save_file

    weights, constants, head = state["model"], state["constants"], {}
    if kind == "Electra":  # the discriminator and its head; the generator has done its work
        head = {name: x for name, x in weights.items() if name.startswith(("dense.", "ln_h.", "out."))}
        weights = part_of(weights, "encoder.")
    weights = {f"model.{name}": x.contiguous() for name, x in weights.items()}
    save_file(weights | head, folder / "model.safetensors", metadata={"format": "pt"})
    auto, name = CLASSES[kind]
    config = {"model_type": "nanoxmoe", "architectures": [name], "dtype": "float32", "use_cache": False}
    config["auto_map"] = {"AutoConfig": "hf_model.NanoXMoEConfig", auto: f"hf_model.{name}"}
    config |= {"vocab_size": state["vocab_size"], "hidden_size": constants["n_embd"], "constants": constants}
    config |= {"num_hidden_layers": constants["n_layer"], "num_attention_heads": constants["n_head"]}
    write(folder / "config.json", config | special | {"max_position_embeddings": constants["block_size"]})


def ids_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens by the names that transformers has for them."""
    if isinstance(tokenizer, XLMR):
        return {"bos_token_id": tokenizer.bos, "pad_token_id": tokenizer.pad, "eos_token_id": tokenizer.eos}
    return {f"{name}_token_id": tokenizer.eot for name in ("bos", "pad", "eos")}


def tokenizer_options(tokenizer: Tokenizer, block_size: int) -> dict:
    options = {
        "tokenizer_class": "NanoXMoETokenizer",
        "auto_map": {"AutoTokenizer": ["hf_model.NanoXMoETokenizer", None]},
        "model_max_length": block_size,
    }
    names = {name.removesuffix("_id"): f"<{i}>" for name, i in ids_of(tokenizer).items()}
    if isinstance(tokenizer, XLMR):
        names["mask_token"] = f"<{tokenizer.mask}>"
    return options | names


def card(run: Path, kind: str, native: bool) -> str:
    """A model card, from result.json where the run is finished."""
    result = read_json(run / "result.json")
    auto, _ = CLASSES[kind]
    trust = "" if native else ", trust_remote_code=True"
    text = f"""# {result.get("name", run.name)}

Trained with nanoXMoE. It is loaded by

```python
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained(FOLDER{trust})
tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
```

Experts have no capacity limit here, so that no token depends on its batch-mates.
"""
    for title in ("test_no_limit", "test", "valid", "held_out", "config", "machine"):
        if title in result:
            facts = {name: value for name, value in result[title].items() if not isinstance(value, list | dict)}
            lines = [f"- {name}: {value}" for name, value in facts.items() if value is not None]
            text += f"\n## {title}\n\n" + "\n".join(lines) + "\n"
    return text
