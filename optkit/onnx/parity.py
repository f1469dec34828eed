"""Prove that an exported model says what its source says.
Logits on a text are compared at several batch sizes and lengths, and through the KV cache.

The source is computed by torch in float32. What is compared with it is the export alone and not the
choices that were asked for. A rounded lm_head computes in the source too, and MatMulNBits do not
round their inputs to 8 bits meanwhile. What the choices cost is measured apart, as the divergence
of the graph as it stands from the source as it is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from optkit.algorithms.grid import QuantizedWeight
from optkit.algorithms.packing import from_bytes
from optkit.errors import SourceError, StageError
from optkit.model.onnx_file import MODEL, OnnxFile
from optkit.onnx.builder import Order
from optkit.onnx.finishing import HEAD
from optkit.onnx.graph_blocks import states
from optkit.onnx.model_file import ModelFile
from optkit.onnx.prediction import compared_shapes
from optkit.onnx.reference import Reference
from optkit.onnx.runtime import OnnxRunner
from optkit.progress import Task

LIMITS = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 1.6e-1}
"""Dtype of the graph -> how far a logit of any model may be from the source's, as a share of the
largest logit (or of 1).

SmolLM2-135M comes to 2.5e-6 (9.3e-5 of a logit) and to 5.7e-3 on a CPU; bfloat16 rounds eight times
as coarsely as float16."""
TIMES_TORCH = 8
"""A model that loses more digits may be so many times as far as torch is from itself on it.

Graphs of five tiny models come to 1.0 to 1.6 times that; to 0.3 to 2.1 times if sharp attention
costs torch 100 to 4,000 times more."""
COARSEST = {"float32": 2e-2, "float16": 1.6e-1, "bfloat16": 1.6e-1}
"""Dtype of the graph -> the limit that no model gets above: a graph that says something else must
not hide behind rounding.
"""
STATE_LIMITS = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 4e-1}
"""Dtype of the graph -> the relative error from which on the output of a block differs."""
DIVERGENCE_LIMIT = 0.5
"""Mean KL divergence from the source, in nats a token, that rounded inputs and a rounded lm_head
may cost.

GPTQ's SmolLM2-135M comes to 0.004 with lm_head in 8 bits, to 0.13 in 4: more is no rounding but a
mistake."""
STEPS = 10
"""Tokens of it that are read one at a time, after the others at once."""
PARTS = 4
"""Steps of the task."""


def comparable(order: Order) -> bool:
    """Whether ONNX Runtime can compute the graph here: it has kernels of bfloat16 on GPUs alone."""
    return order.dtype != "bfloat16" or order.device != "cpu"


def check_parity(order: Order, text: Tensor, task: Task) -> dict[str, Any]:
    """Return how far the graph that was ordered is from its source. text: int64 [n], tokens.

    Raises StageError if it is too far, with the first block whose output differs.
    """
    rounds = order.head_bits is not None or not order.float_activations
    reference = Reference(order.source, order.trust_remote_code)
    cases = _cases(text, reference.positions, reference.window)
    plain = [reference.logits(case) for case in cases] if rounds else []
    task.advance(note="the source")
    error = _round_head_(reference, order)
    wanted = plain if plain and error is None else [reference.logits(case) for case in cases]
    reference.close()
    task.advance(note="the source, rounded as the graph is")
    with _without_rounded_inputs(order) as directory:
        try:
            details = _apart(order, directory, cases, wanted)
        except SourceError as error:
            raise StageError(
                "ONNX Runtime cannot run what the exporter made", where="onnx", why=error.why or error.what
            ) from error
    task.advance(note="the graph")
    if rounds:
        details["divergence"] = _divergence(order, cases, plain)
    task.advance(note="what rounding costs")
    return details | ({} if error is None else {"lm_head_error": error})


def _cases(text: Tensor, positions: int | None, window: int | None) -> list[Tensor]:
    """Return successive parts of a text (from its start again when it ends), int64 [b, s]."""
    shapes = compared_shapes(positions, window)
    needed = sum(batch * length for batch, length in shapes)
    tokens = text.repeat(-(-needed // len(text)))[:needed]
    parts = tokens.split([batch * length for batch, length in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _round_head_(reference: Reference, order: Order) -> float | None:
    """Let the source compute with the lm_head of the graph; return how far that is from its own.
    None if it was not rounded.
    """
    if order.head_bits is None:
        return None
    own = reference.head.float()
    rounded = stored_codes(ModelFile(order.target), HEAD).dequantize().float()
    reference.take_head_(rounded, order.shared_embedding)
    return float((rounded - own).norm() / own.norm())


def _apart(order: Order, directory: Path, cases: Sequence[Tensor], wanted: Sequence[Tensor]) -> dict[str, Any]:
    """Return how far logits are from the wanted ones, for each case. Raises StageError if one is
    too far.
    """
    runner = OnnxRunner(directory, order.device)
    apart: dict[str, float] = {}
    largest, limit, source = 0.0, LIMITS[order.dtype], "the limit of any model"
    for name, tokens, found, theirs in _computed(runner, cases, wanted):
        difference = float((found - theirs).abs().max())
        apart[name] = difference / max(float(theirs.abs().max()), 1.0)
        largest = max(largest, difference)
        if apart[name] > limit == LIMITS[order.dtype]:
            limit, source = _own_limit(order, cases)
        if not apart[name] <= limit:
            runner.close()
            raise _differs(order, directory, name, tokens, (found, theirs), f"{limit:.2g} of that, {source}")
    runner.close()
    return {"logits_apart": apart, "logits_limit": limit, "logits_limit_is": source, "largest_difference": largest}


def _own_limit(order: Order, cases: Sequence[Tensor]) -> tuple[float, str]:
    """Return the limit of this model, a share of the largest logit, and its origin.
    The limit is how far torch is from itself on the cases.
    """
    reference = Reference(order.source, order.trust_remote_code)
    _round_head_(reference, order)
    own = max((reference.rounding(case, order.dtype) for case in cases), key=lambda found: found.share)
    reference.close()
    limit = min(max(LIMITS[order.dtype], TIMES_TORCH * own.share), COARSEST[order.dtype])
    if limit == LIMITS[order.dtype]:
        return limit, f"the limit of any model (torch in {own.how} is {own.share:.2g} from itself)"
    return limit, f"{limit / own.share:.2g} times what torch in {own.how} is from itself on this model"


def _computed(
    runner: OnnxRunner, cases: Sequence[Tensor], wanted: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yield name, tokens, logits of the graph and those of the source of each case.
    The last one is also read through the KV cache.
    """
    for case, theirs in zip(cases, wanted, strict=True):
        yield f"{len(case)} x {case.shape[1]}", case, _logits(runner, case), theirs
    long = cases[-1]
    if long.shape[1] > STEPS and runner.cache:
        yield f"{STEPS} steps", long, _step_by_step(runner, long), wanted[-1][:, -STEPS - 1 :]


def _logits(runner: OnnxRunner, tokens: Tensor) -> Tensor:
    return runner.logits(tokens.to(runner.device)).cpu()


def _step_by_step(runner: OnnxRunner, tokens: Tensor) -> Tensor:
    """Return the logits of the last tokens, float32 [b, STEPS + 1, v].
    All but `STEPS` are read at once, and these one at a time.
    """
    ids = tokens.to(runner.device)
    decoding = runner.prefill(ids[:, :-STEPS], ids.shape[1])
    return torch.stack([decoding.logits, *(decoding.step(ids[:, place]) for place in range(-STEPS, 0))], dim=1).cpu()


def _divergence(order: Order, cases: Sequence[Tensor], plain: Sequence[Tensor]) -> float:
    """Return the mean KL divergence from the source to the graph as it stands. Raises StageError
    if it is too large.
    """
    runner = OnnxRunner(order.target, order.device)
    sums = [
        float(
            kl_div(_logits(runner, case).log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="none")
            .sum(-1)
            .sum()
        )
        for case, logits in zip(cases, plain, strict=True)
    ]
    runner.close()
    found = sum(sums) / sum(case.numel() for case in cases)
    if not found <= DIVERGENCE_LIMIT:
        rounded = [] if order.head_bits is None else [f"lm_head in {order.head_bits} bits"]
        rounded += [] if order.float_activations else ["inputs of layers in 8 bits"]
        raise StageError(
            f"the divergence from the source is {found:.3f} nats a token, and {DIVERGENCE_LIMIT:g} is the limit",
            where="onnx",
            why=f"The export itself agrees; what is rounded beside it costs that: {' and '.join(rounded)}",
            remedy="Set lm_head: keep or activations: float",
        )
    return found


def _differs(
    order: Order, directory: Path, name: str, tokens: Tensor, logits: tuple[Tensor, Tensor], limit: str
) -> StageError:
    ours, theirs = logits
    what = f"logits of {name}" if name.endswith("steps") else f"logits of {name} tokens"
    if not bool(ours.isfinite().all()):
        why = f"Numbers of the model do not fit {order.dtype}" if order.dtype == "float16" else ""
        return StageError(f"the graph gives NaN or Inf as {what}", where="onnx", why=why, remedy="Set dtype: float32")
    largest = float(theirs.abs().max())
    return StageError(
        f"the graph does not say what its source says: {what} differ by {float((ours - theirs).abs().max()):.3g}",
        where="onnx",
        why=f"The largest is {largest:.3g} and the limit {limit}; {_place(order, directory, tokens)}",
        remedy="The exporter does not know this model well enough, and nothing was kept",
    )


def _place(order: Order, directory: Path, tokens: Tensor) -> str:
    """Return the first place where the hidden states of graph and source differ, as a phrase."""
    reference = Reference(order.source, order.trust_remote_code)
    _round_head_(reference, order)
    wanted = reference.states(tokens)
    reference.close()
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=order.target.parent) as work:
        found = states(directory, tokens, Path(work), order.device, wanted[0].shape[-1])
    if len(found) != len(wanted):
        return "where it begins cannot be told"
    errors = [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(found, wanted, strict=True)]
    first = next((index for index, error in enumerate(errors) if not error <= STATE_LIMITS[order.dtype]), None)
    if first is None:
        return "all blocks agree, so it is the last norm, lm_head or the KV cache"
    return (
        f"{f'block {first - 1}' if first else 'the embedding'} is the first that differs, by "
        f"{errors[first]:.2g} of its size"
    )


@contextmanager
def _without_rounded_inputs(order: Order) -> Iterator[Path]:
    """Give a directory with the graph whose MatMulNBits do not round their inputs to 8 bits."""
    if order.float_activations:
        yield order.target
        return
    graph = ModelFile(order.target)
    for node in graph.proto.graph.node:
        for attribute in node.attribute:
            if node.op_type == "MatMulNBits" and attribute.name == "accuracy_level":
                attribute.i = 0
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=order.target.parent) as made:
        work = Path(made)
        (work / MODEL).write_bytes(graph.proto.SerializeToString())
        for path in [*OnnxFile(order.target / MODEL).data_files, *order.target.glob("*.json")]:
            (work / path.name).hardlink_to(path)
        yield work


def stored_codes(graph: ModelFile, name: str) -> QuantizedWeight:
    """Return the weight of a MatMulNBits: codes [out, in], scales and zero points [out, groups]."""
    node = next(node for node in graph.proto.graph.node if node.name == name)
    fields = {attribute.name: attribute.i for attribute in node.attribute}
    outputs, inputs, bits = fields["N"], fields["K"], fields["bits"]
    groups = -(-inputs // fields["block_size"])
    packed, scales, *zeros = [
        torch.from_numpy(graph.array(given).copy()).reshape(outputs, -1) for given in node.input[1:] if given
    ]
    middle = torch.full((outputs, groups), 1 << (bits - 1), dtype=torch.uint8)
    return QuantizedWeight(
        from_bytes(packed, bits, inputs), scales, from_bytes(zeros[0], bits, groups) if zeros else middle, bits
    )
