"""A student that learns beside its weights, and what is known of its adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peft import LoraConfig

from optkit.errors import StageError
from optkit.training.adapters import NAME, AdapterForm, Origin, adapted, inject_, keep_zeros_, start_from_errors_
from optkit.training.student import Student


@dataclass(frozen=True)
class AdaptedStudent(Student):
    """A student whose adapters alone want a gradient."""

    config: LoraConfig
    """peft's configuration of them."""
    sparse: Sequence[str] = ()
    """The layers whose zeros stay zeros."""
    taken: Mapping[str, float] = field(default_factory=dict)
    """Layer -> share of the square of what the base lost that the adapter makes up for before the
    first step.
    """

    skipped: Mapping[str, str] = field(default_factory=dict)
    """Layers without an adapter, and why."""

    def details(self) -> dict[str, Any]:
        """Return what a report says of them before the training."""
        layers = dict(adapted(self.model))
        numbers = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        ranks = Counter(str(module.r[NAME]) for module in layers.values())
        known: dict[str, Any] = {"adapters": len(layers), "ranks": dict(ranks), "adapter_numbers": numbers}
        known |= {"layers_that_keep_zeros": len(self.sparse), "skipped": dict(self.skipped)}
        if self.taken:
            known["initial_share_of_error"] = dict(self.taken)
        return known


def adapt(
    student: Student, form: AdapterForm, zeros: float | None, origin: Origin | None, skipped: Mapping[str, str]
) -> AdaptedStudent:
    """Put adapters beside the layers of a student.

    zeros: share of zeros from which a layer keeps them, None if none does; origin: the model
    whose lost weights they begin with.
    Raises StageError if that one has other layers, and for both at once.
    """
    config = inject_(student.model, form)
    sparse = [] if zeros is None else keep_zeros_(student.model, zeros)
    if sparse and origin:
        raise StageError(
            f"what {len(sparse)} layers lost are weights that are to stay 0",
            where=f"lora_recover.initialization: {sparse[0]}",
            why="The adapters that loftq begins with would fill them; held back from that, they "
            "begin worse than without effect",
            remedy="Set initialization: zero, or keep_zeros: false",
        )
    taken = start_from_errors_(student.model, origin) if origin else {}
    return AdaptedStudent(student.model, student.checkpoint, student.tensor_names, config, sparse, taken, skipped)
