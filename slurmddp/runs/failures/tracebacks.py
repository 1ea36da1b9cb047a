"""Find the exception that ended a process in its last lines, and the place where it was raised; pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from slurmddp.errors import EXIT_FAILED

TRACEBACK = "Traceback (most recent call last):"
FRAME = re.compile(r'\s+File "(?P<path>[^"]+)", line (?P<line>\d+)(,? in (?P<where>.+))?$')
"""Matches the line of a frame or, without `in FUNCTION`, the line with the place of a SyntaxError."""
_EXCEPTION = re.compile(r"[A-Za-z_]([\w.]|<locals>)*(:( .*)?)?$")
_IGNORED = "Exception ignored "
"""The first words of Python's message about an exception that it ignores, such as in `__del__`."""
_GROUP = re.compile(r"\s*\+ Exception Group Traceback")
_BRANCH = re.compile(r"\s*\+-\+-+ 1 -+$")
_BRANCH_ENDS = re.compile(r"\s*\+-+( \d+ -+)?$")
_MARGIN = re.compile(r"\s*[|+] ?")
"""Matches the bars with which Python draws an exception group as a tree, at the left of each line."""
OF_A_RANK = re.compile(r"\[rank\d+\]: ")
"""The prefix, such as `[rank3]: `, that torch gives to lines of a traceback after the rendezvous."""
_SYNTAX = re.compile(r"(Syntax|Indentation|Tab)Error: ")
_LIBRARY = re.compile(r"<|.*/(site|dist)-packages/|.*/lib/python3[^/]*/")
_OURS = str(Path(__file__).parents[2]) + "/"
_LINKS = ("The above exception was the direct cause", "During handling of the above exception")
_WORDS = re.compile(r"[^\W\d_]{2,}")
_AS_BEFORE = 2
_OVER_AND_OVER = 8


def plain_lines(lines: Sequence[str]) -> list[str]:
    """Return the lines without torch's prefixes `[rankN]: ` and without exceptions that Python ignored.

    An exception group at the end is replaced by its first exception.
    """
    return _first_of_group(_without_ignored([OF_A_RANK.sub("", line) for line in lines]))


def _without_ignored(lines: Sequence[str]) -> list[str]:
    """Return the lines without messages "Exception ignored in ..." and their tracebacks."""
    kept: list[str] = []
    number = 0
    while number < len(lines):
        if not lines[number].startswith(_IGNORED):
            kept.append(lines[number])
        elif lines[number + 1 : number + 2] == [TRACEBACK]:
            number += 2
            while number < len(lines) and lines[number].startswith(" "):
                number += 1
        number += 1
    return kept


def _first_of_group(lines: Sequence[str]) -> list[str]:
    """Return the lines with an exception group at the end replaced by its first exception."""
    groups = [number for number, line in enumerate(lines) if _GROUP.match(line)]
    if not groups or any(line.strip() == TRACEBACK for line in lines[groups[-1] :]):
        return list(lines)

    first_exception: list[str] = []
    for line in lines[groups[-1] :]:
        if _BRANCH_ENDS.match(line):
            break
        if not _BRANCH.match(line):
            first_exception.append(_MARGIN.sub("", line, count=1))
            continue

        # The first exception follows the message of the group. This message names no cause and is removed.
        while not first_exception[-1].startswith(" ") and not first_exception[-1].endswith(TRACEBACK):
            first_exception.pop()
    return [*lines[: groups[-1]], *first_exception]


def begins(lines: Sequence[str]) -> list[int]:
    """Return the indices of the lines with which tracebacks begin."""
    return [number for number, line in enumerate(lines) if line.strip().endswith(TRACEBACK)]


def raised_at(lines: Sequence[str]) -> int | None:
    """Return the index of the line with the exception of the last traceback; None if there is none."""
    starts = begins(lines)
    if not starts:
        return None

    after = range(starts[-1] + 1, len(lines))
    return next((n for n in after if not lines[n].startswith(" ") and _EXCEPTION.match(lines[n])), None)


def last_chain(lines: Sequence[str]) -> Sequence[str]:
    """Return the last traceback, with the tracebacks that are chained to it and the lines after it."""
    starts = begins(lines)
    if not starts:
        return lines

    first = starts[-1]
    for start in reversed(starts[:-1]):
        if not any(line.startswith(_LINKS) for line in lines[start:first]):
            break
        first = start
    return lines[first:]


def before_last(lines: Sequence[str]) -> Sequence[str] | None:
    """Return the lines up to the second-last exception of a chain; None unless a person's code raised it."""
    starts = begins(lines)[-2:]
    links = [number for number, line in enumerate(lines) if line.startswith(_LINKS)]
    if len(starts) < 2 or not links or not starts[0] < links[-1] < starts[1]:
        return None

    if not place(lines[starts[0] : links[-1]]):
        return None
    return lines[: links[-1]]


def went_on(lines: Sequence[str], number: int, exit_code: int | None) -> bool:
    """Return whether a process continued after the exception in line `number`.

    A process continued if at least `_AS_BEFORE` later lines have the same words as an earlier line. Other
    lines may belong to a long message, or to the end of the process. If the exit code is not 1,
    `_OVER_AND_OVER` later lines with the same new words count as well.
    """
    before = {_text_words(line) for line in lines[:number] if not line.startswith(" ")}
    after = Counter(_text_words(line) for line in lines[number + 1 :] if not line.startswith((" ", "\t")))
    repeats_of_new_lines = float("inf") if exit_code == EXIT_FAILED else _OVER_AND_OVER

    for text_words, count in after.items():
        enough = _AS_BEFORE if text_words in before else repeats_of_new_lines
        if text_words and count >= enough:
            return True
    return False


def _text_words(line: str) -> tuple[str, ...]:
    """Return the words of a line without numbers; lines that differ only in numbers have the same words."""
    return tuple(_WORDS.findall(line))


def whole(lines: Sequence[str], number: int) -> str:
    """Return line `number`, joined with the next line if it ends with a colon."""
    error = [line.strip() for line in lines[number : number + 2]]
    if error[0].endswith(":"):
        return " ".join(error)
    return error[0]


def exception(lines: Sequence[str], exit_code: int | None) -> tuple[str, str]:
    """Return the line of the exception that ended a process, and where it was raised (see `place`).

    Both are empty if no exception ended the process.
    """
    raised = raised_at(lines)
    if raised is None or went_on(lines, raised, exit_code):
        return "", ""

    starts = begins(lines)
    last = lines[starts[-1] :]
    # The last traceback may be part of the message of an outer one: an error of a data worker contains its
    # "Original Traceback ...". If the inner traceback has no frame of a person's code, the outer one is used.
    outer = next((number for number in reversed(starts) if lines[number].strip() == TRACEBACK), starts[-1])
    raised_in = place(last) or place(lines[outer:]) or place(last, anyone=True)
    return whole(lines, raised), raised_in


def place(lines: Iterable[str], *, anyone: bool = False, innermost: int = -1) -> str:
    """Return the place of a frame as ` (train.py:12 in step)`; empty if there is no such frame.

    Args:
        lines: the lines of a traceback.
        anyone: whether frames of libraries count as well; otherwise only a person's code.
        innermost: the index of the innermost frame: 0 in a stack of faulthandler.
    """
    matches = [FRAME.match(line) for line in lines]
    frames = [frame for frame in matches if frame and (anyone or not _is_library(frame["path"]))]
    if not frames:
        return ""

    frame = frames[innermost]
    where = f" in {frame['where'].strip()}" if frame["where"] else ""
    return f" ({Path(frame['path']).name}:{frame['line']}{where})"


def without_library_frames(lines: Sequence[str]) -> list[str]:
    """Return the lines of a log, with one line in place of neighbouring traceback frames of libraries.

    If no frame is of a person's code, all lines are returned.
    """
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
    """Return the lines of a single frame, or for several frames one line with their number."""
    if len(frames) < 2:
        return [line for frame in frames for line in frame]
    return [f"  ... {len(frames)} frames of libraries"]


def place_in_file(lines: Sequence[str], error: str) -> str:
    """Return the place of a SyntaxError as ` (train.py:12)`, which Python prints without a traceback.

    The result is empty for other errors.
    """
    if not _SYNTAX.match(error):
        return ""
    errors = [number for number, line in enumerate(lines) if line == error]
    if not errors:
        return ""
    return place(lines[max(0, errors[-1] - 2) : errors[-1]])


def _is_library(path: str) -> bool:
    return path.startswith(_OURS) or _LIBRARY.match(path) is not None


def crash_place(lines: Sequence[str]) -> str:
    """Return the place (see `place`) of the Python code that called the compiled code which crashed.

    The lines of faulthandler name it; empty without such lines.
    """
    starts = [number for number, line in enumerate(lines) if line.startswith("Current thread")]
    if not starts:
        return ""

    # `innermost=0`, because faulthandler writes the innermost frame first.
    stack = [line for line in lines[starts[-1] + 1 :] if not line.startswith("Extension modules")]
    return place(stack, innermost=0) or place(stack, anyone=True, innermost=0)
