"""GGUF files: their container, weights, tokenizer and rotary scaling, as llama.cpp reads them."""
