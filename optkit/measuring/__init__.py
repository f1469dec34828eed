"""Measure an artifact beside its baseline: turns, fresh processes, and what each stage added."""
