"""Turn a corpus into files of token ids that training reads.

    python -m data.prepare pydocs                                  # docstrings on this disk, 15 s, no network
    python -m data.prepare wikitext103 [--source DIR]              # the hub, or DIR/wiki.{train,valid,test}.raw
    python -m data.prepare openwebtext [--max_tokens 100000000]    # streamed when limited
    python -m data.prepare text --source FILE_OR_DIR --out DIR     # your own UTF-8 text
    python -m data.prepare catalogs                                # Django's messages in 97 languages, no network
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

import argparse
import difflib
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import corpora
from data.bitext import BITEXT
from data.corpora import SPLITS
from data.multilingual import MULTILINGUAL
from data.tokenizers import XLMR, SentencePiece, Tokenizer, gpt2, load_tokenizer, train_sentencepiece

SEVERAL = MULTILINGUAL | BITEXT  # of many languages, or pairs of them
CORPORA = corpora.CORPORA | SEVERAL
PREPARED = Path(__file__).parent / "prepared"
OUTPUTS = {f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "idx")} | {"valid.jsonl", "test.jsonl"}
OUTPUTS |= {"tokenizer.model", "xlmr.model", "tokenizer.tiktoken", "meta.json"}
# language -> (split, text) of its documents, or (split, text, text) of pairs; None: one language
Groups = dict[str | None, Iterable[tuple[str, ...]]]
COUNTS = ("tokens", "words", "documents", "bytes", "characters")
BATCH_CHARS = 2_000_000  # of text, encoded at once
BPE_PAIRS = 2_000_000  # that a joint BPE is trained on, at most
ENOUGH = 10_000  # tokens of valid and of test that end a limited reading (of a language), once train is full


def prepare(
    name: str,
    source: Path | str | None = None,
    tokenizer: Path | str | None = None,
    max_tokens: int | None = None,
    out: Path | str | None = None,
    spm: Path | str | None = None,
    languages: Sequence[str] | None = None,
    pieces: int | None = None,
) -> Path:
    """Prepare corpus `name` and return its folder.

    source: local file or folder to read; tokenizer: file to use (pydocs trains its own, the others use GPT-2's);
    max_tokens: no training document begins beyond this many tokens; out: folder, by default data/prepared/NAME.
    Corpora of many languages count max_tokens in each, take their tokenizer from `spm`, a SentencePiece model to be
    read with XLM-R's ids (catalogs trains its own), and can be restricted to some `languages`; those of translation
    pairs likewise, `languages` being pairs such as de-en, or they train a joint BPE of so many `pieces` (those meant
    for translation always, unless given `spm`).
    Raises ValueError, OSError or ImportError with one line for the user; what `out` held before is then unchanged.
    """
    if name not in CORPORA:
        nearest = difflib.get_close_matches(name, CORPORA, n=1, cutoff=0)[0]
        raise ValueError(f"unknown corpus {name!r}; did you mean {nearest!r}? (there are {', '.join(CORPORA)})")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be positive, not {max_tokens}")
    if source is not None and not (str(source) and Path(source).exists()):
        raise FileNotFoundError(f"--source {source} does not exist")
    if source is None and CORPORA[name].origin is None:
        raise ValueError(f"corpus {name!r} needs --source FILE or DIR")
    pieces = CORPORA[name].pieces if pieces is None and not spm else pieces
    check_options(name, tokenizer, spm, languages, pieces)
    corpus, kind = CORPORA[name], XLMR if name in SEVERAL else SentencePiece
    out = Path(out or PREPARED / name).resolve()
    check_replaceable(out)
    given = load_tokenizer(spm, kind="xlmr") if spm else load_tokenizer(tokenizer) if tokenizer else None
    where = Path(source) if source else None

    def read() -> Groups:
        found = corpus.read(where, max_tokens is not None)
        return found if name in SEVERAL else {None: found}

    groups = read()
    if pieces:
        given = joint_bpe(chosen(languages, groups), pieces, max_tokens)
        groups = read()  # from the start
    elif corpus.packages and given is None:
        groups = {language: list(documents) for language, documents in groups.items()}
        learned = corpus.vocabulary(where, False) if corpus.vocabulary else groups
        texts = (text for documents in learned.values() for split, text in documents if split == "train")
        given = train_sentencepiece(texts, kind=kind)
    groups = chosen(languages, groups)

    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        origin = (
            f"{corpus.origin} and {source}"
            if source and corpus.packages == ("django",)
            else str(source or corpus.origin)
        )
        meta = {"name": name, "source": origin} | ({"kind": "pairs"} if name in BITEXT else {})
        if corpus.packages:
            versions = {package: importlib.metadata.version(package) for package in corpus.packages}
            meta["versions"] = {"python": platform.python_version(), **versions}
        write(partial, groups, given or gpt2(), max_tokens, meta)
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
    return folder if installed or folder.exists() or not Path(name).exists() else Path(name)


def joint_bpe(groups: Groups, pieces: int, limit: int | None) -> XLMR:
    """Of both sides of the first training pairs, up to BPE_PAIRS in all (or `limit`), as many from each language."""
    most = min(BPE_PAIRS, limit or BPE_PAIRS) // len(groups)
    pairs = (islice((texts for split, *texts in pairs if split == "train"), most) for pairs in groups.values())
    texts = (text for some in pairs for both in some for text in both)
    return train_sentencepiece(texts, pieces + XLMR.added, XLMR, model_type="bpe")


def check_options(
    name: str,
    tokenizer: Path | str | None,
    spm: Path | str | None,
    languages: Sequence[str] | None,
    pieces: int | None,
):
    """Refuse what is meant for the other kind of corpus."""
    several = ", ".join(SEVERAL)
    if pieces is not None and (spm or name not in BITEXT):
        raise ValueError(f"--pieces is for translation pairs ({', '.join(BITEXT)}), without --spm")
    if pieces is not None and pieces < 1:
        raise ValueError(f"pieces must be positive, not {pieces}")
    if name in SEVERAL and tokenizer:
        raise ValueError(f"corpus {name!r} takes a SentencePiece model, for XLM-R's ids: --spm instead of --tokenizer")
    if name in SEVERAL and not (spm or pieces or CORPORA[name].packages):
        hint = ", or --pieces N: a joint BPE of the pairs" if name in BITEXT else ""
        raise ValueError(f"corpus {name!r} needs --spm PATH: a SentencePiece model such as XLM-R's{hint}")
    if name not in SEVERAL and spm:
        raise ValueError(f"--spm is for corpora of many languages ({several}); corpus {name!r} takes --tokenizer")
    if name not in SEVERAL and languages is not None:
        raise ValueError(f"--languages is for corpora of many languages ({several}), not for {name!r}")


def chosen(languages: Sequence[str] | None, groups: Groups) -> Groups:
    """The groups of these languages, sorted; None: all. ValueError offers the nearest name for an unknown one."""
    if languages is None:
        return groups
    for language in languages:
        if language not in groups:
            nearest = difflib.get_close_matches(language, groups, n=1, cutoff=0)[0]
            raise ValueError(f"no language {language!r} among {len(groups)}; did you mean {nearest!r}?")
    return {language: groups[language] for language in sorted(set(languages))}


def write(folder: Path, groups: Groups, tokenizer: Tokenizer, limit: int | None, meta: dict):
    """Stream the documents into `folder`, language by language, meta.json last."""
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    kind = PairFile if meta.get("kind") == "pairs" else SplitFile
    splits = {split: kind(folder / f"{split}.bin", dtype, tokenizer.eot) for split in SPLITS}
    needed = {"train": limit, "valid": min(limit, ENOUGH), "test": min(limit, ENOUGH)} if limit else {}
    with tqdm(desc="encoding", unit="doc", disable=None) as bar:
        for language, documents in groups.items():
            counts = {split: file.begin(language) for split, file in splits.items()}
            for batch in batches(documents):
                ids = iter(tokenizer.encode_batch([text for _, *texts in batch for text in texts]))
                for split, *texts in batch:
                    tokens = [next(ids) for _ in texts]
                    if limit is None or split != "train" or counts["train"]["tokens"] < limit:
                        splits[split].append(texts, tokens)
                bar.update(len(batch))
                bar.set_postfix(tokens=f"{sum(file.written for file in splits.values()):,}")
                if limit and all(counts[split]["tokens"] >= needed[split] for split in SPLITS):
                    break
            if language and not counts["train"][kind.unit]:
                total = sum(count[kind.unit] for count in counts.values())
                what = f"language {language!r} of {meta['source']} has no training text ({total:,} {kind.unit} in all)"
                raise ValueError(f"{what}: give more, or leave it out with --languages")
    counts = {split: file.close() for split, file in splits.items()}
    empty = [split for split in SPLITS if not counts[split][kind.unit]]
    if empty:
        total = sum(count[kind.unit] for count in counts.values())
        raise ValueError(f"split {empty[0]!r} is empty ({total:,} {kind.unit} in all): give more text, or files for it")
    tokenizer.save(folder)
    meta |= {"splits": counts, "dtype": dtype}
    if None not in groups:
        meta["languages"] = {name: {split: splits[split].languages[name] for split in SPLITS} for name in groups}
    meta["tokenizer"] = {key: getattr(tokenizer, key) for key in ("kind", "vocab_size", "eot", "sha256")}
    meta["checksum"] = checksum(meta)
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def batches(documents: Iterable[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """Documents or pairs in lists of about BATCH_CHARS characters; those with a text of white space are left out."""
    batch, chars = [], 0
    for split, *texts in documents:
        if all(text.strip() for text in texts):
            # a lone surrogate (an escape in JSON or in a docstring) has no UTF-8 form and becomes "?"
            batch.append((split, *(text.encode("utf-8", "replace").decode() for text in texts)))
            chars += sum(map(len, texts))
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


class SplitFile:
    """One .bin file being written, with what meta.json says of it."""

    unit = "documents"

    def __init__(self, path: Path, dtype: str, eot: int):
        self.file, self.dtype, self.eot, self.hash = path.open("wb"), dtype, eot, hashlib.sha256()
        self.written, self.languages = 0, {}  # tokens so far; language -> counts

    def begin(self, language: str | None) -> dict[str, int]:
        """What follows is of this language; returns its counts, which grow with every text."""
        self.counts = self.languages[language] = {"start": self.written} | dict.fromkeys(COUNTS, 0)
        return self.counts

    def append(self, texts: list[str], ids: list[list[int]]):
        for text, tokens in zip(texts, ids, strict=True):
            data = np.array([*tokens, self.eot], dtype=self.dtype).tobytes()
            self.file.write(data)
            self.hash.update(data)
            self.written += len(tokens) + 1
            sizes = (len(tokens) + 1, len(text.split()), 1, len(text.encode()), len(text))
            for key, size in zip(COUNTS, sizes):
                self.counts[key] += size

    def close(self) -> dict:
        """The counts of all languages together, and the SHA-256 of the file."""
        self.file.close()
        keys = dict.fromkeys([*COUNTS, self.unit])
        total = {key: sum(counts[key] for counts in self.languages.values()) for key in keys}
        return total | {"sha256": self.hash.hexdigest()}


class PairFile(SplitFile):
    """SplitFile for pairs; the .idx file beside it holds where every text begins, and the end, (2 pairs + 1,) int64.

    Held-out pairs are kept as text too, one JSON list a line: translations are scored against what was really written.
    """

    unit = "pairs"

    def __init__(self, path: Path, dtype: str, eot: int):
        super().__init__(path, dtype, eot)
        self.index, self.index_hash, self.pairs = path.with_suffix(".idx").open("wb"), hashlib.sha256(), 0
        self.texts = None if path.stem == "train" else path.with_suffix(".jsonl").open("wb")
        self.texts_hash = hashlib.sha256()
        self.mark(0)

    def mark(self, *places: int):
        data = np.array(places, dtype="int64").tobytes()
        self.index.write(data)
        self.index_hash.update(data)

    def begin(self, language: str | None) -> dict[str, int]:
        counts = super().begin(language)
        counts |= {"first": self.pairs, "pairs": 0}
        return counts

    def append(self, texts: list[str], ids: list[list[int]]):
        if not all(ids):  # a text of characters that the tokenizer drops
            return
        start = self.written
        super().append(texts, ids)
        self.mark(start + len(ids[0]) + 1, self.written)
        if self.texts:
            line = json.dumps(texts, ensure_ascii=False).encode() + b"\n"
            self.texts.write(line)
            self.texts_hash.update(line)
        self.counts["pairs"] += 1
        self.pairs += 1

    def close(self) -> dict:
        self.index.close()
        counts = super().close() | {"index_sha256": self.index_hash.hexdigest()}
        if self.texts:
            self.texts.close()
            counts["texts_sha256"] = self.texts_hash.hexdigest()
        return counts


def checksum(meta: dict) -> str:
    """One hash for the tokens of all splits (and where pairs of them begin) and the tokenizer that made them."""
    keys = [key for key in ("sha256", "index_sha256") if key in meta["splits"]["train"]]
    parts = [meta["splits"][split][key] for key in keys for split in SPLITS] + [meta["tokenizer"]["sha256"]]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def check_replaceable(out: Path):
    """Refuse to replace anything that this module did not write."""
    here = sorted(entry.name for entry in out.iterdir()) if out.is_dir() else []
    # without a meta.json nothing is ours: somebody's texts may be called test.jsonl
    foreign = [name for name in here if name not in OUTPUTS or "meta.json" not in here]
    if foreign or (out.exists() and not out.is_dir()):
        what = f"holds other files ({foreign[0]})" if foreign else "is a file"
        raise ValueError(f"--out {out} {what}; give a folder that is new, empty or prepared data")


def replace(out: Path, new: Path):
    """Put folder `new` in the place of `out`."""
    old = new.with_suffix(".old")
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def summary(folder: Path) -> str:
    """The counts of a prepared corpus as a small table."""
    meta = json.loads((folder / "meta.json").read_text())
    unit, groups = ("pairs", "language pairs") if meta.get("kind") == "pairs" else ("documents", "languages")
    keys = ("tokens", "words", unit, "bytes")
    rows = [f"{split:8}" + "".join(f"{meta['splits'][split][key]:>16,}" for key in keys) for split in SPLITS]
    languages = [f"{len(meta['languages'])} {groups}"] if "languages" in meta else []
    return "\n".join([f"{'':8}" + "".join(f"{key:>16}" for key in keys), *rows, *languages, f"-> {folder}"])


def main():
    parser = argparse.ArgumentParser(
        prog="python -m data.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def error(message: str):
        options = ("--source", "--tokenizer", "--spm", "--languages", "--pieces", "--max_tokens", "--out")
        close = [option for word in message.split() for option in difflib.get_close_matches(word, options, n=1)]
        sys.exit(f"error: {message}" + (f": did you mean {close[0]}?" if close else ""))

    parser.error = error
    parser.add_argument("name", metavar="NAME", help=", ".join(CORPORA))
    parser.add_argument("--source", help="local file or folder to read instead of the network")
    parser.add_argument("--tokenizer", help="tokenizer file: a GPT-2 rank file or a SentencePiece *.model")
    parser.add_argument("--spm", help=f"SentencePiece model, for {', '.join(SEVERAL)}: read with XLM-R's ids")
    parser.add_argument(
        "--languages", type=lambda names: names.split(","), help="de,en,sw: only these of many; de-en,en-fr: pairs"
    )
    parser.add_argument(
        "--pieces", type=int, help="of a joint BPE, trained on the translation pairs, in place of --spm"
    )
    parser.add_argument(
        "--max_tokens",
        type=int,
        help="no training document begins beyond this many tokens, of each language where there are many",
    )
    parser.add_argument("--out", help="folder to write (default data/prepared/NAME beside this file)")
    try:
        print(summary(prepare(**vars(parser.parse_args()))))
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
