"""Documents: generated parts are up to date, commands and links are real, every option has help and is listed."""

import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

from docs import generate
from docs.generator import pictures, plots, results, site
from specdec.train_eagle.program import app

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
OPTIONS = ROOT / "docs" / "options.md"
GROUP: Any = typer.main.get_command(app)
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")})
REMEDY = "run: python -m docs.generate"


def _named(group: Any) -> Iterator[tuple[str, Any]]:
    """Commands by all words of their names, groups of sub-commands included."""
    for name, command in group.commands.items():
        yield name, command
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", one) for inner, one in _named(command))


BY_NAME = dict(_named(GROUP))


def _parameters() -> Iterator[tuple[str, Any]]:
    for name, command in {"": GROUP, **BY_NAME}.items():
        for parameter in command.params:
            yield f"{name} {parameter.name}", parameter


PARAMETERS = dict(_parameters())


def _commands() -> Iterator[str]:
    """Lines of the documents' code blocks, continued ones joined."""
    for page in PAGES:
        for block in re.findall(r"```\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                yield from (part.strip() for part in re.split(r"&&|\| (?=specdec)|#.*", line))


COMMANDS = sorted({line for line in _commands() if line.startswith("specdec ")})
MODULE = re.compile(r"python -m ((?:specdec|benchmarks|docs)(?:\.\w+)+)")
MODULES = sorted({name for page in PAGES for name in MODULE.findall(page.read_text(encoding="utf-8"))})
up_to_date = cache(generate.documents)


def test_a_table_of_several_runs_names_the_commit_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    for name, commit in {"a": "1111111", "b": "2222222", "c": "1111111"}.items():
        document = {"processor": "P", "threads": 2, "torch": "2.13", "commit": commit}
        (tmp_path / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    assert results.script_source("x.sh", "*", ["a", "c"]).endswith("(P, 2 threads; torch 2.13; commit 1111111).")
    assert results.script_source("x.sh", "*", ["a", "b", "c"]).endswith("commit 1111111; `b`: commit 2222222).")


def test_the_commands_are_found() -> None:
    assert {"generate", "bench", "bench latency"} <= set(BY_NAME)
    assert {"generate model", "generate prompt"} <= set(PARAMETERS)
    assert 'specdec generate --draft eagle "I would like to find a restaurant in San Jose."' in COMMANDS
    assert {"specdec.train_eagle.train", "benchmarks.speed", "docs.generate"} <= set(MODULES)


@pytest.mark.parametrize("name", BY_NAME)
def test_command_has_help_and_examples(name: str) -> None:
    assert re.search(f"\n  specdec {name}[ \n]", f"{BY_NAME[name].help.split('Examples:')[1]}\n")


def test_parameters_have_help() -> None:
    assert [name for name, parameter in PARAMETERS.items() if not parameter.help] == []


@pytest.mark.parametrize("name", GROUP.commands)
def test_command_is_in_the_readme(name: str) -> None:
    assert f"specdec {name}" in README.read_text(encoding="utf-8")


def test_options_are_listed() -> None:
    listed = set(re.findall(r"(?<![\w-])--[\w-]+|[A-Z_]{3,}", OPTIONS.read_text(encoding="utf-8")))
    lacking = []
    for name, parameter in PARAMETERS.items():
        flags = [flag for flag in (*parameter.opts, *parameter.secondary_opts) if flag.startswith("--")]
        wanted = {*flags, *([parameter.envvar] if parameter.envvar else [])}
        lacking += [(name, each) for each in wanted - listed]
    assert lacking == []


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_command_has_its_options(command: str) -> None:
    words = shlex.split(command.split(">")[0])
    name = " ".join(words[1:3]) if " ".join(words[1:3]) in BY_NAME else words[1]
    if name not in BY_NAME:
        # `specdec --version`, or `specdec COMMAND --help`.
        assert words[1] == "COMMAND" or words[1].startswith("--")
        return
    parameters = BY_NAME[name].params
    known = {flag for parameter in parameters for flag in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("module", MODULES)
def test_documented_module_is_there(module: str) -> None:
    assert find_spec(module)


def test_the_readme_is_short_and_holds_the_two_commands() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.split()) <= 1000
    first = 'specdec generate --draft eagle "I would like to find a restaurant in San Jose."'
    assert f"\npip install -e . && {first}\n" in text
    assert "\npip install -e '.[test]' && python -m pytest\n" in text


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, str(README), "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", generate.DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_generated_parts_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == up_to_date()[path], REMEDY


def test_no_generated_part_hides_another() -> None:
    assert len(generate.PARTS) == sum(len(module.PARTS) for module in generate.MODULES)


def test_plots_are_up_to_date() -> None:
    assert not plots.outdated(generate.IMAGES), REMEDY


@pytest.mark.parametrize("name", ["terminal.svg", "tree.svg"])
def test_pictures_show_the_demo_at_hand(name: str) -> None:
    picture = (generate.IMAGES / name).read_text(encoding="utf-8")
    assert f"specdec-inputs: {pictures.inputs()}" in picture, f"{REMEDY} --runs"
    assert "url(" not in picture.replace("url(#", "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
            # The site is built from docs/, and from the pages that it takes from the root.
            found = (page.parent / target).resolve()
            on_site = found.is_relative_to(ROOT / "docs") or found.name in site.PAGES
            assert on_site or page.parent != ROOT / "docs", target


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    own = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert sorted(listed) == sorted([*own, *site.PAGES.values()])
