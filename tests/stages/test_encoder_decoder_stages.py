"""Both halves of encoder-decoders are quantized, and plain transformers opens what is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from optkit.algorithms.grid import Grid, minmax_scales, round_to_nearest
from optkit.algorithms.hessian import Hessian
from optkit.model.checkpoint import Checkpoint
from optkit.model.companions import find_companions
from optkit.model.formats.base import Format
from optkit.model.skeleton import Skeleton
from optkit.model.task import loader_of
from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.cast import Cast
from optkit.stages.dequantize import Dequantize
from optkit.stages.fp8 import Fp8
from optkit.stages.gptq import Gptq
from optkit.stages.nf4 import Nf4
from optkit.stages.prune import Prune
from optkit.stages.quantizing.hessians import watch_inputs
from optkit.stages.rtn import Rtn
from optkit.verification.model_files import model_files
from tests.conftest import TinyModel
from tests.support.crossed import crossed
from tests.support.encoder_decoders import CONFIGS, write_pairs
from tests.support.running import run_stage

STAGES: dict[str, Callable[[], Any]] = {
    "cast": lambda: Cast(dtype="bfloat16"),
    "rtn": lambda: Rtn(group_size=32),
    "fp8": lambda: Fp8(),
    "nf4": lambda: Nf4(),
}
TOKENS = torch.tensor([[2, 40, 50, 60, 70]])
LAYERS = {
    "T5ForConditionalGeneration": 2 * (4 + 3) + 2 * (8 + 3),
    "BartForConditionalGeneration": 2 * 6 + 3 * 10,
    "WhisperForConditionalGeneration": 2 * 6 + 3 * 10,
}


def inputs_of(directory: Path) -> dict[str, Any]:
    config = Checkpoint(directory).config
    if bins := config.get("num_mel_bins"):
        return {"input_features": torch.randn(1, bins, 100, generator=torch.Generator().manual_seed(0))}
    return {"input_ids": torch.arange(10, 30)[None]}


def opened_plainly(directory: Path) -> Any:
    loader = getattr(transformers, loader_of(Checkpoint(directory).config))
    model, report = loader.from_pretrained(directory, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize(("architecture", "kind"), crossed([*LAYERS], [*STAGES]))
def test_plain_transformers_computes_the_same(
    tiny_encoder_decoder: TinyModel, tmp_path: Path, architecture: str, kind: str
) -> None:
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    source, target = tiny_encoder_decoder(architecture), tmp_path / "made"
    stage, before = STAGES[kind](), Checkpoint(source)
    _, left = stage.predict(before.shape, "cpu")
    report = run_stage(stage, source, target)
    after = Checkpoint(target)
    assert left.tensors.keys() == after.tensors.keys()
    assert left.size_bytes == pytest.approx(after.shape.size_bytes, rel=1e-2)
    assert set(find_companions(target).kept) == set(find_companions(source).kept)
    assert [check.detail for check in model_files(Format.of(target), target).checks() if not check.ok] == []
    if kind != "cast":
        read = [name for name, why in report.skipped.items() if "own code" in why]
        assert report.changed + len(read) == LAYERS[architecture]
    session: Any = open_session(target)
    inputs = {name: value.to(session.model.dtype) if value.is_floating_point() else value for name, value in
              inputs_of(source).items()}  # fmt: skip
    ours = session.logits_given(inputs, TOKENS)
    with torch.no_grad():
        theirs = opened_plainly(target)(**inputs, decoder_input_ids=TOKENS).logits.float()
    assert torch.allclose(ours, theirs, atol=2e-2 if kind == "cast" else 1e-3, rtol=1e-3)


@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_of_t5_take_a_byte_each_and_are_those_of_packed_ones(
    tiny_encoder_decoder: TinyModel, tmp_path: Path, symmetric: bool
) -> None:
    """transformers looks for the weight of each layer of T5 when it opens the model."""
    stage = Rtn(bits=3, group_size=32, symmetric=symmetric)
    made = {}
    for architecture in LAYERS:
        (target := tmp_path / architecture).mkdir()
        report = stage.run(source := tiny_encoder_decoder(architecture), target, Context())
        told = [note for note in report.notes if "bits: 8 makes the same size as 3 here" in note]
        assert bool(told) == architecture.startswith("T5")
        assert stage.predict(Checkpoint(source).shape, "cpu")[0].notes == report.notes
        made[architecture] = source, target
    source, target = made["T5ForConditionalGeneration"]
    stored, weights = load_file(target / "model.safetensors"), load_file(source / "model.safetensors")
    grid = Grid(3, 32, symmetric)
    for name in (name for name, tensor in stored.items() if tensor.dtype == torch.int8 and name.endswith(".weight")):
        rounded = round_to_nearest(weights[name], *minmax_scales(weights[name], grid), grid)
        steps = rounded.codes.short() - rounded.zeros.short().repeat_interleave(32, 1)
        zeros = stored.get(f"{name}_zero_point", torch.zeros_like(rounded.zeros)).short()
        assert torch.equal(stored[name].short() - zeros.repeat_interleave(32, 1), steps)
    floats = tmp_path / "floats"
    run_stage(Dequantize(), target, floats)
    found, packed = load_file(floats / "model.safetensors"), opened_plainly(target)
    packed(**inputs_of(source), decoder_input_ids=TOKENS)  # transformers makes floats of the codes at the first call
    parameters = packed.state_dict()
    assert all(torch.equal(found[name], parameters[name]) for name in found if name in parameters)


CALIBRATED: dict[str, Callable[[Calibration], Any]] = {
    "fp8": lambda text: Fp8(rounding="gptq", activations="static", calibration=text),
    "gptq": lambda text: Gptq(group_size=32, calibration=text),
    "prune": lambda text: Prune(method="sparsegpt", calibration=text),
}


def captured(model: Any, names: set[str], calls: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return what layers of an opened model are given, float [tokens, in]."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, given, name=name: found[name].append(given[0].flatten(0, -2))
        )
    with torch.no_grad():
        for call in calls:
            model(**call)
    return {name: torch.cat(given) for name, given in found.items()}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_blocks_alone_are_given_what_the_whole_model_gives_them(
    tiny_encoder_decoder: TinyModel, tmp_path: Path, architecture: str
) -> None:
    source = tiny_encoder_decoder(architecture)
    prompts: Any = pairs(tmp_path, architecture).inputs(source, None)
    skeleton = Skeleton(Checkpoint(source))
    inputs, sums = skeleton.capture_inputs(prompts, "cpu"), {}
    for index, block in enumerate(skeleton.blocks):
        skeleton.load_(block.name, "cpu")
        modules: Any = skeleton.linears(block)
        sums |= watch_inputs(
            skeleton, index, inputs, modules, lambda given: Hessian(given.shape[-1], given.device, False)
        )
        if index + 1 < len(skeleton.blocks):
            skeleton.advance_(index, inputs)
    whole = captured(opened_plainly(source), set(sums), list(prompts))
    assert len(sums) == LAYERS.get(architecture, 42)
    for name, given in whole.items():
        wanted = given.T @ given / len(given)
        torch.testing.assert_close(sums[name].matrix(), wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize(("architecture", "kind"), crossed([*LAYERS], [*CALIBRATED]))
def test_calibrated_on_pairs(tiny_encoder_decoder: TinyModel, tmp_path: Path, architecture: str, kind: str) -> None:
    source, target = tiny_encoder_decoder(architecture), tmp_path / "made"
    stage = CALIBRATED[kind](pairs(tmp_path, architecture))
    stage.predict(Checkpoint(source).shape, "cpu")
    report = run_stage(stage, source, target)
    assert report.calibrated_on[0]["dataset"].endswith("pairs.jsonl")
    session: Any = open_session(target)
    with torch.no_grad():
        theirs = opened_plainly(target)(**inputs_of(source), decoder_input_ids=TOKENS).logits.float()
    assert torch.allclose(session.logits_given(inputs_of(source), TOKENS), theirs, atol=1e-3, rtol=1e-3)


def pairs(folder: Path, architecture: str) -> Calibration:
    hears = architecture.startswith("Whisper")
    path = write_pairs(folder / "pairs", hears)
    names = {"input": "audio", "field": "text"} if hears else {"input": "input", "field": "target"}
    return Calibration(dataset=str(path), samples=6, sequence_length=40, **names)  # type: ignore[arg-type]
