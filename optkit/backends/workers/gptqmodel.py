"""Worker of gptqmodel 7.6: GPTQ, and AWQ with its torch kernel."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from gptqmodel import BACKEND, GPTQModel
from gptqmodel.quantization.config import AWQConfig, GPTAQConfig, GPTQConfig

if TYPE_CHECKING:
    from optkit.backends.workers.launch import Job


def quantize(job: Job) -> dict[str, Any]:
    """Quantize and save; returns nothing of note."""
    usual = Counter(tuple(sorted(scheme.items())) for scheme in job.layers.values()).most_common(1)[0][0]
    scheme = dict(usual)
    dynamic: dict[str, dict[str, Any]] = {f"-:^{re.escape(name)}$": {} for name in job.kept if name != "lm_head"}
    dynamic |= {f"+:^{re.escape(name)}$": _grid(its) for name, its in job.layers.items() if its != scheme}
    backend = BACKEND.AWQ_TORCH if job.device == "cpu" else BACKEND.AUTO
    shared = {**_grid(scheme), "dynamic": dynamic or None, "offload_to_disk": False, "device": job.device}
    if job.method == "gptq":
        share = job.fields.get("earlier_errors")
        config: Any = GPTQConfig(
            **shared,
            desc_act=False,
            act_group_aware=job.fields["activation_order"],
            true_sequential=job.fields["true_sequential"],
            damp_percent=job.fields["damping"],
            gptaq=GPTAQConfig(alpha=share) if share else None,
        )
        model = GPTQModel.load(str(job.source), config, dtype=job.torch_dtype())
    else:
        # Its AWQ has no kernel for the CPU but the torch one, which computes in bfloat16.
        dtype = torch.bfloat16 if job.device == "cpu" else job.torch_dtype()
        model = GPTQModel.load(str(job.source), AWQConfig(**shared), dtype=dtype, backend=backend)
    done: set[int] = set()

    def block_done(layer_idx: int, submodule_finalized: bool) -> None:
        if layer_idx not in done:
            done.add(layer_idx)
            job.advance(f"block {layer_idx}")

    model.layer_callback = block_done
    windows = [{"input_ids": window, "attention_mask": [1] * len(window)} for window in job.windows]
    job.start(f"gptqmodel {job.method}", job.blocks, "blocks")
    options = {} if job.method == "gptq" else {"backend": backend}
    model.quantize(windows, batch_size=job.fields["batch_size"], **options)
    _drop_added_rope(model.model.config)
    model.save(str(job.target))
    return {}


def _drop_added_rope(config: Any) -> None:
    """Take out what the library adds beside rope parameters of each kind of layer (Gemma 3).
    transformers does not save them. `rope_theta` is an object here, and no kind of layer.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = {kind: each for kind, each in parameters.items() if isinstance(each, dict) and kind != "rope_theta"}
    if kinds:
        config.rope_parameters = kinds


def _grid(scheme: dict[str, Any]) -> dict[str, Any]:
    return {"bits": scheme["bits"], "group_size": scheme["group_size"], "sym": scheme["symmetric"]}
