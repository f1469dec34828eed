"""What an opened model can do, whatever it is and whatever runs it: all that evals see of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


class Opened(Protocol):
    """An opened model, whatever it is and whatever runs it (torch, ONNX Runtime, vLLM)."""

    directory: Path
    """The weights that were opened."""
    device: str
    vocabulary: int
    """How many tokens there are."""
    positions: int
    """Longest sequence that the model was built for, in tokens."""
    trust_remote_code: bool
    """Whether the code that came with the model is run."""
    hidden_memory: str
    """Why torch does not know how much of the device's memory the session takes; empty if it
    does.
    """

    @property
    def notes(self) -> tuple[str, ...]:
        """What is in force and what fell back so far, one sentence each.
        For example `int4: 210 of 210 layers use torch's CPU kernel`.
        """

    def close(self) -> None:
        """Give the memory back; the session cannot be used afterwards."""


class Session(Opened, Protocol):
    """An opened causal language model: its evals see nothing else. What computes raises EvalError for
    more tokens than positions, ResourceError without memory.
    """

    def encode(self, text: str) -> Tensor:
        """Return a text's token ids, int64 [tokens], with the tokenizer's own special tokens."""

    def logits(self, tokens: Tensor) -> Tensor:
        """int64 [batch, sequence] -> float32 [batch, sequence, vocabulary], on its device."""

    def generate(self, tokens: Tensor, new_tokens: int) -> Tensor:
        """int64 [batch, prompt] -> int64 [batch, prompt + new_tokens], greedy; never stops early."""

    def stream(self, tokens: Tensor, new_tokens: int) -> Iterator[Tensor]:
        """Yield `new_tokens` greedy tokens, int64 [batch], each when the device has finished it."""

    def decode_bytes(self, batch: int, context: int) -> int:
        """Return the fewest bytes of weights and KV cache that a decode step reads at this size."""


class EncoderSession(Opened, Protocol):
    """An opened encoder of text: its evals see nothing else. A mask is 1 where a token is and 0
    where a row is padded, at its end.
    """

    @property
    def pooling(self) -> str:
        """How features become an embedding, e.g. `mean of the tokens, normalised`."""

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return token ids and mask, int64 [texts, tokens of the longest].
        Each text is cut as the model's own tokenizer cuts it.
        """

    def outputs(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """int64 [batch, sequence] twice -> float32 on the CPU.

        Features [batch, sequence, hidden], logits of labels [batch, labels], or of the labels of
        tokens [batch, sequence, labels].
        """

    def embed(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """int64 [batch, sequence] twice -> pooled features, float32 [batch, hidden], on the CPU."""


class Answering(Protocol):
    """What gives logits of tokens: a causal language model, or an encoder-decoder behind an input."""

    directory: Path
    device: str

    def logits(self, tokens: Tensor) -> Tensor:
        """int64 [batch, sequence] -> float32 [batch, sequence, vocabulary], on its device."""


class ConditionalSession(Opened, Protocol):
    """An opened encoder-decoder: its evals see nothing else. It also has what timing calls of a
    `Session`.
    """

    def target(self, text: str, longest: int) -> Tensor:
        """Return what the decoder is to say, int64 [tokens]: its start, then at most `longest - 1`."""

    def given(self, source: str) -> Answering:
        """Return the model behind an input: a text, or the path of an audio file if it hears."""

    def answer(self, source: str, new_tokens: int) -> str:
        """Return the text that the model makes of an input: greedy, to its own end or `new_tokens`."""


@runtime_checkable
class AttendingSession(Protocol):
    """A session that can say which kernels compute its attention."""

    def attention_kernels(self, tokens: Tensor) -> str:
        """Return what computes the attention of a prompt, int64 [batch, prompt], and of a step."""


@runtime_checkable
class ProposingSession(Protocol):
    """A session that may keep several proposed tokens at once."""

    speculation: Any
    """Counts of what was proposed and kept, with `reset`; None if it decodes token by token."""

    def token_bytes(self, batch: int, context: int) -> int:
        """Return the fewest bytes that a new token of each sequence makes read.
        It is the average since `speculation` was reset.
        """


@runtime_checkable
class SharingSession(Protocol):
    """A session that may compute a context once for several continuations."""

    @property
    def shares_contexts(self) -> bool:
        """Whether it can: what it keeps of a context can be copied."""

    def continued_logits(self, contexts: Tensor, tokens: Tensor, owners: Tensor) -> Tensor:
        """Return the logits, float32 [sequences, new, vocabulary], of tokens behind contexts.
        Contexts are int64 [contexts, length], tokens int64 [sequences, new], and `owners`, int64
        [sequences], says which context stands before each.
        """


@runtime_checkable
class SeeingSession(Protocol):
    """A session that may take prompts with images."""

    @property
    def takes_images(self) -> bool:
        """Whether its model does."""

    def prompt_logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits, float32 [batch, sequence, vocabulary], of prompts with images.
        They are as the model's processor makes them: `input_ids`, int64 [batch, sequence], pixels.
        """


@runtime_checkable
class SteppingSession(Protocol):
    """A session that can say what its decode steps compute for given tokens."""

    def stepped_logits(self, tokens: Tensor, prompt: int) -> Tensor:
        """int64 [batch, sequence] -> float32 [batch, sequence - prompt, vocabulary].
        The tokens behind the prompt are fed one at a time.
        """


@runtime_checkable
class QueueingSession(Protocol):
    """A session that can run ahead of its GPU."""

    device: str

    def queue(self, tokens: Tensor, new_tokens: int) -> Iterator[Tensor]:
        """Yield what `stream` yields, each when its work is queued on the current CUDA stream.
        It does not wait for the device.
        """
