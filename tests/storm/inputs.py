"""Models, GGUF files, texts, artifacts and stores with one damaged file: refused in a sentence, or
read as what they still are. The damage is that of the fuzzed tests, seen by whole commands.
"""

import importlib.util
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.storm.desk import RECIPE, Desk, clear, differences, left, run_words, write
from tests.storm.forked import apart, call
from tests.support import mutations

CASES = 300
WORDS = "a text of many words that goes on and on, line after line, until there are enough of them\n"


def inputs(desk: Desk, count: int | None) -> None:
    """Plan and run with damaged models and texts, then use damaged artifacts and stores."""
    kinds: list[Callable[[Desk, Path], list[str]]] = [_model, _model, _code, _text, _artifact, _store]
    if importlib.util.find_spec("gguf"):
        from tests.support.gguf_files import save_gguf

        assert apart(lambda: save_gguf((desk.root / "model").resolve(), desk.root / "whole.gguf", "llama"), 60) == 0
        kinds.append(_gguf)
    for _ in range(CASES if count is None else count):
        kind = desk.draw.choice(kinds)
        place = desk.place(kind.__name__.strip("_"))
        if not kind(desk, place):
            clear(place)


def damaged(path: Path, draw: Random) -> str:
    """Damage a file, and say which and how."""
    valid = path.read_bytes()
    path.unlink()  # it may be a link to the file of another case
    match draw.randrange(12):
        case 0:
            return f"{path.name} is missing"
        case 1:
            os.mkfifo(path)
        case 2:
            path.mkdir()
        case 3:
            path.symlink_to("none")
        case _:
            path.write_bytes(_changed(path.suffix, valid, draw))
    return f"{path.name} is damaged"


def _changed(suffix: str, valid: bytes, draw: Random) -> bytes:
    match suffix:
        case ".json":
            return mutations.damaged_json_text(json.loads(valid), draw)
        case ".safetensors":
            return mutations.damaged_safetensors(valid, draw)
        case ".gguf":
            return mutations.damaged_bytes(valid, draw, 4000)
        case _:
            return mutations.damaged_text(valid.decode(), draw).encode()


def _model(desk: Desk, place: Path) -> list[str]:
    files = sorted(path for path in _own_model(desk, place).iterdir() if path.suffix in (".json", ".safetensors"))
    return _judged(desk, place, damaged(desk.draw.choice(files), desk.draw))


def _code(desk: Desk, place: Path) -> list[str]:
    """Put code into a model that nobody may execute."""
    model, canary = _own_model(desk, place), str(desk.canary("code of the model"))
    if desk.draw.random() < 0.5:
        name = desk.draw.choice(("modeling.py", "transformers.py", "sitecustomize.py"))
        (model / name).write_text(f"open({canary!r}, 'w')\n", encoding="utf-8")
    else:
        name = "pytorch_model.bin"
        (model / "model.safetensors").unlink()
        (model / name).write_bytes(pickle.dumps(Opened(canary)))
    return _judged(desk, place, f"there is {name}")


class Opened:
    """What leaves a file as soon as it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def _gguf(desk: Desk, place: Path) -> list[str]:
    shutil.copy(desk.root / "whole.gguf", place / "m.gguf")
    write(place / "r.yaml", {**RECIPE, "model": "m.gguf"})
    return _judged(desk, place, damaged(place / "m.gguf", desk.draw))


def _text(desk: Desk, place: Path) -> list[str]:
    records = "".join(json.dumps({"text": WORDS * 3}) + "\n" for _ in range(4))
    name, text = desk.draw.choice((("data.txt", WORDS * 12), ("data.jsonl", records)))
    (place / name).write_text(text, encoding="utf-8")
    how = damaged(place / name, desk.draw)
    perplexity = {"dataset": name, "window": 16, "windows": 2}
    calibration = {"dataset": name, "samples": 2, "sequence_length": 16}
    gptq = {"bits": 4, "group_size": 32, "calibration": calibration}
    write(place / "r.yaml", {**RECIPE, "evals": [{"perplexity": perplexity}]})
    write(place / "s.yaml", {**RECIPE, "stages": [{"gptq": gptq}], "evals": ["footprint"]})
    return _judged(desk, place, how) + _judged(desk, place, f"{how}, to calibrate", "s.yaml")


def _artifact(desk: Desk, place: Path) -> list[str]:
    shutil.copytree(desk.peace / "out", place / "out")
    name = desk.draw.choice(("optkit.json", "scorecard.json", "model.safetensors"))
    how, flaws = damaged(place / "out" / name, desk.draw), list[str]()
    verify = ["verify", "out", "--engine", "transformers", "--device", "cpu"]
    for words in (["show", "out"], ["compare", "out", "out", "--json"], *([verify] if desk.cases % 5 == 0 else [])):
        ended = call(words, place, limit_s=60.0)
        flaws += ended.flaws
        desk.judge(f"{how}, {words[0]}", ended.flaws, ended)
    return flaws


def _store(desk: Desk, place: Path) -> list[str]:
    """Damage a file of a store: the next run makes it again, but a step that nobody needs."""
    shutil.copytree(desk.peace / "store", place / "store")
    pattern = desk.draw.choice(
        ("steps/*/record.json", "steps/*/model/config.json", "steps/*/model/*.safetensors", "metrics/*.json")
    )
    how = damaged(desk.draw.choice(sorted((place / "store").glob(pattern))), desk.draw)
    shown, ended = call(["store", "show", "--store", "store"], place), call(run_words(), place, limit_s=60.0)
    flaws = ended.flaws + shown.flaws
    if ended.status == 0:
        flaws += [each for each in differences(left(desk.peace), left(place)) if not each.startswith("step")]
    desk.judge(how, flaws, ended)
    return flaws


def _own_model(desk: Desk, place: Path) -> Path:
    """Put a copy of the model in the place of the link to it."""
    (place / "model").unlink()
    return Path(shutil.copytree(desk.root / "model", place / "model"))


def _judged(desk: Desk, place: Path, name: str, recipe: str = "r.yaml") -> list[str]:
    """Plan a recipe, and run it if it can be planned."""
    ended = call(["plan", recipe, "--device", "cpu", "--store", "store"], place)
    flaws = ended.flaws
    if not flaws and ended.status == 0:
        ended = call(run_words(recipe=recipe), place)
        flaws = ended.flaws
        if ended.status and (place / "out" / "optkit.json").is_file():
            finished = json.loads((place / "out" / "optkit.json").read_text(encoding="utf-8")).get("finished")
            flaws += [] if finished is False else ["an artifact that calls itself finished is left"]
    if ended.status and not flaws and not ended.err.splitlines()[-1:][0].startswith(("error: ", "warning: ")):
        flaws.append("no message at the end")
    desk.judge(name, flaws, ended)
    return flaws
