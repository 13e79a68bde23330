"""Settings of the HTTP server. Pure Python, so that the command line shows them without the server's packages."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from specdec.kernels.types.settings import check_settings, checked_keywords, setting
from specdec.openai.answer_settings import MetricsChoice, ToolCallParserChoice
from specdec.server.lora_modules import read_lora_modules

DefaultsFrom = Literal["auto", "vllm"]
LogFormat = Literal["text", "json"]
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s,*A-Z]+")


@checked_keywords()
@dataclass(frozen=True)
class ServerSettings:
    """Settings by vLLM's names where it has them; `check_settings` refuses values outside their range."""

    PANEL: ClassVar[str] = "Server"

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = setting(8000, "Port to listen on; 0 for any free one.", least=0, most=65535)
    api_key: Sequence[str] = setting(
        (),
        "Key that clients must send as a bearer token; repeatable.",
        metavar="KEY",
        envvar="SPECDEC_API_KEY",
        shown_default="no key needed",
        flags="",
    )
    admin_api_key: Sequence[str] = setting(
        (),
        "Key that also opens /update_draft and the routes that load adapters; repeatable.",
        metavar="KEY",
        envvar="SPECDEC_ADMIN_API_KEY",
        shown_default="these routes are off",
        flags="",
    )
    served_model_name: Sequence[str] = setting(
        (), "Name of the model in the API; repeatable, answers carry the first.", shown_default="the model as given"
    )
    max_logprobs: int = setting(20, "Most log-probabilities per token that a request may ask for.", least=0)
    generation_config: DefaultsFrom = setting(
        "auto", "Default sampling parameters: auto, the model's generation_config.json; vllm, the API's own."
    )
    chat_template: str | None = setting(
        None,
        "Jinja template of conversations: a file, or the template itself.",
        metavar="FILE|TEXT",
        shown_default="the model's",
    )
    enable_auto_tool_choice: bool = setting(
        True, "Let the model choose whether to call a tool; without it, tools need tool_choice none."
    )
    tool_call_parser: ToolCallParserChoice = setting(
        "auto",
        "Form of the model's tool calls: hermes, llama3_json, pythonic, qwen3_coder, mistral, none, or auto, as the "
        "chat template shows it.",
    )
    per_request_spec_decode_metrics: MetricsChoice = setting(
        "none",
        "Speculation figures in answers, as the field metrics: none, summary, or detailed, with lists of all steps.",
    )
    allow_draft_updates: bool = setting(
        False,
        "Let clients with an administrator's key replace the draft head, by POST /update_draft.",
        flags="--allow-draft-updates",
    )
    lora_modules: Sequence[str] = setting(
        (),
        "Adapter that requests choose by its name as their model, NAME=FOLDER, or vLLM's JSON: name, path, and "
        "draft_lora_path for the draft model's; repeatable.",
        metavar="NAME=FOLDER|JSON",
        shown_default="none",
    )
    allow_runtime_lora_updating: bool = setting(
        False,
        "Let clients with an administrator's key load and unload adapters, by POST /v1/load_lora_adapter and "
        "/v1/unload_lora_adapter.",
        flags="--allow-runtime-lora-updating",
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "Address of a collector of OpenTelemetry traces, by OTLP over HTTP, such as http://localhost:4318/v1/traces.",
        metavar="URL",
        shown_default="no traces",
    )
    log_format: LogFormat = setting("text", "Form of the log: text, or json, one object per line.")
    max_request_size: int = setting(4 << 20, "Most bytes of a request's body; more is refused with 413.", least=1)
    request_timeout: float = setting(
        3600.0, "Seconds after which a request is aborted; 0: no limit.", least=0, metavar="SECONDS"
    )
    stream_delay: float = setting(
        20.0,
        "Milliseconds for which tokens of a streamed answer may wait, to be sent together; the first is sent at once.",
        least=0,
        metavar="MS",
    )
    body_timeout: float = setting(
        60.0, "Seconds within which a request's body must arrive.", above=0, metavar="SECONDS"
    )
    header_timeout: float = setting(
        20.0, "Seconds within which a request's headers must arrive.", above=0, metavar="SECONDS"
    )
    timeout_keep_alive: float = setting(
        75.0,
        "Seconds for which a connection stays open after an answer; before its first request, header_timeout holds.",
        above=0,
        metavar="SECONDS",
    )
    sse_keep_alive_interval: float = setting(
        45.0,
        "Seconds after which a stream without an event gets a comment, so that proxies keep it open; 0: none.",
        least=0,
        metavar="SECONDS",
    )
    send_timeout: float = setting(
        300.0,
        "Seconds in which a client that reads too slowly must catch up; then its connection is cut.",
        above=0,
        metavar="SECONDS",
    )
    engine_timeout: float = setting(
        300.0,
        "Seconds without a sign of life of the engine process, while requests wait, after which it is killed and "
        "started again; above the longest step; 0: no limit.",
        least=0,
        metavar="SECONDS",
    )
    grace: float = setting(
        30.0,
        "Seconds that running requests get to finish at shutdown; then they are aborted.",
        least=0,
        metavar="SECONDS",
    )
    allowed_origins: Sequence[str] = setting(
        (), "Origin that browsers may call from (CORS), or *; repeatable.", metavar="ORIGIN", shown_default="none"
    )
    root_path: str = setting("", "Path prefix under which a proxy serves this server.", shown_default="none")
    ssl_keyfile: str | None = setting(None, "Private key for HTTPS.", metavar="FILE")
    ssl_certfile: str | None = setting(None, "Certificate for HTTPS.", metavar="FILE")

    def __post_init__(self) -> None:
        check_settings(self)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("--ssl-keyfile and --ssl-certfile belong together; give both or neither")
        for name in ("allow_draft_updates", "allow_runtime_lora_updating"):
            if getattr(self, name) and not self.admin_api_key:
                raise ValueError(
                    f"{name} needs an administrator's key, since it names files here; give --admin-api-key"
                )
        read_lora_modules(self.lora_modules)
        for name in ("api_key", "admin_api_key", "served_model_name", "allowed_origins"):
            if any(not text.strip() for text in getattr(self, name)):
                raise ValueError(f"{name} holds an empty text; give at least one character, or leave it out")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins holds {origin!r}; give *, or scheme://host[:port] as browsers send it"
                )
