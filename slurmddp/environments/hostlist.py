"""Read and write SLURM's host lists (`rack[1-2]n[08-10],login`) and counts per node (`4(x2),2`).

`scontrol show hostnames` does the same, but many containers lack scontrol, and one call per rank may hang on
a thousand nodes. The grammar follows SLURM's parser: commas and blanks outside brackets separate. Several
brackets multiply, the leftmost one slowest. The lower bound of a range gives the number of digits. Order and
repetitions are kept. Text after the last bracket is accepted, as in SLURM from 23.02.5 on.

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
"""The largest number of hosts in a list. SLURM has the same limit for one range."""

_TOKEN = re.compile(r"(?P<gap>[\s,]+)|(?P<bracket>\[[^\[\]]*\])|(?P<text>[^\s,\[\]]+)", re.ASCII)
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_NUMBERED = re.compile(r"(.*?)(\d{1,9})", re.ASCII | re.DOTALL)
_PLAIN = re.compile(r"[^\s,\[\]]+")
_COUNTS = re.compile(r"(\d{1,9})(?:\(x(\d{1,6})\))?", re.ASCII)
_MAX_NODES = 1 << 20


def expand(text: str) -> tuple[str, ...]:
    """Return the host names of a SLURM host list in their order; raise ConfigError for any other text."""
    hosts: list[str] = []
    for pieces in _elements(text):
        hosts.extend(_multiply(text, pieces, MAX_HOSTS - len(hosts)))
    return tuple(hosts)


def _elements(text: str) -> Iterator[list[list[str]]]:
    """Yield the elements of a host list, each as a list of its pieces with the alternatives of each piece.

    The element `n[1-2]x` gives [["n"], ["1", "2"], ["x"]].
    """
    pieces: list[list[str]] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _malformed(text, f"a bracket at position {position} has no partner")

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
    """Return the numbers in a bracket as texts: `01-03,7` gives 01, 02, 03 and 7.

    Args:
        text: the whole host list, for errors.
        inside: the text between the brackets.
    """
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _malformed(text, f"{part!r} is neither a number nor a range")

        low = match[1]
        high = match[2] or low
        if int(high) < int(low):
            raise _malformed(text, f"the range {part!r} runs backwards")
        # A few characters, such as 1-999999999, may name more hosts than fit into memory.
        if int(high) - int(low) >= MAX_HOSTS - len(numbers):
            raise _malformed(text, f"it names more than {MAX_HOSTS} hosts")

        # SLURM pads all numbers of a range to the digits of the lower bound.
        numbers.extend(f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1))

    return numbers


def _multiply(text: str, pieces: list[list[str]], free: int) -> Iterator[str]:
    """Return all combinations of one alternative of each piece; raise ConfigError for more than `free`."""
    total = 1
    for choices in pieces:
        total *= len(choices)
    if total > free:
        raise _malformed(text, f"it names more than {MAX_HOSTS} hosts")
    return ("".join(parts) for parts in product(*pieces))


def _malformed(text: str, reason: str) -> ConfigError:
    """Return the error for a text that is not a host list."""
    return ConfigError(
        f"{shorten(text, 80)!r} is not a SLURM host list: {reason}.",
        hint="Write a list such as `node[01-04,7],login`; `scontrol show hostnames LIST` prints its hosts.",
    )


def compress(names: Sequence[str]) -> str:
    """Return names as a SLURM host list, which `expand` turns into the same names again."""
    if len(names) > MAX_HOSTS:
        raise ConfigError(
            f"{len(names)} hosts are more than a host list holds ({MAX_HOSTS}).", hint="Split the list."
        )

    parts: list[str] = []
    # Names keep their order and repetitions, so only neighbours with one prefix share a bracket.
    for (prefix, numbered), group in groupby(map(_split, names), key=lambda name: (name[0], name[1] != "")):
        digits = [name[1] for name in group]
        parts.extend([_bracketed(prefix, digits)] if numbered else [prefix] * len(digits))
    return ",".join(parts)


def _split(name: str) -> tuple[str, str]:
    """Split a name into its prefix and the digits at its end."""
    if _PLAIN.fullmatch(name) is None:
        raise ConfigError(
            f"{name!r} can't be a host name in a SLURM list.",
            hint="A host name holds no blanks, commas or brackets.",
        )

    match = _NUMBERED.fullmatch(name)
    if match is None:
        return name, ""
    return match[1], match[2]


def _bracketed(prefix: str, digits: list[str]) -> str:
    """Return one element of a host list for the names with this prefix and these digits: `n[1-2,5]`."""
    if len(digits) == 1:
        return prefix + digits[0]

    ranges: list[tuple[str, str]] = []
    for number in digits:
        if ranges and _next(*ranges[-1]) == number:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))

    inside = ",".join(low if low == high else f"{low}-{high}" for low, high in ranges)
    return f"{prefix}[{inside}]"


def _next(low: str, high: str) -> str:
    """Return the number after `high`, with as many digits as `low`."""
    return f"{int(high) + 1:0{len(low)}d}"


def parse_counts(text: str) -> tuple[int, ...]:
    """Return one number per node: `4(x2),2` gives (4, 4, 2); raise ConfigError for any other text."""
    counts: list[int] = []
    for part in text.strip().split(","):
        match = _COUNTS.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"{text!r} is not a list of counts per node: {part!r} is neither `N` nor `N(xM)`.",
                hint="SLURM writes `4(x2),2` for two nodes with 4 and one node with 2.",
            )

        times = int(match[2] or 1)
        if len(counts) + times > _MAX_NODES:
            raise ConfigError(
                f"{text!r} counts more than {_MAX_NODES} nodes.",
                hint="Check the variables SLURM_*TASKS_PER_NODE.",
            )
        counts.extend([int(match[1])] * times)

    return tuple(counts)


def render_counts(counts: Iterable[int]) -> str:
    """Return one number per node as SLURM writes it: (4, 4, 2) gives `4(x2),2`."""
    parts = []
    for count, group in groupby(counts):
        times = len(list(group))
        parts.append(f"{count}(x{times})" if times > 1 else str(count))

    return ",".join(parts)
