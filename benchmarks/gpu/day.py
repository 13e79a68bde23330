"""Run stages of the first day on a GPU, each in a process of its own that is stopped after nine minutes at most.

Each stage prints a table last and leaves NAME.json in the folder that the variable OUT names; in the end the logs of
all are added to its logs.tar. A stage that fails, hangs or crashes leaves them too, and the others run all the same.

    bash benchmarks/gpu_day.sh all|1|2|...|STAGE [--seconds N] [--rehearse]
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

STAGES = ("build-and-tests", "kernels", "cycle", "equality", "soak", "steps")
# Limit of a stage, how much earlier it is to end by itself, and the least that is worth a start.
STAGE_SECONDS = 540
MARGIN_SECONDS = 20
LEAST_SECONDS = 60
INTERRUPT_SECONDS = 5

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_day"
# A rehearsal interprets the kernels, on a CPU also where there is a GPU. Threads of two slow cores only wait.
REHEARSAL = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
# Lines of its log that the JSON of a stage which was stopped or crashed ends with.
LAST_LINES = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = f'"all", or some of: {", ".join(STAGES)}; or their numbers, 1 to {len(STAGES)}'
    parser.add_argument("stages", nargs="+", metavar="STAGE", help=which)
    parser.add_argument("--seconds", type=int, help="of all stages together; what one leaves is the next ones'")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU, in Triton's interpreter")
    args = parser.parse_args()
    try:
        names = chosen(args.stages)
    except ValueError as error:
        parser.error(str(error))
    if args.seconds is not None and args.seconds < LEAST_SECONDS * len(names):
        parser.error(f"--seconds {args.seconds} is less than {LEAST_SECONDS} a stage; raise it, or name fewer stages")
    out = Path(os.environ.get("OUT") or (RESULTS / "rehearsal" if args.rehearse else RESULTS)).resolve()
    out.mkdir(parents=True, exist_ok=True)
    environment = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "OUT": str(out)}
    environment |= REHEARSAL if args.rehearse else {}
    until, documents = None if args.seconds is None else time.monotonic() + args.seconds, list[dict[str, Any]]()
    for place, name in enumerate(names):
        share = STAGE_SECONDS if until is None else (until - time.monotonic()) / (len(names) - place)
        documents.append(run_stage(name, out, environment, min(STAGE_SECONDS, int(share))))
    with tarfile.open(out / "logs.tar", "a") as logs:
        for log in [out / f"{name}.log" for name in dict.fromkeys(names)]:
            logs.add(log, log.name)
            log.unlink()
    print(f"\n{'stage':18} {'status':8} {'seconds':>7}  failures")
    for document in documents:
        print(f"{document['stage']:18} {document['status']:8} {document['seconds']:7.0f}  {len(document['failures'])}")
    print(f"results: {out}")
    sys.exit(any(document["status"] != "passed" for document in documents))


def chosen(words: Sequence[str]) -> list[str]:
    """Return the names of stages, given by name, by number from 1, or by "all".

    Raises:
        ValueError: a word is none of these.
    """
    by_word = {**{str(number): name for number, name in enumerate(STAGES, 1)}, **{name: name for name in STAGES}}
    unknown = [word for word in words if word != "all" and word not in by_word]
    if unknown:
        raise ValueError(f'no stage {unknown[0]!r}; take "all", 1 to {len(STAGES)}, or one of: {", ".join(STAGES)}')
    return list(STAGES) if "all" in words else [by_word[word] for word in words]


def run_stage(name: str, out: Path, environment: dict[str, str], seconds: int) -> dict[str, Any]:
    """Run a stage and return the document that it has left as JSON, completed if it did not come to its end."""
    print(f"\n=== {name}, at most {seconds} s", flush=True)
    file, lines = out / f"{name}.json", list[str]()
    file.unlink(missing_ok=True)
    start = time.monotonic()
    with (out / f"{name}.log").open("w") as log:

        def keep(line: str) -> None:
            log.write(line)
            lines.append(line.rstrip())

        status = run_process(command_of(name, seconds), environment, seconds, keep)
    document: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"stage": name, "failures": []}
    if document.get("status") not in ("passed", "failed"):
        why = f"stopped after {seconds} s" if status is None else f"ended with exit status {status}"
        print(f"failed: {why}", flush=True)
        document |= {"status": "failed", "failures": [*document["failures"], why], "log": lines[-LAST_LINES:]}
    document["seconds"] = round(time.monotonic() - start, 1)
    file.write_text(json.dumps(document, indent=2) + "\n")
    return document


def command_of(name: str, seconds: int) -> list[str]:
    """Return the command of a stage's process."""
    return [sys.executable, "-m", "benchmarks.gpu.stage", name, str(seconds - MARGIN_SECONDS)]


def run_process(
    command: Sequence[str], environment: Mapping[str, str], seconds: float, keep: Callable[[str], None]
) -> int | None:
    """Run a command in the repository's root, print its output, and return its exit status; None if it was stopped.

    Args:
        environment: variables beside this process's own.
        seconds: time after which the process, with all that it has started, is stopped.
        keep: is called with each line of output.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    with _stopped_after(process, seconds) as was_stopped:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            keep(line)
        status = process.wait()
    return None if was_stopped.is_set() else status


@contextmanager
def _stopped_after(process: subprocess.Popen[str], seconds: float) -> Iterator[threading.Event]:
    """End a process, which leads a session, with all that it has started, after some seconds or at an interrupt.

    Yields:
        an event that is set when the seconds were over.
    """
    over = threading.Event()

    def end(kind: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, kind)

    def stop() -> None:
        over.set()
        end(signal.SIGKILL)

    timer = threading.Timer(seconds, stop)
    timer.start()
    try:
        yield over
    except BaseException:
        # A stage is told first, as its tools lead sessions of their own.
        end(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPT_SECONDS)
        end(signal.SIGKILL)
        raise
    finally:
        timer.cancel()


if __name__ == "__main__":
    main()
