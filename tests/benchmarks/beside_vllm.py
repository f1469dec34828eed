"""optkit beside vLLM on one GPU, of the same artifacts: as served, and their kernels alone.

    python tests/benchmarks/beside_vllm.py make DIRECTORY [--shape llama] [--layers 32] [--weights int4,fp8,w8a8]
    python tests/benchmarks/beside_vllm.py optkit DIRECTORY/int4 [--batches 1,32,64,128]
    python tests/benchmarks/beside_vllm.py vllm DIRECTORY/int4      (the Python that has vLLM)

`make` writes random weights in a shape of `decode_gpu.py` as `bfloat16`, and what `rtn` (groups of
128), `fp8` and `smoothquant` make of them. vLLM has its own scheduler, compiler and full CUDA graphs.
Its graphs have the sizes of the batches alone and its cache that of the largest, so that it starts sooner. "As
served" is the wall clock from token to token. "Kernels alone" is the part of a step in which the GPU
computed, by torch's profiler, later in the same process. With `--turn FILE` several calls run beside
each other: they open together, and one at a time measures. None is profiled before all have served.
The second engine of an artifact says for how many prompts both choose the same token.
"""

import argparse
import fcntl
import json
import os
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).parents[2]
PROMPT, NEW, PROFILED = 512, 128, 16
MANY = 64
CACHE = 88 << 20
"""Bytes of a sequence's keys and values in vLLM, and some to spare: a token of Llama-3-8B has 128 KiB."""
SMALLEST_GRAPH, FEWEST_STEPS = 9, 4


@contextmanager
def turn(file: str, kind: int = fcntl.LOCK_EX, of: str = "") -> Iterator[None]:
    """Hold the file's lock: alone to measure, with others to open a model."""
    with Path(file + of if file else os.devnull).open("w") as handle:
        if file:
            fcntl.flock(handle, kind)
        try:
            yield
        finally:
            if file:  # a process that was forked meanwhile has the file open, too, and closing it alone would not do
                fcntl.flock(handle, fcntl.LOCK_UN)


def make(directory: Path, shape: str, layers: int, artifacts: list[str]) -> None:
    """Write the model and its artifacts."""
    from decode_gpu import WEIGHTS, random_model

    from optkit.stage import Context

    directory.mkdir(parents=True, exist_ok=True)
    model = random_model(directory / "bfloat16", layers, shape)
    print("bfloat16 made")
    for name in artifacts:
        (directory / name).mkdir(exist_ok=True)
        stage: Any = WEIGHTS[{"int4": "int4, groups of 128"}.get(name, name)]
        stage.run(model, directory / name, Context(device="cuda"))
        print(f"{name} made")


def steps(trace: Path) -> dict[str, Any]:
    """Return what the GPU did between the first and the last whole step of a trace.

    A step is the most common CUDA graph of it, and what runs before the next one.
    """
    from optkit.reports.profiling.torch_trace import covered

    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    done = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    graphs = defaultdict(list)
    for each in sorted(done, key=lambda each: each["ts"]):
        graphs[each["args"].get("correlation")].append(each)
    sizes = Counter(len(each) for each in graphs.values() if len(each) >= SMALLEST_GRAPH)
    size = max(sizes, key=lambda size: (sizes[size], size), default=0)
    begins = sorted(each[0]["ts"] for each in graphs.values() if len(each) == size)
    if len(begins) < FEWEST_STEPS:
        return {"problem": f"{len(done)} events, {len(graphs)} launches, graphs of {dict(sizes)} kernels"}
    inside = [each for each in done if begins[0] <= each["ts"] < begins[-1]]
    busy = [
        covered((each["ts"], each["ts"] + each["dur"]) for each in inside if begin <= each["ts"] < end)
        for begin, end in pairwise(begins)
    ]
    times: Counter[str] = Counter()
    for each in inside:
        times[each["name"]] += each["dur"] / len(busy)
    return {
        "steps": len(busy),
        "kernels": len(inside) / len(busy),
        "busy_us": median(busy),
        "span_us": median(end - begin for begin, end in pairwise(begins)),
        "longest": times.most_common(6),
    }


def prompts_for(vocabulary: int, batch: int) -> list[list[int]]:
    """Return the prompts that both engines read."""
    numbers = random.Random(0)
    return [[numbers.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(batch)]


def compare_tokens(directory: Path, engine: str, found: list[int]) -> None:
    """Keep the tokens behind the prompts in the artifact, and print how many are those of the other engine."""
    file = directory / "first_tokens.json"
    told = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for other, tokens in told.items():
        if other != engine:
            alike = sum(map(int.__eq__, tokens, found))
            count = min(len(tokens), len(found))
            print(f"| {engine} | {directory.name} | first tokens as {other}'s | {alike} of {count} |")
    file.write_text(json.dumps({**told, engine: found}), encoding="utf-8")


def row(weights: str, engine: str, batch: int, repeats: list[list[float]]) -> None:
    """Print a row of what was served: seconds to the first token, then between the tokens."""
    decode = [batch * len(between) / sum(between) for _, *between in repeats]
    prompts = batch * PROMPT / fmean(first for first, *_ in repeats)
    each = " ".join(f"{rate:,.1f}" for rate in decode)
    print(f"| {engine} | {weights} | {batch} | as served | {fmean(decode):,.1f} | prompts {prompts:,.0f}; {each} |")


def kernel_row(weights: str, engine: str, batch: int, trace: Path) -> None:
    """Print a row of what the GPU did in a step, with the kernels that took most of it."""
    found = steps(trace)
    if "problem" in found:
        print(f"{engine} {weights} {batch}: {found['problem']}")
        return
    took = f"{found['busy_us']:,.0f} of {found['span_us']:,.0f} us, {found['kernels']:.0f} kernels"
    print(f"| {engine} | {weights} | {batch} | kernels alone | {batch / found['busy_us'] * 1e6:,.1f} | {took} |")
    for name, spent in found["longest"]:
        print(f"      {spent:9,.1f} us {name[:150]}")


def runs_of(batch: int) -> tuple[int, int]:
    """Return how many answers warm up, and how many are timed. Many sequences take long, and vary less."""
    return (2, 3) if batch < MANY else (1, 2)


def under_optkit(directory: Path, batches: list[int], file: str) -> Iterator[None]:
    """Measure optkit's session: CUDA graphs of its own kernels. Yields between what is served and the profiles."""
    import torch
    from optkit_evals.timing import answer

    from optkit.reports.profiling.torch_trace import trace_phases
    from optkit.session import open_session
    from optkit.settings.cuda_graphs import CudaGraphs

    with turn(file, fcntl.LOCK_SH):
        session: Any = open_session(directory, [CudaGraphs()], "cuda")
        print(f"optkit {directory.name} opened, {torch.cuda.memory_allocated() / 1e9:.1f} GB")
    prompts = torch.tensor(prompts_for(session.vocabulary, max(batches)), device="cuda")
    for batch in batches:
        with turn(file):
            warm_up, count = runs_of(batch)
            found = [answer(session, prompts[:batch], NEW) for _ in range(warm_up + count)][warm_up:]
        row(directory.name, "optkit", batch, [[each.first_token_s, *each.between_tokens_s] for each in found])
    with turn(file):
        compare_tokens(directory, "optkit", next(session.stream(prompts, 1)).tolist())
    yield
    traces = Path(tempfile.mkdtemp())
    for batch in batches:
        (traces / str(batch)).mkdir()
        with turn(file):
            trace_phases(session, prompts[:batch], 2 * PROFILED, traces / str(batch))
        kernel_row(directory.name, "optkit", batch, traces / str(batch) / "decode.trace.json")
    for note in session.notes:
        print(f"   {note}")


def under_vllm(directory: Path, batches: list[int], file: str) -> Iterator[None]:
    """Measure vLLM's engine as `LLM` opens it. Yields between what is served and the profiles."""
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # a function of ours goes to its process
    sys.path.insert(0, str(ROOT / "optkit" / "verification" / "workers"))
    from time_in_vllm import answer, kernels
    from vllm import LLM

    traces = Path(tempfile.mkdtemp())
    with turn(file, fcntl.LOCK_SH):
        llm = LLM(
            model=str(directory),
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=max(batches),
            enable_prefix_caching=False,
            profiler_config={
                "profiler": "torch",
                "torch_profiler_dir": str(traces),
                "torch_profiler_with_stack": False,
                "torch_profiler_use_gzip": False,
                "torch_profiler_dump_cuda_time_total": False,
            },
            compilation_config={"cudagraph_capture_sizes": sorted(batches)},
            gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=max(MANY, *batches) * CACHE,
        )
        config = llm.llm_engine.vllm_config
        print(
            f"vllm {directory.name} opened: {kernels(llm)}, asynchronous {config.scheduler_config.async_scheduling},"
            f" graphs {config.compilation_config.cudagraph_mode}"
        )
    prompts = prompts_for(llm.llm_engine.model_config.get_vocab_size(), max(batches))
    for batch in batches:
        warm_up, count = runs_of(batch)
        with turn(file):
            found = [answer(llm.llm_engine, prompts[:batch], NEW) for _ in range(warm_up + count)][warm_up:]
        row(directory.name, "vllm", batch, found)
    with turn(file):
        compare_tokens(directory, "vllm", first_tokens(llm.llm_engine, prompts))
    yield
    for batch in batches:
        with turn(file):
            trace_steps(llm, prompts[:batch])
        kernel_row(directory.name, "vllm", batch, max(traces.rglob("*.json"), key=lambda each: each.stat().st_mtime))
    llm.llm_engine.engine_core.shutdown()


def first_tokens(engine: Any, prompts: list[list[int]]) -> list[int]:
    """Return the token behind each prompt."""
    from vllm import SamplingParams

    wanted, found = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False), dict[str, int]()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, wanted)
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = output.outputs[0].token_ids[0]
    return [found[str(number)] for number in range(len(prompts))]


def trace_steps(llm: Any, prompts: list[list[int]]) -> None:
    """Profile steps in the middle of an answer, to unlike prompts: sequences that are alike share experts."""
    from vllm import SamplingParams

    engine, counts = llm.llm_engine, dict.fromkeys(map(str, range(len(prompts))), 0)
    wanted = SamplingParams(temperature=0, max_tokens=3 * PROFILED, ignore_eos=True, detokenize=False)
    for name, prompt in zip(counts, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, wanted)

    def until(tokens: int) -> None:
        while engine.has_unfinished_requests() and min(counts.values()) < tokens:
            for output in engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)

    until(PROFILED)
    llm.start_profile()
    until(2 * PROFILED)
    llm.stop_profile()
    until(3 * PROFILED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "optkit", "vllm"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", default="llama")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--weights", default="int4,fp8")
    parser.add_argument("--batches", default="1,32,64,128")
    parser.add_argument("--turn", default="")
    given = parser.parse_args()
    batches = [int(each) for each in given.batches.split(",")]
    if given.what == "make":
        make(given.directory, given.shape, given.layers, given.weights.split(","))
    else:
        measured = {"optkit": under_optkit, "vllm": under_vllm}[given.what](given.directory, batches, given.turn)
        with turn(given.turn, fcntl.LOCK_SH, ".served"):
            next(measured)
        with turn(given.turn, of=".served"):
            pass  # the others have served, too
        list(measured)


if __name__ == "__main__":
    main()
