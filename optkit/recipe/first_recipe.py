"""A first recipe from a few answers: the forms that each target opens, those that lose least first.
What is known of them is in docs/howto/choose-a-recipe.md; each is a line of `FORMS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Target = Literal["vllm", "onnx", "transformers", "llama.cpp"]
Device = Literal["cpu", "cuda"]
Effort = Literal["quick", "thorough"]
PLAIN = re.compile(r"[A-Za-z][\w.-]*[/-][\w./-]+|/[\w./-]+")
"""Names of models that need no quotes in YAML."""
CALIBRATION = {
    "quick": "{dataset: python-reference, samples: 16, sequence_length: 256}",
    "thorough": "{dataset: python-reference, samples: 64, sequence_length: 512}",
}


@dataclass(frozen=True)
class Form:
    """What the weights become."""

    name: str
    why: str
    quick: tuple[str, ...]
    """The stages that make it in the least time; none if there is no quick way."""
    thorough: tuple[str, ...]
    """The stages that lose least."""
    perplexity: tuple[str, str]
    """Limits of the ratio to the unmodified model, quick and thorough."""
    size: str
    """A limit that it keeps beside weights of 16 and of 32 bits."""


FORMS = {
    form.name: form
    for form in (
        Form(
            name="FP8",
            why="8-bit floats: little loss, and fast in vLLM on GPUs since Ada and Hopper.",
            quick=("fp8: {scales: channel, activations: dynamic}",),
            thorough=("fp8: {scales: channel, activations: dynamic, rounding: gptq, calibration: TEXT}",),
            perplexity=("1.05", "1.03"),
            size="0.7",
        ),
        Form(
            name="W8A8",
            why="Weights and activations in 8-bit integers: little loss, and fast for prompts and large batches.",
            quick=("smoothquant: {calibration: TEXT}",),
            thorough=("smoothquant: {alpha: search, calibration: TEXT}",),
            perplexity=("1.05", "1.03"),
            size="0.7",
        ),
        Form(
            name="INT8",
            why="8-bit weights in groups of 64: hardly any loss, no text needed.",
            quick=("rtn: {bits: 8, group_size: 64, symmetric: true}",),
            thorough=("rtn: {bits: 8, group_size: 64, symmetric: true}",),
            perplexity=("1.02", "1.02"),
            size="0.7",
        ),
        Form(
            name="float16",
            why="Weights in 16 bits: half of float32 and no loss to speak of.",
            quick=("onnx: {target: DEVICE, dtype: float16}",),
            thorough=("onnx: {target: DEVICE, dtype: float16}",),
            perplexity=("1.02", "1.02"),
            size="1.05",
        ),
        Form(
            name="mixed INT4 and INT8",
            why="4 or 8 bits for each layer, chosen by what they cost: the best model of 6 bits a weight.",
            quick=(),
            thorough=("auto_bits: {average_bits: 6.0, calibration: TEXT}",),
            perplexity=("1.10", "1.10"),
            size="0.6",
        ),
        Form(
            name="INT4",
            why="4-bit weights in groups of 32 with a zero point each: the smallest that is still good.",
            quick=("rtn: {bits: 4, group_size: 32, symmetric: false}",),
            thorough=("gptq: {bits: 4, group_size: 32, symmetric: false, effort: balanced, calibration: TEXT}",),
            perplexity=("1.50", "1.15"),
            size="0.6",
        ),
        Form(
            name="INT4, groups of 64",
            why="4-bit weights in groups of 64 without zero points: smaller, and what most kernels like best.",
            quick=("rtn: {bits: 4, group_size: 64, symmetric: true}",),
            thorough=("gptq: {bits: 4, group_size: 64, symmetric: true, effort: balanced, calibration: TEXT}",),
            perplexity=("1.60", "1.20"),
            size="0.6",
        ),
        Form(
            name="INT3",
            why="3-bit weights behind a rotation of the attention heads: for when 4 bits do not fit.",
            quick=("gptq: {bits: 3, group_size: 64, symmetric: true, calibration: TEXT}",),
            thorough=(
                "rotate: {residual: false}",
                "gptq: {bits: 3, group_size: 64, symmetric: true, effort: balanced, calibration: TEXT}",
            ),
            perplexity=("2.50", "1.80"),
            size="0.6",
        ),
    )
}
USUAL = "INT4"
"""What is taken if no size is asked for and the model takes it."""
OPENED: dict[tuple[Target, Device], tuple[str, ...]] = {
    ("vllm", "cuda"): ("FP8", "mixed INT4 and INT8", "INT4", "INT4, groups of 64"),
    ("vllm", "cpu"): ("W8A8", "INT4", "INT4, groups of 64"),
    ("transformers", "cuda"): ("INT8", "mixed INT4 and INT8", "INT4", "INT4, groups of 64", "INT3"),
    ("transformers", "cpu"): ("INT8", "mixed INT4 and INT8", "INT4", "INT4, groups of 64", "INT3"),
    ("onnx", "cuda"): ("float16", "INT4", "INT4, groups of 64"),
    ("onnx", "cpu"): ("float16", "INT4", "INT4, groups of 64"),
    ("llama.cpp", "cuda"): ("INT8", "INT4", "INT4, groups of 64"),
    ("llama.cpp", "cpu"): ("INT8", "INT4", "INT4, groups of 64"),
}
"""The forms that a target opens on a device, those that lose least first."""
EXPORTS: dict[tuple[Target, Device], str] = {
    ("onnx", "cpu"): "onnx: {target: cpu, lm_head: 8, activations: int8}",
    ("onnx", "cuda"): "onnx: {target: cuda, activations: float}",
    ("llama.cpp", "cpu"): "gguf",
    ("llama.cpp", "cuda"): "gguf",
}
"""What makes another format of packed weights, as fast as the device can."""
DEPLOYED = {
    "vllm": "vllm serve DIRECTORY",
    "transformers": "AutoModelForCausalLM.from_pretrained(DIRECTORY), with compressed-tensors installed",
    "onnx": "onnxruntime_genai.Model(DIRECTORY), with onnxruntime-genai installed",
    "llama.cpp": "llama-server --model DIRECTORY/model.gguf",
}
PAGE = """\
# Written by `optkit init`: it is yours now. What a line means: `optkit explain STAGE` (or METRIC).
#
#   optkit plan {file}     disk, memory and time that it needs here; computes nothing
#   optkit run {file}      the artifact, and its scorecard beside the unmodified model
#
# The artifact opens with {opens}.
description: {form} for {target} on {device}.
model: {model}
{attribution}
stages:
  # {why}
  # TEXT
{stages}
evals:
  # Measured on text that the stages have not seen. Papers report `dataset: wikitext2, window: 2048`.
  - perplexity: {{dataset: python-reference, split: test, window: 512, windows: {windows}}}
  - divergence: {{dataset: python-reference, split: test, window: 512, windows: {few}}}
  - throughput: {{batch_sizes: [1], prompts: [128], new_tokens: {new_tokens}}}
  - footprint

# Limits; a number that ends in x is relative to the unmodified model. `optkit run` exits with 3 if
# one is broken, and with 4 if the measurement cannot tell. A small model loses more than a large one.
gates:
  perplexity: "<= {perplexity}x"
  size_bytes: "<= {size}"
"""
YOUR_TEXT = "Calibrated on text that comes with Python. Better is your own (`dataset: FILE.jsonl`), or c4."
NO_TEXT = "It needs no text. `--effort thorough` calibrates on one, and loses less."


@dataclass(frozen=True)
class Answers:
    """What a first recipe is made of."""

    target: Target
    device: Device
    effort: Effort
    model: str
    size: str = ""
    """A limit as gates write it, e.g. `0.3x` or `4000000000`; empty for the usual form."""

    def forms(self) -> Iterator[Form]:
        """Yield the forms to choose from, those that lose least first; from the usual one if no size is asked
        for, as a model may take smaller ones alone: experts have no zero points.
        """
        opened = OPENED[self.target, self.device]
        for name in opened if self.size else opened[opened.index(USUAL) :]:
            if self.stages(FORMS[name]):
                yield FORMS[name]

    def stages(self, form: Form) -> tuple[str, ...]:
        """Return the stages that make a form, each as YAML in one line; none if there is no way."""
        made = form.quick if self.effort == "quick" else form.thorough
        export = EXPORTS.get((self.target, self.device))
        if export and not any(line.startswith("onnx:") for line in made):
            made = (*made, export)
        text = CALIBRATION[self.effort]
        return tuple(line.replace("TEXT", text).replace("DEVICE", self.device) for line in made)

    def recipe(self, form: Form, file: str) -> str:
        """Return the text of the recipe that makes a form; `file` is the name of its file."""
        quick, stages = self.effort == "quick", self.stages(form)
        settings = [] if (self.target, self.device) in EXPORTS else ["attention: sdpa"]
        if self.target == "transformers" and self.device == "cuda":
            settings.append("cuda_graphs")
        comment = YOUR_TEXT if any("calibration" in line for line in stages) else NO_TEXT
        return PAGE.format(
            file=file,
            opens=DEPLOYED[self.target],
            form=form.name.replace(", ", " in "),
            target={"vllm": "vLLM", "onnx": "ONNX Runtime"}.get(self.target, self.target),
            device={"cpu": "CPUs", "cuda": "NVIDIA GPUs"}[self.device],
            model=self.model if PLAIN.fullmatch(self.model) else json.dumps(self.model),
            attribution="attribution: false # true: measures too what each stage added\n" if quick else "",
            why=form.why,
            stages="".join(f"  - {line}\n" for line in (*stages, *settings)).replace(", calib", ",\n      calib"),
            windows=8 if quick else 24,
            few=4 if quick else 8,
            new_tokens=32 if quick else 64,
            perplexity=form.perplexity[not quick],
            size=self.size or f"{form.size}x",
        ).replace("# TEXT", f"# {comment}")
