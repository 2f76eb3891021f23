"""Events in, Prometheus' text out; the figures are worked out by hand."""

import asyncio
import urllib.request
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.orchestrator.metrics import RoundMetrics
from services.runtime.actor import Actor
from services.runtime.bus import BusEvent, MemoryBus
from services.runtime.metrics import ProcessMetrics
from services.speculation.errors import AerieError

ROUND = {
    "session": "s",
    "round": 0,
    "tokens": 3,
    "nodes": 8,
    "accepted": 2,
    "draft_seconds": 0.01,
    "verify_seconds": 0.03,
    "network_seconds": 0.002,
    "queue_seconds": 0.001,
    "round_seconds": 0.05,
    "drafted": True,
    "attached": True,
    "late": False,
}


@pytest.fixture
def metrics():
    orchestrator = SimpleNamespace(
        info=SimpleNamespace(name="smollm2"),
        running=3,
        waiting=1,
        directory=SimpleNamespace(offers={"a": 1, "b": 2}),
    )
    process = ProcessMetrics(MemoryBus())
    return process, RoundMetrics(orchestrator, process.registry)


def values(process):
    """Sample name with its labels -> value, as a scraper reads the page."""
    page = process.route().endpoint(None).body.decode()
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def test_rounds_count_under_vllms_names(metrics):
    process, rounds = metrics
    rounds.count(BusEvent("round.committed", ROUND))
    rounds.count(BusEvent("round.committed", {**ROUND, "accepted": 0, "tokens": 1, "nodes": 5}))
    rounds.count(BusEvent("round.committed", {**ROUND, "accepted": 0, "nodes": 1, "drafted": False, "late": True}))
    rounds.count(BusEvent("round.committed", {**ROUND, "nodes": 1, "accepted": 0, "drafted": False, "attached": False}))
    found = values(process)
    assert found["vllm:spec_decode_num_drafts_total"] == 2
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 7 + 4
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 2
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total{position=0}"] == 1
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total{position=1}"] == 1
    assert (found["aerie_rounds_total"], found["aerie_fallback_rounds_total"]) == (4, 1)
    assert found["aerie_late_drafts_total"] == 1
    assert found["aerie_round_seconds_sum{part=verify}"] == pytest.approx(0.12)
    # 0.05 - 0.01 - 0.03 - 0.002 - 0.001 s a round are nobody's.
    assert found["aerie_round_seconds_sum{part=other}"] == pytest.approx(4 * 0.007)
    assert found["aerie_round_seconds_count{part=network}"] == 4


def test_sessions_and_drafters_count(metrics):
    process, rounds = metrics
    rounds.count(BusEvent("session.opened", {"session": "s", "prompt_tokens": 20, "drafter": "off"}))
    ended = {"session": "s", "reason": "stop", "prompt_tokens": 20, "completion_tokens": 33}
    rounds.count(BusEvent("session.finished", {**ended, "first_token_seconds": 0.25, "seconds": 2.0}))
    rounds.count(
        BusEvent("session.finished", {**ended, "reason": "error", "first_token_seconds": None, "seconds": 1.0})
    )
    rounds.count(
        BusEvent("session.finished", {**ended, "reason": "cancelled", "first_token_seconds": None, "seconds": 1.0})
    )
    rounds.count(BusEvent("session.refused", {"reason": "RESOURCE_EXHAUSTED"}))
    rounds.count(BusEvent("drafter.lost", {"drafter": "d", "session": "s", "message": "gone"}))
    rounds.count(BusEvent("drafter.attached", {"drafter": "e", "session": "s"}))
    rounds.count(BusEvent("drafter.resynced", {"drafter": "e", "session": "s"}))
    rounds.count(BusEvent("something.else", {}))
    found = values(process)
    assert found["vllm:prompt_tokens_total"] == 20
    assert found["vllm:generation_tokens_total"] == 99
    assert found["vllm:request_success_total{finished_reason=stop}"] == 1
    assert found["vllm:request_success_total{finished_reason=error}"] == 1
    assert found["vllm:request_success_total{finished_reason=abort}"] == 1
    assert found["vllm:time_to_first_token_seconds_sum"] == 0.25
    assert found["vllm:time_to_first_token_seconds_count"] == 1
    assert found["vllm:e2e_request_latency_seconds_sum"] == 4.0
    assert found["aerie_requests_refused_total{reason=RESOURCE_EXHAUSTED}"] == 1
    assert found["aerie_drafters_lost_total{drafter=d}"] == 1
    assert (found["aerie_drafters_attached_total"], found["aerie_drafter_resyncs_total"]) == (1, 1)
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (3, 1)
    assert found["aerie_drafters"] == 2


def test_an_event_that_cannot_be_counted_does_not_end_the_counting(metrics, caplog):
    process, rounds = metrics

    async def run():
        bus = MemoryBus()
        events = bus.subscribe()
        counting = asyncio.create_task(rounds.consume(events))
        bus.publish("session.opened", session="of another kind")
        bus.publish("round.committed", **ROUND)
        while values(process)["aerie_rounds_total"] == 0:
            await asyncio.sleep(0.01)
        counting.cancel()

    asyncio.run(asyncio.wait_for(run(), 5))
    assert "a session.opened event was not counted, incident" in caplog.text


def test_gauges_are_read_when_asked_over_http(metrics):
    process, _ = metrics
    count = [1]
    process.gauge("aerie_sessions", "Sessions.", lambda: count[0])
    actor: Actor[int] = Actor("someone")
    actor._mailbox.put_nowait(1)
    process.watch({"someone": actor})
    count[0] = 5
    end = process.serve("127.0.0.1:9173")
    try:
        page = urllib.request.urlopen("http://127.0.0.1:9173/metrics", timeout=5).read().decode()
    finally:
        end()
    assert "aerie_sessions 5.0" in page
    assert 'aerie_mailbox_depth{actor="someone"} 1.0' in page


@pytest.mark.parametrize("address", ["unix:/tmp/m", "nowhere", "127.0.0.1:99999", "192.0.2.1:9000"])
def test_where_metrics_cannot_be_served(metrics, address):
    with pytest.raises(AerieError):
        metrics[0].serve(address)
