"""Encoders as torch and ONNX Runtime run them, beside transformers on one sentence at a time."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.errors import EvalError, OptkitError, SourceError, StageError
from optkit.model.pooling import Pooling, longest_text, missing_modules, read_pooling
from optkit.model.task import Task, loader_of, phrase_of, positions_of, task_of
from optkit.session import open_session
from optkit.settings.onnx_provider import OnnxProvider
from tests.conftest import TinyEncoder, TinyModel
from tests.support.changes import change_json
from tests.support.crossed import crossed

TEXTS = ["The cat sat.", "A loop runs until it ends, or until something in it says that it should.", "No."]


def alone(source: Path, text: str) -> Tensor:
    """Return the first output of transformers for one text, without a mask."""
    import transformers

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    head = config["architectures"][0]
    model = getattr(transformers, head).from_pretrained(source, dtype=torch.float32).eval()
    ids = transformers.AutoTokenizer.from_pretrained(source)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        first: Tensor = model(input_ids=ids)[0][0]
    return first


def say_pooling(
    directory: Path, target: Path, pooling: Any, modules: tuple[str, ...] = ("Transformer", "Pooling", "Normalize")
) -> Path:
    """Return a copy of a model that says how its features are pooled."""
    copy = shutil.copytree(directory, target)
    listed = [
        {"idx": n, "name": str(n), "path": f"{n}_{m}" if n else "", "type": f"sentence_transformers.models.{m}"}
        for n, m in enumerate(modules)
    ]
    (copy / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    (copy / "1_Pooling").mkdir()
    (copy / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
    return Path(copy)


def pooled(features: Tensor, mode: str, normalized: bool) -> Tensor:
    found = {"mean": features.mean(0), "cls": features[0], "max": features.amax(0)}[mode]
    return found / found.norm() if normalized else found


@pytest.mark.parametrize(
    ("onnx", "architecture"), crossed([False, True], ["RobertaModel", "BertModel", "DistilBertModel"])
)
def test_embeddings_are_those_of_each_text_alone(
    tiny_encoder: TinyEncoder, tiny_encoder_source: TinyModel, architecture: str, onnx: bool
) -> None:
    source = tiny_encoder_source(architecture)
    session: Any = open_session(tiny_encoder(architecture)[1] if onnx else source)
    tokens, mask = session.tokenize(TEXTS)
    assert mask.sum(1).tolist() == [len(session.tokenizer(text)["input_ids"]) for text in TEXTS]
    embeddings = session.embed(tokens, mask)
    wanted = torch.stack([pooled(alone(source, text), "mean", True) for text in TEXTS])
    torch.testing.assert_close(embeddings, wanted, atol=1e-5, rtol=1e-4)
    assert embeddings.dtype == torch.float32
    assert (session.positions, session.vocabulary, session.dtype) == (64, 512, "float32")
    assert "embeddings: mean of the tokens, normalised (there is no modules.json that says another)" in session.notes
    features = session.outputs(tokens, mask)
    torch.testing.assert_close(features[0, : int(mask[0].sum())], alone(source, TEXTS[0]), atol=1e-4, rtol=1e-4)
    session.close()
    with pytest.raises(OptkitError, match="the session was closed"):
        session.embed(tokens, mask)


@pytest.mark.parametrize(("config", "mode", "modules"), [
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls", ("Transformer", "Pooling")),
    ({"pooling_mode_max_tokens": True}, "max", ("Transformer", "Pooling", "Normalize")),
    ({"pooling_mode": "mean"}, "mean", ("Transformer", "Pooling")),
])  # fmt: skip
@pytest.mark.parametrize("onnx", [False, True])
def test_pooling_is_that_of_modules_json(
    tiny_encoder: TinyEncoder, tmp_path: Path, config: dict[str, Any], mode: str, modules: tuple[str, ...], onnx: bool
) -> None:
    source, exported = tiny_encoder("BertModel")
    session: Any = open_session(say_pooling(exported if onnx else source, tmp_path / "model", config, modules))
    wanted = torch.stack([pooled(alone(source, text), mode, "Normalize" in modules) for text in TEXTS])
    torch.testing.assert_close(session.embed(*session.tokenize(TEXTS)), wanted, atol=1e-4, rtol=1e-4)
    assert session.notes[-1] == f"embeddings: {session.pooling} (as its modules.json says)"


@pytest.mark.parametrize(("config", "modules", "message"), [
    ({"pooling_mode": "mean"}, ("Transformer", "Pooling", "Dense"), "its embeddings go through the "
                                                                    "module Dense. optkit computes Tr.*Del"),
    ({"pooling_mode_lasttoken": True}, ("Transformer", "Pooling"), "are pooled by lasttoken. optkit "
                                                                   "knows one of mean, cls, max"),
    ({"pooling_mode": ["mean", "cls"]}, ("Transformer", "Pooling"), "pooled by mean and cls"),
    ({}, ("Transformer", "Pooling"), "pooled by nothing"),
    ({"pooling_mode": "mean"}, ("Transformer",), "0 modules are Pooling. An embedding has one"),
])  # fmt: skip
def test_pooling_that_is_not_known(
    tiny_encoder: TinyEncoder, tmp_path: Path, config: dict[str, Any], modules: tuple[str, ...], message: str
) -> None:
    directory = say_pooling(tiny_encoder("BertModel")[0], tmp_path / "model", config, modules)
    with pytest.raises(SourceError, match=message):
        open_session(directory)


def test_files_of_sentence_transformers_that_are_damaged(tiny_encoder: TinyEncoder, tmp_path: Path) -> None:
    model = say_pooling(tiny_encoder("BertModel")[0], tmp_path / "model", {"pooling_mode": "mean"})
    (model / "sentence_bert_config.json").write_text('{"max_seq_length": 7}', encoding="utf-8")
    session: Any = open_session(model)
    assert longest_text(model) == 7
    assert session.tokenize(TEXTS)[0].shape == (3, 7)
    (model / "1_Pooling" / "config.json").unlink()
    assert missing_modules(model) == ["1_Pooling/config.json"]
    with pytest.raises(SourceError, match=r"there is no 1_Pooling/config.json. modules.json names it"):
        read_pooling(model)
    (model / "modules.json").write_text('["Transformer"]', encoding="utf-8")
    with pytest.raises(SourceError, match=r"modules.json: is no list of modules"):
        read_pooling(model)
    (model / "modules.json").write_text("[", encoding="utf-8")
    with pytest.raises(SourceError, match=r"modules.json: cannot be read as JSON"):
        read_pooling(model)


def test_a_head_gives_labels_and_no_embeddings(tiny_encoder: TinyEncoder) -> None:
    for place in tiny_encoder("BertForSequenceClassification"):
        session: Any = open_session(place)
        tokens, mask = session.tokenize(TEXTS)
        wanted = torch.stack([alone(tiny_encoder("BertForSequenceClassification")[0], text) for text in TEXTS])
        torch.testing.assert_close(session.outputs(tokens, mask), wanted, atol=1e-4, rtol=1e-4)
        assert session.pooling == ""
        with pytest.raises(
            EvalError, match="it gives labels and no features. Its architecture has a head behind the encoder"
        ):
            session.embed(tokens, mask)


def test_more_tokens_than_positions(tiny_encoder: TinyEncoder, tiny_encoder_source: TinyModel) -> None:
    for place in (tiny_encoder_source("RobertaModel"), tiny_encoder("BertModel")[1]):
        session: Any = open_session(place)
        tokens = torch.full((1, 65), 7)
        assert session.embed(tokens[:, :64], torch.ones(1, 64, dtype=torch.int64)).shape == (1, 32)
        with pytest.raises(EvalError, match="65 tokens are more than the model's 64 positions. Use shorter sequences"):
            session.outputs(tokens, torch.ones_like(tokens))


def test_a_graph_that_is_not_what_its_config_says(tiny_encoder: TinyEncoder, tmp_path: Path) -> None:
    labels = shutil.copytree(tiny_encoder("BertForSequenceClassification")[1], tmp_path / "labels")
    change_json(labels / "config.json", architectures=["BertModel"])
    with pytest.raises(
        SourceError,
        match="the graph has no output 'last_hidden_state' but logits. By its config.json it is an encoder that",
    ):
        open_session(labels)
    change_json(labels / "config.json", lambda config: config.pop("vocab_size"))
    with pytest.raises(SourceError, match="there is no vocab_size in config.json"):
        open_session(labels)
    with pytest.raises(StageError, match="runs causal language models, and this is an encoder. Leave engine out"):
        open_session(tiny_encoder("BertModel")[1], [OnnxProvider(engine="onnxruntime-genai")])


def test_what_a_config_describes() -> None:
    bert, roberta = {"model_type": "bert"}, {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}
    assert task_of({"architectures": ["BertModel"], **bert}) is Task.FEATURES
    assert task_of({"architectures": ["BertForMaskedLM"], **bert}) is Task.CLASSIFICATION
    assert task_of({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}) is Task.GENERATION
    others: list[dict[str, Any]] = [
        {"architectures": ["BertModel"], **bert, "is_decoder": True},
        {"architectures": ["BertForQuestionAnswering"], **bert},
        {"architectures": ["LlamaModel"], "model_type": "llama"},
        {"architectures": ["T5EncoderModel"], "model_type": "t5", "is_encoder_decoder": True},
        bert,
    ]
    assert [task_of(config) for config in others] == [None] * 5
    assert loader_of({"architectures": ["BertForMaskedLM"], **bert}) == "AutoModelForMaskedLM"
    assert loader_of({}) == "AutoModelForCausalLM"
    assert positions_of(roberta) == 512
    assert positions_of({"n_positions": 1024}) == 1024
    assert positions_of({}) is None
    assert phrase_of([Task.GENERATION, Task.FEATURES]) == "a causal language model or an encoder that gives features"


def test_pooling_by_hand() -> None:
    features, mask = torch.tensor([[[3.0, 0.0], [0.0, 4.0], [9.0, 9.0]]]), torch.tensor([[1.0, 1.0, 0.0]])
    assert Pooling()(features, mask).tolist() == [pytest.approx([0.6, 0.8])]
    assert Pooling("mean", normalized=False)(features, mask).tolist() == [[1.5, 2.0]]
    assert Pooling("max", normalized=False)(-features, mask).tolist() == [[0.0, 0.0]]
    assert Pooling("cls", normalized=False)(features.numpy(), mask.numpy()).tolist() == [[3.0, 0.0]]
