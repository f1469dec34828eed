"""Setting `tensor_parallel`: every matrix of a model is split over the GPUs of one host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from optkit.common.byte_sizes import size_text
from optkit.environment import gpu_memory_bytes, visible_gpus
from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import ModelShape, without_indices
from optkit.model.split_plan import (
    plan_of,
    splits_half_a_tie,
    splits_joined,
    splits_packed,
    splits_stack,
    splits_unsummed,
    style_of,
)
from optkit.model.task import architectures_of
from optkit.model.text_config import text_config, text_type
from optkit.settings.speculative import Speculative
from optkit.stage import Format, Loading, Opening, Setting

MOST_DEVICES = 64
NAMED = 4
"""So many of the numbers that do not divide are named."""
OTHERWISE = {
    "doge": "transformers' plan splits the heads of its attention, and not the numbers that each head has",
    "gemma3n_text": "By transformers' plan its logits are others: those of a tiny model differ by 5%",
    "glm5_next_text": "By transformers' plan its shares do not fit each other: a tiny model fails",
}
"""`model_type` of language models that compute something else if they are split, and how it shows."""
EXCLUDED: dict[type[Setting], str] = {Speculative: "The processes follow one request token by token"}


class TensorParallel(Setting):
    """Split the model over several GPUs of one host by transformers' plan for its architecture.
    Each GPU has a process.

    Packed weights are split by whole groups if they are in compressed-tensors. Layers that round
    their inputs (`fp8`, `smoothquant`) round each share with scales of its own.

    optkit starts the processes when the model is opened and ends them when it is closed. Each holds
    its share of the heads, of the feed-forward columns and of lm_head. They exchange partial sums
    twice in each block by NCCL (on CPUs by gloo). Decoding of few sequences waits for Python more
    than for GPUs, split or not: put `cuda_graphs` beside it. Each process has a graph then, and its
    kernels write partial sums into the memory of the other GPUs.

    Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; plans:
    https://huggingface.co/docs/transformers/perf_infer_gpu_multi
    """

    kind: ClassVar[str] = "tensor_parallel"
    example: ClassVar[str] = "- tensor_parallel: {devices: 2}"
    shorthand: ClassVar[str] = "devices"
    requires: ClassVar[tuple[str, ...]] = ("transformers>=5.17",)
    accepts: ClassVar[frozenset[Format]] = frozenset({Format.CHECKPOINT, Format.QUANTIZED})
    places_weights: ClassVar[bool] = True

    devices: int = Field(ge=2, le=MOST_DEVICES)
    """GPUs, from the session's device on (`cuda` is the first); on a CPU processes."""

    def check(self, shape: ModelShape, device: str, directory: Path | None = None) -> None:
        """Raise StageError for too few GPUs or too small ones, or packed weights that cannot be split.
        An architecture without a plan and sizes that do not divide are refused too.
        """
        if shape.config.get("quantization_config") and not splits_packed(shape):
            raise _packed_weights_error()
        if there := visible_gpus():  # without any, the plan is for another machine
            self.check_devices(device, there)
        architecture = architectures_of(shape.config)
        plan = plan_of(shape)
        if plan is not None and not plan:
            raise no_plan_error(architecture)
        if why := _wrong(shape):
            remedy = "Take it out of the recipe, or use offload"
            raise StageError(f"{architecture} cannot be split", where="tensor_parallel", why=why, remedy=remedy)
        if problems := list(_problems(shape, plan or {}, self.devices)):
            more = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
            fit = [str(count) for count in range(2, MOST_DEVICES + 1) if not any(_problems(shape, plan or {}, count))]
            raise StageError(
                f"{architecture} cannot be split over {self.devices} devices: {'; '.join(problems[:NAMED])}{more}",
                where="tensor_parallel",
                why="Each device gets an equal share",
                remedy=f"Set devices to {' or '.join(fit)}" if fit else "Take it out of the recipe",
            )
        limit, needed = gpu_memory_bytes(device), self.device_bytes(shape)
        if limit is not None and needed > limit:
            raise StageError(
                f"each of {self.devices} devices would hold {size_text(needed)} of weights, and "
                f"{device} has {size_text(limit)}",
                where="tensor_parallel",
                remedy="Use more devices, or `cast: {dtype: bfloat16}`",
            )

    def check_devices(self, device: str, there: int) -> None:
        """Raise StageError if fewer GPUs are `there` than asked for."""
        first = int(device.partition(":")[2] or 0)
        if device != "cpu" and first + self.devices > there:
            raise StageError(
                f"{self.devices} devices were asked for, from {device} on, and there "
                f"{'is' if there == 1 else 'are'} {there} here",
                where="tensor_parallel",
                why="Every device holds a share of each matrix",
                remedy=f"Set devices to at most {there - first}" if there - first > 1 else "Take it out of the recipe",
            )

    def excludes(self, other: Setting, device: str) -> str:
        return next((why for kind, why in EXCLUDED.items() if isinstance(other, kind)), "")

    def open(self, opening: Opening) -> Any:
        """Return a session of several processes; None in each of these, which opens its share.

        Raises StageError for weights that cannot be split.
        """
        import torch

        from optkit.session.parallel_session import ParallelSession
        from optkit.session.splitting import is_joined

        if is_joined():
            return None
        checkpoint = Checkpoint(opening.directory)
        if checkpoint.quantization and not splits_packed(checkpoint.shape):
            raise _packed_weights_error()
        self.check_devices(opening.device, torch.cuda.device_count())
        return ParallelSession(opening, self.devices)

    def loading(self, opening: Opening, checkpoint: Checkpoint, packed: bool) -> Loading:
        """Return how this process reads its share.
        Raises StageError if every process would hold the whole model.
        """
        from optkit.session.splitting import is_split, share_kwargs, take_own_shares_

        def check(model: Any) -> tuple[str, ...]:
            if not is_split(model):
                raise no_plan_error(type(model).__name__)
            take_own_shares_(model)
            return ()

        return Loading(share_kwargs(self.devices), check)

    def device_bytes(self, shape: ModelShape) -> int:
        """Return the bytes of weights on each device, by the sizes on disk.
        They are all of them if the plan is not known.
        """
        plan = plan_of(shape) or {}
        return sum(
            info.size_bytes // (self.devices if _split(name, plan) else 1) for name, info in shape.tensors.items()
        )

    def forecast(self, shape: ModelShape, device: str) -> str:
        """Return e.g. `tensor_parallel: 8.5 GB of weights on each of 2 devices`."""
        return f"tensor_parallel: {size_text(self.device_bytes(shape))} of weights on each of {self.devices} devices"

    def describe(self, device: str) -> str:
        """Return e.g. `tensor_parallel: 2 GPUs by nccl`."""
        return f"tensor_parallel: {self.devices} {'processes by gloo' if device == 'cpu' else 'GPUs by nccl'}"


def _packed_weights_error() -> StageError:
    """Return the error for a model whose layers hold codes."""
    return StageError(
        "packed weights of this format or architecture cannot be split",
        where="tensor_parallel",
        why="Of compressed-tensors alone each device can read whole heads and columns, without a cache of codes",
        remedy="Take tensor_parallel out of the recipe, leave the weights in floats, or serve the artifact "
        "with vLLM's tensor parallelism",
    )


def no_plan_error(architecture: str) -> StageError:
    """Return the error for an architecture that transformers does not know how to split."""
    return StageError(
        f"transformers has no tensor parallel plan for {architecture}",
        where="tensor_parallel",
        why="The plan says which matrices are split by rows and which by columns",
        remedy="Take it out of the recipe, or use offload",
    )


def _wrong(shape: ModelShape) -> str:
    """Return why the shares of a model would not compute what the whole does; empty if they would."""
    if splits_half_a_tie(shape):
        return "transformers' plan splits its embedding of tokens, and not the output layer of the same matrix"
    if tensor := splits_joined(shape):
        return f"transformers joins or cuts up {tensor} while it loads it, and would do so with shares"
    if tensor := splits_stack(shape):
        return f"transformers' plan splits {tensor} as one matrix, and it is a stack of them"
    if splits_unsummed(shape):
        return "transformers' plan splits its experts, and does not add up what the shares give"
    return OTHERWISE.get(text_type(shape.config), "")


def _problems(shape: ModelShape, plan: Mapping[str, str], devices: int) -> Iterator[str]:
    """Yield the numbers that the devices do not divide."""
    config = text_config(shape.config)
    heads = config.get("num_attention_heads")
    for name, value in (("attention heads", heads), ("key heads", config.get("num_key_value_heads", heads))):
        if (
            isinstance(value, int)
            and value % devices
            and any(plan.get(key) == "colwise" for key in plan if key.endswith("k_proj"))
        ):
            yield f"{value} {name}"
    seen: set[str] = set()
    for name, info in shape.tensors.items():
        style = style_of(name, plan)
        generic = without_indices(name)
        if style is None or len(info.shape) != 2 or generic in seen:
            continue
        seen.add(generic)
        by_rows = style.startswith("rowwise")
        size = info.shape[1] if by_rows else info.shape[0]
        if size > 1 and size % devices:  # one scale of all inputs is everybody's
            yield f"{size:,} {'inputs' if by_rows else 'outputs'} of {generic.removesuffix('.weight')}"


def _split(name: str, plan: Mapping[str, str]) -> bool:
    """Whether each device holds only a share of a tensor."""
    style = style_of(name, plan)
    return (
        style is not None
        and not style.startswith("replicated")
        and not (style.startswith("rowwise") and name.endswith(".bias"))
    )
