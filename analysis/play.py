"""The playground: a page that shows what a model's routers do with a sentence, and lets you choose otherwise."""

import base64
import copy
import json
import math
import os
import threading
import webbrowser
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.shared import corpus_of
from engine import pretrained
from engine.config import Texts, check
from engine.device import seed_all, setup
from engine.files import read_json
from model import GPT, Encoder
from routers import NOT_CHOSEN, Router, Switch, Threshold, TopK

PAGE = Path(__file__).with_name("play.html")
CHOOSERS = {"threshold": Threshold, "topk": TopK, "switch": Switch}
SENTENCE = "Return the sum of all elements. If the list is empty, raise a ValueError instead of returning zero."
VALIDATION_TOKENS = 1 << 14  # from which the page knows what an expert serves
LISTED = 14  # tokens that it shows of an expert


@dataclass
class Play:
    run: str | None = None  # folder of a run of train_lm.py, train_mlm.py or train_electra.py; None: train_lm.py's demo
    text: Texts = ()  # a sentence to begin with; give it again for more
    port: int | None = None  # on 127.0.0.1; None: 8000, or any that is free
    open: bool = True  # opens the page in a browser
    out: str | None = None  # a file such as play.html: writes the page there and serves nothing


def play(options: Play, demos: Callable):
    """A page to play with: which experts your sentence's tokens ask for, which serve them, and how it could be.

    The trained router's probabilities are drawn, layer by layer, a row for each token, a column for each expert. The
    page chooses anew at once when you move the threshold, the capacity or K, or take another kind of router. It is
    served to this machine alone, until Ctrl-C; --out writes it as one file for any web host, with the sentences given.
    """
    check(options)
    player = Player(options.run or demos()[0])
    texts = options.text or [SENTENCE]
    data = player.about | {"routes": [player.route(text) for text in texts]}
    if options.out:
        page = page_of(data | {"live": False, "served": player.served})
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(page, encoding="utf-8")
        return print(f"{options.out} is the page, {len(page) / 1e3:.0f} kB; texts in it: {len(texts)}")
    page = page_of(data | {"live": True, "served": None})
    with listen(options.port) as server:
        server.player, server.page = player, page.encode()
        address = f"http://127.0.0.1:{server.server_port}/"
        print(f"{address} shows {player.run}, on this machine alone; Ctrl-C ends it", flush=True)
        if options.open:  # a browser in the terminal would wait for the page, and the page for it
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(flush=True)
            os._exit(0)  # a thread that answers may be inside torch, which aborts where Python ends in the usual way


def page_of(data: dict) -> str:
    """The page with its data inside. Whatever a text says, no `<` of it ends the element that the data stand in."""
    inside = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace("{{DATA}}", inside)


# ---------------------------------------------------------------------------------------------------------------------
# What is asked of the model


class Player:
    """A trained model, and what the page asks of it. Raises ValueError or OSError for one without experts."""

    def __init__(self, run: str):
        self.run = run
        self.model, self.tokenizer = pretrained.load(run)
        if not isinstance(self.model, GPT | Encoder) or not self.model.moe_layers:
            raise ValueError(f"{run} is no language model or encoder with experts: give another --run")
        self.decodes = isinstance(self.model, GPT)
        self.lock = threading.Lock()
        self.seen = []
        for moe in self.model.moe_layers:
            moe.watchers.append(lambda moe, h, routing, kept: self.seen.append((routing, kept)))
        self.about = self.of_model()

    def of_model(self) -> dict:
        """The run, how it routes at test, and the choosers that can take its router's place."""
        model, constants = self.model, vars(self.model.config)
        moe = model.moe_layers[0]
        router, chooser = moe.router, chooser_of(moe.router)
        if self.decodes:
            names = [f"block {depth}" for depth, block in enumerate(model.blocks, 1) if block.sparse]
        else:
            names = [f"after layer {depth}" for depth in model.moe_after]
        choosers = [*CHOOSERS] if hasattr(router, "experts") else []  # a hash has no probabilities to choose by
        if chooser == "own":
            choosers = ["own", *choosers]
        t = constants.get("eval_threshold")
        own = {
            "chooser": chooser,
            "t": constants.get("threshold", 0.5) if t is None else t,
            "K": router.K if chooser == "topk" else min(4, router.E),
            "gamma": moe.eval_capacity_factor if moe.eval_capacity_factor < router.E else None,  # None: no limit
        }
        about = {"run": self.run, "router": constants["router"], "names": names, "E": router.E}
        return about | {"own": own, "choosers": choosers}

    def read(self, text: str) -> list[int]:
        """The tokens of a text as the model reads them, uncut: behind the end of another text, or between marks."""
        text = text.encode("utf-8", "replace").decode()
        (ids,) = self.tokenizer.encode_batch([text])
        if not ids:
            raise ValueError("the text is empty: write one")
        if self.decodes:
            return [self.tokenizer.eot, *ids]
        return [self.tokenizer.bos, *ids, self.tokenizer.eos]

    def route(self, text: str) -> dict:
        """Tokens, their losses, and of each MoE layer the probabilities (S, E) and the run's own choices (S, E).

        The choices are ranks: an expert serves smaller ones first, and -1 is not chosen.
        """
        ids = self.read(text)
        shown = ids[: self.model.config.block_size]
        seen, loss = self.forward(torch.tensor([shown]))
        layers = []
        for routing, _ in seen:
            values, place = routing.priority.unique(return_inverse=True)
            rank = torch.where(routing.priority > NOT_CHOSEN, len(values) - 1 - place, -1)
            layers.append({"probs": packed(routing.probs, "<f4"), "rank": packed(rank, "<i4")})
        tokens = [written(self.tokenizer, token) for token in shown]
        return {"text": text, "tokens": tokens, "of": len(ids), "layers": layers, "loss": loss}

    def loss(self, text: str, setting: dict) -> dict:
        """The loss of every token where they choose as the page says: `own` of `about`, changed."""
        ids = self.read(text)[: self.model.config.block_size]
        _, loss = self.forward(torch.tensor([ids]), setting=setting)
        return {"loss": loss}

    @torch.no_grad()
    def forward(self, ids: Tensor, real: Tensor | None = None, setting=None) -> tuple[list, list | None]:
        """ids (B, T) -> [(routing, kept)] of the MoE layers, and a decoder's loss of each token of the first row."""
        given = (ids,) if self.decodes else (ids, real)
        with self.lock, routed(self.model, setting):
            self.seen.clear()
            seed_all(0)  # for a router that draws
            out, _ = self.model(*given)
            seen = [*self.seen]
        if not self.decodes:
            return seen, None  # it is loaded without its head
        logits = out[0, :-1].float()
        loss = F.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()
        return seen, [None, *(round(x, 4) if math.isfinite(x) else None for x in loss)]

    @cached_property
    def served(self) -> dict:
        """Of each layer and expert the tokens of the validation text that it serves most.

        layers: [token, how often the expert serves it, how often it occurs]; note: why there are none.
        """
        try:
            config = read_json(Path(self.run, "config.json"))
            data = corpus_of(self.model, self.run, config, setup("cpu", "float32"))
        except (ValueError, OSError, ImportError, KeyError) as error:
            return {"layers": None, "note": f"no validation text: {error}"}
        occurs = Counter()
        counts = [[Counter() for _ in range(moe.router.E)] for moe in self.model.moe_layers]
        for ids, real in self.held_out(data):
            seen, _ = self.forward(ids, real)
            row = ids.flatten() if real is None else ids.flatten()[real]  # (S,)
            occurs.update(row.tolist())
            for experts, (_, kept) in zip(counts, seen):
                for count, own in zip(experts, kept.t()):
                    count.update(row[own].tolist())

        def listed(count: Counter) -> list:
            return [[written(self.tokenizer, token), n, occurs[token]] for token, n in count.most_common(LISTED)]

        layers = [list(map(listed, experts)) for experts in counts]
        return {"layers": layers, "note": f"{occurs.total():,} tokens of the validation text"}

    def held_out(self, data) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Batches of the validation text, ids (B, T) and which are real; masked tokens are in their places again."""
        if self.decodes:
            for ids, _ in data.eval_batches("valid", VALIDATION_TOKENS):
                yield ids, None
        else:
            for _, _, batch in data.eval_batches("valid", 1, VALIDATION_TOKENS):
                whole = batch.ids.flatten().index_copy(0, batch.masked, batch.targets)
                yield whole.view_as(batch.ids), batch.real


def chooser_of(router) -> str:
    """The name under which the page has a run's router; "own" where it has none."""
    kind = type(router)
    if kind.forward is not Router.forward:
        return "own"
    if kind.choose is TopK.choose:
        return "switch" if router.K == 1 else "topk"
    names = {other.choose: name for name, other in CHOOSERS.items()}
    return names.get(kind.choose, "own")


@contextmanager
def routed(model, setting: dict | None):
    """Inside the `with`, tokens choose as the page says: by the same probabilities, in another class of router."""
    before = [(moe.router, moe.eval_capacity_factor) for moe in model.moe_layers]
    try:
        for moe in model.moe_layers if setting else ():
            moe.eval_capacity_factor = math.inf if setting["gamma"] is None else setting["gamma"]
            if setting["chooser"] != "own":
                moe.router = copy.copy(moe.router)  # with the same parameters
                moe.router.__class__ = kind = CHOOSERS[setting["chooser"]]
                moe.router.K = setting["K"] if kind is TopK else kind.K or moe.router.E
                moe.router.config = SimpleNamespace(threshold=setting["t"], eval_threshold=None)
        yield
    finally:
        for moe, (router, factor) in zip(model.moe_layers, before):
            moe.router, moe.eval_capacity_factor = router, factor


def packed(x: Tensor, kind: str) -> str:
    """The numbers of a tensor in base64, as the page reads them."""
    return base64.b64encode(x.numpy().astype(kind).tobytes()).decode()


def written(tokenizer, token: int) -> str:
    """A token as it is shown: a space is ·, the end of a line ⏎; what is invisible or part of a character is spelt."""
    if tokenizer.kind == "xlmr" and token <= tokenizer.unk:
        return ("<s>", "<pad>", "</s>", "<unk>")[token]
    if tokenizer.kind == "gpt2":
        text = tokenizer.encoding.decode_single_token_bytes(token)
    else:
        piece = token - 1 if tokenizer.kind == "xlmr" else token
        text = tokenizer.processor.id_to_piece(piece).encode()
        if tokenizer.processor.is_byte(piece):  # <0xE4>
            text = bytes([int(text[3:5], 16)])
    marks = {" ": "·", "\u2581": "·", "\n": "⏎", "\t": "⇥"}
    shown = ""
    for char in text.decode(errors="backslashreplace"):
        if char not in marks and not char.isprintable():
            char = repr(char)[1:-1]
        shown += marks.get(char, char)
    return shown


# ---------------------------------------------------------------------------------------------------------------------
# The server


class Handler(BaseHTTPRequestHandler):
    """GET is the page; the page posts JSON to /route, /loss and /served. Only pages of this server are answered."""

    timeout = 60

    def do_GET(self):
        if self.is_ours():
            self.answer(200, self.server.page, "text/html; charset=utf-8")

    def do_POST(self):
        if not self.is_ours():
            return
        player = self.server.player
        try:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/served":
                found = player.served
            elif self.path == "/loss":
                found = player.loss(asked["text"], asked["setting"])
            else:
                found = player.route(asked["text"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return self.answer(400, {"error": f"{error}"})
        self.answer(200, found)

    def is_ours(self) -> bool:
        """Whether the address was typed as we printed it, and no foreign page asks. Else says 403."""
        hosts = [f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")]
        origins = [None, *(f"http://{host}" for host in hosts)]
        ours = self.headers.get("Host") in hosts and self.headers.get("Origin") in origins
        if not ours:
            self.answer(403, {"error": "only pages of this server are answered"})
        return ours

    def answer(self, status: int, content: bytes | dict, kind: str = "application/json"):
        body = content if isinstance(content, bytes) else json.dumps(content, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """A browser that goes away is no error; nor does one request end the others."""


def listen(port: int | None) -> Server:
    """A server on 127.0.0.1. Raises OSError where the port that was asked for is taken."""
    try:
        return Server(("127.0.0.1", port or 8000), Handler)
    except OSError as error:
        if port:
            raise OSError(f"port {port} on 127.0.0.1: {error.strerror}") from None
        return Server(("127.0.0.1", 0), Handler)
