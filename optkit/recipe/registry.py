"""The stages and evals that a recipe can name.
They are dicts of strings, so that listing them imports nothing.

A plug-in package adds its own with an entry point, in the same form as the built-in ones:

    [project.entry-points."optkit.stages"]
    smooth = "my_package.smooth:Smooth"

The name of the entry point is the class's `kind`; it is filled in if the class has none.
"""

from __future__ import annotations

import copy
from functools import cache
from pkgutil import resolve_name
from typing import Any, TypeVar

from optkit.common.plug_ins import Origin, with_plug_ins
from optkit.errors import OptkitError, did_you_mean
from optkit.measure import Eval
from optkit.stage import Setting, Stage, Transform

STAGES = {
    "attention": "optkit.settings.attention:Attention",
    "auto_bits": "optkit.stages.auto_bits:AutoBits",
    "awq": "optkit.stages.awq:Awq",
    "awq_scale": "optkit.stages.awq_scale:AwqScale",
    "cast": "optkit.stages.cast:Cast",
    "compile": "optkit.settings.compile:Compile",
    "cpu_decoder": "optkit.settings.cpu_decoder:CpuDecoder",
    "cuda_graphs": "optkit.settings.cuda_graphs:CudaGraphs",
    "dequantize": "optkit.stages.dequantize:Dequantize",
    "distill": "optkit.stages.distill:Distill",
    "fp8": "optkit.stages.fp8:Fp8",
    "gguf": "optkit.stages.gguf:Gguf",
    "gptq": "optkit.stages.gptq:Gptq",
    "kv_cache": "optkit.settings.kv_cache:KvCache",
    "kv_scales": "optkit.stages.kv_scales:KvScales",
    "lora_recover": "optkit.stages.lora_recover:LoraRecover",
    "onnx": "optkit.stages.onnx:Onnx",
    "onnx_optimize": "optkit.stages.onnx_optimize:OnnxOptimize",
    "onnx_provider": "optkit.settings.onnx_provider:OnnxProvider",
    "onnx_quantize": "optkit.stages.onnx_quantize:OnnxQuantize",
    "int8": "optkit.stages.int8:Int8",
    "mx": "optkit.stages.mx:Mx",
    "nf4": "optkit.stages.nf4:Nf4",
    "offload": "optkit.settings.offload:Offload",
    "precision": "optkit.settings.precision:Precision",
    "prune": "optkit.stages.prune:Prune",
    "prune_structured": "optkit.stages.prune_structured:PruneStructured",
    "qat": "optkit.stages.qat:Qat",
    "rotate": "optkit.stages.rotate:Rotate",
    "rtn": "optkit.stages.rtn:Rtn",
    "smoothquant": "optkit.stages.smoothquant:SmoothQuant",
    "speculative": "optkit.settings.speculative:Speculative",
    "tensor_parallel": "optkit.settings.tensor_parallel:TensorParallel",
}
EVALS = {
    "answers": "optkit_evals.answers:Answers",
    "divergence": "optkit_evals.divergence:Divergence",
    "embedding": "optkit_evals.embedding:Embedding",
    "encoding": "optkit_evals.encoding:Encoding",
    "footprint": "optkit_evals.footprint:Footprint",
    "generation": "optkit_evals.generation:Generation",
    "lm_eval": "optkit_evals.lm_eval:LmEval",
    "load": "optkit_evals.load:Load",
    "noise_floor": "optkit_evals.noise_floor:NoiseFloor",
    "perplexity": "optkit_evals.perplexity:Perplexity",
    "roofline": "optkit_evals.roofline:Roofline",
    "sensitivity": "optkit_evals.sensitivity:Sensitivity",
    "speculation": "optkit_evals.speculation:Speculation",
    "throughput": "optkit_evals.throughput:Throughput",
}
PRESETS: dict[str, dict[str, Any]] = {
    "bf16": {"cast": {"dtype": "bfloat16"}},
    "eager": {"attention": {"implementation": "eager"}},
    "flash_attention_2": {"attention": {"implementation": "flash_attention_2"}},
    "flex_attention": {"attention": {"implementation": "flex_attention"}},
    "fp16": {"cast": {"dtype": "float16"}},
    "fp32": {"cast": {"dtype": "float32"}},
    "kv_fp8": {"kv_cache": {"dtype": "fp8"}},
    "kv_int4": {"kv_cache": {"dtype": "int4"}},
    "kv_int8": {"kv_cache": {"dtype": "int8"}},
    "sdpa": {"attention": {"implementation": "sdpa"}},
}
"""Bare names that stand for a stage with its field: `- sdpa` is `- attention: {implementation:
sdpa}`.
"""


Base = TypeVar("Base", bound=Stage | Eval)


class UnknownKindError(OptkitError):
    """A name that no stage or eval has."""

    exit_status = 2


def names_of(role: str) -> list[str]:
    """Return the kinds of `stage` or `eval`, sorted; imports none of them."""
    return sorted(origins(role))


def stage_class(kind: str) -> type[Stage]:
    """Return the class of a stage. Raises UnknownKindError, or OptkitError if a plug-in is
    broken.
    """
    return _load("stage", kind, (Transform, Setting))


def eval_class(kind: str) -> type[Eval]:
    """Return the class of an eval. Raises UnknownKindError, or OptkitError if a plug-in is
    broken.
    """
    return _load("eval", kind, (Eval,))


def class_of(role: str, kind: str) -> Any:
    """Return the class of a `stage` or an `eval`; raises as these do."""
    return stage_class(kind) if role == "stage" else eval_class(kind)


def summary(described: type[Stage] | type[Eval]) -> str:
    """Return the first paragraph of a class's docstring as one line."""
    return " ".join((described.__doc__ or "").strip().partition("\n\n")[0].split())


def origins(role: str) -> dict[str, Origin]:
    """Return kind -> origin of every `stage` or `eval`, built-in and plugged in.
    Raises OptkitError for a name taken twice.
    """
    built_in = {"stage": STAGES, "eval": EVALS}[role]
    return with_plug_ins(role, built_in, PRESETS if role == "stage" else ())


@cache
def _import(kind: str, role: str, origin: Origin) -> object:
    try:
        return resolve_name(origin.target)
    except OptkitError:
        raise
    except Exception as error:
        raise OptkitError(
            f"the {role} '{kind}' cannot be imported ({origin})",
            why=f"{type(error).__name__}: {error}",
            remedy=f"Reinstall the package {origin.distribution}",
        ) from error


def _load(role: str, kind: str, bases: tuple[type[Base], ...]) -> type[Base]:
    known = origins(role)
    if kind not in known:
        hint = did_you_mean(kind, [*known, *(PRESETS if role == "stage" else ())])
        raise UnknownKindError(f"there is no {role} '{kind}'.{hint}")
    loaded = _import(kind, role, known[kind])
    if not (isinstance(loaded, type) and issubclass(loaded, bases)):
        wanted = " or ".join(base.__name__ for base in bases)
        raise OptkitError(f"the {role} '{kind}' ({known[kind]}) is no {wanted} of optkit")
    return _named(loaded, kind, role, known[kind])


def _named(loaded: type[Base], kind: str, role: str, origin: Origin) -> type[Base]:
    """Return a class that says its kind; that of another class is not inherited."""
    if (own := vars(loaded).get("kind")) is None:
        loaded.kind = kind
    elif own != kind:
        raise OptkitError(
            f"the {role} '{kind}' ({origin}) calls itself '{own}'",
            why="Messages and scorecards would use another name than recipes",
            remedy=f'Set `kind = "{kind}"` in its class, or rename the entry point',
        )
    return loaded


def spell_out(role: str, item: Any) -> Any:
    """Return an item of `stages:` or `evals:` as `{kind: {field: value}}`: `- sdpa` and `- attention: sdpa` are short
    for `- attention: {implementation: sdpa}`. An item that cannot be spelled out comes back as it is.
    """
    if isinstance(item, str):
        item = copy.deepcopy(PRESETS[item]) if role == "stage" and item in PRESETS else {item: None}
    if not isinstance(item, dict) or len(item) != 1:
        return item
    (kind, fields), *_ = item.items()
    if fields is None:
        return {kind: {}}
    if not isinstance(fields, dict) and kind in names_of(role):
        shorthand = getattr(class_of(role, kind), "shorthand", None)
        return {kind: {shorthand: fields}} if shorthand else item
    return item
