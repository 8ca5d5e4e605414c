"""The README's picture: what a sparse layer of a trained language model does with a sentence.

    python -m results.picture [RUN] [TEXT]         by default the run of `python train_lm.py`

Every row is a token, every column an expert: full where the expert serves the token, the stronger the larger its gate,
hollow where the token wanted it but its capacity was used up. The capacity is that of the evaluation.
"""

import sys
from pathlib import Path

import torch

from common import clear_errors
from pretrained import load

TEXT = "Return the sum of all elements. If the list is empty, raise a ValueError instead of returning zero."


def main():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with clear_errors():
        model, tokenizer = load(Path(sys.argv[1] if len(sys.argv) > 1 else "out/train_lm/demo"))
    ids = tokenizer.encode_batch([sys.argv[2] if len(sys.argv) > 2 else TEXT])[0]
    seen = []
    moe = model.eval().moe_layers[-1]
    moe.watchers.append(lambda moe, h, routing, kept: seen.append((routing, kept)))
    with torch.no_grad():
        model(torch.tensor([ids]))
    (routing, kept), *_ = seen

    figure, axes = plt.subplots(figsize=(8, 0.22 * len(ids) + 0.9))
    token, expert = (routing.wanted & ~kept).nonzero().unbind(1)
    axes.scatter(expert, token, s=34, facecolors="none", edgecolors="0.75", linewidths=0.7, label="wanted, cut")
    token, expert = kept.nonzero().unbind(1)
    gate = routing.weight[token, expert]
    served = axes.scatter(expert, token, s=38, c=gate, cmap="viridis_r", label="served")
    axes.set_yticks(range(len(ids)), [repr(tokenizer.decode([i]))[1:-1].replace(" ", "·") for i in ids], fontsize=8)
    axes.set_xticks(range(0, kept.shape[1], 4))
    axes.set(xlabel="expert", ylabel="token", xlim=(-1, kept.shape[1]))
    axes.invert_yaxis()
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=8)
    figure.colorbar(served, label="gate", pad=0.02)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("routing.png"), dpi=130)


if __name__ == "__main__":
    main()
