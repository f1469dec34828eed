"""The decode step of a model of the Llama family as one CUDA graph of few kernels.

Five kernels a layer: the norm goes with the product behind it, as do the gate and the addition to
the residual stream; q, k and v are one product, and so are gate and up. Tokens never leave the GPU
between steps: the graph ends by writing the next one where it begins to read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from optkit.errors import StageError
from optkit.kernels.cuda.families import REMEDY
from optkit.kernels.cuda.matrix import scratch_bytes
from optkit.kernels.cuda.nvrtc import compiled
from optkit.kernels.cuda.schedule import MOST_TOKENS
from optkit.kernels.cuda.step_layers import Layer, layer_of, matrix_of, why_not
from optkit.kernels.cuda.step_products import step_product

MOST_SEQUENCES = 256
MOST_SHARES = 32
KEYS_OF_SHARE = 64
"""The fewest that are worth a block."""
BLOCKS_AT_ONCE = 2
"""Blocks of the attention kernel that a multiprocessor holds."""
CAPACITY_STEP = 128
CHOOSING_BLOCKS = 32


class GraphDecoder:
    """Greedy decoding of an opened model.
    Its matrices are stacked in place; the model's own layers become views of them.
    """

    def __init__(self, model: Any) -> None:
        """Raises StageError for a model whose step is another one."""
        if reason := why_not(model):
            what = f"the decode step of {type(model).__name__} cannot be one graph"
            raise StageError(what, where="cuda_graphs", why=reason, remedy=REMEDY)
        self.model, base = model, model.model
        attention = base.layers[0].self_attn
        self.size = int(attention.head_dim)
        self.heads = int(model.config.num_attention_heads)
        self.kv_heads = int(model.config.num_key_value_heads)
        self.scaling = float(attention.scaling)
        self.epsilon = float(base.norm.variance_epsilon)
        self.embedding = base.embed_tokens.weight
        self.layers = [layer_of(block) for block in base.layers]
        self.norm, self.head = base.norm.weight, matrix_of(model.lm_head)
        self._idle: Steps | None = None
        self._by_model: set[int] = set()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the graph did not decode so far."""
        if not self._by_model:
            return ()
        batches = ", ".join(map(str, sorted(self._by_model)))
        why = f"which the model decodes by its own step: the graph takes up to {MOST_SEQUENCES} sequences"
        return (f"cuda_graphs: off for batches of {batches}, {why}",)

    @contextmanager
    def steps(self, batch: int, length: int) -> Iterator[Steps | ModelSteps]:
        """Lend what `batch` sequences of `length` tokens need; the model if they are too many."""
        if batch > MOST_SEQUENCES:
            self._by_model.add(batch)
            yield ModelSteps(self.model)
            return
        lent, self._idle = self._idle, None
        capacity = min(-(-length // CAPACITY_STEP) * CAPACITY_STEP, int(self.model.config.max_position_embeddings))
        if lent is None or (lent.batch, lent.capacity) != (batch, capacity):
            lent = None
            with torch.cuda.device(self.embedding.device):
                lent = Steps(self, batch, capacity)
        lent.length = length
        try:
            yield lent
        finally:
            self._idle = lent


class Steps:
    """The buffers and the graph for a number of sequences and positions."""

    def __init__(self, decoder: GraphDecoder, batch: int, capacity: int) -> None:
        self.decoder, self.batch, self.capacity = decoder, batch, capacity
        device, dtype = decoder.embedding.device, decoder.embedding.dtype
        first = decoder.layers[0]
        outputs = max(layer.gate_up.outputs for layer in decoder.layers)
        self.hidden = torch.zeros(batch, decoder.embedding.shape[1], dtype=dtype, device=device)
        self.qkv = torch.zeros(batch, first.qkv.outputs, dtype=dtype, device=device)
        self.attended = torch.zeros(batch, decoder.heads * decoder.size, dtype=dtype, device=device)
        self.gated = torch.zeros(batch, outputs // 2, dtype=dtype, device=device)
        self.logits = torch.zeros(batch, decoder.head.outputs, dtype=torch.float32, device=device)
        matrices = [
            matrix for layer in decoder.layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        needed = max(scratch_bytes(matrix.form, min(batch, MOST_TOKENS)) for matrix in (*matrices, decoder.head))
        self.ordered = torch.zeros(needed, dtype=torch.uint8, device=device)
        shape = (len(decoder.layers), 2, batch, decoder.kv_heads, capacity, decoder.size)
        self.cache = torch.zeros(shape, dtype=dtype, device=device)
        self.best = torch.zeros(batch, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(capacity + 1, batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int32, device=device)
        self.shares = _shares(batch * decoder.kv_heads, capacity, device)
        group = decoder.heads // decoder.kv_heads
        shared = batch * decoder.kv_heads * self.shares * group * (decoder.size + 2)
        self.partial = torch.zeros(shared, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(batch * decoder.kv_heads, dtype=torch.int32, device=device)
        positions = torch.arange(capacity, device=device)[None]
        cosines, sines = decoder.model.model.rotary_emb(self.hidden[:1, None], positions)
        self.cosines = cosines[0, :, : decoder.size // 2].float().contiguous()
        self.sines = sines[0, :, : decoder.size // 2].float().contiguous()
        self.graph = self._capture()
        self.length, self._at, self._running = capacity, 0, self.tokens[0]

    def prompt(self, tokens: Tensor) -> Tensor:
        """Run the prompts, int64 [batch, prompt], through the model itself.
        Return the tokens behind them, int64 [batch].
        """
        from transformers import DynamicCache

        model, length = self.decoder.model, tokens.shape[1]
        cache = DynamicCache(config=model.config)
        logits = model.forward(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        for index, layer in enumerate(cache.layers):
            self.cache[index, 0, :, :, :length] = layer.keys
            self.cache[index, 1, :, :, :length] = layer.values
        chosen: Tensor = logits[:, -1].argmax(-1)
        self.position.fill_(length)
        self.tokens[length] = chosen
        self._at = length
        return self._when_done(chosen)

    def next(self) -> Tensor:
        """Return the tokens behind those returned last, int64 [batch], when the device has them.
        The step behind them runs by then.
        """
        return self._when_done(self._running)

    def _when_done(self, tokens: Tensor) -> Tensor:
        with torch.cuda.device(tokens.device):
            done = torch.cuda.Event()
            done.record()
            if self._at + 1 < self.length:
                self.graph.replay()
                self._at += 1
                self._running = self.tokens[self._at].clone()
            done.synchronize()
        return tokens

    def launch(self) -> None:
        """Launch the kernels of one step on the current stream."""
        decoder, epsilon = self.decoder, self.decoder.epsilon
        self._small("embed", (self.batch, 1, 1), (decoder.embedding, self.tokens, self.position, self.hidden))
        for index, layer in enumerate(decoder.layers):
            step_product(layer.qkv, self.hidden, self.qkv, norm=layer.input_norm, epsilon=epsilon, ordered=self.ordered)
            self._attend(index, layer)
            step_product(layer.output, self.attended, self.hidden, add=True, ordered=self.ordered)
            step_product(
                layer.gate_up,
                self.hidden,
                self.gated,
                norm=layer.output_norm,
                epsilon=epsilon,
                gated=True,
                ordered=self.ordered,
            )
            step_product(layer.down, self.gated, self.hidden, add=True, ordered=self.ordered)
        step_product(decoder.head, self.hidden, self.logits, norm=decoder.norm, epsilon=epsilon, ordered=self.ordered)
        self._small("choose", (CHOOSING_BLOCKS, self.batch, 1), (self.logits, self.best))
        self._small("keep", (1, 1, 1), (self.best, self.tokens, self.position, self.batch))

    def _attend(self, index: int, layer: Layer) -> None:
        decoder = self.decoder
        macros = {"HEADS": decoder.heads, "KV_HEADS": decoder.kv_heads, "SIZE": decoder.size, "SHARES": self.shares}
        if layer.query_norm is not None:
            macros["QK_NORM"] = 1
        arguments = (
            *(
                self.qkv,
                self.cache[index, 0],
                self.cache[index, 1],
                self.cosines,
                self.sines,
                self.position,
                self.capacity,
            ),
            *(
                decoder.scaling,
                layer.query_norm,
                layer.key_norm,
                decoder.epsilon,
                self.partial,
                self.arrived,
                self.attended,
            ),
        )
        self._kernel("attention.cu", "attend", macros)((decoder.kv_heads, self.shares, self.batch), 128, arguments)

    def _small(self, name: str, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        macros = {"WIDTH": self.hidden.shape[1], "VOCABULARY": self.logits.shape[1]}
        self._kernel("tokens.cu", name, macros)(grid, 256, arguments)

    def _kernel(self, source: str, name: str, macros: dict[str, int]) -> Any:
        given = {**macros, **({"BF16": 1} if self.hidden.dtype == torch.bfloat16 else {})}
        return compiled(
            source, name, tuple(sorted((key, str(value)) for key, value in given.items())), self.hidden.get_device()
        )

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Return one step as a graph; a first run outside of it compiles and loads the kernels."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.launch()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.launch()
        return graph


class ModelSteps:
    """The steps of a batch that is too large for the graph: each runs through the model."""

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        self.model, self.cache = model, DynamicCache(config=model.config)

    def prompt(self, tokens: Tensor) -> Tensor:
        """Run the prompts, int64 [batch, prompt].
        Return the tokens behind them, int64 [batch], when the device has them.
        """
        logits = self.model.forward(
            input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits
        chosen: Tensor = logits[:, -1].argmax(-1)
        torch.cuda.synchronize(tokens.device)
        self._last = chosen
        return chosen

    def next(self) -> Tensor:
        """Return the tokens behind those returned last."""
        return self.prompt(self._last[:, None])


def _shares(pairs: int, capacity: int, device: torch.device) -> int:
    """Return into how many shares the past is cut: as many as run at once, none too small."""
    room = BLOCKS_AT_ONCE * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(room // pairs, MOST_SHARES, capacity // KEYS_OF_SHARE))
