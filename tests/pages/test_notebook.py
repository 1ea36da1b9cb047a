"""HTML in the output of a notebook cell; a real kernel shows it in tests/on_slurm/test_notebook.py."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from slurmddp.pages import notebook
from slurmddp.pages.notebook import CellOutput, is_notebook


class Handle:
    """The handle that IPython returns for an output."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def update(self, contents: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(contents)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """Let this process look like the kernel of a notebook."""
    handle = Handle()
    ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    shell = types.SimpleNamespace(kernel=object())

    def show(contents: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert display_id
        handle.update(contents, raw=raw)
        return handle

    attributes: dict[str, Any] = {"get_ipython": lambda: shell}
    vars(ipython).update(attributes)
    vars(display).update(display=show)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return handle


def test_outside_of_a_notebook_ipython_is_not_imported_and_nothing_is_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not is_notebook()
    output = CellOutput(lambda: pytest.fail("nobody sees it"), "text")
    output.update()
    output.update(at_once=True)
    assert "IPython" not in sys.modules


def test_the_shell_of_ipython_in_a_terminal_is_no_notebook(
    kernel: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_notebook()
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: object())
    assert not is_notebook()


def test_html_is_replaced_when_it_changes_and_after_a_pause(
    kernel: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(notebook.time, "monotonic", lambda: now[0])
    states = ["a", "b", "b", "c"]
    output = CellOutput(lambda: states.pop(0), "text")
    output.update()
    output.update()
    assert len(kernel.shown) == 1 and len(states) == 3, "the second update comes too early"
    for _ in range(2):
        now[0] += 1.0
        output.update()
    assert [shown["text/html"] for shown in kernel.shown] == ["a", "b"], "equal HTML is not sent again"
    output.update(at_once=True)
    assert kernel.shown[-1] == {"text/html": "c", "text/plain": "text"}


def test_slow_updates_are_rare(kernel: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(notebook.time, "monotonic", lambda: now[0])

    def render() -> str:
        now[0] += 2.0
        return str(now[0])

    output = CellOutput(render, "text")
    for _ in range(100):
        output.update()
        now[0] += 1.0
    assert len(kernel.shown) == 3, "an update of 2 s is made every 42 s"
