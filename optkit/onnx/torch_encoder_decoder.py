"""Encoder-decoders as ONNX by torch.onnx.export, in the parts that optimum's classes open.

    encoder_model            input_ids, attention_mask [b, e], or input_features [b, bins, frames]
                             -> last_hidden_state [b, e, hidden]
    decoder_model            input_ids [b, d], encoder_attention_mask [b, e], encoder_hidden_states
                             -> logits, present.N.decoder.key, .value, present.N.encoder.key, .value
    decoder_with_past_model  input_ids [b, d], encoder_attention_mask, past_key_values.N... (four of a layer)
                             -> logits, present.N.decoder.key, .value

All three read one data file, in which a weight lies once. Models that hear have no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.onnx_file import DECODER, ENCODER, MODEL, STEPS
from optkit.model.task import Task, loader_of, task_of
from optkit.model.writer import copy_companions
from optkit.onnx.encoder_decoder import CACHES, OnnxParts, past_name
from optkit.onnx.exporters import OPSET
from optkit.onnx.model_file import ModelFile, ModelWriter, about_graphs
from optkit.onnx.prediction import exported_config
from optkit.onnx.torch_export import LIMIT, load_eager
from optkit.onnx.tracing import name_by_modules_, trace
from optkit.source.audio import Ears

TRACED = (2, 9, 5)
"""Batch, tokens of the input and of the target that the graphs are traced with."""
SHAPES = ((1, 1, 1), (1, 7, 12), (3, 33, 4))
"""Those that the result is compared on."""
STEPPED = 3
"""Tokens that are then fed one at a time."""


class Part(nn.Module):
    """One of the graphs: a model whose inputs, named, have an order."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return what the graph gives, in the order of its outputs."""
        given = dict(zip(self.names, inputs, strict=True))
        if "encoder_hidden_states" not in given and past_name(0, CACHES[0]) not in given:
            return (self.model.get_encoder()(**given)["last_hidden_state"],)
        past = [given[name] for name in self.names if name.startswith("past_key_values")]
        layers = [past[index : index + len(CACHES)] for index in range(0, len(past), len(CACHES))]
        hidden = given.get("encoder_hidden_states")
        if hidden is None:  # only its shape is read: its keys and values are there
            hidden = torch.zeros(past[-1].shape[0], past[-1].shape[2], self.model.config.hidden_size)
        found = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            attention_mask=given.get("encoder_attention_mask"),
            decoder_input_ids=given["input_ids"],
            past_key_values=EncoderDecoderCache(layers),
            use_cache=True,
        )
        cache = found.past_key_values
        sides = (cache.self_attention_cache.layers, cache.cross_attention_cache.layers)
        left = [(each, *([] if layers else [other])) for each, other in zip(*sides, strict=True)]
        return (found.logits, *(state for layer in left for each in layer for state in (each.keys, each.values)))


def export_encoder_decoder(source: Path, target: Path, opset: int = OPSET, trusted: bool = False) -> dict[str, Any]:
    """Fill `target` with the parts of a float encoder-decoder in float32, and its other files.
    Return what a report says of them.

    Raises StageError for a model that torch cannot trace, and for graphs that say something else
    than their source; SourceError for a checkpoint that does not fit its architecture; ResourceError
    when the disk is full.
    """
    config = Checkpoint(source).config
    model: Any = load_eager(source, loader_of(config), trusted)
    features = Ears(source).silence() if task_of(config) is Task.SPEECH else None
    shared: dict[bytes, int] = {}
    for name, part, feeds, shapes, outputs in _parts(model, features):
        with TemporaryDirectory(prefix=".exported-", dir=target) as work:
            trace(part, feeds, {"inputs": shapes}, (part.names, outputs), Path(work), opset)
            (Path(work) / MODEL).rename(Path(work) / name)
            graph = ModelFile(Path(work), name)
            name_by_modules_(graph)
            ModelWriter(graph, target, shared).finish()
    copy_companions(source, target, trusted, exported_config(config, "float32"))
    return {"architecture": type(model).__name__, **about_graphs(target), **_compare(model, target, features)}


def _parts(
    model: Any, features: Tensor | None
) -> Iterator[tuple[str, Part, tuple[Tensor, ...], tuple[dict[int, str], ...], list[str]]]:
    """Yield each graph's name, module, arguments, their free axes, and the names of its outputs."""
    given, tokens = _inputs(model, features, *TRACED)
    source = {0: "batch"} if features is not None else {0: "batch", 1: "encoder_sequence"}
    encoder = Part(model, [*given]).eval()
    yield ENCODER, encoder, tuple(given.values()), (source,) * len(given), ["last_hidden_state"]
    masked = {"encoder_attention_mask": given["attention_mask"]} if "attention_mask" in given else {}
    with torch.no_grad():
        (hidden,) = encoder(*given.values())
        given = {"input_ids": tokens, **masked, "encoder_hidden_states": hidden}
        decoder = Part(model, [*given]).eval()
        past = decoder(*given.values())[1:]
    ids = {0: "batch", 1: "decoder_sequence"}
    states = [(layer, each) for layer in range(len(past) // len(CACHES)) for each in CACHES]
    left = ["logits", *(f"present.{layer}.{each}" for layer, each in states)]
    yield DECODER, decoder, tuple(given.values()), (ids, *(source,) * (len(given) - 1)), left
    given = {
        "input_ids": tokens[:, :2],
        **masked,
        **{past_name(*name): state for name, state in zip(states, past, strict=True)},
    }
    crossed = {0: "batch"} if features is not None else {0: "batch", 2: "encoder_sequence"}
    axes = [crossed if each.startswith("encoder") else {0: "batch", 2: "past_sequence"} for _, each in states]
    left = ["logits", *(f"present.{layer}.{each}" for layer, each in states if each.startswith("decoder"))]
    yield STEPS, Part(model, [*given]).eval(), tuple(given.values()), (ids, *(source,) * len(masked), *axes), left


def _inputs(
    model: Any, features: Tensor | None, batch: int, length: int, count: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Return what the encoder is given, every other row padded by a third, and a target."""
    generator = torch.Generator().manual_seed(batch * length)
    drawn = torch.randint(5, model.config.vocab_size, (batch, length + count), generator=generator)
    if features is not None:
        noise = torch.randn(batch, *features.shape[1:], generator=generator)
        return {"input_features": noise.to(features.dtype)}, drawn[:, length:].contiguous()
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[1::2, length - length // 3 :] = 0
    return {"input_ids": drawn[:, :length].contiguous(), "attention_mask": mask}, drawn[:, length:].contiguous()


def _compare(model: Any, target: Path, features: Tensor | None) -> dict[str, float]:
    """Return the largest difference of the logits, of whole targets and of tokens fed one at a time, as
    a share of the largest. Raises StageError if one is over the limit.
    """
    parts, apart = OnnxParts(target), {"difference": 0.0, "step_difference": 0.0}
    for batch, length, count in SHAPES:
        given, tokens = _inputs(model, features, batch, length, count + STEPPED)
        with torch.no_grad():
            wanted = model(**given, decoder_input_ids=tokens, use_cache=False).logits
        hidden, past = parts.encode(given), dict[str, Tensor]()
        fed = (tokens[:, :count], *tokens[:, count:].split(1, dim=1))
        logits = [parts.read(each, hidden, given.get("attention_mask"), past) for each in fed]
        distances = (torch.cat(logits, dim=1) - wanted).abs() / wanted.abs().max()
        apart["difference"] = max(apart["difference"], float(distances[:, :count].max()))
        apart["step_difference"] = max(apart["step_difference"], float(distances[:, count:].max()))
    for name, most in apart.items():
        if not most <= LIMIT:
            raise StageError(
                f"the graphs have a {name.replace('_', ' ')} from their source of {most:.2g} of the largest logit, "
                f"and {LIMIT:.2g} is the limit",
                where="onnx",
                why="Its code takes a way that the traced one does not",
                remedy="Deploy the checkpoint",
            )
    return apart
