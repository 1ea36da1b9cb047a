"""Find the exception that ended a process in its last lines, and the place where it was raised; pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from slurmddp.errors import EXIT_FAILED

TRACEBACK = "Traceback (most recent call last):"
FRAME = re.compile(r'\s+File "(?P<path>[^"]+)", line (?P<line>\d+)(,? in (?P<where>.+))?$')
"""A frame; without `in` the place of a SyntaxError."""
_EXCEPTION = re.compile(r"[A-Za-z_]([\w.]|<locals>)*(:( .*)?)?$")
_IGNORED = "Exception ignored "
"""Python's prefix for exceptions that end nothing, such as in `__del__`."""
_GROUP = re.compile(r"\s*\+ Exception Group Traceback")
_BRANCH = re.compile(r"\s*\+-\+-+ 1 -+$")
_BRANCH_ENDS = re.compile(r"\s*\+-+( \d+ -+)?$")
_MARGIN = re.compile(r"\s*[|+] ?")
"""Python's drawing of the tree of an exception group."""
_OF_A_RANK = re.compile(r"\[rank\d+\]: ")
"""torch's prefix of the lines of a traceback after the rendezvous."""
_SYNTAX = re.compile(r"(Syntax|Indentation|Tab)Error: ")
_LIBRARY = re.compile(r"<|.*/(site|dist)-packages/|.*/lib/python3[^/]*/")
_OURS = str(Path(__file__).parents[2]) + "/"
_LINKS = ("The above exception was the direct cause", "During handling of the above exception")
_WORDS = re.compile(r"[^\W\d_]{2,}")
_AS_BEFORE = 2
_OVER_AND_OVER = 8


def plain_lines(lines: Sequence[str]) -> list[str]:
    """Return the lines without prefixes and ignored exceptions, and with the first exception of a group."""
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
    """Return the lines with a last exception group replaced by its first exception."""
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
            found.pop()  # The message of the group.
    return [*lines[: groups[-1]], *found]


def begins(lines: Sequence[str]) -> list[int]:
    """Return the numbers of the lines with which tracebacks begin."""
    return [number for number, line in enumerate(lines) if line.strip().endswith(TRACEBACK)]


def raised_at(lines: Sequence[str]) -> int | None:
    """Return the number of the line with the exception of the last traceback."""
    starts = begins(lines)
    after = range(starts[-1] + 1, len(lines)) if starts else ()
    return next((n for n in after if not lines[n].startswith(" ") and _EXCEPTION.match(lines[n])), None)


def last_chain(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines from the last exception on, with the chain of exceptions that led to it."""
    starts = begins(lines)
    begun = starts[-1] if starts else 0
    for start in reversed(starts[:-1]):
        if not any(line.startswith(_LINKS) for line in lines[start:begun]):
            break
        begun = start
    return lines[begun:]


def before_last(lines: Sequence[str]) -> Sequence[str] | None:
    """Return the lines up to the exception before the last of a chain, if it comes from a person's code."""
    starts = begins(lines)[-2:]
    links = [number for number, line in enumerate(lines) if line.startswith(_LINKS)]
    if len(starts) < 2 or not links or not starts[0] < links[-1] < starts[1]:
        return None
    return lines[: links[-1]] if place(lines[starts[0] : links[-1]]) else None


def went_on(lines: Sequence[str], number: int, exit_code: int | None) -> bool:
    """Return whether a process continued after line `number`: it printed lines of the same kind as before.

    Other lines may belong to a long message, or to the end of the process. With an exit code that no
    exception gives, repeated lines count too.
    """
    before = {_words(line) for line in lines[:number] if not line.startswith(" ")}
    after = Counter(_words(line) for line in lines[number + 1 :] if not line.startswith((" ", "\t")))
    most = float("inf") if exit_code == EXIT_FAILED else _OVER_AND_OVER
    return any(count >= (_AS_BEFORE if words in before else most) for words, count in after.items() if words)


def _words(line: str) -> tuple[str, ...]:
    """Return the words of a line, which stay the same if only its numbers change."""
    return tuple(_WORDS.findall(line))


def whole(lines: Sequence[str], number: int) -> str:
    """Return the line of an error, with the next line if it ends with a colon."""
    error = [line.strip() for line in lines[number : number + 2]]
    return " ".join(error) if error[0].endswith(":") else error[0]


def exception(lines: Sequence[str], exit_code: int | None) -> tuple[str, str]:
    """Return the line of the exception that ended a process, and the place where it was raised."""
    starts, raised = begins(lines), raised_at(lines)
    if raised is None or went_on(lines, raised, exit_code):
        return "", ""
    begun = next((number for number in reversed(starts) if lines[number].strip() == TRACEBACK), starts[-1])
    places = place(lines[starts[-1] :]) or place(lines[begun:]) or place(lines[starts[-1] :], anyone=True)
    return whole(lines, raised), places


def place(lines: Iterable[str], *, anyone: bool = False, innermost: int = -1) -> str:
    """Return ` (train.py:12 in step)` for the innermost frame of a person's code, or of `anyone`'s."""
    frames = [match for line in lines if (match := FRAME.match(line))]
    own = [frame for frame in frames if anyone or not _is_library(frame["path"])]
    if not own:
        return ""
    frame = own[innermost]
    where = f" in {frame['where'].strip()}" if frame["where"] else ""
    return f" ({Path(frame['path']).name}:{frame['line']}{where})"


def without_library_frames(lines: Sequence[str]) -> list[str]:
    """Return lines with neighbouring frames of libraries as one line, if a person's frames are among them."""
    if not place(lines):
        return list(lines)
    kept: list[str] = []
    frames: list[list[str]] = []
    for line in lines:
        frame = FRAME.match(line)
        if frame and frame["where"] and _is_library(frame["path"]):
            frames.append([line])
        elif frames and not frame and line.startswith("    "):
            frames[-1].append(line)
        else:
            kept += _as_one_line(frames)
            frames = []
            kept.append(line)
    return kept + _as_one_line(frames)


def _as_one_line(frames: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of frames; of several frames, a line that counts them."""
    if len(frames) < 2:
        return [line for frame in frames for line in frame]
    return [f"  ... {len(frames)} frames of libraries"]


def place_in_file(lines: Sequence[str], error: str) -> str:
    """Return ` (train.py:12)` for a SyntaxError of a script, which Python prints without a traceback.

    Other errors have no place here.
    """
    errors = [n for n, line in enumerate(lines) if line == error] if _SYNTAX.match(error) else []
    return place(lines[max(0, errors[-1] - 2) : errors[-1]]) if errors else ""


def _is_library(path: str) -> bool:
    return path.startswith(_OURS) or _LIBRARY.match(path) is not None


def crash_place(lines: Sequence[str]) -> str:
    """Return the place in Python code at which compiled code crashed, from the lines of faulthandler."""
    starts = [number for number, line in enumerate(lines) if line.startswith("Current thread")]
    if not starts:
        return ""
    stack = [line for line in lines[starts[-1] + 1 :] if not line.startswith("Extension modules")]
    return place(stack, innermost=0) or place(stack, anyone=True, innermost=0)
