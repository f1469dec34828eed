"""Finding, recording and running the blocks of models that are not built as expected."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from optkit.errors import SourceError
from optkit.model import blocks
from tests.support.live_memory import LiveBytes
from tests.support.skeletons import some_tokens


def test_no_list_of_blocks() -> None:
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=64)
    )
    model.config.n_layer = 5
    message = (
        r"gpt2: unsupported architecture GPT2LMHeadModel: no list of 5 decoder blocks\. .*num_hidden_layers "
        r"= 5.* transformer\.h with 2"
    )
    with pytest.raises(SourceError, match=message):
        blocks.find_blocks(model)


class TupleBlock(nn.Linear):
    form: type = tuple

    def forward(self, hidden_states: Tensor) -> object:  # type: ignore[override]
        return self.form((super().forward(hidden_states), None))


class Custom(nn.Module):
    """A base model of the kind that custom code has: tuples between the blocks, hidden states by
    keyword.
    """

    config = AutoConfig.for_model("llama")

    def __init__(self, between: float) -> None:
        super().__init__()
        self.embed, self.layers, self.between = (
            nn.Embedding(512, 8),
            nn.ModuleList(TupleBlock(8, 8) for _ in range(3)),
            between,
        )

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = (
                layer(hidden_states=hidden)[0] * self.between if self.between != 1 else layer(hidden_states=hidden)[0]
            )
        return hidden


def blocks_of(model: Custom) -> tuple[blocks.Block, ...]:
    return tuple(blocks.Block(f"layers.{index}", layer) for index, layer in enumerate(model.layers))


def custom(between: float) -> tuple[Custom, tuple[blocks.Block, ...]]:
    model = Custom(between)
    return model, blocks_of(model)


@pytest.mark.parametrize("form", [tuple, list])
def test_blocks_that_return_tuples_and_take_keywords(form: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TupleBlock, "form", form)
    (model, parts), tokens = custom(between=1), some_tokens(2)
    hidden, calls = blocks.record_calls(model, parts, {"input_ids": tokens})
    assert torch.equal(hidden, model.embed(tokens))
    for block, call in zip(parts, calls, strict=True):
        hidden = call.run(block.module, hidden)
    assert torch.equal(hidden, model(tokens, use_cache=False))


def test_recording_holds_no_more_for_many_blocks_than_for_few() -> None:
    peaks = []
    for count in (3, 12):
        model = Custom(between=1)
        model.layers.extend(TupleBlock(8, 8) for _ in range(count - 3))
        with LiveBytes() as live:
            assert len(blocks.record_calls(model, blocks_of(model), {"input_ids": some_tokens(2)})[1]) == count
        peaks.append(live.peak)
    assert peaks[0] == peaks[1] > 0


def test_hidden_states_that_change_between_blocks_are_refused() -> None:
    model, parts = custom(between=0.5)
    with pytest.raises(SourceError, match=r"unsupported architecture Custom: its blocks cannot be run one by one\. "):
        blocks.record_calls(model, parts, {"input_ids": some_tokens(2)})


class Adding(Custom):
    """It adds something between its blocks, to a copy of the hidden states or in their place."""

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        hidden = self.embed(input_ids)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden_states=hidden)[0]
            if index == 0:
                hidden = hidden + self.embed(input_ids + 1)
            elif self.between == 1:
                hidden[:, 3:5] += 1
        return hidden


@pytest.mark.parametrize("between", [0, 1])
def test_what_a_model_adds_between_blocks_belongs_to_the_call(between: float) -> None:
    model, tokens = Adding(between), some_tokens(2)
    hidden, calls = blocks.record_calls(model, blocks_of(model), {"input_ids": tokens})
    assert [call.added is None for call in calls] == [True, False, between == 0]
    for block, call in zip(blocks_of(model), calls, strict=True):
        hidden = call.run(block.module, hidden)
    if between:  # what it adds behind the last block is the head's
        hidden[:, 3:5] += 1
    assert torch.equal(hidden, model(tokens, use_cache=False))


def test_hidden_states_of_another_form_are_refused() -> None:
    model, parts = custom(between=1)
    model.embed.register_forward_hook(lambda module, inputs, output: output[None])
    with pytest.raises(SourceError, match=r"the hidden states are \[1, 2, 24, 8\] for tokens \[2, 24\]"):
        blocks.record_calls(model, parts, {"input_ids": some_tokens(2)})


def test_blocks_that_are_not_called_are_refused() -> None:
    model, parts = custom(between=1)
    with pytest.raises(SourceError, match="only 3 of 4 blocks were called"):
        blocks.record_calls(model, (*parts, blocks.Block("layers.3", TupleBlock(8, 8))), {"input_ids": some_tokens(2)})
