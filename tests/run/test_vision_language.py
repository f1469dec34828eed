"""A recipe of a model that sees, from its directory to an artifact that sees as well."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from optkit import pipeline
from optkit.model.checkpoint import Checkpoint
from optkit.session import open_session
from optkit.source.directory import without_processor
from tests.support.processors import save_processor
from tests.support.vision_models import save_vision_model

RECIPE = """\
name: sees
model: {model}
stages:
  - rtn: {{group_size: 32}}
evals:
  - perplexity: {{dataset: {text}, window: 64, windows: 2}}
  - divergence: {{dataset: {text}, window: 64, windows: 2}}
  - footprint
"""
PROCESSOR = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tools.jinja",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_vision_model("llava", tmp_path_factory.mktemp("llava"))
    save_processor("llava", directory)
    (directory / "additional_chat_templates").mkdir()
    for name in PROCESSOR:
        if not (directory / name).exists():
            (directory / name).write_text("{}", encoding="utf-8")
    return directory


def test_a_run_leaves_a_model_that_sees_what_it_saw(model: Path, letters: Path, tmp_path: Path) -> None:
    (tmp_path / "sees.yaml").write_text(RECIPE.format(model=model, text=letters), encoding="utf-8")
    out = tmp_path / "out"
    scorecard = pipeline.run(tmp_path / "sees.yaml", out=out, store=tmp_path / "store", device="cpu")
    rows = {row.metric.name: row for row in scorecard.rows}
    assert {"perplexity", "kl_divergence", "size_bytes"} <= rows.keys()
    assert rows["kl_divergence"].metric.value > 0
    assert not any("processor" in note for note in scorecard.notes)
    assert all((out / name).read_bytes() == (model / name).read_bytes() for name in PROCESSOR)

    source, written = Checkpoint(model), Checkpoint(out)
    towers = [name for name in source.tensors if source.shape.in_tower(name)]
    assert len(towers) > 60
    assert all(torch.equal(source.read(name), written.read(name)) for name in towers)

    processors = [AutoProcessor.from_pretrained(each, local_files_only=True) for each in (model, out)]
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    picture = Image.new("RGB", (40, 30), "red")
    before, after = (
        each(text=each.apply_chat_template(asked), images=picture, return_tensors="pt") for each in processors
    )
    assert all(torch.equal(before[name], after[name]) for name in ("input_ids", "pixel_values"))

    image = torch.rand(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[1, *[500] * 4, 7, 8, 9]])
    ours = open_session(out).model(input_ids=tokens, pixel_values=image).logits
    theirs = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32, device_map="cpu").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=tokens, pixel_values=image).logits, ours, atol=1e-4, rtol=0)
        other = theirs(input_ids=tokens, pixel_values=1 - image).logits
    assert not torch.allclose(other, ours, atol=0.01)


def test_a_missing_processor_is_a_note(model: Path, tmp_path: Path) -> None:
    assert without_processor(model) == ""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert without_processor(tmp_path) == (
        "there is no processor beside the model (preprocessor_config.json): programs read no images or audio with "
        "the artifact until it is copied there"
    )
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_config": None}), encoding="utf-8")
    assert without_processor(tmp_path) == ""
