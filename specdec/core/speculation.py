"""Settings of speculation for one request. Pure Python."""

from dataclasses import dataclass

from specdec.kernels.types.settings import check_settings, checked_keywords, setting


@checked_keywords()
@dataclass(frozen=True)
class Speculation:
    """Bounds of one request's drafts, within those of the engine.

    They change the speed of the request and, with the default acceptance rule, none of its tokens. The other rules keep
    the distribution of the output, as they do with any draft.

    Raises:
        ValueError: a value outside its range; names the setting, the value and the range.
    """

    enabled: bool = setting(True, "Whether the request gets drafts.")
    max_nodes: int | None = setting(
        None, "Most draft nodes in a step; None: as many as the engine drafts.", least=1, wanted="at least 1, or None"
    )
    max_depth: int | None = setting(
        None, "Most draft tokens in a row; None: as many as the engine drafts.", least=1, wanted="at least 1, or None"
    )

    def __post_init__(self) -> None:
        check_settings(self)
