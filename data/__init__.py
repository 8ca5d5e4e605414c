"""Corpora, tokenizers and batches: text in, (B, T) tensors out."""
