"""`optkit verify`: whether an artifact is whole.
It also checks whether other programs open it and compute the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from optkit.verification.registry import engine_names
from optkit_cli.options import FILE, Command, number_option, takes


class EngineName(click.ParamType[str]):
    """An engine; the installed packages are asked for plug-ins when it is used, not for `--help`."""

    name = "engine"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name."""
        return str(click.Choice(engine_names()).convert(value, param, ctx))

    def get_metavar(self, param: click.Parameter, **context: Any) -> str | None:  # type: ignore[override]
        """Return all names."""
        return click.Choice(engine_names()).get_metavar(param, **context)


def engine_python(value: str) -> tuple[str, str]:
    """Return the engine and the interpreter of `ENGINE=PYTHON`, e.g. `vllm=/opt/vllm/bin/python`."""
    engine, equals, python = value.partition("=")
    if engine not in engine_names() or not (equals and python):
        raise click.BadParameter(f"'{value}' names no engine and its Python. Write it as vllm=/opt/vllm/bin/python.")
    return engine, python


@click.command(cls=Command, short_help="Prove that other programs open an artifact.")
@takes("artifact")
@click.option("--engine", "engines", type=EngineName(), multiple=True, help="Ask this engine only; repeatable.")
@click.option(
    "--engine-python",
    "pythons",
    metavar="ENGINE=PYTHON",
    type=engine_python,
    multiple=True,
    help="Python that has the engine, if it is not ours [$OPTKIT_VLLM_PYTHON, $OPTKIT_ONNXRUNTIME_GENAI_PYTHON, ...].",
)
@number_option("--tokens", 128, "Tokens after which logits are compared.", least=2)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="S",
    type=click.FloatRange(min=0, min_open=True),
    default=1800,
    help="Seconds that one engine may take [1800].",
)
@click.option("--signature", is_flag=True, help="Check who signed it, and its files; engines only by --engine.")
@click.option("--public-key", metavar="PEM", type=FILE, help="Public key of whoever has to have signed it.")
@click.option("--certificate", metavar="PEM", type=FILE, help="Root of the certificate that has to have signed it.")
@takes("device", "json", "quiet", "trust")
def command(
    artifact: Path,
    engines: tuple[str, ...],
    pythons: tuple[tuple[str, str], ...],
    signature: bool,
    public_key: Path | None,
    certificate: Path | None,
    **asked: Any,
) -> int:
    """Check ARTIFACT's files, open it in each installed engine and compare its logits with ours.

    The result is kept in the artifact's scorecard. Exit status: 0 every check holds and every
    engine that could be asked agrees, 3 a check failed, or an engine does not open it or disagrees.
    """
    from optkit import pipeline
    from optkit.publishing.signing import Trusted
    from optkit_cli.output import print_result
    from optkit_cli.progress import working
    from optkit_cli.verify_view import refuse_unasked, verified_view

    with working() as progress:
        found = pipeline.verify(
            artifact,
            engines=tuple(name for name in engine_names() if name in engines),
            pythons=dict(pythons),
            signed_by=Trusted(public_key, certificate) if signature or public_key or certificate else None,
            progress=progress,
            **asked,
        )
    print_result(found, lambda: verified_view(found))
    if engines and not found.exit_status:
        refuse_unasked(found)
    return found.exit_status
