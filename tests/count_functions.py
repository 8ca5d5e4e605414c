"""How much a reader must know: the project's functions that one step of the smallest sparse decoder enters.

python tests/count_functions.py
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from train_lm import GPT, Config  # noqa: E402


def entered(step) -> list[str]:
    """Names of the repository's functions that step() enters, in the order of their first entry."""
    names = []

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and Path(code.co_filename).parent == ROOT:
            name = f"{Path(code.co_filename).stem}.{code.co_qualname}"
            if name not in names:
                names.append(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return names


def functions_of_a_step() -> list[str]:
    """Of a forward and a backward pass through GPT with the threshold router."""
    model = GPT(Config(block_size=8, n_layer=2, n_head=2, n_embd=16, ffn_size=32), 32)
    ids = torch.randint(32, (2, 8))

    def step():
        logits, balance = model(ids)
        (logits.logsumexp(dim=2).mean() + 0.01 * balance).backward()

    return entered(step)


if __name__ == "__main__":
    names = functions_of_a_step()
    print(f"{len(names)} functions")
    for name in names:
        print(f"  {name}")
