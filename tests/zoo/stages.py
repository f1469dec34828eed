"""The columns of the zoo: each kind of stage with the least fields, and forms of it that read more of a model."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig

from tests.support.encoder_decoders import write_pairs
from tests.zoo.models import hears

TEXT = "{dataset: TEXT, samples: 4, sequence_length: 32}"
TRAINING = (
    "texts: [{dataset: LETTERS}], tokens: 1024, sequence_length: 32, batch_size: 4, held_out: 2, learning_rate: 0.0001,"
    " temperature: 16"
)
ROUNDED = 0.1
"""Of inputs that are rounded while the model computes: sums in another order round some of them otherwise, and
transformers rounds none of experts."""


@dataclass(frozen=True)
class Column:
    """What a recipe says, and how its result is compared."""

    recipe: str
    """YAML; LETTERS is a file of random letters, and TEXT the same, or pairs for an encoder-decoder, with sounds if
    it hears."""
    tolerance: float = 1e-3
    """Largest difference of the logits, relative to them."""
    exact: bool = True
    """Whether greedy tokens are the same too."""
    against_source: bool = False
    """Whether the logits are those of the unmodified model: nothing is written that transformers opens."""
    of_steps: bool = False
    """Whether it is for models alone that can be run token by token."""

    def stages(self, source: Path, place: Path) -> str:
        """Return the stages of the recipe, and write the text that they read."""
        letters = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=4_000))
        (plain := place / "letters.txt").write_text(letters, encoding="utf-8")
        config = AutoConfig.from_pretrained(source)
        if hears(config):
            said = f"{write_pairs(place / 'sounds', hears=True)}, input: audio, field: text"
        elif config.is_encoder_decoder:
            pairs = [
                {"input": letters[at : at + 60], "target": letters[at + 60 : at + 100]} for at in range(0, 4_000, 100)
            ]
            (text := place / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
            said = f"{text}, input: input, field: target"
        else:
            said = str(plain)
        return self.recipe.replace("TEXT", said).replace("LETTERS", str(plain))


STAGES: dict[str, Column] = {
    "cast": Column("- cast: bfloat16", ROUNDED, exact=False),
    "rtn": Column("- rtn: {group_size: 32}"),
    "gptq": Column(f"- gptq: {{group_size: 32, calibration: {TEXT}}}"),
    "awq": Column(f"- awq: {{group_size: 32, calibration: {TEXT}}}"),
    "awq_scale": Column(f"- awq_scale: {{group_size: 32, calibration: {TEXT}}}"),
    "auto_bits": Column(
        f"- auto_bits: {{average_bits: 5, sensitivity_samples: 2, held_out_samples: 0, calibration: {TEXT}}}"
    ),
    "qat": Column(f"- qat: {{start: rtn, group_size: 32, training: {{{TRAINING}}}}}"),
    "nf4": Column("- nf4", 0.01, exact=False),
    "int8": Column("- int8", ROUNDED, exact=False),
    "fp8": Column("- fp8", ROUNDED, exact=False),
    "mx": Column("- cast: bfloat16\n- mx: {type: mxfp4}", 0.05, exact=False),
    "smoothquant": Column(f"- smoothquant: {{calibration: {TEXT}}}", ROUNDED, exact=False),
    "rotate": Column("- rotate"),
    "kv_scales": Column(f"- kv_scales: {{calibration: {TEXT}}}", 0.2, exact=False),
    "dequantize": Column("- rtn: {group_size: 32}\n- dequantize"),
    "prune": Column(f"- prune: {{method: wanda, sparsity: 0.5, calibration: {TEXT}}}"),
    "prune_structured": Column(f"- prune_structured: {{remove_layers: 1, calibration: {TEXT}}}"),
    "prune_structured heads": Column(f"- prune_structured: {{kv_heads: 1, calibration: {TEXT}}}"),
    "prune_structured channels": Column(f"- prune_structured: {{intermediate_size: 64, calibration: {TEXT}}}"),
    "distill": Column(f"- prune: {{method: magnitude, sparsity: 0.5}}\n- distill: {{{TRAINING}}}"),
    "lora_recover": Column(f"- prune: {{method: magnitude, sparsity: 0.5}}\n- lora_recover: {{rank: 4, {TRAINING}}}"),
    "gguf": Column("- gguf", 0.01, exact=False, against_source=True),
    "onnx": Column("- onnx", 0.01, exact=False, against_source=True),
    "onnx of rtn": Column("- rtn: {group_size: 32}\n- onnx: {activations: float, lm_head: keep}", 0.5, False, True),
    "onnx_optimize": Column("- onnx: {exporter: torch}\n- onnx_optimize: {level: extended}", 0.01, False, True),
    "onnx_quantize": Column("- onnx\n- onnx_quantize: {bits: 8, block_size: 32}", 0.15, False, True),
    "onnx_provider": Column("- onnx\n- onnx_provider: {threads: 1}", 0.01, False, True),
    "attention": Column("- attention: eager"),
    "precision": Column("- precision: bf16", 0.05, exact=False),
    "kv_cache": Column("- kv_cache: int8", 0.2, exact=False, of_steps=True),
    "kv_cache window": Column("- kv_cache: {window: 512}", of_steps=True),
    "compile": Column("- compile: {devices: [cuda]}", of_steps=True),
    "cpu_decoder": Column("- rtn: {group_size: 32}\n- cpu_decoder", of_steps=True),
    "cuda_graphs": Column("- cuda_graphs", of_steps=True),
    "offload": Column("- offload: {gpu_memory: 1 GiB}"),
    "speculative": Column("- speculative: {prompt_lookup: 2, tokens: 2}", of_steps=True),
    "tensor_parallel": Column("- tensor_parallel: {devices: 2}", exact=False),
}
"""Column of the table -> its recipe."""
