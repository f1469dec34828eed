"""Open a checkpoint, packed or not, with torch or transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import distributed
from transformers import PreTrainedModel

from optkit.common.out_of_resources import memory_errors
from optkit.errors import OptkitError, StageError
from optkit.kernels.cpu.decoding import StepDecoder, step_decoder
from optkit.kernels.kv_cache import CacheFactory, coded_cache, stored_codes
from optkit.kernels.low_rank import apply_adapter_
from optkit.kernels.open_packed import load_packed
from optkit.kernels.quant_methods import quantized_layers
from optkit.model.adapter import read_adapter
from optkit.model.attention_choice import eager_note
from optkit.model.carried_state import check_keys_and_values
from optkit.model.checkpoint import Checkpoint
from optkit.model.checkpoint_share import CheckpointShare
from optkit.model.empty_model import stored_dtype
from optkit.model.kv_scales import KvScales, split_kv_scales
from optkit.model.memory import return_freed_memory
from optkit.model.state_kernels import silence_fallbacks_, state_kernels_note
from optkit.model.task import ENCODER_DECODERS, Task, task_of
from optkit.session.loading import load_by_transformers
from optkit.session.splitting import add_up_, is_joined
from optkit.session.torch_encoder import TorchEncoder
from optkit.session.torch_encoder_decoder import TorchEncoderDecoder
from optkit.session.torch_session import TorchSession
from optkit.source.quiet import quiet_transformers
from optkit.stage import Opening, Setting

REMEDY = "Open it on a device with more memory, or in a smaller dtype"


def open_torch(opening: Opening) -> TorchSession | TorchEncoder | TorchEncoderDecoder:
    """Open a checkpoint with torch; see `open_session`."""
    checkpoint, scales = split_kv_scales(Checkpoint(opening.directory))
    asked = opening.dtype or next(
        (name for setting in reversed(opening.settings) if (name := setting.opened_dtype())), None
    )
    dtype = _dtype(asked) if asked else stored_dtype(checkpoint)
    opening = replace(opening, dtype=str(dtype).removeprefix("torch."))
    device, task = opening.device, task_of(checkpoint.config) or Task.GENERATION
    with memory_errors(f"while the model was opened on {device}", str(opening.directory), REMEDY), quiet_transformers():
        model, notes, by_optkit = _load(opening, checkpoint, scales, dtype)
        for setting in opening.settings:
            model = setting.on_load(model, device)
        new_cache, note = _cache(model, opening.settings, scales) if task is Task.GENERATION else (None, [])
    return_freed_memory()
    if task in ENCODER_DECODERS:
        return TorchEncoderDecoder(model, opening, notes)
    if task is not Task.GENERATION:
        return TorchEncoder(model, opening, notes, task)
    decoder, left = _cpu_decoder(model, opening, new_cache) if by_optkit else (None, [])
    session = TorchSession(model, opening, (*notes, *note, *left), new_cache)
    if decoder:
        session.decode_with(decoder)
    return session


def _load(
    opening: Opening, checkpoint: Checkpoint, scales: KvScales | None, dtype: torch.dtype
) -> tuple[PreTrainedModel, list[str], bool]:
    """Return the model, notes, and whether layers compute with optkit's kernels."""
    packed = bool(checkpoint.quantization or scales)
    found = [setting.loading(opening, checkpoint, packed) for setting in opening.settings]
    spread = next((each for each in found if each), None)
    if packed and is_joined():
        checkpoint = CheckpointShare(checkpoint, distributed.get_rank(), distributed.get_world_size())
    quantized = quantized_layers(checkpoint)
    if quantized or (scales and not checkpoint.quantization):
        model, notes = load_packed(
            checkpoint,
            quantized or {},
            opening.device,
            dtype,
            opening.progress,
            opening.trust_remote_code,
            **opening.load_kwargs,
        )
        if isinstance(checkpoint, CheckpointShare):
            add_up_(model, checkpoint)
    else:
        model, notes = load_by_transformers(opening, checkpoint, dtype, spread)
    if checkpoint.quantization and (adapter := read_adapter(checkpoint.directory)):
        notes = [*notes, apply_adapter_(model, adapter, opening.device, dtype)]
    silence_fallbacks_(checkpoint.config)
    told = [*eager_note(checkpoint.config, opening.load_kwargs), *state_kernels_note(checkpoint.config)]
    return model, [*notes, *told], bool(quantized)


def _cpu_decoder(
    model: PreTrainedModel, opening: Opening, new_cache: CacheFactory | None
) -> tuple[StepDecoder | None, list[str]]:
    """Return optkit's decoder for CPUs and notes.
    Nothing may be asked of decode steps but that they are the model's.
    """
    changed = any(setting.changes_products() for setting in opening.settings)
    plain = (
        opening.device == "cpu" and not is_joined() and new_cache is None and not _is_compiled(model) and not changed
    )
    return step_decoder(model) if plain else (None, [])


def _is_compiled(model: PreTrainedModel) -> bool:
    return getattr(model, "_compiled_call_impl", None) is not None


def _cache(
    model: PreTrainedModel, settings: Sequence[Setting], scales: KvScales | None
) -> tuple[CacheFactory | None, list[str]]:
    """Return what makes the KV cache; None for transformers' own.
    The last setting that says decides, else the scales in the checkpoint.
    """
    if scales:
        check_keys_and_values(model, "kv_scales")
    asked = [(setting.kind, factory) for setting in settings if (factory := setting.cache(model, scales)) is not None]
    stored = coded_cache(model.config, stored_codes(scales), "kv_scales") if scales and not asked else None
    where, new_cache = asked[-1] if asked else ("kv_scales", stored)
    if new_cache and _is_compiled(model):
        raise StageError(
            "a compiled step cannot use a KV cache of codes",
            where=where,
            why="It grows with every token, and the compiled step needs a cache as long as the request from the start",
            remedy="Take compile or the quantized KV cache out of the recipe",
        )
    return new_cache, ["kv cache: float8, with the scales of the checkpoint"] if stored else []


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptkitError(f"'{name}' is no float dtype of torch", remedy="Use float32, bfloat16 or float16")
    return found
