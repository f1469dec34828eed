"""Which models the CUDA-graph step knows: what it reads of their modules gives transformers' logits, on a CPU with
the kernels' references in torch.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from optkit.algorithms.eight_bit import INT8, amax_scales, quantize
from optkit.errors import StageError
from optkit.kernels import float8_linear
from optkit.kernels.cuda import decoding, layer_pass, prompts
from optkit.kernels.cuda.decoding import GraphDecoder
from optkit.kernels.cuda.nvrtc import compile_source
from optkit.kernels.int8_linear import Int8Linear
from optkit.model.experts import Experts, unfuse_experts_
from optkit.session import open_session
from optkit.settings.cuda_graphs import CudaGraphs
from optkit.stage import Context
from optkit.stages.fp8 import Fp8
from tests.support.eager_kernels import run_on_cpu

SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
TURNED = {"rope_type": "default", "rope_theta": 1e4}
KNOWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"layer_types": TYPES, "sliding_window": 8, "use_sliding_window": True},
    "phi3": {"sliding_window": 8, "rope_parameters": {**TURNED, "partial_rotary_factor": 0.5}},
    "gemma2": {"sliding_window": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": TYPES},
    "olmo2": {},
    "olmo3": {"sliding_window": 8},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "arcee": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 8, "layer_types": TYPES},
}
UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({"n_embd": 64, "n_head": 4}, "GPT2LMHeadModel has no `embed_tokens` where Llama has one"),
    "granite": ({"residual_multiplier": 0.3}, "its logits are not the model's own (cosine 0."),
    "starcoder2": ({}, "its logits are not the model's own (cosine "),
    "deepseek_v3": ({}, "DeepseekV3Attention has kv_a_layernorm, kv_a_proj_with_mqa, kv_b_proj, "),
    "nanochat": ({}, "its embeddings are more than multiplied in front of the first layer"),
    "olmo": ({}, "its logits are not the model's own (cosine 0."),
    "apertus": ({}, "ApertusDecoderLayer is not attention and an MLP, with norms before and behind them"),
    "llama": ({"head_dim": 24}, "24 channels a head are no multiple of 16 up to 256"),
    "mistral": (
        {"head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 1},
        "16 queries of 256 channels share a head of keys (at most 16, and 2,048 channels)",
    ),
    "qwen3": (
        {"rope_parameters": {**TURNED, "rope_type": "dynamic", "factor": 2.0}},
        "its rotary embeddings (dynamic) change with the length of the text",
    ),
    "ministral3": (
        {},
        "its rotary embeddings have llama_4_scaling_beta, max_position_embeddings, which its kernels do not know",
    ),
}


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_cpu(monkeypatch)


def random_model(kind: str, changed: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **changed})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).eval()
    for parameter in model.parameters():
        scale = 0.15 if parameter.ndim > 1 else 0.3
        parameter.data += torch.randn_like(parameter) * scale
    return model


@torch.no_grad()
def logits_of_both(model: Any, batch: int = 3, prompt: int = 20, steps: int = 15) -> tuple[Tensor, Tensor]:
    """The graph's logits of the last of several steps, and the model's of the same tokens."""
    decoder = GraphDecoder(model)
    tokens = torch.randint(0, 97, (batch, prompt))
    with decoder.steps(batch, prompt + steps) as lent:
        lent.prompt(tokens)
        for _ in range(steps - 1):
            lent.next()
        written = torch.cat([tokens, lent.tokens[prompt : prompt + steps - 1].T], 1)  # type: ignore[union-attr]
        ours = lent.logits.clone()  # type: ignore[union-attr]
    logits = model(written).logits[:, -1]
    cap = getattr(model.config, "final_logit_softcapping", None)
    return (cap * torch.tanh(ours / cap) if cap else ours), logits


FAST = {
    "llama",
    "phi3",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "qwen3_moe",
    "gpt_oss",
    "gpt2",
    "granite",
    "mistral",
    "qwen3",
}


def some(kinds: Iterable[str]) -> list[Any]:
    """Importing the code of a model takes longer than trying it."""
    return [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


@pytest.mark.parametrize("kind", some(KNOWN))
def test_a_layer_is_what_the_modules_say(kind: str) -> None:
    ours, reference = logits_of_both(random_model(kind, KNOWN[kind]))
    assert float((ours - reference).norm() / reference.norm()) < 1e-4
    assert ours.argmax(-1).equal(reference.argmax(-1))


@torch.no_grad()
@pytest.mark.parametrize(("kind", "short", "long"), [("gemma3_text", "", "windows"), ("gpt_oss", "sinks", "sinks")])
def test_prompts_that_the_model_reads_itself_are_noted(
    kind: str, short: str, long: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "TRIED", 5)
    decoder = GraphDecoder(random_model(kind, KNOWN[kind]))
    for length, expected in ((8, short), (9, long)):
        with decoder.steps(1, 12) as steps:
            steps.prompt(torch.arange(length)[None])
        why = f"cuda_graphs: prompts are read by the model itself, whose attention has {expected}"
        assert decoder.notes == ((why,) if expected else ())


@pytest.mark.parametrize("kind", some(UNKNOWN))
def test_what_is_not_known_says_why(kind: str) -> None:
    changed, reason = UNKNOWN[kind]
    with pytest.raises(StageError) as error:
        GraphDecoder(random_model(kind, changed))
    assert reason in str(error.value)
    assert "Take cuda_graphs out of the recipe, or use compile" in str(error.value)


def test_other_layers_and_dtypes_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama", {}, torch.float16)
    with pytest.raises(StageError, match="its kernels compute in bfloat16 and float16, not float16"):
        GraphDecoder(model)  # the references know float32 and bfloat16
    model = random_model("llama", {})
    model.model.layers[0].self_attn.kv_a_proj = torch.nn.Linear(1, 1)
    with pytest.raises(StageError, match="LlamaAttention has kv_a_proj, which its kernels do not know"):
        GraphDecoder(model)
    model = random_model("llama", {})
    model.model.layers[0].more = torch.nn.Linear(1, 1)
    with pytest.raises(StageError, match="LlamaDecoderLayer is not attention and an MLP, with norms before and"):
        GraphDecoder(model)
    model = random_model("llama", {})
    model.model.layers[1].self_attn.k_proj = torch.nn.Bilinear(1, 1, 1)
    with pytest.raises(StageError, match="a projection of its attention has weights in a form that"):
        GraphDecoder(model)
    model = random_model("qwen3_moe", KNOWN["qwen3_moe"])
    unfuse_experts_(model)
    model.model.layers[1].mlp.experts[3].up_proj = torch.nn.Linear(64, 32)  # with a bias
    with pytest.raises(StageError, match="the experts of a block are quantized differently"):
        GraphDecoder(model)
    model.model.layers[1].mlp.inner = torch.nn.Sequential(Experts())
    with pytest.raises(StageError, match="the packed experts of Qwen3MoeSparseMoeBlock lie deeper in it"):
        GraphDecoder(model)
    model = random_model("qwen3_moe", {**KNOWN["qwen3_moe"], "hidden_act": "relu"})
    unfuse_experts_(model)
    with pytest.raises(StageError, match="its experts have no gate of SiLU or GELU"):
        GraphDecoder(model)
    model = random_model("llama", {"layer_types": ["full_attention", "linear_attention", "full_attention"]})
    with pytest.raises(StageError, match="its layers are of linear_attention"):
        GraphDecoder(model)


def test_any_error_of_a_model_is_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama", {})
    monkeypatch.setattr(decoding, "read_layers", lambda model: {}["an odd config"])
    with pytest.raises(StageError, match=r"cannot be one graph\. KeyError: 'an odd config'\."):
        GraphDecoder(model)
    monkeypatch.undo()
    monkeypatch.setattr(decoding, "compiled", lambda source, *_: compile_source("no C++", {}, "sm_90", source))
    with pytest.raises(StageError, match="cannot be one graph"):
        GraphDecoder(model)


@torch.no_grad()
def test_other_kernels_are_tried_when_a_batch_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(matrix: Any, x: Tensor, y: Tensor, **given: Any) -> None:
        step_product(matrix, x, y, **given)
        if len(y) < 100:
            y[32:] = 1

    decoder = GraphDecoder(random_model("llama", {}))
    step_product = layer_pass.step_product
    monkeypatch.setattr(layer_pass, "step_product", broken)
    kinds = {}
    for batch in (1, 20, 40, 24, 48):
        with decoder.steps(batch, 40) as steps:
            kinds[batch] = type(steps).__name__
    assert kinds == {1: "Steps", 20: "Steps", 40: "ModelSteps", 24: "Steps", 48: "ModelSteps"}
    (note,) = decoder.notes
    assert note.startswith(
        "cuda_graphs: off for batches of 40, 48, which the model decodes by its own step: its logits"
    )


def test_layers_of_8_bits_are_stacked_and_round_their_inputs() -> None:
    model = random_model("qwen2", {})
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, layer in [*part.named_children()]:
                if isinstance(layer, torch.nn.Linear):
                    weight, tile = layer.weight.data, (1, layer.in_features)
                    scales = amax_scales(weight, tile, INT8, torch.float32)
                    codes, bias = quantize(weight, scales, tile, INT8), layer.bias
                    packed = Int8Linear(codes, scales, None, None if bias is None else bias.data, torch.float32)
                    setattr(part, name, packed)
    ours, reference = logits_of_both(model)
    assert float((ours - reference).norm() / reference.norm()) < 2e-2  # a code rounds the other way now and then
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.codes.untyped_storage().data_ptr() == attention.v_proj.codes.untyped_storage().data_ptr()


@pytest.mark.parametrize("packed", [False, True])
def test_a_session_decodes_by_the_graph(
    packed: bool, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaGraphs, "applies", lambda self, device: True)
    monkeypatch.setattr(float8_linear, "_why_unavailable", lambda device: None)
    directory = tiny_model("llama")
    if packed:
        Fp8().run(directory, tmp_path, Context())
        directory = tmp_path
    tokens, sessions = torch.randint(5, 90, (3, 12)), [open_session(directory, each) for each in ([], [CudaGraphs()])]
    plain, graph = (session.generate(tokens, 8) for session in sessions)  # type: ignore[union-attr]
    assert sessions[1].decodes_itself  # type: ignore[union-attr]
    assert graph.equal(plain)


class OneRank:
    """Stands in for an exchange; there is nobody to exchange with."""

    def __init__(self, most: int) -> None:
        self.most, self.scaled = most, set[bool]()

    def has_kernel_for(self, rows: int) -> bool:
        return rows <= self.most

    def sum_into_(self, y: Tensor, x: Tensor, of_outputs: Any, of_rows: Any, *, add: bool) -> None:
        self.scaled.add(of_rows is not None)
        total = x if of_rows is None else (x.float() * of_outputs * of_rows[:, None]).to(x.dtype)
        y.copy_(y + total if add else total)

    def first(self, reason: str | None) -> str | None:
        return reason

    def agree_(self, best: Tensor, share: int) -> None: ...

    def gathered(self, shares: Tensor) -> Tensor:
        return shares


def test_an_exchange_scales_what_its_kernel_adds_up(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaGraphs, "applies", lambda self, device: True)
    monkeypatch.setattr(float8_linear, "_why_unavailable", lambda device: None)
    monkeypatch.setattr(layer_pass, "leaves_scales", lambda matrix, rows: matrix.form.bits == 8)  # in float32, too
    Fp8().run(tiny_model("llama"), tmp_path, Context())
    written = []
    for exchange in (None, OneRank(64), OneRank(0)):
        session: Any = open_session(tmp_path, [CudaGraphs()])
        session._decoder.exchange = exchange
        written.append(session.generate(torch.arange(5, 41).view(3, 12), 8))
        assert exchange is None or exchange.scaled == {exchange.most > 0}
    assert written[1].equal(written[2])
    assert written[0].equal(written[1])


def test_long_prompts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optkit.kernels.cuda.prompts.MOST_ROWS", 40)
    monkeypatch.setattr("optkit.kernels.cuda.prompts.MOST_CAPTURED", 0)
    ours, reference = logits_of_both(random_model("llama", {}), batch=5)
    assert float((ours - reference).norm() / reference.norm()) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_prompt_of_about_the_same_length_is_a_graph_from_the_second_on(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = []

    def captured(launch: Callable[[], object], beside: Any) -> Any:
        assert beside is steps.graph  # its memory is theirs, too: they take turns
        launches.append(launch)
        return SimpleNamespace(replay=launch)

    monkeypatch.setattr(prompts, "captured", captured)
    monkeypatch.setattr(prompts, "MOST_GRAPHS", 1)
    model = random_model(kind, KNOWN[kind])
    unfuse_experts_(model)
    with GraphDecoder(model).steps(2, 128) as steps:
        for length, graphs in ((20, 0), (17, 1), (5, 1), (32, 1), (33, 1), (50, 2), (20, 2), (20, 3)):
            tokens = torch.randint(0, 97, (2, length))
            written = [steps.prompt(tokens)]
            assert int(steps.position) == length  # the step behind it has not begun, so that a prompt is timed alone
            written += [steps.next() for _ in range(3)]
            expected = tokens
            for each in written:
                assert each.equal(model(expected).logits[:, -1].argmax(-1))
                expected = torch.cat([expected, each[:, None]], 1)
            assert len(launches) == graphs


@torch.no_grad()
def test_many_short_prompts_are_a_graph_too(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[Tensor] = []
    through = prompts.through
    monkeypatch.setattr(
        prompts, "through", lambda steps, tokens, *rest: (captured.append(tokens), through(steps, tokens, *rest))[1]
    )
    monkeypatch.setattr(prompts, "MOST_CAPTURED", 160)
    with GraphDecoder(random_model("llama", {})).steps(20, 16) as steps:
        steps.prompt(torch.randint(0, 97, (20, 5)))
    assert captured[-1].shape == (20, 8)
