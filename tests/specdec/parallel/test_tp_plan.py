"""Tensor-parallel plans: words, and the parts of each rank."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config

from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.models.llama import read_llama_config
from specdec.models.tp_plan import Shard, TPPlan, plan_of, tp_plan
from tests.specdec.world import World


def test_words_are_those_of_transformers(world: World) -> None:
    """Those of its Qwen3 too, which has norms of queries and keys."""
    theirs = {**world.target.config.base_model_tp_plan, **Qwen3Config.base_model_tp_plan}
    assert len(theirs) >= 9
    assert theirs.items() <= tp_plan().items()


def test_an_unknown_word_is_refused_by_name(world: World) -> None:
    plan = {"model.layers.*.mlp.down_proj": "moe_tp_experts"}
    with pytest.raises(
        ValueError, match=r"plan has 'layers.\*.mlp.down_proj': 'moe_tp_experts'; known words are colwise"
    ):
        plan_of({"base_model_tp_plan": plan}, read_llama_config(world.folder / "target"))
    with pytest.raises(CheckpointError, match="base_model_tp_plan = 3 must be an object"):
        plan_of({"base_model_tp_plan": 3}, read_llama_config(world.folder / "target"))


def test_words_that_do_not_fit_together_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match=r"gate_proj 'colwise', up_proj 'replicate', down_proj 'rowwise'; these"):
        plan_of(
            {"base_model_tp_plan": {"layers.*.mlp.up_proj": "replicate"}}, read_llama_config(world.folder / "target")
        )


@pytest.mark.parametrize(
    ("sizes", "ranks", "message"),
    [
        ({"num_heads": 6}, 4, "tensor_parallel_size is 4; it must divide the model's 6 attention heads"),
        ({"num_heads": 12, "num_kv_heads": 3}, 4, "must divide the model's 3 key-value heads, or be a multiple"),
        ({"intermediate_size": 50}, 4, "tensor_parallel_size is 4; it must divide the model's 50 MLP neurons"),
    ],
)
def test_models_that_cannot_be_split(world: World, sizes: dict[str, int], ranks: int, message: str) -> None:
    config = replace(read_llama_config(world.folder / "target"), **sizes)
    with pytest.raises(ValueError, match=message):
        Shard.of(config, 0, ranks, TPPlan(tp_plan()))


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_cover_each_weight_once(world: World, ranks: int) -> None:
    """But for key-value heads, of which there are two: four ranks hold each of them twice."""
    config = read_llama_config(world.folder / "target")
    shards = [Shard.of(config, rank, ranks, TPPlan(tp_plan())) for rank in range(ranks)]
    width, heads = config.head_dim * config.num_heads, config.head_dim * config.num_kv_heads
    rows = {
        "layers.1.self_attn.q_proj": width,
        "layers.1.mlp.up_proj": config.intermediate_size,
        "embed_tokens": config.vocab_size,
    }
    for name, size in rows.items():
        weight = torch.arange(size * 3).view(size, 3)
        assert torch.equal(torch.cat([shard.cut(f"{name}.weight", weight) for shard in shards]), weight)
    columns = torch.arange(2 * width).view(2, width)
    assert torch.equal(torch.cat([s.cut("layers.0.self_attn.o_proj.weight", columns) for s in shards], 1), columns)
    keys = torch.arange(heads)[:, None]
    parts = [shard.cut("layers.0.self_attn.k_proj.weight", keys) for shard in shards]
    copies = max(1, ranks // config.num_kv_heads)
    assert torch.equal(torch.cat(parts[::copies]), keys)
    assert all(torch.equal(part, parts[place // copies * copies]) for place, part in enumerate(parts))
    norm = torch.ones(3)
    assert all(shard.cut("layers.0.input_layernorm.weight", norm) is norm for shard in shards)


def test_a_summed_bias_is_added_once(world: World) -> None:
    config = read_llama_config(world.folder / "target")
    biases = [
        Shard.of(config, rank, 2, TPPlan(tp_plan())).cut("layers.0.mlp.down_proj.bias", torch.ones(4)).sum().item()
        for rank in range(2)
    ]
    assert biases == [4.0, 0.0]


def test_a_plan_of_the_checkpoint_goes_first(world: World) -> None:
    words = {"embed_tokens": "replicate", "lm_head": "replicate"}
    plan = plan_of({"base_model_tp_plan": words}, read_llama_config(world.folder / "target"))
    assert (plan.attention, plan.mlp, plan.vocabulary) == (True, True, False)
