"""Decoding on CPUs, in turns: float models, INT4 artifacts, and llama.cpp if a Python with
llama-cpp-python is named.

    python tests/benchmarks/cpu_decode.py --float MODEL... --artifacts ARTIFACT...
        [--llama-cpp PYTHON --gguf FILE...] [--arch x86-64-v3]

Each has a process of its own. All are open, and one answers after the other in each round, so that
a machine that slows down costs all alike: random token ids, greedy, no early stop, wall clock. What
comes first is no part of it: an answer to each length of prompts. A row is the median of the
rounds, with the quartiles; new tokens are those behind the first length. `transformers' step` is
the first artifact with the same kernels, called by transformers token by token; `own step` is a
float model with `cpu_decoder`. Behind the rounds all choose the token behind some texts, and the last
column counts those that the first float model chooses in transformers.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ANSWER = "answer: "
TRANSFORMERS_STEP, OWN_STEP = "transformers' step", "own step"
Answer = Callable[[int], tuple[float, float]]
"""One answer to a prompt of a length: prompt tokens per second, new tokens per second."""
Chooser = Callable[[list[int]], int]
"""The token behind a text."""
TEXTS, LENGTH = 64, 64


def main() -> None:
    arguments = _arguments()
    if arguments.worker:
        _work(arguments)
        return
    own = [(OWN_STEP, each) for each in arguments.float] + [("torch", each) for each in arguments.artifacts]
    others = [("torch", each) for each in arguments.float]
    others += [(TRANSFORMERS_STEP, each) for each in arguments.artifacts[:1]]
    others += [("llama.cpp", each) for each in arguments.gguf]
    contenders = [(kind, place, "") for kind, place in others + own]
    contenders += [(kind, place, name) for name in arguments.arch for kind, place in own]
    workers = [_worker(arguments, *each) for each in contenders]
    facts = [_next(worker) for worker in workers]
    found: list[dict[int, list[Any]]] = [{length: [] for length in arguments.prompt} for _ in workers]
    for turn in range(arguments.rounds + 1):
        for worker, rounds in zip(workers, found, strict=True):
            for length, answers in rounds.items():
                print(length, file=worker.stdin, flush=True)
                answer = _next(worker)
                if turn:
                    answers.append(answer)
    chosen = []
    texts = _texts(arguments.float[0])
    for worker in workers:
        print(texts, file=worker.stdin, flush=True)
        chosen.append(_next(worker))
    for fact, tokens in zip(facts, chosen, strict=True):
        fact["alike"] = sum(map(int.__eq__, tokens, chosen[0]))
    names = [f"{kind}{name and f', {name}'}: {'/'.join(place.parts[-2:])}" for kind, place, name in contenders]
    for line in _table(zip(names, facts, found, strict=True), arguments):
        print(line)


def _texts(model: Path) -> list[list[int]]:
    from optkit.source.calibration import Calibration  # which the Python of llama.cpp has not

    text = Calibration(dataset="python-reference", samples=TEXTS, sequence_length=LENGTH)
    return text.windows(model, None)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decoding on CPUs")
    parser.add_argument(
        "--float", type=Path, nargs="+", help="unquantized models: the others are compared with the first"
    )
    parser.add_argument("--artifacts", type=Path, nargs="*", default=[])
    parser.add_argument("--llama-cpp", type=Path, help="a Python that has llama-cpp-python")
    parser.add_argument("--gguf", type=Path, nargs="*", default=[])
    parser.add_argument("--arch", nargs="*", default=[], help="for these, too, optkit's kernels are compiled")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompt", type=int, nargs="+", default=[128], help="lengths")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="2 or more")
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU seconds of one thread, which other programs change less"
    )
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "PLACE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _worker(arguments: argparse.Namespace, kind: str, place: Path, arch: str) -> subprocess.Popen[str]:
    """Start the process of one contender."""
    python = str(arguments.llama_cpp) if kind == "llama.cpp" else sys.executable
    sizes = [f"--threads={arguments.threads}", f"--new-tokens={arguments.new_tokens}", "--prompt"]
    sizes += [*map(str, arguments.prompt), *(["--cpu-time"] if arguments.cpu_time else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
    environment |= {"OPTKIT_CPU_ARCH": arch} if arch else {}
    if kind != "llama.cpp":
        environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in (".", "cli", "evals"))
    command = [python, __file__, *sizes, "--worker", kind, str(place)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _next(worker: subprocess.Popen[str]) -> Any:
    """Return the next answer of a process; other lines are those of libraries."""
    assert worker.stdout
    for line in worker.stdout:
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    raise SystemExit(f"ended with {worker.wait()}: {worker.args!r}")


def _work(arguments: argparse.Namespace) -> None:
    kind, place = arguments.worker
    if arguments.cpu_time:
        time.perf_counter = time.process_time
    answer, choose, facts = (_llama if kind == "llama.cpp" else _torch)(arguments, kind, Path(place))
    print(ANSWER, json.dumps(facts), flush=True)
    for asked in map(json.loads, sys.stdin):
        print(ANSWER, json.dumps(answer(asked) if isinstance(asked, int) else [*map(choose, asked)]), flush=True)


def _torch(arguments: argparse.Namespace, kind: str, place: Path) -> tuple[Answer, Chooser, dict[str, Any]]:
    import torch
    from optkit_evals.timing import answer, random_tokens

    from optkit.session import open_session
    from optkit.settings.cpu_decoder import CpuDecoder

    torch.set_num_threads(arguments.threads)
    session: Any = open_session(place, [CpuDecoder()] if kind == OWN_STEP else [])
    if kind == TRANSFORMERS_STEP:
        session.decode_with(None)
    prompts = {length: random_tokens(session, 1, length, 0) for length in arguments.prompt}

    def run(length: int) -> tuple[float, float]:
        timing = answer(session, prompts[length], arguments.new_tokens)
        return length / timing.first_token_s, (arguments.new_tokens - 1) / timing.decode_s

    def choose(text: list[int]) -> int:
        return int(next(session.stream(torch.tensor([text]), 1)))

    step_bytes = session.decode_bytes(1, arguments.prompt[0] + arguments.new_tokens // 2)
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    return run, choose, {"bytes": step_bytes, "versions": versions}


def _llama(arguments: argparse.Namespace, kind: str, place: Path) -> tuple[Answer, Chooser, dict[str, Any]]:
    import random

    import llama_cpp
    import numpy as np

    model = llama_cpp.llama_model_load_from_file(str(place).encode(), llama_cpp.llama_model_default_params())
    options = llama_cpp.llama_context_default_params()
    longest = max(*arguments.prompt, LENGTH)
    options.n_ctx, options.n_batch = longest + arguments.new_tokens, longest
    options.n_threads = options.n_threads_batch = arguments.threads
    context = llama_cpp.llama_init_from_model(model, options)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    random.seed(0)
    prompts = {length: [random.randrange(vocabulary) for _ in range(length)] for length in arguments.prompt}

    def following(tokens: list[int]) -> int:
        held = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(held, len(tokens))):
            raise SystemExit("llama_decode failed")
        return int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (vocabulary,)).argmax())

    def forget() -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)

    def choose(text: list[int]) -> int:
        forget()
        return following(text)

    def run(length: int) -> tuple[float, float]:
        forget()
        start = time.perf_counter()
        token = following(prompts[length])
        first = time.perf_counter()
        for _ in range(arguments.new_tokens - 1):
            token = following([token])
        return length / (first - start), (arguments.new_tokens - 1) / (time.perf_counter() - first)

    versions = {"llama-cpp-python": metadata.version("llama-cpp-python")}
    return run, choose, {"bytes": place.stat().st_size, "versions": versions}


def _table(
    found: Iterable[tuple[str, dict[str, Any], dict[int, list[Any]]]], arguments: argparse.Namespace
) -> Iterator[str]:
    from optkit.environment import cpu_name  # which the Python of llama.cpp has not

    lengths = arguments.prompt
    prompts = "".join(f" prompt {length} |" for length in lengths)
    yield f"| what | decode, tokens/s | x float | MB read a token | GB/s |{prompts} tokens as float |"
    yield "|---" * (6 + len(lengths)) + "|"
    first: float | None = None
    versions: dict[str, str] = {}
    for name, facts, rounds in found:
        decode = [each for _, each in rounds[lengths[0]]]
        middle, size = statistics.median(decode), facts["bytes"]
        first = first or middle
        cells = [_spread(decode, 1), f"{middle / first:.2f}", f"{size / 1e6:.0f}", f"{size * middle / 1e9:.1f}"]
        cells += [_spread([each for each, _ in rounds[length]], 0) for length in lengths]
        cells.append(f"{facts['alike']} of {TEXTS}")
        yield f"| {' | '.join([name, *cells])} |"
        versions |= facts["versions"]
    yield ""
    yield (
        f"{'CPU time. ' if arguments.cpu_time else ''}Batch 1, {arguments.new_tokens} new tokens, "
        f"{arguments.threads} threads; {arguments.rounds} rounds in turns, medians [quartiles]; {cpu_name()},"
        f" {', '.join(f'{name} {version}' for name, version in versions.items())}, Python {platform.python_version()}."
    )


def _spread(rates: list[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(rates, n=4, method="inclusive")
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


if __name__ == "__main__":
    main()
