"""A recorded trace of a chat service: arrivals, lengths and shared prefixes of its requests.

    python -m benchmarks.recorded_trace FILE

cuts the committed excerpt from the published file; `traces/README.md` names its source and licence. The text of
requests is not published: a prompt is the hashes of its blocks of 512 tokens, of which equal ones are equal from the
beginning of the prompt on.
"""

import argparse
import gzip
import json
from itertools import islice
from pathlib import Path

from benchmarks.arrival_trace import TracedRequest

TRACE = Path(__file__).parent / "traces" / "mooncake-conversation-2000.jsonl.gz"
REQUESTS, BLOCK = 2000, 512


def read(file: Path = TRACE, scale: int = 1, longest: int | None = None) -> list[TracedRequest]:
    """Return the requests, in order.

    Args:
        scale: divides lengths of prompts and outputs, and with them the tokens of a block.
        longest: leave out requests of more tokens, output included; None for none.
    """
    found = []
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for each in map(json.loads, lines):
            size, answer = max(1, each["input_length"] // scale), max(1, each["output_length"] // scale)
            if longest is None or size + answer <= longest:
                blocks = tuple(map(str, each["hash_ids"][: size // (BLOCK // scale)]))
                found.append(TracedRequest(each["timestamp"] / 1000, size, answer, blocks))
    return found


def cut(published: Path, excerpt: Path = TRACE) -> None:
    """Write the first requests of the published trace, unchanged, with the same bytes each time."""
    with published.open(encoding="utf-8") as lines:
        text = "".join(islice(lines, REQUESTS))
    excerpt.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="conversation_trace.jsonl")
    cut(parser.parse_args().file)
