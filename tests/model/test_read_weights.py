from pathlib import Path

import pytest

from optkit.model import config_defaults, read_weights
from optkit.model.config_defaults import model_folder
from optkit.model.read_weights import Read, reads_of

CODE = """
class Mixer(nn.Module):
    def __init__(self, config):
        self.built.weight = nn.Parameter(self.other.weight)
        self.grouped = Grouped(4, 4)
        self.plain = Plain(4, 4)

    def forward(self, hidden):
        if self.training and hidden is None:
            return fused(self.out_proj.weight)
        if self.slow_but_exact:
            return self.dense.weight[:, 1]
        if hasattr(self.config, "_is_quantized"):
            kind = self.config.dtype
        else:
            kind = self.query.weight.dtype
        hidden = hidden.to(self.lm_head.weight.dtype).to(self.wo.weight.device)
        return self.layers[0].mixer.dt_proj.weight @ hidden + self.norm(hidden) * self.weight

class Grouped(nn.Linear):
    def forward(self, x):
        return torch.bmm(x, self.weight.view(2, 2, 4))

class Plain(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T

class Model(PreTrainedModel):
    def _init_weights(self, module):
        if isinstance(module, Mixer):
            init.zeros_(module.in_proj.weight)
            if self.config.rescale_prenorm_residual:
                p = module.down.weight
        elif isinstance(module, Norm):
            init.ones_(module.weight)
"""


@pytest.fixture
def transformers_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand for the folder of a model type of transformers, with CODE in it."""
    (tmp_path / "modeling_odd.py").write_text(CODE)
    monkeypatch.setattr(config_defaults, "model_folder", lambda _: tmp_path)
    read_weights._found.cache_clear()
    yield tmp_path
    read_weights._found.cache_clear()


def test_layers_whose_weight_is_read_are_told_by_what_is_done_with_it(transformers_of: Path) -> None:
    reads = reads_of({"model_type": "odd"})
    assert reads("model.layers.3.mixer.dt_proj") == {Read.COMPUTES}
    assert reads("model.layers.3.mixer.grouped") == {Read.COMPUTES}
    assert reads("lm_head") == reads("model.layers.0.wo") == {Read.DTYPE}
    assert reads("model.layers.0.mixer.in_proj") == {Read.OPENS}
    assert reads("model.layers.0.mixer.plain") == {Read.CLASS}
    for unread in ("out_proj", "dense", "query", "built", "other", "down", "norm", "not_dt_proj"):
        assert not reads(f"model.layers.0.mixer.{unread}"), unread


def test_a_mode_that_the_config_sets_is_taken(transformers_of: Path) -> None:
    reads = reads_of({"model_type": "odd", "slow_but_exact": True, "rescale_prenorm_residual": True})
    assert reads("h.0.dense") == {Read.COMPUTES}
    assert reads("h.0.down") == {Read.OPENS}


def test_code_that_initialises_every_linear_layer_reads_every_weight(transformers_of: Path) -> None:
    (transformers_of / "modeling_odd.py").write_text(CODE.replace("module, Norm", "module, nn.Linear"))
    assert reads_of({"model_type": "odd"})("anything") == {Read.OPENS}


def test_the_code_of_a_model_type_is_found_whatever_its_folder_is_called() -> None:
    folders = {kind: model_folder(kind) for kind in ("mamba2", "gemma3_text", "openai-gpt", "no_such_type", "../x", "")}
    assert [folder and folder.name for folder in folders.values()] == ["mamba2", "gemma3", "openai", None, None, None]
    assert not reads_of({"model_type": "llama"})("lm_head")
    assert reads_of({"text_config": {"model_type": "jamba"}})("model.layers.0.mamba.dt_proj") == {Read.COMPUTES}
