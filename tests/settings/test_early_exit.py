"""The model's own first layers as its draft; the reference is transformers' hidden states, and
plain greedy decoding.
"""

from pathlib import Path

import pytest
import torch
from optkit_evals.throughput import Throughput
from torch import Tensor
from transformers import AutoModelForCausalLM

from optkit.errors import StageError
from optkit.measure import EvalContext
from optkit.session import open_session
from optkit.session.torch_session import TorchSession
from optkit.settings.kv_cache import KvCache
from optkit.settings.speculative import Speculative
from tests.conftest import TinyModel
from tests.support.planning import plan_of

PROMPTS = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7], [1, 2, 3, 1, 2, 3, 1, 2]])
NORMS = {"gpt2": "transformer.ln_f", "opt": "model.decoder.final_layer_norm", "gptj": "transformer.ln_f"}


def exiting(directory: Path, layers: int = 1, *others: object, tokens: int = 3) -> TorchSession:
    session = open_session(directory, [*others, Speculative(early_exit=layers, tokens=tokens)])  # type: ignore[list-item]
    assert isinstance(session, TorchSession)
    return session


def choices_of_first_layers(directory: Path, kind: str, tokens: Tensor, layers: int, count: int) -> Tensor:
    """What norm and head choose behind the first layers, of the whole text anew for each token."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    norm = model.get_submodule(NORMS.get(kind, "model.norm"))
    for _ in range(count):
        hidden: list[Tensor] = []
        blocks = norm_input_blocks(model)
        hook = blocks[layers - 1].register_forward_hook(
            lambda *call, found=hidden: found.append(call[2][0] if isinstance(call[2], tuple) else call[2])
        )
        with torch.no_grad():
            model(tokens)
            logits = model.get_output_embeddings()(norm(hidden[0]))
        hook.remove()
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens[:, -count:]


def norm_input_blocks(model: torch.nn.Module) -> torch.nn.ModuleList:
    return max((module for module in model.modules() if isinstance(module, torch.nn.ModuleList)), key=len)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "gpt2", "gptj", "opt", "mixtral"])
def test_the_first_layers_propose_and_the_output_stays_the_models_own(tiny_model: TinyModel, kind: str) -> None:
    plain = open_session(tiny_model(kind)).generate(PROMPTS, 21)
    session = exiting(tiny_model(kind))
    assert session.generate(PROMPTS, 21).equal(plain)
    assert session.generate(PROMPTS[1:], 21).equal(plain[1:])
    assert session.speculation.proposed > 0
    proposer, _ = session._proposer
    state = session.new_state()
    session.step(PROMPTS, state)
    before = [layer.keys.clone() for layer in state.layers]
    known = plain[:, : PROMPTS.shape[1] + 1]
    proposer.start(state)
    assert proposer.propose(known, 3).equal(choices_of_first_layers(tiny_model(kind), kind, known, 1, 3))
    assert all(layer.keys.equal(keys) for layer, keys in zip(state.layers, before, strict=True))


def test_layers_that_change_nothing_are_no_loss(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.2" in name and name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    model.save_pretrained(tmp_path)
    session = exiting(tmp_path, 2, tokens=4)
    session.generate(PROMPTS, 21)
    assert session.speculation.accepted == session.speculation.proposed == 16


def test_with_a_cache_of_codes(tiny_model: TinyModel) -> None:
    plain = open_session(tiny_model("llama"), [KvCache(dtype="int8")]).generate(PROMPTS, 30)
    assert exiting(tiny_model("llama"), 2, KvCache(dtype="int8")).generate(PROMPTS, 30).equal(plain)


def test_bytes_are_those_of_all_forwards(tiny_model: TinyModel) -> None:
    session = exiting(tiny_model("llama"), 1)
    step = session.decode_bytes(1, 16)
    assert session.token_bytes(1, 16) == step
    proposing = session._proposer[0].read_bytes(1, 16)
    blocks, head = 3, session.model.get_input_embeddings().weight
    outside = (
        head.numel() * 4
        + session.model.model.norm.weight.numel() * 4
        + session.model.model.rotary_emb.inv_freq.numel() * 4
    )
    assert proposing - outside == pytest.approx((step - outside) / blocks, abs=300)
    session.generate(PROMPTS[:1], 21)
    counts = session.speculation
    assert session.token_bytes(1, 16) == round((counts.forwards * step + counts.proposed * proposing) / 20)
    with session.token_by_token():
        assert session.token_bytes(1, 16) == step


def test_more_layers_than_there_are(tiny_model: TinyModel, tmp_path: Path) -> None:
    message = (
        r"^speculative: early_exit: 3 leaves nothing out: the model has 3 layers\. The first.*Set "
        r"early_exit to at most 2\.$"
    )
    with pytest.raises(StageError, match=message):
        plan_of({"model": str(tiny_model("llama")), "stages": [{"speculative": {"early_exit": 3}}]}, tmp_path)
    with pytest.raises(StageError, match=message):
        exiting(tiny_model("llama"), 3)
    plan_of({"model": str(tiny_model("llama")), "stages": [{"speculative": {"early_exit": 2}}]}, tmp_path)


def test_an_architecture_whose_layers_need_each_other(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaModel

    forward = LlamaModel.forward

    def needs_all(self: LlamaModel, *arguments: object, **keywords: object) -> object:
        assert self.layers[2] is not None
        return forward(self, *arguments, **keywords)

    monkeypatch.setattr(LlamaModel, "forward", needs_all)
    with pytest.raises(
        StageError,
        match=r"the first 1 layers of LlamaForCausalLM cannot be run alone\. Without the others: IndexError: .*draft",
    ):
        exiting(tiny_model("llama"))

    def runs_all(self: LlamaModel, *arguments: object, **keywords: object) -> object:
        self.layers = everything
        return forward(self, *arguments, **keywords)

    session = open_session(tiny_model("llama"))
    everything = session.model.model.layers
    monkeypatch.setattr(LlamaModel, "forward", runs_all)
    with pytest.raises(StageError, match=r"Its cache then holds keys and values of 3 layers"):
        from optkit.session.early_exit import EarlyExit

        EarlyExit(session.model, 1, session.step, session.new_state())
    assert session.model.model.layers is everything


def test_its_line() -> None:
    assert (
        Speculative(early_exit=4, tokens=6).describe("cpu") == "speculative: up to 6 tokens "
        "at once by the first 4 layers"
    )


def test_throughput_counts_the_bytes_of_the_draft_too(tiny_model: TinyModel) -> None:
    session = exiting(tiny_model("llama"), 2)
    eval = Throughput(prompts=(8,), new_tokens=16, repeats=2, warmup=1, interval=0.9)
    session.generate(PROMPTS, 5)
    found = {metric.name: metric for metric in eval.run(session, EvalContext())}
    forwards, tokens = session.speculation.forwards, session.speculation.tokens
    # A repeat that the machine disturbed is no sample, and was generated all the same.
    assert tokens % 15 == 0
    assert tokens >= 15 * len(found["decode_bytes_per_s"].samples)
    rate = found["decode_bytes_per_s"].samples[0] / found["decode_tokens_per_s"].samples[0]
    assert rate == pytest.approx(session.token_bytes(1, 16))
    assert rate > session.decode_bytes(1, 16) * forwards / tokens
