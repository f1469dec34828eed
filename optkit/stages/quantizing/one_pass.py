"""Round the layers of a block while it runs through the calibration text once, on CPUs.

Each batch waits in front of the layers that are rounded next, and goes on by their codes. So each
layer sees the errors of those before it, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from optkit.algorithms.grid import QuantizedWeight
from optkit.algorithms.hessian import Hessian
from optkit.kernels.cpu.prompts import left_by
from optkit.model.blocks import BlockInputs
from optkit.model.skeleton import Skeleton
from optkit.model.skeleton_layers import inputs_of
from optkit.stages.quantizing.calibration_products import in_codes, prompt_pass

TURNS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""The layers of a block of the Llama family, in the order in which `PromptPass` yields their inputs."""


def one_pass(
    skeleton: Skeleton,
    index: int,
    inputs: BlockInputs,
    modules: Mapping[str, nn.Module],
    quantized: Mapping[str, QuantizedWeight],
    equal_tokens: bool,
    advance: bool,
) -> Iterator[tuple[dict[str, nn.Module], dict[str, Hessian]]]:
    """Yield those of the modules of a loaded block, for which `is_prompt` holds, that are rounded next, and
    their Hessians.
    Whoever takes them adds them to `quantized`. `advance`: hidden states leave the block in the end.
    """
    if not (modules or advance):
        return
    block, states = skeleton.blocks[index].module, [inputs.hidden[batch.rows] for batch in inputs.batches]
    calls = [batch.calls[index] for batch in inputs.batches]
    # one for each shape and call: their caches are read by none but the attention that fills them
    passes = {
        (hidden.shape, id(call)): prompt_pass(skeleton, block, hidden, call.keywords)
        for hidden, call in zip(states, calls, strict=True)
    }
    runs = [
        passes[hidden.shape, id(call)].inputs_in_turn(0, hidden) for hidden, call in zip(states, calls, strict=True)
    ]
    layers: dict[str, nn.Module] = {}
    for turn in TURNS:
        hessian = None
        with in_codes(layers, quantized):
            layers = {name: module for name, module in modules.items() if name.endswith(turn)}
            if layers:
                hessian = Hessian(inputs_of(next(iter(layers.values()))), "cpu", equal_tokens, rounded=True)
            for rows in map(next, runs):
                if hessian:
                    hessian.add(rows)
        if hessian:
            hessian.add_up_(inputs.together, sum(inputs.together.gather(hessian.tokens)))
            yield layers, dict.fromkeys(layers, hessian)
    if advance:
        with in_codes(layers, quantized):
            for state, run in zip(states, runs, strict=True):
                state.copy_(left_by(run))
