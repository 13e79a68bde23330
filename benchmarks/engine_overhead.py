"""Share of a step that is not the models' arithmetic: scheduling, packing, verification, commit, text.

    python -m benchmarks.engine_overhead [--model FOLDER --draft FOLDER]

Only with the native kernels, whose calls hold all arithmetic of target and head: the clock runs around the calls and
around the step. Medians over the steps of all rounds; the models take turns, round by round.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.report import finish, read_prompts
from specdec import LLM, SamplingParams
from specdec.bench.environment import shown_path
from specdec.engine.engine import LLMEngine
from specdec.kernels.native.library import Library

ARITHMETIC = ("target_pass", "draft", "product", "layer", "attend", "norm")


class StepClock:
    """Times of each step and of the library's calls in it, in seconds."""

    def __init__(self) -> None:
        self.steps, self.inside = list[float](), list[float]()
        self._calls = 0.0
        for name in ARITHMETIC:
            setattr(Library, name, self._timed(getattr(Library, name), self._add))
        LLMEngine.step = self._timed(LLMEngine.step, self._end)  # type: ignore[method-assign]

    def clear(self) -> None:
        self.steps.clear()
        self.inside.clear()

    @staticmethod
    def _timed(function: Callable[..., Any], done: Callable[[float], None]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            result = function(*args)
            done(time.perf_counter() - began)
            return result

        return run

    def _add(self, seconds: float) -> None:
        self._calls += seconds

    def _end(self, seconds: float) -> None:
        self.steps.append(seconds)
        self.inside.append(self._calls)
        self._calls = 0.0


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
