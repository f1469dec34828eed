"""Open a model directory with plain transformers: its logits for the tokens of a request, and a greedy continuation."""

from typing import Any

PACKAGES = ("transformers", "torch", "compressed-tensors", "gptqmodel", "optimum", "bitsandbytes", "accelerate")


def missing(request: dict[str, Any], versions: dict[str, str]) -> list[str]:
    """Return the distributions that the request needs and that are not installed."""
    return [name for name in ("transformers", *request["helpers"]) if name not in versions]


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Return device, dtype, shape of the logits and generated tokens; the logits go to the file that the request names, as raw float32."""
    import torch
    from transformers import AutoModelForCausalLM

    placed = {"device_map": {"": request["device"]}} if request["quantized"] or request["device"] != "cpu" else {}
    model, report = AutoModelForCausalLM.from_pretrained(
        request["directory"], dtype="auto", trust_remote_code=request["trust_remote_code"], output_loading_info=True, **placed
    )
    for kind in ("missing_keys", "mismatched_keys"):
        if report.get(kind):
            names = sorted(map(str, report[kind]))
            raise ValueError(f"{len(names)} {kind.replace('_', ' ')}: {', '.join(names[:3])}")
    model.eval()
    tokens = torch.tensor([request["tokens"]], device=request["device"])
    with torch.inference_mode():
        logits = model(input_ids=tokens, use_cache=False).logits[0].float().cpu().contiguous()
        logits.numpy().tofile(request["logits"])
        generated = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            num_beams=1,
            min_new_tokens=request["new_tokens"],
            max_new_tokens=request["new_tokens"],
            pad_token_id=request["tokens"][0],
        )[0, tokens.shape[1] :]
    return {
        "device": request["device"],
        "dtype": str(model.dtype).removeprefix("torch."),
        "logits_shape": list(logits.shape),
        "generated": generated.tolist(),
    }
