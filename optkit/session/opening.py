"""Open a model directory.
ONNX models open with ONNX Runtime; checkpoints, packed or not, with torch or transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from optkit.errors import OptkitError, StageError
from optkit.model.task import Task
from optkit.progress import Progress, SilentProgress
from optkit.session.generating import GeneratingSession
from optkit.stage import Format, Opening, Setting, exclusion

if TYPE_CHECKING:
    from optkit.session.onnx_encoder import OnnxEncoder
    from optkit.session.onnx_session import OnnxSession
    from optkit.session.parallel_session import ParallelSession
    from optkit.session.torch_encoder import TorchEncoder
    from optkit.session.torch_encoder_decoder import TorchEncoderDecoder
    from optkit.session.torch_session import TorchSession

AnySession: TypeAlias = (
    "TorchSession | ParallelSession | OnnxSession | TorchEncoder | OnnxEncoder | TorchEncoderDecoder"
)


def open_session(
    directory: Path,
    settings: Sequence[Setting] = (),
    device: str = "cpu",
    dtype: str | None = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> AnySession:
    """Open a model directory with its settings applied; packed weights are used as they are. An
    encoder's session is an `EncoderSession`.

    `dtype` is the torch name of the float dtype to compute in, the checkpoint's own if None.
    Raises SourceError if weights are missing or do not fit the model, MissingPackageError if a
    format or setting needs a package that is not there, StageError for a setting that cannot be
    applied, ResourceError without memory.
    """
    opening = Opening(Path(directory), tuple(settings), device, dtype, trust_remote_code, progress or SilentProgress())
    format = Format.of(opening.directory)
    _refuse_other_formats(opening, format)
    if excluded := exclusion(settings, device):
        raise excluded[1]
    opened = next((found for setting in settings if (found := setting.open(opening)) is not None), None)
    if opened is not None:
        return cast(AnySession, opened)
    session: AnySession = format.open(opening)
    for setting in settings:
        if _is_for(setting, session):
            session = setting.on_open(session)
    return session


def _refuse_other_formats(opening: Opening, format: Format) -> None:
    """Raise StageError for a setting that is for another format.
    Raises OptkitError for a dtype that this one cannot be opened in.
    """
    where = str(opening.directory)
    for setting in opening.settings:
        if not setting.fits(format):
            raise StageError(
                f"{setting.kind} cannot be applied to {format.opened}",
                where=where,
                why=f"It is for {' or '.join(sorted({each.opened for each in setting.accepts}))}",
                remedy="Take it out of the recipe",
            )
    if opening.dtype and format.computes_in:
        raise OptkitError(
            f"{format.phrase} cannot be opened as {opening.dtype}", where=where, why="Its files say what it computes in"
        )


def _is_for(setting: Setting, session: AnySession) -> bool:
    if isinstance(session, GeneratingSession):
        return Task.GENERATION in setting.for_tasks
    return bool(setting.for_tasks - {Task.GENERATION})
