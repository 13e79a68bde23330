"""The unrolled loss of a packed batch against drafting chains one after another, as serving does."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.draft_heads.heads.draft_head import TargetOutput
from specdec.draft_heads.heads.eagle import EagleHead
from specdec.draft_heads.heads.eagle3 import Eagle3Head
from specdec.draft_heads.llama.rope import Rotary, rotary_at
from specdec.kernels.reference.projection import onednn_multiplies, padded_rows
from specdec.models.llama import LlamaModel, load_llama
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.passes.features import FeatureBatch, OnlineFeatures
from specdec.train_eagle.training.head_trainer import LossSettings
from specdec.train_eagle.training.training_kinds import TRAINING_KINDS
from tests.fakes import TINY, save_random_llama
from tests.kernel_sets import TORCH
from tests.profiles import num_cases

pytestmark = pytest.mark.slow

VOCAB = TINY["vocab_size"]
KNOWN = torch.arange(0, VOCAB, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_random_llama(folder, num_hidden_layers=7, initializer_range=0.15)
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> LlamaModel:
    return load_llama(folder, torch.float64, torch.device("cpu"), TORCH)


def make_head(target: LlamaModel, kind: str, seed: int, window: int = 0) -> EagleHead | Eagle3Head:
    torch.manual_seed(seed)
    own, tokens = TRAINING_KINDS[kind], KNOWN if kind == "eagle3" else None
    head: EagleHead | Eagle3Head = own.new(target.weights, tokens, {"window": window or None})
    for parameter in head.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3) if parameter.ndim == 2 else parameter.data.uniform_(0.5, 1.5)
    return head.double()


class Chain:
    """Plain causal attention over one short sequence, by an explicit mask."""

    def __init__(self, window: int) -> None:
        self.window = window

    def __call__(self, qkv: Tensor, rotary: Rotary, num_heads: int) -> Tensor:
        rows, heads, dim = qkv.shape
        kv_heads = (heads - num_heads) // 2
        cos, sin = rotary
        turned = qkv[:, : num_heads + kv_heads]
        halves = torch.cat([turned[..., dim // 2 :], turned[..., : dim // 2]], -1)
        turned = turned * cos + halves * sin
        q, k, v = turned[:, :num_heads], turned[:, num_heads:], qkv[:, num_heads + kv_heads :]
        k, v = (x.repeat_interleave(num_heads // kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        hidden = torch.ones(rows, rows).triu(1)
        if self.window:
            hidden += torch.ones(rows, rows).tril(-self.window)
        scores = scores.masked_fill(hidden.bool(), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def naive_loss(
    head: EagleHead | Eagle3Head, table: Tensor, target: LlamaModel, batch: FeatureBatch, options: LossSettings
) -> tuple[Tensor, Tensor]:
    """Total, and the loss of each pass; every chain is drafted by itself."""
    form = head.form(None)
    is_eagle3 = type(head) is Eagle3Head
    known = KNOWN if is_eagle3 else torch.arange(VOCAB)
    weight = head.lm_head.weight if is_eagle3 else target.weights.lm_head_weight
    token_terms: list[list[Tensor]] = [[] for _ in range(options.unroll)]
    feature_terms: list[list[Tensor]] = [[] for _ in range(options.unroll)]
    start = 0
    for length in batch.lengths:
        tokens, said = batch.tokens[start : start + length], batch.mask[start : start + length]
        outputs, taps = batch.features[start : start + length], batch.taps[start : start + length]
        true = form.feature_of(TargetOutput(outputs, list(taps.chunk(len(head.taps), -1)) if head.taps else []))
        start += length
        roots = [root for root in range(1, length - 1) if said[root + 1]]
        most = len(roots) if options.anchors is None else min(options.anchors, len(roots))
        go_on = {roots[i * len(roots) // most] for i in range(most)}
        for root in roots:
            features = list(true[:root])
            for step in range(min(options.unroll if root in go_on else 1, length - 1 - root)):
                last = root + step
                rotary = rotary_at(table, torch.arange(last))
                states = form(tokens[1 : last + 1], torch.stack(features), rotary, list(map(Chain, head.windows)))
                features.append(states[-1])
                if not said[last + 1] or tokens[last + 1] not in known:
                    continue
                p = (outputs[last] @ target.weights.lm_head_weight[known].T).softmax(-1)
                q = (form.read(states[-1:])[0] @ weight.T).log_softmax(-1)
                token_terms[step].append(-(p * q).sum())
                feature_terms[step].append(F.smooth_l1_loss(states[-1], outputs[last]))
    weights = [options.step_decay**step for step, terms in enumerate(token_terms) if terms]
    token, feature = (
        [torch.stack(terms).mean() for terms in of_steps if terms] for of_steps in (token_terms, feature_terms)
    )
    both = [options.token_weight * a + options.feature_weight * b for a, b in zip(token, feature, strict=True)]
    total = sum((w * x for w, x in zip(weights, both, strict=True)), torch.zeros(())) / sum(weights)
    return total, torch.stack(token)


conversations = st.lists(
    st.lists(st.tuples(st.integers(0, VOCAB - 1), st.booleans()), min_size=3, max_size=12), min_size=1, max_size=4
).filter(lambda all_of: any(said for conversation in all_of for _, said in conversation[2:]))


@pytest.mark.long
@settings(max_examples=num_cases(15))
@given(
    said=conversations,
    kind=st.sampled_from(["eagle", "eagle3"]),
    unroll=st.integers(1, 4),
    decay=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 99),
    anchors=st.none() | st.integers(1, 5),
    window=st.just(0) | st.integers(4, 8),
)
def test_loss_and_gradients_are_those_of_chains_drafted_one_by_one(
    target: LlamaModel,
    said: list[list[tuple[int, bool]]],
    kind: str,
    unroll: int,
    decay: float,
    seed: int,
    anchors: int | None,
    window: int,
) -> None:
    head = make_head(target, kind, seed, window)
    options = LossSettings("ce", unroll, decay, 0.7, 0.4 if kind == "eagle" else 0.0, 0.0, anchors=anchors)
    samples = [Sample([t for t, _ in one], [mine for _, mine in one]) for one in said]
    batch = OnlineFeatures(target, samples, head.taps).batch(range(len(samples)))
    # Outside training the rows that go on are spread evenly, not drawn.
    trainer = TRAINING_KINDS[kind].trainer(head, target.weights.lm_head_weight, options).double().eval()
    found = trainer(batch)
    assume(int(found.count.sum()))
    wanted, per_step = naive_loss(head, trainer.rope, target, batch, options)
    torch.testing.assert_close(found.loss[found.count > 0], per_step, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.total, wanted, rtol=1e-9, atol=1e-12)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    with pytest.MonkeyPatch.context() as patch:
        # The norms compute in float32 whatever the dtype, as transformers' do: in sums of gradients that is seen.
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        naive, _ = naive_loss(head, trainer.rope, target, batch, options)
        totals = trainer(batch).total, naive
        grads = [torch.autograd.grad(total, trained, allow_unused=True) for total in totals]
    nothing = torch.zeros(())
    for pair in zip(*grads, strict=True):
        mine, other = (nothing if grad is None else grad for grad in pair)
        # Passes multiply what the first one rounds, and entries cancel: errors are as large as the largest lets them.
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-9 * max(1.0, float(other.abs().max())))


class RowCounts(TorchDispatchMode):
    """Rows of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[int] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left, right = args[-2:]
            self.seen.update((len(left), len(right)))
        elif func.overloadpacket is torch.ops.mkldnn._linear_pointwise:
            self.seen[len(args[0])] += 1
        return func(*args, **kwargs or {})


@pytest.mark.long
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_in_bfloat16_products_meet_few_row_counts(target: LlamaModel, folder: Path, kind: str) -> None:
    """OneDNN compiles and keeps a kernel for each, up to a thousand of them: gigabytes, and the time it takes.

    On a processor without AVX-512 torch multiplies bfloat16 without oneDNN, so nothing is padded.
    """
    head, model = make_head(target, kind, 0).float(), load_llama(folder, torch.bfloat16, torch.device("cpu"), TORCH)
    trainer = TRAINING_KINDS[kind].trainer(
        head, model.weights.lm_head_weight, LossSettings("ce", 4, 0.8, 1.0, 0.5, 0.1)
    )
    sizes = {len(parameter) for parameter in [*head.parameters(), *model.weights.parameters()]}
    sizes |= {parameter.shape[-1] for parameter in [*head.parameters(), *model.weights.parameters()]}
    chance = random.Random(1)
    for _ in range(5):
        lengths = [chance.randrange(40, 60) for _ in range(20)]
        samples = [Sample([chance.randrange(VOCAB) for _ in range(n)], [i > n // 3 for i in range(n)]) for n in lengths]
        with RowCounts() as rows, torch.autocast("cpu", torch.bfloat16):
            trainer(OnlineFeatures(model, samples, head.taps).batch(range(len(samples)))).total.backward()
        assert len(rows.seen) > 5
        unpadded = {count for count in rows.seen if padded_rows(count) != count} - sizes
        assert bool(unpadded) != onednn_multiplies(torch.bfloat16, torch.device("cpu"))


def test_the_first_answer_token_is_trained_and_the_users_words_are_not(target: LlamaModel) -> None:
    head = make_head(target, "eagle", 0)
    options = LossSettings("ce", 1, 1.0, 1.0, 0.0, 0.0)
    trainer = TRAINING_KINDS["eagle"].trainer(head, target.weights.lm_head_weight, options).double()
    tokens = list(range(5, 15))
    counts = {}
    for first in range(2, 10):
        sample = Sample(tokens, [i >= first for i in range(10)])
        counts[first] = int(trainer(OnlineFeatures(target, [sample], ()).batch([0])).count.sum())
    # Row first - 1 predicts the token at `first`, and the last token is never a root.
    assert counts == {first: 10 - first for first in range(2, 10)}


@pytest.mark.long
def test_one_batch_is_learnt_by_heart(target: LlamaModel) -> None:
    torch.manual_seed(0)
    samples = [Sample(torch.randint(0, VOCAB, (14,)).tolist(), [False] * 4 + [True] * 10) for _ in range(4)]
    kind = TRAINING_KINDS["eagle3"]
    head = kind.new(target.weights, None, {}).double()
    trainer = kind.trainer(head, target.weights.lm_head_weight, LossSettings("kl", 3, 0.8, 1.0, 0.0, 0.0)).double()
    batch = OnlineFeatures(target, samples, head.taps).batch(range(4))
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    first = trainer(batch).total.item()
    for _ in range(150):
        loss = trainer(batch).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert trainer(batch).total.item() < 0.02 < 0.25 < first
