"""All kernels but the attention, against the torch functions that one would call instead."""

import random
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.batch import path_of, random_batch, random_tree
from benchmarks.gpu.race import BOUNDS, EXACT, Case, Peer, Subject
from benchmarks.gpu.sizes import Sizes
from specdec.kernels.reference import elementwise as elementwise_reference
from specdec.kernels.reference import gumbel_argmax as gumbel_argmax_reference
from specdec.kernels.reference import kv_copy as kv_copy_reference
from specdec.kernels.reference import logit_filters as logit_filters_reference
from specdec.kernels.reference import perturbed_top_k as perturbed_top_k_reference
from specdec.kernels.reference import rotary_store as rotary_store_reference
from specdec.kernels.triton.elementwise import add_rms_norm, rms_norm, silu_and_mul
from specdec.kernels.triton.gumbel_argmax import gumbel_argmax
from specdec.kernels.triton.kv_copy import copy_between, copy_blocks, move_kv
from specdec.kernels.triton.logit_filters import filter_logits
from specdec.kernels.triton.perturbed_top_k import perturbed_top_k
from specdec.kernels.triton.rotary_store import rotary_store
from specdec.kernels.types.pinned_memory import host_empty
from specdec.kernels.types.types import NoiseColumns

EPS = 1e-5
# Best children of a node.
CHILDREN = 10
SCORE_SCALE = 4


def subjects(sizes: Sizes, device: torch.device) -> Iterator[Subject]:
    """The copy, which bounds all others, first; and one number, the least time that the clock can show."""
    for num_bytes in (*sizes.copies, 4):
        kernel = "copy" if num_bytes > 4 else "one_number"
        yield Subject(kernel, {"bytes": num_bytes}, partial(_copy, num_bytes, device))
    for rows in sizes.rows:
        shape: dict[str, int | str] = {"rows": rows}
        yield Subject("rms_norm", shape, partial(_rms_norm, sizes, rows, device))
        yield Subject("add_rms_norm", shape, partial(_add_rms_norm, sizes, rows, device))
        yield Subject("rotary_store", shape, partial(_rotary_store, sizes, rows, device))
        yield Subject("silu_and_mul", shape, partial(_silu_and_mul, sizes, rows, device))
    for requests in sizes.moves:
        yield Subject("move_kv", {"requests": requests}, partial(_move_kv, sizes, requests, device))
        yield Subject("copy_blocks", {"blocks": requests}, partial(_copy_blocks, sizes, requests, device))
        for way in ("out", "in"):
            shape = {"blocks": requests, "way": way}
            yield Subject("swap", shape, partial(_swap, sizes, requests, way, device))
    for rows in sizes.sampled_rows:
        for way in ("sampled", "greedy"):
            shape = {"rows": rows, "tokens": sizes.vocabulary, "way": way}
            yield Subject("gumbel_argmax", shape, partial(_gumbel_argmax, rows, sizes.vocabulary, way, device))
        shape = {"rows": rows, "tokens": sizes.vocabulary}
        yield Subject("filter_logits", shape, partial(_filter_logits, rows, sizes.vocabulary, device))
    for rows in sizes.drafted_rows:
        for tokens in (sizes.draft_vocabulary, sizes.vocabulary):
            shape = {"rows": rows, "tokens": tokens, "k": CHILDREN}
            yield Subject("perturbed_top_k", shape, partial(_perturbed_top_k, rows, tokens, sizes.vocabulary, device))


def _drawn(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Normal numbers, others at each call."""
    return torch.randn(*shape, dtype=dtype, device=device)


def _copy(num_bytes: int, device: torch.device) -> Case:
    source = _drawn(device, torch.float32, num_bytes // 4)
    target = torch.full_like(source, float("nan"))
    return Case(lambda: target.copy_(source), lambda: source, 2 * num_bytes, EXACT, {})


def _rms_norm(sizes: Sizes, rows: int, device: torch.device) -> Case:
    x, weight = (_drawn(device, sizes.dtype, *shape) for shape in ((rows, sizes.hidden), (sizes.hidden,)))
    return Case(
        run=lambda: rms_norm(x, weight, EPS),
        twin=lambda: elementwise_reference.rms_norm(x, weight, EPS),
        num_bytes=(2 * x.numel() + weight.numel()) * x.element_size(),
        bound=BOUNDS[sizes.dtype],
        peers={"torch": Peer(lambda: F.rms_norm(x, weight.shape, weight, EPS))},
    )


def _add_rms_norm(sizes: Sizes, rows: int, device: torch.device) -> Case:
    x, residual = (_drawn(device, sizes.dtype, rows, sizes.hidden) for _ in range(2))
    weight = _drawn(device, sizes.dtype, sizes.hidden)

    def add_then_norm() -> tuple[Tensor, Tensor]:
        total = residual + x
        return F.rms_norm(total, weight.shape, weight, EPS), total

    return Case(
        run=lambda: add_rms_norm(x, residual, weight, EPS),
        twin=lambda: elementwise_reference.add_rms_norm(x, residual, weight, EPS),
        num_bytes=(4 * x.numel() + weight.numel()) * x.element_size(),
        bound=BOUNDS[sizes.dtype],
        peers={"torch": Peer(add_then_norm)},
    )


def _rotary_store(sizes: Sizes, rows: int, device: torch.device) -> Case:
    """The peer rotates a copy of its own in place, again and again."""
    heads, kv_heads, dim = sizes.heads, sizes.kv_heads, sizes.head_dim
    qkv = _drawn(device, sizes.dtype, rows, heads + 2 * kv_heads, dim)
    angles = 100 * _drawn(device, torch.float32, rows, dim // 2)
    sines = angles.sin()
    cos = torch.cat([angles.cos()] * 2, -1)[:, None].to(sizes.dtype)
    sin = torch.cat([-sines, sines], -1)[:, None].to(sizes.dtype)
    kv = _drawn(device, sizes.dtype, 2 * rows, 2 * kv_heads, dim)
    slots = torch.randperm(2 * rows, device=device)[:rows]
    own = qkv.clone()

    return Case(
        run=lambda: rotary_store(qkv, cos, sin, kv, slots, heads),
        twin=lambda: rotary_store_reference.rotary_store(qkv.clone(), cos, sin, kv, slots, heads),
        num_bytes=2 * (qkv.numel() + cos.numel()) * qkv.element_size(),
        bound=BOUNDS[sizes.dtype],
        peers={"torch": Peer(lambda: rotary_store_reference.rotary_store(own, cos, sin, kv, slots, heads))},
        changed=(kv,),
    )


def _silu_and_mul(sizes: Sizes, rows: int, device: torch.device) -> Case:
    gate_up = _drawn(device, sizes.dtype, rows, 2 * sizes.intermediate)
    return Case(
        run=lambda: silu_and_mul(gate_up),
        twin=lambda: elementwise_reference.silu_and_mul(gate_up),
        num_bytes=3 * gate_up.numel() // 2 * gate_up.element_size(),
        bound=BOUNDS[sizes.dtype],
        peers={"torch": Peer(lambda: elementwise_reference.silu_and_mul(gate_up))},
    )


def _move_kv(sizes: Sizes, requests: int, device: torch.device) -> Case:
    """Moves of one random path per request, anywhere in its tree."""
    chance = random.Random(requests)
    trees = [random_tree(sizes.tree, chance) for _ in range(requests)]
    blocks = requests * (2 + sizes.tree.nodes // sizes.block_size)
    batch = random_batch(3, 1, trees, sizes.block_size, blocks, device, seed=requests)
    source, target = [], []
    for tree, start in zip(trees, batch.row_starts, strict=True):
        path = path_of(tree, chance.randrange(len(tree)))
        source += [start + 1 + node for node in path]
        target += [start + 1 + place for place in range(len(path))]
    ends = [batch.slots[torch.tensor(end, device=device)] for end in (source, target)]
    kv = _drawn(device, sizes.dtype, sizes.layers, blocks * sizes.block_size, 2 * sizes.kv_heads, sizes.head_dim)
    return Case(
        run=partial(move_kv, kv, *ends),
        twin=partial(kv_copy_reference.move_kv, kv, *ends),
        num_bytes=2 * len(source) * kv[:, 0].numel() * kv.element_size(),
        bound=EXACT,
        peers={"torch": Peer(partial(kv_copy_reference.move_kv, kv, *ends))},
        changed=(kv,),
    )


def _copy_blocks(sizes: Sizes, copies: int, device: torch.device) -> Case:
    size = sizes.block_size
    kv = _drawn(device, sizes.dtype, sizes.layers, 4 * copies * size, 2 * sizes.kv_heads, sizes.head_dim)
    blocks = torch.randperm(4 * copies, device=device)
    source, target = blocks[:copies], blocks[copies : 2 * copies]
    return Case(
        run=partial(copy_blocks, kv, source, target, size),
        twin=partial(kv_copy_reference.copy_blocks, kv, source, target, size),
        num_bytes=2 * copies * size * kv[:, 0].numel() * kv.element_size(),
        bound=EXACT,
        peers={"torch": Peer(partial(kv_copy_reference.copy_blocks, kv, source, target, size))},
        changed=(kv,),
    )


def _swap(sizes: Sizes, copies: int, way: str, device: torch.device) -> Case:
    """Between the device's cache and pinned memory of the host, which bounds it more than the device's copy does."""
    shape = (sizes.layers, sizes.block_size * 2 * sizes.kv_heads * sizes.head_dim)
    kv = _drawn(device, sizes.dtype, 4 * copies, *shape)
    host = host_empty((2 * copies, *shape), sizes.dtype, device).normal_()
    blocks, places = (torch.randperm(count, device=device)[:copies] for count in (4 * copies, 2 * copies))
    source, target, *ends = (kv, host, blocks, places) if way == "out" else (host, kv, places, blocks)

    return Case(
        run=partial(copy_between, source, target, *ends),
        twin=partial(kv_copy_reference.copy_between, source, target, *ends),
        num_bytes=copies * kv[0].numel() * kv.element_size(),
        bound=EXACT,
        peers={"torch": Peer(partial(kv_copy_reference.copy_between, source, target, *ends), captured=False)},
        changed=(target,),
    )


def _noise(rows: int, sampled: bool, device: torch.device) -> NoiseColumns:
    seeds, samples, positions = torch.randint(0, 2**62, (3, rows), device=device)
    return NoiseColumns(seeds, samples, positions, torch.full((rows,), sampled, device=device))


def _gumbel_argmax(rows: int, tokens: int, way: str, device: torch.device) -> Case:
    scores = SCORE_SCALE * _drawn(device, torch.float32, rows, tokens)
    noise = _noise(rows, way == "sampled", device)
    return Case(
        run=lambda: gumbel_argmax(scores, noise),
        twin=lambda: gumbel_argmax_reference.gumbel_argmax(scores, noise),
        num_bytes=scores.numel() * scores.element_size(),
        bound=EXACT,
        peers={"torch": Peer(lambda: torch.argmax(scores, -1), None if way == "sampled" else lambda tokens: tokens)},
    )


def _filter_logits(rows: int, tokens: int, device: torch.device) -> Case:
    """Each call filters a copy, which is timed as well."""
    scores = SCORE_SCALE * _drawn(device, torch.float32, rows, tokens)
    limits = torch.tensor([[0.0, 50, 0.9]], device=device).expand(rows, -1).contiguous()
    return Case(
        run=lambda: filter_logits(scores.clone(), limits) > float("-inf"),
        twin=lambda: logit_filters_reference.filter_logits(scores.clone(), limits) > float("-inf"),
        num_bytes=2 * scores.numel() * scores.element_size(),
        # Of all tokens: a rounding may let one in or out.
        bound=2e-5,
        peers={"torch's sort": Peer(lambda: torch.sort(scores, descending=True), None)},
    )


def _perturbed_top_k(rows: int, tokens: int, vocabulary: int, device: torch.device) -> Case:
    """A head that proposes some tokens only says which they are."""
    own = None if tokens == vocabulary else torch.randperm(vocabulary, device=device)[:tokens].sort().values
    scores = SCORE_SCALE * _drawn(device, torch.float32, rows, tokens)
    noise = _noise(rows, True, device)
    return Case(
        run=lambda: perturbed_top_k(scores, noise, CHILDREN, own),
        twin=lambda: perturbed_top_k_reference.perturbed_top_k(scores, noise, CHILDREN, own),
        num_bytes=scores.numel() * scores.element_size(),
        bound=BOUNDS[torch.float32],
        peers={"torch": Peer(lambda: torch.topk(scores, CHILDREN), None)},
    )
