"""What every room uses and knows nothing of models: frozen classes, files, statistics, limits."""
