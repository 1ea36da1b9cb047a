"""Warn of a setup line of the cluster file that failed without ending the shell."""

from __future__ import annotations

import re
from pathlib import Path

from slurmddp.batch.attempt import Attempt, said_if_not_recorded

_SHOWN = 200
"""Characters of a line that are shown."""


def warn(attempt: Attempt, code: str, line: str, script: str) -> None:
    """Record that line `line` of the file `script` failed with exit code `code`."""
    lines = Path(script).read_text(encoding="utf-8", errors="replace").splitlines()
    number = int(line)
    text = lines[number - 1].lstrip() if 0 < number <= len(lines) else ""
    failure = f"setup line `{re.sub(r'[^ -~]', ' ', text)[:_SHOWN]}` failed with code {code}"
    attempt.say(f"The {failure}.")
    text = f"The {failure}. The ranks start all the same, unless `set -e` stands before it."
    with said_if_not_recorded("warned", attempt.say):
        attempt.folder.add_event("warned", attempt=attempt.number, about="setup", failure=failure, text=text)
