"""Parse durations and time limits, and write them as SLURM does; pure functions.

SLURM's own forms are `minutes`, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM` and `D-HH:MM:SS`; people also write
`90m`, `2h`, `1d12h`. SLURM counts time limits in minutes and rounds seconds up, and so does this module.
"""

from __future__ import annotations

import re

from slurmddp.errors import ConfigError

_FORMS = "Write minutes (90), HH:MM:SS, D-HH:MM:SS, or units (90m, 2h, 1d12h)."
_UNIT_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_minutes(value: str | int) -> int:
    """Return the time limit `value` in whole minutes, at least one; raise ConfigError for other values."""
    return -(-parse_duration_s(value, "time_limit") // 60)


def parse_duration_s(value: str | int, key: str) -> int:
    """Return the seconds in the value of `key`, at least one; raise ConfigError for other values."""
    seconds = None
    # YAML reads `yes` as True, which Python would accept as the number 1.
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        seconds = parse_seconds(str(value).strip().lower())
    if seconds is None:
        raise ConfigError(f"{key}={value!r} is not a time.", hint=_FORMS)
    if seconds <= 0:
        raise ConfigError(
            f"{key}={value!s} is not above 0.", hint=f"{_FORMS} Omit {key} for no limit of your own."
        )
    return seconds


def render_minutes(minutes: int) -> str:
    """Return `minutes` as SLURM prints a duration, `D-HH:MM:SS` or `HH:MM:SS`."""
    days, rest = divmod(minutes, 24 * 60)
    hours, minutes = divmod(rest, 60)
    clock = f"{hours:02d}:{minutes:02d}:00"
    return f"{days}-{clock}" if days else clock


def parse_slurm_limit(text: str) -> int | None:
    """Return the minutes of a limit that SLURM printed; None for UNLIMITED and the like."""
    seconds = parse_seconds(text.strip().lower())
    return None if seconds is None else -(-seconds // 60)


def parse_seconds(text: str) -> int | None:
    """Return the seconds of a duration such as `90m`, given in lower case; None for any other text."""
    # For SLURM a plain number is a number of minutes.
    if re.fullmatch(r"\d+", text):
        return int(text) * 60
    if re.fullmatch(r"(\d+[dhms])+", text):
        return sum(int(number) * _UNIT_S[unit] for number, unit in re.findall(r"(\d+)([dhms])", text))

    # Two numbers are minutes and seconds; after a number of days, they are hours and minutes.
    match = re.fullmatch(r"(\d+):([0-5]?\d)", text)
    if match is not None:
        return int(match[1]) * 60 + int(match[2])

    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::([0-5]?\d))?(?::([0-5]?\d))?", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + seconds
