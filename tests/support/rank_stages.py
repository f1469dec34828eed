"""Stages for tests of several processes; a module of its own, because the processes import it."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Literal

from optkit.errors import ResourceError
from optkit.stage import Context, Report, Transform


class Together(Transform):
    """Sum the ranks, or fail in one way or another."""

    how: Literal["sum", "refuse", "refuse_alone", "crash", "killed", "sleep"] = "sum"

    def run(self, source: Path, target: Path, context: Context) -> Report:
        from optkit.training.ranks import current

        ranks = current("ddp")
        (target / f"{ranks.rank}.pid").write_text(str(os.getpid()), encoding="ascii")
        sys.stdout.write(f"a line of rank {ranks.rank}\n")
        sys.stdout.flush()
        with context.progress.task("together", 2, "steps") as task:
            total = sum(ranks.gather(ranks.rank + 1.0))
            task.advance(note=f"sum {total:g}")
            context.progress.say(f"on {context.device}")
        if self.how == "refuse":
            raise ResourceError("no memory", where="together", why="It is full", remedy="Buy some")
        if self.how == "refuse_alone" and ranks.rank == 1:
            raise ResourceError("no memory", where="together", why="It is full", remedy="Buy some")
        if self.how == "crash" and ranks.rank == 1:
            raise ValueError("a mistake of the code")
        if self.how == "killed" and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how != "sum":
            time.sleep(600 if self.how == "sleep" else 0)
            ranks.gather(1.0)
        return Report(changed=int(total), skipped={"a": "b"}, details={"seed": context.seed}, notes=("a note",))


class Trains(Transform):
    """Train a tiny model in several ways by several processes; the first one tells what came out,
    and leaves the weights.
    """

    ways: tuple[str, ...]

    def run(self, source: Path, target: Path, context: Context) -> Report:
        from dataclasses import replace

        import torch
        from safetensors.torch import save_file

        from optkit.progress import SilentProgress
        from optkit.training.loop import Loop
        from optkit.training.objective import LossWeights, Objective
        from optkit.training.ranks import current
        from optkit.training.student import checkpoint_activations_, keep_zeros_, open_student
        from optkit.training.teacher import LiveTeacher
        from tests.support.small_training import OPTIONS, some_data

        class Stops(SilentProgress):
            """Stops a training after a checkpoint."""

            def task(self, label, total, unit=""):
                task, steps = super().task(label, total, unit), []

                def advance(step=1, note=""):
                    steps.append(note)
                    if len(steps) == 8:
                        raise KeyboardInterrupt

                task.advance = advance
                return task

        def one(name: str, parallel: str, place: Path) -> None:
            student = open_student(source, "cpu")
            with torch.no_grad():
                student.model.get_submodule("model.layers.0.mlp.up_proj").weight[:, ::2] = 0
            keep_zeros_(student.model)
            if "checkpointing" in name:
                checkpoint_activations_(student.model)
            teacher = LiveTeacher(source, "cpu") if "teacher" in name else None
            objective = Objective(student.model, LossWeights(divergence=1.0 if teacher else 0.0, cross_entropy=1.0))
            ranks = current(parallel)
            data = some_data()
            options = replace(OPTIONS, steps=10)
            try:
                progress = Stops() if "stopped" in name else SilentProgress()
                result = Loop(
                    objective, data, teacher, options, where="test", progress=progress, place=place, ranks=ranks
                ).run()
            except KeyboardInterrupt:
                return
            if ranks.first:
                found[name] = {
                    "curve": result.course.curve,
                    "held_out": [each["total"] for each in result.course.held_out],
                }
                found[name]["resumed"] = result.course.resumed
                tensors = {key: value.contiguous() for key, value in student.model.state_dict().items()}
                save_file({key: value.clone() for key, value in tensors.items()}, target / f"{name}.safetensors")

        found: dict[str, dict[str, object]] = {}
        torch.use_deterministic_algorithms(True)
        for way in self.ways:
            parallel = way.partition("-")[0]
            if "resumed" in way:
                one(way.replace("resumed", "stopped"), parallel, target / way)
            one(way, parallel, target / way)
        return Report(changed=1, details=found)
