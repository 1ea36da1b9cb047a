"""Show pages in the browser of this machine, if it has a display."""

from __future__ import annotations

import os
from pathlib import Path


def show(page: Path) -> None:
    """Open an HTML file in the web browser; do nothing without a display."""
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        # Imported here, because most commands open no page.
        import webbrowser

        webbrowser.open(page.as_uri())
