"""How near two models are: the numbers against their definitions."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optkit.common.grouping import common_prefix
from optkit.errors import OptkitError
from optkit.kernels.cpu import native
from optkit.progress import SilentProgress
from optkit.stages.rtn import Rtn
from optkit.verification import agreement
from optkit.verification.agreement import (
    TEXT,
    compare_likeliest,
    compare_logits,
    measure_reference,
    read_logits,
    tolerance,
    verdict_of,
)
from optkit.verification.verify import verify_artifact
from tests.conftest import TinyModel
from tests.support.publishing import published
from tests.support.running import run_stage


def two_models(noise: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(20, 50, generator=generator) * 3
    return ours, ours + noise * torch.randn(20, 50, generator=generator)


def likeliest(logits: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    found = torch.log_softmax(logits, -1).topk(count, -1)
    return [
        list(zip(ids.tolist(), values.tolist(), strict=True))
        for ids, values in zip(found.indices, found.values, strict=True)
    ]


def test_logits_against_the_definition() -> None:
    ours, theirs = two_models()
    found = compare_logits(ours, theirs)
    divergence = 0.0
    for left, right in zip(ours.double(), theirs.double(), strict=True):
        p, q = (np.exp(row) / np.exp(row).sum() for row in (left.numpy(), right.numpy()))
        divergence += float((p * np.log(p / q)).sum()) / 20
    assert found.mean_kl == pytest.approx(divergence, rel=1e-4)
    assert found.max_logit_difference == pytest.approx(float((ours - theirs).abs().max()))
    assert found.top1_agreement == float(np.mean(ours.numpy().argmax(1) == theirs.numpy().argmax(1)))
    assert compare_logits(ours, ours).mean_kl == 0


def test_all_tokens_as_the_likeliest_ones_give_the_same_divergence() -> None:
    ours, theirs = two_models()
    whole, listed = compare_logits(ours, theirs), compare_likeliest(ours, likeliest(theirs, 50))
    assert listed.mean_kl == pytest.approx(whole.mean_kl, rel=1e-4)
    assert listed.top1_agreement == whole.top1_agreement


def test_fewer_tokens_never_give_more() -> None:
    ours, theirs = two_models()
    found = [compare_likeliest(ours, likeliest(theirs, count)).mean_kl for count in (1, 5, 20, 50)]
    assert found == sorted(found)
    assert found[0] > 0


def test_a_constant_added_to_logits_is_no_difference_of_log_probabilities() -> None:
    ours, _ = two_models()
    found = compare_likeliest(ours, likeliest(ours + 7, 10))
    assert found.max_logit_difference == pytest.approx(0, abs=1e-5)
    assert found.mean_kl == pytest.approx(0, abs=1e-6)


def test_equally_likely_tokens_agree_in_either_order() -> None:
    ours = torch.tensor([[2.0, 2.0, 0.0]])
    assert compare_logits(ours, torch.tensor([[1.9, 2.0, 0.0]])).top1_agreement == 1
    assert compare_logits(ours, torch.tensor([[1.9, 2.0, 2.1]])).top1_agreement == 0
    assert compare_likeliest(ours, [[(1, -0.7), (0, -0.8)]]).top1_agreement == 1


def test_numbers_that_are_none() -> None:
    ours, theirs = two_models()
    theirs[3, 4] = math.nan
    assert math.isnan(compare_logits(ours, theirs).mean_kl)


def test_the_least_precise_dtype_decides() -> None:
    limits = [tolerance("float32", other, activation_bits=0) for other in ("float32", "float16", "bfloat16")]
    assert limits == sorted(set(limits))
    assert tolerance("float32", "fp9", activation_bits=0) == limits[-1]
    eight, four = (tolerance("float32", "float32", activation_bits=bits) for bits in (8, 4))
    assert four > eight > limits[-1]


def test_decode_steps_have_to_agree_too() -> None:
    ours, far = two_models()
    near, steps = compare_logits(ours, ours), compare_logits(ours, far)
    assert verdict_of(near, 1e-3, near) | {"reason": ""} == verdict_of(near, 1e-3) | {"reason": "", "stepped_kl": 0.0}
    found = verdict_of(near, 1e-3, steps)
    assert (found["verdict"], found["stepped_kl"]) == ("disagrees", steps.mean_kl)
    assert found["reason"].startswith("the mean KL of its decode steps is 0.0")
    far[3, 4] = math.nan
    assert verdict_of(near, 1e-3, compare_logits(ours, far))["reason"] == "its logits are not all finite numbers"


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([1], [2]) == 0


def test_raw_logits_come_back(tmp_path: Path) -> None:
    ours, _ = two_models()
    ours.numpy().tofile(tmp_path / "logits.f32")
    assert torch.equal(read_logits(tmp_path / "logits.f32", ours.shape), ours)


class Words:
    """A session whose tokens are words, and whose logits tell the token before."""

    directory, device, positions = Path("words"), "cpu", 300

    def __init__(self, text: str | None = None) -> None:
        self.text = text

    def encode(self, text: str) -> torch.Tensor:
        return torch.arange(len((text if self.text is None else self.text).split()))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(tokens, 1000).float()

    def generate(self, tokens: torch.Tensor, new_tokens: int) -> torch.Tensor:
        return torch.cat([tokens, torch.full((1, new_tokens), 7)], 1)


@pytest.mark.parametrize(("asked", "got"), [(32, 32), (200, 200), (1000, 284)])
def test_as_many_tokens_as_were_asked_for_and_fit(asked: int, got: int) -> None:
    assert len(TEXT.split()) < 200
    found = measure_reference(Words(), "float32", asked, 16)  # type: ignore[arg-type]
    assert len(found.tokens) == len(found.logits) == got
    assert found.generated == (7,) * 16


def test_too_few_tokens() -> None:
    with pytest.raises(OptkitError, match=r"^words: 1 tokens are too few to compare\. Ask for more with --tokens\.$"):
        measure_reference(Words("one"), "float32", 32, 16)  # type: ignore[arg-type]


def test_others_are_compared_with_exact_products(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, exact, known = tmp_path / "packed", [], agreement.measure_reference
    run_stage(Rtn(group_size=32), tiny_model("llama"), packed)

    def watched(*given: Any) -> Any:
        exact.append(native._exact)
        return known(*given)

    monkeypatch.setattr(agreement, "measure_reference", watched)
    artifact = published(packed, tmp_path / "out")
    found = verify_artifact(
        artifact, engines=[], pythons={}, device="cpu", tokens=40, timeout_s=60, progress=SilentProgress()
    )
    assert found.whole
    assert exact == [True]
    assert not native._exact
    told = next(check.detail for check in found.checks if check.name == "opens")
    assert "16 bits" not in told, "what is said of the kernels is how they compute here"
