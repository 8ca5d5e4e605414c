"""Test sets of sentence pairs: Tatoeba's, held-out pairs of a prepared corpus, and pairs with word alignments.

    tatoeba(folder)           LASER's tatoeba.deu-eng.deu and .eng, a sentence a line, in up to 36 languages
    held_out(folder)          the validation pairs of a corpus that `python -m data.prepare` made
    word_alignments(folder)   de-en.src-tgt (source ||| target) and de-en.gold (i-j sure, ipj possible, from 1)

All files may be plain, .gz or .xz. What is wrong with a file is a ValueError or an OSError of one line.
"""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from data.batches import Prepared
from data.files import one_of, read_lines, read_pairs, source_files, uncompressed_name

Pairs = dict[str, list[tuple[str, str]]]  # language -> pairs of a sentence and its English translation

TATOEBA_14 = "ara bul cmn deu ell fra hin rus spa swh tha tur urd vie".split()  # XLM-E's, those of XNLI
TATOEBA_36 = """afr ara ben bul cmn deu ell est eus fin fra heb hin hun ind ita jav jpn kat kaz kor mal mar nld pes por
    rus spa swh tam tel tgl tha tur urd vie""".split()  # XTREME's


def tatoeba(folder: Path) -> Pairs:
    """Those of the 36 languages that the folder has, with `tatoeba.` before their names or without.

    XTREME's own copies, de-en.en and so on, will not do: their English side is sorted.
    """
    texts = {}
    for language in TATOEBA_36:
        name = f"{language}-eng"
        try:
            paths = [one_of(folder, f"tatoeba.{name}.{side}", f"{name}.{side}") for side in (language, "eng")]
        except FileNotFoundError:
            if any(folder.glob(f"*{name}.*")):
                raise
            continue
        texts[language] = list(read_pairs(*paths))
        if not texts[language]:
            raise ValueError(f"{paths[0]} holds no sentence")
    if not texts:
        what = "no pair of files such as tatoeba.deu-eng.deu and tatoeba.deu-eng.eng (plain, .gz or .xz)"
        raise FileNotFoundError(f"--source {folder} holds {what}")
    return texts


def held_out(folder: Path) -> Pairs:
    """The validation pairs of every language with English that has at least two, as they were written."""
    corpus = Prepared(folder, block_size=8, micro_tokens=8)
    if corpus.meta["kind"] != "pairs":
        raise ValueError(f"{folder} holds no pairs of sentences")
    texts = {}
    for name in corpus.languages:
        pairs = list(zip(*corpus.texts("valid", name)))
        if name.endswith("-en") and len(pairs) > 1:
            texts[name.removesuffix("-en")] = pairs
    return texts


# ---------------------------------------------------------------------------------------------------------------------
# Word alignments


class Aligned(NamedTuple):
    """A sentence and its translation, and which of their words belong together, by their numbers from 0."""

    one: list[str]
    two: list[str]
    sure: set[tuple[int, int]]
    possible: set[tuple[int, int]]  # with the sure ones


def word_alignments(folder: Path) -> tuple[dict[str, list[Aligned]], list[str]]:
    """-> pair of languages -> its sentences, and what was wrong with the links, a line for each pair of languages.

    A sentence whose links cannot be read is left out; a link that points past a sentence is left out alone.
    """
    sets, notes = {}, []
    for path in source_files(folder):
        name, _, ending = uncompressed_name(path).rpartition(".")
        if ending != "src-tgt":
            continue
        gold = one_of(path.parent, f"{name}.gold")
        texts, links = list(read_lines(path)), list(read_lines(gold))
        if len(texts) != len(links):
            raise ValueError(f"{path} has {len(texts):,} sentence pairs and {gold.name} {len(links):,} lines of links")
        if name in sets:
            raise ValueError(f"{folder} holds {name} twice, once in {path.parent}: give the folder of one")
        problems, sets[name] = Counter(), []
        for number, (text, line) in enumerate(zip(texts, links), 1):
            one, bar, two = text.partition("|||")
            if not bar or not one.split() or not two.split():
                raise ValueError(f"{path}, line {number}: not `source ||| target`")
            found = read_links(line, one.split(), two.split(), problems)
            if found is not None:
                sets[name].append(found)
        notes += [f"{gold}: {count:,} {what}" for what, count in problems.items()]
        if not any(aligned.sure for aligned in sets[name]):
            raise ValueError(f"{gold} holds no sure link")
    if not sets:
        raise FileNotFoundError(f"--source {folder} holds no file such as de-en.src-tgt, beside de-en.gold")
    return sets, notes


def read_links(line: str, one: list[str], two: list[str], problems: Counter) -> Aligned | None:
    """A line such as `1-1 2p3`; None where it cannot be read."""
    sure, possible = set(), set()
    for word in line.split():
        link = re.fullmatch(r"(\d{1,9})([-p])(\d{1,9})", word)
        if link is None:
            problems["broken lines, whose sentences are left out"] += 1
            return None
        i, j = int(link[1]) - 1, int(link[3]) - 1
        if i in range(len(one)) and j in range(len(two)):
            possible.add((i, j))
            if link[2] == "-":
                sure.add((i, j))
        else:
            problems["links that point past their sentence, left out"] += 1
    return Aligned(one, two, sure, possible)
