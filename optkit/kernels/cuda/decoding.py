"""The decode step of a decoder of norms, attention and MLPs as one CUDA graph of few kernels.

Five kernels a layer: the norm goes with the product behind it, as do the gate and the addition to
the residual stream; q, k and v are one product, and so are gate and up. Tokens never leave the GPU
between steps: the graph ends by writing the next one where it begins to read. Of a split model each
process has a graph of its share, with kernels that add up what all have (`exchange.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.errors import OptkitError, StageError, first_line
from optkit.kernels.cuda.exchange import Exchange
from optkit.kernels.cuda.graph_capture import captured
from optkit.kernels.cuda.layer_matrices import matrix_of
from optkit.kernels.cuda.layer_pass import UNSCALED, Rows, norms_all_heads
from optkit.kernels.cuda.model_steps import ModelSteps
from optkit.kernels.cuda.nvrtc import compiled
from optkit.kernels.cuda.prompts import Prompts
from optkit.kernels.cuda.split_layers import why_not_split
from optkit.kernels.cuda.step_layers import Layer, epsilon_of, kv_heads_of, norm_of, read_layers, rotations, why_not
from optkit.kernels.cuda.step_products import takes_lined
from optkit.kernels.cuda.wide import Lined, tokens_of
from optkit.kernels.shares import split_dimension, whole

MOST_SEQUENCES = 256
REMEDY = "Take cuda_graphs out of the recipe, or use compile"
MOST_SHARES = 32
KEYS_OF_SHARE = 64
"""The fewest that are worth a block."""
CLUSTERS, MOST_CLUSTERED = (9, 0), 16
"""The compute capability of GPUs that join so many shares in shared memory."""
MOST_BLOCKS = 2
"""Of the attention kernel that a multiprocessor holds; one of few sequences, so that shared memory leaves
room for the L1 cache, through which the weights of the kernels beside it come.
"""
STAGE_ROWS, MOST_STAGES, STATIC_BYTES = 4 * 2 * 16, 4, 14 << 10
"""Keys and values that its 4 warps ask for at once; how many times ahead; what a block needs besides."""
CLUSTERED_STAGES = 3
"""Of blocks that are a cluster, so that shared memory has room for the weight of the kernel behind them."""
CAPACITY_STEP = 128
TRIED, ALIKE, LEAST_ALIKE = 25, 0.99, 0.6
"""Tokens of two texts of which the graph's logits are compared with the model's own, and their cosine
at least, of one of them: rounding alone can send a token to another expert. Where it moves the
model's own logits too, as in 8 bits, less will do.
"""
MOST_PAIRS = 8
"""Of such texts: in a deep mixture of few experts, rounding moves most texts far, and some less."""
EMBEDDED_ERROR = 0.02
"""How far rounding may take embeddings from what the first layer gets."""
MORE_ROUNDED = 10
"""Times as far as logits move if the embeddings alone are rounded otherwise: each layer rounds anew."""
FEWEST_TRIED = 3
"""Batches of 2 to 2^3 have the same kernels; so have those up to each next power of two."""
CHOOSING_BLOCKS = 32


class GraphDecoder:
    """Greedy decoding of an opened model.
    Its matrices are stacked in place; the model's own layers become views of them.
    """

    def __init__(self, model: Any) -> None:
        """Raises StageError for a model whose step is another one."""
        self.model = model
        self._idle: Steps | None = None
        self._by_model: dict[int, str] = {}
        self.not_in_prompts: set[str] = set()
        self._tried: set[int] = set()
        self._expected: dict[int, tuple[Tensor, float]] = {}
        try:
            reason = why_not(model) or why_not_split(model) or self._why_not_read()
        except Exception as error:  # what an unknown model lacks may show anywhere, and compile is left
            reason = first_line(error)
        if reason:
            what = f"the decode step of {type(model).__name__} cannot be one graph"
            raise StageError(what, where="cuda_graphs", why=reason, remedy=REMEDY)

    def _why_not_read(self) -> str | None:
        """Read the model and try two sequences; return why its step is another one, None if it is not."""
        model, base = self.model, self.model.model
        attention, config = base.layers[0].self_attn, model.config
        self.embedding, self.epsilon = whole(base.embed_tokens.weight), epsilon_of(model)
        self.exchange: Exchange | None = None
        if split_dimension(model.lm_head) is not None:
            self.exchange = Exchange.open(self.embedding.shape[1], self.embedding.device)
        ranks = self.exchange.ranks if self.exchange else 1
        self.size, self.scaling = int(attention.head_dim), float(attention.scaling)
        self.heads, self.kv_heads = int(config.num_attention_heads) // ranks, kv_heads_of(config) // ranks
        self.layers, self.head = read_layers(model), matrix_of(model.lm_head)
        self.norm = norm_of(base.norm, self.embedding[0], self.epsilon)
        self.embedding_scale = self._embedding_scale()
        with self.steps(2, TRIED):
            pass
        self._idle = None
        return self._by_model.get(2)

    def all_logits(self, logits: Tensor) -> Tensor:
        """Return those of the whole vocabulary, float32 [batch, vocabulary], from this process's share."""
        return self.exchange.gathered(logits) if self.exchange else logits

    @torch.no_grad()
    def _embedding_scale(self) -> float:
        """Return by what the model multiplies embeddings.
        Raises ValueError for a model that does more to them.
        """
        seen: list[Tensor] = []
        hook = self.model.model.layers[0].register_forward_pre_hook(
            lambda _, given, named: seen.append(given[0] if given else named["hidden_states"]), with_kwargs=True
        )
        with hook:
            self._expected_of(0)
        hidden, embedded = seen[0].flatten().float(), F.embedding(self._texts(0), self.embedding).flatten().float()
        scale = float((hidden @ embedded / (embedded @ embedded)).to(self.embedding.dtype))
        if (hidden - scale * embedded).norm() > EMBEDDED_ERROR * hidden.norm():
            raise ValueError("its embeddings are more than multiplied in front of the first layer")
        return scale

    def _own_logits(self, pair: int) -> Tensor:
        logits: Tensor = self.model.forward(input_ids=self._texts(pair), use_cache=False).logits
        return logits[:, -1].float()

    def _expected_of(self, pair: int) -> tuple[Tensor, float]:
        """Return the model's logits of two texts, and how alike the graph's have to be: rounding alone moves those of
        some models far, so it is tried by how much.
        """
        if pair not in self._expected:
            logits = self._own_logits(pair)
            with self.model.model.embed_tokens.register_forward_hook(lambda _, given, found: rounded_otherwise(found)):
                stay = float(F.cosine_similarity(self._own_logits(pair), logits, dim=-1).min())
            self._expected[pair] = logits, max(LEAST_ALIKE, min(ALIKE, 1 - MORE_ROUNDED * (1 - stay)))
        return self._expected[pair]

    def _texts(self, pair: int) -> Tensor:
        numbers = torch.arange(2 * TRIED * pair, 2 * TRIED * (pair + 1), device=self.embedding.device).view(2, TRIED)
        return numbers.mul_(7919).add_(3).remainder_(self.embedding.shape[0])

    def _why_differs(self, steps: Steps) -> str | None:
        """Return how far the logits of so many sequences are from the model's own, None if they are the same."""
        nearest = -1.0
        for pair in range(MOST_PAIRS):
            alike, least = self._alike(steps, pair), self._expected_of(pair)[1]
            nearest = max(nearest, alike)
            reason = None if alike >= least else f"its logits are not the model's own (cosine {nearest:.3f})"
            reason = self.exchange.first(reason) if self.exchange else reason
            if not reason:
                break
        return reason

    def _alike(self, steps: Steps, pair: int) -> float:
        """Return the cosine of the graph's logits of two texts with the model's own, of the one that is nearer."""
        which = torch.arange(steps.batch, device=self.embedding.device) % 2
        tokens = self._texts(pair)[which]
        steps.prompt(tokens[:, :-1])
        steps.tokens[TRIED - 1] = tokens[:, -1]
        steps.launch()
        logits, cap = self.all_logits(steps.logits), getattr(self.model.config, "final_logit_softcapping", None)
        expected = self._expected_of(pair)[0][which]
        found = F.cosine_similarity(cap * torch.tanh(logits / cap) if cap else logits, expected, dim=-1)
        return max(float(found[text::2].min()) for text in range(min(2, steps.batch)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the model itself decoded or read so far."""
        batches: dict[str, list[str]] = {}
        for batch, reason in sorted(self._by_model.items()):
            batches.setdefault(reason, []).append(str(batch))
        lacking = " and ".join(sorted(self.not_in_prompts))
        read = (f"cuda_graphs: prompts are read by the model itself, whose attention has {lacking}",) if lacking else ()
        return read + tuple(
            f"cuda_graphs: off for batches of {', '.join(found)}, which the model decodes by its own step: {reason}"
            for reason, found in batches.items()
        )

    @contextmanager
    def steps(self, batch: int, length: int) -> Iterator[Steps | ModelSteps]:
        """Lend what `batch` sequences of `length` tokens need; the model if they are too many."""
        if batch > MOST_SEQUENCES:
            self._by_model[batch] = f"the graph takes up to {MOST_SEQUENCES} sequences"
        lent, self._idle = self._idle, None
        capacity = min(-(-length // CAPACITY_STEP) * CAPACITY_STEP, int(self.model.config.max_position_embeddings))
        if batch not in self._by_model and (lent is None or (lent.batch, lent.capacity) != (batch, capacity)):
            lent = None
            with torch.cuda.device(self.embedding.device), torch.no_grad():
                lent = self._new_steps(batch, capacity)
        if lent is None or batch in self._by_model:
            yield ModelSteps(self.model)
            return
        try:
            yield lent
        finally:
            self._idle = lent

    def _new_steps(self, batch: int, capacity: int) -> Steps | None:
        """Return the graph of a batch; None if it is not the model's step, which is tried once for batches
        of about this size: they share their kernels.
        """
        size = max(FEWEST_TRIED, (batch - 1).bit_length()) if batch > 1 else 0
        try:
            steps = Steps(self, batch, capacity)
            reason = None if size in self._tried else self._why_differs(steps)
        except OptkitError as error:
            reason = str(error)
        reason = self.exchange.first(reason) if self.exchange else reason
        if reason:
            self._by_model[batch] = reason
            return None
        self._tried.add(size)
        return steps


class Steps:
    """The buffers and the graph for a number of sequences and positions."""

    def __init__(self, decoder: GraphDecoder, batch: int, capacity: int) -> None:
        self.decoder: GraphDecoder = weakref.proxy(decoder)  # it keeps the steps: in a circle both would outlive it
        self.batch, self.capacity = batch, capacity
        device, dtype = decoder.embedding.device, decoder.embedding.dtype
        self.rows = Rows(decoder, batch, 1)
        self.attended = torch.zeros(batch, decoder.heads * decoder.size, dtype=dtype, device=device)
        self.lined = Lined.empty(batch, decoder.heads * decoder.size, self.attended)
        self.logits = torch.zeros(batch, decoder.head.outputs, dtype=torch.float32, device=device)
        shape = (len(decoder.layers), 2, batch, decoder.kv_heads, capacity, decoder.size)
        self.cache = torch.zeros(shape, dtype=dtype, device=device)
        self.best = torch.zeros(batch, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(capacity + 1, batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int32, device=device)
        pairs, count = batch * decoder.kv_heads, torch.cuda.get_device_properties(device).multi_processor_count
        self.shares = _shares(pairs, capacity, count)
        clusters = device.type == "cuda" and torch.cuda.get_device_capability(device) == CLUSTERS
        self.clustered = clusters and 1 < self.shares <= MOST_CLUSTERED
        stages = attention_stages(decoder.size, 1 if pairs <= count else MOST_BLOCKS, device)
        self.stages = min(stages, CLUSTERED_STAGES) if self.clustered else stages
        group = decoder.heads // decoder.kv_heads
        shared = batch * decoder.kv_heads * self.shares * group * (decoder.size + 2)
        self.partial = torch.zeros(shared, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(batch * decoder.kv_heads, dtype=torch.int32, device=device)
        self.rotations = rotations(decoder.model, self.rows.hidden[:1, None], capacity)
        self.prompts = Prompts()
        self.graph = captured(self.launch)
        self._at = 0

    def prompt(self, tokens: Tensor) -> Tensor:
        """Read prompts, int64 [batch, prompt].
        Return the tokens behind them, int64 [batch], without waiting for the device.
        """
        length = tokens.shape[1]
        if lacking := {why for layer in self.decoder.layers if (why := layer.not_in_prompts(length))}:
            self.decoder.not_in_prompts.update(lacking)
            chosen = self._prompt_by_model(tokens)
        else:
            chosen = self.prompts.read(self, tokens)
        self.position.fill_(length)
        self.tokens[length] = chosen
        self._at = length
        return chosen

    def _prompt_by_model(self, tokens: Tensor) -> Tensor:
        steps, length = ModelSteps(self.decoder.model), tokens.shape[1]
        chosen = steps.prompt(tokens)
        for index, layer in enumerate(steps.cache.layers):
            kept = layer.keys.shape[2]  # the newest, if a window does not need the others
            self.cache[index, 0, :, :, length - kept : length] = layer.keys
            self.cache[index, 1, :, :, length - kept : length] = layer.values
        return chosen

    def next(self) -> Tensor:
        """Return the tokens behind those returned last, int64 [batch], without waiting for the device."""
        with torch.cuda.device(self.tokens.device):
            self.graph.replay()
        self._at += 1
        return self.tokens[self._at].clone()

    def launch(self) -> None:
        """Launch the kernels of one step on the current stream."""
        decoder, rows = self.decoder, self.rows
        embedding = (decoder.embedding, self.tokens, self.position, rows.hidden, decoder.embedding_scale)
        self._small("embed", (self.batch, 1, 1), embedding)
        for index, layer in enumerate(decoder.layers):
            rows.through(layer, partial(self._attend, index, layer))
        rows.product(decoder.head, self.logits, decoder.norm)
        self._small("choose", (CHOOSING_BLOCKS, self.batch, 1), (self.logits, self.best))
        if decoder.exchange:
            decoder.exchange.agree_(self.best, decoder.head.outputs)
        self._small("keep", (1, 1, 1), (self.best, self.tokens, self.position, self.batch))

    def _attend(self, index: int, layer: Layer) -> Tensor | Lined:
        decoder, lined = self.decoder, takes_lined(layer.output, self.batch)
        macros = {"CAPPED": bool(layer.cap), "LINED": lined and tokens_of(self.batch)}
        given = (self.rows.qkv, *self.cache[index], *self.rotations[index], self.position, self.capacity)
        how = (decoder.scaling, *self.head_norms(layer), decoder.epsilon, layer.window, layer.cap, layer.sinks)
        output = self.lined.memory if lined else self.attended
        self.kernel("attention.cu", "attend", self.macros(index, self.rows) | macros)(
            (decoder.kv_heads, self.shares, self.batch),
            128,
            (*given, *how, self.partial, self.arrived, output, *self.rows.scaled),
            self.stages * STAGE_ROWS * decoder.size * 2,
        )
        return self.lined if lined else self.attended

    def macros(self, index: int, rows: Rows) -> dict[str, int]:
        decoder, layer = self.decoder, self.decoder.layers[index]
        macros = {"HEADS": decoder.heads, "KV_HEADS": decoder.kv_heads, "SIZE": decoder.size}
        macros |= {"ROTARY": 2 * self.rotations[index][0].shape[1], "SHARES": self.shares, "STAGES": self.stages}
        norms = self.head_norms(layer) != (None, None)
        return macros | {"SCALED": rows.scaled is not UNSCALED, "CLUSTER": self.clustered, "QK_NORM": norms}

    @staticmethod
    def head_norms(layer: Layer) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if norms_all_heads(layer) else (layer.query_norm, layer.key_norm)

    def _small(self, name: str, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        macros = {"WIDTH": self.rows.hidden.shape[1], "VOCABULARY": self.logits.shape[1]}
        self.kernel("tokens.cu", name, macros)(grid, 256, arguments)

    def kernel(self, source: str, name: str, macros: dict[str, int]) -> Any:
        given = {**macros, "BF16": self.cache.dtype == torch.bfloat16}
        return compiled(source, name, given, self.cache.get_device())


def rounded_otherwise(values: Tensor) -> Tensor:
    """Return values that are off by up to a step of their dtype."""
    steps = torch.arange(values.numel(), device=values.device).mul_(7919).remainder_(3).sub_(1).view_as(values)
    return (values.float() * (1 + steps * torch.finfo(values.dtype).eps)).to(values.dtype)


def attention_stages(size: int, at_once: int, device: torch.device) -> int:
    """Return how many tiles of keys and values of so many channels a warp of the attention kernel has room for
    if a multiprocessor holds so many of its blocks.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    shared = int(properties.shared_memory_per_multiprocessor), int(properties.shared_memory_per_block_optin)
    room = min(shared[0] // at_once, shared[1])
    return max(1, min(MOST_STAGES, (room - STATIC_BYTES) // (STAGE_ROWS * size * 2)))


def _shares(pairs: int, capacity: int, multiprocessors: int) -> int:
    """Return into how many shares the past is cut: as many as run at once, none too small."""
    return max(1, min(multiprocessors // pairs, MOST_SHARES, capacity // KEYS_OF_SHARE))
