"""A model of the Llama family as the C++ of decode steps and prompts reads it: decoder.h has the same structures."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from optkit.kernels.cpu.coded_linear import CodedLinear


class _Matrix(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("weight", "scales", "shifts", "bias")],
        *[(name, ctypes.c_int64) for name in ("bits", "outputs", "inputs", "groups")],
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *[(name, _Matrix) for name in ("queries", "keys", "values", "output", "gate", "up", "down")],
        *[
            (name, ctypes.c_void_p)
            for name in ("input_norm", "output_norm", "query_norm", "key_norm", "key_cache", "value_cache")
        ],
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        *[(name, _Matrix) for name in ("embedding", "head")],
        *[(name, ctypes.c_void_p) for name in ("norm", "cosines", "sines")],
        *[(name, ctypes.c_int64) for name in ("count", "heads", "kv_heads", "size", "capacity", "batch")],
        *[(name, ctypes.c_float) for name in ("epsilon", "scaling")],
    ]


class Structures:
    """The structures of a model, and the tensors that they point to."""

    def __init__(self, model: Any, blocks: Sequence[nn.Module], cache: Tensor, cosines: Tensor, sines: Tensor) -> None:
        """`blocks`: those of the model that are computed; cache: float32 [blocks, 2, batch, kv_heads,
        capacity, size]; cosines, sines: float [capacity, size], of each position.
        """
        self._kept: list[Tensor] = [cache]
        base, config = model.model, model.config
        _, _, batch, kv_heads, capacity, size = cache.shape
        layers = [self._layer(block, each) for block, each in zip(blocks, cache, strict=True)]
        self._model = _Model(
            layers=(_Layer * len(layers))(*layers),
            embedding=self._matrix(base.embed_tokens),
            head=self._matrix(model.lm_head),
            norm=self._floats(base.norm.weight),
            cosines=self._floats(cosines[:, : size // 2]),
            sines=self._floats(sines[:, : size // 2]),
            count=len(layers),
            heads=int(config.num_attention_heads),
            kv_heads=kv_heads,
            size=size,
            capacity=capacity,
            batch=batch,
            epsilon=float(base.norm.variance_epsilon),
            scaling=float(base.layers[0].self_attn.scaling),
        )
        self.model = ctypes.byref(self._model)

    def _layer(self, block: Any, cache: Tensor) -> _Layer:
        attention, mlp = block.self_attn, block.mlp
        query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        return _Layer(
            *[
                self._matrix(layer)
                for layer in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
            ],
            *[self._matrix(layer) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)],
            self._floats(block.input_layernorm.weight),
            self._floats(block.post_attention_layernorm.weight),
            None if query_norm is None else self._floats(query_norm.weight),
            None if key_norm is None else self._floats(key_norm.weight),
            cache[0].data_ptr(),
            cache[1].data_ptr(),
        )

    def _matrix(self, layer: nn.Module) -> _Matrix:
        if isinstance(layer, CodedLinear):
            shifts = None if layer.shifts is None else layer.shifts.data_ptr()
            codes = (layer.codes.data_ptr(), layer.scales.data_ptr(), shifts)
            return _Matrix(
                *codes, self._bias(layer.bias), layer.bits, layer.out_features, layer.in_features, layer.scales.shape[1]
            )
        weight = layer.weight
        assert isinstance(weight, Tensor)
        outputs, inputs = weight.shape
        bias = self._bias(getattr(layer, "bias", None))
        return _Matrix(weight.data_ptr(), None, None, bias, weight.element_size() * 8, outputs, inputs, 0)

    def _bias(self, bias: Tensor | None) -> int | None:
        return None if bias is None else self._floats(bias)

    def _floats(self, values: Tensor) -> int:
        """Return the address of the values in float32, which are kept as long as this."""
        self._kept.append(values.detach().float().contiguous())
        return self._kept[-1].data_ptr()
