"""Remove the experts of each block that add least to its output on a text (REAP).

After Lasby et al. 2025, arXiv:2510.13999: an expert counts by the mean, over the tokens that the
router sends to it, of the router's weight times the length of what the expert makes of the token.
The experts that are left stay as they are, and the router loses the outputs of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optkit.algorithms.importance import highest
from optkit.common.out_of_resources import out_of_memory
from optkit.errors import StageError
from optkit.model.blocks import BlockInputs
from optkit.model.checkpoint import Checkpoint
from optkit.model.experts import Experts
from optkit.model.fewer_experts import WHERE, Mixture, fewer_config, mixture_of
from optkit.model.inventory import extra_heads
from optkit.model.replaced_forward import hooked, replaced_forward
from optkit.model.skeleton import Skeleton
from optkit.model.writer import CheckpointWriter, copy_companions
from optkit.source.calibration import Calibration
from optkit.stage import Context, Report
from optkit.stages.narrowing.fields import KIND
from optkit.stages.narrowing.proof import prove
from optkit.stages.narrowing.told import note, sizes

REMOVED, MERGED = "an expert that adds little", "an expert that was added to another"
SAMPLE = 64
"""Tokens of each batch that all experts are given, to see which make nearly the same."""
FEW = 0.01
"""The share of choices that rounding may change, of experts that are all but equal."""
Groups = Mapping[int, Sequence[int]]
"""Expert that stays -> those whose mean it becomes, itself among them."""


def remove_experts(
    source: Path,
    target: Path,
    context: Context,
    text: Calibration,
    batch_size: int,
    left_of: Callable[[int], int],
    less: str,
    merge: bool = False,
) -> Report:
    """Score the experts of each block on the text, write as many as are left of them, and compare the
    blocks. `merge`: the others are added to these.

    Raises StageError and SourceError as `PruneStructured.run`, ResourceError, which says what is `less`.
    """
    started = time.monotonic()
    checkpoint = Checkpoint(source)
    mixture = mixture_of(checkpoint.shape)
    left = left_of(mixture.count)
    skeleton = Skeleton(checkpoint, trust_remote_code=context.trust_remote_code)
    for index in mixture.holders:
        _called_experts(skeleton, index)
    tokens = text.tokens(source, context.data, context.trust_remote_code)
    with out_of_memory("in front of the first block", context.device, less):
        inputs = skeleton.capture_inputs(tokens, context.device, batch_size)
    heads = tuple(f"{head}." for head in extra_heads(checkpoint.shape))
    kept: dict[int, list[int]] = {}
    groups: dict[int, Groups] = {}
    details: dict[str, Any] = {"kept_experts": {}, "expert_scores": {}, "expert_tokens": {}}
    with context.progress.task(KIND, len(skeleton.blocks), "blocks") as task, CheckpointWriter(target) as writer:
        for name in skeleton.outside_tensors:
            if not name.startswith(heads):
                writer.add(name, checkpoint.read_finite(name))
        for index, block in enumerate(skeleton.blocks):
            with skeleton.loaded(block, context.device, less):
                scores, counts, outputs = _advance_(skeleton, index, inputs, mixture, merge)
            if scores is not None:
                kept[index] = highest(scores, left).tolist()
                told = {"kept_experts": kept[index], "expert_scores": scores.tolist(), "expert_tokens": counts.tolist()}
                for key, value in told.items():
                    details[key][block.name] = value
                if merge:
                    groups[index] = groups_of(outputs, kept[index])
                    details.setdefault("merged_experts", {})[block.name] = [*groups[index].values()]
            for name in skeleton.block_tensors(block):
                if (new := mixture.name(name, kept)) is None:
                    continue
                if merge and mixture.holds(name):
                    writer.add(new, merged(checkpoint, name, mixture, groups[index], counts))
                else:
                    writer.add(new, _left_of(checkpoint.read_finite(name), name, mixture, kept))
            task.advance(note=block.name)
    copy_companions(source, target, context.trust_remote_code, fewer_config(checkpoint.config, mixture.count, left))
    details["largest_difference"] = prove(
        checkpoint, target, range(len(skeleton.blocks)), context, beside=partial(_alike, kept=kept, merge=merge)
    )
    before, after = sizes(checkpoint.shape), sizes(Checkpoint(target).shape)
    details |= {"before": before, "after": after, "experts_before": mixture.count, "experts_after": left}
    details["seconds"] = round(time.monotonic() - started, 2)
    unseen = sum(tokens.count(0) for tokens in details["expert_tokens"].values())
    notes = [note(before, after)]
    notes += [f"no token of the text reached {unseen} experts, which went first"] if unseen else []
    return Report(
        changed=len(kept),
        details=details,
        notes=tuple(notes),
        calibrated_on=(text.identity(),),
        dropped={
            **dict.fromkeys(_removed(mixture, kept), MERGED if merge else REMOVED),
            **dict.fromkeys(extra_heads(checkpoint.shape), "it proposes tokens with as many experts as there were"),
        },
    )


def _advance_(
    skeleton: Skeleton, index: int, inputs: BlockInputs, mixture: Mixture, merge: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Run a loaded block on the text; return the score of each of its experts, float64 [experts], how many
    tokens each saw, and, to `merge`, what each makes of the same tokens in sum, float64 [experts, width].
    Without experts the score is None.
    """
    scores, counts = torch.zeros(mixture.count, dtype=torch.float64), torch.zeros(mixture.count, dtype=torch.int64)
    outputs = [torch.zeros(1, dtype=torch.float64)] * mixture.count  # as wide as what experts make

    def made(experts: nn.Module, hidden: Tensor, expert: int, like: Tensor, weights: Tensor) -> Tensor:
        alone = torch.full((len(hidden), 1), expert, dtype=like.dtype, device=like.device)
        found: Tensor = experts.forward(hidden, alone, weights.new_ones(len(hidden), 1))
        return found.float()

    def add(experts: nn.Module, given: tuple[Any, ...]) -> None:
        hidden, chosen, weights = given
        for expert in chosen.unique().tolist():
            token, place = torch.where(chosen == expert)
            lengths = made(experts, hidden[token], expert, chosen, weights).norm(dim=-1)
            scores[expert] += float((weights[token, place].float() * lengths).sum(dtype=torch.float64))
            counts[expert] += len(token)
        for expert in range(mixture.count) if merge else ():
            some = hidden[:: -(-len(hidden) // SAMPLE)]
            outputs[expert] = outputs[expert] + made(experts, some, expert, chosen, weights).sum(0).double().cpu()

    found = index in mixture.holders
    with torch.no_grad(), hooked([_called_experts(skeleton, index).register_forward_pre_hook(add)] if found else []):
        skeleton.advance_(index, inputs)
    return (scores / counts.clamp(min=1) if found else None), counts, torch.stack(outputs)


def _called_experts(skeleton: Skeleton, index: int) -> nn.Module:
    """Return the module of a block that is called with hidden states, experts and their weights."""
    named = skeleton.blocks[index].module.named_modules(prefix=skeleton.blocks[index].name)
    found = [module for name, module in named if isinstance(module, Experts) or name in skeleton.fused]
    if len(found) != 1 or (not hasattr(found[0], "_apply_gate") and not isinstance(found[0], Experts)):
        raise StageError(
            f"the experts of {skeleton.blocks[index].name} are not called as one with the router's choice",
            where=WHERE,
            why="Nobody can tell what each adds",
            remedy="Take remove_layers",
        )
    module: nn.Module = found[0]
    return module


def _left_of(stored: Tensor, name: str, mixture: Mixture, kept: Mapping[int, Sequence[int]]) -> Tensor:
    place = mixture.places.get(name)
    if place is None or place.index is not None:
        return stored
    return stored.index_select(place.axis, torch.tensor(kept[place.block]))


def _removed(mixture: Mixture, kept: Mapping[int, Sequence[int]]) -> list[str]:
    """Return the experts that are gone and have tensors of their own."""
    apart = {(place.block, place.experts, place.index) for place in mixture.places.values() if place.index is not None}
    return [f"{experts}.{index}" for block, experts, index in sorted(apart) if index not in kept[block]]


@contextmanager
def _alike(
    whole: Skeleton, smaller: Skeleton, index: int, kept: Mapping[int, Sequence[int]], merge: bool
) -> Iterator[None]:
    """Let a loaded block of the whole model send tokens to the experts that the same block of the
    smaller one chose, which runs first; to those of the smaller one if experts `merge`.

    Raises StageError if the smaller one left out an expert that is there and that the whole one chose.
    """
    if index not in kept:
        yield
        return
    ours, theirs = _called_experts(whole, index), _called_experts(smaller, index)
    names = torch.tensor(kept[index])
    calls: list[tuple[Tensor, Tensor]] = []
    forward = ours.forward

    def routed(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        places, shares = calls.pop()
        again = names.to(places.device)[places]
        missed = torch.isin(chosen, names.to(chosen.device)) & ~(chosen[..., None] == again[:, None]).any(-1)
        if float(missed.float().mean()) > FEW:
            raise StageError(
                "the smaller model sends tokens to other experts",
                where=f"prune_structured: {whole.blocks[index].name}",
                why="Its router does not choose from the outputs that are left as it did from all",
                remedy="Take remove_layers",
            )
        output: Tensor = theirs.forward(hidden, places, shares) if merge else forward(hidden, again, shares)
        return output

    with ExitStack() as stack:
        stack.enter_context(
            hooked([theirs.register_forward_pre_hook(lambda module, given: calls.append((given[1], given[2])))])
        )
        stack.enter_context(replaced_forward({ours: routed}))
        yield


def groups_of(outputs: Tensor, kept: Sequence[int]) -> dict[int, list[int]]:
    """Return which experts become which: that with the nearest mean output, float [experts, width]."""
    nearest = torch.cdist(outputs, outputs[list(kept)]).argmin(1).tolist()
    found = {expert: [expert] for expert in kept}
    for expert, place in enumerate(nearest):
        if expert not in found:
            found[kept[place]].append(expert)
    return found


def merged(checkpoint: Checkpoint, name: str, mixture: Mixture, groups: Groups, tokens: Tensor) -> Tensor:
    """Return a tensor of experts that stay, each weight the mean of its group's. Raises SourceError for NaN or Inf."""
    place = mixture.places[name]
    if place.index is None:
        stored = checkpoint.read_finite(name)
        return torch.stack([_mean([stored[each] for each in group], tokens[group]) for group in groups.values()])
    group, rest = groups[place.index], name.removeprefix(f"{place.experts}.{place.index}")
    return _mean([checkpoint.read_finite(f"{place.experts}.{each}{rest}") for each in group], tokens[group])


def _mean(weights: Sequence[Tensor], tokens: Tensor) -> Tensor:
    shares = (tokens.clamp(min=1) / tokens.clamp(min=1).sum()).tolist()
    total = torch.zeros_like(weights[0], dtype=torch.float32)
    for weight, share in zip(weights, shares, strict=True):
        total += share * weight.float()
    return total.to(weights[0].dtype) if len(weights) > 1 else weights[0]
