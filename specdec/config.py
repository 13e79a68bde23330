"""Settings of an engine. Pure Python, so that the command line shows them without waiting for torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from specdec.core.outputs import LogprobsMode
from specdec.core.reasoning import reasoning_parser
from specdec.core.request_limits import RequestLimits
from specdec.draft_heads.drafting.chain_sources import SUFFIX
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.kernels.types.settings import (
    MAX_WHOLE,
    KernelChoice,
    KVCacheDtype,
    Quantization,
    check_settings,
    setting,
)
from specdec.kv_transfer.kv_transfer_config import KVTransferConfig, Role, may_share, tiers_of
from specdec.scheduling.scheduler_config import SchedulerConfig

DEMO = Path(__file__).parent / "demo"
# The demo target's heads by the names that drafts may have; the first one drafts by default.
DEMO_HEADS = {"eagle": DEMO / "eagle3", "eagle3": DEMO / "eagle3", "dspark": DEMO / "dspark"}
DEMO_HEAD = DEMO_HEADS["eagle"]
# The head that the model names or that was shipped for it, or else n-grams.
AUTO = "auto"
# Tokens; a table of rotary embeddings has a row for each.
LONGEST_CONTEXT = 2**22
# EAGLE-2, paper and code: depth 6, 10 expanded a level, 60 verified.
EAGLE2_SHAPE = DraftShape(6, 10, 60)
# On a CPU, where every level costs. 15 nodes and a root are 16 rows, which fill a tile register; adaptive trees have
# fewer where rows cost more.
CPU_SHAPE = DraftShape(6, 4, 15, min_reach=0.4)
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
BUILT_IN_RULES = ("coupled", "rejection")
ExecutorBackend = Literal["mp", "ray"]


def default_shape(device_type: str) -> DraftShape:
    """Return the bounds of draft trees where none are given."""
    return EAGLE2_SHAPE if device_type == "cuda" else CPU_SHAPE


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine, each with its help text; `check_settings` refuses values outside their range."""

    PANEL: ClassVar[str] = "Engine"

    model: Path = setting(DEMO / "target", "Checkpoint folder of the target.", flags="")
    draft: Path | None = setting(None, "Folder of a head or a small model that drafts, or None.", flags="")
    revision: str | None = setting(
        None,
        "Branch, tag or commit of the model on the Hugging Face hub.",
        shown_default="its main branch",
        panel="Model",
    )
    draft_revision: str | None = setting(
        None,
        "Branch, tag or commit of the head or small model on the hub.",
        shown_default="its main branch",
        panel="Drafts",
    )
    speculative_method: str | None = setting(
        None,
        "Method named in `speculative_config`. A checkpoint of another kind still drafts, with a warning.",
        flags="",
    )
    chains: tuple[str, ...] = setting(
        (),
        "Draft sources beside a draft model, or in its place: ngram (prompt lookup), suffix (and earlier requests), "
        "and those of plug-ins.",
        flags="",
    )
    draft_options: Sequence[str] = setting(
        (),
        "Option of a draft source that a plug-in brings; repeatable.",
        metavar="SOURCE=VALUE",
        flags="--draft-option",
        panel="Drafts",
        shown_default="the source's own",
    )
    plugins: Sequence[str] = setting(
        (),
        "Python module, or name of an installed package's entry point in the group specdec.plugins, that registers "
        "head kinds, draft sources or acceptance rules; every process imports it; repeatable.",
        metavar="MODULE",
        flags="--plugin",
        shown_default="none",
    )
    draft_store_tokens: int = setting(
        1_000_000,
        "Tokens of earlier requests and of --draft-corpus that --draft suffix keeps, 41.5 bytes of memory each; the "
        "least recently useful are given up first.",
        least=1024,
        most=1 << 30,
        panel="Drafts",
    )
    draft_corpus: Sequence[str] = setting(
        (),
        "A text file in which --draft suffix finds drafts for all requests; repeatable.",
        metavar="FILE",
        panel="Drafts",
        shown_default="none",
    )
    draft_store_shared: bool = setting(
        False,
        "Let --draft suffix find drafts in requests of other API keys; without API keys, of other addresses.",
        flags="--draft-store-shared",
        panel="Drafts",
    )
    tokenizer: Path | None = setting(
        None,
        "The tokenizer: a folder, or org/name on the Hugging Face hub.",
        metavar="FOLDER",
        flags="",
        panel="Model",
        shown_default="the model's",
    )
    seed: int | None = setting(
        None,
        "Base seed for requests without one. The same requests in the same order get the same outputs.",
        least=0,
        most=MAX_WHOLE,
        wanted="between 0 and 2^63 - 1",
        shown_default="drawn anew",
        flags="",
        short="-s",
    )
    dtype: str = setting(
        "auto",
        "Precision of weights and arithmetic; auto: bfloat16 where the device computes in it, else float32.",
        panel="Model",
        choices=DTYPES,
    )
    device: str = setting("auto", "auto, cpu or cuda.", panel="Model")
    shape: DraftShape = setting(EAGLE2_SHAPE, "Bounds of draft trees.", flags="")
    verify: str = setting(
        "coupled",
        "Acceptance rule: coupled or rejection, or one of a plug-in.",
        panel="Drafts",
        metavar="coupled|rejection|NAME",
    )
    logprobs_mode: LogprobsMode = setting(
        "raw_logprobs", "raw_logprobs of the model, or processed_logprobs after all sampling parameters.", flags=""
    )
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    limits: RequestLimits = field(default_factory=RequestLimits)
    max_model_len: int | None = setting(
        None, "Most tokens of a request, prompt included.", least=2, shown_default="the model's", panel="Model"
    )
    kv_cache_memory: int | None = setting(
        None,
        "Memory for the cache of target and head together: bytes, or a size such as 4GiB.",
        least=1,
        metavar="SIZE",
        is_size=True,
        shown_default="1 GiB on a CPU, what is left on a GPU",
    )
    kv_cache_dtype: KVCacheDtype = setting(
        "auto",
        "Keys and values of the target in the cache: auto, as the checkpoint asks, else as dtype; fp8 (fp8_e4m3), "
        "fp8_e5m2 or int8, 8 bits: twice the tokens in the same memory (almost twice for int8 without the "
        "checkpoint's scales), but the model's outputs change.",
    )
    draft_kv_cache_dtype: KVCacheDtype | None = setting(
        None, "Keys and values of the draft model in the cache.", panel="Drafts", shown_default="kv_cache_dtype"
    )
    gpu_memory_utilization: float = setting(
        0.9, "Share of a GPU's memory for weights, the largest step and the cache together.", above=0, most=1
    )
    block_size: int = setting(16, "Tokens per cache block, a multiple of 8.", least=8, wanted="a multiple of 8")
    enable_prefix_caching: bool = setting(True, "Use cached prefixes of other requests.", shown_default="on")
    kv_transfer_config: KVTransferConfig | None = setting(
        None,
        "Where cached blocks go beyond the device, as vLLM's JSON: kv_connector, kv_role, kv_load_failure_policy, "
        "kv_connector_extra_config, kv_connector_module_path.",
        metavar="JSON",
        shown_default="nowhere",
    )
    role: Role = setting(
        "both",
        "Part in a split of prefill and decoding with other engines: prefill computes prompts for others and answers "
        "once their blocks are in the stores of --kv-transfer-config; decode takes them from there; both: no split.",
        flags="",
    )
    kernels: KernelChoice = setting(
        "auto", "auto, torch, triton or native; auto: triton on a GPU, native on a CPU where it was built, else torch."
    )
    reasoning_parser: str | None = setting(
        None,
        "How the model sets its thinking apart from its answer: qwen3, deepseek_r1, or MODULE:CLASS of one's own. "
        "Structured outputs and forced tool calls begin behind the thinking.",
        metavar="NAME",
        shown_default="it does not think",
        panel="Model",
    )
    structured_compile_timeout: float = setting(
        5.0,
        "Seconds after which a request is refused whose structured output is still being compiled.",
        above=0,
        most=3600,
        metavar="SECONDS",
    )
    structured_max_bytes: int = setting(
        1 << 18,
        "Most bytes of a request's schema, regular expression, choices or grammar.",
        least=1,
        metavar="BYTES",
    )
    threads: int | None = setting(
        None,
        "Threads of the native kernels.",
        least=1,
        most=1024,
        shown_default="OMP_NUM_THREADS, or the cores that the process may use",
    )
    tensor_parallel_size: int = setting(
        1,
        "Number of processes that each hold a part of every weight of the target, and compute each step together.",
        least=1,
        most=64,
        panel="Model",
    )
    pipeline_parallel_size: int = setting(
        1,
        "Number of stages that the target's layers are split into, each in processes of its own.",
        least=1,
        most=64,
        panel="Model",
    )
    distributed_executor_backend: ExecutorBackend = setting(
        "mp",
        "Where ranks beside the first run: mp, in processes of this machine, or ray, in actors of a Ray cluster.",
        panel="Model",
    )
    draft_tensor_parallel_size: int = setting(
        1,
        "Number of processes that share the draft model: 1, so that each has all of it, or tensor_parallel_size.",
        least=1,
        panel="Drafts",
    )
    quantization: Quantization = setting(
        "none",
        "Weights of target and draft model: none, as loaded, or q8, in 8 bits by the native kernels: faster, smaller, "
        "but the model's outputs change.",
        panel="Model",
    )
    enable_lora: bool = setting(
        False,
        "Serve LoRA adapters of the target beside it, each request its own.",
        flags="--enable-lora",
        panel="Model",
    )
    max_loras: int = setting(
        8,
        "Most adapters that are loaded at a time; the least recently used idle one is evicted.",
        least=1,
        most=4096,
        panel="Model",
    )
    max_lora_rank: int = setting(16, "Largest rank of an adapter.", least=1, most=256, panel="Model")
    draft_window_size: int | None = setting(
        None,
        "Most tokens that the draft model's attention sees, the own one included. Heads lose acceptance on texts that "
        "are longer than those of their training; a window avoids it.",
        least=1,
        shown_default="as its config.json says",
        panel="Drafts",
    )
    collect_drafts: Path | None = setting(
        None,
        "Folder in which prompts and outputs of some requests are kept, as tokens, to train the head further on them.",
        metavar="FOLDER",
        panel="Drafts",
        shown_default="nothing is kept",
    )
    collect_drafts_share: float = setting(
        0.1, "Share of the requests that --collect-drafts keeps.", above=0, most=1, panel="Drafts"
    )
    collect_drafts_limit: float = setting(
        1.0,
        "Most GiB that --collect-drafts keeps; the oldest requests are removed first.",
        least=0.001,
        metavar="GIB",
        panel="Drafts",
    )
    enforce_eager: bool = setting(
        False, "Launch every kernel by itself; capture no CUDA graphs.", flags="--enforce-eager"
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.verify not in BUILT_IN_RULES and not self.plugins:
            known = ", ".join(BUILT_IN_RULES)
            raise ValueError(f"verify is {self.verify!r}; it must be one of {known}, or come with a plugin")
        for each in self.draft_options:
            if not all(each.partition("=")):
                raise ValueError(f"draft_options has {each!r}; it must be SOURCE=VALUE")
        if self.block_size % 8:
            raise ValueError(f"block_size is {self.block_size}; it must be a multiple of 8")
        if self.reasoning_parser is not None:
            reasoning_parser(self.reasoning_parser)
        if self.kv_transfer_config is not None:
            if not self.enable_prefix_caching:
                raise ValueError("kv_transfer_config needs the prefix cache; leave enable_prefix_caching on")
            if self.kv_transfer_config.kv_connector_module_path is None:
                tiers_of(self.kv_transfer_config)
        self._check_role()
        size = self.tensor_parallel_size
        if self.draft_tensor_parallel_size not in (1, size):
            raise ValueError(
                f"draft_tensor_parallel_size is {self.draft_tensor_parallel_size}; it must be 1 or "
                f"tensor_parallel_size, which is {size}"
            )

    def _check_role(self) -> None:
        if self.role == "both":
            return
        connector = self.kv_transfer_config
        if connector is None or not may_share(connector):
            raise ValueError(
                f"role is {self.role!r}; it needs a kv_transfer_config with a store that engines share: a tier of type "
                "'fs' or a Mooncake store"
            )
        if connector.role not in ("both", self.role):
            raise ValueError(
                f"role is {self.role!r} and kv_transfer_config has kv_role {connector.kv_role!r}; leave kv_role out"
            )

    @property
    def is_prefill(self) -> bool:
        """True if the engine computes prompts for other engines, by `role` or by vLLM's `kv_role`."""
        return self.role == "prefill" or (
            self.kv_transfer_config is not None and self.kv_transfer_config.role == "prefill"
        )

    @property
    def sources(self) -> str | None:
        """Draft sources as `LLM` takes them, None for none."""
        return ",".join([*([str(self.draft)] if self.draft else []), *self.chains]) or None

    @property
    def drafts_from_store(self) -> bool:
        """Return whether continuations in earlier requests are drafted."""
        return SUFFIX in self.chains

    @property
    def tree_in_words(self) -> str:
        """Largest draft trees, as they stand beside a tau: "at most 8 nodes, depth 6"; empty without drafts."""
        return f"at most {self.shape.in_words}" if self.sources else ""

    def context(self, most: int) -> int:
        """Return the tokens of the longest request.

        Args:
            most: positions of the model.

        Raises:
            ValueError: `max_model_len` is more than that.
        """
        if self.max_model_len is not None and self.max_model_len > most:
            raise ValueError(
                f"max_model_len {self.max_model_len} is more than the model's max_position_embeddings {most}; "
                "give that at most, or leave it out"
            )
        if most < 2:
            raise ValueError(f"the model's max_position_embeddings is {most}; a prompt and an answer need at least 2")
        longest = self.max_model_len or most
        if longest > LONGEST_CONTEXT:
            name = "the model's max_position_embeddings" if self.max_model_len is None else "max_model_len"
            raise ValueError(f"{name} is {longest}; set max_model_len to {LONGEST_CONTEXT} or less")
        return longest


def draft_names(draft: str | Path | None) -> list[str | Path]:
    """Return the sources that a draft names: a folder, or names and folders separated by commas."""
    if draft is None or draft == "none":
        return []
    if isinstance(draft, Path) or Path(draft).is_dir():
        return [draft]
    return [name.strip() for name in draft.split(",")]
