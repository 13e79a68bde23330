"""`specdec export`, also `python -m specdec.train_eagle.export`."""

from pathlib import Path
from typing import Any

import typer

from specdec.cli.options import Verbose, options_for, with_options
from specdec.cli.output_files import check_folder
from specdec.train_eagle.data.stage_settings import ExportSettings
from specdec.train_eagle.stage_command import need_extra, run_stage


@with_options(ExportSettings, defaults={})
def export(
    verbose: Verbose = False,  # noqa: ARG001
    **options: Any,
) -> None:
    """Export a trained head to a folder that can be published: a layout that other engines read, and a model card.

    What train wrote as HEAD is the best head of its run, in bfloat16; HEAD/run holds the last one, in float32.

    \b
    Examples:
      specdec export --draft head --out published --evaluation evaluation/evaluation.json
      specdec export --run head/run --out published --dtype float32
      specdec export --draft dspark --out published --layout speculators
    """
    given = ExportSettings(**options_for(ExportSettings, options))
    check_folder(given.out, "--out")
    need_extra("export")

    # Late, because torch takes seconds to import, and --help and mistakes should not wait for it.
    from specdec.models.hub import checkpoint_path
    from specdec.train_eagle.evaluation.evaluation import Evaluation
    from specdec.train_eagle.training.head_export import export_folder, from_folder, from_run

    evaluation = Evaluation.read(given.evaluation) if given.evaluation else None
    notes = _text(given.notes) if given.notes else None
    if given.run is not None:
        trained = from_run(given.run, given.model)
        if "data" not in trained.recipe:
            typer.echo("the run's prepared data is not there any more, so card and config.json do not name it")
    else:
        assert given.draft is not None
        trained = from_folder(checkpoint_path(given.draft), given.model)
    export_folder(trained, given, evaluation, notes)
    typer.echo(f"config.json, model.safetensors and README.md in {given.out}")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read: {error}; give a Markdown file") from None


if __name__ == "__main__":
    run_stage(export)
