"""Load what GPTQ needs on a GPU while the model is opened: libraries and kernels come when they are first called."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from threading import Thread


@cache
def warming(device: str) -> Thread:
    """Return the thread that loads it, begun with the first call; no random number is drawn.
    Join it before a solver is called: torch raises RuntimeError if two threads do so for the first time at once.
    """
    thread = Thread(target=_rehearse, args=(device,), name="warming", daemon=True)
    thread.start()
    return thread


def _rehearse(device: str) -> None:
    if device == "cpu":
        return
    import torch
    import torch.nn.functional as F

    from optkit.algorithms.gptq import GptqOptions, gptq, row_errors
    from optkit.algorithms.grid import Grid
    from optkit.algorithms.hessian import Hessian
    from optkit.algorithms.packing import pack

    # what fails here fails again where it is needed, and is told there
    with suppress(Exception), torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        hessian = Hessian(1024, device, rounded=True)
        hessian.add(torch.eye(1024, device=device, dtype=torch.bfloat16))
        weight, matrix = torch.eye(512, 1024, device=device), hessian.matrix()
        rounded = gptq(weight, matrix, Grid(4, 128, symmetric=True), GptqOptions()).weight
        row_errors(weight, rounded.dequantize(), matrix)
        pack(rounded.codes, 4, 1)
        states = torch.zeros(4096, 4096, device=device, dtype=torch.bfloat16)
        heads = states.view(1, 32, 4096, 128)
        F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        F.linear(F.silu(states) * states.float().pow(2).mean(-1, keepdim=True).rsqrt().bfloat16(), states)
        torch.cuda.current_stream().synchronize()
