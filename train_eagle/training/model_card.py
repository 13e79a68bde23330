"""The model card of a published head."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from specdec.core.outputs import taus_in_words
from specdec.draft_heads.heads.draft_head import FeatureHead
from specdec.models.head_fit import VOCABULARY
from specdec.train_eagle.data.stage_settings import HeadLayout
from specdec.train_eagle.evaluation.evaluation import Evaluation, format_shares
from specdec.train_eagle.training.train_config import FREE
from specdec.train_eagle.training.training_kind import TrainingKind

UNKNOWN = "TARGET"


def model_card(
    name: str,
    kind: TrainingKind[Any],
    head: FeatureHead,
    recipe: Mapping[str, Any],
    base_model: str | None,
    licence: str | None,
    evaluation: Evaluation | None,
    notes: str | None,
    layout: HeadLayout,
) -> str:
    """Return a README.md with YAML front matter, as the Hugging Face hub reads it.

    Args:
        name: name of the head's folder.
        recipe: settings of the training.
        base_model: name of the target, not a path; None if unknown.
        licence: the head's licence.
        notes: Markdown that is inserted unchanged.
    """
    front: dict[str, Any] = {
        "base_model": base_model,
        "library_name": "specdec",
        "pipeline_tag": "text-generation",
        "tags": [kind.files.name, "speculative-decoding", "draft-model"],
        "license": licence,
    }
    given = {key: value for key, value in front.items() if value is not None}
    title = f"# {kind.files.label} head" + (f" for {base_model}" if base_model else "")
    sections = [
        f"---\n{yaml.safe_dump(given, sort_keys=False, allow_unicode=True)}---",
        title,
        _summary(kind, head, layout),
    ]
    sections += [notes] if notes else []
    if recipe:
        rows = [
            (f"`{setting}`", _shown(value)) for setting, value in recipe.items() if setting not in (VOCABULARY, *FREE)
        ]
        sections += ["## Training", _table(("setting", "value"), rows)]
    sections += _figures(evaluation) if evaluation else []
    return "\n\n".join([*sections, _use(name, kind, head, base_model or UNKNOWN)]) + "\n"


def _summary(kind: TrainingKind[Any], head: FeatureHead, layout: HeadLayout) -> str:
    _, tensors = kind.files.official(head)
    weights = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    layers = "one layer" if head.llama.num_layers == 1 else f"{head.llama.num_layers} layers"
    written = f"in the official {kind.files.label} layout" if layout == "official" else "in speculators' layout"
    sentences = [
        f"A draft head for speculative decoding, {written}: {layers}, {weights / 1e6:,.1f} million parameters.",
        kind.facts(head),
        "The output is the target's own: the head only makes it faster.",
    ]
    return " ".join(filter(None, sentences))


def _figures(found: Evaluation) -> list[str]:
    rows = [(*row.cells, f"{row.prompts:,}") for row in found.measured]
    is_timed = any(row.speedup is not None for row in found.measured)
    speed = f" Speed is over plain decoding, one request at a time ({found.machine})." if is_timed else ""
    ranks = [(domain, f"top {place}", format_shares(shares)) for domain, place, shares in found.ranked()]
    return [
        "## Figures",
        f"{found.dtype}; answers of at most {found.max_tokens} tokens. "
        f"Tau is the mean number of tokens per target step; larger trees have a larger one, and cost more.{speed}",
        _table(("text", "temperature", "tree", "tau", "speed", "steps that accept depth 1, 2, …", "prompts"), rows),
        "How often the target's next token is among the head's likeliest, given that its drafts so far are right:",
        _table(("text", "among", "at depth 1, 2, …"), ranks),
    ]


def _use(name: str, kind: TrainingKind[Any], head: FeatureHead, base: str) -> str:
    method, engines = kind.files.name, kind.engines(head)
    commands = {"specdec": f'specdec generate --model {base} --draft {name} "Hello"'}
    if "vLLM" in engines:
        config = f'{{"method": "{method}", "model": "{name}", "num_speculative_tokens": {kind.drafted(head)}}}'
        commands["vLLM"] = f"vllm serve {base} --speculative-config '{config}'"
    if "SGLang" in engines:
        commands["SGLang"] = (
            f"python -m sglang.launch_server --model-path {base} \\\n"
            f"  --speculative-algorithm {method.upper()} --speculative-draft-model-path {name} \\\n"
            "  --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
        )
    listed = "\n".join(commands.values())
    return f"## Use\n\nWith {', '.join(commands)}:\n\n```\n{listed}\n```"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return taus_in_words(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
