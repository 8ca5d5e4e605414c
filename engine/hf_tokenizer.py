"""Exports a run's tokenizer as tokenizer.json and tokenizer_config.json, which AutoTokenizer reads without our code.

Token ids are the same, with two exceptions. A special token that is spelled out in a text becomes that token. And in
decomposed (NFD) text, XLM-R's tokenizer misses some compositions, as transformers' own XLM-R does: it looks up
SentencePiece's character map by grapheme.
"""

import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import TikTokenConverter, generate_merges

from data.tokenizers import GPT2, GPT2_PATTERN, XLMR, SentencePiece, Tokenizer

UNIGRAM = 1  # SentencePiece's model type; the other is BPE
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = range(1, 5)  # SentencePiece's types of pieces
NEVER = -1e4  # score of all but normal pieces, so that text that spells such a piece never matches it
XLMR_SPECIAL = [("<s>", CONTROL, NEVER), ("<pad>", CONTROL, NEVER), ("</s>", CONTROL, NEVER), ("<unk>", UNKNOWN, NEVER)]


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of special tokens, by transformers' names."""
    if isinstance(tokenizer, XLMR):
        return {f"{name}_token": getattr(tokenizer, name) for name in ("bos", "pad", "eos", "unk", "mask")}
    return dict.fromkeys(("bos_token", "pad_token", "eos_token"), tokenizer.eot)


def files_of(tokenizer: Tokenizer, max_length: int) -> dict:
    """{name: content} of each file, a text or a dict. max_length: the model's context length, in tokens."""
    if isinstance(tokenizer, GPT2):
        converter = TikTokenConverter(pattern=GPT2_PATTERN, extra_special_tokens=["<|endoftext|>"])
        converter.load_tiktoken_bpe = lambda file: tokenizer.ranks
        exported = converter.converted()
    else:
        exported = from_sentencepiece(tokenizer)
    options = {name: exported.id_to_token(token) for name, token in special_ids(tokenizer).items()}
    options |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "right" if isinstance(tokenizer, XLMR) else "left",  # left, to generate after the text
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": exported.to_str(), "tokenizer_config.json": options}


def from_sentencepiece(tokenizer: SentencePiece) -> tokenizers.Tokenizer:
    proto = ModelProto.FromString(tokenizer.file)
    # text, type, score
    pieces = [(one.piece, one.type, one.score if one.type == NORMAL else NEVER) for one in proto.pieces]
    if isinstance(tokenizer, XLMR):
        pieces = [*XLMR_SPECIAL, *pieces[3:], ("<mask>", CONTROL, NEVER)]
    exported = tokenizers.Tokenizer(model_of(pieces, proto.trainer_spec.model_type))
    add_normalizer(exported, proto.normalizer_spec)
    for text, kind, _ in pieces:
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            options = {"lstrip": text == "<mask>", "normalized": False, "special": kind != USER_DEFINED}
            exported.add_tokens([AddedToken(text, **options)])
    if isinstance(tokenizer, XLMR):
        exported.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> </s> $B </s>",
            special_tokens=[("<s>", tokenizer.bos), ("</s>", tokenizer.eos)],
        )
    return exported


def model_of(pieces: list[tuple], model_type: int) -> models.Model:
    texts, kinds, _ = zip(*pieces)
    unknown = kinds.index(UNKNOWN)
    if model_type == UNIGRAM:
        scores = [(text, score) for text, _, score in pieces]
        return models.Unigram(scores, unk_id=unknown, byte_fallback=True)
    scores = {text: score for text, kind, score in pieces if kind == NORMAL}
    merges = generate_merges(scores, scores)  # pairs whose concatenation is a piece, in descending order of its score
    ids = {text: i for i, text in enumerate(texts)}
    return models.BPE(ids, merges, unk_token=texts[unknown], fuse_unk=True, byte_fallback=True)


def add_normalizer(exported: tokenizers.Tokenizer, spec):
    """Adds the normalizer of a SentencePiece model, and the pre-tokenizer and decoder to match."""
    steps = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" +"), " "))
    elif spec.add_dummy_prefix:  # also before a space, where Metaspace adds none
        steps.append(normalizers.Prepend("▁"))
    exported.normalizer = normalizers.Sequence(steps)
    scheme = "always" if spec.add_dummy_prefix else "never"
    exported.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    exported.decoder = decoders.Sequence(steps + [decoders.Strip(" ", left=1)] * spec.add_dummy_prefix)
