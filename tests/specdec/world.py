"""A tiny model with a text of its own, requests of every kind, and what their outputs must be."""

import copy
import functools
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec import LLM, DraftShape, LoRARequest, SamplingParams
from specdec.core.outputs import CompletionOutput
from specdec.core.request import Request, RequestGroup
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.kernels.kv_entries import KV_DTYPES
from specdec.kernels.tree import DraftTree
from specdec.scheduling.integrity import check_scheduler
from tests.baichuan import Baichuan, save_baichuan
from tests.coded_cache import as_stored
from tests.fakes import (
    TINY,
    RandomDrafter,
    edit_json,
    save_random_block,
    save_random_eagle3,
    save_random_head,
    save_random_llama,
    save_shallow_llama,
)
from tests.lora_adapters import merged, request_for, save_adapter, save_draft_adapter
from tests.quantized_checkpoints import FORMATS, quantize_folder
from tests.specdec import oracle
from tests.specdec.oracle import Expected
from tests.specdec.saved_llama import edit_tensors
from tests.strategies import speculations
from tests.trees import chain_of

VOCAB = 97
EOS = 2
# Tokens that the target with a window sees.
WINDOW = 12


# Checkpoints whose weights are quantised, and one that has scales of keys and values.
SCALED = "kv scales"
STORED = (*FORMATS, SCALED)
# Number of the adapter with which the draft model is adapted; the target is as with the first.
WITH_DRAFT = 3
# Block heads of every kind.
BLOCKS = ("dflash", "dspark", "domino", "dflash2")
# What drafts, and its folder in a world.
DRAFTS = {
    "eagle": "head",
    "eagle3": "head3",
    **{kind: kind for kind in BLOCKS},
    "llama": "small",
    "random": "head",
    "knowing": "head",
    "none": None,
}


class World(NamedTuple):
    folder: Path
    target: LlamaForCausalLM | MistralForCausalLM | Baichuan
    tokenizer: Tokenizer
    sliding_target: MistralForCausalLM | None = None
    adapters: tuple[Path, ...] = ()
    alibi_target: Baichuan | None = None
    kv_scales: Tensor | None = None

    def draft(self, drafter: str) -> Path | None:
        """The folder of one of `DRAFTS`."""
        name = DRAFTS[drafter]
        return self.folder / name if name else None

    def with_cache(self, kv_cache_dtype: str) -> "World":
        """The same checkpoints, and the target as it is when it reads its keys and values from such a cache."""
        if kv_cache_dtype == "auto" and self.kv_scales is None:
            return self
        dtype = KV_DTYPES["int8" if kv_cache_dtype == "auto" else kv_cache_dtype]
        if isinstance(self.target, Baichuan):
            return self._replace(target=self.target.reading_codes(dtype))
        return self._replace(target=reading_codes(self.target, dtype, self.kv_scales if dtype == torch.int8 else None))

    @property
    def sliding(self) -> "World":
        """The same weights with a sliding window in every layer, and the same drafts."""
        assert self.sliding_target is not None
        return World(self.folder / "sliding", self.sliding_target, self.tokenizer, adapters=self.adapters)

    @property
    def alibi(self) -> "World":
        """A model whose attention has ALiBi, and the same drafts."""
        assert self.alibi_target is not None
        return World(self.folder / "alibi", self.alibi_target, self.tokenizer)

    def adapter(self, number: int, draft: Path | None = None) -> LoRARequest | None:
        """The request for one of the adapters; None for 0, and where the target has none.

        Args:
            draft: folder of the draft model, of which `WITH_DRAFT` has an adapter too.
        """
        if not (number and self.adapters):
            return None
        found = request_for(self._adapter(number), number)
        if draft is None or number != WITH_DRAFT:
            return found
        folder = self.folder / "lora" / f"draft-{draft.name}"
        if not folder.exists():
            save_draft_adapter(folder, draft)
        return replace(found, draft_lora_path=str(folder))

    def _adapter(self, number: int) -> Path:
        return self.adapters[number - 1 if number < WITH_DRAFT else 0]

    def adapted(self, number: int) -> "World":
        """The same with an adapter merged into the target, for what is expected; itself where a request has none."""
        if not (number and self.adapters):
            return self
        return self._replace(target=_merged(self.target, self._adapter(number)))

    def stored(self, name: str) -> "World":
        """A quantised checkpoint of the target, one of `STORED`, and the same drafts; its target is dequantised."""
        return make_scaled(self) if name == SCALED else make_stored(self, name)

    def other(self, drafter: str) -> Path:
        """The folder of a head of the same shape with other weights, of EAGLE and block heads."""
        return self.folder / f"other-{DRAFTS[drafter]}"

    def logits(self, tokens: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            return self.target(torch.tensor([list(tokens)])).logits[0, -1]


def reading_codes(target: PreTrainedModel, dtype: torch.dtype, scales: Tensor | None = None) -> Any:
    """Return a target with the same weights whose attention reads keys and values in 8 bits.

    Args:
        scales: of a checkpoint, `[layers, 2 * kv_heads]`.
    """
    name = f"codes-{dtype}" + ("" if scales is None else "-scaled")

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **keywords: Any) -> Any:
        given = (None, None) if scales is None else scales[module.layer_idx].chunk(2)
        stored = [
            as_stored(part.transpose(1, 2), dtype, own).transpose(1, 2)
            for part, own in zip((key, value), given, strict=True)
        ]
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *stored, *args, **keywords)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    other = copy.deepcopy(target)
    other.set_attn_implementation(name)
    return other


def make_world(folder: Path) -> World:
    """A model of 97 tokens: special ones, pairs of letters, and bytes that only together are characters."""
    target = save_random_llama(folder / "target")
    for seed, prefix in enumerate(("", "other-")):
        save_random_head(folder / f"{prefix}head", seed)
        save_random_eagle3(folder / f"{prefix}head3", seed)
        for kind in BLOCKS:
            save_random_block(folder / f"{prefix}{kind}", kind, seed)
    save_shallow_llama(folder / "small", target)
    letters = [*"abcdefgh", "Ġ"]
    pieces = [*letters, *(a + b for a in letters for b in letters), "Ã", "©", "â", "Ĥ"]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder / "target")
    assert len(vocab) == VOCAB == TINY["vocab_size"]
    sliding, adapters = make_sliding(folder, target), make_adapters(folder / "lora", target)
    return World(folder, target, fast.backend_tokenizer, sliding, adapters, make_alibi(folder))


def make_adapters(folder: Path, target: LlamaForCausalLM) -> tuple[Path, ...]:
    """Write an adapter of every module with odd ranks, and one of some modules with another scale."""
    scales = {"alpha_pattern": {"down_proj": 3, r"layers\.1\.self_attn\.q_proj": 7}}
    few = ("q_proj", "v_proj", "gate_proj", "down_proj")
    return (
        save_adapter(folder / "first", target, 3, 1, ranks={"k_proj": 1, "o_proj": 17}, **scales),
        save_adapter(folder / "second", target, 8, 2, few, use_rslora=True, size=0.15),
    )


@functools.cache
def _merged(target: LlamaForCausalLM | MistralForCausalLM, folder: Path) -> LlamaForCausalLM | MistralForCausalLM:
    return merged(target, folder)


@cache
def make_scaled(world: World) -> World:
    """Write the target with scales of its keys and values in int8, beside links to its drafts."""
    own = world.folder / "stored-scaled"
    shutil.copytree(world.folder / "target", own / "target")
    scales = torch.tensor([[0.03, 0.05, 0.02, 0.04], [0.06, 0.02, 0.03, 0.05]])

    def add(tensors: dict[str, Tensor]) -> None:
        for layer, row in enumerate(scales):
            for name, part in zip(("k_scale", "v_scale"), row.chunk(2), strict=True):
                tensors[f"model.layers.{layer}.self_attn.{name}"] = part.clone()

    edit_tensors(own / "target", add)
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "attn_head", "dynamic": False}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    edit_json(own / "target" / "config.json", quantization_config=quantization)
    link_drafts(world.folder, own)
    return world._replace(folder=own, kv_scales=scales)


@cache
def make_stored(world: World, name: str) -> World:
    """Write the target in the format of a quantised model, beside links to its drafts."""
    own = world.folder / f"stored-{name}"
    weights = quantize_folder(world.folder / "target", own / "target", name)
    target = LlamaForCausalLM(world.target.config).to(torch.float64)
    target.load_state_dict(weights)
    link_drafts(world.folder, own)
    return World(own, target.eval(), world.tokenizer)


def link_drafts(folder: Path, own: Path) -> None:
    """Link to the drafts of a world in a folder of another."""
    for other in folder.iterdir():
        if other.name not in ("target", "sliding", "alibi") and not other.name.startswith("stored-"):
            (own / other.name).symlink_to(other)


def make_sliding(folder: Path, target: LlamaForCausalLM) -> MistralForCausalLM:
    """Write the target with a window, beside links to its drafts."""
    own = folder / "sliding"
    sliding = MistralForCausalLM(MistralConfig(**{**target.config.to_dict(), "sliding_window": WINDOW})).to(
        torch.float64
    )
    sliding.load_state_dict(target.state_dict())
    sliding.save_pretrained(own / "target")
    link_drafts(folder, own)
    copy_tokenizer(folder, own)
    return sliding.eval()


def make_alibi(folder: Path) -> Baichuan:
    """Write a model with ALiBi, beside links to the drafts of a world."""
    own = folder / "alibi"
    target = save_baichuan(own / "target")
    link_drafts(folder, own)
    copy_tokenizer(folder, own)
    return target


def copy_tokenizer(folder: Path, own: Path) -> None:
    """Copy the tokenizer of a world's target to another's."""
    for file in (folder / "target").glob("*token*"):
        shutil.copy(file, own / "target")


tokens = st.integers(0, VOCAB - 1)
# The end token and a, b, c, d: a request of these alone often meets its bad words, stop strings and ends.
letters = st.sampled_from([EOS, 3, 4, 5, 6])
# Text of few letters, so that stop strings and bad words do occur.
words = st.text(alphabet="abc d", min_size=1, max_size=3)


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    """Everything a request can ask of the output, most of it off most of the time."""
    temperature = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7]))
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 14), st.integers(1, 14), st.integers(1, 14)))
    return SamplingParams(
        n=draw(st.sampled_from([1, 1, 2])) if temperature else 1,
        temperature=temperature,
        top_k=draw(st.sampled_from([0, 0, 1, 3, 20])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.3])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.5, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0, -0.8])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.6, -0.4])),
        logit_bias=draw(st.one_of(st.none(), st.dictionaries(tokens, st.sampled_from([-100.0, 3.0, 8.0]), max_size=3))),
        allowed_token_ids=draw(
            st.one_of(st.none(), st.lists(tokens, min_size=12, max_size=40), st.lists(letters, min_size=2, max_size=5))
        ),
        bad_words=draw(st.lists(words.filter(str.strip), max_size=2)),
        seed=draw(st.integers(0, 2**63 - 1)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(max_tokens or 6, 6))),
        stop=draw(st.one_of(st.none(), words, st.lists(words, max_size=3))),
        stop_token_ids=draw(st.lists(tokens, max_size=6)),
        include_stop_str_in_output=draw(st.booleans()),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0, 2])),
        skip_special_tokens=draw(st.booleans()),
        speculation=draw(speculations()),
    )


# Requests that score choices, whose letters are so few that they share beginnings.
scorings = st.lists(st.lists(letters, min_size=1, max_size=5), min_size=1, max_size=6).map(
    lambda choices: SamplingParams(choices=choices)
)


def cut(params: SamplingParams, most: int) -> SamplingParams:
    """Return the parameters with choices of no more nodes than a step has tokens for."""
    if params.choices is None:
        return params
    return replace(params, choices=[choice[: most + 1] for choice in params.choices])


class Arrival(NamedTuple):
    step: int
    prompt: list[int]
    params: SamplingParams
    adapter: int = 0


# A request's adapter, 0 for none.
adapters = st.sampled_from([0, 0, 1, 2, WITH_DRAFT])
requests = st.one_of(*[parameters()] * 4, scorings)
arrivals = st.lists(
    st.builds(Arrival, st.integers(0, 6), st.lists(tokens, min_size=1, max_size=40), requests, adapters),
    min_size=1,
    max_size=3,
)
shapes = st.builds(
    DraftShape,
    depth=st.integers(1, 5),
    branching=st.integers(1, 5),
    nodes=st.integers(1, 70),
    min_reach=st.sampled_from([0.0, 0.2]),
)


def run(
    llm: LLM, cases: list[Arrival], updates: Mapping[int, Path] | None = None, world: World | None = None
) -> list[RequestGroup]:
    """Requests run to their end, each added when its step has come.

    Args:
        updates: heads by the step before which they replace the one before.
        world: whose adapters the requests have; None for none.
    """
    groups: list[RequestGroup | None] = [None] * len(cases)
    step = 0
    while any(group is None or not group.finished for group in groups):
        for i, case in enumerate(cases):
            if groups[i] is None and case.step <= step:
                # While one of the draft model is loaded, no head can replace it.
                adapter = world.adapter(case.adapter, None if updates else llm.config.draft) if world else None
                group = groups[i] = llm.new_group(case.prompt, case.params, lora_request=adapter)
                for request in group.requests:
                    llm.engine.add_request(request)
        if updates and step in updates:
            llm.update_draft(updates[step])
        before = {request: request.stats.drafted for group in groups if group for request in group.requests}
        for request in llm.engine.step():
            assert request.num_cached <= len(request.token_ids)
            check_bounds(request, before[request])
        check_scheduler(llm.engine.scheduler)
        step += 1
    assert llm.engine.scheduler.stats().kv_usage == 0
    return [group for group in groups if group is not None]


def check_bounds(request: Request, drafted_before: int) -> None:
    """Check the last step and the whole output against what the request asked of speculation."""
    asked, stats = request.params.speculation, request.stats
    assert stats.drafted - drafted_before <= (asked.max_nodes or sys.maxsize)
    assert len(stats.accepted_per_depth) <= (asked.max_depth or sys.maxsize)
    assert asked.enabled or stats.drafted == 0


class KnowingDrafter(RandomDrafter):
    """Drafts what will be said, end tokens and what would lie behind the end included, among random branches."""

    def __init__(self, seed: int, futures: dict[tuple[int, int], list[int]]) -> None:
        super().__init__(VOCAB, seed)
        self.futures = futures

    def tree(self, row: DraftRow) -> DraftTree:
        sampling, position = row.context.sampling, row.context.num_output
        future = self.futures[sampling.seed, sampling.sample_index][position:]
        chain = future[: min(row.num_nodes, row.max_depth, self.random.randint(0, 5))]
        if self.random.random() < 0.3:
            chain = [*chain[:1], EOS, EOS][: min(row.num_nodes, row.max_depth)]
        drafted = chain_of(chain)
        taken, nodes, parents = set(drafted.children), list(chain), list(drafted.parents)
        for _ in range(row.num_nodes - len(chain)):
            parent = self.random.randint(-1, len(chain) - 1)
            token = self.random.choice([EOS, *chain, self.random.randrange(VOCAB)])
            if (parent, token) not in taken and parent + 2 <= row.max_depth:
                taken.add((parent, token))
                nodes.append(token)
                parents.append(parent)
        return DraftTree(tuple(nodes), tuple(parents))


def edited(tokens: list[int], seed: int) -> list[int]:
    """A text with some tokens removed, replaced and inserted."""
    chance, text = random.Random(seed), list[int]()
    for token in tokens:
        kind = chance.randrange(8)
        text += [] if kind == 0 else [chance.randrange(VOCAB)] if kind == 1 else [EOS, token] if kind == 2 else [token]
    return text


def expect(world: World, llm: LLM, request: Request, params: SamplingParams, beyond: int = 0) -> Expected:
    """The plain loop's output for a request not yet run."""
    if params.choices is not None:
        return Expected(finish_reason="stop")
    return oracle.generate(
        world.logits,
        request.token_ids[: request.num_prompt],
        params,
        request.sampling,
        end_tokens=llm.end_tokens,
        tokenizer=world.tokenizer,
        max_length=llm.max_model_len,
        processed=llm.engine.logprobs_mode == "processed_logprobs",
        beyond=beyond,
    )


def check(output: CompletionOutput, expected: Expected, params: SamplingParams) -> None:
    assert output.token_ids == expected.tokens
    assert output.text == expected.text
    assert (output.finish_reason, output.stop_reason) == (expected.finish_reason, expected.stop_reason)
    if params.logprobs is None:
        assert output.logprobs is None
        return
    assert output.logprobs is not None
    for token, entries, log_p in zip(output.token_ids, output.logprobs, expected.logprobs, strict=True):
        likeliest = log_p.topk(params.logprobs).indices.tolist()
        # Tokens that cannot be are alike, so which of them fill the list is not settled.
        assert {t for t in entries if log_p[t].isfinite()} == {t for t in [token, *likeliest] if log_p[t].isfinite()}
        for other, entry in entries.items():
            assert entry.logprob == pytest.approx(log_p[other].item(), abs=1e-9)
        assert entries[token].rank == int((log_p >= log_p[token] - 1e-12).sum())
    total = sum(log_p[token].item() for token, log_p in zip(expected.tokens, expected.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total, abs=1e-8)


def check_choices(group: RequestGroup, world: World) -> None:
    """Check each choice's scores against a pass over the prompt and that choice alone."""
    scores, prompt = group.output().choices, group.prompt_token_ids
    assert scores is not None
    assert [score.token_ids for score in scores] == list(group.requests[0].params.choices or ())
    for score in scores:
        with torch.inference_mode():
            log_p = world.target(torch.tensor([[*prompt, *score.token_ids]])).logits[0].log_softmax(-1)
        own = [log_p[len(prompt) - 1 + place, token].item() for place, token in enumerate(score.token_ids)]
        assert score.logprobs == pytest.approx(own, abs=1e-9)
        assert score.cumulative_logprob == pytest.approx(sum(own), abs=1e-8)


def check_prompt(group: RequestGroup, world: World, params: SamplingParams) -> None:
    if params.choices is not None:
        check_choices(group, world)
    scored = group.output().prompt_logprobs
    if params.prompt_logprobs is None:
        assert scored is None
        return
    assert scored is not None
    assert len(scored) == len(group.prompt_token_ids)
    assert scored[0] is None
    with torch.inference_mode():
        log_p = world.target(torch.tensor([group.prompt_token_ids])).logits[0].log_softmax(-1)
    for at, token in enumerate(group.prompt_token_ids[1:]):
        entries = scored[at + 1]
        assert entries is not None
        assert set(entries) == {token, *log_p[at].topk(params.prompt_logprobs).indices.tolist()}
        for other, entry in entries.items():
            assert entry.logprob == pytest.approx(log_p[at, other].item(), abs=1e-9)
