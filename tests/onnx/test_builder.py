"""The process that exports: what it is asked for, what it says, and every way in which it can end."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from optkit.errors import OptkitError, ResourceError, SourceError, StageError
from optkit.onnx import builder
from optkit.onnx.builder import ARCHITECTURES, Order, build, refuse_architecture
from optkit.progress import SilentTask
from tests.conftest import TinyModel
from tests.support.waiting import ended, wait_until

Toy = Callable[[str], Order]


@dataclass
class Heard(SilentTask):
    """A task that keeps what it is told."""

    notes: list[str] = field(default_factory=list)
    steps: int = 0

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.steps += steps
        self.notes.append(note)


@pytest.fixture
def toy(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """Return what puts a few lines in the place of the export, and returns an order."""
    monkeypatch.setattr(builder, "WORKER", "tests.support.toy_exporter")
    target = tmp_path / "step" / "onnx"
    target.mkdir(parents=True)

    def order(body: str) -> Order:
        monkeypatch.setenv("TOY_EXPORTER", body)
        return Order(tiny_model("llama"), target, "cpu", "float32")

    return order


def test_what_it_prints_is_heard_and_not_shown(toy: Toy, capfd: pytest.CaptureFixture[str]) -> None:
    heard = Heard()
    order = toy(
        "import os; print('Reading embedding layer\\nReading layer 0'); print('Reading layer "
        "1'); os.write(2, b'100%|####|')"
    )
    capfd.readouterr()
    build(order, heard)
    assert heard.notes == ["embedding layer", "layer 0", "layer 1"]
    assert heard.steps == 2
    assert capfd.readouterr() == ("", "")
    assert [*order.target.parent.iterdir()] == [order.target]


def test_it_has_no_network_and_no_gpu(toy: Toy) -> None:
    build(
        toy("import os; assert (os.environ['HF_HUB_OFFLINE'], os.environ['CUDA_VISIBLE_DEVICES']) == ('1', '')"),
        Heard(),
    )


def test_the_exporter_sees_the_model_without_its_quantization(toy: Toy) -> None:
    body = "import json, pathlib; config = json.loads((pathlib.Path(order['view']) / 'config.json').read_text()); "
    build(toy(body + "assert config['model_type'] == 'llama' and 'quantization_config' not in config"), Heard())


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (
            "raise NotImplementedError('The toy is not supported.\\nand more')",
            StageError,
            "^onnx: exporter genai: NotImplementedError: The toy is not supported. ONNX Runtime GenAI's "
            "model builder stopped there.",
        ),
        ("assert 1 == 2", StageError, r"AssertionError: .*\(<string>, line 1\)"),
        (
            "from optkit.errors import SourceError; raise SourceError('it is odd', where='there', "
            "why='So it is', remedy='Leave it')",
            SourceError,
            "^there: it is odd. So it is. Leave it.$",
        ),
        ("raise OSError(28, 'No space left on device')", ResourceError, "onnx: the disk is full. Free some space."),
        (
            "raise MemoryError",
            ResourceError,
            "^onnx: memory ran out while the model was exported. Use a machine with more memory.$",
        ),
        (
            "raise RuntimeError('DefaultCPUAllocator: not enough memory')",
            ResourceError,
            "memory ran out while the model was exported",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            ResourceError,
            r"memory ran out .* ended by SIGKILL \(the system ends a process so when memory runs out\)",
        ),
        (
            "import os; os.kill(os.getpid(), 11)",
            StageError,
            "its process was ended by SIGSEGV and without a result. It said nothing.",
        ),
        (
            "import os; [os.write(2, f'{n}\\n'.encode()) for n in range(5)]; os._exit(3)",
            StageError,
            "^onnx: exporter genai: its process ended with status 3 and without a result. Its last words: 2 / 3 / 4.$",
        ),
    ],
)
def test_every_end_is_told(toy: Toy, body: str, kind: type[OptkitError], said: str) -> None:
    order = toy(body)
    with pytest.raises(kind, match=said):
        build(order, Heard())
    assert [*order.target.parent.iterdir()] == [order.target]


SLEEPS = """import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
pathlib.Path(order["target"], "pids").write_text(f"{os.getpid()} {child.pid}")
print("Reading layer 0")
time.sleep(300)"""


def test_ctrl_c_ends_it_and_its_children(toy: Toy) -> None:
    class Interrupting(SilentTask):
        def advance(self, steps: int = 1, note: str = "") -> None:
            raise KeyboardInterrupt

    order = toy(SLEEPS)
    with pytest.raises(KeyboardInterrupt):
        build(order, Interrupting())
    assert ended(*map(int, (order.target / "pids").read_text().split()))


def test_it_ends_with_its_parent(toy: Toy) -> None:
    order = toy(SLEEPS)
    program = f"""
from pathlib import Path
from optkit.onnx import builder
from optkit.progress import SilentTask
builder.WORKER = "tests.support.toy_exporter"
builder.build(builder.Order(Path({str(order.source)!r}), Path({str(order.target)!r}), "cpu", "float32"), SilentTask())
"""
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=root, env={**os.environ, "PYTHONPATH": f"{root}"})
    pids = order.target / "pids"
    assert wait_until(lambda: pids.exists() and pids.read_text() != "")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert ended(*map(int, pids.read_text().split()))


def test_a_model_that_the_builder_does_not_know() -> None:
    with pytest.raises(
        StageError,
        match=r"^onnx: the exporter genai does not know GPT2LMHeadModel. It knows Ernie4_5ForCausalLM, Gemma2F",
    ):
        refuse_architecture("GPT2LMHeadModel")


def test_the_builder_knows_what_we_say_it_knows() -> None:
    genai = pytest.importorskip("onnxruntime_genai")
    text = (Path(genai.__file__).parent / "models" / "builder.py").read_text()
    assert [name for name in ARCHITECTURES if f'"{name}"' not in text] == []


def test_another_version_of_the_builder_is_told() -> None:
    pytest.importorskip("onnx_ir")
    from optkit.onnx.adapted_builder import REPLACED, _methods

    partial = type("Model", (), dict.fromkeys(REPLACED[2:]))
    said = (
        "^onnx: exporter genai: the builder of the installed ONNX Runtime GenAI has no has_lm_head, "
        "load_weights. optkit changes "
    )
    with pytest.raises(StageError, match=said):
        _methods(partial)
