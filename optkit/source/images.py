"""Prompts with images, made by the model's own processor and its chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from optkit.common.field_types import Name
from optkit.common.files import reading
from optkit.common.grouping import common_prefix
from optkit.errors import MissingPackageError, SourceError, needing
from optkit.model.config_file import read_config
from optkit.model.task import has_prefix
from optkit.source.cut_text import CutText
from optkit.source.hub_texts import FIRST_ROWS, read_hub_rows
from optkit.source.pairs import Pair, pair_of_row, read_pairs
from optkit.source.quiet import quiet_transformers
from optkit.source.text_place import TextPlace
from optkit.source.texts import KNOWN, hub_name

if TYPE_CHECKING:
    from torch import Tensor

PROCESSORS = ("processor_config.json", "preprocessor_config.json")


class ImageText(CutText):
    """A text cut into windows, or conversations about images, each a prompt of its own length."""

    images: Name | None = Field(default=None, exclude_if=lambda value: value is None)
    """Which field of a record (.jsonl, .parquet, hub) has its image or images. `field` is then a text,
    which answers the images, or a list of messages with `role` and `content`. The model's own
    processor and chat template make a prompt of each record."""

    @model_validator(mode="after")
    def _records(self) -> Self:
        if self.images is None:
            return self
        if self.dataset in KNOWN or self.dataset.endswith(".txt"):
            raise ValueError(
                f"'{self.dataset}' has no images. Name a .jsonl or .parquet file, or a hub data set as org/name."
            )
        others = {"bos": "tokenizer", "packing": "auto", "input": None}
        if found := next((name for name, usual in others.items() if getattr(self, name, usual) != usual), None):
            raise ValueError(f"with `images` the chat template makes each prompt. Leave out {found}.")
        return self

    def pairs(self, data: Path | None, most: int | None = None) -> list[Pair]:
        """Return the first records, all if `most` is None; raises SourceError for what is none.
        Of a hub data set at most 10,000 are read.
        """
        field, images = self.field, str(self.images)
        if self.is_local(data):
            self.documents(data)
            return list(islice(read_pairs(Path(self.dataset).expanduser(), field, images), most))
        take = partial(pair_of_row, text=field, images=images, where=self.where)
        repo, name = self._hub_repo(data), hub_name(self.dataset)
        pairs: list[Pair] = read_hub_rows(repo, name, self.split, self.revision, self.where, take, most or FIRST_ROWS)
        return pairs

    def prompts_of(
        self, directory: Path, data: Path | None, trusted: bool, count: int | None, limit: tuple[str, int]
    ) -> Prompts:
        """Return `count` prompts, all if it is None, for the model in a directory.
        `limit`: the field that says how many tokens one may have, and its number.

        Raises SourceError if there are too few, without a processor, or if its template has no
        place for images; MissingPackageError.
        """
        pairs = self._enough(data, count)
        prompts = Prompts(tuple(pairs), load_processor(directory, trusted), directory, *limit)
        prompts.check_template()
        return prompts

    def check_images(self, place: TextPlace, count: int | None, limit: tuple[str, int]) -> None:
        """Refuse what `prompts_of` refuses, images that cannot be read and prompts that are too long.
        Without transformers (`place`) the images alone are read.
        """
        if not self.is_local(place.data):
            return
        if place.transformers:
            self.prompts_of(place.tokenizer, place.data, place.trust_remote_code, count, limit).check()
            return
        check_processor(place.tokenizer)
        for pair in self._enough(place.data, count):
            for picture in pair.pictures:
                picture.decoded()

    def _enough(self, data: Path | None, count: int | None) -> list[Pair]:
        pairs = self.pairs(data, count)
        if count and len(pairs) < count:
            what = f"there are {len(pairs):,} records, and {count:,} are needed"
            raise SourceError(what, where=self.where, remedy="Ask for fewer, or name a larger data set")
        return pairs

    def _read(self, data: Path | None) -> list[str]:
        if self.images is None:
            return super()._read(data)
        return [pair.content for pair in read_pairs(Path(self.dataset).expanduser(), self.field, self.images)]


@dataclass(frozen=True)
class Prompts:
    """Prompts of different lengths, each made when it is asked for: pixels need much memory."""

    pairs: Sequence[Pair]
    processor: Any
    directory: Path
    """Of the model."""
    field: str
    """What says how many tokens a prompt may have."""
    longest: int

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.pairs)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield what the model is called with, a batch of one: token ids, pixels, sizes of grids."""
        return map(self.inputs, self.pairs)

    def __getitem__(self, rows: slice | Sequence[int]) -> Prompts:
        """Return some of them."""
        return replace(self, pairs=self.pairs[rows] if isinstance(rows, slice) else [self.pairs[row] for row in rows])

    def inputs(self, pair: Pair) -> dict[str, Tensor]:
        """Return what the model is called with for a pair.
        Raises SourceError for an image that cannot be read, a prompt that the processor does not
        make, and one that is too long.
        """
        made = self._made(pair, pair.messages)
        self._refuse(pair, made["input_ids"].shape[1])
        return made

    def answer(self, pair: Pair, inputs: Mapping[str, Tensor]) -> int:
        """Return the place of the first token of the last message's text. The prompt of what stands
        before it, as the model is asked, ends there.

        Raises SourceError if that is not the assistant's, or empty.
        """
        *asked, last = pair.messages
        if last["role"] != "assistant" or not asked:
            raise SourceError(
                f"the last message is that of the role '{last['role']}'",
                where=pair.where,
                why="The answer is what is measured",
                remedy="End the messages with one of the role `assistant`",
            )
        ids = inputs["input_ids"][0].tolist()
        before = self._made(pair, asked, add_generation_prompt=True)["input_ids"][0].tolist()
        first = common_prefix(ids, before)
        if not 0 < first < len(ids):
            raise SourceError("the last message has no tokens", where=pair.where)
        return first

    def check(self) -> None:
        """Make all of them; raises what `inputs` raises, for the longest of those that are too long."""
        lengths = [self._made(pair, pair.messages)["input_ids"].shape[1] for pair in self.pairs]
        index = max(range(len(lengths)), key=lengths.__getitem__)
        self._refuse(self.pairs[index], lengths[index])

    def check_template(self) -> None:
        """Raise SourceError if the chat template is missing or writes nothing for an image.
        A processor of prefixes and suffixes needs none.
        """
        if self._prefixes:
            return
        where, remedy = str(self.directory), "Copy chat_template.jinja from the model's source"
        if not self._template:
            raise SourceError("the processor has no chat template", where=where, remedy=remedy)
        pair = next((each for each in self.pairs if each.pictures), None)
        if pair is None:
            return
        without = [{**each, "content": [part for part in each["content"] if "text" in part]} for each in pair.messages]
        with self._reading(pair):
            same = self._applied(pair.messages) == self._applied(without)
        if same:
            raise SourceError("the chat template has no place for an image", where=where, remedy=remedy)

    @property
    def _template(self) -> Any:
        return self.processor.chat_template or self.processor.tokenizer.chat_template

    def _applied(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        given = None if self.processor.chat_template else self._template
        copies = [{**each, "content": list(each["content"])} for each in messages]
        return self.processor.apply_chat_template(copies, chat_template=given, **options)

    def _made(self, pair: Pair, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Tensor]:
        decoded = iter([picture.decoded() for picture in pair.pictures])

        def filled(part: Mapping[str, Any]) -> Mapping[str, Any]:
            return part if "text" in part else {**part, "image": next(decoded)}

        messages = [{**each, "content": [filled(part) for part in each["content"]]} for each in messages]
        if self._prefixes:
            return self._prefixed(pair, messages)
        with self._reading(pair):
            return dict(self._applied(messages, tokenize=True, return_dict=True, return_tensors="pt", **options))

    @cached_property
    def _prefixes(self) -> bool:
        return has_prefix(read_config(self.directory / "config.json"))

    def _prefixed(self, pair: Pair, messages: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return a question as the prefix, which the model sees whole, and its answer as the suffix."""
        asked, *answers = messages
        if len(answers) > 1 or asked["role"] != "user" or any(each["role"] != "assistant" for each in answers):
            what = f"its messages are those of {', '.join(each['role'] for each in messages)}"
            why = "A prompt of this model is a question, which it sees whole, and an answer"
            raise SourceError(what, where=pair.where, why=why, remedy="Keep one of `user` and one of `assistant`")
        pictures = [part["image"] for part in asked["content"] if "image" in part]
        ends = {"suffix": _said(answers[0])} if answers else {}
        with self._reading(pair):
            text = self.processor.image_token * len(pictures) + _said(asked)
            made = dict(self.processor(images=pictures, text=text, return_tensors="pt", **ends))
        return {name: value for name, value in made.items() if name != "labels"}

    def _refuse(self, pair: Pair, length: int) -> None:
        if length > self.longest:
            raise SourceError(
                f"the prompt and its {len(pair.pictures)} images are {length:,} tokens, more than the {self.longest:,}"
                f" of `{self.field}`",
                where=pair.where,
                remedy=f"Set {self.field} to at least {length}, or take the record out",
            )

    def _reading(self, pair: Pair) -> Any:
        return reading(pair.where, "the model's processor makes no prompt of it", "Look at its messages and images")


def _said(message: Mapping[str, Any]) -> str:
    return "\n".join(part["text"] for part in message["content"] if "text" in part)


def check_processor(directory: Path) -> None:
    """Raise SourceError if a model directory has no processor, MissingPackageError without Pillow."""
    if not any((directory / name).is_file() for name in PROCESSORS):
        raise SourceError(
            "there is no processor of images",
            where=str(directory),
            why=f"Neither {' nor '.join(PROCESSORS)} is there",
            remedy="Copy them from the model's source, or leave out `images`",
        )
    with needing("pillow", str(directory), "optkit[vision]"):
        import PIL  # noqa: F401


def load_processor(directory: Path, trust_remote_code: bool = False) -> Any:
    """Return the processor of a model directory; raises as `check_processor` does, MissingPackageError
    for another package that it needs, SourceError for one that takes no images.
    """
    check_processor(directory)
    with quiet_transformers():
        from transformers import AutoProcessor

        remedy = "Copy its files from the model's source again"
        with reading(directory, "the processor cannot be loaded", remedy):
            try:
                found = AutoProcessor.from_pretrained(
                    directory, local_files_only=True, trust_remote_code=trust_remote_code
                )
            except ImportError as error:
                missing = next((name for name in ("torchvision", "num2words") if name in str(error).lower()), None)
                if missing is None:
                    raise
                raise MissingPackageError(missing, where=f"{directory}: the processor of images") from error
    if not hasattr(found, "image_processor"):
        raise SourceError("the processor takes no images", where=str(directory), remedy="Leave out `images`")
    return found
