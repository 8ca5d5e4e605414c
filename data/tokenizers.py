"""Tokenizers with one interface, each created from the bytes of its file.

    SentencePiece    a lossless BPE, learned from text by `train_sentencepiece`
    XLMR             a SentencePiece model with XLM-R's ids and special tokens
    GPT2             GPT-2's byte-level BPE of 50,257 tokens, downloaded once by `gpt2`

decode(encode_batch([text])[0]) == text, except for XLM-R and the character U+2581. No special tokens are added.
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

from data.files import progress

GPT2_FILE = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"  # token ranks
GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
PART = 250_000  # characters encoded at once, at most a million bytes
Ids = list[list[int]]  # the token ids of each text
THREADS = os.cpu_count() or 1
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class Tokenizer:
    """Base class. Attributes: `vocab_size`, `eot` (the end-of-text token). `decode` turns invalid UTF-8 into U+FFFD."""

    unknown = -1  # the id of <unk>; -1: there is none

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
        """The ids of each text. A long text is encoded in parts, which saves memory; some tokenizers fail on it."""
        encoded = iter(self.encode_short([text for text in texts if len(text) <= PART]))
        for text in texts:
            long = (self.encode_short([part])[0] for part in parts(text))
            ids_of_parts = long if len(text) > PART else [next(encoded)]
            yield np.concatenate([np.array(ids, self.dtype) for ids in ids_of_parts])


def parts(text: str) -> Iterator[str]:
    """Cuts a text into parts of at most PART characters, before white space if possible: no token crosses it."""
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
    """A SentencePiece model. It represents a space as U+2581, so U+2581 in a text is decoded to a space."""

    kind, filename = "sentencepiece", "tokenizer.model"
    added = 0  # number of tokens that are not pieces of the model
    # lossless: no normalisation, every space and newline is kept
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
        self.unknown = self.processor.unk_id()

    def encode_short(self, texts: list[str]) -> Ids:
        return self.processor.encode(texts, num_threads=THREADS)

    def decode(self, ids: list[int]) -> str:
        return self.processor.decode(ids)


class XLMR(SentencePiece):
    """fairseq's ids: piece i >= 3 is token i + 1, <mask> is last. Normalises text: NFKC, single spaces."""

    kind, filename = "xlmr", "xlmr.model"
    added = 2
    bos, pad, eos, unk = range(4)  # <s>, <pad>, </s>, <unk>
    training = dict(model_type="unigram", normalization_rule_name="nmt_nfkc")
    training |= dict(character_coverage=0.9995, bos_id=1, eos_id=2)

    def __init__(self, file: bytes):
        super().__init__(file)
        model = self.processor
        if (model.unk_id(), model.bos_id(), model.eos_id()) != (0, 1, 2):
            raise ValueError("XLM-R's ids require a SentencePiece model with <unk> 0, <s> 1 and </s> 2")
        self.vocab_size += self.added
        self.unknown = self.unk
        self.mask = self.vocab_size - 1
        self.special = (self.bos, self.pad, self.eos, self.unk, self.mask)
        self.unwritten = (self.bos, self.pad, self.unk, self.mask)  # never generated: all but </s>

    def encode_short(self, texts: list[str]) -> Ids:
        return [self.tokens(pieces) for pieces in super().encode_short(texts)]

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The token ids of a text and their (begin, end) in it, where a token includes the space before it."""
        encoded = self.processor.encode(text, return_type="offset_mapping")
        return self.tokens(encoded["ids"]), encoded["offsets"]

    def tokens(self, pieces: list[int]) -> list[int]:
        return [piece + 1 if piece else self.unk for piece in pieces]

    def decode(self, ids: list[int]) -> str:
        return super().decode([token - 1 for token in ids if token not in self.special])


class GPT2(Tokenizer):
    """GPT-2's tokenizer (tiktoken's `r50k_base`). Each line of its file has a token in base64 and its rank."""

    kind, filename = "gpt2", "tokenizer.tiktoken"
    vocab_size, eot = 50_257, 50_256

    def __init__(self, file: bytes):
        import tiktoken

        super().__init__(file)
        if self.sha256 != GPT2_SHA256:
            raise ValueError("this is neither a SentencePiece *.model nor GPT-2's rank file r50k_base.tiktoken")
        self.ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, file.splitlines())}
        self.encoding = tiktoken.Encoding(
            "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=self.ranks, special_tokens={"<|endoftext|>": self.eot}
        )

    def encode_short(self, texts: list[str]) -> Ids:
        return self.encoding.encode_ordinary_batch(texts, num_threads=THREADS)

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids, errors="replace")


KINDS = {cls.kind: cls for cls in (SentencePiece, XLMR, GPT2)}


def train_sentencepiece(texts: Iterable[str], vocab_size=8192, kind=SentencePiece, **options) -> SentencePiece:
    """Learns vocab_size tokens, deterministically. Raises ValueError if there is too little text.

    vocab_size: None fits it to the text: bytes, characters, and the square root of the text's length in merges.
    """
    lines = []
    for text in progress(texts, "reading"):
        text = text.encode("utf-8", "replace").decode()  # lone surrogates become "?", as in data.prepare
        # SentencePiece skips lines longer than a mebibyte
        lines += chain.from_iterable(map(parts, text.split("\n")))
    if vocab_size is None:
        vocab_size = 260 + len(set().union(*lines)) + isqrt(sum(map(len, lines))) + kind.added
        options["hard_vocab_limit"] = False  # repetitive text has fewer merges
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
            num_threads=2,  # fixed because it is stored in the model file
            minloglevel=2,
            **dict(byte_fallback=True) | kind.training | options,  # unknown characters become bytes
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2].strip() or "too little text or too few pieces"
        raise ValueError(f"cannot learn {pieces:,} pieces from this text: {reason}") from error
    return kind(file.getvalue())


def gpt2() -> GPT2:
    """GPT-2's tokenizer from tiktoken's cache or the network. Raises OSError if neither has it."""
    from tiktoken.load import read_file_cached

    try:
        return GPT2(read_file_cached(GPT2_FILE, GPT2_SHA256))
    except (OSError, ValueError) as error:
        problem = f"cannot download the GPT-2 vocabulary ({type(error).__name__})"
        hint = "set TIKTOKEN_CACHE_DIR to a filled cache, or pass r50k_base.tiktoken with --tokenizer PATH"
        raise OSError(f"{problem}: {hint}") from error


def load_tokenizer(path: Path | str, kind: str | None = None) -> Tokenizer:
    """The tokenizer in a folder or file; kind "xlmr" selects XLM-R's ids. Raises FileNotFoundError or ValueError."""
    path = Path(path)
    path = path.joinpath(*[cls.filename for cls in KINDS.values() if (path / cls.filename).is_file()])
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer at {path}")
    cls = SentencePiece if path.suffix == ".model" else GPT2
    if kind == XLMR.kind or path.name == XLMR.filename:
        cls = XLMR
    try:
        return cls(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
