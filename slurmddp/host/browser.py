"""The browser of this machine, where there is a display."""

from __future__ import annotations

import os
from pathlib import Path


def show(page: Path) -> None:
    """Show a page in the browser; do nothing without a display."""
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        import webbrowser  # Most commands open no page.

        webbrowser.open(page.as_uri())
