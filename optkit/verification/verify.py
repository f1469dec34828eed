"""Verify an artifact: its files, then each engine that is asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import computed_field

from optkit.artifact import Artifact
from optkit.common.frozen import Frozen
from optkit.errors import SourceError
from optkit.model.task import ENCODER_DECODERS, Task
from optkit.progress import Progress
from optkit.scorecard import Loading
from optkit.verification import agreement
from optkit.verification.agreement import Agreement, Reference
from optkit.verification.artifact_checks import check_artifact, format_of
from optkit.verification.encoders import EncoderReference, measure_encoder, measure_encoder_decoder
from optkit.verification.engine_comparison import NEW_TOKENS, judged, request_to, why_not_asked
from optkit.verification.engines import ask, interpreter
from optkit.verification.model_files import Check, Weights, check_of, model_files
from optkit.verification.registry import engine_of


class Verified(Frozen):
    """What `optkit verify` found."""

    artifact: Path
    artifact_key: str
    checks: tuple[Check, ...]
    loading: tuple[Loading, ...] = ()
    """Of the engines asked for now."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exit_status(self) -> int:
        """0: every check holds and every engine that could be asked agrees; 3: not so."""
        return 3 if not self.whole or any(each.failed for each in self.loading) else 0

    @property
    def whole(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)


def verify_artifact(
    artifact: Artifact,
    *,
    engines: Sequence[str],
    pythons: Mapping[str, str],
    device: str,
    tokens: int,
    timeout_s: float,
    trust_remote_code: bool = False,
    progress: Progress,
) -> Verified:
    """Check the files; if they are whole, open the artifact in each engine and compare.

    optkit opens it without its settings: other programs know nothing of them, and a quantized KV
    cache changes the logits. `pythons`: engine -> interpreter. Raises UsageError for an interpreter
    that is not there, MissingPackageError if optkit itself cannot open the artifact for want of
    a package, ResourceError without memory.
    """
    interpreters = {engine: interpreter(engine, pythons) for engine in engines}
    checks = check_artifact(artifact)
    found = Verified(artifact=artifact.directory, artifact_key=artifact.record.key, checks=checks)
    if not found.whole:
        return found
    weights = model_files(format_of(artifact), artifact.directory).weights()
    with (
        progress.task("verify", 1 + len(engines), "steps") as task,
        tempfile.TemporaryDirectory(prefix="optkit-verify-") as folder,
    ):
        task.advance(0, note="optkit")
        try:
            reference, tokenizer, notes = _reference(artifact, weights, device, tokens, trust_remote_code)
        except SourceError as error:
            return found.model_copy(update={"checks": (*checks, Check(name="opens", ok=False, detail=str(error)))})
        said = f"optkit opens it on {reference.device}, in {reference.dtype}, without its settings"
        checks = (*checks, Check(name="opens", ok=True, detail=f"{said} ({'; '.join(notes)})" if notes else said))
        if isinstance(reference, Reference) and reference.stepped:
            checks = (*checks, _check_steps(reference, reference.stepped, weights.activation_bits))
        task.advance()
        loading = []
        for name, engine in ((name, engine_of(name)) for name in engines):
            task.advance(0, note=name)
            if reason := why_not_asked(engine, artifact, weights):
                loading.append(Loading(engine=name, verdict="skipped", reason=reason))
            else:
                request = request_to(engine, artifact.directory, reference, weights, trust_remote_code, Path(folder))
                answer = ask(engine, interpreters[name], request, Path(folder), timeout_s)
                loading.append(judged(engine, weights, answer, reference, tokenizer, Path(request["logits"])))
            task.advance()
    return found.model_copy(update={"checks": checks, "loading": tuple(loading)})


def _check_steps(reference: Reference, stepped: Agreement, bits: int) -> Check:
    """Return whether decode steps, each with the state before it, compute what the whole text does."""
    limit = agreement.tolerance(reference.dtype, activation_bits=bits)
    fed = f"the last {len(reference.tokens) - reference.prompt} of {len(reference.tokens)} tokens, fed one at a time"
    near = f"{fed}, are at a mean KL of {stepped.mean_kl:.2g} from the same tokens at once"
    far = f"{near}, and rounding explains {limit:g}: generation forgets what it read"
    return check_of("decodes", [] if stepped.mean_kl < limit else [far], near)


def _reference(
    artifact: Artifact, weights: Weights, device: str, tokens: int, trusted: bool
) -> tuple[Reference | EncoderReference, Any, tuple[str, ...]]:
    from optkit.kernels.cpu.native import exact_products
    from optkit.session import open_session

    with (
        exact_products(),
        closing(open_session(artifact.directory, device=device, trust_remote_code=trusted)) as opened,
    ):
        session: Any = opened
        if weights.task is Task.GENERATION:
            found: Any = agreement.measure_reference(
                session, session.dtype, tokens, NEW_TOKENS, weights.activation_bits
            )
        elif weights.task in ENCODER_DECODERS:
            found = measure_encoder_decoder(session, session.dtype, weights.task)
        else:
            found = measure_encoder(session, session.dtype, weights.task)
        return found, session.tokenizer, session.notes
