"""Three workers for all tests of the room that leave them in order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurmddp import remote


@pytest.fixture(scope="package")
def three() -> Iterator[remote.workers]:
    with remote.workers(3) as workers:
        yield workers


@pytest.fixture
def w(three: remote.workers) -> Iterator[remote.workers]:
    yield three
    three.synchronize()  # An error that a test has not asked for fails it.
