"""What a published head says about itself."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from specdec.draft_heads.heads.eagle import EagleHead
from specdec.draft_heads.heads.eagle3 import Eagle3Head
from specdec.train_eagle.evaluation import Evaluation

UNKNOWN = "TARGET"
# Settings of a run that make no difference to its head.
UNTOLD = ("checkpoint_minutes", "evaluate_every", "evaluate_prompts", "gradient_checkpointing")


@dataclass(frozen=True)
class ModelCard:
    """A README.md with YAML front matter, as the Hugging Face hub reads it.

    Attributes:
        name: of the folder that the head lies in.
        head: what it is about.
        recipe: settings of the training.
        base_model: name of the target, None if that is not known.
        licence: of the head.
        evaluation: figures.
        notes: Markdown that is put in as it stands.
    """

    name: str
    head: EagleHead | Eagle3Head
    recipe: Mapping[str, Any]
    base_model: str | None = None
    licence: str | None = None
    evaluation: Evaluation | None = None
    notes: str | None = None

    def text(self) -> str:
        """The file."""
        sections = [self._front(), f"# {self._title}", self._head(), *([self.notes] if self.notes else [])]
        sections += [*self._recipe(), *self._figures(), self._use()]
        return "\n\n".join(sections) + "\n"

    @property
    def _kind(self) -> str:
        return "EAGLE-3" if isinstance(self.head, Eagle3Head) else "EAGLE-1/2"

    @property
    def _title(self) -> str:
        return f"{self._kind} head for {self.base_model}" if self.base_model else f"{self._kind} head"

    def _front(self) -> str:
        method = "eagle3" if isinstance(self.head, Eagle3Head) else "eagle"
        front: dict[str, Any] = {
            "base_model": self.base_model,
            "library_name": "specdec",
            "pipeline_tag": "text-generation",
            "tags": [method, "speculative-decoding", "draft-model"],
            "license": self.licence,
        }
        given = {key: value for key, value in front.items() if value is not None}
        return f"---\n{yaml.safe_dump(given, sort_keys=False, allow_unicode=True)}---"

    def _head(self) -> str:
        head, llama = self.head, self.head.llama
        # An EAGLE-3 head's file leaves the embedding to the target, unless their sizes differ.
        shares = isinstance(head, Eagle3Head) and llama.hidden_size == head.config.target_hidden_size
        own = (p for name, p in head.named_parameters() if not (shares and name == "embed_tokens.weight"))
        size = f"{sum(p.numel() for p in own) / 1e6:,.1f} million parameters"
        layout = f"in the official {self._kind} layout"
        layers = "one layer" if llama.num_layers == 1 else f"{llama.num_layers} layers"
        sentences = [f"A draft head for speculative decoding, {layout}: {layers}, {size}."]
        if isinstance(head, Eagle3Head):
            taps = ", ".join(map(str, head.taps))
            proposes = f"{head.config.draft_vocab_size:,} of {llama.vocab_size:,} tokens"
            sentences.append(f"It reads the inputs of the target's layers {taps} and proposes {proposes}.")
        sentences.append("What is generated is the target's own output: the head only makes it come sooner.")
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
        yield f"{tree}; {found.dtype}; answers of at most {found.max_tokens} tokens. Tau counts the target's own token."
        rows = [
            (row.domain, f"{row.temperature:g}", f"{row.tau:.2f}", _shares(row.accepted_per_depth), f"{row.prompts:,}")
            for row in found.measured
        ]
        yield _table(("text", "temperature", "tau", "steps that accept depth 1, 2, …", "prompts"), rows)
        yield "Where its drafts so far are right, what the target says next is among the head's likeliest tokens:"
        rows_of = [
            (domain, f"top {place}", _shares(of_place))
            for domain, by_depth in found.accuracy.items()
            for place, of_place in enumerate(zip(*by_depth, strict=True), 1)
        ]
        yield _table(("text", "among", "at depth 1, 2, …"), rows_of)

    def _use(self) -> str:
        base, is_eagle3 = self.base_model or UNKNOWN, isinstance(self.head, Eagle3Head)
        commands = {"specdec": f'specdec generate --model {base} --draft {self.name} "Hello"'}
        # vLLM's EAGLE-1 class has no fc.bias, and SGLang's one that nothing but the file would fill.
        if isinstance(self.head, Eagle3Head) or not self.head.config.fc_bias:
            method = "eagle3" if is_eagle3 else "eagle"
            config = f'{{"method": "{method}", "model": "{self.name}", "num_speculative_tokens": 3}}'
            commands["vLLM"] = f"vllm serve {base} --speculative-config '{config}'"
        if is_eagle3:
            commands["SGLang"] = (
                f"python -m sglang.launch_server --model-path {base} \\\n"
                f"  --speculative-algorithm EAGLE3 --speculative-draft-model-path {self.name} \\\n"
                "  --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
            )
        listed = "\n".join(commands.values())
        return f"## Use\n\nWith {', '.join(commands)}:\n\n```\n{listed}\n```"


def _shares(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.2f}" for share in shares)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
