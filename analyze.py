"""Figures, and tables that are measurements of finished models. Nothing is trained here.

    python analyze.py activations    XMoE's figures 1 and 6: positive activations, by number and by size of experts
    python analyze.py gamma          XMoE's figure 4: perplexity with less work at test
    python analyze.py experts        XMoE's figure 5: experts that a token needs, in the course of training
    python analyze.py tokens         which tokens XMoE gives many experts: rare ones, or those before a surprise
    python analyze.py threshold      XMoE's figure 7: perplexity by the threshold, in training and at test
    python analyze.py umap           X-MoE's figures 2a and 2b: tokens as a router sees them
    python analyze.py speed          XMoE's figure 8: time of a batch by its FLOPs
    python analyze.py collapse       X-MoE's figures 2c and 3a: collapse (RC) and fluctuation (RF) in training
    python analyze.py consistency    X-MoE's figure 3b: loads of the experts in fine-tuning runs that differ by seed
    python analyze.py curve          XLM-E's figure 1: scores by training FLOPs
    python analyze.py flops          XLM-E's tables 3 and 4: parameters and FLOPs of the paper's sizes
    python analyze.py retrieval      XLM-E's table 5 and figure 3: translations that encoders find, by layer
    python analyze.py alignment      XLM-E's table 6 and figure 4: word alignment, by layer
    python analyze.py play           a page to play with: what a model's routers do with your sentence, and could do

They read the runs that the demos and the tables left under out/, or the folders of runs that you name. A figure is
written to NAME.png in --out, and the numbers in it to NAME.json. `python analyze.py NAME --help` says what a figure
shows, how to read it, and which options it has.
"""

import sys
from functools import partial
from pathlib import Path

import train_electra
import train_lm
import train_mlm
from analysis import play, x_moe, xlm_e, xmoe
from analysis.shared import Drawn, Measured
from engine.config import parse
from engine.device import clear_errors


def demos(*scripts) -> list[str]:
    """The folders of those of the scripts' demos that were trained."""
    found = [Path(script.Config.out_dir, script.Config.preset) for script in scripts]
    there = [str(folder) for folder in found if folder.exists()]
    if not there:
        others = "".join(f", {file.parent}" for file in sorted(found[0].parent.glob("*/config.json")))
        others = others and f"; or name a run: there are {others[2:]}"
        raise ValueError(f"{found[0]} does not exist: python {scripts[0].__name__}.py trains it{others}")
    return there


SIZES = {preset: train_electra.Config(**constants) for preset, constants in train_electra.PRESETS.items()}
ANALYSES = {  # each: its options, and what it is handed of a training script
    xmoe.activations: (Measured, train_lm.evaluate),
    xmoe.gamma: (Measured, train_lm.evaluate),
    xmoe.experts: (Drawn,),
    xmoe.tokens: (Measured,),
    xmoe.threshold: (Measured, train_lm.evaluate),
    xmoe.speed: (Measured, train_lm.evaluate),
    x_moe.umap: (x_moe.Umap,),
    x_moe.collapse: (Drawn,),
    x_moe.consistency: (Drawn,),
    xlm_e.curve: (Drawn,),
    xlm_e.flops: (xlm_e.Flops, SIZES),
    xlm_e.retrieval: (xlm_e.Encoders, partial(demos, train_electra, train_mlm)),
    xlm_e.alignment: (xlm_e.Alignment, partial(demos, train_electra, train_mlm)),
    play.play: (play.Play, partial(demos, train_lm)),
}


def main():
    name, *argv = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        return print(__doc__)
    analyses = {analysis.__name__: analysis for analysis in ANALYSES}
    with clear_errors():
        if name not in analyses:
            raise ValueError(f"{name!r} is no figure: python analyze.py {' | '.join(analyses)}")
        analysis = analyses[name]
        options, *handed = ANALYSES[analysis]
        analysis(parse(options(), argv, analysis.__doc__), *handed)


if __name__ == "__main__":
    main()
