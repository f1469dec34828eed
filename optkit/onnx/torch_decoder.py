"""Causal language models as ONNX by torch.onnx.export, for any batch and length.
A KV cache goes in and comes out, or there is none.

    input_ids [b, s]   attention_mask [b, past + s]   past_key_values.N.key, .value [b, heads, past, size]
    logits [b, s, v]                                  present.N.key, .value [b, heads, past + s, size]

Positions are counted in the mask, so that prompts may be padded on the left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.experts import Experts
from optkit.model.onnx_file import MODEL
from optkit.model.skeleton import Skeleton
from optkit.onnx.exporters import OPSET, WITHOUT_CACHE
from optkit.onnx.model_file import ModelFile
from optkit.onnx.reference import EXACT
from optkit.onnx.tracing import WHERE, name_by_modules_, trace

TRACED = (2, 5, 9)
"""Batch, tokens and tokens before these that the graph is traced with."""
EXPERTS = "optkit_one_by_one"


class Decoder(nn.Module):
    """A causal language model whose KV cache is tensors: key and value of each layer in turn."""

    def __init__(self, model: nn.Module, cached: bool) -> None:
        super().__init__()
        self.model, self.cached = model, cached
        self._counts = "position_ids" in signature(model.forward).parameters

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Return logits, and the KV cache behind the tokens if there is one."""
        options: dict[str, Any] = {}
        if self._counts:
            options["position_ids"] = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        if self.cached:
            options["past_key_values"] = DynamicCache([*zip(past[::2], past[1::2], strict=True)])
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=self.cached, **options)
        layers = found.past_key_values.layers if self.cached else ()
        return (found.logits, *(each for layer in layers for each in (layer.keys, layer.values)))


def export_decoder(
    source: Path, target: Path, opset: int | None = None, cached: bool = True, trust_remote_code: bool = False
) -> None:
    """Write model.onnx and its data, in float32, from a float checkpoint.

    Raises StageError for a model that torch cannot trace or whose cache is more than keys and
    values; SourceError for a checkpoint that does not fit its architecture; ResourceError when the
    disk is full.
    """
    skeleton = Skeleton(Checkpoint(source), torch.float32, EXACT, trust_remote_code)
    skeleton.load_("", "cpu")
    _run_every_expert_(skeleton.model)
    decoder = Decoder(skeleton.model, cached).eval()
    past = _past(skeleton.model) if cached else []
    batch, sequence, before = TRACED[0], TRACED[1], TRACED[2] if cached else 0
    tokens = torch.randint(0, skeleton.model.config.get_text_config(decoder=True).vocab_size, (batch, sequence))
    feeds = (tokens, torch.ones(batch, before + sequence, dtype=torch.int64), past)
    axes = {0: "batch", 1: "sequence"}
    length = {0: "batch", 1: "total_sequence" if cached else "sequence"}
    shapes = (axes, length, [{0: "batch", 2: "past_sequence"} for _ in past])
    names = _names(len(past))
    trace(decoder, feeds, shapes, names, target, opset or OPSET)
    graph = ModelFile(target)
    name_by_modules_(graph)
    (target / MODEL).write_bytes(graph.proto.SerializeToString())


def _names(caches: int) -> tuple[list[str], list[str]]:
    parts = [f"{index // 2}.{'value' if index % 2 else 'key'}" for index in range(caches)]
    return (
        ["input_ids", "attention_mask", *(f"past_key_values.{part}" for part in parts)],
        ["logits", *(f"present.{part}" for part in parts)],
    )


@torch.no_grad()
def _past(model: Any) -> list[Tensor]:
    """Return a KV cache to trace with: keys, values by layer, float32 [batch, heads, past, size]."""
    cache = model(torch.zeros(1, 2, dtype=torch.int64), use_cache=True).get("past_key_values")
    layers = getattr(cache, "layers", None)
    if not layers:
        raise StageError(
            f"{type(model).__name__} gives no KV cache of layers",
            where=WHERE,
            why=f"It gives {type(cache).__name__}",
            remedy=WITHOUT_CACHE,
        )
    if odd := next((layer for layer in layers if not isinstance(layer, DynamicLayer)), None):
        raise StageError(
            f"the cache of {type(model).__name__} has a {type(odd).__name__}",
            where=WHERE,
            why="Only keys and values of attention can be inputs and outputs of the graph",
            remedy=WITHOUT_CACHE,
        )
    shapes = [
        (TRACED[0], state.shape[1], TRACED[2], state.shape[3])
        for layer in layers
        for state in (layer.keys, layer.values)
    ]
    return [torch.randn(shape) for shape in shapes]


class _EveryExpert(Experts):
    """Experts that are run for any number of tokens, none included.
    Which of them are needed is not known while tracing.
    """

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return _in_turn(hidden, chosen, weights, (expert for expert in self))


def _run_every_expert_(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, Experts):
            module.__class__ = _EveryExpert
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _joined_experts)
    model.config.get_text_config(decoder=True)._experts_implementation = EXPERTS


def _in_turn(hidden: Tensor, chosen: Tensor, weights: Tensor, experts: Iterator[Any]) -> Tensor:
    total = torch.zeros_like(hidden)
    for index, expert in enumerate(experts):
        token, place = torch.where(chosen == index)
        output = expert(hidden[token]) * weights[token, place, None]
        total = total.index_add(0, token, output.to(total.dtype))
    return total


def _joined_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute experts that transformers holds in 3-D parameters, [experts, out, in] or transposed.
    See `transformers.integrations.moe`.
    """
    first = "gate_up_proj" if module.has_gate else "up_proj"

    def project(name: str, index: int, given: Tensor) -> Tensor:
        matrix = getattr(module, name)[index]
        found: Tensor = given @ (matrix if module.is_transposed else matrix.T)
        return found + getattr(module, f"{name}_bias")[index] if module.has_bias else found

    def expert(index: int, given: Tensor) -> Tensor:
        inner = project(first, index, given)
        return project("down_proj", index, module._apply_gate(inner) if module.has_gate else module.act_fn(inner))

    experts = (lambda given, index=index: expert(index, given) for index in range(module.num_experts))
    return _in_turn(hidden, chosen, weights, experts)
