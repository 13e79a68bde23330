"""`specdec prepare`, also `python -m specdec.train_eagle.prepare`."""

from typing import Any

import typer

from specdec.cli.model_options import Model
from specdec.cli.options import Verbose, options_for, with_options
from specdec.cli.output_files import check_folder
from specdec.config import DEMO
from specdec.train_eagle.data.stage_settings import PrepareSettings
from specdec.train_eagle.stage_command import need_extra, run_stage


@with_options(PrepareSettings, defaults={})
def prepare(
    model: Model = None,
    verbose: Verbose = False,  # noqa: ARG001
    **options: Any,
) -> None:
    """Turn conversations into tokens and masks on disk: the first stage of training a head.

    Conversations that cannot be trained on are left out and counted. The same command resumes a killed run after its
    last full shard.

    \b
    Examples:
      specdec prepare --model path/to/llama --data answers.jsonl --out prepared --preview 2
      specdec prepare --data a.jsonl HuggingFaceH4/ultrachat_200k:train_sft --out prepared
    """
    given = PrepareSettings(**options_for(PrepareSettings, options))
    check_folder(given.out, "--out")
    need_extra("prepare")

    # Late, because torch takes seconds to import, and --help and mistakes should not wait for it.
    from rich.console import Console

    from specdec.models.hub import checkpoint_path
    from specdec.models.tokenizer import load_pretrained
    from specdec.train_eagle.data.chat_mask import preview
    from specdec.train_eagle.data.preparation import prepare as fill

    folder = checkpoint_path(model or DEMO / "target", weights=False)
    try:
        prepared = fill(folder, given)
    except KeyboardInterrupt:
        typer.echo("prepare: interrupted; the same command goes on", err=True)
        raise
    if given.preview > 0:
        preview(Console(), load_pretrained(folder), next(iter(prepared))[: given.preview])
    if prepared.bad.counts:
        typer.echo(prepared.bad.table())
    share = prepared.assistant_tokens / prepared.tokens
    counts = f"{prepared.conversations:,} conversations, {prepared.tokens:,} tokens"
    typer.echo(f"{counts}, {share:.0%} trained, in {given.out}")


if __name__ == "__main__":
    run_stage(prepare)
