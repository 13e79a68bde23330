"""A comparison of modes and peers on one dataset: what to run, and what came of it."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from specdec.bench.environment import environment, shown_path
from specdec.bench.figures import Figures, figures_of
from specdec.bench.mode import PLAIN, Mode
from specdec.bench.peers import ADAPTERS, PeerMode, PeerSetup, load_peer
from specdec.bench.prompt_file import GivenPrompt
from specdec.bench.timed_run import Contender, EngineContender, TimedRun, run_rounds
from specdec.building.llm_settings import sharing_a_gpu
from specdec.building.named_checkpoints import named_target
from specdec.building.plugins import import_plugins
from specdec.building.resolved_config import DRAFT_WORDS, resolved_config
from specdec.config import DEMO_HEADS, EngineConfig, default_shape, draft_names
from specdec.core.device import resolve_device
from specdec.core.garbage import loading
from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.drafting.chain_sources import SOURCES
from specdec.llm import LLM
from specdec.models.checkpoint import check_tokenizer
from specdec.models.hub import checkpoint_path

Kind = Literal["latency", "throughput", "acceptance"]
# Drafts that are no folder and no name on the hub.
_WORDS = (*DRAFT_WORDS, *SOURCES, *DEMO_HEADS)
# Room for prompts in a step of an acceptance run, beside whole trees of all rows.
PROMPT_TOKENS = 1 << 14


@dataclass(frozen=True)
class Comparison:
    """Modes and peers to compare, and how.

    Attributes:
        kind: one prompt at a time, all together, or all together with no regard to time.
        dataset: where the prompts are from, for the report.
        prompts: the prompts.
        modes: modes of this engine; the first is plain decoding.
        peers: other engines.
        params: sampling parameters of every request.
        model: the target as `LLM` takes it, None for the demo's.
        shape: bounds of draft trees that differ from the device's default.
        settings: further keywords of `LLM`.
        chat: whether plain text goes through the chat template; None if there is one.
        rounds: measured rounds.
        warmup: rounds before them.
        request_rate: mean arrivals per second; None if all prompts arrive at once.
    """

    kind: Kind
    dataset: str
    prompts: Sequence[GivenPrompt]
    modes: Sequence[Mode]
    peers: Sequence[PeerMode]
    params: SamplingParams
    model: str | Path | None
    shape: Mapping[str, Any]
    settings: Mapping[str, Any]
    chat: bool | None = None
    rounds: int = 3
    warmup: int = 1
    request_rate: float | None = None

    @property
    def num_runs(self) -> int:
        """Number of runs of batches."""
        batches = len(self.prompts) if self.kind == "latency" else 1
        return (self.rounds + self.warmup) * batches * (len(self.modes) + len(self.peers))

    def arrivals(self, number: int) -> list[float]:
        """Return when the prompts arrive in a round: a Poisson process, the same for all contenders."""
        assert self.request_rate is not None
        chance = random.Random(number)
        return list(accumulate(chance.expovariate(self.request_rate) for _ in self.prompts))


@dataclass(frozen=True)
class ModeResult:
    """Results of one mode or peer.

    Attributes:
        label: how the user wrote it.
        configuration: its settings, for the report.
        figures: on all prompts.
        categories: by category, where there are several.
        tok_per_s: tokens per second of each round.
    """

    label: str
    configuration: dict[str, Any]
    figures: Figures
    categories: dict[str, Figures]
    tok_per_s: list[float]


@dataclass(frozen=True)
class Results:
    """Results of a comparison, plain decoding first.

    Attributes:
        comparison: what was compared.
        facts: circumstances of the run.
        modes: one result each.
    """

    comparison: Comparison
    facts: dict[str, Any]
    modes: list[ModeResult]


def compare(comparison: Comparison, advance: Callable[[], None] = lambda: None) -> Results:
    """Load all contenders, run them interleaved, and return their figures.

    Args:
        advance: is called after every run of a batch.

    Raises:
        ValueError: a setting, a prompt or a peer that does not fit.
    """
    # All are checked before the first is loaded.
    configs = {mode.label: _config(comparison, mode, place) for place, mode in enumerate(comparison.modes, 1)}
    check_tokenizer(configs[PLAIN][0].model)
    with loading():
        engines = {label: LLM(config.model, config.sources, **own) for label, (config, own) in configs.items()}
    plain = engines[PLAIN]
    prompts = [one.for_engine(plain, comparison.chat, comparison.params) for one in comparison.prompts]
    contenders: dict[str, Contender] = {
        label: EngineContender(llm, comparison.params) for label, llm in engines.items()
    }
    for peer in comparison.peers:
        contenders[peer.label] = load_peer(peer.name, _peer_setup(comparison, peer, plain, max(map(len, prompts))))
    batches = [[prompt] for prompt in prompts] if comparison.kind == "latency" else [prompts]
    arrivals = comparison.arrivals if comparison.request_rate else None
    measured = run_rounds(contenders, batches, comparison.rounds, comparison.warmup, arrivals, advance)
    results = [_result(comparison, label, measured, engines.get(label)) for label in contenders]
    packages = dict.fromkeys(ADAPTERS[peer.name].install for peer in comparison.peers)
    facts = {**environment(*packages), "model": shown_path(plain.config.model), "device": plain.config.device}
    return Results(comparison, facts, results)


def _config(comparison: Comparison, mode: Mode, place: int) -> tuple[EngineConfig, dict[str, Any]]:
    """Return the configuration of a mode, and the settings with which its `LLM` is made of the paths that it names.

    Args:
        place: the mode's among all, from 1.
    """
    # Peers are loaded behind them.
    shared = sharing_a_gpu(comparison.settings, place, len(comparison.modes) + len(comparison.peers))
    # Rounds must not profit from each other.
    settings = {"enable_prefix_caching": False, **shared, **mode.settings}
    if not _heads(mode) and any(map(_heads, comparison.modes)):
        # It is the other modes'.
        settings.pop("draft_revision", None)
    shape = {**comparison.shape, **mode.shape}
    if comparison.kind == "acceptance":
        # Every row's whole tree in every step, also beside prompts.
        settings.setdefault("adaptive_drafts", False)
        seats = settings.setdefault("max_num_seqs", 32)
        device = resolve_device(settings.get("device", "auto"))
        nodes = replace(default_shape(device.type), **shape).nodes
        settings.setdefault("max_num_batched_tokens", seats * (1 + nodes) + PROMPT_TOKENS)
    settings["shape"] = shape
    config = resolved_config(comparison.model or _named_target(comparison), mode.draft, settings)
    # What was found by its revision is a folder.
    return config, {**settings, "revision": None, "draft_revision": None}


def _named_target(comparison: Comparison) -> Path | None:
    """Return the target that a head among the drafts names, which all modes share."""
    import_plugins(comparison.settings.get("plugins", ()))
    for mode in comparison.modes:
        revision = {**comparison.settings, **mode.settings}.get("draft_revision")
        for head in _heads(mode):
            if target := named_target(checkpoint_path(head, revision, known=_WORDS)):
                return target
    return None


def _heads(mode: Mode) -> list[str | Path]:
    """Return the folder or hub name of the mode's draft model; empty if it names none."""
    return [name for name in draft_names(mode.draft) if name not in _WORDS]


def _peer_setup(comparison: Comparison, peer: PeerMode, plain: LLM, longest: int) -> PeerSetup:
    most = comparison.params.max_tokens
    assert most is not None
    return PeerSetup(
        label=peer.label,
        model=plain.config.model,
        dtype=plain.config.dtype,
        longest=longest + most,
        max_tokens=most,
        end_tokens=frozenset() if comparison.params.ignore_eos else plain.end_tokens,
        draft=peer.draft,
        settings=peer.settings,
    )


def _result(
    comparison: Comparison, label: str, measured: Mapping[str, Sequence[TimedRun]], llm: LLM | None
) -> ModeResult:
    rounds, plain = measured[label], measured[PLAIN]
    alone = comparison.kind == "latency"
    # Tokens do not depend on drafts under the coupled rule; under the others only their distribution does not.
    comparable = comparison.params.temperature == 0 or (llm is not None and llm.config.verify == "coupled")
    places: dict[str, list[int]] = {}
    for index, prompt in enumerate(comparison.prompts):
        places.setdefault(prompt.category, []).append(index)

    def figures(chosen: Sequence[int]) -> Figures:
        found = figures_of(rounds, plain, chosen, alone, comparable)
        # A peer's step is no multiple of a step of this engine.
        return found if llm else replace(found, cost=None)

    return ModeResult(
        label=label,
        configuration=_configuration(llm) if llm else {},
        figures=figures(range(len(comparison.prompts))),
        categories={name or "none": figures(chosen) for name, chosen in places.items()} if len(places) > 1 else {},
        tok_per_s=[one.tok_per_s for one in rounds],
    )


def _configuration(llm: LLM) -> dict[str, Any]:
    config = llm.config
    return {
        "draft": ",".join([*([shown_path(config.draft)] if config.draft else []), *config.chains]) or None,
        "dtype": config.dtype,
        "kernels": llm.engine.worker.cache.kernels.name,
        "verify": config.verify,
        "adaptive_drafts": config.scheduler.adaptive_drafts,
        "shape": vars(config.shape) if config.sources else None,
    }
