"""`specdec generate`: what it prints, and what its options reach."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, DraftShape, SamplingParams
from specdec.config import CPU_SHAPE
from specdec.core.request import Request
from specdec.draft_heads.drafting.drafter import Proposal
from specdec.draft_heads.drafting.model_drafter import ModelDrafter
from specdec.engine.engine import LLMEngine
from specdec.scheduling.scheduler import Scheduler
from specdec.verify.verifier import CoupledVerifier, RejectionVerifier
from tests.command_line import Run
from tests.specdec.cli.generate_run import COMPARE_KEYS, GREEN, KEYS
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_json_tells_what_the_library_tells(run: Run, tiny: Tiny) -> None:
    result = run("Hello", "--json")
    (answer,) = result.objects
    assert (result.code, result.err, list(answer)) == (0, "", KEYS)

    llm = LLM(tiny.target, draft=None, dtype="float64", device="cpu")
    tokens = llm.chat_prompt([{"role": "user", "content": "Hello"}])
    (plain,) = llm.generate(tokens, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert answer["prompt"] == "Hello"
    assert (answer["text"], answer["token_ids"]) == (plain.text, plain.token_ids)
    assert answer["finish_reason"] == "length"
    # The first token comes from the prompt's own pass.
    assert answer["tau"] == 23 / answer["steps"]  # type: ignore[operator]
    assert sum(answer["accepted_per_depth"]) > 0  # type: ignore[call-overload]


@pytest.mark.long
def test_both_engines_of_a_comparison_share_the_memory_of_a_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shares, real = [], LLM.__init__

    def watched(llm: LLM, *args: Any, **settings: Any) -> None:
        real(llm, *args, **settings)
        shares.append((llm.config.draft is None, llm.config.gpu_memory_utilization))

    monkeypatch.setattr(LLM, "__init__", watched)
    assert run("Hello", "--compare", "--json").code == 0
    assert shares == [(False, 0.45), (True, 0.9)]
    shares.clear()
    assert run("Hello").code == 0
    assert shares == [(False, 0.9)]


@pytest.mark.long
def test_streamed_text_is_the_text_of_json(run: Run) -> None:
    (answer,) = run("Hello", "--json").objects
    result = run("Hello")
    text, _, summary = result.out.rpartition("\n\n")
    assert (result.code, result.err) == (0, "")
    assert text == answer["text"]
    assert summary.startswith("24 tokens, ")
    assert answer["tree"] == "at most 64 nodes, depth 2"
    assert f"; tau {answer['tau']:.2f} (trees of {answer['tree']}): " in summary


@pytest.mark.long
def test_all_messages_of_a_user_are_the_prompt(run: Run, tiny: Tiny, jsonl: Callable[..., Path]) -> None:
    messages = [{"role": "user", "content": text} for text in ("Hi", "Bye")]
    (answer,) = run("--prompts", jsonl({"messages": messages}), "--json").objects
    llm = LLM(tiny.target, draft=None, dtype="float64", device="cpu")
    (plain,) = llm.chat([messages], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert (answer["prompt"], answer["token_ids"]) == ("Bye", plain.token_ids)


@pytest.mark.long
def test_the_legend_stands_where_there_are_colours(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "accepted from the draft" in run("Hello").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "accepted from the draft" not in run("Hello").out


@pytest.mark.long
def test_figures_of_the_last_line_agree(run: Run, jsonl: Callable[..., Path]) -> None:
    for line in (run("Hello").out, run("--prompts", jsonl({"prompt": "Hi"}, {"prompt": "Bye"})).out):
        found = re.search(
            r"\n(\d+) tokens, [\d.]+ tok/s; tau ([\d.]+) \(trees of at most 64 nodes, depth 2\): "
            r"(\d+) tokens in (\d+) steps, (\d+) of them drafted, and "
            r"(\d+) from (?:the prompt pass|prompt passes); (?:2 of 2 )?cut at --max-tokens 24\n$",
            line,
        )
        assert found is not None
        tokens, given, steps, accepted, first = (int(found[place]) for place in (1, 3, 4, 5, 6))
        assert tokens == given + first
        assert found[2] == f"{given / steps:.2f}"
        # Each step gives a token of the target's own, unless the output ends before it.
        assert given - steps <= accepted <= given
        assert first in (1, 2)


@pytest.mark.long
def test_the_last_line_says_which_answers_were_cut(run: Run, jsonl: Callable[..., Path]) -> None:
    text = str(run("Hello", "--json").objects[0]["text"])
    assert run("Hello", "--max-tokens", 5).out.endswith("; cut at --max-tokens 5\n")
    assert "cut" not in run("Hello", "--stop", text[7:9]).out.splitlines()[-1]
    # The context has 256 tokens.
    assert run("Hello", "--raw", "--max-tokens", 1000).out.endswith("; cut as the context is full\n")
    several = run("--prompts", jsonl({"prompt": "Hello"}, {"prompt": "Bye"}), "--stop", text[7:9])
    assert several.out.endswith("; 1 of 2 cut at --max-tokens 24\n")


@pytest.mark.long
def test_a_terminal_shows_where_text_came_from(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (answer,) = run("Hello", "--json").objects
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    legend, coloured = run("Hello").out.split("\n\n", 1)
    coloured = coloured.rpartition("\n\n")[0].removesuffix("\x1b[2m")
    assert GREEN.findall(legend) == ["accepted from the draft"]
    assert GREEN.sub(r"\1", coloured) == answer["text"]
    assert len("".join(GREEN.findall(coloured))) == sum(answer["accepted_per_depth"])  # type: ignore[call-overload]
    assert GREEN.sub("", coloured)


@pytest.mark.long
def test_plain_decoding_accepts_nothing(run: Run) -> None:
    (answer,) = run("Hello", "--draft", "none", "--json").objects
    assert (answer["steps"], answer["tau"], answer["accepted_per_depth"]) == (23, 1.0, [])
    assert answer["token_ids"] == run("Hello", "--json").objects[0]["token_ids"]


@pytest.mark.long
def test_a_small_model_changes_no_token(run: Run, tiny: Tiny) -> None:
    (answer,) = run("Hello", "--compare", "--json", "--draft", tiny.target).objects
    assert answer["equal"] is True
    assert sum(answer["accepted_per_depth"]) > 0  # type: ignore[call-overload]


@pytest.mark.long
@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.8), ("--temperature", 0.8, "--seed", 3)])
def test_comparison_finds_equal_tokens(run: Run, jsonl: Callable[..., Path], sampling: tuple[object, ...]) -> None:
    result = run("--prompts", jsonl({"prompt": "Hi"}, {"prompt": "Bye"}), "--compare", "--json", *sampling)
    assert (result.code, result.err) == (0, "")
    for answer in result.objects:
        assert list(answer) == COMPARE_KEYS
        assert answer["equal"] is True
        assert answer["speedup"] == answer["tok_per_s"] / answer["plain_tok_per_s"]  # type: ignore[operator]


@pytest.mark.long
def test_comparison_for_people(run: Run) -> None:
    result = run("Hello", "--compare")
    assert re.search(
        r"; without drafts [\d.]+ tok/s, speed-up [\d.]+x, tokens equal; cut at --max-tokens 24\n$", result.out
    )


@pytest.mark.long
def test_comparison_tells_unequal_tokens(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Request.append
    # Spoils the run without drafts only: a request is told by whether its drafts were ever accepted.
    monkeypatch.setattr(
        Request,
        "append",
        lambda request, token, accepted: real(
            request, token if any(request.accepted) or request.num_output < 20 else 5, accepted
        ),
    )
    (answer,) = run("Hello", "--compare", "--json").objects
    assert answer["equal"] is False
    assert run("Hello", "--compare").out.endswith("tokens differ in 1 of 1; cut at --max-tokens 24\n")


@pytest.mark.long
@pytest.mark.parametrize("argument", [(), ("-",)])
def test_prompt_from_standard_input(run: Run, argument: tuple[str, ...]) -> None:
    (answer,) = run(*argument, "--json", stdin=io.StringIO("Hello\n")).objects
    assert answer["prompt"] == "Hello"
    assert answer["text"] == run("Hello", "--json").objects[0]["text"]


@pytest.mark.long
def test_every_kind_of_line_in_a_prompts_file(run: Run, jsonl: Callable[..., Path]) -> None:
    long = "The first is longer than the others, so that it ends its prompt last. " * 2
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    file = jsonl({"prompt": long}, "", {"turns": ["Hello", "and more"]}, {"messages": conversation})
    result = run("--prompts", file, "--json")
    assert [answer["prompt"] for answer in result.objects] == [long, "Hello", "Yes?"]
    texts = [answer["text"] for answer in result.objects]
    assert texts[:2] == [run(prompt, "--json").objects[0]["text"] for prompt in (long, "Hello")]

    blocks = re.split(r"(?:^|\n\n)\[\d/3\] .*\n", run("--prompts", file).out.rpartition("\n\n")[0])
    assert blocks[1:] == texts


@pytest.mark.long
def test_raw_leaves_the_chat_template_out(run: Run, tiny: Tiny) -> None:
    llm = LLM(tiny.target, draft=None, dtype="float64", device="cpu")
    (plain,) = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    (raw,) = run("Hello", "--raw", "--json").objects
    (chat,) = run("Hello", "--json").objects
    assert raw["token_ids"] == plain.token_ids
    assert raw["token_ids"] != chat["token_ids"]


@pytest.mark.long
def test_text_ends_before_a_stop_string(run: Run) -> None:
    text = str(run("Hello", "--json").objects[0]["text"])
    stop, other = text[7:9], "never comes"
    (answer,) = run("Hello", "--json", "--stop", stop, "--stop", other).objects
    assert answer["text"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"
    assert run("Hello", "--stop", stop).out.startswith(f"{answer['text']}\n\n")


@pytest.mark.long
def test_seed_decides_the_text(run: Run) -> None:
    texts = [run("Hello", "--json", "--temperature", 1, "--seed", seed).objects[0]["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "changed"),
    [
        ((), {}),
        (("--temperature", 0.5, "--min-p", 0.3), {"temperature": 0.5, "min_p": 0.3}),
        (("--repetition-penalty", 1.3), {"repetition_penalty": 1.3}),
        (("--presence-penalty", 1.5), {"presence_penalty": 1.5}),
        (("--frequency-penalty", -0.5), {"frequency_penalty": -0.5}),
        (("--min-tokens", 3), {"min_tokens": 3}),
        (("--bad-word", "e", "--bad-word", "th"), {"bad_words": ["e", "th"]}),
        (("--top-k", -1, "--top-p", 0.5, "--seed", 4), {"top_k": -1, "top_p": 0.5, "seed": 4}),
    ],
)
def test_sampling_options_reach_the_request(
    run: Run, monkeypatch: pytest.MonkeyPatch, args: tuple[object, ...], changed: dict[str, object]
) -> None:
    seen: list[Request] = []
    real = Scheduler.add
    monkeypatch.setattr(Scheduler, "add", lambda scheduler, one: (seen.append(one), real(scheduler, one))[1])
    assert run("Hello", *args).code == 0
    (request,) = seen
    defaults: dict[str, object] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    assert request.params == SamplingParams(**{**defaults, **changed})  # type: ignore[arg-type]


@pytest.mark.long
def test_bad_words_do_not_come(run: Run) -> None:
    free = str(run("Hello", "--json").objects[0]["text"])
    (answer,) = run("Hello", "--json", "--bad-word", free[0], "--bad-word", free[3:5]).objects
    assert free[0] not in str(answer["text"])
    assert free[3:5] not in str(answer["text"])


@pytest.mark.long
def test_nothing_ends_the_output_before_its_least_length(run: Run) -> None:
    text = str(run("Hello", "--json").objects[0]["text"])
    (short,) = run("Hello", "--json", "--stop", text[2]).objects
    (long,) = run("Hello", "--json", "--stop", text[2], "--min-tokens", 10).objects
    assert len(short["token_ids"]) <= 3  # type: ignore[arg-type]
    assert len(long["token_ids"]) > 10  # type: ignore[arg-type]
    assert str(long["text"]).startswith(text[:10])


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "verifier", "proposal", "shape"),
    [
        ((), CoupledVerifier, Proposal.COUPLED, DraftShape(2, 48, 64, CPU_SHAPE.min_reach)),
        (("--verify", "coupled", "--min-reach", 0), CoupledVerifier, Proposal.COUPLED, DraftShape(2, 48, 64)),
        (("--verify", "rejection"), RejectionVerifier, Proposal.DRAWN, DraftShape(2, 48, 64, CPU_SHAPE.min_reach)),
        (("--min-reach", 0.25, "--nodes", 7), CoupledVerifier, Proposal.COUPLED, DraftShape(2, 48, 7, 0.25)),
    ],
)
def test_acceptance_rule_and_tree_reach_the_engine(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[object, ...],
    verifier: object,
    proposal: Proposal,
    shape: DraftShape,
) -> None:
    engines: list[LLMEngine] = []
    real = LLMEngine.step
    monkeypatch.setattr(LLMEngine, "step", lambda engine: (engines.append(engine), real(engine))[1])
    result = run("Hello", "--json", "--temperature", 1, "--seed", 1, *args)
    assert (result.code, len(result.objects[0]["token_ids"])) == (0, 24)  # type: ignore[arg-type]
    engine = engines[-1]
    drafter = engine.worker.drafter
    assert isinstance(drafter, ModelDrafter)
    assert (drafter.proposal, drafter.shape) == (proposal, shape)
    assert type(engine.worker.verifier) is verifier


def test_greedy_text_is_the_same_under_every_rule(run: Run) -> None:
    (expected,) = run("Hello", "--json").objects
    (answer,) = run("Hello", "--json", "--verify", "rejection").objects
    assert answer["token_ids"] == expected["token_ids"]
