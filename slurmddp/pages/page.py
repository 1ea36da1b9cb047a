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
    """Write a page, and return its path.

    Args:
        path: the file to write.
        template_name: the template of the page, which extends `page.html.j2`.
        kind: the kind of subject, such as "Sweep".
        name: the name of the subject.
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
    """Return a text as escaped HTML, with the text between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))
