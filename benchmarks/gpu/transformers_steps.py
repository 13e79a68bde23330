"""Steps of transformers at the shape and batch of the engine's, to compare with."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.cycle_engines import random_weights, timed
from benchmarks.gpu.cycle_sizes import Sizes


class TransformersSteps:
    """A Llama of transformers with random weights, and the time of its steps behind a prompt."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        with torch.device("meta"):
            self.model: Any = LlamaForCausalLM(LlamaConfig(**sizes.model, tie_word_embeddings=False))
        random_weights(self.model, sizes.dtype, device)

    @torch.inference_mode()
    def generate(self, batch: int) -> float:
        """Seconds of a step of `generate`, greedy."""
        ids = self._prompts(batch)

        def seconds(tokens: int) -> float:
            settings = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
            run = lambda: self.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)  # noqa: E731
            return timed(self.device, run)[1]

        seconds(2)
        return (seconds(1 + self.sizes.peer_tokens) - seconds(1)) / self.sizes.peer_tokens

    @torch.inference_mode()
    def forward(self, batch: int) -> float:
        """Seconds of a pass of one token per prompt with the greedy choice of the next, no more."""
        output = self.model(self._prompts(batch), use_cache=True, logits_to_keep=1)
        cache, tokens = output.past_key_values, output.logits[:, -1:].argmax(-1)

        def steps(number: int) -> None:
            nonlocal tokens
            for _ in range(number):
                tokens = self.model(tokens, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

        steps(2)
        return timed(self.device, lambda: steps(self.sizes.peer_tokens))[1] / self.sizes.peer_tokens

    def _prompts(self, batch: int) -> torch.Tensor:
        return torch.randint(self.sizes.model["vocab_size"], (batch, self.sizes.context), device=self.device)
