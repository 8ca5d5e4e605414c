"""The corpus of real text in four languages: no sentence that is scored, and no document in two splits."""

import json
import re

import pytest
from helpers import write_files

from data import corpora, multilingual
from data.batches import PairData, Prepared

SCORED = {  # one sentence of each kind of set
    "udpos/test-en.tsv": "A\tDET\nscored\tADJ\nsentence\tNOUN\n\n",
    "udpos/test-zh.tsv": "东\tPROPN\n京\tPROPN\n\n",
    "panx/test-de.tsv": "Berlin\tB-LOC\nist\tO\n\n",
    "xnli/test-de.tsv": "Ein Satz.\tScored hypothesis\tneutral\n",
    "pawsx/test-de.tsv": "Erstens\tZweitens, getestet\t1\n",
}
TRAINED = {"udpos": "Dogs\tNOUN\n{}\tNUM\n\n", "panx": "Dogs\tO\n{}\tO\n\n"}
TRAINED |= {"xnli": "one\t{}\tneutral\n", "pawsx": "one\t{}\t1\n"}
for task, row in TRAINED.items():
    SCORED[f"{task}/train-en.tsv"] = "".join(row.format(n) for n in range(40))
ANSWERED = []
for n in range(40):
    question = {"id": str(n), "question": f"Who is {n}?", "answers": [{"text": "Last", "answer_start": 23}]}
    ANSWERED.append({"paragraphs": [{"context": "First. Tested context. Last", "qas": [question]}]})
for name in ("squad/train-en", "xquad/xquad.en", "mlqa/test-en", "tydiqa/goldp.en.train", "tydiqa/goldp.en.dev"):
    SCORED[f"{name}.json"] = json.dumps({"data": ANSWERED})
DOWNLOADS = {
    "tatoeba/tatoeba.deu-eng.deu": "Eins zum Finden\n",
    "tatoeba/tatoeba.deu-eng.eng": "One to be found\n",
    "wordalign/de-en.src-tgt": "ausgerichtete Wörter ||| aligned words\n",
    "wordalign/de-en.gold": "1-1 2-2\n",
    "ntrex/DOCUMENT_IDS.tsv": "n2\nn2\nb\n",  # the first is in valid
    "ntrex/newstest2019-src.eng.txt": "News one\nNews two\nAligned\n",
    "ntrex/newstest2019-ref.deu.txt": "Nachricht eins\nausgerichtete Wörter\nNeues\n",
    "udhr/udhr.jsonl": json.dumps({"lang": "de", "text": "Alle Menschen\nTested context."}) + "\n",
    "enwiki-2021/train.txt": "= A =\nAn article. Ａ scored   sentence\n\n= B =\nAnother article\n",
    "enwiki-2021/valid.txt": "Held out\n",
    "multi30k/test_2016_flickr.de": "multi30k de 299\n",
}
for source, languages in {"multi30k": ("de", "fr"), "tatoeba-en-de": ("de",), "tatoeba-en-zh": ("zh",)}.items():
    for side in (*languages, "en"):
        scored_line = {"de": "Eins zum Finden", "en": "Something else", "zh": "东京"}.get(side, "...")
        rows = [f"{source} {side} {number}" for number in range(300)]
        DOWNLOADS[f"{source}/train.{side}"] = "\n".join([*rows, scored_line, f"{source} held out {side}"]) + "\n"
        DOWNLOADS[f"{source}/valid.{side}"] = f"{source} held out {side}\n"
HIDDEN = "scored sentence, Zweitens, getestet, Scored hypothesis, Tested context, Eins zum Finden, ausgerichtete, 东京"
HIDDEN += ", multi30k de 299"  # and of Multi30k's tests


def test_no_scored_sentence_is_in_the_real_text(tmp_path, monkeypatch, capsys):
    write_files(tmp_path / "tested", SCORED)
    write_files(tmp_path / "downloads", DOWNLOADS)
    messages = [("train", f"Nachricht {number}", f"Message {number}") for number in range(50)]
    messages += [("train", "Zweitens, getestet", "Second"), ("train", "Drittens", "Scored hypothesis")]
    messages += [("valid", "Viertens", "Fourth"), ("test", "Fünftens", "Fifth")]
    texts = {"de": [(split, one) for split, one, _ in messages], "en": [(split, two) for split, _, two in messages]}
    monkeypatch.setattr(corpora, "read", {"catalogs": texts, "catalogs-pairs": {"de-en": messages}}.get)
    monkeypatch.setattr(multilingual, "NTREX", {"en": "src.eng", "de": "ref.deu"})
    multilingual.main(tmp_path / "downloads", tmp_path / "tested", tmp_path / "out", pieces=320)
    assert "texts or pairs with a sentence that is scored" in capsys.readouterr().out
    corpus = Prepared(tmp_path / "out" / "multilingual", block_size=8, micro_tokens=8)
    pairs = PairData(tmp_path / "out" / "multilingual-pairs", 16, 64, 64, 0)
    assert corpus.tokenizer.sha256 == pairs.tokenizer.sha256
    assert corpus.languages == ["de", "en", "fr", "zh_Hans"] and pairs.languages == ["de-en", "fr-en", "zh_Hans-en"]
    written = {}  # whether of pairs, split -> everything
    for data in (corpus, pairs):
        for split, tokens in data.tokens.items():
            written[data is pairs, split] = data.tokenizer.decode(tokens.tolist())
    everything = "\n".join(written.values())
    for scored in HIDDEN.split(", "):
        assert scored not in everything
    for kept in ("Another article", "Nachricht 7", "tatoeba-en-de en 17", "Viertens", "Neues"):
        assert kept in everything
    for (_, split), text in written.items():
        assert ("tatoeba-en-de held out de" in text) == ("News one" in text) == (split == "valid")


BAD = [
    ("ntrex/DOCUMENT_IDS.tsv", None, "no DOCUMENT_IDS.tsv"),
    ("multi30k/train.de", "one\n", "not two texts"),
    ("wordalign/de-en.gold", "1-1 2-2\n1-1\n", "de-en.gold"),
]
for line in ("{}", "[]", "5", '{"lang": 5, "text": "a"}', '{"lang": "en"}', '{"lang": "en", "text": 5}', "[" * 100_000):
    BAD.append(("udhr/udhr.jsonl", line, "udhr.jsonl, line 1: no JSON object with the strings 'lang' and 'text'"))


@pytest.mark.parametrize("name, content, line", BAD)
def test_bad_downloads_are_one_line(name, content, line, tmp_path, monkeypatch):
    write_files(tmp_path, {file: text for file, text in (DOWNLOADS | {name: content}).items() if text is not None})
    monkeypatch.setattr(multilingual.xtreme, "TASKS", {})
    monkeypatch.setattr(multilingual, "NTREX", {"en": "src.eng", "de": "ref.deu"})
    monkeypatch.setattr(corpora, "read", lambda name: {})
    with pytest.raises((ValueError, OSError), match=re.escape(line)):
        multilingual.main(tmp_path, tmp_path, tmp_path / "out", pieces=320)
