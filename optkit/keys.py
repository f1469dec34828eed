"""What finished work is found by.

A key is the SHA-256 of the canonical JSON of everything that decides a result, and of nothing else:

    model      see `optkit.source.models.model_key`: its content, or its repository and commit
    step       {schema, kind, version, fields, source: key of the input, seed}
               and {packages} of the library if another one than optkit does the work
    artifact   {schema, weights: key of the last step, settings: [{kind, version, fields}]}
    metric     {schema, eval, version, fields, weights: key, settings}
               and {seed} if the eval draws something,
               and {baseline: key of the model} if the eval compares,
               and {beside: artifact key of the other, device, cores, threads, torch,
               transformers} if it is timed, with the versions of `Format.libraries`;
               of several others `beside` is the digest of their keys;
               {cpu_kernels} if the user changed those
               and `Eval.circumstances`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optkit.common.frozen import digest
from optkit.environment import cpu_cores, cpu_kernels, cpu_threads, device_name, package_version
from optkit.onnx.builds import installed
from optkit.recipe.recipe import EvalEntry, SettingEntry, TransformEntry, unpacking_entry
from optkit.stage import Format

SCHEMA = 1
"""Raised when the meaning of keys, or of what lies under them, changes: then nothing that was
stored is found again.
"""


def make_step_key(entry: TransformEntry, source_key: str, seed: int, unpacks: bool = False) -> str:
    """Return the key of what a transform leaves.
    If it `unpacks` its source, that is what it leaves behind `dequantize`.
    """
    source_key = make_step_key(unpacking_entry(), source_key, seed) if unpacks else source_key
    return digest({"schema": SCHEMA, **_identity(entry), "source": source_key, "seed": seed})


def make_artifact_key(weights_key: str, settings: Sequence[dict[str, Any]]) -> str:
    """Return the key of weights opened with settings."""
    return digest({"schema": SCHEMA, "weights": weights_key, "settings": list(settings)})


def make_metric_key(
    entry: EvalEntry,
    seed: int,
    weights_key: str,
    settings: Sequence[dict[str, Any]],
    circumstances: dict[str, Any] | None = None,
) -> str:
    """Return the key of an eval's metrics; `circumstances` are the further things that decide them."""
    return digest(
        {
            "schema": SCHEMA,
            "eval": entry.kind,
            "version": entry.value.version,
            "fields": entry.value.model_dump(mode="json"),
            **({"seed": seed} if entry.value.draws else {}),
            "weights": weights_key,
            "settings": list(settings),
            **(circumstances or {}),
        }
    )


def settings_identity(settings: Sequence[SettingEntry]) -> list[dict[str, Any]]:
    """Return what keys and artifacts say about settings, in their order."""
    return [_identity(entry) for entry in settings]


def _identity(entry: TransformEntry | SettingEntry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "version": entry.value.version,
        "fields": entry.value.model_dump(mode="json"),
        **entry.value.made_with(),
    }


@dataclass(frozen=True)
class Together:
    """Models that are timed in turns with each other, as they are opened."""

    keys: frozenset[str]
    """Their artifact keys, that of the unmodified model among them."""
    formats: frozenset[Format]
    """The formats of their weights."""

    def __or__(self, other: Together) -> Together:
        """Return the models of both."""
        return Together(self.keys | other.keys, self.formats | other.formats)

    def circumstances(self, device: str) -> dict[str, Any]:
        """Return what decides a timing on a device beside its eval and the others.
        That is the machine, and what runs models of these formats.
        """
        described = {
            "device": device_name(device),
            "cores": cpu_cores() if device == "cpu" else None,
            "threads": cpu_threads() if device == "cpu" else None,
            "torch": package_version("torch"),
            "transformers": package_version("transformers"),
        }
        if device == "cpu" and (changed := cpu_kernels()):
            described["cpu_kernels"] = changed
        libraries = {name: builds for format in self.formats for name, builds in format.libraries.items()}
        return described | {name: installed(builds) for name, builds in libraries.items()}

    def beside(self, key: str) -> str:
        """Return what a timing says of the models that took turns with one of them.
        It is the key of the only other one, its own if there is none.
        """
        others = sorted(self.keys - {key}) or [key]
        return others[0] if len(others) == 1 else digest(others)
