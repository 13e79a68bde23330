"""Requests that are made as those of `LLM.generate` and are not queued, so that tests can queue them at a step."""

from specdec import LLM, SamplingParams
from specdec.core.lora_request import LoRARequest
from specdec.core.request import RequestGroup


def new_group(
    llm: LLM,
    prompt: str | list[int],
    params: SamplingParams,
    *,
    priority: int = 0,
    cache_salt: str | None = None,
    lora_request: LoRARequest | None = None,
) -> RequestGroup:
    """Make the requests of a prompt, one per sample, of an engine of one rank."""
    add = llm.request_maker.add(prompt, params, priority, cache_salt)
    add.adapter = lora_request
    return llm.engine.new_group(add)
