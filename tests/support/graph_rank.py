"""Stands in for `optkit.session.rank_worker` on CPUs: `cuda_graphs` applies there, its kernels in torch."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from optkit.kernels import float8_linear
from optkit.processes.child_program import Parent
from optkit.session import rank_worker
from optkit.settings.cuda_graphs import CudaGraphs
from tests.support.eager_kernels import run_on_cpu


def work(parent: Parent) -> None:
    patched = pytest.MonkeyPatch()
    run_on_cpu(patched)
    patched.setattr(CudaGraphs, "applies", lambda self, device: True)
    patched.setattr(float8_linear, "_why_unavailable", lambda device: None)
    rank_worker.work(parent)
