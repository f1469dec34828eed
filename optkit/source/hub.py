"""Repositories of the Hugging Face hub, whose revisions become commits.
Files are looked for in the hub's own cache first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from optkit.common.files import reading
from optkit.errors import SourceError, first_line
from optkit.model.safetensors_file import tensor_info
from optkit.model.shape import TensorInfo
from optkit.progress import Progress

COMMIT = re.compile(r"[0-9a-f]{40}")
SITE = "https://huggingface.co"


@dataclass(frozen=True)
class HubRepo:
    """A model or data set repository.
    `looked` and `remedy` are added to what an error says when it cannot be reached.
    """

    name: str
    kind: Literal["model", "dataset", "kernel"] = "model"
    looked: str = ""
    remedy: str = ""
    root: str = ""
    """Directory of the cache, if it is another one than the hub's."""

    @property
    def cache(self) -> Path:
        """Where the hub's cache keeps this repository, there or not."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        return Path(self.root or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=self.name, repo_type=self.kind)

    def snapshot(self, commit: str) -> Path:
        """Where the hub's cache keeps the files of a commit, there or not."""
        return self.cache / "snapshots" / commit

    def commit(self, revision: str | None = None) -> str:
        """Return the commit that a branch, a tag or nothing (the main branch) stands for now.

        Offline it is the commit that the cache last saw there. Raises SourceError if neither is
        to be had.
        """
        if revision and COMMIT.fullmatch(revision):
            return revision
        with self._explained(revision) as unreachable:
            from huggingface_hub import HfApi

            if self.kind == "kernel":
                return str(HfApi().kernel_info(self.name, revision=revision).sha)
            return str(HfApi().repo_info(self.name, repo_type=self.kind, revision=revision).sha)
        reference = self.cache / "refs" / (revision or "main")
        if reference.is_file():
            return reference.read_text(encoding="utf-8").strip()
        raise self._unreachable(f"the revision {revision or 'main'}", reference, unreachable[0])

    def file(self, name: str, commit: str) -> Path:
        """Return a file of a commit, downloaded if the cache lacks it. Raises SourceError."""
        cached = self.snapshot(commit) / name
        if cached.is_file():
            return cached
        with self._explained(commit) as unreachable:
            from huggingface_hub import hf_hub_download, utils
            from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

            try:
                with without_bars(utils):
                    return Path(hf_hub_download(self.name, name, repo_type=self.kind, revision=commit))
            except LocalEntryNotFoundError as error:
                unreachable.append(error)
            except EntryNotFoundError as error:
                raise SourceError(
                    f"there is no {name}", where=self._where(commit), why=f"See {SITE}/{self.name}/tree/{commit[:12]}"
                ) from error
        raise self._unreachable(name, cached, unreachable[0])

    def download(self, commit: str, wanted: Callable[[str], bool], progress: Progress) -> Path:
        """Return a commit's directory in the hub's cache, with the files whose names are `wanted`.

        Raises SourceError if they cannot all be had.
        """
        with self._explained(commit) as unreachable:
            from huggingface_hub import HfApi

            listed = HfApi().model_info(self.name, revision=commit, files_metadata=True).siblings or []
            files = {file.rfilename: file.size or 0 for file in listed if wanted(file.rfilename)}
            with progress.task(f"download {self.name}", sum(files.values()), "bytes") as task:
                for name, size_bytes in sorted(files.items()):
                    self.file(name, commit)
                    task.advance(size_bytes, note=name)
            return self.snapshot(commit)
        raise self._unreachable("the whole snapshot", self.snapshot(commit), unreachable[0])

    def tensors(self, commit: str) -> dict[str, TensorInfo]:
        """Return dtype and shape of a commit's tensors from the headers of its safetensors.
        Raises SourceError.
        """
        with self._explained(commit) as unreachable:
            from huggingface_hub import HfApi
            from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

            try:
                files = HfApi().get_safetensors_metadata(self.name, revision=commit).files_metadata.values()
            except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
                raise SourceError(
                    "there are no safetensors", where=self._where(commit), why=first_line(error)
                ) from error
            with reading(self._where(commit), "the headers are not safetensors", ""):
                return {name: tensor_info(name, vars(info)) for file in files for name, info in file.tensors.items()}
        raise self._unreachable("the model", self.snapshot(commit), unreachable[0])

    @property
    def _word(self) -> str:
        return "data set" if self.kind == "dataset" else self.kind

    def _where(self, revision: str | None) -> str:
        return f"{self.name}@{revision[:12]}" if revision else self.name

    def _unreachable(self, what: str, place: Path, error: Exception) -> SourceError:
        from huggingface_hub import constants

        why = (
            "The hub is switched off (HF_HUB_OFFLINE)"
            if constants.is_offline_mode()
            else f"The hub cannot be reached ({error})"
        )
        looked = f"{why}, and {what} is not in its cache: there is no {place}"
        local = "directory" if self.kind == "model" else ".txt or .jsonl file"
        remedy = self.remedy or (
            f"Connect and run: hf download {self.name}{' --repo-type dataset' if self.kind == 'dataset' else ''}"
            f"{', then copy the cache' if constants.is_offline_mode() else ''}, or name a local {local}"
        )
        return SourceError(
            f"the {self._word} is neither here nor to be downloaded",
            where=self.name,
            why=f"{looked}. {self.looked}".strip(" ."),
            remedy=remedy,
        )

    @contextmanager
    def _explained(self, revision: str | None) -> Iterator[list[Exception]]:
        """Turn the hub's refusals into SourceErrors.
        Without a connection the block ends, with the reason in the list.
        """
        from httpx import HTTPError, TransportError
        from huggingface_hub import errors

        unreachable: list[Exception] = []
        page = f"{SITE}/{'' if self.kind == 'model' else f'{self.kind}s/'}{self.name}"
        try:
            yield unreachable
        except (errors.OfflineModeIsEnabled, TransportError) as error:
            unreachable.append(error)
        except errors.GatedRepoError as error:
            raise SourceError(
                "the repository is gated",
                where=self._where(revision),
                why="Its authors ask you to accept a licence first",
                remedy=f"Accept it at {page}, then run: hf auth login",
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise SourceError(
                f"the hub has no such {self._word}, or it is private",
                where=self.name,
                remedy=f"Check the name at {page}; for a private one run: hf auth login",
            ) from error
        except errors.RevisionNotFoundError as error:
            raise SourceError(
                f"there is no revision '{revision}'",
                where=self.name,
                remedy=f"Branches, tags and commits are listed at {page}/tree/main",
            ) from error
        except errors.HFValidationError as error:
            raise SourceError("not a name that the hub could have", where=self.name, why=first_line(error)) from error
        except HTTPError as error:
            raise SourceError(
                "the hub refused", where=self._where(revision), why=first_line(error), remedy="Try again in a while"
            ) from error


@contextmanager
def without_bars(library: Any) -> Iterator[None]:
    """Draw none of the progress bars of `huggingface_hub.utils` or `datasets`.
    The setting is left as it was.
    """
    before = library.are_progress_bars_disabled()
    library.disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            library.enable_progress_bars()
