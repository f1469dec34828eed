"""Encoders (BERT and its kin) as ONNX, by torch.onnx.export, for any batch and length.
Padding is masked; the graph is proven equal to the source.

Inputs are input_ids, attention_mask and, if the model tells sentences apart, token_type_ids,
int64 [batch, sequence]. Nodes and weights carry the names of the modules that they come from, so
that patterns can mean them: `/encoder/layer.0/attention/self/query/MatMul`.
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from optkit.errors import SourceError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.onnx_file import MODEL
from optkit.model.task import Task, loader_of
from optkit.model.writer import copy_companions
from optkit.onnx.exporters import OPSET, traced_task
from optkit.onnx.model_file import ModelFile, ModelWriter, about_graphs
from optkit.onnx.opening import open_model, runtime_errors
from optkit.onnx.prediction import exported_config
from optkit.onnx.quiet import quiet_tools
from optkit.onnx.tracing import name_by_modules_, trace
from optkit.source.quiet import quiet_transformers

TRACED = (2, 9)
"""Batch and length of the tokens that the graph is traced with."""
SHAPES = ((1, 1), (1, 7), (3, 33), (2, 128))
"""Those that the result is compared on."""
OUTPUTS = {Task.FEATURES: ("last_hidden_state",), Task.CLASSIFICATION: ("logits",)}
"""What the graph gives."""
LIMIT = 1e-4
"""How far an output may be from the source's, as a share of its largest value."""


class Named(nn.Module):
    """A model whose inputs and outputs have an order."""

    def __init__(self, model: nn.Module, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names, self.outputs = inputs, outputs

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the named outputs."""
        found = self.model(**dict(zip(self.names, inputs, strict=True)), return_dict=True)
        return tuple(found[name] for name in self.outputs)


def export_encoder(source: Path, target: Path, opset: int = OPSET, trust_remote_code: bool = False) -> dict[str, Any]:
    """Fill `target` with the encoder of a float checkpoint as ONNX in float32, and its other files.
    Return what a report says of it.

    Raises StageError for a model that is no encoder, one that torch cannot trace, and a graph that
    says something else than its source; SourceError for a checkpoint that does not fit its
    architecture; ResourceError when the disk is full.
    """
    checkpoint = Checkpoint(source)
    outputs = OUTPUTS[traced_task(checkpoint.config)]
    model = load_eager(source, loader_of(checkpoint.config), trust_remote_code)
    inputs = _inputs(model)
    named = Named(model, inputs, outputs).eval()
    positions = checkpoint.shape.positions
    with TemporaryDirectory(prefix=".exported-", dir=target) as work:
        _trace(named, Path(work), opset, positions)
        graph = ModelFile(Path(work))
        name_by_modules_(graph)
        ModelWriter(graph, target).finish()
    copy_companions(source, target, trust_remote_code, exported_config(checkpoint.config, "float32"))
    return {
        "architecture": type(model).__name__,
        "inputs": list(inputs),
        "outputs": list(outputs),
        **about_graphs(target),
        **_compare(named, target, positions),
    }


def load_eager(source: Path, loader: str, trust_remote_code: bool) -> nn.Module:
    """Return a float checkpoint in float32, with attention that can be traced.

    Raises SourceError if weights are missing.
    """
    import transformers

    with quiet_transformers(), quiet_tools():
        model, loading = getattr(transformers, loader).from_pretrained(
            source,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    missing = sorted(name for name in loading["missing_keys"] if "pooler" not in name)
    if missing:
        raise SourceError(
            f"{len(missing)} weights of {type(model).__name__} are missing: {', '.join(missing[:3])}",
            where=str(source),
            why="They would be made up at random",
            remedy="Correct `architectures` in config.json",
        )
    return model.eval()  # type: ignore[no-any-return]


def _inputs(model: Any) -> tuple[str, ...]:
    takes_types = (
        "token_type_ids" in signature(model.forward).parameters and getattr(model.config, "type_vocab_size", 0) > 1
    )
    return ("input_ids", "attention_mask", *(("token_type_ids",) if takes_types else ()))


def _trace(named: Named, target: Path, opset: int, positions: int | None) -> None:
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=positions)}
    shapes = {"inputs": tuple(axes for _ in named.names)}
    trace(named, _feeds(named, *TRACED), shapes, (named.names, named.outputs), target, opset)


def _feeds(named: Named, batch: int, length: int) -> tuple[Tensor, ...]:
    """Return tokens, a mask that pads every other sequence by a third, and token types: 0, then 1."""
    generator = torch.Generator().manual_seed(batch * length)
    vocabulary = int(named.model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[1::2, length - length // 3 :] = 0
    types = (torch.arange(length) >= length // 2).long().expand(batch, length)
    made = {
        "input_ids": torch.randint(5, vocabulary, (batch, length), generator=generator),
        "attention_mask": mask,
        "token_type_ids": types,
    }
    return tuple(made[name].contiguous() for name in named.names)


def _compare(named: Named, target: Path, positions: int | None) -> dict[str, float]:
    """Return the least cosine and the largest difference of both outputs, for mask 1.

    Raises StageError if the difference is over the limit.
    """
    session = open_model(target / MODEL).session
    cosine, difference = 1.0, 0.0
    for batch, length in SHAPES:
        feeds = _feeds(named, batch, min(length, positions or length))
        with torch.no_grad(), runtime_errors("on a few tokens", str(target / MODEL)):
            wanted = named(*feeds)
            found = session.run(
                list(named.outputs), {name: each.numpy() for name, each in zip(named.names, feeds, strict=True)}
            )
        for want, got in zip(wanted, map(torch.from_numpy, found), strict=True):
            seen = feeds[1].bool() if want.shape[:2] == feeds[1].shape else slice(None)
            cosine = min(cosine, float(torch.cosine_similarity(want[seen].double(), got[seen].double(), -1).min()))
            difference = max(difference, float((want - got)[seen].abs().max() / want[seen].abs().max()))
    if not difference <= LIMIT:
        raise StageError(
            f"the graph differs from its source by {difference:.2g} of the largest value, and {LIMIT:.2g} is the limit",
            where="onnx",
            why="Its code takes a way that the traced one does not",
        )
    return {"cosine": cosine, "difference": difference}
