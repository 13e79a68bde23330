"""Methods that say which of the scored choices a `select` takes, by SGLang's names. Ties go to the first."""

from collections.abc import Callable, Sequence

from specdec.core.choices import ChoiceScore

# Returns the place of the choice that is taken.
ChoiceMethod = Callable[[Sequence[ChoiceScore]], int]


def token_length_normalized(scores: Sequence[ChoiceScore]) -> int:
    """Return the choice whose tokens have the highest mean log-probability."""
    return _first_best([score.normalized_logprob for score in scores])


def total_logprob(scores: Sequence[ChoiceScore]) -> int:
    """Return the most probable choice: the highest sum of its tokens' log-probabilities, which favours short ones."""
    return _first_best([score.cumulative_logprob for score in scores])


def greedy_token_selection(scores: Sequence[ChoiceScore]) -> int:
    """Return the choice whose first token is most probable, the next token among those that share it, and so on.

    Where a choice has ended, its mean log-probability stands for further tokens.
    """
    longest = max(len(score.logprobs) for score in scores)
    padded = [(*score.logprobs, *[score.normalized_logprob] * (longest - len(score.logprobs))) for score in scores]
    return padded.index(max(padded))


def _first_best(values: Sequence[float]) -> int:
    return values.index(max(values))
