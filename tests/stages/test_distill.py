"""The stage `distill`: what it writes, whom it learns from, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from optkit.errors import ResourceError, StageError
from optkit.execute import execute
from optkit.model.checkpoint import Checkpoint
from optkit.plan import make_plan
from optkit.recipe.recipe import load_recipe
from optkit.stage import Context
from optkit.stages.distill import Distill
from optkit.store.contents import prune
from optkit.store.store import Store
from optkit.training import checkpoints
from optkit.training import teacher as teachers
from optkit.training.loop import Loop
from tests.support.changes import change_json
from tests.support.opened import transformers_logits
from tests.support.running import run_stage

FAST = {
    "texts": ["python-reference"],
    "sequence_length": 32,
    "tokens": 3000,
    "batch_size": 8,
    "learning_rate": 2e-3,
    "precision": "float32",
}


def noisy(source: Path, target: Path, share: float = 0.3, dtype: torch.dtype = torch.float32) -> Path:
    """Copy a model with noise of a share of each weight's deviation."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    changed = {
        name: (each + share * each.std() * torch.randn(each.shape, generator=generator)).to(dtype)
        for name, each in tensors.items()
    }
    save_file(changed, target / "model.safetensors", metadata={"format": "pt"})
    return target


def distill(student: Path, origin: Path | None, root: Path, **fields) -> tuple[Path, dict]:
    stage = Distill.model_validate(FAST | fields)
    stage.predict(Checkpoint(student).shape, "cpu")
    target = root / f"out{len(list(root.glob('out*')))}"
    target.mkdir(parents=True)
    report = stage.run(student, target, Context(origin=origin, workspace=root / "work" / target.name))
    assert report.changed > 0
    assert report.calibrated_on[0]["dataset"] == "python-reference"
    return target, dict(report.details)


def divergence_from(teacher: Path, student: Path) -> float:
    tokens = torch.randint(0, 512, (4, 32), generator=torch.Generator().manual_seed(9))
    ours, theirs = (transformers_logits(each, tokens, dtype=torch.float32) for each in (student, teacher))
    return float((theirs.softmax(-1) * (theirs.log_softmax(-1) - ours.log_softmax(-1))).sum(-1).mean())


class TestLearning:
    @pytest.mark.parametrize(
        "kind",
        [
            *("llama", "gemma3", "mixtral", "mamba2"),
            *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2", "gpt2", "gpt_oss")),
        ],
    )
    def test_the_student_comes_nearer_to_the_teacher(self, tiny_model, tmp_path, kind):
        student = noisy(tiny_model(kind), tmp_path / "student")
        target, details = distill(student, tiny_model(kind), tmp_path)
        assert details["held_out_after"]["divergence"] < details["held_out_before"]["divergence"]
        assert details["steps"] == len(details["curve"]) == 12
        assert Checkpoint(target).tensors == Checkpoint(student).tensors
        assert json.loads((target / "config.json").read_text()) == json.loads((student / "config.json").read_text())
        assert (target / "tokenizer.json").is_file()
        if kind != "gemma3":  # whose random teacher is so sure of itself that nothing diverges
            assert divergence_from(tiny_model(kind), target) < divergence_from(tiny_model(kind), student)

    def test_the_dtype_of_the_input_stays(self, tiny_model, tmp_path):
        student = noisy(tiny_model("llama"), tmp_path / "student", dtype=torch.bfloat16)
        target, _ = distill(student, tiny_model("llama"), tmp_path)
        assert {info.dtype for info in Checkpoint(target).tensors.values()} == {"BF16"}

    def test_what_config_ties_stays_tied_where_the_checkpoint_holds_both(self, tiny_model, tmp_path):
        student = noisy(tiny_model("llama"), tmp_path / "student")
        tensors = load_file(student / "model.safetensors")
        both = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        save_file(both, student / "model.safetensors", metadata={"format": "pt"})
        target, _ = distill(student, tiny_model("llama"), tmp_path)
        after = load_file(target / "model.safetensors")
        assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
        assert not torch.equal(after["lm_head.weight"], both["lm_head.weight"])

    def test_a_smaller_model_learns_from_a_named_teacher(self, tiny_model, tmp_path):
        """Other widths, other depth, other architecture: only the tokens have to be the same."""
        target, details = distill(
            tiny_model("gpt2"), None, tmp_path, teacher={"name": str(tiny_model("llama"))}, hidden=0.5
        )
        assert details["held_out_after"]["total"] < details["held_out_before"]["total"]
        assert Checkpoint(target).config["model_type"] == "gpt2"

    def test_zeros_of_a_pruned_student_stay(self, tiny_model, tmp_path):
        student = noisy(tiny_model("llama"), tmp_path / "student")
        tensors = load_file(student / "model.safetensors")
        pruned = {name: each * (each.abs() > each.abs().median()) for name, each in tensors.items() if "mlp" in name}
        save_file(tensors | pruned, student / "model.safetensors", metadata={"format": "pt"})
        kept, _ = distill(student, tiny_model("llama"), tmp_path)
        after = load_file(kept / "model.safetensors")
        assert all(torch.equal(after[name] == 0, each == 0) for name, each in pruned.items())
        assert all(not torch.equal(after[name], each) for name, each in pruned.items())
        filled, _ = distill(student, tiny_model("llama"), tmp_path, keep_zeros=False)
        after = load_file(filled / "model.safetensors")
        assert all((after[name] == 0).float().mean() < 0.01 for name in pruned)

    def test_a_second_student_needs_no_teacher(self, tiny_model, tmp_path, monkeypatch):
        """Its answers, and the text that it wrote, lie beside the workspaces."""
        student = noisy(tiny_model("llama"), tmp_path / "student")
        fields = {"top_k": 16, "generated": {"tokens": 500}, "epochs": 2}
        first, _ = distill(student, tiny_model("llama"), tmp_path, **fields)
        places = sorted(path.name.partition("-")[0] for path in (tmp_path / "work").glob("*-*"))
        assert places == ["answers", "generated"]

        def asked(*arguments: object, **options: object) -> None:
            raise AssertionError("the teacher was opened again")

        monkeypatch.setattr(teachers, "LiveTeacher", asked)
        second, _ = distill(student, tiny_model("llama"), tmp_path, **fields)
        assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()

    def test_without_a_store_nothing_is_left_of_it(self, tiny_model, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        student, target = noisy(tiny_model("llama"), tmp_path / "student"), tmp_path / "done"
        stage = Distill.model_validate(FAST | {"top_k": 16, "generated": {"tokens": 500}})
        run_stage(stage, student, target, Context(origin=tiny_model("llama")))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["done", "student"]

    def test_a_training_that_fails_lets_go_of_the_answers(self, tiny_model, tmp_path, monkeypatch):
        def fail(*arguments: object, **options: object) -> None:
            raise StageError("the loss is not finite")

        monkeypatch.setattr(Loop, "run", fail)
        with pytest.raises(StageError) as failed:
            distill(tiny_model("llama"), tiny_model("llama"), tmp_path / "store", top_k=16)
        pruned = prune(Store(tmp_path / "store"), everything=True)
        assert [work.what for work in pruned.work] == ["answers of a teacher, top 16"]
        assert not list((tmp_path / "store" / "work").iterdir())
        assert failed.tb is not None  # what it refers to lived until here

    def test_the_plan_counts_the_checkpoints_that_lie_there_at_once(self, tiny_model, tmp_path, monkeypatch):
        held, found = [], checkpoints._found

        def seen(where: Path) -> list[Path]:
            held.append(sum(path.stat().st_size for path in where.rglob("*") if path.is_file()))
            return found(where)

        monkeypatch.setattr(checkpoints, "_found", seen)
        monkeypatch.setattr(Loop, "_checkpoint_due", lambda loop: True)
        student = noisy(tiny_model("qwen2"), tmp_path / "student")
        distill(student, tiny_model("qwen2"), tmp_path, evaluations=2)
        shape = Checkpoint(student).shape
        planned = Distill.model_validate(FAST).predict(shape, "cpu")[0].disk_bytes - shape.size_bytes
        assert max(held) == pytest.approx(planned, rel=0.02)

    def test_text_is_written_anew_where_others_are_held_out(self, tiny_model, tmp_path):
        """Its prompts come from what is trained on."""
        student = noisy(tiny_model("llama"), tmp_path / "student")
        for held_out in (8, 16):
            distill(student, tiny_model("llama"), tmp_path, generated={"tokens": 500}, held_out=held_out)
        assert len(list((tmp_path / "work").glob("generated-*"))) == 2

    def test_several_fields_of_one_file_are_several_texts(self):
        assert (
            len(
                Distill(
                    texts=({"dataset": "a.jsonl", "field": "question"}, {"dataset": "a.jsonl", "field": "answer"})
                ).texts
            )
            == 2
        )

    def test_in_a_recipe_the_teacher_is_its_first_model(self, tiny_model, tmp_path):
        stages = [{"cast": {"dtype": "bfloat16"}}, {"prune": {"method": "magnitude"}}, {"distill": FAST}]
        recipe = load_recipe({"name": "r", "model": {"name": str(tiny_model("llama"))}, "stages": stages}).pinned(None)
        store = Store(tmp_path / "store")
        plan = make_plan(recipe, store, "cpu")
        done = execute(plan, store, Context())
        assert done.steps[-1].kind == "distill"
        assert {info.dtype for info in Checkpoint(done.weights).tensors.values()} == {"BF16"}
        assert not (tmp_path / "store" / "work" / plan.weights_key).exists()
        size = Checkpoint(done.weights).shape.size_bytes
        assert plan.steps[-1].cost.disk_bytes > size + 2 * 12 * Checkpoint(done.weights).shape.elements


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"divergence": 0}, "divergence and cross_entropy are both 0. Give one of them a weight."),
            ({"top_k": 8, "hidden": 1}, "hidden and attention need the teacher beside the student. Leave out top_k"),
            ({"top_k": 8, "divergence": 0, "cross_entropy": 1}, "top_k is for the divergence, whose weight is 0."),
            ({"texts": []}, "at least 1 item"),
            (
                {"texts": ["c4", "wikitext2", {"dataset": "c4", "packing": "joined"}]},
                r"texts: c4 \(train\) is named twice, so what is held out of one would be trained "
                r"on in the other. Name it once",
            ),
            (
                {"sequence_length": 32, "generated": {"tokens": 100, "prompt_tokens": 32}},
                "generated.prompt_tokens 32 leaves the teacher nothing to write in sequences of "
                "32 tokens. Use at most 31.",
            ),
            ({"warmup": 1.0}, "less than 1"),
            ({"precision": "float16"}, "'float32' or 'bfloat16'"),
        ],
    )
    def test_fields(self, fields, message):
        with pytest.raises(ValidationError, match=message):
            Distill.model_validate(fields)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (
                {"sequence_length": 513},
                "distill: sequences of 513 tokens, and the model was built for 512. Set "
                "`sequence_length` to at most 512",
            ),
            ({"top_k": 512}, "distill: top_k 512 of 512 tokens is all. Leave out `top_k`"),
        ],
    )
    def test_what_the_model_has_no_room_for(self, tiny_model, fields, message):
        with pytest.raises(StageError, match=message):
            Distill.model_validate(fields).predict(Checkpoint(tiny_model("llama")).shape, "cpu")

    def test_another_vocabulary(self, tiny_model, tmp_path):
        other = Path(shutil.copytree(tiny_model("llama"), tmp_path / "other"))
        change_json(other / "config.json", vocab_size=300)
        stage = Distill.model_validate({"teacher": str(other)})
        with pytest.raises(
            StageError, match=r"the teacher \S+ has a vocabulary of 300 tokens and the student one of 512. What it says"
        ):
            stage.predict(Checkpoint(tiny_model("llama")).shape, "cpu")

    def test_another_tokenizer(self, tiny_model, tmp_path):
        other = Path(shutil.copytree(tiny_model("llama"), tmp_path / "other"))
        file = other / "tokenizer.json"
        said = json.loads(file.read_text())
        words = said["model"]["vocab"]
        first, second = list(words)[300], list(words)[301]
        words[first], words[second] = words[second], words[first]
        file.write_text(json.dumps(said))
        with pytest.raises(
            StageError,
            match=r"distill: the teacher's tokenizer is another one: '.+' is 30\d to it and 30\d to the student",
        ):
            distill(tiny_model("llama"), None, tmp_path, teacher={"name": str(other)})

    def test_a_quantized_teacher(self, tiny_model, tmp_path):
        other = Path(shutil.copytree(tiny_model("llama"), tmp_path / "other"))
        change_json(other / "config.json", quantization_config={"quant_method": "gptq"})
        with pytest.raises(StageError, match=r"the teacher \S+ is quantized. Name its float weights"):
            Distill.model_validate({"teacher": str(other)}).predict(Checkpoint(tiny_model("llama")).shape, "cpu")

    def test_no_teacher(self, tiny_model, tmp_path):
        with pytest.raises(StageError, match="distill: there is no teacher. Name one"):
            distill(tiny_model("llama"), None, tmp_path)

    def test_no_memory_for_model_or_teacher(self, tiny_model, tmp_path, monkeypatch):
        def full(*arguments: object, **options: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        for name in ("optkit.training.student.open_student", "optkit.training.teacher.LiveTeacher"):
            with monkeypatch.context() as patch:
                patch.setattr(name, full)
                with pytest.raises(
                    ResourceError,
                    match=r"distill: the memory of cpu is full. CUDA .* `optkit plan` says what a training needs",
                ):
                    distill(tiny_model("llama"), tiny_model("llama"), tmp_path)

    def test_too_little_text(self, tiny_model, tmp_path):
        with pytest.raises(
            StageError, match=r"distill: [\d,]+ tokens are asked for, and the texts have [\d,]+ to train on"
        ):
            distill(tiny_model("llama"), tiny_model("llama"), tmp_path, tokens=10_000_000)
