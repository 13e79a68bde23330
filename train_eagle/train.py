"""`specdec train`, also `python -m specdec.train_eagle.train`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from specdec.cli.options import Verbose, options_for, with_options
from specdec.cli.output_files import check_folder
from specdec.train_eagle.stage_command import let_threads_sleep, need_extra, run_stage
from specdec.train_eagle.training.train_config import TrainConfig


@with_options(TrainConfig, defaults={"data": "the file's", "out": "the file's"})
def train(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML file of these settings; options override it.")
    ] = None,
    verbose: Verbose = False,  # noqa: ARG001
    **options: Any,
) -> None:
    """Train a draft head for a target: EAGLE, EAGLE-3, DFlash or DSpark.

    A plan is printed first. The same command resumes a killed run; Ctrl-C and SIGTERM save it first. OUT gets the head
    with the best tau on held-out conversations. OUT/run gets the state of the run, its settings as YAML, log.jsonl, and
    curves.png, drawn as it runs.

    \b
    Examples:
      specdec train --model path/to/llama --data prepared --out head
      specdec train --config run.yaml --lr 2e-3
      accelerate launch --multi_gpu -m specdec.train_eagle.train --config run.yaml
    """
    given = options_for(TrainConfig, options)
    for name in ("data", "out"):
        if config is None and name not in given:
            raise ValueError(f"--{name} is missing; give it, or a --config FILE that has it")
    need_extra("train")
    let_threads_sleep()

    # Late, because torch takes seconds to import, and --help and mistakes should not wait for it.
    from specdec.core.out_of_memory import explained_shortage
    from specdec.train_eagle.training.read_config import read_config
    from specdec.train_eagle.training.train_run import TrainingRun

    with explained_shortage("lower batch_tokens, or take a smaller target or head"):
        settings = read_config(given, config)
        check_folder(settings.out, "--out")
        received = TrainingRun(settings).train()
    if received is not None:
        # As a shell tells of a program that a signal has ended.
        raise typer.Exit(128 + received)


if __name__ == "__main__":
    run_stage(train)
