"""Models that were trained before: runs of these scripts, or GPT-2 and XLM-R in Hugging Face's format.

    model, tokenizer = load("out/train_mlm/demo")         the best weights of a run, or its newest
    model, tokenizer = load("/models/xlm-roberta-base")   downloaded by hand: nothing is downloaded here
    python -m engine.pretrained export RUN FOLDER         a run as a folder that transformers loads, and `load` again

A run of train_lm.py gives a GPT; of train_mlm.py and train_electra.py an Encoder, without its head (of XLM-E the
discriminator's); of train_mt.py a Translator.
"""

import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from torch import nn

from data.tokenizers import XLMR, Tokenizer, load_tokenizer
from engine import hugging_face
from engine.device import clear_errors
from engine.files import WEIGHTS, newest
from engine.hugging_face import LAYOUTS, OTHERS, SIZES, Found, Weights, short
from model import GPT, Encoder, Translator

MODELS = {"GPT": GPT, "MaskedLM": Encoder, "Electra": Encoder, "Translator": Translator}  # trained, and loaded
PIECES = "sentencepiece.bpe.model"  # XLM-R's tokenizer


def read(folder: Path) -> Found:
    """A run, or a model in Hugging Face's format. Raises OSError or ValueError where there is no sound one."""
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist: train it first, or name another folder")
    if not is_run(folder):
        return hugging_face.read(folder)
    _, state = newest(folder, WEIGHTS)
    if state["class"] not in MODELS:
        raise ValueError(f"{folder} holds checkpoints of something else")
    constants = OTHERS | state["constants"] | {"vocab_size": state["vocab_size"]}
    return Found(state["class"], constants, state["model"], state["identity"]["tokenizer_checksum"])


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in WEIGHTS)


def load(path: str | Path, **changes) -> tuple[nn.Module, Tokenizer | None]:
    """The model in a folder, on the CPU and in evaluation mode, and its tokenizer, None where the folder holds none.

    changes: constants to replace, such as the dropout. Raises OSError or ValueError where no sound model is there.
    """
    folder = Path(path)
    found, tokenizer = read(folder), tokenizer_in(folder)
    if found.vocabulary and found.vocabulary != tokenizer.sha256:
        raise ValueError(f"{path} was trained with another vocabulary than the tokenizer in it")
    kind, weights = MODELS[found.kind], found.weights
    constants = found.constants | changes
    V = constants.pop("vocab_size")
    try:
        model = kind(SimpleNamespace(**constants), V)
    except Exception as error:  # constants of another version show themselves in a dozen ways
        raise ValueError(f"{path} describes no model: {short(error)}") from error
    if kind is Encoder:  # without the head that it was trained with
        own = {name.removeprefix("encoder."): x for name, x in weights.items() if name.startswith("encoder.")}
        weights = own or weights  # an encoder's own have no prefix
    return fill(model, {}, weights, path).eval(), tokenizer


def tokenizer_in(folder: Path) -> Tokenizer | None:
    """That of a run, or XLM-R's; other models may have none."""
    if (folder / PIECES).exists():
        return load_tokenizer(folder / PIECES, kind="xlmr")
    if is_run(folder):
        return load_tokenizer(folder)
    with suppress(FileNotFoundError):
        return load_tokenizer(folder)


def load_encoder(path: str | Path, **changes) -> tuple[Encoder, XLMR]:
    """As `load`, of a folder that must hold an encoder with XLM-R's kind of tokenizer."""
    encoder, tokenizer = load(path, **changes)
    if not isinstance(encoder, Encoder):
        raise ValueError(f"{path} is no encoder: give a run of train_mlm.py or train_electra.py")
    if not isinstance(tokenizer, XLMR):
        raise ValueError(f"{path} has no {PIECES}, the tokenizer of XLM-R")
    if tokenizer.vocab_size != encoder.vocab_size:
        raise ValueError(f"{path}: its tokenizer has {tokenizer.vocab_size:,} pieces, not those of its model")
    return encoder, tokenizer


def weights_of(path: str | Path, kind: str, vocabulary: str) -> tuple[dict, Weights]:
    """The constants that weights depend on, and the weights, of a folder with a model of this class to train on.

    Raises ValueError where it holds another class, or is known to have another vocabulary.
    """
    folder = Path(path)
    found = read(folder)
    if found.kind != kind or found.vocabulary not in ("", vocabulary):
        raise ValueError(f"{path} is no run of this script with the vocabulary of this corpus")
    shaping = {*SIZES, "frequency_bias", "relative_bias"}
    if not is_run(folder):
        shaping |= LAYOUTS[kind].ours.keys()
    sizes = {name: value for name, value in found.constants.items() if name in shaping}
    return sizes, found.weights


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


def export(run: str | Path, folder: str | Path):
    """Writes the newest sound checkpoint of a run. Raises ValueError, OSError or ImportError of one line."""
    run, folder = Path(run), Path(folder)
    if not is_run(run):
        raise FileNotFoundError(f"{run} holds no checkpoint: give the folder of a run")
    hugging_face.export(read(run), run, folder)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] != "export":
        sys.exit("usage: python -m engine.pretrained export RUN FOLDER")
    with clear_errors():
        export(*sys.argv[2:])
