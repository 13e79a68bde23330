"""The engine's step at the shape of Llama-3.1-8B: plain, and with a forced number of accepted drafts.

A part of `benchmarks.gpu`. Weights are random, so the tokens mean nothing. A verifier does all its work and is then
overruled, which fixes how many drafts are accepted. Times are medians of steps; the kinds of steps take turns. c is the
time of a speculative step over that of a plain step. The bound is the time in which a plain copy reads and writes as
many bytes as a step must read of weights and cached entries. The plain step is compared with transformers' `generate`
at the same batch and context.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

# Whatever brings Triton, transformers too, is imported late: it asks then whether it is to interpret its kernels.

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
TINY_LLAMA = {
    **LLAMA_8B,
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
STEPS_BEFORE = 3
HEADS = ("eagle", "eagle3")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of the run.

    Attributes:
        model: as in a config.json.
        batches: requests at once; the last is the largest.
        context: tokens of each prompt.
        shape: depth, branching, nodes.
        accepted: drafts of a step, by force.
        taps: layers that an EAGLE-3 head reads.
        draft_vocab: tokens that it proposes.
        steps: timed of each kind and round.
        peer_tokens: that transformers generates.
    """

    model: dict[str, Any]
    dtype: torch.dtype
    batches: tuple[int, ...]
    context: int
    shape: tuple[int, int, int]
    accepted: tuple[int, ...]
    rounds: int
    steps: int
    peer_tokens: int
    taps: tuple[int, ...]
    draft_vocab: int

    @property
    def longest(self) -> int:
        """Tokens that a request may come to while it is timed twice."""
        return self.context + (STEPS_BEFORE + 2 * self.steps + 2) * (1 + self.shape[0])


FULL = Sizes(LLAMA_8B, torch.bfloat16, (1, 4, 16, 64), 1024, (6, 10, 60), (0, 2, 4), 3, 12, 24, (2, 16, 29), 32000)
# Triton's interpreter is wrong about bfloat16.
TINY = Sizes(TINY_LLAMA, torch.float32, (2,), 9, (2, 2, 4), (0, 1), 1, 2, 3, (0, 1, 2), 40)


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
    """One target without a head and with one at a time, as three caches of a large batch are too much for a GPU."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        from specdec import DraftShape
        from specdec.config import EngineConfig
        from specdec.core.device import name_of
        from specdec.draft_heads.llama.llama_config import LlamaConfig
        from specdec.engine.engine_builder import EngineBuilder
        from specdec.kernels.kernel_set import choose_kernels
        from specdec.kernels.linear import prepare_for_inference
        from specdec.models.llama import LlamaModel
        from specdec.scheduling.scheduler_config import SchedulerConfig
        from specdec.verify.noise import GumbelNoise

        self.sizes, self.device = sizes, device
        self.kernels = choose_kernels("triton", device, sizes.dtype, GumbelNoise(device))
        with torch.device("meta"):
            self.target = LlamaModel(LlamaConfig.from_json(sizes.model))
        random_weights(self.target, sizes.dtype, device)
        prepare_for_inference(self.target, self.kernels)
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
        self.plain = EngineBuilder(self.config, self.target, None, self.kernels).build()
        self.eagle: Any = None

    def use(self, kind: str) -> None:
        """Have a head of random weights, of EAGLE-1's shape or of EAGLE-3's; the one before is gone."""
        from specdec.draft_heads.heads.draft_head import DraftModel
        from specdec.draft_heads.heads.eagle import EagleConfig, EagleHead
        from specdec.draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head
        from specdec.draft_heads.heads.readout import MatrixReadout
        from specdec.draft_heads.llama.llama_config import LlamaConfig
        from specdec.engine.engine_builder import EngineBuilder
        from specdec.kernels.linear import prepare_for_inference
        from specdec.kernels.projection import Projection

        self.eagle = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        sizes, vocab = self.sizes, len(self.target.embed_tokens.weight)
        llama = LlamaConfig.from_json({**sizes.model, "num_hidden_layers": 1})
        with torch.device("meta"):
            eagle = EagleHead(EagleConfig(llama, True))
            eagle3 = Eagle3Head(Eagle3Config(llama, sizes.taps, llama.hidden_size, sizes.draft_vocab))
        head = eagle if kind == "eagle" else eagle3
        random_weights(head, sizes.dtype, self.device)
        prepare_for_inference(head, self.kernels)
        readout = MatrixReadout(self.target.output, vocab)
        if head is eagle3:
            chosen = torch.randperm(vocab, device=self.device)[: sizes.draft_vocab].sort().values
            eagle3.draft_tokens.copy_(chosen)
            readout = MatrixReadout(Projection(eagle3.lm_head.weight), vocab, eagle3.draft_tokens)
        drafts = DraftModel(head, readout)
        self.eagle = EngineBuilder(self.config, self.target, drafts, self.kernels).build()
        self.forced = Forced(self.eagle.worker.verifier)
        self.eagle.worker.verifier = self.forced

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that every step reads: all but the embedding, of which it reads a few rows."""
        total = sum(parameter.nbytes for parameter in self.target.parameters())
        return total - self.target.embed_tokens.weight.nbytes

    @property
    def entry_bytes(self) -> int:
        """Keys and values of a token."""
        sizes = self.sizes.model
        numbers = 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]
        return int(numbers) * self.sizes.dtype.itemsize

    def steps(self, engine: Any, batch: int) -> tuple[list[float], list[float]]:
        """Seconds of steps of `batch` requests behind their prompts, and of the target's passes in them."""
        chance, sizes = random.Random(0), self.sizes
        requests = [_request(chance, index, sizes) for index in range(batch)]
        for request in requests:
            engine.add_request(request)
        while any(request.num_output == 0 for request in requests):
            engine.step()
        for _ in range(STEPS_BEFORE):
            engine.step()
        forward, passes = engine.worker.runner.forward, list[float]()

        def timed(*arguments: Any) -> Any:
            logits, seconds = self._timed(lambda: forward(*arguments))
            passes.append(seconds)
            return logits

        whole = [self._timed(engine.step)[1] for _ in range(sizes.steps)]
        engine.worker.runner.forward = timed
        for _ in range(sizes.steps):
            engine.step()
        del engine.worker.runner.forward
        assert not any(request.finished for request in requests), "a request has ended that is timed"
        for request in requests:
            engine.abort(request)
        return whole, passes

    def _timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        self._wait()
        start = time.perf_counter()
        result = work()
        self._wait()
        return result, time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def copy_bandwidth(self) -> float:
        """Bytes a second, read and written, of a plain copy."""
        source = torch.empty(
            (1 << 30) if self.device.type == "cuda" else 1 << 22, dtype=torch.uint8, device=self.device
        )
        target = torch.empty_like(source)
        seconds = [self._timed(lambda: target.copy_(source))[1] for _ in range(10)]
        return 2 * source.nbytes / min(seconds)

    def peer_step(self, model: Any, batch: int) -> float:
        """Seconds of a step of transformers' `generate`."""
        shape = (batch, self.sizes.context)
        ids = torch.randint(self.sizes.model["vocab_size"], shape, device=self.device)

        def generate(tokens: int) -> float:
            settings = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
            return self._timed(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **settings))[1]

        generate(2)
        return (generate(1 + self.sizes.peer_tokens) - generate(1)) / self.sizes.peer_tokens


class Forced:
    """A verifier that does its work, and then says that `accepted` drafts in a row were right."""

    def __init__(self, verifier: Any) -> None:
        self.verifier, self.accepted = verifier, 0

    def verify(self, trees: Any, contexts: Sequence[Any], logits: Tensor) -> list[Any]:
        from benchmarks.gpu_batch import path_of
        from specdec.kernels.types import Acceptance

        self.verifier.verify(trees, contexts, logits)
        found = []
        for tree in trees.read():
            nodes = [node for node, depth in enumerate(tree.depths) if depth <= self.accepted]
            found.append(Acceptance(tuple(path_of(tree, nodes[-1])) if nodes else (), 1))
        return found


def _request(chance: random.Random, index: int, sizes: Sizes) -> Any:
    from specdec import SamplingParams
    from specdec.core.detokenizer import Detokenizer
    from specdec.core.request import Request
    from specdec.verify.sampling import Sampling

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


def run(tiny: bool, device: torch.device, seconds: float, show: Callable[[str], object]) -> dict[str, Any]:
    """Rows of figures, one per head and batch, and what was cut.

    Args:
        tiny: a model of two layers.
        device: a CPU only if `TRITON_INTERPRET` was set before any kernel was imported.
        seconds: no batch is begun after them; each head has its share.
        show: is told of each row when it is done.
    """
    from transformers import LlamaConfig as TransformersConfig
    from transformers import LlamaForCausalLM

    sizes = TINY if tiny else FULL
    start = time.monotonic()
    engines = Engines(sizes, device)
    with torch.device("meta"):
        peer = LlamaForCausalLM(TransformersConfig(**sizes.model, tie_word_embeddings=False))
    random_weights(peer, sizes.dtype, device)
    bandwidth = engines.copy_bandwidth()
    rows: list[dict[str, Any]] = []
    cut: list[str] = []
    for number, (kind, batch) in enumerate(product(HEADS, sizes.batches)):
        place, of_head = divmod(number, len(sizes.batches))
        if time.monotonic() - start > seconds * (place + 1) / len(HEADS):
            cut.append(f"{kind}, batch {batch}: its {seconds / len(HEADS):.0f} s were over")
            continue
        if of_head == 0:
            engines.use(kind)
        plain: list[float] = []
        passes: dict[str, list[float]] = {"plain": [], "tree": []}
        cycles: dict[int, list[float]] = {accepted: [] for accepted in sizes.accepted}
        for _ in range(sizes.rounds):
            whole, inner = engines.steps(engines.plain, batch)
            plain += whole
            passes["plain"] += inner
            for accepted in sizes.accepted:
                engines.forced.accepted = accepted
                whole, inner = engines.steps(engines.eagle, batch)
                cycles[accepted] += whole
                passes["tree"] += inner
        with torch.inference_mode():
            peer_seconds = engines.peer_step(peer, batch)
        step = statistics.median(plain)
        bound = (engines.weight_bytes + batch * sizes.context * engines.entry_bytes) / bandwidth
        row = {
            "head": kind,
            "batch": batch,
            "context": sizes.context,
            "plain_ms": round(step * 1e3, 3),
            "share_of_copy_bound": round(bound / step, 3),
            "transformers_over_plain": round(peer_seconds / step, 2),
            "verification_over_plain": round(statistics.median(passes["tree"]) / statistics.median(passes["plain"]), 3),
            "cycles": [
                {
                    "accepted": accepted,
                    "cycle_ms": round(statistics.median(times) * 1e3, 3),
                    "c": round(statistics.median(times) / step, 3),
                    "times_plain": round((1 + accepted) * step / statistics.median(times), 2),
                }
                for accepted, times in cycles.items()
            ],
        }
        rows.append(row)
        show(json.dumps(row))
    return {"copy_gb_per_s": round(bandwidth / 1e9, 1), "shape": sizes.shape, "rows": rows, "cut": cut}


def table_of(rows: list[dict[str, Any]]) -> Table:
    names = ("head", "batch", "plain_ms", "share_of_copy_bound", "transformers_over_plain", "verification_over_plain")
    table = Table(*(name.replace("_", " ") for name in names), "accepted: c")
    for row in rows:
        cs = ", ".join(f"{one['accepted']}: {one['c']}" for one in row["cycles"])
        table.add_row(*(str(row[name]) for name in names), cs)
    return table
