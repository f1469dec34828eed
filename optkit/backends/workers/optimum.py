"""optimum-onnx: a decoder as ONNX by torch's TorchScript exporter.
launch.py runs it in its environment.
"""

from __future__ import annotations

from typing import Any


def export(job: Any) -> dict[str, Any]:
    """Write model.onnx and its data into the target; the caller compares it with the source."""
    from optimum.exporters.onnx import main_export

    main_export(
        str(job.source),
        output=job.target,
        task=job.fields["task"],
        opset=job.fields["opset"],
        device="cpu",
        dtype="fp32",
        framework="pt",
        local_files_only=True,
        do_validation=False,
    )
    return {}
