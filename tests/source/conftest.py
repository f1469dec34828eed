"""Tiny models as directories and as GGUF files."""

import pytest
import torch


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory):
    """Return architecture -> directory of a tiny model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.tiny_models import SIZES, save_tokenizer

    qwen3 = tmp_path_factory.mktemp("qwen3")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3", **SIZES, head_dim=32, tie_word_embeddings=False)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(qwen3)
    save_tokenizer(qwen3)
    return {"llama": tiny_model("llama"), "qwen2": tiny_model("qwen2"), "qwen3": qwen3}


@pytest.fixture(scope="module")
def llama_file(models, tmp_path_factory):
    from tests.support.gguf_files import save_gguf

    return save_gguf(models["llama"], tmp_path_factory.mktemp("gguf") / "llama.gguf", "llama")
