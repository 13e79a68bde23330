"""Engines at the shape of Llama-3.1-8B whose steps are timed, with a forced number of accepted drafts.

Weights are random, so the tokens mean nothing. A verifier does all its work and is then overruled, which fixes how many
drafts are accepted.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.cycle_sizes import MODES, STEPS_BEFORE, Sizes
from specdec import DraftShape, SamplingParams
from specdec.building.engine_builder import EngineBuilder
from specdec.config import EngineConfig
from specdec.core.device import name_of
from specdec.core.request import Request
from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.draft_heads.heads.eagle import EagleConfig, EagleHead
from specdec.draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.engine.request_maker import RequestMaker
from specdec.kernels.kernel_set import choose_kernels
from specdec.kernels.reference.projection import Projection
from specdec.kernels.triton.walks import outcome_of
from specdec.kernels.types.draft_trees import WalkOutcome
from specdec.kernels.types.types import Walk
from specdec.kernels.types.upload import Packet, upload
from specdec.models.generation_config import GenerationConfig
from specdec.models.llama import LlamaModel, LlamaWeights
from specdec.parallel.ranks import Ranks
from specdec.scheduling.scheduler_config import SchedulerConfig
from specdec.text.detokenizer import Detokenizer
from specdec.verify.sampling import Sampling


def random_weights(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give a module random weights, in place of a checkpoint's."""
    module.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)
    module.requires_grad_(False).eval()


class Engines:
    """One target without a head and with one head at a time, each with CUDA graphs and without.

    A GPU of 80 GB has no room for the caches of more.

    Attributes:
        plain, eagle: engines by mode.
        forced: verifiers by mode.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.kernels = choose_kernels("triton", device, sizes.dtype)
        with torch.device("meta"):
            weights = LlamaWeights(LlamaConfig.from_json(sizes.model))
        random_weights(weights, sizes.dtype, device)
        self.target = LlamaModel(weights, self.kernels)
        depth, branching, nodes = sizes.shape
        rows = sizes.batches[-1]
        length = sizes.longest + nodes
        entry = (
            2 * sizes.model["head_dim"] * sizes.model["num_key_value_heads"] * (1 + sizes.model["num_hidden_layers"])
        )
        self.config = EngineConfig(
            dtype=name_of(sizes.dtype),
            device=str(device),
            shape=DraftShape(depth, branching, nodes),
            scheduler=SchedulerConfig(
                max_num_seqs=rows,
                max_num_batched_tokens=max(2048, rows * (1 + nodes)),
                adaptive_drafts=False,
                prefill_stretch=0,
            ),
            max_model_len=min(length, sizes.model["max_position_embeddings"]),
            kv_cache_memory=(entry + sizes.model["hidden_size"]) * sizes.dtype.itemsize * rows * (length + 64),
            enable_prefix_caching=False,
        )
        self.plain = {mode: self._build(mode, None) for mode in MODES}
        self.eagle: dict[str, Any] = {}
        self.forced: dict[str, Forced] = {}

    def _build(self, mode: str, drafts: DraftModel | None) -> Any:
        config = replace(self.config, enforce_eager=mode == "eager")
        longest = config.context(self.target.config.max_position)
        requests = RequestMaker(config, self.target.config, None, GenerationConfig(frozenset(), {}), longest)
        return EngineBuilder(config, self.target, drafts, self.kernels, Ranks(), requests).build()

    def use(self, kind: str) -> None:
        """Have a head of random weights, of EAGLE-1's shape or of EAGLE-3's; the one before is gone."""
        self.eagle, self.forced = {}, {}
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        sizes, vocab = self.sizes, len(self.target.embed_tokens.weight)
        llama = LlamaConfig.from_json({**sizes.model, "num_hidden_layers": 1})
        with torch.device("meta"):
            eagle = EagleHead(EagleConfig(llama, True))
            eagle3 = Eagle3Head(Eagle3Config(llama, sizes.taps, llama.hidden_size, sizes.draft_vocab))
        head = eagle if kind == "eagle" else eagle3
        random_weights(head, sizes.dtype, self.device)
        readout = MatrixReadout(self.target.output, vocab)
        if head is eagle3:
            chosen = torch.randperm(vocab, device=self.device)[: sizes.draft_vocab].sort().values
            eagle3.draft_tokens.copy_(chosen)
            readout = MatrixReadout(Projection(eagle3.lm_head.weight), vocab, eagle3.draft_tokens)
        drafts = DraftModel(head.form(self.kernels), readout)
        for mode in MODES:
            engine = self.eagle[mode] = self._build(mode, drafts)
            self.forced[mode] = engine.worker.verifier = Forced(engine.worker.verifier)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that every step reads: all but the embedding, of which it reads a few rows."""
        total = sum(parameter.nbytes for parameter in self.target.weights.parameters())
        return total - self.target.embed_tokens.weight.nbytes

    @property
    def entry_bytes(self) -> int:
        """Keys and values of a token."""
        sizes = self.sizes.model
        numbers = 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]
        return int(numbers) * self.sizes.dtype.itemsize

    @contextmanager
    def decoding(self, engine: Any, batch: int) -> Iterator[None]:
        """Have `batch` requests behind their prompts meanwhile."""
        chance = random.Random(0)
        requests = [request_of(chance, index, self.sizes) for index in range(batch)]
        try:
            for request in requests:
                engine.scheduler.add(request)
            while any(request.num_output == 0 for request in requests):
                engine.step()
            for _ in range(STEPS_BEFORE):
                engine.step()
            yield
            assert not any(request.finished for request in requests), "a request has ended that is timed"
        finally:
            # Also where memory was too small, as smaller batches are still to be measured.
            for request in requests:
                engine.scheduler.abort(request)

    def steps(self, engine: Any, batch: int) -> tuple[list[float], list[float]]:
        """Seconds of steps of `batch` requests behind their prompts, and of the target's passes in them."""
        sizes, prepare, passes = self.sizes, engine.worker.runner.prepare, list[float]()

        def timed_pass(*arguments: Any) -> Any:
            run = prepare(*arguments)

            def pass_of(tokens: Any = None) -> Any:
                logits, seconds = timed(self.device, lambda: run(tokens))
                passes.append(seconds)
                return logits

            return pass_of

        with self.decoding(engine, batch):
            whole = step_times(engine, sizes.steps)
            engine.worker.runner.prepare = timed_pass
            try:
                for _ in range(sizes.steps):
                    engine.step()
            finally:
                engine.worker.runner.prepare = prepare
        return whole, passes


class Forced:
    """A verifier that does its work, and then says that `accepted` drafts in a row were right.

    On a device they are found there, as a walk is: the host does not wait for them.
    """

    def __init__(self, verifier: Any) -> None:
        self.verifier, self.accepted = verifier, 0

    def prepare(self, trees: Any, contexts: Sequence[Any], packet: Packet) -> Any:
        walk = self.verifier.prepare(trees, contexts, packet)

        def overruled(logits: Tensor) -> WalkOutcome:
            outcome = walk(logits)
            return outcome if outcome.walk is None else outcome_of(self.forced(outcome.walk, trees), trees)

        return overruled

    def forced(self, walk: Walk, trees: Any) -> Walk:
        """Return a walk down the last of the deepest nodes that may be accepted."""
        _, parents, depths, *_ = trees.batch.table
        most = min(self.accepted, walk.paths.shape[1])
        places = torch.arange(depths.shape[1], device=depths.device)
        sizes = upload(trees.batch.sizes, places.device)[:, None]
        node = torch.where((depths <= most) & (places < sizes), places, -1).amax(1, keepdim=True)
        lengths = torch.where(node >= 0, depths.gather(1, node.clamp_min(0)), 0)[:, 0]
        path = [node]
        for _ in range(max(most - 1, 0)):
            path.append(torch.where(path[-1] >= 0, parents.gather(1, path[-1].clamp_min(0)), -1))
        # From the deepest node upwards, and roots last.
        paths = torch.full_like(walk.paths, -1)
        if most:
            upwards = torch.cat(path[::-1], 1)
            shift = (torch.arange(most, device=places.device) + (most - lengths)[:, None]).clamp_max(most - 1)
            paths[:, :most] = upwards.gather(1, shift)
        return Walk(paths, lengths, torch.ones_like(walk.next_tokens))


def request_of(chance: random.Random, index: int, sizes: Sizes) -> Request:
    """Return a request with a random prompt, which goes on until it is aborted."""
    return Request(
        request_id=str(index),
        token_ids=[chance.randrange(sizes.model["vocab_size"]) for _ in range(sizes.context)],
        num_prompt=sizes.context,
        params=SamplingParams(temperature=0, max_tokens=None),
        sampling=Sampling(),
        max_length=sizes.longest,
        end_tokens=frozenset(),
        detokenizer=Detokenizer(None, ()),
    )


def step_times(engine: Any, count: int) -> list[float]:
    """Return the seconds between the ends of steps, in which the device may work ahead of the host."""
    engine.step()
    times, last = list[float](), time.perf_counter()
    for _ in range(count):
        engine.step()
        times.append(time.perf_counter() - last)
        last += times[-1]
    return times


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result and the seconds until the device has computed it."""
    _wait(device)
    start = time.perf_counter()
    result = work()
    _wait(device)
    return result, time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
