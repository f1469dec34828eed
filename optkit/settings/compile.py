"""Setting `compile`: torch.compile for the decode step of an opened model."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from optkit.common.field_types import AtLeastOne
from optkit.environment import COMPILERS, find_compiler
from optkit.errors import MissingPackageError, StageError
from optkit.model.attention import refuse_without_steps
from optkit.model.compiling import allow_many_shapes, keep_waiting_out_of_graphs, silence_advice
from optkit.model.shape import ModelShape
from optkit.settings.kv_cache import KvCache
from optkit.settings.speculative import Speculative
from optkit.stage import Setting

LANGUAGES = {"cpu": "C++", "cuda": "C"}
"""Kind of device -> what torch, or triton, writes its code in."""


class Compile(Setting):
    """Compile the decode step with torch.compile, on the devices that profit.
    Prompts run as they are, since each has its own shape.

    What was compiled is kept between processes, in torch's own cache (`$TORCHINDUCTOR_CACHE_DIR`).
    """

    kind: ClassVar[str] = "compile"
    example: ClassVar[str] = "- compile: {mode: reduce-overhead, devices: [cuda]}"
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
        """Raise StageError without a decode step or a compiler, MissingPackageError without triton."""
        refuse_without_steps(shape.config, self.kind)
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

        Raises StageError or MissingPackageError if there is no compiler, StageError for
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
        keep_waiting_out_of_graphs()
        model.compile(
            mode=None if self.mode == "default" else self.mode, dynamic=self.dynamic, fullgraph=self.fullgraph
        )
        return model

    def applies(self, device: str) -> bool:
        return _kind(device) in self.devices

    def step_mode(self, device: str) -> str:
        return self.mode if self.applies(device) else ""

    @classmethod
    def lacking(cls) -> tuple[str, str] | None:
        """Return that there is no C++ compiler, without which no CPU compiles."""
        return (
            None if find_compiler("C++") else ("no C++ compiler was found, which it needs on a CPU", "apt install g++")
        )

    def describe(self, device: str) -> str:
        """Return e.g. `compile: default` or `compile: off on cpu (devices: cuda)`."""
        if self.applies(device):
            return f"compile: {self.mode}{', fullgraph' * self.fullgraph}{', dynamic' * self.dynamic}"
        return f"compile: off on {_kind(device)} (devices: {', '.join(self.devices)})"


def _kind(device: str) -> str:
    return device.partition(":")[0]


def _require_tools(kind: str) -> None:
    """Raise MissingPackageError without triton on a GPU, StageError without the compiler to call.
    torch calls C++ on the CPU, triton C on a GPU.
    """
    if kind == "cuda" and find_spec("triton") is None:
        raise MissingPackageError("triton", where="compile on cuda")
    language = LANGUAGES[kind]
    if find_compiler(language) is None:
        variable, names = COMPILERS[language]
        named = os.environ.get(variable)
        raise StageError(
            f"there is no {language} compiler{f' {named} (${variable})' if named else ''}",
            where=f"compile on {kind}",
            why="torch.compile writes code and compiles it",
            remedy=f"Install {names[0]}, or take {kind} out of `devices`",
        )
