"""Answers of the target to conversations, turn by turn, with every seat of the engine in use."""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from specdec.building.resolved_config import resolved_config
from specdec.cli.model_options import ModelOptions
from specdec.config import EngineConfig
from specdec.core.commands import Abort
from specdec.core.outputs import SpeculationStats
from specdec.core.progress import progress_bar
from specdec.core.request import Request, RequestGroup
from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.llama.whole_files import write_whole
from specdec.kernels.types.settings import settings_of
from specdec.llm import LLM
from specdec.models.head_fit import VOCABULARY
from specdec.models.tokenizer import vocabulary_digest
from specdec.train_eagle.data.answer_journal import AnswerJournal, AnswerRow, compare_settings
from specdec.train_eagle.data.chat_mask import BadConversation, Message
from specdec.train_eagle.data.chat_prompts import chat_prompt, with_answers
from specdec.train_eagle.data.conversations import BadData, Place, Source, open_source, read, write_conversations
from specdec.train_eagle.data.provenance import JOURNAL, journal_settings, named_digest
from specdec.train_eagle.data.stage_settings import RegenerateSettings

# Seeds of conversations are this far apart, more than any has turns.
SEED_STEP = 1000


@dataclass
class OpenConversation:
    """A conversation while it is answered.

    Attributes:
        number: number of its entry in the sources, from 0.
        messages: as `with_answers` reads them; answers take the places of the assistant's turns.
        keep_cut: whether the beginning of a longer answer counts as one.
        answers: the target's answers so far.
        problem: why it ends before the end of its last answer; None if it does not.
    """

    number: int
    place: Place
    messages: list[Message]
    keep_cut: bool = False
    answers: list[str] = field(default_factory=list)
    problem: str | None = None

    @property
    def ended(self) -> bool:
        """Return whether no answer is to come."""
        turns = sum(message["role"] == "assistant" for message in self.messages)
        return self.problem is not None or len(self.answers) == turns

    @property
    def question(self) -> list[Message]:
        """Return the messages before the next answer."""
        found: list[Message] = []
        answers = iter(self.answers)
        for message in self.messages:
            if message["role"] == "assistant":
                text = next(answers, None)
                if text is None:
                    break
                message = {"role": "assistant", "content": text}
            found.append(message)
        return found

    @property
    def answered(self) -> list[Message]:
        """Return the messages up to the last answer."""
        found = self.question
        while found and found[-1]["role"] != "assistant":
            found.pop()
        return found

    def take(self, row: AnswerRow) -> None:
        """Add an answer, or the reason that there is none; one with a reason is the beginning of a longer answer."""
        self.problem = row.problem
        if row.text is not None and (row.problem is None or self.keep_cut):
            self.answers.append(row.text)


def read_conversations(
    llm: LLM, sources: Iterable[Source], given: RegenerateSettings, bad: BadData
) -> list[OpenConversation]:
    """Return the conversations, of at most `given.limit` entries per source, whose prompts the template can render.

    The others are counted in `bad`.

    Raises:
        ValueError: a model without a chat template; a bad conversation, if `bad` is strict.
    """
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ValueError(f"{llm.config.model}: no chat template; add a chat_template.jinja to the folder")
    conversations = []
    for number, entry in enumerate(read(sources, given.limit)):
        try:
            messages = with_answers(entry)
            for i, message in enumerate(messages):
                if message["role"] == "assistant":
                    chat_prompt(llm.request_maker, messages[:i])
            conversations.append(OpenConversation(number, entry.place, messages, given.keep_cut))
        except BadConversation as error:
            bad.add(error, entry.place)
    return conversations


def settings_before_loading(
    config: EngineConfig, sources: Sequence[Source], given: RegenerateSettings
) -> dict[str, Any]:
    """Return those of `run_settings` that are known before the model is loaded."""
    return {
        "model": named_digest(config.model),
        VOCABULARY: vocabulary_digest(config.tokenizer or config.model),
        "data": hashlib.sha256(" ".join(source.digest() for source in sources).encode()).hexdigest()[:12],
        "limit": given.limit,
        "temperature": list(given.temperature),
        "max_tokens": given.max_tokens,
        "seed": given.seed,
    }


def run_settings(
    llm: LLM, sources: Sequence[Source], given: RegenerateSettings, params: SamplingParams
) -> dict[str, Any]:
    """Return what determines the answers, for the journal: drafts do so only under a rule that draws from them."""
    config = llm.config
    sampling = {name: getattr(params, name) for name, (_, facts) in settings_of(params).items() if facts.flags != ""}
    drafts = "any" if config.verify == "coupled" else f"{config.sources} {config.shape}, verified by {config.verify}"
    return {
        **sampling,
        **settings_before_loading(config, sources, given),
        "dtype": config.dtype,
        "quantization": config.quantization,
        "max_model_len": llm.max_model_len,
        "drafts": drafts,
    }


class Summary(NamedTuple):
    """Outcome of a run of the command, as lines for people."""

    lines: list[str]
    interrupted: bool


def regenerate_file(options: ModelOptions, given: RegenerateSettings) -> Summary:
    """Answer the conversations of all sources, with a progress bar, to its end or to Ctrl-C.

    Raises:
        ValueError: a source, the model or a setting is unusable; `given.out` was made with other settings; nothing is
            answered.
    """
    bad = BadData(given.strict)
    sources = [open_source(name) for name in given.data]
    config = resolved_config(options.model, options.draft, {**options.settings, "shape": options.shape})
    journal = given.out.with_name(f"{given.out.name}{JOURNAL}")
    if journal.is_file():
        compare_settings(journal, journal_settings(journal), settings_before_loading(config, sources, given))
    llm = options.load()
    conversations = read_conversations(llm, sources, given, bad)
    params = replace(options.params(llm), max_tokens=given.max_tokens, seed=given.seed)
    settings = run_settings(llm, sources, given, params)
    unusable = sum(bad.counts.values())
    run = Regeneration(llm, conversations, params, given, settings)
    earlier, interrupted = len(run.journal.rows), False
    with progress_bar(sum(not each.ended for each in conversations), "answering") as advance:
        try:
            run.run(advance)
        except KeyboardInterrupt:
            interrupted = True
    whole, part, nothing = run.count(bad)
    if not (interrupted or whole or part):
        reasons = (
            ", ".join(f"{count} {reason}" for reason, count in bad.counts.most_common()) or "there is nothing in it"
        )
        raise ValueError(f"{', '.join(given.data)}: nothing is answered: {reasons}")
    entries = f"{len(conversations) + unusable:,} conversations read"
    ends = f"{whole:,} answered, {part:,} in part, {nothing:,} not at all, {unusable:,} unusable"
    lines = [bad.table("left out")] if bad.counts else []
    cut = sum(f"--max-tokens {given.max_tokens}" in (each.problem or "") for each in conversations)
    if cut:
        remedy = "" if given.keep_cut else "; raise --max-tokens into another --out, or give --keep-cut and the same"
        lines.append(f"{cut:,} of {len(conversations):,} conversations have an answer that is cut{remedy}")
    lines.append(f"{entries}: {ends}; {whole + part:,} in {given.out}")
    if earlier:
        lines.append(f"{earlier:,} answers were on disk from an earlier run of the same command")
    if run.tokens:
        tau = f", tau {run.stats.tau:.2f} ({llm.config.tree_in_words})" if run.stats.drafted else ""
        speed = f"{run.tokens / run.seconds:,.0f} tokens/s"
        lines.append(f"{run.tokens:,} tokens in {run.seconds:,.1f} s, {speed}{tau}")
    if interrupted:
        lines.append(
            f"interrupted with {len(conversations) - whole - part - nothing:,} to go; the same command goes on"
        )
    return Summary(lines, interrupted)


class Regeneration:
    """Has the target answer conversations, and writes each answer as it ends.

    The file `out` has the ended conversations, one `{"messages": [...]}` per line: in the order of their ends while the
    run lasts, in the order of the sources afterwards. The journal beside it, `out` with ".journal", has every answer,
    and why conversations ended early. A killed run goes on after the last answer written, to the same file.

    Attributes:
        tokens, seconds: tokens generated by this process, and the time that they took.
        stats: speculation figures of these.

    Args:
        params: of all answers, but for temperature and seed.
        given: temperatures, where to write, and whether to keep the beginnings of longer answers.
        settings: what determines the answers.

    Raises:
        ValueError: `out` has been written by something else, or with other settings.
    """

    def __init__(
        self,
        llm: LLM,
        conversations: Sequence[OpenConversation],
        params: SamplingParams,
        given: RegenerateSettings,
        settings: dict[str, Any],
    ) -> None:
        self.llm, self.conversations, self.params, self.given = llm, conversations, params, given
        self.out = out = given.out
        self.tokens, self.seconds, self.stats = 0, 0.0, SpeculationStats()
        file = out.with_name(f"{out.name}{JOURNAL}")
        if out.exists() and not file.exists():
            raise ValueError(f"{out}: exists, and {file.name} is missing, so how it was made is not known; remove it")
        if not out.parent.is_dir():
            raise ValueError(f"{out}: {out.parent} is no folder; create it, or name a file elsewhere")
        self.journal = AnswerJournal(file, settings)
        by_number = {each.number: each for each in conversations}
        for row in self.journal.rows:
            by_number[row.conversation].take(row)
        self._groups: dict[Request, tuple[OpenConversation, RequestGroup]] = {}

    def run(self, advance: Callable[[], None]) -> None:
        """Answer all conversations.

        Args:
            advance: is called for each conversation that ends.
        """
        began = time.monotonic()
        self.write()
        waiting = deque(each for each in self.conversations if not each.ended)
        # The engine always has a full second set of requests to go on with, but not all of them.
        most = 2 * self.llm.config.scheduler.max_num_seqs
        try:
            while waiting or self._groups:
                while waiting and len(self._groups) < most:
                    self._ask(waiting.popleft(), advance)
                for request in self.llm.engine.step():
                    if request.finished:
                        conversation, group = self._groups.pop(request)
                        self._add(conversation, *self._outcome(group))
                        self._ask(conversation, advance)
        finally:
            for _, group in self._groups.values():
                self.llm.engine.handle(Abort(group.request_id))
            self.seconds = time.monotonic() - began
            self.write()
            self.journal.close()

    def write(self) -> None:
        """Write the ended conversations in the order of the sources."""
        rows = [each.answered for each in self.conversations if each.ended and each.answers]

        def save(new: Path) -> None:
            new.unlink(missing_ok=True)
            write_conversations(new, rows)

        write_whole(self.out, save)

    def count(self, bad: BadData) -> tuple[int, int, int]:
        """Return the numbers of conversations answered whole, in part, and not at all; the reasons go to `bad`."""
        whole = part = nothing = 0
        for each in self.conversations:
            if each.problem is None:
                whole += each.ended
                continue
            part, nothing = part + bool(each.answers), nothing + (not each.answers)
            what = "later turns" if each.answers else "conversation"
            what = "the rest" if self.given.keep_cut and each.answers else what
            bad.add(BadConversation(f"{each.problem}, {what} left out"), each.place)
        return whole, part, nothing

    def _ask(self, conversation: OpenConversation, advance: Callable[[], None]) -> None:
        """Queue the next turn of a conversation, or end it."""
        while not conversation.ended:
            try:
                group = self._request(conversation)
            except BadConversation as error:
                self._add(conversation, None, error.reason)
                continue
            (request,) = group.requests
            self._groups[request] = conversation, group
            return
        advance()
        if conversation.answers:
            write_conversations(self.out, [conversation.answered])

    def _request(self, conversation: OpenConversation) -> RequestGroup:
        """Return the request for the next answer.

        Raises:
            BadConversation: there is none.
        """
        prompt = chat_prompt(self.llm.request_maker, conversation.question)
        room = self.llm.max_model_len - len(prompt)
        if room < 1:
            raise BadConversation("prompt as long as the context")
        number = conversation.number
        params = replace(
            self.params,
            temperature=self.given.temperature[number % len(self.given.temperature)],
            max_tokens=min(self.params.max_tokens or room, room),
            seed=(self.params.seed or 0) + number * SEED_STEP + len(conversation.answers),
        )
        return self.llm.engine.handle(self.llm.request_maker.add(prompt, params))

    def _outcome(self, group: RequestGroup) -> tuple[str | None, str | None]:
        """Return the text of a finished request, and why it is no answer, or only the beginning of one."""
        output = group.output().outputs[0]
        self.tokens += len(output.token_ids)
        self.stats = SpeculationStats.total([self.stats, output.stats])
        text = output.text if output.text.strip() else None
        if output.finish_reason == "length":
            is_cut = len(output.token_ids) == self.params.max_tokens
            limit = f"--max-tokens {self.params.max_tokens}" if is_cut else "the context"
            # Kept in the journal in any case, so that the same command can take it up with --keep-cut later.
            return text, f"answer longer than {limit}"
        if output.finish_reason != "stop":
            return None, "answer failed in the engine"
        return text, "answer is empty" if text is None else None

    def _add(self, conversation: OpenConversation, text: str | None, problem: str | None) -> None:
        row = AnswerRow(conversation=conversation.number, turn=len(conversation.answers), text=text, problem=problem)
        self.journal.add(row)
        conversation.take(row)
