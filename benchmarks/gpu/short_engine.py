"""A short run of the engine on the demo model, for a checker of memory to look at: prompts in chunks, draft trees, and
every acceptance rule, greedy and sampled.

Without CUDA graphs, as the checker must see each allocation by itself, and a capture allows none.
"""

from benchmarks.gpu.device import day_device

PROMPTS = ("I would like to find a restaurant in San Jose.", "Can you find me a bus to Fresno?")


def main() -> None:
    device = day_device()
    from specdec import LLM, DraftShape, SamplingParams

    for verify, head in (("coupled", "eagle3"), ("rejection", "eagle"), ("rejection", "dspark")):
        llm = LLM(
            draft=head,
            verify=verify,
            device=str(device),
            dtype="float32" if device.type == "cpu" else "auto",
            kernels="triton",
            shape=DraftShape(2, 2, 4),
            adaptive_drafts=False,
            prefill_stretch=0,
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            kv_cache_memory=1 << 20,
        )
        params = [SamplingParams(temperature=t, top_k=20, seed=1, max_tokens=3, ignore_eos=True) for t in (0, 1)]
        outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
        assert all(len(output.token_ids) == 3 for output in outputs), "too few tokens"
        assert llm.stats().drafts_verified > 0, "nothing was drafted"
        print(f"{verify}, {head}: done", flush=True)


if __name__ == "__main__":
    main()
