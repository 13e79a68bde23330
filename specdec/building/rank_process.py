"""A rank beside the first: it builds its part of the engine, and does what the first rank tells.

    python -m specdec.building.rank_process STORE RANK

STORE is the file through which the ranks find each other, and RANK the number of this one. The process ends when the
connection to the first rank is closed, however that happens.
"""

import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import NoReturn

from specdec.building.build import build_engine
from specdec.building.ranks import layout_of
from specdec.core.commands import Close, LoadAdapter, RunStep, UpdateDraft
from specdec.core.garbage import loading
from specdec.core.launch import Launch
from specdec.core.request import RequestGroup
from specdec.engine.engine import LLMEngine
from specdec.engine.request_maker import RequestMaker
from specdec.models.llama import read_llama_config
from specdec.parallel.other_ranks import meet
from specdec.parallel.rank_group import LOOPBACK, file_store
from specdec.parallel.ranks import REFUSALS, OtherRank
from specdec.parallel.started_ranks import met_rank

# New groups of requests after which those that have ended are dropped.
_MOST_ENDED = 64
# Commands that may wait for files, without work for the processor.
_UsesFiles = UpdateDraft | LoadAdapter | Close


def serve(rank: OtherRank, end: Callable[[int], object] = os._exit) -> None:
    """Be a rank until the first one ends.

    Args:
        end: ends the process with an exit code if the rank hangs.
    """
    with rank.reporting():
        config, timeout = rank.receive()
        rank.join(layout_of(config), timeout)
        with loading():
            requests = RequestMaker.read(config, read_llama_config(config.model))
            requests.makes_texts = False
            engine = build_engine(config, rank, requests)
        rank.begin_beats(end)
        _follow(rank, engine)


def _follow(rank: OtherRank, engine: LLMEngine) -> None:
    # Nothing else holds them.
    groups: list[RequestGroup] = []
    num_kept = 0
    while True:
        record = rank.receive()
        if isinstance(record, RunStep):
            with rank.watching():
                engine.act(record)
            continue
        # A command that cannot be carried out is refused by all ranks, and the first one says why.
        with suppress(*REFUSALS), nullcontext() if isinstance(record, _UsesFiles) else rank.watching():
            done = engine.act(record)
            if isinstance(done, RequestGroup):
                groups.append(done)
        if len(groups) > num_kept + _MOST_ENDED:
            groups = [group for group in groups if not group.finished]
            num_kept = len(groups)
        if isinstance(record, Close):
            return


def follow(launch: Launch) -> NoReturn:
    """Be a rank that a launcher has started, to the end of this process."""
    # Ctrl-C in a terminal is for the first rank, with which this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _be(met_rank(launch))


def _be(rank: OtherRank, folder: str | None = None) -> NoReturn:
    # What all ranks say is said by the first one.
    logging.getLogger("specdec").setLevel(logging.CRITICAL)
    serve(rank)
    if folder is not None:
        # A first rank that was killed leaves it behind.
        shutil.rmtree(folder, ignore_errors=True)
    # Nothing is worth taking down in order, and a group whose ranks are gone may wait for them.
    os._exit(0)


if __name__ == "__main__":
    # A service manager sends it to all processes, and the first rank may have requests to finish.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _be(meet(file_store(sys.argv[1]), int(sys.argv[2]), LOOPBACK), os.path.dirname(sys.argv[1]))
