"""Tracebacks in the last lines of a process: which exception ended it, and where it was raised; pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from slurmddp.errors import EXIT_FAILED

TRACEBACK = "Traceback (most recent call last):"
FRAME = re.compile(r'\s+File "(?P<path>[^"]+)", line (?P<line>\d+)(,? in (?P<where>.+))?$')
"""A frame; without `in` it is the place of a SyntaxError."""
_EXCEPTION = re.compile(r"[A-Za-z_]([\w.]|<locals>)*(:( .*)?)?$")
_IGNORED = "Exception ignored "
"""How Python announces what was raised where nobody can catch it, in `__del__` say: it ends nothing."""
_GROUP = re.compile(r"\s*\+ Exception Group Traceback")
_BRANCH = re.compile(r"\s*\+-\+-+ 1 -+$")
_BRANCH_ENDS = re.compile(r"\s*\+-+( \d+ -+)?$")
_MARGIN = re.compile(r"\s*[|+] ?")
"""How Python draws the tree of an exception group."""
_OF_A_RANK = re.compile(r"\[rank\d+\]: ")
"""What torch puts before each line of a traceback once the ranks have met."""
_LIBRARY = re.compile(r"<|.*/(site|dist)-packages/|.*/lib/python3[^/]*/")
_OURS = str(Path(__file__).parents[2]) + "/"
_LINKS = ("The above exception was the direct cause", "During handling of the above exception")
_WORDS = re.compile(r"[^\W\d_]{2,}")
_AS_BEFORE = 2
_OVER_AND_OVER = 8


def plain_lines(lines: Sequence[str]) -> list[str]:
    """Return the lines without what is no word of the process's own on its end, and a group as its first."""
    return _first_of_group(_without_ignored([_OF_A_RANK.sub("", line) for line in lines]))


def _without_ignored(lines: Sequence[str]) -> list[str]:
    found: list[str] = []
    number = 0
    while number < len(lines):
        if lines[number].startswith(_IGNORED):
            if lines[number + 1 : number + 2] == [TRACEBACK]:
                number += 2
                while number < len(lines) and lines[number].startswith(" "):
                    number += 1
        else:
            found.append(lines[number])
        number += 1
    return found


def _first_of_group(lines: Sequence[str]) -> list[str]:
    """Return the lines with the first exception of a group in the group's place, if a group comes last."""
    groups = [number for number, line in enumerate(lines) if _GROUP.match(line)]
    if not groups or any(line.strip() == TRACEBACK for line in lines[groups[-1] :]):
        return list(lines)
    found: list[str] = []
    for line in lines[groups[-1] :]:
        if _BRANCH_ENDS.match(line):
            break
        if not _BRANCH.match(line):
            found.append(_MARGIN.sub("", line, count=1))
            continue
        while not found[-1].startswith(" ") and not found[-1].endswith(TRACEBACK):
            found.pop()  # What the group says of itself.
    return [*lines[: groups[-1]], *found]


def begins(lines: Sequence[str]) -> list[int]:
    """Return where tracebacks begin."""
    return [number for number, line in enumerate(lines) if line.strip().endswith(TRACEBACK)]


def raised_at(lines: Sequence[str]) -> int | None:
    """Return where the last traceback's exception stands."""
    starts = begins(lines)
    after = range(starts[-1] + 1, len(lines)) if starts else ()
    return next((n for n in after if not lines[n].startswith(" ") and _EXCEPTION.match(lines[n])), None)


def last_chain(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines from where the last exception, or the first of those that led to it, is told."""
    starts = begins(lines)
    begun = starts[-1] if starts else 0
    for start in reversed(starts[:-1]):
        if not any(line.startswith(_LINKS) for line in lines[start:begun]):
            break
        begun = start
    return lines[begun:]


def before_last(lines: Sequence[str]) -> Sequence[str] | None:
    """Return the lines up to the exception before the last of a chain, if it came from a person's code."""
    starts = begins(lines)[-2:]
    links = [number for number, line in enumerate(lines) if line.startswith(_LINKS)]
    if len(starts) < 2 or not links or not starts[0] < links[-1] < starts[1]:
        return None
    return lines[: links[-1]] if place(lines[starts[0] : links[-1]]) else None


def went_on(lines: Sequence[str], number: int, exit_code: int | None) -> bool:
    """Whether a process has outlived what it told in line `number`: it printed on as before, step by step.

    What else it printed may be the rest of a long message, or what it said as it left. An exit code that an
    exception does not give shows that no message ends there.
    """
    before = {_words(line) for line in lines[:number] if not line.startswith(" ")}
    after = Counter(_words(line) for line in lines[number + 1 :] if not line.startswith((" ", "\t")))
    most = float("inf") if exit_code == EXIT_FAILED else _OVER_AND_OVER
    return any(count >= (_AS_BEFORE if words in before else most) for words, count in after.items() if words)


def _words(line: str) -> tuple[str, ...]:
    """Return what lines have in common that tell the same of other numbers."""
    return tuple(_WORDS.findall(line))


def whole(lines: Sequence[str], number: int) -> str:
    """Return the line of an error, with the next one if it only announces what it tells."""
    told = [line.strip() for line in lines[number : number + 2]]
    return " ".join(told) if told[0].endswith(":") else told[0]


def exception(lines: Sequence[str], exit_code: int | None) -> tuple[str, str]:
    """Return the line of the exception that ended a process, and where it was raised."""
    starts, raised = begins(lines), raised_at(lines)
    if raised is None or went_on(lines, raised, exit_code):
        return "", ""
    begun = next((number for number in reversed(starts) if lines[number].strip() == TRACEBACK), starts[-1])
    places = place(lines[starts[-1] :]) or place(lines[begun:]) or place(lines[starts[-1] :], anyone=True)
    return whole(lines, raised), places


def place(lines: Iterable[str], *, anyone: bool = False, innermost: int = -1) -> str:
    """Return ` (train.py:12 in step)` for the innermost frame of the person's own code, or of `anyone`."""
    frames = [match for line in lines if (match := FRAME.match(line))]
    own = [frame for frame in frames if anyone or not _is_library(frame["path"])]
    if not own:
        return ""
    frame = own[innermost]
    where = f" in {frame['where'].strip()}" if frame["where"] else ""
    return f" ({Path(frame['path']).name}:{frame['line']}{where})"


def _is_library(path: str) -> bool:
    return path.startswith(_OURS) or _LIBRARY.match(path) is not None


def crash_place(lines: Sequence[str]) -> str:
    """Return where Python stood when compiled code crashed, from the lines of faulthandler."""
    starts = [number for number, line in enumerate(lines) if line.startswith("Current thread")]
    if not starts:
        return ""
    stack = [line for line in lines[starts[-1] + 1 :] if not line.startswith("Extension modules")]
    return place(stack, innermost=0) or place(stack, anyone=True, innermost=0)
