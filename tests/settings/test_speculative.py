"""Proposals and what is kept of them; the reference is plain greedy decoding of the same session."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.session import open_session
from optkit.session.speculation import PromptLookup
from optkit.session.torch_session import TorchSession
from optkit.settings.compile import Compile
from optkit.settings.kv_cache import KvCache
from optkit.settings.speculative import Speculative
from optkit.source.tokenizer import refuse_other_tokens
from tests.conftest import TinyModel
from tests.support.planning import plan_of

PROMPTS = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7], [1, 2, 3, 1, 2, 3, 1, 2]])


class Oracle:
    """Proposes what plain decoding gave, with a mistake at every `wrong`th place."""

    def __init__(self, whole: Tensor, wrong: int) -> None:
        self.whole = whole.clone()
        self.whole[:, PROMPTS.shape[1] + wrong :: wrong + 1] += 1
        self.asked: list[int] = []

    def start(self, cache: object) -> None:
        self.asked.clear()

    def read_bytes(self, batch: int, context: int) -> int:
        return 0

    def propose(self, known: Tensor, count: int) -> Tensor:
        self.asked.append(count)
        return self.whole[:, known.shape[1] : known.shape[1] + count] % 512


@pytest.fixture
def pruned(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """The tiny Llama without its last block: another model with the same vocabulary."""
    target = Path(shutil.copytree(tiny_model("llama"), tmp_path / "draft"))
    model = AutoModelForCausalLM.from_pretrained(target, num_hidden_layers=2)
    model.save_pretrained(target)
    return target


def speculating(directory: Path, **fields: object) -> TorchSession:
    session = open_session(directory, [Speculative.model_validate(fields)])
    assert isinstance(session, TorchSession)
    return session


@pytest.mark.parametrize("wrong", [1, 2, 3, 50])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_output_is_the_models_own_whatever_is_proposed(tiny_model: TinyModel, wrong: int, rows: int) -> None:
    session = open_session(tiny_model("llama"))
    prompts = PROMPTS[:rows]
    plain = session.generate(prompts, 21)
    session.speculate_with(Oracle(plain, wrong), 4)
    assert session.generate(prompts, 21).equal(plain)
    counts = session.speculation
    assert counts.tokens == 20
    assert counts.accepted == 20 - counts.forwards
    if wrong == 50:
        assert counts.forwards == 4
        assert counts.accepted == counts.proposed == 16


def test_no_more_is_proposed_than_can_be_kept(tiny_model: TinyModel) -> None:
    session = open_session(tiny_model("llama"))
    oracle = Oracle(session.generate(PROMPTS, 8), 50)
    session.speculate_with(oracle, 4)
    assert [len(list(session.stream(PROMPTS, count))) for count in (0, 1, 2, 8)] == [0, 1, 2, 8]
    assert oracle.asked == [4, 1]


@pytest.mark.parametrize("fields", [{"prompt_lookup": 3}, {"prompt_lookup": 1, "tokens": 9}])
def test_prompt_lookup(tiny_model: TinyModel, fields: dict[str, int]) -> None:
    session = speculating(tiny_model("llama"), **fields)
    found = session.generate(PROMPTS, 40)
    with session.token_by_token():
        assert session.generate(PROMPTS, 40).equal(found)
    assert found.equal(open_session(tiny_model("llama")).generate(PROMPTS, 40))


def test_a_draft_model(tiny_model: TinyModel, pruned: Path) -> None:
    session = speculating(tiny_model("llama"), draft=str(pruned), tokens=3)
    plain = open_session(tiny_model("llama")).generate(PROMPTS, 30)
    assert session.generate(PROMPTS, 30).equal(plain)
    assert 0 < session.speculation.accepted < session.speculation.proposed
    session.speculation.reset()
    assert session.generate(PROMPTS[:1], 30).equal(plain[:1])


def test_the_model_as_its_own_draft_agrees_with_itself(tiny_model: TinyModel) -> None:
    session = speculating(tiny_model("llama"), draft=str(tiny_model("llama")), tokens=4)
    session.generate(PROMPTS, 21)
    assert session.speculation.accepted == session.speculation.proposed == 16
    assert session.speculation.tokens / session.speculation.forwards == 5
    session.close()


def test_with_a_cache_of_codes(tiny_model: TinyModel) -> None:
    plain = open_session(tiny_model("llama"), [KvCache(dtype="int8")])
    session = open_session(tiny_model("llama"), [KvCache(dtype="int8"), Speculative(prompt_lookup=2)])
    assert session.generate(PROMPTS, 30).equal(plain.generate(PROMPTS, 30))


@pytest.mark.parametrize(
    ("known", "longest", "count", "proposed"),
    [
        ([[1, 2, 3, 9, 1, 2, 3]], 3, 2, [[9, 1]]),
        ([[1, 2, 3, 9, 4, 2, 3, 8, 2, 3]], 3, 2, [[8, 2]]),
        ([[7, 5, 3, 5]], 3, 4, [[3, 5]]),
        ([[1, 2, 3]], 3, 4, [[]]),
        ([[1, 2, 3], [4, 4, 4]], 2, 4, [[0], [4]]),
        ([[1]], 3, 4, [[]]),
    ],
)
def test_what_a_prompt_proposes(known: list[list[int]], longest: int, count: int, proposed: list[list[int]]) -> None:
    found = PromptLookup(longest).propose(torch.tensor(known), count)
    assert found.tolist() == proposed
    assert found.dtype == torch.int64


def test_windows_and_linear_attention_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    message = (
        r"^speculative: the model.s layers have windows of their own\. .*taken out of the KV cache "
        r"again.*Take it out for this"
    )
    with pytest.raises(StageError, match=message):
        plan_of({"model": str(tiny_model("gemma3")), "stages": [{"speculative": {"prompt_lookup": 3}}]}, tmp_path)
    with pytest.raises(StageError, match=r"the KV cache has layers of another kind: DynamicSlidingWindowLayer"):
        speculating(tiny_model("gemma3"), prompt_lookup=3)


def test_a_compiled_step_is_refused(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [Compile(devices=("cpu",)), Speculative(prompt_lookup=3)]
    for order in (settings, settings[::-1]):
        with pytest.raises(
            StageError,
            match=r"(compile|speculative) exclude each other\. The compiled step takes one token at a time, .*Take one",
        ):
            open_session(tiny_model("llama"), order)
    session = open_session(tiny_model("llama"), settings[:1])
    with pytest.raises(
        StageError,
        match=r"^speculative: a compiled step cannot check several tokens\. .*Take compile or speculative out",
    ):
        session.speculate_with(PromptLookup(3), 4)


def refused(model: Path, draft: Path, store: Path) -> str:
    with pytest.raises(StageError) as caught:
        plan_of({"model": str(model), "stages": [{"speculative": {"draft": str(draft)}}]}, store)
    return str(caught.value)


def test_a_draft_with_another_vocabulary_is_refused_before_anything_runs(
    tiny_model: TinyModel, pruned: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(pruned)
    model.resize_token_embeddings(300)
    model.save_pretrained(tmp_path / "small")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pruned / name, tmp_path / "small")
    said = refused(tiny_model("llama"), tmp_path / "small", tmp_path / "store")
    assert said.startswith(
        f"speculative: the draft {tmp_path / 'small'} has a vocabulary of 300 tokens and the model one of 512. "
    )
    assert said.endswith("Take a smaller model of the same family, or prompt_lookup.")
    with pytest.raises(StageError, match="is no torch model with a vocabulary of 512"):
        (tmp_path / "small" / "tokenizer.json").unlink()
        speculating(tiny_model("llama"), draft=str(tmp_path / "small"))


def test_a_draft_with_another_tokenizer_is_refused_before_anything_runs(
    tiny_model: TinyModel, pruned: Path, tmp_path: Path
) -> None:
    file = pruned / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = list(vocabulary)
    vocabulary[names[7]], vocabulary[names[9]] = vocabulary[names[9]], vocabulary[names[7]]
    file.write_text(json.dumps(tokenizer))
    said = refused(tiny_model("llama"), pruned, tmp_path / "store")
    assert said.startswith(f"speculative: the draft's tokenizer is another one: {names[7]!r} is ")
    file.write_text(json.dumps({"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]]}}))
    with pytest.raises(StageError, match="is unknown to it and "):
        refuse_other_tokens("draft", pruned, "model", tiny_model("llama"), "speculative", "")


def test_a_draft_that_is_no_directory(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optkit.source.models.locate_model", lambda source: None)
    said = refused(tiny_model("llama"), tiny_model("llama"), tmp_path / "store")
    assert "is no model directory yet. It is opened beside the model, without the store. Make a directory of it" in said


def test_the_draft_is_part_of_the_key(tiny_model: TinyModel, pruned: Path, tmp_path: Path) -> None:
    def key() -> str:
        return plan_of(
            {"model": str(tiny_model("llama")), "stages": [{"speculative": {"draft": str(pruned)}}]}, tmp_path / "store"
        ).artifact_key

    before = key()
    assert key() == before
    name = next(iter(Checkpoint(pruned).tensors))
    model = AutoModelForCausalLM.from_pretrained(pruned)
    with torch.no_grad():
        model.get_parameter(name).add_(1.0)
    model.save_pretrained(pruned)
    assert key() != before


def test_fields_that_mean_nothing_are_refused() -> None:
    for fields in ({}, {"draft": "a", "prompt_lookup": 2}, {"early_exit": 1, "prompt_lookup": 2}):
        with pytest.raises(ValidationError, match="set one of draft, prompt_lookup and early_exit"):
            Speculative.model_validate(fields)
    assert (
        Speculative(prompt_lookup=3).describe("cpu") == "speculative: up to 4 tokens at once by prompt lookup (3-grams)"
    )
    assert (
        Speculative.model_validate({"draft": "small"}).describe("cpu") == "speculative: up to 4 tokens "
        "at once by the draft small"
    )
