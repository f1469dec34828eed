"""Bits for each layer: the choices of `auto_bits`, AutoScheme and AutoQuantize, each rounded by the same
`gptq`, as a Markdown table.

    python docs/benchmarks/mixed_bits.py MODEL DATA [--bits 4.25 ...] [--device DEVICE] [--only PATTERN]

All choose from symmetric groups of 64 with a 16-bit scale, a quarter of a bit for each weight, and read the
same 64 x 512 tokens of C4 in bfloat16. q, k and v have one form, gate and up too; lm_head has 16 bits and
does not count. Perplexity and KL are those of the first 15 windows of 2048 tokens of WikiText-2's test
split. AutoScheme needs auto-round 0.16.1, AutoQuantize nvidia-modelopt 0.47.0 with pulp and omegaconf.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from optkit_evals.divergence import Divergence
from optkit_evals.footprint import Footprint
from optkit_evals.perplexity import Perplexity
from transformers import AutoModelForCausalLM, AutoTokenizer

import optkit
from optkit.measure import EvalContext
from optkit.session import open_session
from optkit.source.calibration import Calibration

Stage: TypeAlias = dict[str, Any]
CHOICES = (2, 3, 4, 5, 6, 8)
GROUP = 64
SCALE_BITS = 16 / GROUP
TEXT = {"dataset": "c4", "samples": 64, "sequence_length": 512}
BATCH = 8
WINDOWS = {"dataset": "wikitext2", "split": "test", "window": 2048, "windows": 15}
JOINED = (["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"])


def one_grid(_model: Path, _data: Path, bits: float, _device: str) -> Stage | None:
    """Return `gptq` with as many bits for all layers, None if there is no such number."""
    return gptq({"*": int(bits)}) if bits - SCALE_BITS in CHOICES else None


def auto_bits(effort: str, _model: Path, _data: Path, bits: float, _device: str) -> Stage:
    """Return optkit's stage."""
    forms = [f"{each}g{GROUP}" for each in CHOICES]
    fields = {"choices": forms, "held_out_samples": 0, "calibration": TEXT, "effort": effort}
    return {"auto_bits": {"average_bits": bits, **fields}}


def auto_scheme(model: Path, data: Path, bits: float, device: str) -> Stage:
    """Return `gptq` with what auto-round's AutoScheme chooses."""
    os.environ["AR_ENABLE_AUTO_SCHEME_PARALLEL"] = "0"
    from auto_round import AutoRound, AutoScheme
    from auto_round.auto_scheme import delta_loss
    from auto_round.schemes import QuantizationScheme

    text = batches(model, data, "cpu")
    delta_loss.get_dataloader = lambda *_, **__: text  # it takes names of data sets on the hub alone
    scheme = AutoScheme(
        avg_bits=bits - SCALE_BITS,
        options=[QuantizationScheme(bits=each, group_size=GROUP, sym=True, data_type="int") for each in CHOICES],
        shared_layers=JOINED,
        ignore_scale_zp_bits=True,  # it counts zero points of symmetric forms too
        nsamples=TEXT["samples"],
        seqlen=TEXT["sequence_length"],
        batch_size=BATCH,
    )
    chooser = AutoRound(opened(model, "cpu"), AutoTokenizer.from_pretrained(model), scheme=scheme, device_map=device)
    chooser.post_init()
    return gptq({name: form["bits"] for name, form in chooser.layer_config.items() if form["bits"] < 16})


def auto_quantize(model: Path, data: Path, bits: float, device: str) -> Stage:
    """Return `gptq` with what ModelOpt's AutoQuantize chooses."""
    import modelopt.torch.quantization as quantization

    text = batches(model, data, device)
    forms = [
        {
            "quant_cfg": [
                {"quantizer_name": "*", "enable": False},
                {
                    "quantizer_name": "*weight_quantizer",
                    "cfg": {"num_bits": each, "block_sizes": {-1: GROUP, "type": "static"}},
                },
            ],
            "algorithm": "max",
            "effective_bits": each + SCALE_BITS,
        }
        for each in CHOICES
    ]
    layers = {"module_name_patterns": ["*_proj"], "quantization_formats": forms, "allow_no_quant": False}
    made, _ = quantization.auto_quantize(
        opened(model, device),
        constraints={"effective_bits": bits, "cost": {"excluded_module_name_patterns": ["*lm_head*"]}},
        module_search_spaces=[layers],
        quantization_formats=forms,
        data_loader=text,
        forward_step=lambda network, batch: network(**batch),
        loss_func=lambda output, _: output.loss,
        disabled_layers="*lm_head*",
        num_calib_steps=len(text),
        num_score_steps=len(text),
    )
    found = {name: module for name, module in made.named_modules() if name.endswith("_proj")}
    return gptq({name: module.weight_quantizer.num_bits for name, module in found.items()})


METHODS: dict[str, Callable[[Path, Path, float, str], Stage | None]] = {
    "one grid": one_grid,
    "auto_bits": partial(auto_bits, "fast"),
    "auto_bits, effort: best": partial(auto_bits, "best"),
    "AutoScheme": auto_scheme,
    "AutoQuantize": auto_quantize,
}


def opened(model: Path, device: str) -> Any:
    """Return a model in bfloat16."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device).eval()


def batches(model: Path, data: Path, device: str) -> list[dict[str, torch.Tensor]]:
    """Return the text that all choose by."""
    rows = Calibration(**TEXT).tokens(model, data).to(device)
    return [{"input_ids": part, "attention_mask": torch.ones_like(part), "labels": part} for part in rows.split(BATCH)]


def gptq(widths: dict[str, int]) -> Stage:
    """Return optkit's `gptq` with each layer's bits."""
    usual = Counter(widths.values()).most_common(1)[0][0]
    others = {name: {"bits": bits} for name, bits in widths.items() if bits != usual}
    return {"gptq": {"bits": usual, "group_size": GROUP, "overrides": others, "calibration": TEXT}}


def made(model: Path, stage: Stage, target: Path, data: Path, device: str) -> Path:
    """Return the directory that a stage leaves of a model."""
    recipe = {"name": "made", "model": {"name": str(model)}, "stages": [stage], "evals": [], "attribution": False}
    optkit.run(optkit.load_recipe(recipe), out=target, data=data, device=device)
    return target


def main() -> None:
    """Print a line as each choice is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--bits", type=float, nargs="+", default=[4.25, 3.25, 2.75])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="*")
    asked = parser.parse_args()
    print("| bits asked | chosen by | bits | perplexity | KL | time |\n" + "|---" * 6 + "|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        model = made(asked.model, {"cast": {"dtype": "bfloat16"}}, Path(directory) / "bfloat16", asked.data, "cpu")
        context = EvalContext(data=asked.data, baseline=open_session(model, (), asked.device))
        for bits, name in ((bits, name) for bits in asked.bits for name in METHODS if fnmatch(name, asked.only)):
            began = time.perf_counter()
            if stage := METHODS[name](model, asked.data, bits, asked.device):
                path = made(model, stage, Path(directory) / f"{bits:g}, {name}", asked.data, asked.device)
                spent, session = time.perf_counter() - began, open_session(path, (), asked.device)
                evals = Perplexity(**WINDOWS), Divergence(**WINDOWS), Footprint()
                found = {metric.name: metric.value for each in evals for metric in each.run(session, context)}
                cells = [f"{found[each]:.4f}" for each in ("bits_per_quantized_weight", "perplexity", "kl_divergence")]
                print(f"| {bits:g} | {name} | {' | '.join(cells)} | {spent:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
