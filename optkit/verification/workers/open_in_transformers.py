"""Open a model directory with plain transformers.
It gives logits for the tokens of a request, and a greedy continuation.
"""

import gc
from typing import Any

PACKAGES = ("transformers", "torch", "compressed-tensors", "gptqmodel", "optimum", "bitsandbytes", "accelerate", "peft")


def missing(request: dict[str, Any], versions: dict[str, str]) -> list[str]:
    """Return the distributions that the request needs and that are not installed."""
    return [name for name in ("transformers", *request["helpers"]) if name not in versions]


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Return device, dtype, shape of the logits and generated tokens.
    The logits go to the file that the request names, as raw float32.
    """
    gc.disable()  # what is imported stays
    import torch
    import transformers

    loader = getattr(transformers, request["loader"])
    gc.freeze()
    gc.enable()
    placed: dict[str, Any] = (
        {"device_map": {"": request["device"]}} if request["quantized"] or request["device"] != "cpu" else {}
    )
    placed |= request.get("options", {})
    if request.get("dequantize"):  # peft finds no weight in a packed layer of compressed-tensors
        placed["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    model, report = loader.from_pretrained(
        request["directory"],
        dtype="auto",
        trust_remote_code=request["trust_remote_code"],
        output_loading_info=True,
        **placed,
    )
    unused = "pooler." if request["loader"] == "AutoModel" else "nothing"
    for kind in ("missing_keys", "mismatched_keys"):
        if names := sorted(name for name in map(str, report.get(kind) or ()) if not name.startswith(unused)):
            raise ValueError(f"{len(names)} {kind.replace('_', ' ')}: {', '.join(names[:3])}")
    if request.get("adapter"):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, request["adapter"])
    model.eval()
    if "mask" in request:
        return encode(model, request)
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
        stepped = step(model, tokens, request["prompt"])
        stepped.numpy().tofile(request["stepped_logits"])
        blocks = {"blocks": differing_blocks(model, tokens, request)} if "states" in request else {}
    return {
        "device": request["device"],
        "dtype": str(model.dtype).removeprefix("torch."),
        "logits_shape": list(logits.shape),
        "stepped_shape": list(stepped.shape),
        "generated": generated.tolist(),
        **blocks,
    }


def differing_blocks(model: Any, tokens: Any, request: dict[str, Any]) -> list[float]:
    """Return how far what each block adds to the hidden states of the request is from what was added
    there, as a share of that: the mean over tokens. Nothing if no list of the decoder has as many modules.
    """
    import torch

    count, length, width = request["states_shape"]
    states = torch.from_file(request["states"], size=count * length * width, dtype=torch.float32)
    states = states.view(count, 1, length, width).to(tokens.device)
    lists = (module for module in model.get_decoder().modules() if isinstance(module, torch.nn.ModuleList))
    blocks = next((each for each in lists if len(each) == count - 1), ())
    found = []

    def enter(index: int) -> Any:
        given = states[index].to(model.dtype)

        def hook(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if arguments:
                return (given, *arguments[1:]), keywords
            return arguments, {**keywords, "hidden_states": given}

        return hook

    def leave(index: int) -> Any:
        def hook(_module: Any, _arguments: Any, output: Any) -> None:
            left = output[0] if isinstance(output, tuple) else output
            off, added = left.float() - states[index + 1], states[index + 1] - states[index]
            found.append(float((off.norm(dim=-1) / added.norm(dim=-1).clamp(min=1e-30)).mean()))

        return hook

    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(enter(index), with_kwargs=True)
        block.register_forward_hook(leave(index))
    model(input_ids=tokens, use_cache=False)
    return found


def step(model: Any, tokens: Any, prompt: int) -> Any:
    """Return the logits, float32 [tokens - prompt, vocabulary], after each token behind a prompt.
    `generate` is made to choose these tokens.
    """
    import torch

    given = [*tokens[0].tolist(), tokens[0, 0].item()]
    found = model.generate(
        tokens[:, :prompt],
        attention_mask=torch.ones_like(tokens[:, :prompt]),
        do_sample=False,
        num_beams=1,
        max_new_tokens=len(given) - prompt,
        eos_token_id=-1,
        pad_token_id=given[0],
        prefix_allowed_tokens_fn=lambda _, known: [given[len(known)]],
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat(found.logits[1:]).float().cpu().contiguous()


def encode(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return device, dtype and shape of what an encoder gives for padded texts, or an encoder-decoder
    for a target.
    The numbers go to the file that the request names.
    """
    import torch

    tokens, mask = (torch.tensor(request[name], device=request["device"]) for name in ("tokens", "mask"))
    given = {"input_ids": tokens, "attention_mask": mask}
    if request.get("target"):
        target = torch.tensor(request["target"], device=request["device"])
        hears = tokens.is_floating_point()
        source = {"input_features": tokens.to(model.dtype)} if hears else {"input_ids": tokens}
        given = {**source, "decoder_input_ids": target}
    with torch.inference_mode():
        found = model(**given)[0].float().cpu().contiguous()
    found.numpy().tofile(request["logits"])
    dtype = str(model.dtype).removeprefix("torch.")
    return {"device": request["device"], "dtype": dtype, "logits_shape": list(found.shape), "generated": []}
