"""Tables of what fewer bits change: in weights, and in keys and values."""

from collections.abc import Callable
from typing import Any

from docs.generator.regions import table
from docs.generator.results import read, source, sourced


def _quantized_products() -> str:
    """Return how much faster products with 8-bit weights are, by form, dtype and rows."""
    found: dict[tuple[str, str, int], dict[int, list[float]]] = {}
    for row in read("quantization_products")["rows"]:
        ratios = found.setdefault((row["form"], row["dtype"], row["threads"]), {})
        ratios.setdefault(row["rows"], []).append(row["ratio"])
    counts = sorted({count for ratios in found.values() for count in ratios})
    rows = [
        [form, dtype, str(threads), *(" / ".join(f"{ratio:.2f}" for ratio in ratios[count]) for count in counts)]
        for (form, dtype, threads), ratios in found.items()
    ]
    header = ["form", "`--dtype`", "threads", *(f"{count} row{'s' * (count > 1)}" for count in counts)]
    return sourced("quantization_products", header, rows, "quantization products")


def _kv_cache_dtype() -> str:
    """Return what keys and values in 8 bits change, and the memory that they take."""

    def figures(one: dict[str, Any]) -> list[str]:
        by_text = [one[name] for name in ("sgd-eval", "gsm8k-eval")]
        pairs = [
            " / ".join(f"{text['perplexity']:.3f} ± {text['standard_error_of_change']:.3f}" for text in by_text),
            *(
                " / ".join(f"{text[what]:{form}}" for text in by_text)
                for what, form in (("mean_change_of_log_prob", ".3f"), ("tau", ".2f"))
            ),
        ]
        bytes_of, requests = one["bytes_per_token_by_part"], one["requests"]
        sizes = f"{bytes_of['target']} + {bytes_of['head']} + {bytes_of['features']}"
        return [sizes, f"{requests['target']} / {requests['with_head']}", *pairs]

    made = read("kv_cache_dtype")
    header = ["target", "head", "scales of the target", "bytes a token: target + head + features"]
    header += [f"requests, where 16 bits hold {made['requests_in_16_bits']}: alone / with the head"]
    header += ["perplexity, sgd / gsm8k", "mean change of a log-probability", "tau"]
    rows = []
    for one in made["rows"]:
        source_of = {"auto": "", "int8": "measured"}.get(one["kv_cache_dtype"], "1")
        scales = "checkpoint's" if one["checkpoint_scales"] else source_of
        rows.append([one["kv_cache_dtype"], one["draft_kv_cache_dtype"], scales, *figures(one)])
    return sourced("kv_cache_dtype", header, rows)


def _quantized_logits() -> str:
    """Return what 8-bit weights change in the demo target's logits."""
    rows = [
        [
            name,
            f"{row['mean_logit_difference']:.3f}",
            f"{row['largest_logit_difference']:.2f}",
            f"{100 * row['equal_greedy_tokens']:.1f} %",
            " / ".join(f"{value:.3f}" for value in reversed(row["perplexities"])),
        ]
        for name, row in read("quantization_logits")["comparisons"].items()
    ]
    header = ["demo target", "mean difference", "largest", "equal greedy tokens", "perplexity of each"]
    return sourced("quantization_logits", header, rows, "quantization logits")


def _quantized_speed() -> str:
    """Return speed and memory of the widened target with 8-bit weights."""
    speed = read("quantization_speed")
    rows = [
        [
            kind,
            f"{speed['weights_mib'][kind]:.0f} MiB",
            *(f"{speed['tok_per_s'][f'{name} {kind}']:.0f}" for name in ("plain", "eagle3")),
            f"{speed['eagle3_over_plain'][kind]:.2f}",
        ]
        for kind in speed["weights_mib"]
    ]
    ratios = speed["q8_over_none"]
    header = ["`--quantization`", "weights", "plain, tok/s", "EAGLE-3, tok/s", "EAGLE-3 over plain"]
    medians = f"{ratios['plain']:.2f} plain, {ratios['eagle3']:.2f} with EAGLE-3"
    command = source("quantization_speed", "quantization speed --wide FOLDER")
    return f"{table(header, rows)}\n\nq8 over none, medians over prompts: {medians}, in {speed['dtype']}. {command}"


PARTS: dict[str, Callable[[], str]] = {
    "results-q8-products": _quantized_products,
    "results-kv-cache-dtype": _kv_cache_dtype,
    "results-q8-logits": _quantized_logits,
    "results-q8-speed": _quantized_speed,
}
