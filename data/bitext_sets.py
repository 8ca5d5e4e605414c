"""Test sets of sentence pairs: Tatoeba, the held-out pairs of a prepared corpus, and pairs with word alignments."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from data.batches import PairData
from data.files import read_lines, read_sides, say

Pairs = dict[str, list[tuple[str, str]]]  # language -> (sentence, English translation)
Links = set[tuple[int, int]]  # (i, j): word i of the first sentence and word j of the second, from 0

TATOEBA_14 = "ara bul cmn deu ell fra hin rus spa swh tha tur urd vie".split()  # XLM-E's: the languages of XNLI
TATOEBA_36 = """afr ara ben bul cmn deu ell est eus fin fra heb hin hun ind ita jav jpn kat kaz kor mal mar nld pes por
    rus spa swh tam tel tgl tha tur urd vie""".split()  # XTREME's


def tatoeba(folder: Path) -> Pairs:
    """LASER's files tatoeba.deu-eng.deu and .eng, or deu-eng.deu and .eng, in any of the 36 languages.

    XTREME's copies (de-en.en and so on) cannot be used: their English side is sorted.
    """
    texts = {}
    for language in TATOEBA_36:
        name = f"{language}-eng"
        if any(folder.glob(f"*{name}.*")):
            texts[language] = list(read_sides(folder, (language, "eng"), f"tatoeba.{name}", name))
    if not texts:
        expected = "pair of files such as tatoeba.deu-eng.deu and tatoeba.deu-eng.eng (plain, .gz or .xz)"
        raise FileNotFoundError(f"--source {folder} contains no {expected}")
    return texts


def held_out(folder: Path) -> Pairs:
    """The original text of the validation pairs, for every language with at least two pairs with English."""
    corpus = PairData(folder, block_size=8, micro_tokens=8)
    texts = {}
    for name in corpus.languages:
        pairs = list(zip(*corpus.texts("valid", name)))
        if name.endswith("-en") and len(pairs) > 1:
            texts[name.removesuffix("-en")] = pairs
    return texts


class Aligned(NamedTuple):
    """The words of a sentence and of its translation, with word alignments."""

    one: list[str]
    two: list[str]
    sure: Links
    possible: Links  # includes the sure ones


def letters(folder: Path) -> dict[str, list[Aligned]]:
    """The validation pairs of a cipher, where characters at the same position translate each other."""
    sets = {}
    for language, pairs in held_out(folder).items():
        links = [{(i, i) for i in range(len(one))} for one, _ in pairs]
        sets[f"{language}-en"] = [Aligned([*one], [*two], same, same) for (one, two), same in zip(pairs, links)]
    return sets


def word_alignments(folder: Path) -> dict[str, list[Aligned]]:
    """Language pair -> its aligned sentences.

    A line of de-en.src-tgt is `source ||| target`; the same line of de-en.gold has its links, such as `1-1 2p3`: i-j is
    sure, ipj possible, from 1, or from 0 if that fits better. Published sets have a few links to no word; these are
    dropped.
    """
    sets = {}
    for path in sorted(folder.glob("*.src-tgt")):
        gold = path.with_suffix(".gold")
        from_1, from_0 = (list(read_alignments(path, gold, first)) for first in (1, 0))
        sets[path.stem] = max(from_1, from_0, key=lambda pairs: sum(len(pair.possible) for pair in pairs))
        if sets[path.stem] is from_0:
            say(f"{gold}: words are counted from 0")
    if not sets:
        raise FileNotFoundError(f"--source {folder} contains no file such as de-en.src-tgt with its de-en.gold")
    return sets


def read_alignments(path: Path, gold: Path, first: int) -> Iterator[Aligned]:
    """The sentence pairs in the lines of `path`, with the links in those of `gold`, which counts words from `first`."""
    texts, links = list(read_lines(path)), list(read_lines(gold))
    if len(texts) != len(links):
        raise ValueError(f"{path} has {len(texts):,} sentence pairs, but {gold.name} has {len(links):,} lines of links")
    for number, (text, line) in enumerate(zip(texts, links), start=1):
        one, _, two = text.partition("|||")
        aligned = Aligned(one.split(), two.split(), set(), set())
        if not aligned.one or not aligned.two:
            raise ValueError(f"{path}, line {number}: not `source ||| target`")
        for link in line.split():
            if not (match := re.fullmatch(r"(\d{1,9})([-p])(\d{1,9})", link)):
                raise ValueError(f"{gold}, line {number}: {link} is not a link such as 1-1 or 2p3")
            i, j = int(match[1]) - first, int(match[3]) - first
            if 0 <= i < len(aligned.one) and 0 <= j < len(aligned.two):
                aligned.possible.add((i, j))
                if match[2] == "-":
                    aligned.sure.add((i, j))
        yield aligned
