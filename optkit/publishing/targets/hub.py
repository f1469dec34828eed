"""`hf://`: the Hugging Face hub, by huggingface_hub.

Files that the hub already holds are not sent again, so a push that broke off goes on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import ClassVar

from optkit.common.own_files import is_own
from optkit.errors import PushError, first_line
from optkit.model.companions import belongs_to_model, holds_weights
from optkit.progress import Progress
from optkit.publishing.targets.base import Shipment, Target, Upload
from optkit.source.hub import without_bars

ADDRESS = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w][\w./-]*))?")
MAIN = "main"
TOKENS = "https://huggingface.co/settings/tokens"


class Hub(Target):
    """A model repository of the hub; a new one is private."""

    scheme: ClassVar[str] = "hf"
    form: ClassVar[str] = "OWNER/NAME[@REVISION]"
    secret_variables: ClassVar[tuple[str, ...]] = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")

    def __init__(self, address: str) -> None:
        super().__init__(address)
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        found = ADDRESS.fullmatch(address)
        if found is None:
            raise self.refusal(f"'{address}' is no repository of the hub")
        self.repository, self.revision = found[1], found[2] or MAIN
        try:
            validate_repo_id(self.repository)
        except HFValidationError as error:
            raise self.refusal(first_line(error).rstrip(".")) from error

    @property
    def endpoint(self) -> str:
        """The hub's address: $HF_ENDPOINT, or that of huggingface.co."""
        from huggingface_hub import constants

        return os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT

    @property
    def place(self) -> str:
        return f"{self.endpoint}/{self.repository}, branch {self.revision}"

    @property
    def opened_as(self) -> str:
        return self.repository

    def secrets(self) -> tuple[str, ...]:
        from huggingface_hub import get_token

        return tuple(filter(None, (*super().secrets(), get_token())))

    def upload(self, shipment: Shipment, files: tuple[Upload, ...], progress: Progress) -> dict[str, str]:
        """Create repository and branch if they are not there, upload large files one by one, then
        commit all at once. The commit deletes weights and records that an earlier push left and this
        artifact does not have: programs would open them.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token, utils

        token = get_token()
        if not token:
            raise PushError(
                "there is no token for the hub",
                where=str(self),
                remedy=f"Set HF_TOKEN to one that may write ({TOKENS}), or run: hf auth login",
            )
        api = HfApi(endpoint=self.endpoint, token=token)
        with self._explained(), without_bars(utils):
            api.create_repo(self.repository, private=True, exist_ok=True)
            if self.revision != MAIN:
                api.create_branch(self.repository, branch=self.revision, exist_ok=True)
            additions = []
            total = sum(file.size_bytes for file in files)
            with progress.task(f"push to {self}", total, "bytes") as task:
                for file in files:
                    source = file.source if isinstance(file.source, bytes) else str(file.source)
                    addition = CommitOperationAdd(file.name, source)
                    addition.upload_info.sha256 = bytes.fromhex(file.sha256)
                    api.preupload_lfs_files(
                        self.repository, [addition], revision=self.revision, gitignore_content="", free_memory=False
                    )
                    additions.append(addition)
                    task.advance(file.size_bytes, note=file.name)
            there = api.list_repo_files(self.repository, revision=self.revision)
            kept = {file.name for file in files}
            stale = [CommitOperationDelete(name) for name in there if _is_replaced(name) and name not in kept]
            message = f"{shipment.scorecard.name}, artifact {shipment.artifact.record.key[:12]}"
            info = api.create_commit(
                self.repository, [*additions, *stale], commit_message=message, revision=self.revision
            )
        return {"url": f"{self.endpoint}/{self.repository}/tree/{info.oid}", "commit": str(info.oid)}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what the hub and the way there refuse into PushErrors."""
        from httpx import TransportError
        from huggingface_hub import errors

        where, owner = str(self), self.repository.partition("/")[0]
        try:
            yield
        except errors.OfflineModeIsEnabled as error:
            why = "The hub is switched off (HF_HUB_OFFLINE)"
            raise PushError("nothing was uploaded", where=where, why=why, remedy="Unset HF_HUB_OFFLINE") from error
        except (TransportError, ConnectionError) as error:
            why = f"{self.endpoint} cannot be reached ({first_line(error)})"
            remedy = "Connect and push again: what arrived is not sent twice"
            raise PushError("the upload broke off", where=where, why=why, remedy=remedy) from error
        except errors.HfHubHTTPError as error:
            raise self._refused(error.response.status_code, first_line(error), owner) from error
        except RuntimeError as error:  # of a file; the reason is its cause
            cause = error.__cause__
            if isinstance(cause, errors.HfHubHTTPError):
                raise self._refused(cause.response.status_code, first_line(cause), owner) from error
            raise PushError("the upload broke off", where=where, why=first_line(cause or error)) from error
        except ValueError as error:
            why = " ".join(str(error).split())
            raise PushError("the hub does not take it", where=where, why=why, remedy="Write hf://OWNER/NAME") from error

    def _refused(self, status: int, said: str, owner: str) -> PushError:
        what, remedy = {
            401: ("the hub does not know the token", f"Set HF_TOKEN to one that may write: {TOKENS}"),
            403: (
                f"the token may not write to {owner}",
                f"Name a repository of yours, or take a token that may write there: {TOKENS}",
            ),
            404: ("the hub has no such repository, or hides it from the token", "Check its name and the token"),
        }.get(status, (f"the hub refused with status {status}", "Push again: what arrived is not sent twice"))
        return PushError(what, where=str(self), why=f"It said: {said}", remedy=remedy)


def _is_replaced(name: str) -> bool:
    """Say whether a file of the repository is one of weights that programs open, or optkit's own."""
    weights = holds_weights(PurePath(name)) or name.endswith(".index.json")
    return is_own(name) or (weights and belongs_to_model(name))
