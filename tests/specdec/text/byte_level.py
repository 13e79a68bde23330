"""Tokenizers of bytes."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def spelled(piece: bytes) -> str:
    """Bytes in the alphabet of byte-level tokenizers."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return "".join(chr(byte if byte in plain else 256 + sum(b not in plain for b in range(byte))) for byte in piece)


def merged_tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes, and of pieces that begin or end inside a character, as in large vocabularies."""
    pieces = [" caf\xc3", "ab\xf0\x9f", "\xa9x", "\x98\x80!", "\xff", "\xe2\x82", "\xacz\xe2", "ab"]
    vocab = {c: i for i, c in enumerate(ALPHABET)}
    for piece in pieces:
        vocab.setdefault(spelled(piece.encode("latin-1")), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


MERGED = merged_tokenizer()
# Bytes of characters and of none, letters, pieces, and the special token.
BYTES = [MERGED.token_to_id(c) for c in ALPHABET]
PIECES = list(range(len(ALPHABET), MERGED.get_vocab_size()))
