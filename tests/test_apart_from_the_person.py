"""The tests write nothing into the folders of the person who runs them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

AT_IMPORT = dict(os.environ)
"""As a test module copies the environment for the programs that it starts."""


def test_a_program_of_a_test_module_has_no_index_of_the_person() -> None:
    """The runs of such a program would stand in the person's `slurmddp list`."""
    state = Path(AT_IMPORT.get("XDG_STATE_HOME", ""))
    assert state.is_relative_to(tempfile.gettempdir()) and state.name.startswith("slurmddp-state-")
