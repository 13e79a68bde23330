"""The model card of a published head."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from specdec.draft_heads.heads.draft_head import FeatureHead
from specdec.train_eagle.evaluation import Evaluation
from specdec.train_eagle.training_kind import TrainingKind

UNKNOWN = "TARGET"
# Settings of a run that do not affect its head.
UNTOLD = ("checkpoint_minutes", "evaluate_every", "evaluate_prompts", "gradient_checkpointing")


@dataclass(frozen=True)
class ModelCard:
    """A README.md with YAML front matter, as the Hugging Face hub reads it.

    Attributes:
        name: name of the head's folder.
        kind: the head's kind.
        head: the head.
        recipe: settings of the training.
        base_model: name of the target; None if unknown.
        licence: the head's licence.
        evaluation: measurements.
        notes: Markdown that is inserted unchanged.
    """

    name: str
    kind: TrainingKind[Any]
    head: FeatureHead
    recipe: Mapping[str, Any]
    base_model: str | None = None
    licence: str | None = None
    evaluation: Evaluation | None = None
    notes: str | None = None

    def text(self) -> str:
        """Return the file's text."""
        sections = [self._front(), f"# {self._title}", self._head(), *([self.notes] if self.notes else [])]
        sections += [*self._recipe(), *self._figures(), self._use()]
        return "\n\n".join(sections) + "\n"

    @property
    def _title(self) -> str:
        title = f"{self.kind.files.label} head"
        return f"{title} for {self.base_model}" if self.base_model else title

    def _front(self) -> str:
        front: dict[str, Any] = {
            "base_model": self.base_model,
            "library_name": "specdec",
            "pipeline_tag": "text-generation",
            "tags": [self.kind.files.name, "speculative-decoding", "draft-model"],
            "license": self.licence,
        }
        given = {key: value for key, value in front.items() if value is not None}
        return f"---\n{yaml.safe_dump(given, sort_keys=False, allow_unicode=True)}---"

    def _head(self) -> str:
        llama = self.head.llama
        _, tensors = self.kind.files.official(self.head)
        weights = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
        size = f"{weights / 1e6:,.1f} million parameters"
        layout = f"in the official {self.kind.files.label} layout"
        layers = "one layer" if llama.num_layers == 1 else f"{llama.num_layers} layers"
        sentences = [f"A draft head for speculative decoding, {layout}: {layers}, {size}."]
        sentences += [self.kind.facts(self.head)] if self.kind.facts(self.head) else []
        sentences.append("The output is the target's own: the head only makes it faster.")
        return " ".join(sentences)

    def _recipe(self) -> Iterator[str]:
        if self.recipe:
            rows = [(f"`{name}`", str(value)) for name, value in self.recipe.items() if name not in UNTOLD]
            yield "## Training"
            yield _table(("setting", "value"), rows)

    def _figures(self) -> Iterator[str]:
        found = self.evaluation
        if found is None:
            return
        tree = f"Trees of depth {found.depth}, branching {found.branching} and {found.nodes} nodes"
        yield "## Figures"
        limits = f"{tree}; {found.dtype}; answers of at most {found.max_tokens} tokens"
        yield f"{limits}. Tau is the mean number of tokens per target step."
        rows = [
            (row.domain, f"{row.temperature:g}", f"{row.tau:.2f}", _shares(row.accepted_per_depth), f"{row.prompts:,}")
            for row in found.measured
        ]
        yield _table(("text", "temperature", "tau", "steps that accept depth 1, 2, …", "prompts"), rows)
        yield "How often the target's next token is among the head's likeliest, given that its drafts so far are right:"
        rows_of = [
            (domain, f"top {place}", _shares(of_place))
            for domain, by_depth in found.accuracy.items()
            for place, of_place in enumerate(zip(*by_depth, strict=True), 1)
        ]
        yield _table(("text", "among", "at depth 1, 2, …"), rows_of)

    def _use(self) -> str:
        base, method, engines = self.base_model or UNKNOWN, self.kind.files.name, self.kind.engines(self.head)
        commands = {"specdec": f'specdec generate --model {base} --draft {self.name} "Hello"'}
        if "vLLM" in engines:
            config = f'{{"method": "{method}", "model": "{self.name}", "num_speculative_tokens": 3}}'
            commands["vLLM"] = f"vllm serve {base} --speculative-config '{config}'"
        if "SGLang" in engines:
            commands["SGLang"] = (
                f"python -m sglang.launch_server --model-path {base} \\\n"
                f"  --speculative-algorithm {method.upper()} --speculative-draft-model-path {self.name} \\\n"
                "  --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
            )
        listed = "\n".join(commands.values())
        return f"## Use\n\nWith {', '.join(commands)}:\n\n```\n{listed}\n```"


def _shares(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.2f}" for share in shares)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
