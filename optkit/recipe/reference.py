"""The site's pages about recipes, written from the classes themselves."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from optkit.common.markdown import markdown_table
from optkit.measure import Eval
from optkit.recipe.entries import class_of, names_of
from optkit.recipe.files import shipped_recipes
from optkit.recipe.recipe import Recipe
from optkit.recipe.registry import PRESETS
from optkit.recipe.yaml_places import read_yaml
from optkit.source.models import ModelSource, known_models
from optkit.source.texts import known_texts
from optkit.stage import Transform

OPENING = """\
# Recipes

A recipe is a YAML file. It has a model, the stages that change it, the evals that measure it, and
the gates that judge the result.
`optkit validate FILE` finds every mistake at once, with line and column.
`optkit schema` prints a JSON Schema for editors.

```yaml
{example}```

- A stage or eval is written `name: {{field: value}}`, or as the bare name if every field keeps its
  default.
- `--model NAME` replaces the model, `--set PATH=VALUE` any other value. For example
  `--set stages.0.gptq.group_size=32`.
- Numbers like `1e-5` are numbers, `yes` and `no` are text (write `true` and `false`), anchors and
  merge keys work.
  A key given twice is refused, and so is a text that is calibrated on and measured on.
"""

GATES = """\
Metric, then an operator (`<=`, `>=`, `<`, `>`) and a number.
A number that ends in `x` is relative to the unmodified model, or to the model named behind it.

```yaml
gates:
  perplexity: "<= 1.10x"                      # at most 1.10 times the unmodified model's
  size_bytes: "<= 300e6"                      # at most 300 MB
  decode_tokens_per_s[batch=1]: ">= 1.2x"     # only the rows measured at batch 1
  prefill_tokens_per_s: ">= 1x same engine"   # of the same weights in the artifact's engine
  kl_divergence: "<= 1.01x of previous"       # at most 1.01 times that of an earlier release
```

`previous` is the release that `--against ARTIFACT` names: a directory or a scorecard.json.
Its numbers are those that its scorecard holds; those of accuracy are paired on the same windows.
Both must have been measured by the same protocol (for timings: on the same device, with the same
torch), or the gate FAILs and says in what they differ.
Before the first release `--against none` makes such gates SKIPPED; without `--against` a recipe
that has them is refused.

A gate is PASS, FAIL or, if the 95% interval of the measurement straddles the limit, INCONCLUSIVE.
`optkit run` then ends with exit status 0, 3 or 4.
"""

MATRIX = """\
A recipe with a `matrix:` is many recipes: one for each combination of the values of its axes.
`optkit sweep` makes them all.

```yaml
matrix:
  stages.0: [rtn, {gptq: {calibration: {dataset: python-reference, samples: 16}}}]   # whole stages
  stages.0.*.bits: [3, 4]                      # a field of whichever stage stands there
  exclude: [{stages.0: rtn, stages.0.*.bits: 3}]
  include: [{stages.0: nf4}]                   # further combinations
```

- A path is one of `--set`. Whole stages are set before their fields.
- A combination is named after its values, e.g. `gptq-bits4`: its artifact lies in
  `artifacts/NAME/gptq-bits4`.
- `exclude` takes parts of combinations; a stage may be given by the word that stands in names.
- `--set PATH=VALUE,VALUE` is an axis too, of any recipe, and takes the place of one with the same
  path. Commas in quotes, lists and mappings belong to the value.
- More than 500 combinations are not all made: `--trials 40` makes some.
- An axis that changes nothing, a value given twice and an `exclude` that meets nothing are errors.
"""


def recipes_page() -> str:
    """Return the page about recipes."""
    example = shipped_recipes()["llama_int4"].read_text(encoding="utf-8")
    about = {name: _flat(field.description or "") for name, field in Recipe.model_fields.items()}
    sections = [
        OPENING.format(example=example[example.index("description:") :]),
        "## Top-level keys\n",
        _table(("key", "meaning"), ((f"`{name}`", text) for name, text in about.items())),
        "## `model`\n",
        f"{_prose(ModelSource)}\n",
        _fields(ModelSource),
        _table(("built-in model", "what it is"), ((f"`{name}`", line) for name, line in known_models().items())),
        "## Stages\n",
        "A transform changes the weights; a setting changes none and is applied each time "
        "that the artifact is opened.\n",
        *(_entry("stage", kind) for kind in names_of("stage")),
        "### Presets\n",
        _table(
            ("bare name", "stands for"),
            ((f"`- {name}`", f"`- {_yaml(entry)}`") for name, entry in sorted(PRESETS.items())),
        ),
        "## Evals\n",
        *(_entry("eval", kind) for kind in names_of("eval")),
        "## Texts\n",
        "What `dataset` can name, besides a .txt or .jsonl file and a hub data set:\n",
        _table(("dataset", "what it is"), ((f"`{name}`", line) for name, line in known_texts().items())),
        *(f"### `{model.__name__}`\n\n{_prose(model)}\n\n{_fields(model)}" for model in _inner_models()),
        "## `gates`\n",
        GATES,
        "## `matrix`\n",
        MATRIX,
        "## Recipes that come with optkit\n",
        _table(
            ("name", "what it does"),
            ((f"`{name}`", _description(path.read_text(encoding="utf-8"))) for name, path in shipped_recipes().items()),
        ),
    ]
    return "\n".join(sections).rstrip() + "\n"


def _description(text: str) -> str:
    return str(read_yaml(text, "").data["description"])


def _entry(role: str, kind: str) -> str:
    model = class_of(role, kind)
    notes = [_prose(model)]
    if issubclass(model, Eval):
        notes.append(f"Metrics: {', '.join(f'`{metric}`' for metric in model.metrics)}.")
        notes += ["Compares the artifact with the unmodified model."] if model.compares else []
        notes += ["Measures the unmodified model alone."] if model.of_unmodified else []
        notes += ["Timed for both models in the same run."] if model.timed else []
    else:
        notes.append(_kind_of_stage(model))
    if shorthand := getattr(model, "shorthand", None):
        notes.append(f"`- {kind}: VALUE` is short for `- {kind}: {{{shorthand}: VALUE}}`.")
    if model.requires:
        notes.append(f"Needs: {', '.join(f'`{need}`' for need in model.requires)}.")
    return f"### `{kind}`\n\n" + "\n\n".join(notes) + f"\n\n{_fields(model)}"


def _kind_of_stage(model: type[BaseModel]) -> str:
    if not issubclass(model, Transform):
        return "A setting."
    others = {given: left for given in sorted(model.accepts) if (left := model.leaves(given)) is not model.produces}
    return (
        "A transform: leaves the format "
        f"`{model.produces}`{''.join(f', of `{given}` `{left}`' for given, left in others.items())}."
    )


def _fields(model: type[BaseModel]) -> str:
    if not model.model_fields:
        return "It has no fields.\n"
    rows = (
        (f"`{name}`", _type(field.annotation, field.metadata), _default(field), _flat(field.description or ""))
        for name, field in model.model_fields.items()
    )
    return _table(("field", "type", "default", "meaning"), rows)


def _inner_models() -> list[type[BaseModel]]:
    """Return the classes that fields of stages and evals hold, each once, by name."""
    found: dict[str, type[BaseModel]] = {}
    waiting = [class_of(role, kind) for role in ("stage", "eval") for kind in names_of(role)]
    while waiting:
        for field in waiting.pop().model_fields.values():
            for inner in _models_in(field.annotation):
                if inner.__name__ not in found:
                    found[inner.__name__] = inner
                    waiting.append(inner)
    return [found[name] for name in sorted(found)]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _type(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Return a type as the reader of a YAML file would say it."""
    bounds = [bound for part in metadata for bound in (part.metadata if isinstance(part, FieldInfo) else (part,))]
    said = ((sign, getattr(bound, name)) for bound in bounds for name, sign in _LIMITS.items() if hasattr(bound, name))
    limits = "".join(f" {sign} {_number(value)}" for sign, value in said)
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *limiting = get_args(annotation)
        return _type(inner, [*limiting, *metadata])
    if origin is Literal:
        return ", ".join(f"`{_yaml(choice)}`" for choice in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part, metadata if part in (int, float) else ()) for part in get_args(annotation))
    if origin in (tuple, list, frozenset):
        return f"list of {_type(get_args(annotation)[0])}"
    if origin in (dict, Mapping):
        key, value = get_args(annotation)
        return f"mapping of {_type(key)} to {_type(value)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"mapping, see [`{annotation.__name__}`](#{annotation.__name__.lower()})"
    return _NAMES.get(annotation, str(getattr(annotation, "__name__", annotation))) + limits


def _number(bound: float) -> str:
    return f"{bound:,.0f}" if bound == round(bound) else f"{bound:g}"


_LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "" if value is PydanticUndefined else f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    """Return a value as YAML in one line."""
    if isinstance(value, BaseModel):
        return _yaml(value.model_dump(mode="json", exclude_unset=True))
    if isinstance(value, Mapping):
        text = ", ".join(f"{key}: {_yaml(part)}" for key, part in value.items())
        return f"{{{text}}}" if len(value) != 1 or not isinstance(next(iter(value.values())), Mapping) else text
    if isinstance(value, list | tuple | frozenset):
        return f"[{', '.join(_yaml(part) for part in value)}]"
    plain = (
        isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w ./-]*", value) and value not in ("true", "false", "null")
    )
    return str(value) if plain else json.dumps(value)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return f"{markdown_table(head, rows)}\n"


def _prose(model: type[BaseModel]) -> str:
    return inspect.cleandoc(model.__doc__ or "")


def _flat(text: str) -> str:
    return " ".join(text.split())
