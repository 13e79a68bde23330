"""`specdec serve`."""

import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from specdec.building.speculative_config import parse_speculative_config
from specdec.cli.model_options import ENGINE_OWNERS, SHAPE_DEFAULTS, Draft, Model, check_engine, engine_options
from specdec.cli.options import Verbose, options_for, with_options
from specdec.cli.startup import spinner
from specdec.config import AUTO
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.kernels.types.extras import lacking
from specdec.server.server_settings import ServerSettings

DEMO_NAME = "demo"
# Settings that are options of this command alone.
SERVED = ("api_key", "admin_api_key", "max_queued_requests", "scheduling_policy", "role", "tokenizer", "seed")


@with_options(ServerSettings, DraftShape, *ENGINE_OWNERS, defaults=SHAPE_DEFAULTS, also=SERVED)
def serve(
    model_name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="The target: a checkpoint folder, a GGUF file, or org/name on the Hugging Face hub; default: demo "
            "model.",
        ),
    ] = None,
    model: Model = None,
    draft: Draft = "",
    speculative_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            rich_help_panel="Drafts",
            help="The draft as vLLM's JSON: method, model, num_speculative_tokens (depth of the trees), and other keys "
            "on the cards of published heads.",
        ),
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel="Server",
            help="Engines that share the requests, on Ray Serve; a prompt goes where its beginning is cached; "
            "one engine needs no Ray.",
        ),
    ] = 1,
    prefill_replicas: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            rich_help_panel="Server",
            help="Further engines that compute prompts for those of --replicas; they share a store of "
            "--kv-transfer-config, a folder or a Mooncake pool; default: 0, each engine computes its own.",
        ),
    ] = 0,
    verbose: Verbose = False,  # noqa: ARG001
    **options: Any,
) -> None:
    """Serve the model over HTTP with OpenAI's API.

    \b
    Examples:
      specdec serve
      specdec serve path/to/llama --draft path/to/head --port 8000
      specdec serve path/to/llama --draft ngram --api-key secret --max-queued-requests 100
      specdec serve path/to/llama --speculative-config '{"method": "eagle3", "model": "path/to/head"}'
      specdec serve path/to/llama --replicas 4
      specdec serve path/to/llama --replicas 2 --prefill-replicas 1 --kv-transfer-config "$CONNECTOR"
    """
    if model_name is not None and model is not None and model_name != model:
        raise ValueError(f"MODEL is {model_name} and --model is {model}; give one of them")
    target = model_name or model
    for name in ("api_key", "admin_api_key"):
        variable = f"SPECDEC_{name.upper()}"
        # As a secret that was never filled. The server would ask for no key.
        if not options[name] and not os.environ.get(variable, "unset").strip():
            raise ValueError(f"{variable} is set and holds no key; give one, or unset it")
    server = ServerSettings(**options_for(ServerSettings, options, SERVED))
    shape = options_for(DraftShape, options)
    settings = engine_options(options, SERVED)
    if speculative_config is not None:
        if draft:
            raise ValueError("--speculative-config and --draft exclude each other; leave one out")
        named = parse_speculative_config(speculative_config, "--speculative-config")
        draft, shape = named.draft, {**named.shape, **shape}
        settings = {**named.settings, **settings}
    check_engine(shape, settings)

    # Late, because torch takes seconds to import, and the packages of the server may be missing.
    from specdec.server.command import run

    starting = spinner("starting the engine")
    run(
        target,
        draft or AUTO,
        settings,
        shape,
        server,
        target or DEMO_NAME,
        starting,
        _replicated(replicas, prefill_replicas),
    )


def _replicated(num_replicas: int, num_prefill: int = 0) -> Callable[..., Any] | None:
    """Return what makes the front end of several replicas; None for one engine.

    Raises:
        ValueError: Ray is missing.
    """
    if num_replicas == 1 and not num_prefill:
        return None
    option = f"--prefill-replicas {num_prefill}" if num_prefill else f"--replicas {num_replicas}"
    if problem := lacking(option, "ray", {"ray": "ray"}):
        raise ValueError(problem)

    def make(*arguments: Any, **settings: Any) -> Any:
        # Late: the package takes a second to import, and needs those of the server.
        from specdec.ray_serve.replicated_llm import replicated_here

        return replicated_here(num_replicas, *arguments, num_prefill=num_prefill, **settings)

    return make
