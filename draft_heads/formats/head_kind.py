"""A kind of draft head as one object: how its folders are recognised, described, built and saved."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.draft_heads.formats.head_settings import HeadSettings
from specdec.draft_heads.formats.head_tensors import EMBEDDING, HeadTensors
from specdec.draft_heads.formats.tap_ids import TapIds
from specdec.draft_heads.heads.draft_head import DraftModel, FeatureHead, HeadConfig, TargetParts
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, check_finite, lend, place
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.llama_layer import fuse_layer
from specdec.draft_heads.llama.whole_files import write_whole
from specdec.kernels.kernel_set import KernelSet

C = TypeVar("C", bound=HeadConfig)
H = TypeVar("H", bound=FeatureHead)


class Source(StrEnum):
    """Origin of a matrix."""

    FILE = "its own"
    TARGET = "the target's"
    EMBEDDING = "its embedding"


@dataclass(frozen=True)
class HeadDescription(Generic[C]):
    """A head as recognised in its folder, with every assumption that the folder made necessary.

    Attributes:
        kind: its kind.
        label: the kind's name for people, such as "EAGLE-3.1".
        settings: what config.json says of the head, and in whose conventions.
        config: the head's shape; of the layers that it reads, only their number is settled.
        tensors: the file's tensors.
        expected: shapes of the tensors that the file must hold, by the same names.
        embedding: FILE or TARGET.
        output: where the output matrix comes from.
        reads: size of the target states that the head reads.
        tokens: int64, the target's ids of the output matrix's rows; None for all tokens in order.
        id_maps: tensors of token ids that the file may hold.
        taps: the target layers that the head reads; None if it reads the target's final state only.
        selects_rows: whether the output matrix consists of rows of another one, which `tokens` selects.
        variants: what plain heads of this kind do not have, by names of config.json.
        assumptions: one sentence each.
    """

    kind: "HeadKind[C, Any]"
    label: str
    settings: HeadSettings
    config: C
    tensors: HeadTensors
    expected: Mapping[str, list[int]]
    embedding: Source
    output: Source
    reads: int
    tokens: Tensor | None = None
    id_maps: tuple[str, ...] = ()
    taps: TapIds | None = None
    selects_rows: bool = False
    variants: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    def check(self, target: LlamaConfig | None = None) -> None:
        """Check that the file is complete, and that the head fits a target.

        Raises:
            CheckpointError: both sizes, or the tensors that are missing, unexpected or of another shape or type.
        """
        if target is not None:
            self.check_target(target)
        self.tensors.check(self.expected, self.id_maps)

    def check_target(self, target: LlamaConfig) -> None:
        """Check that a target has the sizes that the head was made for.

        Raises:
            CheckpointError: names both sizes.
        """
        vocab_size = self.config.llama.vocab_size
        if self.reads != target.hidden_size:
            states = f"states of size {self.reads}"
            raise CheckpointError(f"the head reads {states}, but the target's hidden_size is {target.hidden_size}")
        if vocab_size != target.vocab_size:
            raise CheckpointError(f"the head's vocab_size {vocab_size} does not fit the target's {target.vocab_size}")
        if self.taps is not None:
            self.taps.of(target.num_layers)

    def check_finite(self, dtype: torch.dtype) -> None:
        """Check the weights of a complete head, which reads them. With NaN among them it would draft nothing.

        Args:
            dtype: in which the head is to run.

        Raises:
            CheckpointError: as `checkpoint_files.check_finite`, by the file's name of the tensor.
        """
        weights = {self.tensors.spelling(name): self.tensors.by_name[name] for name in self.expected}
        check_finite(weights, dtype)

    def limited_to(self, max_position: int, window: int | None = None) -> "HeadDescription[C]":
        """Return the same head with narrower limits.

        Args:
            max_position: positions of its target, which bound its rotary table.
            window: most tokens that its layers see; None for as many as config.json says.
        """
        llama = self.config.llama.with_window(window)
        llama = replace(llama, max_position=min(llama.max_position, max_position))
        return replace(self, config=replace(self.config, llama=llama))

    def lent(self, target: TargetParts) -> dict[str, Tensor]:
        """Return the target's embedding by its name, where the head has none of its own."""
        return {EMBEDDING: target.embedding} if self.embedding == Source.TARGET else {}

    @property
    def file_tensors(self) -> dict[str, Tensor]:
        """The file's tensors under the file's names."""
        return {self.tensors.spellings[name]: tensor for name, tensor in self.tensors.by_name.items()}


class LoadedHead(NamedTuple):
    """A head, and the question that its folder left open.

    Attributes:
        draft: head and readout.
        description: the description that it was built from.
        other: the same weights reading the layers that the folder's ids mean if they are counted the other way; None
            where the counting is certain. `specdec.building.tap_probe` decides.
    """

    draft: DraftModel
    description: HeadDescription[Any]
    other: DraftModel | None = None


class HeadKind(ABC, Generic[C, H]):
    """A kind of head. `head_kinds.KINDS` lists all of them.

    Attributes:
        name: in a training run's settings and in speculators' `speculators_model_type`.
        label: for people.
        sign: a tensor by which its files are known.
        id_maps: tensors of token ids that its files may hold.
    """

    name: str
    label: str
    sign: str
    id_maps: tuple[str, ...] = ()

    def recognises(self, settings: HeadSettings, tensors: HeadTensors) -> bool:  # noqa: ARG002
        """Return whether a folder holds a head of this kind, complete or not: by default, if it has the sign."""
        return self.sign in tensors

    @abstractmethod
    def describe(self, settings: HeadSettings, tensors: HeadTensors) -> HeadDescription[C]:
        """Describe a head of this kind.

        Raises:
            CheckpointError: a setting that is not honoured, or tensors that contradict the settings.
        """

    @abstractmethod
    def build(self, description: HeadDescription[C], target: TargetParts, kernels: KernelSet) -> LoadedHead:
        """Build a described head from tensors with values, on the target's device and in its dtype."""

    def check_official(self, description: HeadDescription[C]) -> None:
        """Check that the official layout has a place for each of a head's matrices.

        Raises:
            CheckpointError: it has none for a matrix of the head, or asks for one that the head lacks; by default.
        """
        raise CheckpointError(f"{description.label} heads have no official layout")

    def official(self, head: H) -> tuple[dict[str, Any], dict[str, Tensor]]:  # noqa: ARG002
        """Return config.json and tensors of a head in the official layout; by default it is not written.

        Raises:
            ValueError: the head has a setting that the layout cannot express, or its kind has no such layout.
        """
        raise ValueError(f"{self.label} heads have no official layout")

    def speculators(self, head: H, verifier: str | None) -> tuple[dict[str, Any], dict[str, Tensor]]:  # noqa: ARG002
        """Return config.json and tensors of a head in speculators' layout; by default it is not written.

        Args:
            verifier: name of the target.

        Raises:
            ValueError: the layout cannot express the head, or is not written for its kind.
        """
        raise ValueError(f"{self.label} heads are not written in speculators' layout; take --layout official")

    def save(self, head: H, folder: Path, settings: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
        """Write `config.json` and `model.safetensors` in the official layout.

        Args:
            settings: extra keys for config.json, such as the training recipe.
            dtype: of the weights; token ids keep theirs.

        Raises:
            ValueError: as `official`.
        """
        config, tensors = self.official(head)
        write_head(folder, {**config, **settings}, tensors, dtype)


def write_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write `model.safetensors` and `config.json`, each as a whole, weights in `dtype`; token ids keep theirs.

    Raises:
        OSError: the folder cannot be written.
    """
    saved = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    saved = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in saved.items()}
    folder.mkdir(parents=True, exist_ok=True)
    saved = {name: tensor.contiguous() for name, tensor in saved.items()}
    write_whole(folder / "model.safetensors", lambda new: save_file(saved, new, {"format": "pt"}))
    told = json.dumps(config, indent=2) + "\n"
    write_whole(folder / "config.json", lambda new: new.write_text(told, encoding="utf-8"))


def expected_shapes(make: Callable[[], dict[str, Tensor]]) -> dict[str, list[int]]:
    """Return the shapes of tensors that are made on the meta device.

    Raises:
        CheckpointError: no tensor can be that large.
    """
    try:
        with torch.device("meta"):
            return {name: list(tensor.shape) for name, tensor in make().items()}
    except (RuntimeError, OverflowError, TypeError):
        problem = "config.json: its sizes are too large for any tensor; compare them with the file"
        raise CheckpointError(problem) from None


def filled(
    make: Callable[[], H],
    tensors: Mapping[str, Tensor],
    lent: Mapping[str, Tensor],
    target: TargetParts,
) -> H:
    """Return a head with weights, on the target's device and in its dtype.

    Args:
        make: makes the head without weights.
        tensors: weights by the names of the head's parameters, but for layers as in `fuse_layer`; others are ignored.
        lent: matrices of the target that the head uses without a copy, likewise.
    """
    with torch.device("meta"):
        head = make()
        target.divide(head)
    lend(head, lent)
    named = dict(tensors)
    for layer in range(head.llama.num_layers):
        fuse_layer(named, f"layers.{layer}.", head.llama)
    place(head, named, target.embedding.dtype, target.embedding.device)
    head.requires_grad_(False).eval()
    return head
