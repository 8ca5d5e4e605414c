"""Loads pre-trained models: runs of these scripts, or GPT-2 and XLM-R in Hugging Face's format.

    model, tokenizer = load("out/train_mlm/demo")         the best weights of a run, or else the newest
    model, tokenizer = load("/models/xlm-roberta-base")   a folder that you downloaded: nothing is downloaded here
    python -m engine.pretrained export RUN FOLDER         exports a run for transformers; `load` reads it, too

`load` returns a GPT for a run of train_lm.py, a Translator for train_mt.py, and for the other scripts an Encoder
without its head (of train_electra.py the discriminator's).
"""

import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from torch import nn

from data.tokenizers import XLMR, Tokenizer, load_tokenizer
from engine import hugging_face, one_line
from engine.device import clear_errors
from engine.files import WEIGHTS, newest
from engine.hugging_face import DEFAULTS, FINE_TUNED, LAYOUTS, SIZES, SavedModel, Weights
from model import GPT, Encoder, Translator

MODELS = {"GPT": GPT, "Translator": Translator}  # SavedModel.kind -> loaded class
MODELS |= dict.fromkeys(("MaskedLM", "Electra", *FINE_TUNED), Encoder)
PIECES = "sentencepiece.bpe.model"  # XLM-R's tokenizer


def read(folder: Path) -> SavedModel:
    """Reads a run, or a model in Hugging Face's format. Raises OSError or ValueError if there is no intact one."""
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist: train it first, or pass another folder")
    if (folder / "dict.txt").exists():
        raise ValueError(f"{folder} has a model in fairseq's format: pass one in Hugging Face's (xlm-roberta-base)")
    if not is_run(folder):
        return hugging_face.read(folder)
    _, state = newest(folder, WEIGHTS)
    kind = state.get("kind", state["class"])
    if kind not in MODELS:
        raise ValueError(f"{folder} holds checkpoints of another kind of model, or of unfinished fine-tuning")
    constants = DEFAULTS | state["constants"] | {"vocab_size": state["vocab_size"]}
    return SavedModel(kind, constants, state["model"], state["identity"]["tokenizer_checksum"], state.get("labels", ()))


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in WEIGHTS)


def load(path: str | Path, **changes) -> tuple[nn.Module, Tokenizer | None]:
    """Loads the model of a folder, on the CPU and in evaluation mode, and its tokenizer (None if there is none).

    changes: constants to replace, such as the dropout. Raises OSError or ValueError if there is no intact model.
    """
    folder = Path(path)
    saved, tokenizer = read(folder), tokenizer_in(folder)
    if saved.vocabulary and saved.vocabulary != tokenizer.sha256:
        raise ValueError(f"{path} was trained with another vocabulary than that of its tokenizer")
    model_class, weights = MODELS[saved.kind], saved.weights
    constants = saved.constants | changes
    V = constants.pop("vocab_size")
    try:
        model = model_class(SimpleNamespace(**constants), V)
    except Exception as error:  # constants of another version raise many kinds of errors
        raise ValueError(f"{path} does not describe a model: {one_line(error):.300}") from error
    if model_class is Encoder:  # drop the pre-training head; weights without a head have no prefix
        encoder = {name.removeprefix("encoder."): x for name, x in weights.items() if name.startswith("encoder.")}
        weights = encoder or weights
    return fill(model, {}, weights, path).eval(), tokenizer


def tokenizer_in(folder: Path) -> Tokenizer | None:
    """The tokenizer of a run or of XLM-R; other models may have none."""
    if (folder / PIECES).exists():
        return load_tokenizer(folder / PIECES, kind="xlmr")
    if is_run(folder):
        return load_tokenizer(folder)
    with suppress(FileNotFoundError):
        return load_tokenizer(folder)


def load_encoder(path: str | Path, **changes) -> tuple[Encoder, XLMR]:
    """Like `load`, but the folder must hold an encoder with an XLM-R tokenizer."""
    encoder, tokenizer = load(path, **changes)
    if not isinstance(encoder, Encoder):
        raise ValueError(f"{path} is no encoder: pass a run of train_mlm.py or train_electra.py")
    if not isinstance(tokenizer, XLMR):
        raise ValueError(f"{path} has no XLM-R tokenizer ({PIECES})")
    if tokenizer.vocab_size != encoder.vocab_size:
        raise ValueError(f"{path}: its tokenizer has {tokenizer.vocab_size:,} pieces, its model {encoder.vocab_size:,}")
    return encoder, tokenizer


def weights_of(path: str | Path, kind: str, vocabulary: str) -> tuple[dict, Weights]:
    """Reads the weights to continue training from, and the constants that determine their shapes.

    Raises ValueError if the folder holds another class of model, or one with another vocabulary.
    """
    folder = Path(path)
    saved = read(folder)
    if saved.kind != kind:
        raise ValueError(f"{path} is not a run of this script")
    if saved.vocabulary not in ("", vocabulary):
        hint = f"pass --data a text file or folder, or prepare the corpus with --tokenizer {path}"
        raise ValueError(f"{path} was trained with another tokenizer than the corpus: {hint}")
    names = {*SIZES, "frequency_bias", "relative_bias"}
    if saved.constants["router"] == "dense" and not is_run(folder):  # such as GPT-2
        names |= LAYOUTS[kind].constants.keys()
    return {name: value for name, value in saved.constants.items() if name in names}, saved.weights


def fill(model: nn.Module, sizes: dict, weights: Weights, path: str | Path) -> nn.Module:
    """Loads the weights that the model needs; others are ignored.

    sizes: constants of the model that the weights come from. Raises ValueError if this model differs.
    """
    for name, size in sizes.items():
        expected = model.vocab_size if name == "vocab_size" else getattr(model.config, name)
        if size != expected:
            raise ValueError(f"{path} has {name} {size}, not {expected}")
    try:
        model.load_state_dict({name: weights[name] for name in model.state_dict().keys() & weights.keys()})
    except RuntimeError as error:
        problem = f"{path} does not have the weights of the model that it describes: {one_line(error):.300}"
        raise ValueError(f"{problem} (if an older version trained it, train it again)") from None
    return model


def export(run: str | Path, folder: str | Path):
    """Exports the best weights of a run, or else the newest. Raises as hugging_face.export does."""
    run, folder = Path(run), Path(folder)
    if not is_run(run):
        raise FileNotFoundError(f"{run} has no checkpoint: pass the folder of a run")
    hugging_face.export(read(run), run, folder)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] != "export":
        sys.exit("usage: python -m engine.pretrained export RUN FOLDER")
    with clear_errors():
        export(*sys.argv[2:])
