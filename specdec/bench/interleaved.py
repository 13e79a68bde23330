"""Rounds of several contenders, interleaved, so that a slow moment of the machine meets all of them."""

from collections.abc import Callable, Mapping, Sequence

from specdec.bench.timed_run import Contender, TimedRun, TimedSample


def run_rounds(
    contenders: Mapping[str, Contender],
    batches: Sequence[Sequence[list[int]]],
    rounds: int,
    warmup: int,
    arrivals: Callable[[int], Sequence[float]] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, list[TimedRun]]:
    """Run every batch of prompts with every contender, in each round.

    A batch is run by one contender after the other, before the next batch begins. Their order is reversed from batch to
    batch and from round to round.

    Args:
        contenders: by label.
        batches: prompts that run together.
        rounds: number of measured rounds.
        warmup: number of rounds before them that are not measured.
        arrivals: returns when the prompts of a batch arrive, by the number of the round.
        advance: is called after every run.

    Returns:
        By label a run of all prompts for each measured round. Its seconds are those in which the contender worked.
    """
    measured: dict[str, list[TimedRun]] = {label: [] for label in contenders}
    for number in range(-warmup, rounds):
        samples: dict[str, list[TimedSample]] = {label: [] for label in contenders}
        seconds = dict.fromkeys(contenders, 0.0)
        for index, batch in enumerate(batches):
            order = list(contenders)[:: -1 if (number + index) % 2 else 1]
            for label in order:
                run = contenders[label].run(batch, arrivals(number) if arrivals else None)
                samples[label] += run.samples
                seconds[label] += run.seconds
                advance()
        if number >= 0:
            for label, rows in measured.items():
                rows.append(TimedRun(samples[label], seconds[label]))
    return measured
