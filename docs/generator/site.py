"""Hooks of mkdocs: pages at the repository's root become pages of the site, which takes none from there."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[2]
PAGES = {"ARCHITECTURE.md": "architecture.md", "TOUR.md": "tour.md"}
_CODE = re.compile(r"\[(`[^`]+`)\]\((?!docs/|\w+\.md)[^)]+\)")


def on_files(files: "Files", config: Any) -> "Files":
    """Add the pages. Their links to code become plain names, since the site has no code."""
    # Late: tests read `PAGES` where mkdocs is not installed.
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        text = _CODE.sub(r"\1", (ROOT / name).read_text(encoding="utf-8")).replace("](docs/", "](")
        for other, address in PAGES.items():
            text = text.replace(f"]({other}", f"]({address}")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links of other pages there."""
    for name, page in PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({page}")
    return markdown
