"""A training run, from its settings to its head."""

import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec

import torch
import yaml
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, set_seed
from torch import Tensor

from specdec.config import EAGLE2_SHAPE, default_shape
from specdec.core.device import resolve_dtype
from specdec.core.outputs import taus_in_words
from specdec.draft_heads.llama.whole_files import write_whole
from specdec.kernels.kernel_set import torch_kernels
from specdec.kernels.types.quantized_tensor import plain
from specdec.kernels.types.threads import usable_threads
from specdec.models.head_fit import VOCABULARY
from specdec.models.hub import checkpoint_path
from specdec.models.llama import load_llama, read_llama_config
from specdec.models.tokenizer import vocabulary_digest
from specdec.train_eagle.data.provenance import data_digests, named_digest, target_name
from specdec.train_eagle.evaluation.head_evaluation import accepted_shares
from specdec.train_eagle.evaluation.replay import HeldOutTau
from specdec.train_eagle.passes.features import FeatureStore, OnlineFeatures
from specdec.train_eagle.training.optimizers import optimizers_of, schedules_of
from specdec.train_eagle.training.start_head import check_start, new_head
from specdec.train_eagle.training.stop_signals import StopSignals
from specdec.train_eagle.training.train_config import FREE, UNTOLD, TrainConfig
from specdec.train_eagle.training.train_log import TrainLog
from specdec.train_eagle.training.train_plan import TrainPlan, read_samples, source_names
from specdec.train_eagle.training.training_kinds import TRAINING_KINDS
from specdec.train_eagle.training.training_state import TrainingState, saved_run
from specdec.train_eagle.training.unrolled_loss import UnrolledLoss

SETTINGS = "settings.yaml"


class TrainingRun:
    """One training run.

    Raises:
        ValueError: a setting, the data, the target or the run in `config.out` is unusable.
    """

    def __init__(self, config: TrainConfig) -> None:
        torch.set_num_threads(config.threads or usable_threads())
        # What does not belong together is refused before anything is loaded or said.
        named = checkpoint_path(config.model, weights=False)
        sizes = read_llama_config(named)
        self.kind = TRAINING_KINDS[config.head]
        if config.draft_vocab_size is None:
            config = replace(config, draft_vocab_size=self.kind.default_draft_vocab(sizes))
        self.config = config
        samples = read_samples(config.data, named, sizes)
        self.data_names = source_names(config.data)
        if config.start is not None:
            check_start(config.start, named)
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
            project_config=ProjectConfiguration(str(self.folder), logging_dir=str(self.folder / "tensorboard")),
            # They are the same in all processes from the start, the target's output matrix among them.
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        )
        self.device = self.accelerator.device
        self.plan = TrainPlan.of(config, samples, sizes.hidden_size, self.accelerator.num_processes)
        target = checkpoint_path(config.model)
        self.made_with = {
            "target": named_digest(target),
            VOCABULARY: vocabulary_digest(target),
            "contents": data_digests(config.data),
        }
        kept = {name: value for name, value in self.plan.plain_settings.items() if name not in FREE}
        kept |= {**self.made_with, "processes": self.accelerator.num_processes}
        self.state = TrainingState(self.folder, kept, config.resume)
        weights = dtype if mixed == "bf16" else torch.float32
        self.model = load_llama(target, weights, self.device, torch_kernels(self.device))
        self.head = new_head(config, self.model.weights, self.plan.samples, self.plan.settings)
        self.trainer = self.kind.trainer(self.head, plain(self.model.weights.lm_head_weight), self.plan.loss)
        self.trained = [parameter for parameter in self.head.parameters() if parameter.requires_grad]
        used = self.plan.settings
        tables = self.trainer.tables
        optimizers = optimizers_of(config.optimizer, self.head, tables, used["lr"], config.vocab_lr_factor)
        schedules = schedules_of(optimizers, used["warmup_steps"], self.plan.total)
        self.source, self.held_out = self._sources()
        self.tau = HeldOutTau(
            self.kind.files, config.model, self.model, self.folder, self.plan.held_out, config.evaluate_prompts
        )
        self.wrapped, *prepared = self.accelerator.prepare(self.trainer, *optimizers, *schedules)
        self.optimizers, self.schedules = prepared[: len(optimizers)], prepared[len(optimizers) :]
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
            **self.made_with,
            "held_out": len(self.plan.held_out),
            "taps": list(self.head.taps),
            "dtype": str(self.model.embed_tokens.weight.dtype),
        }
        store = FeatureStore(folder, settings, train)
        if self.accelerator.is_main_process and (left := store.tokens_left):
            size = left * (2 * self.model.config.hidden_size * (1 + len(self.head.taps)) + 5)
            print(f"{size / 2**30:.1f} GiB of features of {left:,} tokens will go to {folder}", flush=True)
        return store, held_out

    def train(self) -> int | None:
        """Train to the end, with checkpoints, or to the first Ctrl-C or SIGTERM.

        Returns:
            The number of the signal that ended it; None if it came to its end.
        """
        config, state, main = self.config, self.state, self.accelerator.is_main_process
        if config.resume is False and main:
            shutil.rmtree(self.folder, ignore_errors=True)
        speed = self._speed()
        self.accelerator.wait_for_everyone()
        self.accelerator.init_trackers("specdec", init_kwargs={"wandb": {"config": self.plan.plain_settings}})
        tokens = sum(self._tokens(step) for step in range(state.step))
        began = saved = time.monotonic()
        saved_step = state.step
        log = TrainLog(self.folder, self.accelerator, self.total, state.step) if main else None
        if log is not None:
            self._begin(log, speed)
        with log or nullcontext(), StopSignals(self.accelerator.num_processes == 1) as stop:
            if main and state.step < self.total:
                # Before the first step, so that a second copy of the target that does not fit ends the run here.
                self.tau.answer(self.head.taps)
            while state.step < self.total and not self._any(stop.received is not None):
                start = time.monotonic()
                loss, norm, rate = self.step(state.step)
                new_tokens = self._tokens(state.step)
                tokens += new_tokens
                state.step += 1
                if log is not None:
                    log.step(state.step, tokens, new_tokens, time.monotonic() - start, loss, rate, norm)
                evaluates = state.step % self.evaluated_every == 0 or state.step == self.total
                if evaluates:
                    self._check_weights()
                if evaluates and log is not None:
                    self._evaluate(log, tokens)
                if self._any(main and (evaluates or time.monotonic() - saved > config.checkpoint_minutes * 60)):
                    self._save()
                    saved, saved_step = time.monotonic(), state.step
                    if log is not None:
                        log.draw(at_once=evaluates)
            # Still inside, so that a further signal does not end the run while it saves.
            stopped = state.step < self.total
            if stopped and saved_step < state.step:
                self._save()
        if log is not None and stopped:
            kept = f"saved in {self.folder}; the same command resumes it"
            log.say(f"stopped   after step {state.step:,} of {self.total:,}, {kept}")
        elif log is not None:
            self._end(log, tokens, time.monotonic() - began)
        # A process that ended while the first one still evaluates has been seen to abort in its gloo threads.
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        return stop.received if stopped else None

    def _any(self, told: bool) -> bool:
        """Return whether any process was told so, so that all do the same after a step."""
        if self.accelerator.num_processes == 1:
            return told
        count: Tensor = self.accelerator.reduce(torch.tensor(float(told), device=self.device))
        return count.item() > 0

    def _save(self) -> None:
        """Write a checkpoint. Features that its steps computed are kept first, or later epochs would see others.

        Raises:
            ValueError: the weights are not finite.
        """
        self._check_weights()
        if isinstance(self.source, FeatureStore):
            self.source.flush()
        if self.accelerator.is_main_process:
            self.state.save(self.accelerator)

    def step(self, step: int) -> tuple[UnrolledLoss, float, float]:
        """Take one optimizer step; return its last batch's loss, its gradient norm and learning rate.

        Raises:
            ValueError: the gradient is not finite; no weight has changed.
        """
        rate = self.schedules[0].get_last_lr()[0]
        loss = self._gradient(step)
        norm = self.accelerator.clip_grad_norm_(self.trained, self.plan.settings["clip_norm"])
        if not norm.isfinite():
            raise self._diverged(f"the gradient of step {step + 1:,} is not finite")
        for stepped in (*self.optimizers, *self.schedules):
            stepped.step()
        self._forget_gradient()
        return loss, float(norm), rate

    def _check_weights(self) -> None:
        """Raise ValueError if a weight is not finite, so that neither a head nor a checkpoint holds it."""
        if not all(weight.isfinite().all() for weight in self.trained):
            raise self._diverged(f"the weights after step {self.state.step:,} are not finite")

    def _diverged(self, found: str) -> ValueError:
        last = saved_run(self.folder)
        again = "begin anew with --no-resume"
        if last is not None:
            again = (
                f"go on from its last checkpoint, of step {last.step:,}, by --start {self.folder} into another --out"
            )
        return ValueError(f"{found}; {again}, and an --lr below {self.plan.settings['lr']:g}")

    def _gradient(self, step: int) -> UnrolledLoss:
        """Compute the gradient of a step's mean over all predictions; return its last batch's loss."""
        accelerator = self.accelerator
        first = step * self.per_step + accelerator.process_index
        own = range(first, (step + 1) * self.per_step, accelerator.num_processes)
        weight = torch.zeros((), device=self.device)
        for number in own:
            # Noise depends on the batch alone, not on the process or on earlier steps.
            set_seed((self.config.seed * 1_000_003 + number) % 2**32)
            with nullcontext() if number == own[-1] else accelerator.no_sync(self.wrapped):
                loss: UnrolledLoss = self.wrapped(self.source.batch(self.batches[number]).to(self.device))
                accelerator.backward(loss.total * loss.weight)
                weight += loss.weight
        # Gradients are sums over a process's batches by now, and means over processes.
        scale = accelerator.num_processes / accelerator.reduce(weight).clamp_min(1)
        for parameter in self.trained:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
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
            self._forget_gradient()
        return self._tokens(step) / seconds

    def _forget_gradient(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _tokens(self, step: int) -> int:
        """Return the number of tokens in all processes' batches of a step."""
        lengths = self.source.lengths
        batches = self.batches[step * self.per_step : (step + 1) * self.per_step]
        return sum(lengths[i] for batch in batches for i in batch)

    def _evaluate(self, log: TrainLog, tokens: int) -> None:
        """Measure loss and tau on held-out conversations, and save the head if it is the best so far."""
        loss = self._validate()
        stats, is_best = self.tau.measure(self.head, EAGLE2_SHAPE), False
        taus = {EAGLE2_SHAPE.in_words: round(stats.tau, 4)}
        if stats.tau >= self.state.best_tau:
            self.state.best_tau, is_best = stats.tau, True
            serving = default_shape(self.device.type)
            if serving != EAGLE2_SHAPE:
                taus[serving.in_words] = round(self.tau.measure(self.head, serving).tau, 4)
        values = {
            "step": self.state.step,
            "tokens": tokens,
            "held_out_loss": round(loss.total.item(), 5),
            "held_out_accuracy": [round(value, 4) for value in loss.accuracy.tolist()],
            "tau": round(stats.tau, 4),
            "tau_by_tree": taus,
            "accepted_per_depth": accepted_shares(stats),
        }
        log.record(values)
        shares = " ".join(f"{value:.2f}" for value in loss.accuracy.tolist())
        found = f"loss {loss.total.item():.3f} accuracy {shares}, tau {taus_in_words(taus)}"
        log.console.print(f"step {self.state.step}/{self.plan.total} held out: {found}", soft_wrap=True)
        if is_best:
            recipe = {name: value for name, value in self.plan.plain_settings.items() if name not in UNTOLD}
            recipe |= {"tokens": tokens, "held_out_tau": taus, "held_out_prompts": self.tau.num_prompts}
            named = {"target": target_name(self.config.model), VOCABULARY: self.made_with[VOCABULARY]}
            recipe = {**named, "data": self.data_names, **recipe}
            self.kind.files.save(self.head, self.config.out, {"training": recipe})

    @torch.no_grad()
    def _validate(self) -> UnrolledLoss:
        """Return the loss of the held-out conversations."""
        self.trainer.eval()
        with self.accelerator.autocast():
            losses = [self.trainer(self.held_out.batch(group).to(self.device)) for group in self.plan.held_out_batches]
        self.trainer.train()
        return UnrolledLoss.pooled(losses)

    def _begin(self, log: TrainLog, speed: float) -> None:
        """Say what the run will do and whether it goes on, and save its settings."""
        state, run = self.state, self.folder
        weights = sum(parameter.numel() for parameter in self.trained)
        for line in self.plan.lines(weights, speed, self.trainer.proposable.tolist()):
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
            found = f"tau {taus_in_words(best['tau_by_tree'])} on {self.tau.num_prompts} held-out prompts"
            log.say(f"head      the best one, of step {best['step']:,}, in {out}; {found}")
        log.say(f"run       {SETTINGS}, log.jsonl and curves.png in {self.folder}")
        log.say(f"next      specdec evaluate --model {self.config.model} --draft {out} --data NAME=FILE --out FOLDER")
