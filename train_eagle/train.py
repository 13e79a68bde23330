"""Train an EAGLE-1/2 head for a target.

    python -m specdec.train_eagle.train --model MODEL --data answers.jsonl --features build/features --out HEAD

and a run of a minute on the demo model, to see that it works:

    python -m specdec.train_eagle.train --data answers.jsonl --limit 64 --epochs 1 --features /tmp/f --out /tmp/head

Features are captured once into `--features` and found there by later runs. A killed run goes on from its last
checkpoint when the same command is given again.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoTokenizer

from specdec.config import DEMO, resolve_dtype
from specdec.draft_heads.checkpoint import save_eagle_head
from specdec.draft_heads.eagle import EagleConfig, EagleHead
from specdec.draft_heads.llama_config import LlamaConfig
from specdec.draft_heads.rope import RopeConfig, rotary_at
from specdec.models.llama import LlamaModel, load_llama
from specdec.train_eagle.causal_attention import CausalAttention
from specdec.train_eagle.conversations import encode, read_conversations
from specdec.train_eagle.features import FeatureBatch, FeatureSample, FeatureStore, batches, capture
from specdec.train_eagle.losses import HeadLoss, eagle_loss


def new_head(model: LlamaModel) -> EagleHead:
    """A head of the target's sizes with default rotary settings; its embedding is the target's, frozen."""
    target = model.config
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_position=target.max_position,
        rms_norm_eps=target.rms_norm_eps,
        rope=RopeConfig(theta=target.rope.theta),
    )
    # No fc.bias: vLLM cannot load a head that has one.
    head = EagleHead(EagleConfig(config, fc_bias=False))
    for parameter in head.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
    head.embed_tokens.weight.data.copy_(model.embed_tokens.weight)
    head.embed_tokens.weight.requires_grad_(False)
    return head


class HeadTrainer(nn.Module):
    """The head with what turns a batch into its loss.

    Args:
        unroll: passes over a batch; in pass 2 and on the head reads its own predictions of the pass before
            in place of the target's features, as it does when it drafts (HASS, Zhang et al. 2024).
    """

    def __init__(
        self, head: EagleHead, lm_head: Tensor, noise: float, feature_weight: float, token_weight: float, unroll: int
    ) -> None:
        super().__init__()
        self.head, self.noise, self.unroll = head, noise, unroll
        self.weights = (feature_weight, token_weight)
        llama = head.config.llama
        self.register_buffer("lm_head", lm_head, persistent=False)
        self.register_buffer("rope", llama.rope.table(llama.head_dim, llama.max_position, torch.float32), False)

    def forward(self, batch: FeatureBatch) -> list[HeadLoss]:
        """Losses of the rows whose next token the assistant says, per pass.

        Row i of a sequence takes (x_i, f_{i-1}), i from 1 on, and predicts f_i, hence token i + 1.
        """
        assert isinstance(self.lm_head, Tensor)
        assert isinstance(self.rope, Tensor)
        count, length = batch.tokens.shape
        rows = length - 1
        tokens = batch.tokens[:, 1:].reshape(-1)
        wanted = batch.features[:, 1:].float()
        # The row before the assistant's first token is trained too: it predicts that token.
        trained = batch.mask[:, 2:].nonzero(as_tuple=True)
        features = batch.features[:, :-1].float()
        if self.training and self.noise:
            features = features + torch.empty_like(features).uniform_(-self.noise, self.noise)
        rotary = rotary_at(self.rope, torch.arange(rows, device=self.rope.device).repeat(count))
        losses = []
        for _ in range(self.unroll if self.training else 1):
            hidden = self.head(tokens, features.reshape(count * rows, -1), rotary, [CausalAttention(count, rows)])
            predicted = hidden.view(count, rows, -1)
            losses.append(eagle_loss(predicted[trained], wanted[trained], self.lm_head, *self.weights))
            # What the head reads at row i is its own f'_{i-1}; row 1 has none and keeps the target's.
            features = torch.cat([batch.features[:, :1].float(), predicted[:, :-1].float()], 1)
        return losses


def capture_all(args: argparse.Namespace, model: LlamaModel) -> list[FeatureSample]:
    """The features of the conversations in `args.data`, captured unless they are in `args.features` already."""
    store = FeatureStore(args.features)
    if not (args.features / "index.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
        conversations = read_conversations(args.data, args.limit)
        samples = [encode(tokenizer, messages, args.max_length) for messages in conversations]
        samples = [sample for sample in samples if sum(sample.mask[2:]) and len(sample.token_ids) > 2]
        size = sum(len(sample.token_ids) for sample in samples) * model.config.hidden_size * args.dtype.itemsize
        print(f"capturing features of {len(samples):,} conversations, {size / 2**20:,.0f} MiB, to {args.features}")
        for start in range(0, len(samples), 2048):
            store.add(list(capture(model, samples[start : start + 2048])))
    return store.load()


@torch.no_grad()
def validate(trainer: HeadTrainer, samples: list[FeatureSample], batch_tokens: int) -> tuple[float, float]:
    """Mean token loss and agreement over held-out conversations."""
    trainer.eval()
    results = [(batch.mask[:, 2:].sum().item(), trainer(batch)[0]) for batch in batches(samples, batch_tokens, 0)]
    trainer.train()
    rows = sum(count for count, _ in results)
    token = sum(count * loss.token.item() for count, loss in results) / rows
    return token, sum(count * loss.agreement.item() for count, loss in results) / rows


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO / "target", help="checkpoint folder of the target")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head to write")
    data = parser.add_argument_group("data")
    data.add_argument("--data", type=Path, nargs="+", required=True, help="JSONL files with `messages`")
    data.add_argument("--limit", type=int, help="conversations of each file")
    data.add_argument("--features", type=Path, required=True, help="folder of captured features")
    data.add_argument("--max-length", type=int, default=1024, help="tokens kept of a conversation")
    data.add_argument("--held-out", type=int, default=100, help="conversations for validation")
    loop = parser.add_argument_group("loop")
    loop.add_argument("--epochs", type=int, default=10)
    loop.add_argument("--batch-tokens", type=int, default=8192)
    loop.add_argument("--lr", type=float, default=2e-3)
    loop.add_argument("--warmup-steps", type=int, default=50)
    loop.add_argument("--clip-norm", type=float, default=1.0)
    loop.add_argument("--noise", type=float, default=0.1, help="features get uniform noise of +- this")
    loop.add_argument("--feature-weight", type=float, default=1.0, help="weight of the feature loss")
    loop.add_argument("--token-weight", type=float, default=0.1, help="weight of the token loss")
    loop.add_argument("--unroll", type=int, default=1, help="passes over a batch, from the second on own features")
    loop.add_argument("--checkpoint-minutes", type=float, default=3.0)
    loop.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    args.dtype = resolve_dtype("auto", device)
    model = load_llama(args.model, args.dtype, device)
    samples = capture_all(args, model)
    held_out, train = samples[: args.held_out], samples[args.held_out :]
    accelerator = Accelerator(mixed_precision="bf16" if args.dtype == torch.bfloat16 else "no")
    head = new_head(model)
    trainer = HeadTrainer(
        head, model.lm_head_weight, args.noise, args.feature_weight, args.token_weight, args.unroll
    ).train()
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    wrapped, optimizer = accelerator.prepare(trainer, optimizer)

    per_epoch = len(batches(train, args.batch_tokens, 0))
    total = args.epochs * per_epoch
    args.out.mkdir(parents=True, exist_ok=True)
    state_file = args.out / "training_state.pt"
    step = 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        step = state["step"]
    tokens = sum(len(sample.tokens) for sample in train)
    print(f"{len(train):,} conversations, {tokens:,} tokens, {total:,} steps", flush=True)
    started = saved = time.monotonic()
    first = step
    while step < total:
        epoch = step // per_epoch
        for batch in batches(train, args.batch_tokens, args.seed + epoch)[step % per_epoch :]:
            progress = step / total
            rate = args.lr * min(1.0, (step + 1) / args.warmup_steps) * (0.5 + 0.5 * math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = rate
            losses = wrapped(batch)
            accelerator.backward(torch.stack([loss.total for loss in losses]).mean())
            accelerator.clip_grad_norm_(trained, args.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            now = time.monotonic()
            if step % 20 == 0:
                left = (total - step) * (now - started) / (step - first) / 60
                shown = " ".join(
                    f"[{loss.feature.item():.4f} {loss.token.item():.3f} {loss.agreement.item():.3f}]"
                    for loss in losses
                )
                print(f"step {step}/{total} [feature token agreement] {shown} {left:.1f} min left", flush=True)
            if now - saved > args.checkpoint_minutes * 60 or step == total:
                saved = now
                state = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save({**state, "rng": torch.get_rng_state()}, state_file.with_suffix(".tmp"))
                state_file.with_suffix(".tmp").replace(state_file)
        token, agreement = validate(trainer, held_out, args.batch_tokens)
        print(f"epoch {epoch + 1}: held-out token loss {token:.3f}, agreement {agreement:.3f}", flush=True)
    recipe = {name: value for name, value in vars(args).items() if isinstance(value, int | float)}
    save_eagle_head(head, args.out, {"training": recipe})


if __name__ == "__main__":
    main()
