"""A hub on this machine: the calls that an upload makes, by HTTP, with accounts and branches.

Paths and answers: https://huggingface.co/spaces/huggingface/openapi, and for large files git-lfs'
batch API, https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from tests.support.http_server import Quiet, served

LARGE = 4096
"""Bytes from which on a file is a large one."""


class Hub:
    """What the server knows: who may write where, objects by digest, branches of repositories."""

    def __init__(self) -> None:
        self.accounts = {"hf_mine": "me"}
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.uploaded: list[str] = []
        self.refuse_upload: set[str] = set()
        """Digests whose next upload is refused."""
        self.url = ""

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        """Return status and document of a call."""
        if found := re.fullmatch(r"/objects/(\w+)", path):
            return self._store(found[1], body)
        user = self.accounts.get(token)
        if user is None:
            return 401, {"error": f"Invalid credentials in Authorization header: {token}"}
        if path == "/api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        if path == "/api/repos/create":
            wanted = json.loads(body)
            return self._create(user, f"{wanted['organization']}/{wanted['name']}", wanted.get("visibility"))
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(\w+)/([^/]+))?", path) or re.fullmatch(
            r"/([^/]+/[^/]+)\.git/info/lfs/objects/(batch)()", path
        )
        if found is None or found[1] not in self.repositories:
            return 404, {"error": "Repository not found"}
        if method == "GET" and found[2] == "tree":
            there = self.repositories[found[1]][found[3]].items()
            return 200, [{"type": "file", "path": path, "size": len(data), "oid": "0" * 40} for path, data in there]
        if method == "GET":
            return 200, {"id": found[1], "sha": self._commit(found[1], "main")}
        if found[1].partition("/")[0] != user:
            return 403, {"error": "Forbidden: you do not have write access"}
        return getattr(self, f"_{found[2]}")(found[1], found[3], body)

    def _create(self, user: str, name: str, visibility: str | None) -> tuple[int, Any]:
        if name in self.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
        if name.partition("/")[0] != user:
            return 403, {"error": f"You don't have the rights to create a model under the namespace {name}"}
        self.repositories[name] = {"main": {}}
        self.private[name] = visibility == "private"
        return 200, {"url": f"{self.url}/{name}"}

    def _validate(self, content: str) -> tuple[int, Any]:
        try:
            data = YAML(typ="safe").load(content.split("---")[1])
        except (IndexError, YAMLError) as error:
            return 400, {"errors": [{"message": f"the metadata is no YAML: {error}"}]}
        bad = not isinstance(data.get("tags", []), list)
        return (400, {"errors": [{"message": '"tags" must be an array'}]}) if bad else (200, {"warnings": []})

    def _branch(self, name: str, revision: str, body: bytes) -> tuple[int, Any]:
        if revision in self.repositories[name]:
            return 409, {"error": "Reference already exists"}
        self.repositories[name][revision] = dict(self.repositories[name]["main"])
        return 201, {}

    def _preupload(self, name: str, revision: str, body: bytes) -> tuple[int, Any]:
        files = json.loads(body)["files"]
        modes = [{"path": file["path"], "uploadMode": "lfs" if file["size"] > LARGE else "regular"} for file in files]
        return 200, {"files": [{**mode, "shouldIgnore": False} for mode in modes]}

    def _batch(self, name: str, revision: str, body: bytes) -> tuple[int, Any]:
        objects = []
        for each in json.loads(body)["objects"]:
            there = each["oid"] in self.objects
            upload = {"actions": {"upload": {"href": f"{self.url}/objects/{each['oid']}"}}}
            objects.append(each if there else each | upload)
        return 200, {"transfer": "basic", "objects": objects}

    def _store(self, digest: str, content: bytes) -> tuple[int, Any]:
        if digest in self.refuse_upload:
            self.refuse_upload.remove(digest)
            return 400, {"error": "the link has expired"}
        assert hashlib.sha256(content).hexdigest() == digest
        self.objects[digest] = content
        self.uploaded.append(digest)
        return 200, {}

    def _commit(self, name: str, revision: str, body: bytes | None = None) -> Any:
        branch = self.repositories[name][revision]
        for line in map(json.loads, body.splitlines() if body else ()):
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                branch[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del branch[value["path"]]
            else:
                branch[value["path"]] = self.objects[value["oid"]]
        oid = hashlib.sha1(repr(sorted(branch.items())).encode()).hexdigest()
        return oid if body is None else (200, {"commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid})


@contextmanager
def serving() -> Iterator[Hub]:
    """Give a hub that answers until the block ends."""
    hub = Hub()

    class Handler(Quiet):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
            status, document = hub.answer(self.command, self.path.partition("?")[0], token, body)
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            if status >= 400 and isinstance(document, dict) and "error" in document:
                self.send_header("x-error-message", document["error"])
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _answer  # noqa: N815

    with served(Handler) as host:
        hub.url = f"http://{host}"
        yield hub
