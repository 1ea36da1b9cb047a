"""Why a process ended, from unusual tracebacks: exception groups, colours, thousands of lines, bad syntax."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.runs.failures.capture import here, last_lines, tail_of
from slurmddp.runs.failures.causes import ADVICE, find_cause, telling

GROUP = """\
rank 1 begins
  + Exception Group Traceback (most recent call last):
  |   File "/venv/lib/python3.11/asyncio/runners.py", line 190, in run
  |     return runner.run(main)
  |   File "train.py", line 40, in main
  |     async with asyncio.TaskGroup() as tasks:
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "data.py", line 8, in fetch
    |     raise ValueError("bad sample")
    | ValueError: bad sample
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "data.py", line 9, in fetch
    |     raise OSError(28, "No space left on device")
    | OSError: [Errno 28] No space left on device
    +------------------------------------
"""
BARE = """\
  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 8, in step
  |     raise ExceptionGroup("outer", [inner])
  | ExceptionGroup: outer (2 sub-exceptions)
  | It has a note.
  +-+---------------- 1 ----------------
    | ExceptionGroup: inner (1 sub-exception)
    +-+---------------- 1 ----------------
      | MemoryError
      +------------------------------------
    +---------------- 2 ----------------
    | KeyError: 7
    +------------------------------------
"""
AFTER = """
During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 9, in step
    raise KeyError("later")
KeyError: 'later'
"""
SYNTAX = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 3, in <module>
    import model
  File "/home/me/model.py", line 12
    def forward(:
                ^
SyntaxError: invalid syntax
"""
LOCAL = """\
Traceback (most recent call last):
  File "train.py", line 9, in step
    raise Stop()
train.main.<locals>.Stop: <exception str() failed>
"""
COLOURED = """\
\x1b[2K\x1b[1A\x1b]0;title\x07Traceback (most recent call last):
  File \x1b[35m"/home/me/train.py"\x1b[0m, line \x1b[35m9\x1b[0m, in \x1b[35mstep\x1b[0m
    \x1b[31mraise ValueError\x1b[0m\x1b[1;31m("bad")\x1b[0m
    \x1b[31m~~~~~~~~~~~~~~~~\x1b[0m\x1b[1;31m^^^^^^^\x1b[0m
\x1b[1;35mValueError\x1b[0m: \x1b[35mbad\x1b[0m
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GROUP, "ValueError: bad sample (data.py:8 in fetch)"),
        (BARE, "out of memory: MemoryError (train.py:8 in step)"),
        (GROUP + AFTER, "KeyError: 'later' (train.py:9 in step)"),
        (AFTER.lstrip() + BARE, "out of memory: MemoryError (train.py:8 in step)"),
        (SYNTAX, "SyntaxError: invalid syntax (model.py:12)"),
        (LOCAL, "train.main.<locals>.Stop: <exception str() failed> (train.py:9 in step)"),
        (COLOURED, "ValueError: bad (train.py:9 in step)"),
    ],
)
def test_a_traceback_of_an_unusual_kind_is_understood(text: str, reason: str) -> None:
    assert find_cause(1, None, tail_of(text)).reason == reason


def test_escape_sequences_are_removed() -> None:
    lines = tail_of("\x1b[31mred\x1b[0m\x1b[5A\t|\nbeep\x07\x1bc\x00\x9b2J\n\x1b[0m\n50%\r60%\x1b[K\r\n")
    assert lines == ("red\t|", "beep2J", "60%")


TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 5, in main\n    load()\n'
MISFIT = "RuntimeError: Error(s) in loading state_dict for GPT:"
KEYS = "".join(f"\tsize mismatch for layers.{n}.attention.weight: copying a param\n" for n in range(3000))
NAMES = "".join(f'"module.layers.{n}.attention.projection.weight", ' for n in range(3000))
FRAMES = '  File "train.py", line 7, in visit\n    visit(node)\n' * 900


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            f"{TRACEBACK}{MISFIT}\n{KEYS}",
            f"{MISFIT} size mismatch for layers.0.attention.weight: copying a param (train.py:5 in main)",
        ),
        (
            f"{TRACEBACK}{MISFIT}\n\tMissing: {NAMES}\n\tMore: {NAMES}\n",
            f"{MISFIT} Missing: {NAMES}",
        ),
        (f"{TRACEBACK}{FRAMES}RecursionError: too deep\n", "RecursionError: too deep (train.py:7 in visit)"),
    ],
)
def test_a_very_long_message_does_not_hide_its_beginning(tmp_path: Path, text: str, reason: str) -> None:
    log = tmp_path / "rank.log"
    log.write_text(TRACEBACK + "KeyError: 'an old one'\n" + "step 7\n" * 1000 + text)
    failure = here(1, node_rank=0, lines=last_lines(log))
    assert failure.reason[:100] == reason[:100]
    assert failure.reason.endswith(reason[-20:]) or failure.reason.endswith("... (train.py:5 in main)")
    assert len(failure.last_lines) == 30


def test_an_exception_of_long_ago_is_no_reason(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    log.write_text(TRACEBACK + "KeyError: 'an old one'\n" + "  step 7\nstep 8\n" * 400)
    assert here(3, node_rank=0, lines=last_lines(log)).reason == ""


IGNORED = """\
Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f>
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1697, in __del__
    self._shutdown_workers()
AssertionError: can only test a child process
"""
RAISED = f"{TRACEBACK}KeyError: 'lr'\n"
AT = "KeyError: 'lr' (train.py:5 in main)"
STEPS = "".join(f"step {step}, loss {2 / step:.2f}\n" for step in range(1, 21))


@pytest.mark.parametrize(
    ("code", "text", "reason"),
    [
        (1, RAISED + IGNORED, AT),
        (1, RAISED + IGNORED * 8, AT),
        (1, IGNORED + RAISED, AT),
        (5, STEPS + IGNORED, ""),
        (1, f"{IGNORED}OSError: no data\n", "OSError: no data"),
    ],
)
def test_an_exception_that_python_ignores_ends_nothing(code: int, text: str, reason: str) -> None:
    assert find_cause(code, None, tail_of(text)).reason == reason


@pytest.mark.parametrize("code", [1, 3])
@pytest.mark.parametrize(
    "text",
    [
        STEPS[:80] + RAISED + STEPS[80:],
        f"{STEPS}ValueError: bad line, left out\n{STEPS}",
        f"loss 3.0 \x1b[0m\n{RAISED}loss 2e-05\nloss nan: 7\nloss 1\n",
    ],
)
def test_an_exception_after_which_a_program_continued_is_no_reason(code: int, text: str) -> None:
    assert find_cause(code, None, tail_of(text)).reason == ""


def test_an_exception_before_the_first_of_many_steps_is_no_reason_of_a_code_of_its_own() -> None:
    assert find_cause(3, None, tail_of(RAISED + STEPS)).reason == ""


@pytest.mark.parametrize(
    "rest",
    [
        "saved step-7\n",
        "saving\nsaved step-7\nclosing loader 0\nclosing loader 1\nclosing loader 2\nclosing loader 3\n",
        "wandb: Run summary:\nwandb: loss 2.0\nwandb: step 7\n",
        f"{IGNORED}step 7, loss 2\n",
    ],
)
def test_what_is_printed_while_a_program_leaves_takes_no_reason_away(rest: str) -> None:
    for code in (1, 3):
        assert find_cause(code, None, tail_of(f"saved step-5\n{STEPS}{RAISED}{rest}")).reason == AT


def test_a_message_of_many_lines_alike_is_no_sign_of_going_on() -> None:
    message = "ValueError: bad rows\n" + "".join(f"row {n} is bad\n" for n in range(100))
    assert find_cause(1, None, tail_of(f"{STEPS}{TRACEBACK}{message}")).reason == (
        "ValueError: bad rows (train.py:5 in main)"
    )


def test_the_message_of_an_argument_parser_is_the_reason() -> None:
    usage = "usage: train.py [-h] --lr LR\n"
    message = "train.py: error: the following arguments are required: --lr"
    assert find_cause(2, None, tail_of(f"{usage}{message}\n")).reason == message
    assert find_cause(2, None, tail_of(f"{message}\n{RAISED}")).reason == AT
    assert find_cause(3, None, tail_of(f"{usage}a.py: error: tried\n{STEPS}")).reason == ""


def test_a_taken_port_leads_to_advice_about_scripts_that_start_ranks() -> None:
    message = "port: 12355, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    lines = ["Traceback (most recent call last):", '  File "multigpu.py", line 20, in setup', "    init()"]
    cause = find_cause(1, None, [*lines, f"torch.distributed.DistNetworkError: {message}"])
    assert cause.reason.startswith("a port is taken: torch.distributed.DistNetworkError")
    assert "ranks_per_node=1" in ADVICE[cause.kind]


DEEP = """\
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/a.py", line 1, in first
    first()
    ^^^^^^^
  File "/venv/lib/python3.11/site-packages/torch/b.py", line 2, in second
    second(
  File "/home/me/nets.py", line 9, in forward
    return self.n(x)
  File "/venv/lib/python3.11/site-packages/torch/c.py", line 3, in third
    third()
RuntimeError: shapes (64x4 and 2x3)
    an indented line of the message
"""


def test_frames_of_libraries_are_counted_beside_a_persons_own() -> None:
    lines = DEEP.splitlines()
    assert telling(lines, 30) == (
        lines[0],
        "  ... 2 frames of libraries",
        *lines[6:],
    )
    assert telling(telling(lines, 30), 30) == telling(lines, 30)
    others = [line for line in lines if "nets.py" not in line]
    assert telling(others, 30) == tuple(others), "all frames are of libraries"
