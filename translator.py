"""The encoder-decoder with sparse experts (XMoE 4.2), its incremental decoding, and beam search.

Every `moe_every`-th block has experts in place of its FFN, in the encoder and, with `decoder_moe`, in the decoder; with
`moe_after`, X-MoE's sparse layers stand in the encoder instead. Where the papers say "Transformer" and no more: norms
come first, positions are sinusoids, one matrix embeds sources and translations and makes the logits. Tensor letters:
B sentences, K beams of each, R rows of the decoder (B, or B * K), N tokens of a source, T of a translation, S tokens
that are not padding, M of a target, D model width, H heads, V vocabulary.
"""

import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import FFN, ModelConfig, MoE, SparseModel, real_mask

KeysValues = tuple[Tensor, Tensor]  # of one block: (B, H, N, D / H) each


class Attention(nn.Module):
    """Queries of (B, T, D) look at keys and values that were made of (B, N, D): the same sequence, or the source."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, self.n_head = config.n_embd, config.n_head
        self.q = nn.Linear(D, D)
        self.kv = nn.Linear(D, 2 * D)
        self.proj = nn.Linear(D, D)

    def keys_values(self, h: Tensor) -> KeysValues:
        """(B, N, D) -> (B, H, N, D / H) each"""
        k, v = self.kv(h).chunk(2, dim=2)
        return self.heads(k), self.heads(v)

    def heads(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, H, N, D / H)"""
        return x.unflatten(2, (self.n_head, -1)).transpose(1, 2)

    def forward(self, h: Tensor, kv: KeysValues, mask: Tensor | None, causal: bool = False) -> Tensor:
        """mask (B, 1, 1, N) bool: which keys may be looked at; None: all."""
        q = self.heads(self.q(h))  # (B, H, T, D / H)
        y = F.scaled_dot_product_attention(q, *kv, mask, is_causal=causal)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Each part reads a norm of the residual stream and adds to it; only the decoder's blocks look at the source."""

    def __init__(self, config: ModelConfig, sparse: bool, decoder: bool):
        super().__init__()
        D = config.n_embd
        self.ln_1, self.attn = nn.LayerNorm(D), Attention(config)
        if decoder:
            self.ln_c, self.cross = nn.LayerNorm(D), Attention(config)
        self.ln_2, self.sparse = nn.LayerNorm(D), sparse
        self.ffn = MoE(config, "tanh") if sparse else FFN(config, "tanh")
        self.dropout = nn.Dropout(config.dropout)

    def encode(self, x: Tensor, ids: Tensor, real: Tensor | None, mask: Tensor | None):
        """(B, N, D) -> the same, balance loss"""
        h = self.ln_1(x)
        y = self.attn(h, self.attn.keys_values(h), mask)
        return self.add_ffn(x + self.dropout(y), ids, real)

    def decode(
        self,
        x: Tensor,
        ids: Tensor,
        real: Tensor | None,
        source: KeysValues,
        mask: Tensor | None,
        past: KeysValues | None,
    ):
        """(R, T, D) -> the same, balance loss, keys and values of all positions so far.

        source: of B sources; mask (B, 1, 1, N). R is B, or B * K where the beams of a sentence lie side by side and
        share its keys and values. past: of the positions before, None if there are none.
        """
        h = self.ln_1(x)
        k, v = self.attn.keys_values(h)
        if past is not None:
            k = torch.cat([past[0], k], dim=2)
            v = torch.cat([past[1], v], dim=2)
        y = self.attn(h, (k, v), None, causal=past is None)
        x = x + self.dropout(y)
        B = len(source[0])
        h = self.ln_c(x).view(B, -1, x.shape[2])  # (B, K * T, D): here queries need no order
        y = self.cross(h, source, mask).view_as(x)
        x, balance = self.add_ffn(x + self.dropout(y), ids, real)
        return x, balance, (k, v)

    def add_ffn(self, x: Tensor, ids: Tensor, real: Tensor | None):
        h, balance = self.ln_2(x), 0.0
        if self.sparse:
            y, balance = self.ffn(h, ids, real)
        else:
            y = self.ffn(h)
        return x + self.dropout(y), balance


class Source(NamedTuple):
    """What the decoder looks at."""

    keys_values: list[KeysValues]  # for each of its blocks
    mask: Tensor | None  # (B, 1, 1, N) bool, True where a token is not padding; None: everywhere

    def sentences(self, stay: Tensor) -> "Source":
        """stay (B,) bool -> those sentences alone"""
        mask = None if self.mask is None else self.mask[stay]
        return Source(rows_of(self.keys_values, stay), mask)


def rows_of(keys_values: list[KeysValues], rows: Tensor) -> list[KeysValues]:
    return [(k[rows], v[rows]) for k, v in keys_values]


class Translator(SparseModel):
    """Encoder-decoder: source and what is written so far -> logits of the next token, and the balance loss.

    Raises ValueError for expert_choice in the decoder, whose experts choose among tokens that are not written yet.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, D = config, config.n_embd
        self.moe_after = [] if config.router == "dense" else sorted(config.moe_after)
        self.wte = nn.Embedding(config.vocab_size, D)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = self.blocks(config.n_layer, decoder=False)
        self.moes = nn.ModuleList(MoE(config, "tanh") for _ in self.moe_after)
        self.decoder = self.blocks(config.decoder_layers, decoder=True)
        self.ln_e = nn.LayerNorm(D)
        self.ln_d = nn.LayerNorm(D)
        for block in self.decoder:
            if block.sparse and block.ffn.router.select == "expert_choice":
                raise ValueError("expert_choice sees later tokens, so it cannot translate: add --decoder_moe false")
        # As in GPT-2, what writes to the residual stream starts smaller, the deeper the model.
        depth = max(config.n_layer, config.decoder_layers)
        self.draw(config.init_std, config.init_std / math.sqrt(2 * depth))

    def blocks(self, layers: int, decoder: bool) -> nn.ModuleList:
        config, blocks = self.config, nn.ModuleList()
        in_place_of_ffns = config.router != "dense" and not config.moe_after
        if decoder and not config.decoder_moe:
            in_place_of_ffns = False
        for depth in range(1, 1 + layers):
            sparse = in_place_of_ffns and depth % config.moe_every == 0
            blocks.append(Block(config, sparse, decoder))
        return blocks

    @property
    def moe_names(self) -> list[str]:
        """Where the MoE layers stand, in the order of `moe_layers`."""
        names = [f"encoder block {i}" for i, block in enumerate(self.encoder, 1) if block.sparse]
        names += [f"after encoder block {depth}" for depth in self.moe_after]
        names += [f"decoder block {i}" for i, block in enumerate(self.decoder, 1) if block.sparse]
        return names

    def embed(self, ids: Tensor, first: int = 0) -> Tensor:
        """ids (B, T), whose first stands at position `first` -> (B, T, D)"""
        x = math.sqrt(self.config.n_embd) * self.wte(ids)
        position = torch.arange(first, first + ids.shape[1], device=ids.device)
        return self.dropout(x + sinusoids(position, self.config.n_embd).to(x.dtype))

    def encode(self, ids: Tensor, real: Tensor | None = None) -> tuple[Source, Tensor]:
        """ids (B, N), real (S,) places in B * N of what is not padding, None if all is -> source, balance loss."""
        mask = None
        if real is not None:
            mask = real_mask(ids, real)[:, None, None]
        x = self.embed(ids)
        total = self.ln_e.weight.new_zeros(())
        for depth, block in enumerate(self.encoder, 1):
            x, balance = block.encode(x, ids, real, mask)
            total = total + balance
            for moe, after in zip(self.moes, self.moe_after):
                if after == depth:  # X-MoE eq. 2
                    y, balance = moe(x, ids, real)
                    x, total = x + y, total + balance
        h = self.ln_e(x)
        keys_values = [block.cross.keys_values(h) for block in self.decoder]
        return Source(keys_values, mask), total

    def decode(
        self,
        ids: Tensor,
        source: Source,
        past: list[KeysValues] | None = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list[KeysValues]]:
        """ids (R, T) -> hidden states (R, T, D), balance loss, what to pass as `past` with the next ids, (R, 1).

        Raises ValueError where several ids come behind a past.
        """
        if past and ids.shape[1] > 1:
            raise ValueError(f"behind a past comes one token at a time, not {ids.shape[1]}")
        x = self.embed(ids, first=past[0][0].shape[2] if past else 0)
        total = self.ln_d.weight.new_zeros(())
        present = []
        for i, block in enumerate(self.decoder):
            before = past[i] if past else None
            x, balance, so_far = block.decode(x, ids, real, source.keys_values[i], source.mask, before)
            total = total + balance
            present.append(so_far)
        return self.ln_d(x), total, present

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_real: Tensor | None = None,
        target_real: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """source (B, N), target (B, T) -> logits (M, V) at the tokens of the target that are real, balance loss.

        source_real, target_real: places in B * N and in B * T of what is not padding, ascending; None if all is.
        """
        encoded, balance = self.encode(source, source_real)
        h, more, _ = self.decode(target, encoded, real=target_real)
        h = h.flatten(0, 1)
        if target_real is not None:
            h = h.index_select(0, target_real)
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

        Sources end in </s>. Of a source of n tokens before it a translation has at most 1.2 n + 10. `never` are ids
        that no text is made of. Experts have no capacity limit, so that a translation depends on nothing but its
        source; with `limit` they have the evaluation's. Without `cache` all that is written is computed again for
        every token: the same translations, but for rounding and for the limit, which then counts other rows.
        """
        was_training = self.training
        self.eval()
        if self.sees_later:
            limit = True  # which is what chooses
        with nullcontext() if limit else self.no_limit():
            encoded, _ = self.encode(source, real)
            search = Search(longest_translations(source, real), beam, bos, eos, length_penalty)
            banned = torch.tensor(never, dtype=torch.int64, device=source.device)
            past = None
            while len(search.sentence):
                ids = search.written.flatten(0, 1)  # (R, 1 + t)
                if cache:
                    ids = ids[:, -1:]
                h, _, past = self.decode(ids, encoded, past)
                scores = self.log_probabilities(h[:, -1])
                scores[:, banned] = -math.inf
                rows, stay = search.step(scores)
                if not stay.all():
                    encoded = encoded.sentences(stay)
                past = rows_of(past, rows) if cache else None
        self.train(was_training)
        return search.translations()

    def log_probabilities(self, h: Tensor) -> Tensor:
        """(R, D) -> (R, V) fp32 of the next token, whatever the autocast type: small differences tell beams apart."""
        w = self.wte.weight
        with torch.autocast(h.device.type, enabled=False):
            logits = F.linear(h.to(w.dtype), w)
        return logits.float().log_softmax(dim=1)


def sinusoids(position: Tensor, D: int) -> Tensor:
    """(T,) -> (T, D): half of them sines, half cosines (Vaswani et al. 3.5)"""
    i = torch.arange(0, D, 2, device=position.device)
    turn = torch.exp(-math.log(10_000) / D * i)
    angle = position.unsqueeze(1) * turn  # (T, D / 2)
    both = torch.cat([angle.sin(), angle.cos()], dim=1)
    return both[:, :D]  # one less where D is odd


def longest_translations(source: Tensor, real: Tensor | None) -> Tensor:
    """(B, N) -> (B,), 1.2 n + 10 for n tokens before </s>."""
    n = torch.full_like(source[:, 0], source.shape[1] - 1)
    if real is not None:
        n = real_mask(source, real).sum(dim=1) - 1
    return 6 * n // 5 + 10


class Search:
    """A beam search over B sentences with K beams each. Those that have ended leave it; b are left.

    A translation's value is the sum of its log probabilities, over its length with </s> to the power of
    `length_penalty`. A sentence ends when K translations have ended among the K best continuations, or at its longest.
    """

    def __init__(self, longest: Tensor, K: int, bos: int, eos: int, length_penalty: float):
        """longest (B,): how many tokens a translation may have."""
        B, device = len(longest), longest.device
        self.longest, self.length_penalty = longest, length_penalty
        self.K, self.eos = K, eos
        self.ended = torch.zeros_like(longest)  # (B,) how many translations have
        width = int(longest.max()) + 1
        self.best = torch.full((B, width), eos, device=device)  # ids of the best, then </s>
        self.value = torch.full((B,), -math.inf, device=device)  # of the best
        self.sentence = torch.arange(B, device=device)  # (b,) which ones are left
        self.written = torch.full((B, K, 1), bos, device=device)  # (b, K, 1 + t): <s> and t tokens
        self.score = torch.full((B, K), -math.inf, device=device)  # (b, K) the sum of their log probabilities
        self.score[:, 0] = 0.0  # all beams begin alike: only one may go on

    def step(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Goes on by one token, whose log probabilities are scores (b * K, V).

        -> (R,) the rows, of all b * K, that go on; (b,) bool, the sentences that are left.
        """
        K, V = self.K, scores.shape[1]
        t = self.written.shape[2] - 1
        last = t >= self.longest[self.sentence]  # (b,)
        not_end = torch.arange(V, device=scores.device) != self.eos
        scores = scores.unflatten(0, (-1, K))  # (b, K, V)
        scores = scores.masked_fill(last[:, None, None] & not_end, -math.inf)
        total = self.score.unsqueeze(2) + scores
        # Of 2 K continuations at most K are ends, so that K go on.
        score, place = total.flatten(1).topk(2 * K)  # (b, 2 K)
        beam, token = place // V, place % V
        self.end(score, beam, token)
        rows = self.extend(score, beam, token)  # (b, K)
        stay = (self.ended[self.sentence] < K) & ~last
        self.sentence = self.sentence[stay]
        self.written = self.written[stay]
        self.score = self.score[stay]
        return rows[stay].flatten(), stay

    def end(self, score: Tensor, beam: Tensor, token: Tensor):
        """Counts the translations among the K best of 2 K continuations, (b, 2 K) each, and keeps the best so far."""
        ends = (token == self.eos) & score.isfinite()
        ends[:, self.K :] = False
        self.ended[self.sentence] += ends.sum(dim=1)
        length = self.written.shape[2]  # with </s>
        value = score / length**self.length_penalty
        value, which = value.masked_fill(~ends, -math.inf).max(dim=1)  # (b,)
        better = value > self.value[self.sentence]
        sentence = self.sentence[better]
        self.value[sentence] = value[better]
        beam = beam[better, which[better]]
        self.best[sentence, : length - 1] = self.written[better, beam, 1:]

    def extend(self, score: Tensor, beam: Tensor, token: Tensor) -> Tensor:
        """Of 2 K continuations, (b, 2 K) each, the K best that are no ends go on -> (b, K) their rows."""
        score = score.masked_fill(token == self.eos, -math.inf)
        self.score, which = score.topk(self.K)
        beam = beam.gather(1, which)  # (b, K)
        token = token.gather(1, which)
        sentence = torch.arange(len(beam), device=beam.device).unsqueeze(1)  # (b, 1)
        written = self.written[sentence, beam]  # (b, K, 1 + t)
        self.written = torch.cat([written, token.unsqueeze(2)], dim=2)
        return self.K * sentence + beam

    def translations(self) -> list[list[int]]:
        ids = self.best.tolist()
        return [row[: row.index(self.eos)] for row in ids]
