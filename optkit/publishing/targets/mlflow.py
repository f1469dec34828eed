"""`mlflow://`: a run of an experiment of MLflow, and a version of a registered model.

https://mlflow.org/docs/latest/ml/model-registry. MLflow's telemetry is switched off.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from optkit.common.cache import cache_directory
from optkit.common.held_files import held_directory
from optkit.common.yaml_text import yaml_text
from optkit.errors import MissingPackageError, PushError, first_line
from optkit.progress import Progress
from optkit.publishing.targets.base import Shipment, Target, Upload
from optkit.recipe.gates import Verdict
from optkit.scorecard import Scorecard
from optkit.scorecard.gate_lines import gate_lines
from optkit.scorecard.openmetrics import number_lines
from optkit.store.store import explain_os_error

if TYPE_CHECKING:
    from mlflow import MlflowClient

ADDRESS = re.compile(r"([^/@:]+)(?:/([^/@:]+))?")
MODEL = "model"
"""Folder of a run that is the whole artifact; a registered version is that folder."""
ALIASES = {Verdict.PASS: "passed", Verdict.FAIL: "failed", Verdict.INCONCLUSIVE: "inconclusive"}
"""Verdict of the gates -> alias of the newest version that has it."""
LONGEST_PARAMETER, LONGEST_TAG, MOST_PARAMETERS = 6000, 5000, 100
RETRIES = "3"
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}


class Mlflow(Target):
    """A run with numbers, gates, recipe and files; with a name a registered version too."""

    scheme: ClassVar[str] = "mlflow"
    form: ClassVar[str] = "EXPERIMENT[/REGISTERED_NAME]"
    secret_variables: ClassVar[tuple[str, ...]] = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")

    def __init__(self, address: str) -> None:
        super().__init__(address)
        found = ADDRESS.fullmatch(address)
        if found is None:
            raise self.refusal(f"'{address}' names no experiment")
        self.experiment, self.model = found[1], found[2] or ""

    @property
    def server(self) -> str:
        """$MLFLOW_TRACKING_URI without a password, for texts."""
        return re.sub("//[^/?#]*@", "//", os.environ.get("MLFLOW_TRACKING_URI", ""), count=1)

    @property
    def place(self) -> str:
        registered = f", registered as {self.model}" if self.model else ""
        return f"{self.server or '$MLFLOW_TRACKING_URI is not set'}, experiment {self.experiment}{registered}"

    def secrets(self) -> tuple[str, ...]:
        password = urlsplit(os.environ.get("MLFLOW_TRACKING_URI", "")).password
        return tuple(filter(None, (*super().secrets(), password)))

    def uploads(self, shipment: Shipment) -> tuple[Upload, ...]:
        recipe = Upload.of("recipe.yaml", yaml_text(shipment.scorecard.recipe).encode())
        inside = (Upload(f"{MODEL}/{each.name}", each.size_bytes, each.sha256, each.source) for each in shipment.files)
        return (*inside, recipe)

    def upload(self, shipment: Shipment, files: tuple[Upload, ...], progress: Progress) -> dict[str, str]:
        """Make a run, or go on with one of this artifact that broke off, and register its model."""
        if not self.server:
            raise PushError(
                "there is no server",
                where=str(self),
                remedy="Set MLFLOW_TRACKING_URI, e.g. to http://localhost:5000 or sqlite:///mlflow.db",
            )
        if find_spec("mlflow") is None:
            raise MissingPackageError("mlflow", where=str(self), install="optkit[mlflow]")
        os.environ.update(QUIET)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", RETRIES)
        from mlflow import MlflowClient

        with self._explained():
            uri = os.environ["MLFLOW_TRACKING_URI"]
            client = MlflowClient(uri, os.environ.get("MLFLOW_REGISTRY_URI", uri))
            run = self._run(client, shipment)
            try:
                _log_record(client, run, shipment.scorecard)
                self._send(client, run, files, progress)
                known = {"experiment": self.experiment, "run": run, **self._registered(client, run, shipment)}
            except BaseException:
                client.set_terminated(run, "FAILED")
                raise
            client.set_terminated(run, "FINISHED")
        return known

    def _run(self, client: MlflowClient, shipment: Shipment) -> str:
        """Return the id of a run of this artifact that is not finished, else of a new one. After a
        kill such a run still says RUNNING. If another push is at work on it, both send the same.
        """
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else client.create_experiment(self.experiment)
        tags = _tags(shipment)
        mine = f"tags.`optkit.artifact_key` = '{tags['optkit.artifact_key']}' and attributes.status != 'FINISHED'"
        if begun := client.search_runs([experiment], mine, max_results=1):
            return str(begun[0].info.run_id)
        return str(client.create_run(experiment, tags=tags, run_name=shipment.scorecard.name).info.run_id)

    def _send(self, client: MlflowClient, run: str, files: tuple[Upload, ...], progress: Progress) -> None:
        """Upload the files that the run does not have with this size."""
        folders = {PurePosixPath(file.name).parent.as_posix() for file in files}
        listed = [each for folder in folders for each in client.list_artifacts(run, folder if folder != "." else None)]
        there = {each.path: each.file_size for each in listed}
        with (
            progress.task(f"push to {self}", sum(file.size_bytes for file in files), "bytes") as task,
            held_directory(cache_directory() / "drafts", "push-") as drafts,
        ):
            for file in files:
                place = PurePosixPath(file.name)
                source = file.source
                if isinstance(source, bytes):
                    source = _written(drafts / place.name, source)
                if there.get(file.name) != file.size_bytes:
                    folder = place.parent.as_posix()
                    client.log_artifact(run, str(source), None if folder == "." else folder)
                task.advance(file.size_bytes, note=file.name)

    def _registered(self, client: MlflowClient, run: str, shipment: Shipment) -> dict[str, str]:
        """Register the run's model, and give it the alias of its verdict; nothing without a name."""
        from mlflow.exceptions import MlflowException

        if not self.model:
            return {}
        try:
            client.create_registered_model(self.model)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"{client.get_run(run).info.artifact_uri}/{MODEL}"
        known = [each for each in client.search_model_versions(f"run_id = '{run}'") if each.name == self.model]
        made = known[0] if known else client.create_model_version(self.model, source, run, tags=_tags(shipment))
        said = {"model": self.model, "version": str(made.version)}
        verdict = shipment.scorecard.verdict
        if verdict not in ALIASES or not list(gate_lines(shipment.scorecard)):
            return said
        client.set_registered_model_alias(self.model, ALIASES[verdict], str(made.version))
        return {**said, "alias": ALIASES[verdict]}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what MLflow and the way to it refuse into PushErrors."""
        from mlflow.exceptions import MlflowException
        from requests.exceptions import RequestException

        where = str(self)
        try:
            yield
        except (MlflowException, RequestException) as error:
            said, answer = first_line(error), getattr(error, "response", None)
            reason = error.get_http_status_code() if isinstance(error, MlflowException) else 0
            again = "Push again: the run goes on with what is missing"
            if (isinstance(error, RequestException) and answer is None) or "Max retries" in said:
                raise PushError(f"{self.server} cannot be reached", where=where, why=said, remedy=again) from error
            if reason in (401, 403):
                remedy = "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
                raise PushError(f"{self.server} does not let you in", where=where, why=said, remedy=remedy) from error
            raise PushError("MLflow does not take it", where=where, why=said, remedy=again) from error


def _written(file: Path, content: bytes) -> Path:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise explain_os_error(error, file.name, file.parent, "set XDG_CACHE_HOME to another place") from error
    return file


def _tags(shipment: Shipment) -> dict[str, str]:
    return {name: value[:LONGEST_TAG] for name, value in shipment.lineage().items()}


def _log_record(client: MlflowClient, run: str, scorecard: Scorecard) -> None:
    """Log the numbers and ratios as metrics, the recipe as parameters, the gates as tags."""
    from mlflow.entities import Metric, Param, RunTag

    metrics = [Metric(_key(name, labels), value, 0, 0) for name, labels, value in number_lines(scorecard)]
    client.log_batch(run, metrics=metrics)
    told = {"model": scorecard.recipe.get("model"), "stages": scorecard.recipe.get("stages")}
    parameters = [Param(_plain(name), value[:LONGEST_PARAMETER]) for name, value in _flat(told, "")]
    for start in range(0, len(parameters), MOST_PARAMETERS):
        client.log_batch(run, params=parameters[start : start + MOST_PARAMETERS])
    gates: dict[str, str] = {}
    for line in gate_lines(scorecard):
        name = _plain(f"gate {line.row}")
        said = f"{line.limit} {line.verdict}: {line.said}"
        gates[name] = f"{gates[name]}; {said}" if name in gates else said
    client.log_batch(run, tags=[RunTag(name, value[:LONGEST_TAG]) for name, value in gates.items()])


def _key(name: str, labels: Mapping[str, str]) -> str:
    """Return e.g. `perplexity`, `perplexity/baseline` and `decode_tokens_per_s_ratio/batch 1/baseline`."""
    of = labels.get("of") or labels.get("model")
    parts = [f"{label} {value}" for label, value in labels.items() if label not in ("protocol", "model", "of")]
    return _plain("/".join([name, *parts, *([of] if of and of != "artifact" else [])]))


def _plain(name: str) -> str:
    """Return a name that MLflow takes."""
    return re.sub(r"[^\w\-. /:]", "_", name)[:250]


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield dotted name and text of each value of a recipe, e.g. `stages.0.gptq.bits`."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if pairs is None:
        yield name, str(value)
        return
    for key, part in pairs:
        yield from _flat(part, f"{name}.{key}" if name else str(key))
