"""`quantization_config` of a config.json, read strictly: FP8, AWQ, GPTQ and compressed-tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specdec.draft_heads.llama.checkpoint_files import CheckpointError, section
from specdec.draft_heads.llama.kv_scheme import quantizes_kv_alone

Method = Literal["fp8", "awq", "gptq", "compressed-tensors"]
METHODS: tuple[Method, ...] = ("fp8", "awq", "gptq", "compressed-tensors")
# Formats of compressed-tensors whose weights are numbers and scales. The other formats are refused by name.
FORMATS = ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized")
STRATEGIES = ("tensor", "channel", "group", "block")
ALL_INPUTS = -1


@dataclass(frozen=True)
class QuantizationConfig:
    """Quantisation of a checkpoint's weights.

    Attributes:
        bits: of a number, for AWQ and GPTQ.
        group_size: inputs that share a scale, for AWQ and GPTQ; -1 for all.
        block: rows and inputs that share a scale, of weights in blocks.
        zeros_less_one: whether stored zeros are less by one, as in GPTQ's first format.
        symmetric: whether each zero is the middle of the numbers, for GPTQ.
    """

    method: Method
    bits: int = 8
    group_size: int = ALL_INPUTS
    block: tuple[int, int] | None = None
    zeros_less_one: bool = False
    symmetric: bool = False

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> "QuantizationConfig | None":
        """Read a config.json; None if its weights are plain.

        Raises:
            CheckpointError: another method, or a setting that this engine would not honour; one line.
        """
        given = settings.get("quantization_config") or settings.get("compression_config")
        if given is None or quantizes_kv_alone(settings):
            return None
        if not isinstance(given, Mapping):
            raise _error(f"is {given!r:.60}; it must be an object")
        method = given.get("quant_method")
        if method not in METHODS:
            raise _error(f"quant_method {method!r:.60} is not supported; supported are {', '.join(METHODS)}")
        readers = {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}
        return readers[method](given)


def with_plain_weights(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json as if its weights were plain; the scheme of keys and values stays."""
    given = settings.get("quantization_config")
    scheme = given.get("kv_cache_scheme") if isinstance(given, Mapping) else None
    left = None if scheme is None else {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    return {**settings, "quantization_config": left}


def _error(problem: str) -> CheckpointError:
    return CheckpointError(f"config.json: quantization_config: {problem}")


def _require(given: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Check that settings have values that are honoured; one that is left out is None."""
    for key, values in allowed.items():
        value = given.get(key)
        if not any(type(value) is type(each) and value == each for each in values):
            known = ", ".join(repr(each) for each in values if each is not None)
            raise _error(f"{prefix}{key} = {value!r:.60} is not supported; supported: {known or 'none'}")


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(one) is int and one > 0 for one in value):
        raise _error(f"weights in blocks of {value!r:.60} are not supported; a block is two whole numbers")
    return value[0], value[1]


def _group_size(given: Mapping[str, Any]) -> int:
    size = given.get("group_size")
    if type(size) is not int or (size != ALL_INPUTS and (size < 8 or size % 8)):
        raise _error(f"group_size = {size!r:.60} is not supported; it must be -1 or a multiple of 8")
    return size


def _fp8(given: Mapping[str, Any]) -> QuantizationConfig:
    allowed: dict[str, tuple[Any, ...]] = {"fmt": (None, "e4m3"), "activation_scheme": (None, "dynamic", "static")}
    _require(given, allowed)
    return QuantizationConfig("fp8", block=_block(given.get("weight_block_size")))


def _awq(given: Mapping[str, Any]) -> QuantizationConfig:
    version = given.get("version")
    lowered = {**given, "version": version.lower() if isinstance(version, str) else version}
    _require(lowered, {"bits": (4,), "version": (None, "gemm"), "zero_point": (True,)})
    return QuantizationConfig("awq", 4, _group_size(given))


def _gptq(given: Mapping[str, Any]) -> QuantizationConfig:
    allowed: dict[str, tuple[Any, ...]] = {
        "bits": (4, 8),
        "checkpoint_format": (None, "gptq", "gptq_v2"),
        "is_marlin_format": (None, False),
        "dynamic": (None, {}),
        "pack_dtype": (None, "int32"),
    }
    _require(given, allowed)
    is_first = given.get("checkpoint_format") != "gptq_v2"
    is_symmetric = given.get("sym") is True
    return QuantizationConfig(
        "gptq", given["bits"], _group_size(given), zeros_less_one=is_first, symmetric=is_symmetric
    )


def _compressed(given: Mapping[str, Any]) -> QuantizationConfig:
    _require(given, {"transform_config": (None, {})})
    sparsity = section(given, "sparsity_config")
    if sparsity and sparsity.get("format") != "dense":
        raise _error(f"sparsity_config with format {sparsity.get('format')!r:.60} is not supported")
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _error(f"config_groups = {groups!r:.60} is not supported; it must be an object with a group")
    block = None
    for name, group in groups.items():
        prefix = f"{name}: "
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise _error(f"{prefix}it must be an object with weights")
        weights, inputs = group["weights"], group.get("input_activations")
        _require({"format": group.get("format") or given.get("format")}, {"format": FORMATS}, prefix)
        allowed: dict[str, tuple[Any, ...]] = {
            "type": ("int", "float"),
            "num_bits": (8,) if weights.get("type") == "float" else (4, 8),
            "strategy": STRATEGIES,
            "dynamic": (None, False),
            "actorder": (None, False, "weight", "static"),
        }
        _require(weights, allowed, f"{prefix}weights.")
        # Activations are not quantised here. Those in 8-bit floats only lose precision; models with others were
        # tuned to it.
        is_float = isinstance(inputs, Mapping) and (inputs.get("type"), inputs.get("num_bits")) == ("float", 8)
        if inputs is not None and not is_float:
            raise _error(
                f"{prefix}input_activations {inputs!r:.80} are not supported; supported are none and 8-bit floats"
            )
        _require(group, {"output_activations": (None,)}, prefix)
        block = _block(weights.get("block_structure")) or block
    return QuantizationConfig("compressed-tensors", block=block)
