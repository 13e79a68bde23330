"""A training run, from its settings to its head."""

import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
import yaml
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed
from torch import Tensor
from transformers import get_cosine_schedule_with_warmup

from specdec.core.device import resolve_dtype
from specdec.core.outputs import SpeculationStats
from specdec.draft_heads.heads.draft_head import FeatureHead
from specdec.kernels.kernel_set import torch_kernels
from specdec.kernels.quantized_tensor import plain
from specdec.models.hub import checkpoint_path
from specdec.models.llama import LlamaModel, load_llama
from specdec.train_eagle.chat_mask import Sample
from specdec.train_eagle.features import FeatureStore, OnlineFeatures, packed
from specdec.train_eagle.head_evaluation import accepted_shares, measure_tau
from specdec.train_eagle.prepared_data import write_whole
from specdec.train_eagle.start_head import begin_with
from specdec.train_eagle.target_name import target_name
from specdec.train_eagle.train_config import TrainConfig
from specdec.train_eagle.train_log import TrainLog
from specdec.train_eagle.train_plan import TrainPlan, read_samples, source_names
from specdec.train_eagle.training_kinds import TRAINING_KINDS
from specdec.train_eagle.training_state import TrainingState
from specdec.train_eagle.unrolled_loss import UnrolledLoss
from specdec.verify.noise import GumbelNoise

SHARD_TOKENS = 1 << 18
# Settings that may change when a run is resumed.
FREE = (
    "out",
    "features",
    "checkpoint_minutes",
    "evaluate_every",
    "evaluate_prompts",
    "gradient_checkpointing",
    "tracker",
)
SETTINGS = "settings.yaml"
# Settings that a head's recipe does not name.
UNTOLD = ("model", "data", "out", "features", "start", "tracker")


def new_head(
    config: TrainConfig, model: LlamaModel, samples: Sequence[Sample], settings: Mapping[str, Any]
) -> FeatureHead:
    """Make the head that the settings ask for, as a function of the seed.

    Args:
        settings: all settings by name, none of the kind's left open.

    Raises:
        ValueError: the head to start from is missing or does not fit, or there are too few tokens to propose.
    """
    torch.manual_seed(config.seed)
    count = config.draft_vocab_size
    tokens = frequent_tokens(samples, count, model.config.vocab_size) if count else None
    head: FeatureHead = TRAINING_KINDS[config.head].sized(settings).new(model, tokens)
    if config.start is not None:
        begin_with(head, config.start, config.model)
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
    """One training run.

    Raises:
        ValueError: a setting, the data, the target or the run in `config.out` is unusable.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        samples = read_samples(config.data)
        self.data_names = source_names(config.data)
        # By default accelerate treats several processes without a GPU as separate runs.
        on_cpu = not torch.cuda.is_available()
        dtype = resolve_dtype("auto", PartialState(cpu=on_cpu).device)
        mixed = config.mixed_precision
        if mixed == "auto":
            mixed = "bf16" if dtype == torch.bfloat16 else "no"
        self.folder = config.out / "run"
        if config.tracker == "wandb" and find_spec("wandb") is None:
            raise ValueError("tracker is wandb, which is not installed; run: pip install wandb, or take another")
        # A step of the schedule is one of the optimizer, whatever the number of processes.
        self.accelerator = Accelerator(
            mixed_precision=mixed,
            cpu=on_cpu,
            step_scheduler_with_optimizer=False,
            log_with=None if config.tracker == "none" else config.tracker,
            project_dir=self.folder,
        )
        self.device = self.accelerator.device
        weights = dtype if mixed == "bf16" else torch.float32
        target = checkpoint_path(config.model)
        self.model = load_llama(target, weights, self.device, torch_kernels(GumbelNoise(self.device)))
        self.plan = TrainPlan.of(config, samples, self.model.config.hidden_size, self.accelerator.num_processes)
        self.kind = TRAINING_KINDS[config.head]
        self.head = new_head(config, self.model, self.plan.samples, self.plan.settings)
        self.trainer = self.kind.trainer(self.head, plain(self.model.lm_head_weight), self.plan.loss)
        self.trained = [parameter for parameter in self.head.parameters() if parameter.requires_grad]
        kept = {name: value for name, value in self.plan.plain_settings.items() if name not in FREE}
        kept["processes"] = self.accelerator.num_processes
        self.state = TrainingState(self.folder, kept, config.resume)
        used = self.plan.settings
        optimizer = torch.optim.AdamW(self.trained, lr=used["lr"], betas=(0.9, 0.95), weight_decay=0.0)
        schedule = get_cosine_schedule_with_warmup(optimizer, used["warmup_steps"], self.plan.total)
        self.source, self.held_out = self._sources()
        prepared = self.accelerator.prepare(self.trainer, optimizer, schedule)
        self.wrapped, self.optimizer, self.schedule = prepared
        self.state.load(self.accelerator)
        self.batches, self.per_step, self.total = self.plan.batches, self.plan.per_step, self.plan.total
        self.evaluated_every = max(1, round(used["evaluate_every"] * self.total / used["epochs"]))

    def _sources(self) -> tuple[OnlineFeatures | FeatureStore, OnlineFeatures]:
        """Return the features for training and for validation."""
        train = OnlineFeatures(self.model, self.plan.samples, self.head.taps)
        held_out = OnlineFeatures(self.model, self.plan.held_out, self.head.taps)
        folder = self.config.features
        if folder is None:
            return train, held_out
        settings = {
            "data": [str(path) for path in self.config.data],
            "held_out": len(self.plan.held_out),
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
            for done in store.write(train, SHARD_TOKENS, self.plan.settings["batch_tokens"]):
                print(f"features of {done:,} of {len(train.lengths):,} conversations", flush=True)
        self.accelerator.wait_for_everyone()
        return FeatureStore(folder, settings), held_out

    def train(self) -> None:
        """Train to the end, with checkpoints."""
        config, state, main = self.config, self.state, self.accelerator.is_main_process
        if config.resume is False and main:
            shutil.rmtree(self.folder, ignore_errors=True)
        speed = self._speed()
        self.accelerator.wait_for_everyone()
        self.accelerator.init_trackers("tensorboard")
        tokens = sum(self._tokens(step) for step in range(state.step))
        began = saved = time.monotonic()
        log = TrainLog(self.folder, self.accelerator, self.total, state.step) if main else None
        if log is not None:
            self._begin(log, speed)
        with log or nullcontext():
            while state.step < self.total:
                start = time.monotonic()
                loss, norm, rate = self.step(state.step)
                new_tokens = self._tokens(state.step)
                tokens += new_tokens
                state.step += 1
                if log is not None:
                    log.step(state.step, tokens, new_tokens, time.monotonic() - start, loss, rate, norm)
                evaluates = state.step % self.evaluated_every == 0 or state.step == self.total
                if evaluates and log is not None:
                    self._evaluate(log, tokens)
                if log is not None and (evaluates or time.monotonic() - saved > config.checkpoint_minutes * 60):
                    state.save(self.accelerator)
                    log.draw(at_once=evaluates)
                    saved = time.monotonic()
        if log is not None:
            self._end(log, tokens, time.monotonic() - began)
        # A process that ended while the first one still evaluates has been seen to abort in its gloo threads.
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()

    def step(self, step: int) -> tuple[UnrolledLoss, float, float]:
        """Take one optimizer step; return its last batch's loss, its gradient norm and learning rate."""
        rate = self.schedule.get_last_lr()[0]
        loss = self._gradient(step)
        norm = self.accelerator.clip_grad_norm_(self.trained, self.plan.settings["clip_norm"])
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss, float(norm), rate

    def _gradient(self, step: int) -> UnrolledLoss:
        """Compute the gradient of a step; return its last batch's loss."""
        accelerator = self.accelerator
        first = step * self.per_step + accelerator.process_index
        own = range(first, (step + 1) * self.per_step, accelerator.num_processes)
        for number in own:
            # Noise depends on the batch alone, not on the process or on earlier steps.
            set_seed(self.config.seed * 1_000_003 + number)
            with nullcontext() if number == own[-1] else accelerator.no_sync(self.wrapped):
                loss: UnrolledLoss = self.wrapped(self.source.batch(self.batches[number]).to(self.device))
                accelerator.backward(loss.total / len(own))
        return loss

    def _speed(self) -> float:
        """Measure the tokens per second of a step's gradient, which is then dropped."""
        step = min(self.state.step, self.total - 1)
        seconds = 0.0
        # The first one also allocates and compiles.
        for _ in range(2):
            began = time.perf_counter()
            self._gradient(step)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds = time.perf_counter() - began
            self.optimizer.zero_grad()
        return self._tokens(step) / seconds

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
        shares = " ".join(f"{value:.2f}" for value in loss.accuracy.tolist())
        found = f"loss {loss.total.item():.3f} accuracy {shares}, tau {stats.tau:.2f}"
        log.console.print(f"step {self.state.step}/{self.plan.total} held out: {found}", soft_wrap=True)
        if stats.tau >= self.state.best_tau:
            self.state.best_tau = stats.tau
            recipe = {name: value for name, value in self.plan.plain_settings.items() if name not in UNTOLD}
            recipe |= {"tokens": tokens, "held_out_tau": round(stats.tau, 4)}
            recipe = {"target": target_name(self.config.model), "data": self.data_names, **recipe}
            self.kind.files.save(self.head, self.config.out, {"training": recipe})

    @torch.no_grad()
    def _validate(self) -> UnrolledLoss:
        """Return the mean loss over the batches of held-out conversations."""
        self.trainer.eval()
        groups = packed(self.held_out.lengths, self.plan.settings["batch_tokens"], 0)
        with self.accelerator.autocast():
            losses = [self.trainer(self.held_out.batch(group).to(self.device)) for group in groups]
        self.trainer.train()
        return UnrolledLoss(*(torch.stack(values).float().mean(0) for values in zip(*losses, strict=True)))

    def _speculation(self) -> SpeculationStats:
        """Measure the current head by the engine."""
        held_out = self.plan.held_out
        count = min(self.config.evaluate_prompts, len(held_out))
        if count == 0:
            return SpeculationStats()
        # Spread over all of them.
        chosen = [held_out[i * len(held_out) // count] for i in range(count)]
        prompts = [sample.token_ids[: sample.mask.index(True)] for sample in chosen]
        folder = self.folder / "latest"
        self.kind.files.save(self.head, folder, {})
        return measure_tau(self.config.model, folder, prompts)

    def _begin(self, log: TrainLog, speed: float) -> None:
        """Say what the run will do and whether it goes on, and save its settings."""
        state, run = self.state, self.folder
        for line in self.plan.lines(sum(parameter.numel() for parameter in self.trained), speed):
            log.say(line)
        if state.step:
            log.say(f"resumes   after step {state.step:,} of {self.total:,}, from {run}; --no-resume begins anew")
        else:
            log.say(f"begins    a new run in {run}; the same command resumes it")
        for warning in self.plan.warnings:
            log.say(f"warning   {warning}")
        told = yaml.safe_dump(self.plan.plain_settings, sort_keys=False, allow_unicode=True)
        write_whole(run / SETTINGS, lambda new: new.write_text(told, encoding="utf-8"))

    def _end(self, log: TrainLog, tokens: int, seconds: float) -> None:
        """Say what the run has made."""
        out, best = self.config.out, log.best()
        log.say(f"trained   {self.total:,} steps, {tokens:,} tokens; {seconds / 60:.1f} minutes of this process")
        if best is None or not best["tau"]:
            log.say(f"head      the last one, in {out}; its tau was not measured")
        else:
            held_out = f"{min(self.config.evaluate_prompts, len(self.plan.held_out))} held-out prompts"
            log.say(f"head      the best one, of step {best['step']:,}, in {out}; tau {best['tau']:.2f} on {held_out}")
        log.say(f"run       {SETTINGS}, log.jsonl and curves.png in {self.folder}")
        log.say(f"next      specdec evaluate --model {self.config.model} --draft {out} --data NAME=FILE --out FOLDER")
