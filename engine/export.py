"""A run as a folder that transformers loads: `python -m engine.pretrained export RUN FOLDER`.

A dense decoder without an output bias is written in GPT-2's own layout, a dense encoder without a relative bias in
XLM-R's. All others, and the tokenizers, take their code along (model.py, routers.py, nanoxmoe_tokenizers.py and
hf_model.py), which transformers runs where it is told trust_remote_code=True. A decoder's folder can be scored by
lm-eval (pip install "lm-eval[hf]"):

    lm_eval run --model hf --model_args pretrained=FOLDER,trust_remote_code=True --tasks lambada_openai
"""

import shutil
from pathlib import Path

from data.tokenizers import XLMR, Tokenizer, load_tokenizer
from engine.pretrained import LAYOUTS, Found, Weights, is_run, part_of, read
from engine.run import write

CODE = {"model.py": "model.py", "routers.py": "routers.py", "hf_model.py": "engine/hf_model.py"}
CODE["nanoxmoe_tokenizers.py"] = "data/tokenizers.py"  # a name of its own: there is a library called tokenizers
CLASSES = {  # class of a run's model -> transformers' class for it, and ours in hf_model.py
    "GPT": ("AutoModelForCausalLM", "NanoXMoEForCausalLM"),
    "MaskedLM": ("AutoModelForMaskedLM", "NanoXMoEForMaskedLM"),
    "Electra": ("AutoModelForTokenClassification", "NanoXMoEForTokenClassification"),
}
CARD = """# {name}

Trained with nanoXMoE. What it was trained with, and what it scored, is in result.json if the run was finished. Experts
have no capacity limit here, so that no token depends on its batch-mates. It is loaded by

```python
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained(FOLDER{trust})
tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
```
"""


def export(run: str | Path, folder: str | Path):
    """Writes the newest sound checkpoint of a run. Raises ValueError, OSError or ImportError of one line."""
    from safetensors.torch import save_file

    run, folder = Path(run), Path(folder)
    if not is_run(run):
        raise FileNotFoundError(f"{run} holds no checkpoint: give the folder of a run")
    found = read(run)
    if found.kind not in CLASSES:
        raise ValueError(f"{run} holds a {found.kind}: give a run of train_lm.py, train_mlm.py or train_electra.py")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give another folder")
    tokenizer, layout = load_tokenizer(run), LAYOUTS.get(found.kind)
    theirs = layout.written(found.constants, found.weights) if layout else None
    config, weights = theirs or with_our_code(found)
    special = special_tokens(tokenizer)
    config |= {f"{name}_id": token for name, token in special.items()}

    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # as the other files
    write(folder / "config.json", config)
    options = {name: f"<{token}>" for name, token in special.items()}
    options["tokenizer_class"] = "NanoXMoETokenizer"
    options["auto_map"] = {"AutoTokenizer": ["hf_model.NanoXMoETokenizer", None]}
    options["model_max_length"] = found.constants["block_size"]
    write(folder / "tokenizer_config.json", options)
    tokenizer.save(folder)
    for name, here in CODE.items():
        code = (Path(__file__).parents[1] / here).read_text()
        write(folder / name, code.replace("from routers import", "from .routers import"))
    auto, _ = CLASSES[found.kind]
    trust = "" if theirs else ", trust_remote_code=True"
    write(folder / "README.md", CARD.format(name=run.name, auto=auto, trust=trust))
    if (run / "result.json").exists():
        shutil.copy(run / "result.json", folder)
    print(f"{folder} has the model, its tokenizer and a card that says how transformers loads them")


def with_our_code(found: Found) -> tuple[dict, Weights]:
    """The config and the tensors of a model of hf_model.py."""
    weights, constants, head = found.weights, dict(found.constants), {}
    if found.kind == "Electra":  # the discriminator and its head; the generator has done its work
        head = {name: x for name, x in weights.items() if name.startswith(("dense.", "ln_h.", "out."))}
        weights = part_of(weights, "encoder.")
    auto, name = CLASSES[found.kind]
    config = {
        "model_type": "nanoxmoe",
        "trained": found.kind,
        "architectures": [name],
        "auto_map": {"AutoConfig": "hf_model.NanoXMoEConfig", auto: f"hf_model.{name}"},
        "dtype": "float32",
        "use_cache": False,
        "vocab_size": constants.pop("vocab_size"),
        "max_position_embeddings": constants["block_size"],
        "hidden_size": constants["n_embd"],
        "num_hidden_layers": constants["n_layer"],
        "num_attention_heads": constants["n_head"],
        "constants": constants,
    }
    tensors = {f"model.{name}": x.contiguous() for name, x in weights.items()}
    return config, tensors | head


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Tokens by the names that transformers has for them."""
    if not isinstance(tokenizer, XLMR):
        return dict.fromkeys(("bos_token", "pad_token", "eos_token"), tokenizer.eot)
    return {f"{name}_token": getattr(tokenizer, name) for name in ("bos", "pad", "eos", "mask")}
