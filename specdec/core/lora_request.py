"""The adapter that a request asks for, and a loaded one that requests have. Pure Python."""

import threading
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from specdec.kernels.settings import MAX_WHOLE, check_text, checked_keywords, whole_number


class AdapterUser(Protocol):
    """A request, as far as its adapter knows it."""

    @property
    def finished(self) -> bool: ...


@checked_keywords()
@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter in PEFT's format, by vLLM's fields.

    Attributes:
        lora_name: its name.
        lora_int_id: a number from 1 on.
        lora_path: its folder.

    Raises:
        ValueError: a field of another kind, or an empty one.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if isinstance(self.lora_path, Path):
            object.__setattr__(self, "lora_path", str(self.lora_path))
        for name in ("lora_name", "lora_path"):
            check_text(name, getattr(self, name))
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give the adapter's")
        number = whole_number("lora_int_id", self.lora_int_id)
        if not 1 <= number <= MAX_WHOLE:
            raise ValueError(f"lora_int_id is {number}; it must be between 1 and 2^63 - 1")
        object.__setattr__(self, "lora_int_id", number)

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


def with_whole_path(lora_request: LoRARequest) -> LoRARequest:
    """Return an adapter with its whole path, for a process of another working folder.

    Raises:
        ValueError: it is no `LoRARequest`.
    """
    if not isinstance(lora_request, LoRARequest):
        raise ValueError(f"lora_request is {lora_request!r:.60}; it must be a LoRARequest")
    return replace(lora_request, lora_path=str(Path(lora_request.lora_path).absolute()))


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in a place of the bank.

    Attributes:
        request: what it was loaded for.
        place: its number in the bank, from 1 on.
        identity: stands for its name and its content in the hashes of cache blocks.
    """

    request: LoRARequest
    place: int
    identity: str
    _users: "weakref.WeakSet[AdapterUser]" = field(default_factory=weakref.WeakSet, repr=False)
    # Beams are made while other threads make requests.
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add_user(self, request: AdapterUser) -> None:
        """Note a request that has it."""
        with self._lock:
            self._users.add(request)

    @property
    def is_used(self) -> bool:
        """True if a request that has not ended has it."""
        with self._lock:
            return any(not request.finished for request in self._users)
