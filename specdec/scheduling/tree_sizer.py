"""Choice of a step's trees by the load, with trials of what is not chosen. Pure Python."""

from collections.abc import Sequence
from typing import NamedTuple

from specdec.core.draftable_row import DraftableRow
from specdec.core.engine_stats import DraftOutlook
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.rank_values import RankValues, TreeOutcome
from specdec.scheduling.step_cost import LONG_SECONDS, WARM_SECONDS, StepCost
from specdec.scheduling.tree_fit import LEAST_SECONDS, ChainFit, TreeFit, TreeFitter, fit_chains

# Share of the time that trials may cost: plain steps where trees pay, and trees where they do not.
TRIALS = 0.005
# Most plain steps of a trial, and seconds after which it ends: a small model's first plain steps are not measured. One
# step is enough if it is predicted to take ONE_PLAIN_SECONDS, which leaves a margin over LONG_SECONDS.
PLAIN, PLAIN_SECONDS, ONE_PLAIN_SECONDS = 10, 3 * WARM_SECONDS, 1.25 * LONG_SECONDS
# Least number of steps with trees between two trials; it begins lower and doubles, as costs measured at first can be
# wrong.
PLAIN_EVERY, PLAIN_FIRST = 128, 64
# Steps with a lone tree of a trial, for several rows and for a single one, whose first is not representative; and least
# number of plain steps between two.
LONE, LONE_OF_ONE, LONE_EVERY = 2, 4, 16
# Trees with a predicted gain below LOW_GAIN are tried less often: the steps between trials double with each, up to this
# factor.
LOW_GAIN, MOST_SPACING = 0.8, 4
# Seconds that the plain steps after a trial of trees lose, since the target's weights have left the caches.
COLD_SECONDS = 0.001
# Steps between two trials of chains that are predicted to bring nothing; and steps until the next attempt, if they
# bring nothing even by an optimistic prediction.
CHAINS_EVERY, CHAINS_AGAIN = 64, 8
# Limit of the steps until a trial.
LATEST_TRIAL = 4096
# Limit of the steps in a row without trees for want of measurements: under load every step may compute prompts.
MOST_WAITED = 64
# Trees that are verified before the first choice for a single row. They are as large as allowed: before, there is
# little to learn from.
FIRST_TREES = 8
# Steps after which, if there are trees, a single row gets the largest one, so that the nodes of all ranks are observed.
LARGEST_EVERY = 128
# Seconds of plain steps after which the size is computed anew for the same load, and most steps in that time: with a
# small model, computing it takes a tenth of a step. It is computed sooner at first, after 1 step, 2, 4 and so on, while
# a few trees tell much.
FIT_SECONDS, FIT_STEPS = 0.032, 64
# Limit of the steps with trees that seem not to pay while too few of them were measured: one disturbed step would end
# trees, and the next trial comes late.
MOST_DOUBTED = 16
# Factor by which steps with trees must be predicted faster before they begin. What is chosen for being the best of
# several predictions is worth less than predicted, and changes take time.
MARGIN = 1.03


class TreeSize(NamedTuple):
    """Trees of a step.

    Attributes:
        nodes: limit of the nodes that the draft model drafts per tree.
        trees: number of rows that it drafts for.
        least_value: nodes of chains are verified if their value is at least this.
        least_ratio: the model drafts for rows whose acceptance history has at least this ratio.
        turn: picks the row of a lone tree. The same row should have it several times, as the head must read its text.
    """

    nodes: int
    trees: int
    least_value: float = 0.0
    least_ratio: float = 0.0
    turn: int = 0


class TreeSizer:
    """Adapts tree size to load.

    Each step uses the trees predicted to maximise tokens per second, from measured step costs and observed acceptance
    rates (`TreeFitter`). If drafting would not help any row, it is skipped. Values belong to ranks and not to single
    nodes, so that the choice precedes drafting and a plain step drafts nothing.

    Chains cost no drafting and have values of their own. Their nodes are chosen first, the most valuable of all rows,
    as many as maximise tokens per second without the model.

    Attributes:
        num_first: trees that a single row still gets before the first choice for one.
    """

    def __init__(
        self, cost: StepCost, shape: DraftShape, num_first: int = FIRST_TREES, prior: Sequence[float] = ()
    ) -> None:
        self.cost, self.shape = cost, shape
        self._steps = 0
        self._best = TreeFit()
        self.begin_with(prior, num_first)
        # Steps in a row without trees for want of measurements.
        self._waited = 0
        # Steps in a row that have trees though these seem not to pay, as too few were measured.
        self._doubted = 0
        # Number of the step in which the size is computed anew, and of that up to which the same rows decode plainly.
        self._next_fit, self._plain_until = 0, 0
        # Calls of `size`, and that from which on chains are tried.
        self._calls, self._try_chains = 0, 0
        # Whether steps have trees, number of the step at which a trial of the other kind begins, and its steps.
        self._drafts, self._trial, self._trial_steps = False, 0, 0
        # Limit of the steps with trees before the next trial, and factor of the plain ones; both double with each.
        self._most_trees, self._spacing = PLAIN_FIRST, 1

    def begin_with(self, prior: Sequence[float], num_first: int = FIRST_TREES) -> None:
        """Forget what was learnt of the draft model, for another one.

        Args:
            prior: values of the other one's nodes by rank, as measured before.
        """
        self.ranks = RankValues(self.shape.nodes, prior)
        self._fitter = TreeFitter(self.cost, self.ranks, self.shape.nodes)
        self._load: tuple[object, ...] | None = None
        self._fit_steps = 1
        self.num_first = num_first

    def goes_on_plainly(self, sampled: int, *, mixed: bool = False) -> bool:
        """Return whether a step is plain whatever trees are predicted to bring, and count it.

        So are the steps of a run of plain ones, and those that wait for measurements.

        Args:
            sampled: rows that yield a token, none of them with chains.
            mixed: whether the step may compute prompts too.
        """
        if self.stays_plain(sampled):
            self._steps += 1
            return True
        return not self._begins(sampled) and self._waits(sampled, mixed=mixed)

    def choose_anew(self) -> None:
        """Choose the next step's trees anew, since its rows are others."""
        self._plain_until, self._next_fit = 0, self._steps

    def stays_plain(self, sampled: int) -> bool:
        """Return whether the coming step is one of a run of plain ones, if it has as many rows that yield a token."""
        return self._steps < self._plain_until and self._load is not None and sampled == self._load[0]

    def _begins(self, sampled: int) -> bool:
        """Return whether a single row has one of the first trees."""
        return self.num_first > 0 and sampled == 1

    def size(self, sampled: int, known: int, rows: Sequence[DraftableRow], *, mixed: bool = False) -> TreeSize:
        """Choose the trees of a step, none if plain steps are as fast.

        Now and then some steps are of the other kind, so that the costs of both stay up to date, and text that has
        become easier is noticed.

        Args:
            sampled: rows that yield a token.
            known: tokens of the step without drafts.
            rows: those that may draft, or have chains.
            mixed: whether the step may compute prompts too.
        """
        chains = self._fit_chains(sampled, known, rows)
        size = self._size_drafted(sampled, known, [row for row in rows if row.nodes], chains, mixed=mixed)
        return size._replace(least_value=chains.least_value)

    def _fit_chains(self, sampled: int, known: int, rows: Sequence[DraftableRow]) -> ChainFit:
        """Choose the nodes of chains. Now and then, verify some that are predicted to bring nothing.

        Only a step that verifies chains measures what they cost.
        """
        chains, self._calls = fit_chains(self.cost, sampled, known, rows), self._calls + 1
        is_due = self._calls >= self._try_chains and self.cost.plain.knows(sampled)
        if chains.nodes or not is_due or not any(row.chains for row in rows):
            return chains
        chains = fit_chains(self.cost, sampled, known, rows, is_optimistic=True)
        every = CHAINS_EVERY if self.cost.checking.knows(sampled) else 1
        self._try_chains = self._calls + (every if chains.nodes else CHAINS_AGAIN)
        return chains

    def _size_drafted(
        self, sampled: int, known: int, rows: Sequence[DraftableRow], chains: ChainFit, *, mixed: bool
    ) -> TreeSize:
        """Choose what the draft model drafts."""
        drafting, self._plain_until = len(rows), 0
        if drafting == 0:
            return TreeSize(0, 0)
        if self._begins(sampled):
            self._steps += 1
            return TreeSize(self.shape.nodes, 1)
        if self._waits(sampled, mixed=mixed):
            return TreeSize(0, 0)
        _, nodes, depths, _, shares, _ = zip(*rows, strict=True)
        bounds, covered = sorted(nodes), drafting - sum(shares)
        load: tuple[object, ...] = sampled, known, max(depths), bounds
        # Chains are others in each step, and those of one row among many change little; where trees are far from being
        # worth it, they change nothing.
        if self._best.gain >= LOW_GAIN:
            load += round(chains.nodes / sampled), round(chains.tokens / sampled, 1), round(covered / sampled, 1)
        plain = self.cost.step(sampled, known, 0, 0)
        if load != self._load or self._steps >= self._next_fit:
            self._load, self._best = load, self._fitter.fit(sampled, known, rows, chains)
            self._next_fit = self._steps + self._fit_steps
            most = max(1, min(FIT_STEPS, int(FIT_SECONDS / max(plain, LEAST_SECONDS))))
            self._fit_steps = min(2 * self._fit_steps, most)
        best = self._best
        self._steps += 1
        pays = best.gain > (1 if self._drafts else MARGIN)
        is_doubtful = self._drafts and not pays and self.cost.checking.is_doubtful(sampled)
        self._doubted = self._doubted + 1 if is_doubtful else 0
        if self._drafts != (pays or 0 < self._doubted <= MOST_DOUBTED):
            self._drafts, self._most_trees, self._spacing = not self._drafts, PLAIN_FIRST, 1
            self._plan_trial(sampled, known, plain, rows)
        if self._steps >= self._trial + self._trial_steps:
            self._plan_trial(sampled, known, plain, rows)
        is_trial = self._steps >= self._trial
        if self._drafts == is_trial:
            if not is_trial:
                self._plain_until = min(self._next_fit, self._trial - 1)
            return TreeSize(0, 0)
        if is_trial:
            return TreeSize(best.nodes, 1, turn=self._trial)
        if self._steps % LARGEST_EVERY == 0:
            return TreeSize(bounds[-1], 1, turn=self._steps // LARGEST_EVERY)
        return TreeSize(best.nodes, best.trees, least_ratio=best.least_ratio)

    def _waits(self, sampled: int, *, mixed: bool) -> bool:
        """Return whether the step has no trees because costs are not known, at most `MOST_WAITED` times in a row.

        The cost of plain steps with so many rows must have been measured. In a step that computes prompts too, the cost
        of trees cannot be told from that of the prompts, so it has trees only if the last step without prompts had.
        """
        if self._drafts if mixed else self.cost.plain.knows(sampled):
            self._waited = 0
            return False
        self._waited += 1
        return self._waited <= MOST_WAITED

    def _plan_trial(self, sampled: int, known: int, plain: float, rows: Sequence[DraftableRow]) -> None:
        """Set when the next trial begins: so that it costs its share of the time."""
        best = self._best
        if self._drafts:
            self._trial_steps = 1
            if plain < ONE_PLAIN_SECONDS:
                self._trial_steps = max(2, min(PLAIN, int(PLAIN_SECONDS / max(plain, LEAST_SECONDS))))
            lost, every = self._trial_steps * max(0.0, 1 - 1 / best.gain), best.cycle_cost
            least, most = PLAIN_EVERY, self._most_trees
            self._most_trees = min(2 * most, LATEST_TRIAL)
        else:
            self._trial_steps = LONE_OF_ONE if sampled == 1 else LONE
            lone = self.cost.step(sampled, known + best.nodes, 1, min(best.nodes, self.shape.depth)) - plain
            lone += self.cost.reading(sum(row.ahead().unread for row in rows) // len(rows))
            lost = (self._trial_steps * max(0.0, lone) + COLD_SECONDS) / max(plain, LEAST_SECONDS)
            self._spacing = min(2 * self._spacing, MOST_SPACING) if best.gain < LOW_GAIN else 1
            every = 1 / self._spacing
            least, most = LONE_EVERY, LATEST_TRIAL
        self._trial = self._steps + min(max(least, int(lost / (TRIALS * every))), most)

    @property
    def outlook(self) -> DraftOutlook | None:
        """Prediction for steps with trees at the last load, None before the first choice."""
        if self._load is None:
            return None
        return DraftOutlook(self._drafts, self._best.cycle_cost, self._best.gain * self._best.cycle_cost)

    def learn(self, outcomes: Sequence[TreeOutcome]) -> None:
        """Update the values of ranks and the requests' histories."""
        self.num_first -= len(outcomes)
        self.ranks.learn(outcomes, self._steps)
