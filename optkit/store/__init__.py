"""Finished steps and metrics, kept by the key of what made them."""
