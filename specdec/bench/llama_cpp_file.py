"""The target as llama.cpp reads it."""

from pathlib import Path

from specdec.bench.peers import PeerSetup


def gguf_file(setup: PeerSetup) -> Path:
    """Return the GGUF file of the target.

    Raises:
        ValueError: none is named, or it is not there.
    """
    file = setup.settings.get("gguf")
    if file is None:
        raise ValueError(
            f"--peer {setup.label!r}: needs the target as GGUF, made by llama.cpp's convert_hf_to_gguf.py; "
            f"write {setup.label}:gguf=FILE"
        )
    if not Path(file).is_file():
        raise ValueError(f"--peer {setup.label!r}: {file}: no such file")
    return Path(file)
