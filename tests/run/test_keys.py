"""Keys must never change by accident: everything that was ever stored is found by them."""

import hashlib
from typing import Any, ClassVar

import pytest

from optkit.environment import ARCHITECTURE, EXACT, describe_environment
from optkit.errors import UsageError
from optkit.keys import Together, make_artifact_key, make_metric_key, make_step_key, settings_identity
from optkit.measure import Eval
from optkit.recipe.recipe import EvalEntry, SettingEntry, TransformEntry
from optkit.stage import Setting, Transform

MODEL = "0" * 64


class Halve(Transform):
    """Makes weights half."""

    by: int = 2
    rate: float = 1e-5
    names: tuple[str, ...] = ("ä",)


class Newer(Halve):
    """The same fields with another effect."""

    version: ClassVar[int] = 2


class Tone(Setting):
    """Sets a tone."""

    key: str = "major"


class Score(Eval):
    """Scores."""

    window: int = 16


class Counts(Score):
    """Scores without drawing anything."""

    draws: ClassVar[bool] = False


def step_key(stage: Transform, kind: str = "halve", source: str = MODEL, seed: int = 0) -> str:
    return make_step_key(TransformEntry(kind=kind, value=stage), source, seed)


def settings(*keys: str) -> list[dict[str, Any]]:
    return settings_identity([SettingEntry(kind="tone", value=Tone(key=key)) for key in keys])


def metric_key(
    window: int = 16, seed: int = 0, weights: str = MODEL, *, tones: tuple[str, ...] = (), **circumstances: str
) -> str:
    return make_metric_key(
        EvalEntry(kind="score", value=Score(window=window)), seed, weights, settings(*tones), circumstances
    )


STEP = (
    '{"fields":{"by":2,"names":["ä"],"rate":1e-05},"kind":"halve","schema":1,"seed":0,'
    '"source":"0000000000000000000000000000000000000000000000000000000000000000","version":1}'
)
ARTIFACT = (
    '{"schema":1,"settings":[{"fields":{"key":"major"},"kind":"tone","version":1}],'
    '"weights":"0000000000000000000000000000000000000000000000000000000000000000"}'
)
METRIC = (
    '{"beside":"1111111111111111111111111111111111111111111111111111111111111111","eval":"score","fields":{"window":16},"schema":1,"seed":0,'
    '"settings":[{"fields":{"key":"major"},"kind":"tone","version":1}],"version":1,'
    '"weights":"0000000000000000000000000000000000000000000000000000000000000000"}'
)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_the_golden_keys() -> None:
    assert step_key(Halve()) == sha256(STEP)
    assert sha256(STEP) == "545ef0fa0aa3eeeb7d05d157c84efaba1e0ec235f5d50f409bf6f26284d36741"
    assert (
        make_artifact_key(MODEL, settings("major"))
        == sha256(ARTIFACT)
        == "c404bb2ded763d4885723ca665393a63d27a4a9e576b84abaf98a9e48dbabab6"
    )
    assert (
        metric_key(tones=("major",), beside="1" * 64)
        == sha256(METRIC)
        == "5a94ef279f3a87bb0d5d3eeb7efdb72a4b11629f4f927f9f45fdb9f643f8da60"
    )


def test_a_step_key_depends_on_all_that_decides_the_weights() -> None:
    keys = [
        step_key(Halve()),
        step_key(Halve(by=3)),
        step_key(Halve(rate=1e-4)),
        step_key(Halve(names=("a",))),
        step_key(Newer()),
        step_key(Halve(), kind="other"),
        step_key(Halve(), source="1" * 64),
        step_key(Halve(), seed=1),
    ]
    assert len(set(keys)) == len(keys)


def test_a_default_written_out_is_the_same_step() -> None:
    assert step_key(Halve()) == step_key(Halve(by=2, rate=0.00001, names=("ä",)))


def test_an_artifact_key_depends_on_the_settings_and_their_order() -> None:
    combinations: list[tuple[str, ...]] = [(), ("major",), ("minor",), ("major", "minor"), ("minor", "major")]
    keys = {make_artifact_key(MODEL, settings(*tones)) for tones in combinations}
    assert len(keys) == len(combinations)
    assert MODEL not in keys


def test_a_metric_key_depends_on_all_that_decides_the_number() -> None:
    keys = [
        metric_key(),
        metric_key(window=32),
        metric_key(seed=1),
        metric_key(weights="1" * 64),
        metric_key(tones=("major",)),
        metric_key(device="cpu"),
        metric_key(device="NVIDIA H200"),
    ]
    assert len(set(keys)) == len(keys)


def test_a_seed_is_in_the_key_of_what_draws_alone() -> None:
    keys = [
        make_metric_key(EvalEntry(kind="score", value=value), seed, MODEL, [])
        for value in (Score(), Counts())
        for seed in (0, 1)
    ]
    assert len(set(keys)) == 3
    assert keys[2] == keys[3]


@pytest.mark.parametrize(("name", "value", "usual"), [(ARCHITECTURE, "x86-64-v3", "native"), (EXACT, "1", "0")])
def test_timings_of_other_cpu_kernels_have_other_keys(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, usual: str
) -> None:
    together = Together(frozenset({MODEL}), frozenset())
    monkeypatch.delenv(name, raising=False)
    before = together.circumstances("cpu")
    for none in (usual, ""):
        monkeypatch.setenv(name, none)
        assert together.circumstances("cpu") == before
    monkeypatch.setenv(name, value)
    assert together.circumstances("cpu") == before | {"cpu_kernels": f"{name}={value}"}
    assert describe_environment("cpu")["cpu_kernels"] == f"{name}={value}"


def test_exact_kernels_are_asked_for_by_1_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another word was written down as the circumstance of a timing, and changed nothing."""
    monkeypatch.setenv(EXACT, "true")
    with pytest.raises(UsageError, match="OPTKIT_CPU_EXACT: 'true' is neither 1 nor 0. Set OPTKIT_CPU_EXACT=1, or"):
        describe_environment("cpu")


def test_what_is_no_number_has_no_key() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        step_key(Halve(rate=float("inf")))
