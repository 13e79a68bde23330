"""`specdec regenerate`, also `python -m specdec.train_eagle.regenerate`."""

from typing import Annotated, Any

import typer

from specdec.cli.model_options import OWNERS, SHOWN_DEFAULTS, Model, ModelOptions
from specdec.cli.options import Verbose, options_for, with_options
from specdec.cli.output_files import check_writable
from specdec.train_eagle.data.stage_settings import RegenerateSettings
from specdec.train_eagle.stage_command import need_extra, run_stage

# Answers are made in large batches.
SEATS = 128
SHOWN = {name: value for name, value in SHOWN_DEFAULTS.items() if name not in ("temperature", "max_tokens")}


@with_options(RegenerateSettings, *OWNERS, defaults={**SHOWN, "max_num_seqs": str(SEATS)})
def regenerate(
    model: Model = None,
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            "-d",
            metavar="TEXT",
            rich_help_panel="Drafts",
            help="What drafts, as in generate. Coupled drafts change no answer.",
            show_default="none",
        ),
    ] = "none",
    verbose: Verbose = False,  # noqa: ARG001
    **options: Any,
) -> None:
    """Have the target answer conversations itself: a head learns best from the text that it will predict.

    The users' turns stay. Every assistant turn is generated, after the generated ones before it. Each answer is on disk
    as soon as it ends, and the same command goes on after the last one. What is left out is counted and named.

    \b
    Examples:
      specdec regenerate --model path/to/llama --data chats.jsonl --out answers.jsonl
      specdec regenerate --data a.jsonl HuggingFaceH4/ultrachat_200k:train_sft --out answers.jsonl --temperature 0 0 1
      specdec regenerate --model path/to/llama --draft ngram --data chats.jsonl --out answers.jsonl
    """
    given = RegenerateSettings(**options_for(RegenerateSettings, options))
    sampling = {**options, "temperature": None, "max_tokens": given.max_tokens, "seed": given.seed}
    sampling["max_num_seqs"] = options.get("max_num_seqs") or SEATS
    model_options = ModelOptions.of(model, draft, sampling)
    check_writable(given.out, "--out")
    need_extra("regenerate")

    # Late, because torch takes seconds to import, and --help and mistakes should not wait for it.
    from specdec.train_eagle.data.regeneration import regenerate_file

    done = regenerate_file(model_options, given)
    for line in done.lines:
        typer.echo(line)
    raise typer.Exit(130 if done.interrupted else 0)


if __name__ == "__main__":
    run_stage(regenerate)
