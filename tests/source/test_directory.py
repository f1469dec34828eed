"""Which decoders behind other towers are taken."""

from pathlib import Path

import pytest

from optkit.errors import SourceError
from optkit.model.task import Task, loader_of, task_of
from optkit.source import digests
from optkit.source.digests import FileDigests
from optkit.source.directory import check_config, directory_revision


@pytest.mark.parametrize(
    ("tower", "loader"),
    [("vision_config", "AutoModelForImageTextToText"), ("audio_config", "AutoModelForMultimodalLM")],
)
def test_a_decoder_behind_a_tower(tower: str, loader: str) -> None:
    config = {"architectures": ["XForConditionalGeneration"], "model_type": "llava", tower: {"depth": 1}}
    check_config({**config, "text_config": {"hidden_size": 1}}, "here", False)
    check_config(config, "here", False)
    assert task_of(config) is Task.GENERATION
    assert loader_of(config) == loader
    for other in ({"is_encoder_decoder": True}, {"text_config": {"is_encoder_decoder": True}}):
        with pytest.raises(SourceError, match="XForConditionalGeneration.* in front of the decoder, and encoders"):
            check_config({**config, **other}, "here", False)


def test_a_text_that_is_seen_whole() -> None:
    config = {"architectures": ["XForConditionalGeneration"], "model_type": "llava", "vision_config": {"depth": 1}}
    config |= {"text_config": {"use_bidirectional_attention": True}}
    check_config({**config, "model_type": "paligemma"}, "here", False)  # the answers of its prompts are causal
    with pytest.raises(SourceError) as caught:
        check_config(config, "here", False)
    assert str(caught.value) == (
        "here: in XForConditionalGeneration each token of a prompt sees those behind it. optkit calibrates and "
        "measures with texts whose next token is not seen yet. Take a model with causal attention, e.g. Gemma 3."
    )


def test_what_was_read_before_a_stop_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    shards = [model / f"{number}.safetensors" for number in range(3)]
    for shard in shards:
        shard.write_bytes(bytes(16))
    read, stop_at = [], [shards[1]]

    def sha256_of(path: Path) -> str:
        if path in stop_at:
            raise KeyboardInterrupt
        read.append(path.name)
        return path.name

    monkeypatch.setattr(digests, "REMEMBERED_BYTES", 1)
    monkeypatch.setattr(digests, "sha256_of", sha256_of)
    monkeypatch.setattr(digests, "cpu_threads", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        directory_revision(model, shards, FileDigests(cache))
    read.clear()
    stop_at.clear()
    directory_revision(model, shards, FileDigests(cache))
    assert shards[0].name not in read
    assert shards[1].name in read
