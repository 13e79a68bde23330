"""The adapter that a request asks for, and a loaded one that requests have. Pure Python."""

import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from specdec.kernels.types.settings import MAX_WHOLE, check_text, checked_keywords, whole_number


class AdapterUser(Protocol):
    """A request, as far as its adapter knows it."""

    @property
    def finished(self) -> bool: ...


@checked_keywords()
@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter in PEFT's format, by vLLM's fields, and perhaps one of the draft model with it.

    Attributes:
        lora_name: its name.
        lora_int_id: a number from 1 on.
        lora_path: its folder; empty where the target alone is served, and its drafts are adapted.
        draft_lora_path: folder of the draft model's adapter, with which it drafts for these requests; None to draft
            without one. It changes no output.

    Raises:
        ValueError: a field of another kind, or an empty one.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    draft_lora_path: str | None = None

    def __post_init__(self) -> None:
        for name in ("lora_path", "draft_lora_path"):
            if isinstance(value := getattr(self, name), Path):
                object.__setattr__(self, name, str(value))
        for name in ("lora_name", "lora_path", "draft_lora_path"):
            value = getattr(self, name)
            if value is None and name == "draft_lora_path":
                continue
            check_text(name, value)
            if not value and (name != "lora_path" or self.draft_lora_path is None):
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

    def whole(path: str) -> str:
        return str(Path(path).absolute())

    target, draft = lora_request.lora_path, lora_request.draft_lora_path
    return replace(lora_request, lora_path=target and whole(target), draft_lora_path=draft and whole(draft))


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in a place of the bank.

    Attributes:
        request: what it was loaded for.
        place: its number in the banks of target and draft model, from 1 on.
        identity: stands for its name and its content, both models', in the hashes of cache blocks.
    """

    request: LoRARequest
    place: int
    identity: str
    _users: "weakref.WeakSet[AdapterUser]" = field(default_factory=weakref.WeakSet, repr=False)

    @property
    def target_place(self) -> int:
        """Place in the target's bank, 0 if the adapter leaves the target as it is."""
        return self.place if self.request.lora_path else 0

    @property
    def draft_place(self) -> int:
        """Place in the draft model's bank, 0 if the adapter leaves the draft model as it is."""
        return self.place if self.request.draft_lora_path else 0

    def add_user(self, request: AdapterUser) -> None:
        """Note a request that has it."""
        self._users.add(request)

    @property
    def is_used(self) -> bool:
        """True if a request that has not ended has it."""
        return any(not request.finished for request in self._users)
