"""What tests of structured pruning share: small random models of many architectures, a text, and
transformers' own logits.
"""

import atexit
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.recipe.field_faults import validate
from optkit.source.calibration import Calibration
from optkit.stage import Context, Report
from optkit.stages.prune_structured import PruneStructured
from tests.support.tiny_models import save_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
SIZES |= {
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
GPT2 = {
    "vocab_size": 512,
    "n_embd": 32,
    "n_layer": 6,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "llama_biases": {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True},
    "multi_head": {"model_type": "llama", **SIZES, "num_key_value_heads": 4},
    "qwen2": {"model_type": "qwen2", **SIZES, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 16},
    "gemma": {"model_type": "gemma", **SIZES, "head_dim": 16},
    "gemma3": {"model_type": "gemma3_text", **SIZES, "head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 3},
    "smollm3": {"model_type": "smollm3", **SIZES, "no_rope_layer_interval": 3},
    "olmo2": {"model_type": "olmo2", **SIZES},
    "phi3": {"model_type": "phi3", **SIZES},
    "helium": {"model_type": "helium", **SIZES, "head_dim": 8},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "opt": {
        "model_type": "opt",
        "vocab_size": 512,
        "hidden_size": 32,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "num_attention_heads": 4,
    }
    | {"num_hidden_layers": 6, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"model_type": "qwen2_moe", **SIZES, **MIXTURE, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
}


@cache
def _models() -> Path:
    place = tempfile.TemporaryDirectory(prefix="smaller-models-")
    atexit.register(place.cleanup)
    return Path(place.name)


def made_model(kind: str, **config: Any) -> Path:
    """Return the directory of a random model, the same one for every test, so copy it before
    changing it.
    """
    directory = _models() / "-".join([kind, *(f"{key}-{value}" for key, value in config.items())])
    return directory if directory.exists() else save_model(kind, directory, **config)


def save_model(kind: str, directory: Path, **config: Any) -> Path:
    """Write a random float32 model with norms and biases that are far from 1 and 0."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[kind] | config), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1))
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def letters(directory: Path, samples: int = 6, length: int = 32) -> dict[str, Any]:
    """Return the fields of a calibration text of random letters that comes from a file."""
    drawn = torch.randint(97, 123, (3_000,), generator=torch.Generator().manual_seed(0)).tolist()
    (directory / "letters.txt").write_text("".join(map(chr, drawn)), encoding="utf-8")
    return {"dataset": str(directory / "letters.txt"), "samples": samples, "sequence_length": length}


def letters_tokens(source: Path, directory: Path) -> Tensor:
    return Calibration(**letters(directory)).tokens(source, None)


def pruned(source: Path, target: Path, **fields: Any) -> Report:
    """Run the stage, fields as a recipe gives them; what it left is what it predicted."""
    stage = validate(PruneStructured, fields)
    assert not isinstance(stage, list), stage
    target.mkdir(exist_ok=True)
    cost, left = stage.predict(Checkpoint(source).shape, "cpu")
    report = stage.run(source, target, Context())
    written = Checkpoint(target)
    assert cost.disk_bytes == left.size_bytes == written.shape.size_bytes
    assert dict(left.tensors) == written.tensors
    return report


def refused(source: Path, **fields: Any) -> str:
    """Return what a plan says to fields that do not fit the model."""
    stage = validate(PruneStructured, fields)
    assert not isinstance(stage, list), stage
    try:
        stage.predict(Checkpoint(source).shape, "cpu")
    except StageError as error:
        return str(error)
    raise AssertionError("it was not refused")


def model_of(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager").eval()


def logits(model: PreTrainedModel) -> Tensor:
    tokens = torch.randint(512, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        made: Tensor = model(tokens, use_cache=False).logits
    return made


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def blocks_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=lambda each: sum(parameter.numel() for parameter in each.parameters()))
