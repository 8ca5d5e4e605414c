"""Tokenizers behind one interface, each made from the bytes of its file.

    SentencePiece    a lossless BPE, which `train_sentencepiece` learns from a text
    XLMR             a SentencePiece model with the ids and the special tokens of XLM-R
    GPT2             GPT-2's byte-level BPE of 50,257 tokens, which `gpt2` downloads once

But for XLM-R's, and but for U+2581, decode(encode_batch([text])[0]) == text. No special tokens are added.
"""

import base64
import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from math import isqrt
from pathlib import Path

import numpy as np
import sentencepiece

GPT2_FILE = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"  # the ranks of its tokens
GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
PART = 250_000  # characters that are encoded at once, in at most a million bytes
Ids = list[list[int]]  # of the tokens of each text
THREADS = os.cpu_count() or 1
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class Tokenizer:
    """What all have: `vocab_size`, `eot` (the token that ends a text), encode_batch and decode (U+FFFD: no UTF-8)."""

    def __init__(self, file: bytes):
        self.file = file
        self.sha256 = hashlib.sha256(file).hexdigest()

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"

    def save(self, folder: Path) -> Path:
        path = Path(folder) / self.filename
        path.write_bytes(self.file)
        return path

    def encode_batch(self, texts: list[str]) -> Ids:
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode_arrays(self, texts: list[str]) -> Iterator[np.ndarray]:
        """The ids of each text. A long one is encoded in parts: some tokenizers fail on it, and its ids take memory."""
        short = [text for text in texts if len(text) <= PART]
        encoded = iter(self.encode_short(short))
        for text in texts:
            long = (self.encode_short([part])[0] for part in parts(text))
            found = long if len(text) > PART else [next(encoded)]
            yield np.concatenate([np.array(ids, self.dtype) for ids in found])


def parts(text: str) -> Iterator[str]:
    """A text in parts of PART characters at most, cut before white space, which no token spans, or in a longer run."""
    begin = 0
    while begin < len(text):
        end = begin + PART
        while begin < end < len(text) and (text[end] not in " \n" or text[end - 1].isspace()):
            end -= 1
        if end == begin:
            end += PART
        yield text[begin:end]
        begin = end


class SentencePiece(Tokenizer):
    """A SentencePiece model. It writes a space as U+2581, so one of these in a text comes back as a space."""

    kind, filename = "sentencepiece", "tokenizer.model"
    added = 0  # tokens that are not pieces of the model
    # lossless: the text is not normalised, and every space and newline is kept
    training = dict(model_type="bpe", normalization_rule_name="identity")
    training |= dict(remove_extra_whitespaces=False, add_dummy_prefix=False, allow_whitespace_only_pieces=True)
    training |= dict(user_defined_symbols=["\n"], eos_id=1, bos_id=-1)

    def __init__(self, file: bytes):
        super().__init__(file)
        self.processor = sentencepiece.SentencePieceProcessor()
        try:
            self.processor.LoadFromSerializedProto(file)
        except RuntimeError as error:
            raise ValueError("this is not a SentencePiece model") from error
        self.vocab_size = self.processor.vocab_size()
        self.eot = self.processor.eos_id()

    def encode_short(self, texts: list[str]) -> Ids:
        return self.processor.encode(texts, num_threads=THREADS)

    def decode(self, ids: list[int]) -> str:
        return self.processor.decode(ids)


class XLMR(SentencePiece):
    """fairseq's ids: piece i >= 3 is token i + 1, <mask> the last. Text is normalised: NFKC, and single spaces."""

    kind, filename = "xlmr", "xlmr.model"
    added = 2
    bos, pad, eos, unk = range(4)  # <s>, <pad>, </s>, <unk>
    training = dict(model_type="unigram", normalization_rule_name="nmt_nfkc")
    training |= dict(character_coverage=0.9995, bos_id=1, eos_id=2)

    def __init__(self, file: bytes):
        super().__init__(file)
        model = self.processor
        if (model.unk_id(), model.bos_id(), model.eos_id()) != (0, 1, 2):
            raise ValueError("XLM-R's ids need a SentencePiece model with <unk> 0, <s> 1 and </s> 2")
        self.vocab_size += self.added
        self.mask = self.vocab_size - 1
        self.special = (self.bos, self.pad, self.eos, self.unk, self.mask)
        self.unwritten = (self.bos, self.pad, self.unk, self.mask)  # what a model must never write: all but the end

    def encode_short(self, texts: list[str]) -> Ids:
        return [self.tokens(pieces) for pieces in super().encode_short(texts)]

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The token ids of a text, and where each begins and ends in it, with the space before it."""
        found = self.processor.encode(text, return_type="offset_mapping")
        return self.tokens(found["ids"]), found["offsets"]

    def tokens(self, pieces: list[int]) -> list[int]:
        return [piece + 1 if piece else self.unk for piece in pieces]

    def decode(self, ids: list[int]) -> str:
        pieces = [token - 1 for token in ids if token not in self.special]
        return super().decode(pieces)


class GPT2(Tokenizer):
    """GPT-2's tokenizer (tiktoken's `r50k_base`) from a file with a token in base64 and its rank in every line."""

    kind, filename = "gpt2", "tokenizer.tiktoken"
    vocab_size, eot = 50_257, 50_256

    def __init__(self, file: bytes):
        import tiktoken

        super().__init__(file)
        if self.sha256 != GPT2_SHA256:
            raise ValueError("this is neither a SentencePiece *.model nor GPT-2's rank file, r50k_base.tiktoken")
        self.ranks = {}
        for line in file.splitlines():
            token, rank = line.split()
            self.ranks[base64.b64decode(token)] = int(rank)
        self.encoding = tiktoken.Encoding(
            "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=self.ranks, special_tokens={"<|endoftext|>": self.eot}
        )

    def encode_short(self, texts: list[str]) -> Ids:
        return self.encoding.encode_ordinary_batch(texts, num_threads=THREADS)

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids, errors="replace")


KINDS = {each.kind: each for each in (SentencePiece, XLMR, GPT2)}


def train_sentencepiece(texts: Iterable[str], vocab_size=8192, kind=SentencePiece, **options) -> SentencePiece:
    """Learns vocab_size tokens. The same texts always give the same file; too few texts are a ValueError.

    vocab_size: None is what fits the texts: bytes, their characters, and as many merges as the root of their length.
    """
    lines = []
    for text in texts:
        text = text.encode("utf-8", "replace").decode()  # lone surrogates become "?", as in data.prepare
        # SentencePiece leaves out a line of more than a mebibyte.
        lines += chain.from_iterable(map(parts, text.split("\n")))
    if vocab_size is None:
        merges = isqrt(sum(map(len, lines)))
        vocab_size = 260 + len(set().union(*lines)) + merges + kind.added
        options["hard_vocab_limit"] = False  # a monotonous text has fewer merges
    file = io.BytesIO()
    pieces = vocab_size - kind.added
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=file,
            vocab_size=pieces,
            unk_id=0,
            pad_id=-1,
            max_sentence_length=1 << 20,
            num_threads=2,  # it is written into the model: a number of cores would change the file
            minloglevel=2,
            **dict(byte_fallback=True) | kind.training | options,  # unknown characters are spelt in bytes
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2].strip() or "too little of it, or too few pieces"
        raise ValueError(f"no vocabulary of {pieces:,} pieces from this text: {reason}") from error
    return kind(file.getvalue())


def gpt2() -> GPT2:
    """GPT-2's tokenizer from tiktoken's cache or from the network. OSError says what to do where neither has it."""
    from tiktoken.load import read_file_cached

    try:
        return GPT2(read_file_cached(GPT2_FILE, GPT2_SHA256))
    except (OSError, ValueError) as error:
        what = f"the GPT-2 vocabulary cannot be downloaded ({type(error).__name__})"
        hint = "set TIKTOKEN_CACHE_DIR to a filled cache, or pass r50k_base.tiktoken with --tokenizer PATH"
        raise OSError(f"{what}: {hint}") from error


def load_tokenizer(path: Path | str, kind: str | None = None) -> Tokenizer:
    """The tokenizer in a file (*.model is SentencePiece, anything else a rank file) or in a folder.

    The name xlmr.model or kind "xlmr" make its ids XLM-R's. Raises FileNotFoundError or ValueError.
    """
    path = Path(path)
    there = [each.filename for each in KINDS.values() if (path / each.filename).is_file()]
    path = path.joinpath(*there)
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer at {path}")
    chosen = SentencePiece if path.suffix == ".model" else GPT2
    if kind == XLMR.kind or path.name == XLMR.filename:
        chosen = XLMR
    try:
        return chosen(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
