"""Corpora, tokenizers and batches: text comes in here, (B, T) tensors go out."""
