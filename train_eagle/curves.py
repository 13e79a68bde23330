"""A picture of how a run went."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot as plt


def draw_curves(log: Path, picture: Path) -> None:
    """Loss, accuracy of each pass, and tau on held-out conversations, against tokens trained on.

    Args:
        log: `log.jsonl` of a run.
    """
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
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
    tau.set(title="tau, held out, temperature 0", xlabel="tokens")
    figure.savefig(picture, dpi=100)
    plt.close(figure)
