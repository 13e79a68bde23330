"""The Python API: a model, its head, and prompts in."""

import itertools
import secrets
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specdec.acceptance_rule import AcceptanceRule
from specdec.block_pool import BlockPool
from specdec.config import DEMO, EngineConfig, default_shape, resolve_device, resolve_dtype
from specdec.detokenizer import Detokenizer
from specdec.draft_heads.checkpoint import load_eagle_head
from specdec.draft_heads.drafter import Drafter, DraftShape, NoDrafter
from specdec.draft_heads.eagle_drafter import EagleDrafter
from specdec.draft_heads.llama_config import LlamaConfig
from specdec.engine import LLMEngine
from specdec.generation_config import GenerationConfig
from specdec.kv_cache import KVCache, entry_bytes
from specdec.model_runner import ModelRunner
from specdec.models.llama import load_llama
from specdec.outputs import RequestOutput
from specdec.request import LogprobsMode, Request
from specdec.request_group import RequestGroup
from specdec.sampling_params import SamplingParams
from specdec.scheduler import Scheduler
from specdec.tokenizer import Tokenizer
from specdec.verify.noise import GumbelNoise
from specdec.verify.sampling import Sampling

Prompt = str | Sequence[int]


class LLM:
    """A target with a draft head.

    llm = LLM(draft="eagle")
    llm.generate(["I would like to find a restaurant."], SamplingParams(temperature=0, max_tokens=64))

    Args:
        model: checkpoint folder of the target; None for the built-in demo model.
        draft: "eagle" for the demo model's own head, a head's folder, or None for plain decoding.
        dtype: "auto", "float64", "float32", "bfloat16" or "float16".
        device: "auto", "cpu" or "cuda".
        shape: bounds of draft trees; None for the device's default.
        verify: the acceptance rule, "coupled", "rejection" or "block" (chains alone); at temperature 0 all are one.
        logprobs_mode: "raw_logprobs" of the model, or "processed_logprobs" after all parameters.
        max_num_seqs, max_num_batched_tokens, max_model_len, kv_cache_memory, block_size: as in `EngineConfig`.

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
        max_model_len: int | None = None,
        kv_cache_memory: int = 1 << 30,
        block_size: int = 16,
    ) -> None:
        rule = AcceptanceRule(verify)
        place = resolve_device(device)
        self.config = EngineConfig(
            model=DEMO / "target" if model is None else Path(model),
            draft=_draft_folder(draft, is_demo=model is None),
            dtype=resolve_dtype(dtype, place),
            device=place,
            shape=rule.shape(shape or default_shape(place)),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            kv_cache_memory=kv_cache_memory,
            block_size=block_size,
        )
        config = self.config
        self.model = load_llama(config.model, config.dtype, place)
        self.tokenizer = Tokenizer(config.model) if (config.model / "tokenizer.json").is_file() else None
        self.max_model_len = _context(config.max_model_len, self.model.config.max_position)
        self.generation_config = GenerationConfig.read(config.model)
        self.end_tokens = self.generation_config.end_tokens
        head = None
        if config.draft is not None:
            head = load_eagle_head(config.draft, self.model.embed_tokens.weight, config.dtype, place)
        llama = head.config.llama if head else None
        cache = KVCache(self._num_blocks(llama), config.block_size, self.model.config, llama, config.dtype, place)
        noise = GumbelNoise(self.model.config.vocab_size, place)
        drafter: Drafter = NoDrafter()
        if head is not None and cache.draft is not None:
            drafter = EagleDrafter(
                head, self.model.output, cache.draft, config.block_size, config.shape, noise, rule.proposal
            )
        scheduler = Scheduler(
            BlockPool(cache.num_blocks),
            config.block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.shape if head else None,
        )
        runner = ModelRunner(self.model, cache)
        self.engine = LLMEngine(scheduler, runner, cache, drafter, rule.verifier(noise), logprobs_mode)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run prompts to their end, all in one ragged batch, and return them in order.

        Args:
            prompts: strings or token-id lists.
            sampling_params: one for all, or one each.
            use_tqdm: show a progress bar where there are several prompts (the name is vLLM's).

        Raises:
            ValueError: a prompt that is empty or leaves no room for a token; nothing has run then.
        """
        groups = self._groups(prompts, sampling_params)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        hidden = not use_tqdm or len(groups) < 2 or not console.is_terminal
        with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
            task = progress.add_task("generating", total=len(groups))
            for group in self._run(groups):
                if group.finished:
                    progress.advance(task)
        return [group.output() for group in groups]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[RequestOutput]:
        """Like `generate`, but yields a request's state after each step in which it got tokens.

        `segments` of a state is what is new in it. Closing the iterator aborts what is unfinished.
        """
        for group in self._run(self._groups(prompts, sampling_params)):
            yield group.output()

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.chat_prompt(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation up to where the answer begins.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        tokenizer = self._need_tokenizer()
        if not tokenizer.has_chat_template:
            raise ValueError(f"{self.config.model}: the tokenizer has no chat template; give the prompt as it is")
        return tokenizer.encode_chat(messages)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model}: no tokenizer.json; give prompts as token ids")
        return self.tokenizer

    def _groups(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestGroup]:
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        batch: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[list-item, assignment]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self.get_default_sampling_params()] * len(batch)
        else:
            params = list(sampling_params)
        if len(params) != len(batch):
            raise ValueError(f"{len(params)} sampling_params for {len(batch)} prompts; give one, or one each")
        return [self.new_group(prompt, own) for prompt, own in zip(batch, params, strict=True)]

    def new_group(self, prompt: Prompt, params: SamplingParams) -> RequestGroup:
        """The requests of a prompt, one per sample, checked and not yet queued.

        Raises:
            ValueError: a prompt that is empty, foreign to the vocabulary, or too long; a parameter that the model
                cannot honour.
        """
        tokens = self._need_tokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)
        vocab = self.model.config.vocab_size
        if not tokens:
            raise ValueError("the prompt is empty; give at least one token")
        if bad := [token for token in tokens if not 0 <= token < vocab]:
            raise ValueError(f"prompt token {bad[0]} is outside the vocabulary of {vocab}")
        if len(tokens) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, and the context is {self.max_model_len}; shorten it"
            )
        params.check_tokens(vocab)
        for name in ("stop", "bad_words"):
            if getattr(params, name) and self.tokenizer is None:
                raise ValueError(f"{name} needs a tokenizer, and the model's folder has none; use token ids")
        longest = self.max_model_len
        if params.max_tokens is not None:
            longest = min(longest, len(tokens) + params.max_tokens)
        ends = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.end_tokens)
        backend = self.tokenizer.backend if self.tokenizer else None
        seed = secrets.randbits(63) if params.seed is None else params.seed
        group_id = str(next(self._ids))
        requests = [
            Request(
                request_id=f"{group_id}-{index}",
                token_ids=list(tokens),
                num_prompt=len(tokens),
                # The prompt is scored once.
                params=params if index == 0 else replace(params, prompt_logprobs=None),
                sampling=self._sampling(params, ends, seed, index),
                max_length=longest,
                end_tokens=ends,
                detokenizer=Detokenizer(
                    backend, params.stop_strings, params.include_stop_str_in_output, params.skip_special_tokens
                ),
            )
            for index in range(params.n)
        ]
        return RequestGroup(group_id, prompt if isinstance(prompt, str) else None, tokens, requests)

    def _sampling(self, params: SamplingParams, ends: frozenset[int], seed: int, index: int) -> Sampling:
        allowed = params.allowed_token_ids
        return Sampling(
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=tuple((params.logit_bias or {}).items()),
            allowed_token_ids=None if allowed is None else tuple(sorted(set(allowed))),
            bad_words=self.tokenizer.encode_words(params.bad_words) if self.tokenizer else (),
            min_tokens=params.min_tokens,
            end_tokens=tuple(sorted(ends)),
            seed=seed,
            sample_index=index,
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json asks for; what it leaves open is `SamplingParams`' own."""
        return SamplingParams(**self.generation_config.params)

    def _add(self, requests: list[Request]) -> None:
        """Queue all or none."""
        for index, request in enumerate(requests):
            try:
                self.engine.add_request(request)
            except ValueError:
                for queued in requests[:index]:
                    self.engine.abort(queued)
                raise

    def _run(self, groups: list[RequestGroup]) -> Generator[RequestGroup]:
        """Step until all have ended; whatever interrupts it, none is left behind."""
        owners = {request: group for group in groups for request in group.requests}
        self._add(list(owners))
        try:
            while not all(group.finished for group in groups):
                # Each group once a step, in the order of its first news.
                yield from dict.fromkeys(owners[request] for request in self.engine.step() if request in owners)
        finally:
            for request in owners:
                self.engine.abort(request)

    def _num_blocks(self, draft: LlamaConfig | None) -> int:
        config = self.config
        per_entry = entry_bytes(self.model.config, config.dtype) + (entry_bytes(draft, config.dtype) if draft else 0)
        per_block = config.block_size * per_entry
        blocks = config.kv_cache_memory // per_block
        if blocks < 1:
            raise ValueError(f"kv_cache_memory {config.kv_cache_memory} is less than one block of {per_block} bytes")
        # More than every seat at full length is never used.
        entries = self.max_model_len + (config.shape.slots if draft else 0)
        return min(blocks, config.max_num_seqs * -(-entries // config.block_size))


def _draft_folder(draft: str | Path | None, is_demo: bool) -> Path | None:
    if draft is None or draft == "none":
        return None
    if draft == "eagle":
        if not is_demo:
            raise ValueError("draft 'eagle' is the demo model's own head; give the folder of this model's, or none")
        return DEMO / "eagle"
    return Path(draft)


def _context(asked: int | None, most: int) -> int:
    if asked is not None and asked > most:
        raise ValueError(f"max_model_len {asked} is more than the model's max_position_embeddings {most}")
    return asked or most
