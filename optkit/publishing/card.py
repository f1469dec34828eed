"""The model card of an artifact: README.md with the hub's metadata.

Metadata: https://huggingface.co/docs/hub/model-cards#model-card-metadata, evaluation results as a
`model-index`. `.eval_results/*.yaml` are for data sets alone that the hub lists as benchmarks:
https://huggingface.co/docs/hub/eval-results.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.artifact import Artifact
from optkit.common.files import read_text, reading
from optkit.common.own_files import SCORECARD_HTML, SOURCE_CARD, marked
from optkit.errors import OptkitError
from optkit.model.config_file import read_config
from optkit.model.formats.base import Format
from optkit.model.onnx_file import graph_names
from optkit.model.task import KNOWN_TASKS, Task, architecture_of, loader_of, task_of
from optkit.recipe.gates import Verdict
from optkit.recipe.registry import eval_class
from optkit.scorecard import Loading, Scorecard
from optkit.scorecard.gate_lines import gate_lines
from optkit.scorecard.markdown import as_page, sections
from optkit.source.digests import PREFIX
from optkit.source.models import BUILT_IN
from optkit.verification.artifact_checks import format_of
from optkit.verification.registry import engine_of

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

HUB = "https://huggingface.co"
SHOWN = ("## Numbers", "## To act on", "## Protocols", "## Loading", "## Settings", "## Files", "## Recipe")
"""Sections of scorecard.md that a card has too."""
FROM_SOURCE = ("license", "license_name", "license_link", "language")
"""Metadata of the source's card that are true of what is made of it."""
WORDS = re.compile(r"(?!javascript:|data:)[\w.+:/#?=&%@~, -]{1,300}", re.ASCII | re.IGNORECASE)
HEADS = {"ForTokenClassification": "token-classification", "ForMaskedLM": "fill-mask"}
"""How an architecture ends -> `pipeline_tag`, if its task alone does not say it."""
LIBRARIES = {"safetensors": "transformers"}
"""Label of a format -> `library_name`, if that is not the label."""
TAGS = {"AutoModelForImageTextToText": "image-text-to-text", "AutoModelForMultimodalLM": "audio-text-to-text"}
"""Class of transformers -> `pipeline_tag` of those that see or hear."""


def card_of(artifact: Artifact, scorecard: Scorecard, place: str = "") -> str:
    """Return the text of README.md. `place` is where programs find the artifact, e.g. `owner/name` of
    the hub; its directory's name without one.
    """
    from huggingface_hub import ModelCard, ModelCardData

    config = config_of(artifact)
    data = ModelCardData(**_metadata(artifact, scorecard, config))
    said = sections(scorecard)
    page = {
        f"# {scorecard.name}": _introduction(artifact, scorecard, data.to_dict()),
        "## How to open it": _usage(artifact, scorecard, config, place),
        **{title: said[title] for title in SHOWN},
        "## Licence": _licence(data.to_dict()),
    }
    return marked(str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{as_page(page)}")))


def config_of(artifact: Artifact) -> dict[str, Any]:
    """Return config.json, or what a format has in its place. Raises SourceError if it is damaged."""
    path = artifact.directory / "config.json"
    return read_config(path) if path.exists() else dict(format_of(artifact).shape(artifact.directory).config)


def origin_of(source: Mapping[str, Any]) -> str:
    """Return what the hub calls the model of a pinned recipe; empty for a directory or a file."""
    if known := BUILT_IN.get(source["name"]):
        return known.origin
    return "" if not source.get("revision") or source["revision"].startswith(PREFIX) else str(source["name"])


def licences_of(artifact: Artifact) -> list[str]:
    """Return the licences of an artifact, as the hub calls them."""
    said = _licence_metadata(artifact)
    given = said.get("license") or []
    return [str(said.get("license_name") or each) for each in (given if isinstance(given, list) else [given])]


def _metadata(artifact: Artifact, scorecard: Scorecard, config: Mapping[str, Any]) -> dict[str, Any]:
    source, format = artifact.record.recipe["model"], format_of(artifact)
    origin = origin_of(source)
    method = str((config.get("quantization_config") or {}).get("quant_method", ""))
    packed = bool(method) or format.label != Format.CHECKPOINT.label
    chats = (artifact.directory / "chat_template.jinja").is_file()
    tags = ["optkit", *(step["kind"] for step in artifact.record.steps), method, "conversational" if chats else ""]
    return {
        **_licence_metadata(artifact),
        "base_model": origin or None,
        "base_model_relation": ("quantized" if packed else "finetune") if origin else None,
        "library_name": LIBRARIES.get(format.label, format.label.lower()),
        "pipeline_tag": _pipeline_tag(config),
        "tags": [tag for tag in tags if tag and tag != "import"],
        "model_name": scorecard.name,
        "eval_results": list(_eval_results(scorecard, task_of(config) or Task.GENERATION)) or None,
    }


def _pipeline_tag(config: Mapping[str, Any]) -> str | None:
    task = task_of(config)
    special = (tag for head, tag in HEADS.items() if architecture_of(config).endswith(head))
    return next(special, TAGS.get(loader_of(config), str(task) if task in KNOWN_TASKS else None))


def _licence_metadata(artifact: Artifact) -> dict[str, Any]:
    """Return licence and language, from the source's card, a file of the artifact, or what is known."""
    found: dict[str, Any] = {}
    model = artifact.record.recipe["model"]["name"]
    with contextlib.suppress(OptkitError):
        known = source_metadata(artifact.directory / SOURCE_CARD)
        found = {name: known[name] for name in FROM_SOURCE if _are_words(known.get(name))}
    if "license" not in found and model in BUILT_IN:
        found["license"] = BUILT_IN[model].licence
    texts = sorted(path.name for path in artifact.directory.glob("LICEN[CS]E*"))
    if "license" not in found and texts:
        found |= {"license": "other", "license_name": "see-the-file", "license_link": texts[0]}
    return found


def _are_words(value: Any) -> bool:
    """Say whether it is a word, or a list of them, that no page of a card takes for more than its text."""
    each = value if isinstance(value, list) else [value]
    return bool(each) and all(isinstance(word, str) and WORDS.fullmatch(word) for word in each)


def source_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of the source's card; nothing if it has none.
    Raises SourceError if it cannot be read.
    """
    from huggingface_hub import ModelCard

    if not path.is_file() or not (text := read_text(path)).startswith("---"):
        return {}
    with reading(path, "the metadata cannot be read"):
        return dict(ModelCard(text, ignore_metadata_errors=True).data.to_dict())


def _eval_results(scorecard: Scorecard, task: Task) -> Iterator[EvalResult]:
    """Yield each number that was measured on a text or a task, as the hub's `model-index` has it."""
    from huggingface_hub import EvalResult

    texts = dict(_texts(scorecard.recipe.get("evals") or ()))
    for row in scorecard.rows:
        metric = row.metric
        text = texts.get(metric.name, {})
        name = next((str(metric.labels[label]) for label in ("task", "text") if label in metric.labels), "")
        if not metric.failure and (dataset := name or text.get("dataset")):
            yield EvalResult(
                task_type=str(task),
                dataset_type=str(dataset),
                dataset_name=str(dataset),
                dataset_split=None if name else text.get("split"),
                metric_type=metric.name,
                metric_name=", ".join([metric.name, *(f"{key} {value}" for key, value in metric.labels.items())]),
                metric_value=metric.value,
            )


def _texts(evals: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name of a metric -> fields of the eval that measured it on one text."""
    for entry in evals:
        for kind, fields in entry.items():
            with contextlib.suppress(OptkitError):  # a plug-in that is not installed here
                yield from ((name, fields) for name in eval_class(kind).metrics if fields.get("dataset"))


def _introduction(artifact: Artifact, scorecard: Scorecard, known: Mapping[str, Any]) -> str:
    record, source = artifact.record, artifact.record.recipe["model"]
    base = known.get("base_model")
    model = f"[{base}]({HUB}/{base})" if base else f"`{source['name']}`"
    kinds = " and ".join(f"`{step['kind']}`" for step in record.steps if step["kind"] != "import")
    revision = f" (revision `{source['revision'][:19]}`)" if source.get("revision") else ""
    made = f"{model}{revision}, {f'changed by {kinds} of' if kinds else 'copied by'} optkit {record.optkit}"
    gates = list(gate_lines(scorecard))
    broken = [
        f"- {each.row} {each.limit}: {each.verdict}, {each.said}"
        for each in gates
        if each.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE)
    ]
    verdict = "No gate of its recipe failed." if gates else "Its recipe has no gates."
    if broken:
        verdict = "\n".join(["Gates that it does not keep:", "", *broken])
    trace = f"Artifact `{record.key[:12]}` of {record.created}. All measurements: {SCORECARD_HTML}."
    return f"{made}.\n\n{verdict}\n\n{trace}"


def _usage(artifact: Artifact, scorecard: Scorecard, config: Mapping[str, Any], place: str) -> str:
    """Return how to open it in each engine that `optkit verify` found to agree."""
    directory = place.rpartition("/")[2] or artifact.directory.resolve().name
    auto = loader_of(config)
    ort = f"ORTModelFor{auto.removeprefix('AutoModel').removeprefix('For') or 'FeatureExtraction'}"
    words = {"place": place or directory, "directory": directory, "auto": auto, "ort": ort}
    words["graph"] = graph_names(artifact.directory)[-1]
    parts = [f"Download it: `hf download {place} --local-dir {directory}`."] if place else []
    agreeing = {each.engine: each for each in scorecard.loading if each.verdict == "agrees"}
    for name, each in agreeing.items():
        usage = _engine_usage(name)
        for word, value in words.items():
            usage = usage.replace(f"{{{word}}}", value)
        parts += [f"### {name}", usage, _proof(each)]
    if format_of(artifact) == Format.ADAPTED:
        parts.append(
            "Its adapter lies in `adapter/`: `peft.PeftModel.from_pretrained(model, "
            f'"{words["place"]}", subfolder="adapter")`. Without it the model is the plain quantized one.'
        )
    if not agreeing:
        parts.append("No program beside optkit was asked to open it; `optkit verify` asks.")
    return "\n\n".join(part for part in parts if part)


def _engine_usage(name: str) -> str:
    try:
        return engine_of(name).usage
    except KeyError:  # a plug-in that is not installed here
        return ""


def _proof(loading: Loading) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in loading.packages.items())
    return f"Checked on {loading.device} in {loading.dtype}, with {packages}: {loading.compared}."


def _licence(known: Mapping[str, Any]) -> str:
    if not known.get("license"):
        return "The files of the unmodified model name no licence: look it up where it comes from."
    linked = f", see [{known['license_link']}]({known['license_link']})" if known.get("license_link") else ""
    return f"That of the unmodified model: {known['license']}{linked}."
