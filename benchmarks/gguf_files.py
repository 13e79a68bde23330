"""Write the checkpoints that `peers.sh` measures, and the same weights as GGUF for llama.cpp.

    python -m benchmarks.gguf_files FOLDER --llama-cpp SOURCE

SOURCE is llama.cpp's source folder, whose converter writes the files (it needs `sentencepiece`); the source package of
llama-cpp-python holds it under vendor/llama.cpp. Written: FOLDER/wide, FOLDER/smollm2, FOLDER/smollm2-{q4_1,q8_0}.gguf
and, in bfloat16 and float16, FOLDER/gguf/NAME-TYPE.gguf and FOLDER/gguf/NAME-eagle3-TYPE.gguf. Files that are there are
kept.

llama.cpp forbids end tokens where it is told to ignore them, which changes the text. In the files of the demo and of
its widened twin the end token is therefore an ordinary one, with a text that llama.cpp does not take for an end.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.smollm2 import smollm2, smollm2_gguf
from benchmarks.widen import Sizes, widen
from specdec.config import DEMO

TYPES = ("bf16", "f16")
# The converter knows tokenizers by a hash; the demo's splits text as GPT-2's does.
CONVERTER = """
import runpy, sys
sys.path[:0] = [{source!r}, {source!r} + "/gguf-py"]
from conversion.base import TextModel
known = TextModel.get_vocab_base_pre
def get_vocab_base_pre(self, tokenizer):
    try:
        return known(self, tokenizer)
    except NotImplementedError:
        return "gpt-2"
TextModel.get_vocab_base_pre = get_vocab_base_pre
runpy.run_path({source!r} + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def convert(source: Path, checkpoint: Path, file: Path, dtype: str, target: Path | None = None) -> None:
    """Have llama.cpp's converter write `file`; `target` is the folder of the model that a head belongs to."""
    if file.exists():
        return
    of_target = ["--target-model-dir", str(target)] if target else []
    command = [sys.executable, "-c", CONVERTER.format(source=str(source)), str(checkpoint), *of_target]
    quiet = {**os.environ, "TQDM_DISABLE": "1"}
    subprocess.run([*command, "--outtype", dtype, "--outfile", str(file)], check=True, env=quiet)


def without_end(target: Path, folder: Path) -> Path:
    """Copy a demo checkpoint so that its end token is an ordinary one and no token that it writes ends a text."""
    shutil.copytree(target, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    text = tokenizer["added_tokens"][1]["content"]
    tokenizer["added_tokens"][1].update(content="<turn>", special=False)
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["<turn>"] = vocabulary.pop(text)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        if "eos_token_id" in settings:
            settings["eos_token_id"] = 4  # the mark of a system message, which no answer holds
        if "eos_token" in settings:
            settings["eos_token"] = "<|system|>"
        (folder / name).write_text(json.dumps(settings))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where everything is written; 4 GB")
    parser.add_argument("--llama-cpp", type=Path, required=True, help="llama.cpp's source folder")
    arguments = parser.parse_args()
    folder, source = arguments.folder, arguments.llama_cpp.resolve()
    files = folder / "gguf"
    files.mkdir(parents=True, exist_ok=True)
    if not (folder / "wide").exists():
        widen(folder / "wide", Sizes())
    smollm2(folder / "smollm2")
    smollm2_gguf(folder / "smollm2-q4_1.gguf")
    convert(source, folder / "smollm2", folder / "smollm2-q8_0.gguf", "q8_0")
    for dtype in TYPES:
        convert(source, folder / "smollm2", files / f"smollm2-{dtype}.gguf", dtype)
    for name, parent in (("wide", folder / "wide"), ("demo", DEMO)):
        with tempfile.TemporaryDirectory() as copies:
            target = without_end(parent / "target", Path(copies) / "target")
            for dtype in TYPES:
                convert(source, target, files / f"{name}-{dtype}.gguf", dtype)
                convert(source, parent / "eagle3", files / f"{name}-eagle3-{dtype}.gguf", dtype, target)


if __name__ == "__main__":
    main()
