"""What the kernels of *.cu take, read from their text: a launch hands over bytes, which no compiler checks."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from optkit.kernels.cuda.nvrtc import SOURCES

DTYPES = {
    **{"float": torch.float32, "int": torch.int32, "unsigned int": torch.int32},
    **{"u64": torch.int64, "long long": torch.int64},
}
"""Of what a pointer points to. Other types are vectors of anything, or 16 bits, which a CPU may have as float32."""

UNREAD: dict[str, Callable[[Mapping[str, int]], bool]] = {
    "given": lambda macros: macros["BITS"] == 4,
    "scales": lambda macros: macros.get("BITS") == 4 and "SCALED" not in macros,
}
"""Arguments that a kernel compiled so does not read, or as words that hold something else."""


def check_launch(source: str, name: str, macros: Mapping[str, int], arguments: tuple[Any, ...]) -> None:
    """Hold the arguments of a launch against the parameters of its kernel."""
    parameters = parameters_of(source, name, frozenset(macros))
    assert len(arguments) == len(parameters), f"{name} of {source} takes {parameters}"
    for (kind, is_pointer, called), given in zip(parameters, arguments, strict=True):
        wanted = None if called in UNREAD and UNREAD[called](macros) else DTYPES.get(kind)
        if not is_pointer:
            fits = isinstance(given, float if kind == "float" else int)
        elif isinstance(given, Tensor):  # of uint8 is memory for anything
            fits = given.is_contiguous() and (wanted is None or given.dtype in (wanted, torch.uint8))
        else:
            fits = given is None
        assert fits, f"{called} of {name} in {source} is no {kind}{' *' * is_pointer}: {_shown(given)}"


def _shown(given: Any) -> str:
    return f"{given.dtype} {[*given.shape]} {given.stride()}" if isinstance(given, Tensor) else repr(given)


@cache
def parameters_of(source: str, name: str, macros: frozenset[str]) -> list[tuple[str, bool, str]]:
    """Return the type of each, whether it is a pointer, and its name."""
    text = (SOURCES / source).read_text(encoding="utf-8")
    text = re.sub(r"\n#ifdef (\w+)\n(.*?)#endif", lambda part: part[2] * (part[1] in macros), text, flags=re.DOTALL)
    (found,) = re.findall(rf'extern "C" __global__[^{{]*?\b{name}\(([^)]*)\) {{', text)
    each = re.findall(r"\s*(?:const )?([\w ]+?)(\*[* const]*)? (\w+)\s*(?:,|$)", found)
    return [(kind, bool(pointer), called) for kind, pointer, called in each]
