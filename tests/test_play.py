"""`analyze.py play`: the page's routing against routers.py, its numbers against the model's, and its server."""

import base64
import contextlib
import http.client
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from helpers import ROOT, Script, constants, save_run
from test_analyze import refused, run
from test_flops import SMALL
from test_train_electra import corpora as electra_corpora

import train_lm
from analysis import play
from data.batches import MaskedData
from data.tokenizers import XLMR, SentencePiece, load_tokenizer, train_sentencepiece
from engine import pretrained
from model import GPT, MaskedLM, MoE, Translator, within_capacity
from routers import NOT_CHOSEN, find_router

__all__ = ["electra_corpora"]  # a fixture
NODE = shutil.which("node")
TEXT = "the cat & the <script> sat\n\ton the mat שלום 中文 $x$"
HOSTILE = "</script><script>alert(1)</script><!-- \u202e\u2066 \u2028 \x00 \ud800 {{DATA}} & \\u003c"
SIZE = SMALL | dict(n_layer=4, n_embd=16, ffn_size=32, block_size=64, router_std=0.03)
SIZE |= dict(data="nowhere", seed=0, batch_tokens=64, micro_tokens=64, sampling_exponent=0.7, mask_share=0.15)
DECODERS = {
    "threshold": dict(router="threshold", eval_threshold=0.7, capacity=1.0),
    "topk": dict(router="topk", split=4, capacity=0.25),
    "switch": dict(router="switch", capacity=0.25),
    "hash": dict(router="hash", capacity=0.05),
    "base": dict(router="base", capacity=0.25),
}
FILE = ROOT / "examples/routers_of_today.py"
TODAY = {name: f"{FILE}:{name}" for name in ("bias", "shared", "relu", "null", "noisy")}
ENCODERS = {
    "hypersphere": dict(router="hypersphere", experts=8, moe_after=(1, 3)),
    "top-2": dict(router="topk", experts=8, top_k=2, relative_bias=True, moe_after=(2,), capacity_factor=0.5),
}


@pytest.fixture(autouse=True)
def routers_of_today():
    for name in TODAY.values():
        find_router(name)


@pytest.fixture(scope="session")
def tokenizers() -> dict:
    text = ["the cat sat on the mat <script> <b> & שלום x y z", "the 中 the cat sat " * 3]
    text.append("a quick brown fox jumps over")
    return {kind: train_sentencepiece(text, 296, kind) for kind in (SentencePiece, XLMR)}


@pytest.fixture
def made(tokenizers, tmp_path):
    """A run's folder with a random model: `made(GPT, router=...)`, or `made(MaskedLM, ...)`."""

    def make(kind, **changes):
        torch.manual_seed(0)
        tokenizer = tokenizers[SentencePiece if kind is GPT else XLMR]
        model = kind(constants(**SIZE | changes), tokenizer.vocab_size)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3.0)  # at initialization all tokens are routed nearly alike
        return save_run(tmp_path / f"run-{kind.__name__}", model, tokenizer)

    return make


def make_any(made, name: str):
    if name in TODAY:
        return made(GPT, router=TODAY[name], split=4, capacity=0.25)
    return made(GPT, **DECODERS[name]) if name in DECODERS else made(MaskedLM, **ENCODERS[name])


def unpacked(text: str, kind: str, E: int) -> torch.Tensor:
    """(S, E)"""
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), kind).reshape(-1, E).copy())


def data_of(page: str) -> dict:
    (inside,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(inside)


# ---------------------------------------------------------------------------------------------------------------------
# The page's routing


def in_the_page(expression: str, cases: list) -> list:
    """The values of a function of the page's script for each case."""
    (code,) = re.findall(r'<script id="choose">(.*?)</script>', play.PAGE.read_text(), re.S)
    code += f"""
    const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
    console.log(JSON.stringify(cases.map({expression})));
    """
    done = subprocess.run([NODE, "-e", code], input=json.dumps(cases), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# [requested, kept], two strings of 0 and 1, S * E long
CHOSEN = """({ chooser, probs, S, E, t, K, gamma, given }) => {
  const p = Float32Array.from(probs);
  const rank = given ? Int32Array.from(given) : ranks(chooser, p, inOrder(p, S, E), S, E, t, K);
  const kept = serve(rank, given ? new Float32Array(S * E) : p, S, E, capacity(S, E, gamma));
  return [Array.from(rank, (r) => (r >= 0 ? 1 : 0)).join(""), Array.from(kept).join("")];
}"""


def digits(mask) -> str:
    return "".join("01"[x] for x in mask.flatten().int().tolist())


def random_probabilities(S: int, E: int, ties: bool, seed: int) -> torch.Tensor:
    """(S, E); ties: between a token's experts, between an expert's tokens, and of sums with round thresholds."""
    rng = torch.Generator().manual_seed(seed)
    if ties:
        p = torch.randint(1, 4, (S, E), generator=rng) ** 2
        p = p[torch.randint(max(1, S // 2), (S,), generator=rng)].float()  # equal tokens
        return p / p.sum(dim=1, keepdim=True)
    sharp = 1 + 3 * torch.rand(S, 1, generator=rng)
    return (sharp * torch.randn(S, E, generator=rng)).softmax(dim=1)


@pytest.mark.skipif(not NODE, reason="needs node")
def test_the_page_chooses_as_the_routers_do():
    cases, expected, dropped = [], [], 0
    sizes = (1, 3), (5, 1), (7, 4), (33, 8), (64, 32), (100, 10)
    for seed, (S, E) in enumerate(sizes):
        for ties in (False, True):
            probs = random_probabilities(S, E, ties, seed)
            sums = probs.sort(dim=1, descending=True).values.cumsum(dim=1).flatten()
            edges = [float(sums[i]) for i in torch.randint(len(sums), (6,))]  # sums that just reach t
            settings = [("threshold", t, 1) for t in (0.0, 0.3, 0.5, 0.9, 0.999999, 1.0, *edges)]
            settings += [("topk", 0.5, K) for K in {1, min(2, E), E // 2 or 1, E}]
            settings.append(("switch", 0.5, 1))
            for chooser, t, K in settings:
                config = constants(threshold=min(t, 1.0), eval_threshold=None)
                router = play.CHOOSERS[chooser](config, E, K)
                moe = MoE(router, None, math.inf, math.inf).eval()
                priority = router.choose(probs, probs)
                for gamma in (None, 0.25, 1.0, 1.1, 2.5, 6.0, float(E)):
                    moe.eval_capacity_factor = math.inf if gamma is None else gamma
                    kept = within_capacity(priority, moe.capacity(S))
                    expected.append([digits(priority > NOT_CHOSEN), digits(kept)])
                    dropped += expected[-1][0] != expected[-1][1]
                    setting = dict(chooser=chooser, t=min(t, 1.0), K=K, gamma=gamma)
                    cases.append(setting | dict(probs=probs.flatten().tolist(), S=S, E=E))
    assert dropped > 300, "the limits hardly drop anything"
    for case, actual, masks in zip(cases, in_the_page(CHOSEN, cases), expected, strict=True):
        assert actual == masks, {name: case[name] for name in ("chooser", "t", "K", "gamma", "S", "E")}


@pytest.mark.skipif(not NODE, reason="needs node")
def test_every_stop_of_the_capacity_slider_is_another_capacity():
    cases = [[S, E, gamma] for S in (2, 22, 64, 500) for E in (1, 8, 32) for gamma in (0.3, 4.0, None)]
    values = in_the_page("([S, E, gamma]) => [stops(S, E, gamma), capacity(S, E, gamma)]", cases)
    for (S, E, trained), (stops, C) in zip(cases, values):
        assert [C, trained] in stops
        capacities = [capacity for capacity, _ in stops]
        assert capacities == sorted({*capacities})
        assert capacities[-1] == S
        for capacity, gamma in stops:
            assert capacity == reference.capacity(S, E, E if gamma is None else gamma)


@pytest.mark.skipif(not NODE, reason="needs node")
@pytest.mark.parametrize("name", [*DECODERS, *TODAY, *ENCODERS])
def test_the_page_routes_as_the_trained_model(name, made):
    """By the probabilities and by the ranks that the server sends."""
    folder = make_any(made, name)
    player = play.Player(str(folder))
    about, route = player.about, player.route(TEXT)
    other = dict.fromkeys(("hash", "base", "bias", "relu", "null"), "trained") | {"hypersphere": "switch"}
    other |= dict.fromkeys(("top-2", "shared", "noisy"), "topk")
    assert about["trained"]["chooser"] == other.get(name, name)
    assert ("topk" in about["choosers"]) == (name != "hash")
    names = {"hypersphere": ["after layer 1", "after layer 3"], "top-2": ["after layer 2"]}
    assert about["names"] == names.get(name, ["block 2", "block 4"])
    S, E, cases = len(route["tokens"]), about["E"], []
    for layer in route["layers"]:
        case = about["trained"] | {"S": S, "E": E, "probs": unpacked(layer["probs"], "<f4", E).flatten().tolist()}
        ranks = unpacked(layer["rank"], "<i4", E).flatten().tolist()
        cases += [case | {"given": ranks}] + [case] * (about["trained"]["chooser"] != "trained")
    model, tokenizer = pretrained.load(folder)
    ids, masks = tokenizer.encode_batch([TEXT])[0], []
    ids = [0, *ids, 2] if tokenizer.kind == "xlmr" else [tokenizer.eot, *ids]
    for moe in model.moe_layers:
        moe.watchers.append(lambda moe, h, routing, kept: masks.append([digits(routing.wanted), digits(kept)]))
    with torch.no_grad():
        model(torch.tensor([ids]))
    repeated = [layer for layer in masks for _ in range(len(cases) // len(masks))]
    assert in_the_page(CHOSEN, cases) == repeated
    drops = any(requested != kept for requested, kept in masks)
    assert drops == (name != "hypersphere")


# ---------------------------------------------------------------------------------------------------------------------
# The model


def test_the_loss_is_the_models_under_the_setting(made):
    folder = made(GPT, **DECODERS["threshold"])
    player = play.Player(str(folder))
    setting = player.about["trained"]
    trained = player.route(TEXT)["loss"]
    assert setting == {"chooser": "threshold", "t": 0.7, "K": 4, "gamma": 2.0}
    assert player.loss(TEXT, setting)["loss"] == trained
    assert trained[0] is None

    def expected(**changes) -> list:
        model, tokenizer = pretrained.load(folder, **changes)
        ids = torch.tensor([[tokenizer.eot, *tokenizer.encode_batch([TEXT])[0]]])
        with torch.no_grad():
            return F.cross_entropy(model(ids)[0][0, :-1], ids[0, 1:], reduction="none").tolist()

    assert trained[1:] == pytest.approx(expected(), abs=1e-4)
    inf = math.inf
    for change, constants_ in (
        (dict(t=0.2), dict(eval_threshold=0.2)),
        (dict(gamma=None), dict(eval_capacity=inf)),
        (dict(gamma=1.0), dict(eval_capacity=0.5)),
        (dict(chooser="topk", K=2), dict(router="topk", split=2)),
        (dict(chooser="switch", gamma=None), dict(router="switch", split=2, eval_capacity=inf)),
    ):
        loss = player.loss(TEXT, setting | change)["loss"]
        assert loss[1:] == pytest.approx(expected(**constants_), abs=2e-4), change
        assert loss != trained
    assert player.route(TEXT)["loss"] == trained  # the setting is reset
    draws = []
    player.model.moe_layers[0].watchers.append(lambda *_: draws.append(float(torch.rand(()))))  # as a router might
    for _ in range(2):
        player.route(TEXT)
    assert draws[0] == draws[1]


@pytest.mark.skipif(not NODE, reason="needs node")
@pytest.mark.parametrize("name", TODAY)
def test_choosers_replace_the_choice_of_any_router(name, made):
    """As the page shows it, also for null experts: further columns of scores, which no other chooser chooses."""
    player = play.Player(str(make_any(made, name)))
    about, ids = player.about, torch.tensor([player.read(TEXT)])
    S, E, cases, masks = ids.numel(), about["E"], [], []
    assert about["choosers"][-3:] == ["threshold", "topk", "switch"]
    for chooser, t, K in (("threshold", 0.2, 1), ("threshold", 1.0, 1), ("topk", 0.5, 3), ("switch", 0.5, 1)):
        setting = dict(chooser=chooser, t=t, K=K, gamma=2.0)
        seen, _ = player.forward(ids, setting=setting)
        for routing, kept in seen:
            assert routing.probs.shape == (S, E)
            cases.append(setting | dict(S=S, E=E, probs=routing.probs.flatten().tolist()))
            masks.append([digits(routing.wanted), digits(kept)])
    assert in_the_page(CHOSEN, cases) == masks


def test_choosers_keep_gates_and_shared_experts(made):
    """A ReLU router weights negative scores by 0, so choosing every expert changes nothing."""
    player = play.Player(str(make_any(made, "relu")))
    unlimited = player.about["trained"] | {"gamma": None}
    trained = player.loss(TEXT, unlimited)["loss"][1:]
    every = player.loss(TEXT, unlimited | {"chooser": "threshold", "t": 1.0})["loss"][1:]
    assert every == pytest.approx(trained, abs=2e-4)
    player = play.Player(str(make_any(made, "shared")))
    setting, trained = player.about["trained"], player.route(TEXT)["loss"]
    assert (setting["chooser"], setting["K"]) == ("topk", 3)
    assert player.loss(TEXT, setting)["loss"] == trained
    for moe in player.model.moe_layers:
        moe.router.beside = None
    assert player.loss(TEXT, setting)["loss"] != trained


def test_an_encoder_has_no_loss(made):
    player = play.Player(str(made(MaskedLM, **ENCODERS["top-2"])))
    assert player.route(TEXT)["loss"] is None
    assert player.loss(TEXT, player.about["trained"]) == {"loss": None}


def test_every_token_is_printable(tokenizers):
    def pieces(kind, text: str) -> list[str]:
        return [play.printable(tokenizers[kind], token) for token in tokenizers[kind].encode_batch([text])[0]]

    shown = pieces(SentencePiece, "the cat\n\tש中é\x00\u200f$")
    assert "".join(shown) == "the·cat⏎⇥ש中\\xc3\\xa9\\x00\\xe2\\x80\\x8f$"
    assert {"⏎", "\\xc3"} <= {*shown}
    assert "".join(pieces(XLMR, "cat 中")) == "·cat·中"
    assert [play.printable(tokenizers[XLMR], token) for token in (0, 2, 3)] == ["<s>", "</s>", "<unk>"]
    bytes_of = [b" cat", b"\n", "é".encode()[:1]].__getitem__
    gpt2 = SimpleNamespace(kind="gpt2", encoding=SimpleNamespace(decode_single_token_bytes=bytes_of))
    assert [play.printable(gpt2, token) for token in range(3)] == ["·cat", "⏎", "\\xc3"]


def test_the_tokens_that_an_expert_serves_most_are_counted(options, tmp_path, monkeypatch):
    """On a run of train_lm.py, against the routing of the same windows."""
    Script(train_lm).run(options | {"out_dir": tmp_path / "out", "steps": 2, "threshold": 0.9}, monkeypatch)
    (folder,) = (tmp_path / "out").iterdir()
    served = play.Player(str(folder)).served
    model, tokenizer = pretrained.load(folder)
    data = train_lm.TokenData.open(options["data"], model.config, play.setup("cpu", "float32"))
    keeps, [moe] = [], model.moe_layers
    moe.watchers.append(lambda moe, h, routing, kept: keeps.append(kept))
    batches = [ids for ids, _ in data.eval_batches("valid", play.VALIDATION_TOKENS)]
    with torch.no_grad():
        for ids in batches:
            model(ids)
    tokens, kept = torch.cat([ids.flatten() for ids in batches]), torch.cat(keeps)  # (S,), (S, E)
    occurs = Counter(tokens.tolist())
    assert served["note"] == f"{len(tokens):,} tokens of the validation text"
    for mask, top in zip(kept.t(), served["layers"][0], strict=True):
        count = Counter(tokens[mask].tolist())
        assert top
        assert [n for _, n, _ in top] == sorted(count.values(), reverse=True)[: play.LISTED]
        every = {(play.printable(tokenizer, token), n, occurs[token]) for token, n in count.items()}
        assert set(map(tuple, top)) <= every
    (folder / "config.json").write_text('{"data_checksum": "of another text"}')
    assert "no validation text: " in play.Player(str(folder)).served["note"]


def test_an_encoders_experts_together_serve_all_tokens(made, tokenizers, electra_corpora, monkeypatch):
    """Each token has one expert and there is no limit, so the counts add up to the unmasked validation text."""
    folder = electra_corpora["data"]
    monkeypatch.setitem(tokenizers, XLMR, load_tokenizer(folder, kind="xlmr"))
    run = made(MaskedLM, **ENCODERS["hypersphere"], data=str(folder))
    data = MaskedData(folder, block_size=64, micro_tokens=64)
    (run / "config.json").write_text(json.dumps({"data_checksum": f"{data.checksum}+checksum of pairs"}))
    monkeypatch.setattr(play, "LISTED", 1000)
    served = play.Player(str(run)).served
    rows = data.eval_rows("valid", play.VALIDATION_TOKENS)
    occurs = Counter(data.tokens["valid"].tolist()) + Counter({XLMR.bos: len(rows.lengths)})
    assert served["note"] == f"{occurs.total():,} tokens of the validation text"
    assert len(served["layers"]) == 2
    expected = Counter()
    for token, n in occurs.items():
        expected[play.printable(tokenizers[XLMR], token)] += n
    for experts in served["layers"]:
        total = Counter()
        for top in experts:
            total.update({token: n for token, n, _ in top})
        assert total == expected
        assert sum(bool(top) for top in experts) > 2


# ---------------------------------------------------------------------------------------------------------------------
# The page as a file


@pytest.mark.parametrize("text", [TEXT, HOSTILE, "none"])
def test_a_written_page_holds_its_text_as_data(text, made, tmp_path, monkeypatch, capsys):
    folder, file = made(GPT, **DECODERS["threshold"]), tmp_path / "pages" / "play.html"
    run(monkeypatch, "play", "--run", folder, "--text", text, "--out", file)
    assert re.search(rf"Wrote {file}: \d+ kB$", capsys.readouterr().out)
    page, player = file.read_text(), play.Player(str(folder))
    data = data_of(page)
    route = player.route(text)
    assert data["route"] == json.loads(json.dumps(route))
    assert route["text"] == text
    assert not data["live"]
    assert "no validation text" in data["served"]["note"]
    # No text adds an element to the page.
    plain = play.PAGE.read_text()
    for mark in ("<script", "</script", "<!--"):
        assert page.count(mark) == plain.count(mark)
    embedded = page[page.index('id="data">') + 10 : page.index("</script>")]
    assert page.replace(embedded, "{{DATA}}") == plain
    elsewhere = r"https?:|//cdn|@import|<link(?! rel=\"icon\")|src=|innerHTML|outerHTML|insertAdj|eval\("
    assert not re.search(elsewhere, plain)
    assert plain.count("{{DATA}}") == 1
    for slider in re.findall(r'<input id="(\w+)" type="range"', plain):
        assert f'<label for="{slider}">' in plain  # for screen readers


@pytest.mark.parametrize("name", ["topk", "top-2"])
def test_a_long_text_is_cut_to_block_size(made, name):
    route = play.Player(str(make_any(made, name))).route("x y " * 2500)
    assert len(route["tokens"]) == 64
    assert route["of"] > 2500


def test_unusable_runs_and_options_are_refused_in_one_line(made, tmp_path, monkeypatch, capsys):
    def error(*line) -> str:
        return refused(monkeypatch, capsys, "play", "--open", "false", "--run", *line)

    assert "does not exist: train it first" in error(tmp_path / "nothing")
    monkeypatch.chdir(tmp_path)
    message = "out/train_lm/demo does not exist: run python train_lm.py, or pass another run"
    assert message in refused(monkeypatch, capsys, "play")
    for kind in (GPT, MaskedLM, Translator):
        folder = made(kind, router="dense" if kind is not Translator else "topk")
        assert f"{folder} is not a language model or encoder with experts" in error(folder)
    folder = made(GPT, **DECODERS["topk"])
    assert "--text is empty: pass a value, or leave it out" in error(folder, "--text", "")
    assert "port must be between 1 and 65535, not 70000" in error(folder, "--port", "70000")
    (tmp_path / "file").write_text("in the way")
    assert "file" in error(folder, "--out", tmp_path / "file" / "play.html")
    with play.listen(0) as taken:
        assert f"port {taken.server_port} on 127.0.0.1: " in error(folder, "--port", taken.server_port)


# ---------------------------------------------------------------------------------------------------------------------
# The server


@pytest.fixture
def server(made):
    with play.listen(0) as server:
        server.player = play.Player(str(made(GPT, **DECODERS["threshold"])))
        server.page = play.page_of(server.player.about | {"live": True, "route": None, "served": None}).encode()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def request(server, method: str, path: str, body=None, **headers) -> tuple:
    """-> status, body, headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, json.loads(text) if "json" in response.headers["Content-Type"] else text, response.headers


def test_the_server_answers_its_own_page(server):
    status, page, headers = request(server, "GET", "/")
    assert status == 200
    assert headers["Content-Type"].startswith("text/html")
    assert data_of(page)["live"]
    assert "default-src 'none'" in page
    origin = f"http://127.0.0.1:{server.server_port}"
    status, route, _ = request(server, "POST", "/route", json.dumps({"text": HOSTILE}), Origin=origin)
    assert (status, route) == (200, json.loads(json.dumps(server.player.route(HOSTILE))))
    setting = server.player.about["trained"] | {"chooser": "topk", "K": 2}
    status, loss, _ = request(server, "POST", "/loss", json.dumps({"text": TEXT, "setting": setting}))
    assert (status, loss) == (200, server.player.loss(TEXT, setting))
    status, served, _ = request(server, "POST", "/served", "{}")
    assert status == 200
    assert "no validation text" in served["note"]
    assert server.server_address[0] == "127.0.0.1"


def test_the_server_refuses_other_hosts_and_origins(server):
    port, body = server.server_port, json.dumps({"text": TEXT})
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", "", "0.0.0.0"):
        for method, path in (("GET", "/"), ("POST", "/route"), ("GET", "/nothing")):
            assert request(server, method, path, body, Host=host)[0] == 403, host
    assert request(server, "GET", "/", Host=f"localhost:{port}")[0] == 200
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{port}", "http://127.0.0.1"):
        assert request(server, "POST", "/route", body, Origin=origin)[0] == 403, origin
        assert request(server, "GET", "/", Origin=origin)[0] == 403
    assert request(server, "DELETE", "/", body)[0] == 501
    assert request(server, "POST", "/route", Content_Length="x")[0] == 400
    assert request(server, "POST", "/route", json.dumps({"text": "x " * 500_000}))[0] == 200  # a megabyte


def test_malformed_requests_get_an_error_in_one_line(server):
    trained = server.player.about["trained"]
    bad = ["", "{", "null", "{}", '{"text": 3}', '{"text": ""}', '{"text": null}', "\xff"]
    for body in bad:
        status, answer, _ = request(server, "POST", "/route", body.encode("latin-1"))
        assert status == 400, body
        assert "\n" not in answer["error"], body
    for change in ({"chooser": "hash"}, {"t": "x"}, {"chooser": "topk", "K": "x"}, {"gamma": math.nan}):
        body = json.dumps({"text": TEXT, "setting": trained | change})
        status, answer, _ = request(server, "POST", "/loss", body)
        assert (status, [*answer]) == (400, ["error"]), change
    body = json.dumps({"text": TEXT, "setting": trained})
    assert request(server, "POST", "/loss", body)[0] == 200  # still running


def test_ctrl_c_stops_the_server(made):
    """Even while it answers requests."""
    folder = made(GPT, **DECODERS["switch"])
    with play.listen(0) as free:
        port = str(free.server_port)
    command = [sys.executable, ROOT / "analyze.py", "play", "--run", folder, "--open", "false", "--port", port]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        line = process.stdout.readline()
        server = SimpleNamespace(server_port=int(re.search(r"http://127\.0\.0\.1:(\d+)/", line)[1]))
        assert request(server, "GET", "/")[0] == 200

        def keep_asking():
            with contextlib.suppress(OSError, http.client.HTTPException):
                while True:
                    request(server, "POST", "/route", json.dumps({"text": TEXT}))

        others = [threading.Thread(target=keep_asking) for _ in range(3)]
        for other in others:
            other.start()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30)
        for other in others:
            other.join()
    assert process.returncode == 0
    assert (out.strip(), error) == ("", "")
