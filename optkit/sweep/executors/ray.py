"""Executor `ray`: recipes as tasks of Ray, on this machine or on a cluster that is there."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from optkit.common.byte_sizes import size_text
from optkit.environment import unmet
from optkit.errors import MissingPackageError, ResourceError, UsageError, first_line
from optkit.processes.crashes import error_of
from optkit.sweep.executors.base import Order
from optkit.sweep.executors.nodes import NodesExecutor
from optkit.sweep.executors.on_node import make_on_node, refusal

LOST_NODES = 3
"""How often a task goes elsewhere when its node or its process is lost."""
VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
"""No telemetry. And when memory runs out the system ends the recipe that takes it, which is a failure
to be told: Ray's own monitor would end a task and begin it again and again.
"""
START_BEFORE = "If the machine is busy, start Ray before: `ray start --head`, then add --address auto"
START_A_NODE = "See with `ray status` that it runs, and make this machine a node: `ray start --address HOST:PORT`"
OBJECTS_BYTES = 100 << 20
"""Ray's own memory for what tasks return: here a few lines each."""


class RayExecutor(NodesExecutor):
    """Makes each artifact in a task that has the CPUs, GPUs and memory that its plan says.

    Ray runs again elsewhere what a node was lost with, and nothing else: a failure is an outcome.
    """

    settings: ClassVar[frozenset[str]] = frozenset({"address"})

    def __init__(self, address: str = "") -> None:
        """Take the address of a cluster that this machine belongs to; without one Ray runs here alone.
        Raises MissingPackageError without Ray.
        """
        super().__init__()
        if unmet(["ray"]):
            raise MissingPackageError("ray", where="--executor ray", install="optkit[ray]")
        self._address = address
        self._tasks: dict[Any, str] = {}

    def start(self, order: Order) -> None:
        """Start Ray, and ask each node whether it can work for this sweep.
        Raises UsageError if the cluster cannot be reached, StoreError if a node cannot work for it.
        """
        import ray
        from ray.util.queue import Queue
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

        if not ray.is_initialized():
            self._open.callback(ray.shutdown)
            # Ray lets workers import from the directory that the driver is in.
            with signals_kept(), contextlib.chdir(order.store):
                join(self._address)
        here = OnNode(ray.get_runtime_context().get_node_id(), soft=False)
        self._queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        self._open.callback(self._queue.shutdown)
        self._make = ray.remote(self.make)
        asked = ray.remote(refusal)
        places = [OnNode(node["NodeID"], soft=False) for node in ray.nodes() if node["Alive"]]
        described = self.describe(order)
        said = ray.get([asked.options(num_cpus=0, scheduling_strategy=place).remote(described) for place in places])
        if found := next(filter(None, said), None):
            raise error_of(found, "a node")

    @staticmethod
    def make(order: Mapping[str, Any], queue: Any) -> dict[str, Any]:
        """Be the task."""
        return make_on_node(order, _Lines(order["name"], queue))

    def submit(self, order: Order, described: Mapping[str, Any]) -> None:
        """Make a task of an order; raises ResourceError if no node is large enough."""
        import ray

        needs = order.needs
        wanted = {"CPU": needs.cpus, "GPU": needs.gpus, "memory": needs.ram_bytes}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(all(node.get(kind, 0) >= count for kind, count in wanted.items()) for node in nodes):
            has = " and ".join(_size(*(int(node.get(kind, 0)) for kind in wanted)) for node in nodes)
            what = f"no node has what it needs ({_size(*wanted.values())})"
            raise ResourceError(what, where=order.name, why=f"Ray's nodes have {has}", remedy="Start a larger one")
        task = self._make.options(
            num_cpus=needs.cpus, num_gpus=needs.gpus, memory=needs.ram_bytes, max_retries=LOST_NODES, name=order.name
        )
        self._tasks[task.remote(described, self._queue)] = order.name

    def results(self, wait_s: float) -> dict[str, dict[str, Any]]:
        """Return what tasks returned, or how Ray lost them."""
        import ray

        done, _ = ray.wait([*self._tasks], timeout=wait_s) if self._tasks else ([], [])
        return {self._tasks.pop(each): _result(each) for each in done}

    def lines(self) -> Iterable[tuple[str, str]]:
        found: list[tuple[str, str]] = self._queue.get_nowait_batch(self._queue.qsize())
        return found

    def cancel(self) -> None:
        """Cancel the tasks."""
        if self._tasks:
            import ray

            for each in self._tasks:
                ray.cancel(each)
            self._tasks.clear()


def join(address: str = "") -> None:
    """Join a cluster of Ray, or start Ray here; raises UsageError if that fails."""
    os.environ.update(VARIABLES)
    import ray

    alone: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECTS_BYTES}
    # Ray gives its own processes 15 s to start, and a busy machine may need more at first.
    for left in (0,) if address else (2, 1, 0):
        try:
            ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **({} if address else alone))
            return
        except Exception as error:
            ray.shutdown()
            if not left:
                where = f"--address {address}" if address else "--executor ray"
                remedy = START_A_NODE if address else START_BEFORE
                raise UsageError(f"Ray cannot be used: {first_line(error)}", where=where, remedy=remedy) from error


@dataclass(frozen=True)
class _Lines:
    """The lines of an order, on their way to the driver."""

    name: str
    queue: Any

    def write(self, line: str) -> None:
        self.queue.put((self.name, line))  # waits: calls of this actor may overtake each other

    def flush(self) -> None:
        pass


def _result(task: Any) -> dict[str, Any]:
    import ray

    try:
        found: dict[str, Any] = ray.get(task)
    except ray.exceptions.RayError as error:
        return {"verdict": None, "reason": f"Ray: {first_line(error)}", "seconds": 0.0, "log": str(error)}
    return found


def _size(cpus: int, gpus: int, ram_bytes: int) -> str:
    return f"CPU: {cpus}, GPU: {gpus}, memory: {size_text(ram_bytes)}"


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Keep our own handler of SIGTERM, in place of which Ray puts one that ends at once."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
