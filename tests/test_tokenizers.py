"""Tokenizers are lossless, XLM-R's ids are fairseq's, and a bad file is refused in one line."""

import hashlib
import math
import random
import shutil

import pytest
import sentencepiece
from helpers import OWN_CODE, made_up_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from data import tokenizers
from data.tokenizers import GPT2, XLMR, SentencePiece, gpt2, load_tokenizer, train_sentencepiece


@pytest.fixture(scope="session")
def gpt2_tokenizer() -> GPT2:
    """As many tokens as GPT-2's, made up so that no download is needed."""
    ranks = made_up_ranks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "GPT2_SHA256", hashlib.sha256(ranks).hexdigest())
        return GPT2(ranks)


# no lone surrogates, which are not valid UTF-8
characters = st.characters(codec="utf-8", exclude_characters="▁") | st.sampled_from(" \n\t\r\0")
special = st.sampled_from(["</s>", "<unk>", "<0x41>", "  a   b \n\n  c ", "<|endoftext|>"])
texts = st.lists(st.text(characters) | special, max_size=4)


@given(texts)
@settings(max_examples=200, deadline=None)
def test_decoding_gives_back_the_encoded_text(bpe, gpt2_tokenizer, texts):
    for tokenizer in (bpe, gpt2_tokenizer):
        encoded = tokenizer.encode_batch(texts)
        assert [tokenizer.decode(ids) for ids in encoded] == texts
        tokens = set().union(*encoded)
        assert tokenizer.eot not in tokens
        assert max(tokens, default=0) < tokenizer.vocab_size


def test_gpt2_is_the_published_vocabulary(tmp_path):
    try:
        tokenizer = gpt2()
    except OSError:
        pytest.skip("needs the network, or a cache")
    assert tokenizer.encode_batch(["Hello world"]) == [[15496, 995]]
    assert (tokenizer.vocab_size, tokenizer.eot) == (50257, 50256)
    path = tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).sha256 == tokenizer.sha256
    path.write_bytes(tokenizer.file.replace(b"IGE= 257", b"IGE= 258").replace(b"aGU= 258", b"aGU= 257"))
    with pytest.raises(ValueError, match="nor GPT-2's rank file"):
        load_tokenizer(tmp_path)


def test_gpt2_without_a_network_suggests_an_option(monkeypatch):
    monkeypatch.setattr("tiktoken.load.read_file_cached", lambda *name: open("/no/route"))
    with pytest.raises(OSError, match="--tokenizer PATH"):
        gpt2()


@pytest.mark.parametrize("kind, size", [(SentencePiece, 600), (XLMR, 500)])
def test_the_same_texts_give_the_same_file(bpe, xlmr, kind, size, tmp_path):
    first = bpe if kind is SentencePiece else xlmr
    again = train_sentencepiece(OWN_CODE, size, kind)
    again.save(tmp_path)
    for tokenizer in (again, load_tokenizer(tmp_path)):
        assert tokenizer.sha256 == first.sha256
        assert tokenizer.vocab_size == size
        assert type(tokenizer) is kind


@pytest.mark.parametrize("name", ["bpe", "xlmr"])
def test_frequent_words_are_merged_and_unknown_characters_are_bytes(name, request):
    tokenizer = request.getfixturevalue(name)
    word, emoji = tokenizer.encode_batch(["return", "🙂"])
    assert len(word) < 6
    assert tokenizer.decode(emoji) == "🙂"
    assert "\ufffd" in tokenizer.decode(emoji[:-1])


@pytest.mark.parametrize("kind", [SentencePiece, XLMR])
def test_long_lines_and_lines_with_nul_are_learned_from(kind):
    """A line longer than a mebibyte and lines with a NUL give the same pieces as short lines."""
    words = ["zebra quagga okapi gnu"] * 50_000
    texts = [" ".join(words), "\n".join(words[:99]), "\n".join(f"{word}\0" for word in words[:99])]
    lengths = []
    for text in texts:
        tokenizer = train_sentencepiece([text], 300, kind, model_type="bpe", hard_vocab_limit=False)
        lengths.append(len(tokenizer.encode_batch([words[0]])[0]))
    assert lengths == [lengths[0]] * 3
    assert lengths[0] <= 5


CHINESE = list(map(chr, range(0x4E00, 0x4E00 + 3000)))


@pytest.mark.parametrize("kind", [SentencePiece, XLMR])
@pytest.mark.parametrize("letters, length", [("abc defg. ", 10_000), (CHINESE, 30_000), ("x", 100)])
def test_the_default_vocabulary_size_fits_the_text(kind, letters, length):
    """It is bytes, characters and the root of the length, in English and Chinese; repetitive text may have fewer."""
    rng = random.Random(0)
    text = "\n".join("".join(rng.choices(letters, k=100)) for _ in range(length // 100))
    tokenizer = train_sentencepiece([text], None, kind, model_type="bpe")
    limit = 260 + len(set(text)) + math.isqrt(length) + kind.added
    assert tokenizer.vocab_size <= limit
    assert tokenizer.vocab_size >= limit - 10 or letters == "x"
    assert tokenizer.decode(tokenizer.encode_batch([text])[0]).split() == text.split()


def test_xlmr_ids_are_fairseqs(xlmr, tmp_path):
    file = shutil.copy(xlmr.save(tmp_path), tmp_path / "any.model")
    tokenizer = load_tokenizer(file, kind="xlmr")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    pieces = [processor.id_to_piece(i) for i in range(3, 498)]
    fairseq = ["<s>", "<pad>", "</s>", "<unk>", *pieces, "<mask>"]
    special = [tokenizer.bos, tokenizer.pad, tokenizer.eos, tokenizer.unk, tokenizer.mask]
    assert special == list(tokenizer.special) == [0, 1, 2, 3, 499]
    assert tokenizer.unwritten == (0, 1, 3, 499)
    assert tokenizer.eot == 2
    assert tokenizer.vocab_size == len(fairseq) == processor.vocab_size() + 2
    [ids] = tokenizer.encode_batch(["def split_of(key: str)  →\n a  ｆｕｌｌ width"])
    plain = "def split_of(key: str) → a full width"
    assert [fairseq[token] for token in ids] == processor.encode_as_pieces(plain)
    assert tokenizer.decode([0, *ids, 2, 1, 3, 499]) == plain
    assert load_tokenizer(file).kind == "sentencepiece"


WORDS = ["word", "Wort's", " ", "  ", "\n\n", "\t", "漢字", "12", "🙂", " a", "\r\n"]


@given(st.lists(st.sampled_from(WORDS), max_size=150))
@settings(max_examples=200, deadline=None)
def test_encoding_in_parts_gives_the_same_tokens(bpe, xlmr, gpt2_tokenizer, words):
    """If every cut is before white space; otherwise the decoded text is the same."""
    text = "".join(words)
    for tokenizer in (bpe, xlmr, gpt2_tokenizer):
        uncut = tokenizer.encode_batch([text, "a"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizers, "PART", 20)
            cut, parts = tokenizer.encode_batch([text, "a"]), list(tokenizers.parts(text))
        assert "".join(parts) == text
        assert max(map(len, parts), default=0) <= 20
        if all(one[-1:].strip() and two[0] in " \n" for one, two in zip(parts, parts[1:])):
            assert cut == uncut
        elif tokenizer is not xlmr:  # XLM-R normalises text
            assert tokenizer.decode(cut[0]) == text


def test_offsets_are_the_position_of_each_token_in_the_text(xlmr):
    text = "for number  in range(9)"
    ids, offsets = xlmr.encode_offsets(text)
    assert [ids] == xlmr.encode_batch([text])
    for token, (begin, end) in zip(ids, offsets):
        assert xlmr.decode([token]).strip() == text[begin:end].strip()


def test_without_byte_fallback_an_unknown_character_is_unk():
    tokenizer = train_sentencepiece(
        ["a b c d", "ab cd dc ba"] * 20, 11, XLMR, byte_fallback=False, hard_vocab_limit=False
    )
    [ids] = tokenizer.encode_batch(["a漢b"])
    assert ids.count(tokenizer.unk) == 1
    assert tokenizer.decode(ids).replace(" ", "") == "ab"


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("tokenizer.model", b"no model", "not a SentencePiece model"),
        ("xlmr.model", b"", "not a SentencePiece model"),
        ("tokenizer.tiktoken", b"IQ== 0\nIg== 1\n", "neither a SentencePiece"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, name, content, reason):
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match=f"{name}: .*{reason}"):
            load_tokenizer(path)


def test_a_folder_with_two_tokenizers_is_refused(bpe, xlmr, tmp_path):
    paths = [bpe.save(tmp_path), xlmr.save(tmp_path)]
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at \S+tokenizer\.model/xlmr\.model"):
        load_tokenizer(tmp_path)
    assert [load_tokenizer(path).sha256 for path in paths] == [bpe.sha256, xlmr.sha256]
    with pytest.raises(ValueError, match=r"tokenizer\.model: .* <unk> 0, <s> 1 and </s> 2"):
        load_tokenizer(paths[0], kind="xlmr")
