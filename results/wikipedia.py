"""Makes the text that the results on English Wikipedia were trained on.

    python -m results.wikipedia DOWNLOADS --out data/prepared/enwiki

DOWNLOADS holds train.txt and valid.txt (plain, .gz or .xz): articles as WikiExtractor leaves them, each under a line
`= Title =`, with a blank line between two. Every second one of the validation set is for the test. The vocabulary is
learned from the first training articles.
"""

import shutil
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import tyro

from data.files import one_of, read_documents
from data.prepare import PREPARED, prepare, summary
from data.tokenizers import train_sentencepiece

LEARNED_FROM = 4000  # articles


def main(downloads: tyro.conf.Positional[Path], out: Path = PREPARED / "enwiki", pieces: int = 8192):
    """See the head of this file."""
    folder = out.with_name(f"{out.name}.source")
    shutil.rmtree(folder, ignore_errors=True)  # what a killed call left
    (folder / "text").mkdir(parents=True)

    def write(split: str, articles: Iterable[str]):
        (folder / "text" / f"{split}.txt").write_text("\n\n".join(articles) + "\n")

    write("train", read_documents(one_of(downloads, "train.txt")))
    held_out = list(read_documents(one_of(downloads, "valid.txt")))
    write("valid", held_out[::2])
    write("test", held_out[1::2])
    learned_from = islice(read_documents(folder / "text" / "train.txt"), LEARNED_FROM)
    tokenizer = train_sentencepiece(learned_from, pieces).save(folder)
    print(summary(prepare("text", folder / "text", tokenizer, out=out)))


if __name__ == "__main__":
    tyro.cli(main)
