"""Open a model directory: ONNX with ONNX Runtime; a plain checkpoint, packed weights, or what
transformers itself can open with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import transformers
from transformers import PreTrainedModel

from optkit.common.limits import is_out_of_memory
from optkit.errors import MissingPackageError, OptkitError, SourceError, StageError
from optkit.kernels.cpu.decoding import step_decoder
from optkit.kernels.formats import quantized_layers
from optkit.kernels.kv_cache import CacheFactory, coded_cache, stored_codes
from optkit.kernels.load import load_packed
from optkit.kernels.low_rank import apply_adapter_
from optkit.model.adapter import read_adapter
from optkit.model.attention_choice import attention_options, eager_note
from optkit.model.carried_state import check_keys_and_values
from optkit.model.checkpoint import Checkpoint
from optkit.model.kv_scales import KvScales, split_kv_scales
from optkit.model.memory import return_freed_memory
from optkit.model.names import is_ignorable
from optkit.model.pooling import pooling_for
from optkit.model.skeleton import stored_dtype
from optkit.model.task import Task, loader_of, task_of
from optkit.progress import Progress, SilentProgress
from optkit.session.early_exit import EarlyExit
from optkit.session.memory import memory_errors
from optkit.session.offloading import Offloading
from optkit.session.parallel_session import ParallelSession
from optkit.session.speculation import DraftModel, PromptLookup, Proposer
from optkit.session.splitting import check_split, is_joined, share_kwargs
from optkit.session.torch_encoder import TorchEncoder
from optkit.session.torch_session import TorchSession
from optkit.settings.cuda_graphs import CudaGraphs
from optkit.settings.offload import Offload, packed_weights_error
from optkit.settings.speculative import Speculative, check_tokens
from optkit.settings.tensor_parallel import TensorParallel
from optkit.settings.tensor_parallel import packed_weights_error as unsplittable_error
from optkit.source.quiet import quiet_accelerate, quiet_bitsandbytes, quiet_transformers
from optkit.stage import Format, Setting, check_together

if TYPE_CHECKING:
    from optkit.kernels.cuda.decoding import GraphDecoder
    from optkit.session.onnx_encoder import OnnxEncoder
    from optkit.session.onnx_session import OnnxSession

AnySession: TypeAlias = "TorchSession | ParallelSession | OnnxSession | TorchEncoder | OnnxEncoder"
PACKAGES = {
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "gptq": "gptqmodel",
}
"""What transformers needs to open the quantization methods that optkit does not read itself."""
BITSANDBYTES_TILE = 32, 64
"""Outputs and inputs that bitsandbytes' kernel for CPUs with AVX512-BF16 takes together."""


def open_session(
    directory: Path,
    settings: Sequence[Setting] = (),
    device: str = "cpu",
    dtype: str | None = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> AnySession:
    """Open a model directory with its settings applied; packed weights are used as they are. An
    encoder's session is an `EncoderSession`.

    `dtype` is the torch name of the float dtype to compute in, the checkpoint's own where None.
    Raises SourceError where weights are missing or do not fit the model, MissingPackageError where
    a format or setting needs a package that is not there, StageError for a setting that cannot be
    applied, ResourceError without memory.
    """
    directory = Path(directory)
    format = Format.of(directory)
    for setting in settings:
        if not any(each == format or (each.is_checkpoint and format.is_checkpoint) for each in setting.accepts):
            raise StageError(
                f"{setting.kind} cannot be applied to {format.opened}",
                where=str(directory),
                why=f"It is for {' or '.join(sorted({each.opened for each in setting.accepts}))}",
                remedy="Take it out of the recipe",
            )
    if dtype and format.computes_in:
        raise OptkitError(
            f"{format.phrase} cannot be opened as {dtype}",
            where=str(directory),
            why="Its files say what it computes in",
        )
    found: AnySession = format.open(
        directory,
        settings=settings,
        device=device,
        dtype=dtype,
        progress=progress,
        trust_remote_code=trust_remote_code,
    )
    return found


def open_torch(
    directory: Path,
    settings: Sequence[Setting],
    device: str,
    dtype: str | None,
    progress: Progress | None,
    trust_remote_code: bool,
) -> TorchSession | ParallelSession | TorchEncoder:
    """Open a checkpoint with torch; see `open_session`."""
    check_together(settings, device)
    split = next((setting for setting in settings if isinstance(setting, TensorParallel)), None)
    if split and not is_joined():
        return _open_split(split, directory, settings, device, dtype, trust_remote_code)
    checkpoint, scales = split_kv_scales(Checkpoint(directory))
    dtype = dtype or next((name for setting in reversed(settings) if (name := setting.opened_dtype())), None)
    chosen = _dtype(dtype) if dtype else stored_dtype(checkpoint)
    options = {name: value for setting in settings for name, value in setting.load_kwargs(device).items()}
    remedy = "Open it on a device with more memory, or in a smaller dtype"
    with memory_errors(f"while the model was opened on {device}", str(directory), remedy), quiet_transformers():
        task = task_of(checkpoint.config) or Task.GENERATION
        quantized = quantized_layers(checkpoint)
        if quantized or (scales and not checkpoint.quantization):
            if any(isinstance(setting, Offload) for setting in settings):
                raise packed_weights_error()
            quiet = progress or SilentProgress()
            model, notes = load_packed(checkpoint, quantized or {}, device, chosen, quiet, trust_remote_code, **options)
        else:
            model, notes = _load_spread(checkpoint, device, chosen, trust_remote_code, options, settings)
        if checkpoint.quantization and (adapter := read_adapter(checkpoint.directory)):
            notes = [*notes, apply_adapter_(model, adapter, device, chosen)]
        notes = [*notes, *eager_note(checkpoint.config, options)]
        for setting in settings:
            model = setting.on_load(model, device)
        new_cache, note = _cache(model, settings, scales) if task is Task.GENERATION else (None, [])
    return_freed_memory()
    if task is not Task.GENERATION:
        return TorchEncoder(model, directory, device, tuple(notes), trust_remote_code, pooling_for(directory, task))
    decoder, told = (
        step_decoder(model) if quantized and _decodes_plainly(model, settings, device, new_cache) else (None, [])
    )
    notes = [*notes, *note, *told]
    session = TorchSession(
        model, directory, device, tuple(notes), trust_remote_code, new_cache, _computing(settings, device)
    )
    if decoder:
        session.decode_with(decoder)
    for setting in settings:
        if isinstance(setting, Speculative):
            session.speculate_with(_proposer(setting, session, device), setting.tokens)
        if isinstance(setting, CudaGraphs) and setting.applies(device):
            session.decode_with(_graph_decoder(session))
    return session


def _proposer(setting: Speculative, session: TorchSession, device: str) -> Proposer:
    """Return what proposes tokens; raises StageError for a draft that does not fit, and what
    opening it raises.
    """
    if setting.prompt_lookup is not None:
        return PromptLookup(setting.prompt_lookup)
    if setting.early_exit is not None:
        return EarlyExit(session.model, setting.early_exit, session.step, session.new_state())
    place = setting.draft_directory()
    check_tokens(place, session.directory)
    draft = open_session(place, (), device)
    if not isinstance(draft, TorchSession) or draft.vocabulary != session.vocabulary:
        raise StageError(
            f"the draft {place} is no torch model with a vocabulary of {session.vocabulary}",
            where="speculative",
            remedy="Take a smaller model of the same family, or prompt_lookup",
        )
    return DraftModel(draft.step, draft.new_state, draft.decode_bytes)


def _decodes_plainly(
    model: PreTrainedModel, settings: Sequence[Setting], device: str, new_cache: CacheFactory | None
) -> bool:
    """Whether nothing is asked of the decode steps on a CPU but that they are the model's."""
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    changed = any(setting.changes_products() for setting in settings)
    return device == "cpu" and new_cache is None and not compiled and not changed


def _graph_decoder(session: TorchSession) -> GraphDecoder:
    """Return the decoder; raises StageError where the model has another step, or something else
    decides how it decodes.
    """
    from optkit.kernels.cuda.decoding import GraphDecoder

    if session.codes_cache:
        raise StageError(
            "the checkpoint has scales for a KV cache of codes, and cuda_graphs keeps floats",
            where="cuda_graphs",
            why="Each of them decides how a token is decoded",
            remedy="Take cuda_graphs or kv_scales out of the recipe",
        )
    return GraphDecoder(session.model)


def _computing(settings: Sequence[Setting], device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the context of all settings in which a model is called."""

    @contextmanager
    def together() -> Iterator[None]:
        with ExitStack() as stack:
            for setting in settings:
                stack.enter_context(setting.computing(device))
            yield

    return together


def _cache(
    model: PreTrainedModel, settings: Sequence[Setting], scales: KvScales | None
) -> tuple[CacheFactory | None, list[str]]:
    """Return what makes the KV cache: the last setting that says, else the scales in the
    checkpoint; None for transformers' own.
    """
    if scales:
        check_keys_and_values(model, "kv_scales")
    asked = [factory for setting in settings if (factory := setting.cache(model, scales)) is not None]
    new_cache: CacheFactory | None = (
        asked[-1] if asked else coded_cache(model.config, stored_codes(scales), "kv_scales") if scales else None
    )
    if new_cache and getattr(model, "_compiled_call_impl", None) is not None:
        raise StageError(
            "a compiled step cannot use a KV cache of codes",
            where="kv_cache",
            why="It grows with every token, and the compiled step needs a cache as long as the request from the start",
            remedy="Take compile or the quantized KV cache out of the recipe",
        )
    return new_cache, ["kv cache: float8, with the scales of the checkpoint"] if scales and not asked else []


def _load_spread(
    checkpoint: Checkpoint,
    device: str,
    dtype: torch.dtype,
    trust_remote_code: bool,
    options: dict[str, Any],
    settings: Sequence[Setting],
) -> tuple[PreTrainedModel, list[str]]:
    """Open a directory with transformers: on the device, where `offload` says, or the share of one
    process.
    """
    for setting in settings:
        if isinstance(setting, Offload):
            if checkpoint.quantization:
                raise packed_weights_error()
            quiet_accelerate()
            offloading = Offloading(setting, checkpoint, device, dtype, trust_remote_code, **options)
            model, notes = _load_whole(checkpoint, device, dtype, trust_remote_code, options, offloading.load_kwargs())
            return model, [*notes, *offloading.finish_(model)]
        if isinstance(setting, TensorParallel):
            model, notes = _load_whole(checkpoint, device, dtype, trust_remote_code, options, share_kwargs(setting))
            check_split(model)
            return model, notes
    return _load_whole(checkpoint, device, dtype, trust_remote_code, options)


def _open_split(
    setting: TensorParallel,
    directory: Path,
    settings: Sequence[Setting],
    device: str,
    dtype: str | None,
    trust_remote_code: bool,
) -> ParallelSession:
    """Open a model in several processes; raises StageError for weights that cannot be split."""
    checkpoint, scales = split_kv_scales(Checkpoint(directory))
    if checkpoint.quantization or scales:
        raise unsplittable_error()
    return ParallelSession(setting, directory, settings, device, dtype, trust_remote_code)


def _load_whole(
    checkpoint: Checkpoint,
    device: str,
    dtype: torch.dtype,
    trust_remote_code: bool,
    options: dict[str, Any],
    placed: dict[str, Any] | None = None,
) -> tuple[PreTrainedModel, list[str]]:
    """Open a directory with transformers, its weights straight onto the device, or where `placed`
    says.
    """
    where = str(checkpoint.directory)
    method = str(checkpoint.quantization.get("quant_method")) if checkpoint.quantization else None
    if method == "bitsandbytes":
        quiet_bitsandbytes()
    options = attention_options(checkpoint.config, options)
    if placed:
        options = {**options, **placed}
    elif method or device != "cpu":
        options = {**options, "device_map": {"": device}}
    try:
        model, report = getattr(transformers, loader_of(checkpoint.config)).from_pretrained(
            where,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
            **options,
        )
    except ImportError as error:
        if method in PACKAGES:
            raise MissingPackageError(PACKAGES[method], where=f"{where} ({method})") from error
        raise SourceError("transformers cannot open it", where=where, why=_first_line(error)) from error
    except Exception as error:  # whatever transformers makes of numbers that it does not expect
        if is_out_of_memory(error) or isinstance(error, OptkitError):
            raise
        raise SourceError("transformers cannot open it", where=where, why=_first_line(error)) from error
    report["missing_keys"] = [name for name in report["missing_keys"] if not _is_unused(name, checkpoint)]
    report["unexpected_keys"] = [name for name in report["unexpected_keys"] if not is_ignorable(name, model)]
    problems = [
        f"{len(report[kind])} {kind.removesuffix('_keys')} ({_some(report[kind])})" for kind in report if report[kind]
    ]
    if problems:
        raise SourceError(
            f"the weights are not those of {type(model).__name__}: {', '.join(problems)}",
            where=where,
            why="A parameter without weights would be random numbers",
            remedy="See that config.json and the weights belong together",
        )
    if method == "bitsandbytes" and device == "cpu":
        _refuse_unpackable(model, where)
    notes = [f"{method}: opened by transformers, with the kernels that it has for it"] if method else []
    return model.eval().requires_grad_(False), notes


def _is_unused(name: Any, checkpoint: Checkpoint) -> bool:
    """Whether a parameter decides nothing: the pooler of an encoder whose features are asked for."""
    return task_of(checkpoint.config) is Task.FEATURES and str(name).startswith("pooler.")


def _refuse_unpackable(model: PreTrainedModel, where: str) -> None:
    """Raise SourceError for a layer of 4 bits that bitsandbytes would fail to pack anew for this
    CPU at the first call.
    """
    for name, module in model.named_modules():
        if not getattr(module, "support_avx512bf16_for_cpu", False):
            continue
        outputs, inputs, (rows, columns) = module.out_features, module.in_features, BITSANDBYTES_TILE
        if outputs % rows or inputs % columns:
            raise SourceError(
                f"{outputs} x {inputs} weights are no tiles of {rows} x {columns}",
                where=f"{where}: {name}",
                why="bitsandbytes packs 4-bit weights so for CPUs with AVX512-BF16",
                remedy="Open it on a GPU, or exclude the layer from nf4",
            )


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptkitError(f"'{name}' is no float dtype of torch", remedy="Use float32, bfloat16 or float16")
    return found


def _some(names: Any) -> str:
    shown = sorted(name if isinstance(name, str) else str(name[0]) for name in names)
    return ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), repr(error))
