"""Turn a corpus into files of token ids that training reads.

    python -m data.prepare pydocs                                  # docstrings on this disk, 20 s, no network
    python -m data.prepare openwebtext --max_tokens 100000000      # streamed from the Hugging Face hub
    python -m data.prepare text --source FILE_OR_DIR --out DIR     # your own UTF-8 text, under a vocabulary of its own
    python -m data.prepare bitext --pieces 8000 --source DIR       # your own pairs: DIR/de-en.{de,en} or .tsv

data/README.md lists all corpora, and says what the files of data/prepared/NAME hold. The folder appears whole or not at
all, and a folder that holds something is never written to.
"""

import importlib.metadata
import json
import platform
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

import numpy as np
import tyro
from filelock import FileLock
from tqdm import tqdm

from data.corpora import CORPORA, Groups, read
from data.files import PREPARED, SPLITS, Records, checksum, sha256
from data.tokenizers import XLMR, SentencePiece, Tokenizer, gpt2, load_tokenizer, train_sentencepiece

BATCH_CHARS = 2_000_000  # of text that is encoded at once
LEARNED = 100_000_000  # characters that a vocabulary is learned from, at most, as many of each language
ENOUGH = 10_000  # tokens of valid and of test that end the reading of a language whose training split is full


def prepare(
    name: tyro.conf.Positional[str],
    source: Path | None = None,
    tokenizer: Path | None = None,
    max_tokens: int | None = None,
    out: Path | None = None,
    languages: str | None = None,
    pieces: int | None = None,
) -> Path:
    """Prepare corpus `name` and return its folder. ValueError, OSError or ImportError: one line, nothing is written.

    Args:
        name: see data/README.md; pydocs, ciphers and their pairs need no network
        source: local file or folder to read instead of the network
        tokenizer: GPT-2 rank file or SentencePiece *.model; for many languages the latter, read with XLM-R's ids
        max_tokens: no training document begins beyond this many tokens, of each language where there are many
        out: folder to write, by default data/prepared/NAME; new or empty
        languages: de,en,sw: only these of many; de-en,en-fr: pairs
        pieces: of a BPE that is learned from the texts, in place of a tokenizer
    """
    check_options(name, source, tokenizer, max_tokens, languages, pieces)
    corpus = CORPORA[name]
    out = Path(out or PREPARED / name).resolve()
    with new_folder(out) as folder:
        every = read(name, source)
        groups = restricted(every, languages)
        chosen = tokenizer_of(name, source, tokenizer, languages, pieces, every)
        versions = {package: importlib.metadata.version(package) for package in corpus.packages}
        meta = {"name": name, "source": str(source or name), "versions": versions, "kind": corpus.kind}
        write_corpus(folder, meta, groups, chosen, max_tokens)
    return out


@contextmanager
def new_folder(out: Path):
    """A hidden folder to write into, which becomes `out` in the end, and is removed where an exception comes first."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.new.partial")
    with FileLock(out.with_name(f".{out.name}.lock")):  # a second preparation of the folder waits
        if out.exists() and any(out.iterdir()):
            raise FileExistsError(f"--out {out} is not empty: remove what is there, or give another folder")
        shutil.rmtree(partial, ignore_errors=True)  # of a preparation that was killed
        try:
            partial.mkdir()
            yield partial
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def check_options(name: str, source, tokenizer, max_tokens, languages, pieces):
    """ValueError for options that make no sense together."""
    if name not in CORPORA:
        raise ValueError(f"unknown corpus {name!r}; there are {', '.join(CORPORA)}")
    corpus = CORPORA[name]
    numbers = [number for number in (max_tokens, pieces) if number is not None]
    known = tokenizer or pieces or source or corpus.vocabulary or corpus.pieces
    hint = "a SentencePiece model such as XLM-R's; or --pieces N, a BPE of its own"
    refused = {
        f"corpus {name!r} needs --source FILE or DIR": not source and not corpus.read,
        f"corpus {name!r} is read from installed packages: leave out --source": source and not corpus.local,
        f"--source {source} does not exist": source and not source.exists(),
        f"corpus {name!r} needs --tokenizer PATH: {hint}": not known,
        "--max_tokens and --pieces must be positive": min(numbers, default=1) < 1,
        f"--languages is for corpora of many languages, not for {name!r}": languages and corpus.kind == "text",
        "--pieces learns a tokenizer: leave it out, or --tokenizer": pieces and tokenizer,
    }
    for message, applies in refused.items():
        if applies:
            raise ValueError(message)


def restricted(groups: Groups, languages: str | None) -> Groups:
    """The rows of these languages, or of all. ValueError for a language that there is not."""
    chosen = languages.split(",") if languages else groups
    unknown = set(chosen) - set(groups)
    if unknown:
        raise ValueError(f"no language {min(unknown)!r}; there are {', '.join(sorted(groups))}")
    return {language: groups[language] for language in sorted(chosen, key=str)}


def tokenizer_of(name: str, source, tokenizer, languages, pieces, every: Groups) -> Tokenizer:
    """The given tokenizer, one that is learned from training texts, or GPT-2's. every: the rows of all languages."""
    corpus = CORPORA[name]
    kind = SentencePiece if corpus.kind == "text" else XLMR
    if tokenizer:
        chosen = load_tokenizer(tokenizer, kind.kind)
        if chosen.eot < 0:
            raise ValueError(f"{tokenizer} has no token that ends a text")
        return chosen
    own = None if pieces else corpus.vocabulary
    if own == "gpt2":
        return gpt2()
    if own:  # learned from all languages, so that it does not depend on --languages
        options = corpus.learning
        if own != name or corpus.learn_from:  # else rows are lists, which writing goes through again
            every = read(own, source)
    else:
        pieces = pieces or corpus.pieces
        options = {"vocab_size": pieces and pieces + kind.added, "model_type": "bpe"}
        every = restricted(read(name, source), languages)
    return train_sentencepiece(training_texts(every, corpus.learn_from), kind=kind, **options)


def training_texts(groups: Groups, most: int | None = None) -> Iterator[str]:
    """Every text of the first `most` training documents or pairs of each language, and LEARNED characters at most."""
    for rows in groups.values():
        train = (texts for split, *texts in rows if split == "train")
        room = LEARNED // len(groups)
        for text in chain.from_iterable(islice(train, most)):
            yield text[:room]
            room -= len(text)
            if room <= 0:
                break


def write_corpus(folder: Path, meta: dict, groups: Groups, tokenizer: Tokenizer, limit: int | None = None):
    """Encode the rows into the files of `folder`, language by language; meta.json comes last.

    meta: what is said of the corpus, its `kind` among it.
    """
    meta["versions"]["python"] = platform.python_version()
    meta["dtype"] = tokenizer.dtype
    writers = {split: SplitWriter(folder, split, meta["kind"]) for split in SPLITS}
    counts = {}  # language -> split -> counts
    with tqdm(desc="encoding", unit="doc", disable=None) as bar:
        for language, rows in groups.items():
            own = {split: writers[split].begin_language() for split in SPLITS}
            counts[language] = own
            for batch in batches(rows):
                encoded = tokenizer.encode_arrays([text for _, texts in batch for text in texts])
                for split, texts in batch:
                    ids = [next(encoded) for _ in texts]
                    if split != "train" or not limit or own["train"]["tokens"] < limit:
                        writers[split].append(texts, ids, tokenizer.eot)
                bar.update(len(batch))
                train, *held_out = (own[split]["tokens"] for split in SPLITS)
                if limit and train >= limit and min(held_out) >= min(limit, ENOUGH):
                    break
            if language and not train:
                what = f"language {language!r} of {meta['source']} has no training text"
                raise ValueError(f"{what}: leave it out with --languages")
    meta["splits"] = {split: writers[split].close() for split in SPLITS}
    for split, total in meta["splits"].items():
        if not total["tokens"]:
            raise ValueError(f"split {split!r} is empty: give more text, or files for it")
    if meta["kind"] != "text":
        meta["languages"] = counts
    tokenizer.save(folder)
    meta["tokenizer"] = {key: getattr(tokenizer, key) for key in ("kind", "vocab_size", "eot", "sha256")}
    meta["files"] = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    meta["checksum"] = checksum(meta)
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def batches(rows: Records) -> Iterator[list]:
    """The (split, texts) of rows in lists of about BATCH_CHARS characters. Rows with an empty text are left out."""
    batch, chars = [], 0
    for split, *texts in rows:
        if all(text.strip() for text in texts):
            # half of a surrogate pair, which JSON and Python can spell, has no UTF-8 form and becomes "?"
            texts = [text.encode("utf-8", "replace").decode() for text in texts]
            batch.append((split, texts))
            chars += sum(map(len, texts))
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    yield batch


class SplitWriter:
    """Writes the files of one split. Held-out pairs are kept as text too: translations are scored against that."""

    def __init__(self, folder: Path, split: str, kind: str):
        self.unit = "pairs" if kind == "pairs" else "documents"
        self.counts = []  # of each language
        self.tokens = (folder / f"{split}.bin").open("wb")
        self.index = self.texts = None
        if kind == "pairs":
            self.index = (folder / f"{split}.idx").open("wb")
            self.index.write(np.int64(0))
            if split != "train":
                self.texts = (folder / f"{split}.jsonl").open("w", encoding="utf-8", newline="\n")

    def begin_language(self) -> dict[str, int]:
        """The counts of the language that follows, which will grow, and the number of its first token or pair."""
        unit = "pairs" if self.index else "tokens"
        first = sum(own[unit] for own in self.counts)
        self.counts.append(Counter({"first": first, "tokens": 0, "words": 0, "bytes": 0, self.unit: 0}))
        return self.counts[-1]

    def append(self, texts: list[str], ids: list[np.ndarray], eot: int):
        """A document or a pair, each text with the token that ends it."""
        if not all(map(len, ids)):
            return  # a text of characters that the tokenizer drops
        own = self.counts[-1]
        for text, tokens in zip(texts, ids):
            words = len(text.split())
            own.update(tokens=len(tokens) + 1, words=words, bytes=len(text.encode()))
            self.tokens.write(np.append(tokens, tokens.dtype.type(eot)))
            if self.index:
                self.index.write(np.int64(self.tokens.tell() // tokens.itemsize))
        own[self.unit] += 1
        if self.texts:
            self.texts.write(json.dumps(texts, ensure_ascii=False) + "\n")

    def close(self) -> dict[str, int]:
        for file in (self.tokens, self.index, self.texts):
            if file:
                file.close()
        return {key: sum(own[key] for own in self.counts) for key in ("tokens", "words", "bytes", self.unit)}


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an exception could wait for a tokenizer's threads for ever
    try:
        out = tyro.cli(prepare, prog="python -m data.prepare", description=__doc__, use_underscores=True)
    except (ValueError, OSError, ImportError, MemoryError) as error:
        sys.exit(f"error: {' '.join(str(error).split()) or 'the memory does not suffice'}")
    splits = json.loads((out / "meta.json").read_text())["splits"]
    counts = [f"{splits[split]['tokens']:,}" for split in SPLITS]
    print(f"{out}: {' / '.join(counts)} tokens (train / valid / test)")


if __name__ == "__main__":
    main()
