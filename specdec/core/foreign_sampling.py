"""Sampling parameters of vLLM's, now or once, that are not supported, with the values that ask for nothing."""

from specdec.kernels.types.settings import Foreign

FOREIGN_SAMPLING = {
    "logits_processors": Foreign("use logit_bias, allowed_token_ids, bad_words or structured_outputs", ([],)),
    "guided_decoding": Foreign("use structured_outputs"),
    "best_of": Foreign("use n, and choose among the outputs", (1,)),
    "use_beam_search": Foreign("use LLM.beam_search", (False,)),
    "length_penalty": Foreign("use LLM.beam_search", (1, 1.0)),
    "early_stopping": Foreign("use LLM.beam_search", (False,)),
    "flat_logprobs": Foreign("log-probabilities are lists of dicts", (False,)),
    **dict.fromkeys(
        ("logprob_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start"),
        Foreign("use logprobs or prompt_logprobs, or choices for the scores of given tokens"),
    ),
    "stream_interval": Foreign("each step that brings tokens is a state of the stream", (1,)),
    "skip_reading_prefix_cache": Foreign("use cache_salt, or enable_prefix_caching of the engine", (False,)),
    "repetition_detection": Foreign("use repetition_penalty or max_tokens"),
    "routed_experts_prompt_start": Foreign("models have no experts", (0,)),
    "trace_decode_token_ids": Foreign("use choices for the scores of given tokens"),
    "skip_clone": Foreign("a request keeps the values that it began with", (False,)),
    "output_text_buffer_length": Foreign("leave it out", (0,)),
    "extra_args": Foreign("leave it out", ({},)),
}
# Parameters of a beam search.
FOREIGN_BEAMS = {
    "temperature": Foreign("a beam search takes the most probable tokens; leave it out", (0, 0.0)),
    "include_stop_str_in_output": Foreign("a search has no stop strings; leave it out", (False,)),
}
