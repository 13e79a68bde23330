"""The plug-ins of docs/extend.md, as they stand there."""

import re
from pathlib import Path

_PAGE = (Path(__file__).parents[2] / "docs" / "extend.md").read_text(encoding="utf-8")
# Sources by the names of their modules.
EXAMPLES = {name: f"# {text}" for name, text in re.findall(r"```python\n# (\w+)\.py: (.*?)```", _PAGE, re.DOTALL)}
