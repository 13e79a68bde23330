"""Options: panels, short forms, choices, completion, and earlier names, from one declaration each."""

import os
import re
import subprocess
import sys
from typing import Any, get_args

import pytest
import typer

from specdec.cli.options import EARLIER, PANELS
from specdec.config import EngineConfig
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.kernels.types.settings import KernelChoice, settings_of
from specdec.train_eagle.program import app, main

pytestmark = pytest.mark.slow

GROUP: Any = typer.main.get_command(app)
COMMANDS = {**GROUP.commands, **{f"bench {name}": one for name, one in GROUP.commands["bench"].commands.items()}}
del COMMANDS["bench"]
SHORT = {"model": "-m", "max_tokens": "-n", "seed": "-s", "verbose": "-v", "out": "-o", "output": "-o"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_panels(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option is in its panel once, with its whole name in a narrow terminal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "60")
        with pytest.raises(SystemExit):
            main([*name.split(), "--help"])
    shown = capsys.readouterr().out
    found = re.findall(r"^([A-Z]\w+):$", shown, re.MULTILINE)
    assert found == [panel for panel in PANELS if panel in found]
    for parameter in COMMANDS[name].params:
        panel = getattr(parameter, "rich_help_panel", None) or "Other"
        if parameter.param_type_name == "option":
            part = re.split(r"^[A-Z]\w+:$", shown, flags=re.MULTILINE)[1 + found.index(panel)]
            assert re.search(rf"^  (-\w, )?{parameter.opts[0]}(?![\w-])", part, re.MULTILINE), parameter.name


@pytest.mark.parametrize("name", COMMANDS)
def test_common_options_have_the_same_short_forms_everywhere(name: str) -> None:
    for parameter in COMMANDS[name].params:
        if parameter.name in SHORT:
            assert SHORT[parameter.name] in parameter.opts
        if "-d" in parameter.opts:
            assert parameter.name == "draft"
        if "-t" in parameter.opts:
            assert parameter.name in ("temperature", "temperatures")
    shorts = [flag for parameter in COMMANDS[name].params for flag in parameter.opts if re.fullmatch(r"-\w", flag)]
    assert len(shorts) == len(set(shorts))


def test_generate_has_the_panels_of_its_settings() -> None:
    panels = {parameter.name: parameter.rich_help_panel for parameter in GROUP.commands["generate"].params}
    expected = {
        "model": "Model",
        "dtype": "Model",
        "draft": "Drafts",
        "nodes": "Drafts",
        "verify": "Drafts",
        "temperature": "Sampling",
        "max_num_seqs": "Engine",
        "as_json": "Output",
    }
    assert {name: panels[name] for name in expected} == expected


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("generate", "--kernels", "coupledd", "hi"),
        ("serve", "--kernels", "coupledd"),
        ("bench", "latency", "--dtype", "coupledd"),
        ("train", "--loss", "coupledd"),
        ("evaluate", "-d", "x", "--data", "a=b", "-o", "c", "--dtype", "coupledd"),
    ],
)
def test_a_typo_in_a_choice_is_refused_before_anything_is_loaded(words: tuple[str, ...]) -> None:
    code = "import sys\nfrom specdec.train_eagle.program import main\n"
    code += "try: main(sys.argv[1:])\nfinally: print(sys.modules)"
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 2
    assert re.fullmatch(r"specdec: Invalid value for '--\w+': 'coupledd' is not one of '.*'\.\n", done.stderr)
    assert not re.search(r"'(torch|transformers|accelerate|datasets)'", done.stdout)


def test_choices_are_completed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the script that `--install-completion` installs for bash asks for them."""
    flags = {flag for parameter in GROUP.params for flag in parameter.opts}
    assert {"--install-completion", "--show-completion"} <= flags
    for line, expected in (
        ("specdec generate --kernels ", set(get_args(KernelChoice))),
        ("specdec reg", {"regenerate"}),
        ("specdec train --head ", {"eagle", "eagle3", "dflash", "dspark"}),
        ("specdec generate --draft-n", {"--draft-nodes"}),
    ):
        monkeypatch.setenv("_SPECDEC_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        with pytest.raises(SystemExit):
            main([])
        assert set(capsys.readouterr().out.split()) == expected


@pytest.mark.long
def test_earlier_names_still_work(capsys: pytest.CaptureFixture[str]) -> None:
    for earlier, name in EARLIER.items():
        for words in ((earlier, "0"), (f"{earlier}=0",), (name, "0")):
            with pytest.raises(SystemExit):
                main(["generate", *words, "hi"])
            assert capsys.readouterr().err.startswith(f"specdec: {earlier[2:]} is 0; it must be at least 1")


def test_options_of_settings_are_declared_by_them() -> None:
    """Help, flags and panels of options come from the fields."""
    parameters = {parameter.name: parameter for parameter in GROUP.commands["generate"].params}
    for owner in (EngineConfig, DraftShape):
        for name, (_, facts) in settings_of(owner).items():
            if facts.flags != "":
                assert parameters[name].help.startswith(facts.help.removesuffix("."))
                assert parameters[name].rich_help_panel == (facts.panel or owner.PANEL)
