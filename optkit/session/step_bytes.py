"""The bytes that one decode step reads."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from optkit.kernels.kv_cache import CodedLayer
from optkit.kernels.shares import local_part
from optkit.model.experts import Experts, joined_matrices

STATES = ("conv_states", "recurrent_states")
"""What a layer of transformers' caches holds that is as large for any context."""


def weight_bytes(model: Any, batch: int, without: Container[nn.Module] = ()) -> int:
    """Return the fewest bytes of parameters and buffers that one decode step reads.
    It reads nothing of the modules `without`, such as an encoder's.

    Shared storage counts once. Of an embedding only `batch` rows are read, unless it is lm_head
    too; of the experts of a block only as many as a token is sent to.
    """
    embeddings = [local_part(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)]
    # each parameter that waits elsewhere -> a name for its place, which tied ones share
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    everything = model.named_parameters(remove_duplicate=False)
    offloaded = {id(parameter): tied.get(name, name) for name, parameter in everything if parameter.is_meta}
    read: dict[int | str, float] = {}

    def place(tensor: Tensor) -> int | str:
        return offloaded.get(id(tensor)) or tensor.data_ptr()

    for module, share in _shares(model):
        if isinstance(module, nn.Embedding) or module in without:
            continue
        for tensor in _held(module):
            if tensor.numel():
                read[place(tensor)] = max(read.get(place(tensor), 0), _size(tensor) * share)
    rows = sum(min(batch, len(weight)) * _size(weight[0]) for weight in embeddings if place(weight) not in read)
    return round(sum(read.values())) + rows


def _held(module: nn.Module) -> Iterator[Tensor]:
    """Yield a module's own parameters and buffers, and the scales that bitsandbytes hangs on them."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield local_part(tensor)
            scales = getattr(tensor, "quant_state", None)
            while scales is not None:
                yield scales.absmax
                # gone if bitsandbytes has laid the weight out anew for a CPU
                scales = getattr(scales, "state2", None)


def cache_bytes(cache: Any, batch: int, context: int) -> int:
    """Return the bytes of a KV cache of `batch` sequences of `context` tokens.
    One that holds one token of one sequence tells.

    A state of tensors is as large for any context.
    """
    if not hasattr(cache, "layers"):
        return batch * sum(map(_size, _tensors(cache)))
    total = 0
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        held = vars(layer)
        states = [held.get(name) for name in STATES]
        if isinstance(layer, CodedLayer):
            total += layer.token_bytes() * (min(context, layer.sliding_window) if layer.sliding_window else context)
        elif isinstance(keys, Tensor) and isinstance(values, Tensor):
            window = getattr(layer, "sliding_window", None)
            total += (_size(keys) + _size(values)) * (min(context, window) if window else context)
        else:
            states = [held]
        total += sum(map(_size, _tensors(states)))
    return total * batch


def _tensors(held: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested collections."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, (Mapping, list, tuple)):
        for each in held.values() if isinstance(held, Mapping) else held:
            yield from _tensors(each)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shares(model: Any) -> Iterator[tuple[nn.Module, float]]:
    """Yield each module with the share of its weights that one token needs: below 1 for experts.
    Towers of vision and audio are left out.
    """
    config = model.config.get_text_config(decoder=True)
    chosen = next(
        (count for name in ("num_experts_per_tok", "top_k") if isinstance(count := getattr(config, name, None), int)),
        None,
    )
    shares: dict[nn.Module, float] = {}
    for module in model.modules():
        count = _experts(module)
        if chosen and count:
            shares |= dict.fromkeys(module.modules(), min(1.0, chosen / count))
    parts = [model] if config is model.config else [model.get_decoder(), model.get_output_embeddings()]
    for module in dict.fromkeys(module for part in parts for module in part.modules()):
        yield module, shares.get(module, 1.0)


def _experts(module: nn.Module) -> int:
    """Return how many experts a module holds, 0 if it is none of experts."""
    if isinstance(module, Experts):
        return len(module)
    joined = joined_matrices(module) if "xpert" in type(module).__name__ else []
    return math.gcd(*map(len, joined))
