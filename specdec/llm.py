"""The Python API: a model, its head, and prompts in."""

import itertools
import json
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specdec.block_pool import BlockPool
from specdec.config import DEMO, EngineConfig, default_shape, resolve_device, resolve_dtype
from specdec.detokenizer import Detokenizer
from specdec.draft_heads.checkpoint import load_eagle_head
from specdec.draft_heads.checkpoint_files import CheckpointError
from specdec.draft_heads.drafter import Drafter, DraftShape, NoDrafter
from specdec.draft_heads.eagle_drafter import EagleDrafter
from specdec.draft_heads.llama_config import LlamaConfig
from specdec.engine import LLMEngine
from specdec.kv_cache import KVCache, entry_bytes
from specdec.model_runner import ModelRunner
from specdec.models.llama import load_llama
from specdec.outputs import RequestOutput
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.scheduler import Scheduler
from specdec.tokenizer import Tokenizer
from specdec.verify.noise import GumbelNoise
from specdec.verify.verifier import CoupledVerifier

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
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        kv_cache_memory: int = 1 << 30,
        block_size: int = 16,
    ) -> None:
        place = resolve_device(device)
        self.config = EngineConfig(
            model=DEMO / "target" if model is None else Path(model),
            draft=_draft_folder(draft, is_demo=model is None),
            dtype=resolve_dtype(dtype, place),
            device=place,
            shape=shape or default_shape(place),
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
        self.end_tokens = _end_tokens(config.model)
        head = None
        if config.draft is not None:
            head = load_eagle_head(config.draft, self.model.embed_tokens.weight, config.dtype, place)
        llama = head.config.llama if head else None
        cache = KVCache(self._num_blocks(llama), config.block_size, self.model.config, llama, config.dtype, place)
        noise = GumbelNoise(self.model.config.vocab_size, place)
        drafter: Drafter = NoDrafter()
        if head is not None and cache.draft is not None:
            drafter = EagleDrafter(head, self.model.output, cache.draft, config.block_size, config.shape, noise)
        scheduler = Scheduler(
            BlockPool(cache.num_blocks),
            config.block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.shape if head else None,
        )
        runner = ModelRunner(self.model, cache)
        self.engine = LLMEngine(scheduler, runner, cache, drafter, CoupledVerifier(noise))
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
        requests = self._requests(prompts, sampling_params)
        self._add(requests)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        hidden = not use_tqdm or len(requests) < 2 or not console.is_terminal
        with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
            task = progress.add_task("generating", total=len(requests))
            for request in self._run(requests):
                if request.finished:
                    progress.advance(task)
        return [request.output() for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[RequestOutput]:
        """Like `generate`, but yields a request's state after each step in which it got tokens.

        `segments` of a state is what is new in it. Closing the iterator aborts what is unfinished.
        """
        requests = self._requests(prompts, sampling_params)
        self._add(requests)
        for request in self._run(requests):
            yield request.output()

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

    def _requests(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        batch: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[list-item, assignment]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(batch)
        else:
            params = list(sampling_params)
        if len(params) != len(batch):
            raise ValueError(f"{len(params)} sampling_params for {len(batch)} prompts; give one, or one each")
        return [self.new_request(prompt, own) for prompt, own in zip(batch, params, strict=True)]

    def new_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A request for the engine, checked and not yet queued.

        Raises:
            ValueError: a prompt that is empty, foreign to the vocabulary, or too long.
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
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the model's folder has none; use stop_token_ids")
        longest = self.max_model_len
        if params.max_tokens is not None:
            longest = min(longest, len(tokens) + params.max_tokens)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_tokens)
        backend = self.tokenizer.backend if self.tokenizer else None
        return Request(
            request_id=str(next(self._ids)),
            prompt=prompt if isinstance(prompt, str) else None,
            token_ids=tokens,
            num_prompt=len(tokens),
            params=params,
            max_length=longest,
            end_tokens=ends,
            detokenizer=Detokenizer(backend, params.stop_strings),
        )

    def _add(self, requests: list[Request]) -> None:
        """Queue all or none."""
        for index, request in enumerate(requests):
            try:
                self.engine.add_request(request)
            except ValueError:
                for queued in requests[:index]:
                    self.engine.abort(queued)
                raise

    def _run(self, requests: list[Request]) -> Generator[Request]:
        """Step until all have ended; whatever interrupts it, none is left behind."""
        try:
            while not all(request.finished for request in requests):
                yield from self.engine.step()
        finally:
            for request in requests:
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


def _end_tokens(folder: Path) -> frozenset[int]:
    """`eos_token_id` of generation_config.json, else of config.json: a number or a list."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.is_file():
            try:
                value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            except ValueError as error:
                raise CheckpointError(f"{file}: not valid JSON: {error}") from None
            if value is not None:
                return frozenset([value] if isinstance(value, int) else value)
    return frozenset()
