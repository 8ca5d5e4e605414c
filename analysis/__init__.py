"""Figures, and tables that are measurements of trained models."""
