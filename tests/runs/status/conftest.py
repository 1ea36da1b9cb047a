"""The run folder whose status the tests read."""

from __future__ import annotations

import pytest

from support.runs.run_events import make_folder


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path, "name: gpt\nnodes: 2\nranks_per_node: 2\ntrain:\n  steps: 400\n")
