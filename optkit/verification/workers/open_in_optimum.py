"""Open a directory with the classes of optimum-onnx (ORTModelForCausalLM and its kin).
They give logits or features, and a greedy continuation.
"""

from typing import Any

PACKAGES = ("optimum-onnx", "optimum", "transformers", "onnxruntime", "onnxruntime-gpu", "torch")
KNOWN = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "use_cache_branch")
"""Inputs, besides the KV cache, that it feeds."""
HEADS = {"AutoModel": "FeatureExtraction"}
"""Class of transformers -> how the name of optimum's class ends, if that is not the same."""


def missing(request: dict[str, Any], versions: dict[str, str]) -> list[str]:
    """Return `optimum-onnx` if it is not installed."""
    return [] if "optimum-onnx" in versions else ["optimum-onnx"]


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Return device, dtype, shape of the logits and generated tokens.
    Or return why optimum is not made for such a model.

    The logits go to the file that the request names, as raw float32.
    """
    from optimum import onnxruntime as classes

    loader = request["loader"]
    name = f"ORTModelFor{HEADS.get(loader) or loader.removeprefix('AutoModelFor')}"
    parted, encodes = bool(request.get("target")), "mask" in request
    inputs = {} if parted else inputs_of(request)
    reason = (
        unknown_config(request) or strange_input(inputs) or ("" if hasattr(classes, name) else f"optimum has no {name}")
    )
    if reason:
        return {"not_applicable": reason}
    model = getattr(classes, name).from_pretrained(
        request["directory"],
        provider="CPUExecutionProvider" if request["device"] == "cpu" else "CUDAExecutionProvider",
        local_files_only=True,
        trust_remote_code=request["trust_remote_code"],
        **({} if parted else {"file_name": "model.onnx"}),
        **({} if encodes else {"use_cache": any(map(is_cache, inputs))}),
    )
    if parted:
        return decode(model, request)
    if encodes:
        return encode(model, request)
    reason = other_cache(model, inputs)
    return {"not_applicable": reason} if reason else generate(model, request)


def inputs_of(request: dict[str, Any]) -> dict[str, list[int | str]]:
    """Return the inputs of the graph with their shapes; sizes that vary have names."""
    import onnx

    graph = onnx.load(f"{request['directory']}/model.onnx", load_external_data=False).graph
    return {
        each.name: [axis.dim_value or axis.dim_param for axis in each.type.tensor_type.shape.dim]
        for each in graph.input
    }


def is_cache(name: str) -> bool:
    """Whether optimum takes an input for a part of the KV cache."""
    return ".key" in name or ".value" in name


def strange_input(inputs: dict[str, list[int | str]]) -> str:
    """Return which input optimum has nothing for; empty if it knows all."""
    strange = next((name for name in inputs if name not in KNOWN and not is_cache(name)), "")
    return f"optimum has nothing for the input {strange}" if strange else ""


def unknown_config(request: dict[str, Any]) -> str:
    """Return why the transformers here does not read config.json; empty if it does."""
    import transformers

    try:
        transformers.AutoConfig.from_pretrained(request["directory"], trust_remote_code=request["trust_remote_code"])
    except (KeyError, ValueError) as error:
        said = str(error).splitlines()[0]
        return (
            f"transformers {transformers.__version__} does not know the model, and optimum goes "
            f"with no newer one ({said})"
        )
    return ""


def other_cache(model: Any, inputs: dict[str, list[int | str]]) -> str:
    """Return how the KV cache that optimum starts with differs from the graph's.
    It is empty if it does not.
    """
    made = [getattr(model, name, None) for name in ("num_key_value_heads", "embed_size_per_head")]
    for name, shape in inputs.items():
        if is_cache(name) and None not in made and len(shape) == 4 and shape[1::2] != made:
            return (
                f"ORTModelForCausalLM begins with {made[0]} heads of {made[1]} numbers for a "
                f"{model.config.model_type}; {name} is {shape}"
            )
    return ""


def generate(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return what a decoder answers."""
    import torch

    tokens = torch.tensor([request["tokens"]], device=request["device"])
    mask = torch.ones_like(tokens)
    logits = model(input_ids=tokens, attention_mask=mask).logits[0].float().cpu().contiguous()
    logits.numpy().tofile(request["logits"])
    count = request["new_tokens"]
    plain = {"do_sample": False, "num_beams": 1, "pad_token_id": request["tokens"][0]}
    generated = model.generate(tokens, attention_mask=mask, min_new_tokens=count, max_new_tokens=count, **plain)[
        0, tokens.shape[1] :
    ]
    return {**facts_of(model, request, logits), "generated": generated.tolist()}


def encode(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return what an encoder gives for padded texts.
    The numbers go to the file that the request names.
    """
    import torch

    tokens, mask = (torch.tensor(request[name], device=request["device"]) for name in ("tokens", "mask"))
    found = model(input_ids=tokens, attention_mask=mask)[0].float().cpu().contiguous()
    found.numpy().tofile(request["logits"])
    return {**facts_of(model, request, found), "generated": []}


def decode(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return what an encoder-decoder gives for a target, its second half behind the KV cache of the first.
    The numbers go to the file that the request names.
    """
    import torch

    tokens, target = (torch.tensor(request[name], device=request["device"]) for name in ("tokens", "target"))
    given = {"input_features": tokens} if tokens.is_floating_point() else {"input_ids": tokens}
    given["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
    logits: list[Any] = []
    past: dict[str, Any] = {}
    for half in target.chunk(2, dim=1):
        found = model(**given, decoder_input_ids=half, use_cache=True, **past)
        logits.append(found.logits)
        past = {"past_key_values": found.past_key_values}
    both = torch.cat(logits, dim=1).float().cpu().contiguous()
    both.numpy().tofile(request["logits"])
    return {**facts_of(model, request, both), "generated": []}


def facts_of(model: Any, request: dict[str, Any], logits: Any) -> dict[str, Any]:
    """Return where and in what a model computed, and the shape of what it gave."""
    return {
        "device": request["device"],
        "dtype": str(model.dtype).removeprefix("torch."),
        "logits_shape": list(logits.shape),
    }
