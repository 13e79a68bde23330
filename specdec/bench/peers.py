"""Other engines in a comparison, each behind an adapter that is imported when it is asked for. Pure Python."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.bench.mode import check_labels, split_settings

if TYPE_CHECKING:
    from specdec.bench.timed_run import Contender


@dataclass(frozen=True)
class PeerMode:
    """Another engine in a comparison, and how it drafts.

    Attributes:
        label: how the user wrote it.
        name: the peer.
        draft: source of its drafts; None for plain decoding.
        settings: settings of its adapter.
    """

    label: str
    name: str
    draft: str | None
    settings: dict[str, str]


@dataclass(frozen=True)
class PeerSetup:
    """Task of a peer: checkpoint, precision and limits.

    Attributes:
        label: how the user wrote it, for messages.
        model: checkpoint folder of the target.
        dtype: of its weights, such as "float32".
        longest: tokens of the longest request, prompt included.
        max_tokens: tokens to generate per prompt.
        end_tokens: tokens after which an answer ends.
        draft: source of drafts, None for plain decoding.
        settings: settings of the adapter, by name.
    """

    label: str
    model: Path
    dtype: str
    longest: int
    max_tokens: int
    end_tokens: frozenset[int]
    draft: str | None
    settings: Mapping[str, str]

    def error(self, problem: str) -> ValueError:
        """Return the error for a peer that cannot be made, or that failed."""
        return ValueError(f"--peer {self.label!r}: {problem}")

    def number(self, name: str, default: int) -> int:
        """Return a setting that is a number of at least 1.

        Raises:
            ValueError: it is none.
        """
        value = self.settings.get(name, str(default))
        if not value.isdecimal() or int(value) < 1:
            raise self.error(f"{name} is {value!r}; it must be a whole number of at least 1")
        return int(value)

    def gguf(self) -> Path:
        """Return the target as GGUF.

        Raises:
            ValueError: none is named, or it is not there.
        """
        value = self.settings.get("gguf")
        if value is None:
            made = "the target as GGUF, made by llama.cpp's convert_hf_to_gguf.py"
            raise self.error(f"needs {made}; write {self.label}:gguf=FILE")
        if not Path(value).is_file():
            raise self.error(f"{value}: no such file")
        return Path(value)

    def cut(self, tokens: list[int]) -> list[int]:
        """Return an answer up to its end token, and no longer than asked for."""
        tokens = tokens[: self.max_tokens]
        end = next((place for place, token in enumerate(tokens, 1) if token in self.end_tokens), len(tokens))
        return tokens[:end]


@dataclass(frozen=True)
class Adapter:
    """Module, settings and package of a peer.

    Attributes:
        module: our module; its `load` makes a `Contender` of a `PeerSetup`.
        settings: names of the adapter's settings.
        package: what the peer is imported as, None for a program.
        install: how its package is called for pip, or its program.
    """

    module: str
    settings: tuple[str, ...]
    package: str | None
    install: str

    @property
    def remedy(self) -> str | None:
        """Command or advice that installs the peer; None where it is installed."""
        if self.package is None:
            if shutil.which(self.install):
                return None
            return f"{self.install} is not on the PATH; build it from llama.cpp's source"
        if find_spec(self.package):
            return None
        return f"{self.install} is not installed; run: pip install {self.install}"


LLAMA_SERVER = "llama-server"
ADAPTERS = {
    "transformers": Adapter("specdec.bench.transformers_peer", ("batch", "tokens"), "transformers", "transformers"),
    LLAMA_SERVER: Adapter("specdec.bench.llama_server_peer", ("batch", "tokens", "gguf", "type"), None, LLAMA_SERVER),
    "xllamacpp": Adapter("specdec.bench.xllamacpp_peer", ("batch", "tokens", "gguf", "type"), "xllamacpp", "xllamacpp"),
    "openvino": Adapter(
        "specdec.bench.openvino_peer",
        ("batch", "tokens", "ir", "branching", "depth"),
        "openvino_genai",
        "openvino-genai",
    ),
    "vllm": Adapter("specdec.bench.vllm_peer", ("batch", "tokens"), "vllm", "vllm"),
}


def parse_peers(peers: Sequence[str]) -> list[PeerMode]:
    """Return the peers of a comparison, refusing mistakes before anything is loaded.

    Raises:
        ValueError: a peer that is unknown, given twice, or not installed, with what to install; or a setting that its
            adapter does not have.
    """
    modes = []
    for text in peers:
        head, settings = split_settings(text, "--peer")
        name, _, draft = head.partition(":")
        if name not in ADAPTERS:
            raise ValueError(f"--peer is {text!r}; it must begin with one of {', '.join(ADAPTERS)}")
        adapter = ADAPTERS[name]
        if unknown := next((key for key in settings if key not in adapter.settings), None):
            raise ValueError(
                f"--peer {text!r}: no setting is called {unknown!r}; it must be one of {', '.join(adapter.settings)}"
            )
        if adapter.remedy:
            raise ValueError(f"--peer {text!r}: {adapter.remedy}")
        modes.append(PeerMode(text, name, draft or None, settings))
    check_labels([mode.label for mode in modes], "--peer")
    return modes


def load_peer(name: str, setup: PeerSetup) -> "Contender":
    """Return a peer with its model loaded.

    Raises:
        ValueError: what it cannot do, or what is missing.
    """
    contender: Contender = import_module(ADAPTERS[name].module).load(setup)
    return contender
