"""Write a page: a single HTML file that needs no network, no script and no other file."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import slurmddp
from slurmddp.host.atomic_file import write_atomic
from slurmddp.templates import template


def write_page(path: Path, template_name: str, *, kind: str, name: str, **content: Any) -> Path:
    """Render a template, write it as an HTML file, and return the path of the file.

    Args:
        path: the file to write.
        template_name: the template of the page, which extends `page.html.j2`.
        kind: the kind of the page's subject, such as "Sweep"; shown before the name.
        name: the name of the run, sweep or benchmark.
        content: further values for the template; the template escapes their text.
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
    """Return a text as escaped HTML, in which text between backticks becomes a `<code>` element."""
    from markupsafe import Markup, escape

    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))
