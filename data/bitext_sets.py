"""Test sets of sentence pairs: Tatoeba's, the held-out pairs of a prepared corpus, and pairs with word alignments."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from data.batches import PairData
from data.files import read_lines, read_sides

Pairs = dict[str, list[tuple[str, str]]]  # language -> pairs of a sentence and its English translation
Links = set[tuple[int, int]]  # of a word of the first sentence and one of the second, by their numbers from 0

TATOEBA_14 = "ara bul cmn deu ell fra hin rus spa swh tha tur urd vie".split()  # XLM-E's, those of XNLI
TATOEBA_36 = """afr ara ben bul cmn deu ell est eus fin fra heb hin hun ind ita jav jpn kat kaz kor mal mar nld pes por
    rus spa swh tam tel tgl tha tur urd vie""".split()  # XTREME's


def tatoeba(folder: Path) -> Pairs:
    """LASER's tatoeba.deu-eng.deu and .eng, or deu-eng.deu and .eng, in those of the 36 languages that there are.

    XTREME's own copies, de-en.en and so on, will not do: their English side is sorted.
    """
    texts = {}
    for language in TATOEBA_36:
        name = f"{language}-eng"
        if any(folder.glob(f"*{name}.*")):
            texts[language] = list(read_sides(folder, (language, "eng"), f"tatoeba.{name}", name))
    if not texts:
        what = "no pair of files such as tatoeba.deu-eng.deu and tatoeba.deu-eng.eng (plain, .gz or .xz)"
        raise FileNotFoundError(f"--source {folder} holds {what}")
    return texts


def held_out(folder: Path) -> Pairs:
    """The validation pairs, as they were written, of every language with English that has two or more."""
    corpus = PairData(folder, block_size=8, micro_tokens=8)
    texts = {}
    for name in corpus.languages:
        pairs = list(zip(*corpus.texts("valid", name)))
        if name.endswith("-en") and len(pairs) > 1:
            texts[name.removesuffix("-en")] = pairs
    return texts


class Aligned(NamedTuple):
    """A sentence and its translation, and which of their words belong together."""

    one: list[str]
    two: list[str]
    sure: Links
    possible: Links  # with the sure ones


def letters(folder: Path) -> dict[str, list[Aligned]]:
    """The validation pairs of a cipher: each character is the translation of the one in the same place."""
    sets = {}
    for language, pairs in held_out(folder).items():
        links = [{(i, i) for i in range(len(one))} for one, _ in pairs]
        sets[f"{language}-en"] = [Aligned([*one], [*two], own, own) for (one, two), own in zip(pairs, links)]
    return sets


def word_alignments(folder: Path) -> dict[str, list[Aligned]]:
    """Pair of languages -> its sentences.

    de-en.src-tgt has lines `source ||| target`, de-en.gold the links of each, such as `1-1 2p3`: i-j sure, ipj
    possible, counted from 1. Links that point past their sentence, of which published sets have a few, are left out.
    """
    sets = {}
    for path in sorted(folder.glob("*.src-tgt")):
        gold = path.with_suffix(".gold")
        sets[path.stem] = list(read_alignments(path, gold))
    if not sets:
        raise FileNotFoundError(f"--source {folder} holds no file such as de-en.src-tgt, beside de-en.gold")
    return sets


def read_alignments(path: Path, gold: Path) -> Iterator[Aligned]:
    """The sentences of a file with the links of another."""
    texts, links = list(read_lines(path)), list(read_lines(gold))
    if len(texts) != len(links):
        raise ValueError(f"{path} has {len(texts):,} sentence pairs and {gold.name} {len(links):,} lines of links")
    for number, (text, line) in enumerate(zip(texts, links), start=1):
        one, _, two = text.partition("|||")
        aligned = Aligned(one.split(), two.split(), set(), set())
        if not aligned.one or not aligned.two:
            raise ValueError(f"{path}, line {number}: not `source ||| target`")
        for link in line.split():
            parts = re.fullmatch(r"(\d{1,9})([-p])(\d{1,9})", link)
            if not parts:
                raise ValueError(f"{gold}, line {number}: {link} is no link such as 1-1 or 2p3")
            i, j = int(parts[1]) - 1, int(parts[3]) - 1
            if 0 <= i < len(aligned.one) and 0 <= j < len(aligned.two):
                aligned.possible.add((i, j))
                if parts[2] == "-":
                    aligned.sure.add((i, j))
        yield aligned
