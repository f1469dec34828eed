"""Setting `compile`: torch.compile for the decode step of an opened model."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from optkit.common.field_types import AtLeastOne
from optkit.errors import MissingPackageError, StageError
from optkit.model.shape import ModelShape
from optkit.settings.kv_cache import KvCache
from optkit.settings.speculative import Speculative
from optkit.stage import Setting

RECOMPILE_LIMIT = 64
"""Shapes of requests (batch, length of the cache) that are compiled before torch stops compiling."""
GIVEN_UP = "Dynamo recompile limit exceeded"
"""How torch's counter of what it does not compile names too many shapes."""


class Compile(Setting):
    """Compile the decode step with torch.compile, on the devices where that pays; prompts run as
    they are, since each has its own shape.

    What was compiled is kept between processes, in torch's own cache (`$TORCHINDUCTOR_CACHE_DIR`).
    """

    kind: ClassVar[str] = "compile"
    shorthand: ClassVar[str] = "mode"

    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """`reduce-overhead` replays CUDA graphs; `max-autotune` also times several kernels for each
    product, for minutes.
    """
    devices: AtLeastOne[Literal["cpu", "cuda"]] = ("cuda",)
    """Where it is applied; elsewhere the model runs as it is, and the scorecard says so."""

    fullgraph: bool = False
    """Refuse a step that torch cannot compile as one graph. Otherwise the scorecard counts the
    breaks and names their lines.
    """
    dynamic: bool = False
    """Compile for any shape at once instead of once for each batch and length of the cache: fewer
    compilations, slower code.
    """

    def check(self, shape: ModelShape, device: str, directory: Path | None = None) -> None:
        """Raise StageError or MissingPackageError where there is no compiler."""
        if self.applies(device):
            _require_tools(_kind(device))

    def excludes(self, other: Setting, device: str) -> str:
        """Return why the compiled step cannot be used beside another setting."""
        if not self.applies(device):
            return ""
        if isinstance(other, Speculative):
            return "The compiled step takes one token at a time, and speculative decoding checks several"
        if isinstance(other, KvCache):
            return (
                "A KV cache of codes grows with every token, and the compiled step needs one as long "
                "as the request from the start"
            )
        return ""

    def on_load(self, model: Any, device: str) -> Any:
        """Return the model, its calls compiled.

        Raises StageError or MissingPackageError where there is no compiler, StageError for
        flash_attention_2.
        """
        if not self.applies(device):
            return model
        if "flash" in str(model.config._attn_implementation):
            raise StageError(
                f"a compiled step cannot use {model.config._attn_implementation}",
                where="compile",
                why="Its KV cache is as long as the request from the start, and these kernels would "
                "attend to the empty part",
                remedy="Use sdpa or flex_attention with compile, or take one of the two settings out of the recipe",
            )
        if _kind(device) == "cpu" and model.config._attn_implementation == "flex_attention":
            raise StageError(
                "a compiled step cannot use flex_attention on the CPU",
                where="compile",
                why="The C++ that torch 2.13 writes for it does not compile",
                remedy="Use sdpa, or take cpu out of `devices`",
            )
        _require_tools(_kind(device))
        silence_advice()
        allow_many_shapes()
        model.compile(
            mode=None if self.mode == "default" else self.mode, dynamic=self.dynamic, fullgraph=self.fullgraph
        )
        return model

    def applies(self, device: str) -> bool:
        """Say whether the model is compiled on a device."""
        return _kind(device) in self.devices

    def describe(self, device: str) -> str:
        """Return e.g. `compile: default` or `compile: off on cpu (devices: cuda)`."""
        if self.applies(device):
            return f"compile: {self.mode}{', fullgraph' * self.fullgraph}{', dynamic' * self.dynamic}"
        return f"compile: off on {_kind(device)} (devices: {', '.join(self.devices)})"


def silence_advice() -> None:
    """Keep torch's compiler from telling the user of optkit to allow TensorFloat32, which would
    change what is measured.
    """
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning, r"torch\._inductor\.compile_fx")


def allow_many_shapes() -> None:
    """Let torch compile a function for `RECOMPILE_LIMIT` shapes; its own limit is 8."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)


def times_given_up() -> int:
    """Return how often in this process torch ran a function as it is because it had been compiled
    for too many shapes.
    """
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return sum(count for reason, count in counters["unimplemented"].items() if reason.startswith(GIVEN_UP))


def _kind(device: str) -> str:
    return device.partition(":")[0]


def _require_tools(kind: str) -> None:
    if kind == "cuda":
        _require_triton()
    _require_compiler(kind)


def _require_triton() -> None:
    if find_spec("triton") is None:
        raise MissingPackageError("triton", where="compile on cuda")


def _require_compiler(kind: str) -> None:
    """Raise StageError where the compiler that torch (C++, on the CPU) or triton (C, on a GPU)
    calls is not there.
    """
    language, variable, names = (
        ("C++", "CXX", ("g++", "clang++")) if kind == "cpu" else ("C", "CC", ("gcc", "clang", "cc"))
    )
    named = os.environ.get(variable)
    if not _found([named] if named else names):
        raise StageError(
            f"there is no {language} compiler{f' {named} (${variable})' if named else ''}",
            where=f"compile on {kind}",
            why="torch.compile writes code and compiles it",
            remedy=f"Install {names[0]}, or take {kind} out of `devices`",
        )


def _found(names: Iterable[str]) -> bool:
    return any(shutil.which(name) for name in names)
