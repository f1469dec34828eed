"""Time answers of vLLM, token by token, with an engine that is opened once.
Each configuration gives the moments of its tokens.
"""

import os
import random
import time
from itertools import pairwise
from statistics import fmean as mean
from typing import Any

from open_in_vllm import PACKAGES, lora_options, missing, with_adapter  # type: ignore[import-not-found]

__all__ = ["PACKAGES", "answer_to", "missing"]

MOST_FURTHER_RUNS = 10


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Return dtype, quantization method, and what computes the linear layers.
    For each of `cells` [batch, prompt, new tokens] it returns the repeats.

    A repeat is the seconds to the first token and those between the tokens. Prefix caching is off:
    the prompts of all repeats are the same. On CPUs its compiler is off, which takes minutes for a
    small model.
    """
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # our own function goes to the engine that this process starts
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    if request["device"] == "cpu":
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    cells = request["cells"]
    options = {"gpu_memory_utilization": request["memory_fraction"]} if request["memory_fraction"] else {}
    model = LLM(
        model=request["directory"],
        dtype="auto",
        trust_remote_code=request["trust_remote_code"],
        max_model_len=max(prompt + new for _, prompt, new in cells),
        max_num_seqs=max(batch for batch, _, _ in cells),
        enable_prefix_caching=False,
        seed=request["seed"],
        enforce_eager=request["device"] == "cpu",
        **options,
        **lora_options(request),
    )
    measured = [measure(model.llm_engine, cell, request) for cell in cells]
    dtype = str(model.llm_engine.model_config.dtype).removeprefix("torch.")
    return {
        "dtype": dtype,
        "quantization": model.llm_engine.model_config.quantization,
        "kernels": kernels(model),
        "cells": measured,
    }


def kernels(model: Any) -> dict[str, int]:
    """Return how many linear layers each method and kernel computes; nothing if unknown."""
    try:
        return dict(model.apply_model(kernels_of)[0])
    except Exception:  # an older vLLM, or an engine in another process that takes no function
        return {}


def kernels_of(model: Any) -> dict[str, int]:
    """Return what computes the linear layers of a loaded model.
    It is the class of the method or scheme, and of the kernel that it chose.
    """
    found: dict[str, int] = {}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if not type(method).__name__.endswith(("LinearMethod", "MoEMethod")):
            continue
        holders = [each for each in (getattr(module, "scheme", None), method) if each is not None]
        chosen = [
            type(value).__name__
            for each in holders
            for value in vars(each).values()
            if type(value).__name__.endswith("Kernel")
        ]
        name = f"{chosen[0]} ({type(holders[0]).__name__})" if chosen else type(holders[0]).__name__
        found[name] = found.get(name, 0) + 1
    return found


def measure(engine: Any, cell: list[int], request: dict[str, Any]) -> dict[str, Any]:
    """Return warm-up runs, whether they settled, and the repeats of one configuration."""
    numbers = random.Random(request["seed"])
    batch, prompt, new = cell
    prompts = [[numbers.randrange(request["vocabulary"]) for _ in range(prompt)] for _ in range(batch)]
    warm: list[float] = []
    given = with_adapter(request)
    settled = False
    while not settled and len(warm) < request["warmup"] + MOST_FURTHER_RUNS:
        warm.append(sum(answer(engine, prompts, new, given)))
        if len(warm) >= max(request["warmup"], 2):
            before, now = mean(warm[-3:-1]), mean(warm[-2:])
            settled = abs(now - before) < request["settled"] * before
        if len(warm) > request["warmup"] and sum(warm[request["warmup"] :]) > request["limit_s"]:
            break
    return {
        "warmup": len(warm),
        "settled": settled,
        "repeats": [answer(engine, prompts, new, given) for _ in range(request["repeats"])],
    }


def answer(engine: Any, prompts: list[list[int]], new: int, given: dict[str, Any] | None = None) -> list[float]:
    """Return the seconds until all prompts have their first token.
    Then come those between the tokens that all of them have.
    """
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
    counts = dict.fromkeys(map(str, range(len(prompts))), 0)
    moments = [time.perf_counter()]
    for name, tokens in zip(counts, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": tokens}, wanted, **(given or {}))
    while engine.has_unfinished_requests():
        for output in engine.step():
            counts[output.request_id] = len(output.outputs[0].token_ids)
        now = time.perf_counter()
        while len(moments) <= min(counts.values()):
            moments.append(now)
    if len(moments) != new + 1:
        raise RuntimeError(f"{len(moments) - 1} of {new} tokens came")
    return [later - earlier for earlier, later in pairwise(moments)]
