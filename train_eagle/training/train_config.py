"""Settings of a training run. Pure Python, so that the command line shows them without waiting for torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from specdec.config import DEMO
from specdec.kernels.types.settings import check_settings, setting

LossKind = Literal["ce", "kl", "lk-hybrid", "ce-l1"]
OptimizerKind = Literal["adamw", "muon"]
MarkovKind = Literal["vanilla", "gated", "rnn"]
SlotWeights = Literal["decay", "dpace"]
Tracker = Literal["tensorboard", "wandb", "all", "none"]
# Settings that do not affect the head, so that they may change when a run is resumed.
FREE = (
    "out",
    "features",
    "checkpoint_minutes",
    "evaluate_every",
    "evaluate_prompts",
    "gradient_checkpointing",
    "threads",
    "tracker",
)
# Settings that a head's recipe does not name.
UNTOLD = ("model", "data", "start", *FREE)
# Hidden size of the targets that the published learning rates are for; narrower ones take more.
PUBLISHED_SIZE = 4096
MOST_LR = 2e-3
# By kind of head, where neither the file nor an option says otherwise. EAGLE-1: the paper (Li et al. 2024). EAGLE-3:
# unrolled passes of the official code (Li et al. 2025), learning rate of SpecForge. DFlash (2602.06036) and DSpark
# (2607.05147): the papers, but two layers instead of five, of which the second brings most.
RECIPES: dict[str, dict[str, Any]] = {
    "eagle": {
        "lr": 3e-5,
        "clip_norm": 0.5,
        "loss": "ce",
        "step_decay": 0.8,
        "unroll": 1,
        "token_weight": 0.1,
        "feature_weight": 1.0,
        "noise": 0.1,
    },
    "eagle3": {
        "lr": 1e-4,
        "clip_norm": 1.0,
        "loss": "ce",
        "step_decay": 0.8,
        "unroll": 7,
        "token_weight": 1.0,
        "feature_weight": 0.0,
        "noise": 0.0,
    },
    "dflash": {
        "lr": 6e-4,
        "clip_norm": 1.0,
        "loss": "ce",
        "step_decay": 0.78,
        "layers": 2,
        "block_size": 8,
        "causal": False,
        "anchors": 512,
        "slot_weights": "decay",
        "dpace_alpha": 0.5,
    },
    "dspark": {
        "lr": 6e-4,
        "clip_norm": 1.0,
        "loss": "ce-l1",
        "step_decay": 0.78,
        "layers": 2,
        "block_size": 7,
        "causal": False,
        "anchors": 512,
        "markov_rank": 256,
        "markov_kind": "vanilla",
        "confidence_weight": 1.0,
        "slot_weights": "decay",
        "dpace_alpha": 0.5,
    },
}


def listed(words: Sequence[str]) -> str:
    """Return words as people list them: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _by_head(name: str) -> str:
    """Return a setting of all kinds that have it, in words."""
    kinds: dict[Any, list[str]] = {}
    for head, recipe in RECIPES.items():
        if name in recipe:
            kinds.setdefault(recipe[name], []).append(head)
    values = {value if isinstance(value, str) else f"{value:g}": heads for value, heads in kinds.items()}
    return "; ".join(f"{value} for {listed(heads)}" for value, heads in values.items())


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a run; None is for what follows from the data, the target or the kind of head, see `TrainPlan`."""

    PANEL: ClassVar[str] = "Training"
    # Settings of a file are read by pydantic.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    model: Path = setting(
        DEMO / "target",
        "The target: a checkpoint folder, a GGUF file, or org/name on the hub.",
        shown_default="demo model",
        short="-m",
        panel="Model",
    )
    data: Sequence[Path] = setting(
        help="Folders of conversations that prepare wrote; several may follow.", metavar="FOLDER", panel="Data"
    )
    out: Path = setting(
        help="Folder of the head to write, with the run's state and logs.", metavar="FOLDER", short="-o", panel="Output"
    )
    features: Path | None = setting(
        None, "Folder to store the target's states in.", metavar="FOLDER", shown_default="computed anew"
    )
    head: str = setting("eagle3", "Kind of head.", choices=tuple(RECIPES), panel="Model")
    start: Path | None = setting(
        None,
        "Folder of a head, or of a run (OUT/run), from whose weights this run goes on; it must have the same sizes.",
        metavar="FOLDER",
    )
    draft_vocab_size: int | None = setting(
        None,
        "Tokens that an EAGLE-3, DFlash or DSpark head can propose, by an output matrix of its own; 0: all, and DFlash "
        "and DSpark heads use the target's matrix.",
        least=0,
        shown_default="for eagle3 as many as make the output matrix as large as the rest of the head, from 8192 to "
        "32000; else 0",
    )
    layers: int | None = setting(
        None, "Layers of a DFlash or DSpark head.", least=1, shown_default=_by_head("layers"), panel="Model"
    )
    intermediate_size: int | None = setting(
        None,
        "Inner size of the MLPs of a DFlash or DSpark head; small ones draft faster.",
        least=1,
        shown_default="the target's",
        panel="Model",
    )
    block_size: int | None = setting(
        None,
        "Rows of its block. A DSpark head drafts as many tokens in a pass, a DFlash head one fewer.",
        least=2,
        most=64,
        shown_default=_by_head("block_size"),
        panel="Model",
    )
    causal: bool | None = setting(
        None,
        "Whether a row of its block sees only earlier rows of it, so that small trees need only the first rows.",
        flags="--causal/--no-causal",
        shown_default="no",
        panel="Model",
    )
    markov_rank: int | None = setting(
        None,
        "Rank of a DSpark head's bias by the token before.",
        least=1,
        shown_default=f"{_by_head('markov_rank')}, at most a quarter of the target's hidden size",
        panel="Model",
    )
    markov_kind: MarkovKind | None = setting(
        None,
        "What a DSpark head's bias reads: vanilla, the token before; gated, the state of the slot too; rnn, the whole "
        "path.",
        choices=get_args(MarkovKind),
        shown_default=_by_head("markov_kind"),
        panel="Model",
    )
    window: int | None = setting(
        None,
        "Tokens that each layer of the head sees, its own included, in training and when it is served. It must be at "
        "least 64.",
        least=64,
        shown_default="all",
        panel="Model",
    )
    mask_token: int | None = setting(
        None,
        "Token whose embedding stands for the tokens to draft; one that texts never have is best.",
        least=0,
        shown_default="the last row of the target's embedding",
        panel="Model",
    )
    held_out: int | None = setting(
        None,
        "Conversations for validation.",
        least=1,
        shown_default="one in twenty, at least 12 (or a fifth of all), at most 100",
    )

    epochs: int | None = setting(
        None, "Passes over the data.", least=1, shown_default="10, up to 40 where that is fewer than 200 steps"
    )
    batch_tokens: int | None = setting(
        None,
        "Most tokens of a batch on one device.",
        least=1,
        shown_default="8192, down to 1024 where an epoch would have fewer than 20 steps",
    )
    accumulate: int = setting(1, "Batches per device and optimizer step.", least=1)
    lr: float | None = setting(
        None,
        "Highest learning rate.",
        above=0,
        shown_default=f"{_by_head('lr')}, each times {PUBLISHED_SIZE} / the target's hidden size, at most {MOST_LR:g}",
    )
    vocab_lr_factor: float = setting(
        1.0,
        "Learning rate of matrices with a row or column for each token (output matrix, a DSpark head's bias) over that "
        "of the others.",
        above=0,
    )
    warmup_steps: int | None = setting(
        None, "Steps up to the highest learning rate.", least=0, shown_default="one in twenty, at most 50"
    )
    optimizer: OptimizerKind = setting(
        "adamw", "What takes the steps; muon: Muon for matrices that map states to states, AdamW for the others."
    )
    clip_norm: float | None = setting(
        None, "Gradients are scaled down to this norm.", above=0, shown_default=_by_head("clip_norm")
    )
    mixed_precision: Literal["auto", "bf16", "no"] = setting("auto", "Arithmetic over float32 weights.")
    gradient_checkpointing: bool = setting(
        False, "Recompute each pass for its gradient, to save memory.", flags="--gradient-checkpointing"
    )
    seed: int = setting(0, "Seed of initial weights, noise and order of the data.", least=0, short="-s")

    loss: LossKind | None = setting(
        None,
        "Loss between the target's and the head's next-token distribution.",
        choices=get_args(LossKind),
        shown_default=_by_head("loss"),
    )
    anchors: int | None = setting(
        None,
        "Most blocks of a conversation in a batch, drawn anew each time; of an EAGLE head, most rows that its passes "
        "after the first go on with.",
        least=1,
        shown_default=f"{_by_head('anchors')}; else all",
    )
    unroll: int | None = setting(
        None,
        "Passes over a batch; all but the first read the head's own states.",
        least=1,
        most=16,
        shown_default=_by_head("unroll"),
    )
    step_decay: float | None = setting(
        None,
        "Weight of each pass, or slot of a block, relative to the one before.",
        above=0,
        most=1,
        shown_default=_by_head("step_decay"),
    )
    slot_weights: SlotWeights | None = setting(
        None,
        "Weights of a block's slots: decay, by step_decay; dpace, by how many tokens would be accepted behind each, so "
        "that they follow what the head has learnt (D-PACE).",
        choices=get_args(SlotWeights),
        shown_default=_by_head("slot_weights"),
    )
    dpace_alpha: float | None = setting(
        None,
        "Least factor of a slot in D-PACE's weights of those behind it; higher values give these more.",
        above=0,
        most=1,
        shown_default=_by_head("dpace_alpha"),
    )
    token_weight: float | None = setting(
        None, "Weight of the loss between distributions.", least=0, shown_default=_by_head("token_weight")
    )
    feature_weight: float | None = setting(
        None,
        "Weight of the smooth L1 distance of features, of EAGLE-1 heads.",
        least=0,
        shown_default=_by_head("feature_weight"),
    )
    confidence_weight: float | None = setting(
        None,
        "Weight of the loss of a DSpark head's estimate of its acceptance.",
        least=0,
        shown_default=_by_head("confidence_weight"),
    )
    noise: float | None = setting(
        None, "Amplitude of uniform noise added to features.", least=0, shown_default=_by_head("noise")
    )

    threads: int | None = setting(
        None,
        "Threads of torch on a CPU. They sleep while they wait for each other.",
        least=1,
        most=1024,
        shown_default="OMP_NUM_THREADS, or the cores that it may use",
    )
    checkpoint_minutes: float = setting(3.0, "Minutes between saved states and curves of the run.", above=0)
    evaluate_every: float | None = setting(
        None, "Epochs between evaluations by the engine.", above=0, shown_default="a tenth of the run, at least 1"
    )
    evaluate_prompts: int = setting(
        40, "Held-out conversations answered at each evaluation; 0: none, the last head is kept.", least=0
    )
    resume: bool | None = setting(
        None,
        "Go on with the run in OUT, which must be there; or begin anew and replace it.",
        flags="--resume/--no-resume",
        shown_default="go on if there is one with these settings",
    )
    tracker: Tracker = setting(
        "tensorboard", "Where figures of the run go beside log.jsonl and curves.png; all: those that are installed."
    )

    def __post_init__(self) -> None:
        check_settings(self)
