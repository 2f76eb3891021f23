"""The three actors in one process, on the real model."""

import logging
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from services.embedded import Engine
from services.orchestrator.generation import Done
from services.orchestrator.routing import TreeOptions
from services.speculation.errors import AerieError, Reason
from services.speculation.warpers import Sampler

pytestmark = pytest.mark.real
QUESTION = "Why is the sky blue?"


def both_sides(engine: Engine) -> int:
    return len(engine.verifier.sessions) + sum(len(host.sessions) for host in engine.drafters)


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_streamed_chunks_add_up_to_the_result(engine):
    tokens = engine.chat_tokens(QUESTION)
    whole = engine.generate(tokens, max_tokens=16)
    *chunks, done = engine.stream(tokens, max_tokens=16)
    assert isinstance(done, Done)
    assert "".join(c.text for c in chunks) == whole.text == engine.orchestrator.tokenizer.decode(whole.token_ids)
    assert tuple(t for c in chunks for t in c.tokens) == whole.token_ids
    assert done.stats.usage() == {"prompt_tokens": len(tokens), "completion_tokens": 16}


def test_depths_say_how_each_token_came(engine):
    result = engine.generate(QUESTION, max_tokens=24)
    assert result.depths[0] == 0
    rounds = [0, *[i for i, depth in enumerate(result.depths) if depth == 0 and i]]
    for start, stop in pairwise(rounds):
        # Between two bonus tokens the accepted drafts count up from depth 1.
        assert list(result.depths[start + 1 : stop]) == list(range(1, stop - start))
    assert sum(d > 0 for d in result.depths) == sum(result.stats.accepted)


def check_lengths(engine, prompt, lengths, **options):
    results = engine.run_all([engine.request(prompt, max_tokens=n, ignore_eos=True, **options) for n in lengths])
    longest = max(results, key=lambda result: len(result.token_ids))
    for length, result in zip(lengths, results, strict=True):
        assert len(result.token_ids) == length == result.stats.completion_tokens
        assert result.finish_reason == "length"
        assert result.token_ids == longest.token_ids[:length]
    return results


def test_max_tokens_is_met_exactly(engine):
    """The last token follows accepted drafts in some answers, and none in others."""
    results = check_lengths(engine, QUESTION, [1, 2, 3, 5, 8, 12], tree=TreeOptions(nodes=6, depth=4, top_k=2))
    assert {result.depths[-2] > 0 for result in results[1:]} == {True, False}


def test_every_max_tokens_is_met_exactly(tiny_engine):
    check_lengths(tiny_engine, [5, 6, 7], range(1, 41), drafter="random")


def test_eos_ends_ids_text_and_usage_at_one_token(engine):
    result = engine.generate("Hi there", max_tokens=40)
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] == 2
    assert 2 not in result.token_ids[:-1]
    assert result.text == engine.orchestrator.tokenizer.decode(result.token_ids)
    assert result.stats.completion_tokens == len(result.token_ids)
    longer = engine.generate("Hi there", max_tokens=20, ignore_eos=True)
    assert longer.token_ids[: len(result.token_ids)] == result.token_ids
    assert len(longer.token_ids) == 20


@pytest.mark.parametrize("drafter", ["eagle3", "off"])
def test_stop_strings_cut_ids_text_and_usage(engine, drafter):
    whole = engine.generate(QUESTION, max_tokens=32, drafter="off")
    stop = whole.text[37:44]
    result = engine.generate(QUESTION, max_tokens=32, drafter=drafter, stop=(stop,))
    assert result.text == whole.text[: whole.text.find(stop)]
    assert result.finish_reason == "stop"
    decode = engine.orchestrator.tokenizer.decode
    shortest = next(n for n in range(1, 33) if stop in decode(whole.token_ids[:n]))
    assert result.token_ids == whole.token_ids[:shortest]
    assert result.stats.completion_tokens == shortest


def test_last_position_of_the_context_is_usable(engine):
    context = engine.info.context_length
    prompt = [1] + [(i * 7919) % 40000 + 100 for i in range(300)]
    small = TreeOptions(nodes=8, depth=4, top_k=4)
    # A verifier that believes in a shorter context: the limit is a value, not the size of a buffer.
    info, engine.verifier.info = engine.verifier.info, replace(engine.info, context_length=310)
    engine.orchestrator.info = engine.verifier.info
    try:
        result = engine.generate(prompt, max_tokens=50, ignore_eos=True, tree=small)
        with pytest.raises(AerieError) as caught:
            engine.generate([1] * 310, max_tokens=1)
    finally:
        engine.verifier.info = engine.orchestrator.info = info
    assert len(prompt) + len(result.token_ids) == 310
    assert result.finish_reason == "length"
    assert caught.value.reason is Reason.PROMPT_TOO_LONG
    with pytest.raises(AerieError) as caught:
        engine.generate([1] * context, max_tokens=1)
    assert caught.value.reason is Reason.PROMPT_TOO_LONG


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tokens": 0}, Reason.INVALID_ARGUMENT),
        ({"stop": ("",)}, Reason.INVALID_ARGUMENT),
        ({"seed": -1}, Reason.INVALID_ARGUMENT),
        ({"seed": 2**64}, Reason.INVALID_ARGUMENT),
        ({"sampler": Sampler(logit_bias=((49152, 1.0),))}, Reason.INVALID_ARGUMENT),
        ({"tree": TreeOptions(nodes=100000)}, Reason.INVALID_ARGUMENT),
        ({"drafter": "hass"}, Reason.DRAFTER_UNAVAILABLE),
    ],
)
def test_bad_options_are_refused_by_name(engine, options, reason):
    with pytest.raises(AerieError) as caught:
        engine.generate(QUESTION, **options)
    assert caught.value.reason is reason
    assert both_sides(engine) == 0


def test_empty_prompt_and_unknown_tokens_are_refused(engine):
    for tokens, reason in (
        ((), Reason.PROMPT_EMPTY),
        ((49152,), Reason.INVALID_ARGUMENT),
        ((-1,), Reason.INVALID_ARGUMENT),
    ):
        with pytest.raises(AerieError) as caught:
            engine.generate(tokens)
        assert caught.value.reason is reason


@pytest.mark.parametrize("chunks", [0, 1, 4])
def test_abandoned_generation_frees_both_sides_within_two_rounds(engine, chunks):
    stream = engine.stream(QUESTION, max_tokens=400, ignore_eos=True)
    for _ in range(chunks):
        next(stream)
    if chunks:
        batches = engine.verifier.batches
        stream.close()
        wait_until(lambda: both_sides(engine) == 0)
        assert engine.verifier.batches - batches <= 2
    else:
        stream.close()
    wait_until(lambda: both_sides(engine) == 0)
    assert engine.verifier.budget.leased == 0
    assert engine.generate(QUESTION, max_tokens=3).stats.completion_tokens == 3


class BrokenDrafter:
    """A drafter whose n-th draft raises: everything else is the random one's."""

    def __init__(self, base, good_rounds):
        self._base, self._left = base, good_rounds
        self.info = base.info.__class__("broken", "broken", (0,), None, 0)

    def __getattr__(self, name):
        return getattr(self._base, name)

    def top_children(self, hidden, k):
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("secret detail")
        return self._base.top_children(hidden, k)


def test_losing_a_drafter_changes_no_token(engine, caplog):
    from services.bench.drafters import RandomDrafter

    plain = engine.generate(QUESTION, max_tokens=12, drafter="off")
    engine.add_drafter(BrokenDrafter(RandomDrafter(engine.info.vocab_size), good_rounds=4))
    (broken,) = (host for host in engine.drafters if host.info.name == "broken")
    *chunks, done = engine.stream(
        QUESTION, max_tokens=12, drafter="broken", tree=TreeOptions(nodes=3, depth=1, top_k=2)
    )
    engine._call(broken.stop())
    assert tuple(t for c in chunks for t in c.tokens) == plain.token_ids
    assert "INTERNAL" in done.drafter_lost
    assert "secret" not in done.drafter_lost
    assert done.stats.drafted_rounds == 4


def test_eight_sessions_share_batches(engine):
    requests = [engine.request(QUESTION, max_tokens=8, drafter="eagle3") for _ in range(8)]
    before = engine.verifier.batches, engine.verifier.batched_rows
    results = engine.run_all(requests)
    batches = engine.verifier.batches - before[0]
    assert len({r.token_ids for r in results}) == 1
    assert batches <= 2 * max(r.stats.rounds for r in results) + 9


def test_auto_without_a_fitting_drafter_warns_once_and_decodes_plainly(engine, caplog):
    offers = engine._parts.directory.offers
    before = dict(offers)
    offers.clear()
    try:
        with caplog.at_level(logging.WARNING):
            for drafter in ("off", "auto", "auto"):
                assert engine.generate(QUESTION, max_tokens=3, drafter=drafter).stats.drafted_rounds == 0
        assert [record.getMessage() for record in caplog.records] == ["no drafter fits the target: decoding plainly"]
    finally:
        offers.update(before)
