"""Setting `speculative`: several tokens are proposed cheaply.
The model checks them all in one forward pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from optkit.common.field_types import Count
from optkit.errors import StageError
from optkit.model.attention import forgetting_layers
from optkit.model.shape import ModelShape
from optkit.source.models import ModelSource, model_shape, require_directory
from optkit.source.places import pin_and_remember
from optkit.source.tokenizer import refuse_other_tokens
from optkit.stage import Setting

if TYPE_CHECKING:
    from optkit.session.speculation import Proposer

SAME_FAMILY = "Take a smaller model of the same family, or prompt_lookup"


class Speculative(Setting):
    """Decode several tokens with each forward pass.
    What the model generates greedily stays the same.

    A small draft model, the model's own first layers, or the prompt proposes tokens, and the model
    keeps those that it would have chosen itself. Leviathan et al. 2023,
    https://arxiv.org/abs/2211.17192 (greedy); LayerSkip, https://arxiv.org/abs/2404.16710; prompt
    lookup: https://github.com/apoorvumang/prompt-lookup-decoding
    """

    kind: ClassVar[str] = "speculative"
    example: ClassVar[str] = "- speculative: {prompt_lookup: 3, tokens: 4}"

    draft: ModelSource | None = None
    """A small model with the same vocabulary, as a directory or a hub id that is downloaded
    already.
    """
    prompt_lookup: Count | None = None
    """Instead of a draft: look for the last so many tokens (or fewer) earlier in the text, and
    propose what followed them there.
    """
    early_exit: Count | None = None
    """Instead of a draft: the model's own first so many layers with its norm and head. That pays
    for models which were trained for it.
    """
    tokens: int = Field(default=4, ge=1, le=64)
    """Tokens proposed at once, at most."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if sum(each is not None for each in (self.draft, self.prompt_lookup, self.early_exit)) != 1:
            raise ValueError("set one of draft, prompt_lookup and early_exit")
        return self

    def pinned(self, data: Path | None) -> Self:
        """Return the setting with the draft's revision filled in.
        Raises SourceError if there is no such model.
        """
        return self.model_copy(update={"draft": pin_and_remember(self.draft)}) if self.draft else self

    def check(self, shape: ModelShape, device: str, directory: Path | None = None) -> None:
        """Raise StageError for a draft that does not fit or is not at hand.
        More layers than there are, and a cache that cannot forget, are refused too.
        """
        if why := forgetting_layers(shape.config):
            raise StageError(
                f"the model's layers {why}",
                where="speculative",
                why="Tokens that were proposed in vain have to be taken out of the KV cache again, and such "
                "a layer has overwritten others",
                remedy="Take it out for this architecture",
            )
        if self.early_exit is not None and shape.block_count:
            check_layers(self.early_exit, shape.block_count)
        if self.draft is None:
            return
        place = self.draft_directory()
        theirs, ours = (each.config.get("vocab_size") for each in (model_shape(self.draft, place), shape))
        if theirs != ours:
            raise StageError(
                f"the draft {self.draft.name} has a vocabulary of {theirs} tokens and the model one of {ours}",
                where="speculative",
                why="What it proposes would be other tokens",
                remedy=SAME_FAMILY,
            )
        if directory:
            refuse_other_tokens("draft", place, "model", directory, "speculative", SAME_FAMILY)

    def on_open(self, session: Any) -> Any:
        """Return the session, which checks what is proposed from now on.

        Raises StageError for a draft that does not fit, and what opening it raises.
        """
        session.speculate_with(self._proposer(session), self.tokens)
        return session

    def _proposer(self, session: Any) -> Proposer:
        from optkit.session.early_exit import EarlyExit
        from optkit.session.opening import open_session
        from optkit.session.speculation import DraftModel, PromptLookup
        from optkit.session.torch_session import TorchSession

        if self.prompt_lookup is not None:
            return PromptLookup(self.prompt_lookup)
        if self.early_exit is not None:
            check_layers(self.early_exit, session.model.config.get_text_config(decoder=True).num_hidden_layers)
            return EarlyExit(session.model, self.early_exit, session.step, session.new_state())
        place = self.draft_directory()
        refuse_other_tokens("draft", place, "model", session.directory, "speculative", SAME_FAMILY)
        draft = open_session(place, (), session.device)
        if not isinstance(draft, TorchSession) or draft.vocabulary != session.vocabulary:
            raise StageError(
                f"the draft {place} is no torch model with a vocabulary of {session.vocabulary}",
                where="speculative",
                remedy=SAME_FAMILY,
            )
        return DraftModel(draft.step, draft.new_state, draft.decode_bytes)

    def draft_directory(self) -> Path:
        """Return where the draft lies; raises StageError if it is no directory yet."""
        assert self.draft
        return require_directory(self.draft, "draft", "speculative", "It is opened beside the model, without the store")

    def describe(self, device: str) -> str:
        """Return e.g. `speculative: 4 tokens at once by prompt lookup (3-grams)`."""
        if self.early_exit is not None:
            by = f"the first {self.early_exit} layers"
        else:
            by = f"the draft {self.draft.name}" if self.draft else f"prompt lookup ({self.prompt_lookup}-grams)"
        return f"speculative: up to {self.tokens} tokens at once by {by}"


def check_layers(layers: int, count: int) -> None:
    """Raise StageError if a model of `count` layers has no layers behind its first `layers`."""
    if layers >= count:
        raise StageError(
            f"early_exit: {layers} leaves nothing out: the model has {count} layers",
            where="speculative",
            why="The first layers propose, and all of them check",
            remedy=f"Set early_exit to at most {count - 1}" if count > 1 else "Take a draft model, or prompt_lookup",
        )
