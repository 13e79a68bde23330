"""Engines with a connector over the world's models, and what they compute."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from specdec import LLM, DraftShape, SamplingParams
from specdec.core.outputs import CompletionOutput
from specdec.kv_transfer import disk_store
from specdec.kv_transfer.disk_store import DiskStore
from specdec.kv_transfer.offloading_connector import OffloadingConnector
from tests.specdec.world import World

SIZE = 8
# Five whole blocks and three tokens.
PROMPT = [3 + (7 * i + i * i // 3) % 90 for i in range(43)]
# Tokens of its whole blocks.
WHOLE = len(PROMPT) // SIZE * SIZE
OTHER = [token + 1 for token in PROMPT]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
DRAWN = SamplingParams(temperature=1, seed=5, max_tokens=14, ignore_eos=True)
HOST = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}


class Computed(NamedTuple):
    """Outputs of requests, and what they cost.

    Attributes:
        known: tokens that the target computed.
        read: tokens that the draft head read.
        loaded: tokens that the connector loaded.
    """

    outputs: list[CompletionOutput]
    known: int
    read: int
    loaded: int

    @property
    def tokens(self) -> list[list[int]]:
        return [output.token_ids for output in self.outputs]

    @property
    def tau(self) -> list[float]:
        return [output.stats.tokens / max(1, output.stats.steps) for output in self.outputs]


def disk(folder: Path, host_bytes: int = 1 << 20, **extra: Any) -> dict[str, Any]:
    """A host tier with a disk behind it."""
    tier = {"type": "fs", "root_dir": str(folder)}
    own = {"cpu_bytes_to_use": host_bytes, "secondary_tiers": [tier], **extra}
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": own}


def file_of_key(store: DiskStore, key: str) -> Path:
    return store._path(disk_store._name_of(key))


@contextmanager
def engine(world: World, drafter: str, config: dict[str, Any] | None, **settings: Any) -> Iterator[LLM]:
    """An engine of the world's model, closed at the end, so that all is written."""
    own: dict[str, Any] = {"dtype": "float64", "block_size": SIZE, "max_model_len": 128, "kv_cache_memory": 1 << 20}
    fixed: dict[str, Any] = {"adaptive_drafts": False, "prefill_stretch": 0, "shape": DraftShape(3, 2, 6)}
    draft = world.draft(drafter)
    with LLM(world.folder / "target", draft, kv_transfer_config=config, **{**own, **fixed, **settings}) as llm:
        yield llm


def first_connector(llm: LLM) -> OffloadingConnector:
    """The connector of an engine's first rank."""
    connector = llm.engine.connector
    assert isinstance(connector, OffloadingConnector)
    return connector


def flush(llm: LLM) -> None:
    """Wait until everything is written, on all ranks."""
    connector = first_connector(llm)
    while connector.tier.writing:
        connector.wait(0.01)
        # A step without requests takes what has been written.
        llm.engine.step()


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Computed:
    """Run the prompts together."""
    before, reads = llm.engine.scheduler.stats(), [0]
    learn = llm.engine._observer.end

    def end(rows: Any, draft_rows: Any, results: Any, drafting: Any) -> None:
        reads[0] += sum(max(0, row.draft_prefill_end - row.num_draft_cached) for row in draft_rows)
        learn(rows, draft_rows, results, drafting)

    llm.engine._observer.end = end  # type: ignore[method-assign]
    outputs = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
    llm.engine._observer.end = learn  # type: ignore[method-assign]
    stats = llm.engine.scheduler.stats()
    return Computed(
        outputs,
        stats.known_tokens - before.known_tokens,
        reads[0],
        stats.external_prefix_hits - before.external_prefix_hits,
    )
