"""A model that torch runs: logits, greedy generation with a KV cache, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from optkit.common.out_of_resources import memory_errors
from optkit.kernels.cpu.decoding import StepDecoder
from optkit.model.carried_state import (
    CACHES,
    KEYS_AND_VALUES,
    CarriedState,
    keeps_keys_and_values,
    own_cache,
    state_name,
)
from optkit.model.compiling import RECOMPILE_LIMIT, times_given_up
from optkit.model.memory import return_freed_memory
from optkit.model.mixed_dtypes import one_dtype
from optkit.model.prompts import placed, takes_images
from optkit.progress import ToActOn
from optkit.session.attention_kernels import kernels_text, watched_attention
from optkit.session.cast_logits import cast_logits
from optkit.session.compile_watch import CompileWatch
from optkit.session.generating import NO_POSITIONS, Decoder, GeneratingSession, when_done
from optkit.session.offloading import delete_offloaded
from optkit.session.speculation import Proposer, Speculation, check_speculates, speculate
from optkit.session.static_caches import StaticCaches
from optkit.session.step_bytes import cache_bytes, weight_bytes
from optkit.session.torch_model import TorchModel
from optkit.stage import Opening

REMEDY = "Lower the batch, the prompt or the new tokens"
UNCOMPILED = ToActOn(
    f"torch compiled a function for {RECOMPILE_LIMIT} shapes and ran it uncompiled for others: "
    "ask for fewer batches and lengths"
)


class TorchSession(GeneratingSession, TorchModel):
    """An opened model; implements `optkit.measure.Session`."""

    def __init__(
        self,
        model: PreTrainedModel,
        opening: Opening,
        notes: Sequence[str] = (),
        new_cache: Callable[[], Cache] | None = None,
    ) -> None:
        super().__init__(opening)
        config = model.config.get_text_config(decoder=True)
        self.vocabulary = int(config.vocab_size)
        self.positions = max(0, getattr(config, "max_position_embeddings", None) or 0) or NO_POSITIONS
        self._opened = model
        self._new_cache, self._settings = new_cache, opening.settings
        self.codes_cache = new_cache is not None
        """Whether the KV cache holds codes instead of floats."""
        self.compiled = getattr(model, "_compiled_call_impl", None) is not None
        """Whether the decode step is compiled."""
        self._compiles = self.compiled or getattr(model.config, "_attn_implementation", "") == "flex_attention"
        self._notes, self._given_up_before = notes, times_given_up()
        self._compiling: CompileWatch | None = None
        if self.compiled:
            self._compiling = CompileWatch()
        self.speculation: Speculation | None = None
        """What was proposed and kept so far; None if the model decodes token by token."""
        self._proposer: tuple[Proposer, int] | None = None
        self._decoder: Decoder | None = None
        self.choose: Callable[[Tensor], Tensor] = likeliest
        """What takes the next tokens, int64 [batch, 1], from the logits of the last ones."""
        self._static = StaticCaches(model.config, self.positions)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """The context of all settings in which a model is called."""
        with ExitStack() as stack:
            for setting in self._settings:
                stack.enter_context(setting.computing(self.device))
            yield

    @property
    def notes(self) -> tuple[str, ...]:
        gave_up = self._compiles and times_given_up() > self._given_up_before
        compiled = self._compiling.notes() if self._compiling else ()
        decoded = self._decoder.notes if self._decoder else ()
        return (*self._notes, *compiled, *decoded, *((UNCOMPILED,) if gave_up else ()))

    @property
    def decodes_itself(self) -> bool:
        """Whether something else than the model computes the tokens behind a prompt."""
        return self._decoder is not None

    @property
    def product_dtype(self) -> str:
        """What the products of plain layers are computed in.
        That is the model's dtype, what autocast casts to, or `tf32`.
        """
        kind = self.device.partition(":")[0]
        with self._computing():
            if torch.is_autocast_enabled(kind):
                return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
            rounded = kind == "cuda" and self.dtype == "float32" and torch.get_float32_matmul_precision() != "highest"
        return "tf32" if rounded else self.dtype

    def logits(self, tokens: Tensor) -> Tensor:
        """int64 [batch, sequence] -> float32 [batch, sequence, vocabulary].
        Attention sees keys and values as a cache of codes holds them.

        Raises EvalError for more tokens than positions, ResourceError without memory.
        """
        return self.prompt_logits({"input_ids": tokens})

    @property
    def takes_images(self) -> bool:
        """Whether the model can be called with images."""
        return takes_images(self.model)

    def prompt_logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of prompts with images, as `SeeingSession` says; raises as `logits`."""
        self._check_length(inputs["input_ids"], 0)
        given = {**placed(inputs, self.device, self.model.dtype), **self._attended()}
        batch, sequence = inputs["input_ids"].shape
        with self._computes(f"in the logits of {batch} x {sequence} tokens", "Lower the window or the batch"):
            if self.model.dtype == torch.float32:
                whole: Tensor = self.model.forward(**given).logits
                return whole.float()
            return cast_logits(self.model, given, self.vocabulary)

    def stream(self, tokens: Tensor, new_tokens: int) -> Iterator[Tensor]:
        """Yield `new_tokens` greedy tokens, int64 [batch], each when the device has finished it.
        All prompts are of one length; raises as `logits`.
        """
        self._check_length(tokens, new_tokens)
        return self._stream(tokens.to(self.device), new_tokens, waiting=True)

    def queue(self, tokens: Tensor, new_tokens: int) -> Iterator[Tensor]:
        self._check_length(tokens, new_tokens)
        return self._stream(tokens.to(self.device), new_tokens, waiting=False)

    def step(self, tokens: Tensor, state: CarriedState, *, last: bool = False) -> Tensor:
        """Return the logits, [batch, new, vocabulary], of tokens behind a state; if `last`, of one."""
        batch, new = tokens.shape
        with self._computes(f"at {batch} x {new} tokens"):
            return state.step(tokens, last=last)

    def stepped_logits(self, tokens: Tensor, prompt: int) -> Tensor:
        """int64 [batch, sequence] -> float32 [batch, sequence - prompt, vocabulary].
        The tokens behind the prompt are fed one at a time; raises as `logits`.
        """
        self._check_length(tokens, 0)
        first, *others = tokens.to(self.device).split([prompt, *[1] * (tokens.shape[1] - prompt)], dim=1)
        if isinstance(self._decoder, StepDecoder):
            with self._no_gradients(), self._decoder.steps(*tokens.shape) as steps:
                steps.prompt(first)
                return torch.stack([steps.logits_after(each[:, 0]) for each in others], dim=1)
        state = self.new_state()
        self.step(first, state, last=True)
        return torch.cat([self.step(each, state).float() for each in others], dim=1)

    @property
    def shares_contexts(self) -> bool:
        return not self.codes_cache and keeps_keys_and_values(self.model)

    def continued_logits(self, contexts: Tensor, tokens: Tensor, owners: Tensor) -> Tensor:
        """Return the logits of tokens behind contexts, as `SharingSession` says; raises as `logits`."""
        self._check_length(contexts, tokens.shape[1])
        state = self.new_state()
        self.step(contexts.to(self.device), state, last=True)
        state.spread(owners.to(self.device))
        return self.step(tokens.to(self.device), state).float()

    def new_state(self) -> CarriedState:
        """Return what the model keeps of tokens, before any; a KV cache grows. Raises SourceError
        for a model that keeps nothing known.
        """
        return CarriedState(self.model, self._new_cache() if self._new_cache else None)

    def speculate_with(self, proposer: Proposer, tokens: int) -> None:
        """Decode from now on with up to `tokens` proposed tokens at once.

        Raises StageError for a compiled model, or if tokens cannot be taken out of the cache again.
        """
        check_speculates(self.new_state(), self.compiled)
        self._proposer, self.speculation = (proposer, tokens), Speculation()

    def add_note(self, note: str) -> None:
        """Add a sentence to the notes."""
        self._notes = (*self._notes, note)

    def decode_with(self, decoder: Decoder) -> None:
        """Let a decoder compute the tokens behind prompts from now on."""
        self._decoder = decoder

    @contextmanager
    def token_by_token(self) -> Iterator[None]:
        """Decode without proposals within the block."""
        proposer, self._proposer = self._proposer, None
        try:
            yield
        finally:
            self._proposer = proposer

    def decode_bytes(self, batch: int, context: int) -> int:
        return weight_bytes(self.model, batch) + cache_bytes(self._one_token_state.held, batch, context)

    def token_bytes(self, batch: int, context: int) -> int:
        """Return the fewest bytes that a new token of each sequence makes read.
        Without proposals they are a decode step's. With them, they are those of all forwards since
        `speculation` was reset, the draft's too, for each token that they gave.
        """
        step, counts = self.decode_bytes(batch, context), self.speculation
        if not self._proposer or counts is None or not counts.tokens:
            return step
        proposing = self._proposer[0].read_bytes(batch, context)
        return round((counts.forwards * step + counts.proposed * proposing) / counts.tokens)

    def attention_kernels(self, tokens: Tensor) -> str:
        """Return torch's attention kernels of a prompt, int64 [batch, prompt], and of a step.

        E.g. `flash in prompts, math in steps`; the name of the implementation if it is not
        torch's. They are seen as they are dispatched to, in a run that is not compiled.
        """
        self._check_length(tokens, 1)
        tokens = tokens.to(self.device)
        batch, prompt = tokens.shape
        found = []
        with self._state(batch, prompt + 1) as state, self._computes("in a prompt", "Lower the batch or the prompt"):
            for part in (tokens, tokens[:, :1]):
                with watched_attention() as kernels:
                    state.step(part, last=True)
                found.append(kernels_text(kernels))
        if self._decoder:
            found[1] = "kernels of its own"
        if not all(found):
            return str(getattr(self.model.config, "_attn_implementation", "its own"))
        return found[0] if found[0] == found[1] else f"{found[0]} in prompts, {found[1]} in steps"

    def close(self) -> None:
        delete_offloaded(self._opened)
        self._opened = self._proposer = self._decoder = None
        self._static.close()
        self.__dict__.pop("_one_token_state", None)
        if self._compiling:
            self._compiling.close()
        if self._compiles:
            torch.compiler.reset()
        return_freed_memory(self.device)

    def _stream(self, tokens: Tensor, new_tokens: int, *, waiting: bool) -> Iterator[Tensor]:
        if self._proposer and self.speculation is not None:
            proposer, most = self._proposer
            yield from speculate(self.step, self.new_state(), tokens, new_tokens, proposer, most, self.speculation)
            return
        if self._decoder:
            queued = self._decoded(self._decoder, tokens, new_tokens)
            yield from when_done(queued) if waiting and tokens.is_cuda else queued
            return
        batch, prompt = tokens.shape
        step = tokens
        with self._state(batch, prompt + new_tokens) as state:
            for count in range(new_tokens):
                with self._computes(f"at new token {count + 1} of {batch} x {prompt} tokens"):
                    # The prompt is never compiled: its shape changes with every request.
                    call = self.model.forward if count == 0 else self.model
                    if self.compiled:
                        torch.compiler.cudagraph_mark_step_begin()
                    step = self.choose(state.step(step, call, last=True))
                    if waiting and self.device != "cpu":
                        torch.cuda.synchronize(self.device)
                yield step[:, 0]

    def _decoded(self, decoder: Decoder, tokens: Tensor, new_tokens: int) -> Iterator[Tensor]:
        batch, prompt = tokens.shape
        with ExitStack() as stack:
            with self._memory(f"before {batch} x {prompt} tokens"):
                steps = stack.enter_context(decoder.steps(batch, prompt + new_tokens))
            for count in range(new_tokens):
                with self._computes(f"at new token {count + 1} of {batch} x {prompt} tokens"):
                    step = steps.next() if count else steps.prompt(tokens)
                yield step

    @contextmanager
    def _state(self, batch: int, length: int) -> Iterator[CarriedState]:
        """Lend what the model keeps of `batch` sequences of `length` tokens, before any."""
        if self.compiled and state_name(self.model) in CACHES and not own_cache(self.model):
            with self._static.lend(batch, length) as cache:
                yield CarriedState(self.model, cache)
        else:
            yield self.new_state()

    def _attended(self) -> dict[str, Any]:
        """Return how the model is called for logits.
        A cache of codes has to be there, or they would be those of another model.
        """
        return {KEYS_AND_VALUES: self._new_cache(), "use_cache": True} if self._new_cache else {"use_cache": False}

    @cached_property
    def _one_token_state(self) -> CarriedState:
        state = self.new_state()
        with self._no_gradients():
            state.step(torch.zeros(1, 1, dtype=torch.int64, device=self.device), last=True)
        return state

    @contextmanager
    def _computes(self, what: str, remedy: str = REMEDY) -> Iterator[None]:
        with self._memory(what, remedy), one_dtype(str(self.directory)), self._no_gradients():
            yield

    def _memory(self, what: str, remedy: str = REMEDY) -> AbstractContextManager[None]:
        return memory_errors(f"{what} on {self.device}", str(self.directory), remedy)

    @contextmanager
    def _no_gradients(self) -> Iterator[None]:
        with (
            torch.no_grad() if self.compiled else torch.inference_mode(),
            self._computing(),
            self._compiling.errors() if self._compiling else nullcontext(),
        ):
            yield


def likeliest(logits: Tensor) -> Tensor:
    """float [batch, sequence, vocabulary] -> the likeliest last tokens, int64 [batch, 1]."""
    return logits[:, -1:].argmax(-1)
