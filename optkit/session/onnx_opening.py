"""Open an ONNX directory with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from optkit.model.pooling import pooling_for
from optkit.model.task import Task, task_of
from optkit.onnx.directory import OnnxDirectory
from optkit.progress import Progress
from optkit.session.onnx_encoder import OnnxEncoder
from optkit.session.onnx_session import OnnxSession
from optkit.stage import Setting


def open_onnx(
    directory: Path,
    settings: Sequence[Setting],
    device: str,
    dtype: str | None,
    progress: Progress | None,
    trust_remote_code: bool,
) -> OnnxSession | OnnxEncoder:
    """Open an ONNX directory; see `optkit.session.open_session`."""
    options = {name: value for setting in settings for name, value in setting.load_kwargs(device).items()}
    task = task_of(OnnxDirectory(directory).config) or Task.GENERATION
    if task is Task.GENERATION:
        return OnnxSession(directory, device, trust_remote_code, **options)
    return OnnxEncoder(directory, device, trust_remote_code, pooling_for(directory, task), **options)
