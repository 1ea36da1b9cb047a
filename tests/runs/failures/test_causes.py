"""Why a process ended, read from its last lines. The logs come from real processes.

They were written by a small training on torch 2.13 that did the one thing its file is named for: `worker_shm`
with /dev/shm as a mount of 64 MB, `disk` on one of 2 MB. `cuda_oom` and `peer` hold the text of such errors.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurmddp.host.heartbeat_page import ReportedError
from slurmddp.runs.failures import torchrun_report
from slurmddp.runs.failures.capture import here, last_lines, tail_of, unexplained
from slurmddp.runs.failures.causes import ADVICE, find_cause
from slurmddp.runs.failures.failure import Failure, is_consequence
from slurmddp.runs.failures.kinds import Cause
from slurmddp.runs.failures.tracebacks import TRACEBACK

LOGS = Path(__file__).parent / "last_lines"
SIGNALS = {"segv": -11, "bus": -7, "torchrun_killed": -9}
AT_LIMIT = "at the limit of 4 GiB"

REASONS = {
    "torch_exception": "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5) "
    "(train.py:16 in step)",
    "worker_exception": "ValueError: bad sample 5 (train.py:8 in __getitem__)",
    "memory_error": "out of memory: MemoryError (train.py:17 in step)",
    "alloc": "out of memory: RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPU"
    "Allocator: can't allocate memory: you tried to allocate 4503599627370496 bytes. Error code 12 (Cannot "
    "allocate memory) (train.py:18 in step)",
    "cuda_oom": "out of GPU memory: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
    "GPU 0 has a total capacity of 79.15 GiB of which 1.06 GiB is free. Including non-PyTorch memory, this "
    "process has 78.08 GiB m... (train.py:32 in step)",
    "worker_killed": "out of memory, most likely: a data worker was killed",
    "worker_segv": "crashed in a data worker: segmentation fault",
    "worker_gone": "crashed in a data worker: illegal instruction (train.py:8 in __getitem__)",
    "worker_shm": "shared memory (/dev/shm) is full: RuntimeError: unable to allocate shared memory(shm) for "
    "file </torch_8256_1842347783_0>: No space left on device (28) (train.py:35 in main)",
    "disk": "no space left: OSError: [Errno 28] No space left on device (train.py:23 in step)",
    "torch_disk": "no space left, most likely: RuntimeError: [enforce fail at inline_container.cc:672] . "
    "unexpected pos 576 vs 534 (train.py:24 in step)",
    "files": "too many open files: OSError: [Errno 24] Too many open files: '/dev/null' "
    "(train.py:31 in <listcomp>)",
    "segv": "crashed (train.py:19 in step)",
    "bus": "shared memory (/dev/shm) is full, or a memory-mapped file was truncated or is on a full disk "
    "(train.py:29 in step)",
    "no_torch": "not the right Python on the node: ModuleNotFoundError: No module named 'torch' "
    "(train.py:1 in <module>)",
    "peer": "lost another rank: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] "
    "Connection closed by peer [10.0.0.1]:4711",
    "torchrun_error": "ValueError: bad sample 5 (train.py:12 in step), in rank 1 of its torchrun",
    "torchrun_killed": "in rank 1 of its torchrun",
    "torchrun_stopped": "in rank 0 of its torchrun",
    "torchrun_signal": "torch.distributed.elastic.multiprocessing.api.SignalException: Process 26896 got "
    "signal: 15 (torchrun:8 in <module>)",
}  # fmt: skip


def failure_in(name: str, oom: str | None = None) -> Failure:
    failure = here(SIGNALS.get(name, 1), node_rank=0, lines=last_lines(LOGS / f"{name}.log"), oom=oom)
    assert len(failure.last_lines) <= 30, "a failure keeps only the last lines"
    return failure


def read(name: str, oom: str | None = None) -> str:
    return failure_in(name, oom).reason


def test_every_recorded_log_has_its_own_reason() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == set(REASONS)
    assert {name: read(name) for name in REASONS} == REASONS


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("torchrun_error", (1, 1)),
        ("torchrun_killed", (-9, 1)),
        ("torchrun_stopped", (75, 0)),
        ("torchrun_signal", (-15, None)),
        ("torch_exception", None),
    ],
)
def test_a_torchrun_reports_how_its_ranks_ended(name: str, end: tuple[int, int | None] | None) -> None:
    lines = last_lines(LOGS / f"{name}.log")
    report = torchrun_report.read(lines)
    assert (report and (report.exit_code, report.rank)) == end
    assert torchrun_report.read([*lines, TRACEBACK, "ValueError: of the shell's next program"]) is None
    if report:
        assert not any("torchrun" in line for line in failure_in(name).last_lines)


@pytest.mark.parametrize(
    ("oom", "reason"),
    [
        (None, ""),
        ("", "by a person, the site or SLURM (the kernel counted no out-of-memory kill)"),
        (AT_LIMIT, "out of memory: the kernel killed it at the limit of 4 GiB"),
    ],
)
def test_only_the_kernels_count_distinguishes_kills(oom: str | None, reason: str) -> None:
    assert find_cause(None, "SIGKILL", ["MemoryError"], oom).reason == reason


def test_a_killed_data_worker_ran_out_of_memory_if_the_kernel_says_so() -> None:
    assert (
        read("worker_killed", AT_LIMIT)
        == "out of memory: the kernel killed a data worker at the limit of 4 GiB"
    )
    assert read("worker_killed", "").startswith("a data worker was killed by a person, the site or SLURM")


BUS = "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory."


@pytest.mark.parametrize(
    ("before", "oom", "reason"),
    [
        (BUS, None, "shared memory (/dev/shm) is full: a data worker ended with a bus error"),
        ("", AT_LIMIT, "out of memory: the kernel killed a data worker at the limit of 4 GiB"),
        ("", "", "a data worker ended by itself, or was killed"),
    ],
)
def test_a_data_worker_that_is_gone_while_its_batch_is_fetched_is_the_cause(
    before: str, oom: str | None, reason: str
) -> None:
    """The rank has then lost a connection, and torch does not report that the other rank ended."""
    lines = (LOGS / "worker_gone.log").read_text().splitlines()
    fetching = lines[lines.index("Traceback (most recent call last):") :]
    assert find_cause(1, None, [before, *fetching], oom).reason == reason


def test_a_count_of_kills_says_nothing_of_a_plain_exception() -> None:
    assert read("torch_exception", AT_LIMIT) == REASONS["torch_exception"]


LOST = "RuntimeError: [pair.cc:5] Connection closed by peer"
TRIED = "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nKeyError: 'tried'\n"


@pytest.mark.parametrize("earlier", [TRIED, TRIED.replace("KeyError: 'tried'", LOST), ""])
@pytest.mark.parametrize("code", [76, 78, 79])
@pytest.mark.parametrize("message", ["lr is 7 km.", "MismatchError: nodes=2, and there is one."])
def test_a_refusal_is_quoted(message: str, code: int, earlier: str) -> None:
    line = message if "Error: " in message else f"Error: {message}"
    assert find_cause(code, None, tail_of(f"{earlier}{line}\nGive a number.")).reason == message


def test_an_error_of_slurmddp_without_an_exception_is_the_reason() -> None:
    text = "step 7\nCheckpointError: Rank 0 could not write it.\nMake room."
    assert find_cause(1, None, tail_of(text)).reason == "CheckpointError: Rank 0 could not write it."
    assert find_cause(1, None, tail_of(TRIED + text)).reason == "KeyError: 'tried' (a.py:1 in f)"


@pytest.mark.parametrize("returncode", [1, 78, -6])
@pytest.mark.parametrize("log", [f"{TRIED}step 7", "Error: the first server is away", f"{TRIED}{LOST}", ""])
@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("no data in /x", "other", "no data in /x"),
        ("ConfigError: lr is 7 km.", "other", "ConfigError: lr is 7 km"),
        ("these are missing:\na.txt\nb.txt", "other", "these are missing: a.txt"),
        ("a.pt: No space left on device", "disk_full", "no space left: a.pt: No space left on device"),
    ],
)
def test_what_a_rank_has_reported_is_the_reason_whatever_its_log_says(
    text: str, kind: str, reason: str, log: str, returncode: int
) -> None:
    failure = unexplained(returncode, log.splitlines, node_rank=0, rank=1)
    cause = replace(failure, reported=ReportedError(text, "")).explained
    assert (cause.kind, cause.reason) == (kind, reason)


def test_a_rank_that_reports_the_loss_of_another_is_a_consequence() -> None:
    reported = ReportedError("RankFailure: Rank 0 went away.", "Its log says why.", is_lost_rank=True)
    failure = replace(unexplained(1, list, node_rank=0, rank=1), reported=reported).explained
    assert is_consequence(failure)
    assert failure.reason == "lost another rank: RankFailure: Rank 0 went away"


def test_a_rank_that_was_killed_has_not_ended_by_the_error_that_it_reported() -> None:
    failure = unexplained(-9, list, node_rank=0, rank=1, oom=AT_LIMIT)
    killed = replace(failure, reported=ReportedError("ConfigError: lr is 7 km.", "")).explained
    assert killed.kind == "out_of_memory"


def test_lines_that_torch_marks_with_their_rank_are_read_as_well() -> None:
    marked = (f"[rank3]: {line}" for line in (LOGS / "disk.log").read_text().splitlines())
    assert find_cause(1, None, list(marked)).reason == REASONS["disk"]


TERMINATED = "terminate called without an active exception"


FATAL = f"{TERMINATED}\nFatal Python error: Aborted\n\nCurrent thread 0x7 (most recent call first):\n"
AT_EXIT = [TERMINATED, f"{FATAL}  Garbage-collecting\n  <no Python frame>"]


@pytest.mark.parametrize("end", AT_EXIT, ids=["faulthandler is off", "faulthandler is on"])
def test_an_abort_while_python_shuts_down_is_named(end: str) -> None:
    cause = find_cause(None, "SIGABRT", tail_of(f"step 100, loss 2.0\n{end}\n"))
    assert cause == Cause("crashed_at_exit", f"crashed at its exit: {TERMINATED}")
    assert "gloo" in ADVICE[cause.kind] and "the whole stack" not in ADVICE[cause.kind]
    error = (LOGS / "torch_exception.log").read_text()
    reason = find_cause(None, "SIGABRT", tail_of(f"{error}{end}\n")).reason
    assert reason == REASONS["torch_exception"], "the abort does not hide the error of the program"


def test_an_abort_before_the_exit_has_a_stack() -> None:
    text = f'step 100, loss 2.0\n{FATAL}  File "/home/a/train.py", line 7 in main\n'
    assert find_cause(None, "SIGABRT", tail_of(text)).reason == "crashed (train.py:7 in main)"


def test_an_abort_quotes_the_library() -> None:
    text = "terminate called after throwing an instance of 'c10::Error'\n  what():  bad device\nFatal error"
    assert find_cause(None, "SIGABRT", tail_of(text)).reason == "crashed: bad device"
    lost = "[c10d] sendBytes failed on SocketImpl(fd=3, addr=[n1]:1, remote=[n2]:2): Broken pipe"
    assert find_cause(None, "SIGABRT", [lost]).reason == f"lost another rank: {lost}"


@pytest.mark.parametrize(("code", "signal"), [(3, None), (1, None), (None, "SIGTERM"), (None, "signal 40")])
def test_nothing_is_made_up_where_nothing_was_said(code: int | None, signal: str | None) -> None:
    assert find_cause(code, signal, ["step 100, loss 2.0"]).reason == ""
    assert find_cause(code, signal, TRIED.splitlines()[:-1]).reason == "", "a traceback that was cut off"


def test_a_signal_of_scancel_without_a_handler_is_named() -> None:
    cause = find_cause(None, "SIGUSR1", ["line 8"])
    assert cause == Cause("unhandled_signal", "its program does not handle this signal")
    advice = ADVICE[cause.kind]
    assert "`scancel --signal`" in advice and "`slurmddp stop`" in advice


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("alloc", "mem_gb="),
        ("cuda_oom", "train.batch_size"),
        ("worker_killed", "train.workers"),
        ("worker_shm", "--shm-size"),
        ("bus", "--shm-size"),
        ("disk", "quota"),
        ("torch_disk", "quota"),
        ("files", "ulimit -n"),
        ("no_torch", "`python:`"),
        ("segv", "compiled code"),
        ("peer", "rank or node that ended first"),
    ],
)
def test_a_reason_leads_to_what_can_be_done(name: str, word: str) -> None:
    assert word in failure_in(name).advice


def test_a_persons_own_error_needs_no_advice() -> None:
    assert failure_in("torch_exception").advice == ""


@pytest.mark.parametrize(
    "message",
    ["stalled", "lost another rank", "lost node 3 of the tree", "out of memory", "no space left", "crashed"],
)
def test_the_words_of_a_program_decide_nothing_although_slurmddp_uses_them_too(message: str) -> None:
    failure = here(3, node_rank=0, rank=1, lines=["step 7", f"Error: {message}"])
    assert (failure.kind, failure.reason, failure.advice) == ("other", message, "")
    assert failure.sentence.endswith(f"ended with exit code 3: {message}")
    assert not is_consequence(failure)
