"""A run's tokenizer as files that AutoTokenizer reads without code of ours: tokenizer.json and its options.

Its ids are ours, with two exceptions. A special token that a text spells out is that token. And where a text is
decomposed (NFD), XLM-R's kind misses some compositions, as transformers' own XLM-R does: its reader of SentencePiece's
table of characters goes by what looks like one.
"""

import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import TikTokenConverter

from data.tokenizers import GPT2, GPT2_PATTERN, XLMR, SentencePiece, Tokenizer

UNIGRAM = 1  # a kind of SentencePiece's models; others join pairs of pieces
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = range(1, 5)  # kinds of its pieces
NEVER = -1e4  # the score of other kinds: where a text is normalised to the name of one, it is not meant
XLMR_BEGINS = [("<s>", CONTROL, NEVER), ("<pad>", CONTROL, NEVER), ("</s>", CONTROL, NEVER), ("<unk>", UNKNOWN, NEVER)]


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens by the names that transformers has for them."""
    if isinstance(tokenizer, XLMR):
        names = "bos", "pad", "eos", "unk", "mask"
        return {f"{name}_token": getattr(tokenizer, name) for name in names}
    return dict.fromkeys(("bos_token", "pad_token", "eos_token"), tokenizer.eot)


def files_of(tokenizer: Tokenizer, longest: int) -> dict:
    """What each file holds, a text or a dict. longest: how many tokens the model reads at once."""
    theirs = from_gpt2(tokenizer) if isinstance(tokenizer, GPT2) else from_sentencepiece(tokenizer)
    special = special_ids(tokenizer)
    options = {name: theirs.id_to_token(token) for name, token in special.items()}
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
    model = ModelProto.FromString(tokenizer.file)
    pieces = []  # name, kind, score
    for piece in model.pieces:
        score = piece.score if piece.type == NORMAL else NEVER
        pieces.append((piece.piece, piece.type, score))
    if isinstance(tokenizer, XLMR):
        pieces = [*XLMR_BEGINS, *pieces[3:], ("<mask>", CONTROL, NEVER)]
    theirs = tokenizers.Tokenizer(model_of(pieces, model.trainer_spec.model_type))
    read_and_write(theirs, model.normalizer_spec)
    for name, kind, _ in pieces:
        special = kind in (UNKNOWN, CONTROL)
        if special or kind == USER_DEFINED:
            mask = name == "<mask>"
            theirs.add_tokens([AddedToken(name, lstrip=mask, normalized=False, special=special)])
    if isinstance(tokenizer, XLMR):
        theirs.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> </s> $B </s>",
            special_tokens=[("<s>", tokenizer.bos), ("</s>", tokenizer.eos)],
        )
    return theirs


def model_of(pieces: list[tuple], kind: int) -> models.Model:
    names, kinds, _ = zip(*pieces)
    unknown = kinds.index(UNKNOWN)
    if kind == UNIGRAM:
        scores = [(name, score) for name, _, score in pieces]
        return models.Unigram(scores, unk_id=unknown, byte_fallback=True)
    normal = {name: score for name, kind, score in pieces if kind == NORMAL}
    pairs = []  # any two pieces that make a third, those first that make the one of the highest score
    for name in sorted(normal, key=normal.get, reverse=True):
        for k in range(1, len(name)):
            halves = name[:k], name[k:]
            if normal.keys() >= {*halves}:
                pairs.append(halves)
    ids = {name: i for i, name in enumerate(names)}
    return models.BPE(ids, pairs, unk_token=names[unknown], fuse_unk=True, byte_fallback=True)


def read_and_write(theirs: tokenizers.Tokenizer, rules):
    """How a text is normalised, and spelt again."""
    begins, characters = rules.add_dummy_prefix, rules.precompiled_charsmap
    steps = [normalizers.Precompiled(characters)] if characters else []
    if rules.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" +"), " "))
    elif begins:  # also before a space, where a pre-tokenizer puts none
        steps.append(normalizers.Prepend("▁"))
    theirs.normalizer = normalizers.Sequence(steps)
    scheme = "always" if begins else "never"
    theirs.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    theirs.decoder = decoders.Sequence(steps + [decoders.Strip(" ", left=1)] * begins)
