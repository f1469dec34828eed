"""How long the GPUs of a host take to add up the partial sums of a split model, in CUDA graphs.

    python tests/benchmarks/exchange_gpu.py [--width 4096] [--rows 1,32,256] [--out DIRECTORY]

By the kernel of optkit/kernels/cuda/exchange.cu, by NCCL's all-reduce and by torch's
`symm_mem.one_shot_all_reduce`, of bfloat16, on 2 and, if they are there, 4 and 8 GPUs. A graph has
64 sums, one behind the other; the mean of 20 replays. Our sums are compared with float32's first.
exchange.json in --out ($OUT) has microseconds a sum.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, distributed, multiprocessing

from optkit.devices.process_group import join
from optkit.environment import describe_environment
from optkit.kernels.cuda.exchange import Exchange
from optkit.kernels.cuda.graph_capture import captured

CHAIN, REPLAYS, TIMEOUT_S = 64, 20, 60.0


def main() -> None:
    """Start a process for each GPU, print a row for each way and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    given = parser.parse_args()
    rows = [int(each) for each in given.rows.split(",")]
    record: dict[str, Any] = {"environment": describe_environment("cuda"), "width": given.width, "us": {}}
    for ranks in (2, 4, 8):
        if ranks > torch.cuda.device_count():
            break
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "found.json"
            multiprocessing.spawn(_work, (ranks, folder, given.width, rows, found), nprocs=ranks)
            record["us"][ranks] = json.loads(found.read_text())
        for way, times in record["us"][ranks].items():
            print(f"{ranks} GPUs, {way}: {', '.join(f'{row} x {given.width} {times[row]:.2f} us' for row in times)}")
        (given.out / "exchange.json").write_text(json.dumps(record, indent=1))


def _work(rank: int, ranks: int, folder: str, width: int, rows: list[int], found: Path) -> None:
    device = torch.device("cuda", rank)
    join(str(device), rank, ranks, f"{folder}/meeting", TIMEOUT_S)
    exchange = Exchange.open(width, device)
    times: dict[str, dict[int, float]] = {"optkit": {}, "NCCL": {}, "symm_mem": {}}
    for row in rows:
        x = torch.randn(row, width, device=device, generator=torch.Generator(device).manual_seed(rank)).bfloat16()
        _check(exchange, x)
        total = torch.zeros_like(x)
        shared = symmetric_memory.empty(x.numel(), dtype=x.dtype, device=device)
        group = distributed.group.WORLD.group_name  # type: ignore[union-attr]
        symmetric_memory.rendezvous(shared, group)
        ways = {
            "optkit": partial(exchange.sum_into_, total, x, add=True),
            "NCCL": partial(distributed.all_reduce, total),
            "symm_mem": partial(torch.ops.symm_mem.one_shot_all_reduce, shared.zero_(), "sum", group),
        }
        for way, call in ways.items():
            times[way][row] = _timed(call)
    if rank == 0:
        found.write_text(json.dumps(times))
    distributed.barrier()
    distributed.destroy_process_group()


def _check(exchange: Exchange, x: Tensor) -> None:
    each = [torch.empty_like(x) for _ in range(exchange.ranks)]
    distributed.all_gather(each, x)
    expected, total = torch.stack(each).float().sum(0), torch.empty_like(x)
    exchange.sum_into_(total, x.clone(), add=False)
    assert total.equal(expected.to(x.dtype)), "the sums are wrong"


def _timed(call: Callable[[], Any]) -> float:
    """Return the microseconds of a call in a graph."""
    graph = captured(lambda: [call() for _ in range(CHAIN)])
    for _ in range(3):
        graph.replay()
    distributed.barrier()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end) / REPLAYS / CHAIN


if __name__ == "__main__":
    main()
