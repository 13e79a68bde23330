"""Train an EAGLE or EAGLE-3 head for a target.

    python -m specdec.train_eagle.train --model MODEL --data build/prepared --out HEAD
    python -m specdec.train_eagle.train --config run.yaml --lr 2e-3
    accelerate launch --multi_gpu -m specdec.train_eagle.train --config run.yaml

The same command resumes a killed run. OUT gets the head with the best tau on held-out conversations. OUT/run gets the
state of the run, `log.jsonl`, TensorBoard's files and `curves.png`.
"""

import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed
from torch import Tensor

from specdec.core.device import resolve_dtype
from specdec.core.outputs import SpeculationStats
from specdec.draft_heads.heads.draft_head import FeatureHead
from specdec.kernels.kernel_set import torch_kernels
from specdec.models.hub import checkpoint_path
from specdec.models.llama import LlamaModel, load_llama
from specdec.train_eagle.chat_mask import Sample
from specdec.train_eagle.evaluate import accepted_shares, measure_tau
from specdec.train_eagle.features import FeatureStore, OnlineFeatures, packed
from specdec.train_eagle.head_trainer import LossSettings
from specdec.train_eagle.prepared_data import PreparedData
from specdec.train_eagle.train_config import TrainConfig
from specdec.train_eagle.train_log import TrainLog, draw_curves
from specdec.train_eagle.training_kinds import TRAINING_KINDS
from specdec.train_eagle.training_state import FILE, TrainingState, begin_with
from specdec.train_eagle.unrolled_loss import UnrolledLoss
from specdec.verify.noise import GumbelNoise

SHARD_TOKENS = 1 << 18
# Settings that may change when a run is resumed.
FREE = ("out", "features", "checkpoint_minutes", "evaluate_every", "evaluate_prompts", "gradient_checkpointing")


def read_data(config: TrainConfig) -> tuple[list[Sample], list[Sample]]:
    """Return the conversations for training and those for validation.

    Raises:
        ValueError: too few conversations to train on.
    """
    samples = [sample for folder in config.data for shard in PreparedData(folder) for sample in shard]
    samples = [sample for sample in samples if any(sample.mask[2:])]
    if len(samples) <= config.held_out:
        raise ValueError(f"{len(samples)} conversations are too few to keep {config.held_out} apart; lower held_out")
    # Spread over all files, which may be of different kinds.
    apart = {i * len(samples) // config.held_out for i in range(config.held_out)}
    held_out = [samples[i] for i in sorted(apart)]
    return [sample for i, sample in enumerate(samples) if i not in apart], held_out


def new_head(config: TrainConfig, model: LlamaModel, samples: Sequence[Sample]) -> FeatureHead:
    """Make the head that the settings ask for, as a function of the seed.

    Raises:
        ValueError: the head to start from is missing or does not fit, or there are too few tokens to propose.
    """
    torch.manual_seed(config.seed)
    count = config.draft_vocab_size
    tokens = frequent_tokens(samples, count, model.config.vocab_size) if count else None
    head: FeatureHead = TRAINING_KINDS[config.head].new(model, tokens)
    if config.start is not None:
        begin_with(head, config.start)
    return head


def frequent_tokens(samples: Iterable[Sample], count: int, vocab_size: int) -> Tensor:
    """Return the tokens that the assistant says most often, int64 `[count]`, ascending; ties go to lower ids.

    Raises:
        ValueError: there are not so many tokens.
    """
    if count > vocab_size:
        raise ValueError(f"draft_vocab_size is {count}; the target has {vocab_size} tokens")
    said = Counter(token for sample in samples for token, own in zip(sample.token_ids, sample.mask, strict=True) if own)
    ranked = sorted(range(vocab_size), key=lambda token: (-said[token], token))
    return torch.tensor(sorted(ranked[:count]))


class Run:
    """One training run, from its settings to its head."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.samples, self.held_out_samples = read_data(config)
        # By default accelerate treats several processes without a GPU as separate runs.
        on_cpu = not torch.cuda.is_available()
        dtype = resolve_dtype("auto", PartialState(cpu=on_cpu).device)
        mixed = config.mixed_precision
        if mixed == "auto":
            mixed = "bf16" if dtype == torch.bfloat16 else "no"
        self.accelerator = Accelerator(mixed_precision=mixed, cpu=on_cpu)
        self.device = self.accelerator.device
        weights = dtype if mixed == "bf16" else torch.float32
        target = checkpoint_path(config.model)
        self.model = load_llama(target, weights, self.device, torch_kernels(GumbelNoise(self.device)))
        self.kind = TRAINING_KINDS[config.head]
        self.head = new_head(config, self.model, self.samples)
        settings = LossSettings(*(getattr(config, name) for name in LossSettings._fields))
        self.trainer = self.kind.trainer(self.head, self.model.lm_head_weight, settings)
        self.trained = [parameter for parameter in self.head.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.folder = config.out / "run"
        kept = {name: value for name, value in config.model_dump(mode="json").items() if name not in FREE}
        self.state = TrainingState(self.folder / FILE, kept)
        self.state.load(self.head, self.optimizer)
        self.source, self.held_out = self._sources()
        self.wrapped, self.optimizer = self.accelerator.prepare(self.trainer, self.optimizer)
        # All epochs' batches in one list, so that a step's number determines its batches.
        epochs = [packed(self.source.lengths, config.batch_tokens, config.seed + i) for i in range(config.epochs)]
        self.batches = [batch for epoch in epochs for batch in epoch]
        self.per_step = config.accumulate * self.accelerator.num_processes
        self.total = max(1, len(self.batches) // self.per_step)
        self.evaluated_every = max(1, round(config.evaluate_every * self.total / config.epochs))

    def _sources(self) -> tuple[OnlineFeatures | FeatureStore, OnlineFeatures]:
        """Return the features for training and for validation."""
        train = OnlineFeatures(self.model, self.samples, self.head.taps)
        held_out = OnlineFeatures(self.model, self.held_out_samples, self.head.taps)
        folder = self.config.features
        if folder is None:
            return train, held_out
        settings = {
            "data": [str(path) for path in self.config.data],
            "held_out": self.config.held_out,
            "taps": list(self.head.taps),
            "dtype": str(self.model.embed_tokens.weight.dtype),
        }
        store = FeatureStore(folder, settings)
        if self.accelerator.is_main_process:
            width = self.model.config.hidden_size * (1 + len(self.head.taps))
            left = sum(train.lengths[len(store.lengths) :])
            if left:
                size = left * (width * self.model.embed_tokens.weight.element_size() + 5)
                print(f"{size / 2**30:.1f} GiB of features of {left:,} tokens go to {folder}", flush=True)
            for done in store.write(train, SHARD_TOKENS, self.config.batch_tokens):
                print(f"features of {done:,} of {len(train.lengths):,} conversations", flush=True)
        self.accelerator.wait_for_everyone()
        return FeatureStore(folder, settings), held_out

    def train(self) -> None:
        """Train to the end, with checkpoints."""
        config, state, main = self.config, self.state, self.accelerator.is_main_process
        if main:
            self._describe()
        tokens = sum(self._tokens(step) for step in range(state.step))
        saved = time.monotonic()
        with TrainLog(self.folder, self.total, state.step) if main else nullcontext() as log:
            while state.step < self.total:
                began = time.monotonic()
                loss, norm, rate = self.step(state.step)
                new_tokens = self._tokens(state.step)
                tokens += new_tokens
                state.step += 1
                if log is not None:
                    log.step(state.step, tokens, new_tokens, time.monotonic() - began, loss, rate, norm)
                evaluates = state.step % self.evaluated_every == 0 or state.step == self.total
                if evaluates and log is not None:
                    self._evaluate(log, tokens)
                if main and (evaluates or time.monotonic() - saved > config.checkpoint_minutes * 60):
                    saved = time.monotonic()
                    state.save(self.head, self.optimizer)
        if main:
            draw_curves(self.folder / "log.jsonl", self.folder / "curves.png")

    def step(self, step: int) -> tuple[UnrolledLoss, float, float]:
        """Take one optimizer step; return its last batch's loss, its gradient norm and learning rate."""
        config, accelerator = self.config, self.accelerator
        warm = min(1.0, (step + 1) / config.warmup_steps)
        rate = config.lr * warm * (0.5 + 0.5 * math.cos(math.pi * step / self.total))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        first = step * self.per_step + accelerator.process_index
        own = range(first, (step + 1) * self.per_step, accelerator.num_processes)
        for number in own:
            # Noise depends on the batch alone, not on the process or on earlier steps.
            set_seed(config.seed * 1_000_003 + number)
            with nullcontext() if number == own[-1] else accelerator.no_sync(self.wrapped):
                loss: UnrolledLoss = self.wrapped(self.source.batch(self.batches[number]).to(self.device))
                accelerator.backward(loss.total / len(own))
        norm = accelerator.clip_grad_norm_(self.trained, config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, float(norm), rate

    def _tokens(self, step: int) -> int:
        """Return the number of tokens in all processes' batches of a step."""
        lengths = self.source.lengths
        batches = self.batches[step * self.per_step : (step + 1) * self.per_step]
        return sum(lengths[i] for batch in batches for i in batch)

    def _evaluate(self, log: TrainLog, tokens: int) -> None:
        """Measure loss and tau on held-out conversations, and save the head if it is the best so far."""
        loss = self._validate()
        stats = self._speculation()
        values = {
            "step": self.state.step,
            "tokens": tokens,
            "held_out_loss": round(loss.total.item(), 5),
            "held_out_accuracy": [round(value, 4) for value in loss.accuracy.tolist()],
            "tau": round(stats.tau, 4),
            "accepted_per_depth": accepted_shares(stats),
        }
        log.record(values)
        log.console.print(f"step {self.state.step}: held out: {values}", soft_wrap=True)
        if stats.tau >= self.state.best_tau:
            self.state.best_tau = stats.tau
            recipe = self.config.model_dump(mode="json", exclude={"model", "data", "out", "features"})
            recipe |= {"tokens": tokens, "held_out_tau": stats.tau}
            self.kind.files.save(self.head, self.config.out, {"training": recipe})

    @torch.no_grad()
    def _validate(self) -> UnrolledLoss:
        """Return the mean loss over the batches of held-out conversations."""
        self.trainer.eval()
        groups = packed(self.held_out.lengths, self.config.batch_tokens, 0)
        with self.accelerator.autocast():
            losses = [self.trainer(self.held_out.batch(group).to(self.device)) for group in groups]
        self.trainer.train()
        return UnrolledLoss(*(torch.stack(values).float().mean(0) for values in zip(*losses, strict=True)))

    def _speculation(self) -> SpeculationStats:
        """Measure the current head by the engine."""
        held_out = self.held_out_samples
        count = min(self.config.evaluate_prompts, len(held_out))
        if count == 0:
            return SpeculationStats()
        # Spread over all of them.
        chosen = [held_out[i * len(held_out) // count] for i in range(count)]
        prompts = [sample.token_ids[: sample.mask.index(True)] for sample in chosen]
        folder = self.folder / "latest"
        self.kind.files.save(self.head, folder, {})
        return measure_tau(self.config.model, folder, prompts)

    def _describe(self) -> None:
        weights = sum(parameter.numel() for parameter in self.trained)
        tokens = sum(self.source.lengths)
        print(
            f"{len(self.samples):,} conversations, {tokens:,} tokens, {self.total:,} steps of "
            f"{self.per_step * self.config.batch_tokens:,} tokens at most, {weights:,} weights",
            flush=True,
        )
        if self.state.step:
            print(f"going on after step {self.state.step:,}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        run = Run(TrainConfig.parse(arguments, __doc__))
    except ValueError as error:
        print(f"train: {error}", file=sys.stderr)
        sys.exit(2)
    run.train()


if __name__ == "__main__":
    main()
