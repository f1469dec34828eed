"""Many recipes of one matrix: made one after another, timed in turns, kept side by side."""
