"""What a stage takes in memory that goes through a model block by block, by shapes alone. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from optkit.common.grouping import grouped
from optkit.environment import gpu_memory_bytes
from optkit.errors import StageError
from optkit.model.attention_choice import eager_bytes
from optkit.model.cost import Cost
from optkit.model.expected_tensors import FLOATS
from optkit.model.kept_blocks import writes_states
from optkit.model.linear_layers import EXPERTS, Layer, by_block, layers_of, stacks
from optkit.model.memory import is_little_of_gpu
from optkit.model.output_layer import HEAD
from optkit.model.read_weights import Read, reads_of
from optkit.model.reading_ahead import AHEAD_BYTES
from optkit.model.shape import DTYPE_BITS, ModelShape
from optkit.model.task import architectures_of
from optkit.model.text_config import text_config, text_type
from optkit.model.writer import SHARD_BYTES

REMEDY = "Take a stage without calibration: rtn, fp8, mx, nf4, or prune by magnitude"
STREAMS = "each block passes on several streams of hidden states"
UNCHAINED = {
    "fsmt": "its hidden states lie token by token, each with its batch",
    "deepseek_v4": STREAMS,
    "gemma3n_text": STREAMS,
    "hy_v4": STREAMS,
    "led": "it pads inputs to a multiple of its window",
    "pegasus_x": "it pads inputs to a multiple of its window",
    "prophetnet": "its decoder passes on a stream of hidden states for each token that it predicts ahead",
    "rwkv": "it reads weights of all blocks at each call",
    "xlm": "the layers of a block are in lists of their own",
    "xlnet": "its hidden states lie token by token, each with its batch",
}
"""`model_type` of those whose blocks cannot be run one by one -> why."""
ENTERING = 4
"""Hidden states of a batch that are there while calls of blocks are recorded."""
HESSIANS_AT_ONCE = 1 << 34
"""Most bytes of the Hessians of a block's experts; for those of others the text runs through it again."""


class Text(Protocol):
    """What is known of a text that a stage is calibrated on."""

    @property
    def size(self) -> tuple[int, int]:
        """Windows, and tokens of each."""

    @property
    def experts(self) -> str:
        """Whether `all` experts see every token."""

    @property
    def images(self) -> Any:
        """None without them."""


@dataclass(frozen=True)
class Work:
    """Bytes that a stage takes on the device that computes, beside what waits to be written."""

    block: int
    """Most of them while it works on a block or a layer."""
    entering: int = 0
    """In front of the first block."""
    states: int = 0
    """Those of the hidden states of a text, which are kept on the disk with finished blocks if `writes_states`, and
    are in main memory if they are no little part of a GPU.
    """
    streams: int = 1
    """Models that have hidden states of it."""
    held: int = 0
    """In main memory, whatever computes."""
    streamed: bool = False
    """What it makes waits to be written as soon as it is made, and not when its block is done."""
    alone: bool = False
    """Nothing is read or copied beside the work of a GPU."""
    processes: int = 1
    """That do it together: each holds what it works on, one of them what waits to be written."""

    def cost(self, shape: ModelShape, left: ModelShape, device: str) -> Cost:
        """Return what turning one model into another costs; some blocks are written before what is outside."""
        made = left.size_bytes - (0 if self.streamed else left.block_bytes)
        waiting, outside = min(SHARD_BYTES, made), 0
        inside, beyond = (
            max((info.size_bytes for name, info in shape.tensors.items() if bool(shape.block(name)) is here), default=0)
            for here in (True, False)
        )
        entering, block, held, gpu = self.entering, self.block, self.held, 0
        share = self.states // self.processes
        if device.startswith("cuda"):
            copied = min(AHEAD_BYTES, made) if self.streamed and not self.alone else 0
            moved = waiting_in_main_memory(share, device)
            held += moved * self.streams * self.processes
            gpu = max(entering - moved, block - moved * self.streams) + copied
            entering, block = 0, 0
            # a shard is written while the next one is made; blocks are copied behind each other
            beside, outside = SHARD_BYTES if self.streamed else 2 * left.block_bytes, left.outside_bytes
            waiting = min(outside + SHARD_BYTES + beside, made)
            # what is read ahead, and what a GPU is given meanwhile
            ahead = min(AHEAD_BYTES + 2 * inside, shape.size_bytes) if self.streamed else shape.pinned_bytes
            inside += 0 if self.alone else ahead
        needed = max(
            outside + self.processes * max(entering, beyond),
            waiting + held + self.processes * max(block, inside, 0 if outside else beyond),
            min(SHARD_BYTES, left.size_bytes),
        )
        # states behind a block are written before those behind the one before it go
        states = 2 * self.states if writes_states(share, device.startswith("cuda")) else 0
        kept = 0 if self.streamed else left.size_bytes - left.outside_bytes + states
        return Cost(disk_bytes=left.size_bytes, kept_bytes=kept, ram_bytes=needed, gpu_bytes=gpu)


def waiting_in_main_memory(states: int, device: str) -> int:
    """Return how many of the bytes of hidden states a GPU leaves there: all or none."""
    return 0 if is_little_of_gpu(states, gpu_memory_bytes(device)) else states


def less_memory(stage: str) -> str:
    """Return what to do if a stage that reads a text has too little memory."""
    remedy = f"Lower {stage}.batch_size, {stage}.calibration.samples or {stage}.calibration.sequence_length"
    return f"{remedy}: `optkit plan` says what that gains"


def calibrated_work(
    shape: ModelShape,
    layers: Mapping[str, Layer],
    text: Text,
    batch: int,
    sums: int,
    work: int,
    devices: int = 1,
    activation: int = 4,
) -> Work:
    """Return what it takes to run a text through the blocks. `batch`: sequences at once; `sums`: bytes
    kept of the inputs of a block's layers; `work`: of changing its layers, one after another; `devices`
    have a share of the text each; `activation`: bytes of one.

    Raises StageError as `refuse_unchained` does.
    """
    hidden, running = calibration_bytes(shape, layers, text, batch, devices, activation)
    head = shape.tensors.get(f"{HEAD}.weight")
    outside = shape.outside_bytes - (head.size_bytes if head else 0)
    block = hidden + shape.block_bytes + sums + max(running, work)
    entering = hidden + outside + int(ENTERING * hidden * min(1, batch * devices / text.size[0]))
    return Work(block, entering, devices * hidden, processes=devices)


def hessian_turns(inputs: Mapping[str, int]) -> list[list[str]]:
    """Return layers of a block, name -> inputs, in turns whose Hessians there is room for, each expert whole.
    What feeds the experts comes last, so that all of them see what they would see in one turn.
    """
    turns, room = [list[str]()], HESSIANS_AT_ONCE
    for expert in grouped((name for name in inputs if EXPERTS in name), _expert_of).values():
        size = _bytes_of(expert, inputs)
        if size > room and turns[-1]:
            turns.append([])
            room = HESSIANS_AT_ONCE
        turns[-1] += expert
        room -= size
    if len(turns) == 1:
        return [list(inputs)]
    turns[-1] += [name for name in inputs if EXPERTS not in name]
    return turns


def _expert_of(name: str) -> str:
    holder, _, inside = name.rpartition(EXPERTS)
    return f"{holder}{EXPERTS}{inside.partition('.')[0]}"


def _bytes_of(names: Iterable[str], inputs: Mapping[str, int]) -> int:
    return sum(4 * inputs[stack[0]] ** 2 for stack in stacks(names))


def hessian_bytes(shape: ModelShape, layers: Mapping[str, Layer], at_once: bool) -> int:
    """Return the bytes of the Hessians that are held together, in float32; layers with one input share one.
    `at_once`: all of a block are.
    """
    inputs = {name: layer.inputs for name, layer in layers.items()}
    turns = by_block(shape, layers)
    if not at_once:
        turns = [turn for block in turns for turn in hessian_turns({name: inputs[name] for name in block})]
    return max((_bytes_of(turn, inputs) for turn in turns), default=0)


def code_bytes(shape: ModelShape, layers: Mapping[str, Layer]) -> int:
    """Return the bytes of a block's codes before they are packed: one for a weight, and an eighth for scales."""
    weights = (sum(layers[name].outputs * layers[name].inputs for name in block) for block in by_block(shape, layers))
    return max(weights) * 9 // 8


def waiting_bytes(shape: ModelShape, layers: Mapping[str, Layer], text: Text) -> int:
    """Return the bytes of a text's activations that wait within a block, in float32: the residual stream
    and the inputs of its widest layer.
    """
    widest, (samples, length) = max(layer.inputs for layer in layers.values()), text.size
    return 4 * samples * length * ((shape.width or widest) + widest)


def calibration_bytes(
    shape: ModelShape, layers: Mapping[str, Layer], text: Text, batch: int, devices: int = 1, activation: int = 4
) -> tuple[int, int]:
    """Return the bytes of the hidden states of a device's share of a text, as in the file, and of a
    block's activations, of which each takes `activation`. `batch`: sequences that run at once.

    Raises StageError as `refuse_unchained` does, and if no expert could see all tokens.
    """
    refuse_unchained(shape, "calibration")
    if text.experts == "all" and (why := _why_unseen(shape)):
        raise no_such_experts("calibration.experts", why)
    width = shape.width or min(layer.inputs for layer in layers.values())
    element = float_bytes(shape)
    widest = max(layer.inputs for layer in layers.values())
    samples, length = text.size
    samples = -(-samples // devices)
    # an encoder that hears has as many, whatever it hears
    length, sequences = max(length, shape.config.get("max_source_positions") or 0), min(batch, samples)
    running = activation * sequences * length * (6 * width + 3 * widest) + eager_bytes(shape.config, sequences, length)
    beside = (shape.config.get("vision_config") or {}).get("deepstack_visual_indexes") if text.images else None
    return (1 + len(beside or ())) * samples * length * width * element, running


def summed_bytes(shape: ModelShape, device: str) -> int:
    """Return the bytes of an activation where Hessians are summed: GPUs take those of a bfloat16 model as they are,
    CPUs make float32 of them.
    """
    dtypes = {info.dtype for info in shape.tensors.values()}
    return 2 if device.startswith("cuda") and dtypes == {"BF16"} else 4


def float_bytes(shape: ModelShape) -> int:
    """Return the bytes of the widest floats of a model, in which it computes."""
    return max(DTYPE_BITS[info.dtype] // 8 for info in shape.tensors.values() if info.dtype in FLOATS)


def _why_unseen(shape: ModelShape) -> str:
    """Return why no expert could see all tokens, an empty text if they could."""
    if any(EXPERTS in name for name in layers_of(shape)):
        own = Read.REPLACED in reads_of(shape.config)("")
        return "transformers opens its experts as modules that give each its own tokens alone" if own else ""
    joined = next((f"{name} {[*each.shape]}" for name, each in shape.tensors.items() if EXPERTS in name), "")
    return f"The checkpoint stores its experts joined ({joined})" if joined else "It is dense"


def no_such_experts(where: str, why: str) -> StageError:
    """Return what to raise if all experts shall see all tokens, and a model has none that could."""
    what = "the model has no experts that could see all tokens"
    return StageError(what, where=where, why=why, remedy="Leave it out")


def refuse_unchained(shape: ModelShape, where: str) -> None:
    """Raise StageError if blocks cannot be run one by one, or a text does not reach all of them."""
    if why := UNCHAINED.get(text_type(shape.config)):
        raise StageError(
            f"the blocks of {architectures_of(shape.config)} cannot be run one by one",
            where=where,
            why=f"{why[0].upper()}{why[1:]}",
            remedy=REMEDY,
        )
    refuse_unreached(shape, where)


def refuse_unreached(shape: ModelShape, where: str) -> None:
    """Raise StageError if a text does not run through all blocks of the model."""
    if blocks := text_config(shape.config).get("cross_attention_layers"):
        raise StageError(
            f"{len(blocks):,} of {shape.block_count:,} blocks of {architectures_of(shape.config)} run for images alone",
            where=where,
            why="Text does not reach them",
            remedy=REMEDY,
        )
