"""Encoder-decoders as torch runs them, beside transformers; and what they are measured on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from optkit_evals.divergence import Divergence
from optkit_evals.perplexity import Perplexity

from optkit.errors import EvalError, OptkitError, SourceError
from optkit.measure import EvalContext
from optkit.model.task import ENCODER_DECODERS, Task, loader_of, phrase_of, task_of
from optkit.session import open_session
from optkit.source.audio import Ears, read_wav
from optkit.source.text_place import TextPlace
from optkit.verification.encoders import asked_of, compare_encoded, measure_encoder_decoder
from optkit.verification.workers.open_in_transformers import encode
from tests.conftest import TinyModel
from tests.support.encoder_decoders import CONFIGS, write_pairs, write_wav

SPEECH = "WhisperForConditionalGeneration"
FIELDS = {False: {"input": "input", "field": "target"}, True: {"input": "audio", "field": "text"}}


def asked(architecture: str, folder: Path, kind: type[Any] = Perplexity, **fields: Any) -> Any:
    hears = architecture == SPEECH
    return kind(dataset=str(write_pairs(folder, hears)), **FIELDS[hears], **{"window": 32, **fields})


@pytest.mark.parametrize("architecture", CONFIGS)
def test_perplexity_is_the_loss_of_transformers(
    tiny_encoder_decoder: TinyModel, tmp_path: Path, architecture: str
) -> None:
    import transformers

    source = tiny_encoder_decoder(architecture)
    session: Any = open_session(source)
    (metric,) = asked(architecture, tmp_path).run(session, EvalContext())
    model = getattr(transformers, architecture).from_pretrained(source).eval()
    losses = []
    for line in (tmp_path / "pairs.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if architecture == SPEECH:
            extractor = transformers.AutoFeatureExtractor.from_pretrained(source)
            heard = extractor(read_wav(tmp_path / record["audio"])[0], sampling_rate=16_000, return_tensors="pt")
            inputs = {"input_features": heard["input_features"]}
        else:
            inputs = {"input_ids": session.tokenizer(record["input"], return_tensors="pt")["input_ids"]}
        said = record.get("target") or record["text"]
        labels = session.tokenizer(said, return_tensors="pt")["input_ids"][:, :31]
        with torch.no_grad():
            losses.append(model(**inputs, labels=labels).loss.item())
    assert metric.samples == pytest.approx(losses, rel=1e-5)
    assert "first 6 pairs" in metric.protocol
    (same, *_) = asked(architecture, tmp_path, Divergence).run(session, EvalContext(baseline=session))
    assert same.value == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("architecture", ["T5ForConditionalGeneration", SPEECH])
def test_greedy_tokens_are_those_of_transformers(tiny_encoder_decoder: TinyModel, architecture: str) -> None:
    source = tiny_encoder_decoder(architecture)
    session: Any = open_session(source)
    tokens = torch.tensor([[9, 7, 5, 3], [4, 8, 12, 16]])
    found = session.generate(tokens, 6)
    inputs, begun = {"input_ids": tokens}, torch.full((2, 1), 1)
    if architecture == SPEECH:
        inputs, begun = {"input_features": Ears(source).silence().expand(2, -1, -1)}, tokens
    for _ in range(6):
        with torch.no_grad():
            logits = session.model(**inputs, decoder_input_ids=begun).logits
        begun = torch.cat([begun, logits[:, -1:].argmax(-1)], dim=1)
    assert found.equal(begun[:, -6:])
    encoder = sum(parameter.nbytes for parameter in session.model.get_encoder().parameters())
    whole = sum(parameter.nbytes for parameter in session.model.parameters())
    assert whole - encoder - 512 * 64 * 4 < session.decode_bytes(1, 4) < whole - encoder + 512 * 64 * 4
    session.close()
    with pytest.raises(OptkitError, match="the session was closed"):
        session.generate(tokens, 1)


def test_an_answer_ends_where_it_is_told_to(tiny_encoder_decoder: TinyModel, tmp_path: Path) -> None:
    session: Any = open_session(tiny_encoder_decoder("BartForConditionalGeneration"))
    assert isinstance(session.answer("What is the matter?", 4), str)
    hearing: Any = open_session(tiny_encoder_decoder(SPEECH))
    assert hearing.answer(str(write_wav(tmp_path / "a.wav", 440)), 4)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_config_json_tells_the_task(architecture: str, tiny_encoder_decoder: TinyModel) -> None:
    config = json.loads((tiny_encoder_decoder(architecture) / "config.json").read_text(encoding="utf-8"))
    hears = architecture == SPEECH
    assert task_of(config) is (Task.SPEECH if hears else Task.TRANSLATION)
    assert loader_of(config) == ("AutoModelForSpeechSeq2Seq" if hears else "AutoModelForSeq2SeqLM")
    assert task_of({**config, "architectures": ["T5EncoderModel"]}) is None
    assert phrase_of(ENCODER_DECODERS) == "an encoder-decoder"
    assert phrase_of({Task.SPEECH}) == "an encoder-decoder of speech"


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_any_width(tmp_path: Path, width: int) -> None:
    samples, rate = read_wav(write_wav(tmp_path / "a.wav", 100, 0.1, 8_000, width))
    wanted = 0.5 * torch.sin(2 * torch.pi * 100 * torch.arange(800) / 8_000)
    assert torch.from_numpy(samples).sub(wanted).abs().max() < (1e-2 if width == 1 else 1e-4)
    assert rate == 8_000


def test_what_cannot_be_heard(tiny_encoder_decoder: TinyModel, tmp_path: Path) -> None:
    ears = Ears(tiny_encoder_decoder(SPEECH))
    (tmp_path / "no.wav").write_bytes(b"RIFF of nothing")
    with pytest.raises(SourceError, match=r"no.wav: no WAV file of whole numbers \(PCM\)"):
        ears.heard(tmp_path / "no.wav")
    with pytest.raises(SourceError, match="8,000 samples a second, and the model hears 16,000"):
        ears.heard(write_wav(tmp_path / "slow.wav", 100, rate=8_000))
    with pytest.raises(SourceError, match="it lasts 1.5 s, and the model hears 1 s at once"):
        ears.heard(write_wav(tmp_path / "long.wav", 100, seconds=1.5))
    with pytest.raises(SourceError, match="the feature extractor cannot be loaded"):
        Ears(tmp_path).heard(tmp_path / "slow.wav")


def test_texts_that_do_not_fit_the_model(
    tiny_encoder_decoder: TinyModel, tiny_model: TinyModel, tmp_path: Path
) -> None:
    def place(directory: Path) -> TextPlace:
        return TextPlace(directory, None, tmp_path / "counts")

    bart = place(tiny_encoder_decoder("BartForConditionalGeneration"))
    pairs = str(write_pairs(tmp_path, hears=False))
    Perplexity(dataset=pairs, **FIELDS[False], window=32).check_texts(bart)
    with pytest.raises(SourceError, match="there is no `input`, and the model is an encoder-decoder of text"):
        Perplexity(dataset=pairs, field="target", window=32).check_texts(bart)
    with pytest.raises(SourceError, match="`input` means nothing here: the model is a causal language model"):
        Perplexity(dataset=pairs, **FIELDS[False], window=32).check_texts(place(tiny_model("llama")))
    with pytest.raises(SourceError, match="there are 6 pairs and 7 are needed"):
        Perplexity(dataset=pairs, **FIELDS[False], window=32, windows=7).check_texts(bart)
    with pytest.raises(SourceError, match="there is no field 'inputt'. Did you mean 'input'\\? Set `input:`"):
        Perplexity(dataset=pairs, input="inputt", field="target", window=32).check_texts(bart)
    with pytest.raises(SourceError, match="it has no pairs"):
        Perplexity(dataset="python-reference", input="input").check_texts(bart)
    (tmp_path / "pairs.jsonl").write_text('{"audio": "gone.wav", "text": "a"}', encoding="utf-8")
    with pytest.raises(SourceError, match="gone.wav: the audio file cannot be read"):
        Perplexity(dataset=pairs, **FIELDS[True]).check_texts(bart)
    (tmp_path / "pairs.jsonl").write_text('{"input": "a", "target": ""}\n' * 2, encoding="utf-8")
    session: Any = open_session(bart.tokenizer)
    with pytest.raises(EvalError, match="the target of pair 1 is empty"):
        Perplexity(dataset=pairs, **FIELDS[False], window=32).run(session, EvalContext())


def test_audio_in_the_rows_of_a_parquet_file(tiny_encoder_decoder: TinyModel, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    session: Any = open_session(tiny_encoder_decoder(SPEECH))
    pairs = write_pairs(tmp_path, hears=True)
    beside = asked(SPEECH, tmp_path)
    (wanted,) = beside.run(session, EvalContext())
    rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    rows = [{**row, "audio": {"bytes": (tmp_path / row["audio"]).read_bytes(), "path": row["audio"]}} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    inside = beside.model_copy(update={"dataset": str(tmp_path / "pairs.parquet")})
    (found,) = inside.run(session, EvalContext())
    assert found.samples == wanted.samples
    rows[0]["audio"]["bytes"] = b"fLaC"
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    with pytest.raises(SourceError, match=r"audio in a row: no WAV file of whole numbers \(PCM\)"):
        inside.run(session, EvalContext())
    with pytest.raises(SourceError, match="the field 'audio' is not a text but"):
        inside.model_copy(update={"field": "audio"}).run(session, EvalContext())


def test_another_audio_file_is_another_data_set(tmp_path: Path) -> None:
    text = Perplexity(dataset=str(write_pairs(tmp_path, hears=True)), **FIELDS[True])
    before = text.pinned(None)
    write_wav(tmp_path / "0.wav", 999)
    assert text.pinned(None).revision != before.revision
    with pytest.raises(SourceError, match="the text is sha256:.* and not sha256:"):
        before.examples(None)


@pytest.mark.parametrize("architecture", ["BartForConditionalGeneration", SPEECH])
def test_transformers_is_asked_for_the_same_logits(
    tiny_encoder_decoder: TinyModel, tmp_path: Path, architecture: str
) -> None:
    import transformers

    source = tiny_encoder_decoder(architecture)
    session: Any = open_session(source)
    reference = measure_encoder_decoder(session, "float32", Task.SPEECH)
    model = getattr(transformers, architecture).from_pretrained(source).eval()
    said = encode(model, {**asked_of(reference), "device": "cpu", "logits": str(tmp_path / "logits")})
    found = compare_encoded(reference, said, tmp_path / "logits", bits=0)
    assert found["verdict"] == "agrees"
    assert "for each of 32 tokens" in found["compared"]
