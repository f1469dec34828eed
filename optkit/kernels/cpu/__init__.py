"""Kernels of our own for CPUs, compiled on the machine that they run on: a few rows of activations
times weights in codes or floats.
"""
