"""Show on the site of the docs the files of the repository to which pages link: examples, sources, README.

MkDocs takes pages from docs/ only. A page's link to a file elsewhere leads to a page `repository/PATH` of the
site: Markdown is shown as it is, other text as code.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?(\))")
IMAGES = (".png", ".svg")
AS_CODE = "---\nsearch:\n  exclude: true\n---\n# `{path}`\n\n~~~~~~~~{language}\n{text}\n~~~~~~~~\n"
BOOST = {"start": 2.0, "guides": 2.0, "internals": 0.5, "repository": 0.5}
"""Weights of pages in the results of a search, by folder: a reader mostly looks for a task."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository to which pages link, and the files to which these link."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    known = set(pages)
    while pages:
        page = pages.pop()
        for path in linked_from(page):
            if path in known or path.startswith("docs/"):
                continue

            known.add(path)
            if path.endswith(IMAGES):
                files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
            else:
                files.append(File.generated(config, in_site(path), content=content_of(path)))
            if path.endswith(".md"):
                pages.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page for the place that it and its targets have on the site; weigh the page."""
    source = in_repository(page.file.src_uri)
    folder = page.file.src_uri.partition("/")[0]
    page.meta.setdefault("search", {"boost": BOOST.get(folder, 1.0)})

    def rewritten(link: re.Match[str]) -> str:
        path = resolved(source, link[2])
        if not path:
            return link[0]
        target = posixpath.relpath(in_site(path), posixpath.dirname(page.file.src_uri))
        return f"{link[1]}{target}{link[3] or ''}{link[4]}"

    return LINK.sub(rewritten, markdown)


def linked_from(page: str) -> Iterator[str]:
    """Yield the paths in the repository of the files to which a page of Markdown links."""
    for link in LINK.finditer((ROOT / page).read_text()):
        if path := resolved(page, link[2]):
            yield path


def resolved(page: str, target: str) -> str:
    """Return the path in the repository of a link's target; empty if the target is no file there."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    is_file = "://" not in target and not path.startswith("..") and (ROOT / path).is_file()
    return path if is_file else ""


def in_site(path: str) -> str:
    """Return the path of a source file of the site for a path in the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")

    is_as_it_is = path.endswith((".md", *IMAGES))
    return f"repository/{path}" if is_as_it_is else f"repository/{path}.md"


def in_repository(source: str) -> str:
    """Return the path in the repository for the path of a source file of the site."""
    if source.startswith("repository/"):
        return source.removeprefix("repository/")

    return f"docs/{source}"


def content_of(path: str) -> str:
    """Return the Markdown that shows a text file of the repository."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text

    return AS_CODE.format(path=path, language=LANGUAGES.get(Path(path).suffix, "text"), text=text)
