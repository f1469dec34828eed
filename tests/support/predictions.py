"""What tests of stages share about plans: a stage says beforehand exactly what it leaves."""

from pathlib import Path

from optkit.model.checkpoint import Checkpoint
from optkit.stage import Cost, Transform


def predicted(stage: Transform, source: Path, target: Path) -> Cost:
    """Assert that tensors, config.json and bytes of what a stage left are those that it predicts on
    a CPU; return what that costs.
    """
    cost, shape = stage.predict(Checkpoint(source).shape, "cpu")
    written = Checkpoint(target)
    assert dict(shape.tensors) == written.tensors
    assert dict(shape.config) == written.config
    assert cost.disk_bytes == shape.size_bytes == written.shape.size_bytes
    return cost
