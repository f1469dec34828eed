"""Every reader of a format, fed with what is nearly right: it reads it, or raises an error of
optkit.
"""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from optkit.errors import OptkitError
from tests.storm.desk import RECIPE, Desk
from tests.storm.forked import LIMIT_S, apart
from tests.support.mutations import damaged_bytes, damaged_json_text, damaged_text

MUTATIONS = 150
AT_ONCE = 25
"""Mutations that one fork tries; which of them hangs is told by the note that it leaves."""
Feed = Callable[[], None]
"""Makes one mutation and reads it."""


def parsers(desk: Desk, count: int | None) -> None:
    """Feed each reader its mutations; `count` is of each of them."""
    seed = Path(shutil.copytree(desk.peace, desk.root / "seed", symlinks=True))
    for name, feed in _feeds(desk, seed):
        note = desk.root / "note.txt"
        flaws: list[str] = []
        for start in range(0, MUTATIONS if count is None else count, AT_ONCE):
            note.write_text("", encoding="utf-8")
            desk.draw.seed(desk.draw.getrandbits(64))  # what a fork draws, this process does not
            status = apart(lambda feed=feed, note=note: _feed(feed, note), LIMIT_S)  # type: ignore[misc]
            told = note.read_text(encoding="utf-8", errors="replace")
            if status is None:
                flaws.append(f"hangs (mutations {start} to {start + AT_ONCE})")
            elif status or told:
                flaws.append(told or f"ended with {status} (mutations {start} to {start + AT_ONCE})")
            if flaws:
                break
        desk.judge(f"reader of {name}", flaws)


def _feed(feed: Feed, note: Path) -> None:
    for _ in range(AT_ONCE):
        try:
            feed()
        except (OptkitError, click.ClickException):
            continue
        except BaseException as error:
            frames = [
                f"{Path(each.filename).name}:{each.lineno}" for each in traceback.extract_tb(error.__traceback__)[-3:]
            ]
            note.write_text(f"{type(error).__name__}: {str(error)[:160]} at {' > '.join(frames)}", encoding="utf-8")
            return


def _feeds(desk: Desk, seed: Path) -> Iterator[tuple[str, Feed]]:
    yield from _of_words(desk)
    yield from _of_models(desk)
    yield from _of_records(desk, seed)
    yield from _of_texts(desk)
    yield from _of_binaries(desk)


def _of_words(desk: Desk) -> Iterator[tuple[str, Feed]]:
    """Yield the readers of what users write by hand."""
    from optkit_cli.options import assignment, device
    from optkit_cli.store import AGE, SIZE

    from optkit.common.byte_sizes import size_bytes
    from optkit.recipe.gates import parse_gate
    from optkit.recipe.recipe import load_recipe

    draw, recipes = desk.draw, sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
    yield (
        "recipes",
        lambda: _ignore(load_recipe, damaged_text(draw.choice(recipes).read_text(encoding="utf-8"), draw) + "\n"),
    )
    yield (
        "recipes as JSON",
        lambda: _ignore(load_recipe, damaged_json_text(RECIPE, draw).decode("utf-8", "replace") + "\n"),
    )
    yield "overrides", lambda: _ignore(load_recipe, RECIPE, overrides=[damaged_text("stages.1.rtn.bits=4", draw)])
    yield (
        "gates",
        lambda: _or_value_error(
            parse_gate, damaged_text("decode_tokens_per_s[batch=1]", draw), damaged_text(">= 1.10x", draw)
        ),
    )
    yield "sizes", lambda: _or_value_error(size_bytes, damaged_text("20 GB", draw))
    words = {
        "ages": (AGE, "30d"),
        "sizes with units": (SIZE, "20 GB"),
        "devices": (device, "cuda:0"),
        "words": (assignment, "a.b=c"),
    }
    for name, (read, text) in words.items():
        yield name, lambda read=read, text=text: _ignore(read, damaged_text(text, draw))  # type: ignore[misc]


def _of_models(desk: Desk) -> Iterator[tuple[str, Feed]]:
    """Yield the readers of a model's files."""
    from optkit.model.checkpoint import Checkpoint
    from optkit.model.pooling import read_pooling
    from optkit.source.calibration import load_tokenizer
    from optkit.source.models import ModelSource, model_shape, pin_model
    from optkit.source.text_place import TextPlace
    from optkit.source.token_counts import TokenCounts
    from optkit.source.training_text import TrainingText

    draw, model = desk.draw, Path(shutil.copytree(desk.root / "model", desk.root / "fed"))
    config, tokenizer, its_config = (
        _json(model / name) for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    )
    weights = (model / "model.safetensors").read_bytes()
    text = TrainingText(dataset="python-reference", split="test", packing="joined")

    def restored(name: str, data: bytes, use: Callable[[], Any]) -> None:
        kept = (model / name).read_bytes() if (model / name).exists() else None
        (model / name).write_bytes(data)
        try:
            use()
        finally:
            (model / name).unlink() if kept is None else (model / name).write_bytes(kept)

    def shape() -> Any:
        pinned = pin_model(ModelSource(name=str(model)), desk.root / "digests")
        return model_shape(pinned, model)

    def count() -> Any:
        counts = TokenCounts.of(TextPlace(model, None, desk.root / "counts"))
        return counts.enough_sequences((text,), 32, 4)

    yield "config.json", lambda: restored("config.json", damaged_json_text(config, draw), shape)
    yield (
        "safetensors",
        lambda: restored(
            "model.safetensors", damaged_bytes(weights, draw, 3000), lambda: Checkpoint(model).shape.size_bytes
        ),
    )
    index = {"metadata": {"total_size": 1}, "weight_map": {"lm_head.weight": "model.safetensors"}}
    yield (
        "index.json",
        lambda: restored("model.safetensors.index.json", damaged_json_text(index, draw), lambda: Checkpoint(model)),
    )
    yield "tokenizer.json", lambda: restored("tokenizer.json", damaged_json_text(tokenizer, draw), count)
    yield (
        "tokenizer_config.json",
        lambda: restored("tokenizer_config.json", damaged_json_text(its_config, draw), lambda: load_tokenizer(model)),
    )
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    yield (
        "modules.json",
        lambda: restored("modules.json", damaged_json_text(modules, draw), lambda: read_pooling(model)),
    )


def _of_records(desk: Desk, seed: Path) -> Iterator[tuple[str, Feed]]:
    """Yield the readers of what optkit wrote itself."""
    from optkit.artifact import read_artifact
    from optkit.scorecard import read_json
    from optkit.store.contents import survey
    from optkit.store.store import Store

    draw, out, store = desk.draw, seed / "out", Store(seed / "store")
    record, scorecard = _json(out / "optkit.json"), _json(out / "scorecard.json")
    step = next(iter((seed / "store" / "steps").iterdir()))
    metric = next(iter((seed / "store" / "metrics").iterdir()))
    kept_step, kept_metric = _json(step / "record.json"), _json(metric)

    def fed(path: Path, value: Any, use: Callable[[], Any]) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(damaged_json_text(value, draw))
        use()

    yield "optkit.json", lambda: fed(out / "optkit.json", record, lambda: read_artifact(out).check())
    yield "scorecard.json", lambda: fed(out / "scorecard.json", scorecard, lambda: read_json(out / "scorecard.json"))
    yield "record.json", lambda: fed(step / "record.json", kept_step, lambda: (store.get(step.name), survey(store)))
    yield "metrics", lambda: fed(metric, kept_metric, lambda: store.get_json(metric.stem))


def _of_texts(desk: Desk) -> Iterator[tuple[str, Feed]]:
    """Yield the readers of data."""
    from optkit.source.texts import TextSource

    draw, lines = desk.draw, desk.root / "data.jsonl"

    def read() -> None:
        rows = [damaged_json_text({"text": "a b c", "id": 5}, draw) for _ in range(5)]
        lines.write_bytes(b"\n".join(rows))
        TextSource(dataset=str(lines)).documents(None)

    yield "jsonl", read


def _of_binaries(desk: Desk) -> Iterator[tuple[str, Feed]]:
    """Yield the readers of GGUF and ONNX, if the packages that write them are installed."""
    from optkit.model.gguf_file import read_gguf
    from optkit.source.gguf_llama import checkpoint_shape

    draw = desk.draw
    try:
        from tests.support.gguf_files import save_gguf

        file = desk.root / "seed.gguf"
        assert apart(lambda: save_gguf((desk.root / "model").resolve(), file, "llama"), 60) == 0
        data, fed = file.read_bytes(), desk.root / "fed.gguf"
        yield (
            "gguf",
            lambda: (fed.write_bytes(damaged_bytes(data, draw, 4000)), checkpoint_shape(read_gguf(fed)))[0] and None,
        )
    except (ImportError, click.ClickException):
        pass
    try:
        import onnx
    except ImportError:
        return
    from optkit.model.onnx_file import OnnxFile

    port = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["x2"])], "g", [port], [port])
    model, place = onnx.helper.make_model(graph).SerializeToString(), desk.root / "model.onnx"
    yield "onnx", lambda: (place.write_bytes(damaged_bytes(model, draw)), OnnxFile(place))[0] and None


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _ignore(read: Callable[..., Any], *given: Any, **named: Any) -> None:
    read(*given, **named)


def _or_value_error(read: Callable[..., Any], *given: Any) -> None:
    """Read what is documented to raise ValueError, whose caller tells the place."""
    with suppress(ValueError):
        read(*given)
