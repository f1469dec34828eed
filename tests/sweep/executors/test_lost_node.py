"""Two nodes of Ray with separate stores and one S3 store behind them; one node is lost in the middle."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest

from optkit.artifact import read_artifact
from optkit.environment import cpu_threads
from optkit.pipeline import read_scorecard
from optkit.sweep.executors.ray import VARIABLES, RayExecutor
from optkit.sweep.run import sweep
from tests.support.object_store import environment, object_store
from tests.support.remembered import Lines
from tests.support.sweeps import NAMES, Here, recipe

ray = pytest.importorskip("ray")


class Apart(RayExecutor):
    """Its nodes have disks of their own: what their environment names stands for the driver's store."""

    @staticmethod
    def make(order: Mapping[str, Any], queue: Any) -> dict[str, Any]:
        return RayExecutor.make({**order, "store": os.environ["STORE_OF_NODE"]}, queue)


class Losing(Lines):
    """Ends the node of the first recipe when it has made the shared step."""

    def __init__(self, cluster: Any, nodes: Mapping[str, Any]) -> None:
        super().__init__()
        self.cluster, self.nodes = cluster, dict(nodes)
        self.lost = ""

    def say(self, line: str) -> None:
        super().say(line)
        if not self.lost and line == f"{NAMES[0]}: cast: kept in the store":
            at_work = (each for each in psutil.process_iter(["cmdline"]) if f"ray::{NAMES[0]}" in each.info["cmdline"])
            self.lost = next(at_work).environ()["STORE_OF_NODE"]
            self.cluster.remove_node(self.nodes.pop(self.lost), allow_graceful=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_node_costs_no_finished_step(
    tmp_path: Path, tiny_model: Callable[[str], Path], letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster

    (tmp_path / "s.json").write_text(json.dumps(recipe(tiny_model("llama"), letters)))
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with object_store() as server:
        for name, value in {**VARIABLES, **environment(server), "OPTKIT_STORE_REMOTE": "s3://shared/team"}.items():
            monkeypatch.setenv(name, value)
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("shared")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            stores = [str(tmp_path / f"node-{index}" / "store") for index in range(2)]
            nodes = {
                store: cluster.add_node(num_cpus=cpu_threads(), env_vars={"STORE_OF_NODE": store}) for store in stores
            }
            for store in stores:
                Path(store).mkdir(parents=True)
            lines = Losing(cluster, nodes)
            done = sweep(
                tmp_path / "s.json",
                out=tmp_path / "there",
                store=tmp_path / "driver" / "store",
                device="cpu",
                executor=Apart(cluster.address),
                progress=lines,
            )
        finally:
            cluster.shutdown()
        monkeypatch.delenv("OPTKIT_STORE_REMOTE")
    assert [(str(entry.status), entry.reason) for entry in done.record.entries] == [("done", "")] * 4
    assert lines.lost
    (left,) = lines.nodes
    assert sum(": cast of 29 tensors" in line for line in lines.lines) == 1
    assert any(f"{NAMES[0]}: cast from s3://shared/team" in line for line in lines.lines)
    assert len([*Path(left, "steps").iterdir()]) == 5
    assert len([*Path(lines.lost, "steps").iterdir()]) <= 2
    sweep(tmp_path / "s.json", out=tmp_path / "here", store=tmp_path / "one" / "store", device="cpu", executor=Here())
    for name in NAMES:
        ours, theirs = (read_artifact(tmp_path / place / name).record for place in ("here", "there"))
        assert ours.key == theirs.key
        digests = [{file: its["sha256"] for file, its in each.files.items()} for each in (ours, theirs)]
        assert digests[0] == digests[1]
        cards = [read_scorecard(tmp_path / place / name) for place in ("here", "there")]
        assert cards[0].rows == cards[1].rows
