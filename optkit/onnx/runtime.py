"""Run a decoder with ONNX Runtime alone: whole sequences, and decode steps.
The KV cache of decode steps stays where it is.

    prompt   input_ids [b, s]  attention_mask [b, s]       past [b, h, length, d] (empty)  -> logits [b, s, v], present
    step     input_ids [b, 1]  attention_mask [b, s + 1]   past                            -> logits [b, 1, v], present

If the operation behind a cache can (GroupQueryAttention), past and present are one buffer of
full length; elsewhere each step leaves a longer copy, which the next one reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optkit.errors import OptkitError, SourceError
from optkit.model.memory import return_freed_memory
from optkit.onnx.directory import CacheLayer, OnnxDirectory, Port
from optkit.onnx.opening import Opened, open_model, runtime_errors

NUMBERS = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.int32: 6, torch.int64: 7, torch.float16: 10,
    torch.float64: 11, torch.bfloat16: 16,
}  # fmt: skip
"""Dtypes that inputs and outputs can have, and what ONNX calls them (TensorProto.DataType)."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NUMBERS}
SEEN_WHOLE = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul"})
"""Operations whose result for a token depends on the tokens that it is computed with: one scale is
chosen for all of them.
"""
TOKENS_AT_ONCE = 512
"""Tokens of a sequence that are computed together if the KV cache can carry those before; memory
for attention scores stays small.
"""
TOKENS_IN_ALL = 4096
"""Tokens of a batch that are computed together: their logits, of which a prompt needs the last
ones, are held at once.
"""


class OnnxRunner:
    """An opened decoder. Several `Decoding`s may be under way at once."""

    def __init__(
        self,
        directory: OnnxDirectory | Path,
        device: str = "cpu",
        threads: int | None = None,
        providers: Sequence[str] = (),
    ) -> None:
        """Open it on `cpu`, `cuda` or `cuda:1`.
        See `optkit.onnx.opening.open_model` for the other arguments and what is raised.
        """
        self.directory = directory if isinstance(directory, OnnxDirectory) else OnnxDirectory(directory)
        self.device = device
        graph = self.directory.graph
        self.cache = self.directory.cache
        self.logits_port = self._output("logits")
        self._check_inputs()
        self._opened: Opened | None = open_model(graph.path, device, threads, providers)
        self.vocabulary = self._vocabulary()
        kind, _, index = device.partition(":")
        self.memory = (kind, int(index or 0))
        """ONNX Runtime's name and number of the device that tensors are bound on."""
        self.sliceable = bool(self.cache) and not any(node.kind in SEEN_WHOLE for node in graph.nodes)
        """Logits of a long sequence may be computed in parts, with equal results."""

    @property
    def opened(self) -> Opened:
        """The session and what it runs on; raises OptkitError after `close`."""
        if self._opened is None:
            raise OptkitError("the session was closed", where=str(self.directory.directory), remedy="Open it again")
        return self._opened

    @property
    def providers(self) -> tuple[str, ...]:
        """The providers really used, the first one before the others."""
        return self.opened.providers

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """int64 [b, s] -> float32 [b, s, v], on the device of the runner.

        A long sequence is computed in parts of `TOKENS_AT_ONCE` through the KV cache, if the
        graph has one. Raises ResourceError.
        """
        batch, sequence = tokens.shape
        with self.errors(f"in the logits of {batch} x {sequence} tokens", "Lower the window or the batch"):
            found = torch.empty(batch, sequence, self.vocabulary, dtype=torch.float32, device=self.device)
            Decoding(self, batch, sequence).read(tokens, found)
        return found

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, length: int) -> Decoding:
        """Return a decoding that has read the prompts, int64 [b, s] with s <= length.
        It has `.logits` [b, v] and `.step(tokens [b])`.

        `length` is the most tokens that it will ever hold. Raises ResourceError without memory,
        OptkitError for a model without KV cache.
        """
        if not self.cache:
            raise OptkitError(
                "the graph has no KV cache",
                where=str(self.directory.path),
                why="None of its inputs holds past keys and values",
                remedy="Export it with a KV cache to decode token by token",
            )
        batch, sequence = tokens.shape
        with self.errors(
            f"at {batch} x {sequence} tokens, {length} in all", "Lower the batch, the prompt or the new tokens"
        ):
            found = Decoding(self, batch, length)
            found.read(tokens)
        return found

    def compute_with(self, session: Any) -> None:
        """From now on compute with another session of ONNX Runtime, opened on the same graph."""
        self._opened = replace(self.opened, session=session)

    def close(self) -> None:
        """Give the memory back."""
        self._opened = None
        return_freed_memory()

    def errors(self, what: str, remedy: str) -> Any:
        """Turn what ONNX Runtime raises into our errors."""
        return runtime_errors(what, str(self.directory.directory), self.device, remedy)

    def _output(self, name: str) -> Port:
        outputs = self.directory.graph.outputs
        if name not in outputs:
            raise SourceError(
                f"the graph has no output '{name}' but {', '.join([*outputs][:4])}",
                where=str(self.directory.path),
                why="It is not a causal language model",
                remedy="Export it as one",
            )
        return outputs[name]

    def _vocabulary(self) -> int:
        if found := self.directory.vocabulary:
            return found
        raise SourceError(
            "neither the graph nor a config says how many logits a token has",
            where=str(self.directory.directory),
            remedy="Add config.json",
        )

    def _check_inputs(self) -> None:
        known = {
            "input_ids",
            "attention_mask",
            "position_ids",
            "token_type_ids",
            *(layer.past.name for layer in self.cache),
        }
        unknown = [name for name in self.directory.graph.inputs if name not in known]
        if unknown or "input_ids" not in self.directory.graph.inputs:
            raise SourceError(
                f"the graph wants {', '.join(unknown[:4]) or 'no input_ids'}, which optkit cannot fill in",
                where=str(self.directory.path),
                why=f"It knows {', '.join(sorted(known)[:4])} and the KV cache",
                remedy="Export it as a decoder of text",
            )
        ports = (self.logits_port, *self.directory.graph.inputs.values())
        if strange := next((port for port in ports if port.dtype not in DTYPES), None):
            raise SourceError(
                f"{strange.name} has the dtype {strange.dtype}, which optkit cannot bind",
                where=str(self.directory.path),
            )
        for layer in self.cache:
            if not all(isinstance(layer.past.shape[axis], int) for axis in (1, 3)):
                raise SourceError(
                    f"{layer.past.name} has the shape {list(layer.past.shape)}, without a number "
                    "of heads and their size",
                    where=str(self.directory.path),
                    remedy="Export it again with fixed heads",
                )


class Decoding:
    """Sequences of one length that are read and continued together, with their KV cache."""

    def __init__(self, runner: OnnxRunner, batch: int, length: int) -> None:
        self._runner, self._batch, self._length = runner, batch, length
        self._binding = runner.opened.session.io_binding()
        device = runner.device
        self._inputs = runner.directory.graph.inputs
        self._ones = torch.ones(batch * length, dtype=self._dtype("attention_mask"), device=device)
        self._buffers = {layer: self._buffer(layer) for layer in runner.cache if self._in_place(layer)}
        self._bound: slice | None = None
        self._moving = [layer for layer in runner.cache if layer not in self._buffers]
        self._copies: dict[CacheLayer, Any] = {}
        self._names = ["logits", *(layer.present for layer in (*self._buffers, *self._moving))]
        """The outputs in the order in which they are bound."""
        self._alive: list[Tensor] = []
        self._step_logits = torch.empty(
            batch, 1, runner.vocabulary, dtype=DTYPES[runner.logits_port.dtype], device=device
        )
        self.position = 0
        """Tokens read so far."""
        self.logits = torch.empty(0)
        """Of the last token that was read, float32 [b, v]."""

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Read one more token of each sequence, int64 [b], and return its logits, float32 [b, v]."""
        with self._runner.errors(
            f"at token {self.position + 1} of {self._batch} sequences", "Lower the batch or the new tokens"
        ):
            self._run(tokens.reshape(self._batch, 1), self._step_logits, slice(0, self._batch), self.position)
        self.position += 1
        self.logits = _copied(self._step_logits[:, -1])
        return self.logits

    def read(self, tokens: Tensor, into: Tensor | None = None) -> None:
        """Read prompts, int64 [b, s], and keep the logits of their last tokens.
        All logits are left in `into`, float32 [b, s, v].
        """
        narrow = self._step_logits.dtype
        last = torch.empty_like(self._step_logits[:, 0])
        for rows, columns in self._parts(*tokens.shape):
            part = tokens[rows, columns]
            target = None if into is None else into[rows, columns]
            if target is not None and target.dtype == narrow and target.is_contiguous():
                found = target
            else:
                found = torch.empty(*part.shape, self._runner.vocabulary, dtype=narrow, device=last.device)
            self._run(part, found, rows, columns.start)
            last[rows] = found[:, -1]
            if target is not None and target is not found:
                target.copy_(found)
        self.position = tokens.shape[1]
        self.logits = _copied(last)

    def _parts(self, batch: int, sequence: int) -> list[tuple[slice, slice]]:
        """Return rows and columns of the tokens that are computed together.
        So memory stays bounded even if the sequences are long.

        GroupQueryAttention reads on from a cache for one sequence at a time, which it can in the
        rows of its buffer.
        """
        together = slice(0, batch)
        columns = [slice(start, min(start + TOKENS_AT_ONCE, sequence)) for start in range(0, sequence, TOKENS_AT_ONCE)]
        if not self._runner.sliceable or (batch > 1 and self._buffers and self._moving):
            return [(together, slice(0, sequence))]
        if batch == 1 or not self._buffers:
            return [(together, each) for each in columns]
        if sequence <= TOKENS_AT_ONCE and batch * sequence <= TOKENS_IN_ALL:
            return [(together, slice(0, sequence))]
        return [(slice(row, row + 1), each) for row in range(batch) for each in columns]

    def _run(self, tokens: Tensor, logits: Tensor, rows: slice, start: int) -> None:
        """Compute tokens that `start` others precede, int64 [b, s].
        Their logits are left in `logits`, [b, s, v].
        """
        batch, sequence = tokens.shape
        total = start + sequence
        if total > self._length:
            raise OptkitError(
                f"{total} tokens do not fit into a KV cache of {self._length}",
                where=str(self._runner.directory.directory),
                remedy="Give prefill the length that it will reach",
            )
        self._alive = []
        self._bind_input("input_ids", lambda: tokens)
        self._bind_input("attention_mask", lambda: self._ones[: batch * total].view(batch, total))
        self._bind_input("position_ids", lambda: torch.arange(start, total).expand(batch, sequence))
        self._bind_input("token_type_ids", lambda: torch.zeros(batch, sequence))
        self._bind("logits", logits, output=True)
        self._bind_buffers(rows)
        self._bind_copies(start)
        if self._runner.memory[0] == "cuda":
            torch.cuda.synchronize(self._runner.device)  # ONNX Runtime computes on a stream of its own
        self._runner.opened.session.run_with_iobinding(self._binding)
        if self._moving:
            made = dict(zip(self._names, self._binding.get_outputs(), strict=True))
            self._copies = {layer: made[layer.present] for layer in self._moving}

    def _bind_input(self, name: str, value: Callable[[], Tensor]) -> None:
        """Bind an input that the graph has, in its dtype."""
        if name in self._inputs:
            ready = value().to(self._runner.device, self._dtype(name)).contiguous()
            self._alive.append(ready)
            self._bind(name, ready)

    def _bind(self, name: str, value: Tensor, *, output: bool = False) -> None:
        kind, index = self._runner.memory
        bind = self._binding.bind_output if output else self._binding.bind_input
        bind(name, kind, index, NUMBERS[value.dtype], list(value.shape), value.data_ptr())

    def _bind_buffers(self, rows: slice) -> None:
        """Bind the rows of the buffers, if others were bound before."""
        if rows == self._bound:
            return
        for layer, buffer in self._buffers.items():
            self._bind(layer.past.name, buffer[rows])
            self._bind(layer.present, buffer[rows], output=True)
        self._bound = rows

    def _bind_copies(self, start: int) -> None:
        """Bind what the last run left of the caches that move, nothing at the start."""
        kind, index = self._runner.memory
        for layer in self._moving:
            if start:
                self._binding.bind_ortvalue_input(layer.past.name, self._copies[layer])
            else:
                memory = torch.zeros(1, dtype=DTYPES[layer.past.dtype], device=self._runner.device)
                self._alive.append(memory)
                shape = [self._batch, int(layer.past.shape[1]), 0, int(layer.past.shape[3])]
                self._binding.bind_input(layer.past.name, kind, index, NUMBERS[memory.dtype], shape, memory.data_ptr())
            self._binding.bind_output(layer.present, kind, index)

    def _in_place(self, layer: CacheLayer) -> bool:
        return layer.shared and self._runner.providers[0] in ("CPUExecutionProvider", "CUDAExecutionProvider")

    def _buffer(self, layer: CacheLayer) -> Tensor:
        heads, size = int(layer.past.shape[1]), int(layer.past.shape[3])
        return torch.zeros(
            self._batch, heads, self._length, size, dtype=DTYPES[layer.past.dtype], device=self._runner.device
        )

    def _dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._inputs[name].dtype] if name in self._inputs else torch.int64


def _copied(logits: Tensor) -> Tensor:
    """Return a copy in float32. On a CPU NumPy makes it: torch's threads would go on spinning if
    ONNX Runtime's have to compute.
    """
    if logits.device.type != "cpu" or logits.dtype == torch.bfloat16:
        return logits.to(torch.float32, copy=True)
    return torch.from_numpy(logits.numpy().astype("float32"))
