"""`optkit explain`: every name has a page that says something; unknown ones are answered with near ones."""

import re
from pathlib import Path

import pytest
from optkit_cli import explain
from optkit_cli.explain import EXIT_STATUSES, known_names, pages
from optkit_cli.main import main
from optkit_evals.meanings import MEANINGS

from optkit.errors import UsageError
from optkit.processes.signals import SIGNALS
from optkit.recipe.gates import check_gate, parse_gate
from optkit.recipe.reference import field_names
from optkit.recipe.registry import EVALS, eval_class
from optkit.scorecard import read_json
from optkit.scorecard.scorecard import EXIT_STATUS
from tests.support.command_line import spoken

RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks" / "results"


@pytest.mark.parametrize("name", sorted(set(known_names())))
def test_every_name_has_a_page_for_a_terminal(name: str) -> None:
    for page in pages(name):
        assert len(page.splitlines()) >= (1 if "(preset)" in page else 3)
        assert "](" not in page
        assert "```" not in page


def test_every_metric_has_a_meaning_and_every_meaning_a_metric() -> None:
    assert MEANINGS.keys() == {name for kind in EVALS for name in eval_class(kind).metrics}


def test_the_better_direction_is_the_one_that_is_measured() -> None:
    rows = [row.metric for path in RESULTS.rglob("sweep*/*.json") for row in read_json(path).rows]
    assert len({metric.name for metric in rows}) > 12
    assert {metric.name: MEANINGS[metric.name].better for metric in rows} == {
        metric.name: "higher" if metric.higher_is_better else "lower" for metric in rows
    }


@pytest.mark.parametrize("name", sorted(MEANINGS))
def test_the_gate_that_is_shown_is_taken(name: str) -> None:
    (page,) = [page for page in pages(name) if page.startswith(f"{name} (metric)")]
    (limit,) = re.findall(rf'`{name}: "(.*)"`', page)
    evals = [each for kind in EVALS if name in (each := eval_class(kind)).metrics]
    check_gate(parse_gate(name, limit.replace("LIMIT", "0.5")), evals)


def test_a_gate_of_a_metric_of_others_does_not_guess_which_way_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Write `>=`" not in "".join(pages("size_bytes"))
    monkeypatch.delitem(MEANINGS, "size_bytes")
    (page,) = [each for each in pages("size_bytes") if "(metric)" in each]
    assert " ".join(page.split()).endswith("Write `>=` if more of it is better.")


def test_the_example_of_the_help_is_a_message() -> None:
    (words,) = re.findall(r'optkit explain "(.*?)"', explain.command.help or "")
    assert pages(words)


def test_a_name_with_several_meanings_has_several_pages(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = spoken(capsys, "explain", "perplexity")
    assert out.startswith("perplexity (eval)\n\n")
    assert "\nperplexity (metric): perplexity; lower is better\n\nHow surprised" in out
    assert 'A gate: `perplexity: "<= 1x"`' in out
    assert "`optkit explain throughput`" in spoken(capsys, "explain", "decode_tokens_per_s")[0]


def test_a_stage_has_its_fields_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = spoken(capsys, "explain", "gptq")
    assert "    stages:\n      - gptq: {bits: 4" in out
    assert "`bits`: `2`, `3`, `4`, `5`, `6` or `8`, default `4`\n    Bits of a weight.\n" in out
    assert spoken(capsys, "explain", "sdpa")[0].startswith(
        "sdpa (preset): short for `- attention: {implementation: sdpa}`"
    )


@pytest.mark.parametrize(
    ("name", "meaning", "places", "example"),
    [
        ("group_size", "it must divide the inputs of every layer", "stages.awq, stages.gptq,", "- awq: {"),
        ("stages.0.gptq.bits", "default `4`\n    Bits of a weight.", "In stages.gptq.", "- gptq: {bits: 4"),
        ("calibration.sequence_length", "", "stages.gptq.calibration", ""),
        ("seed", "The seed of everything random", "A key of the recipe.", "    seed: VALUE"),
        (
            "mine.yaml:4:9: gptq.bits: 7 is not one of 2, 3, 4, 5, 6, 8.",
            "Bits of a weight.",
            "In stages.gptq.",
            "bits: 4",
        ),
    ],
)
def test_a_field_is_explained_by_name_path_and_message(name: str, meaning: str, places: str, example: str) -> None:
    found = [page for page in pages(name) if meaning in page and places in page and example in page]
    assert found
    assert re.search(r"\(field\)\n\n(In |A key)", found[0])


def test_every_field_has_a_page_and_is_suggested() -> None:
    assert {"group_size", "window", "teacher"} <= field_names()
    assert all("(field)" in pages(name)[0] + pages(name)[-1] for name in ("group_size", "teacher", "damping"))
    with pytest.raises(UsageError, match=r"nothing is called 'grup_size'. Did you mean 'group_size'\?"):
        pages("grup_size")


def test_errors_are_explained_by_class_and_by_words_of_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = spoken(capsys, "explain", "storeerror")
    assert out.startswith("StoreError (error): exit status 1\n\nThe store or an output directory")
    out, _ = spoken(capsys, "explain", "there", "is", "a", "file", "of", "this", "name")
    assert out == "UsageError: there is a file of this name\n\nName another, or add --force.\n"


def test_a_message_is_found_with_its_values_and_many_are_counted() -> None:
    (page,) = pages("error: mine.yaml: there is a file of this name. Name another, or add --force.")
    assert page.startswith("UsageError: there is a file of this name\n")
    (page,) = pages("org/x: the hub has no such model, or it is private.")
    assert page.startswith("SourceError: the hub has no such ‹")
    found = pages("is not")
    assert len(found) == 5
    assert re.search(r"\n\n\d+ more have these words\.$", found[-1])


def test_exit_statuses_are_those_of_the_code() -> None:
    ended = {128 + number for number in SIGNALS}
    assert {*EXIT_STATUS.values(), 1, 2, *ended} == EXIT_STATUSES.keys()
    assert pages("4")[0].startswith("4 (exit status)\n\nNo gate FAILed, and one is INCONCLUSIVE")


def test_unknown_names_are_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gptk"]) == 2
    assert "explain: nothing is called 'gptk'. Did you mean 'GPTQ'" in capsys.readouterr().err
    with pytest.raises(UsageError, match="nothing is called 'zzzzzzzz'. `optkit list stages`, or evals, has what"):
        pages("zzzzzzzz")


@pytest.mark.parametrize("name", ["dithered", "plain", "plain, dithered"])
def test_a_word_that_shares_its_line_is_found_alone(name: str) -> None:
    assert pages(name)[0].startswith("plain, dithered\n\nSmolLM2-135M of the wheel")


def test_a_word_does_not_send_to_a_page_that_a_terminal_does_not_have() -> None:
    assert pages("W4A4") == pages("W8A8")
    assert [page for page in pages("GPTQ") if page.startswith("GPTQ\n")] == [
        "GPTQ\n\nRounding weight by weight, with the rest of the row compensating."
    ]


@pytest.mark.parametrize("name", ["python-reference", "smollm2-135m", "llama_int4"])
def test_data_sets_models_and_recipes_have_pages(name: str) -> None:
    (page,) = pages(name)
    assert name in known_names()
    assert page.startswith(f"{name} (one of `optkit list ")
