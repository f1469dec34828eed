"""Evals for tests that look at something else than their numbers."""

THROUGHPUT = {
    "throughput": {"isolated": False, "prompts": [8], "new_tokens": 2, "repeats": 2, "warmup": 1, "limit_s": 1}
}
