"""Tokenizers behind one interface: two lossless ones, SentencePiece BPE and GPT-2's byte-level BPE, and XLM-R's.

    train_sentencepiece(texts)   a vocabulary of 8,192 tokens, learned from documents in memory
    gpt2()                       OpenAI's 50,257 tokens through tiktoken (downloaded once, then cached)
    load_tokenizer(path)         any of them, from its file or from a folder that holds its file

All offer encode_batch, decode, vocab_size, eot, kind, sha256 and save. encode_batch adds no special token, and, but for
XLM-R's, decode(encode_batch([text])[0]) == text for every text that is valid Unicode, U+2581 apart.
"""

import base64
import hashlib
import io
import os
from collections.abc import Iterable
from pathlib import Path

import sentencepiece
import tiktoken

THREADS = os.cpu_count() or 1
GPT2_RANKS = 50_256
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class Tokenizer:
    """What the tokenizers share: each is made from the bytes of its file. ValueError where these are no such file."""

    kind, filename = "", ""

    def __init__(self, file: bytes):
        self.file = file
        self.sha256 = hashlib.sha256(file).hexdigest()

    def save(self, folder: Path) -> Path:
        """Write the file into `folder` and return its path."""
        path = Path(folder) / self.filename
        path.write_bytes(self.file)
        return path


class SentencePiece(Tokenizer):
    """A SentencePiece model. It writes a space as U+2581, so one of these in a text comes back as a space."""

    kind, filename = "sentencepiece", "tokenizer.model"
    added = 0  # tokens that are not pieces of the model
    # lossless: no normalisation, every space and newline kept
    training = {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "allow_whitespace_only_pieces": True,
        "user_defined_symbols": ["\n"],
        "eos_id": 1,
        "bos_id": -1,
    }

    def __init__(self, file: bytes):
        super().__init__(file)
        self.processor = sentencepiece.SentencePieceProcessor()
        try:
            self.processor.LoadFromSerializedProto(file)
        except RuntimeError as error:
            raise ValueError("this is not a SentencePiece model") from error
        self.vocab_size, self.eot = self.processor.vocab_size(), self.processor.eos_id()

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text, without special tokens."""
        return self.processor.encode(texts, num_threads=THREADS)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids; an incomplete UTF-8 sequence becomes U+FFFD."""
        return self.processor.decode(ids)


class XLMR(SentencePiece):
    """A SentencePiece model under fairseq's ids, as XLM-R has them: piece i >= 3 is token i + 1, `<mask>` the last.

    Not lossless: NFKC, and white space becomes single spaces. `special` are the ids that no text is made of.
    """

    kind, filename, added = "xlmr", "xlmr.model", 2
    bos, pad, eos, unk = range(4)  # <s>, <pad>, </s>, <unk>
    training = {
        "model_type": "unigram",
        "normalization_rule_name": "nmt_nfkc",
        "character_coverage": 0.9995,
        "bos_id": 1,
        "eos_id": 2,
    }

    def __init__(self, file: bytes):
        super().__init__(file)
        if (self.processor.unk_id(), self.processor.bos_id(), self.processor.eos_id()) != (0, 1, 2):
            raise ValueError("XLM-R's ids need a SentencePiece model with <unk> 0, <s> 1 and </s> 2")
        self.vocab_size += self.added
        self.eot, self.mask = self.eos, self.vocab_size - 1
        self.special = (self.bos, self.pad, self.eos, self.unk, self.mask)
        self.unwritten = (self.bos, self.pad, self.unk, self.mask)  # what nobody writes: only an end

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text, without special tokens but `<unk>`."""
        batch = self.processor.encode(texts, num_threads=THREADS)
        return [self._ids(pieces) for pieces in batch]

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The token ids of a text, and of each where it begins and ends in it, the space before it included."""
        found = self.processor.encode(text, return_type="offset_mapping")
        return self._ids(found["ids"]), found["offsets"]

    def _ids(self, pieces: list[int]) -> list[int]:
        return [piece + 1 if piece else self.unk for piece in pieces]

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, special ones left out; an incomplete UTF-8 sequence becomes U+FFFD."""
        return self.processor.decode([token - 1 for token in ids if token not in self.special])


class GPT2(Tokenizer):
    """GPT-2's tokenizer (tiktoken's `r50k_base`), from lines of base64 token and rank."""

    kind, filename = "gpt2", "tokenizer.tiktoken"
    vocab_size, eot = GPT2_RANKS + 1, GPT2_RANKS

    def __init__(self, file: bytes):
        super().__init__(file)
        try:
            pairs = (line.split() for line in file.splitlines() if line)
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        except ValueError as error:
            raise ValueError("this is not a rank file (lines of base64 token and rank)") from error
        if sorted(ranks.values()) != list(range(GPT2_RANKS)):
            raise ValueError(f"holds {len(ranks):,} ranks; GPT-2's file has {GPT2_RANKS:,}, from 0 on")
        special = {"<|endoftext|>": self.eot}
        self.encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text, without special tokens."""
        return self.encoding.encode_ordinary_batch(texts, num_threads=THREADS)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids; an incomplete UTF-8 sequence becomes U+FFFD."""
        return self.encoding.decode(ids, errors="replace")


def train_sentencepiece(
    texts: Iterable[str], vocab_size: int = 8192, kind: type[SentencePiece] = SentencePiece, **options
) -> SentencePiece:
    """Learn a vocabulary of `vocab_size` tokens for that kind of tokenizer; the same texts always give the same file.

    `options` are SentencePiece's, in place of the kind's. Raises ValueError when the texts are too few for that many.
    """
    lines = []
    for text in texts:
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate, see data.prepare
        lines += filter(None, text.split("\n"))
    file = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=file,
            vocab_size=vocab_size - kind.added,
            byte_fallback=True,  # unknown characters are spelt in bytes
            unk_id=0,
            pad_id=-1,
            max_sentence_length=1 << 20,
            num_threads=2,  # written into the model, so a count of cores here would change its hash
            minloglevel=2,
            **kind.training | options,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2]
        raise ValueError(f"no vocabulary of {vocab_size - kind.added:,} pieces from this text: {reason}") from error
    return kind(file.getvalue())


def gpt2() -> GPT2:
    """GPT-2's tokenizer from tiktoken's cache, or from the network; OSError says what to do when neither has it."""
    try:
        ranks = tiktoken.get_encoding("r50k_base")._mergeable_ranks
    except (OSError, ValueError) as error:
        what = f"the GPT-2 vocabulary cannot be downloaded ({type(error).__name__})"
        hint = "set TIKTOKEN_CACHE_DIR to a filled cache, or pass r50k_base.tiktoken with --tokenizer PATH"
        raise OSError(f"{what}: {hint}") from error
    tokens = sorted(ranks, key=ranks.get)
    return GPT2(b"".join(b"%s %d\n" % (base64.b64encode(token), ranks[token]) for token in tokens))


def load_tokenizer(path: Path | str, kind: str | None = None) -> Tokenizer:
    """The tokenizer of a file (*.model is SentencePiece, anything else a rank file) or of a folder that holds one.

    A SentencePiece file does not say whose ids it stands for: the name xlmr.model or kind "xlmr" makes them XLM-R's.
    Raises FileNotFoundError when there is none and ValueError when the file is not a tokenizer.
    """
    path = Path(path)
    for each in (SentencePiece, XLMR, GPT2):
        if (path / each.filename).is_file():
            path = path / each.filename
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer at {path}")
    if kind == XLMR.kind or path.name == XLMR.filename:
        chosen = XLMR
    else:
        chosen = SentencePiece if path.suffix == ".model" else GPT2
    try:
        return chosen(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
