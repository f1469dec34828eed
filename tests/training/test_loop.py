"""The loop of a training: it goes on bit by bit where it was killed, and stops with a sentence for
everything that goes wrong.
"""

import json
import signal
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from optkit.errors import ResourceError, StageError
from optkit.progress import SilentProgress
from optkit.training import checkpoints
from optkit.training.loop import Loop
from optkit.training.objective import Objective
from optkit.training.optimizer import learning_rate, make_optimizer
from optkit.training.student import open_student
from tests.support.fresh_python import python
from tests.support.small_training import CROSS_ENTROPY, OPTIONS, run, some_data


def weights(objective: Objective) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in objective.named_parameters()}


class TestResume:
    @pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
    def test_an_interrupted_loop_ends_with_the_same_bits(self, tiny_model, tmp_path, monkeypatch, optimizer):
        if optimizer == "adamw_8bit":
            pytest.importorskip("bitsandbytes")
        options = replace(OPTIONS, optimizer=optimizer)
        whole, expected = run(tiny_model("llama"), options)
        seen = []

        class Stopped(SilentProgress):
            def task(self, label, total, unit=""):
                task = super().task(label, total, unit)

                def advance(steps=1, note=""):
                    seen.append(note)
                    if len(seen) == 9:
                        raise KeyboardInterrupt

                task.advance = advance
                return task

        objective = Objective(open_student(tiny_model("llama"), "cpu").model, CROSS_ENTROPY)
        with pytest.raises(KeyboardInterrupt):
            Loop(objective, some_data(), None, options, "test", Stopped(), tmp_path).run()
        resumed, found = run(tiny_model("llama"), options, tmp_path)
        assert found.course.resumed == [6]
        assert found.course.curve == expected.course.curve
        assert found.course.held_out == expected.course.held_out
        assert all(torch.equal(tensor, weights(resumed)[name]) for name, tensor in weights(whole).items())

    @pytest.mark.usefixtures("warm_children")
    def test_a_killed_process_ends_with_the_same_bits(self, tiny_model, tmp_path):
        source = tiny_model("qwen2")
        whole, _ = run(source)
        script = (
            "import sys, os, signal\nfrom pathlib import Path\nfrom optkit.training import checkpoints\n"
            "from tests.support.small_training import run\nsave = checkpoints.save\n"
            "def dies(place, step, digest, saved):\n    if step == 9: os.kill(os.getpid(), signal.SIGKILL)\n"
            "    return save(place, step, digest, saved)\ncheckpoints.save = dies\n"
            "run(Path(sys.argv[1]), place=Path(sys.argv[2]))\n"
        )
        killed = python("-c", script, str(source), str(tmp_path / "work"))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        resumed, found = run(source, place=tmp_path / "work")
        assert found.course.resumed == [6]
        assert all(torch.equal(tensor, weights(resumed)[name]) for name, tensor in weights(whole).items())

    def test_the_last_two_checkpoints_are_kept_and_hold_no_pickle(self, tiny_model, tmp_path):
        run(tiny_model("llama"), place=tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000009"]
        assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors", ".json"}

    def test_a_checkpoint_of_other_options_is_not_taken(self, tiny_model, tmp_path):
        run(tiny_model("llama"), place=tmp_path, digest="one")
        _, found = run(tiny_model("llama"), place=tmp_path, digest="another")
        assert found.course.resumed == []

    def test_what_others_left_goes_and_ones_own_stay(self, tiny_model, tmp_path):
        run(tiny_model("llama"), replace(OPTIONS, steps=24), tmp_path, digest="one")
        (tmp_path / ".draft-00000099").mkdir()
        run(tiny_model("llama"), place=tmp_path, digest="another")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000009"]
        assert run(tiny_model("llama"), place=tmp_path, digest="another")[1].course.resumed == [9]

    def test_a_broken_checkpoint_gives_way_to_the_one_before(self, tiny_model, tmp_path):
        run(tiny_model("llama"), place=tmp_path)
        broken = tmp_path / "step-00000009" / "weights.safetensors"
        broken.write_bytes(broken.read_bytes()[:1000])
        _, found = run(tiny_model("llama"), place=tmp_path)
        assert found.course.resumed == [6]

    def test_each_process_goes_on_with_random_numbers_of_its_own_device(self, monkeypatch):
        set_to = {}
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor([7, device.index]))
        monkeypatch.setattr(
            torch.cuda, "set_rng_state", lambda state, device: set_to.update({device.index: state.tolist()})
        )
        saved = checkpoints.random_state(torch.device("cuda", 0))
        for index in range(2):
            checkpoints.set_random_state(saved, torch.device("cuda", index))
        checkpoints.set_random_state(saved, torch.device("cpu"))
        assert set_to == {0: [7, 0], 1: [7, 0]}

    def test_a_full_disk_leaves_the_checkpoint_before(self, tiny_model, tmp_path, monkeypatch):
        written = save_file

        def full(tensors, path, metadata=None):
            if "00000009" in str(path):
                raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
            written(tensors, path, metadata)

        monkeypatch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(
            ResourceError, match=r"step-00000009: the disk is full: [\d,]+ bytes were to be written and [\d,]+ are free"
        ):
            run(tiny_model("llama"), place=tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000006"]
        monkeypatch.undo()
        assert run(tiny_model("llama"), place=tmp_path)[1].course.resumed == [6]


class TestStops:
    def test_it_learns_and_keeps_the_best_weights(self, tiny_model):
        objective, result = run(tiny_model("llama"), replace(OPTIONS, steps=30))
        assert result.best["total"] < 0.8 * result.first["total"]
        assert result.course.stopped == "all steps were made"
        assert result.tokens == 30 * 4 * 16
        data = some_data()
        with torch.no_grad():
            again = objective(data.tokens[list(data.held_out)], None).total
        assert float(again) == pytest.approx(result.best["total"], rel=1e-5)

    def test_a_loss_that_never_falls(self, tiny_model):
        with pytest.raises(
            StageError, match=r"test: the held-out loss never fell below its start: .* Lower `learning_rate`"
        ):
            run(tiny_model("llama"), replace(OPTIONS, steps=8, learning_rate=3.0, diverged=1e9))

    def test_a_loss_that_diverges(self, tiny_model):
        with pytest.raises(
            StageError,
            match=r"diverges: the loss was .* at the start and is .* at step .*Lower `learning_rate`, e.g. to 1",
        ):
            run(tiny_model("llama"), replace(OPTIONS, steps=60, learning_rate=5.0, diverged=1.2))

    def test_a_few_texts_with_large_losses_are_no_divergence(self, tiny_model):
        objective = Objective(open_student(tiny_model("llama"), "cpu").model, CROSS_ENTROPY)
        loop = Loop(objective, some_data(), None, replace(OPTIONS, steps=20), "test", SilentProgress())
        loop.course.step, loop.course.curve = 20, [1.0] * 16 + [50.0] * 4
        loop._check_divergence()
        loop.course.curve = [1.0] * 10 + [3.1] * 10
        with pytest.raises(StageError, match=r"the loss was 1.0000 at the start and is 3.1000 at step 20"):
            loop._check_divergence()

    def test_a_loss_that_is_not_finite_names_step_and_text(self, tiny_model):
        objective = Objective(open_student(tiny_model("qwen2"), "cpu").model, CROSS_ENTROPY)
        with torch.no_grad():
            objective.student.get_input_embeddings().weight[500] = float("inf")
        data = some_data()
        poisoned = data.rows(4, 4)[1]
        data.tokens[poisoned, 3] = 500
        with pytest.raises(
            StageError, match=rf"the loss is nan at step 2, on 1 of 4 sequences \(text, row {poisoned}\)"
        ):
            Loop(objective, data, None, OPTIONS, "test", SilentProgress()).run()

    def test_patience(self, tiny_model):
        options = replace(OPTIONS, steps=60, learning_rate=0.3, warmup=0.0, evaluations=30, patience=2, diverged=1e9)
        _, result = run(tiny_model("llama"), options)
        assert result.course.stopped == "the held-out loss did not fall 2 times in a row"
        assert result.course.step < 60

    def test_minutes(self, tiny_model):
        _, result = run(tiny_model("llama"), replace(OPTIONS, steps=100_000, minutes=0.02))
        assert result.course.stopped == "the 0.02 minutes were over"
        assert 1 <= result.course.seconds < 10

    def test_a_step_that_took_long_is_not_made_up_for_by_judging_each_of_the_next(self, tiny_model, monkeypatch):
        clock, losses = Clock(), Loop._losses

        def slow(self, rows):
            clock.now += 30.0 if self.course.step == 0 and len(self.course.held_out) else 0.25
            return losses(self, rows)

        monkeypatch.setattr("optkit.training.loop.time", clock)
        monkeypatch.setattr(Loop, "_losses", slow)
        _, result = run(
            tiny_model("qwen2"), replace(OPTIONS, steps=10_000, minutes=2.0, evaluations=10, learning_rate=1e-5)
        )
        judged = [each["step"] for each in result.course.held_out]
        assert judged[:2] == [0, 1]
        assert all(later - earlier > 10 for earlier, later in pairwise(judged[1:]))
        assert len(judged) == 7  # 60 of 120 seconds went into the first step, and 12 seconds are a tenth


class Clock:
    """Time as a test says it."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_learning_rate():
    rates = [learning_rate(index / 100, 2.0, 0.1) for index in range(101)]
    assert rates[5] == pytest.approx(1.0)
    assert max(rates) == rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.0)


def test_state_is_json(tiny_model, tmp_path):
    run(tiny_model("llama"), place=tmp_path)
    state = json.loads((tmp_path / "step-00000009" / "state.json").read_text())
    assert state["facts"]["step"] == 9


def test_matrices_alone_decay():
    layer = torch.nn.Linear(4, 3)
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    optimizer = make_optimizer(layer, "adamw", 0.5)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before["weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(layer.bias, before["bias"])
