"""An encoder-decoder that torch runs: the logits of a target given an input, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from optkit.model.prompts import placed
from optkit.model.task import Task, positions_of, task_of
from optkit.session.generating import NO_POSITIONS
from optkit.session.step_bytes import weight_bytes
from optkit.session.torch_model import TorchModel
from optkit.source.examples import ExampleReader
from optkit.source.quiet import quiet_transformers
from optkit.stage import Opening

REMEDY = "Lower the batch, the prompt or the new tokens"


@dataclass(frozen=True)
class Conditioned:
    """An encoder-decoder behind one input, which gives logits as a causal language model does."""

    session: TorchEncoderDecoder
    inputs: dict[str, Tensor]

    @property
    def directory(self) -> Path:
        """The weights that were opened."""
        return self.session.directory

    @property
    def device(self) -> str:
        return self.session.device

    def logits(self, tokens: Tensor) -> Tensor:
        """int64 [batch, target] -> float32 [batch, target, vocabulary]."""
        return self.session.logits_given(self.inputs, tokens)


class TorchEncoderDecoder(TorchModel):
    """An opened encoder-decoder; implements `optkit.measure.ConditionalSession`."""

    def __init__(self, model: PreTrainedModel, opening: Opening, notes: Sequence[str]) -> None:
        super().__init__(opening)
        config = model.config.to_dict()
        self.hears = task_of(config) is Task.SPEECH
        """Whether inputs are audio files, and not texts."""
        self.vocabulary = int(model.config.vocab_size)
        self.positions = positions_of(config) or NO_POSITIONS
        self.notes = (*notes, *(["timed with 30 s of silence, and prompts of the decoder"] if self.hears else ()))
        self._opened = model

    def encode(self, text: str) -> Tensor:
        """Return the token ids of an input text, int64 [tokens]."""
        return torch.tensor(self.tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)

    def target(self, text: str, longest: int) -> Tensor:
        return self._reader.target(text, longest)

    def given(self, source: str) -> Conditioned:
        """Return the model behind an input: a text, or the path of an audio file if it hears.

        Raises SourceError for a file that cannot be heard.
        """
        return Conditioned(self, self._inputs(source))

    def fixed_inputs(self, text: str) -> dict[str, Tensor]:
        """Return an input that is the same wherever the model is: the tokens of a text, or silence."""
        return {"input_features": self._silence} if self.hears else {"input_ids": self._inputs(text)["input_ids"]}

    def logits_given(self, inputs: dict[str, Tensor], tokens: Tensor) -> Tensor:
        """int64 [batch, target] -> float32 [batch, target, vocabulary], behind inputs of `given`.

        Raises EvalError for more tokens than positions, ResourceError without memory.
        """
        self._check_count(tokens.shape[1], "Use shorter targets")
        with self._computes(f"in the logits of {list(tokens.shape)} tokens", "Use shorter inputs and targets"):
            found = self.model(**inputs, decoder_input_ids=tokens.to(self.device), use_cache=False)
            return found.logits.float()  # type: ignore[no-any-return]

    def answer(self, source: str, new_tokens: int) -> str:
        with self._computes(f"in an answer of {new_tokens} tokens", REMEDY), quiet_transformers():
            made = self.model.generate(**self._inputs(source), max_new_tokens=new_tokens, do_sample=False, num_beams=1)
        return str(self.tokenizer.decode(made[0], skip_special_tokens=True))

    def generate(self, tokens: Tensor, new_tokens: int) -> Tensor:
        """int64 [batch, prompt] -> the tokens of `stream`, int64 [batch, new_tokens]."""
        return torch.stack(list(self.stream(tokens, new_tokens)), dim=1)

    def stream(self, tokens: Tensor, new_tokens: int) -> Iterator[Tensor]:
        """Yield `new_tokens` greedy tokens, int64 [batch], each when the device has finished it.
        Prompts, int64 [batch, prompt], are inputs of the encoder, or of the decoder if it hears.

        Raises EvalError for more tokens than positions, ResourceError without memory.
        """
        self._check_count(tokens.shape[1] + new_tokens, "Use a shorter prompt")
        tokens = tokens.to(self.device)
        if self.hears:
            step, inputs = tokens, {"input_features": self._silence.expand(len(tokens), -1, -1)}
        else:
            step = torch.full((len(tokens), 1), self._reader.start, device=self.device)
            inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        encoded = cache = None
        for count in range(new_tokens):
            with self._computes(f"at new token {count + 1} of {list(tokens.shape)} tokens", REMEDY):
                encoded = encoded or self.model.get_encoder()(**inputs)
                found = self.model(
                    encoder_outputs=encoded, decoder_input_ids=step, past_key_values=cache, use_cache=True
                )
                cache, step = found.past_key_values, found.logits[:, -1:].argmax(-1)
                if self.device != "cpu":
                    torch.cuda.synchronize(self.device)
            yield step[:, 0]

    def decode_bytes(self, batch: int, context: int) -> int:
        """Return the fewest bytes of weights that a decode step reads: the decoder's and lm_head's."""
        return weight_bytes(self.model, batch, without=set(self.model.get_encoder().modules()))

    @cached_property
    def _reader(self) -> ExampleReader:
        return ExampleReader(self.directory, self.trust_remote_code)

    @cached_property
    def _silence(self) -> Tensor:
        """What stands for audio when it is timed, float [1, bins, frames]."""
        return self._reader.ears.silence().to(self.device, self.model.dtype)

    def _inputs(self, source: str) -> dict[str, Tensor]:
        """Return what the encoder is given of a text or an audio file, on the device."""
        return placed(self._reader.source(source), self.device, self.model.dtype)
