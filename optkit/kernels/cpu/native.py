"""The C++ beside this file, compiled when first needed by the compiler of torch.compile."""

from __future__ import annotations

import hashlib
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from optkit.algorithms.column_kernels import use_compiled
from optkit.common.cache import cache_directory
from optkit.environment import asks_exact, compiler_names, cpu_architecture, cpu_flags, cpu_name, find_compiler
from optkit.kernels.library_cache import LENGTH, keep_library, kept_library, private_directory
from optkit.processes.commands import python_command, python_environment, run

DIRECTORY = Path(__file__).parent
SOURCES = ("linear.cpp", "decoding.cpp", "columns.cpp", "prompts.cpp")
HEADERS = ("decoder.h", "matrix.h", "pairs.h", "tiles.h", "vectors.h")
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared")
LINKED_BY_NAME = "-Wl,-undefined,dynamic_lookup"
"""What macOS needs beside `FLAGS`: torch's functions are found when the library is loaded."""
TIME_LIMIT_S = 300
STEP_ROWS = 32
"""As in pairs.h: on x86 more rows of activations are rounded to 16 bits."""

_loaded: list[Path] = []
_exact = False


@cache
def why_not_native() -> str | None:
    """Return why there are no kernels of our own here, None once they compute right."""
    compiler = find_compiler("C++")
    if compiler is None:
        return f"optkit's CPU kernels need a C++ compiler, and there is no {' or '.join(compiler_names('C++'))}"
    try:
        compiled = _compiled(compiler)
        torch.ops.load_library(compiled)
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).splitlines()
        return (
            f"{compiler} does not compile optkit's CPU kernels "
            f"({next((line for line in lines if 'error' in line), 'no message')})"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"optkit's CPU kernels cannot be compiled and loaded ({error})"
    _register_shapes()
    _loaded.append(compiled)
    if not _is_right():
        return f"optkit's CPU kernels, compiled by {compiler}, do not compute what they should"
    use_compiled(torch.ops.optkit_cpu)
    return None


def packed_linear(
    rows: Tensor, codes: Tensor, scales: Tensor, shifts: Tensor | None, bits: int, outputs: int
) -> Tensor:
    """float [n, in] -> float [n, out] in the dtype of the rows, with sums in float32.
    Needs `why_not_native() is None`. Many rows are rounded, except within `exact_products`.

    codes: int32 [blocks, in * bits / 32, 16]: word w of lane l holds inputs w * 32 / bits on of
    output block * 16 + l, first input lowest.
    scales: float32 [blocks, groups, 16]; shifts: int8, zero point - 2^(bits - 1), None if all of
    them are 0.
    """
    if len(rows) > STEP_ROWS and is_exact():
        return torch.cat([packed_linear(few, codes, scales, shifts, bits, outputs) for few in rows.split(STEP_ROWS)])
    return torch.ops.optkit_cpu.packed_linear(rows, codes, scales, shifts, bits, outputs)  # type: ignore[no-any-return]


@contextmanager
def exact_products() -> Iterator[None]:
    """Round no activations within the block or function: for what others are compared with."""
    global _exact
    before, _exact = _exact, True
    try:
        yield
    finally:
        _exact = before


def is_exact() -> bool:
    """Return whether no activations are rounded: within `exact_products`, and if the user asks for it."""
    return _exact or asks_exact()


def precision() -> str:
    """Return in what `packed_linear` computes here, in words."""
    return "float32" if is_exact() else f"float32 (x86: 16 bits above {STEP_ROWS} rows)"


def dense_linear(rows: Tensor, weight: Tensor) -> Tensor:
    """float [n, in], float32 or bfloat16 [out, in] -> float [n, out] in the dtype of the rows.
    Sums, and what it needs, as above.
    """
    return torch.ops.optkit_cpu.dense_linear(rows, weight)  # type: ignore[no-any-return]


def library() -> Path:
    """Return the file that is loaded; needs `why_not_native() is None`."""
    return _loaded[-1]


def _flags() -> tuple[str, ...]:
    return (*FLAGS, f"-march={cpu_architecture()}")


def _compiled(compiler: str) -> Path:
    """Return the library, compiling it if these sources, torch and processor have none yet."""
    instructions = (torch.backends.cpu.get_cpu_capability(), cpu_name(), platform.machine(), sorted(cpu_flags()))
    sources = [(DIRECTORY / name).read_text(encoding="utf-8") for name in (*SOURCES, *HEADERS)]
    parts = (*sources, torch.__version__, compiler, *_flags(), *instructions)
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
    place, made_of = private_directory(cache_directory() / "kernels"), digest[:LENGTH]
    if kept := kept_library(place, made_of):
        return kept
    with tempfile.TemporaryDirectory(dir=place) as directory:
        made = Path(directory) / "kernels.so"
        run(_command(compiler, made), timeout_s=TIME_LIMIT_S).check_returncode()
        _try(made)
        return keep_library(made, place, made_of)


def _try(library: Path) -> None:
    """Load a new library in a process of its own first.
    If that crashes, it costs the kernels and not the run. Raises OSError.
    """
    done = run(
        python_command("-m", "optkit.kernels.cpu.native", str(library)),
        timeout_s=TIME_LIMIT_S,
        env=python_environment(),
    )
    if done.returncode:
        ended = (
            f"was ended by {signal.Signals(-done.returncode).name}"
            if done.returncode < 0
            else f"ended with status {done.returncode}"
        )
        raise OSError(f"a process that tried them {ended}")


def _command(compiler: str, library: Path) -> list[str]:
    torch_files = Path(torch.__file__).parent
    linked = [LINKED_BY_NAME] if sys.platform == "darwin" else [f"-L{torch_files / 'lib'}", "-ltorch_cpu", "-lc10"]
    return [
        compiler,
        *_flags(),
        f"-I{torch_files / 'include'}",
        *[str(DIRECTORY / name) for name in SOURCES],
        "-o",
        str(library),
        *linked,
    ]


def _register_shapes() -> None:
    """Tell torch.compile the shapes of what the kernels return."""
    torch.library.register_fake(
        "optkit_cpu::packed_linear", lambda rows, *packed: rows.new_empty(rows.shape[0], packed[-1])
    )
    torch.library.register_fake(
        "optkit_cpu::dense_linear", lambda rows, weight: rows.new_empty(rows.shape[0], weight.shape[0])
    )


def _is_right() -> bool:
    """Whether both kernels agree with torch on small numbers."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-2, 3, (3, 64), generator=generator).float()
    words = torch.randint(0, 1 << 31, (2, 8, 16), generator=generator).int()
    shifts = torch.randint(-8, 9, (2, 2, 16), generator=generator).to(torch.int8)
    # [blocks, groups, group, 16]
    codes = torch.stack([words >> place & 15 for place in range(0, 32, 4)], dim=2).view(2, 2, 32, 16) - 8
    weight = (codes - shifts.unsqueeze(2)).permute(0, 3, 1, 2).reshape(32, 64).float()
    scales = torch.ones(2, 2, 16)
    right = torch.equal(packed_linear(rows, words, scales, shifts, 4, 30), rows @ weight[:30].T)
    return right and torch.equal(dense_linear(rows, weight), rows @ weight.T)


if __name__ == "__main__":  # the process of `_try`
    torch.ops.load_library(sys.argv[1])
    _is_right()
