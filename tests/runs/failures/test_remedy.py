"""The remedy in the lines of a rank stands in the first sentence about its failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.runs.failures.causes import remedy
from slurmddp.runs.failures.failure import Failure, as_error, describe

FRAMES = (
    "Traceback (most recent call last):",
    '  File "/p/train.py", line 2, in <module>',
    "    import nosuch",
)
MISSING = "ModuleNotFoundError: No module named 'nosuch'"
TOO_FEW = "ConfigError: The data set has 5 samples"


@pytest.mark.parametrize(
    ("reason", "lines", "found"),
    [
        (TOO_FEW, ("log", f"{TOO_FEW}.", "Use a smaller batch."), "Use a smaller batch."),
        (f"{TOO_FEW[:30]}...", (f"{TOO_FEW}.", "Use a smaller batch."), "Use a smaller batch."),
        (TOO_FEW, (f"{TOO_FEW}.",), ""),
        (TOO_FEW, (f"{TOO_FEW}.", "  a key: 3", "Go back."), ""),
        (f"{MISSING} (train.py:2)", (*FRAMES, MISSING, "hint: Install it."), "Install it."),
        (f"{MISSING} (train.py:2)", (*FRAMES, MISSING, "Exception ignored in: x"), ""),
        ("ValueError: x", ("ValueError: x", "another thread still prints"), ""),
        ("", ("step 3", "step 4"), ""),
    ],
)
def test_only_what_slurmddp_has_printed_after_the_error_is_a_remedy(
    reason: str, lines: tuple[str, ...], found: str
) -> None:
    assert remedy(reason, lines) == found


def test_the_first_sentence_holds_the_remedy_also_if_the_lines_were_shown_before() -> None:
    lines = (f"{TOO_FEW}.", "Use a smaller batch.")
    failure = Failure(rank=1, host="c07", exit_code=78, signal=None, reason=TOO_FEW, last_lines=lines)
    sentence = f"Rank 1 on c07 refused to continue (exit code 78): {TOO_FEW}. Use a smaller batch."
    assert describe(failure) == sentence
    assert as_error(failure, Path("rank-1.log"), with_lines=False).message == sentence
