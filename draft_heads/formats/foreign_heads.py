"""Kinds of draft heads that are known but not supported, and the signs that show them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from specdec.draft_heads.llama.checkpoint_files import items, section


class ForeignHead(NamedTuple):
    """Signs of a kind of head, any one of which is enough.

    Attributes:
        name: the kind.
        keys: keys of config.json, where their values are neither false nor empty.
        words: regular expression for `architectures`, `model_type`, `speculators_model_type` and `projector_type`.
        tensors: regular expression for names of tensors.
        reason: why it is not supported, and what to do.
    """

    name: str
    keys: tuple[str, ...] = ()
    words: str = "(?!)"
    tensors: str = "(?!)"
    reason: str = ""


# What can be said of heads that outdo a DFlash head by parts that are not built.
TAKE_PLAIN = "take a DFlash, DSpark or Domino head of the same target"

FOREIGN = (
    ForeignHead(
        "an EAGLE-4 head",
        words=r"eagle-?4",
        reason="its licence, which is no open one, forbids other engines to serve it or to take over how it works; "
        "take an EAGLE-3, DFlash or DSpark head of the same target",
    ),
    ForeignHead(
        "a P-EAGLE head",
        words="peagle",
        tensors=r"\bmask_hidden\b",
        reason=f"its rows of masks see each other by depth and not by block; {TAKE_PLAIN}",
    ),
    ForeignHead(
        "a LiLiCorr head",
        words="lilicorr",
        tensors="lilicorr",
        reason=f"it scores pairs by attention over all candidates of a block; {TAKE_PLAIN}",
    ),
    ForeignHead(
        "an XPress head",
        words="xpress",
        tensors=r"\bmix_l\b",
        reason=f"it refines a block by several passes; {TAKE_PLAIN}",
    ),
    ForeignHead("a Medusa head", ("medusa_num_heads",), "medusa", r"medusa_head|^\d+\.\d+\.linear\.weight"),
    ForeignHead("a Hydra head", ("hydra_num_heads",), "hydra"),
    ForeignHead("an MLP speculator", words="mlp_speculator"),
    ForeignHead("an MTP head", words=r"mtp|nextn", tensors=r"(^|\.)(mtp|eh_proj)\."),
    ForeignHead(
        "an EAGLE head with norms before fc (HASS)",
        ("add_para_norm", "layernorms"),
        tensors=r"\b(enorm|hnorm|embedding_layernorm|pre_lm_head_layernorm)\.",
    ),
    ForeignHead(
        "an EAGLE head with experts",
        ("num_local_experts", "num_experts", "n_routed_experts"),
        "mixtral",
        r"\bexperts\.|block_sparse_moe",
    ),
    ForeignHead("an EAGLE head with latent attention (MLA)", tensors=r"\bkv_a_proj"),
    # Those in 8-bit floats have been dequantised.
    ForeignHead(
        "a quantised EAGLE head", ("quantization_config",), tensors=r"\.(qweight|qzeros|weight_scale|weight_packed)\b"
    ),
)


def foreign_kind(settings: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return which of the known unsupported heads this is, with the sign that shows it and the reason; None if none.

    Args:
        settings: config.json.
        names: of the tensors.
    """
    values = [settings.get(key) for key in ("model_type", "speculators_model_type", "projector_type")]
    values.append(section(settings, "dflash_config").get("projector_type"))
    said = " ".join(str(value) for value in (*items(settings, "architectures"), *values))
    names = list(names)
    for head in FOREIGN:
        signs = [f"{key} in config.json" for key in head.keys if settings.get(key)]
        signs += [f"{word.group()!r} in config.json" for word in [re.search(head.words, said, re.IGNORECASE)] if word]
        signs += [f"tensor {name!r}" for name in names if re.search(head.tensors, name)]
        if signs:
            reason = f": {head.reason}" if head.reason else ""
            return f"{head.name} ({signs[0]}) is not supported{reason}"
    if section(settings, "eagle_config").get("use_aux_hidden_state") is False:
        return "an EAGLE-3 head that reads no inner layers (use_aux_hidden_state is false) is not supported"
    return None
