"""What speculative decoding does on a text.
It says how many proposed tokens are kept, how fast it is, and that the output is the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from optkit.common.field_types import SequenceLength, Several
from optkit.common.statistics import mean
from optkit.measure import EvalContext, Metric, Session, TimedEval
from optkit.model.session_memory import SessionMemory
from optkit_evals.meanings import row
from optkit_evals.timing import answer, check_room, device_text, uninterrupted
from optkit_evals.windows import WindowedText

if TYPE_CHECKING:
    from torch import Tensor

UNITS = {
    "text_decode_tokens_per_s": "tokens/s",
    "tokens_per_forward": "tokens",
    "acceptance_rate": "fraction",
    "greedy_agreement": "fraction",
}


class Speculation(WindowedText, TimedEval):
    """Decode speed on text, tokens per forward pass, the share of proposed tokens kept.
    It also gives the agreement with plain greedy decoding.

    What is kept depends on the text: random prompts, as `throughput` has them, say nothing about
    speculative decoding.
    """

    kind: ClassVar[str] = "speculation"
    example: ClassVar[str] = "- speculation: {dataset: wikitext2, new_tokens: 64}"
    version: ClassVar[int] = 3
    draws: ClassVar[bool] = False
    asks_draft: ClassVar[bool] = True
    sets_length: ClassVar[tuple[str, ...]] = ("window", "new_tokens")
    metrics: ClassVar[Mapping[str, str]] = UNITS

    window: SequenceLength = 128
    """Tokens of a prompt."""
    windows: Several | None = 8
    """Prompts, from the start of the text; as many as there are when null. Each is answered in one
    of the turns.
    """
    new_tokens: SequenceLength = 64
    """Tokens generated after each prompt."""

    def turns(self) -> int:
        return min(self.processes, self.windows or self.processes)

    def longest_sequence(self) -> int:
        return self.window + self.new_tokens

    def working_bytes(self, model: SessionMemory) -> int:
        return model.forward(1, self.window) + 2 * model.logits(1) + model.cache(1, self.longest_sequence())

    def run(self, session: Session, context: EvalContext) -> list[Metric]:
        """Measure; a model that decodes token by token has no acceptance. Raises EvalError as
        `WindowedText.cut` does.
        """
        check_room(session, self.window, self.new_tokens, self.where, "Lower window or new_tokens")
        windows = self.cut(session, context)
        counts = getattr(session, "speculation", None)
        found: dict[str, list[float]] = {name: [] for name in UNITS}
        trials: dict[str, list[int]] = {"acceptance_rate": [], "greedy_agreement": []}
        mine = list(enumerate(windows.tokens))[context.turn.index :: context.turn.count]
        with context.progress.task(f"speculation{context.turn.label}", len(mine), "prompts") as task, uninterrupted():
            answer(session, mine[0][1][None].to(session.device), self.new_tokens)
            for index, window in mine:
                prompt = window[None].to(session.device)
                if counts is not None:
                    counts.reset()
                timing = answer(session, prompt, self.new_tokens)
                found["text_decode_tokens_per_s"].append((self.new_tokens - 1) / timing.decode_s)
                found["tokens_per_forward"].append(counts.tokens / counts.forwards if counts else 1.0)
                if counts is not None:
                    found["acceptance_rate"].append(counts.accepted / counts.proposed if counts.proposed else 0.0)
                    trials["acceptance_rate"].append(counts.proposed)
                    found["greedy_agreement"].append(self._agreement(session, prompt, index, context))
                    trials["greedy_agreement"].append(1)
                task.advance()
        protocol = self._protocol(windows.protocol, session)
        return [
            row(
                self,
                name,
                mean(samples),
                protocol,
                samples,
                trials=tuple(trials.get(name, ())),
                pairing="independent" if name in trials else "paired_turns",
            )
            for name, samples in found.items()
            if samples
        ]

    def _agreement(self, session: Any, prompt: Tensor, index: int, context: EvalContext) -> float:
        """Return 1 if the tokens are those of decoding one by one, else 0.
        A word on how near the model's choice was there goes with it.
        """
        proposed = session.generate(prompt, self.new_tokens)
        with session.token_by_token():
            plain = session.generate(prompt, self.new_tokens)
        if proposed.equal(plain):
            return 1.0
        first = int((proposed != plain)[0].nonzero()[0])
        best, second = session.logits(plain[:, :first])[0, -1].topk(2).values.tolist()
        context.warn(
            f"speculation, prompt {index + 1}: differs from token {first - prompt.shape[1] + 1} on, where "
            "the model's two best logits are"
            f" {best - second:.2g} apart; several tokens at once are rounded in another order than one"
        )
        return 0.0

    def _protocol(self, text: str, session: Session) -> str:
        return (
            f"{text}, each window a prompt; {self.new_tokens} greedy tokens after each, one prompt at a "
            "time, one answer before them to"
            f" warm up; each prompt in one turn; {self.turns_text()}; decoding is timed as in throughput;"
            f" {device_text(session.device)}"
        )
