"""Score texts and write answers with vLLM: log-likelihoods of given tokens, and greedy continuations."""

import os
from typing import Any

from open_in_vllm import PACKAGES, lora_options, missing, with_adapter  # type: ignore[import-not-found]

__all__ = ["PACKAGES", "answer_to", "missing"]


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Return dtype, quantization method, a score of each of `scored` [tokens, of which so many at the
    end are scored], and the tokens of the answer to each of `prompts` [tokens, new tokens, stops].

    A score is a log-likelihood in nats and whether the tokens are the greedy ones. Log-probabilities
    are those of the logits before any sampling (`raw_logprobs`). On CPUs vLLM's compiler is off, which
    takes minutes for a small model.
    """
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # an error is then the engine's own, not "engine core failed"
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    scored, prompts = request["scored"], request["prompts"]
    lengths = [len(tokens) + 1 for tokens, _ in scored] + [len(tokens) + new for tokens, new, _ in prompts]
    options = {"gpu_memory_utilization": request["memory_fraction"]} if request["memory_fraction"] else {}
    model = LLM(
        model=request["directory"],
        dtype="auto",
        trust_remote_code=request["trust_remote_code"],
        max_model_len=max(lengths),
        max_logprobs=1,
        logprobs_mode="raw_logprobs",
        enable_prefix_caching=False,
        enforce_eager=request["device"] == "cpu",
        **options,
        **lora_options(request),
    )
    reading = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    writing = [SamplingParams(temperature=0, max_tokens=new, stop=stops) for _, new, stops in prompts]
    read = answers(model, [tokens for tokens, _ in scored], [reading] * len(scored), request)
    written = answers(model, [tokens for tokens, _, _ in prompts], writing, request)
    config = model.llm_engine.model_config
    return {
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": config.quantization,
        "scores": [score(each.prompt_logprobs, *asked) for each, asked in zip(read, scored, strict=True)],
        "answers": [list(each.outputs[0].token_ids) for each in written],
    }


def answers(model: Any, texts: list[list[int]], wanted: list[Any], request: dict[str, Any]) -> list[Any]:
    """Return what vLLM makes of token sequences, in their order."""
    if not texts:
        return []
    prompts = [{"prompt_token_ids": tokens} for tokens in texts]
    found: list[Any] = model.generate(prompts, wanted, use_tqdm=False, **with_adapter(request))
    return found


def score(positions: list[Any], tokens: list[int], count: int) -> tuple[float, bool]:
    """Return the log-likelihood of the last tokens, and whether each is the likeliest of its position.
    A position has the log-probability of its token and of the likeliest one.
    """
    pairs = list(zip(tokens, positions, strict=True))[-count:]
    loss = sum(float(found[token].logprob) for token, found in pairs)
    return loss, all(found[token].logprob >= max(each.logprob for each in found.values()) for token, found in pairs)
