"""Times of requests in the metrics, by a clock that stands still."""

from unittest.mock import Mock

import pytest

from specdec import RequestOutput, SamplingParams
from specdec.core.outputs import CompletionOutput
from specdec.server import metrics
from specdec.server.metrics import RequestTimer, ServerMetrics


def test_a_sample_that_has_ended_takes_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples of a token a second each, of two and of four tokens."""
    clock = Mock()
    monkeypatch.setattr(metrics, "time", clock)
    clock.perf_counter.return_value = 0.0
    counted = ServerMetrics("tiny", 64, {})
    timer = RequestTimer(counted, SamplingParams(n=2), None)
    for second in range(1, 5):
        clock.perf_counter.return_value = float(second)
        outputs = [
            CompletionOutput(index, "", [7] * min(second, most), [False] * min(second, most), reason)
            for index, most in enumerate((2, 4))
            for reason in ["length" if second >= most else None]
        ]
        timer.saw(RequestOutput("0", None, [1, 2], outputs, second == 4))
    page = counted.page(None, 0).decode()
    found = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in page.splitlines() if "tiny" in line}
    assert (found["vllm:inter_token_latency_seconds_count"], found["vllm:inter_token_latency_seconds_sum"]) == (3, 3)
    assert found["vllm:request_time_per_output_token_seconds_sum"] == 1
