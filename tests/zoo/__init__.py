"""Tiny random models of every architecture that transformers has, through every stage."""
