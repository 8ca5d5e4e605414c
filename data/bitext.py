"""The corpora of translation pairs, each a function (source, streaming) -> {pair: its (split, first, second)}, sorted.

    catalogs-pairs  every message of Django's catalogs beside its English (nothing is downloaded)
    opus100         OPUS-100, English and 99 other languages
    bitext          your own files, aligned line by line

and, under a joint BPE of their own, for translation:

    catalogs-en     the messages in XMoE's five languages: German, Hebrew, Russian, Ukrainian, Chinese
    multi30k-XX     captions of pictures, XX being de, fr or cs
    wmt23-XX        XMoE table 4's pairs, XX being de, he, ru, uk or zh: WMT and CCMatrix, tested on WMT22 or FLORES-200
    wmt10           X-MoE table 4's ten languages

A pair is named after its two languages, the first text's first: "de-en". The pairs of one are read when they are asked
for, one by one, and only those of the catalogs are ever held in memory.
"""

import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import permutations, zip_longest
from pathlib import Path

from data.corpora import Corpus, hub_rows, named_split, one_of, read_lines, source_files, split_of
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
            columns = f"translation.{first}", f"translation.{second}"
            for texts in hub_rows("Helsinki-NLP/opus-100", name, theirs, streaming=True, column=columns):
                yield split, *texts


# ---------------------------------------------------------------------------------------------------------------------
# translation: catalogs-en, multi30k-XX, wmt23-XX, wmt10


def catalogs_en(source: Path | None, streaming: bool) -> dict[str, Pairs]:
    """catalogs-pairs in the languages of XMoE's table 3: some 800 short pairs each."""
    pairs = catalogs_pairs(source, streaming)
    return {name: pairs[name] for name in ("de-en", "he-en", "ru-en", "uk-en", "zh_Hans-en")}


def multi30k(language: str, source: Path | None, streaming: bool) -> dict[str, Pairs]:
    """Task 1, raw: train.XX, val.XX and test_2016_flickr.XX beside their English (plain, .gz or .xz)."""
    return {f"{language}-en": multi30k_pairs(language, source)}


def multi30k_pairs(language: str, source: Path | None) -> Pairs:
    sides = (language, "en")
    for split, name, theirs in MULTI30K:
        if source:
            pairs = read_pairs([one_of(source, f"{name}.{side}") for side in sides])
        elif language == "de":
            pairs = hub_rows("bentrevett/multi30k", None, theirs, streaming=True, column=sides)
        else:
            raise ValueError(f"multi30k-{language} needs --source DIR with train.{language}, train.en and so on")
        yield from ((split, *texts) for texts in pairs)


MULTI30K = [  # split, name in the files, name on the hub
    ("valid", "val", "validation"),
    ("test", "test_2016_flickr", "test"),
    ("train", "train", "train"),
]
CCMATRIX = "sentence-transformers/parallel-sentences-ccmatrix"
# language -> its training pairs on the hub: repository, configuration, columns. The paper does not name its files: here
# WMT's own, the newest there are, and CCMatrix for Ukrainian and Hebrew, which WMT collected later.
WMT23 = {x: ("wmt/wmt19", f"{x}-en", (f"translation.{x}", "translation.en")) for x in ("de", "ru", "zh")}
WMT23 |= {x: (CCMATRIX, f"en-{x}", ("non_english", "english")) for x in ("he", "uk")}
FLORES = {"he": "heb_Hebr", "uk": "ukr_Cyrl", "en": "eng_Latn"}
# the newest WMT with pairs and a test set of that language on the hub; Gujarati has no test set there
WMT10 = {"cs": 18, "de": 18, "et": 18, "fi": 18, "fr": 15, "gu": 19, "hi": 14, "lv": 17, "ro": 16, "tr": 18}


def wmt23(language: str, source: Path | None, streaming: bool) -> dict[str, Pairs]:
    """Validated on WMT21 and tested on WMT22 (sacrebleu), or FLORES-200's dev and devtest, as FLORES+ has them.

    `source` as for bitext; where its names speak of splits, its own valid and test are taken instead.
    """
    name = f"{language}-en"
    groups = (
        {stem: files for stem, files in aligned_files(source).items() if stem.name.split(".")[0] == name}
        if source
        else {}
    )
    if source and not groups:
        raise FileNotFoundError(f"--source {source} holds no {name}.{language} and {name}.en, and no {name}.tsv")
    if any(named_split(stem.relative_to(source)) for stem in groups if source.is_dir()):
        return {name: bitext(source, streaming)[name]}
    return {name: wmt23_pairs(language, groups.values())}


def wmt23_pairs(language: str, files: Iterable[list[Path]]) -> Pairs:
    for split, year, flores in (("valid", "wmt21", "dev"), ("test", "wmt22", "devtest")):
        pairs = (
            flores_pairs(language, flores)
            if language in FLORES
            else read_pairs(sacrebleu_files(year, f"{language}-en"))
        )
        yield from ((split, *texts) for texts in pairs)
    repository, config, columns = WMT23[language]
    own = (pair for paths in files for pair in read_pairs(paths))
    pairs = own if files else hub_rows(repository, config, "train", streaming=True, column=columns)
    yield from (("train", *texts) for texts in pairs)


def flores_pairs(language: str, split: str) -> Iterator[tuple[str, str]]:
    repository, columns = "openlanguagedata/flores_plus", ("id", "text")
    sides = (hub_rows(repository, FLORES[side], split, streaming=True, column=columns) for side in (language, "en"))
    for one, two in zip_longest(*sides, fillvalue=("", "")):
        if one[0] != two[0]:
            raise ValueError(
                f"{repository}: {FLORES[language]} and {FLORES['en']} have other sentences ({one[0]}, {two[0]})"
            )
        yield one[1], two[1]


def sacrebleu_files(test_set: str, pair: str) -> list[Path]:
    """The source and the first reference, downloaded by sacrebleu."""
    try:
        from sacrebleu.utils import get_reference_files, get_source_file
    except ImportError as error:
        raise ImportError(f"{test_set} needs sacrebleu: pip install sacrebleu, or pass files with --source") from error
    try:
        return [Path(get_source_file(test_set, pair)), Path(get_reference_files(test_set, pair)[0])]
    except (Exception, SystemExit) as error:  # it raises many kinds, and exits
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        hint = f"name local files {pair}.valid.* and {pair}.test.* and give --source"
        raise OSError(f"cannot download {test_set} {pair} ({reason}); {hint}") from error


def wmt10(source: Path | None, streaming: bool) -> dict[str, Pairs]:
    """Validated and tested on the sets that WMT gave with the pairs. `source` as for bitext."""
    return bitext(source, streaming) if source else {f"{language}-en": wmt10_pairs(language) for language in WMT10}


def wmt10_pairs(language: str) -> Pairs:
    columns = f"translation.{language}", "translation.en"
    for split, theirs in (("valid", "validation"), ("test", "test"), ("train", "train")):
        halved = language == "gu" and split != "train"
        theirs = "validation" if halved else theirs
        for texts in hub_rows(f"wmt/wmt{WMT10[language]}", f"{language}-en", theirs, streaming=True, column=columns):
            if not halved or split_of(texts[1], valid=0.5, test=0.5) == split:
                yield split, *texts


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
    "catalogs-en": Corpus(catalogs_en, "the message catalogs of Django", ("django",), pieces=4_000),
    **{f"multi30k-{x}": Corpus(partial(multi30k, x), "Multi30k, task 1", pieces=8_000) for x in ("de", "fr", "cs")},
    **{f"wmt23-{x}": Corpus(partial(wmt23, x), f"{WMT23[x][0]}, {WMT23[x][1]}", pieces=32_000) for x in WMT23},
    "wmt10": Corpus(wmt10, "wmt/wmt14 to wmt/wmt19", pieces=32_000),
}
