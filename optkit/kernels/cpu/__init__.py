"""Our own CPU kernels, compiled where they run: a few rows times weights in codes or floats."""
