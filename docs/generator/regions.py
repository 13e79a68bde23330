"""Generated parts of a document, between two comments that a reader does not see."""

import re
from collections.abc import Mapping

REGION = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end generated -->)", re.DOTALL)


def names(text: str) -> list[str]:
    """Return the names of a document's generated parts."""
    return [match[2] for match in REGION.finditer(text)]


def fill(text: str, parts: Mapping[str, str]) -> str:
    """Return the document with every generated part replaced.

    Raises:
        KeyError: a part that nothing generates.
    """
    return REGION.sub(lambda match: f"{match[1]}\n{parts[match[2]]}\n\n{match[3]}", text)


def cells_table(rows: list[dict[str, str]]) -> str:
    """Return a markdown table of rows that all have the same cells by heading."""
    return table(list(rows[0]), [list(row.values()) for row in rows])


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a markdown table. Columns of numbers are aligned to the right."""
    columns = list(zip(*rows, strict=True))
    numeric = [all(re.fullmatch(r"-?[\d,.]+[%×]?|", cell) for cell in column) and any(column) for column in columns]
    rule = ["---:" if number else "---" for number in numeric]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))
