"""What each metric means, which way is better, and how it is measured; names and units are the evals'."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from optkit.common.statistics import Estimate
from optkit.measure import Eval, Metric


class Meaning(NamedTuple):
    """What a metric says."""

    better: str
    """`higher`, `lower`, or empty if neither is."""
    text: str
    no_ratio: str = ""
    """Why a gate does not compare it with the unmodified model, if none does."""


def _higher(text: str) -> Meaning:
    return Meaning("higher", text)


def _lower(text: str) -> Meaning:
    return Meaning("lower", text)


def row(
    of: Eval, name: str, found: Estimate | float, protocol: str, samples: Iterable[float] = (), **more: Any
) -> Metric:
    """Return a number of an eval, in the unit that the eval names; MEANINGS knows which way is better."""
    value, interval = (found.value, found.interval) if isinstance(found, Estimate) else (found, None)
    return Metric(
        name=name,
        value=value,
        unit=of.metrics[name],
        higher_is_better=MEANINGS[name].better == "higher",
        interval=interval,
        protocol=protocol,
        samples=tuple(samples),
        **more,
    )


_ITEMS = "Mean over the items of a task, asked as EleutherAI's harness asks them."
_GAP = "Time from one token of an answer to the next, nothing else running:"
_GAPS = {"p50": "the median", "p95": "95% of the gaps are shorter", "p99": "99% of the gaps are shorter"}
_LIMIT = "Tokens a second by the device's measured bandwidth and rates, if nothing else took time."
_SHARE = "What was reached, as a share of that limit."
_MFU = "Operations of the model a second, as a share of the device's rate in that dtype (model FLOPs utilisation)."
_FIRST = "Time from a request's arrival to its first token while requests arrive at a rate: {} of all requests."
_BETWEEN = "Time between tokens of an answer while requests arrive at a rate: {} of all gaps."
_QUANTILES = {"p50": "the median", "p95": "95%", "p99": "99%"}
MEANINGS: dict[str, Meaning] = {
    "perplexity": _lower(
        "How surprised the model is by a text: exp of the mean loss of a token, in windows without overlap. The ratio "
        "to the baseline is paired window by window, so its interval is far narrower than that of each number."
    ),
    "kl_divergence": _lower(
        "How far the model's next-token distribution is from the unmodified model's: mean KL(baseline || model) over "
        "the tokens of a text. 0 is no difference; it sees damage that perplexity averages away."
    ),
    "kl_divergence_p99": _lower("The same divergence at the worst percent of tokens."),
    "top1_agreement": _higher("Share of tokens after which both models find the same next token likeliest."),
    "prefill_tokens_per_s": _higher(
        "Speed of reading a prompt: batch times prompt tokens, over the time to the first new token."
    ),
    "decode_tokens_per_s": _higher(
        "Speed of generating: new tokens behind the first one of all sequences of a batch, over their time. Mean of "
        "turns in fresh processes, in turns with the baseline."
    ),
    "time_to_first_token_s": _lower("Time from the prompt to its first new token, nothing else running."),
    **{f"inter_token_{name}_s": _lower(f"{_GAP} {text}.") for name, text in _GAPS.items()},
    "decode_bytes_per_s": _higher("Bytes of weights and KV cache that decode steps must read, over their time."),
    "peak_memory_bytes": _lower(
        "Largest memory while it was timed: allocated on a GPU, resident set of the process on a CPU (Python and "
        "torch are in it)."
    ),
    "peak_reserved_bytes": _lower("Largest memory that torch's allocator took from the GPU, free blocks with it."),
    "energy_per_token_j": _lower("Energy of the GPU, by its own counter, over the new tokens."),
    "size_bytes": _lower("Weights and every file beside them that deploys (tokenizer, configs)."),
    "weights_bytes": _lower("Files that hold weights."),
    "bits_per_weight": _lower(
        "Bits of all tensors, with scales, zero points and embeddings, for each weight of the model."
    ),
    "bits_per_quantized_weight": Meaning(
        "lower",
        "Bits of the quantized layers' tensors, for each weight of these layers.",
        "without x: an unmodified model in floats has none",
    ),
    "zeros": _higher("Share of the linear layers' weights that are 0."),
    "cosine_similarity": _higher("Mean cosine of a sentence's embedding and the unmodified model's."),
    "cosine_similarity_p1": _higher("The same cosine at the worst percent of sentences."),
    "cosine_similarity_min": _higher("The same cosine at the worst sentence."),
    "spearman_cosine": _higher("Rank correlation of all pairs' similarities with those of the unmodified model."),
    "recall_at_10": _higher("Share of the unmodified model's ten nearest neighbours that are found again."),
    "latency_p50_s": _lower("Time of one call of an encoder: the median of the calls of all turns."),
    "latency_p95_s": _lower("Time of one call of an encoder that 95% of the calls keep."),
    "sequences_per_s": _higher("Sequences that an encoder computes in a second, one call after another."),
    "repetition": _lower("Share of an answer's n-grams that it had already said; a broken model repeats itself."),
    "common_prefix": _higher("Tokens from the start on that both models' greedy answers share."),
    "same_answers": _higher("Share of prompts to which both models give the same greedy answer."),
    "acc": _higher(f"Share of items whose right answer the model finds likeliest. {_ITEMS}"),
    "acc_norm": _higher(f"The same, each answer's likelihood divided by its length in bytes. {_ITEMS}"),
    "acc_bytes": _higher(f"The same, by the harness' own count of bytes. {_ITEMS}"),
    "acc_mutual_info": _higher(f"The same, less the answer's likelihood without the question. {_ITEMS}"),
    "exact_match": _higher(f"Share of generated answers that are the expected text. {_ITEMS}"),
    "word_error_rate": _lower(
        "Words to replace, insert or delete in answers until they are the targets, for each of their words."
    ),
    "f1": _higher(f"Words that the answer shares with the expected one, precision and recall together. {_ITEMS}"),
    "task_perplexity": _lower("exp of the mean loss of the answers of a task."),
    "word_perplexity": _lower("exp of the loss of a text over its words, whatever the tokenizer."),
    "byte_perplexity": _lower("exp of the loss of a text over its bytes, whatever the tokenizer."),
    "right_to_wrong": _lower("Items that the unmodified model answers rightly and the artifact wrongly."),
    "wrong_to_right": _higher("Items that the artifact answers rightly and the unmodified model wrongly."),
    "mcnemar_p": _higher(
        "Probability of flips at least as lopsided if both models were equally good (exact McNemar test). Below 0.05 "
        "the difference is hardly chance."
    ),
    "recovery": _higher("What is left of the unmodified model's scores, mean over the tasks; 100 is all of it."),
    **{f"load_first_token_{name}_s": _lower(_FIRST.format(text)) for name, text in _QUANTILES.items()},
    **{f"load_inter_token_{name}_s": _lower(_BETWEEN.format(text)) for name, text in _QUANTILES.items()},
    "load_tokens_per_s": _higher("New tokens of all requests over the time in which they were served."),
    "goodput_requests_per_s": _higher("Requests a second whose first token came within `first_token_limit_s`."),
    "goodput_fraction": _higher("Share of requests whose first token came within `first_token_limit_s`."),
    "noise_kl_divergence": _lower("Divergence of the unmodified model from itself, computed in another way."),
    "noise_top1_agreement": _lower("Share of tokens whose likeliest next one is another if computed in another way."),
    "noise_perplexity": _lower("How much the unmodified model's perplexity moves if computed in another way."),
    "prefill_limit_tokens_per_s": _higher(f"Of prompts. {_LIMIT}"),
    "decode_limit_tokens_per_s": _higher(f"Of decode steps. {_LIMIT}"),
    "prefill_of_limit": _higher(f"Of prompts. {_SHARE}"),
    "decode_of_limit": _higher(f"Of decode steps. {_SHARE}"),
    "prefill_mfu": _higher(f"Of prompts. {_MFU}"),
    "decode_mfu": _higher(f"Of decode steps. {_MFU}"),
    "prefill_matrix_mfu": _higher(f"Of prompts, attention left out. {_MFU}"),
    "decode_bandwidth_used": _higher("Bytes that decode steps read a second, as a share of the device's bandwidth."),
    "predicted_kl_divergence": _lower("Divergence that the rounding of all layers predicts, to second order."),
    "layer_kl_divergence": _lower("Divergence that the rounding of this layer alone predicts, to second order."),
    "text_decode_tokens_per_s": _higher("Speed of generating behind prompts of a text, one sequence."),
    "tokens_per_forward": _higher("Tokens that a forward pass of the model keeps; 1 without speculation."),
    "acceptance_rate": _higher("Share of proposed tokens that the model keeps."),
    "greedy_agreement": _higher("Share of prompts whose answer is that of plain greedy decoding, token by token."),
}
"""Metric -> what it says."""
