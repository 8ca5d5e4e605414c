"""The corpora of translation pairs, each a function (source, streaming) -> {pair: its (split, first, second)}, sorted.

    catalogs-pairs  every message of Django's catalogs beside its English (nothing is downloaded)
    opus100         OPUS-100, English and 99 other languages
    bitext          your own files, aligned line by line

A pair is named after its two languages, the first text's first: "de-en". The pairs of one are read when they are asked
for, one by one, and only catalogs-pairs is ever held in memory.
"""

import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import permutations, zip_longest
from pathlib import Path

from data.corpora import Corpus, hub_rows, named_split, read_lines, source_files, split_of
from data.multilingual import catalog_pairs, catalogs

Pairs = Iterator[tuple[str, str, str]]  # (split, first text, second text)
# the languages that OPUS-100 has beside English
OPUS100 = """
    af am an ar as az be bg bn br bs ca cs cy da de dz el eo es et eu fa fi fr fy ga gd gl gu ha he hi hr hu hy id ig is
    it ja ka kk km kn ko ku ky li lt lv mg mk ml mn mr ms mt my nb ne nl nn no oc or pa pl ps pt ro ru rw se sh si sk sl
    sq sr sv ta te tg th tk tr tt ug uk ur uz vi wa xh yi yo zh zu
""".split()
TRAIN_ONLY = {"an-en", "dz-en", "en-hy", "en-mn", "en-yo"}


def catalogs_pairs(source: Path | None, streaming: bool) -> dict[str, Pairs]:
    """Message and English, split by the English text."""
    pairs = defaultdict(list)
    for language, english, message, split in catalog_pairs(source):
        # by a checksum rather than the alphabet, as in `catalogs`: a limit then takes all kinds of messages
        pairs[f"{language}-en"].append((zlib.crc32(english.encode()), english, message, split))
    return {name: [(split, one, two) for _, two, one, split in sorted(pairs[name])] for name in sorted(pairs)}


def opus100(source: Path | None, streaming: bool) -> dict[str, Pairs]:
    """Sentences, in OPUS-100's own splits; five of its pairs have nothing but training text."""
    if source:
        return bitext(source, streaming)
    return {name: opus100_pair(name) for name in sorted("-".join(sorted((other, "en"))) for other in OPUS100)}


def opus100_pair(name: str) -> Pairs:
    first, second = name.split("-")
    # valid and test first, so that a limit on the training tokens can end the reading
    for split, theirs in (("valid", "validation"), ("test", "test"), ("train", "train")):
        if split == "train" or name not in TRAIN_ONLY:
            for row in hub_rows("Helsinki-NLP/opus-100", name, theirs, streaming=True, column="translation"):
                yield split, row[first], row[second]


# ---------------------------------------------------------------------------------------------------------------------
# bitext


def bitext(source: Path, streaming: bool) -> dict[str, Pairs]:
    """Lines of two files, PAIR.FIRST and PAIR.SECOND, or of PAIR.tsv, perhaps with more between dots.

    Where names inside a folder speak of train, valid and test, those files are the splits and the others are not read.
    Otherwise a hash of the second text sends 1% of the pairs to valid and as many to test.
    """
    groups = aligned_files(source)
    splits = {stem: named_split(stem.relative_to(source)) for stem in groups} if source.is_dir() else {}
    pairs = {}
    for name in sorted({stem.name.split(".")[0] for stem in groups}):
        own = {stem: paths for stem, paths in groups.items() if stem.name.split(".")[0] == name}
        if any(splits.values()):
            pairs[name] = named([(splits[stem], paths) for stem, paths in own.items()])
        else:
            pairs[name] = hashed(own.values())
    return pairs


def aligned_files(source: Path) -> dict[Path, list[Path]]:
    """Path without its ending -> its one .tsv file, or the files of its two sides in the order of the pair's name."""
    found: dict[Path, dict[str, Path]] = defaultdict(dict)  # path without its ending -> ending -> file
    for path in source_files(source):
        stem, _, ending = re.sub(r"\.(gz|xz)$", "", path.name).rpartition(".")
        pair = stem.split(".")[0]
        if ("-" in pair and ending == "tsv") or pair.startswith(f"{ending}-") or pair.endswith(f"-{ending}"):
            files = found[path.with_name(stem)]
            if ending in files:
                raise ValueError(f"{files[ending]} and {path} are the same side of the same pairs: leave one of them")
            files[ending] = path
    if not found:
        what = "no two files such as de-en.de and de-en.en, and no de-en.tsv (plain, .gz or .xz)"
        raise FileNotFoundError(f"--source {source} holds {what}")
    groups = {}
    for stem, files in found.items():
        pair = stem.name.split(".")[0]
        orders = [order for order in permutations(files) if order == ("tsv",) or "-".join(order) == pair]
        if not orders:
            names = " and ".join(path.name for path in files.values())
            raise ValueError(f"{stem}.* must be one .tsv file or the two sides of {pair}, not {names}")
        groups[stem] = [files[ending] for ending in orders[0]]
    return groups


def named(groups: list[tuple[str | None, list[Path]]]) -> Pairs:
    for split in ("valid", "test", "train"):  # as for opus100
        for name, paths in groups:
            if name == split:
                yield from ((split, *texts) for texts in read_pairs(paths))


def hashed(groups: Iterable[list[Path]]) -> Pairs:
    for paths in groups:
        for first, second in read_pairs(paths):
            yield split_of(second, valid=0.01, test=0.01), first, second


def read_pairs(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """The pairs of one .tsv file or of two aligned ones, stripped. ValueError says which line is wrong, and why."""
    for number, first, second in read_tsv(*paths) if len(paths) == 1 else read_aligned(*paths):
        for text, path in ((first, paths[0]), (second, paths[-1])):
            if not text.strip():
                raise ValueError(f"{path}, line {number}: an empty text")
        yield first.strip(), second.strip()


def read_tsv(path: Path) -> Iterator[tuple[int, str, str]]:
    for number, line in read_lines(path):
        tabs = line.count("\t")
        if tabs != 1:
            raise ValueError(f"{path}, line {number}: {tabs} tabs instead of one")
        yield number, *line.split("\t")


def read_aligned(one: Path, two: Path) -> Iterator[tuple[int, str, str]]:
    lengths = [0, 0]
    for first, second in zip_longest(read_lines(one), read_lines(two)):
        if first and second:
            yield first[0], first[1], second[1]
        lengths = [length + (line is not None) for length, line in zip(lengths, (first, second))]
    if lengths[0] != lengths[1]:
        raise ValueError(f"{one} has {lengths[0]:,} lines and {two} {lengths[1]:,}")


BITEXT = {
    "catalogs-pairs": Corpus(catalogs_pairs, "the message catalogs of Django", ("django",), vocabulary=catalogs),
    "opus100": Corpus(opus100, "Helsinki-NLP/opus-100"),
    "bitext": Corpus(bitext, None),
}
