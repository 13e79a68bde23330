"""Prompts that one engine computes and another one goes on with: no work is done twice, no token changes."""

import threading
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, SamplingParams
from specdec.engine.engine import LLMEngine
from specdec.kv_transfer.disk_store import DiskStore
from tests.specdec.async_engine.loop_peer import Peer, add
from tests.specdec.kv_transfer.engines import DRAWN, GREEDY, PROMPT, SIZE, WHOLE, Computed, disk, engine, flush, run
from tests.specdec.world import World

DRAFTERS = ["eagle", "eagle3", "dspark", "llama", "none"]
# What a router sends to a prefill engine: the prompt, for one token.
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def prefill(world: World, drafter: str, folder: Path, prompts: list[list[int]], **settings: Any) -> Computed:
    """What an engine of this role computes of the prompts, whose blocks have been sent when this returns."""
    with engine(world, drafter, disk(folder), role="prefill", **settings) as llm:
        computed = run(llm, prompts, FIRST)
        flush(llm)
    return computed


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_of_one_engine(world: World, tmp_path: Path, drafter: str, params: SamplingParams) -> None:
    """Both engines run at once, the second one since before the prompt was computed."""
    with engine(world, drafter, None) as llm:
        alone = run(llm, [PROMPT], params)
    with engine(world, drafter, disk(tmp_path), role="decode") as decode:
        first = prefill(world, drafter, tmp_path, [PROMPT])
        second = run(decode, [PROMPT], params)
    assert second.tokens == alone.tokens
    assert second.tau == alone.tau
    assert (first.known, second.loaded) == (len(PROMPT), WHOLE)
    assert second.known == alone.known - WHOLE
    if drafter == "none":
        return
    # The head has read the prompt beside its computation, and reads the rest with its first draft.
    assert first.read >= WHOLE
    assert second.read == alone.read - WHOLE
    assert second.outputs[0].stats.drafted > 0


@pytest.mark.long
def test_a_prompt_of_whole_blocks_has_its_last_token_computed(world: World, tmp_path: Path) -> None:
    prompt = PROMPT[:WHOLE]
    with engine(world, "eagle3", None) as llm:
        alone = run(llm, [prompt], DRAWN)
    prefill(world, "eagle3", tmp_path, [prompt])
    with engine(world, "eagle3", disk(tmp_path), role="decode") as llm:
        second = run(llm, [prompt], DRAWN)
    assert (second.tokens, second.tau, second.loaded) == (alone.tokens, alone.tau, WHOLE - 1)


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["eagle", "dspark", "llama"])
def test_prompts_in_chunks_are_read_in_chunks(world: World, tmp_path: Path, drafter: str) -> None:
    """Several prompts at once, in steps of few tokens. Two of them have their beginnings in common."""
    prompts = [PROMPT, [*PROMPT[:20], *PROMPT[:18]], PROMPT[5:]]
    with engine(world, drafter, None) as llm:
        alone = run(llm, prompts, DRAWN)
    chunks: dict[str, Any] = {"max_num_batched_tokens": 11, "max_num_seqs": 3, "max_num_partial_prefills": 2}
    first = prefill(world, drafter, tmp_path, prompts, **chunks)
    assert first.read <= first.known
    with engine(world, drafter, disk(tmp_path), role="decode") as llm:
        second = run(llm, prompts, DRAWN)
    assert (second.tokens, second.tau) == (alone.tokens, alone.tau)
    whole = sum(len(prompt) // SIZE * SIZE for prompt in prompts)
    # What two prompts share is loaded once, or twice if both are admitted in one step.
    assert whole - 2 * SIZE <= second.loaded <= whole


@pytest.mark.long
def test_an_engine_of_this_role_answers_like_others(world: World, tmp_path: Path) -> None:
    """Requests of many tokens draft on what was read beside their prompts, at once, however short its steps are."""
    for drafter in ("eagle3", "dflash"):
        with engine(world, drafter, None, max_num_seqs=1) as llm:
            alone = run(llm, [PROMPT, PROMPT[3:]], DRAWN)
        own = disk(tmp_path / drafter)
        with engine(world, drafter, own, role="prefill", max_num_seqs=1, max_num_batched_tokens=16) as llm:
            found = run(llm, [PROMPT, PROMPT[3:]], DRAWN)
        assert (found.tokens, found.tau) == (alone.tokens, alone.tau)


@pytest.mark.parametrize("role", [{"role": "prefill"}, {"kv_role": "kv_producer"}], ids=["role", "kv_role"])
def test_an_answer_waits_until_its_blocks_have_been_sent(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: dict[str, str]
) -> None:
    """Other requests go on meanwhile, and one that has nothing to send is answered."""
    write, sending, may_send = DiskStore.write, threading.Event(), threading.Event()

    def slow(*given: Any) -> None:
        sending.set()
        assert may_send.wait(120)
        write(*given)

    monkeypatch.setattr(DiskStore, "write", slow)
    settings = {name: value for name, value in role.items() if name == "role"}
    connector = {**disk(tmp_path), **{name: value for name, value in role.items() if name == "kv_role"}}
    with engine(world, "eagle", connector, **settings) as llm:
        peer = Peer(llm)
        try:
            peer.send(add(1, PROMPT, FIRST))
            assert sending.wait(120)
            # The second one has no block; the third one's are those of the first.
            peer.send(add(2, PROMPT[: SIZE - 1], FIRST), add(3, PROMPT, FIRST))
            assert len(peer.ended(2)[2]) == 1
            assert len(peer.loop._outboxes) == 2
            may_send.set()
            assert all(len(deltas) == 1 for deltas in peer.ended(1, 3).values())
        finally:
            may_send.set()
            peer.close()
    assert len(list(tmp_path.glob("??/*.kv"))) == 3 * WHOLE // SIZE


def test_a_call_waits_until_its_blocks_have_been_sent(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write ends once the engine waits for blocks, which it does after all tokens are there."""
    write, wait, may_send = DiskStore.write, LLMEngine.wait_for_kv, threading.Event()

    def slow(*given: Any) -> None:
        assert may_send.wait(120)
        write(*given)

    def waiting(engine: LLMEngine) -> None:
        may_send.set()
        wait(engine)

    monkeypatch.setattr(DiskStore, "write", slow)
    monkeypatch.setattr(LLMEngine, "wait_for_kv", waiting)
    with engine(world, "none", disk(tmp_path), role="prefill") as llm:
        try:
            llm.generate([PROMPT], FIRST, use_tqdm=False)
            assert len(list(tmp_path.glob("??/*.kv"))) == WHOLE // SIZE
        finally:
            may_send.set()


def test_an_answer_waits_for_a_store_that_hangs_no_longer_than_a_search(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_send, ended = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        may_send.wait(120)
        ended.set()

    monkeypatch.setattr(DiskStore, "write", hang)
    with engine(world, "none", disk(tmp_path, load_timeout=0.2), role="prefill") as llm:
        peer = Peer(llm)
        peer.send(add(1, PROMPT, FIRST))
        (delta,) = peer.ended(1)[1]
        assert not ended.is_set()
        may_send.set()
        peer.close()
    assert delta.finish_reason == "length"


@pytest.mark.long
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_missing_blocks_are_computed(world: World, tmp_path: Path, params: SamplingParams) -> None:
    """Nothing was sent; some files are gone; some are damaged; the parts of the head are gone."""
    with engine(world, "eagle3", None) as llm:
        alone = run(llm, [PROMPT], params)
    for loss in ("all", "some", "damage", "head"):
        folder = tmp_path / loss
        if loss != "all":
            prefill(world, "none" if loss == "head" else "eagle3", folder, [PROMPT])
        for number, file in enumerate(sorted(folder.glob("??/*.kv"))):
            if loss == "some" and number % 4 == 0:
                file.unlink()
            if loss == "damage" and number % 4 == 0:
                file.write_bytes(file.read_bytes()[:-1])
        with engine(world, "eagle3", disk(folder), role="decode") as llm:
            second = run(llm, [PROMPT], params)
        assert second.tokens == alone.tokens
        assert (second.loaded == WHOLE) == (loss == "head")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"role": "prefill"}, "role is 'prefill'; it needs a kv_transfer_config with a store that engines share"),
        ({"role": "decode", "kv": {"kv_connector": "OffloadingConnector"}}, "it needs a kv_transfer_config with a"),
        ({"role": "decode", "kv_role": "kv_producer"}, "role is 'decode' and kv_transfer_config has kv_role 'kv_prod"),
        ({"role": "prefill", "kv_role": "kv_consumer"}, "has kv_role 'kv_consumer'; leave kv_role out"),
        ({"role": "both of them"}, "role is 'both of them'; it must be one of both, prefill, decode"),
    ],
)
def test_roles_that_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    given = dict(settings)
    config = given.pop("kv", None)
    if "kv_role" in given:
        config = {**disk(tmp_path), "kv_role": given.pop("kv_role")}
    with pytest.raises(ValueError, match=message):
        LLM(kv_transfer_config=config, **given)
