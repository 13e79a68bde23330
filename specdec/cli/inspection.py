"""The report of `specdec inspect` on a head, for people and for programs."""

import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.building.named_checkpoints import head_path
from specdec.core.device import name_of
from specdec.core.outputs import taus_in_words
from specdec.draft_heads.drafting.chain_sources import SOURCES
from specdec.draft_heads.formats.head_kind import HeadDescription
from specdec.draft_heads.formats.head_kinds import check_not_head, describe_folder
from specdec.draft_heads.formats.tap_ids import KEY, Taps
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, error_context
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.weight_files import has_weights, read_tensors
from specdec.gguf.file import is_gguf
from specdec.models.checkpoint import read_settings
from specdec.models.head_fit import check_fit
from specdec.models.hub import checkpoint_path, shown_path
from specdec.models.llama_draft import holds_llama

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inspection:
    """A head's description, checked against a target if there is one.

    Attributes:
        folder: the head's folder.
        head: the head's description.
        target: the target's folder; None if it is not on this machine.
        sizes: the target's shape.
    """

    folder: Path
    head: HeadDescription[Any]
    target: Path | None
    sizes: LlamaConfig | None

    @classmethod
    def of(cls, head: str, model: str | None) -> "Inspection":
        """Inspect a head without reading its weights.

        Args:
            head: its folder, or its name on the hub.
            model: likewise of the target, whose weights are not needed; None for the one that the head names, if that
                is here or to be had.

        Raises:
            CheckpointError: no supported head, or one that does not fit the target, with the reason.
        """
        if head in SOURCES and not Path(head).exists():
            raise CheckpointError(f"{head}: a draft source without weights; give the folder or hub name of a head")
        folder = head_path(head)
        if holds_llama(folder):
            raise CheckpointError(f"{folder}: a whole model and no head; given to --draft it drafts as it is")
        found = describe_folder(folder)
        target = _target(found.settings.verifier, folder) if model is None else checkpoint_path(model, weights=False)
        if target is None:
            return cls(folder, found, None, None)
        # A target is described by its config.json alone.
        tensors = read_tensors(target) if not is_gguf(target) and has_weights(target) else {}
        with error_context(target):
            check_not_head(read_settings(target), tensors)
        return cls(folder, found, target, check_fit(found, folder, target))

    @property
    def taps(self) -> Taps | None:
        """Target layers that the head reads; None if it reads none, or if they depend on a target that is not given."""
        return self.head.taps.of(self.sizes.num_layers) if self.head.taps and self.sizes else None

    @property
    def trained_for(self) -> str | None:
        """Name of the target that the head was trained for; None if config.json does not say."""
        named = self.head.settings.verifier or self.head.settings.training.get("target")
        return str(named) if named else None

    @property
    def facts(self) -> dict[str, str]:
        """Facts about the head by their labels, a few words each."""
        head, llama = self.head, self.head.config.llama
        rope, few = llama.rope, head.tokens
        scaled = "" if rope.rope_type == "default" else f", {rope.rope_type} by {rope.factor:g}"
        facts = {
            "recognised": f"{head.label} in the layout of {head.settings.layout}",
            "trained for": self.trained_for or "not said",
            "target": f"{shown_path(self.target)}: fits" if self.target else "not given: whether it fits is not known",
            "reads": self._reads(),
            "layers": f"{llama.num_layers}, {', '.join(self._parts())}",
            "rope": f"theta {rope.theta:g}{scaled}; {llama.max_position} positions",
            "tokens": f"{llama.vocab_size:,}" + ("" if few is None else f", of which it proposes {len(few):,}"),
            "embedding": str(head.embedding),
            "output": str(head.output),
            "weights": self._weights(),
        }
        if trained := self._training():
            facts["trained on"] = trained
        if head.variants:
            facts["besides"] = ", ".join(head.variants)
        return facts

    @property
    def assumptions(self) -> list[str]:
        """Assumptions, one sentence each."""
        said, named, taps = list(self.head.assumptions), self.head.taps, self.taps
        if named and named.ids is None:
            said.append("config.json names no layers to read: the official ones")
        if named and taps and taps.others:
            said.append(f"{KEY} {list(named.ids or ())} count {taps.reason}; a probe decides when the head is loaded")
        return said

    def to_json(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        head, llama, taps = self.head, self.head.config.llama, self.taps
        ids = head.taps.ids if head.taps else None
        return {
            "path": str(self.folder),
            "kind": head.label,
            "layout": str(head.settings.layout),
            "verifier": head.settings.verifier,
            "trained_for": self.trained_for,
            "training": dict(head.settings.training) or None,
            "target": str(self.target) if self.target else None,
            "layer_ids": list(ids) if ids else None,
            "taps": list(taps.layers) if taps else None,
            "other_taps": list(taps.others) if taps and taps.others else None,
            "num_layers": llama.num_layers,
            "hidden_size": llama.hidden_size,
            "vocab_size": llama.vocab_size,
            "draft_vocab_size": llama.vocab_size if head.tokens is None else len(head.tokens),
            "max_position": llama.max_position,
            "rope_theta": llama.rope.theta,
            "embedding": head.embedding.name.lower(),
            "output": head.output.name.lower(),
            "variants": list(head.variants),
            "tensors": {n: {"shape": list(t.shape), "dtype": name_of(t.dtype)} for n, t in head.file_tensors.items()},
            "assumptions": self.assumptions,
        }

    def _training(self) -> str:
        """Return the texts of the training, their amount and the taus it reached, as far as config.json says."""
        training = self.head.settings.training
        names = ("data", "tokens", "held_out_tau", "held_out_prompts")
        data, tokens, taus, prompts = (training.get(name) for name in names)
        parts = [", ".join(map(str, data))] if isinstance(data, list) and data else []
        parts += [f"{tokens:,} tokens"] if isinstance(tokens, int) else []
        on = f"{prompts} held-out prompts" if prompts else "held-out text"
        parts += [f"tau {taus_in_words(taus)} on {on}"] if isinstance(taus, dict) and any(taus.values()) else []
        return "; ".join(parts)

    def _reads(self) -> str:
        ids = self.head.taps
        if ids is None:
            return "the target's last state, behind its final norm"
        taps = self.taps
        if taps is None:
            return str(ids)
        layers = f"inputs of layers {list(taps.layers)}"
        if taps.others:
            return f"{layers}, or of {list(taps.others)}"
        return f"{layers} ({taps.reason})"

    def _parts(self) -> list[str]:
        llama = self.head.config.llama
        flags = {"q_norm and k_norm": llama.qk_norm, "biases": llama.attention_bias or llama.mlp_bias}
        sizes = f"hidden {llama.hidden_size}", f"MLP {llama.intermediate_size}"
        heads = f"{llama.num_heads} query and {llama.num_kv_heads} key-value heads of {llama.head_dim}"
        return [*sizes, heads, *(name for name, has in flags.items() if has)]

    def _weights(self) -> str:
        counts = Counter[str]()
        for name, tensor in self.head.file_tensors.items():
            if name.rpartition(".")[2] in ("weight", "bias"):
                counts[name_of(tensor.dtype)] += tensor.numel()
        return ", ".join(f"{count:,} in {dtype}" for dtype, count in counts.items())


def _target(named: str | None, head: Path) -> Path | None:
    """Return the folder of the target that a head names; None if it names none, or that cannot be had."""
    try:
        target = checkpoint_path(named, beside=head, weights=False) if named else None
    except CheckpointError as error:
        logger.info("%s", error)
        return None
    return target if target and target.exists() else None


def show(inspection: Inspection, as_json: bool) -> None:
    """Print a report: one JSON object, tables on a terminal, or lines."""
    if as_json:
        print(json.dumps(inspection.to_json()))
        return
    rows = list(inspection.facts.items())
    tensors = [(name, f"{list(t.shape)}", name_of(t.dtype)) for name, t in sorted(inspection.head.file_tensors.items())]
    console = Console()
    if console.is_terminal:
        facts = Table(show_header=False, title=shown_path(inspection.folder))
        for row in rows:
            facts.add_row(*row)
        shapes = Table("tensor", "shape", "numbers")
        for line in tensors:
            shapes.add_row(*line)
        console.print(facts, shapes)
    else:
        width = max(len(label) for label, _ in rows)
        for label, value in rows:
            print(f"{label:<{width}}  {value}")
        width = max(len(name) for name, _, _ in tensors)
        for name, shape, dtype in tensors:
            print(f"tensor  {name:<{width}}  {shape} {dtype}")
    for sentence in inspection.assumptions:
        console.print(f"assumed: {sentence}", soft_wrap=True, markup=False, highlight=False)
