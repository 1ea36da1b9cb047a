"""A server that forks ranks with torch already imported, so that a test of four ranks costs one import."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import ranks


@pytest.fixture(scope="session")
def rank_server() -> Iterator[None]:
    """Start the server before any test looks for processes that are left, and end it after the last one."""
    importlib.import_module("torch._dynamo")  # It sets a variable; the first optimizer would import it.
    ranks.start_server()
    yield
    ranks.stop_server()
