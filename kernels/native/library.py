"""The compiled library for CPUs: its file, the structures of its arguments, and its calls."""

import ctypes
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int64, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.native.huge_pages import HugePages
from specdec.kernels.types.types import NoiseKey, Stream

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Of the cache's numbers.
KV_KINDS = {**KINDS, torch.int8: 16, torch.float8_e4m3fn: 17, torch.float8_e5m2: 18}
# Of weights in few bits: their numbers, scales and offsets.
NUMBER_KINDS = {"int8": 3, "uint4": 4, "fp8": 5}
NESTED = 3
NO_OFFSETS, OFFSET_KINDS = 0, {"minima": 1, "zeros": 2}
# Columns of a weight that lie side by side.
BLOCK = 16
# Parts of an adapted product.
MOST_PARTS = 3
# Forms of the library, the slowest first.
FORMS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
NOT_BUILT = "the native kernels are not built: install a C compiler (gcc or clang), and specdec once more"


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class MatrixFields(Structure):
    """`matrix` of native.h."""

    _fields_ = [
        *_fields(c_int64, "kind columns inputs depth blocks group scales offsets rounds_inputs"),
        *_fields(c_void_p, "weight bias"),
    ]


class LayerFields(Structure):
    """`layer` of native.h."""

    _fields_ = [
        *_fields(c_int64, "heads kv_heads head_dim hidden window"),
        ("eps", c_double),
        *_fields(c_void_p, "input_norm query_norm key_norm post_norm slopes"),
        *_fields(MatrixFields, "qkv output gate_up down"),
        ("for_many", c_void_p),
    ]


class LoRAPartFields(Structure):
    """`lora_part` of native.h."""

    _fields_ = [*_fields(c_int64, "first in_turn column"), ("up", MatrixFields)]


class LoRAFields(Structure):
    """`lora` of native.h."""

    _fields_ = [("parts", c_int64), ("low", MatrixFields), ("part", LoRAPartFields * MOST_PARTS)]


class AdapterFields(Structure):
    """`layer_adapter` of native.h."""

    _fields_ = _fields(LoRAFields, "qkv output gate_up down")


class StepFields(Structure):
    """`step` of native.h."""

    _fields_ = [
        *_fields(c_int64, "rows words table_blocks block_size first kv_kind slot_bytes"),
        *_fields(c_void_p, "slots request tables visible ancestors tree_starts lengths cos sin kv kv_scales"),
        *_fields(c_int64, "layer spans"),
        *_fields(c_void_p, "adapted firsts"),
    ]


class HeadFields(Structure):
    """`draft_head` of native.h."""

    _fields_ = [
        *_fields(c_int64, "kind hidden layers residual_is_normed states_are_normed"),
        ("eps", c_double),
        *_fields(c_void_p, "embedding packed_embedding embed_norm state_norm norm layer tokens"),
        *_fields(MatrixFields, "input output"),
    ]


class BlockFields(Structure):
    """`block_head` of native.h."""

    _fields_ = [
        *_fields(c_int64, "hidden layers rows slots mask rank markov"),
        ("eps", c_double),
        *_fields(c_void_p, "embedding packed_embedding hidden_norm norm key_norms causal layer"),
        *_fields(c_void_p, "tokens scorer_rows"),
        *_fields(c_void_p, "predecessors successors joint joint_bias"),
        *_fields(MatrixFields, "context output"),
    ]


class TargetFields(Structure):
    """`target` of native.h."""

    _fields_ = [
        *_fields(c_int64, "hidden layers features taps"),
        ("eps", c_double),
        *_fields(c_void_p, "embedding packed_embedding norm layer tap"),
        *_fields(MatrixFields, "output feature"),
    ]


class PassFields(Structure):
    """`pass` of native.h."""

    _fields_ = [
        *_fields(c_int64, "requests table_blocks block_size kv_bytes kv_kind slot_bytes"),
        *_fields(c_void_p, "tokens cached known nodes scored tables parents rotary kv kv_scales feature_cache logits"),
        ("spans", c_int64),
        ("adapted", c_void_p),
    ]


class DraftingFields(Structure):
    """`drafting` of native.h."""

    _fields_ = [
        *_fields(c_int64, "rows trees width table_blocks block_size first kv_bytes kv_kind slot_bytes most"),
        ("least_reach", c_double),
        *_fields(c_void_p, "tokens starts ends firsts tables budgets depths features rotary kv temperatures limits"),
        *_fields(c_void_p, "noise sizes nodes parents ranks values adapters"),
    ]


class WalkFields(Structure):
    """`walks` of native.h."""

    _fields_ = [
        *_fields(c_int64, "rule rows size kind levels"),
        *_fields(c_void_p, "scores nodes sampled tokens parents keys noise draft_probs lengths next_tokens paths"),
    ]


# As `specdec_interface` of api.c has them.
VERSION = 5
STRUCTURES = (
    MatrixFields, LayerFields, LoRAPartFields, LoRAFields, AdapterFields, StepFields, HeadFields, BlockFields,
    TargetFields, PassFields, DraftingFields, WalkFields,
)  # fmt: skip
Signatures = Mapping[str, tuple[Any, list[Any]]]
_CALLS: Signatures = {
    "open": (c_void_p, [c_char_p, c_int64, c_int64]),
    "close": (None, [c_void_p]),
    "form": (c_char_p, [c_void_p]),
    "product": (c_int, [c_void_p, POINTER(MatrixFields), POINTER(StepFields), c_int64, c_void_p, c_void_p]),
    "rows": (c_int, [c_void_p, POINTER(MatrixFields), c_int64, c_void_p, c_void_p]),
    "layer": (c_int, [c_void_p, POINTER(LayerFields), POINTER(StepFields), c_void_p, c_void_p, c_void_p]),
    "pass": (c_int, [c_void_p, POINTER(TargetFields), POINTER(PassFields)]),
    "noise": (c_int, [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p]),
    "filter": (c_int, [c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
    "walk": (c_int, [c_void_p, POINTER(WalkFields)]),
    "move": (c_int, [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p]),
    "attend": (
        c_int,
        [c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_double, POINTER(StepFields), c_void_p, c_void_p],
    ),
    "draft": (c_int, [c_void_p, POINTER(HeadFields), POINTER(DraftingFields)]),
    "draft_block": (c_int, [c_void_p, POINTER(BlockFields), POINTER(DraftingFields)]),
    "norm": (c_int, [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_double, c_void_p]),
}


def numbers(values: Iterable[int]) -> "array[int]":
    """Return whole numbers as the library reads them; quicker than a tensor."""
    return array("q", values)


def room(count: int) -> "array[int]":
    """Return memory for whole numbers that the library writes."""
    return array("q", bytes(8 * count))


def joined(*lists: Sequence[int]) -> "tuple[array[int], list[int]]":
    """Return lists of whole numbers in one array, and where each begins: quicker than an array for each.

    Lists of zeros are memory that the library writes.
    """
    flat, begins = list[int](), list[int]()
    for each in lists:
        begins.append(len(flat))
        flat += each
    whole = numbers(flat)
    base = address_of(whole)
    return whole, [base + whole.itemsize * begin for begin in begins]


def padded_tables(tables: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Return block tables of one length in turn, and that length."""
    longest, padded = max(map(len, tables)), list[int]()
    for table in tables:
        padded += table
        padded += [0] * (longest - len(table))
    return padded, longest


def cache_fields(kv: Tensor) -> dict[str, int]:
    """Return the fields of a cache `[layers, slots, heads, dim]`."""
    layer, slot = kv.stride(0) * kv.element_size(), kv.stride(1) * kv.element_size()
    return {"kv": kv.data_ptr(), "kv_kind": KV_KINDS[kv.dtype], "kv_bytes": layer, "slot_bytes": slot}


def pointer_to(tensor: Tensor | None) -> int | None:
    """Return where a tensor's numbers lie, None for none."""
    return None if tensor is None else tensor.data_ptr()


def address_of(values: "array[int] | array[float]") -> int:
    """Return where the numbers lie."""
    return values.buffer_info()[0]


def library_file() -> Path | None:
    """Return the file of the compiled library, None where it has not been built for this Python.

    Files that other Pythons have built in the same folder may be of another state of the sources. The environment's
    SPECDEC_NATIVE_LIBRARY names another file, such as one built with sanitizers.
    """
    named = os.environ.get("SPECDEC_NATIVE_LIBRARY")
    if named:
        return Path(named)
    folder = Path(__file__).parent
    # As an import would look for it: the suffix of this Python and platform comes first.
    files = (folder / f"_library{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((file for file in files if file.is_file()), None)


def opened_library() -> ctypes.CDLL:
    """Return the library.

    Raises:
        ValueError: it is not built, cannot be opened, or is from other sources than these, so that a call might read
            memory that is not its own.
    """
    file = library_file()
    if file is None:
        raise ValueError(f"{NOT_BUILT}, or use kernels 'torch'")
    anew = "build it anew: python setup.py build_ext --inplace, or pip install -e ."
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        reason = str(error).removeprefix(f"{file}: ")
        raise ValueError(f"{file} cannot be opened, {reason}; {anew}") from None
    interface = getattr(library, "specdec_interface", None)
    if interface is not None:
        interface.restype = POINTER(c_int64)
        found, own = interface(), [VERSION, *map(ctypes.sizeof, STRUCTURES), 0]
        # Not beyond the first that differs: none lies behind the 0.
        if all(found[place] == number for place, number in enumerate(own)):
            return library
    raise ValueError(f"{file} was built from other sources; {anew}")


def opened_calls(prefix: str, signatures: Signatures) -> dict[str, Any]:
    """Return calls of the library by their names without the prefix.

    Args:
        signatures: of each, the type of its result and those of its arguments.

    Raises:
        ValueError: see `opened_library`.
    """
    library, found = opened_library(), {}
    for name, (result, arguments) in signatures.items():
        found[name] = call = getattr(library, f"{prefix}_{name}")
        call.restype, call.argtypes = result, arguments
    return found


def processor_forms() -> list[str]:
    """Return the forms of the library that this processor has, the slowest first; none where it is not built."""

    def runs(form: str) -> bool:
        try:
            Library(1, torch.float32, form)
        except ValueError:
            return False
        return True

    return [form for form in FORMS if runs(form)]


class Library:
    """A context of the compiled library: its threads, and memory between the parts of a layer.

    Args:
        form: one of `FORMS`; "" for the fastest that the processor has. `avx512_bf16` and `amx` are `avx512`
            where activations are not bfloat16.
        threads: number of threads, the caller's included; the others sleep while nothing is asked.
        dtype: of activations.

    Attributes:
        form: the form in use.
        weights: memory for packed weights.
        multiplies_bytes: whether weights of 4 bits in groups of 32 meet inputs of 8 bits.

    Raises:
        ValueError: see `opened_library`; or the processor does not have the form.
    """

    def __init__(self, threads: int, dtype: torch.dtype, form: str = "") -> None:
        self._calls = opened_calls("specdec", _CALLS)
        self.dtype, self.threads, self.weights = dtype, threads, HugePages()
        self._context = self._calls["open"](form.encode(), threads, KINDS[dtype])
        if not self._context:
            raise ValueError(f"the native kernels' form {form!r} does not run on this processor, or memory is short")
        self.form: str = self._calls["form"](self._context).decode()
        self.multiplies_bytes = self.form != "portable" and dtype != torch.float32

    def call(self, name: str, *arguments: Any) -> None:
        """Call `specdec_NAME`; the arrays that fields name last are written.

        Raises:
            MemoryError: there is none for its arrays.
        """
        if self._calls[name](self._context, *arguments):
            raise MemoryError(
                "no memory for arrays of the native kernels; lower max_num_batched_tokens or kv_cache_memory"
            )

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._calls["close"](self._context)
            self._context = None

    def noise(self, keys: Sequence[NoiseKey], size: int, stream: Stream, lane: int, places: Sequence[int]) -> None:
        """Write the Gumbel noise of each key, float32 `[size]`, where it is to lie."""
        given, addresses = numbers(number for key in keys for number in key), numbers(places)
        self.call("noise", len(keys), size, address_of(given), stream, lane, address_of(addresses))
