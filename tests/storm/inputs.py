"""Models, tokenizers, GGUF files, texts, artifacts and stores that are damaged: refused in a
sentence, or read as what they still are.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.storm.damages import (
    Damage,
    change_header,
    cut,
    fifo,
    higher_ids,
    in_store,
    lose,
    patch,
    pickled,
    put,
    replaced,
    set_field,
    set_metadata,
)
from tests.storm.desk import RECIPE, Desk, clear, differences, drawn, left, run_words, write
from tests.storm.forked import apart, call
from tests.support.mutations import damaged_bytes

Case = tuple[str, Damage, bool]
"""What is damaged, how (in the directory of the model), and whether it must be refused."""
CASES = 300
"""Of nearly 500 that there are."""
WRONG_VALUES = ("text", -1, 0, 10**15, 1.5, [], {}, None, True, [10**9])


def inputs(desk: Desk, count: int | None) -> None:
    """Plan and run with damaged models and texts, then use damaged artifacts and stores."""
    if importlib.util.find_spec("gguf"):
        from tests.support.gguf_files import save_gguf

        assert apart(lambda: save_gguf((desk.root / "model").resolve(), desk.root / "whole.gguf", "llama"), 60) == 0
    cases: list[tuple[str, Any]] = [
        *(("model", case) for case in [*_configs(), *_headers(desk), *_tokenizers(), *_whole_files(desk)]),
        *(("text", case) for case in _texts()),
        *(("artifact", case) for case in _records(desk)),
        *(("store", case) for case in _stored(desk)),
        *(("gguf", case) for case in _gguf(desk)),
    ]
    for kind, (name, damage, refused) in drawn(cases, CASES if count is None else count, desk.draw):
        place = desk.place(kind)
        use = {"model": _model, "text": _text, "artifact": _artifact, "store": _store, "gguf": _gguf_run}[kind]
        flaws = use(desk, place, damage, refused, f"{kind}: {name}")
        if not flaws:
            clear(place)


def _model(desk: Desk, place: Path, damage: Damage, refused: bool, name: str) -> list[str]:
    model = place / "model"
    model.unlink()
    shutil.copytree(desk.root / "model", model)
    damage(model)
    return _judged(desk, place, name, refused)


def _judged(desk: Desk, place: Path, name: str, refused: bool, recipe: str = "r.yaml") -> list[str]:
    ended = call(["plan", recipe, "--device", "cpu", "--store", "store"], place)
    flaws = ended.flaws
    if not flaws and ended.status == 0:
        ended = call(run_words(recipe=recipe), place)
        flaws = ended.flaws
        if refused and ended.status == 0:
            flaws.append("it is accepted")
        if ended.status and (place / "out" / "optkit.json").is_file():
            finished = json.loads((place / "out" / "optkit.json").read_text(encoding="utf-8")).get("finished")
            flaws += [] if finished is False else ["an artifact that calls itself finished is left"]
    if ended.status and not flaws and not ended.err.splitlines()[-1:][0].startswith(("error: ", "warning: ")):
        flaws.append("no message at the end")
    desk.judge(name, flaws, ended)
    return flaws


def _text(desk: Desk, place: Path, damage: Damage, refused: bool, name: str) -> list[str]:
    damage(place)
    dataset = next(each.name for each in place.iterdir() if each.name.startswith("data."))
    perplexity = {"dataset": dataset, "window": 16, "windows": 2}
    calibration = {"dataset": dataset, "samples": 2, "sequence_length": 16}
    gptq = {"bits": 4, "group_size": 32, "calibration": calibration}
    write(place / "r.yaml", {**RECIPE, "evals": [{"perplexity": perplexity}]})
    write(place / "s.yaml", {**RECIPE, "stages": [{"gptq": gptq}], "evals": ["footprint"]})
    return _judged(desk, place, name, refused) + _judged(desk, place, f"{name}, to calibrate", refused, "s.yaml")


def _artifact(desk: Desk, place: Path, damage: Damage, refused: bool, name: str) -> list[str]:
    shutil.copytree(desk.peace / "out", place / "out")
    damage(place / "out")
    flaws: list[str] = []
    for words in (
        ["show", "out"],
        ["compare", "out", "out", "--json"],
        ["verify", "out", "--engine", "transformers", "--device", "cpu"],
    ):
        if words[0] == "verify" and desk.cases % 5:
            continue
        ended = call(words, place, limit_s=60.0)
        flaws += ended.flaws
        desk.judge(f"{name}, {words[0]}", ended.flaws, ended)
    return flaws


def _store(desk: Desk, place: Path, damage: Damage, refused: bool, name: str) -> list[str]:
    shutil.copytree(desk.peace / "store", place / "store")
    damage(place / "store")
    shown = call(["store", "show", "--store", "store"], place)
    ended = call(run_words(), place, limit_s=60.0)
    flaws = ended.flaws + shown.flaws
    if ended.status == 0:
        # A step that nobody needs, because the one after it is there, is not made again.
        flaws += [each for each in differences(left(desk.peace), left(place)) if not each.startswith("step")]
    desk.judge(name, flaws, ended)
    return flaws


def _configs() -> Iterator[Case]:
    """Yield config.json with one value that it cannot have."""
    numbers = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "intermediate_size",
    )
    for field in (
        *numbers,
        "architectures",
        "model_type",
        "rope_theta",
        "head_dim",
        "max_position_embeddings",
        "torch_dtype",
        "hidden_act",
    ):
        for value in WRONG_VALUES:
            refused = field in numbers and not isinstance(value, (int, float, type(None))) and value != []
            yield f"config.json {field} = {value!r}", set_field(field, value), refused
    own = {"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "modeling.Config"}
    for value in (own, ["a"], "modeling.Model", 5):
        yield f"auto_map {value!r}", set_field("auto_map", value), False
    for value in (
        {"quant_method": "gptq"},
        {"quant_method": "nobody"},
        5,
        "awq",
        {},
        {"quant_method": "compressed-tensors", "config_groups": 5},
    ):
        yield f"quantization_config {value!r}", set_field("quantization_config", value), value not in ({},)
    for text in ("", "{", "[]", "5", "null", '{"a":' * 50_000, "\0", "{}"):
        yield f"config.json is {text[:10]!r}", put("config.json", text.encode()), True
    yield "config.json is missing", lambda model: (model / "config.json").unlink(), True
    yield "config.json is a directory", replaced(Path.mkdir), True


def _headers(desk: Desk) -> Iterator[Case]:
    """Yield safetensors whose header or index is wrong."""
    changes: dict[str, Any] = {
        "dtype": [None, "F7", 5, []],
        "shape": [None, "x", [1.5], [-1, 64], [10**12, 10**12], 64],
        "data_offsets": [None, [0], [5, 1], [0, 10**12], "x", [-4, 0]],
    }
    for field, values in changes.items():
        for value in values:
            yield (
                f"header {field} = {value!r}",
                change_header(lambda entry, field=field, value=value: entry.update({field: value})),
                True,
            )
        yield f"header without {field}", change_header(lambda entry, field=field: entry.pop(field)), True
    yield "header metadata is a number", set_metadata(5), True
    for length in (0, 1, 2**40, 2**63, 2**64 - 1):
        yield f"header of {length} bytes", patch("model.safetensors", 0, struct.pack("<Q", length)), True
    for share in (0.0, 0.001, 0.5, 0.999):
        yield f"weights cut at {share}", cut("model.safetensors", share), True
    yield "the weights are a pickle", pickled(desk.canary("pickle")), True
    places = ("../../x.safetensors", "/etc/passwd", 5, "none.safetensors")
    for value in (*({"weight_map": {"a": place}} for place in places), {"weight_map": 5}, [], 5, {}):
        yield f"index {value!r}", put("model.safetensors.index.json", json.dumps(value).encode()), True
    for index in range(10):
        place = desk.draw.randrange(8, 2000)
        yield (
            f"header byte {place} ({index})",
            patch("model.safetensors", place, bytes([desk.draw.randrange(256)])),
            False,
        )


def _tokenizers() -> Iterator[Case]:
    """Yield tokenizers that cannot be read, or are another model's."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for text in ("", "{", "[]", "5", "null", "{}", '"text"'):
            yield f"{name} is {text!r}", put(name, text.encode()), name == "tokenizer.json"
        yield f"{name} is no text", put(name, b"\xff\xfe\0"), name == "tokenizer.json"
    yield "there is no tokenizer", lose("*token*"), True
    yield "ids beyond the vocabulary", higher_ids, True
    for key, value in (
        ("model", None),
        ("model", 5),
        ("model", {"type": "Nobody"}),
        ("pre_tokenizer", 5),
        ("decoder", {"type": "x"}),
        ("added_tokens", 5),
    ):
        yield f"tokenizer.json {key} = {value!r}", set_field(key, value, "tokenizer.json"), True
    for key, value in (
        ("tokenizer_class", 5),
        ("tokenizer_class", "Nobody"),
        ("auto_map", {"AutoTokenizer": ["x.X", None]}),
        ("model_max_length", "x"),
    ):
        yield f"tokenizer_config.json {key} = {value!r}", set_field(key, value, "tokenizer_config.json"), False


def _whole_files(desk: Desk) -> Iterator[Case]:
    """Yield what is no file, or nobody's business."""
    yield "a FIFO for the weights", fifo("model.safetensors"), True
    yield "a FIFO for the config", fifo("config.json"), True
    yield "a link that leads nowhere", replaced(lambda path: path.symlink_to("none")), True
    code = f"open({str(desk.canary('model code'))!r}, 'w')\n"
    yield "python beside it", put("modeling.py", code.encode()), False
    yield "a package beside it", put("transformers.py", code.encode()), False
    yield "a sitecustomize beside it", put("sitecustomize.py", code.encode()), False


def _texts() -> Iterator[Case]:
    """Yield data that holds no text."""
    rows = [
        b"{",
        b"[]",
        b"5",
        b'{"text": 5}',
        b'{"other": "x"}',
        b'{"text": null}',
        b"\xff",
        b'{"text": "a b c"}',
        b'{"text": ' + b"[" * 50_000,
    ]
    contents = {"data.txt": [b"", b"  \n", b"\xff\xfe\0\0", b"a b c"], "data.jsonl": [b"", *rows]}
    for name, texts in contents.items():
        for text in texts:
            yield f"{name} is {text[:20]!r}", put(name, text), True
        yield f"{name} is a directory", lambda place, name=name: (place / name).mkdir(), True
        yield f"{name} is a FIFO", fifo(name), True


def _records(desk: Desk) -> Iterator[Case]:
    """Yield artifacts whose own files were changed."""
    for name in ("optkit.json", "scorecard.json"):
        for text in ("", "{", "[]", "5", "null", "{}", '{"a":' * 20_000):
            yield f"{name} is {text[:10]!r}", put(name, text.encode()), True
    for field in (
        "name",
        "key",
        "recipe",
        "settings",
        "steps",
        "files",
        "calibrated_on",
        "finished",
        "optkit_artifact",
    ):
        for value in ("x", 5, [], {"a": 1}, None):
            yield f"optkit.json {field} = {value!r}", set_field(field, value, "optkit.json"), False
    yield "weights cut", cut("model.safetensors", 0.5), True


def _stored(desk: Desk) -> Iterator[Case]:
    """Yield stores in which a file was changed or cut off: the next run makes it again."""
    for pattern in (
        "steps/*/record.json",
        "steps/*/model/config.json",
        "steps/*/model/*.safetensors",
        "metrics/*.json",
        "counts/*.json",
    ):
        for what, text in (
            ("empty", b""),
            ("cut off", None),
            ("a list", b"[]"),
            ("no text", b"\xff"),
            ("a word", b"null"),
        ):
            yield f"{pattern} is {what}", in_store(desk, pattern, text), False


def _gguf(desk: Desk) -> Iterator[Case]:
    """Yield GGUF files that are none."""
    head = b"GGUF" + struct.pack("<I", 3)
    counts = (0, 1, 2**32, 2**62, 2**64 - 1)
    for tensors in counts:
        for values in counts:
            yield (
                f"{tensors} tensors, {values} values",
                put("m.gguf", head + struct.pack("<QQ", tensors, values)),
                True,
            )
    if (whole := desk.root / "whole.gguf").is_file():
        for index in range(20):
            yield f"changed bytes {index}", put("m.gguf", damaged_bytes(whole.read_bytes(), desk.draw, 4000)), False
    for index in range(10):
        yield f"random bytes {index}", put("m.gguf", head + desk.draw.randbytes(200)), True
    for text in (b"", b"GGUF", b"GGML" + bytes(60), b"\0" * 100, head):
        yield f"file {text[:8]!r}", put("m.gguf", text), True


def _gguf_run(desk: Desk, place: Path, damage: Damage, refused: bool, name: str) -> list[str]:
    damage(place)
    write(place / "r.yaml", {**RECIPE, "model": "m.gguf"})
    return _judged(desk, place, name, refused)
