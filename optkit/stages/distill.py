"""Stage `distill`: a smaller model learns to say what its teacher says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from optkit.stages.teaching.stage import TrainingStage

if TYPE_CHECKING:
    from optkit.training.student import Student


class Distill(TrainingStage):
    """Train a pruned or smaller model to predict what a teacher predicts.
    The teacher is by default the model that the recipe starts from.

    Hinton et al. 2015, https://arxiv.org/abs/1503.02531; for pruned language models Muralidharan et
    al. 2024 (Minitron), https://arxiv.org/abs/2407.14679.
    """

    kind: ClassVar[str] = "distill"
    example: ClassVar[str] = (
        "- prune_structured: {remove_layers: 0.2}\n- distill: {texts: [{dataset: c4}], tokens: 1_000_000}"
    )

    keep_zeros: bool | None = None
    """Let pruned weights stay zeros; left out, in the matrices of which at least a quarter is zero."""

    def _details(self, student: Student) -> dict[str, Any]:
        from optkit.training.student import SPARSE, keep_zeros_

        if self.keep_zeros is False:
            return {}
        kept = keep_zeros_(student.model, 0.0 if self.keep_zeros else SPARSE)
        return {"matrices_that_keep_zeros": len(kept)}
