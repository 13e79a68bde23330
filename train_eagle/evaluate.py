"""`specdec evaluate`, also `python -m specdec.train_eagle.evaluate`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from specdec.cli.model_options import SHAPE_DEFAULTS, Model, check_engine
from specdec.cli.options import Verbose, options_for, with_options
from specdec.cli.output_files import check_folder
from specdec.config import DEMO, default_shape
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.train_eagle.data.stage_settings import EvaluateSettings
from specdec.train_eagle.stage_command import let_threads_sleep, need_extra, run_stage

# Columns where the output is no terminal.
WIDTH = 140
SHOWN = dict.fromkeys(SHAPE_DEFAULTS, "as in generate: by device")


@with_options(EvaluateSettings, DraftShape, defaults=SHOWN)
def evaluate(
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            "-d",
            rich_help_panel="Drafts",
            help="A draft head: its folder, org/name on the hub, or the demo's: eagle or dspark.",
        ),
    ],
    model: Model = None,
    verbose: Verbose = False,  # noqa: ARG001
    **options: Any,
) -> None:
    """Evaluate a head: tokens per target step, speed over plain decoding, and accuracy.

    Tau is measured with trees as large as allowed: those of the options, or else those of generate and EAGLE-2's of 60
    nodes. Speed is measured with the adaptive ones of generate, one request at a time.
    Each line of a file is a conversation, or has a prompt or turns. The first question of a conversation is answered;
    of one that ends with a question, the last, after the rest as context. OUT gets evaluation.json and evaluation.png.

    \b
    Examples:
      specdec evaluate --model path/to/llama --draft path/to/head --data gsm8k=a.jsonl sgd=b.jsonl --out evaluation
    """
    given = EvaluateSettings(**options_for(EvaluateSettings, options))
    given_shape = options_for(DraftShape, options)
    check_engine(given_shape, {})
    domains = named_sources(given.data)
    check_folder(given.out, "--out")
    need_extra("evaluate")
    let_threads_sleep()

    # Late, because torch takes seconds to import, and --help and mistakes should not wait for it.
    from rich.console import Console

    from specdec.building.named_checkpoints import head_path
    from specdec.core.device import resolve_device
    from specdec.models.hub import checkpoint_path
    from specdec.train_eagle.data.conversations import BadData
    from specdec.train_eagle.evaluation.head_evaluation import evaluate as measure

    bad = BadData(given.strict)
    shape = replace(default_shape(resolve_device("auto").type), **given_shape) if given_shape else None
    target = checkpoint_path(model or DEMO / "target")
    evaluation = measure(target, head_path(draft), domains, given, bad, shape)
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    for table in evaluation.tables():
        console.print(table)
    if given.speed_prompts:
        typer.echo(f"speed: tokens per second of single requests over plain decoding; {evaluation.machine}")
    if bad.counts:
        typer.echo(bad.table())
    # After the figures, which took long.
    try:
        evaluation.save(given.out)
    except OSError as error:
        raise ValueError(f"--out {given.out}: cannot be written: {error.strerror}") from None


def named_sources(words: Sequence[str]) -> dict[str, str]:
    """Return files and data sets by their names, from words NAME=FILE.

    Raises:
        ValueError: a word of another form, or a name given twice.
    """
    found: dict[str, str] = {}
    for word in words:
        name, _, source = word.partition("=")
        if not (name and source):
            raise ValueError(f"--data {word}: give NAME=FILE, such as gsm8k=gsm8k.jsonl")
        if name in found:
            raise ValueError(f"--data names {name} twice; give each file a name of its own")
        found[name] = source
    return found


if __name__ == "__main__":
    run_stage(evaluate)
