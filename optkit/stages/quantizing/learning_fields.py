"""The fields of stages whose blocks can learn (`gptq`, `mx`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from optkit.common.field_types import Amount
from optkit.common.frozen import Frozen
from optkit.source.calibration import Calibration


class LearningFields(Frozen):
    """How blocks learn to return what those of the unmodified model return."""

    efforts: ClassVar[Mapping[str, Mapping[str, Any]]]
    """What each `effort` picks."""

    effort: Literal["fast", "balanced", "best"] = Field(default="fast", exclude=True)
    """Picks fields that are not written. `fast`: none. `balanced`: `earlier_errors: 0.5` in gptq, `rounding: gptq` in
    mx. `best`: `learn: blocks`, in mx with `rounding: gptq`."""
    learn: Literal["blocks"] | None = Field(default=None, exclude_if=lambda value: value is None)
    """`blocks`: train the codes and scales of each block, so that it returns what the unmodified model has there.
    It takes several times as long."""
    learning_steps: Amount | None = Field(default=None, exclude_if=lambda value: value is None)
    """Steps for each block, each on `batch_size` sequences; 120 if blocks learn and nothing is said."""
    scale_steps: Amount | None = Field(default=None, exclude_if=lambda value: value is None)
    """Steps behind the last block, in which the scales alone learn from the unmodified model's
    probabilities; 64 if blocks learn and nothing is said.
    """
    copies: Amount | None = Field(default=None, exclude_if=lambda value: value is None)
    """How many copies of the text blocks learn from beside it; 3 if blocks learn and nothing is said. In each half
    of the tokens are drawn anew, from what the unmodified model expects there. Prompts with images have none.
    """

    @model_validator(mode="after")
    def _picked(self) -> Self:
        # what is picked stands in the fields, and so in the key: the word itself is not kept
        picked = {name: each for name, each in self.efforts[self.effort].items() if name not in self.model_fields_set}
        self.__dict__.update(picked, effort="fast")
        for name, usual in self._usual_steps.items():
            if self.learn and getattr(self, name) is None:
                self.__dict__[name] = usual
            if getattr(self, name) is not None and not self.learn:
                raise ValueError(f"{name} would not be read: take it out, or set learn: blocks")
        if self.learn and not (self.learning_steps or self.scale_steps):
            raise ValueError("learning_steps and scale_steps are 0: nothing would learn. Raise one, or leave out learn")
        if (field := self.beside_unmodified) and getattr(self, "devices", 1) > 1:
            what = f"{field}, which effort: {'best' if self.learn else 'balanced'} picks, has the unmodified model"
            raise ValueError(f"{what} beside it, on one device. Leave out devices, or {field} and effort")
        return self

    @property
    def beside_unmodified(self) -> str:
        """The field that holds blocks to those of the unmodified model; "" if none does."""
        return "learn" if self.learn else ""

    @property
    def _usual_steps(self) -> Mapping[str, int]:
        """Of fields that nothing is said of."""
        return {"learning_steps": 120, "scale_steps": 64, "copies": 3}

    def with_copies(self, text: Calibration) -> Calibration:
        """Return a text as large as what blocks learn from."""
        copies = 0 if text.images else self.copies or 0
        return text.model_copy(update={"samples": text.samples * (1 + copies)})
