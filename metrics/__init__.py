"""What a training measures: routing, FLOPs, trivial baselines, scores of tasks."""
