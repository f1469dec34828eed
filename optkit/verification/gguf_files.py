"""What verification asks of a GGUF model."""

from __future__ import annotations

from dataclasses import replace

from optkit.verification.model_files import ModelFiles, Weights


class GgufFiles(ModelFiles):
    """model.gguf: llama.cpp rounds the inputs of quantized layers to 8 bits."""

    def weights(self) -> Weights:
        """Return what is known of the weights; call it only if the checks hold."""
        rounds = any(size.quantized for size in self.format.layer_sizes(self.directory))
        return replace(super().weights(), rounds_activations=rounds)
