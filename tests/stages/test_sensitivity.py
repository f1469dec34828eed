"""The predicted divergence of quantizing one layer alone against the divergence that is measured
when it alone is quantized.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import kl_div
from transformers.pytorch_utils import Conv1D

from optkit.algorithms.grid import Grid, round_to_nearest
from optkit.algorithms.hessian import Hessian
from optkit.algorithms.scale_search import search_scales
from optkit.algorithms.sensitivity import fisher_probe
from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.skeleton import Skeleton
from optkit.progress import SilentProgress
from optkit.stages.sensitivity.measure import Rounding, measure_sensitivity
from tests.conftest import TinyModel
from tests.support.changes import changed_copy

GRIDS = [Grid(3, 32, True), Grid(4, 64, False), Grid(8, 64, True)]


def random_tokens(sequences: int = 64, length: int = 24) -> torch.Tensor:
    return torch.randint(0, 500, (sequences, length), generator=torch.Generator().manual_seed(3))


def brute_force(source: Path, tokens: torch.Tensor, grids: list[Grid]) -> dict[str, list[float]]:
    """Return layer -> mean KL(model || model with this layer rounded) for each grid, every one by a
    run of the whole model.
    """
    skeleton = Skeleton(Checkpoint(source))
    skeleton.load_("", "cpu")
    found: dict[str, list[float]] = {}
    with torch.no_grad():
        before = skeleton.model(tokens).logits.double().log_softmax(-1)
        for block in skeleton.blocks:
            for name, module in skeleton.linears(block).items():
                stored = module.weight.clone()
                weight = stored.T.contiguous() if isinstance(module, Conv1D) else stored
                for grid in grids:
                    rounded = round_to_nearest(weight, *search_scales(weight, grid), grid).dequantize()
                    module.weight.copy_(rounded.T if isinstance(module, Conv1D) else rounded)
                    after = skeleton.model(tokens).logits.double().log_softmax(-1)
                    divergence = kl_div(after, before, log_target=True, reduction="none").sum(-1).mean()
                    found.setdefault(name, []).append(float(divergence))
                module.weight.copy_(stored)
    return found


def ranks(values: torch.Tensor) -> torch.Tensor:
    return values.argsort().argsort().float()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_one_pass_predicts_what_each_layer_alone_costs(tiny_model: TinyModel, kind: str) -> None:
    source, tokens = tiny_model(kind), random_tokens()
    true = brute_force(source, tokens, GRIDS)
    skeleton = Skeleton(Checkpoint(source))
    predicted = measure_sensitivity(skeleton, tokens, dict.fromkeys(true, GRIDS), "rtn", "cpu", SilentProgress())
    assert list(predicted) == list(true)
    ours, theirs = (torch.tensor([each[name] for name in true]) for each in (predicted, true))
    for place in range(len(GRIDS)):
        ratio = (ours[:, place] / theirs[:, place]).log()
        assert abs(float(ratio.mean())) < 0.1
        assert float(ratio.std()) < 0.25
    both = torch.stack([ranks(ours.flatten()), ranks(theirs.flatten())])
    assert float(torch.corrcoef(both)[0, 1]) > 0.98
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())


def test_experts_are_predicted_too(tiny_model: TinyModel) -> None:
    source, tokens = tiny_model("mixtral"), random_tokens()
    true = {name: each for name, each in brute_force(source, tokens, GRIDS[:1]).items() if not name.endswith("gate")}
    predicted = measure_sensitivity(
        Skeleton(Checkpoint(source)), tokens, dict.fromkeys(true, GRIDS[:1]), "rtn", "cpu", SilentProgress()
    )
    assert any(".experts." in name for name in predicted)
    ours, theirs = (torch.tensor([each[name][0] for name in true]) for each in (predicted, true))
    assert float(torch.corrcoef(torch.stack([ranks(ours), ranks(theirs)]))[0, 1]) > 0.9


def test_probes_have_the_covariance_of_the_fisher_information() -> None:
    logits = torch.randn(6, generator=torch.Generator().manual_seed(0)) * 2
    drawn = fisher_probe(logits.expand(200_000, 6), torch.Generator().manual_seed(1))
    likely = logits.softmax(-1)
    assert drawn.mean(0).abs().max() < 3e-3
    assert (drawn.T @ drawn / len(drawn) - (likely.diag() - likely.outer(likely))).abs().max() < 3e-3


def test_layers_that_text_does_not_reach_are_refused(tiny_model: Callable[[str], Path]) -> None:
    skeleton = Skeleton(Checkpoint(tiny_model("llama")))
    grids = {"vision.blocks.0.mlp.up": [Grid(4, 32, True)]}
    with pytest.raises(
        StageError, match=r"^sensitivity: 1 layers are no part of the language model's decoder blocks \(vision"
    ):
        measure_sensitivity(skeleton, torch.zeros(1, 8, dtype=torch.int64), grids, "rtn", "cpu", SilentProgress())


@pytest.mark.parametrize(
    ("rounding", "factor", "said"),
    [
        (
            "gptq",
            1.0,
            "the Hessian is not positive definite, even with damping 10.0. Exclude the layer, round to "
            "nearest (rtn), or take more text.",
        ),
        (
            "rtn",
            1e30,
            "its predicted divergence is NaN or Inf. Activations or gradients do not fit float32 on this "
            "text. Take other text, or see whether the model computes on it at all.",
        ),
    ],
)
def test_a_layer_that_cannot_be_judged_is_named(
    tiny_model: TinyModel, tmp_path: Path, rounding: Rounding, factor: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rounding == "gptq":
        whole = Hessian.matrix
        monkeypatch.setattr(Hessian, "matrix", lambda self: -whole(self))
    changed = [f"model.layers.2.mlp.{leaf}_proj.weight" for leaf in ("gate", "up")]
    source = changed_copy(
        tiny_model("llama"), tmp_path, lambda tensors: tensors | {name: tensors[name] * factor for name in changed}
    )
    grids = {"model.layers.2.mlp.down_proj": [Grid(4, 32, True)]}
    with pytest.raises(StageError) as raised:
        measure_sensitivity(Skeleton(Checkpoint(source)), random_tokens(), grids, rounding, "cpu", SilentProgress())
    assert str(raised.value) == f"sensitivity: model.layers.2.mlp.down_proj: {said}"
