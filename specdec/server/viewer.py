"""The draft-tree viewer: one HTML file, served as a page for chats or written with a recorded answer in it.

It is put together from the files of the folder `page`, and holds no reference to another file or host. Its content
security policy allows its own script and style alone, by their hashes, so that no text of a model can become code.
Needs none of the server's packages.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from specdec.core.step_report import StepReport

_FOLDER = Path(__file__).with_name("page")
# In the order in which they run, as one script.
_SCRIPTS = ("stream.js", "markdown.js", "tree.js", "answer.js", "chat.js")
_POLICY_PLACE, _TRACE_PLACE = "<!-- policy -->\n", "<!-- trace -->\n"


def page() -> tuple[bytes, str]:
    """Return the page for chats and its content security policy, a header of the answer that carries it."""
    html = _html()
    policy = _policy(html, "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'")
    return html.replace(_POLICY_PLACE, "").replace(_TRACE_PLACE, "").encode(), policy


def recorded_page(model: str, prompt: str, steps: Sequence[StepReport], end: str = "") -> str:
    """Return the page with an answer in it, as a file that needs no server.

    Args:
        model: name of the model, to be shown.
        steps: all steps of the answer.
        end: what cut the answer, to be shown; empty for nothing.
    """
    html = _html()
    policy = _policy(html, "form-action 'none'; base-uri 'none'")
    data = {"model": model, "prompt": prompt, "steps": [asdict(step) for step in steps], "end": end}
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    block = f'<script id="recorded" type="application/json">{_embedded(data)}</script>\n'
    return html.replace(_POLICY_PLACE, meta).replace(_TRACE_PLACE, block)


def _html() -> str:
    """Return the page with its style and script in it."""
    html, style = _read("page.html"), _read("page.css")
    script = "\n".join(_read(name) for name in _SCRIPTS)
    html = html.replace("<!-- style -->", f"<style>\n{style}</style>")
    return html.replace("<!-- script -->", f"<script>\n{script}</script>")


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _embedded(data: Mapping[str, object]) -> str:
    """Return JSON that no HTML parser takes for the end of a script."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def _policy(html: str, more: str) -> str:
    """Return a policy that allows the page's own script and style.

    Args:
        more: further directives.
    """
    hashes = []
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes.append(f"{tag}-src 'sha256-{digest}'")
    return f"default-src 'none'; {'; '.join(hashes)}; img-src data:; {more}"
