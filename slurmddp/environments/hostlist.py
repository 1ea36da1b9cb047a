"""Read and write SLURM's host lists (`rack[1-2]n[08-10],login`) and counts per node (`4(x2),2`).

`scontrol show hostnames` does the same, but many containers lack it, and a call per rank can hang on a
thousand nodes. The grammar follows SLURM's parser: commas and blanks outside brackets separate. Several
brackets multiply, the leftmost one slowest. The lower bound of a range gives the number of digits. Order and
repetitions are kept. Text after the last bracket is read, as SLURM does from 23.02.5 on.

SLURM_TASKS_PER_NODE, SLURM_STEP_TASKS_PER_NODE and SLURM_JOB_CPUS_PER_NODE hold one number per node, in the
order of the node list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, product

from slurmddp.errors import ConfigError
from slurmddp.short_text import shorten

MAX_HOSTS = 1 << 16
"""The most hosts of a list. SLURM has the same bound for one range."""

_TOKEN = re.compile(r"(?P<gap>[\s,]+)|(?P<bracket>\[[^\[\]]*\])|(?P<text>[^\s,\[\]]+)", re.ASCII)
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_NUMBERED = re.compile(r"(.*?)(\d{1,9})", re.ASCII | re.DOTALL)
_PLAIN = re.compile(r"[^\s,\[\]]+")
_COUNTS = re.compile(r"(\d{1,9})(?:\(x(\d{1,6})\))?", re.ASCII)
_MOST_NODES = 1 << 20


def expand(text: str) -> tuple[str, ...]:
    """Return the host names of a SLURM host list, in its order; raises ConfigError for another text."""
    hosts: list[str] = []
    for pieces in _elements(text):
        hosts.extend(_multiply(text, pieces, MAX_HOSTS - len(hosts)))
    return tuple(hosts)


def _elements(text: str) -> Iterator[list[list[str]]]:
    """Yield each element between separators as a list of pieces; a piece is a list of choices."""
    pieces: list[list[str]] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _nonsense(text, f"a bracket at position {position} has no partner")
        position = match.end()
        if match["gap"] is not None:
            if pieces:
                yield pieces
            pieces = []
        elif match["bracket"] is not None:
            pieces.append(_choices(text, match["bracket"][1:-1]))
        else:
            pieces.append([match["text"]])
    if pieces:
        yield pieces


def _choices(text: str, inside: str) -> list[str]:
    """Return the numbers of one bracket, as texts."""
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _nonsense(text, f"{part!r} is neither a number nor a range")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise _nonsense(text, f"the range {part!r} runs backwards")
        if int(high) - int(low) >= MAX_HOSTS - len(numbers):
            raise _nonsense(text, f"it names more than {MAX_HOSTS} hosts")
        numbers.extend(f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1))
    return numbers


def _multiply(text: str, pieces: list[list[str]], free: int) -> Iterator[str]:
    total = 1
    for choices in pieces:
        total *= len(choices)
    if total > free:
        raise _nonsense(text, f"it names more than {MAX_HOSTS} hosts")
    return ("".join(parts) for parts in product(*pieces))


def _nonsense(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"{shorten(text, 80)!r} is not a SLURM host list: {why}.",
        hint="Write it as `node[01-04,7],login`; `scontrol show hostnames LIST` shows how SLURM reads it.",
    )


def compress(names: Sequence[str]) -> str:
    """Return names as a SLURM host list. `expand` turns the list into the same names again."""
    if len(names) > MAX_HOSTS:
        raise ConfigError(
            f"{len(names)} hosts are more than one list of {MAX_HOSTS} holds.", hint="Split it."
        )
    parts: list[str] = []
    for (prefix, numbered), group in groupby(map(_split, names), key=lambda name: (name[0], name[1] != "")):
        digits = [name[1] for name in group]
        parts.extend([_bracketed(prefix, digits)] if numbered else [prefix] * len(digits))
    return ",".join(parts)


def _split(name: str) -> tuple[str, str]:
    """Split a name into its prefix and the digits at its end."""
    if _PLAIN.fullmatch(name) is None:
        raise ConfigError(
            f"{name!r} can't be a host name in a SLURM list.",
            hint="Host names hold no blanks, commas or brackets.",
        )
    match = _NUMBERED.fullmatch(name)
    return (match[1], match[2]) if match else (name, "")


def _bracketed(prefix: str, digits: list[str]) -> str:
    runs: list[tuple[str, str]] = []
    for number in digits:
        if runs and _next(*runs[-1]) == number:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    if len(digits) == 1:
        return prefix + digits[0]
    inside = ",".join(low if low == high else f"{low}-{high}" for low, high in runs)
    return f"{prefix}[{inside}]"


def _next(low: str, high: str) -> str:
    """Return the number after `high`, with as many digits as `low`."""
    return f"{int(high) + 1:0{len(low)}d}"


def parse_counts(text: str) -> tuple[int, ...]:
    """Return one number per node: `4(x2),2` gives (4, 4, 2); raises ConfigError for another text."""
    counts: list[int] = []
    for part in text.strip().split(","):
        match = _COUNTS.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"{text!r} is not a list of counts per node: {part!r} is neither `N` nor `N(xM)`.",
                hint="SLURM writes it as in `4(x2),2`: two nodes with 4 and one with 2.",
            )
        times = int(match[2] or 1)
        if len(counts) + times > _MOST_NODES:
            raise ConfigError(f"{text!r} counts more than {_MOST_NODES} nodes.", hint="Check the variable.")
        counts.extend([int(match[1])] * times)
    return tuple(counts)


def render_counts(counts: Iterable[int]) -> str:
    """Return one number per node as SLURM writes it: (4, 4, 2) gives `4(x2),2`."""
    parts = []
    for count, group in groupby(counts):
        times = len(list(group))
        parts.append(f"{count}(x{times})" if times > 1 else str(count))
    return ",".join(parts)
