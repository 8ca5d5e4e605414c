"""Routers of recent papers in a few lines each: python train_lm.py --router examples/routers_of_today.py:bias

tests/test_routers_of_today.py holds each to a literal loop. S tokens, E experts, K experts per token, D model width.
"""

import torch
import torch.nn.functional as F
from torch import nn

from routers import NOT_CHOSEN, Router, TopK, by_rank, router


@router("bias")
class Bias(TopK):
    """Biases in place of the balance loss move choices away from busy experts (DeepSeek-V3, section 2.1.2)."""

    gate, balanced = "sigmoid", False
    constants = {"bias_rate": 0.001}  # gamma: how far each step moves a bias

    def __init__(self, config, E: int, top_k: int = 1, V: int = 0, x_moe: bool = False):
        super().__init__(config, E, top_k, V, x_moe)
        self.register_buffer("bias", torch.zeros(E))
        self.tally("load", E)

    def choose(self, score, probs):
        affinity = score.sigmoid()
        order = (affinity + self.bias).argsort(dim=1, descending=True, stable=True)
        priority = by_rank(order, affinity, self.K)
        self.count("load", (priority > NOT_CHOSEN).sum(dim=0))
        return priority

    def forward(self, h, ids=None):
        routing = super().forward(h, ids)
        return routing._replace(weight=routing.weight / routing.weight.sum(dim=1, keepdim=True))

    @torch.no_grad()
    def after_step(self):
        super().after_step()
        self.bias += self.config.bias_rate * (self.load.mean() - self.load).sign()


@router("shared")
class Shared(TopK):
    """K - 1 chosen experts, and a shared one that serves every token (DeepSeekMoE, section 3.2)."""

    def __init__(self, config, E: int, top_k: int = 1, V: int = 0, x_moe: bool = False):
        super().__init__(config, E, top_k - 1, V, x_moe)
        D = config.n_embd
        width = config.expert_size if x_moe else config.ffn_size // (config.split or self.split)
        self.shared = nn.Sequential(nn.Linear(D, width), nn.GELU(approximate="tanh"), nn.Linear(width, D))

    def beside(self, h, routing):
        return self.shared(h)


@router("relu")
class ReLU(Router):
    """Every expert with a positive score, weighted by it (ReMoE). The weight of an L1 loss keeps K of E positive."""

    split, K, balanced, reads = 4, None, False, Router.reads - {"gate"}
    constants = {"l1_rate": 1.2}  # alpha: the factor by which each step changes the weight of the loss

    def __init__(self, config, E: int, top_k: int = 1, V: int = 0, x_moe: bool = False):
        super().__init__(config, E, top_k, V, x_moe)
        self.target = top_k / E
        self.register_buffer("l1_weight", torch.tensor(1e-8))
        self.tally("positive")
        self.tally("pairs")

    def choose(self, score, probs):
        self.count("positive", (score > 0).sum())
        self.count("pairs", score.numel())
        return torch.where(score > 0, score, NOT_CHOSEN)

    def gates(self, logits, probs):
        return logits.relu()

    def losses(self, score, probs, priority):
        return {"l1": (self.l1_weight, score.relu().sum(dim=1).mean())}

    @torch.no_grad()
    def after_step(self):
        super().after_step()
        too_many = self.positive / self.pairs - self.target
        self.l1_weight *= self.config.l1_rate ** too_many.sign()


@router("null")
class Null(TopK):
    """2 K choices among E experts and E null experts, so that a token decides how many experts it gets (AdaMoE)."""

    def __init__(self, config, E: int, top_k: int = 1, V: int = 0, x_moe: bool = False):
        super().__init__(config, 2 * E, 2 * top_k, V, x_moe)
        self.E = E  # the other columns of `scores` are the null experts


@router("noisy")
class Noisy(TopK):
    """Noise on the scores in training (Shazeer et al., eq. 4), and a loss that keeps them small (ST-MoE, eq. 5)."""

    constants = {"z_coef": 0.001}  # c_z, the weight of that loss

    def __init__(self, config, E: int, top_k: int = 1, V: int = 0, x_moe: bool = False):
        super().__init__(config, E, top_k, V, x_moe)
        self.noise = nn.Linear(config.n_embd, E, bias=False)
        nn.init.zeros_(self.noise.weight)

    def scores(self, h):
        score = super().scores(h)
        if self.training:
            score = score + torch.randn_like(score) * F.softplus(self.noise(h))
        return score

    def losses(self, score, probs, priority):
        z = score.logsumexp(dim=1).square().mean()
        return super().losses(score, probs, priority) | {"z": (self.config.z_coef, z)}
