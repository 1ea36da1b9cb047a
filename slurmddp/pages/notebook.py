"""Show HTML in the output of a notebook cell, and replace it there.

IPython is imported only in a process that has imported it already: in a kernel of Jupyter.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

_EVERY_S = 1.0
"""Shortest pause between two updates of an output, in seconds."""
_SHARE = 0.05
"""Largest share of the time that is spent on updates."""


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return getattr(get_ipython and get_ipython(), "kernel", None) is not None


class CellOutput:
    """HTML in the output of the current notebook cell; outside of a notebook nothing is shown.

    Args:
        render: returns the HTML.
        text: the text that a front end without HTML shows.
    """

    def __init__(self, render: Callable[[], str], text: str) -> None:
        self._render = render
        self._text = text
        self._shown = ""
        self._handle: Any = None
        self._due = 0.0 if is_notebook() else math.inf

    def update(self, *, at_once: bool = False) -> None:
        """Show the HTML of this moment, unless the last update was too short a time ago.

        Args:
            at_once: whether to replace HTML that was shown just now.
        """
        started = time.monotonic()
        if started < self._due and not (at_once and self._handle):
            return

        html = self._render()
        if html != self._shown:
            self._show({"text/html": html, "text/plain": self._text})
            self._shown = html

        ended = time.monotonic()
        self._due = ended + max(_EVERY_S, (ended - started) / _SHARE)

    def _show(self, contents: dict[str, str]) -> None:
        if self._handle is None:
            display = import_module("IPython.display").display
            self._handle = display(contents, raw=True, display_id=True)
        else:
            self._handle.update(contents, raw=True)
