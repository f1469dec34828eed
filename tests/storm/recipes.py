"""Recipes and overrides that are wrong: each is refused by `validate`, or by `plan` if a model
or a machine is needed to see it.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

from tests.storm.desk import RECIPE, Desk, clear, drawn
from tests.storm.forked import call, call_apart

Case = tuple[str, bytes, tuple[str, ...]]
"""What is wrong, the recipe's bytes, and overrides."""
CASES = 800
"""Of twice as many that there are."""
APART = 20
"""Of so many cases one is a process of its own."""
WRONG = {"a mapping": {"zzz": 1}, "lists": [[["zzz"]]]}
WRONG_NUMBERS = {
    "text": "many",
    "nan": "NAN",
    "infinite": "INF",
    "negative": -(10**30),
    "huge": 10**30,
    "a truth": "TRUE",
}
ENCODINGS = ("utf-16", "utf-32", "utf-7")
HEAD = "model: model\n"


def recipes(desk: Desk, count: int | None) -> None:
    """Validate wrong recipes, then plan those that were accepted; a plan that accepts one too has
    failed.
    """
    cases = drawn(
        [*_by_field(), *_by_entry(), *_by_text(desk), *_by_gate(), *_by_override()],
        CASES if count is None else count,
        desk.draw,
    )
    place = desk.place("recipes")
    for index, (name, text, overrides) in enumerate(cases):
        (place / "r.yaml").write_bytes(text)
        words = [word for each in overrides for word in ("--set", each)]
        run = call_apart if index % APART == 0 else call
        ended = run(["validate", "r.yaml", *words], place)
        if ended.status == 0:
            ended = call(["plan", "r.yaml", "--store", "store", "--device", "cpu", *words], place)
        flaws = ended.flaws
        if ended.status == 0:
            flaws = [*flaws, "it is accepted"]
        elif not flaws and not ended.err.startswith(("error: ", "Usage: ")):
            flaws = [*flaws, f"it is refused without a message: {ended.err[:80]!r}"]
        desk.judge(f"recipe, {name}", flaws, ended)
    clear(place)


def _text(recipe: dict[str, Any]) -> bytes:
    said = json.dumps(recipe)
    for word, yaml in {'"NAN"': ".nan", '"INF"': ".inf", '"TRUE"': "true"}.items():
        said = said.replace(word, yaml)
    return said.encode()


def _by_field() -> Iterator[Case]:
    """Yield for every field of every stage and eval values that it cannot have."""
    from optkit.recipe.registry import EVALS, STAGES, eval_class, stage_class

    for group, kinds, found in (("stages", STAGES, stage_class), ("evals", EVALS, eval_class)):
        for kind in kinds:
            for name, about in found(kind).model_fields.items():
                numeric = _is_number(about.annotation)
                for what, value in {**WRONG, **(WRONG_NUMBERS if numeric else {})}.items():
                    if what == "huge" and name in MAY_BE_HUGE:
                        continue
                    fields = {**NEEDED.get(kind, {}), name: value}
                    yield f"{kind}.{name} is {what}", _text({**RECIPE, group: [{kind: fields}]}), ()


NEEDED: dict[str, dict[str, Any]] = {}
MAY_BE_HUGE = frozenset(
    {"seed", "limit_s", "threshold", "first_token_limit_s", "inter_token_limit_s", "window", "prompt_lookup"}
)


OVERRIDES = """
stages.9.rtn.bits=4
stages.-1.rtn.bits=4
stages.1.gptq.bits=4
stages.1.rtn.bits=7
stages.1.rtn.bits=
stages.1.rtn.bits=[
stages.1.rtn.nobody=1
stages.1.rtn=4
stages.x.rtn=4
stages=4
nobody=1
evals.0=
.=1
=1
..=1
stages.=1
seed=x
seed=-1
seed=1e999
model=
model=[a]
name=[
name={a: 1}
gates.perplexity=5
gates.nobody=<= 5
stages.1.rtn.bits=!!python/object/apply:os.getcwd []
stages.1.rtn.group_size=10000000000000000000000000
stages.0.bf16.dtype=x
evals.1.perplexity.window=1
evals.1.perplexity.windows=0
evals.1.perplexity.dataset=none.txt
evals.1.perplexity.split=none
evals.1.perplexity.window=99999999
evals.1.perplexity.windows=100000000
""".strip().splitlines()


def _is_number(annotation: Any) -> bool:
    parts = typing.get_args(annotation) or (annotation,)
    return all(part in (int, float, type(None)) for part in parts)


def _by_entry() -> Iterator[Case]:
    """Yield entries that are none."""
    from optkit.recipe.registry import EVALS, STAGES

    for group, kinds in (("stages", STAGES), ("evals", EVALS)):
        for kind in kinds:
            yield f"{kind} misspelled", _text({**RECIPE, group: [f"{kind}x"]}), ()
            yield f"{kind} with a field of nobody", _text({**RECIPE, group: [{kind: {"nobody": 1}}]}), ()
            yield f"{kind} with a number for its fields", _text({**RECIPE, group: [{kind: 5}]}), ()
            yield f"{kind} twice in one entry", _text({**RECIPE, group: [{kind: None, "nobody": None}]}), ()
            yield f"{kind} in the wrong list", _text({**RECIPE, "evals" if group == "stages" else "stages": [kind]}), ()
    for name in RECIPE:
        for what, value in {**WRONG, "a number": 5.5, "a truth": True}.items():
            yield f"{name} is {what}", _text({**RECIPE, name: value}), ()
    for name in ("model", "stages"):
        yield f"no {name}", _text({key: value for key, value in RECIPE.items() if key != name and key != "evals"}), ()
    for name in (
        "nowhere",
        "../..",
        "/dev/null",
        "a" * 5000,
        "model\0",
        "\x1b[31mred",
        "x/y/z",
        "C:\\model",
        " ",
        "~/none",
        "file://model",
    ):
        yield f"model {name[:20]!r}", _text({**RECIPE, "model": name}), ()
    for seed in (-1, 1.5, "1", 10**40, None, [1]):
        yield f"seed {str(seed)[:10]}", _text({**RECIPE, "seed": seed}), ()


def _by_text(desk: Desk) -> Iterator[Case]:
    """Yield what is no YAML, or YAML that would run code."""
    call_code = f"open({str(desk.canary('yaml'))!r}, 'w')"
    for tag in ("python/object/apply:os.system", "python/object/new:subprocess.Popen", "python/name:os.system",
                "python/module:os",
                "python/object/apply:builtins.eval", "python/tuple", "binary", "omap", "custom"):  # fmt: skip
        yield f"tag {tag}", f"{HEAD}stages: [!!{tag} [{call_code!r}]]\n".encode(), ()
        yield f"tag {tag} of a key", f"? !!{tag} [x]\n: 1\n{HEAD}".encode(), ()
    laughs = [f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    texts = {
        "empty": "",
        "a comment": "# x",
        "null": "null",
        "a list": "- a\n- b\n",
        "a word": "recipe",
        "a number": "5",
        "two documents": f"{HEAD}---\n{HEAD}",
        "a tab": "model:\tmodel\n\tstages: []\n",
        "unclosed list": f"{HEAD}stages: [bf16\n",
        "unclosed mapping": f"{HEAD}stages: [{{rtn: \n",
        "unclosed quote": 'model: "model\n',
        "no such anchor": f"{HEAD}stages: *none\n",
        "an endless anchor": f"{HEAD}stages: &a [*a]\n",
        "a key twice": f"{HEAD}{HEAD}stages: [bf16]\n",
        "a field twice": f"{HEAD}stages: [{{rtn: {{bits: 4, bits: 8}}}}]\n",
        "a merge": f"a: &a {{model: x}}\n<<: *a\n{HEAD}",
        "a list for a key": "[a]: b\n",
        "indentation": " model: x\nstages: []\n",
        "a bell": "model: mod\x07el\n",
        "a directive": "%FOO bar\n---\n",
        "deep": f"{HEAD}stages: {'[' * 20_000}",
        "deep mappings": "a: {" * 5_000,
        "a million laughs": f"a: &a [x,x,x,x,x,x,x,x,x]\n{''.join(laughs)}",
        "digits": f"seed: {'9' * 5000}\n{HEAD}stages: [bf16]\n",
        "a long name": f"name: {'n' * 300}\n{HEAD}stages: [bf16]\n",
        "a path for a name": f"name: ../../x\n{HEAD}stages: [bf16]\n",
        "a long key": f"{'k' * 10_000}: 1\n{HEAD}",
    }
    for name, text in texts.items():
        yield f"text, {name}", text.encode(), ()
    for encoding in ENCODINGS:
        yield f"text in {encoding}", _text(RECIPE).decode().replace("model", "modèle").encode(encoding), ()
    good = _text(RECIPE)
    for index in range(20):
        yield f"cut off {index}", good[: desk.draw.randrange(1, len(good) - 1)], ()
        yield f"zeros {index}", _overwritten(good, desk.draw.randrange(len(good)), b"\0"), ()
        yield f"no text {index}", _overwritten(good, desk.draw.randrange(len(good)), b"\xff"), ()


def _overwritten(text: bytes, place: int, by: bytes) -> bytes:
    return text[:place] + by + text[place + 1 :]


def _by_gate() -> Iterator[Case]:
    """Yield gates that nothing can meet, or that say nothing."""
    limits = [
        "",
        "5",
        "<=",
        "<= ",
        "<= many",
        "=< 3",
        "<= 1 2",
        "<= 1e999",
        "<= .nan",
        "<= -5",
        "<= 0x",
        ">= infx",
        "<= 1xx",
        "<< 1",
        "5 <=",
        "<= 5 %",
    ]
    for limit in limits:
        yield f"gate {limit!r}", _text({**RECIPE, "gates": {"perplexity": limit}}), ()
    for key in (
        "",
        "perplexty",
        "perplexity[",
        "perplexity[batch=1]",
        "perplexity[]",
        "perplexity[=]",
        "[perplexity]",
        "perplexity[batch]",
    ):
        yield f"gate of {key!r}", _text({**RECIPE, "gates": {key: "<= 5"}}), ()
    for value in (5, None, ["<= 5"], {"max": 5}, True):
        yield f"gate {value!r}", _text({**RECIPE, "gates": {"perplexity": value}}), ()


def _by_override() -> Iterator[Case]:
    """Yield overrides of what is not there, or by what cannot be."""
    good = _text(RECIPE)
    for each in OVERRIDES:
        yield f"override {each}", good, (each,)
    yield "two overrides of which one is wrong", good, ("seed=1", "seed=x")
