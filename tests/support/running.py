"""A stage, run as `execute` runs it."""

from pathlib import Path

from optkit.stage import Context, Report, Transform


def run_stage(stage: Transform, source: Path, target: Path, context: Context | None = None) -> Report:
    """Run a stage into a directory that is made for it."""
    target.mkdir(parents=True)
    return stage.run(source, target, context or Context())
