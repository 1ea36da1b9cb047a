"""Read numbers from environment variables; errors name the variable."""

from __future__ import annotations

from collections.abc import Mapping

from slurmddp.errors import MismatchError


def integer(environ: Mapping[str, str], *names: str, least: int = 0) -> int | None:
    """Return the first set variable of `names` as a number of at least `least`; None if all are unset."""
    for name in names:
        text = environ.get(name, "").strip()
        if not text:
            continue
        if text.isascii() and text.isdigit() and int(text) >= least:
            return int(text)
        raise MismatchError(
            f"{name}={text!r} is not a whole number of at least {least}.",
            hint=f"A launcher sets it, and something has changed it. Unset {name} or start the job again.",
        )
    return None


def needed(environ: Mapping[str, str], *names: str, least: int = 0) -> int:
    """Return the first set variable of `names` as a number; raises MismatchError if all are unset."""
    value = integer(environ, *names, least=least)
    if value is None:
        raise MismatchError(
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not set.",
            hint="Start with srun, torchrun or mpirun, or set SLURMDDP_ENVIRONMENT=single for one process.",
        )
    return value
