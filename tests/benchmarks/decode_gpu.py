"""Decode and prefill on one GPU, of a model in bfloat16, 4 and 8 bits, by each way of decoding: a
Markdown table.

    python tests/benchmarks/decode_gpu.py [--model DIRECTORY | --shape llama] [--layers 32] \
        [--only PATTERN] [--batches 1,32] [--prompt 512] [--new-tokens 128]

Without a model: random weights in the shape of Llama-3-8B, Qwen3-30B-A3B or Mixtral-8x7B, made and
rounded on the GPU (they say nothing of quality). INT4 has symmetric groups of 128, NF4 is
bitsandbytes' with double quantization; a model on the disk goes through `rtn`, `fp8`, `smoothquant`
and `nf4`. Greedy; the protocol of the eval `throughput`, which is what measures. `transformers` is
its own eager decoding loop with a growing cache and SDPA; `compile` is torch.compile of its step
with a static cache in CUDA graphs (`compile: reduce-overhead`). Of `cuda_graphs` the steps alone are
timed too, one behind the other around the middle of the new tokens: the fewest seconds of five
times 30.
"""

import argparse
import gc
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from optkit_evals.throughput import Throughput
from torch import Tensor, nn

from optkit.algorithms.eight_bit import FLOAT8, INT8, amax_scales, quantize
from optkit.algorithms.grid import Grid, minmax_scales, round_to_nearest
from optkit.algorithms.packing import pack
from optkit.environment import describe_environment
from optkit.kernels.cuda.decoding import Steps
from optkit.kernels.float8_linear import Float8Linear
from optkit.kernels.int8_linear import Int8Linear
from optkit.kernels.integer_kernels import integer_layer
from optkit.kernels.packed_linear import PackedWeight
from optkit.measure import EvalContext
from optkit.model.experts import unfuse_experts_
from optkit.session import open_session
from optkit.session.torch_session import TorchSession
from optkit.settings.compile import Compile
from optkit.settings.cuda_graphs import CudaGraphs
from optkit.source.calibration import Calibration
from optkit.stage import Context, Opening, Setting, Transform
from optkit.stages.fp8 import Fp8
from optkit.stages.nf4 import Nf4
from optkit.stages.rtn import Rtn
from optkit.stages.smoothquant import SmoothQuant

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    },
    "qwen3_moe": {
        **{"vocab_size": 151936, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6},
        **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    },
    "mixtral": {
        **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    },
}
"""Llama-3-8B, Qwen3-30B-A3B and Mixtral-8x7B."""
WEIGHTS: dict[str, Transform | None] = {
    "bfloat16": None,
    "int4, groups of 128": Rtn(group_size=128),
    "int4, groups of 32 with zero points": Rtn(group_size=32, symmetric=False),
    "lm_head too, int4, groups of 128": Rtn(group_size=128, lm_head=True),
    "fp8": Fp8(),
    "nf4": Nf4(),
    "w8a8": SmoothQuant(
        alpha=0.5,
        rounding="nearest",
        calibration=Calibration(dataset="python-reference", samples=4, sequence_length=64),
    ),
}
WAYS: dict[str, list[Setting]] = {
    "transformers": [],
    "compile": [Compile(mode="reduce-overhead")],
    "cuda_graphs": [CudaGraphs()],
}
REPLAYS = 30


def model_in_memory(layers: int | None = None, shape: str = "llama") -> Any:
    """Return random bfloat16 weights in a shape of `SHAPES`, or of so many of its layers, on the GPU."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    fewer = {} if layers is None else {"num_hidden_layers": layers}
    sizes = {**SHAPES[shape], "max_position_embeddings": 8192, "tie_word_embeddings": False, **fewer}
    config = CONFIG_MAPPING[shape](**sizes)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def random_model(directory: Path, layers: int | None = None, shape: str = "llama") -> Path:
    """Write such a model, and a tokenizer, into a directory."""
    from transformers import PreTrainedTokenizerFast

    if not (directory / "config.json").exists():
        model_in_memory(layers, shape).save_pretrained(directory)
        words = str(Path(__file__).parents[1] / "support" / "tiny_tokenizer.json")  # for the stage that reads a text
        PreTrainedTokenizerFast(tokenizer_file=words, eos_token="<|endoftext|>").save_pretrained(directory)
        torch.cuda.empty_cache()
    return directory


def rounded_layer(weights: str, weight: Tensor) -> nn.Module:
    """Return the layer that an artifact of such weights opens as."""
    outputs, inputs = weight.shape
    if weights == "nf4":
        from bitsandbytes.nn import Linear4bit, Params4bit

        with torch.device("meta"):  # it would fill a weight with random numbers first
            layer = Linear4bit(inputs, outputs, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        layer.weight = Params4bit(weight, requires_grad=False, quant_type="nf4")
        return layer.cuda()
    if "int4" in weights:
        grid = Grid(4, 32, symmetric=False) if weights.endswith("zero points") else Grid(4, 128, symmetric=True)
        rounded = round_to_nearest(weight.float(), *minmax_scales(weight.float(), grid), grid)
        zeros = None if grid.symmetric else rounded.zeros
        packed = PackedWeight(pack(rounded.codes, 4, 1), rounded.scales, zeros, None, 4, inputs)
        return integer_layer(packed, None, torch.bfloat16, "cuda")[0]
    numbers, kind = (FLOAT8, Float8Linear) if weights == "fp8" else (INT8, Int8Linear)
    scales = amax_scales(weight.float(), (1, inputs), numbers, torch.float32)
    codes = quantize(weight.float(), scales, (1, inputs), numbers)
    return kind(codes, scales, None, None, torch.bfloat16)


@torch.no_grad()
def session_in_memory(weights: str, settings: list[Setting], layers: int | None = None, shape: str = "llama") -> Any:
    """Return a session as `open_session` does, of a model that was never on a disk."""
    model = model_in_memory(layers, shape)
    if weights != "bfloat16":
        unfuse_experts_(model)
        for name, layer in list(model.model.layers.named_modules()):
            if isinstance(layer, nn.Linear):
                model.model.layers.set_submodule(name, rounded_layer(weights, layer.weight.data))
    if weights.startswith("lm_head"):
        model.lm_head = rounded_layer(weights, model.lm_head.weight.data)
    torch.cuda.empty_cache()
    for setting in settings:
        model = setting.on_load(model, "cuda")
    session: Any = TorchSession(model, Opening(Path(), device="cuda"))
    for setting in settings:
        session = setting.on_open(session)
    return session


def steps_alone(session: Any, batch: int, prompt: int, new_tokens: int) -> float | None:
    """Return the tokens/s of the graphs of steps and nothing else; None if steps are not graphs."""
    if session._decoder is None:
        return None
    times = []
    with torch.no_grad(), session._decoder.steps(batch, prompt + new_tokens) as steps:
        if not isinstance(steps, Steps):
            return None
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            steps.position.fill_(prompt + max(0, new_tokens - REPLAYS) // 2)
            start.record()
            for _ in range(REPLAYS):
                steps.graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
    return batch * REPLAYS / min(times)


def print_notes(session: Any, said: tuple[str, ...]) -> tuple[str, ...]:
    """Print the notes that were not said yet, as they come: a row that no graph made takes minutes. Return all."""
    for note in session.notes:
        if note not in said:
            print(f"<!-- {note} -->", flush=True)
    return tuple(session.notes)


def main() -> None:
    """Make the models, measure each way, print a row for each batch as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--work", type=Path, default=Path("/tmp/decode_gpu"))
    parser.add_argument("--only", default="*", help="pattern of `WEIGHTS WAY`, e.g. 'int4*'")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    given = parser.parse_args()
    environment = describe_environment("cuda")
    print(
        ", ".join(f"{name} {environment[name]}" for name in ("device_name", "driver", "torch", "transformers")),
        flush=True,
    )
    print(
        "\n| weights | way | batch | decode tokens/s | of 95% | steps alone | prefill tokens/s | GB read/s in decode "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    batches = tuple(int(batch) for batch in given.batches.split(","))
    for weights, stage in WEIGHTS.items():
        ways = {way: settings for way, settings in WAYS.items() if fnmatch(f"{weights} {way}", given.only)}
        directory = given.work / weights if ways and stage else given.model
        if given.model and ways and stage and not directory.exists():
            directory.mkdir(parents=True)
            stage.run(given.model, directory, Context(device="cuda"))
        for way, settings in ways.items():
            begin = time.perf_counter()
            session: Any = (
                open_session(directory, settings, "cuda")
                if given.model
                else session_in_memory(weights, settings, given.layers, given.shape)
            )
            context = EvalContext()
            print(f"<!-- opened in {time.perf_counter() - begin:.1f} s -->", flush=True)
            said = print_notes(session, ())
            for batch in batches:
                grid = Throughput(
                    batch_sizes=(batch,), prompts=(given.prompt,), new_tokens=given.new_tokens, limit_s=20, repeats=3
                )
                metrics = grid.pool([grid.run(session, context)], context)
                rows = {metric.name: metric for metric in metrics}
                decode, prefill, bandwidth = (
                    rows[name] for name in ("decode_tokens_per_s", "prefill_tokens_per_s", "decode_bytes_per_s")
                )
                interval = "-" if decode.interval is None else f"{decode.interval[0]:,.1f} to {decode.interval[1]:,.1f}"
                alone = steps_alone(session, batch, given.prompt, given.new_tokens)
                decoded = f"{decode.value:,.1f} | {interval} | {'-' if alone is None else f'{alone:,.1f}'}"
                values = f"{decoded} | {prefill.value:,.0f} | {bandwidth.value / 1e9:,.0f}"
                print(f"| {weights} | {way} | {batch} | {values} |", flush=True)
                said = print_notes(session, said)
            session.close()
            del session
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
