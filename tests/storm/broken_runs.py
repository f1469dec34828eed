"""Runs that are killed, signalled, or at work in one store together: nothing is lost or changed by
it.
"""

import json
import signal
import time
from pathlib import Path

from tests.storm.desk import RECIPE, Desk, clear, differences, left, rubbish, run_words, write
from tests.storm.forked import MARK, Running, call, left_behind, start

MESSAGE_S, END_S = 2.0, 5.0
AGAIN_S = 120.0
SIGNALS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated"), signal.SIGHUP: (129, "terminated")}


def kills(desk: Desk, count: int | None) -> None:
    """Kill a run at a moment of its own; the same command then ends in the bytes of one that was
    left alone.
    """
    wanted = left(desk.peace)
    index = 0
    while index < (100 if count is None else count):
        place, flaws = desk.place("kill"), []
        moments = [desk.draw.uniform(0.02, 1.2) * desk.seconds for _ in range(desk.draw.choice((1, 1, 2)))]
        killed = [_kill(place, moment) for moment in moments]
        if not any(killed):
            clear(place)
            continue  # it was done before
        index += 1
        again = call(run_words(), place, limit_s=AGAIN_S)
        if again.status != 0:
            flaws.append("the same command did not end well")
        else:
            flaws = [*differences(wanted, left(place)), *(f"{name} is left" for name in rubbish(place))]
        desk.judge(
            f"kill {index} after {', '.join(f'{moment:.2f}' for moment in moments)} s", flaws + again.flaws, again
        )
        if not flaws:
            clear(place)


def signals(desk: Desk, count: int | None) -> None:
    """Send a run a signal at a moment of its own: it says so, ends with the right status and
    without children, and the next run is well.
    """
    wanted = left(desk.peace)
    wanted_count = 60 if count is None else count
    index = 0
    while index < wanted_count:
        timed = index % 6 == 5
        place, mark = desk.place("signal"), f"{desk.root.name}-{index}-{desk.cases}"
        if timed:  # a process of its own measures, and has to go too
            throughput = {"batch_sizes": [1], "prompts": [8], "new_tokens": 4, "repeats": 2}
            write(place / "r.yaml", {**RECIPE, "evals": [{"throughput": throughput}, *RECIPE["evals"]]})
        number = desk.draw.choice(list(SIGNALS))
        moment = desk.draw.uniform(0.05, 1.0) * (desk.seconds + 6 * timed)
        running = start(run_words(), place, {MARK: mark})
        if _until(running, moment) is not None:
            clear(place)
            continue  # it was done before
        index += 1
        flaws = _signal(running, number, double=desk.draw.random() < 0.2)
        if left_behind(mark):
            time.sleep(0.5)
            flaws += [f"process {pid} is left" for pid in left_behind(mark)]
        write(place / "r.yaml", RECIPE)
        again = call(run_words(), place, limit_s=AGAIN_S)
        flaws += again.flaws + ([] if again.status == 0 else ["the next run did not end well"])
        flaws += [] if again.status else differences(wanted, left(place)) if not timed else []
        desk.judge(f"{number.name} after {moment:.2f} s", flaws, again)
        if not flaws:
            clear(place)


def together(desk: Desk, count: int | None) -> None:
    """Let several runs, and somebody who cleans up, use one store at once: each artifact is that of
    a run alone.
    """
    wanted = {name: digest for name, digest in left(desk.peace).items() if name.startswith("artifact")}
    other = {**RECIPE, "name": "other", "stages": ["bf16", {"rtn": {"bits": 8, "group_size": 32}}]}
    alone = desk.place("alone")
    write(alone / "r.yaml", other)
    assert call(run_words(), alone, limit_s=AGAIN_S).status == 0
    wanted_of_other = {name: digest for name, digest in left(alone).items() if name.startswith("artifact")}
    for index in range(10 if count is None else count):
        place, flaws = desk.place("together"), []
        write(place / "other.yaml", other)
        runs = [
            start(run_words("out0"), place),
            start(run_words("out1"), place),
            start(run_words("out2", recipe="other.yaml"), place),
        ]
        runs.append(start(["store", "prune", "--older-than", "1h", "--store", "store"], place))
        for running in runs:
            ended = running.wait(AGAIN_S)
            flaws += ended.flaws + ([f"{ended.told()}"] if ended.status else [])
        if not flaws:
            for name, expected in (("out0", wanted), ("out1", wanted), ("out2", wanted_of_other)):
                found = {each: digest for each, digest in left(place, name).items() if each.startswith("artifact")}
                flaws += [f"{name}: {each}" for each in differences(expected, found)]
            flaws += [f"{name} is left" for name in rubbish(place)]
            keys = {
                step["key"]
                for name in ("out0", "out2")
                for step in json.loads((place / name / "optkit.json").read_text())["steps"]
            }
            flaws += [
                f"step {key[:8]} is lost"
                for key in keys
                if not (place / "store" / "steps" / key / "record.json").is_file()
            ]
        desk.judge(f"set {index}", flaws)
        if not flaws:
            clear(place)


def _until(running: Running, moment_s: float) -> int | None:
    """Wait for a moment; the exit status if it ended before."""
    while time.monotonic() - running.started < moment_s:
        if (status := running.ended()) is not None:
            return status
        time.sleep(0.002)
    return None


def _kill(place: Path, moment_s: float) -> bool:
    """Start the run and kill it at a moment; say whether it was there."""
    running = start(run_words(), place)
    if _until(running, moment_s) is not None:
        return False
    running.send(signal.SIGKILL)
    running.wait()
    return True


def _signal(running: Running, number: signal.Signals, double: bool) -> list[str]:
    """Send a signal, or two; return what was not as it should be."""
    expected, word = SIGNALS[number]
    sent = time.monotonic()
    running.send(number)
    said = status = None
    while status is None and time.monotonic() - sent < END_S + 10:
        if said is None and word in running.err:
            said = time.monotonic() - sent
            if double:
                time.sleep(0.4)
                running.send(number)
        status = running.ended()
        time.sleep(0.005)
    took = time.monotonic() - sent
    said = said if said is not None else took if word in running.err else None
    if status is None:
        running.wait(0)
        return ["it goes on"]
    flaws = [] if status == expected else [f"status {status} and not {expected}"]
    flaws += [] if took <= END_S else [f"it took {took:.1f} s to end"]
    flaws += (
        []
        if said is not None and said <= MESSAGE_S
        else ["it says nothing" if said is None else f"it said so after {said:.1f} s"]
    )
    return flaws + (["a traceback"] if "Traceback" in running.err or "Exception ignored" in running.err else [])
