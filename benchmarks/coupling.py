"""Tau by temperature: how often the emitted token is among a node's first K children.

    python -m benchmarks.coupling

The texts were written by the target itself, at temperature 0 and at 1. Every token of an answer is taken as the root of
a tree; the head, fed the target's own features, ranks the children. This separates the effect of the text from that of
how tokens are chosen. Three choices: the target's argmax among the head's most probable tokens (greedy); a sample of
the target among the same (likeliest); the same sample among the first after adding the same noise to the head's scores
(coupled).
"""

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import read_prompts, write
from specdec import LLM, SamplingParams
from specdec.config import DEMO
from specdec.draft_heads.formats.head_kinds import load_head
from specdec.draft_heads.heads.eagle import EagleForm
from specdec.draft_heads.llama.rope import rotary_at
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.passes.features import OnlineFeatures
from specdec.train_eagle.passes.unrolled_attention import UnrolledAttention
from specdec.verify.noise import gumbel

CHILDREN = (1, 2, 4, 8)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0], help="of the draws")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    llm = LLM(draft=None, dtype="float32")
    weight = llm.model.weights.lm_head_weight
    head = load_head(DEMO / "eagle", llm.model.parts, llm.engine.worker.cache.kernels).draft.head
    assert isinstance(head, EagleForm)
    llama = head.llama
    rope = llama.rope.table(llama.head_dim, llama.max_position, torch.float32)
    rows: list[dict[str, Any]] = []
    for name in ("sgd-eval", "gsm8k-eval"):
        prompts = [llm.chat_prompt(messages) for messages in read_prompts(name)]
        for written_at in (0.0, 1.0):
            params = [SamplingParams(temperature=written_at, seed=i, max_tokens=args.max_tokens) for i in range(100)]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            samples = [
                Sample([*prompt, *output.token_ids], [False] * len(prompt) + [True] * len(output.token_ids))
                for prompt, output in zip(prompts, outputs, strict=True)
            ]
            ps, qs = [], []
            source = OnlineFeatures(llm.model, samples, ())
            for i, prompt in enumerate(prompts):
                features = source.batch([i])
                length = len(features.tokens) - 1
                rotary = rotary_at(rope, torch.arange(length))
                hidden = head(features.tokens[1:], features.features[:-1], rotary, [UnrolledAttention([length])])
                # Row i of both tells token i + 1; the answer's second token is the first that can be drafted.
                start = len(prompt)
                ps.append((features.features[start:-1] @ weight.T).log_softmax(-1))
                qs.append((hidden[start - 1 : -1] @ weight.T).log_softmax(-1))
            p, q = torch.cat(ps), torch.cat(qs)
            entropy = -(p.exp() * p).sum(-1).mean().item()

            def hits(emitted: torch.Tensor, ranked: torch.Tensor) -> list[float]:
                found = ranked.topk(max(CHILDREN), -1).indices == emitted[:, None]
                return [round(found[:, :k].any(1).float().mean().item(), 3) for k in CHILDREN]

            common = {"prompts": name, "written_at": written_at, "tokens": len(p), "entropy_nats": round(entropy, 2)}
            rows.append({**common, "choice": "greedy", "temperature": 0.0, "hits": hits(p.argmax(-1), q)})
            noise = torch.stack([gumbel(1, 0, i, p.shape[1]) for i in range(len(p))])
            for temperature in args.temperatures:
                warm_p, warm_q = ((x / temperature).log_softmax(-1) for x in (p, q))
                drawn = (warm_p + noise).argmax(-1)
                for choice, ranked in (("likeliest", warm_q), ("coupled", warm_q + noise)):
                    rows.append({**common, "choice": choice, "temperature": temperature, "hits": hits(drawn, ranked)})
    table = Table("prompts", "text of", "entropy", "choice", "temperature", *(f"K = {k}" for k in CHILDREN))
    for row in rows:
        table.add_row(
            row["prompts"],
            f"temperature {row['written_at']:g}",
            f"{row['entropy_nats']:.2f}",
            row["choice"],
            f"{row['temperature']:g}",
            *(f"{hit:.2f}" for hit in row["hits"]),
        )
    Console().print(table)
    write("coupling", {"children": CHILDREN, "rows": rows})


if __name__ == "__main__":
    main()
