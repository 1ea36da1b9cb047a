"""CUDA's own answer about this process: an import may have initialised CUDA without torch knowing."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace

import pytest

from slurmddp.launchers.agent import preload

NOT_INITIALIZED, STUB_LIBRARY = 3, 34


def driver_that_says(code: int, count: int = 8) -> SimpleNamespace:
    def get_count(there: object) -> int:
        there._obj.value = count  # type: ignore[attr-defined]
        return code

    return SimpleNamespace(cuDeviceGetCount=get_count)


@pytest.mark.parametrize(
    ("code", "why"), [(0, "has initialised CUDA"), (NOT_INITIALIZED, None), (STUB_LIBRARY, None)]
)
def test_a_driver_that_somebody_has_initialised_stands_in_the_way(
    monkeypatch: pytest.MonkeyPatch, code: int, why: str | None
) -> None:
    asked = []

    def load(name: str, mode: int) -> SimpleNamespace:
        asked.append((name, mode))
        return driver_that_says(code)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert preload.why_no_fork() == why
    assert asked == [("libcuda.so.1", os.RTLD_NOLOAD)], "asking must not load it"


def test_without_a_driver_nothing_stands_in_the_way() -> None:
    assert preload.why_no_fork() is None
