"""A trained head to a folder that can be published: official EAGLE or EAGLE-3 layout, and a model card.

    python -m specdec.train_eagle.export --draft HEAD --out FOLDER --evaluation evaluation.json
    python -m specdec.train_eagle.export --run HEAD/run --out FOLDER --dtype float32

HEAD has the best head of a training run, in bfloat16; HEAD/run the last one, in float32.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec.draft_heads.formats.eagle3_checkpoint import build_eagle3_head
from specdec.draft_heads.formats.eagle_checkpoint import build_eagle_head
from specdec.draft_heads.formats.head_description import HeadDescription, Source
from specdec.draft_heads.formats.recogniser import recognise
from specdec.draft_heads.heads.draft_head import TargetParts
from specdec.draft_heads.heads.eagle import EagleHead
from specdec.draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, error_context, read_config, read_tensors
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.kernels.kernel_set import torch_kernels
from specdec.kernels.linear import Projection
from specdec.models.llama import LlamaModel
from specdec.train_eagle.evaluation import Evaluation
from specdec.train_eagle.model_card import ModelCard
from specdec.train_eagle.new_head import new_eagle3_head, new_eagle_head
from specdec.train_eagle.save_head import save_head
from specdec.verify.noise import GumbelNoise

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# vLLM and SGLang choose a class by these. Of EAGLE-3 both know the second; of EAGLE-1/2 vLLM knows the official name
# alone, and SGLang one of its own, whose class has an fc.bias that nothing would fill.
ARCHITECTURES = {EagleHead: "LlamaForCausalLM", Eagle3Head: "LlamaForCausalLMEagle3"}


class Trained(NamedTuple):
    """A head and where it comes from.

    Attributes:
        head: float32, on the CPU.
        recipe: how it was trained, as far as that is known.
        target: name or path of its target, if that is known.
    """

    head: EagleHead | Eagle3Head
    recipe: dict[str, Any]
    target: str | None


def from_run(folder: Path, target: Path | None = None) -> Trained:
    """The last head of a training run.

    Args:
        folder: the run's, OUT/run.
        target: checkpoint folder of its target; None for where it was when the run began.

    Raises:
        ValueError: there is no run or no such target.
    """
    file = folder / "training_state.pt"
    if not file.is_file():
        raise ValueError(f"{folder}: no training_state.pt; give the folder `run` in what train wrote, or --draft")
    try:
        kept = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        settings, tensors, step = dict(kept["settings"]), kept["head"], kept["step"]
        named = settings.pop("model")
    except Exception as error:  # pickle and zip raise many kinds
        raise ValueError(f"{file}: not a training state: {str(error).splitlines()[0]}; train again") from None
    target = target or Path(named)
    if not target.is_dir():
        raise ValueError(f"{target}: the run's target is not here; give its folder by --model")
    with error_context(target):
        sizes = LlamaConfig.from_json(read_config(target))
    try:
        with torch.device("meta"):
            model = LlamaModel(sizes)
            is_eagle3 = "draft_tokens" in tensors
            head = new_eagle3_head(model, tensors["draft_tokens"]) if is_eagle3 else new_eagle_head(model)
        head.load_state_dict(tensors, assign=True)
    except (RuntimeError, IndexError):
        raise ValueError(f"{file}: not of a head for {target}; give the run's own target by --model") from None
    recipe = {name: value for name, value in settings.items() if name != "data"}
    return Trained(head.float(), {**recipe, "steps": step}, str(target))


def from_folder(folder: Path, target: Path | None = None) -> Trained:
    """A head in a folder.

    Args:
        target: checkpoint folder of its target, where config.json leaves open which of its layers the head reads.

    Raises:
        ValueError: there is no head, or one that the official layout has no place for.
    """
    settings = read_config(folder)
    with error_context(folder):
        found = recognise(settings, read_tensors(folder))
        found.check()
        head = _eagle(found) if found.taps is None else _eagle3(found, target)
    named = found.verifier or (None if target is None else str(target))
    return Trained(head, dict(settings.get("training") or {}), named)


def _eagle(found: HeadDescription) -> EagleHead:
    if found.embedding != Source.FILE:
        raise CheckpointError("it has no embedding; the official layout of EAGLE-1/2 asks for one")
    if found.output != Source.TARGET or found.tokens is not None:
        raise CheckpointError(
            "it has an output matrix of its own; the official layout of EAGLE-1/2 has no place for one"
        )
    embedding, device = found.tensors.by_name["embed_tokens.weight"], torch.device("cpu")
    return build_eagle_head(found, embedding, torch.float32, device, torch_kernels(GumbelNoise(device)))


def _eagle3(found: HeadDescription, target: Path | None) -> Eagle3Head:
    taps, sizes = found.taps, found.config
    assert taps is not None
    assert isinstance(sizes, Eagle3Config)
    llama = sizes.llama
    if found.output != Source.FILE:
        raise CheckpointError("it has no output matrix; the official layout of EAGLE-3 asks for one")
    if found.embedding == Source.FILE and llama.hidden_size == sizes.target_hidden_size:
        raise CheckpointError("it has an embedding of its own; the official layout of EAGLE-3 takes the target's")
    if target is not None:
        with error_context(target):
            layers = taps.of(LlamaConfig.from_json(read_config(target)).num_layers)
        if layers.others:
            raise CheckpointError("config.json leaves open how it counts the layers it reads; give both countings")
        read = layers.layers
    elif taps.ids is not None and taps.settled_by:
        read = taps.ids
    else:
        raise CheckpointError("config.json leaves open which layers it reads; give the folder of its target by --model")
    # Nothing of the target is written, so nothing of it is needed.
    device, nothing = torch.device("cpu"), torch.zeros(1).expand(llama.vocab_size, llama.hidden_size)
    parts = TargetParts(nothing, Projection(nothing), 0)
    return build_eagle3_head(found, read, parts, torch.float32, device, torch_kernels(GumbelNoise(device)))


def export(trained: Trained, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors in the official layout of the head's kind.

    Raises:
        ValueError: the head has what that layout cannot say.
    """
    head = trained.head
    names = [ARCHITECTURES[type(head)]]
    settings: dict[str, Any] = {"architectures": names, "torch_dtype": str(dtype).removeprefix("torch.")}
    if trained.recipe:
        settings["training"] = trained.recipe
    save_head(head, folder, settings, dtype)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, help="folder of a training run's state, HEAD/run")
    source.add_argument("--draft", type=Path, help="folder of a head")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--model", type=Path, help="checkpoint folder of the target; default: what the run says")
    parser.add_argument("--evaluation", type=Path, help="evaluation.json, for the model card")
    parser.add_argument("--base-model", help="name of the target in the model card; default: its folder")
    parser.add_argument("--licence", help="of the head, for the model card")
    parser.add_argument("--notes", type=Path, help="Markdown for the model card, such as about the data")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of the weights")
    args = parser.parse_args(words)
    try:
        evaluation = Evaluation.read(args.evaluation) if args.evaluation else None
        notes = _text(args.notes) if args.notes else None
        trained = from_run(args.run, args.model) if args.run else from_folder(args.draft, args.model)
        export(trained, args.out, DTYPES[args.dtype])
    except ValueError as error:
        parser.exit(2, f"export: {error}\n")
    base = args.base_model or trained.target
    card = ModelCard(args.out.resolve().name, trained.head, trained.recipe, base, args.licence, evaluation, notes)
    (args.out / "README.md").write_text(card.text(), encoding="utf-8")
    print(f"config.json, model.safetensors and README.md in {args.out}")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read: {error}; give a Markdown file") from None


if __name__ == "__main__":
    main()
