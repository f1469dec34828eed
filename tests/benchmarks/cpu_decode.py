"""Decoding on CPUs, in turns: float models, INT4 artifacts, and llama.cpp if a Python with
llama-cpp-python is named.

    python tests/benchmarks/cpu_decode.py --float MODEL... --artifacts ARTIFACT...
        [--llama-cpp PYTHON --gguf FILE...]

Each runs in a fresh process in each round, one after the other, so that a machine that slows down
costs all alike. A process warms up on one answer and times three: random token ids, greedy, no
early stop, wall clock. A row is the mean of the rounds' medians, with the lowest and the highest of
them. `transformers' step` is the first artifact with the same kernels, called by transformers token
by token; `own step` is a float model with `cpu_decoder`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WARM_UP, REPEATS = 1, 3
TRANSFORMERS_STEP, OWN_STEP = "transformers' step", "own step"
Answer = Callable[[], tuple[float, float]]
"""One answer: prompt tokens per second, new tokens per second."""


def main() -> None:
    arguments = _arguments()
    if arguments.worker:
        _work(arguments)
        return
    contenders = [(kind, each) for each in arguments.float for kind in ("torch", OWN_STEP)]
    contenders += [("torch", each) for each in arguments.artifacts]
    contenders += [(TRANSFORMERS_STEP, each) for each in arguments.artifacts[:1]]
    contenders += [("llama.cpp", each) for each in arguments.gguf]
    found: dict[tuple[str, Path], list[dict[str, Any]]] = {contender: [] for contender in contenders}
    for _ in range(arguments.rounds):
        for kind, place in contenders:
            found[kind, place].append(_measured(arguments, kind, place))
            print(f"{kind}: {place.name}: {found[kind, place][-1]['decode']:.1f} tokens/s", file=sys.stderr, flush=True)
    for line in _table(found, arguments):
        print(line)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decoding on CPUs")
    parser.add_argument(
        "--float", type=Path, nargs="+", help="unquantized models: the others are compared with the first"
    )
    parser.add_argument("--artifacts", type=Path, nargs="*", default=[])
    parser.add_argument("--llama-cpp", type=Path, help="a Python that has llama-cpp-python")
    parser.add_argument("--gguf", type=Path, nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU seconds of one thread, which other programs change less"
    )
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "PLACE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _measured(arguments: argparse.Namespace, kind: str, place: Path) -> dict[str, Any]:
    """Run one contender in a process of its own."""
    python = str(arguments.llama_cpp) if kind == "llama.cpp" else sys.executable
    sizes = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in ("threads", "prompt", "new-tokens")]
    sizes += ["--cpu-time"] if arguments.cpu_time else []
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
    if kind != "llama.cpp":
        environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in (".", "cli", "evals"))
    command = [python, __file__, *sizes, "--worker", kind, str(place)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{kind} {place}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _work(arguments: argparse.Namespace) -> None:
    kind, place = arguments.worker
    if arguments.cpu_time:
        time.perf_counter = time.process_time
    answer, facts = (_llama if kind == "llama.cpp" else _torch)(arguments, kind, Path(place))
    timings = [answer() for _ in range(WARM_UP + REPEATS)][WARM_UP:]
    prefill, decode = (statistics.median(each) for each in zip(*timings, strict=True))
    print(json.dumps({"prefill": prefill, "decode": decode, **facts}))


def _torch(arguments: argparse.Namespace, kind: str, place: Path) -> tuple[Answer, dict[str, Any]]:
    import torch
    from optkit_evals.timing import answer, random_tokens

    from optkit.session import open_session
    from optkit.settings.cpu_decoder import CpuDecoder

    torch.set_num_threads(arguments.threads)
    session: Any = open_session(place, [CpuDecoder()] if kind == OWN_STEP else [])
    if kind == TRANSFORMERS_STEP:
        session.decode_with(None)
    tokens = random_tokens(session, 1, arguments.prompt, 0)

    def run() -> tuple[float, float]:
        timing = answer(session, tokens, arguments.new_tokens)
        return arguments.prompt / timing.first_token_s, (arguments.new_tokens - 1) / timing.decode_s

    step_bytes = session.decode_bytes(1, arguments.prompt + arguments.new_tokens // 2)
    return run, {"bytes": step_bytes, "versions": {name: metadata.version(name) for name in ("torch", "transformers")}}


def _llama(arguments: argparse.Namespace, kind: str, place: Path) -> tuple[Answer, dict[str, Any]]:
    import random

    import llama_cpp
    import numpy as np

    model = llama_cpp.llama_model_load_from_file(str(place).encode(), llama_cpp.llama_model_default_params())
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch = arguments.prompt + arguments.new_tokens, arguments.prompt
    options.n_threads = options.n_threads_batch = arguments.threads
    context = llama_cpp.llama_init_from_model(model, options)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    random.seed(0)
    prompt = [random.randrange(vocabulary) for _ in range(arguments.prompt)]

    def following(tokens: list[int]) -> int:
        held = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(held, len(tokens))):
            raise SystemExit("llama_decode failed")
        return int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (vocabulary,)).argmax())

    def run() -> tuple[float, float]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        start = time.perf_counter()
        token = following(prompt)
        first = time.perf_counter()
        for _ in range(arguments.new_tokens - 1):
            token = following([token])
        return arguments.prompt / (first - start), (arguments.new_tokens - 1) / (time.perf_counter() - first)

    return run, {"bytes": place.stat().st_size, "versions": {"llama-cpp-python": metadata.version("llama-cpp-python")}}


def _table(found: dict[tuple[str, Path], list[dict[str, Any]]], arguments: argparse.Namespace) -> Iterator[str]:
    yield "| what | decode tokens/s [lowest, highest round] | x float | MB read a token | GB/s | prefill tokens/s |"
    yield "|---|---|---|---|---|---|"
    slowest = statistics.mean(each["decode"] for each in next(iter(found.values())))
    versions: dict[str, str] = {}
    for (kind, place), rounds in found.items():
        decode, prefill = ([each[name] for each in rounds] for name in ("decode", "prefill"))
        mean, size = statistics.mean(decode), rounds[0]["bytes"]
        name = f"{kind}: {place.name}"
        spread = f"{mean:.1f} [{min(decode):.1f}, {max(decode):.1f}]"
        bandwidth = f"{size / 1e6:.0f} | {size * mean / 1e9:.1f}"
        prompts = f"{statistics.mean(prefill):.0f} [{min(prefill):.0f}, {max(prefill):.0f}]"
        yield f"| {name} | {spread} | {mean / slowest:.2f} | {bandwidth} | {prompts} |"
        versions |= rounds[0]["versions"]
    yield ""
    yield (
        f"{'CPU time. ' if arguments.cpu_time else ''}Batch 1, prompt {arguments.prompt}, "
        f"{arguments.new_tokens} new tokens, {arguments.threads} threads;"
        f" {arguments.rounds} rounds in turns, {WARM_UP} warm-up and the median of {REPEATS} "
        f"answers in each; {_processor()},"
        f" {', '.join(f'{name} {version}' for name, version in versions.items())}, Python {platform.python_version()}."
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
