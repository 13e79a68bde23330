"""TOUR.md: its files are there, and its values are those of the engine."""

import re
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, DraftShape, SamplingParams
from specdec.execution.worker import Worker
from specdec.kernels.types.upload import Packet
from specdec.verify.tree_batch import PackedBatch, TreeBatch

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "TOUR.md").read_text(encoding="utf-8")


def test_its_files_are_there() -> None:
    names = re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|h|md))`|\]\(([\w./]+)\)", TOUR)
    assert len(names) > 20
    assert not [name for pair in names for name in pair if name and not (ROOT / name).is_file()]
    assert len(re.findall(r"^\*\*\d+\.", TOUR, re.MULTILINE)) == 12
    assert len(TOUR.splitlines()) <= 150


def test_its_values_are_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[dict[str, Any]] = []
    pack, finish = TreeBatch.pack_into, Worker.finish

    def packed(packet: Packet, parts: Any, trees: Any, block_size: int, **more: Any) -> PackedBatch:
        found = pack(packet, parts, trees, block_size, **more)
        if "first" in more:  # of the head
            return found
        batch = found.batch
        (tree,) = trees.read()
        steps.append({"tree": (tree.tokens, tree.parents), "table": list(parts[0].block_table)})
        for name, values in (("tokens", batch.tokens), ("positions", batch.positions), ("slots", batch.slots)):
            steps[-1][name] = values.tolist()
        steps[-1]["bits"] = batch.rows.ancestors.flatten().tolist()
        return found

    def finished(worker: Worker) -> Any:
        move, moves = worker.cache.move, list[Any]()

        def moved(*slots: Any) -> None:
            moves.append(slots)
            move(*slots)

        with monkeypatch.context() as patch:
            patch.setattr(worker.cache, "move", moved)
            outcome = finish(worker)
        steps[-1] |= {"acceptance": tuple(outcome.acceptances[0]), "moves": moves}
        return outcome

    settings: dict[str, Any] = {"dtype": "float32", "kernels": "torch", "block_size": 8, "kv_cache_memory": 1 << 20}
    llm = LLM(draft="eagle", shape=DraftShape(3, 2, 4), adaptive_drafts=False, prefill_stretch=0, **settings)
    monkeypatch.setattr(TreeBatch, "pack_into", staticmethod(packed))
    monkeypatch.setattr(Worker, "finish", finished)
    prompt = llm.chat_prompt([{"role": "user", "content": "I need a taxi."}])
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)

    first, second, third = steps
    assert f"token_ids  {prompt} " in TOUR
    assert (first["tree"], first["table"], first["slots"]) == (((), ()), [0, 1], list(range(9)))
    assert first["acceptance"] == ((), 645)
    assert second["tree"] == ((487, 642, 1502, 371), (-1, 0, 0, 1))
    for name in ("tokens", "positions", "slots"):
        assert re.search(rf"^    {name} +" + " +".join(map(str, second[name])), TOUR, re.MULTILINE)
    assert re.search("as bits +" + " +".join(map(str, second["bits"])), TOUR)
    assert second["acceptance"] == ((0, 1, 3), 784)
    ((sources, targets),) = second["moves"]
    assert (sources[-1], targets[-1]) == (13, 12)
    assert third["tree"] == ((35, 320, 1, 543), (-1, -1, 0, 2))
    assert f"slots {' '.join(map(str, third['slots']))}" in TOUR
    assert third["acceptance"] == ((0, 2), 2)
    assert f"`{' '.join(map(str, output.token_ids))}`" in TOUR
    assert (output.outputs[0].text, output.stats.tokens / output.stats.steps) == ("How many people are going?", 3.0)
