"""Layers that compute with packed weights."""
