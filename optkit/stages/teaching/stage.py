"""What every stage that trains does.
It reads texts, opens student and teacher, trains with checkpoints, and writes the best weights.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from optkit.common.field_types import (
    BatchSize,
    Count,
    Devices,
    Duration,
    Factor,
    LearningRate,
    NonNegative,
    Part,
    SequenceLength,
    Tokens,
)
from optkit.common.frozen import digest
from optkit.common.out_of_resources import out_of_memory
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import ModelShape
from optkit.source.text_place import TextPlace
from optkit.source.token_counts import TokenCounts
from optkit.source.training_text import TrainingText
from optkit.stage import Context, Cost, Report
from optkit.stages.teaching.teacher import StageWithTeacher
from optkit.stages.teaching.training_refusals import check_devices, check_positions
from optkit.training.budget import Budget
from optkit.training.memory_kinds import MemoryKinds
from optkit.training.predicted_memory import OPTIMIZER_BYTES, Setup, predicted_memory

if TYPE_CHECKING:
    from optkit.training.data import TrainingData
    from optkit.training.objective import Objective
    from optkit.training.ranks import Ranks
    from optkit.training.student import Student
    from optkit.training.teacher import Teacher
    from optkit.training.training_options import TrainingOptions
    from optkit.training.training_report import Trainee


LESS_MEMORY = (
    "`optkit plan` says what a training needs: take a device with more, a smaller model or "
    "teacher, or a lower `batch_size`"
)
OPTIONS = (
    "batch_size", "accumulation", "learning_rate", "warmup", "weight_decay", "clip", "optimizer", "minutes",
    "evaluations", "patience", "checkpoint_minutes", "compile",
)  # fmt: skip
"""Fields that the loop knows by the same names."""
CHECKPOINTS = 3
"""On disk at once: the last two, and the one that is being written."""


class TrainingStage(StageWithTeacher):
    """Train a model on texts so that it says again what a teacher says."""

    version: ClassVar[int] = 3
    reads_origin: ClassVar[bool] = True

    texts: tuple[TrainingText, ...] = Field(default=(TrainingText.model_validate("c4"),), min_length=1, max_length=1000)
    """Texts to train on, as names or mappings."""
    tokens: Tokens | None = None
    """Tokens to train on; left out, all of the texts, `epochs` times."""
    epochs: Count = 1
    """How often a text may be repeated, each time in another order."""
    minutes: Duration | None = None
    """Time to train at most; the learning rate comes down in time for it. Two runs with a limit
    differ in their last bits.
    """
    sequence_length: SequenceLength = 512
    """Tokens of a sequence."""
    batch_size: BatchSize = 8
    """Sequences of a forward pass."""
    accumulation: Count = 1
    """Forward passes whose gradients make one step."""
    held_out: Count = 16
    """Sequences of the texts that are never trained on, to judge the student by."""
    evaluations: Count = 10
    """How often it is judged; the best weights are kept."""
    patience: Count | None = 3
    """Stop after so many of these in a row without a new least loss; `null` never stops early."""
    learning_rate: LearningRate = 1e-4
    """Highest learning rate."""
    warmup: Part = 0.05
    """Share of the training in which the learning rate rises in a line; it comes down in half a
    cosine.
    """
    weight_decay: NonNegative = 0.0
    """Of matrices, as AdamW has it."""
    clip: Factor = 1.0
    """Longest gradient of a step."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw` is torch's fused one; `adamw_8bit` is that of bitsandbytes, whose state takes a
    quarter of the memory.
    """
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """What matrices are multiplied in; weights and optimizer are float32 in any case."""
    gradient_checkpointing: bool = False
    """Compute activations again on the way back: less memory, a third more work."""
    compile: bool = False
    """torch.compile the blocks of the student, in front of the training; `minutes` begin after it."""
    devices: Devices = 1
    """GPUs, or on a CPU processes, that share the sequences of a forward pass."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What each of several devices holds: the whole model (`ddp`), or its part of weights,
    gradients and optimizer (`fsdp`, FSDP2).
    """
    checkpoint_minutes: Duration = 5.0
    """Minutes between two checkpoints. A run that is killed goes on from the last one."""

    @model_validator(mode="after")
    def _has_texts_apart(self) -> Self:
        for index, text in enumerate(self.texts):
            if any(text.field == earlier.field and text.overlaps(earlier) for earlier in self.texts[:index]):
                raise ValueError(
                    f"texts: {text.where} is named twice, so what is held out of one would be trained on in the other."
                    " Name it once, and set `epochs` to repeat it."
                )
        if self.generated and self.generated.prompt_tokens >= self.sequence_length:
            raise ValueError(
                f"generated.prompt_tokens {self.generated.prompt_tokens} leaves the teacher nothing "
                f"to write in sequences of {self.sequence_length} tokens. Use at most {self.sequence_length - 1}."
            )
        return self

    @model_validator(mode="after")
    def _can_be_shared(self) -> Self:
        if self.batch_size % self.devices:
            raise ValueError(
                f"batch_size {self.batch_size} cannot be shared by {self.devices} devices alike."
                f" Use {-(-self.batch_size // self.devices) * self.devices}."
            )
        if self.devices > 1 and self.parallel == "fsdp" and self.optimizer == "adamw_8bit":
            raise ValueError("adamw_8bit cannot keep its state in parts. Use `parallel: ddp`, or `optimizer: adamw`.")
        return self

    def _student(self, source: Path, context: Context) -> Student:
        """Return the model to train on the device; the parameters that want a gradient are trained."""
        from optkit.training.student import open_student

        return open_student(source, context.device, context.trust_remote_code)

    def _write(self, student: Student, target: Path, context: Context) -> int:
        """Write the trained student; returns how many tensors changed."""
        from optkit.training.student import write_student

        return write_student(student, target, context.trust_remote_code)

    def _details(self, student: Student) -> dict[str, Any]:
        """Return what else belongs into the report, before the training."""
        return {}

    def _deciding(self) -> dict[str, Any]:
        """Return what decides the result beside texts and seed, as JSON values.
        A checkpoint of others is not continued.
        """
        return self.model_dump(mode="json")

    def _expected(self, student: Student, trainee: Trainee, device: str) -> MemoryKinds:
        """Return the peak memory of each device as the plan said it."""
        return self._memory(trainee.shape, device, trainee.adapter_elements, trainee.teacher)

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Train, and leave the weights with the least held-out loss.

        Raises StageError for too little text, a teacher that does not fit, a loss that is not
        finite, diverges or never falls; ResourceError without memory or disk space. Checkpoints
        stay in the workspace then.
        """
        from optkit.training.launch import launch
        from optkit.training.ranks import current

        ranks = current(self.parallel)
        if self.devices > ranks.count:
            return launch(self, source, target, context, self.devices, self.kind)
        return self._train(source, target, context, ranks)

    def _train(self, source: Path, target: Path, context: Context, ranks: Ranks) -> Report:
        """Train as one of the processes; the first one writes what was learned."""
        import torch

        from optkit.training.loop import Loop
        from optkit.training.training_report import account, spending

        torch.manual_seed(context.seed)
        with out_of_memory(self.kind, context.device, LESS_MEMORY):
            data = self._with_generated(self._data(source, context), source, context)
        options = self._options(data)
        with spending(context.device) as spent, ExitStack() as held:
            with out_of_memory(self.kind, context.device, LESS_MEMORY):
                student = self._student(source, context)
                details = self._details(student)
                rows = [*data.held_out, *data.rows(0, options.steps * self.batch_size * self.accumulation)]
                teacher = held.enter_context(self._teacher(source, context, data, rows, self.batch_size))
                objective = self._objective(student, teacher)
                trainee = self._trainee(student, source, context)
            loop = Loop(
                objective,
                data,
                teacher,
                options,
                where=self.kind,
                progress=context.progress,
                place=context.workspace,
                digest=digest({"fields": self._deciding(), "data": data.digest(), "version": self.version}),
                ranks=ranks,
            )
            result = loop.run()
        predicted = None if student.checkpoint.quantization else self._expected(student, trainee, context.device)
        record = account(result, trainee, spent, ranks, self.parallel, predicted)
        if not ranks.first:
            return Report(changed=0)
        changed = self._write(student, target, context)
        return Report(
            changed=changed,
            details=details
            | result.details()
            | {"curve": [(each.step, each.loss) for each in record.points]}
            | record.details(),
            calibrated_on=tuple(text.identity() for text in self.texts),
        )

    def _trainee(self, student: Student, source: Path, context: Context) -> Trainee:
        from optkit.training.training_report import Trainee

        parameters = list(student.model.parameters())
        trained = sum(each.numel() for each in parameters if each.requires_grad)
        beside = self._has_teacher and self.top_k is None
        return Trainee(
            shape=student.checkpoint.shape,
            length=self.sequence_length,
            arithmetic="bf16" if self.precision == "bfloat16" else "fp32",
            recomputed=self.gradient_checkpointing,
            adapter_elements=trained if trained < sum(each.numel() for each in parameters) else None,
            teacher=Checkpoint(self._teacher_directory(source, context)).shape if beside else None,
        )

    def check_texts(self, place: TextPlace) -> None:
        """Refuse texts that are too short for the tokens that are asked for, if that can be known.
        Raises as `run` does.
        """
        budget, written = (
            self._budget(),
            0 if self.generated is None else self.generated.sequences(self.sequence_length),
        )
        counts = TokenCounts(place.tokenizer, place.data, place.counts, place.trust_remote_code)
        found = counts.enough_sequences(self.texts, self.sequence_length, budget.least_sequences(written))
        if found is not None:
            budget.refuse_nothing_left(found)
            budget.steps(found - self.held_out + written)

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return what `predict_beside` does if the recipe starts from the student."""
        return self.predict_beside(shape, device, shape)

    def predict_beside(self, shape: ModelShape, device: str, origin: ModelShape) -> tuple[Cost, ModelShape]:
        """Return the size of the student and of its checkpoints, and the memory.
        The memory is that of weights, gradients, optimizer and activations.

        Raises StageError for sequences longer than the model's positions, and for a teacher that is
        not there or has another vocabulary.
        """
        check_positions(self, shape)
        check_devices(self, shape, device)
        self._check_teacher(shape, origin)
        kinds = self._memory(shape, device, origin=origin)
        weights, state = 4 * shape.elements, OPTIMIZER_BYTES[self.optimizer] * shape.elements
        disk = shape.size_bytes + CHECKPOINTS * (2 * weights + state)
        if device == "cpu":
            return Cost(disk_bytes=disk, ram_bytes=self.devices * kinds.total, by_kind=kinds.by_kind()), shape
        # for a checkpoint, beside the best weights
        copied = max(weights, state) if self.devices == 1 else weights + state
        return Cost(disk_bytes=disk, ram_bytes=weights + copied, gpu_bytes=kinds.total, by_kind=kinds.by_kind()), shape

    def _memory(
        self, shape: ModelShape, device: str, trained: int | None = None, origin: ModelShape | None = None
    ) -> MemoryKinds:
        """Return the peak memory of each device by kind.
        `trained` numbers lie beside frozen weights; None: all of them are trained.

        `origin` is the model that the recipe starts from, the student itself if None.
        """
        teacher = None
        if self._has_teacher and self.top_k is None:
            teacher = self.teacher_shape() if self.teacher else origin or shape
        setup = Setup(
            positions=self.batch_size * self.sequence_length,
            length=self.sequence_length,
            half=self.precision == "bfloat16",
            checkpointing=self.gradient_checkpointing,
            accumulation=self.accumulation,
            optimizer=self.optimizer,
            trained=trained,
            teacher=teacher,
            known_answers=self.top_k is not None,
            divergence=self.divergence > 0,
            attention_loss=self.attention > 0,
            hidden_loss=self.hidden > 0,
            device=device,
            devices=self.devices,
            parallel=self.parallel,
        )
        return predicted_memory(shape, setup)

    def _data(self, source: Path, context: Context) -> TrainingData:
        from optkit.training.data import read_texts

        return read_texts(
            self.texts,
            source,
            self.sequence_length,
            self.held_out,
            context.data,
            seed=context.seed,
            trust_remote_code=context.trust_remote_code,
            where=self.kind,
        )

    def _options(self, data: TrainingData) -> TrainingOptions:
        from optkit.training.training_options import TrainingOptions

        fields = {name: getattr(self, name) for name in OPTIONS}
        return TrainingOptions(self._budget().steps(len(data.training)), **fields)

    def _budget(self) -> Budget:
        together = self.batch_size * self.accumulation
        return Budget(self.sequence_length, together, self.held_out, self.tokens, self.epochs, self.kind)

    def _objective(self, student: Student, teacher: Teacher | None) -> Objective:
        import torch

        from optkit.training.objective import Objective
        from optkit.training.student import checkpoint_activations_, compile_blocks_

        precision = torch.bfloat16 if self.precision == "bfloat16" else torch.float32
        objective = Objective(student.model, self._weights(), getattr(teacher, "width", None), precision)
        if self.gradient_checkpointing:
            checkpoint_activations_(student.model)
        if self.compile:
            compile_blocks_(student.model)
        return objective
