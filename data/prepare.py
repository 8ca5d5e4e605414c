"""Turn a corpus into files of token ids that training reads.

    python -m data.prepare pydocs                                  # docstrings on this disk, 15 s, no network
    python -m data.prepare wikitext103 [--source DIR]              # the hub, or DIR/wiki.{train,valid,test}.raw
    python -m data.prepare openwebtext [--max_tokens 100000000]    # streamed
    python -m data.prepare text --source FILE_OR_DIR --out DIR     # your own UTF-8 text
    python -m data.prepare catalogs                                # Django's messages in 96 languages, no network
    python -m data.prepare cc100 --spm PATH --languages de,sw --max_tokens 1000000       # streamed; mc4 likewise
    python -m data.prepare cc100 --spm PATH --source DIR           # or your own: DIR/de.txt, DIR/sw.jsonl.xz
    python -m data.prepare catalogs-pairs                          # the same messages beside their English, no network
    python -m data.prepare opus100 --spm PATH --languages de-en    # streamed translation pairs
    python -m data.prepare bitext --spm PATH --source DIR          # your own: DIR/de-en.de and DIR/de-en.en
    python -m data.prepare catalogs-en                             # for translation: five languages, a joint BPE
    python -m data.prepare multi30k-de [--source DIR]              # wmt23-de, wmt10 and others likewise
    python -m data.prepare bitext --pieces 8000 --source DIR       # your own pairs under a joint BPE

Writes train.bin, valid.bin and test.bin (token ids, uint16 or uint32, every document followed by the end-of-document
token), the tokenizer's file, and meta.json (counts, hashes, languages) into data/prepared/NAME. A translation pair is
two documents; train.idx, valid.idx and test.idx say where each begins, valid.jsonl and test.jsonl hold both as they
were read. The folder appears whole or not at all; data prepared earlier stays until the new data is complete.
"""

import difflib
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from data.corpora import CORPORA, Corpus
from data.files import SPLITS
from data.tokenizers import XLMR, SentencePiece, Tokenizer, gpt2, load_tokenizer, train_sentencepiece

PREPARED = Path(__file__).parent / "prepared"
OUTPUTS = {"tokenizer.model", "xlmr.model", "tokenizer.tiktoken", "meta.json", "valid.jsonl", "test.jsonl"}
OUTPUTS |= {f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "idx")}
BATCH_CHARS = 2_000_000  # of text, encoded at once
BPE_PAIRS = 2_000_000  # that a joint BPE is trained on, at most
ENOUGH = 10_000  # tokens of valid and of test that end a limited reading (of a language), once train is full
# language -> (split, text) of its documents, or (split, text, text) of pairs; None: one language
Groups = dict[str | None, Iterable[tuple[str, ...]]]


def prepare(
    name: tyro.conf.Positional[str],
    source: str | Path | None = None,
    tokenizer: Path | None = None,
    max_tokens: int | None = None,
    out: Path | None = None,
    spm: Path | None = None,
    languages: str | None = None,
    pieces: int | None = None,
) -> Path:
    """Prepare corpus `name` and return its folder.

    Raises ValueError, OSError or ImportError with one line for the user; what `out` held before is then unchanged.

    Args:
        name: see data/README.md; pydocs, catalogs, catalogs-pairs and catalogs-en need no network
        source: local file or folder to read instead of the network
        tokenizer: file for a corpus of one language, a GPT-2 rank file or a SentencePiece *.model, in place of GPT-2's
        max_tokens: no training document begins beyond this many tokens, of each language where there are many
        out: folder to write, by default data/prepared/NAME
        spm: SentencePiece model for corpora of many languages, read with XLM-R's ids
        languages: de,en,sw: only these of many; de-en,en-fr: pairs
        pieces: of a joint BPE, trained on the translation pairs, in place of spm
    """
    check_options(name, source, tokenizer, max_tokens, spm, languages, pieces)
    corpus = CORPORA[name]
    out = Path(out or PREPARED / name).resolve()
    check_replaceable(out)
    source = Path(source) if source else None
    everything = read(corpus, source)
    groups = select(everything, languages)
    if spm:
        chosen = load_tokenizer(spm, kind="xlmr")
    elif tokenizer:
        chosen = load_tokenizer(tokenizer)
    elif pieces or corpus.pieces:
        # groups can be gone through once
        chosen = joint_bpe(select(read(corpus, source), languages), pieces or corpus.pieces, max_tokens)
    elif corpus.packages:
        # of all languages, so that it does not depend on --languages
        learned = read(CORPORA[corpus.vocabulary], source) if corpus.vocabulary else everything
        chosen = train_sentencepiece(training_texts(learned), kind=SentencePiece if corpus.kind == "text" else XLMR)
    else:
        chosen = gpt2()

    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        meta = {"name": name, **provenance(corpus, source), "kind": corpus.kind}
        write(partial, groups, chosen, max_tokens, meta)
        replace(out, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def ready(name: str, spm: str | None = None, make: bool = True) -> Path:
    """The folder of corpus `name` under data/prepared, or else the folder that `name` is.

    A corpus that is inside installed packages is prepared there if it is missing; `make`: by this process. With `spm`
    (those of many languages) it has a folder for each vocabulary.
    """
    installed = name in CORPORA and CORPORA[name].packages
    folder = PREPARED / name
    if spm:
        if not installed:
            raise ValueError(f"--spm is for catalogs: give it to python -m data.prepare {name} instead")
        if not Path(spm).is_file():
            raise ValueError(f"--spm {spm} does not exist")
        folder = PREPARED / f"{name}-{hashlib.sha256(Path(spm).read_bytes()).hexdigest()[:8]}"
    if installed and make and not folder.exists():
        prepare(name, spm=spm, out=folder)
    if not installed and not folder.exists() and Path(name).exists():
        return Path(name)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# what to read, and with which tokenizer


def check_options(name: str, source, tokenizer, max_tokens, spm, languages, pieces):
    """Refuse what makes no sense or is meant for another kind of corpus."""
    if name not in CORPORA:
        nearest = difflib.get_close_matches(name, CORPORA, n=1, cutoff=0)[0]
        raise ValueError(f"unknown corpus {name!r}; did you mean {nearest!r}? (there are {', '.join(CORPORA)})")
    corpus = CORPORA[name]
    many = ", ".join(other for other in CORPORA if CORPORA[other].kind != "text")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be positive, not {max_tokens}")
    if source is None and corpus.read is None:
        raise ValueError(f"corpus {name!r} needs --source FILE or DIR")
    if source is not None and not (str(source) and Path(source).exists()):
        raise FileNotFoundError(f"--source {source} does not exist")
    if pieces is not None and (spm or corpus.kind != "pairs"):
        raise ValueError("--pieces is for translation pairs (bitext, wmt10, ...), without --spm")
    if pieces is not None and pieces < 1:
        raise ValueError(f"pieces must be positive, not {pieces}")
    if corpus.kind == "text" and spm:
        raise ValueError(f"--spm is for corpora of many languages ({many}); corpus {name!r} takes --tokenizer")
    if corpus.kind == "text" and languages is not None:
        raise ValueError(f"--languages is for corpora of many languages ({many}), not for {name!r}")
    if corpus.kind != "text" and tokenizer:
        raise ValueError(f"corpus {name!r} takes a SentencePiece model, for XLM-R's ids: --spm instead of --tokenizer")
    if corpus.kind != "text" and not (spm or pieces or corpus.pieces or corpus.packages):
        hint = ", or --pieces N: a joint BPE of the pairs" if corpus.kind == "pairs" else ""
        raise ValueError(f"corpus {name!r} needs --spm PATH: a SentencePiece model such as XLM-R's{hint}")


def read(corpus: Corpus, source: Path | None) -> Groups:
    found = corpus.local(source) if source else corpus.read()
    groups = {None: found} if corpus.kind == "text" else found
    if corpus.packages:  # small, and gone through twice: for the tokenizer and for the tokens
        return {language: list(documents) for language, documents in groups.items()}
    return groups


def select(groups: Groups, languages: str | None) -> Groups:
    """The groups of these languages, sorted; None: all. ValueError offers the nearest name for an unknown one."""
    if languages is None:
        return groups
    chosen = sorted(set(languages.split(",")))
    for language in chosen:
        if language not in groups:
            nearest = difflib.get_close_matches(language, groups, n=1, cutoff=0)[0]
            raise ValueError(f"no language {language!r} among {len(groups)}; did you mean {nearest!r}?")
    return {language: groups[language] for language in chosen}


def training_texts(groups: Groups, most: int | None = None) -> Iterator[str]:
    """Every text of the first `most` training documents or pairs of each language."""
    for documents in groups.values():
        train = (texts for split, *texts in documents if split == "train")
        for texts in islice(train, most):
            yield from texts


def joint_bpe(groups: Groups, pieces: int, limit: int | None) -> XLMR:
    """Of both sides of the first training pairs, up to BPE_PAIRS in all (or `limit`), as many from each language."""
    most = min(BPE_PAIRS, limit or BPE_PAIRS) // len(groups)
    return train_sentencepiece(training_texts(groups, most), pieces + XLMR.added, XLMR, model_type="bpe")


def provenance(corpus: Corpus, source: Path | None) -> dict:
    """Where the text comes from, as meta.json tells it."""
    origin = str(source or corpus.origin)
    if source and "django" in corpus.packages:
        origin = f"{corpus.origin} and {source}"
    versions = {"python": platform.python_version()}
    for package in corpus.packages:
        versions[package] = importlib.metadata.version(package)
    return {"source": origin, "versions": versions}


# ---------------------------------------------------------------------------------------------------------------------
# writing


def write(folder: Path, groups: Groups, tokenizer: Tokenizer, limit: int | None, meta: dict):
    """Stream the documents into `folder`, language by language, meta.json last."""
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    unit = "pairs" if meta["kind"] == "pairs" else "documents"
    counts = {}  # language -> split -> counts
    with ExitStack() as stack, tqdm(desc="encoding", unit="doc", disable=None) as bar:
        files = {split: stack.enter_context(SplitFiles(folder, split, dtype, unit)) for split in SPLITS}
        for language, documents in groups.items():
            counts[language] = own = {split: files[split].begin() for split in SPLITS}
            for batch in batches(documents):
                ids = iter(tokenizer.encode_batch(list(chain.from_iterable(texts for _, *texts in batch))))
                for split, *texts in batch:
                    tokens = [[*next(ids), tokenizer.eot] for _ in texts]
                    if limit is None or split != "train" or own["train"]["tokens"] < limit:
                        files[split].append(texts, tokens)
                bar.update(len(batch))
                if limit and own["train"]["tokens"] >= limit and held_out_is_enough(own, limit):
                    break
            if language and not own["train"][unit]:
                total = sum(count[unit] for count in own.values())
                what = f"language {language!r} of {meta['source']} has no training text ({total:,} {unit} in all)"
                raise ValueError(f"{what}: give more, or leave it out with --languages")
    splits = {}
    for split in SPLITS:
        keys = [key for key in files[split].counts if key not in ("start", "first")]
        splits[split] = {key: sum(own[split][key] for own in counts.values()) for key in keys}
    total = sum(count[unit] for count in splits.values())
    for split in SPLITS:
        if not splits[split][unit]:
            raise ValueError(f"split {split!r} is empty ({total:,} {unit} in all): give more text, or files for it")
    tokenizer.save(folder)
    meta |= {"splits": splits, "dtype": dtype}
    if None not in counts:
        meta["languages"] = counts
    meta["tokenizer"] = {key: getattr(tokenizer, key) for key in ("kind", "vocab_size", "eot", "sha256")}
    meta["files"] = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    meta["checksum"] = checksum(meta)
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def held_out_is_enough(counts: dict[str, dict], limit: int) -> bool:
    return all(counts[split]["tokens"] >= min(limit, ENOUGH) for split in ("valid", "test"))


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
    if batch:
        yield batch


class SplitFiles:
    """The files of one split being written: .bin, and of pairs .idx, where every text begins, and the end.

    Held-out pairs are kept as text too, in .jsonl, one JSON list a line: translations are scored against what was
    really written.
    """

    def __init__(self, folder: Path, split: str, dtype: str, unit: str):
        self.dtype, self.unit = dtype, unit
        self.tokens = (folder / f"{split}.bin").open("wb")
        self.index = (folder / f"{split}.idx").open("wb") if unit == "pairs" else None
        self.texts = None
        if unit == "pairs" and split != "train":
            self.texts = (folder / f"{split}.jsonl").open("w", encoding="utf-8")
        self.written = self.units = 0  # tokens, and documents or pairs
        if self.index:
            self.index.write(np.int64(0).tobytes())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in (self.tokens, self.index, self.texts):
            if file:
                file.close()

    def begin(self) -> dict[str, int]:
        """What follows is of another language; returns its counts, which grow with every text."""
        self.counts = {"start": self.written, "tokens": 0, "words": 0, "bytes": 0, "characters": 0, self.unit: 0}
        if self.index:
            self.counts["first"] = self.units
        return self.counts

    def append(self, texts: list[str], ids: list[list[int]]):
        """A document or a pair, with an end behind each text."""
        if min(len(tokens) for tokens in ids) == 1 and self.index:
            return  # a text of characters that the tokenizer drops
        self.units += 1
        self.counts[self.unit] += 1
        for text, tokens in zip(texts, ids, strict=True):
            self.tokens.write(np.array(tokens, dtype=self.dtype).tobytes())
            self.written += len(tokens)
            self.counts["tokens"] += len(tokens)
            self.counts["words"] += len(text.split())
            self.counts["bytes"] += len(text.encode())
            self.counts["characters"] += len(text)
            if self.index:
                self.index.write(np.int64(self.written).tobytes())
        if self.texts:
            self.texts.write(json.dumps(texts, ensure_ascii=False) + "\n")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(meta: dict) -> str:
    """One hash for the data: every file, count and the tokenizer, but not where they come from."""
    data = {key: value for key, value in meta.items() if key not in ("name", "source", "versions", "checksum")}
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def check_replaceable(out: Path):
    """Refuse to replace anything that this module did not write."""
    if out.is_file():
        raise ValueError(f"--out {out} is a file; give a folder that is new, empty or prepared data")
    here = sorted(path.name for path in out.iterdir()) if out.exists() else []
    # without a meta.json nothing is ours: somebody's texts may be called test.jsonl
    foreign = [name for name in here if name not in OUTPUTS or "meta.json" not in here]
    if foreign:
        what = f"holds other files ({foreign[0]})"
        raise ValueError(f"--out {out} {what}; give a folder that is new, empty or prepared data")


def replace(out: Path, new: Path):
    """Put folder `new` in the place of `out`."""
    old = new.with_suffix(".old")
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------------
# the command


def summary(folder: Path) -> str:
    """The counts of a prepared corpus as a small table."""
    meta = json.loads((folder / "meta.json").read_text())
    keys = ("tokens", "words", "pairs" if meta["kind"] == "pairs" else "documents", "bytes")
    lines = [f"{'':8}" + "".join(f"{key:>16}" for key in keys)]
    for split in SPLITS:
        lines.append(f"{split:8}" + "".join(f"{meta['splits'][split][key]:>16,}" for key in keys))
    if "languages" in meta:
        lines.append(f"{len(meta['languages'])} language" + (" pairs" if meta["kind"] == "pairs" else "s"))
    return "\n".join([*lines, f"-> {folder}"])


def main():
    try:
        print(summary(tyro.cli(prepare, prog="python -m data.prepare", description=__doc__, use_underscores=True)))
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
