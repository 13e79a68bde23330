"""Draft sources that need no model, by the names that `draft` gives them. Pure Python."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specdec.draft_heads.drafting.chains import ChainRates, ChainSource
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.ngram_chains import NGramChains
from specdec.kernels.types.registry import Registry

# Makes a request's source, which gives its rates to its chains.
MakeSource = Callable[[ChainRates], ChainSource]


class SourceKind(NamedTuple):
    """A draft source.

    Attributes:
        prepare: returns what makes the source of each request of an engine, given the bounds of its trees and the
            value of the source's option, None if it is not given; raises a ValueError for a wrong value.
        option: what the option is, for people; empty for a source without one.
    """

    prepare: Callable[[DraftShape, str | None], MakeSource]
    option: str = ""


NGRAM, SUFFIX = "ngram", "suffix"
_IN_OWN_TEXT = SourceKind(lambda shape, _: lambda rates: NGramChains(shape.branching, rates))
# What suffix finds in earlier requests too comes from the store of its engine.
SOURCES: Registry[SourceKind] = Registry("draft source", {NGRAM: _IN_OWN_TEXT, SUFFIX: _IN_OWN_TEXT})


def prepared_sources(names: Sequence[str], shape: DraftShape, options: Sequence[str]) -> dict[str, MakeSource]:
    """Return what makes the sources of these names.

    Args:
        shape: bounds of draft trees.
        options: `NAME=VALUE` each, the last of a name counts.

    Raises:
        ValueError: no such source, an option of one that has none or does not draft, or a wrong value.
    """
    given = dict(each.split("=", 1) for each in options)
    for name, value in given.items():
        if name not in names or not SOURCES.named(name, "draft").option:
            why = "has no option" if name in names else "does not draft"
            raise ValueError(f"draft_options has {name}={value}, and {name} {why}; leave it out")
    return {name: SOURCES.named(name, "draft").prepare(shape, given.get(name)) for name in names}
