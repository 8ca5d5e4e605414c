"""A run's tokenizer as files that AutoTokenizer reads without code of ours: tokenizer.json and its options.

Its ids are ours, with two exceptions. A special token that a text spells out is that token. And where a text is
decomposed (NFD), XLM-R's kind misses some compositions, as transformers' own XLM-R does: its reader of SentencePiece's
table of characters goes by what looks like one.
"""

import io
from collections import defaultdict
from collections.abc import Iterator

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import TikTokenConverter

from data.tokenizers import GPT2, GPT2_PATTERN, XLMR, SentencePiece, Tokenizer

UNIGRAM = 1  # a kind of SentencePiece's models; others join pairs of pieces
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = range(1, 5)  # kinds of its pieces
NEVER = -1e4  # the score of other kinds: where a text is normalised to the name of one, it is not meant


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens by the names that transformers has for them."""
    if isinstance(tokenizer, XLMR):
        return {f"{name}_token": getattr(tokenizer, name) for name in ("bos", "pad", "eos", "unk", "mask")}
    return dict.fromkeys(("bos_token", "pad_token", "eos_token"), tokenizer.eot)


def files_of(tokenizer: Tokenizer, longest: int) -> dict[str, str | dict]:
    """What each file holds. longest: how many tokens the model reads at once."""
    theirs = from_gpt2(tokenizer) if isinstance(tokenizer, GPT2) else from_sentencepiece(tokenizer)
    options = {name: theirs.id_to_token(token) for name, token in special_ids(tokenizer).items()}
    options |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "right" if isinstance(tokenizer, XLMR) else "left",  # a decoder goes on from a text's end
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": theirs.to_str(), "tokenizer_config.json": options}


def from_gpt2(tokenizer: GPT2) -> tokenizers.Tokenizer:
    converter = TikTokenConverter(pattern=GPT2_PATTERN, extra_special_tokens=["<|endoftext|>"])
    converter.load_tiktoken_bpe = lambda file: tokenizer.ranks
    return converter.converted()


def from_sentencepiece(tokenizer: SentencePiece) -> tokenizers.Tokenizer:
    parts = defaultdict(list)  # pieces, and what they were trained by
    for number, value in fields(tokenizer.file):
        parts[number].append(dict(fields(value)))
    kinds = [piece.get(3, NORMAL) for piece in parts[1]]
    names = [piece[1].decode() for piece in parts[1]]
    scores = [tokenizer.processor.get_score(i) for i in range(len(names))]
    if isinstance(tokenizer, XLMR):
        names = ["<s>", "<pad>", "</s>", "<unk>", *names[3:], "<mask>"]
        kinds = [CONTROL] * 3 + [UNKNOWN] + kinds[3:] + [CONTROL]
        scores = [0.0] * 4 + scores[3:] + [0.0]
    unknown = kinds.index(UNKNOWN)
    [training], [rules] = parts[2], parts[3]
    if training.get(3, UNIGRAM) == UNIGRAM:
        found = [score if kind in (NORMAL, USER_DEFINED) else NEVER for score, kind in zip(scores, kinds)]
        model = models.Unigram([*zip(names, found)], unk_id=unknown, byte_fallback=True)
    else:
        normal = {name: score for name, score, kind in zip(names, scores, kinds) if kind == NORMAL}
        ids = {name: i for i, name in enumerate(names)}
        model = models.BPE(ids, [*pairs(normal)], unk_token=names[unknown], fuse_unk=True, byte_fallback=True)
    theirs = tokenizers.Tokenizer(model)
    begins, single = rules.get(3, True), rules.get(4, True)  # a space is put in front; there is one at a time
    theirs.normalizer = normalizer(rules.get(2), begins, single)
    scheme = "always" if begins else "never"
    theirs.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    theirs.decoder = decoders.Sequence(steps + [decoders.Strip(" ", left=1)] * begins)
    for name, kind in zip(names, kinds):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            special = kind != USER_DEFINED
            theirs.add_tokens([AddedToken(name, lstrip=name == "<mask>", normalized=False, special=special)])
    if isinstance(tokenizer, XLMR):
        theirs.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> </s> $B </s>",
            special_tokens=[("<s>", tokenizer.bos), ("</s>", tokenizer.eos)],
        )
    return theirs


def pairs(scores: dict[str, float]) -> Iterator[tuple[str, str]]:
    """Any two pieces that make a third, those first that make the one of the highest score."""
    for name in sorted(scores, key=scores.get, reverse=True):
        for k in range(1, len(name)):
            if name[:k] in scores and name[k:] in scores:
                yield name[:k], name[k:]


def normalizer(table: bytes | None, begins: bool, single: bool) -> normalizers.Sequence:
    steps = [normalizers.Precompiled(table)] if table else []
    if single:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" +"), " ")]
    elif begins:  # also before a space, where a pre-tokenizer puts none
        steps.append(normalizers.Prepend("▁"))
    return normalizers.Sequence(steps)


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values in a message of Protocol Buffers. SentencePiece's file is one, whose values are messages."""
    file = io.BytesIO(message)
    while key := number(file):
        kind = key & 7
        value = 4 if kind == 5 else number(file)  # of bytes and floats the length
        yield key >> 3, value if kind == 0 else file.read(value)


def number(file: io.BytesIO) -> int:
    """Seven bits a byte, the lowest first; the eighth says whether more follow. 0 at the end."""
    [byte] = file.read(1) or [0]
    return byte if byte < 128 else byte - 128 + (number(file) << 7)
