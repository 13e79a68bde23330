"""Share of a step that is not the models' arithmetic: scheduling, packing, verification, commit, text.

    python -m benchmarks.engine_overhead [--model FOLDER --draft FOLDER]

Only with the native kernels, whose calls hold all arithmetic of target and head: the clock runs around the calls and
around the step. Medians over the steps of all rounds; the models take turns, round by round.
"""

import argparse
import time
from statistics import median
from typing import Any

from benchmarks.report import finish, read_prompts
from specdec import LLM, SamplingParams
from specdec.bench.environment import shown_path
from specdec.engine.engine import LLMEngine
from specdec.kernels.native.library import Library

ARITHMETIC = ("pass", "draft", "draft_block", "product", "rows", "layer", "attend", "norm")


class StepClock:
    """Times of each step and of the library's calls in it, in seconds."""

    def __init__(self) -> None:
        self.steps, self.inside = list[float](), list[float]()
        self._calls = 0.0
        call, step = Library.call, LLMEngine.step

        def timed_call(library: Library, name: str, *arguments: Any) -> None:
            began = time.perf_counter()
            call(library, name, *arguments)
            if name in ARITHMETIC:
                self._calls += time.perf_counter() - began

        def timed_step(engine: LLMEngine) -> Any:
            began = time.perf_counter()
            result = step(engine)
            self.steps.append(time.perf_counter() - began)
            self.inside.append(self._calls)
            self._calls = 0.0
            return result

        for owner, name, timed in ((Library, "call", timed_call), (LLMEngine, "step", timed_step)):
            setattr(owner, name, timed)

    def clear(self) -> None:
        self.steps.clear()
        self.inside.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo")
    parser.add_argument("--draft", default="eagle")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    modes: dict[str, dict[str, Any]] = {
        "plain": {"draft": None},
        "fixed trees": {"draft": args.draft, "adaptive_drafts": False},
        "adaptive trees": {"draft": args.draft},
    }
    llms = {name: LLM(args.model, kernels="native", **settings) for name, settings in modes.items()}
    prompts = [llms["plain"].chat_prompt(messages) for messages in read_prompts("gsm8k-eval")]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    clock = StepClock()
    rows = []
    for batch in args.batches:
        steps: dict[str, list[float]] = {name: [] for name in modes}
        shares: dict[str, list[float]] = {name: [] for name in modes}
        for turn in range(args.rounds + 1):
            for name, llm in llms.items():
                clock.clear()
                llm.generate(prompts[:batch], params, use_tqdm=False)
                # The first round warms up; the first step of a round holds the prompts.
                if turn:
                    steps[name] += clock.steps[1:]
                    shares[name] += [1 - a / b for a, b in zip(clock.inside[1:], clock.steps[1:], strict=True)]
        for name in modes:
            milliseconds, share = 1e3 * median(steps[name]), median(shares[name])
            rows.append({"batch": batch, "mode": name, "step_ms": round(milliseconds, 3), "outside": round(share, 4)})
    finish("engine_overhead", {"model": shown_path(args.model or "demo")}, rows)


if __name__ == "__main__":
    main()
