"""Spellings of a duration, in and out; pure.

SLURM's own forms are `minutes`, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM` and `D-HH:MM:SS`; people also write
`90m`, `2h`, `1d12h`. SLURM counts time limits in minutes and rounds seconds up, so all of this does too.
"""

from __future__ import annotations

import re

from slurmddp.errors import ConfigError

_FORMS = "Write minutes (90), HH:MM:SS, D-HH:MM:SS, or units (90m, 2h, 1d12h)."
_UNIT_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_minutes(value: str | int) -> int:
    """Return the time limit `value` in whole minutes, at least one; raises ConfigError on anything else."""
    return -(-parse_duration_s(value, "time_limit") // 60)


def parse_duration_s(value: str | int, key: str) -> int:
    """Return the seconds of the value of `key`, at least one; raises ConfigError on anything else."""
    plain = isinstance(value, (str, int)) and not isinstance(value, bool)
    seconds = parse_seconds(str(value).strip().lower()) if plain else None
    if seconds is None:
        raise ConfigError(f"{key}={value!r} is not a time.", hint=_FORMS)
    if seconds <= 0:
        raise ConfigError(
            f"{key}={value!s} is not above 0.", hint=f"{_FORMS} Leave it out for no limit of your own."
        )
    return seconds


def render_minutes(minutes: int) -> str:
    """Return `minutes` as SLURM writes them, `D-HH:MM:SS` or `HH:MM:SS`."""
    days, rest = divmod(minutes, 24 * 60)
    hours, mins = divmod(rest, 60)
    clock = f"{hours:02d}:{mins:02d}:00"
    return f"{days}-{clock}" if days else clock


def parse_slurm_limit(text: str) -> int | None:
    """Return a limit that SLURM printed in minutes; None for UNLIMITED and the like."""
    seconds = parse_seconds(text.strip().lower())
    return None if seconds is None else -(-seconds // 60)


def parse_seconds(text: str) -> int | None:
    """Return the seconds of a lower-case time that a person or SLURM wrote; None for anything else."""
    if re.fullmatch(r"\d+", text):
        return int(text) * 60
    if re.fullmatch(r"(\d+[dhms])+", text):
        return sum(int(number) * _UNIT_S[unit] for number, unit in re.findall(r"(\d+)([dhms])", text))
    match = re.fullmatch(r"(\d+):([0-5]?\d)", text)
    if match is not None:
        return int(match[1]) * 60 + int(match[2])
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::([0-5]?\d))?(?::([0-5]?\d))?", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + seconds
