"""The bill of materials of an artifact: a CycloneDX 1.7 ML-BOM (https://cyclonedx.org/docs/1.7/json/).

It is a document of its schema, and not of classes: cyclonedx-python-lib 11.12 has none for model cards
and formulations. Its validator proves the whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from uuid import UUID

from optkit.artifact import Artifact, recorded_recipe
from optkit.common.files import reading
from optkit.common.frozen import canonical_json
from optkit.common.grouping import by_key
from optkit.common.own_files import RECORD, is_own
from optkit.environment import PACKAGES
from optkit.errors import ArtifactError, needing
from optkit.publishing.card import config_of, licences_of
from optkit.recipe.recipe import Recipe
from optkit.scorecard import Scorecard
from optkit.source.digests import PREFIX
from optkit.source.lineage import texts_in
from optkit.source.models import BUILT_IN, ModelSource

SPECIFICATION = "1.7"
UNMODIFIED = "unmodified model"
CALIBRATION, EVALUATION = "calibration", "evaluation"
MODEL, BASE, WORKFLOW = "model", "base-model", "recipe"
"""What components are referred to by."""


def bill_of_materials(artifact: Artifact, scorecard: Scorecard) -> str:
    """Return the ML-BOM of an artifact as JSON.
    The same artifact and scorecard give the same bytes.

    Raises MissingPackageError without the extra `bom`, ArtifactError for a record of which none can be made.
    """
    with needing("cyclonedx-python-lib", "bom", "optkit[bom]"):
        import cyclonedx  # noqa: F401
    record, recipe = artifact.record, recorded_recipe(artifact)
    base = _base_model(recipe.model)
    with reading(artifact.directory / RECORD, "its key is no digest", "Run its recipe again", ArtifactError):
        identifier = UUID(record.key[:32], version=4)
    texts, packages = list(_texts(artifact, recipe)), list(_packages(artifact))
    used = [base["bom-ref"], *(each["bom-ref"] for each in texts)]
    said = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPECIFICATION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "serialNumber": f"urn:uuid:{identifier}",
        "version": 1,
        "metadata": {
            "timestamp": scorecard.created,
            "lifecycles": [{"phase": "build"}],
            "tools": {"components": [_package("optkit", record.optkit)]},
            "component": _model(artifact, scorecard, base, [each["bom-ref"] for each in texts]),
        },
        "components": [base, *texts, *packages],
        "dependencies": [{"ref": MODEL, "dependsOn": used}],
        "formulation": [_formulation(recipe.resolved(), record.steps, [each["bom-ref"] for each in packages])],
    }
    text = json.dumps(said, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    _check(text, artifact)
    return text


def _model(artifact: Artifact, scorecard: Scorecard, base: Mapping[str, Any], texts: list[str]) -> dict[str, Any]:
    config = config_of(artifact)
    record = artifact.record
    said = {
        "optkit:artifact_key": record.key,
        "optkit:weights_key": record.weights_key,
        "optkit:seed": record.recipe.get("seed", 0),
    }
    settings = [("optkit:setting", canonical_json(each)) for each in record.settings]
    parameters = {
        "architectureFamily": config.get("model_type"),
        "modelArchitecture": next(iter(config.get("architectures") or []), None),
        "datasets": [{"ref": ref} for ref in texts],
    }
    return {
        "type": "machine-learning-model",
        "bom-ref": MODEL,
        "name": record.name,
        "version": record.key[:12],
        "description": str(record.recipe.get("description") or f"{base['name']}, optimized"),
        "components": [
            {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": _sha256(str(facts["sha256"]))}
            for name, facts in sorted(record.files.items())
            if not is_own(name)
        ],
        **_licences(licences_of(artifact)),
        "pedigree": {"ancestors": [{name: base[name] for name in base if name != "bom-ref"}]},
        "modelCard": {
            "modelParameters": {name: value for name, value in parameters.items() if value},
            "quantitativeAnalysis": {"performanceMetrics": list(_metrics(scorecard))},
        },
        "properties": _properties([*said.items(), *settings]),
    }


def _licences(names: list[str]) -> dict[str, Any]:
    """Return the licences, by their SPDX identifiers if they have one."""
    from cyclonedx.spdx import fixup_id

    named = [(fixup_id(name), name) for name in names]
    return (
        {"licenses": [{"license": {"id": known} if known else {"name": name}} for known, name in named]}
        if named
        else {}
    )


def _metrics(scorecard: Scorecard) -> Iterator[dict[str, Any]]:
    for row in scorecard.rows:
        for metric, whose in ((row.metric, ""), (row.baseline, UNMODIFIED)):
            if metric is None or metric.failure:
                continue
            low, high = metric.interval or (None, None)
            yield {
                "type": f"{metric.name} [{metric.unit}]" if metric.unit else metric.name,
                "value": repr(metric.value),
                "slice": "; ".join(filter(None, (whose, metric.protocol))),
                **(
                    {"confidenceInterval": {"lowerBound": repr(low), "upperBound": repr(high)}}
                    if low is not None
                    else {}
                ),
            }


def _base_model(model: ModelSource) -> dict[str, Any]:
    said = {"type": "machine-learning-model", "bom-ref": BASE, "name": model.name}
    place = BUILT_IN[model.name].place if model.name in BUILT_IN else model.name
    found = _pinned(str(model.revision), "" if place.endswith(".gguf") else "the names and the SHA-256 of its files")
    return {
        **said,
        **found,
        **({} if "hashes" in found else {"purl": f"pkg:huggingface/{model.name}@{model.revision}"}),
    }


def _pinned(revision: str, digest_of: str) -> dict[str, Any]:
    """Return a revision, and its digest if it is one. `digest_of` says of what, if not of the file."""
    if not revision.startswith(PREFIX):
        return {"version": revision}
    said = _properties([("optkit:digest_of", digest_of)] if digest_of else [])
    return {
        "version": revision,
        "hashes": _sha256(revision.removeprefix(PREFIX)),
        **({"properties": said} if said else {}),
    }


def _texts(artifact: Artifact, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield the data sets that shaped the weights, then those that they were measured on."""
    measured = (text.identity() for entry in recipe.evals for text in texts_in(entry.value))
    seen = set()
    for use, texts in ((CALIBRATION, artifact.record.calibrated_on), (EVALUATION, measured)):
        for text in texts:
            ref = f"data:{text['dataset']}:{text['split']}:{text['revision'][-12:]}:{use}"
            if ref not in seen:
                seen.add(ref)
                yield _text(text, ref, use)


def _text(text: Mapping[str, str], ref: str, use: str) -> dict[str, Any]:
    said = _pinned(text["revision"], "its documents, joined by an empty line")
    return {
        "type": "data",
        "bom-ref": ref,
        "name": text["dataset"],
        **said,
        "data": [{"type": "dataset", "name": f"{text['dataset']} ({text['split']})", "description": use}],
    }


def _packages(artifact: Artifact) -> Iterator[dict[str, Any]]:
    """Yield the packages that made the weights: of each the versions of all steps."""
    seen = set()
    for step in (artifact.record.imported or {}, *artifact.record.steps):
        environment = step.get("environment") or {}
        listed = (name.partition("==") for name in environment.get("packages", ()))
        own = ((name, "==", str(environment[name])) for name in ("optkit", *PACKAGES) if name in environment)
        for name, _, version in (*own, *listed):
            if (name, version) not in seen:
                seen.add((name, version))
                yield _package(name, version)


def _package(name: str, version: str) -> dict[str, Any]:
    purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{version.replace('+', '%2B')}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _formulation(recipe: Mapping[str, Any], steps: Iterable[Mapping[str, Any]], packages: list[str]) -> dict[str, Any]:
    """Return how the weights were made: a task for each step, which stands on the one before it."""
    fields = by_key(pair for entry in recipe.get("stages", ()) for pair in entry.items())
    tasks = []
    for index, step in enumerate(steps):
        said = {"optkit:fields": canonical_json(fields[step["kind"]].pop(0)), "optkit:seconds": step["seconds"]}
        digests = {f"optkit:sha256:{name}": value for name, value in (step.get("sha256") or {}).items()}
        tasks.append(
            {
                "bom-ref": f"step:{index}:{step['kind']}",
                "uid": step["key"],
                "name": step["kind"],
                "taskTypes": ["build"],
                "properties": _properties([*said.items(), *digests.items()]),
            }
        )
    order = [
        {"ref": tasks[index]["bom-ref"], "dependsOn": [tasks[index - 1]["bom-ref"]]} for index in range(1, len(tasks))
    ]
    return {
        "workflows": [
            {
                "bom-ref": WORKFLOW,
                "uid": str(recipe.get("name", "")),
                "name": str(recipe.get("name", "")),
                "taskTypes": ["build"],
                "resourceReferences": [{"ref": ref} for ref in packages],
                "tasks": tasks,
                "taskDependencies": order,
            }
        ]
    }


def _properties(pairs: Iterable[tuple[str, Any]]) -> list[dict[str, str]]:
    return [{"name": name, "value": str(value)} for name, value in pairs]


def _sha256(digest: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": digest}]


def _check(text: str, artifact: Artifact) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    if wrong := JsonStrictValidator(SchemaVersion.V1_7).validate_str(text):
        why, remedy = str(wrong).strip().splitlines()[0][:200], "Run its recipe again"
        where = str(artifact.directory / RECORD)
        raise ArtifactError("it makes no valid bill of materials", where=where, why=why, remedy=remedy)
