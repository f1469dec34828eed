"""An encoder-decoder that ONNX Runtime runs, as `TorchEncoderDecoder` is one that torch runs.

Its model is transformers' own without weights, whose forwards ask ONNX Runtime: so `generate` is
that of transformers in either case, with all that generation_config.json says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, EncoderDecoderCache, GenerationConfig
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils import GENERATION_CONFIG_NAME

from optkit.errors import SourceError
from optkit.model.task import loader_of
from optkit.onnx.decode_bytes import decode_bytes
from optkit.onnx.directory import OnnxDirectory
from optkit.onnx.encoder_decoder import CACHES, OnnxParts, past_name
from optkit.onnx.opening import HIDDEN_MEMORY
from optkit.session.onnx_encoder import refuse_engine
from optkit.session.torch_encoder_decoder import TorchEncoderDecoder
from optkit.source.quiet import quiet_transformers
from optkit.stage import Opening

COMPUTED = ("attention_mask", "cache_position")
"""What transformers gives that a graph may not take: no padding in audio, and positions from the start."""


class OnnxEncoderDecoder(TorchEncoderDecoder):
    """An opened ONNX directory of an encoder-decoder; implements `optkit.measure.ConditionalSession`."""

    def __init__(self, opening: Opening) -> None:
        """Open it. Raises what `OnnxDirectory` and `open_model` raise, StageError for another engine."""
        refuse_engine(opening, "an encoder-decoder")
        self._graphs = OnnxDirectory(opening.directory)
        parts = OnnxParts(opening.directory, opening.device, **opening.load_kwargs)
        model = _without_weights(opening, loader_of(self._graphs.config))
        _ask_(model, parts)
        super().__init__(model, opening, (parts.steps.opened.note(),))
        self.hidden_memory = "" if self.device == "cpu" else HIDDEN_MEMORY

    def decode_bytes(self, batch: int, context: int) -> int:
        return decode_bytes(self._graphs, batch, 0)


def _without_weights(opening: Opening, loader: str) -> Any:
    directory, trusted = opening.directory, opening.trust_remote_code
    with quiet_transformers(), torch.device("meta"):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trusted)
        model = getattr(transformers, loader).from_config(config, trust_remote_code=trusted)
    if (directory / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    for module in model.modules():
        module._parameters.clear()
        module._buffers.clear()
    model.place = nn.Parameter(torch.empty(0, device=opening.device))  # generation asks where the model is
    return model.eval()


def _ask_(model: Any, parts: OnnxParts) -> None:
    """Let ONNX Runtime compute what a model and its encoder are called for."""
    encoder = model.get_encoder()

    @wraps(encoder.forward)
    def encode(**inputs: Any) -> BaseModelOutput:
        _refuse_strange(inputs, parts)
        given = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        return BaseModelOutput(last_hidden_state=parts.encode(given).to(model.device))

    @wraps(model.forward)
    def forward(
        decoder_input_ids: Tensor,
        encoder_outputs: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        use_cache: bool = True,
        **inputs: Any,
    ) -> Seq2SeqLMOutput:
        decoding = inputs.pop("decoder_attention_mask", None)
        _refuse_strange(inputs if decoding is None or decoding.all() else {"decoder_attention_mask": decoding}, parts)
        given = inputs if attention_mask is None else {**inputs, "attention_mask": attention_mask}
        hidden = (encoder_outputs or encode(**given))[0]
        mask = attention_mask if attention_mask is not None and attention_mask.shape == hidden.shape[:2] else None
        past = _states(past_key_values)
        logits = parts.read(decoder_input_ids, hidden, mask, past).to(model.device)
        left = _cache(past, past_key_values) if use_cache else None
        return Seq2SeqLMOutput(logits=logits, past_key_values=left, encoder_last_hidden_state=hidden)

    encoder.forward, model.forward = encode, forward


def _refuse_strange(inputs: Mapping[str, Any], parts: OnnxParts) -> None:
    """Raise SourceError for tensors that would change what torch computes, and that no graph takes."""
    file = parts.encoder.file
    known = {*file.inputs, *COMPUTED}
    if strange := next(
        (name for name, value in inputs.items() if isinstance(value, Tensor) and name not in known), None
    ):
        raise SourceError(
            f"its graphs take no {strange}",
            where=str(file.path.parent),
            why=f"They read {', '.join(file.inputs)}, and a target without padding from its start",
            remedy="Leave it out",
        )


def _states(cache: EncoderDecoderCache | None) -> dict[str, Tensor]:
    """Return a KV cache by the names of the graph's inputs."""
    if cache is None or not cache.get_seq_length():
        return {}
    sides = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True)
    states = [(grown.keys, grown.values, read.keys, read.values) for grown, read in sides]
    return {
        past_name(layer, name): state
        for layer, four in enumerate(states)
        for name, state in zip(CACHES, four, strict=True)
    }


def _cache(past: dict[str, Tensor], cache: EncoderDecoderCache | None) -> EncoderDecoderCache:
    """Return a KV cache as transformers holds it: the same one, if it had something."""
    states = [*past.values()]
    layers = [states[index : index + len(CACHES)] for index in range(0, len(states), len(CACHES))]
    if cache is None or not cache.get_seq_length():
        return EncoderDecoderCache(layers)
    for layer, (keys, values, *_) in zip(cache.self_attention_cache.layers, layers, strict=True):
        layer.keys, layer.values = keys, values
    return cache
