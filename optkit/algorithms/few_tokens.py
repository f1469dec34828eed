"""How many inputs of a layer say something about it; no torch is needed."""

FEW_TOKENS = 128
"""Fewer say nothing about the inputs of a layer (an expert), which is rounded to nearest or pruned by magnitude."""
