"""Tables of what plug-ins may add to: things by the names that settings give them. Pure Python."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")
# Names stand in lists with commas, in labels of metrics, and before the settings of a benchmark's mode.
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


class Registry(Mapping[str, T]):
    """Things by name. What was added last comes first.

    Args:
        what: they are, for messages.
        built_in: the first ones.
        check: is called with the name and value of each that is added, and raises a ValueError.
    """

    def __init__(self, what: str, built_in: Mapping[str, T], check: Callable[[str, T], None] = lambda *_: None) -> None:
        self.what, self._check, self._found = what, check, dict(built_in)

    def register(self, name: str, value: T) -> None:
        """Add one.

        Raises:
            ValueError: the name is taken, or no lower-case word.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{self.what} {name!r}: a name has lower-case letters, digits, '-', '_' and '.'")
        if name in self._found:
            raise ValueError(f"{self.what} {name!r} is there already; take another name")
        self._check(name, value)
        self._found = {name: value, **self._found}

    def named(self, name: str, setting: str) -> T:
        """Return the one that a setting names.

        Raises:
            ValueError: there is none of this name.
        """
        if name not in self._found:
            known = ", ".join(sorted(self._found))
            raise ValueError(f"{setting} is {name!r}; it must be one of {known}, or come with a plugin")
        return self._found[name]

    def __getitem__(self, name: str) -> T:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
