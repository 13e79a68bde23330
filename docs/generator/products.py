"""Tables of the compiled kernels' products, by form and number of rows, and of passes over prompts."""

from collections.abc import Callable
from typing import Any

from docs.generator.regions import table
from docs.generator.results import read, source


def _products() -> str:
    """Return how fast products read weights, over torch's sum of a tensor, and what more rows cost, by form."""
    rows = read("products")["rows"]
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["form"], row["rows"]), []).append(row)
    counts = sorted({count for _, count in found})

    def figures(form: str, what: str, shown: list[int]) -> list[str]:
        return [" / ".join(f"{row[what]:.2f}" for row in found[form, count]) for count in shown]

    few = [count for count in counts if count <= 4]
    many = counts[len(few) :]
    lines = [
        [form, *figures(form, "over_sum_speed", few), *figures(form, "over_one_row", many)]
        for form in dict.fromkeys(form for form, _ in found)
    ]
    header = ["form", *(f"{count} row{'s' * (count > 1)}: bytes a second over a sum's" for count in few)]
    header += [f"{count} rows over one" for count in many]
    speeds = " and ".join(str(speed) for speed in sorted({row["sum_gb_s"] for row in rows}))
    return f"{table(header, lines)}\n\nSum of one large tensor by torch: {speeds} GB/s. {source('products')}"


def _first_tokens() -> str:
    """Return the time to the first token by a prompt's length, and the share of the processor's speed."""
    models = {"first_token_smollm2": "SmolLM2-135M", "first_token_wide": "widened target (256M)"}
    lines = [
        [
            model,
            f"{row['tokens']:,}",
            f"{row['before_ms']:.0f}",
            f"{row['now_ms']:.0f}",
            f"{row['of_product']:.0%}",
            f"{row['of_tiles']:.0%}",
        ]
        for name, model in models.items()
        for row in read(name)["rows"]
    ]
    header = ["model", "tokens", "ms, before", "ms", "of torch's product", "of tile registers"]
    speeds = ", ".join(f"{read(name)['product_speed']:.1f} and {read(name)['tiles_speed']:.1f}" for name in models)
    return (
        f"{table(header, lines)}\n\nSpeeds of torch's product and of tile registers in the two runs: {speeds} "
        f"Tflop/s. {source('first_token_smollm2', 'first_token MODEL --name NAME --before TREE')}"
    )


PARTS: dict[str, Callable[[], str]] = {"results-products": _products, "results-prompts": _first_tokens}
