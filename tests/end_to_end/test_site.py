"""The site of the docs: it builds strictly, its links and redirects resolve, and it needs no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

from support import ROOT

FLAT = [
    "api", "architecture", "behaviours", "bench", "checkpoints", "cluster", "collectives",
    "configuration", "controller", "data", "ddp", "exact-resume", "extending", "failures", "fsdp",
    "goodput", "hydra", "json", "loggers", "measurements", "own-script", "placement", "preflight",
    "process-groups", "python", "release", "rendezvous", "requeue", "restart", "run-folder",
    "stopping", "strategies", "trainer", "watchdog",
]  # fmt: skip
"""Names of pages that once stood directly in docs/."""
COUNTED = ("h1", "h2", "h3", "li", "table", "tr", "td", "pre", "em", "strong", "img")
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href"}
"""Attributes whose address a browser opens by itself."""


class Tags(HTMLParser):
    """The tags of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def counts(self) -> dict[str, int]:
        return {tag: count for tag, count in Counter(tag for tag, _ in self.tags).items() if tag in COUNTED}


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    # With --quiet, warnings are not counted, and --strict has no effect.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        [*command, "--config-file", str(config), "--site-dir", str(site)],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT / "mkdocs.yml", folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Tags]:
    return {page: Tags(page.read_text()) for page in site.rglob("*.html")}


def article(page: Path) -> str:
    """Return the HTML that the site made of a page's Markdown."""
    text = page.read_text()
    return text[text.index("<article") : text.index("</article>")]


def test_every_page_of_the_docs_is_on_the_site(site: Path) -> None:
    names = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert len(names) > len(FLAT)
    assert [name for name in names if not (site / name).exists()] == []


def test_links_of_the_site_resolve(site: Path, pages: dict[Path, Tags]) -> None:
    anchors = {
        page: {attributes.get("id") for _, attributes in parsed.tags} for page, parsed in pages.items()
    }
    broken = []
    checked = 0
    for page, parsed in pages.items():
        if page == site / "404.html":  # Its links are for a server's root.
            continue

        for tag, attributes in parsed.tags:
            link = attributes.get("href" if tag in ("a", "link") else "src", "")
            parts = urlsplit(link)
            if not link or parts.scheme:
                continue

            checked += 1
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchor = unquote(parts.fragment)
            is_anchor = not anchor or target not in anchors or anchor in anchors[target]
            if not target.is_file() or not is_anchor:
                broken.append((page.relative_to(site), link))
    assert broken == []
    assert checked > 1000


def test_a_page_needs_no_other_host(pages: dict[Path, Tags]) -> None:
    loaded = {
        attributes.get(LOADED[tag], "")
        for parsed in pages.values()
        for tag, attributes in parsed.tags
        if tag in LOADED and attributes.get("rel") != "canonical"
    }
    assert len(loaded) > 10
    assert [address for address in loaded if urlsplit(address).netloc] == []


@pytest.mark.parametrize("name", FLAT)
def test_the_old_name_of_a_page_leads_to_the_page(name: str, site: Path) -> None:
    old = site / f"{name}.html"
    target = re.search(r'<meta http-equiv="refresh" content="0; url=([^"]+)">', old.read_text())
    assert target, f"{old.name} redirects nowhere"
    title = re.search(r"<title>(.*) - slurmddp</title>", (site / target[1]).read_text())
    assert title and (site / target[1]).parent != site


@pytest.mark.parametrize(
    "page",
    [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("README.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_site_reads_a_page_as_other_readers_of_markdown_do(page: Path, site: Path) -> None:
    """A list or a code block that is indented too little is one for CommonMark, but not for MkDocs."""
    name = str(page.relative_to(ROOT)).removeprefix("docs/")
    shown = site / (name if name != str(page.relative_to(ROOT)) else f"repository/{name}")
    shown = shown.with_name("index.html" if page.stem == "README" else f"{page.stem}.html")
    expected = Tags(MarkdownIt("commonmark").enable("table").render(page.read_text())).counts()
    assert Tags(article(shown)).counts() == expected


@pytest.mark.parametrize(
    ("link", "complaint"),
    [
        ("../guides/none.md", "'../guides/none.md', but the target 'guides/none.md' is not found"),
        ("../index.md#none", "'index.md' does not contain an anchor '#none'"),
        ("/index.html", "an absolute link '/index.html'"),
        ("../../tests/none.py", "link '../../tests/none.py'"),
    ],
)
def test_a_wrong_link_in_a_folder_ends_the_build(link: str, complaint: str, tmp_path: Path) -> None:
    config = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    config = re.sub(r"redirect_maps:\n( +# .*\n)?( +\S+\.md: .*\n)+", "redirect_maps: {}\n", config)
    (tmp_path / "mkdocs.yml").write_text(config)
    (tmp_path / "docs" / "guides").mkdir(parents=True)
    (tmp_path / "docs" / "site").symlink_to(ROOT / "docs" / "site")
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n[A](guides/a.md)\n")
    guide = tmp_path / "docs" / "guides" / "a.md"
    guide.write_text("# A\n\n[Home](../index.md#home)\n")
    built = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert built.returncode == 0, built.stdout + built.stderr

    guide.write_text(f"# A\n\n[B]({link})\n")
    built = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert built.returncode != 0
    assert complaint in built.stdout + built.stderr


@pytest.mark.browser
def test_the_search_answers_in_pages_that_are_opened_from_a_folder(site: Path, tmp_path: Path) -> None:
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    address = (site / "guides" / "ddp.html").as_uri() + "?q=exit+codes"
    shown = subprocess.run(
        ["chromium", *options, "--virtual-time-budget=30000", "--dump-dom", address],
        capture_output=True,
        text=True,
        check=True,
    )
    results = re.findall(r'<a href="([^"]+)" class="md-search-result__link"', shown.stdout)
    assert any("reference/exit-codes.html" in result for result in results), results
