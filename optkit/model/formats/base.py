"""The contract of a format: how it is found, checked, opened and counted.

Plans ask formats too, so no module here imports torch or a runtime. What a format needs of rooms
above this one (a session, a verification) it names as `module:name`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from optkit.model.formats.registry import format_targets, instance, resolve
from optkit.model.shape import ModelShape

if TYPE_CHECKING:
    from optkit.model.layer_sizes import LayerSize
    from optkit.stage import Opening


class _Listed(type):
    """Makes `Format.ONNX` of the registry's `onnx`, and lets formats be iterated over in its order."""

    def __getattr__(cls, name: str) -> Format:
        if name.isupper() and name.lower() in format_targets():
            return _named(name.lower())
        raise AttributeError(f"{cls.__name__} has no attribute {name}")

    def __iter__(cls) -> Iterator[Format]:
        return map(_named, format_targets())


class Format(str, metaclass=_Listed):
    """What a directory of weights holds; a stage says which of them it reads and which it leaves.

    As a text it is its `kind`, which keys and records hold.
    """

    kind: ClassVar[str]
    """Its name in the registry."""
    label: ClassVar[str]
    """What the weights are in, e.g. `ONNX`."""
    phrase: ClassVar[str]
    """A directory of it, e.g. `an ONNX model`."""
    opened: ClassVar[str]
    """What a setting is applied to if it is opened, e.g. `an ONNX model`."""
    origin: ClassVar[str]
    """What to start from instead, e.g. `the checkpoint that it was exported from`."""
    made_by: ClassVar[str] = ""
    """The stage that makes it of a checkpoint; empty if there is none."""
    is_checkpoint: ClassVar[bool] = False
    """config.json and safetensors with a tensor for each parameter, which torch opens."""
    may_link: ClassVar[bool] = True
    """Its files may be hard links; without, an artifact has copies."""
    computes_in: ClassVar[str | None] = None
    """Torch name of the float dtype that it always computes in; None if it can be asked for one."""
    libraries: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """What runs it beside torch -> its distributions; their versions belong to the key of a timing."""
    session: ClassVar[str]
    """`module:function` that returns a session of an `optkit.stage.Opening`."""
    verification: ClassVar[str] = "optkit.verification.model_files:ModelFiles"
    """`module:Class` of an `optkit.verification.model_files.ModelFiles`."""

    def __new__(cls, kind: str = "") -> Format:
        """Return the format itself, or of `Format` the one of a kind.
        Raises ValueError for another.
        """
        if cls is not Format:
            return super().__new__(cls, cls.kind)
        if kind not in format_targets():
            raise ValueError(f"'{kind}' is no format: {', '.join(format_targets())}")
        return _named(kind)

    @classmethod
    def of(cls, directory: Path) -> Format:
        """Return the format of a directory, by the names of its files; a checkpoint without any."""
        place = Path(directory)
        return cls.of_files({path.name for path in place.iterdir() if path.is_file()} if place.is_dir() else ())

    @classmethod
    def of_files(cls, names: Collection[str]) -> Format:
        """Return the format of a directory with these files; a checkpoint if none is known."""
        return next((each for each in cls if each.detects(names)), Format.CHECKPOINT)

    def detects(self, names: Collection[str]) -> bool:
        """Say whether the files of a directory, by their names, are those of this format."""
        return False

    def narrowed(self, config: Mapping[str, Any], directory: Path | None) -> Format:
        """Return the format that the parsed config.json and the directory, if it is there, say."""
        return self

    def holds_weights(self, name: str) -> bool:
        """Say whether a file of this name holds weights in this format."""
        return False

    def check(self, directory: Path) -> tuple[Path, ...]:
        """Return the files that hold the weights. Raises SourceError if one is missing or damaged."""
        raise NotImplementedError

    def published(self, directory: Path) -> set[str]:
        """Return the names of an artifact's files of weights, relative to the directory."""
        return {path.relative_to(directory).as_posix() for path in self.check(directory)}

    def shape(self, directory: Path) -> ModelShape:
        """Return config and tensors, from headers alone. Raises SourceError if they are damaged."""
        raise NotImplementedError

    def layer_sizes(self, directory: Path) -> list[LayerSize]:
        """Return what each layer takes on disk. Raises EvalError for a layout that is not known."""
        raise NotImplementedError

    def open(self, opening: Opening) -> Any:
        """Return a session of a directory.
        `optkit.session.open_session` asks the settings before and after.
        """
        return resolve(self.session)(opening)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            Format, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )


def makers(accepts: Collection[Format]) -> str:
    """Return the stages that make one of these formats; empty if one of them needs no stage."""
    made = {each.made_by for each in accepts}
    return "" if "" in made else " or ".join(sorted(made))


def _named(kind: str) -> Format:
    return cast(Format, instance(format_targets()[kind]))
