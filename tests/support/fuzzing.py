"""What the tests share that throw damage at a boundary: the draws, the property, and a file that is
damaged for a while.
"""

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optkit.errors import OptkitError

SEED = int(os.environ.get("FUZZ_SEED", "0")) << 32
MOST_BYTES = 256 << 20
"""Python may hold so much for a damaged file of some kB."""


def damages(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with so many generators of damage; it has the argument `draw`.
    They are the same ones each time, unless `FUZZ_SEED` in the environment names others.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        drawn = given(draw=st.integers(0, 2**32 - 1).map(lambda number: Random(number + SEED)))(test)
        quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
        return settings(max_examples=examples, suppress_health_check=quiet)(drawn)

    return decorate


def read_or_refused(read: Callable[[], Any]) -> bool:
    """Say whether something was read; a refusal names its place and says why."""
    said = ""
    tracemalloc.start()
    try:
        read()
    except OptkitError as error:
        said = str(error)
        assert len(said) > 20
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST_BYTES
    return not said


class Changed:
    """A file that is damaged, and as it was again afterwards."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path, self.content, self.before = path, content, path.read_bytes() if path.is_file() else None

    def __enter__(self) -> None:
        self.path.write_bytes(self.content)

    def __exit__(self, *_: object) -> None:
        if self.before is None:
            self.path.unlink()
        else:
            self.path.write_bytes(self.before)
