from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from optkit_evals.speculation import Speculation
from optkit_evals.timing import device_text

from optkit.errors import EvalError
from optkit.measure import EvalContext, Metric, Turn
from optkit.session import open_session
from optkit.settings.speculative import Speculative
from tests.support.bigram_session import Said

TEXT = {"dataset": "python-reference", "split": "test"}


def measured(session: object, **fields: object) -> dict[str, Metric]:
    eval = Speculation.model_validate(TEXT | {"window": 16, "windows": 4, "new_tokens": 9} | fields)
    return {metric.name: metric for metric in eval.run(session, EvalContext())}


def test_a_model_that_decodes_token_by_token(tiny_model: Callable[[str], Path]) -> None:
    found = measured(open_session(tiny_model("llama")))
    assert set(found) == {"text_decode_tokens_per_s", "tokens_per_forward"}
    assert found["tokens_per_forward"].samples == (1.0,) * 4
    assert found["text_decode_tokens_per_s"].value > 0


def test_a_draft_that_is_always_right(tiny_model: Callable[[str], Path]) -> None:
    session = open_session(
        tiny_model("llama"), [Speculative.model_validate({"draft": str(tiny_model("llama")), "tokens": 3})]
    )
    found = measured(session)
    assert set(found) == set(Speculation.metrics)
    assert found["acceptance_rate"].value == found["greedy_agreement"].value == 1.0
    assert found["tokens_per_forward"].value == 4.0
    assert found["tokens_per_forward"].protocol == found["acceptance_rate"].protocol
    assert "each window a prompt; 9 greedy tokens after each" in found["tokens_per_forward"].protocol
    assert found["tokens_per_forward"].protocol.endswith(f"; {device_text('cpu')}")
    assert " threads, torch " in device_text("cpu")


def test_turns_share_the_prompts(tiny_model: Callable[[str], Path]) -> None:
    eval = Speculation.model_validate(TEXT | {"window": 8, "windows": 5, "new_tokens": 4})
    session = open_session(tiny_model("llama"), [Speculative(prompt_lookup=2)])
    turns = [eval.run(session, EvalContext(turn=Turn(index, 2))) for index in range(2)]
    assert [len(turn[0].samples) for turn in turns] == [3, 2]
    pooled = {metric.name: metric for metric in eval.pool(turns, EvalContext())}
    assert len(pooled["acceptance_rate"].samples) == 5
    assert len(pooled["text_decode_tokens_per_s"].samples) == 2
    assert (eval.turns(), Speculation.model_validate(TEXT | {"windows": 2}).turns()) == (4, 2)


def test_a_few_prompts_that_agree_do_not_make_the_agreement_certain(tiny_model: Callable[[str], Path]) -> None:
    eval = Speculation.model_validate(TEXT | {"window": 8, "windows": 5, "new_tokens": 4})
    session = open_session(tiny_model("llama"), [Speculative(prompt_lookup=2)])
    pooled = eval.pool([eval.run(session, EvalContext(turn=Turn(index, 2))) for index in range(2)], EvalContext())
    agreement = next(metric for metric in pooled if metric.name == "greedy_agreement")
    assert (agreement.value, agreement.trials) == (1.0, (1,) * 5)
    assert agreement.interval == pytest.approx((0.025 ** (1 / 5), 1.0))


def test_output_that_is_not_the_models_own_is_told(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(tiny_model("llama"), [Speculative(prompt_lookup=2)])
    generate = session.generate

    def wrong(tokens: torch.Tensor, new_tokens: int) -> torch.Tensor:
        found = generate(tokens, new_tokens).clone()
        found[:, -2:] += session._proposer is not None
        return found

    monkeypatch.setattr(session, "generate", wrong)
    context = EvalContext(progress=Said())
    eval = Speculation.model_validate(TEXT | {"window": 16, "windows": 2, "new_tokens": 9})
    found = {metric.name: metric.value for metric in eval.run(session, context)}
    assert found["greedy_agreement"] == 0.0
    assert context.notes[0].startswith(
        "speculation, prompt 1: differs from token 8 on, where the model's two best logits are "
    )


def test_more_tokens_than_positions(tiny_model: Callable[[str], Path]) -> None:
    eval = Speculation.model_validate(TEXT | {"window": 508, "new_tokens": 5})
    assert eval.longest_sequence() == 513
    with pytest.raises(EvalError, match="a prompt of 508 and 5 new tokens are more than the model's 512 positions"):
        eval.run(open_session(tiny_model("llama")), EvalContext())
