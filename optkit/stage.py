"""What a stage is: one frozen class whose fields are its YAML keys, with one method.

A `Transform` reads a model directory and fills another; a `Setting` changes no weights and is applied each time
that the artifact is opened. Nothing live passes from one stage to the next. No stage module imports torch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator

from optkit.common.frozen import Frozen
from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.cost import Cost as Cost
from optkit.model.formats.base import Format as Format
from optkit.model.shape import ModelShape
from optkit.model.task import Task
from optkit.progress import Progress, SilentProgress
from optkit.source.calibration import Calibration
from optkit.source.text_place import TextPlace
from optkit.source.token_counts import TokenCounts


@dataclass(frozen=True)
class Context:
    """What a stage gets from outside its own fields: where to run, the seed, and whom to tell."""

    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:1`."""
    seed: int = 0
    progress: Progress = field(default_factory=SilentProgress)
    data: Path | None = None
    """Directory with local copies of data sets, if the user named one."""
    trust_remote_code: bool = False
    """Whether the recipe allows the code that comes with its model; part of the model's key."""
    origin: Path | None = None
    """Directory of the model that the recipe starts from, for stages with `reads_origin`; every
    step's key stands on its key.
    """
    workspace: Path | None = None
    """Directory, perhaps not there yet, whose files outlive a run that fails or is killed:
    checkpoints of a training, finished blocks. It belongs to this step alone and goes with its end."""
    may_link: bool = False
    """A stage may link the files of its source: they are the store's, not the user's or the hub's."""


@dataclass(frozen=True)
class Report:
    """What a transform did.
    It has counts of modules, the skipped ones with the reason, and numbers worth keeping.
    """

    changed: int
    skipped: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    """JSON values, e.g. `{"losses": {"model.layers.0.mlp.up_proj": 0.0021}}`."""
    notes: tuple[str, ...] = ()
    """What whoever deploys the model must know, one sentence each; shown with the scorecard's
    notes.
    """
    calibrated_on: tuple[Mapping[str, str], ...] = ()
    """The texts that shaped the weights, as `TextSource.identity()` gives them; evals refuse them."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Tensors or modules of the source that are not in what it leaves -> the reason. A tensor that is
    lost otherwise is an error."""


class Stage(Frozen):
    """A step of a recipe. `version` is raised when equal fields begin to give different output."""

    kind: ClassVar[str] = ""
    """How recipes, messages and scorecards call it; left out, the name of its entry point."""
    example: ClassVar[str] = ""
    """What a recipe says, as YAML: the entry, after those that it needs."""
    version: ClassVar[int] = 1
    requires: ClassVar[tuple[str, ...]] = ()
    """Packages beyond optkit's own dependencies, as given to `pip install`, e.g.
    `("bitsandbytes>=0.50",)`.

    Distributions of which any will do are one string: `"onnxruntime>=1.22 |
    onnxruntime-gpu>=1.22"`, the one to install first.
    """

    for_tasks: ClassVar[frozenset[Task]] = frozenset({Task.GENERATION})
    """The models that it knows how to change; a recipe for another one is refused before anything
    runs.
    """

    def needs(self) -> tuple[str, ...]:
        """Return the packages of `requires`, and those that these fields need beside them."""
        return self.requires

    @classmethod
    def lacking(cls) -> tuple[str, str] | None:
        """Return what this machine lacks for it beside packages, and the command that installs it."""
        return None

    def made_with(self) -> dict[str, Any]:
        """Return what decides the result beside version and fields, as JSON for the key; empty if nothing does."""
        return {}


class Transform(Stage):
    """A stage that reads a model directory and fills another."""

    accepts: ClassVar[frozenset[Format]] = frozenset({Format.CHECKPOINT})
    produces: ClassVar[Format] = Format.CHECKPOINT
    """What it leaves, of a checkpoint with float weights if that hangs on what it reads (`leaves`)."""
    reads_origin: ClassVar[bool] = False
    """Needs the model that the recipe starts from beside its input: `Context.origin`."""
    unpacks: ClassVar[bool] = False
    """Reads weights by `Checkpoint` alone, which makes floats of packed ones when they are read."""
    finds_parts: ClassVar[bool] = False
    """Finds blocks and layers by the names of tensors: refused for a model that has them by others."""
    sees_images: ClassVar[bool] = False
    """Its calibration may be prompts with images (`Calibration.inputs`)."""
    shows_experts: ClassVar[bool] = False
    """Its calibration may show every token to every expert."""

    @model_validator(mode="after")
    def _read_text_unless_seeing(self) -> Self:
        for name, part in vars(self).items():
            if isinstance(part, Calibration) and (why := part.unread_by(self.kind, self)):
                raise ValueError(f"{name}.{why}. Leave it out.")
        return self

    @property
    def grid(self) -> Mapping[str, Any]:
        """What weights are rounded to, in the words of stages that prepare them; empty if nothing is said."""
        return {}

    @property
    def prepares(self) -> Mapping[str, Any]:
        """The `grid` that weights are prepared for, of the next stage that says one; empty for any."""
        return {}

    @classmethod
    def leaves(cls, given: Format) -> Format:
        """Return the format that it leaves of one that it accepts."""
        return cls.produces

    def begin(self, device: str) -> None:
        """Begin what nothing waits for, once torch is there, while other libraries are imported."""

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Read the model in `source`, leave the changed one in the empty directory `target`.

        Raises an `OptkitError` for everything that a user can cause: no package, no match, NaN weights, no memory.
        """
        raise NotImplementedError

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return what the step will need and the shape of the model that it leaves.
        It needs the shape of its input, and no torch.

        Without a method of its own: the same tensors again, and at most all of them in memory.
        """
        return Cost(disk_bytes=shape.size_bytes, ram_bytes=shape.size_bytes), shape

    def predict_beside(self, shape: ModelShape, device: str, origin: ModelShape) -> tuple[Cost, ModelShape]:
        """Return what `predict` does, for stages with `reads_origin`.
        `origin` is the shape of the model that the recipe starts from.
        """
        return self.predict(shape, device)

    def check_texts(self, place: TextPlace) -> None:
        """Refuse, before any stage runs, texts that are too short for it, and sequences that are too long.

        Without a method of its own: its calibration, and those of the stages among its fields.
        Raises StageError, SourceError.
        """
        for part in vars(self).values():
            if isinstance(part, Transform):
                part.check_texts(place)
            elif isinstance(part, Calibration) and part.images is not None:
                part.check_images(place, part.samples, part.limit)
            elif isinstance(part, Calibration) and part.input is not None:
                part.check_task(place)
                if part.is_local(place.data):
                    part.first_examples(place.data, part.samples)
            elif isinstance(part, Calibration):
                part.check_task(place)
                counts = TokenCounts(place.tokenizer, place.data, place.counts, place.trust_remote_code)
                counts.check_calibration(part, place.positions)


@dataclass(frozen=True)
class Loading:
    """How transformers reads weights that a setting spreads over devices or processes."""

    kwargs: Mapping[str, Any]
    """Keyword arguments for `from_pretrained` beside those of `Setting.load_kwargs`."""
    finish: Callable[[Any], Sequence[str]] = lambda model: ()
    """Completes the model that was read, and returns notes for the scorecard."""


@dataclass(frozen=True)
class Opening:
    """A model that is being opened, as the hooks of its settings see it."""

    directory: Path
    settings: tuple[Setting, ...] = ()
    device: str = "cpu"
    dtype: str | None = None
    """Torch name of the float dtype to compute in; None: that of the checkpoint."""
    trust_remote_code: bool = False
    progress: Progress = field(default_factory=SilentProgress)

    @cached_property
    def load_kwargs(self) -> dict[str, Any]:
        """What the settings give to `from_pretrained`, the last word of each counting."""
        return {name: value for each in self.settings for name, value in each.load_kwargs(self.device).items()}


class Setting(Stage):
    """A stage that changes no weights: recorded in the artifact and applied when it is opened.

    `optkit.session.open_session` asks its hooks in this order: `open`, `load_kwargs`, `loading`,
    `on_load`, `cache`, `computing`, `on_open`.
    """

    accepts: ClassVar[frozenset[Format]] = frozenset({Format.CHECKPOINT, Format.QUANTIZED, Format.ADAPTED})
    """What it can be applied to when it is opened; the built-in ones know torch models alone."""
    exact: ClassVar[bool] = True
    """Leaves what the model computes as it is, but for the order of rounding."""
    places_weights: ClassVar[bool] = False
    """Says where weights lie and nothing else: if the unmodified model has no room alone, it is
    measured with it too.
    """

    def check(self, shape: ModelShape, device: str, directory: Path | None = None) -> None:
        """Refuse what the model, the device or the installed packages cannot honour.
        It is asked before anything runs, without torch.

        `shape` is that of the model which is opened, `directory` that of the one which the recipe
        starts from, if it is here already. Raises StageError, MissingPackageError.
        """

    def fits(self, format: Format) -> bool:
        """Say whether it can be applied to a format: to any checkpoint if it accepts one."""
        return any(each == format or (each.is_checkpoint and format.is_checkpoint) for each in self.accepts)

    def excludes(self, other: Setting, device: str) -> str:
        """Return why it cannot be honoured beside another setting, without a full stop; empty if it can."""
        return ""

    def foreign_code(self) -> str:
        """Return, in words, the code of others that it has loaded when a model is opened; empty if none."""
        return ""

    def opened_dtype(self) -> str | None:
        """Return the torch name of the float dtype that the model is opened in; None if the setting is silent."""
        return None

    def computing(self, device: str) -> AbstractContextManager[Any]:
        """Return a context in which every call of the model runs."""
        return nullcontext()

    def changes_products(self) -> bool:
        """Say whether `computing` changes what comes out of a call.
        Only torch's own operators will do then.
        """
        return type(self).computing is not Setting.computing

    def open(self, opening: Opening) -> Any:
        """Return the session if the setting opens the model itself, e.g. in other processes.
        None if this process opens it.
        """
        return None

    def load_kwargs(self, device: str) -> dict[str, Any]:
        """Return keyword arguments for `from_pretrained` or `from_config`.
        For example `{"attn_implementation": "sdpa"}`.

        A setting of ONNX models returns those of `optkit.session.onnx_session.OnnxSession`.
        """
        return {}

    def loading(self, opening: Opening, checkpoint: Checkpoint, packed: bool) -> Loading | None:
        """Return how transformers spreads a checkpoint's weights; None if the setting is silent.

        `packed`: its weights or its KV cache are codes, which optkit reads itself and nothing can
        spread. `opening.dtype` is known here. Raises StageError.
        """
        return None

    def on_load(self, model: Any, device: str) -> Any:
        """Return the opened torch model, changed as the setting says."""
        return model

    def cache(self, model: Any, scales: Any) -> Any:
        """Return what makes an opened torch model an empty KV cache, a transformers `Cache`.
        None if the setting does not say.

        `scales` are those of a float8 cache that the checkpoint holds
        (`optkit.model.kv_scales.KvScales`), or None.
        """
        return None

    def on_open(self, session: Any) -> Any:
        """Return the opened session of a model for one of `tasks`, changed as the setting says.

        A `TorchSession` learns here who computes its decode steps (`decode_with`), and who proposes
        tokens that it checks (`speculate_with`).
        """
        return session

    def step_mode(self, device: str) -> str:
        """Return what makes one call of a decode step's operations, e.g. `reduce-overhead`; empty if nothing."""
        return ""

    def applies(self, device: str) -> bool:
        """Say whether a model on this device is other than without the setting."""
        return True

    def forecast(self, shape: ModelShape, device: str) -> str:
        """Return one line for the plan: what opening a model will need, e.g. of each GPU; empty if nothing new."""
        return ""

    def describe(self, device: str) -> str:
        """Return one line for the scorecard: what is in force on this device.
        For example `compile: off on cpu (devices: cuda)`.
        """
        return f"{self.kind}: {(self.model_dump(mode='json') or 'on') if self.applies(device) else f'off on {device}'}"


def exclusion(
    settings: Sequence[Setting], device: str, name: Callable[[int], str] | None = None
) -> tuple[int, StageError] | None:
    """Return the first setting, by its place, that another before it excludes on a device, and why.
    Their order does not matter; `name` says how the other one is called in the message.
    """
    for (first, one), (second, other) in combinations(enumerate(settings), 2):
        if why := one.excludes(other, device) or other.excludes(one, device) or _both_place(one, other):
            what = f"{other.kind} and {name(first) if name else one.kind} exclude each other"
            return second, StageError(what, where=other.kind, why=why, remedy="Take one of the two out")
    return None


def _both_place(one: Setting, other: Setting) -> str:
    return "Each of the two says itself where every weight lies" if one.places_weights and other.places_weights else ""
