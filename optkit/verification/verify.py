"""Verify an artifact: its files, then what each installed engine makes of them beside optkit."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import computed_field

from optkit.artifact import Artifact
from optkit.common.frozen import Frozen
from optkit.errors import SourceError
from optkit.model.adapter import ADAPTER
from optkit.model.attention_choice import attention_options
from optkit.model.task import PHRASES, Task
from optkit.onnx.directory import GENAI_CONFIG
from optkit.progress import Progress
from optkit.scorecard import Loading
from optkit.scorecard.loading import EngineName
from optkit.verification import agreement
from optkit.verification.agreement import Agreement, Reference, verdict_of
from optkit.verification.artifact_checks import check_artifact, format_of
from optkit.verification.check_result import Check
from optkit.verification.encoders import EncoderReference, asked_of, because, compare_encoded, measure_encoder
from optkit.verification.engines import ENGINES, ONNXRUNTIME_GENAI, TRANSFORMERS, VLLM, Answer, Engine, ask, interpreter
from optkit.verification.model_files import Weights, model_files

NEW_TOKENS = 16
LIKELIEST = 64
"""Tokens whose log-probabilities vLLM is asked for at each position."""
STEPS = ".steps"
"""What the name of the file with logits of decode steps ends in."""
OPENED_EAGER = "opened with attn_implementation='eager', because its own choice leaves out the soft cap of the scores"


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
    engines: Sequence[EngineName],
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
            checks = (*checks, _check_steps(reference, reference.stepped, weights.rounds_activations))
        task.advance()
        loading = []
        for name in engines:
            task.advance(0, note=name)
            if reason := _unasked(ENGINES[name], artifact, weights):
                loading.append(Loading(engine=name, verdict="skipped", reason=reason))
            else:
                request = _request(
                    ENGINES[name], artifact.directory, reference, weights, trust_remote_code, Path(folder)
                )
                answer = ask(ENGINES[name], interpreters[name], request, Path(folder), timeout_s)
                loading.append(_judge(ENGINES[name], weights, answer, reference, tokenizer, Path(request["logits"])))
            task.advance()
    return found.model_copy(update={"checks": checks, "loading": tuple(loading)})


def _check_steps(reference: Reference, stepped: Agreement, rounded: bool) -> Check:
    """Return whether decode steps, each with the state before it, compute what the whole text does."""
    limit = agreement.tolerance(reference.dtype, rounded_activations=rounded)
    said = (
        f"the last {len(reference.tokens) - reference.prompt} of {len(reference.tokens)} tokens, fed "
        "one at a time, are at a mean KL of"
    )
    near = f"{said} {max(stepped.mean_kl, 0):.2g} from the same tokens at once"
    ok = stepped.mean_kl < limit
    return Check(
        name="decodes",
        ok=ok,
        detail=near if ok else f"{near}, and rounding explains {limit:g}: generation forgets what it read",
    )


def _reference(
    artifact: Artifact, weights: Weights, device: str, tokens: int, trusted: bool
) -> tuple[Reference | EncoderReference, Any, tuple[str, ...]]:
    from optkit.session import open_session

    session: Any = open_session(artifact.directory, device=device, trust_remote_code=trusted)
    try:
        if weights.task is Task.GENERATION:
            return (
                agreement.measure_reference(session, session.dtype, tokens, NEW_TOKENS),
                session.tokenizer,
                session.notes,
            )
        return measure_encoder(session, session.dtype, weights.task), session.tokenizer, session.notes
    finally:
        session.close()


def _unasked(engine: Engine, artifact: Artifact, weights: Weights) -> str:
    """Return why an engine need not be asked; empty if it is."""
    if reason := engine.cannot_open(weights.format):
        return reason
    if weights.task is not Task.GENERATION and engine is ONNXRUNTIME_GENAI:
        return f"it generates text, and this artifact is {PHRASES[weights.task]}"
    if weights.task is not Task.GENERATION and engine is VLLM:
        return f"optkit asks it for the log-probabilities of tokens alone, and this artifact is {PHRASES[weights.task]}"
    if engine is ONNXRUNTIME_GENAI and not (artifact.directory / GENAI_CONFIG).is_file():
        return f"there is no {GENAI_CONFIG}, without which it opens nothing"
    return ""


def _request(
    engine: Engine,
    directory: Path,
    reference: Reference | EncoderReference,
    weights: Weights,
    trusted: bool,
    folder: Path,
) -> dict[str, Any]:
    if isinstance(reference, EncoderReference):
        asked = asked_of(reference, weights.config)
    else:
        asked = {"tokens": list(reference.tokens), "prompt": reference.prompt}
    return {
        "directory": str(directory.resolve()),
        **asked,
        "new_tokens": NEW_TOKENS,
        "device": reference.device,
        "quantized": bool(weights.method),
        "trust_remote_code": trusted,
        "options": _options(engine, weights.config),
        "adapter": str((directory / ADAPTER).resolve()) if weights.adapter else "",
        "adapter_rank": weights.adapter.ranks[-1] if weights.adapter else 0,
        "dequantize": weights.adapter is not None and weights.method == "compressed-tensors",
        "helpers": list(engine.needed_for(weights.method, weights.adapter is not None)),
        "likeliest": LIKELIEST,
        "logits": str(folder / f"{engine.name}.logits.f32"),
        "stepped_logits": str(folder / f"{engine.name}.logits.f32{STEPS}"),
    }


def _judge(
    engine: Engine,
    weights: Weights,
    answer: Answer,
    reference: Reference | EncoderReference,
    tokenizer: Any,
    logits: Path,
) -> Loading:
    """Return the loading line of an engine."""
    every = {name for helpers in (*engine.helpers.values(), engine.adapter_helpers) for name in helpers}
    others = every - set(engine.needed_for(weights.method, weights.adapter is not None))
    packages = {name: version for name, version in answer.said.get("versions", {}).items() if name not in others}
    version = next((packages[name] for name in engine.distributions if name in packages), "")
    facts = {"engine": engine.name, "version": version, "packages": packages, "seconds": round(answer.seconds, 2)}
    if answer.not_applicable:
        return Loading.model_validate(
            {**facts, "verdict": "skipped", "reason": f"not applicable: {answer.not_applicable}"}
        )
    if answer.missing:
        return Loading.model_validate({**facts, "verdict": "skipped", "reason": answer.problem})
    if answer.problem:
        return Loading.model_validate({**facts, "verdict": "refused", "reason": answer.problem})
    said, count, rounded = answer.said, len(reference.tokens), weights.rounds_activations
    facts |= {"device": said["device"], "dtype": said["dtype"]}
    if isinstance(reference, EncoderReference):
        return Loading.model_validate({**facts, **compare_encoded(reference, said, logits, rounded)})
    facts |= {
        "same_tokens": agreement.common_prefix(reference.generated, said["generated"]),
        "text": tokenizer.decode(said["generated"]),
    }
    limit = agreement.tolerance(reference.dtype, said["dtype"], rounded_activations=rounded)
    if "likeliest" in said:
        what = f"log-probabilities of the {LIKELIEST} likeliest tokens"
        near = agreement.compare_likeliest(reference.logits, said["likeliest"])
    elif tuple(said["logits_shape"]) == tuple(reference.logits.shape):
        what = "logits"
        near = agreement.compare_logits(reference.logits, agreement.read_logits(logits, said["logits_shape"]))
    else:
        reason = f"its logits are {said['logits_shape']}, and optkit's are {list(reference.logits.shape)}"
        return Loading.model_validate({**facts, "verdict": "disagrees", "reason": reason})
    stepped = None
    if "stepped_shape" in said:
        what = f"{what} after each of {count} tokens, and of the last {count - reference.prompt} fed one at a time"
        steps = agreement.read_logits(Path(f"{logits}{STEPS}"), said["stepped_shape"])
        stepped = agreement.compare_logits(reference.logits[reference.prompt :], steps)
    else:
        what = f"{what} after each of {count} tokens"
    why = because((reference.dtype, said["dtype"]), rounded)
    opened = f"; {OPENED_EAGER}" if _options(engine, weights.config) else ""
    facts["compared"] = f"{what}; agrees below a mean KL of {limit:g} ({why}){opened}"
    return Loading.model_validate({**facts, **verdict_of(near, limit, stepped)})


def _options(engine: Engine, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an engine is told beside config.json.
    That is how to attend, if its own choice would leave something out unsaid.
    """
    return attention_options(config, {}) if engine is TRANSFORMERS and "attn_implementation" not in config else {}
