"""How many optimizer steps a budget of tokens is, and whether texts have the tokens for it.

No torch is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from optkit.errors import StageError


@dataclass(frozen=True)
class Budget:
    """What a training asks of its texts."""

    sequence_length: int
    """Tokens of a sequence."""
    sequences_per_step: int
    held_out: int
    """Sequences that are never trained on."""
    tokens: int | None = None
    """Tokens to train on; None: all of the texts, `epochs` times."""
    epochs: int = 1
    where: str = "training"
    """Whom messages are about."""

    def refuse_nothing_left(self, sequences: int) -> None:
        """Raise StageError if the texts have too few sequences to hold out and to train on."""
        if sequences <= self.held_out:
            raise StageError(
                f"the texts give {sequences:,} sequences of {self.sequence_length:,} tokens, and "
                f"{self.held_out:,} are to be held out",
                where=self.where,
                why="Nothing is left to train on",
                remedy="Name more texts, or lower `held_out` or `sequence_length`",
            )

    def steps(self, sequences: int) -> int:
        """Return how many optimizer steps are made of so many sequences to train on.

        Raises StageError if they are too few.
        """
        step_tokens = self.sequences_per_step * self.sequence_length
        once = sequences * self.sequence_length
        available = once * self.epochs
        steps = available // step_tokens if self.tokens is None else -(-self.tokens // step_tokens)
        if steps == 0 or steps * step_tokens > available:
            wanted = steps * step_tokens or step_tokens
            raise StageError(
                f"{wanted:,} tokens are asked for, and the texts have {once:,} to train on"
                + (f", {available:,} in {self.epochs} epochs" if self.epochs > 1 else ""),
                where=self.where,
                why=f"A step takes {step_tokens:,}",
                remedy=f"Set `epochs: {-(-wanted // once)}`, name more texts, or lower `tokens`",
            )
        return steps

    def least_sequences(self, written: int = 0) -> int:
        """Return how many sequences of the texts are enough, beside `written` further ones.
        Those held out are among them.
        """
        step_tokens = self.sequences_per_step * self.sequence_length
        steps = max(1, -(-(self.tokens or 1) // step_tokens))
        to_train_on = -(-steps * self.sequences_per_step // self.epochs)
        return self.held_out + max(1, to_train_on - written)
