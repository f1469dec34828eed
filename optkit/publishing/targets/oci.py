"""`oci://`: a registry of containers that holds the artifact as CNCF's ModelPack.

https://github.com/modelpack/model-spec/blob/main/docs/spec.md. Each file is a layer as it is, so
that layers are as alike as files are, and those that a registry has are not sent again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from io import BytesIO
from pathlib import PurePosixPath
from typing import Any, ClassVar

import httpx
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from optkit.artifact import Artifact
from optkit.common.files import object_if_any
from optkit.common.own_files import is_own
from optkit.errors import PushError, first_line
from optkit.model.companions import CODE, holds_weights, is_document
from optkit.progress import Progress, Task
from optkit.publishing.card import HUB, licences_of, origin_of
from optkit.publishing.oci_registry import PASSWORD, USERNAME, Login, Registry, address_of, login_of, said_by
from optkit.publishing.targets.base import Shipment, Target, Upload
from optkit.verification.artifact_checks import format_of

PART = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
HOST = r"(?:localhost|[\w-]+(?:\.[\w-]+)+)(?::\d+)?|[\w-]+:\d+"
ADDRESS = re.compile(rf"({HOST})/({PART}(?:/{PART})*):(\w[\w.-]{{0,127}})", re.ASCII)
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT = "application/vnd.cncf.model.manifest.v1+json"
CONFIG = "application/vnd.cncf.model.config.v1+json"
LAYER = "application/vnd.cncf.model.{}.v1.raw"
FILE, TITLE = "org.cncf.model.filepath", "org.opencontainers.image.title"
"""By which modctl and oras name what they pull."""
BLOCK = 1 << 20


class Oci(Target):
    """A tag of a repository of a registry."""

    scheme: ClassVar[str] = "oci"
    form: ClassVar[str] = "REGISTRY/NAME:TAG"
    secret_variables: ClassVar[tuple[str, ...]] = (PASSWORD,)

    def __init__(self, address: str) -> None:
        super().__init__(address)
        found = ADDRESS.fullmatch(address)
        if found is None:
            raise self.refusal(f"'{address}' does not name a registry, a repository in small letters and a tag")
        self.host, self.repository, self.tag = found[1], found[2], found[3]

    @property
    def place(self) -> str:
        return f"{address_of(self.host)}, repository {self.repository}, tag {self.tag}"

    @cached_property
    def login(self) -> Login | None:
        """User and password."""
        return login_of(self.host)

    def secrets(self) -> tuple[str, ...]:
        return tuple(filter(None, (*super().secrets(), self.login[1] if self.login else "")))

    def upload(self, shipment: Shipment, files: tuple[Upload, ...], progress: Progress) -> dict[str, str]:
        """Upload the layers that the registry does not have, then the manifest."""
        config = Upload.of("config", _json(_config(shipment, files)))
        manifest = _json(_manifest(shipment, files, config))
        blobs = {_digest(file): file for file in (*files, config)}
        total = sum(blob.size_bytes for blob in blobs.values())
        with (
            self._explained(),
            Registry(self.host, self.repository, self.login) as registry,
            progress.task(f"push to {self}", total, "bytes") as task,
        ):
            sent = sum(_send(registry, digest, blob, task) for digest, blob in blobs.items())
            registry.tag(self.tag, manifest, MANIFEST)
        digest = f"sha256:{sha256(manifest).hexdigest()}"
        known = {"reference": f"{self.host}/{self.repository}:{self.tag}", "digest": digest}
        return {**known, "sent": f"{sent} of {len(blobs)} blobs"}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what a registry and the way there refuse into PushErrors."""
        where = str(self)
        try:
            yield
        except httpx.HTTPStatusError as error:
            raise self._refused(error.response) from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            why = f"{self.host} cannot be reached, or is no registry ({first_line(error)})"
            remedy = "Connect and push again: what arrived is not sent twice"
            raise PushError("the upload broke off", where=where, why=why, remedy=remedy) from error

    def _refused(self, answer: httpx.Response) -> PushError:
        where, why = str(self), f"It said: {said_by(answer)}"
        log_in = f"Set {USERNAME} and {PASSWORD}, or run: docker login {self.host}"
        if answer.status_code == httpx.codes.FORBIDDEN:
            what = f"{self.host} does not let you write to {self.repository}"
            return PushError(what, where=where, why=why, remedy=log_in)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            asked = "does not know the user or the password" if self.login else "asks for a user and a password"
            return PushError(f"{self.host} {asked}", where=where, why=why, remedy=log_in)
        what = f"{self.host} refused with status {answer.status_code}"
        return PushError(what, where=where, why=why, remedy="Mend that and push again: what arrived is not sent twice")


def _send(registry: Registry, digest: str, blob: Upload, task: Task) -> bool:
    """Upload a blob block by block, and say whether that had to be."""

    def blocks() -> Iterator[bytes]:
        with BytesIO(blob.source) if isinstance(blob.source, bytes) else blob.source.open("rb") as stream:
            while block := stream.read(BLOCK):
                yield block
                task.advance(len(block), note=blob.name)

    if registry.has(digest):
        task.advance(blob.size_bytes, note=blob.name)
        return False
    registry.send(digest, blocks(), blob.size_bytes)
    return True


def _digest(file: Upload) -> str:
    return f"sha256:{file.sha256}"


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode()


def _manifest(shipment: Shipment, files: tuple[Upload, ...], config: Upload) -> dict[str, Any]:
    record = shipment.artifact.record
    said = {
        TITLE: shipment.scorecard.name,
        "org.opencontainers.image.created": record.created,
        "org.opencontainers.image.version": record.key[:12],
        "org.opencontainers.image.licenses": " AND ".join(map(_spdx, licences_of(shipment.artifact))),
        "org.opencontainers.image.source": _source(shipment.artifact),
        **shipment.lineage(),
    }
    return {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": ARTIFACT,
        "config": _descriptor(config, CONFIG),
        "layers": [
            {**_descriptor(file, _media_type(file.name)), "annotations": {FILE: file.name, TITLE: file.name}}
            for file in files
        ],
        "annotations": {name: value for name, value in said.items() if value},
    }


def _config(shipment: Shipment, files: tuple[Upload, ...]) -> dict[str, Any]:
    """Return ModelPack's configuration; https://github.com/modelpack/model-spec/blob/main/docs/config.md."""
    artifact = shipment.artifact
    config = object_if_any(artifact.directory / "config.json")
    descriptor = {
        "createdAt": artifact.record.created,
        "name": shipment.scorecard.name,
        "version": artifact.record.key[:12],
        "family": config.get("model_type"),
        "sourceURL": _source(artifact),
        "licenses": list(map(_spdx, licences_of(artifact))),
    }
    technical = {
        "format": format_of(artifact).label.lower(),
        "precision": config.get("dtype") or config.get("torch_dtype"),
        "quantization": (config.get("quantization_config") or {}).get("quant_method"),
    }
    return {
        "descriptor": {name: value for name, value in descriptor.items() if value},
        "config": {name: value for name, value in technical.items() if value},
        "modelfs": {"type": "layers", "diffIds": [_digest(file) for file in files]},
    }


def _descriptor(file: Upload, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(file), "size": file.size_bytes}


def _media_type(name: str) -> str:
    path = PurePosixPath(name)
    if holds_weights(path):
        return LAYER.format("weight")
    if is_own(path) or is_document(name):
        return LAYER.format("doc")
    return LAYER.format("code" if path.suffix == CODE else "weight.config")


def _source(artifact: Artifact) -> str:
    """Return the page of the unmodified model; empty without one."""
    origin = origin_of(artifact.record.recipe["model"])
    return f"{HUB}/{origin}" if origin else ""


def _spdx(licence: str) -> str:
    """Return a licence as SPDX writes it."""
    try:
        return canonicalize_license_expression(licence)
    except InvalidLicenseExpression:
        return f"LicenseRef-{re.sub(r'[^A-Za-z0-9.-]', '-', licence)}"
