"""The Python API: a model, its head, and prompts in."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specdec.config import DEMO, DEMO_HEAD, EngineConfig, default_shape, on_device, resolve_device, resolve_dtype
from specdec.core.engine_stats import EngineStats
from specdec.core.logprobs import LogprobsMode
from specdec.core.outputs import BeamSearchOutput, RequestOutput
from specdec.core.request import RequestGroup
from specdec.core.sampling_params import BeamSearchParams, SamplingParams
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.engine.acceptance_rule import AcceptanceRule
from specdec.engine.beam_search import BeamRequest, BeamSearch, num_scored, run_searches
from specdec.engine.draft_loader import load_drafts, named_target
from specdec.engine.engine_builder import build_engine
from specdec.engine.request_maker import Prompt, RequestMaker
from specdec.engine.shared_engine import SharedEngine
from specdec.kernels.kernel_set import KernelChoice, choose_kernels
from specdec.models.generation_config import GenerationConfig
from specdec.models.llama import load_llama
from specdec.models.tokenizer import Tokenizer
from specdec.scheduling.scheduler_config import Policy, SchedulerConfig
from specdec.verify.noise import GumbelNoise


class LLM:
    """A target with a draft head.

    Calls may interleave, and may come from several threads: their requests share the engine's steps.

    llm = LLM(draft="eagle")
    llm.generate(["I would like to find a restaurant."], SamplingParams(temperature=0, max_tokens=64))

    Args:
        model: checkpoint folder of the target; None for the one that a head of speculators names, or else for the
            built-in demo model.
        draft: "eagle" for the demo model's own head, the folder of a head or of a small model with the target's
            tokenizer, "ngram" for drafts from the text itself, or None for plain decoding.
        dtype: "auto", "float64", "float32", "bfloat16" or "float16".
        device: "auto", "cpu" or "cuda".
        shape: bounds of draft trees; None for the device's default.
        verify: the acceptance rule, "coupled", "rejection" or "block" (chains alone); at temperature 0 all are one.
        logprobs_mode: "raw_logprobs" of the model, or "processed_logprobs" after all parameters.
        max_num_seqs, max_num_batched_tokens, max_num_partial_prefills, long_prefill_token_threshold,
        scheduling_policy, prefill_stretch, adaptive_drafts, watermark, max_queued_requests: as in `SchedulerConfig`.
        draft_vocab: how many tokens can be drafted, or a token map: the path of a JSON or torch file with their ids.
        max_model_len, kv_cache_memory, gpu_memory_utilization, swap_space, block_size, enable_prefix_caching, kernels,
            draft_rank, enforce_eager: as in `EngineConfig`.

    Raises:
        CheckpointError: a folder that cannot be loaded; the message names what is wrong.
        ValueError: a setting outside its range.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        shape: DraftShape | None = None,
        verify: str = "coupled",
        logprobs_mode: LogprobsMode = "raw_logprobs",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_num_partial_prefills: int = 1,
        long_prefill_token_threshold: int = 0,
        scheduling_policy: Policy = "fcfs",
        prefill_stretch: float = 1.75,
        adaptive_drafts: bool = True,
        watermark: float = 0.01,
        max_queued_requests: int | None = None,
        max_model_len: int | None = None,
        kv_cache_memory: int | None = None,
        gpu_memory_utilization: float = 0.9,
        swap_space: float = 0.0,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        kernels: KernelChoice = "auto",
        draft_vocab: int | str | Path | None = None,
        draft_rank: int | None = None,
        enforce_eager: bool = False,
    ) -> None:
        rule = AcceptanceRule(verify)
        place = resolve_device(device)
        source = _draft_source(draft, rule, is_demo=model is None)
        self.config = EngineConfig(
            model=_target_folder(source) if model is None else Path(model),
            draft=source,
            dtype=resolve_dtype(dtype, place),
            device=place,
            shape=rule.shape(shape or default_shape(place)),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_partial_prefills=max_num_partial_prefills,
                long_prefill_token_threshold=long_prefill_token_threshold,
                scheduling_policy=scheduling_policy,
                prefill_stretch=prefill_stretch,
                adaptive_drafts=adaptive_drafts,
                watermark=watermark,
                max_queued_requests=max_queued_requests,
            ),
            max_model_len=max_model_len,
            kv_cache_memory=kv_cache_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            swap_space=swap_space,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            kernels=kernels,
            draft_vocab=_draft_vocab(draft_vocab),
            draft_rank=draft_rank,
            enforce_eager=enforce_eager,
        )
        with on_device(place):
            self._load(rule, logprobs_mode)

    def _load(self, rule: AcceptanceRule, logprobs_mode: LogprobsMode) -> None:
        folder, place = self.config.model, self.config.device
        kernel_set = choose_kernels(self.config.kernels, place, self.config.dtype, GumbelNoise(place))
        self.model = load_llama(folder, self.config.dtype, place, kernel_set)
        self.tokenizer = Tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
        self.max_model_len = self.config.context(self.model.config.max_position)
        self.generation_config = GenerationConfig.read(folder)
        kept = self.generation_config.end_tokens | (self.tokenizer.special_tokens if self.tokenizer else frozenset())
        drafts = load_drafts(self.config, self.model, kernel_set, kept)
        self.engine = build_engine(self.config, self.model, drafts, kernel_set, rule, logprobs_mode)
        self._shared = SharedEngine(self.engine)
        self._requests = RequestMaker(
            self.tokenizer, self.model.config.vocab_size, self.max_model_len, self.generation_config.end_tokens, folder
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end, all in one ragged batch, and return them in order.

        Args:
            prompts: strings or token-id lists.
            sampling_params: one for all, or one each.
            use_tqdm: show a progress bar where there are several prompts (the name is vLLM's).
            priority: one each, lower ones first, under the policy "priority".
            cache_salt: only prompts of the same salt share cached beginnings.

        Raises:
            ValueError: a prompt that is empty or leaves no room for a token; nothing has run then.
            QueueFullError: more prompts than `max_queued_requests`; nothing has run then.
        """
        groups = self._groups(prompts, sampling_params, priority, cache_salt)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        hidden = not use_tqdm or len(groups) < 2 or not console.is_terminal
        with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
            task = progress.add_task("generating", total=len(groups))
            for finished in self._shared.run(groups, read=lambda group: group.finished):
                if finished:
                    progress.advance(task)
        return [group.output() for group in groups]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> Generator[RequestOutput]:
        """Like `generate`, but yields a request's state after each step in which it got tokens.

        `segments` of a state is what is new in it. Closing the iterator aborts what is unfinished.
        """
        groups = self._groups(prompts, sampling_params, priority, cache_salt)
        yield from self._shared.run(groups, RequestGroup.output)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.chat_prompt(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority, cache_salt=cache_salt)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The likeliest sequences after each prompt, all searched in one batch, without drafts.

        Tokens and scores are those of transformers' `generate` with `num_beams` of `params.beam_width`.

        Raises:
            ValueError: a prompt as in `generate`, or more beams than `max_num_seqs`; nothing has run then.
        """
        seats = self.config.scheduler.max_num_seqs
        if params.beam_width > seats:
            raise ValueError(f"beam_width is {params.beam_width}; it must be at most max_num_seqs, {seats}")
        num_ends = 0 if params.ignore_eos else len(self.end_tokens)
        step = SamplingParams(
            temperature=0,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            logprobs=num_scored(params, num_ends, self.model.config.vocab_size),
        )
        roots = [BeamRequest.root(group.requests[0]) for group in self._groups(prompts, step)]
        searches = [BeamSearch(self.engine, params, root) for root in roots]
        run_searches(self._shared, searches)
        return [search.output(self.tokenizer) for search in searches]

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation up to where the answer begins.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        tokenizer = self._requests.need_tokenizer()
        if not tokenizer.has_chat_template:
            raise ValueError(f"{self.config.model}: the tokenizer has no chat template; give the prompt as it is")
        return tokenizer.encode_chat(messages)

    def _groups(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestGroup]:
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        batch: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[list-item, assignment]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self.get_default_sampling_params()] * len(batch)
        else:
            params = list(sampling_params)
        if len(params) != len(batch):
            raise ValueError(f"{len(params)} sampling_params for {len(batch)} prompts; give one, or one each")
        priorities = [0] * len(batch) if priority is None else list(priority)
        if len(priorities) != len(batch):
            raise ValueError(f"{len(priorities)} priorities for {len(batch)} prompts; give one each")
        return [
            self.new_group(prompt, own, priority=rank, cache_salt=cache_salt)
            for prompt, own, rank in zip(batch, params, priorities, strict=True)
        ]

    def new_group(
        self, prompt: Prompt, params: SamplingParams, *, priority: int = 0, cache_salt: str | None = None
    ) -> RequestGroup:
        """The requests of a prompt, one per sample, checked and not yet queued.

        Args:
            priority: lower runs first, under the policy "priority".
            cache_salt: only requests of the same salt share cached prefixes.

        Raises:
            ValueError: a prompt that is empty, foreign to the vocabulary, or too long; a parameter that the model
                cannot honour.
        """
        return self._requests.group(prompt, params, priority, cache_salt)

    @property
    def end_tokens(self) -> frozenset[int]:
        """After which the model's output ends."""
        return self._requests.end_tokens

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json asks for; what it leaves open is `SamplingParams`' own."""
        return SamplingParams(**self.generation_config.params)

    def stats(self) -> EngineStats:
        """What has come through the engine so far, and what is in it."""
        with self._shared.turn() as engine:
            return replace(engine.scheduler.stats())


def _target_folder(draft: Path | Literal["ngram"] | None) -> Path:
    """The target where none is named."""
    own = named_target(draft) if isinstance(draft, Path) else None
    return own or DEMO / "target"


def _draft_source(draft: str | Path | None, rule: AcceptanceRule, is_demo: bool) -> Path | Literal["ngram"] | None:
    if draft is None or draft == "none":
        return None
    if draft == "ngram":
        if rule.name == "block":
            raise ValueError("verify 'block' weighs drawn drafts, draft 'ngram' draws none; use coupled or rejection")
        return "ngram"
    if draft == "eagle":
        if not is_demo:
            raise ValueError("draft 'eagle' is the demo model's own head; give the folder of this model's, or none")
        return DEMO_HEAD
    return Path(draft)


def _draft_vocab(given: int | str | Path | None) -> int | Path | None:
    """A number, however it is written, or a file."""
    try:
        return given if given is None else int(str(given))
    except ValueError:
        return Path(str(given))
