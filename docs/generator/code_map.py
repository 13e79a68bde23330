"""Index of files and the drawing of folders and their imports, both read from the source text."""

import ast
import os
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from docs.generator.regions import table

ROOT = Path(__file__).parents[2]
LAYERS = ("kernels", "verify", "draft_heads", "specdec", "train_eagle")


@cache
def sources() -> dict[str, Path]:
    """Return the file of every product module by the name it is imported by, with the linked folders resolved."""
    found = {}
    for layer in LAYERS:
        # Unlike a glob, `os.walk` never follows the links in specdec/.
        for folder, folders, files in os.walk(ROOT / layer):
            folders.sort()
            for name in sorted(files):
                if name.endswith(".py"):
                    path = Path(folder, name)
                    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                    found[dotted if layer == "specdec" else f"specdec.{dotted}"] = path
    return found


def room_of(module: str) -> str | None:
    """Return the room a module lies in, such as `specdec/cache` or `verify`.

    Modules beside the rooms of a linked layer lie in one with the layer's name. The package itself and
    `python -m specdec` are the entrance and lie in none.
    """
    parts = module.split(".")
    if len(parts) == 1 or parts[1] == "__main__":
        return None
    if parts[1] not in LAYERS:
        return f"specdec/{parts[1]}"
    return "/".join(parts[1:3]) if len(parts) > 3 else parts[1]


@cache
def imports() -> Counter[tuple[str, str]]:
    """Return how many import statements lead from one room to another."""
    files, arrows = sources(), Counter[tuple[str, str]]()
    for module, path in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets: set[str] = set()
            if isinstance(node, ast.Import):
                targets = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                targets = {name if name in files else str(node.module) for name in full}
            for target in targets & set(files):
                importer, imported = room_of(module), room_of(target)
                if importer and imported and importer != imported:
                    arrows[importer, imported] += 1
    return arrows


def rooms_in_order(files: dict[str, Path], arrows: Counter[tuple[str, str]]) -> list[str]:
    """Return all rooms, each after those it imports.

    Raises:
        graphlib.CycleError: two rooms import each other, directly or not.
    """
    graph: dict[str, set[str]] = {room: set() for room in map(room_of, sorted(files)) if room}
    for importer, imported in sorted(arrows):
        graph[importer].add(imported)
    sorter = TopologicalSorter(graph)
    sorter.prepare()
    order: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=lambda room: (LAYERS.index(room.split("/")[0]), room))
        order += ready
        sorter.done(*ready)
    return order


def drawing() -> str:
    """Return the rooms and their imports as a mermaid drawing: one box a room, one arrow a pair, importer on top."""
    arrows = imports()
    rooms = rooms_in_order(sources(), arrows)
    lines = ["```mermaid", "flowchart TD"]
    for layer in reversed(LAYERS):
        own = sorted(room for room in rooms if room.split("/")[0] == layer)
        if own == [layer]:
            lines.append(f'  {layer}["{layer}/"]')
            continue
        lines.append(f'  subgraph {layer}_layer ["{layer}/"]')
        lines += [f"    {_identifier(room)}[{room.split('/')[-1]}]" for room in own]
        lines.append("  end")
    lines += [f"  {_identifier(one)} --> {_identifier(other)}" for one, other in _reduced(rooms, arrows)]
    return "\n".join([*lines, "```"])


def _reduced(rooms: list[str], arrows: Counter[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the arrows between rooms in order that no longer path implies, so that the drawing can be read."""
    after = {room: {other for one, other in arrows if one == room} for room in rooms}
    reachable: dict[str, set[str]] = {}
    for room in rooms:
        reachable[room] = after[room].union(*(reachable[other] for other in after[room]))
    return sorted(
        (one, other) for one, other in arrows if not any(other in reachable[between] for between in after[one])
    )


def _identifier(room: str) -> str:
    return room.replace("/", "_")


def matrix() -> str:
    """Return which room imports which, every arrow, as a table."""
    arrows = imports()
    order = rooms_in_order(sources(), arrows)
    rows = []
    for room in order:
        used = [other for other in order if arrows[room, other]]
        rows.append([f"`{room}`", ", ".join(f"`{other}`" for other in used) or "nothing"])
    return table(["room", "imports"], rows)


def file_index() -> str:
    """Return every module with the first line of its docstring, grouped by folder."""
    folders: dict[str, list[list[str]]] = {}
    for path in sources().values():
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if docstring:
            row = [f"`{path.name}`", docstring.splitlines()[0].replace("|", "\\|")]
            folders.setdefault(path.parent.relative_to(ROOT).as_posix(), []).append(row)
    return "\n\n".join(f"### `{folder}/`\n\n{table(['file', 'holds'], folders[folder])}" for folder in sorted(folders))


PARTS = {"rooms": drawing, "room-imports": matrix, "files": file_index}
