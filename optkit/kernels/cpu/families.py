"""Which models a decode step in C++ is known for; no torch, so that a plan can ask."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s whose step is: embed; norm, attend, add; norm, gated MLP, add; norm, head."""
DECODES = "decode: each step is one call of optkit's CPU kernels, in float32"
"""What a session says that decodes so."""


def why_not_family(model_type: object) -> str | None:
    """Return why the step of models of a `model_type` cannot be one call, None if it can."""
    known = ", ".join(FAMILIES)
    return None if model_type in FAMILIES else f"{model_type} is not of the families that it is known for ({known})"
