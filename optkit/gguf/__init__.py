"""GGUF files: written of a checkpoint, quantized by llama.cpp, and run by it."""
