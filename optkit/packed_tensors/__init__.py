"""How quantized layers lie on disk: tensors and config.json of each format."""
