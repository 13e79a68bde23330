"""Write a tiny model of random weights and its head: python -m tests.frameworks.save_model FOLDER."""

import sys
from pathlib import Path

from tests.fakes import edit_json
from tests.specdec.tiny_checkpoints import save_tiny

# Tokens are characters, and schemas of frameworks are long.
CONTEXT = 8192

if __name__ == "__main__":
    tiny = save_tiny(Path(sys.argv[1]))
    for folder in (tiny.target, tiny.head):
        edit_json(folder / "config.json", max_position_embeddings=CONTEXT)
