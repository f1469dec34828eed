"""Which layers of a model get adapters."""

from torch import nn

from optkit.training.adapters import AdapterForm, adapted, inject_, targets


def test_a_last_name_that_other_modules_have_too_means_none_of_them() -> None:
    """Zamba 2 keeps layers in lists inside its blocks: their last names are those of blocks."""
    block = nn.ModuleDict({"down": nn.Linear(4, 4), "adapters": nn.ModuleList([nn.Linear(4, 4)])})
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    both = {"layers.0.adapters.0": 2, "layers.0.down": 2}
    assert targets({"layers.0.down": 2}, model) == ["down"]
    assert targets(both, model) == sorted(both)
    inject_(model, AdapterForm(both, scale=1.0))
    assert {name for name, _ in adapted(model)} == set(both)
