"""A piece of an output's text."""

from typing import NamedTuple


class Segment(NamedTuple):
    """New text, and whether its tokens come from accepted drafts."""

    text: str
    accepted: bool
