"""Kernels of our own for NVIDIA GPUs, compiled when needed: few tokens times weights of 4 or 16
bits, and attention to a KV cache.
"""
