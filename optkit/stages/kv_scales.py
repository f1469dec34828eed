"""Stage `kv_scales`: scales of a float8 KV cache, measured on a text.
They are stored for vLLM to read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from optkit.common.field_types import BatchSize
from optkit.common.out_of_resources import out_of_memory
from optkit.errors import StageError
from optkit.model.attention import refuse_other_states
from optkit.model.attention_choice import eager_bytes
from optkit.model.calibration_memory import float_bytes, refuse_unreached
from optkit.model.checkpoint import INDEX, Checkpoint
from optkit.model.kv_scales import KEYS, SCHEME, VALUES, attention_layers
from optkit.model.linear_layers import EXPERTS
from optkit.model.shape import ModelShape, TensorInfo
from optkit.model.text_config import text_config
from optkit.model.writer import copy_companions, disk_space_for, link_or_copy
from optkit.source.calibration import Calibration
from optkit.stage import Context, Cost, Format, Report, Transform

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.kernels.kv_cache import RecordingLayer
    from optkit.model.prompts import Prompts

FLOAT8_MAX = 448.0
WITHOUT_GROUPS: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "quantization_status": "compressed",
    "config_groups": {},
    "ignore": [],
}
"""The `quantization_config` of float weights with a quantized KV cache."""


class KvScales(Transform):
    """Store the scales of a float8 (E4M3) KV cache.
    They are the largest key and value of each layer on a text, over 448.

    vLLM then keeps its KV cache in float8 on its own (`kv_cache_scheme` of compressed-tensors), and
    so does optkit. Weights stay as they are, float or packed by compressed-tensors; put this stage
    behind the one that quantizes.
    """

    finds_parts: ClassVar[bool] = True
    kind: ClassVar[str] = "kv_scales"
    example: ClassVar[str] = "- gptq: {bits: 4}\n- kv_scales: {calibration: {dataset: c4}}"
    accepts: ClassVar[frozenset[Format]] = frozenset({Format.CHECKPOINT, Format.QUANTIZED})
    produces: ClassVar[Format] = Format.QUANTIZED
    sees_images: ClassVar[bool] = True

    calibration: Calibration = Calibration(dataset="c4")
    """The text whose keys and values are measured."""
    batch_size: BatchSize = 8
    """Sequences that run through the model at once."""

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Run the text through the whole model, link its weights into `target` and add the scales.

        Raises StageError if the scales would not be read: another format than
        compressed-tensors, scales that are there already, an architecture without k_proj;
        ResourceError without memory.
        """
        started = time.monotonic()
        checkpoint = Checkpoint(source)
        layers = _layers(checkpoint.shape)
        prompts = self.calibration.inputs(source, context.data, context.trust_remote_code)
        with out_of_memory(
            "kv_scales", context.device, "Lower kv_scales.batch_size or kv_scales.calibration.sequence_length"
        ):
            recorded = self._record(checkpoint, prompts, context)
        if len(recorded) != len(layers):
            raise StageError(
                f"{len(layers)} layers have a k_proj, and {len(recorded)} keep keys and values",
                where="kv_scales",
                why="The others keep states, which no scale is for",
                remedy="Take the stage out for this architecture",
            )
        keys, values = ([getattr(layer, f"largest_{kind}") for layer in recorded] for kind in ("key", "value"))
        wrong = next(
            (
                name
                for name, *pair in zip(layers, keys, values, strict=True)
                if not all(0 < each < float("inf") for each in pair)
            ),
            "",
        )
        if wrong:
            raise StageError(
                "its keys or values are 0, NaN or Inf on the calibration text", where=f"kv_scales: {wrong}"
            )
        _write(checkpoint, target, layers, keys, values, link=context.may_link)
        copy_companions(source, target, context.trust_remote_code, _config(checkpoint.config))
        details = {
            "largest_keys": dict(zip(layers, keys, strict=True)),
            "largest_values": dict(zip(layers, values, strict=True)),
            "seconds": round(time.monotonic() - started, 2),
        }
        return Report(changed=len(layers), details=details, calibrated_on=(self.calibration.identity(),))

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return the exact tensors that it leaves.
        The memory is that of the whole model and of one batch.
        """
        refuse_unreached(shape, self.kind)
        layers = _layers(shape)
        tensors = dict(shape.tensors) | {
            f"{layer}.{leaf}": TensorInfo("F32", (1,)) for layer in layers for leaf in (KEYS, VALUES)
        }
        left = ModelShape(config=_config(shape.config), tensors=tensors)
        widest = max(max(info.shape) for name, info in shape.tensors.items() if shape.block(name) and info.shape)
        needed = shape.size_bytes + self.batch_size * self.calibration.sequence_length * widest * 4 * float_bytes(shape)
        needed += eager_bytes(shape.config, self.batch_size, self.calibration.sequence_length)
        on_gpu = device.startswith("cuda")
        largest = max(info.size_bytes for info in shape.tensors.values())
        ram = largest if on_gpu else needed  # tensor by tensor
        return Cost(disk_bytes=left.size_bytes, ram_bytes=ram, gpu_bytes=needed if on_gpu else 0), left

    def _record(self, checkpoint: Checkpoint, prompts: Tensor | Prompts, context: Context) -> list[RecordingLayer]:
        import torch

        from optkit.kernels.kv_cache import recording_cache
        from optkit.kernels.open_packed import load_packed
        from optkit.kernels.quant_methods import quantized_layers
        from optkit.model.carried_state import check_keys_and_values
        from optkit.model.empty_model import stored_dtype
        from optkit.model.prompts import in_batches, placed, refuse_images

        quantized = quantized_layers(checkpoint)
        if checkpoint.quantization and not quantized:
            raise StageError(
                "the weights are in a form that optkit does not open itself",
                where="kv_scales",
                remedy="Calibrate with its maker",
            )
        dtype = stored_dtype(checkpoint)
        model, _ = load_packed(
            checkpoint, quantized or {}, context.device, dtype, context.progress, context.trust_remote_code
        )
        refuse_images(model, prompts, "kv_scales")
        check_keys_and_values(model, "kv_scales")
        cache, layers = recording_cache(model.config, "kv_scales")
        with context.progress.task("kv_scales", len(prompts), "sequences") as task, torch.no_grad():
            for rows, inputs in in_batches(prompts, self.batch_size):
                model.base_model(**placed(inputs, context.device, dtype), past_key_values=cache, use_cache=True)
                task.advance(rows.stop - rows.start)
        return layers


def _layers(shape: ModelShape) -> list[str]:
    """Return the attention layers that get scales. Raises StageError if nothing would read them."""
    quantization = shape.config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method not in (None, "compressed-tensors"):
        raise StageError(
            f"the weights are stored in the format {method}",
            where="kv_scales",
            why="vLLM reads the scales of a KV cache from a quantization_config of compressed-tensors",
            remedy="Set format: compressed-tensors in the stage that quantizes",
        )
    if quantization.get("kv_cache_scheme"):
        raise StageError(
            "the model has scales for its KV cache already",
            where="kv_scales",
            remedy="Take the stage out of the recipe",
        )
    layers = attention_layers(shape)
    if not layers:
        raise StageError(
            "no layer has a k_proj or qkv_proj",
            where="kv_scales",
            why="vLLM finds the scales by the names of attention layers like those of Llama",
            remedy="Take the stage out of the recipe for this architecture",
        )
    refuse_other_states(shape.config, "kv_scales", "States have no scales", "Take the stage out of the recipe")
    text = text_config(shape.config)
    unread = {
        "its config.json has no num_key_value_heads": "num_key_value_heads" not in text,
        "its heads differ from block to block": bool(text.get("per_layer_config")),
        "its resampler has keys of its own": any("resampler" in name for name in shape.tensors),
        "its experts are floats": not quantization and any(EXPERTS in name for name in shape.tensors),
    }
    if why := next((why for why, is_so in unread.items() if is_so), ""):
        raise StageError(
            f"transformers would not open {text.get('model_type')} with scales for its KV cache",
            where="kv_scales",
            why=f"compressed-tensors, which reads them, fails: {why}",
            remedy="Put the stage behind one that quantizes the experts" if "experts" in why else "Take the stage out",
        )
    return layers


def _config(config: Mapping[str, Any]) -> dict[str, Any]:
    quantization = config.get("quantization_config") or WITHOUT_GROUPS
    return {**config, "quantization_config": {**quantization, "kv_cache_scheme": dict(SCHEME)}}


def _write(
    checkpoint: Checkpoint, target: Path, layers: list[str], keys: list[float], values: list[float], *, link: bool
) -> None:
    """Link or copy the files with the weights into `target` as shards.
    One more has the scales; the index has all.
    """
    import torch
    from safetensors.torch import save_file

    scales = {f"{layer}.{KEYS}": key for layer, key in zip(layers, keys, strict=True)}
    scales |= {f"{layer}.{VALUES}": value for layer, value in zip(layers, values, strict=True)}
    files = sorted(set(checkpoint.files.values()))
    shards = {
        file: f"model-{number:05d}-of-{len(files) + 1:05d}.safetensors" for number, file in enumerate(files, start=1)
    }
    for file, shard in shards.items():
        link_or_copy(file, target / shard, link=link)
    last = f"model-{len(files) + 1:05d}-of-{len(files) + 1:05d}.safetensors"
    tensors = {name: torch.tensor([largest / FLOAT8_MAX], dtype=torch.float32) for name, largest in scales.items()}
    with disk_space_for(target / last, 4 * len(tensors)):
        save_file(tensors, target / last, metadata={"format": "pt"})
    weight_map = {name: shards[file] for name, file in checkpoint.files.items()} | dict.fromkeys(tensors, last)
    index = {
        "metadata": {"total_size": checkpoint.shape.size_bytes + 4 * len(tensors)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    with disk_space_for(target / INDEX, 100 * len(weight_map)):
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
