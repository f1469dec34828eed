"""Devices: what they can do at most, and what they do now (memory, clocks, energy)."""
