"""Figures, and tables that are measurements of models: what needs no training.

    python analyze.py activations        XMoE's figures 1 and 6: positive activations, by number and size of experts
    python analyze.py gamma              figure 4 and table 2: perplexity with less work at test
    python analyze.py compare            table 1: differences of trained models, with intervals
    python analyze.py experts            figure 5: experts that a token needs, in the course of training
    python analyze.py threshold          figure 7: perplexity by the threshold, in training and at test
    python analyze.py speed              figure 8: time of a batch by FLOPs
    python analyze.py umap               X-MoE's figures 2a and 2b: tokens as a router sees them
    python analyze.py collapse           figures 2c and 3a: RC, RF, and the spectrum of hidden states
    python analyze.py consistency        figure 3b: loads of the experts, by fine-tuning runs that differ by seed
    python analyze.py curve              XLM-E's figure 1: scores by training FLOPs
    python analyze.py flops              tables 3 and 4: parameters and FLOPs; GPU-hours of the papers' scale
    python analyze.py retrieval          table 5 and figure 3: translations that encoders find, by layer
    python analyze.py alignment          table 6 and figure 4: word alignment, by layer
    python analyze.py gap                table 7: English ahead of other languages, after fine-tuning
    python analyze.py tokens             your text: how many experts each token wants, and which serve it
    python analyze.py report             one page of HTML with all that is found under out/ and results/

By default they read the runs that the demos and tables left under out/. A figure NAME is kept as NAME.png and NAME.svg
in --out, with the numbers that are drawn in NAME.json. `python analyze.py NAME --help` says what it shows, how to read
it, and lists its options.
"""

import common
import runs
from figures import collapse, crosslingual, experts, flops, report, tokens

ANALYSES = {  # options, which say what is shown; what is done
    "activations": (experts.Activations, experts.activations),
    "gamma": (experts.Gamma, experts.gamma),
    "compare": (experts.Compare, experts.compare),
    "experts": (experts.Required, experts.experts),
    "threshold": (experts.Threshold, experts.threshold),
    "speed": (experts.Speed, experts.speed),
    "umap": (collapse.Umap, collapse.umap),
    "collapse": (collapse.Collapse, collapse.collapse),
    "consistency": (collapse.Consistency, collapse.consistency),
    "curve": (crosslingual.Curve, crosslingual.curve),
    "flops": (flops.Flops, flops.flops),
    "retrieval": (crosslingual.Retrieval, crosslingual.retrieval),
    "alignment": (crosslingual.Alignment, crosslingual.alignment),
    "gap": (crosslingual.Gap, crosslingual.gap),
    "tokens": (tokens.Tokens, tokens.tokens),
    "report": (report.Report, report.write),
}


def main():
    with common.clear_errors():
        Options, analysis, options = runs.chosen(ANALYSES, __doc__, "say what to analyze")
        analysis(runs.parse(Options(), options, Options.__doc__))


if __name__ == "__main__":
    main()
