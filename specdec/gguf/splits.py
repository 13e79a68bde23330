"""How llama.cpp splits text before byte-pair merges, by the names that GGUF files have for it (`tokenizer.ggml.pre`).

The patterns are those of llama.cpp (`llama-vocab.cpp`, October 2026), written for Oniguruma, the regular expressions of
the package `tokenizers`. Where llama.cpp's own functions (`unicode.cpp`) differ from the pattern that they stand for,
the functions count: `\\p{Lu}` and its like are any letter, and spaces beyond ASCII are in no range of characters.
"""

from dataclasses import dataclass

# English contractions, whose case is ASCII's.
_SHORT = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"(?:{_SHORT})|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_END}"
_QWEN2 = rf"(?:{_SHORT})|{_WORDS}|\p{{N}}|{_SIGNS}|{_END}"
_QWEN35 = rf"(?:{_SHORT})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_END}"
_MINICPM5 = rf"(?:{_SHORT})|{_WORDS}|\p{{N}}+|{_SIGNS}|{_END}"
# Letters that are no lower case and no upper case of ASCII.
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_UPPER_MARKS, _LOWER_MARKS = r"(?:(?=[\p{L}\p{M}])[^a-z])", r"(?:(?=[\p{L}\p{M}])[^A-Z])"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SIGNS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_SIGNS_SLASH}|{_END}"


def _gpt4o(upper: str, lower: str, digits: str) -> str:
    short = rf"(?:{_SHORT})?"
    return rf"{_LEAD}{upper}*{lower}+{short}|{_LEAD}{upper}+{lower}*{short}|{digits}|{_SIGNS_SLASH}|{_END}"


_ANY_CASE = r"[\p{L}\p{M}]"
_HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_SIGN_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_SIGN_WORDS = rf"{_ASCII_SIGN_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
# Groups of three digits, counted from the last. The first has the text before it.
_THREES = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_CJK = r"(?:(?!\s)[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff])+"
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_NO_HAN = r"(?:(?=\p{L})\P{Han})"


@dataclass(frozen=True)
class Split:
    """How text is split, and what goes with the name of that.

    Attributes:
        patterns: each splits the pieces of the one before; its matches are pieces, and so is what lies between them.
        ignores_merges: whether a piece that is a token is that token, whatever the merges say.
        adds_bos: whether a text begins with the token of beginnings, unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


def _named(names: str, *patterns: str, ignores_merges: bool = False, adds_bos: bool = False) -> dict[str, Split]:
    return dict.fromkeys(names.split(), Split(patterns, ignores_merges, adds_bos))


# What llama.cpp does where a file has no name: the same as for "default".
NO_NAME = "default"
SPLITS: dict[str, Split] = {
    **_named("default", r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **_named(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _LLAMA3,
        ignores_merges=True,
        adds_bos=True,
    ),
    **_named("dbrx smaug-bpe chatglm-bpe", _LLAMA3),
    **_named("glm4 glm5", _LLAMA3, ignores_merges=True),
    **_named(
        "jais-2",
        rf"(?:{_SHORT})|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|\s{{512}}(?!\S)|\s{{256}}(?!\S)|\s{{128}}(?!\S)|"
        r"\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
    ),
    **_named(
        "deepseek-llm",
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002]+",
        r"\s+\z",
        _CJK,
        r"\p{N}+",
    ),
    **_named("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    **_named("deepseek-v3 hunyuan-dense joyai-llm hy_v4", r"\p{N}{1,3}", _HAN_KANA, rf"{_SIGN_WORDS}[\r\n]*|{_END}"),
    **_named("spark2_5", r"\p{N}{1,3}", _HAN_KANA, rf"{_SIGN_WORDS}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
    **_named(
        "youtu",
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        _gpt4o(_ANY_CASE, _ANY_CASE, r"\p{N}"),
        ignores_merges=True,
    ),
    **_named("falcon", r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    **_named("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", r"\p{N}", _GPT2),
    **_named(
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code "
        "roberta-bpe mpt olmo jais trillion granite-docling exaone4",
        _GPT2,
    ),
    **_named("qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2", _QWEN2),
    **_named("qwen35", _QWEN35),
    **_named("poro-chat bloom gpt3-finnish", " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"),
    **_named("viking", " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}"),
    **_named("tekken", _TEKKEN, ignores_merges=True, adds_bos=True),
    **_named(
        "chameleon",
        "<sentinel:[0-9]+>",
        "(?:IMGIMG)(?:[A-I]{1,4})Z",
        r"(?:[\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
        adds_bos=True,
    ),
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", _gpt4o(_UPPER, _LOWER, r"\p{N}{1,3}")),
    **_named("granite-embed-multi-97m", _gpt4o(_UPPER_MARKS, _LOWER_MARKS, r"\p{N}{1,3}"), ignores_merges=True),
    **_named("tiny_aya cohere2moe", _THREES, _gpt4o(_ANY_CASE, _ANY_CASE, r"\p{N}{1,3}")),
    **_named(
        "kimi-k2",
        rf"\p{{Han}}+|{_LEAD}{_NO_HAN}+(?:{_SHORT})?|\p{{N}}{{1,3}}|{_SIGNS}|{_END}",
    ),
    **_named("superbpe", r"\p{N}+", r"(?=([0-9]{3})+(?![0-9]))"),
    **_named(
        "bailingmoe bailingmoe2 llada-moe",
        rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORDS}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    **_named("seed-coder", rf"(?:{_SHORT})|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_END}"),
    **_named("ufakzeka", rf"{_WORDS}|\p{{N}}|{_SIGNS}|{_END}"),
    **_named(
        "afmoe",
        _THREES,
        "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        rf"{_SIGN_WORDS}[\r\n]*|{_END}",
    ),
    **_named("laguna", r"[^\n]+|[\n]+", _QWEN2),
    **_named(
        "exaone-moe",
        rf"(?:{_SHORT})|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|"
        r"\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    **_named("minicpm5", r"\p{N}{1,3}", _MINICPM5, ignores_merges=True),
}
# Names of byte-pair merges over plain text instead of bytes, which no model of this engine has.
PLAIN_TEXT = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace")
