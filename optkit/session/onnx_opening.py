"""Open an ONNX directory with ONNX Runtime."""

from __future__ import annotations

from optkit.model.pooling import pooling_for
from optkit.model.task import Task, task_of
from optkit.onnx.directory import OnnxDirectory
from optkit.session.onnx_encoder import OnnxEncoder
from optkit.session.onnx_session import OnnxSession
from optkit.stage import Opening


def open_onnx(opening: Opening) -> OnnxSession | OnnxEncoder:
    """Open an ONNX directory; see `optkit.session.open_session`."""
    directory, options = opening.directory, opening.load_kwargs
    task = task_of(OnnxDirectory(directory).config) or Task.GENERATION
    if task is Task.GENERATION:
        return OnnxSession(directory, opening.device, opening.trust_remote_code, **options)
    pooling = pooling_for(directory, task)
    return OnnxEncoder(directory, opening.device, opening.trust_remote_code, pooling, **options)
