"""Profile a model or an artifact, with its settings applied, from its name to the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from optkit.artifact import is_artifact, read_artifact, settings_of
from optkit.environment import device_name
from optkit.errors import EvalError, UsageError
from optkit.execute import materialize
from optkit.pipeline import open_artifact, plan
from optkit.progress import Progress, SilentProgress
from optkit.recipe.recipe import load_recipe
from optkit.reports.profiling.advice import Circumstances, advise
from optkit.reports.profiling.profile_report import KINDS, SHOWN, Phase, ProfileReport
from optkit.stage import Context, Setting
from optkit.store.shared import open_store

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.reports.profiling.torch_trace import Traced
    from optkit.session.onnx_session import OnnxSession
    from optkit.session.torch_session import TorchSession

WARM_UP_RUNS = 2
"""Requests before anything is timed: compilation, caches and clocks settle."""


@contextmanager
def located(
    model: str, device: str | None, store: Path | None, progress: Progress, trust_remote_code: bool = False
) -> Iterator[Path]:
    """Lend the directory of a model.
    A built-in name, a .gguf file or a hub id lies in the store, and is kept there meanwhile.
    """
    if Path(model).is_dir():
        yield Path(model)
        return
    shelf = open_store(store, progress)
    todo = plan(
        load_recipe({"model": model, "evals": ["footprint"]}).trusting(trust_remote_code), device=device, store=shelf
    )
    context = Context(device=todo.device, progress=progress, trust_remote_code=trust_remote_code)
    with shelf.using([todo.steps[0].key]):
        yield materialize(todo, 0, shelf, context, set())


def profile_model(
    model: Path | str,
    out: Path,
    *,
    batch: int = 1,
    prompt: int = 128,
    new_tokens: int = 16,
    device: str | None = None,
    store: Path | None = None,
    nvtx: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> ProfileReport:
    """Trace one request and return where its time goes.
    Traces, and on CUDA a memory snapshot, are written to `out`.

    With `nvtx` nothing is traced here: ranges are marked for Nsight Systems. Raises UsageError for
    `nvtx` without a GPU, EvalError for more tokens than the model has positions, SourceError if
    opening it would run code of others without `trust_remote_code`.
    """
    progress = progress or SilentProgress()
    with located(str(model), device, store, progress, trust_remote_code) as directory:
        session: Any = open_artifact(directory, device=device, trust_remote_code=trust_remote_code, progress=progress)
        with closing(session):
            _check(session, prompt, new_tokens, nvtx)
            settings = settings_of(read_artifact(directory)) if is_artifact(directory) else []
            tokens = _tokens(session, batch, prompt)
            return _profile(session, str(model), settings, out, tokens, new_tokens, nvtx, progress)


def _check(session: Any, prompt: int, new_tokens: int, nvtx: bool) -> None:
    where = str(session.directory)
    if not hasattr(session, "stream"):
        why = "What is traced is a prompt and the tokens after it"
        raise EvalError("it generates no tokens", where=where, why=why)
    if len(getattr(session, "devices", ())) > 1:
        why, remedy = "torch.profiler sees this process alone, and the model runs in others", "Profile it without"
        raise EvalError("its model is split over several devices", where=where, why=why, remedy=remedy)
    if nvtx and session.device == "cpu":
        remedy = "Leave it out on a CPU, or use --device cuda"
        raise UsageError("NVTX ranges are marks on a GPU's timeline", where="--nvtx", remedy=remedy)
    if prompt + new_tokens > session.positions:
        asked = f"a prompt of {prompt:,} and {new_tokens:,} new tokens"
        what = f"{asked} are more than the model's {session.positions:,} positions"
        raise EvalError(what, where="profile", remedy="Lower --prompt or --new-tokens")


def _profile(
    session: TorchSession | OnnxSession,
    model: str,
    settings: Sequence[Setting],
    out: Path,
    tokens: Tensor,
    new_tokens: int,
    nvtx: bool,
    progress: Progress,
) -> ProfileReport:
    from optkit.reports.profiling.torch_trace import mark_ranges, snapshot_memory, time_phases

    known = circumstances(session, settings)
    files: list[str] = []
    phases: tuple[Phase, ...] = ()
    with progress.task("profiling", WARM_UP_RUNS + 2, "requests") as task:
        for _ in range(WARM_UP_RUNS):
            time_phases(session, tokens, new_tokens)
            task.advance(note="warming up")
        if nvtx:
            mark_ranges(session, tokens, new_tokens)
        else:
            out.mkdir(parents=True, exist_ok=True)
            seconds = time_phases(session, tokens, new_tokens)
            task.advance(note="timed")
            traced = _trace(session, tokens, new_tokens, out)
            task.advance(note="traced")
            phases = (
                phase_of("prefill", 1, seconds[0], traced["prefill"], known),
                phase_of("decode", new_tokens - 1, seconds[1], traced["decode"], known),
            )
            files = [phase.trace for phase in phases]
        if session.device != "cpu" and not nvtx:
            snapshot_memory(session, tokens, new_tokens, out / "memory.pickle")
            files.append("memory.pickle")
    return ProfileReport(
        model=model,
        device=session.device,
        device_name=device_name(session.device),
        engine=known.engine,
        batch=tokens.shape[0],
        prompt=tokens.shape[1],
        new_tokens=new_tokens,
        phases=phases,
        settings=tuple(setting.describe(session.device) for setting in settings),
        notes=session.notes,
        files=tuple(files),
    )


def _trace(session: TorchSession | OnnxSession, tokens: Tensor, new_tokens: int, out: Path) -> dict[str, Traced]:
    from optkit.reports.profiling.onnx_trace import trace_onnx_phases
    from optkit.reports.profiling.torch_trace import trace_phases
    from optkit.session.onnx_session import OnnxSession

    if isinstance(session, OnnxSession):
        return trace_onnx_phases(session, tokens, new_tokens, out)
    return trace_phases(session, tokens, new_tokens, out)


def phase_of(
    name: Literal["prefill", "decode"], steps: int, seconds: float, traced: Traced, known: Circumstances
) -> Phase:
    """Return a phase with its advice; `seconds` is what it takes without a profiler."""
    idle_s = traced.traced_s - traced.busy_s if known.device == "cpu" else seconds - traced.busy_s
    totals = {kind: sum(line.seconds for line in traced.lines if line.kind == kind) for kind in KINDS}
    phase = Phase(
        name=name,
        steps=steps,
        seconds=seconds,
        traced_s=traced.traced_s,
        idle_s=max(0.0, idle_s),
        kinds={kind: total for kind, total in totals.items() if total},
        calls=sum(line.calls for line in traced.lines),
        top=traced.lines[:SHOWN],
        advice="",
        trace=f"{name}.trace.json",
    )
    return phase.model_copy(update={"advice": advise(phase, known)})


def circumstances(session: Any, settings: Sequence[Setting]) -> Circumstances:
    """Return what the advice depends on."""
    model = getattr(session, "model", None)
    config = getattr(model, "config", None)
    return Circumstances(
        device=session.device.partition(":")[0],
        compiled=next((mode for each in settings if (mode := each.step_mode(session.device))), None),
        quantized=getattr(config, "quantization_config", None) is not None,
        dtype=session.dtype,
        attention=str(getattr(config, "_attn_implementation", "")),
        engine="torch" if model is not None else "onnxruntime",
    )


def _tokens(session: TorchSession | OnnxSession, batch: int, prompt: int) -> Tensor:
    import torch

    return torch.randint(session.vocabulary, (batch, prompt), generator=torch.Generator().manual_seed(0))
