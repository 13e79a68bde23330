"""`config.json` of public models as they are on the hub, with sizes that fit a test."""

from typing import Any

# What is shrunk: none of it changes how a model computes. `head_dim` is set where the published file has it.
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "use_cache": True,
}
_LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 16,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
}
_SMOL = {
    **_LLAMA,
    "is_llama_config": True,
    "mlp_bias": False,
    "rope_interleaved": False,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
}

SUPPORTED: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM-135M-Instruct": {**_SMOL, "max_position_embeddings": 2048, "rope_theta": 10000.0},
    "HuggingFaceTB/SmolLM2-135M-Instruct": {**_SMOL, "max_position_embeddings": 8192, "rope_theta": 100000},
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": {**_LLAMA, "max_position_embeddings": 2048, "rope_theta": 10000.0},
    "meta-llama/Llama-2-7b-chat-hf": {
        **{key: value for key, value in _LLAMA.items() if key not in ("attention_bias", "attention_dropout")},
        "max_position_embeddings": 4096,
        "torch_dtype": "float16",
    },
    "meta-llama/Meta-Llama-3-8B-Instruct": {**_LLAMA, "max_position_embeddings": 8192, "rope_theta": 500000.0},
    "meta-llama/Llama-3.1-8B-Instruct": {
        **_LLAMA,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "rope_scaling": _LLAMA3_ROPE,
        "rope_theta": 500000.0,
    },
    "meta-llama/Llama-3.2-1B-Instruct": {
        **_LLAMA,
        "head_dim": 8,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "01-ai/Yi-1.5-6B-Chat": {
        **_LLAMA,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000.0,
    },
    "mistralai/Mistral-7B-Instruct-v0.1": {**_MISTRAL, "rope_theta": 10000.0, "sliding_window": 4096},
    "mistralai/Mistral-7B-Instruct-v0.3": {**_MISTRAL, "rope_theta": 1000000.0, "sliding_window": None},
    "mistralai/Mistral-Nemo-Instruct-2407": {
        **_MISTRAL,
        "head_dim": 16,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "Qwen/Qwen2-0.5B-Instruct": {
        **_QWEN2,
        "max_window_layers": 24,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B-Instruct": {**_QWEN2, "max_window_layers": 28, "sliding_window": 131072},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": {
        **_QWEN2,
        "max_position_embeddings": 131072,
        "max_window_layers": 21,
        "rope_theta": 10000,
        "sliding_window": 4096,
        "use_mrope": False,
    },
    "Qwen/Qwen3-0.6B": {**_QWEN3, "max_window_layers": 28, "tie_word_embeddings": True},
    "Qwen/Qwen3-8B": {**_QWEN3, "max_window_layers": 36},
}

_BAICHUAN = {
    "architectures": ["BaichuanForCausalLM"],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_max_length": 4096,
    "model_type": "baichuan",
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_BAICHUAN_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 64000,
}
_BAICHUAN_13B = {
    "hidden_size": 5120,
    "intermediate_size": 13696,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "vocab_size": 64000,
}
_BAICHUAN_2 = {"vocab_size": 125696, "z_loss_weight": 0}

# Of a family that transformers does not have, with the published sizes: some of them say how a model computes.
TWINS: dict[str, dict[str, Any]] = {
    "baichuan-inc/Baichuan-7B": {**_BAICHUAN, **_BAICHUAN_7B, "architectures": ["BaiChuanForCausalLM"]},
    "baichuan-inc/Baichuan-13B-Chat": {**_BAICHUAN, **_BAICHUAN_13B},
    "baichuan-inc/Baichuan2-7B-Chat": {**_BAICHUAN, **_BAICHUAN_7B, **_BAICHUAN_2},
    "baichuan-inc/Baichuan2-13B-Chat": {**_BAICHUAN, **_BAICHUAN_13B, **_BAICHUAN_2},
}

# Names by which they are refused, and the `model_type` of their config.json.
REFUSED: dict[str, dict[str, Any]] = {
    "microsoft/Phi-3-mini-4k-instruct": {**_MISTRAL, "model_type": "phi3", "auto_map": {"AutoConfig": "x.X"}},
    "google/gemma-2-2b-it": {**_LLAMA, "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh"},
    "google/gemma-3-1b-it": {**_LLAMA, "model_type": "gemma3_text", "hidden_act": None},
    "google/gemma-3-4b-it": {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
    "mistralai/Mixtral-8x7B-Instruct-v0.1": {**_MISTRAL, "model_type": "mixtral", "num_local_experts": 8},
    "Qwen/Qwen3-30B-A3B": {**_QWEN3, "model_type": "qwen3_moe", "num_experts": 128},
}
REFUSED_AS = {
    "microsoft/Phi-3-mini-4k-instruct": "Phi-3",
    "google/gemma-2-2b-it": "Gemma-2",
    "google/gemma-3-1b-it": "Gemma-3",
    "google/gemma-3-4b-it": "Gemma-3",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "Mixtral",
    "Qwen/Qwen3-30B-A3B": "Qwen3 with experts",
}
