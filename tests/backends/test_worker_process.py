"""A worker speaks JSON lines on a pipe of its own, its errors come through, and it never outlives
its parent.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optkit.backends.process import KEPT_LOGS, LAUNCH, run_worker
from optkit.errors import StageError
from optkit.progress import SilentProgress
from tests.support.fake_library import Heard, environment_at
from tests.support.waiting import ended, wait_until

REQUEST: dict[str, Any] = {
    "method": "gptq",
    "source": "/source",
    "target": "/target",
    "layers": {"a": {"bits": 4}},
    "kept": [],
    "quantization": {},
    "blocks": 2,
    "fields": {"damping": 0.5},
    "device": "cpu",
    "dtype": "float32",
    "seed": 0,
    "windows": [[1, 2]],
    "probe": [],
}
Toy = Callable[[str], Path]


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """Return what writes a library's worker beside a copy of launch.py, and returns that copy."""

    def write(body: str) -> Path:
        place = tmp_path / "workers"
        place.mkdir(exist_ok=True)
        shutil.copy(LAUNCH, place)
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        (place / "toy.py").write_text(f"import os, sys, time\ndef quantize(job):\n{lines}", encoding="utf-8")
        return place / "launch.py"

    return write


def run(
    launch: Path,
    progress: SilentProgress | None = None,
    check: Callable[[Path], None] = lambda file: None,
    **changes: Any,
) -> Any:
    directory = launch.parent.parent / "env"
    environment = environment_at(directory)
    return run_worker(
        environment, {**REQUEST, **changes}, progress or Heard(), launch.parent / "toy.log", check, launch
    )


def test_progress_and_result_come_through_whatever_the_library_prints(toy: Toy) -> None:
    body = """print('{"type": "error"}')
os.write(1, b"noise"); os.write(2, b"noise")
job.start("toy gptq", job.blocks, "blocks")
job.advance("block 0")
job.warn("odd")
return {"damping": job.fields["damping"], "windows": job.windows, "gpu": os.environ["CUDA_VISIBLE_DEVICES"],
        "offline": os.environ["HF_HUB_OFFLINE"], "path": sys.path[0], "device": job.device}"""
    heard = Heard()
    launch = toy(body)
    details = run(launch, heard)
    assert heard.lines == ["toy gptq of 2 blocks", "+1 block 0", "warning: toy: odd", "end"]
    path = details.pop("path")
    assert details == {"damping": 0.5, "windows": [[1, 2]], "gpu": "", "offline": "1", "device": "cpu"}
    assert path != str(launch.parent)  # there a worker has the name of its library
    assert not (launch.parent / "toy.log").exists()


def test_a_gpu_is_the_only_one_that_the_worker_sees(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = toy("return {'gpu': os.environ['CUDA_VISIBLE_DEVICES'], 'device': job.device}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert run(launch, device="cuda:1") == {"gpu": "7", "device": "cuda:0"}


def test_the_librarys_exception_comes_through(toy: Toy) -> None:
    launch = toy("print('much'); raise ValueError('group size 7 is odd\\nand more')")
    said = (
        r"^backend toy: ValueError: group size 7 is odd. The library stopped there. Its whole output is "
        r"in (\S+); `backend: optkit` does"
    )
    with pytest.raises(StageError, match=said):
        run(launch)
    log = (launch.parent / "toy.log").read_text()
    assert "much" in log
    assert "Traceback" in log


def test_of_the_logs_of_runs_that_failed_the_newest_are_kept(toy: Toy) -> None:
    launch = toy("raise ValueError('odd')")
    logs = [launch.parent / f"toy-{number}.log" for number in range(KEPT_LOGS + 3)]
    for age, log in enumerate(logs):
        log.write_text("")
        os.utime(log, (1e9 - age, 1e9 - age))
    with logs[-1].open("r") as another_run:
        fcntl.flock(another_run, fcntl.LOCK_SH)
        with pytest.raises(StageError, match="odd"):
            run(launch)
    assert {log.name for log in launch.parent.glob("*.log")} == {
        "toy.log",
        *(log.name for log in logs[:KEPT_LOGS]),
        logs[-1].name,
    }


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "os.write(2, b'out of luck\\n'); os._exit(3)",
            "its process ended with status 3 and without a result. Its last words: out of luck.",
        ),
        (
            "os.kill(os.getpid(), 9)",
            r"was ended by SIGKILL \(the system ends a process so when memory runs out\) and without a result.",
        ),
        ("os.kill(os.getpid(), 11)", "was ended by SIGSEGV and without a result. It said nothing. Its output is in "),
    ],
)
def test_a_worker_that_dies_says_how(toy: Toy, body: str, said: str) -> None:
    with pytest.raises(StageError, match=said):
        run(toy(body))


def test_a_result_counts_without_its_log(toy: Toy, tmp_path: Path) -> None:
    assert run(toy(f"os.unlink({str(tmp_path / 'workers' / 'toy.log')!r}); return {{'done': 1}}")) == {"done": 1}


def test_a_death_without_a_log_says_how(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"status 3 and without a result. Its output was deleted meanwhile.$"):
        run(toy(f"os.unlink({str(tmp_path / 'workers' / 'toy.log')!r}); os._exit(3)"))


def test_an_exception_without_a_word_says_where(toy: Toy) -> None:
    with pytest.raises(
        StageError, match=r"AssertionError: assert job.blocks == 7 \(toy.py, line 3\). The library stopped there"
    ):
        run(toy("assert job.blocks == 7"))


def test_a_library_without_a_worker(toy: Toy) -> None:
    launch = toy("pass")
    (launch.parent / "toy.py").unlink()
    with pytest.raises(StageError, match="backend toy: FileNotFoundError"):
        run(launch)


SLEEPS = """import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open(job.source, "w").write(f"{os.getpid()} {child.pid}")
job.start("toy", 2, "blocks")
job.advance()
time.sleep(300)"""


def test_ctrl_c_ends_the_worker_and_its_children(toy: Toy, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(toy(SLEEPS), Heard(interrupt), source=str(tmp_path / "pids"))
    assert ended(*map(int, (tmp_path / "pids").read_text().split()))


def test_logits_that_differ_end_the_worker(toy: Toy, tmp_path: Path) -> None:
    def differ(file: Path) -> None:
        assert file == Path("/logits")
        raise StageError("two models")

    body = (
        f"open({str(tmp_path / 'pids')!r}, 'w').write(str(os.getpid())); job.parent.tell('logits', "
        "file='/logits'); time.sleep(300)"
    )
    with pytest.raises(StageError, match="two models"):
        run(toy(body), check=differ)
    assert ended(int((tmp_path / "pids").read_text()))


def test_a_parent_that_is_killed_takes_the_worker_along(toy: Toy, tmp_path: Path) -> None:
    launch = toy(SLEEPS)
    program = f"""
from pathlib import Path
from tests.backends.test_worker_process import run
run(Path({str(launch)!r}), source={str(tmp_path / "pids")!r})
"""
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=root, env={**os.environ, "PYTHONPATH": f"{root}"})
    pids = tmp_path / "pids"
    assert wait_until(lambda: pids.exists() and pids.read_text() != "")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert ended(*map(int, pids.read_text().split()))
