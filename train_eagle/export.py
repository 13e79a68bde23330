"""Export a trained head to a folder that can be published: official layout of its kind, and a model card.

    python -m specdec.train_eagle.export --draft HEAD --out FOLDER --evaluation evaluation.json
    python -m specdec.train_eagle.export --run HEAD/run --out FOLDER --dtype float32

HEAD holds the best head of a training run, in bfloat16; HEAD/run holds the last one, in float32.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec.draft_heads.formats.head_kind import HeadDescription
from specdec.draft_heads.formats.head_kinds import describe_folder
from specdec.draft_heads.heads.draft_head import FeatureHead, TargetParts
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, error_context, first_line, read_config
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.kernels.kernel_set import torch_kernels
from specdec.kernels.projection import Projection
from specdec.models.checkpoint import read_settings
from specdec.models.hub import checkpoint_path
from specdec.models.llama import LlamaModel
from specdec.train_eagle.evaluation import Evaluation
from specdec.train_eagle.model_card import model_card
from specdec.train_eagle.training_kind import TrainingKind
from specdec.train_eagle.training_kinds import TRAINING_KINDS
from specdec.train_eagle.training_state import FILE
from specdec.verify.noise import GumbelNoise

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Trained(NamedTuple):
    """A trained head and its origin.

    Attributes:
        kind: the head's kind.
        head: the head in float32 on the CPU.
        recipe: settings of its training, as far as known.
        target: name or path of its target, if known.
    """

    kind: TrainingKind[Any]
    head: FeatureHead
    recipe: dict[str, Any]
    target: str | None


def from_run(folder: Path, target: Path | None = None) -> Trained:
    """Read the last head of a training run.

    Args:
        folder: folder of the run's state, OUT/run.
        target: its target, a folder or a name on the hub; None for the one that the run used.

    Raises:
        ValueError: there is no such run or target.
    """
    file = folder / FILE
    if not file.is_file():
        raise ValueError(f"{folder}: no {FILE}; give the folder `run` in what train wrote, or --draft")
    try:
        kept = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        settings, tensors, step = dict(kept["settings"]), kept["head"], kept["step"]
        kind, named = TRAINING_KINDS[settings["head"]], settings.pop("model")
    except Exception as error:  # pickle and zip raise many exceptions
        raise ValueError(f"{file}: not a training state: {first_line(error)}; train again") from None
    target = target or Path(named)
    path = checkpoint_path(target, weights=False)
    if not path.exists():
        raise ValueError(f"{target}: the run's target is not here; give its folder by --model")
    with error_context(path):
        sizes = LlamaConfig.from_json(read_settings(path))
    try:
        with torch.device("meta"):
            head = kind.new(LlamaModel(sizes), tensors.get("draft_tokens"))
        head.load_state_dict(tensors, assign=True)
    except (RuntimeError, IndexError):
        raise ValueError(f"{file}: not of a head for {target}; give the run's own target by --model") from None
    recipe = {name: value for name, value in settings.items() if name != "data"}
    return Trained(kind, head.float(), {**recipe, "steps": step}, str(target))


def from_folder(folder: Path, target: Path | None = None) -> Trained:
    """Read a head from a folder.

    Args:
        target: its target, likewise, needed if config.json leaves open which layers the head reads.

    Raises:
        ValueError: there is no head, or one that the official layout cannot hold.
    """
    found = describe_folder(folder)
    with error_context(folder):
        found.kind.check_official(found)
        llama = replace(found.config.llama, num_layers=_num_layers(found, target))
        # Nothing of the target is written, so placeholders for its matrices do.
        device, nothing = torch.device("cpu"), torch.zeros(1).expand(llama.vocab_size, llama.hidden_size)
        parts = TargetParts(nothing, Projection(nothing), llama)
        loaded = found.kind.build(found, parts, torch_kernels(GumbelNoise(device)))
        if loaded.other is not None:
            raise CheckpointError("config.json leaves open how it counts the layers it reads; give both countings")
    head, kind = loaded.draft.head, TRAINING_KINDS[found.kind.name]
    assert isinstance(head, FeatureHead)
    named = found.settings.verifier or (None if target is None else str(target))
    return Trained(kind, head, dict(read_config(folder).get("training") or {}), named)


def _num_layers(found: HeadDescription[Any], target: Path | None) -> int:
    """Return the number of the target's layers, or without a target one that has all the layers that the head reads."""
    if target is not None:
        path = checkpoint_path(target, weights=False)
        with error_context(path):
            config = LlamaConfig.from_json(read_settings(path))
        return config.num_layers
    if found.taps is None:
        return 0
    if found.taps.ids is not None and found.taps.settled_by:
        return max(found.taps.ids)
    raise CheckpointError("config.json leaves open which layers it reads; give the folder of its target by --model")


def export(trained: Trained, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors in the official layout of the head's kind.

    Raises:
        ValueError: the head has a setting that the layout cannot express.
    """
    names = [trained.kind.architecture]
    settings: dict[str, Any] = {"architectures": names, "torch_dtype": str(dtype).removeprefix("torch.")}
    if trained.recipe:
        settings["training"] = trained.recipe
    trained.kind.files.save(trained.head, folder, settings, dtype)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, help="folder of a training run's state, HEAD/run")
    source.add_argument("--draft", type=Path, help="a head: a folder, or org/name on the hub")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--model", type=Path, help="its target, likewise; default: what the run says")
    parser.add_argument("--evaluation", type=Path, help="evaluation.json, for the model card")
    parser.add_argument("--base-model", help="name of the target in the model card; default: its folder")
    parser.add_argument("--licence", help="of the head, for the model card")
    parser.add_argument("--notes", type=Path, help="Markdown for the model card, such as about the data")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of the weights")
    args = parser.parse_args(words)
    try:
        evaluation = Evaluation.read(args.evaluation) if args.evaluation else None
        notes = _text(args.notes) if args.notes else None
        trained = from_run(args.run, args.model) if args.run else from_folder(checkpoint_path(args.draft), args.model)
        export(trained, args.out, DTYPES[args.dtype])
    except ValueError as error:
        parser.exit(2, f"export: {error}\n")
    base = args.base_model or trained.target
    name = args.out.resolve().name
    card = model_card(name, trained.kind, trained.head, trained.recipe, base, args.licence, evaluation, notes)
    (args.out / "README.md").write_text(card, encoding="utf-8")
    print(f"config.json, model.safetensors and README.md in {args.out}")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read: {error}; give a Markdown file") from None


if __name__ == "__main__":
    main()
