"""Rounds: what comes out is what plain decoding gives, whatever the trees."""

import asyncio
import gc

import mlx.core as mx
import numpy as np
import pytest

from services.runtime.device import device_thread
from services.speculation import window as window_module
from services.speculation.trees import DraftTree
from services.speculation.warpers import Sampler
from services.verifier import batching
from tests.plain import GREEDY, PlainRun, decode, relative_error
from tests.targets.test_target import hidden_states
from tests.tiny import write_tiny_llama
from tests.verifier.client import Client, busy_device, chain, hosting, partly_right, run
from tests.verifier.conftest import Tiny, load_both

PROMPT = [11, 42, 7, 199, 250, 3, 42, 88, 5, 17, 121]
LIMIT = 1e-4
SAMPLERS = {
    "greedy": GREEDY,
    "greedy, penalties": Sampler(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    "greedy, bias": Sampler(logit_bias=((5, 3.0), (9, -100.0), (42, 2.5))),
    "temperature": Sampler(temperature=0.9),
    "top-p": Sampler(temperature=1.2, top_p=0.8),
    "top-k": Sampler(temperature=1.5, top_k=20),
    "min-p": Sampler(temperature=1.5, min_p=0.05),
    "everything": Sampler(1.1, 50, 0.95, 0.01, 1.2, 0.3, 0.1, ((7, 1.0), (8, -2.0))),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_rounds_equal_plain_decoding(tiny: Tiny, kind: str):
    expected = decode(tiny.plain, PROMPT, 24, SAMPLERS[kind], seed=7)

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT, max_tokens=24, sampler=SAMPLERS[kind])
            assert await client.play_to(expected.tokens, np.random.default_rng(1)) == expected.tokens
            assert client.verdicts[-1].finish == "length"
            # The trees were partly right: several tokens a round, but not always.
            assert len({len(verdict.tokens) for verdict in client.verdicts}) > 1

    run(play())


@pytest.mark.parametrize("kind", ["greedy", "top-p"])
def test_rounds_equal_plain_decoding_past_a_sliding_window(sliding: Tiny, kind: str):
    expected = decode(sliding.plain, PROMPT, 30, SAMPLERS[kind], seed=2**63 + 5)

    async def play():
        async with hosting(sliding.target) as host:
            client = Client(host)
            await client.open(PROMPT, max_tokens=30, sampler=SAMPLERS[kind], seed=2**63 + 5)
            assert await client.play_to(expected.tokens, np.random.default_rng(2)) == expected.tokens

    run(play())


def test_seed_decides_and_trees_do_not(tiny: Tiny):
    sampler = SAMPLERS["temperature"]

    async def play():
        async with hosting(tiny.target) as host:
            outputs = []
            for name, (seed, trees) in enumerate([(1, 10), (1, 11), (2, 10)]):
                client, expected = Client(host, str(name)), decode(tiny.plain, PROMPT, 16, sampler, seed).tokens
                await client.open(PROMPT, max_tokens=16, sampler=sampler, seed=seed)
                outputs.append(await client.play_to(expected, np.random.default_rng(trees)))
            assert outputs[0] == outputs[1]
            assert outputs[0] != outputs[2]

    run(play())


@pytest.mark.parametrize("rows", [512, 4, 11, 10])
def test_history_brings_the_features_of_every_prompt_position(tiny: Tiny, monkeypatch, rows: int):
    """Row i goes with the token at i + 1; the last one's is the first pending token. Slices change nothing."""
    monkeypatch.setattr(batching, "PREFILL_ROWS", rows)
    taps = (0, 2, "final")
    expected = hidden_states(tiny.plain, PROMPT)

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            first = await client.open(PROMPT, taps=taps)
            assert first.token == decode(tiny.plain, PROMPT, 1).tokens[0]
            assert [h.features.base for h in client.history] == list(range(0, len(PROMPT), rows))
            assert [len(h.features) for h in client.history] == [len(h.tokens) for h in client.history]
            assert max(len(h.features) for h in client.history) <= rows
            assert [t for h in client.history for t in h.tokens] == [*PROMPT[1:], first.token]
            for tap in taps:
                got = np.concatenate([h.features.rows[tap] for h in client.history])
                assert relative_error(got, expected[tap]) < LIMIT
            assert host.batches == -(-len(PROMPT) // rows)

    run(play())


@pytest.mark.parametrize("rows", [512, 4, 11])
def test_history_leaves_out_rows_that_no_drafter_keeps(tiny: Tiny, monkeypatch, rows: int):
    """Positions before the last 5 are sent up to the sinks, each with the token that follows it."""
    monkeypatch.setattr(batching, "PREFILL_ROWS", rows)
    monkeypatch.setattr(window_module, "WINDOW", 5)
    expected = hidden_states(tiny.plain, PROMPT)
    kept = [p for p in range(len(PROMPT)) if p < 4 or p >= len(PROMPT) - 5]

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            first = await client.open(PROMPT, taps=(2,))
            following = [*PROMPT[1:], first.token]
            sent = [h.features.base + i for h in client.history for i in range(len(h.features))]
            assert sent == kept
            assert [t for h in client.history for t in h.tokens] == [following[p] for p in kept]
            got = np.concatenate([h.features.rows[2] for h in client.history])
            assert relative_error(got, expected[2][kept]) < LIMIT

    run(play())


def test_verdicts_bring_the_features_of_accepted_positions(tiny: Tiny):
    """Together with the prompt's: one row for each position but the pending token's."""
    expected = decode(tiny.plain, PROMPT, 20).tokens
    states = hidden_states(tiny.plain, [*PROMPT, *expected])

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT, taps=(1, 3))
            await client.play_to(expected, np.random.default_rng(3))
            position = len(PROMPT)
            for verdict in client.verdicts:
                assert verdict.features.base == position == verdict.base_len - 1
                assert len(verdict.features) == len(verdict.path) == len(verdict.tokens)
                for tap in (1, 3):
                    rows = verdict.features.rows[tap]
                    assert relative_error(rows, states[tap][position : position + len(rows)]) < LIMIT
                position += len(verdict.path)
            assert position == len(client.tokens) - 1

    run(play())


def test_sessions_of_a_batch_get_their_own_taps(tiny: Tiny):
    async def play():
        async with hosting(tiny.target) as host:
            clients = {taps: Client(host, str(taps)) for taps in [(), (1,), (2, "final")]}
            async with busy_device() as settle:
                for taps, client in clients.items():
                    client.ask_open(PROMPT, taps=taps)
                await settle()
            for client in clients.values():
                await client.prefilled()
            async with busy_device() as settle:
                for client in clients.values():
                    client.tell(client.verify(client.root()))
                await settle()
            for taps, client in clients.items():
                assert tuple((await client.verdict()).features.rows) == taps
                assert [tuple(history.features.rows) for history in client.history] == ([taps] if taps else [])
            assert host.batches == 2

    run(play())


def test_path_names_the_accepted_nodes(tiny: Tiny):
    right = decode(tiny.plain, PROMPT, 5).tokens
    wrong = [(token + 1) % 300 for token in right]

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT)
            tokens = [right[0], wrong[1], right[1], right[2], wrong[2], wrong[3], right[3]]
            verdict = await client.play(DraftTree.build(tokens, [-1, 0, 0, 2, 2, 3, 3]))
            assert verdict.path == (0, 2, 3, 6)
            assert verdict.tokens == tuple(right[1:5])
            assert (verdict.round, verdict.base_len, verdict.finish) == (0, len(PROMPT) + 1, None)

    run(play())


def test_sessions_share_batches_and_keep_their_tokens(tiny: Tiny):
    """Eight sessions, each with its own prompt, sampler and trees; greedy and sampled, tapped and not."""
    kinds = list(SAMPLERS.values())
    prompts = [PROMPT[: 2 + i] for i in range(8)]
    runs = [decode(tiny.plain, p, 12, s, seed=i) for i, (p, s) in enumerate(zip(prompts, kinds, strict=True))]

    async def play():
        async with hosting(tiny.target) as host:
            clients = [Client(host, str(i)) for i in range(8)]

            async def one(i: int) -> list[int]:
                taps = (2,) if i % 2 else ()
                await clients[i].open(prompts[i], max_tokens=12, sampler=kinds[i], seed=i, taps=taps)
                return await clients[i].play_to(runs[i].tokens, np.random.default_rng(i))

            outputs = await asyncio.gather(*(one(i) for i in range(8)))
            assert outputs == [run.tokens for run in runs]
            alone = sum(1 + len(client.verdicts) for client in clients)
            assert host.batches < alone / 2

    run(play())


def test_work_that_waits_together_is_one_batch(tiny: Tiny):
    runs = [decode(tiny.plain, PROMPT[: 3 + i], 7).tokens for i in range(4)]

    async def play():
        async with hosting(tiny.target) as host:
            clients = [Client(host, str(i)) for i in range(4)]
            async with busy_device() as settle:
                for i, client in enumerate(clients):
                    client.ask_open(PROMPT[: 3 + i])
                await settle()
            for client in clients:
                await client.prefilled()
            assert (host.batches, host.batched_rows) == (1, 3 + 4 + 5 + 6)
            late = Client(host, "late")
            async with busy_device() as settle:
                for i, client in enumerate(clients):
                    client.tell(client.verify(chain(client.tokens[-1], runs[i][1 : 2 + i])))
                late.ask_open(PROMPT)
                await settle()
            for i, client in enumerate(clients):
                assert (await client.verdict()).tokens == tuple(runs[i][1 : 3 + i])
            await late.prefilled()
            assert (host.batches, host.batched_rows) == (2, 18 + (2 + 3 + 4 + 5) + 11)

    run(play())


def test_prompts_wait_in_slices_while_others_go_on(tiny: Tiny, monkeypatch):
    """No batch holds more prompt rows than allowed, and a running session's rounds pass the long prompt by."""
    monkeypatch.setattr(batching, "PREFILL_ROWS", 8)
    sizes, forward = [], tiny.target.forward

    def spy(rows, taps):
        sizes.append(sum(len(r.tokens) for r in rows if r.logits != "all"))
        return forward(rows, taps)

    monkeypatch.setattr(tiny.target, "forward", spy)
    long = (PROMPT * 10)[:100]
    expected = decode(tiny.plain, PROMPT, 12).tokens

    async def play():
        async with hosting(tiny.target) as host:
            quick, first, second = Client(host, "quick"), Client(host, "first"), Client(host, "second")
            await quick.open(PROMPT)
            async with busy_device() as settle:
                first.ask_open(long[:3])
                second.ask_open(long)
                await settle()
            assert await quick.play_to(expected[:4], np.random.default_rng(0), nodes=1) == expected[:4]
            assert second.inbox.empty()
            assert (await first.prefilled()).token == decode(tiny.plain, long[:3], 1).tokens[0]
            assert (await second.prefilled()).token == decode(tiny.plain, long, 1).tokens[0]
            assert max(sizes) == 8

    run(play())


def reported(raw: PlainRun, step: int) -> np.ndarray:
    wide = raw.logits[step].astype(np.float64)
    return wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()


def test_log_probabilities_are_those_of_the_unwarped_target(tiny: Tiny):
    sampler = Sampler(temperature=1.4, top_k=5, repetition_penalty=1.5, logit_bias=((3, 4.0),))
    raw = decode(tiny.plain, PROMPT, 12, sampler, seed=7)

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            first = await client.open(PROMPT, max_tokens=12, sampler=sampler, top_logprobs=3)
            assert await client.play_to(raw.tokens, np.random.default_rng(4)) == raw.tokens
            entries = [*first.log_probs, *(entry for verdict in client.verdicts for entry in verdict.log_probs)]
            assert [entry.token for entry in entries] == raw.tokens
            for step, entry in enumerate(entries):
                log_probs = reported(raw, step)
                assert entry.log_prob == pytest.approx(log_probs[entry.token], abs=1e-4)
                best = np.argsort(-log_probs)[:3]
                assert [token for token, _ in entry.top] == best.tolist()
                np.testing.assert_allclose([value for _, value in entry.top], log_probs[best], atol=1e-4)

    run(play())


@pytest.mark.parametrize(("asked", "entries"), [(None, 0), (0, 1)])
def test_log_probabilities_come_only_when_asked_for(tiny: Tiny, asked: int | None, entries: int):
    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            first = await client.open(PROMPT, top_logprobs=asked)
            verdict = await client.play(client.root())
            assert len(first.log_probs) == len(verdict.log_probs) == entries
            assert all(entry.top == () for entry in (*first.log_probs, *verdict.log_probs))

    run(play())


def test_memory_stays_flat_over_many_rounds(tmp_path):
    target = load_both(write_tiny_llama(tmp_path, num_hidden_layers=1)).target
    rng = np.random.default_rng(5)

    async def play():
        async with hosting(target) as host:
            client = Client(host)
            await client.open(PROMPT, max_tokens=900, sampler=SAMPLERS["temperature"], taps=(1, "final"))
            used = {}
            for number in range(1, 501):
                await client.play(partly_right(rng, client.tokens[-1], rng.integers(0, 300, 7).tolist(), 9))
                if number in (50, 500):
                    gc.collect()  # what other tests left behind, too
                    used[number] = await device_thread().run(mx.get_active_memory)
                if len(client.tokens) > 200:  # stay within the cache's first step
                    del client.tokens[20:]
                    client.cut(20)
            # 2 % of what is in use, but not of the other tests' models.
            assert abs(used[500] - used[50]) <= 0.02 * min(used[50], 2**20)

    run(play())
