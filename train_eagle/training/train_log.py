"""Progress of a run: a bar or lines, `log.jsonl`, trackers, and curves."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from specdec.config import EAGLE2_SHAPE
from specdec.draft_heads.llama.whole_files import write_whole
from specdec.train_eagle.training.unrolled_loss import UnrolledLoss

matplotlib.use("agg")

from matplotlib import pyplot as plt

# Seconds between lines if there is no terminal, and between pictures; steps between records.
LINE_SECONDS = 30.0
RECORD_STEPS = 10


class TrainLog:
    """The log of a run, written by one of its processes.

    Args:
        folder: folder of `log.jsonl`, which is appended to, and of `curves.png`.
        accelerator: has the trackers.
        total: number of steps of the run.
        done: number of steps already done.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, total: int, done: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.picture = folder / "log.jsonl", folder / "curves.png"
        self.accelerator, self.console = accelerator, Console()
        self._keep_until(done)
        self.total, self.began, self.first = total, time.monotonic(), done
        self._shown, self._drawn = 0.0, time.monotonic()
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[told]}")
        self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console, disable=not self.console.is_terminal)
        self._task = self.bar.add_task("training", total=total, completed=done, told="")

    def __enter__(self) -> "TrainLog":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def step(
        self, step: int, tokens: int, new_tokens: int, seconds: float, loss: UnrolledLoss, rate: float, norm: float
    ) -> None:
        """Log a step.

        Args:
            tokens: tokens trained on so far.
            new_tokens: tokens of this step.
            seconds: duration of the step.
        """
        now = time.monotonic()
        line_due = now - self._shown >= LINE_SECONDS or step == self.total
        if step % RECORD_STEPS and not line_due:
            self.bar.update(self._task, completed=step)
            return
        accuracy = [round(value, 4) for value in loss.accuracy.tolist()]
        record = {
            "step": step,
            "tokens": tokens,
            "loss": round(loss.total.item(), 5),
            "step_loss": [round(value, 5) for value in loss.loss.tolist()],
            "accuracy": accuracy,
            "acceptance": [round(value, 4) for value in loss.acceptance.tolist()],
            "lr": rate,
            "grad_norm": round(norm, 4),
            "tokens_per_s": round(new_tokens / seconds, 1),
        }
        self.record(record)
        shares = " ".join(f"{value:.2f}" for value in accuracy)
        told = f"loss {record['loss']:.3f} accuracy {shares} {new_tokens / seconds:,.0f} tokens/s"
        self.bar.update(self._task, completed=step, told=told)
        if line_due:
            self._shown = now
        if line_due and not self.console.is_terminal:
            left = (self.total - step) * (now - self.began) / max(1, step - self.first) / 60
            line = f"step {step}/{self.total} {told}, {tokens:,} tokens, {left:.1f} min left"
            self.console.print(line, soft_wrap=True)

    def record(self, values: dict[str, Any]) -> None:
        """Write a step's values to `log.jsonl` and the trackers."""
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(values) + "\n")
        lists = {
            f"{n}/{i}": part for n, value in values.items() if isinstance(value, list) for i, part in enumerate(value)
        }
        numbers = {n: value for n, value in values.items() if isinstance(value, int | float) and n != "step"}
        self.accelerator.log({**numbers, **lists}, step=values["step"])

    def records(self) -> list[dict[str, Any]]:
        """Return all that `log.jsonl` has."""
        if not self.file.exists():
            return []
        return [json.loads(line) for line in self.file.read_text(encoding="utf-8").splitlines()]

    def best(self) -> dict[str, Any] | None:
        """Return the record of the evaluation with the best tau, the last of equal ones."""
        return max((r for r in self.records() if "tau" in r), key=lambda r: (r["tau"], r["step"]), default=None)

    def draw(self, at_once: bool) -> None:
        """Draw the curves so far, now and then only unless `at_once`."""
        if at_once or time.monotonic() - self._drawn > LINE_SECONDS:
            draw_curves(self.records(), self.picture)
            self._drawn = time.monotonic()

    def _keep_until(self, done: int) -> None:
        """Drop the records of steps that a resumed run takes again, and a line that a killed one left torn."""
        if self.file.exists():
            lines = self.file.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= done]
            write_whole(self.file, lambda new: new.write_text("".join(whole), encoding="utf-8"))


def draw_curves(records: Sequence[dict[str, Any]], picture: Path) -> None:
    """Plot loss, accuracy per pass, and tau on held-out conversations against tokens trained on, of a run's records."""
    steps = [record for record in records if "loss" in record]
    held_out = [record for record in records if "tau" in record]
    figure, (loss, accuracy, tau) = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    tokens = [record["tokens"] for record in steps]
    loss.plot(tokens, [record["loss"] for record in steps], label="training")
    loss.plot([r["tokens"] for r in held_out], [r["held_out_loss"] for r in held_out], "o-", label="held out")
    loss.set(title="loss", xlabel="tokens")
    loss.legend()
    for step in range(len(steps[0]["accuracy"]) if steps else 0):
        accuracy.plot(tokens, [record["accuracy"][step] for record in steps], label=f"pass {step + 1}")
    accuracy.set(title="share of predictions that are the target's", xlabel="tokens")
    accuracy.legend()
    tau.plot([record["tokens"] for record in held_out], [record["tau"] for record in held_out], "o-")
    tau.set(title=f"tau ({EAGLE2_SHAPE.in_words}), held out, temperature 0", xlabel="tokens")
    write_whole(picture, lambda new: figure.savefig(new, dpi=100, format="png"))
    plt.close(figure)
