"""Devices: what they can do at most, by datasheet and measured, and what they do now: memory,
clocks, energy.
"""
