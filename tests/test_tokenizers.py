"""Tokenizers: nothing is lost, XLM-R's ids are fairseq's, and a file that is none is refused in one line."""

import math
import random
import shutil

import pytest
import sentencepiece
from helpers import OWN_CODE
from hypothesis import given, settings
from hypothesis import strategies as st

from data import tokenizers
from data.tokenizers import XLMR, SentencePiece, gpt2, load_tokenizer, train_sentencepiece


@pytest.fixture(scope="session")
def gpt2_tokenizer():
    """None where there is neither a cache nor a network."""
    try:
        return gpt2()
    except OSError:
        return None


# no lone surrogates: they have no UTF-8 form
characters = st.characters(codec="utf-8", exclude_characters="▁") | st.sampled_from(" \n\t\r\0")
special = st.sampled_from(["</s>", "<unk>", "<0x41>", "  a   b \n\n  c ", "<|endoftext|>"])
texts = st.lists(st.text(characters) | special, max_size=4)


@given(texts)
@settings(max_examples=200, deadline=None)
def test_nothing_is_lost(bpe, gpt2_tokenizer, texts):
    for tokenizer in filter(None, (bpe, gpt2_tokenizer)):
        encoded = tokenizer.encode_batch(texts)
        assert [tokenizer.decode(ids) for ids in encoded] == texts
        tokens = set().union(*encoded)
        assert tokenizer.eot not in tokens and max(tokens, default=0) < tokenizer.vocab_size


def test_gpt2_is_the_published_vocabulary(gpt2_tokenizer, tmp_path):
    if gpt2_tokenizer is None:
        pytest.skip("no vocabulary")
    assert gpt2_tokenizer.encode_batch(["Hello world"]) == [[15496, 995]]
    assert (gpt2_tokenizer.vocab_size, gpt2_tokenizer.eot) == (50257, 50256)
    path = gpt2_tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).sha256 == gpt2_tokenizer.sha256
    path.write_bytes(gpt2_tokenizer.file.replace(b"IGE= 257", b"IGE= 258").replace(b"aGU= 258", b"aGU= 257"))
    with pytest.raises(ValueError, match="nor GPT-2's rank file"):
        load_tokenizer(tmp_path)


def test_gpt2_without_network_says_what_to_do(monkeypatch):
    monkeypatch.setattr("tiktoken.load.read_file_cached", lambda *name: open("/no/route"))
    with pytest.raises(OSError, match="--tokenizer PATH"):
        gpt2()


@pytest.mark.parametrize("kind, size", [(SentencePiece, 600), (XLMR, 500)])
def test_the_same_texts_give_the_same_file(bpe, xlmr, kind, size, tmp_path):
    first = bpe if kind is SentencePiece else xlmr
    again = train_sentencepiece(OWN_CODE, size, kind)
    assert again.sha256 == first.sha256 and again.vocab_size == size and type(again) is kind
    assert len(again.encode_batch(["return"])[0]) < len("return")  # it has learned words
    [ids] = again.encode_batch(["🙂"])
    assert again.decode(ids) == "🙂" and "\ufffd" in again.decode(ids[:-1])  # part of a character, in bytes
    again.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert type(loaded) is kind and loaded.sha256 == first.sha256


@pytest.mark.parametrize("kind", [SentencePiece, XLMR])
def test_every_line_counts_in_a_vocabulary(kind):
    """One of over a mebibyte, as one with a NUL, has the pieces that its words have in short lines."""
    words = ["zebra quagga okapi gnu"] * 50_000
    alike = [" ".join(words), "\n".join(words[:99]), "\n".join(f"{word}\0" for word in words[:99])]
    encoded = []
    for text in alike:
        tokenizer = train_sentencepiece([text], 300, kind, model_type="bpe", hard_vocab_limit=False)
        encoded.append(len(tokenizer.encode_batch([words[0]])[0]))
    assert encoded == [encoded[0]] * 3 and encoded[0] <= 5


CHINESE = list(map(chr, range(0x4E00, 0x4E00 + 3000)))


@pytest.mark.parametrize("kind", [SentencePiece, XLMR])
@pytest.mark.parametrize("letters, length", [("abc defg. ", 10_000), (CHINESE, 30_000), ("x", 100)])
def test_a_vocabulary_fits_the_text(kind, letters, length):
    """Its characters and the root of its length, of Chinese as of English, and of what is too monotonous fewer."""
    rng = random.Random(0)
    text = "\n".join("".join(rng.choices(letters, k=100)) for _ in range(length // 100))
    tokenizer = train_sentencepiece([text], None, kind, model_type="bpe")
    most = 260 + len(set(text)) + math.isqrt(length) + kind.added
    assert most - 10 <= tokenizer.vocab_size <= most or (length == 100 and tokenizer.vocab_size < most)
    assert tokenizer.decode(tokenizer.encode_batch([text])[0]).split() == text.split()


def test_xlmr_ids_are_fairseqs(xlmr, tmp_path):
    file = shutil.copy(xlmr.save(tmp_path), tmp_path / "any.model")
    tokenizer = load_tokenizer(file, kind="xlmr")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    pieces = [processor.id_to_piece(i) for i in range(3, 498)]
    fairseq = ["<s>", "<pad>", "</s>", "<unk>", *pieces, "<mask>"]
    special = [tokenizer.bos, tokenizer.pad, tokenizer.eos, tokenizer.unk, tokenizer.mask]
    assert special == list(tokenizer.special) == [0, 1, 2, 3, 499]
    assert tokenizer.unwritten == (0, 1, 3, 499) and tokenizer.eot == 2
    assert tokenizer.vocab_size == len(fairseq) == processor.vocab_size() + 2
    [ids] = tokenizer.encode_batch(["def split_of(key: str)  →\n a  ｆｕｌｌ width"])
    plain = "def split_of(key: str) → a full width"
    assert [fairseq[token] for token in ids] == processor.encode_as_pieces(plain)
    assert tokenizer.decode([0, *ids, 2, 1, 3, 499]) == plain
    assert load_tokenizer(file).kind == "sentencepiece"


WORDS = ["word", "Wort's", " ", "  ", "\n\n", "\t", "漢字", "12", "🙂", " a", "\r\n"]


@given(st.lists(st.sampled_from(WORDS), max_size=150))
@settings(max_examples=200, deadline=None)
def test_parts_have_the_tokens_of_the_whole(bpe, xlmr, gpt2_tokenizer, words):
    """Where no run is longer than a part, and whatever the run the text is the same."""
    text = "".join(words)
    for tokenizer in filter(None, (bpe, xlmr, gpt2_tokenizer)):
        whole = tokenizer.encode_batch([text, "a"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizers, "PART", 20)
            cut, pieces = tokenizer.encode_batch([text, "a"]), list(tokenizers.parts(text))
        assert "".join(pieces) == text and max(map(len, pieces), default=0) <= 20
        clean = all(one[-1:].strip() and two[0] in " \n" for one, two in zip(pieces, pieces[1:]))
        assert cut == whole if clean else tokenizer is xlmr or tokenizer.decode(cut[0]) == text


def test_offsets_say_where_a_token_stands(xlmr):
    text = "for number  in range(9)"
    ids, offsets = xlmr.encode_offsets(text)
    assert [ids] == xlmr.encode_batch([text])
    for token, (begin, end) in zip(ids, offsets):
        assert xlmr.decode([token]).strip() == text[begin:end].strip()


def test_unknown_characters_without_byte_fallback():
    tokenizer = train_sentencepiece(
        ["a b c d", "ab cd dc ba"] * 20, 11, XLMR, byte_fallback=False, hard_vocab_limit=False
    )
    [ids] = tokenizer.encode_batch(["a漢b"])
    assert ids.count(tokenizer.unk) == 1 and tokenizer.decode(ids).replace(" ", "") == "ab"


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("tokenizer.model", b"no model", "not a SentencePiece model"),
        ("xlmr.model", b"", "not a SentencePiece model"),
        ("tokenizer.tiktoken", b"IQ== 0\nIg== 1\n", "neither a SentencePiece"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, name, content, reason):
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match=f"{name}: .*{reason}"):
            load_tokenizer(path)


def test_of_two_tokenizers_in_a_folder_none_is_taken(bpe, xlmr, tmp_path):
    paths = [bpe.save(tmp_path), xlmr.save(tmp_path)]
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at \S+tokenizer\.model/xlmr\.model"):
        load_tokenizer(tmp_path)
    assert [load_tokenizer(path).sha256 for path in paths] == [bpe.sha256, xlmr.sha256]
    with pytest.raises(ValueError, match=r"tokenizer\.model: .* <unk> 0, <s> 1 and </s> 2"):
        load_tokenizer(paths[0], kind="xlmr")
