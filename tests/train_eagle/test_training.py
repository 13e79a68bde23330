"""From conversations to a head that serves: each stage against what serving computes."""

import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import LLM, DraftShape, SamplingParams
from specdec.draft_heads.checkpoint import load_eagle_head
from specdec.draft_heads.llama_layer import PagedAttention
from specdec.models.llama import load_llama
from specdec.train_eagle import train
from specdec.train_eagle.conversations import encode, read_conversations
from specdec.train_eagle.features import FeatureSample, FeatureStore, batches, capture
from specdec.train_eagle.losses import eagle_loss
from specdec.train_eagle.regenerate import regenerate
from specdec.train_eagle.train import HeadTrainer, new_head
from specdec.verify.tree import DraftTree
from specdec.verify.tree_batch import TreeRow
from tests.fakes import save_random_llama

WORDS = [f"w{i}" for i in range(80)]
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + ' <end> ' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + ' <end> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_random_llama(folder, initializer_range=0.2)
    names = ["<pad>", "<bos>", "<end>", "<user>", "<assistant>", *WORDS, "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def samples(target: Path) -> list[FeatureSample]:
    model = load_llama(target, torch.float32, CPU)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    chats = [
        [
            {"role": "user", "content": " ".join(WORDS[i : i + 3 + i % 4])},
            {"role": "assistant", "content": " ".join(WORDS[2 * i : 2 * i + 9])},
        ]
        for i in range(24)
    ]
    return list(capture(model, [encode(tokenizer, chat, 64) for chat in chats], batch_tokens=64))


def test_mask_covers_the_answer_and_its_end(target: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    chat = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}]
    sample = encode(tokenizer, chat, 100)
    words = tokenizer.convert_ids_to_tokens(sample.token_ids)
    assert words == ["<user>", "w1", "w2", "<end>", "<assistant>", "w3", "w4", "<end>"]
    assert [w for w, said in zip(words, sample.mask, strict=True) if said] == ["w3", "w4", "<end>"]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"messages": []}\n{"text": 1}\n')
    with pytest.raises(ValueError, match=r"data\.jsonl, line 2"):
        read_conversations([file])


def test_captured_features_are_those_of_serving(
    target: Path, samples: list[FeatureSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded batches against the paged engine's own forward pass."""
    llm = LLM(target, dtype="float32")
    stored: list[torch.Tensor] = []
    monkeypatch.setattr(llm.engine.runner, "head", new_head(llm.model))
    monkeypatch.setattr(llm.engine.cache, "store_features", lambda _, features: stored.append(features))
    for sample in samples[:5]:
        row = TreeRow(sample.tokens.tolist(), DraftTree(), 0, [3, 1, 0, 2, 4], False)
        with torch.inference_mode():
            llm.engine.runner.forward([row])
        torch.testing.assert_close(stored.pop(), sample.features, rtol=1e-4, atol=1e-4)


def test_store_gives_back_what_was_added(tmp_path: Path, samples: list[FeatureSample]) -> None:
    store = FeatureStore(tmp_path / "features")
    store.add(samples[:10])
    store.add(samples[10:])
    for a, b in zip(store.load(), samples, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.mask, b.mask)
        assert torch.equal(a.features, b.features)


def test_an_epoch_has_every_conversation_once(samples: list[FeatureSample]) -> None:
    def rows(seed: int) -> list[list[int]]:
        return [tokens[: len(tokens)].tolist() for batch in batches(samples, 80, seed) for tokens in batch.tokens]

    want = sorted(sample.tokens.tolist() for sample in samples)
    got = sorted([t for t in row if t != 0] for row in rows(1))
    assert got == [[t for t in row if t != 0] for row in want]
    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


def test_training_rows_are_the_rows_of_serving(target: Path, samples: list[FeatureSample]) -> None:
    """The head over a whole sequence in training equals the paged head at entries 1, 2, …, rotary position i - 1."""
    model = load_llama(target, torch.float32, CPU)
    head = new_head(model).eval()
    sample = samples[0]
    batch = batches([sample], 1000, 0)[0]
    seen: list[torch.Tensor] = []
    trainer = HeadTrainer(head, model.lm_head_weight, 0.0, 1.0, 0.1, 1).eval()
    head.register_forward_hook(lambda _module, _args, output: seen.append(output))
    trainer(batch)

    from specdec.draft_heads.rope import rotary_at
    from specdec.kernels.ragged_rows import RaggedRows

    n = len(sample.tokens)
    entries = torch.arange(1, n)
    rows = RaggedRows([n - 1], [n], [n], torch.arange(4)[None], entries + 1, torch.zeros(n - 1, 1).long(), 16, first=1)
    llama = head.config.llama
    kv = torch.full((4 * 16, 2 * llama.num_kv_heads, llama.head_dim), torch.nan)
    table = llama.rope.table(llama.head_dim, 64, torch.float32)
    with torch.no_grad():
        rotary = rotary_at(table, torch.arange(n - 1))
        hidden = head(sample.tokens[1:], sample.features[:-1], rotary, [PagedAttention(kv, entries, rows)])
    torch.testing.assert_close(seen[0], hidden, rtol=1e-4, atol=1e-5)


def test_loss_of_a_perfect_head_is_the_targets_entropy() -> None:
    torch.manual_seed(0)
    wanted, lm_head = torch.randn(7, 8), torch.randn(11, 8)
    loss = eagle_loss(wanted.clone(), wanted, lm_head, feature_weight=2.0, token_weight=0.5)
    p = (wanted @ lm_head.T).softmax(-1)
    entropy = -(p * p.log()).sum(-1).mean()
    assert loss.feature == 0
    assert loss.agreement == 1
    torch.testing.assert_close(loss.token, entropy)
    torch.testing.assert_close(loss.total, 0.5 * entropy)


def test_padding_and_the_users_words_are_not_trained(target: Path, samples: list[FeatureSample]) -> None:
    """Only rows whose next token the assistant says enter the loss, the first of them included."""
    model = load_llama(target, torch.float32, CPU)
    trainer = HeadTrainer(new_head(model), model.lm_head_weight, 0.0, 1.0, 0.1, 1).eval()
    short, long = sorted(samples[:8], key=lambda s: len(s.tokens))[::7]
    alone = [trainer(batches([s], 1000, 0)[0])[0].total for s in (short, long)]
    together = trainer(batches([short, long], 1000, 0)[0])[0].total
    counts = [int(s.mask[2:].sum()) for s in (short, long)]
    want = sum(count * loss for count, loss in zip(counts, alone, strict=True)) / sum(counts)
    torch.testing.assert_close(together, want)
    first_said = int(long.mask.nonzero()[0])
    assert long.mask[2:][first_said - 2], "the row before the first answer token is trained"


def test_regenerated_answers_are_the_targets_own(target: Path) -> None:
    llm = LLM(target, dtype="float64")
    chats = [
        [{"role": "user", "content": "w1 w2 w3"}, {"role": "assistant", "content": "w9"}] * 2,
        [{"role": "user", "content": "w7"}],
    ]
    answered = regenerate(llm, chats, [0.0, 0.0], max_tokens=100, seed=0)
    assert answered[1] == []
    expected = llm.chat(chats[0][:1], SamplingParams(temperature=0, max_tokens=100))[0]
    if expected.finish_reason == "stop":
        assert answered[0][:2] == [chats[0][0], {"role": "assistant", "content": expected.text}]
    else:
        assert answered[0] == []


def run_train(monkeypatch: pytest.MonkeyPatch, target: Path, data: Path, folder: Path, *more: str) -> None:
    words = ["train", "--model", str(target), "--data", str(data), "--features", str(folder / "f")]
    words += ["--out", str(folder / "head"), "--held-out", "4", "--batch-tokens", "64", "--warmup-steps", "2", *more]
    monkeypatch.setattr(sys, "argv", words)
    train.main()


def test_trained_head_drafts_better_than_a_new_one(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few seconds of training on the target's own words, and the engine accepts more."""
    llm = LLM(target, dtype="float32")
    generator = torch.Generator().manual_seed(1)
    data = tmp_path / "data.jsonl"
    with data.open("w") as lines:
        for _ in range(60):
            prompt = torch.randint(5, 85, (4,), generator=generator).tolist()
            output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0]
            words = [WORDS[t - 5] for t in output.token_ids if 5 <= t < 85]
            chat = [
                {"role": "user", "content": " ".join(WORDS[t - 5] for t in prompt)},
                {"role": "assistant", "content": " ".join(words)},
            ]
            lines.write(json.dumps({"messages": chat}) + "\n")
    run_train(monkeypatch, target, data, tmp_path / "a", "--epochs", "1", "--lr", "0")
    run_train(monkeypatch, target, data, tmp_path / "b", "--epochs", "12", "--lr", "3e-3", "--token-weight", "1")
    taus = []
    for name in "ab":
        eagle = LLM(target, tmp_path / name / "head", dtype="float32", shape=DraftShape(3, 3, 8))
        prompts = [[5 + i, 20 + i, 41] for i in range(12)]
        outputs = eagle.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        taus.append(sum(o.stats.tokens for o in outputs) / sum(o.stats.steps for o in outputs))
    assert taus[1] > taus[0]


def test_resuming_gives_the_same_head(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after its first checkpoint and started again, a run ends with the very same weights."""
    data = tmp_path / "data.jsonl"
    chat = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4 w5 w6 w7 w8"}]
    data.write_text((json.dumps({"messages": chat}) + "\n") * 20)
    settings = ("--epochs", "3", "--checkpoint-minutes", "0")
    run_train(monkeypatch, target, data, tmp_path / "whole", *settings)

    saves = 0
    save = torch.save

    def dying_save(*args: object, **kwargs: object) -> None:
        nonlocal saves
        save(*args, **kwargs)  # type: ignore[arg-type]
        saves += 1
        if saves == 3:
            (tmp_path / "cut" / "head" / "training_state.tmp").replace(tmp_path / "cut" / "head" / "training_state.pt")
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", dying_save)
        with pytest.raises(KeyboardInterrupt):
            run_train(patch, target, data, tmp_path / "cut", *settings)
    run_train(monkeypatch, target, data, tmp_path / "cut", *settings)
    embedding = load_llama(target, torch.float32, CPU).embed_tokens.weight
    whole, cut = (load_eagle_head(tmp_path / name / "head", embedding, torch.float32, CPU) for name in ("whole", "cut"))
    for (name, a), b in zip(whole.named_parameters(), cut.parameters(), strict=True):
        assert torch.equal(a, b), name
