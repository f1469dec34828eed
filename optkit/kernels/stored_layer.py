"""A quantized layer as it lies in a checkpoint, before a module is built from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from optkit.errors import SourceError
from optkit.kernels.packed_linear import PackedWeight
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import TensorInfo


@dataclass(frozen=True)
class QuantizedLayer:
    """The tensors of one layer; each format is a class of its own."""

    checkpoint: Checkpoint
    name: str
    """In the checkpoint, e.g. `model.layers.0.mlp.up_proj`."""
    scheme: Mapping[str, Any]
    """What the `quantization_config` says about it."""
    leaves: ClassVar[tuple[str, ...]]
    """Last names of the tensors that a weight may be made of, the weight's own first."""
    dtypes: ClassVar[frozenset[str]] = frozenset()
    """What tells the weight itself from floats of its name: how it may be stored."""

    @classmethod
    def all_of(cls, checkpoint: Checkpoint, scheme: Mapping[str, Any]) -> list[Self]:
        """Return the layers of a checkpoint that has no other quantized ones."""
        names = (name.rpartition(f".{cls.leaves[0]}") for name in checkpoint.tensors)
        return [cls(checkpoint, layer, scheme) for layer, weight, rest in names if weight and not rest]

    @classmethod
    def is_weight(cls, leaf: str, info: TensorInfo) -> bool:
        return leaf == cls.leaves[0] and info.dtype in cls.dtypes

    @classmethod
    def reads(cls, scheme: Mapping[str, Any]) -> bool:
        """Whether this class knows everything that a group of `config_groups` says."""
        return cls.reads_weights(scheme) and not scheme.get("input_activations")

    @classmethod
    def reads_weights(cls, scheme: Mapping[str, Any]) -> bool:
        """Whether this class knows what a group of `config_groups` says of weights."""
        return True

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that its weight is made of."""
        return self.present(self.leaves)

    @property
    def where(self) -> str:
        """Directory and layer, for errors."""
        return f"{self.checkpoint.directory}: {self.name}"

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        raise NotImplementedError

    def build(self, bias: Tensor | None, dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
        """Return the module on the device, and what computes in it, e.g. `int4: {layers} use ...`, with
        `{layers}` to be filled with a count. Raises SourceError if its tensors do not fit each other.
        """
        raise NotImplementedError

    def dequantize(self, dtype: torch.dtype, device: str) -> Tensor:
        """Return its weights, float [out, in]: computed in float32 and rounded once.
        Raises SourceError if its tensors do not fit each other.
        """
        raise NotImplementedError

    def integers(self, device: str) -> PackedWeight | None:
        """Return its codes, scales and zero points on the device.
        None for a format without integer codes in groups of inputs. Raises SourceError as `dequantize`.
        """
        return None

    def info(self, leaf: str) -> TensorInfo | None:
        """Return dtype and shape of one of its tensors, None if it has none of that name."""
        return self.checkpoint.tensors.get(f"{self.name}.{leaf}")

    def present(self, leaves: Iterable[str]) -> tuple[str, ...]:
        """Return the full names of those of the given tensors that it has."""
        return tuple(f"{self.name}.{leaf}" for leaf in leaves if self.info(leaf))

    def read(self, leaves: Iterable[str], device: str, required: Iterable[str] = ()) -> dict[str, Tensor]:
        """Return those of the given tensors that it has, on the device. Raises SourceError if
        one of the `required` is missing.
        """
        parts = {name[len(self.name) + 1 :]: self.checkpoint.read(name).to(device) for name in self.present(leaves)}
        if missing := [leaf for leaf in required if leaf not in parts]:
            raise SourceError(f"there is no {', '.join(missing)}", where=self.where)
        return parts


def plain_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a layer of float weights [out, in]."""
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias.to(weight.dtype))
    return linear
