"""The libraries that can take a stage's place, in versions that were seen to work together.
Nothing is imported or installed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from optkit.errors import UsageError, did_you_mean

TRANSFORMERS_5 = ("transformers==5.17.0", "accelerate==1.15.0", "safetensors==0.8.0", "numpy==2.2.6")
"""What current libraries stand on, in one set."""


@dataclass(frozen=True)
class Library:
    """One library and what its environment is made of, besides the torch that is installed."""

    name: str
    """As in `backend: NAME`; the worker is workers/NAME.py."""
    distribution: str
    """Whose version is the library's."""
    summary: str
    requirements: tuple[str, ...]
    """As given to pip, pinned. torchvision and torchaudio are never among them: they would bring
    another torch.
    """
    bare: tuple[str, ...] = ()
    """Installed after those and without their own requirements, which cannot be met or are not
    needed.
    """
    build_packages: tuple[str, ...] = ()
    """Needed to build `sources`."""
    sources: tuple[str, ...] = ()
    """Names of packages, of all that the environment needs, that are published as source alone."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the worker."""


LIBRARIES: Mapping[str, Library] = {
    library.name: library
    for library in (
        Library(
            "autoawq",
            "autoawq",
            "AWQ as published, scales and clipping searched on the data itself; writes AutoAWQ's GEMM layout",
            # The last transformers that it was released for; newer ones have no PytorchGELUTanh and
            # ask blocks for attributes.
            ("transformers==4.51.3", "accelerate==1.6.0", "safetensors==0.8.0", "numpy==2.2.6", "datasets==5.0.1"),
            bare=("autoawq==0.2.9",),  # asks for triton, which it does without on a CPU
            build_packages=("setuptools==81.0.0", "wheel"),
            sources=("autoawq",),
        ),
        Library(
            "auto_round",
            "auto-round",
            "AutoRound itself, and its AWQ rounded to nearest; writes GPTQ's format or AutoAWQ's GEMM layout",
            (*TRANSFORMERS_5, "auto-round==0.16.1", "datasets==5.2.0"),
        ),
        Library(
            "gptqmodel",
            "gptqmodel",
            "GPTQ and AWQ; writes their own formats",
            (*TRANSFORMERS_5, "gptqmodel==7.6.0", "torchao==0.18.0", "optimum==2.3.0", "datasets==5.2.0"),
            build_packages=("setuptools==81.0.0", "wheel", "cmake>=3.27", "ninja"),
            sources=("defuser", "device-smi", "gptqmodel", "logbar", "pypcre", "tokenicer"),
            variables={"GPTQMODEL_CPU_WORKERS": "2"},
        ),
        Library(
            "llmcompressor",
            "llmcompressor",
            "the quantizer of vLLM: GPTQ and rounding to nearest, AWQ on a GPU; writes compressed-tensors",
            (*TRANSFORMERS_5, "llmcompressor==0.14.0.1", "compressed-tensors==0.19.0", "datasets==5.2.0"),
        ),
        Library(
            "optimum",
            "optimum-onnx",
            "the ONNX exporter of Hugging Face, and ORTModelForCausalLM, which opens what it and optkit write",
            (
                *(
                    "transformers==4.57.6",
                    "optimum==2.1.0",
                    "optimum-onnx==0.1.0",
                    "onnx==1.20.1",
                    "onnxruntime==1.31.0",
                ),
                *("accelerate==1.15.0", "safetensors==0.8.0", "numpy==2.2.6"),
            ),
        ),
        Library(
            "torchao",
            "torchao",
            "rounding to nearest with torch's own tensor types",
            (*TRANSFORMERS_5, "torchao==0.18.0"),
        ),
    )
}


def find_library(name: str) -> Library:
    """Return a library by name; raises UsageError for one that is not known."""
    if name not in LIBRARIES:
        raise UsageError(f"there is no backend '{name}'.{did_you_mean(name, LIBRARIES)}")
    return LIBRARIES[name]
