"""A quantizer's hooks are public, and defaults that hang on other fields are in its key."""

import inspect
from typing import Any

import pytest

from optkit.common.frozen import digest
from optkit.recipe.registry import class_of, names_of
from optkit.settings.kv_cache import KvCache
from optkit.stage import Stage
from optkit.stages.awq import Awq
from optkit.stages.gptq import Gptq
from optkit.stages.prune import Prune
from optkit.stages.qat import Qat
from optkit.stages.quantizing.streaming import LayerQuantizer

QUANTIZERS = [found for kind in names_of("stage") if issubclass(found := class_of("stage", kind), LayerQuantizer)]


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda each: each.__name__)
def test_what_another_class_overrides_is_public(quantizer: type[LayerQuantizer]) -> None:
    above: set[str] = set()
    for each in reversed([base for base in quantizer.__mro__ if issubclass(base, Stage)]):
        own = {name for name, value in vars(each).items() if inspect.isfunction(value) or isinstance(value, property)}
        assert not {name for name in own & above if name.startswith("_") and not name.startswith("__")}
        above |= own


def test_every_hook_says_what_it_returns() -> None:
    hooks = {name: value for name, value in vars(LayerQuantizer).items() if inspect.isfunction(value)}
    assert {"layer_format", "check_layers", "quantized_blocks", "working_memory"} <= hooks.keys()
    assert all(hook.__doc__ for name, hook in hooks.items() if not name.startswith("_"))


def test_qat_holds_a_gptq_with_its_own_fields() -> None:
    stage = Qat(bits=3, damping=0.05, batch_size=2, activation_order=False, exclude=("*.q_proj",))
    assert not isinstance(stage, Gptq)
    own = {"backend", "devices", "earlier_errors", "effort", "learn", "learning_steps", "scale_steps", "copies"}
    shared = Gptq.model_fields.keys() & Qat.model_fields.keys() - own
    assert {name: getattr(stage.gptq, name) for name in shared} == {name: getattr(stage, name) for name in shared}
    assert shared == Gptq.model_fields.keys() - own
    assert (stage.rtn.bits, stage.rtn.exclude, stage.rtn.scale_search) == (3, ("*.q_proj",), "mse")


@pytest.mark.parametrize(
    ("stage", "fields", "key"),
    [
        (Qat, {}, "563982244b7fcffb"),
        (Qat, {"start": "rtn"}, "67c2da79ba37e079"),
        (Gptq, {"backend": "gptqmodel"}, "ec2b2591101917c1"),
        (Awq, {"backend": "auto_round"}, "e807cc2b77bbcec0"),
        (Prune, {"method": "sparsegpt", "pattern": "2:4"}, "5cc985b0e0218cf1"),
        (Prune, {"method": "magnitude", "allocation": "owl"}, "60ce384a6f0450dd"),
        (KvCache, {"window": 64}, "82870f4542f6e725"),
    ],
)
def test_defaults_that_hang_on_other_fields_are_in_the_key(
    stage: type[Stage], fields: dict[str, Any], key: str
) -> None:
    """A golden test: the artifacts of earlier versions are found by these."""
    made = stage(**fields)
    assert digest(made.model_dump(mode="json"))[:16] == key
    assert digest(type(made)(**made.model_dump(mode="json")).model_dump(mode="json"))[:16] == key
