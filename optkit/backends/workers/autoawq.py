"""Worker of autoawq 0.2.9: AWQ in its GEMM layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from awq import AutoAWQForCausalLM
from awq.quantize import quantizer

if TYPE_CHECKING:
    from optkit.backends.workers.launch import Job


def restore_weights() -> None:
    """Let the search for scales begin each time from the weights.
    On a CPU it scales the very tensors that it keeps to restore them.

    AutoAWQ 0.2.9 keeps `{name: tensor.cpu()}`, which is a copy if the model is on a GPU alone.
    """
    search = quantizer.AwqQuantizer._compute_best_scale

    def searched(self: Any, x: Any, w_mean: Any, x_mean: Any, module2inspect: Any, *rest: Any, **named: Any) -> Any:
        def copied(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            state.update({name: tensor.clone() for name, tensor in state.items()})

        hook = module2inspect.register_state_dict_post_hook(copied)
        try:
            return search(self, x, w_mean, x_mean, module2inspect, *rest, **named)
        finally:
            hook.remove()

    quantizer.AwqQuantizer._compute_best_scale = searched


def quantize(job: Job) -> dict[str, Any]:
    """Quantize and save; returns nothing of note."""
    scheme = next(iter(job.layers.values()))

    def counted(blocks: Iterable[Any], desc: str = "", **_: Any) -> Iterator[Any]:
        for block in blocks:
            yield block
            job.advance(f"block {block}")

    quantizer.tqdm = counted
    restore_weights()
    job.start("autoawq", job.blocks, "blocks")
    model = AutoAWQForCausalLM.from_pretrained(
        str(job.source),
        torch_dtype=torch.float16 if job.device != "cpu" else job.torch_dtype(),
        trust_remote_code=False,
    )
    settings = {
        "w_bit": scheme["bits"],
        "q_group_size": scheme["group_size"],
        "zero_point": not scheme["symmetric"],
        "version": "GEMM",
    }
    model.quantize(
        None,
        quant_config=settings,
        calib_data=job.windows,
        max_calib_samples=len(job.windows),
        max_calib_seq_len=len(job.windows[0]),
        n_parallel_calib_samples=job.fields["batch_size"],
    )
    model.save_quantized(str(job.target))
    return {}
