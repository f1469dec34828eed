"""`oci://` against Debian's docker-registry."""

import hashlib
import json
import shutil
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from optkit.artifact import read_artifact
from optkit.errors import PushError, UsageError
from optkit.progress import Progress, SilentProgress, SilentTask
from optkit.publishing.oci_registry import address_of, login_of
from optkit.publishing.push import prepare_push
from optkit.publishing.targets.oci import MANIFEST, Oci
from optkit.publishing.targets.registry import target_of
from optkit.verification.artifact_checks import check_artifact
from tests.support.command_line import spoken
from tests.support.http_server import Quiet, served
from tests.support.oci_registry import PASSWORD, USER, Registry, by_password, by_token, find_registry, serving

needs_registry = pytest.mark.skipif(
    find_registry() is None, reason="no docker-registry: apt-get install docker-registry"
)
MODEL = "application/vnd.cncf.model"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with serving(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture
def artifact(tiny_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the artifact, with a licence."""
    out = shutil.copytree(tiny_run / "out", tmp_path / "out")
    (out / "README.base.md").write_text("---\nlicense: apache-2.0\n---\n", encoding="utf-8")
    return out


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a password, and with settings of Docker that are this test's."""
    for name in ("OPTKIT_OCI_USERNAME", "OPTKIT_OCI_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))


def known_as(monkeypatch: pytest.MonkeyPatch, password: str = PASSWORD) -> None:
    monkeypatch.setenv("OPTKIT_OCI_USERNAME", USER)
    monkeypatch.setenv("OPTKIT_OCI_PASSWORD", password)


def docker_settings(tmp_path: Path, host: str, password: str = PASSWORD) -> None:
    auth = b64encode(f"{USER}:{password}".encode()).decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}), encoding="utf-8")


def pushed(artifact: Path, address: str, progress: Progress | None = None) -> dict[str, str]:
    return prepare_push(artifact, address).upload(progress or SilentProgress())


def refused(artifact: Path, address: str, progress: Progress | None = None) -> str:
    with pytest.raises(PushError) as caught:
        pushed(artifact, address, progress)
    assert PASSWORD not in str(caught.value)
    return str(caught.value)


def manifest(registry: Registry, repository: str, reference: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(registry.get(f"{repository}/manifests/{reference}", MANIFEST))
    return found


@needs_registry
def test_what_is_pulled_is_the_artifact_as_a_modelpack(
    running: Registry, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"oci://{running.host}/models/tiny:v1"
    out, _ = spoken(capsys, "push", str(artifact), address, "--dry-run")
    assert f"http://{running.host}, repository models/tiny, tag v1" in " ".join(out.split())
    assert running.uploads() == 0
    said = json.loads(spoken(capsys, "push", str(artifact), address, "--json")[0])
    files, known = {file["name"]: file for file in said["files"]}, said["result"]
    assert known["reference"] == f"{running.host}/models/tiny:v1"

    content = running.get("models/tiny/manifests/v1", MANIFEST)
    assert known["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
    found = json.loads(content)
    assert (found["mediaType"], found["artifactType"]) == (MANIFEST, f"{MODEL}.manifest.v1+json")
    layers = {layer["annotations"]["org.cncf.model.filepath"]: layer for layer in found["layers"]}
    assert layers.keys() == files.keys()
    kinds = {name: layer["mediaType"].removeprefix(f"{MODEL}.") for name, layer in layers.items()}
    assert kinds["model.safetensors"] == "weight.v1.raw"
    assert kinds["config.json"] == kinds["tokenizer.json"] == "weight.config.v1.raw"
    assert kinds["README.md"] == kinds["scorecard.json"] == "doc.v1.raw"

    for name, layer in layers.items():
        pulled = running.get(f"models/tiny/blobs/{layer['digest']}")
        assert (layer["digest"], layer["size"]) == (f"sha256:{hashlib.sha256(pulled).hexdigest()}", len(pulled))
        assert layer["digest"] == f"sha256:{files[name]['sha256']}"
        assert layer["annotations"]["org.opencontainers.image.title"] == name
        (tmp_path / "there" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "there" / name).write_bytes(pulled)
    assert [check.detail for check in check_artifact(read_artifact(tmp_path / "there")) if not check.ok] == []

    record = read_artifact(artifact).record
    notes = found["annotations"]
    assert notes["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert notes["org.opencontainers.image.created"] == record.created
    assert (notes["optkit.artifact_key"], notes["optkit.baseline_key"]) == (record.key, record.baseline_key)
    assert notes["optkit.verdict"] == "no gates"

    assert found["config"]["mediaType"] == f"{MODEL}.config.v1+json"
    config = json.loads(running.get(f"models/tiny/blobs/{found['config']['digest']}"))
    assert config["descriptor"]["licenses"] == ["Apache-2.0"]
    assert (config["descriptor"]["family"], config["config"]["format"]) == ("llama", "safetensors")
    assert config["modelfs"] == {"type": "layers", "diffIds": [layer["digest"] for layer in found["layers"]]}


@needs_registry
def test_a_second_push_and_another_tag_send_no_blob(running: Registry, artifact: Path) -> None:
    address = f"oci://{running.host}/again"
    first, count = pushed(artifact, f"{address}:v1"), running.uploads()
    second = pushed(artifact, f"{address}:v2")
    assert running.uploads() == count > 0
    assert second["sent"].startswith("0 of ")
    assert first["digest"] == second["digest"]
    assert manifest(running, "again", "v2") == manifest(running, "again", first["digest"])


class KillingProgress(SilentProgress):
    """Kills a registry when the first block of a file is under way."""

    def __init__(self, registry: Registry, name: str) -> None:
        self.registry, self.name = registry, name

    def task(self, label: str, total: int, unit: str = "") -> SilentTask:
        return self  # type: ignore[return-value]

    __enter__ = SilentTask.__enter__
    __exit__ = SilentTask.__exit__

    def advance(self, steps: int = 1, note: str = "") -> None:
        if note == self.name:
            self.registry.kill()


@needs_registry
def test_a_registry_that_dies_in_the_middle(tmp_path: Path, artifact: Path) -> None:
    with serving(tmp_path) as registry:
        address = f"oci://{registry.host}/dies:v1"
        said = refused(artifact, address, KillingProgress(registry, "model.safetensors"))
        why = f"{address}: the upload broke off. {registry.host} cannot be reached, or is no registry ("
        assert said.startswith(why)
        assert said.endswith(" Connect and push again: what arrived is not sent twice.")
        before = registry.uploads()
        registry.start()
        with pytest.raises(HTTPError, match="404"):
            registry.get("dies/manifests/v1")
        sent, _, blobs = pushed(artifact, address)["sent"].removesuffix(" blobs").partition(" of ")
        assert 0 < before == int(blobs) - int(sent)
        assert registry.uploads() == int(blobs)
        assert registry.get("dies/tags/list") == b'{"name":"dies","tags":["v1"]}\n'


@needs_registry
def test_a_registry_that_asks_for_a_password(
    tmp_path: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path, by_password(tmp_path)) as registry:
        address = f"oci://{registry.host}/secret:v1"
        said = refused(artifact, address)
        assert said.startswith(f"{address}: {registry.host} asks for a user and a password. It said: ")
        remedy = f"Set OPTKIT_OCI_USERNAME and OPTKIT_OCI_PASSWORD, or run: docker login {registry.host}."
        assert said.endswith(remedy)
        docker_settings(tmp_path, registry.host, "wrong-sesame")
        said = refused(artifact, address)
        assert said.startswith(f"{address}: {registry.host} does not know the user or the password. It said: ")
        assert "wrong-sesame" not in said
        docker_settings(tmp_path, registry.host)
        pushed(artifact, address)
        known_as(monkeypatch, "wrong-sesame")
        assert "does not know the user" in refused(artifact, address)
        known_as(monkeypatch)
        out, err = spoken(capsys, "push", str(artifact), address)
        assert PASSWORD not in out + err
    for file in prepare_push(artifact, address).files:
        content = file.source if isinstance(file.source, bytes) else file.source.read_bytes()
        assert PASSWORD.encode() not in content, file.name


@needs_registry
def test_a_registry_that_asks_for_a_token_of_another_server(
    tmp_path: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with by_token(tmp_path) as auth, serving(tmp_path, auth) as registry:
        address = f"oci://{registry.host}/me/tiny:v1"
        said = refused(artifact, address)
        assert said.startswith(f"{address}: {registry.host} asks for a user and a password. It said: DENIED: no. Set")
        known_as(monkeypatch)
        assert not pushed(artifact, address)["sent"].startswith("0 of ")
        said = refused(artifact, f"oci://{registry.host}/you/tiny:v1")
        assert "does not know the user or the password. It said: UNAUTHORIZED: " in said


@contextmanager
def answering(**answers: tuple[int, str]) -> Iterator[str]:
    """Give the host of a server that answers each method with a status and one error."""

    class Handler(Quiet):
        def do_any(self) -> None:
            status, message = answers[self.command]
            self.rfile.read(int(self.headers.get("content-length") or 0))
            content = json.dumps({"errors": [{"code": "SAID", "message": message}]}).encode()
            self.send_response(status)
            self.send_header("location", "http://127.0.0.1:9/elsewhere")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else content)

        do_HEAD = do_POST = do_PUT = do_any  # noqa: N815

    with served(Handler) as host:
        yield host


def test_a_registry_that_refuses(artifact: Path) -> None:
    with answering(HEAD=(404, ""), POST=(403, "not below team")) as host:
        assert refused(artifact, f"oci://{host}/team/x:1") == (
            f"oci://{host}/team/x:1: {host} does not let you write to team/x. It said: SAID: not below team. "
            f"Set OPTKIT_OCI_USERNAME and OPTKIT_OCI_PASSWORD, or run: docker login {host}."
        )
    with answering(HEAD=(404, ""), POST=(507, "the disk is full")) as host:
        assert refused(artifact, f"oci://{host}/x:1") == (
            f"oci://{host}/x:1: {host} refused with status 507. It said: SAID: the disk is full. "
            "Mend that and push again: what arrived is not sent twice."
        )


def test_layers_that_a_registry_keeps_elsewhere_are_there(artifact: Path) -> None:
    with answering(HEAD=(307, ""), PUT=(201, "")) as host:
        assert pushed(artifact, f"oci://{host}/x:1")["sent"].startswith("0 of ")


def test_a_registry_that_is_not_there(artifact: Path) -> None:
    said = refused(artifact, "oci://127.0.0.1:9/tiny:v1")
    assert said.startswith("oci://127.0.0.1:9/tiny:v1: the upload broke off. 127.0.0.1:9 cannot be reached, or is no")


def test_logins_of_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "config.json"
    assert login_of("ghcr.io") is None
    settings.write_text('{"auths": {"ghcr.io": {"auth": "no base64"}}}', encoding="utf-8")
    assert login_of("ghcr.io") is None
    docker_settings(tmp_path, "https://index.docker.io/v1/")
    assert login_of("docker.io") == (USER, PASSWORD)
    assert login_of("ghcr.io") is None

    settings.write_text('{"credHelpers": {"ghcr.io": "test"}, "credsStore": "lost"}', encoding="utf-8")
    helper = tmp_path / "docker-credential-test"
    helper.write_text('#!/bin/sh\ntest "$1 $(cat)" = "get ghcr.io" && echo \'{"Username": "a", "Secret": "b"}\'\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert login_of("ghcr.io") == ("a", "b")
    helper.write_text("#!/bin/sh\necho credentials not found\nexit 1\n", encoding="utf-8")
    assert login_of("ghcr.io") is None
    said = f"{settings}: it names docker-credential-lost, which cannot be run. Install it, or set OPTKIT_OCI_USERNAME"
    with pytest.raises(PushError) as caught:
        login_of("quay.io")
    assert str(caught.value).startswith(said)
    known_as(monkeypatch)
    assert login_of("quay.io") == (USER, PASSWORD)


def test_only_registries_of_this_machine_are_spoken_to_without_encryption() -> None:
    assert address_of("localhost:5000") == "http://localhost:5000"
    assert address_of("127.0.0.1:5000") == "http://127.0.0.1:5000"
    assert address_of("localhost.example.com") == "https://localhost.example.com"
    assert address_of("docker.io") == "https://registry-1.docker.io"


@pytest.mark.parametrize("address", ["ghcr.io/me/a-b__c/d.e:V_1.2-3", "localhost/x:1", "reg:5000/x:latest"])
def test_addresses_that_are_some(address: str) -> None:
    target = target_of(f"oci://{address}")
    assert isinstance(target, Oci)
    assert f"{target.host}/{target.repository}:{target.tag}" == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "ghcr.io/me/x",
        "me/x:1",
        "ghcr.io/Me/x:1",
        "ghcr.io/x:.1",
        "ghcr.io/x:",
        "ghcr.io/x@sha256:0",
        "a.b/x:1/y",
        "a.b/x:é",
    ],
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(UsageError) as caught:
        Oci(address)
    assert str(caught.value) == (
        f"oci://{address}: '{address}' does not name a registry, a repository in small letters and a tag. "
        "Write it as oci://REGISTRY/NAME:TAG."
    )
