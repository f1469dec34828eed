"""What every room uses and what knows nothing of models: frozen classes, atomic files, statistics,
limits.
"""
