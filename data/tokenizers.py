"""Tokenizers behind one interface: two lossless ones, SentencePiece BPE and GPT-2's byte-level BPE, and XLM-R's.

    train_sentencepiece(texts)   a vocabulary of 8,192 tokens, learned from documents in memory
    gpt2()                       OpenAI's 50,257 tokens through tiktoken (downloaded once, then cached)
    load_tokenizer(path)         any of them, from its file or from a folder that holds its file

All offer encode_batch, decode, vocab_size, eot, kind, sha256 and save. encode_batch adds no special token, and, but for
XLM-R's, decode(encode_batch([text])[0]) == text for every text that is valid Unicode.
"""

import base64
import binascii
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


class SentencePiece:
    """A SentencePiece model, given as the bytes of its file."""

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

    def __init__(self, model: bytes):
        self.model = model
        self.processor = sentencepiece.SentencePieceProcessor()
        self.processor.LoadFromSerializedProto(model)
        self.vocab_size, self.eot = self.processor.vocab_size(), self.processor.eos_id()
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.space_mark = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in "▁".encode()]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text, without special tokens."""
        batch = self.processor.encode(texts, num_threads=THREADS)
        # SentencePiece writes a space as U+2581, so one in the text would come back as a space: spell it in bytes.
        return [self._encode_marked(text) if "▁" in text else ids for text, ids in zip(texts, batch, strict=True)]

    def _encode_marked(self, text: str) -> list[int]:
        ids, *rest = self.processor.encode(text.split("▁"))
        for part in rest:
            ids += self.space_mark + part
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of the ids; an incomplete UTF-8 sequence becomes U+FFFD."""
        return self.processor.decode(ids)

    def save(self, folder: Path) -> Path:
        """Write the tokenizer's file into `folder` and return its path."""
        path = Path(folder) / self.filename
        path.write_bytes(self.model)
        return path


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

    def __init__(self, model: bytes):
        super().__init__(model)
        if (self.processor.unk_id(), self.processor.bos_id(), self.processor.eos_id()) != (0, 1, 2):
            raise ValueError("XLM-R's ids need a SentencePiece model with <unk> 0, <s> 1 and </s> 2")
        self.vocab_size += self.added
        self.eot, self.mask = self.eos, self.vocab_size - 1
        self.special = (self.bos, self.pad, self.eos, self.unk, self.mask)
        self.unwritten = (self.bos, self.pad, self.unk, self.mask)  # what nobody writes: only an end

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text, without special tokens but `<unk>`."""
        batch = self.processor.encode(texts, num_threads=THREADS)
        return [[piece + 1 if piece else self.unk for piece in pieces] for pieces in batch]

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, special ones left out; an incomplete UTF-8 sequence becomes U+FFFD."""
        return self.processor.decode([token - 1 for token in ids if token not in self.special])


class GPT2:
    """GPT-2's tokenizer (tiktoken's `r50k_base`), given as its ranks {bytes of a token: id}."""

    kind, filename = "gpt2", "tokenizer.tiktoken"
    vocab_size, eot = GPT2_RANKS + 1, GPT2_RANKS

    def __init__(self, ranks: dict[bytes, int]):
        self.file = b""
        for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
            self.file += base64.b64encode(token) + b" %d\n" % rank
        self.sha256 = hashlib.sha256(self.file).hexdigest()
        special = {"<|endoftext|>": self.eot}
        self.encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text, without special tokens."""
        return self.encoding.encode_ordinary_batch(texts, num_threads=THREADS)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids; an incomplete UTF-8 sequence becomes U+FFFD."""
        return self.encoding.decode(ids, errors="replace")

    def save(self, folder: Path) -> Path:
        """Write the tokenizer's rank file into `folder` and return its path."""
        path = Path(folder) / self.filename
        path.write_bytes(self.file)
        return path


Tokenizer = SentencePiece | XLMR | GPT2


def train_sentencepiece(
    texts: Iterable[str], vocab_size: int = 8192, kind: type[SentencePiece] = SentencePiece, **options
) -> SentencePiece:
    """Learn a vocabulary of `vocab_size` tokens for that kind of tokenizer; the same texts always give the same file.

    `options` are SentencePiece's, in place of the kind's. Raises ValueError when the texts are too few for that many.
    """
    unread = []

    def lines():
        try:
            for text in texts:
                yield from filter(None, text.split("\n"))
        except BaseException as error:  # of the texts, or Ctrl-C: SentencePiece would report it as its own
            unread.append(error)
            raise

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=model,
            vocab_size=vocab_size - kind.added,
            byte_fallback=True,  # unknown characters are spelt in bytes
            unk_id=0,
            pad_id=-1,
            max_sentence_length=1 << 20,
            num_threads=2,  # written into the model, so a count of cores here would change its hash
            minloglevel=2,
            **kind.training | options,
        )
    except (RuntimeError, OSError) as error:
        if unread:
            raise unread[0] from None
        pieces = f"{vocab_size - kind.added:,} pieces"
        if "required_chars" in str(error):
            raise ValueError(f"{pieces} are fewer than the characters of the training text: give more") from error
        raise ValueError(f"the training text is too small for a vocabulary of {pieces}") from error
    return kind(model.getvalue())


def gpt2() -> GPT2:
    """GPT-2's tokenizer from tiktoken's cache, or from the network; OSError says what to do when neither has it."""
    try:
        return GPT2(tiktoken.get_encoding("r50k_base")._mergeable_ranks)
    except (OSError, ValueError) as error:
        what = f"the GPT-2 vocabulary cannot be downloaded ({type(error).__name__})"
        hint = "set TIKTOKEN_CACHE_DIR to a filled cache, or pass r50k_base.tiktoken with --tokenizer PATH"
        raise OSError(f"{what}: {hint}") from error


def load_tokenizer(path: Path | str, kind: str | None = None) -> Tokenizer:
    """The tokenizer of a file (*.model is SentencePiece, anything else a rank file) or of a folder that holds one.

    A SentencePiece file does not say whose ids it stands for: the name xlmr.model or kind "xlmr" makes them XLM-R's.
    Raises FileNotFoundError when there is none and ValueError when the file is not a tokenizer.
    """
    path = Path(path)
    if path.is_dir():
        for each in (SentencePiece, XLMR, GPT2):
            if (path / each.filename).is_file():
                return load_tokenizer(path / each.filename)
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer at {path}")
    if kind == XLMR.kind or path.name == XLMR.filename:
        return _read_sentencepiece(path, XLMR)
    if path.suffix == ".model":
        return _read_sentencepiece(path, SentencePiece)
    return _read_ranks(path)


def _read_sentencepiece(path: Path, kind: type[SentencePiece]) -> SentencePiece:
    try:
        return kind(path.read_bytes())
    except RuntimeError as error:
        raise ValueError(f"{path} is not a SentencePiece model") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_ranks(path: Path) -> GPT2:
    try:
        pairs = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"{path} is not a rank file (lines of base64 token and rank)") from error
    if sorted(ranks.values()) != list(range(GPT2_RANKS)):
        raise ValueError(f"{path} holds {len(ranks):,} ranks; GPT-2's file has {GPT2_RANKS:,}, from 0 on")
    return GPT2(ranks)
