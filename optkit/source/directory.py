"""A model directory as a source: what its config says it is, and the digest of what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from optkit.common.frozen import digest
from optkit.errors import SourceError
from optkit.model.checkpoint import Checkpoint
from optkit.model.companions import files_beside, find_companions
from optkit.model.config_file import check_against_tensors, read_config
from optkit.model.formats.base import Format
from optkit.model.task import (
    CALLED_OTHERWISE,
    CAUSAL,
    ENCODERS,
    HEADS,
    MULTI_MODAL,
    TOWERS,
    Task,
    is_built_in,
    is_multi_modal,
    sees_ahead,
    task_of,
)
from optkit.model.ties import broken_tie
from optkit.progress import Progress
from optkit.source.digests import PREFIX, FileDigests
from optkit.source.foreign_code import classes_in, kernels_in

START = 1 << 20
"""Bytes of a tensor that tell it from another one: plans read no weights."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")


def check_config(config: Mapping[str, Any], where: str, trust_remote_code: bool) -> None:
    """Raise SourceError unless a config.json is of a model for one of optkit's tasks, or of one that nobody
    knows: some stages need its names and shapes alone.
    """
    if task_of(config) is Task.UNKNOWN:
        return
    architectures = config.get("architectures") or []
    if not architectures:
        raise SourceError(
            "there are no `architectures` in config.json",
            where=where,
            why="What the weights are is not known without them",
            remedy='Add, for example, "architectures": ["LlamaForCausalLM"]',
        )
    if task_of(config) is None:
        encoder = config.get("model_type") in ENCODERS
        of_encoders = f"Those of encoders end in Model, {', '.join(HEADS[:-1])} or {HEADS[-1]}"
        of_others = (
            f"Their architectures end in {' or '.join(CAUSAL)}, or in {MULTI_MODAL} with a {' or '.join(TOWERS)} "
            "in front of the decoder, and encoders are BERT and its kin"
        )
        of_itself = "It gives no logits of tokens alone, nor of sounds as Whisper hears them"
        raise SourceError(
            f"unsupported architecture {', '.join(map(str, architectures))}: optkit optimizes causal language "
            "models, encoders of text and encoder-decoders",
            where=where,
            why=of_encoders if encoder else of_itself if config.get("model_type") in CALLED_OTHERWISE else of_others,
            remedy=f"Take the {'feature-extraction' if encoder else 'text-generation'} checkpoint of "
            "the model, if there is one",
        )
    if task_of(config) is Task.GENERATION and sees_ahead(config):
        raise SourceError(
            f"in {', '.join(map(str, architectures))} each token of a prompt sees those behind it",
            where=where,
            why="optkit calibrates and measures with texts whose next token is not seen yet",
            remedy="Take a model with causal attention, e.g. Gemma 3",
        )
    if trust_remote_code:
        return
    remedy = (
        "Read that code, then set `trust_remote_code: true` and `revision:` in the recipe's `model:`, "
        "or give --trust-remote-code"
    )
    if kernels := kernels_in(config):
        raise SourceError(
            f"its config.json has the kernel {kernels[0]} of the hub loaded for attention",
            where=where,
            why="A kernel is code, and code of others is not run unasked",
            remedy=remedy,
        )
    if "auto_map" in config and not is_built_in(str(config.get("model_type", ""))):
        raise SourceError(
            f"the model comes with code of its own ({', '.join(classes_in(config))})",
            where=where,
            why="transformers has "
            "no model type '" + str(config.get("model_type", "")) + "', and code of others is not run unasked",
            remedy=remedy,
        )


def check_directory(directory: Path, trust_remote_code: bool) -> tuple[Path, ...]:
    """Return the files that hold its weights; raises SourceError if incomplete, damaged or of another kind."""
    found = Format.of(directory)
    if found.is_checkpoint:
        if not (directory / "config.json").is_file() and (files := sorted(directory.glob("*.gguf"))):
            raise SourceError(
                f"there is no config.json but {len(files)} GGUF file{'s' if len(files) > 1 else ''}",
                where=str(directory),
                remedy=f"Name the file: {files[0]}",
            )
        checkpoint = Checkpoint(directory)
        shape = checkpoint.shape
        check_config(shape.config, str(directory), trust_remote_code)
        check_against_tensors(shape.config, {name: info.shape for name, info in shape.tensors.items()}, str(directory))
        if wrong := broken_tie(checkpoint, START):
            raise SourceError(
                wrong,
                where=str(directory),
                why="transformers computes with both, and other programs with one of them",
                remedy="Set tie_word_embeddings to false in config.json, or take the first tensor out of the file",
            )
    return found.check(directory)


def directory_revision(
    root: Path, weights: Iterable[Path], digests: FileDigests, progress: Progress | None = None
) -> str:
    """Return `sha256:...` over the names and contents of the weights and of every file beside them.

    Hidden files, weights in other formats and what optkit itself leaves beside an artifact are not
    looked at.
    """
    files = files_beside(root) | {path.relative_to(root).as_posix(): path for path in weights}
    names = sorted(files)
    found = digests.of_all([files[name] for name in names], progress)
    return PREFIX + digest(dict(zip(names, found, strict=True)))


def left_out(directory: Path, trust_remote_code: bool) -> str:
    """Return a sentence on the files that no artifact gets; empty if it gets all."""
    return find_companions(directory, trust_remote_code).said()


def without_processor(directory: Path) -> str:
    """Return a sentence if the model sees or hears and nothing beside it prepares that for it."""
    config = directory / "config.json"
    if not config.is_file() or not is_multi_modal(read_config(config)) or any(directory.glob("*processor*.json")):
        return ""
    return (
        "there is no processor beside the model (preprocessor_config.json): programs read no images or "
        "audio with the artifact until it is copied there"
    )
