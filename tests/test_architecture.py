"""Layers and rooms: which module may import which. Each test names all modules that break its rule."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each imports only itself and those before it.
LAYERS = ["kernels", "verify", "draft_heads", "specdec", "train_eagle"]
LINKED = [name for name in LAYERS if name != "specdec"]
# The console script assembles the commands of all layers, so it stands in the topmost one.
CONSOLE_SCRIPT = "specdec.__main__"
# The rooms of a layer (its sub-packages and the modules beside them), floor by floor. Each room imports only itself and
# the floors before its own; rooms of one floor do not import each other.
FLOORS = {
    "kernels": [{"types"}, {"reference"}, {"triton", "native"}, {"kernel_set"}],
    "specdec": [
        {"json_schema", "text", "gguf"},
        {"core"},
        {"parallel"},
        {"cache"},
        {"kv_transfer"},
        {"scheduling"},
        {"config"},
        {"models"},
        {"execution"},
        {"engine"},
        {"building"},
        {"llm"},
        {"async_engine"},
        {"__init__"},
        {"programs"},
        {"bench"},
        {"tool_calls"},
        {"openai"},
        {"server"},
        {"ray_serve"},
        {"cli"},
    ],
    "draft_heads": [{"llama"}, {"heads"}, {"drafting", "formats"}],
    "train_eagle": [
        {"data"},
        {"passes"},
        {"evaluation"},
        {"training"},
        {"stage_command"},
        {"regenerate", "prepare", "train", "evaluate", "export"},
        {"program"},
        {"__main__"},
    ],
}


def _sources() -> dict[str, Path]:
    """Map the importable name of every module to its file in its real folder."""
    found = {}
    for layer in LAYERS:
        # Unlike a glob, `os.walk` never follows the links in specdec/.
        for folder, _, names in os.walk(ROOT / layer):
            for name in names:
                if name.endswith(".py"):
                    file = Path(folder, name)
                    dotted = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                    found[dotted if layer == "specdec" else f"specdec.{dotted}"] = file
    return found


SOURCES = _sources()


def _layer(module: str) -> str | None:
    """The layer of an imported name, or None if it is not ours."""
    parts = module.split(".")
    if module == CONSOLE_SCRIPT:
        return LAYERS[-1]
    if parts[0] != "specdec":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LINKED else "specdec"


def _room(module: str) -> str:
    """The folder of a layer that holds one of our modules, or the module itself where it stands beside the folders."""
    inside = module.split(".")[1 if _layer(module) == "specdec" or module == CONSOLE_SCRIPT else 2 :]
    return inside[0] if inside else "__init__"


@cache
def _imports(module: str) -> set[str]:
    """Names of all modules that a module imports: at its head, inside functions, and under TYPE_CHECKING."""
    names = set()
    for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{SOURCES[module]}:{node.lineno}: a relative import breaks under the links"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in SOURCES else str(node.module) for name in full}
    return names


def test_modules_of_every_layer_are_found() -> None:
    assert {_layer(module) for module in SOURCES} >= set(LAYERS) - {"train_eagle"}
    assert {"specdec", "specdec.llm", "specdec.models.llama", "specdec.kernels.types.tree"} <= set(SOURCES)
    assert "specdec.kernels.types.tree" in _imports("specdec.engine.engine")


def test_imports_point_downwards() -> None:
    wrong = []
    for module in SOURCES:
        own = _layer(module)
        assert own is not None
        allowed = LAYERS[: LAYERS.index(own) + 1]
        wrong += [(module, name) for name in _imports(module) if _layer(name) not in (None, *allowed)]
    assert not wrong


@pytest.mark.parametrize("layer", FLOORS)
def test_every_room_has_a_floor(layer: str) -> None:
    rooms = {_room(module) for module in SOURCES if _layer(module) == layer}
    assert rooms == set().union(*FLOORS[layer])


def test_imports_point_to_earlier_rooms() -> None:
    wrong = []
    for module in SOURCES:
        layer, room = _layer(module), _room(module)
        if layer not in FLOORS:
            continue
        floors = FLOORS[layer]
        own = next(index for index, floor in enumerate(floors) if room in floor)
        allowed = {room}.union(*floors[:own])
        inside = [name for name in _imports(module) & set(SOURCES) if _layer(name) == layer]
        wrong += [(module, name) for name in inside if _room(name) not in allowed]
    assert not wrong


def test_layers_are_imported_through_the_package() -> None:
    pairs = [(module, name) for module in SOURCES for name in _imports(module)]
    assert [(module, name) for module, name in pairs if name.split(".")[0] in LINKED] == []


def test_kernels_need_only_torch_triton_and_numpy() -> None:
    kernels = [module for module in SOURCES if _layer(module) == "kernels"]
    others = [(module, name) for module in kernels for name in _imports(module) if _layer(name) != "kernels"]
    known = {"torch", "triton", "numpy", *sys.stdlib_module_names}
    assert [(module, name) for module, name in others if name.split(".")[0] not in known] == []


def test_no_two_classes_have_one_name() -> None:
    names = Counter(
        node.name
        for file in SOURCES.values()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert not {name for name, count in names.items() if count > 1}


def test_no_import_cycle() -> None:
    graph = {module: _imports(module) & set(SOURCES) - {module} for module in SOURCES}
    list(TopologicalSorter(graph).static_order())


def test_test_modules_do_not_import_each_other() -> None:
    """Code that several of them need stands in a module of its own."""
    statement = re.compile(r"^\s*(?:from|import) \S*\b(?:test_\w+|conftest)\b", re.MULTILINE)
    files = (ROOT / "tests").rglob("*.py")
    assert {str(file) for file in files if statement.search(file.read_text(encoding="utf-8"))} == set()


@pytest.mark.parametrize("name", LINKED)
def test_layer_is_a_plain_folder_linked_into_the_package(name: str) -> None:
    assert not (ROOT / name).is_symlink()
    assert not (ROOT / name / "__init__.py").exists()
    assert os.readlink(ROOT / "specdec" / name) == f"../{name}"


def test_an_editable_install_puts_the_package_alone_on_the_path() -> None:
    assert [name for name in os.listdir(ROOT / "src") if not name.endswith(".egg-info")] == ["specdec"]
    assert os.readlink(ROOT / "src" / "specdec") == "../specdec"


def test_links_are_kept_by_git() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    links = ["src/specdec", *(f"specdec/{name}" for name in LINKED)]
    command = ["git", "ls-files", "-s", *links]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert sorted((line.split()[0], line.split("\t")[1]) for line in lines) == sorted(
        ("120000", name) for name in links
    )
