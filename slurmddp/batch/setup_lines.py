"""Warn of a failed setup line of the cluster file after which the shell continued."""

from __future__ import annotations

import re
from pathlib import Path

from slurmddp.batch.attempt import Attempt, log_write_error

_SHOWN = 200
"""Number of characters of a setup line that the warning shows."""


def warn(attempt: Attempt, code: str, line: str, script: str) -> None:
    """Record that line number `line` of the file `script` failed with exit code `code`."""
    lines = Path(script).read_text(encoding="utf-8", errors="replace").splitlines()
    number = int(line)
    command = lines[number - 1].lstrip() if 0 < number <= len(lines) else ""
    command = re.sub(r"[^ -~]", " ", command)[:_SHOWN]

    failure = f"setup line `{command}` failed with code {code}"
    attempt.log(f"The {failure}.")
    with log_write_error("The event `warned`", attempt.log):
        attempt.folder.add_event(
            "warned",
            attempt=attempt.number,
            about="setup",
            failure=failure,
            text=f"The {failure}. The ranks start all the same, unless a line before it sets `set -e`.",
        )
