"""GGUF files of architectures that optkit has no layout for."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from optkit.errors import SourceError
from optkit.model.checkpoint import Checkpoint
from optkit.processes.child_program import Parent
from optkit.source.gguf_by_transformers import work
from optkit.source.gguf_tokenizer import Vocabulary
from optkit.source.models import ModelSource, import_model, model_shape, pin_model
from tests.conftest import TinyModel
from tests.support.fresh_python import imported_by
from tests.support.gguf_files import save_by_names
from tests.support.near import near
from tests.support.remembered import Lines
from tests.zoo.models import plain_logits, save_model

pytest.importorskip("gguf")
GEMMA3 = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.key_length": "head_dim",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
}
EXPERTS = {
    **{key: GEMMA3[key] for key in [*GEMMA3][:-1]},
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
TEXT = "def f(x): return x + 1"


@pytest.fixture(scope="module")
def gemma3(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a GGUF file of a tiny Gemma 3, whose norms llama.cpp's converter stores plus 1."""
    return save_by_names(tiny_model("gemma3"), tmp_path_factory.mktemp("gguf") / "tiny.gguf", "gemma3", GEMMA3, 1.0)


@pytest.mark.usefixtures("warm_children")
def test_an_import_is_what_transformers_reads(gemma3: Path, tiny_model: TinyModel, tmp_path: Path) -> None:
    pinned, heard = pin_model(ModelSource(name=str(gemma3)), tmp_path / "cache"), Lines()
    shape = model_shape(pinned, None)
    details = import_model(pinned, tmp_path, heard)
    written = Checkpoint(tmp_path)
    assert dict(shape.tensors) == written.tensors
    assert details["reader"] == "transformers"
    assert heard.lines[0].startswith("import by transformers of 41 tensors")
    assert "+1 blk.0.attn_q.weight" in heard.lines
    stored, read = Checkpoint(tiny_model("gemma3")), {name: written.read(name) for name in written.tensors}
    assert all(torch.allclose(tensor, stored.read(name), atol=1e-6) for name, tensor in read.items())
    here = AutoTokenizer.from_pretrained(gemma3.parent, gguf_file=gemma3.name)
    assert AutoTokenizer.from_pretrained(tmp_path)(TEXT).input_ids == here(TEXT).input_ids


def test_a_large_vocabulary_is_read_once_and_its_tokens_found_by_hash(
    gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf
    from transformers import modeling_gguf_pytorch_utils
    from transformers.integrations import ggml

    calls: list[Any] = []

    def noted(plain: Any) -> Any:
        return lambda *given: (calls.append(given), plain(*given))[1]

    for place, name in ((gguf, "GGUFReader"), (ggml, "GGUFTokenizerSkeleton")):
        monkeypatch.setattr(place, name, noted(getattr(place, name)))
    monkeypatch.setattr(modeling_gguf_pytorch_utils, "tqdm", None)  # restored behind the test
    parent = Parent(io.StringIO())
    monkeypatch.setattr(parent, "order", lambda: {"path": str(gemma3), "target": str(tmp_path)})
    work(parent)
    assert [given[0] for given in calls if isinstance(given[0], str)] == [str(gemma3)]
    described = [given[0]["tokens"] for given in calls if isinstance(given[0], dict)]
    assert described
    assert all(isinstance(tokens, Vocabulary) for tokens in described)


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize("told", [True, False])
def test_experts_have_the_sizes_of_the_file(tmp_path: Path, told: bool) -> None:
    """transformers leaves their width at the default of its config, and saves them joined."""
    source = save_model("qwen3_moe", tmp_path / "model", norm_topk_prob=True, head_dim=16)
    file = save_by_names(source, tmp_path / "tiny.gguf", "qwen3moe", EXPERTS | (WIDTH if told else {}))
    pinned = pin_model(ModelSource(name=str(file)), tmp_path / "cache")
    (target := tmp_path / "imported").mkdir()
    if not told:
        with pytest.raises(SourceError, match=r"It does not read all sizes: \S+ has \[64, 64\].* says \[.*Take"):
            import_model(pinned, target, Lines())
        return
    import_model(pinned, target, Lines())
    assert dict(model_shape(pinned, None).tensors) == Checkpoint(target).tensors
    assert near(plain_logits(target), plain_logits(source))


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize(("key", "value"), [("router_logit_softcapping", 30.0), ("rope__scaling__type", "yarn")])
def test_metadata_that_nobody_looks_at_is_refused(
    tmp_path: Path, tiny_model: TinyModel, key: str, value: object
) -> None:
    file = save_by_names(tiny_model("gemma3"), tmp_path / "tiny.gguf", "gemma3", GEMMA3, 1.0, **{key: value})
    said = f"cannot read this gemma3. It does not look at {key.replace('__', '.')}. .*safetensors"
    with pytest.raises(SourceError, match=said):
        model_shape(pin_model(ModelSource(name=str(file)), tmp_path / "cache"), None)


@pytest.mark.slow
def test_a_plan_of_it_imports_no_torch(gemma3: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from optkit.source.models import *; "
        f"pinned = pin_model(ModelSource(name={str(gemma3)!r}), Path({str(tmp_path)!r})); "
        "assert model_shape(pinned, None).block_count == 3"
    )
    assert not {"torch", "transformers"} & imported_by(code)
