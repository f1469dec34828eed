"""The packages of kernels that a model with states would be computed by, and that are not there.

transformers computes the same with plain torch then. No torch is needed to tell.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from optkit.model.config_defaults import code_files
from optkit.model.text_config import text_type

DISTRIBUTIONS = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d", "fla": "flash-linear-attention"}
WITHOUT_CACHE = frozenset({"recurrent_gemma", "roc_bert"})
"""`model_type` of those whose code takes keys and values, and returns none."""
CARRYING = r"\n +(past_key_values|cache_params|state): "
"""An argument in the code of those that take what they keep: `optkit.model.carried_state.NAMES`."""
WARNS = "transformers.integrations.hub_kernels"
"""The logger that warns at the first call of each function without its kernel."""


def state_kernels_note(config: Mapping[str, Any]) -> list[str]:
    """Return a sentence for the notes if kernels are not installed; nothing if none are missed."""
    missing = [name for name in _packages(text_type(config)) if find_spec(name) is None]
    if not missing:
        return []
    packages = " and ".join(DISTRIBUTIONS.get(name, name) for name in missing)
    return [f"states: plain torch, which is right and slow; the kernels for GPUs are those of {packages}"]


def silence_fallbacks_(config: Mapping[str, Any]) -> None:
    """Keep transformers from warning function by function of what the note says once."""
    if state_kernels_note(config):
        logging.getLogger(WARNS).setLevel(logging.ERROR)


def keeps_states(config: Mapping[str, Any]) -> bool:
    """Say whether layers of a model keep states of convolutions or recurrences, and not keys and values alone."""
    return bool(re.search(r"\.update_(conv|recurrent)_state\(", code_of(text_type(config))))


def keeps_keys_and_values(config: Mapping[str, Any]) -> bool:
    """Say whether a model keeps keys and values of the tokens it has seen, and nothing of another kind.
    States that some layers keep in their place are told by `keeps_states`.
    """
    code = code_of(text_type(config))
    takes = re.search(r"\n +past_key_values: ", code) and text_type(config) not in WITHOUT_CACHE
    return not code or bool(takes and not re.search(r"\.update_indexer\(|class \w+Cache\b", code))


def takes_steps(config: Mapping[str, Any]) -> bool:
    """Say whether a model can be run token by token: it takes what it keeps of the tokens before, and returns it."""
    code = code_of(text_type(config))
    return not code or (text_type(config) not in WITHOUT_CACHE and bool(re.search(CARRYING, code)))


@cache
def _packages(model_type: str) -> tuple[str, ...]:
    call = r'use_kernel_func_from_hub_with_fallback\(\s*"\w+",\s*(?:package=)?"(\w+)"'
    return tuple(sorted(set(re.findall(call, code_of(model_type)))))


@cache
def code_of(model_type: str) -> str:
    """Return transformers' code of a model type; nothing if it has none."""
    return "".join(file.read_text(encoding="utf-8") for file in code_files(model_type, "modeling"))
