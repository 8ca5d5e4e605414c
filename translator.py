"""The encoder-decoder with sparse experts (XMoE 4.2), its incremental decoding, and beam search.

Every `moe_every`-th block has experts in place of its FFN, in the encoder and, with `decoder_moe`, in the decoder; with
`moe_after`, X-MoE's sparse layers stand in the encoder instead. Where the papers say "Transformer" and no more: norms
come first, positions are sinusoids, one matrix embeds sources and translations and makes the logits. Tensor letters:
B sentences, K beams of each, N tokens of a source, T of a translation, S tokens that are not padding, D model width,
H heads, V vocabulary.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import FFN, ModelConfig, MoE, SparseModel, check_depths, inserted_defaults


@dataclass
class TranslatorConfig(ModelConfig):
    """Left to themselves, all routers get the same parameters and FLOPs, as in the decoder (XMoE eq. 6)."""

    n_layer: int = 4  # of the encoder
    decoder_layers: int = 2  # of the decoder
    dropout: float = 0.1  # after embeddings, attention and FFN
    init_std: float = 0.04  # of the normal that weights start from
    expert_ffns: int = 8  # a sparse layer has as many parameters as so many FFNs; the paper: 32
    decoder_moe: bool = True  # experts in the decoder too (the text; the authors' configurations: the encoder alone)
    moe_after: str | None = None  # X-MoE: sparse layers stand after these encoder layers, such as 3,6, and nowhere else
    expert_layers: int | None = None  # FFNs of an expert, each with a norm and a residual; default: 3 with moe_after
    num_experts: int | None = None  # E; default: as many parameters as expert_ffns FFNs; 32 with moe_after
    top_k: int | None = None  # K of topk; default: ffn_size / expert_size; 2 with moe_after
    capacity_factor: float | None = None  # gamma, inf for no limit; default: ffn_size / expert_size (equal FLOPs)
    renormalize: bool | None = None  # softmax gate over the K chosen only; default: with moe_after and topk
    balance_choices: str | None = None  # choices that the balance loss counts; default: first; with both of these, all

    def __post_init__(self):
        if self.router == "dense":
            self.moe_after = None
        if self.router == "dense" or self.moe_after:  # what then means nothing makes no other run
            self.moe_every, self.expert_ffns, self.decoder_moe = 2, 8, True
        self.expert_layers = (3 if self.moe_after else 0) if self.expert_layers is None else self.expert_layers
        if self.decoder_layers < 1 or self.expert_ffns < 1:
            raise ValueError(f"decoder_layers, expert_ffns = {self.decoder_layers}, {self.expert_ffns}: not positive")
        super().__post_init__()
        check_depths(self)
        if self.select == "expert_choice" and self.sparse_blocks(decoder=True):
            raise ValueError("expert_choice sees later tokens, so it cannot translate: add --decoder_moe false")

    def sparse_defaults(self):
        if self.moe_after:
            inserted_defaults(self)
            return
        super().sparse_defaults()
        self.renormalize, self.balance_choices = bool(self.renormalize), self.balance_choices or "first"

    @property
    def sparse_after(self) -> list[int]:
        """The encoder layers, from 1, behind which X-MoE's layers stand."""
        return sorted(int(depth) for depth in self.moe_after.split(",")) if self.moe_after else []

    def sparse(self, layer: int, decoder: bool = False) -> bool:
        """Whether block `layer` (from 0) of the encoder or of the decoder has experts in place of its FFN."""
        return not self.moe_after and (self.decoder_moe or not decoder) and super().sparse(layer)

    def sparse_blocks(self, decoder: bool) -> int:
        return sum(self.sparse(i, decoder) for i in range(self.decoder_layers if decoder else self.n_layer))

    @property
    def num_sparse(self) -> int:
        return self.sparse_blocks(False) + self.sparse_blocks(True) + len(self.sparse_after)

    @property
    def num_ffns(self) -> int:
        return self.n_layer + self.decoder_layers - self.sparse_blocks(False) - self.sparse_blocks(True)


class Attention(nn.Module):
    """Queries of (B, T, D) look at keys and values that were made of (B, N, D): the same sequence, or the source."""

    def __init__(self, config: TranslatorConfig):
        super().__init__()
        D, self.n_head = config.n_embd, config.n_head
        self.q, self.kv, self.proj = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)

    def keys_values(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """(B, N, D) -> (B, H, N, D / H) each"""
        return self.kv(h).unflatten(2, (2, self.n_head, -1)).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, h: Tensor, kv: tuple[Tensor, Tensor], mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """mask (B, 1, 1, N) bool: which keys may be looked at; None: all."""
        q = self.q(h).unflatten(2, (self.n_head, -1)).transpose(1, 2)  # (B, H, T, D / H)
        return self.proj(F.scaled_dot_product_attention(q, *kv, mask, is_causal=causal).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Each part reads a norm of the residual stream and adds to it; only the decoder's blocks look at the source."""

    def __init__(self, config: TranslatorConfig, sparse: bool, decoder: bool):
        super().__init__()
        self.attn, self.ln_1, self.ln_2 = Attention(config), nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        if decoder:
            self.cross, self.ln_c = Attention(config), nn.LayerNorm(config.n_embd)
        self.ffn, self.sparse, self.dropout = MoE(config) if sparse else FFN(config), sparse, nn.Dropout(config.dropout)

    def add_ffn(self, x: Tensor, ids: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor | float]:
        h = self.ln_2(x)
        y, balance = self.ffn(h, ids, real) if self.sparse else (self.ffn(h), 0.0)
        return x + self.dropout(y), balance

    def encode(self, x: Tensor, ids: Tensor, real: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """(B, N, D) -> the same, balance loss"""
        h = self.ln_1(x)
        x = x + self.dropout(self.attn(h, self.attn.keys_values(h), mask))
        return self.add_ffn(x, ids, real)

    def decode(self, x: Tensor, ids: Tensor, real: Tensor | None, source, mask: Tensor | None, past):
        """(R, T, D) -> the same, balance loss, keys and values of all positions so far.

        source: keys and values of B sources; mask (B, 1, 1, N). R is B, or B * K where the beams of a sentence lie side
        by side and share its keys and values. past: keys and values of the positions before, None if there are none.
        """
        h = self.ln_1(x)
        kv = self.attn.keys_values(h)
        if past is not None:
            kv = tuple(torch.cat(pair, dim=2) for pair in zip(past, kv))
        x = x + self.dropout(self.attn(h, kv, causal=past is None))
        h = self.ln_c(x).view(len(source[0]), -1, x.shape[2])  # (B, K * T, D): here queries need no order
        x = x + self.dropout(self.cross(h, source, mask)).view_as(x)
        return *self.add_ffn(x, ids, real), kv


class Source(NamedTuple):
    """What the decoder looks at: keys and values (B, H, N, D / H) for each of its blocks, and mask (B, 1, 1, N)."""

    keys_values: list[tuple[Tensor, Tensor]]
    mask: Tensor | None

    def rows(self, chosen: Tensor) -> "Source":
        mask = None if self.mask is None else self.mask[chosen]
        return Source([(k[chosen], v[chosen]) for k, v in self.keys_values], mask)


class Translator(SparseModel):
    """Encoder-decoder: source and what is written so far -> logits of the next token, and the balance loss."""

    def __init__(self, config: TranslatorConfig):
        super().__init__()
        self.config, self.sparse_after = config, config.sparse_after
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.encoder = nn.ModuleList(Block(config, config.sparse(i), False) for i in range(config.n_layer))
        self.moes = nn.ModuleList(MoE(config) for _ in self.sparse_after)
        self.decoder = nn.ModuleList(Block(config, config.sparse(i, True), True) for i in range(config.decoder_layers))
        self.ln_e, self.ln_d = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        # As in GPT-2, what writes to the residual stream starts smaller, the deeper the model.
        self.draw(config.init_std, config.init_std / math.sqrt(2 * max(config.n_layer, config.decoder_layers)))

    @property
    def moe_names(self) -> list[str]:
        """Where the MoE layers stand, in the order of `stats`."""
        blocks = {"encoder block": self.encoder, "decoder block": self.decoder}
        names = {id(block.ffn): f"{part} {i}" for part, own in blocks.items() for i, block in enumerate(own, 1)}
        names |= {id(moe): f"after encoder block {depth}" for moe, depth in zip(self.moes, self.sparse_after)}
        return [names[id(moe)] for moe in self.moe_layers]

    def embed(self, ids: Tensor, first: int = 0) -> Tensor:
        """ids (B, T), whose first stands at position `first` -> (B, T, D)"""
        D, place = self.config.n_embd, torch.arange(first, first + ids.shape[1], device=ids.device)
        turn = torch.exp(torch.arange(0, D, 2, device=ids.device) * (-math.log(10_000) / D))
        angle = place[:, None] * turn  # (T, D / 2)
        sinusoids = torch.cat([angle.sin(), angle.cos()], dim=1)[:, :D].to(self.wte.weight.dtype)
        return self.dropout(math.sqrt(D) * self.wte(ids) + sinusoids)

    def encode(self, ids: Tensor, real: Tensor | None = None) -> tuple[Source, Tensor]:
        """ids (B, N), real (S,) places in B * N of what is not padding, None if all is -> source, balance loss."""
        mask = None
        if real is not None:
            mask = ids.new_zeros(ids.numel(), dtype=torch.bool).index_fill_(0, real, True)
            mask = mask.view(len(ids), 1, 1, -1)
        x, total, moes = self.embed(ids), self.ln_e.weight.new_zeros(()), list(self.moes)
        for depth, block in enumerate(self.encoder, 1):
            x, balance = block.encode(x, ids, real, mask)
            total = total + balance
            for _ in range(self.sparse_after.count(depth)):  # X-MoE eq. 2
                y, balance = moes.pop(0)(x, ids, real)
                x, total = x + y, total + balance
        h = self.ln_e(x)
        return Source([block.cross.keys_values(h) for block in self.decoder], mask), total

    def decode(self, ids: Tensor, source: Source, past: list | None = None, real: Tensor | None = None):
        """ids (R, T) -> hidden states (R, T, D), balance loss, what to pass as `past` with the next ids, (R, 1).

        Raises ValueError where several ids come behind a past.
        """
        if past and ids.shape[1] > 1:
            raise ValueError(f"behind a past comes one token at a time, not {ids.shape[1]}")
        x = self.embed(ids, past[0][0].shape[2] if past else 0)
        total, present = self.ln_d.weight.new_zeros(()), []
        for block, kv, before in zip(self.decoder, source.keys_values, past or [None] * len(self.decoder)):
            x, balance, so_far = block.decode(x, ids, real, kv, source.mask, before)
            total = total + balance
            present.append(so_far)
        return self.ln_d(x), total, present

    def forward(
        self, source: Tensor, target: Tensor, source_real: Tensor | None = None, target_real: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """source (B, N), target (B, T) -> logits (M, V) at the M tokens of the target that are real, balance loss.

        source_real, target_real: places in B * N and in B * T of what is not padding, ascending; None if all is.
        """
        encoded, balance = self.encode(source, source_real)
        h, more, _ = self.decode(target, encoded, real=target_real)
        h = h.flatten(0, 1)
        h = h if target_real is None else h.index_select(0, target_real)
        return F.linear(h, self.wte.weight), balance + more

    @torch.no_grad()
    def translate(
        self,
        source: Tensor,
        real: Tensor | None = None,
        *,
        bos: int,
        eos: int,
        never: tuple[int, ...] = (),
        beam: int = 5,
        length_penalty: float = 1.0,
        limit: bool = False,
        cache: bool = True,
    ) -> list[list[int]]:
        """The best translation that beam search finds of each source (B, N), ids without <s> and </s>.

        Sources end in </s>. Of a source of n tokens before it a translation has at most 1.2 n + 10. Its score is the
        sum of its log probabilities, over its length with </s> to the power of `length_penalty`; a search ends when
        `beam` translations have ended among the best `beam` continuations. `never` are ids that no text is made of.
        Experts have no capacity limit, so that a translation depends on nothing but its source; with `limit` they have
        the evaluation's. Without `cache` all that is written is computed again for every token: the same translations,
        but for rounding and for the limit, which then counts other rows.
        """
        was_training, K = self.training, beam
        self.eval()
        limit = limit or self.config.select == "expert_choice"  # to which the limit is what chooses
        with nullcontext() if limit else self.test_routing(capacity_factor=math.inf):
            encoded, _ = self.encode(source, real)
            B, device = len(source), source.device
            n = torch.full((B,), source.shape[1], device=device) if real is None else encoded.mask.sum(dim=(1, 2, 3))
            most = 6 * (n - 1) // 5 + 10  # (B,)
            state = Search(B, K, int(most.max()), bos, device)
            banned = torch.tensor(never, dtype=torch.int64, device=device)
            found, past = [[] for _ in range(B)], None
            for t in range(int(most.max()) + 1):
                written = state.written.flatten(0, 1)  # (B * K, 1 + t)
                h, _, past = self.decode(written[:, -1:] if cache else written, encoded, past)
                with torch.autocast(device.type, enabled=False):  # beams are told apart by small differences
                    scores = F.linear(h[:, -1].to(self.wte.weight.dtype), self.wte.weight).log_softmax(dim=1)
                scores.index_fill_(1, banned, -math.inf)
                last = t >= most  # nothing but </s> may follow
                scores = scores.view(-1, K, scores.shape[1])
                scores[:, :, :eos].masked_fill_(last[:, None, None], -math.inf)
                scores[:, :, eos + 1 :].masked_fill_(last[:, None, None], -math.inf)
                order = state.step(scores, eos, length_penalty)
                going = ~(state.ended >= K) & ~last
                if not going.all():
                    for number, ids in zip(state.number[~going].tolist(), state.best_ids(~going)):
                        found[number] = ids
                    if not going.any():
                        break
                    order, encoded, most = order[going], encoded.rows(going), most[going]
                    state.keep(going)
                past = [tuple(x.index_select(0, order.flatten()) for x in kv) for kv in past] if cache else None
        self.train(was_training)
        return found


class Search:
    """The state of a beam search over B sentences with K beams each; sentences leave it as they end."""

    def __init__(self, B: int, K: int, most: int, bos: int, device):
        self.K = K
        self.number = torch.arange(B, device=device)  # of each sentence that is still here
        self.written = torch.full((B, K, 1), bos, device=device)  # (B, K, 1 + t)
        self.score = torch.full((B, K), -math.inf, device=device)  # of what is written
        self.score[:, 0] = 0.0  # all beams begin alike: only one may go on
        self.ended = torch.zeros(B, dtype=torch.int64, device=device)  # translations that have ended
        self.best = torch.full((B,), -math.inf, device=device)  # the best of these, its length and its ids
        self.length = torch.zeros(B, dtype=torch.int64, device=device)
        self.ids = torch.zeros(B, most, dtype=torch.int64, device=device)

    def step(self, scores: Tensor, eos: int, length_penalty: float) -> Tensor:
        """Takes log probabilities (B, K, V) of the next token; -> (B, K) the rows, of all B * K, that go on."""
        (B, K, V), t = scores.shape, self.written.shape[2] - 1
        # Of 2 K continuations at most K are ends, so that K go on.
        score, place = (self.score[:, :, None] + scores).flatten(1).topk(2 * K)  # (B, 2 K)
        beam, token = place // V, place % V
        end = (token == eos) & score.isfinite()

        value = torch.where(end, score / (t + 1) ** length_penalty, -math.inf)[:, :K]
        value, which = value.max(dim=1)
        better = value > self.best
        ids = self.written[torch.arange(B, device=place.device), beam.gather(1, which[:, None])[:, 0], 1:]  # (B, t)
        self.ids[:, :t] = torch.where(better[:, None], ids, self.ids[:, :t])
        self.length, self.best = torch.where(better, t, self.length), torch.where(better, value, self.best)
        self.ended += end[:, :K].sum(dim=1)

        self.score, place = score.masked_fill(token == eos, -math.inf).topk(K)
        beam, token = beam.gather(1, place), token.gather(1, place)
        written = self.written.gather(1, beam[:, :, None].expand(-1, -1, t + 1))
        self.written = torch.cat([written, token[:, :, None]], dim=2)
        return beam + K * torch.arange(B, device=beam.device)[:, None]

    def best_ids(self, chosen: Tensor) -> list[list[int]]:
        return [ids[:n] for ids, n in zip(self.ids[chosen].tolist(), self.length[chosen].tolist())]

    def keep(self, chosen: Tensor):
        for name in ("number", "written", "score", "ended", "best", "length", "ids"):
            setattr(self, name, getattr(self, name)[chosen])
