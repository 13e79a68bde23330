"""Plan of a run: its settings, with those that follow from data and target, and its batches."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.data.prepared_data import PreparedData
from specdec.train_eagle.data.provenance import check_data
from specdec.train_eagle.passes.features import packed
from specdec.train_eagle.training.head_trainer import LossSettings
from specdec.train_eagle.training.read_config import recipe
from specdec.train_eagle.training.train_config import MOST_LR, PUBLISHED_SIZE, TrainConfig

# Tau on ten prompts or fewer says little, so that of few conversations a larger share is held out, at most a fifth.
MOST_HELD_OUT, LEAST_HELD_OUT = 100, 12
MOST_WARMUP = 50
# One conversation in this many is held out, and one step in this many warms up.
SHARE = 20
MOST_BATCH, LEAST_BATCH = 8192, 1024
STEPS_PER_EPOCH, STEPS = 20, 200
EPOCHS, MOST_EPOCHS = 10, 40
# Most evaluations of a run.
EVALUATIONS = 10
# Fewer conversations, or steps, hardly make a head.
FEW_CONVERSATIONS, FEW_STEPS = 1000, 100
# No part of a run's recipe.
NOT_SAVED = ("resume",)


def read_samples(folders: Sequence[Path], target: Path, sizes: LlamaConfig) -> list[Sample]:
    """Return all conversations of prepared data that can be trained on.

    Args:
        target: the target's checkpoint.
        sizes: its sizes.

    Raises:
        ValueError: a folder holds no complete prepared data, or data that does not fit the target, see `check_data`.
    """
    samples = []
    for folder in folders:
        found = PreparedData(folder).load()
        check_data(folder, found, target, sizes)
        samples += found
    return [sample for sample in samples if any(sample.mask[2:])]


def source_names(folders: Iterable[Path]) -> list[str]:
    """Return the names of the files and data sets that prepared data is made of, without folders of this machine."""
    sources = [source for folder in folders for source in PreparedData(folder).sources]
    return [Path(source).name if Path(source).is_absolute() or Path(source).exists() else source for source in sources]


@dataclass(frozen=True)
class TrainPlan:
    """A run before it starts.

    Attributes:
        samples, held_out: for training and for validation; those of one conversation are all on one side.
        settings: all settings of `TrainConfig` by name, none of them open.
        batches: samples of each batch, of all epochs.
        held_out_batches: those of validation.
        per_step: batches of a step, over all processes.
        loss: settings of the loss.
    """

    samples: list[Sample]
    held_out: list[Sample]
    settings: dict[str, Any]
    batches: list[list[int]]
    held_out_batches: list[list[int]]
    per_step: int
    loss: LossSettings

    @classmethod
    def of(cls, config: TrainConfig, samples: Sequence[Sample], hidden_size: int, processes: int = 1) -> Self:
        """Settle what the settings leave open.

        Args:
            samples: of all conversations.
            hidden_size: the target's.
            processes: number of processes that train together.

        Raises:
            ValueError: too few conversations, or one that is longer than a batch; or fewer batches than a step takes.
        """
        # No answer is validated beside one of its own conversation that was trained on.
        conversations = _conversations(samples)
        fewest = max(1, min(LEAST_HELD_OUT, len(conversations) // 5))
        held_out = config.held_out or min(MOST_HELD_OUT, max(fewest, len(conversations) // SHARE))
        if len(conversations) <= held_out:
            least = f"{len(conversations)} conversations are too few to keep {held_out} apart"
            raise ValueError(f"{least}; lower held_out" if config.held_out else f"{least}; prepare more")
        # Spread over all files, which may be of different kinds.
        apart = {i * len(conversations) // held_out for i in range(held_out)}
        training = [sample for i, own in enumerate(conversations) if i not in apart for sample in own]
        validation = [sample for i in sorted(apart) for sample in conversations[i]]
        lengths, held_out_lengths = ([len(sample.token_ids) for sample in part] for part in (training, validation))
        per_step = config.accumulate * processes
        batch_tokens = config.batch_tokens or max(_batch_tokens(lengths, per_step), *held_out_lengths)
        held_out_batches = packed(held_out_lengths, batch_tokens, 0)
        found = len(packed(lengths, batch_tokens, config.seed)) / per_step
        epochs = config.epochs or min(MOST_EPOCHS, max(EPOCHS, math.ceil(STEPS / max(1.0, found))))
        batches = [batch for i in range(epochs) for batch in packed(lengths, batch_tokens, config.seed + i)]
        total = len(batches) // per_step
        if not total:
            few = f"{len(batches)} batches of {batch_tokens} tokens in {epochs} epochs are fewer than the {per_step}"
            step = f"of one step, accumulate {config.accumulate} in {processes} processes"
            raise ValueError(f"{few} {step}; lower accumulate or batch_tokens, or raise epochs")
        own = recipe(config.head)
        settled = {
            "held_out": held_out,
            "batch_tokens": batch_tokens,
            "epochs": epochs,
            "lr": min(MOST_LR, own["lr"] * PUBLISHED_SIZE / hidden_size),
            "warmup_steps": min(MOST_WARMUP, max(1, total // SHARE)),
            "evaluate_every": max(1.0, epochs / EVALUATIONS),
            **{name: value for name, value in own.items() if name != "lr"},
        }
        if "markov_rank" in own:
            settled["markov_rank"] = max(1, min(own["markov_rank"], hidden_size // 4))
        settings = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in NOT_SAVED}
        settings |= {name: value for name, value in settled.items() if settings[name] is None}
        # A kind of head has no value for settings of others.
        used = {name: settings[name] for name in LossSettings._fields if settings[name] is not None}
        loss = LossSettings(**used)
        return cls(training, validation, settings, batches, held_out_batches, per_step, loss)

    @property
    def total(self) -> int:
        """Return the number of optimizer steps."""
        return len(self.batches) // self.per_step

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all epochs."""
        return sum(len(self.samples[i].token_ids) for batch in self.batches for i in batch)

    @property
    def plain_settings(self) -> dict[str, Any]:
        """Return the settings as values for YAML and JSON."""
        return {name: _plain(value) for name, value in self.settings.items()}

    @property
    def warnings(self) -> list[str]:
        """Return what about the run is likely to be a mistake, in sentences."""
        told, held_out, total = [], len(self.held_out), self.total
        if len(self.samples) < FEW_CONVERSATIONS or total < FEW_STEPS:
            few = f"{len(self.samples):,} conversations and {total:,} steps are few"
            told.append(f"{few}: heads are trained on tens of thousands; expect a low tau")
        if held_out > 1 and held_out * 4 > len(self.samples):
            told.append(f"held_out {held_out} is more than a fifth of the data; lower it")
        if self.settings["warmup_steps"] * 2 > total:
            told.append(f"warmup_steps {self.settings['warmup_steps']} is more than half of {total:,} steps; lower it")
        return told

    def lines(self, weights: int, tokens_per_s: float, proposable: Sequence[bool]) -> list[str]:
        """Return the plan for people.

        Args:
            weights: number of weights to train.
            tokens_per_s: measured speed of training.
            proposable: of each of the target's tokens, whether the head can propose it.
        """
        used = self.settings
        said = sum(sum(sample.mask) for sample in self.samples)
        tokens = sum(len(sample.token_ids) for sample in self.samples)
        evaluations = math.ceil(used["epochs"] / used["evaluate_every"])
        asked = min(used["evaluate_prompts"], sum(not sample.mask[0] for sample in self.held_out))
        proposes = f"proposes all {len(proposable):,} tokens"
        if not all(proposable):
            own = (zip(sample.token_ids, sample.mask, strict=True) for sample in self.samples)
            covered = sum(proposable[token] for pairs in own for token, is_own in pairs if is_own)
            share = f"{covered / said:.1%} of what the assistant says"
            few = f"{sum(proposable):,} of {len(proposable):,} tokens"
            proposes = f"proposes {few}, {share}; --draft-vocab-size 0: all"
        return [
            f"data      {len(self.samples):,} conversations to train on, {tokens:,} tokens, {said / tokens:.0%} the "
            f"assistant's; {len(self.held_out):,} held out",
            f"head      {used['head']}, {weights:,} weights to train; {proposes}",
            f"steps     {self.total:,} in {used['epochs']} epochs, of at most {self.per_step * used['batch_tokens']:,} "
            f"tokens; {used['warmup_steps']} of warm-up to a learning rate of {used['lr']:.2g}",
            f"minutes   about {self.tokens / tokens_per_s / 60:.1f} at {tokens_per_s:,.0f} tokens/s, and {evaluations} "
            f"evaluations of {asked} prompts",
        ]


def _conversations(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Return the samples of each conversation."""
    found: list[list[Sample]] = []
    for sample in samples:
        if not (found and sample.continues):
            found.append([])
        found[-1].append(sample)
    return found


def _batch_tokens(lengths: Sequence[int], per_step: int) -> int:
    """Return the size of batches that gives an epoch enough steps, as far as a batch holds the longest conversation."""
    wanted = sum(lengths) // (STEPS_PER_EPOCH * per_step)
    return max(min(MOST_BATCH, max(LEAST_BATCH, wanted)), *lengths)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
