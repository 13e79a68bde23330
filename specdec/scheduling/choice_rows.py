"""Rows that score choices: how many nodes each gets, and which choices. Pure Python."""

from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.scheduling.step_plan import StepBudget

# Largest tree where the kernels have no limit of their own; that of `DraftShape.nodes` too.
MOST_NODES = 1024


def plan_choices(step: StepBudget, manager: KVCacheManager, most: int) -> None:
    """Give the rows that reach the last token of their prompt a tree of choices to score.

    Each has the tokens and entries of one choice, which its planning has taken. Further nodes take tokens and blocks
    that no row of known tokens needs, and come before drafts. As they cost as much as a prompt's tokens, they count as
    such.

    Args:
        step: with all rows of known tokens planned.
        most: limit of a tree's nodes.
    """
    for row in step.rows:
        request, end = row.request, row.request.num_cached + row.num_known
        if request.choices is None or end < len(request.token_ids):
            continue
        least = request.least_nodes
        more = max(0, min(step.tokens, step.prompt_tokens))
        tree = request.choices.tree(min(most, least + more))
        free = manager.extend(request, end + len(tree.tokens)) - end
        if free < len(tree.tokens):
            tree = request.choices.tree(free)
        row.choices = tree
        step.tokens -= len(tree.tokens) - least
        step.prompt_tokens -= len(tree.tokens)
