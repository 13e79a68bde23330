"""Export of a trained head to a folder that can be published: in a layout that others read, with a model card."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec.core.device import DTYPES
from specdec.draft_heads.formats.head_kind import HeadDescription, write_head
from specdec.draft_heads.formats.head_kinds import describe_folder
from specdec.draft_heads.heads.draft_head import FeatureHead, TargetParts
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, error_context, read_config
from specdec.kernels.kernel_set import torch_kernels
from specdec.kernels.reference.projection import Projection
from specdec.kernels.types.settings import one_line
from specdec.models.head_fit import VOCABULARY, check_fit, check_vocabulary
from specdec.models.hub import checkpoint_path
from specdec.models.llama import LlamaWeights, read_llama_config
from specdec.models.tokenizer import vocabulary_digest
from specdec.train_eagle.data.provenance import WEIGHTS, file_digest, target_name
from specdec.train_eagle.data.stage_settings import ExportSettings
from specdec.train_eagle.evaluation.evaluation import Evaluation
from specdec.train_eagle.training.model_card import model_card
from specdec.train_eagle.training.train_config import UNTOLD
from specdec.train_eagle.training.train_plan import source_names
from specdec.train_eagle.training.training_kind import TrainingKind
from specdec.train_eagle.training.training_kinds import TRAINING_KINDS
from specdec.train_eagle.training.training_state import saved_run


class Trained(NamedTuple):
    """A trained head and its origin.

    Attributes:
        kind: the head's kind.
        head: the head in float32 on the CPU.
        recipe: settings of its training, as far as known; no `data` where a run's prepared data is not there any more.
        target: name of its target, if known.
        vocabulary: `vocabulary_digest` of its target, if known.
        weights: `file_digest` of the folder's weights; None for those of a run, which no evaluation can be of.
    """

    kind: TrainingKind[Any]
    head: FeatureHead
    recipe: dict[str, Any]
    target: str | None
    vocabulary: str | None = None
    weights: str | None = None


def from_run(folder: Path, target: Path | None = None) -> Trained:
    """Read the last head of a training run.

    Args:
        folder: folder of the run's state, OUT/run.
        target: its target, a path or a name on the hub; None for the one that the run used.

    Raises:
        ValueError: there is no such run or target.
    """
    saved = saved_run(folder)
    if saved is None:
        raise ValueError(f"{folder}: no state of a run; give the folder `run` in what train wrote, or --draft")
    settings, tensors = dict(saved.settings), saved.head()
    try:
        kind, named = TRAINING_KINDS[settings["head"]], settings.pop("model")
    except LookupError as error:
        raise ValueError(f"{saved.folder}: not the state of a run: {one_line(error)}; train again") from None
    try:
        target = checkpoint_path(target or named, weights=False)
    except CheckpointError as error:
        raise ValueError(f"{error}; the run's target is not here; give its folder by --model") from None
    sizes = read_llama_config(target)
    check_vocabulary(f"--run {folder}", settings.get("target"), settings.get(VOCABULARY), target)
    try:
        with torch.device("meta"):
            head = kind.new(LlamaWeights(sizes), tensors.get("draft_tokens"), settings)
        head.load_state_dict(tensors, assign=True)
    except (RuntimeError, IndexError):
        raise ValueError(f"{folder}: not of a head for {target}; give the run's own target by --model") from None
    left_out = ("processes", "target", "contents", *UNTOLD)
    recipe = {name: value for name, value in settings.items() if name not in left_out}
    name = target_name(target)
    told: dict[str, Any] = {"target": name}
    # A head can be exported after its data has been moved or deleted.
    with suppress(ValueError):
        told["data"] = source_names(Path(folder) for folder in settings.get("data", ()))
    return Trained(kind, head.float(), {**told, **recipe, "steps": saved.step}, name, vocabulary_digest(target))


def from_folder(folder: Path, target: Path | None = None) -> Trained:
    """Read a head from a folder.

    Args:
        target: its target, likewise, needed if config.json leaves open which layers the head reads.

    Raises:
        ValueError: there is no head, or one that the official layout cannot hold.
    """
    target = None if target is None else checkpoint_path(target, weights=False)
    found = describe_folder(folder)
    with error_context(folder):
        if found.kind.name not in TRAINING_KINDS:
            raise CheckpointError(f"{found.label} heads are not exported, only {', '.join(TRAINING_KINDS)}")
        found.kind.check_official(found)
    if target is not None:
        check_fit(found, folder, target)
    with error_context(folder):
        llama = replace(found.config.llama, num_layers=_num_layers(found, target))
        # Nothing of the target is written, so placeholders for its matrices do.
        device, nothing = torch.device("cpu"), torch.zeros(1).expand(llama.vocab_size, llama.hidden_size)
        parts = TargetParts(nothing, Projection(nothing), llama)
        kernels = replace(torch_kernels(device), projection=_KeptWeight)
        loaded = found.kind.build(found, parts, kernels)
        if loaded.other is not None:
            raise CheckpointError("config.json leaves open how it counts the layers it reads; give both countings")
    head, kind = loaded.draft.head.module, TRAINING_KINDS[found.kind.name]
    assert head is not None
    recipe = dict(read_config(folder).get("training") or {})
    named = target_name(target) if target is not None else found.settings.verifier or recipe.get("target")
    return Trained(kind, head, recipe, named, recipe.get(VOCABULARY), file_digest(folder, WEIGHTS))


class _KeptWeight(Projection):
    """A product whose weight stays as it is, whatever its size, to be written."""

    @property
    def keeps_weight(self) -> bool:
        return True


def _num_layers(found: HeadDescription[Any], target: Path | None) -> int:
    """Return the number of the target's layers, or without a target one that has all the layers that the head reads."""
    if target is not None:
        return read_llama_config(target).num_layers
    if found.taps is None:
        return 0
    if found.taps.ids is not None and found.taps.settled_by:
        # An id may count the outputs of layers.
        return max(found.taps.ids) + 1
    raise CheckpointError("config.json leaves open which layers it reads; give the folder of its target by --model")


def check_evaluated(trained: Trained, evaluation: Evaluation) -> None:
    """Check that an evaluation is of a head, and of a target with the tokens of the head's.

    Raises:
        ValueError: names both.
    """
    heads, vocabularies = (trained.weights, evaluation.weights), (trained.vocabulary, evaluation.vocabulary)
    for what, (own, evaluated) in {"head's weights": heads, "target's vocabulary": vocabularies}.items():
        if own is not None and evaluated is not None and own != evaluated:
            found = f"of {evaluation.draft} with {evaluation.model}; the {what} there are {evaluated}, and here {own}"
            raise ValueError(f"the evaluation is {found}; evaluate the head to export, or leave out --evaluation")


def export_folder(trained: Trained, given: ExportSettings, evaluation: Evaluation | None, notes: str | None) -> None:
    """Write config.json, model.safetensors and a model card, in the official layout of the head's kind or speculators'.

    Raises:
        ValueError: the evaluation is of another head, or with another target; or the head has a setting that the layout
            cannot express.
    """
    if evaluation is not None:
        check_evaluated(trained, evaluation)
    base, folder, dtype = given.base_model or trained.target, given.out, DTYPES[given.dtype]
    # None stands for settings of other kinds of heads.
    recipe = {name: value for name, value in trained.recipe.items() if value is not None}
    if recipe and base is not None:
        recipe["target"] = base
    kind, head = trained.kind, trained.head
    settings: dict[str, Any] = {"torch_dtype": str(dtype).removeprefix("torch.")}
    if recipe:
        settings["training"] = recipe
    if given.layout == "speculators":
        config, tensors = kind.files.speculators(head, base)
        write_head(folder, {**config, **settings}, tensors, dtype)
    else:
        kind.files.save(head, folder, {"architectures": [kind.architecture], **settings}, dtype)
    name = folder.resolve().name
    card = model_card(name, kind, head, recipe, base, given.licence, evaluation, notes, given.layout)
    (folder / "README.md").write_text(card, encoding="utf-8")
