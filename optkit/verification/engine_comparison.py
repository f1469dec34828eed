"""What an engine is asked, and whether its answer is what optkit itself computes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optkit.artifact import Artifact
from optkit.common.grouping import common_prefix
from optkit.model.adapter import ADAPTER
from optkit.model.attention_choice import attention_options
from optkit.model.task import PHRASES, Task, loader_of
from optkit.onnx.directory import GENAI_CONFIG
from optkit.scorecard import Loading
from optkit.verification import agreement
from optkit.verification.agreement import Reference, verdict_of
from optkit.verification.blocks import problem_of
from optkit.verification.encoders import EncoderReference, asked_of, because, compare_encoded
from optkit.verification.engines import ONNXRUNTIME_GENAI, TRANSFORMERS, VLLM, Answer, Engine
from optkit.verification.model_files import Weights

NEW_TOKENS = 16
LIKELIEST = 64
"""Tokens whose log-probabilities vLLM is asked for at each position."""
STEPS = ".steps"
"""What the name of the file with logits of decode steps ends in."""
STATES = "states.f32"
"""The name of the file with optkit's hidden states."""
OPENED_EAGER = "opened with attn_implementation='eager', because its own choice leaves out the soft cap of the scores"


def why_not_asked(engine: Engine, artifact: Artifact, weights: Weights) -> str:
    """Return why an engine need not be asked; empty if it is."""
    if reason := engine.cannot_open(weights.format):
        return reason
    if weights.task is not Task.GENERATION and engine is ONNXRUNTIME_GENAI:
        return f"it runs causal language models, and this artifact is {PHRASES[weights.task]}"
    if weights.task is not Task.GENERATION and engine is VLLM:
        return f"optkit asks it for the log-probabilities of tokens alone, and this artifact is {PHRASES[weights.task]}"
    if engine is ONNXRUNTIME_GENAI and not (artifact.directory / GENAI_CONFIG).is_file():
        return f"there is no {GENAI_CONFIG}, without which it opens nothing"
    return ""


def request_to(
    engine: Engine,
    directory: Path,
    reference: Reference | EncoderReference,
    weights: Weights,
    trusted: bool,
    folder: Path,
) -> dict[str, Any]:
    """Return what an engine is asked, as JSON values; it writes its logits into the folder."""
    if isinstance(reference, EncoderReference):
        asked = asked_of(reference)
    else:
        asked = {"tokens": list(reference.tokens), "prompt": reference.prompt}
        if reference.states is not None and engine is TRANSFORMERS:
            reference.states.numpy().tofile(folder / STATES)
            asked |= {"states": str(folder / STATES), "states_shape": list(reference.states.shape)}
    return {
        "directory": str(directory.resolve()),
        **asked,
        "loader": loader_of(weights.config),
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


def judged(
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
        found: dict[str, Any] = {"verdict": "skipped", "reason": f"not applicable: {answer.not_applicable}"}
    elif answer.problem:
        found = {"verdict": "skipped" if answer.missing else "refused", "reason": answer.problem}
    else:
        facts |= {"device": answer.said["device"], "dtype": answer.said["dtype"]}
        if isinstance(reference, EncoderReference):
            found = compare_encoded(reference, answer.said, logits, weights.activation_bits)
        else:
            generated = answer.said["generated"]
            same = common_prefix(reference.generated, generated)
            facts |= {"same_tokens": same, "text": tokenizer.decode(generated)}
            found = _compared(engine, weights, answer.said, reference, logits)
    return Loading.model_validate({**facts, **found})


def _compared(
    engine: Engine, weights: Weights, said: Mapping[str, Any], reference: Reference, logits: Path
) -> dict[str, Any]:
    """Return the fields of a loading line: what was compared, the numbers and the verdict."""
    count, bits = len(reference.tokens), weights.activation_bits
    limit = agreement.tolerance(reference.dtype, said["dtype"], activation_bits=bits)
    if "likeliest" in said:
        what = f"log-probabilities of the {LIKELIEST} likeliest tokens"
        near = agreement.compare_likeliest(reference.logits, said["likeliest"])
    elif tuple(said["logits_shape"]) == tuple(reference.logits.shape):
        what = "logits"
        near = agreement.compare_logits(reference.logits, agreement.read_logits(logits, said["logits_shape"]))
    else:
        reason = f"its logits are {said['logits_shape']}, and optkit's are {list(reference.logits.shape)}"
        return {"verdict": "disagrees", "reason": reason}
    stepped, what = None, f"{what} after each of {count} tokens"
    if "stepped_shape" in said:
        what += f", and of the last {count - reference.prompt} fed one at a time"
        steps = agreement.read_logits(Path(f"{logits}{STEPS}"), said["stepped_shape"])
        stepped = agreement.compare_logits(reference.logits[reference.prompt :], steps)
    wrong = ""
    if shares := said.get("blocks"):
        what, wrong = f"{what}; what each block makes of optkit's hidden states", problem_of(shares)
    why = because((reference.dtype, said["dtype"]), bits)
    opened = f"; {OPENED_EAGER}" if _options(engine, weights.config) else ""
    compared = f"{what}; agrees below a mean KL of {limit:g} ({why}){opened}"
    verdict = verdict_of(near, limit, stepped)
    if wrong and verdict["verdict"] == "agrees":
        verdict |= {"verdict": "disagrees", "reason": wrong}
    return {"compared": compared, **verdict}


def _options(engine: Engine, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an engine is told beside config.json.
    That is how to attend, if its own choice would leave something out unsaid.
    """
    return attention_options(config, {}) if engine is TRANSFORMERS and "attn_implementation" not in config else {}
