"""Checks and gauges of the services that own models."""

from services.cli.serving.process import Process
from services.cli.serving.watching import watch_actor, watch_device
from services.drafter.host import DrafterHost
from services.speculation.errors import Reason
from services.verifier.host import VerifierHost
from services.verifier.servicer import VerifierServicer


def watch_verifier(process: Process, host: VerifierHost, servicer: VerifierServicer) -> None:
    watch_device(process)
    watch_actor(process, "verifier", host)
    process.cut_off.append(lambda why: host.fail_sessions(why, Reason.SERVICE_UNAVAILABLE))
    gauge = process.metrics.gauge
    gauge("aerie_sessions", "Sessions that the verifier holds.", lambda: len(host.sessions))
    gauge("aerie_kv_bytes", "Bytes that sessions' caches may come to use.", lambda: host.budget.leased)
    gauge("aerie_feature_bytes", "Bytes of history that wait to be sent on.", lambda: servicer.outboxes.total)
    gauge("aerie_batches", "Forwards of the target so far.", lambda: host.batches)
    gauge("aerie_batched_rows", "Rows of those forwards.", lambda: host.batched_rows)


def watch_drafter(process: Process, host: DrafterHost) -> None:
    watch_device(process)
    watch_actor(process, "drafter", host)
    gauge = process.metrics.gauge
    gauge("aerie_drafter_sessions", "Sessions that the drafter holds.", lambda: len(host.sessions))
    gauge("aerie_draft_seconds", "Running mean of the seconds of a draft.", lambda: host.draft_seconds)
