"""The target's states: as in serving, and the same whether made anew or kept on disk."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from specdec import LLM
from specdec.draft_heads.heads.draft_head import TargetOutput
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.tree import TreeRow
from specdec.models.llama import load_llama
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.passes import features
from specdec.train_eagle.passes.features import PARTS, FeatureBatch, FeatureStore, OnlineFeatures
from tests.baichuan import save_baichuan
from tests.fakes import TINY, save_random_llama
from tests.kernel_sets import TORCH

CPU = torch.device("cpu")
TAPS = (2, 3, 6)


def save_sliding(folder: Path, **sizes: Any) -> None:
    """A Mistral whose window is shorter than the conversations."""
    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(**{**TINY, "sliding_window": 16, **sizes})).to(torch.float64).save_pretrained(
        folder
    )


TARGETS: dict[str, Callable[..., object]] = {
    "llama": save_random_llama,
    "window": save_sliding,
    "alibi": save_baichuan,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("target"))


def saved(kind: str, folder: Path) -> Path:
    TARGETS[kind](folder, num_hidden_layers=7, initializer_range=0.15)
    return folder


@pytest.fixture(scope="module")
def source(folder: Path) -> OnlineFeatures:
    return source_of(folder)


def source_of(folder: Path) -> OnlineFeatures:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i in range(23):
        tokens = torch.randint(0, 97, (3 + 5 * i % 31,), generator=generator).tolist()
        samples.append(Sample(tokens, [k % 3 > 0 for k in range(len(tokens))]))
    return OnlineFeatures(load_llama(folder, torch.float64, CPU, TORCH), samples, TAPS)


class Watcher:
    """Stands for a head, and keeps what the target's pass gives it."""

    taps = TAPS
    feature_size = 1

    def __init__(self) -> None:
        self.seen: list[TargetOutput] = []

    def feature_of(self, output: TargetOutput) -> torch.Tensor:
        self.seen.append(output)
        return output.features


@pytest.mark.parametrize("kind", TARGETS)
def test_packed_conversations_have_the_states_of_serving(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(kind, tmp_path)
    source = source_of(folder)
    llm, watcher = LLM(folder, draft=None, dtype="float64"), Watcher()
    monkeypatch.setattr(llm.engine.worker.runner, "head", watcher)
    monkeypatch.setattr(llm.engine.worker.runner, "taps", TAPS)
    monkeypatch.setattr(llm.engine.worker.cache, "store_features", lambda *_: None)
    batch = source.batch([4, 1, 6])
    start = 0
    for length in batch.lengths:
        rows = slice(start, start + length)
        with torch.inference_mode():
            chain = TreeRow(batch.tokens[rows].tolist(), 0, [3, 1, 0, 2, 4], 0)
            llm.engine.worker.runner.forward([chain], HostTrees.empty(1))
        output = watcher.seen.pop()
        torch.testing.assert_close(batch.features[rows], output.features, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(batch.taps[rows], torch.cat(output.taps, -1), rtol=1e-9, atol=1e-12)
        start += length


def same(mine: FeatureBatch, other: FeatureBatch) -> None:
    assert mine.lengths == other.lengths
    for name in PARTS:
        torch.testing.assert_close(getattr(mine, name), getattr(other, name), rtol=1e-12, atol=1e-12)


def test_kept_states_are_those_made_anew(source: OnlineFeatures, tmp_path: Path) -> None:
    settings = {"data": ["a"], "taps": list(TAPS)}
    store = FeatureStore(tmp_path, settings, source)
    for some in ([20, 0, 7], [0, 3], range(23)):
        same(store.batch(some), source.batch(some))
        store.flush()
    assert store.tokens_left == 0
    assert len(list(tmp_path.glob("features-*.safetensors"))) == 3
    opened = FeatureStore(tmp_path, settings, source)
    assert opened.tokens_left == 0
    same(opened.batch([20, 0, 7]), source.batch([20, 0, 7]))


def test_an_interrupted_store_goes_on(source: OnlineFeatures, tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, {}, source)
    store.batch([5, 1])
    store.flush()
    store.batch([2])
    killed, written = (tmp_path / f"features-{i}.safetensors.tmp" for i in range(2))
    for file in (killed, written):
        file.write_bytes(b"half a shard")
    os.utime(killed, (0, 0))
    opened = FeatureStore(tmp_path, {}, source)
    # Another process may be writing the younger one.
    assert (killed.exists(), written.exists()) == (False, True)
    assert opened.tokens_left == sum(source.lengths) - source.lengths[5] - source.lengths[1]
    same(opened.batch(range(23)), source.batch(range(23)))


def test_a_full_shard_is_written_at_once(
    source: OnlineFeatures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "SHARD_TOKENS", 60)
    FeatureStore(tmp_path, {}, source).batch(range(10))
    left = FeatureStore(tmp_path, {}, source).tokens_left
    assert left == sum(source.lengths[10:])


def test_a_state_is_the_same_when_it_is_computed_and_when_it_is_read(folder: Path, tmp_path: Path) -> None:
    """In float32 both are rounded, so that a resumed run meets the numbers that it would have met."""
    samples = source_of(folder).samples
    source = OnlineFeatures(load_llama(folder, torch.float32, CPU, TORCH), samples, TAPS)
    store = FeatureStore(tmp_path, {}, source)
    computed = store.batch([3, 9])
    store.flush()
    read = FeatureStore(tmp_path, {}, source).batch([3, 9])
    for name in PARTS:
        assert torch.equal(getattr(computed, name), getattr(read, name))
    assert read.taps.dtype == torch.float32
    torch.testing.assert_close(read.taps, source.batch([3, 9]).taps, rtol=2**-8, atol=0)


def test_states_of_other_settings_are_refused(source: OnlineFeatures, tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, {"taps": [2]}, source)
    store.batch([0])
    store.flush()
    with pytest.raises(ValueError, match="holds features of other settings"):
        FeatureStore(tmp_path, {"taps": [2, 3]}, source)


def test_heads_without_layers_get_none(folder: Path) -> None:
    source = OnlineFeatures(load_llama(folder, torch.float64, CPU, TORCH), [Sample([5, 6, 7], [False, True, True])], ())
    assert source.batch([0]).taps.shape == (3, 0)
