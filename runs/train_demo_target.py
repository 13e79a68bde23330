"""Pretrain the demonstration target: tokenizer, chat template and a small Llama.

The target exists only so that `specdec generate` runs on a machine without a model hub, so everything
here is transformers, tokenizers and accelerate. The whole recipe is one command:

    python runs/train_demo_target.py --data ../shared/data --out build/demo-target --tokens 11_000_000

and a run of a minute, to see that it works:

    python runs/train_demo_target.py --data ../shared/data --out /tmp/t --tokens 200_000

A killed run goes on from its last checkpoint when the same command is given again.
"""

import argparse
import json
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS, USER, ASSISTANT, SYSTEM = "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role'] + ': use system, user or assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def conversations(path: Path) -> list[list[dict[str, str]]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line in lines]


def standard_library(limit: int) -> list[str]:
    """Return whole source files of this Python's standard library, about `limit` characters in total."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "site-packages", "idlelib", "encodings", "lib2to3", "turtledemo", "pydoc_data"}
    files = [p for p in sorted(root.rglob("*.py")) if not skipped & set(p.relative_to(root).parts)]
    random.Random(0).shuffle(files)
    texts: list[str] = []
    for file in files:
        if limit <= 0:
            break
        text = file.read_text(encoding="utf-8", errors="replace")
        if 1_000 < len(text) < 60_000:
            texts.append(text)
            limit -= len(text)
    return texts


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, USER, ASSISTANT, SYSTEM],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def pack(data: Path, tokenizer: PreTrainedTokenizerFast, stdlib_chars: int, seed: int) -> np.ndarray:
    """Return one token stream of all documents, shuffled across sources, each beginning with BOS."""
    documents = [
        tokenizer.apply_chat_template(messages, tokenize=False)
        for name in ("sgd-train", "gsm8k-train", "gsm8k-train")
        for messages in conversations(data / f"{name}.jsonl")
    ]
    documents += [BOS + text for text in standard_library(stdlib_chars)]
    random.Random(seed).shuffle(documents)
    encoded = tokenizer.backend_tokenizer.encode_batch(documents, add_special_tokens=False)
    return np.concatenate([np.asarray(e.ids, dtype=np.int32) for e in encoded])


def optimizers(model: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Return the optimizers: Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of sgd-train.jsonl and gsm8k-train.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--tokens", type=int, default=11_000_000, help="training tokens in all")
    parser.add_argument("--stdlib-chars", type=int, default=1_500_000, help="characters of Python sources")
    shape = parser.add_argument_group("model")
    shape.add_argument("--vocab-size", type=int, default=4096)
    shape.add_argument("--hidden-size", type=int, default=256)
    shape.add_argument("--layers", type=int, default=10)
    shape.add_argument("--intermediate-size", type=int, default=704)
    shape.add_argument("--heads", type=int, default=4)
    shape.add_argument("--kv-heads", type=int, default=2)
    loop = parser.add_argument_group("loop")
    loop.add_argument("--seq-len", type=int, default=256)
    loop.add_argument("--long-seq-len", type=int, default=1024, help="row length in the last seventh of the run")
    loop.add_argument("--batch-tokens", type=int, default=8192)
    loop.add_argument("--lr", type=float, default=3e-3)
    loop.add_argument("--warmup-steps", type=int, default=40)
    loop.add_argument("--checkpoint-minutes", type=float, default=5.0)
    loop.add_argument("--compile", action="store_true", help="torch.compile: needs a C++ compiler, 1.3 times as fast")
    loop.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    if (args.out / "tokenizer.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
    else:
        chats = (
            message["content"]
            for name in ("sgd-train", "gsm8k-train")
            for messages in conversations(args.data / f"{name}.jsonl")
            for message in messages
        )
        sources = (text for text in standard_library(args.stdlib_chars))
        tokenizer = train_tokenizer((t for part in (chats, sources) for t in part), args.vocab_size)
        tokenizer.save_pretrained(args.out)

    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.02,
    )
    model = LlamaForCausalLM(config)
    accelerator = Accelerator(mixed_precision="bf16")
    opts = optimizers(model, args.lr)
    model, *opts = accelerator.prepare(model, *opts)
    forward = torch.compile(model, dynamic=False) if args.compile else model

    state_file = args.out / "training_state.pt"
    step = seen = 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        for opt, saved in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
        step, seen = state["step"], state["seen"]

    stream = pack(args.data, tokenizer, args.stdlib_chars, args.seed)
    print(f"{len(stream):,} tokens an epoch, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    total_steps = args.tokens // args.batch_tokens
    started = saved_at = time.monotonic()
    start_seen, smooth = seen, 0.0
    while step < total_steps:
        seq_len = args.seq_len if step < 6 / 7 * total_steps else args.long_seq_len
        # Every epoch starts at another offset, so that rows begin at other tokens.
        epoch, at = divmod(seen, len(stream))
        window = np.take(np.roll(stream, -epoch * 137), range(at, at + args.batch_tokens), mode="wrap")
        rows = torch.from_numpy(window.astype(np.int64)).view(-1, seq_len)
        factor = min(1.0, (step + 1) / args.warmup_steps) * max(0.0, 1 - step / total_steps)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = args.lr * factor
        loss = forward(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        step, seen = step + 1, seen + args.batch_tokens
        smooth = loss.item() if smooth == 0 else 0.95 * smooth + 0.05 * loss.item()
        now = time.monotonic()
        if step % 10 == 0:
            speed = (seen - start_seen) / (now - started)
            left = (total_steps - step) * args.batch_tokens / speed / 60
            print(f"step {step}/{total_steps} loss {smooth:.3f} {speed:,.0f} tok/s {left:.0f} min left", flush=True)
        if now - saved_at > args.checkpoint_minutes * 60:
            saved_at = now
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in opts]}
            torch.save({**state, "step": step, "seen": seen}, state_file.with_suffix(".tmp"))
            state_file.with_suffix(".tmp").replace(state_file)
    final = accelerator.unwrap_model(model).to(torch.bfloat16)
    final.generation_config.update(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id)
    final.save_pretrained(args.out)
    print(f"wrote {args.out}, loss {smooth:.3f}")


if __name__ == "__main__":
    main()
