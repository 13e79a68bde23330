"""The head that a training run begins with: a fresh one, or with the weights of another run's or of one in a folder."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.draft_heads.formats.head_kind import Source
from specdec.draft_heads.formats.head_kinds import describe_folder
from specdec.draft_heads.heads.draft_head import FeatureHead
from specdec.draft_heads.llama.mlp import mlp_kind
from specdec.models.head_fit import VOCABULARY, check_fit, check_vocabulary
from specdec.models.hub import shown_path
from specdec.models.llama import LlamaWeights, read_llama_config
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.training.head_export import from_folder
from specdec.train_eagle.training.train_config import TrainConfig
from specdec.train_eagle.training.training_kinds import TRAINING_KINDS
from specdec.train_eagle.training.training_state import saved_run

EMBEDDING = "embed_tokens.weight"
MARKOV = "markov_head."
WEIGHT = f"{MARKOV}markov_w2.weight"
# Trained embeddings of the Markov head are within about 1, where tanh of an eighth is linear to half a percent.
LINEAR = 8.0
OUTPUT, DRAFT_TOKENS, DRAFT_SIZE = "lm_head.weight", "draft_tokens", "draft_vocab_size"
INNER = "intermediate_size"


def new_head(
    config: TrainConfig, model: LlamaWeights, samples: Sequence[Sample], settings: Mapping[str, Any]
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
    head: FeatureHead = TRAINING_KINDS[config.head].new(model, tokens, settings)
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


def check_start(start: Path, target: Path) -> None:
    """Check that the head of a folder, or of a run, is for a target with the sizes and tokens of this one.

    Raises:
        ValueError: names both, and the remedy.
    """
    saved = saved_run(start)
    if saved is None:
        if (start / "config.json").is_file():
            check_fit(describe_folder(start), start, target)
        return
    sizes, embedding = read_llama_config(target), saved.head().get(EMBEDDING)
    shape = [sizes.vocab_size, sizes.hidden_size]
    if embedding is not None and list(embedding.shape) != shape:
        found = f"its run was for a target of {embedding.shape[0]} tokens and a hidden_size of {embedding.shape[1]}"
        remedy = "give that target by --model, or another --start"
        raise ValueError(f"{start}: {found}; {shown_path(target)} has {shape[0]} and {shape[1]}; {remedy}")
    check_vocabulary(f"--start {start}", saved.settings.get("target"), saved.settings.get(VOCABULARY), target)


def begin_with(head: FeatureHead, start: Path, target: Path) -> None:
    """Copy the weights of another head into a fresh one, the tokens that it proposes included.

    Of wider MLPs it takes the neurons with the largest weights, as many as its own have. A block head that proposes
    some tokens only may start from one that proposes all.

    Args:
        start: the folder of a run's state (OUT/run), or of a head.
        target: the target's checkpoint.

    Raises:
        ValueError: there is no head, or one of another kind or other sizes.
    """
    saved = saved_run(start)
    if saved is None:
        _begin_with_folder(head, start, target)
        return
    window = saved.settings.get("window") or 0
    _check_windows(start, (window,) * head.llama.num_layers, head)
    try:
        head.load_state_dict(_fitted(saved.head(), head))
    except RuntimeError as error:
        raise ValueError(f"{start}: its head does not fit: {str(error).splitlines()[1].strip()}") from None


def _begin_with_folder(head: FeatureHead, folder: Path, target: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: holds no head; start names the folder of a head, or of a run, OUT/run")
    kind, given, *_ = from_folder(folder, target)
    if type(given) is not type(head):
        raise ValueError(
            f"{folder}: an {kind.files.label} head, which is another kind than this run's; give its --head"
        )
    _check_windows(folder, given.llama.layer_windows, head)
    # A head without a window may learn to see less.
    given.config = replace(given.config, llama=replace(given.llama, windows=head.llama.windows))
    given.llama = given.config.llama
    # Shapes alone would not tell which layers it reads, nor by which norms.
    own, wanted = (kind.files.official(one)[0] for one in (given, head))
    if own.get("markov_head_type") == "vanilla":
        # See `_extended`.
        own["markov_head_type"] = wanted.get("markov_head_type")
    if own.get(INNER, 0) > wanted.get(INNER, 0):
        # See `_narrowed`.
        own[INNER] = wanted.get(INNER)
    if _proposes_some(head) and not _proposes_some(given):
        # See `_with_draft_tokens`.
        own[DRAFT_SIZE] = wanted.get(DRAFT_SIZE)
    if different := [name for name in (own | wanted) if own.get(name) != wanted.get(name)]:
        name = different[0]
        sizes = f"its {name} is {own.get(name)}, and this run's {wanted.get(name)}"
        raise ValueError(f"{folder}: {sizes}; give the run the sizes of the head that it starts from")
    tensors = given.state_dict()
    if describe_folder(folder).embedding != Source.FILE:
        # The target's, which the fresh head has.
        del tensors[EMBEDDING]
    head.load_state_dict(_fitted(tensors, head), strict=False)


def _check_windows(start: Path, windows: Sequence[int], head: FeatureHead) -> None:
    """Check that a head begins with weights that saw all tokens, or as many as its own layers."""
    own = head.llama.layer_windows
    if any(windows) and tuple(windows) != own:
        told = f"its layers see {_seen(windows)}, and this run's {_seen(own)}"
        raise ValueError(f"{start}: {told}; give the run that window")


def _seen(windows: Sequence[int]) -> str:
    found = [f"{window} tokens" if window else "all tokens" for window in windows]
    return " and ".join(dict.fromkeys(found))


def _fitted(tensors: dict[str, Tensor], head: FeatureHead) -> dict[str, Tensor]:
    return _extended(_with_draft_tokens(_narrowed(tensors, head), head), head)


def _proposes_some(head: FeatureHead) -> bool:
    return getattr(head, "lm_head", None) is not None


def _with_draft_tokens(tensors: dict[str, Tensor], head: FeatureHead) -> dict[str, Tensor]:
    """Return the tensors of a block head that proposes all tokens as one that proposes those of `head`.

    Its output matrix is the fresh head's, the target's rows of those tokens.
    """
    if not _proposes_some(head) or OUTPUT in tensors:
        return tensors
    own = head.state_dict()
    found = {**tensors, OUTPUT: own[OUTPUT], DRAFT_TOKENS: own[DRAFT_TOKENS]}
    if WEIGHT in tensors:
        found[WEIGHT] = tensors[WEIGHT][own[DRAFT_TOKENS]]
    return found


def _narrowed(tensors: dict[str, Tensor], head: FeatureHead) -> dict[str, Tensor]:
    """Return the tensors with MLPs at most as wide as those of `head`."""
    found = dict(tensors)
    for prefix in {f"{before}.mlp." for before, is_mlp, _ in (name.partition(".mlp.") for name in tensors) if is_mlp}:
        mlp_kind(head.llama).narrowed(found, prefix, head.llama.intermediate_size)
    return found


def _extended(tensors: dict[str, Tensor], head: FeatureHead) -> dict[str, Tensor]:
    """Return a vanilla Markov head as one of `head`'s kind that scores as it does, and others as they are."""
    scorer = getattr(head, "markov_head", None)
    if scorer is None or scorer.kind == "vanilla" or WEIGHT not in tensors or not _is_vanilla(tensors):
        return tensors
    own = {f"{MARKOV}{name}": tensor.clone() for name, tensor in scorer.state_dict().items()}
    rank = scorer.markov_w1.weight.shape[1]
    if scorer.kind == "gated":
        own[f"{MARKOV}gate_proj.weight"].zero_()
        own[f"{MARKOV}gate_proj.bias"].zero_()
        # A gate of 0 lets half through.
        factor = 2.0
    else:
        joint = own[f"{MARKOV}joint_proj.weight"]
        own[f"{MARKOV}joint_proj.bias"].zero_()
        # The output is tanh(embedding / factor), which is nearly linear; states begin small.
        factor = LINEAR
        joint[2 * rank :] = 0
        joint[2 * rank :, rank : 2 * rank] = torch.eye(rank) / factor
    return {**own, **tensors, WEIGHT: tensors[WEIGHT] * factor}


def _is_vanilla(tensors: Mapping[str, Tensor]) -> bool:
    return not any(name.startswith((f"{MARKOV}gate_proj", f"{MARKOV}joint_proj")) for name in tensors)
