"""Push an artifact: check that it may leave, list what goes where, then upload it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from optkit.artifact import Artifact, read_finished
from optkit.common.files import read_text
from optkit.common.own_files import CARD, OWN_FILES
from optkit.errors import OptkitError, PushError, UnsoundError
from optkit.model.companions import require_inside
from optkit.progress import Progress
from optkit.publishing.card import card_of
from optkit.publishing.targets.base import Shipment, Target, Upload
from optkit.publishing.targets.registry import target_of
from optkit.recipe.gates import Verdict
from optkit.scorecard import Scorecard
from optkit.scorecard.gate_lines import gate_lines
from optkit.verification.artifact_checks import check_artifact
from optkit.verification.result_file import read_scorecard

HIDDEN = "[hidden]"


@dataclass(frozen=True)
class Push:
    """What goes where; nothing has left yet."""

    target: Target
    shipment: Shipment
    files: tuple[Upload, ...]
    warnings: tuple[str, ...]

    def upload(self, progress: Progress) -> dict[str, str]:
        """Upload the files and return what is known of them now, e.g. `url`.
        Raises what `Target.upload` does; no message holds a secret of the target.
        """
        with without_secrets(self.target.secrets()):
            return self.target.upload(self.shipment, self.files, progress)


def prepare_push(directory: Path, address: str, *, allow_failed_gates: bool = False) -> Push:
    """Return what a push of an artifact would do.

    Raises UsageError for an address that names no target, ArtifactError if the directory is no
    finished artifact, UnsoundError if a file was lost or changed, or a gate failed and
    `allow_failed_gates` is false.
    """
    target = target_of(address)
    artifact = read_finished(directory)
    scorecard = read_scorecard(directory)
    wrong = [f"{check.name}: {check.detail}" for check in check_artifact(artifact) if not check.ok]
    if wrong:
        where = str(artifact.directory)
        raise UnsoundError(f"it is not whole: {'; '.join(wrong)}", where=where, remedy="Run its recipe again")
    warnings = _check_gates(scorecard, directory, allow_failed_gates)
    card, stale = _card(artifact, scorecard, target)
    shipment = Shipment(artifact, scorecard, (card, *_files(artifact)))
    return Push(target, shipment, target.uploads(shipment), (*warnings, *stale))


def _check_gates(scorecard: Scorecard, directory: Path, allow_failed: bool) -> tuple[str, ...]:
    """Return what to say of gates that are not kept; raises UnsoundError for a failed one."""
    lines = [line for line in gate_lines(scorecard) if line.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE)]
    said = tuple(f"{line.row} {line.limit} {line.verdict}: {line.said}" for line in lines)
    failed = [text for line, text in zip(lines, said, strict=True) if line.verdict is Verdict.FAIL]
    if failed and not allow_failed:
        raise UnsoundError(
            f"{len(failed)} gates failed: {'; '.join(failed)}" if len(failed) > 1 else f"a gate failed: {failed[0]}",
            where=str(directory),
            remedy="To push it all the same: --allow-failed-gates",
        )
    return said


def _card(artifact: Artifact, scorecard: Scorecard, target: Target) -> tuple[Upload, tuple[str, ...]]:
    """Return the card beside the weights, else the one that `optkit card` would write, and what to
    say of it.
    """
    path = artifact.directory / CARD
    if not path.is_file():
        return Upload.of(CARD, card_of(artifact, scorecard, target.opened_as).encode()), ()
    of_this = artifact.record.key[:12] in read_text(require_inside(artifact.directory, CARD))
    said = f"{path} does not name the artifact {artifact.record.key[:12]}: `optkit card` writes it again"
    return Upload.of(CARD, path), () if of_this else (said,)


def _files(artifact: Artifact) -> tuple[Upload, ...]:
    """Return the model's files, whose digests are proven, and optkit's own that are there."""
    root = artifact.directory
    own = [name for name in sorted(OWN_FILES) if (root / name).is_file()]
    known = {name: facts["sha256"] for name, facts in artifact.record.files.items()}
    names = dict.fromkeys([*known, *own, *artifact.record.attachments])
    return tuple(Upload.of(name, require_inside(root, name), known.get(name, "")) for name in names)


@contextmanager
def without_secrets(secrets: Sequence[str]) -> Iterator[None]:
    """Let no error leave that holds one of the secrets, itself or in what caused it."""
    try:
        yield
    except Exception as error:
        if not any(secret in text for secret in secrets for text in traceback.format_exception(error)):
            raise
        what = error.what if isinstance(error, OptkitError) else f"{type(error).__name__}: {error}"
        parts = [what, *(getattr(error, name, "") for name in ("where", "why", "remedy"))]
        for secret in secrets:
            parts = [part.replace(secret, HIDDEN) for part in parts]
        what, where, why, remedy = parts
        raise PushError(what, where=where, why=why, remedy=remedy) from None
