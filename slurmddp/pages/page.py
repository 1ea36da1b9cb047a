"""Write a page: one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import slurmddp
from slurmddp.host.atomic_file import write_atomic
from slurmddp.templates import template


def write_page(path: Path, template_name: str, *, kind: str, name: str, **content: Any) -> Path:
    """Write a page, and return its path.

    Args:
        path: of the page.
        template_name: the page's template, which extends `page.html.j2`.
        kind: of the subject, such as "Sweep".
        name: of the subject.
        content: other values of the template, as plain text that the template escapes.
    """
    text = template(template_name).render(
        kind=kind,
        name=name,
        **content,
        coded=coded,
        written=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        version=slurmddp.__version__,
    )
    write_atomic(path, text)
    return path


def coded(text: str) -> Any:
    """Return a sentence as escaped HTML, with text between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))
