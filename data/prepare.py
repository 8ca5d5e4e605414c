"""Turn a corpus into files of token ids that training reads.

    python -m data.prepare pydocs                                  # docstrings on this disk, 20 s, no network
    python -m data.prepare wikitext103 [--source DIR]              # the hub, or DIR/wiki.{train,valid,test}.raw
    python -m data.prepare openwebtext [--max_tokens 100000000]    # streamed
    python -m data.prepare text --source FILE_OR_DIR --out DIR     # your own UTF-8 text
    python -m data.prepare catalogs                                # Django's messages in 96 languages, no network
    python -m data.prepare cc100 --tokenizer PATH --languages de,sw --max_tokens 1000000    # streamed; mc4 likewise
    python -m data.prepare cc100 --tokenizer PATH --source DIR     # or your own: DIR/de.txt, DIR/sw.jsonl.xz
    python -m data.prepare catalogs-pairs                          # the same messages beside their English, no network
    python -m data.prepare opus100 --tokenizer PATH --languages de-en      # streamed translation pairs
    python -m data.prepare bitext --tokenizer PATH --source DIR    # your own: DIR/de-en.{de,en} or .tsv
    python -m data.prepare catalogs-en                             # for translation: five languages, a joint BPE
    python -m data.prepare multi30k-de [--source DIR]              # wmt23-de, wmt10 and others likewise
    python -m data.prepare bitext --pieces 8000 --source DIR       # your own pairs under a joint BPE

Writes train.bin, valid.bin and test.bin (token ids, uint16 or uint32, every document followed by the end-of-document
token), the tokenizer's file, and meta.json (counts, hashes, languages) into data/prepared/NAME. A translation pair is
two documents; train.idx, valid.idx and test.idx say where each begins, valid.jsonl and test.jsonl hold both as they
were read. The folder appears whole or not at all, and one that is already there is never written to. What a killed
preparation left behind is removed by the next one of that name.
"""

import glob
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from data.corpora import CORPORA, Corpus
from data.files import SPLITS
from data.tokenizers import XLMR, SentencePiece, Tokenizer, gpt2, load_tokenizer, train_sentencepiece

PREPARED = Path(__file__).parent / "prepared"
BATCH_CHARS = 2_000_000  # of text, encoded at once
BPE_PAIRS = 2_000_000  # that a joint BPE is trained on, at most
ENOUGH = 10_000  # tokens of valid and of test that end a limited reading (of a language), once train is full
# language -> (split, text) of its documents, or (split, text, text) of pairs; None: one language
Groups = dict[str | None, Iterable[tuple[str, ...]]]


def prepare(
    name: tyro.conf.Positional[str],
    source: Path | None = None,
    tokenizer: Path | None = None,
    max_tokens: int | None = None,
    out: Path | None = None,
    languages: str | None = None,
    pieces: int | None = None,
) -> Path:
    """Prepare corpus `name` and return its folder.

    Raises ValueError, OSError or ImportError with one line for the user; nothing is then written.

    Args:
        name: see data/README.md; pydocs, catalogs, catalogs-pairs and catalogs-en need no network
        source: local file or folder to read instead of the network
        tokenizer: GPT-2 rank file or SentencePiece *.model; for many languages the latter, read with XLM-R's ids
        max_tokens: no training document begins beyond this many tokens, of each language where there are many
        out: folder to write, by default data/prepared/NAME; new or empty
        languages: de,en,sw: only these of many; de-en,en-fr: pairs
        pieces: of a joint BPE, trained on the translation pairs, in place of a tokenizer
    """
    check_options(name, source, tokenizer, max_tokens, languages, pieces)
    corpus = CORPORA[name]
    out = Path(out or PREPARED / name).resolve()
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty: remove what is there, or give another folder")
    everything = read(corpus, source)
    groups = select(everything, languages)
    if tokenizer:
        chosen = load_tokenizer(tokenizer, kind=None if corpus.kind == "text" else XLMR.kind)
    elif pieces or corpus.pieces:
        # groups can be gone through once
        chosen = joint_bpe(select(read(corpus, source), languages), pieces or corpus.pieces, max_tokens)
    elif corpus.packages:
        # of all languages, so that it does not depend on --languages
        learned = read(CORPORA[corpus.vocabulary], source) if corpus.vocabulary else everything
        chosen = train_sentencepiece(training_texts(learned), kind=SentencePiece if corpus.kind == "text" else XLMR)
    elif corpus.kind == "text":
        chosen = gpt2()
    else:
        hint = ", or --pieces N: a joint BPE of the pairs" if corpus.kind == "pairs" else ""
        raise ValueError(f"corpus {name!r} needs --tokenizer PATH: a SentencePiece model such as XLM-R's{hint}")

    versions = {package: importlib.metadata.version(package) for package in corpus.packages}
    versions["python"] = platform.python_version()
    meta = {"name": name, "source": str(source or name), "versions": versions, "kind": corpus.kind}
    mine = f".{out.name}.{platform.node()}."  # another machine may share this disk, and knows other processes
    partial = out.with_name(f"{mine}{os.getpid()}.partial")
    remove_leftovers(out.parent, mine)
    partial.mkdir(parents=True)
    try:
        write(partial, groups, chosen, max_tokens, meta)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def remove_leftovers(folder: Path, prefix: str):
    """Those of preparations of the same name that were killed: PREFIX PROCESS.partial, of a process that is gone."""
    for partial in folder.glob(f"{glob.escape(prefix)}*.partial"):
        process = partial.name.removeprefix(prefix).removesuffix(".partial")
        if process.isdecimal() and (int(process) == os.getpid() or not alive(int(process))):
            shutil.rmtree(partial, ignore_errors=True)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def ready(name: str, make: bool = True) -> Path:
    """The folder of corpus `name` under data/prepared, or else the folder that `name` is.

    A corpus that is inside installed packages is prepared there if it is missing; `make`: by this process.
    """
    folder = PREPARED / name
    if name in CORPORA and CORPORA[name].packages:
        if make and not folder.exists():
            try:
                prepare(name, out=folder)
            except (OSError, ValueError):
                if not folder.exists():  # else another process was faster
                    raise
    elif not folder.exists() and Path(name).exists():
        folder = Path(name)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# what to read, and with which tokenizer


def check_options(name: str, source, tokenizer, max_tokens, languages, pieces):
    """Refuse what makes no sense or is meant for another kind of corpus."""
    if name not in CORPORA:
        raise ValueError(f"unknown corpus {name!r}; there are {', '.join(CORPORA)}")
    corpus = CORPORA[name]
    if source is None and corpus.read is None:
        raise ValueError(f"corpus {name!r} needs --source FILE or DIR")
    if source is not None and not source.exists():
        raise FileNotFoundError(f"--source {source} does not exist")
    for option, value in {"max_tokens": max_tokens, "pieces": pieces}.items():
        if value is not None and value < 1:
            raise ValueError(f"{option} must be positive, not {value}")
    if languages is not None and corpus.kind == "text":
        raise ValueError(f"--languages is for corpora of many languages, not for {name!r}")
    if pieces and (tokenizer or corpus.kind != "pairs"):
        raise ValueError("--pieces is for translation pairs (bitext, wmt10, ...), without --tokenizer")


def read(corpus: Corpus, source: Path | None) -> Groups:
    found = corpus.local(source) if source else corpus.read()
    groups = {None: found} if corpus.kind == "text" else found
    if corpus.packages:  # small, and gone through twice: for the tokenizer and for the tokens
        return {language: list(documents) for language, documents in groups.items()}
    return groups


def select(groups: Groups, languages: str | None) -> Groups:
    """The groups of these languages, sorted; None: all. ValueError for an unknown one."""
    chosen = languages.split(",") if languages else groups
    unknown = set(chosen) - set(groups)
    if unknown:
        raise ValueError(f"no language {min(unknown)!r}; there are {', '.join(sorted(groups))}")
    return {language: groups[language] for language in sorted(chosen)}


def training_texts(groups: Groups, most: int | None = None) -> Iterator[str]:
    """Every text of the first `most` training documents or pairs of each language."""
    for documents in groups.values():
        train = (texts for split, *texts in documents if split == "train")
        for texts in islice(train, most):
            yield from texts


def joint_bpe(groups: Groups, pieces: int, limit: int | None) -> XLMR:
    """Of both sides of the first training pairs, BPE_PAIRS in all, or so many that each language may have tokens."""
    most = min(BPE_PAIRS // len(groups), limit or BPE_PAIRS)
    return train_sentencepiece(training_texts(groups, most), pieces + XLMR.added, XLMR, model_type="bpe")


# ---------------------------------------------------------------------------------------------------------------------
# writing


def write(folder: Path, groups: Groups, tokenizer: Tokenizer, limit: int | None, meta: dict):
    """Stream the documents into `folder`, language by language, meta.json last."""
    meta["dtype"] = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    unit = "pairs" if meta["kind"] == "pairs" else "documents"
    files = {split: SplitFiles(folder, split, meta["dtype"], unit) for split in SPLITS}
    counts = {}  # language -> split -> counts
    with tqdm(desc="encoding", unit="doc", disable=None) as bar:
        for language, documents in groups.items():
            own = counts[language] = {split: files[split].begin() for split in SPLITS}
            for batch in batches(documents):
                write_batch(files, batch, tokenizer, limit)
                bar.update(len(batch))
                if limit and is_enough(own, limit):
                    break
            if language and not own["train"][unit]:
                what = f"language {language!r} of {meta['source']} has no training text"
                raise ValueError(f"{what}: give more, or leave it out with --languages")
    meta["splits"] = {split: files[split].finish() for split in SPLITS}
    for split, total in meta["splits"].items():
        if not total[unit]:
            raise ValueError(f"split {split!r} is empty: give more text, or files for it")
    if meta["kind"] != "text":
        meta["languages"] = counts
    tokenizer.save(folder)
    meta["tokenizer"] = {key: getattr(tokenizer, key) for key in ("kind", "vocab_size", "eot", "sha256")}
    meta["files"] = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    meta["checksum"] = checksum(meta)
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def batches(documents: Iterable[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """Documents or pairs in lists of about BATCH_CHARS characters; those with a text of white space are left out."""
    batch = []
    chars = 0
    for split, *texts in documents:
        if all(text.strip() for text in texts):
            # a lone surrogate (an escape in JSON or in a docstring) has no UTF-8 form and becomes "?"
            batch.append((split, *(text.encode("utf-8", "replace").decode() for text in texts)))
            chars += sum(len(text) for text in texts)
        if chars >= BATCH_CHARS:
            yield batch
            batch = []
            chars = 0
    yield batch


def write_batch(files: dict[str, "SplitFiles"], batch: list[tuple[str, ...]], tokenizer: Tokenizer, limit: int | None):
    """Each text and an end behind it; what is beyond the limit of training tokens is left out."""
    ids = iter(tokenizer.encode_batch(list(chain.from_iterable(texts for _, *texts in batch))))
    for split, *texts in batch:
        tokens = [[*next(ids), tokenizer.eot] for _ in texts]
        if limit is None or split != "train" or files["train"].counts["tokens"] < limit:
            files[split].append(texts, tokens)


def is_enough(counts: dict[str, dict], limit: int) -> bool:
    held_out = min(counts[split]["tokens"] for split in ("valid", "test"))
    return counts["train"]["tokens"] >= limit and held_out >= min(limit, ENOUGH)


class SplitFiles:
    """The files of one split being written: .bin, and of pairs .idx, where every text begins, and the end.

    Held-out pairs are kept as text too, in .jsonl, one JSON list a line: translations are scored against what was
    really written.
    """

    def __init__(self, folder: Path, split: str, dtype: str, unit: str):
        self.dtype, self.unit = dtype, unit
        self.total = Counter({"tokens": 0, "words": 0, "bytes": 0, unit: 0})
        self.tokens = (folder / f"{split}.bin").open("wb")
        self.index = self.texts = None
        if unit == "pairs":
            self.index = (folder / f"{split}.idx").open("wb")
            self.index.write(np.int64(0).tobytes())
            if split != "train":
                self.texts = (folder / f"{split}.jsonl").open("w", encoding="utf-8")

    def begin(self) -> Counter:
        """What follows is of another language; returns its counts, which grow, and the number of its first."""
        first = self.total["pairs" if self.index else "tokens"]
        self.counts = Counter({"first": first} | dict.fromkeys(self.total, 0))
        return self.counts

    def append(self, texts: list[str], ids: list[list[int]]):
        """A document or a pair, with an end behind each text."""
        if min(map(len, ids)) == 1:
            return  # a text of characters that the tokenizer drops
        end = self.total["tokens"]
        sizes = Counter({self.unit: 1})
        for text, tokens in zip(texts, ids):
            self.tokens.write(np.array(tokens, self.dtype).tobytes())
            end += len(tokens)
            if self.index:
                self.index.write(np.int64(end).tobytes())
            sizes.update(tokens=len(tokens), words=len(text.split()), bytes=len(text.encode()))
        if self.texts:
            self.texts.write(json.dumps(texts, ensure_ascii=False) + "\n")
        self.total.update(sizes)
        self.counts.update(sizes)

    def finish(self) -> Counter:
        """Close the files; returns the counts of all languages."""
        for file in filter(None, (self.tokens, self.index, self.texts)):
            file.close()
        return self.total


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(meta: dict) -> str:
    """One hash for the data: every file, count and the tokenizer, but not where they come from."""
    data = {key: value for key, value in meta.items() if key not in ("name", "source", "versions", "checksum")}
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# the command


def summary(folder: Path) -> str:
    """The counts of a prepared corpus as a small table."""
    meta = json.loads((folder / "meta.json").read_text())
    columns = list(meta["splits"]["train"])
    lines = [f"{'':8}" + "".join(f"{name:>16}" for name in columns)]
    for split, counts in meta["splits"].items():
        lines.append(f"{split:8}" + "".join(f"{counts[name]:>16,}" for name in columns))
    if "languages" in meta:
        lines.append(f"{len(meta['languages'])} languages, or pairs of them")
    return "\n".join([*lines, f"-> {folder}"])


def stop(number: int, frame):
    raise KeyboardInterrupt(number)


def main():
    signal.signal(signal.SIGTERM, stop)
    try:
        print(summary(tyro.cli(prepare, prog="python -m data.prepare", description=__doc__, use_underscores=True)))
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt as interrupt:  # Ctrl-C, or with the number of another signal
        print("stopped: nothing was written", file=sys.stderr)
        sys.exit(128 + (*interrupt.args, signal.SIGINT)[0])


if __name__ == "__main__":
    main()
