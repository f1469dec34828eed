"""Attention kernels of the hub, named `owner/repository@revision:function` as in transformers.
The package `kernels` loads them.
"""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from optkit.common.files import sha256_of
from optkit.common.frozen import digest
from optkit.environment import unmet
from optkit.errors import MissingPackageError, SourceError, StageError, first_line
from optkit.model.attention_choice import PHRASES
from optkit.source.hub import COMMIT, HubRepo

PACKAGE = "kernels>=0.16,<0.17"
"""What transformers 5.17 takes."""
NAME = r"^[\w.-]+/[\w.-]+(@[\w.-]+)?(:\w+)?$"
LOCAL = "local-"
"""How the revision of a kernel begins that `$LOCAL_KERNELS` names a directory for; the digest of
its files follows.
"""
VERSIONS = {"2": 3, "4": 0}
"""Version of FlashAttention in a repository's name -> the version of the kernel that transformers
takes; of all others it is 1.
"""


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel by its name.
    `revision` is a branch, a tag, a commit, `local-` and a digest, or None for what transformers
    would take.
    """

    repository: str
    revision: str | None = None
    function: str | None = None

    @classmethod
    def parse(cls, name: str) -> Self:
        """Return the kernel that a name of the form `NAME` means."""
        where, _, function = name.partition(":")
        repository, _, revision = where.partition("@")
        return cls(repository, revision or None, function or None)

    def __str__(self) -> str:
        return (
            self.repository
            + (f"@{self.revision}" if self.revision else "")
            + (f":{self.function}" if self.function else "")
        )

    def pinned(self) -> Self:
        """Return it with a commit, or the digest of a local directory, as its revision. Raises
        SourceError, MissingPackageError.
        """
        self.require_package()
        if place := self.local():
            return replace(self, revision=_digest(place))
        if self.revision and self.revision.startswith(LOCAL):
            raise self._gone()
        return replace(self, revision=self._repo.commit(self.revision or f"v{self._version}"))

    def check(self, device: str) -> None:
        """Raise StageError without a build for a device, or if it is neither here nor downloadable.
        Raises MissingPackageError too.

        What one that is not pinned holds is known when it is loaded.
        """
        self.require_package()
        place = self.local()
        if place is None and self.revision and self.revision.startswith(LOCAL):
            raise self._gone()
        if place and self.revision and self.revision != _digest(place):
            raise StageError(
                f"{place} holds another kernel than {self.repository}@{self.revision}",
                where="attention",
                why="Its files have changed since the recipe was run",
                remedy="Run the recipe again, or name the directory as it was in $LOCAL_KERNELS",
            )
        if place is None and not COMMIT.fullmatch(self.revision or ""):
            return
        place = place or self._repo.snapshot(str(self.revision))
        builds = _builds(place)
        if builds is None and self._hub_is_off():
            raise StageError(
                f"the kernel {self} is neither here nor to be downloaded",
                where="attention",
                why=f"The hub is switched off (HF_HUB_OFFLINE), and there is no {place / 'build'}",
                remedy="Load it once with a connection to the hub and copy the cache, or use sdpa",
            )
        kind = device.partition(":")[0]
        if builds and not any(_is_for(build, kind) for build in builds):
            raise StageError(
                f"the kernel {self} does not run on {device}",
                where="attention",
                why=f"It was built for {', '.join(sorted(builds)[:3])}{' and others' if len(builds) > 3 else ''}",
                remedy="Use sdpa, which is fused on every device",
            )

    def load(self) -> None:
        """Load it and tell transformers; raises StageError if that fails."""
        from transformers.integrations.hub_kernels import load_and_register_attn_kernel

        try:
            load_and_register_attn_kernel(str(self))
        except Exception as error:  # the module of a kernel is imported, and may raise anything
            raise StageError(
                f"the kernel {self} cannot be loaded",
                where="attention",
                why=first_line(error),
                remedy="Use sdpa, or a kernel that was built for this torch and this device",
            ) from error

    def local(self) -> Path | None:
        """Return the directory that `$LOCAL_KERNELS` names for the repository. Raises SourceError
        if it is not there.
        """
        named = [entry.partition("=") for entry in os.environ.get("LOCAL_KERNELS", "").split(":") if entry]
        if odd := next((name for name, sign, _ in named if not sign), None):
            raise SourceError(
                f"$LOCAL_KERNELS has an entry '{odd}'", where="attention", remedy="Write owner/repository=directory"
            )
        place = next((Path(directory) for name, _, directory in named if name == self.repository), None)
        if place and not place.is_dir():
            raise SourceError(
                f"$LOCAL_KERNELS names {place} for {self.repository}, and there is no such directory", where="attention"
            )
        return place

    def require_package(self) -> None:
        """Raise MissingPackageError unless `kernels` is here in a version that transformers takes."""
        if unmet([PACKAGE]):
            raise MissingPackageError(PACKAGE, where=f"attention: {self}")

    @property
    def _version(self) -> int:
        _, flash, rest = self.repository.partition("flash")
        return next((version for number, version in VERSIONS.items() if flash and number in rest), 1)

    @property
    def _repo(self) -> HubRepo:
        return HubRepo(
            self.repository, "kernel", root=os.environ.get("KERNELS_CACHE", ""), remedy="Connect, or use sdpa"
        )

    @staticmethod
    def _hub_is_off() -> bool:
        from huggingface_hub import constants

        return constants.is_offline_mode()

    def _gone(self) -> StageError:
        return StageError(
            f"the kernel {self} was one of a local directory",
            where="attention",
            why="$LOCAL_KERNELS names none for it now",
            remedy=f"Set LOCAL_KERNELS={self.repository}=DIRECTORY",
        )


def why_not_function(implementation: str, argument: str) -> str:
    """Return why a loaded implementation leaves out an argument of attention (`PHRASES`).
    It is empty if it takes it.

    transformers hands FlashAttention's function what that has a parameter for, and every other
    function everything, which it may ignore.
    """
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS[implementation]
    if function is flash_attention_forward:
        function = lazy_import_flash_attention(implementation)[0][1]
    names = {argument, "learnable_sink"} if argument == "s_aux" else {argument}
    taken = names & set(inspect.signature(function).parameters)
    return (
        ""
        if taken
        else f"Its function {function.__name__} has no parameter {argument}, so it leaves out {PHRASES[argument]}"
    )


def _digest(place: Path) -> str:
    files = sorted(path for path in place.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return LOCAL + digest({str(path.relative_to(place)): sha256_of(path) for path in files})[:16]


def _builds(place: Path) -> set[str] | None:
    """Return the names of the builds in a directory; None if there is none.
    For example `torch-cpu` or `torch213-cxx11-cu130-x86_64-linux`.

    The directory may also be a build itself, of a name that says nothing: an empty set.
    """
    for directory in (place / "build", place):
        if directory.is_dir():
            found = {
                each.name for each in directory.iterdir() if each.is_dir() and each.name.startswith(("torch", "tvm"))
            }
            if found or directory.name == "build":
                return found
    return set() if (place / "__init__.py").is_file() else None


def _is_for(build: str, kind: str) -> bool:
    """Whether a build runs on `cpu` or `cuda`."""
    return any(re.fullmatch(r"cu(da|\d+)" if kind == "cuda" else kind, part) for part in build.split("-"))
