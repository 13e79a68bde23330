"""llama.cpp as the package xllamacpp brings it, prebuilt and with its server inside: plain, or with its drafts."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import xllamacpp

from specdec.bench.llama_server_peer import HOST, NGRAM_SIZE, CompletionPeer
from specdec.bench.peers import PeerSetup

NAME = "xllamacpp"
# Of `COMMON_SPECULATIVE_TYPE_...`, by the names of llama-server's option.
TYPES = ("draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark")


class XLlamaCppPeer(CompletionPeer):
    """llama.cpp's server in this process, with as many slots as requests may run at once. It ends with the process."""

    def __init__(self, setup: PeerSetup) -> None:
        seats, threads = setup.number("batch", 8), torch.get_num_threads()
        params = xllamacpp.CommonParams()
        params.model.path = str(setup.gguf())
        params.n_parallel, params.n_ctx = seats, seats * setup.longest
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        # Its log would be written on standard error.
        params.hostnames, params.port, params.verbosity = [HOST], 0, -1
        _draft(setup, params.speculative)
        try:
            self._server = xllamacpp.Server(params)
        except Exception as error:
            raise setup.error(f"{NAME} cannot load these files: {error}") from None
        port = urlsplit(self._server.listening_address).port
        assert port is not None
        super().__init__(setup, seats, port, NAME)


load = XLlamaCppPeer


def _draft(setup: PeerSetup, given: Any) -> None:
    """Set what drafts."""
    if setup.draft is None:
        return
    if setup.draft == "ngram":
        given.types = [_type("ngram-simple")]
        given.ngram_simple.size_n, given.ngram_simple.size_m = NGRAM_SIZE, setup.number("tokens", 10)
        return
    kind = setup.settings.get("type", "draft-eagle3")
    if kind not in TYPES:
        raise setup.error(f"type is {kind!r}; it must be one of {', '.join(TYPES)}")
    if not Path(setup.draft).is_file():
        raise setup.error(f"{setup.draft}: no such file; drafts are ngram or a GGUF file")
    given.types = [_type(kind)]
    given.draft.mparams.path, given.draft.n_max = setup.draft, setup.number("tokens", 3)


def _type(name: str) -> Any:
    return getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{name.upper().replace('-', '_')}")
