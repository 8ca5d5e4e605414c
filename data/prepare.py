"""Turn a corpus into files of token ids for training.

    python -m data.prepare pydocs                                  # docstrings on this disk, 20 s, no network
    python -m data.prepare openwebtext --max_tokens 100000000      # streamed from the Hugging Face hub
    python -m data.prepare text --source FILE_OR_DIR --out DIR     # your own UTF-8 text, with its own vocabulary
    python -m data.prepare bitext --pieces 8000 --source DIR       # your own pairs: DIR/de-en.{de,en} or .tsv

data/README.md lists all corpora and describes the files of data/prepared/NAME. The folder appears only when it is
complete, and a folder that is not empty is never written to.
"""

import json
import platform
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path

import numpy as np
import tyro
from filelock import FileLock, Timeout

if not __package__:  # python data/prepare.py
    sys.path.insert(0, str(Path(__file__).parents[1]))

from data.corpora import CORPORA, Groups, read
from data.files import PREPARED, SPLITS, Records, checksum, progress, say, sha256
from data.tokenizers import XLMR, SentencePiece, Tokenizer, gpt2, load_tokenizer, train_sentencepiece
from engine import one_line

BATCH_CHARS = 2_000_000  # characters encoded at once
LEARNED = 100_000_000  # characters to learn a vocabulary from, at most, shared equally by the languages
ENOUGH = 10_000  # under --max_tokens, keep reading until valid and test have this many tokens each


def prepare(
    name: tyro.conf.Positional[str],
    source: Path | None = None,
    tokenizer: Path | None = None,
    max_tokens: int | None = None,
    out: Path | None = None,
    languages: str | None = None,
    pieces: int | None = None,
) -> Path:
    """Prepare corpus `name` and return its folder. On ValueError, OSError or ImportError, nothing is written.

    Args:
        name: see data/README.md; pydocs, ciphers and their pairs need no network
        source: local file or folder to read instead of the network
        tokenizer: GPT-2 rank file or SentencePiece *.model; multilingual corpora need the latter, read with XLM-R's ids
        max_tokens: start no training document after this many tokens (per language)
        out: folder to write, new or empty (default: data/prepared/NAME)
        languages: only these languages (de,en,sw) or language pairs (de-en,en-fr)
        pieces: size of a BPE to learn from the texts instead of passing a tokenizer
    """
    check_options(name, source, tokenizer, max_tokens, languages, pieces)
    corpus = CORPORA[name]
    out = Path(out or PREPARED / name).resolve()
    with new_folder(out) as folder:
        all_groups = read(name, source)
        groups = select(all_groups, languages)
        tokenizer = tokenizer_of(name, source, tokenizer, languages, pieces, all_groups)
        versions = {package: version(package) for package in corpus.packages} | {"python": platform.python_version()}
        meta = {"name": name, "source": str(source or name), "versions": versions, "kind": corpus.kind}
        write_corpus(folder, meta, groups, tokenizer, max_tokens)
    return out


@contextmanager
def new_folder(out: Path):
    """A hidden folder to write into. It is renamed to `out` at the end, or removed after an exception."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.new.partial")
    lock = FileLock(out.with_name(f".{out.name}.lock"))
    try:
        held = lock.acquire(blocking=False)
    except Timeout:
        say(f"waiting for the process that is preparing {out}")
        held = lock.acquire()
    with held:
        if out.exists() and any(out.iterdir()):
            raise FileExistsError(f"--out {out} is not empty: delete its files or pass another folder")
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed preparation
        try:
            partial.mkdir()
            yield partial
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def check_options(name: str, source, tokenizer, max_tokens, languages, pieces):
    """Raises ValueError for invalid or conflicting options."""
    if name not in CORPORA:
        raise ValueError(f"unknown corpus {name!r}; choose from {', '.join(CORPORA)}")
    corpus = CORPORA[name]
    numbers = [number for number in (max_tokens, pieces) if number is not None]
    has_vocabulary = tokenizer or pieces or source or corpus.vocabulary or corpus.pieces
    hint = "(a SentencePiece model such as XLM-R's) or --pieces N (to learn a BPE)"
    problems = {
        f"corpus {name!r} needs --source FILE or DIR": not source and not corpus.read,
        f"corpus {name!r} is read from installed packages: omit --source": source and not corpus.local,
        f"--source {source} does not exist": source and not source.exists(),
        f"corpus {name!r} needs --tokenizer PATH {hint}": not has_vocabulary,
        "--max_tokens and --pieces must be positive": min(numbers, default=1) < 1,
        f"--languages is only for multilingual corpora, not for {name!r}": languages and corpus.kind == "text",
        "--pieces learns a tokenizer: do not combine it with --tokenizer": pieces and tokenizer,
    }
    for message, applies in problems.items():
        if applies:
            raise ValueError(message)


def select(groups: Groups, languages: str | None) -> Groups:
    """The rows of these languages (default: all). Raises ValueError for an unknown language."""
    chosen = languages.split(",") if languages else groups
    if unknown := set(chosen) - set(groups):
        raise ValueError(f"unknown language {min(unknown)!r}; choose from {', '.join(sorted(groups))}")
    return {language: groups[language] for language in sorted(chosen, key=str)}


def tokenizer_of(name: str, source, path, languages, pieces, groups: Groups) -> Tokenizer:
    """The tokenizer at `path`, GPT-2's, or one learned from training texts. groups: the rows of all languages."""
    corpus = CORPORA[name]
    kind = SentencePiece if corpus.kind == "text" else XLMR
    if path:
        tokenizer = load_tokenizer(path, kind.kind)
        if tokenizer.eot < 0:
            raise ValueError(f"{path} has no end-of-text token")
        return tokenizer
    vocabulary = None if pieces else corpus.vocabulary
    if vocabulary == "gpt2":
        return gpt2()
    if vocabulary:  # learned from all languages, so that it does not depend on --languages
        options = corpus.learn_options
        if vocabulary != name or corpus.learn_from:  # otherwise rows are lists, which can be read again
            groups = read(vocabulary, source)
    else:
        pieces = pieces or corpus.pieces
        options = {"vocab_size": pieces and pieces + kind.added, "model_type": "bpe"}
        groups = select(read(name, source), languages)
    return train_sentencepiece(training_texts(groups, corpus.learn_from), kind=kind, **options)


def training_texts(groups: Groups, limit: int | None = None) -> Iterator[str]:
    """The texts of the first `limit` training documents or pairs of each language, at most LEARNED characters."""
    for rows in groups.values():
        train = (texts for split, *texts in rows if split == "train")
        room = LEARNED // len(groups)
        for text in chain.from_iterable(islice(train, limit)):
            yield text[:room]
            room -= len(text)
            if room <= 0:
                break


def write_corpus(folder: Path, meta: dict, groups: Groups, tokenizer: Tokenizer, limit: int | None = None):
    """Encode the rows into the files of `folder`, language by language, and write meta.json last; limit: max_tokens."""
    meta["dtype"] = tokenizer.dtype
    writers = {split: SplitWriter(folder, split, meta["kind"]) for split in SPLITS}
    counts = {}  # language -> split -> counts
    for language, rows in groups.items():
        counts[language] = {split: writers[split].begin_language() for split in SPLITS}
        unknown = 0  # tokens
        for batch in batches(progress(rows, f"encoding {language or 'documents'}", unit="doc")):
            encoded = tokenizer.encode_arrays([text for _, texts in batch for text in texts])
            for split, texts in batch:
                ids = [next(encoded) for _ in texts]
                if split != "train" or not limit or counts[language]["train"]["tokens"] < limit:
                    writers[split].append(texts, ids, tokenizer.eot)
                    unknown += sum(np.count_nonzero(tokens == tokenizer.unknown) for tokens in ids)
            train, *held_out = (counts[language][split]["tokens"] for split in SPLITS)
            if limit and train >= limit and min(held_out) >= min(limit, ENOUGH):
                break
        of = f"language {language!r} of {meta['source']}" if language else meta["source"]
        if language and not train:
            raise ValueError(f"{of} has no training text: exclude it with --languages")
        share = unknown / max(1, train + sum(held_out))
        if share > 0.1:
            raise ValueError(f"{share:.0%} of the tokens of {of} would be <unk>: pass another --tokenizer, or --pieces")
        if share > 0.001:
            say(f"{share:.1%} of the tokens of {of} are <unk>, since the tokenizer lacks their characters")
    meta["splits"] = {split: writers[split].close() for split in SPLITS}
    for split, total in meta["splits"].items():
        if not total["tokens"]:
            raise ValueError(f"split {split!r} is empty: add text, or files named {split}")
    if meta["kind"] != "text":
        meta["languages"] = counts
    tokenizer.save(folder)
    meta["tokenizer"] = {key: getattr(tokenizer, key) for key in ("kind", "vocab_size", "eot", "sha256")}
    meta["files"] = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    meta["checksum"] = checksum(meta)
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def batches(rows: Records) -> Iterator[list]:
    """Lists of (split, texts) with about BATCH_CHARS characters. Rows with an empty text are dropped."""
    batch, chars = [], 0
    for split, *texts in rows:
        if all(text.strip() for text in texts):
            # a lone surrogate, possible in JSON and Python, is not valid UTF-8 and becomes "?"
            texts = [text.encode("utf-8", "replace").decode() for text in texts]
            batch.append((split, texts))
            chars += sum(map(len, texts))
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    yield batch


class SplitWriter:
    """Writes the files of one split. Held-out pairs are also kept as text, the references that translations need."""

    def __init__(self, folder: Path, split: str, kind: str):
        self.unit = "pairs" if kind == "pairs" else "documents"
        self.counts = []  # one Counter per language
        self.tokens = (folder / f"{split}.bin").open("wb")
        self.index = self.texts = None
        if kind == "pairs":
            self.index = (folder / f"{split}.idx").open("wb")
            self.index.write(np.int64(0))
            if split != "train":
                self.texts = (folder / f"{split}.jsonl").open("w", encoding="utf-8", newline="\n")

    def begin_language(self) -> dict[str, int]:
        """The counts of the next language, updated by `append`, and `first`, the index of its first token or pair."""
        first = sum(count["pairs" if self.index else "tokens"] for count in self.counts)
        self.counts.append(Counter({"first": first, "tokens": 0, "words": 0, "bytes": 0, self.unit: 0}))
        return self.counts[-1]

    def append(self, texts: list[str], ids: list[np.ndarray], eot: int):
        """Writes a document or a pair; `eot` ends each text."""
        if not all(map(len, ids)):
            return  # a text made only of characters that the tokenizer drops
        count = self.counts[-1]
        for text, tokens in zip(texts, ids):
            count.update(tokens=len(tokens) + 1, words=len(text.split()), bytes=len(text.encode()))
            self.tokens.write(np.append(tokens, tokens.dtype.type(eot)))
            if self.index:
                self.index.write(np.int64(self.tokens.tell() // tokens.itemsize))
        count[self.unit] += 1
        if self.texts:
            self.texts.write(json.dumps(texts, ensure_ascii=False) + "\n")

    def close(self) -> dict[str, int]:
        for file in filter(None, (self.tokens, self.index, self.texts)):
            file.close()
        return {key: sum(count[key] for count in self.counts) for key in ("tokens", "words", "bytes", self.unit)}


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # KeyboardInterrupt could wait forever for a tokenizer's threads
    try:
        out = tyro.cli(prepare, prog="python -m data.prepare", description=__doc__, use_underscores=True)
    except (ValueError, OSError, ImportError, MemoryError) as error:
        sys.exit(f"error: {one_line(error) or 'out of memory'}")
    splits = json.loads((out / "meta.json").read_text())["splits"]
    counts = [f"{splits[split]['tokens']:,}" for split in SPLITS]
    print(f"{out}: {' / '.join(counts)} tokens (train / valid / test)")


if __name__ == "__main__":
    main()
