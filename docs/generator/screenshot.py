"""The picture of the draft-tree viewer: the page of a running server with the demo model, in headless Chromium.

    python -m docs.generator.screenshot CHROMIUM

CHROMIUM is the program of the browser. Needs the extras `serve` and `browser`.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from docs.generator.pictures import EXACT, TREE_PROMPT

PICTURE = Path(__file__).parents[1] / "images" / "viewer.png"
SIZE = {"width": 1400, "height": 600}
MESSAGES = (TREE_PROMPT, "At seven in the evening, please. Something Italian.")
SHAPE = ["--depth", "4", "--branching", "4", "--nodes", "10"]


@contextmanager
def _served() -> Iterator[str]:
    """Serve the demo model, and yield the address."""
    command = [sys.executable, "-m", "specdec", "serve", "--port", "0", *EXACT, *SHAPE]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = next(filter(None, (re.search(r"serving .* at (\S+)", line) for line in process.stderr)))
            yield found[1]
        finally:
            process.terminate()


def take(tab: Any, address: str) -> None:
    """Let the page answer the messages, open the step with the longest accepted path, and write the picture."""
    tab.goto(address)
    for message in MESSAGES:
        tab.fill("#message", message)
        tab.press("#message", "Enter")
        tab.wait_for_selector("#send", state="visible")
    steps: list[tuple[int, Any, int]] = []
    for slider in tab.locator(".steps input").all():
        for step in range(1, 1 + int(slider.get_attribute("max"))):
            slider.fill(str(step))
            found = re.search(r"(\d+) accepted", tab.locator("#title").text_content())
            assert found is not None
            steps.append((int(found[1]), slider, step))
    _, slider, step = max(steps, key=lambda each: each[0])
    slider.fill(str(step))
    tab.screenshot(path=PICTURE)


def main() -> None:
    from playwright.sync_api import sync_playwright

    with _served() as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=sys.argv[1], args=["--no-sandbox"])
        take(browser.new_page(viewport=SIZE), address)
        browser.close()
    print(PICTURE, PICTURE.stat().st_size)


if __name__ == "__main__":
    main()
