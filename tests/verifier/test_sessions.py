"""Limits of a session: what is refused before work starts, and where a sequence ends."""

import asyncio

import numpy as np
import pytest

from services.speculation.errors import Reason
from services.speculation.trees import DraftTree
from services.speculation.warpers import Sampler
from tests.plain import decode
from tests.tiny import VOCAB_SIZE
from tests.verifier.client import Client, chain, hosting, run
from tests.verifier.conftest import Tiny

PROMPT = [11, 42, 7, 199, 250, 3]


@pytest.mark.parametrize(
    ("prompt", "options", "reason"),
    [
        ([], {}, Reason.PROMPT_EMPTY),
        (PROMPT, {"prompt_len": 0}, Reason.PROMPT_EMPTY),
        ([1] * 48, {}, Reason.PROMPT_TOO_LONG),
        ([1] * 60, {}, Reason.PROMPT_TOO_LONG),
        (PROMPT, {"max_tokens": 0}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"max_tokens": -3}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"prompt_len": 7}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"prompt_len": 2, "max_tokens": 4}, Reason.INVALID_ARGUMENT),  # four are out already
        ([5, VOCAB_SIZE], {}, Reason.INVALID_ARGUMENT),
        ([5, -1], {}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"seed": -1}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"seed": 2**64}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"top_logprobs": -1}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"top_logprobs": VOCAB_SIZE + 1}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"taps": (3,)}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"taps": ("final", -1)}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"sampler": Sampler(logit_bias=((VOCAB_SIZE, 1.0),))}, Reason.INVALID_ARGUMENT),
        # Wrong types.
        ([5, 6.0], {}, Reason.INVALID_ARGUMENT),
        ([5, "a"], {}, Reason.INVALID_ARGUMENT),
        ([5, True], {}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"prompt_len": 6.0}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"max_tokens": 5.5}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"max_tokens": "5"}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"seed": 1.5}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"seed": None}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"epoch": 0.0}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"top_logprobs": 2.0}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"eos_ids": ("2",)}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"eos_ids": 2}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"taps": ("last",)}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"taps": (1.0,)}, Reason.INVALID_ARGUMENT),
        (PROMPT, {"sampler": None}, Reason.INVALID_ARGUMENT),
    ],
)
def test_bad_open_is_refused_before_work_starts(short: Tiny, prompt: list[int], options: dict, reason: Reason):
    async def play():
        async with hosting(short.target) as host:
            client = Client(host)
            client.ask_open(prompt, **options)
            error = await client.refused()
            assert (error.session, error.reason) == ("s", reason)
            assert error.message
            assert (host.sessions, host.budget.leased, host.batches) == ({}, 0, 0)
            # The same session may try again.
            await client.open(PROMPT)

    run(play())


def test_limits_themselves_are_allowed(short: Tiny):
    async def play():
        async with hosting(short.target) as host:
            widest = {"seed": 2**64 - 1, "top_logprobs": VOCAB_SIZE, "taps": (0, 2, "final")}
            first = await Client(host).open([0, VOCAB_SIZE - 1], max_tokens=1, **widest)
            assert first.finish == "length"
            assert len(first.log_probs[0].top) == VOCAB_SIZE

    run(play())


def bad_trees(root: int, limit: int) -> dict[str, DraftTree]:
    """``limit`` is the deepest node that may still be emitted."""
    return {
        "root": chain((root + 1) % VOCAB_SIZE, [1, 2]),
        "depth": chain(root, [1] * (limit + 1)),
        "branch depth": DraftTree.build([root, 5, *[1] * (limit + 1)], [-1, 0, 0, *range(2, limit + 2)]),
        "nodes": DraftTree.build([root] + [1] * 256, [-1] + [0] * 256),
        "token": chain(root, [1, VOCAB_SIZE]),
        "negative token": chain(root, [-1]),
    }


@pytest.mark.parametrize("kind", bad_trees(0, 1))
def test_bad_tree_is_refused_and_the_session_goes_on(tiny: Tiny, kind: str):
    expected = decode(tiny.plain, PROMPT, 10).tokens

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT, max_tokens=10)
            for _ in range(2):
                client.tell(client.verify(bad_trees(client.tokens[-1], 8)[kind]))
                assert (await client.refused()).reason is Reason.INVALID_TREE
            assert await client.play_to(expected, np.random.default_rng(0)) == expected

    run(play())


def test_largest_and_deepest_tree_is_verified(tiny: Tiny):
    expected = decode(tiny.plain, PROMPT, 40).tokens

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT, max_tokens=40)
            right = expected[1:39]
            tree = DraftTree.build([expected[0], *right, *[1] * 217], [*range(-1, 38), *[0] * 217])
            assert len(tree) == 256
            assert (await client.play(tree)).tokens == tuple(expected[1:])

    run(play())


def test_max_tokens_are_met_exactly_by_over_eager_trees(tiny: Tiny):
    """Budgets of 1 to 40 at once; each tree is right and as deep as it may be, up to seven."""
    expected = decode(tiny.plain, PROMPT, 48).tokens

    async def play():
        async with hosting(tiny.target) as host:

            async def one(budget: int) -> None:
                client = Client(host, str(budget))
                first = await client.open(PROMPT, max_tokens=budget)
                finishes = [first.finish]
                while finishes[-1] is None:
                    out = len(client.tokens) - len(PROMPT)
                    left = budget - out
                    tree = chain(client.tokens[-1], expected[out : out + min(7, left - 1)])
                    if left <= 7:
                        client.tell(client.verify(chain(client.tokens[-1], expected[out : out + left])))
                        assert (await client.refused()).reason is Reason.INVALID_TREE
                    finishes.append((await client.play(tree)).finish)
                assert client.tokens == [*PROMPT, *expected[:budget]]
                assert finishes == [None] * (len(finishes) - 1) + ["length"]
                client.tell(client.verify(client.root()))
                assert (await client.refused()).reason is Reason.INVALID_TREE

            await asyncio.gather(*(one(budget) for budget in range(1, 41)))

    run(play())


@pytest.mark.parametrize("prompt_len", [47, 46, 40])
def test_last_position_of_the_context_is_used(short: Tiny, prompt_len: int):
    prompt = (PROMPT * 8)[:prompt_len]
    expected = decode(short.plain, prompt, 48 - prompt_len).tokens

    async def play():
        async with hosting(short.target) as host:
            client = Client(host)
            first = await client.open(prompt, max_tokens=1000)
            if prompt_len < 47:
                client.tell(client.verify(chain(client.tokens[-1], [*expected[1:], 0])))
                assert (await client.refused()).reason is Reason.INVALID_TREE
                verdict = await client.play(chain(client.tokens[-1], expected[1:-1]))
                assert verdict.finish == "length"
            else:
                assert first.finish == "length"
            assert client.tokens == prompt + expected
            assert len(client.tokens) == 48

    run(play())


def test_eos_inside_an_accepted_path_cuts_there(tiny: Tiny):
    expected = decode(tiny.plain, PROMPT, 12).tokens
    place = next(i for i in range(3, 12) if expected[i] not in expected[:i])

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT, eos_ids=(299, expected[place]))
            verdict = await client.play(chain(expected[0], expected[1:]))
            assert verdict.tokens == tuple(expected[1 : place + 1])
            assert verdict.path == tuple(range(place))
            assert verdict.finish == "stop"

    run(play())


def test_eos_as_the_first_token_ends_at_once(tiny: Tiny):
    first = decode(tiny.plain, PROMPT, 1).tokens[0]

    async def play():
        async with hosting(tiny.target) as host:
            assert (await Client(host).open(PROMPT, eos_ids=(first,))).finish == "stop"

    run(play())


def test_eos_on_the_last_token_is_a_stop(tiny: Tiny):
    expected = decode(tiny.plain, PROMPT, 2).tokens

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT, max_tokens=2, eos_ids=(expected[1],))
            assert (await client.play(client.root())).finish == "stop"

    run(play())


def test_ignored_eos_is_a_token_like_others(tiny: Tiny):
    expected = decode(tiny.plain, PROMPT, 8).tokens

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            first = await client.open(PROMPT, max_tokens=8, eos_ids=tuple(expected), ignore_eos=True)
            assert first.finish is None
            assert await client.play_to(expected, np.random.default_rng(1)) == expected
            assert client.verdicts[-1].finish == "length"

    run(play())


def test_resumed_session_counts_output_from_the_prompt(tiny: Tiny):
    """max_tokens and penalties look at the whole output, not only at what this stream adds."""
    sampler = Sampler(temperature=0.8, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.2)
    expected = decode(tiny.plain, PROMPT, 20, sampler, seed=7).tokens

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host, epoch=4)
            await client.open(PROMPT + expected[:9], prompt_len=len(PROMPT), max_tokens=20, sampler=sampler)
            assert await client.play_to(expected[9:], np.random.default_rng(2)) == expected[9:]
            assert client.verdicts[-1].finish == "length"

    run(play())


PENALTIES = Sampler(temperature=0.7, presence_penalty=2.0, frequency_penalty=0.5)


@pytest.mark.parametrize("sampler", [Sampler(), PENALTIES])
def test_truncated_session_goes_on_as_if_the_tail_had_never_been(tiny: Tiny, sampler: Sampler):
    expected = decode(tiny.plain, PROMPT, 24, sampler, seed=7).tokens

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT, max_tokens=24, sampler=sampler)
            await client.play_to(expected[:16], np.random.default_rng(3))
            for length in (len(PROMPT) + 9, len(PROMPT) + 9, len(PROMPT) + 1):
                client.cut(length)
                del client.tokens[length:]
                client.tell(client.verify(client.root(), base_len=length + 1))
                assert (await client.refused()).expected == (0, client.round, length)
            out = len(client.tokens) - len(PROMPT)
            assert await client.play_to(expected[out - 1 :], np.random.default_rng(4)) == expected[out - 1 :]
            assert client.verdicts[-1].finish == "length"

    run(play())


def test_bad_cut_is_refused_and_changes_nothing(tiny: Tiny):
    expected = decode(tiny.plain, PROMPT, 10).tokens

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            client.cut(3)
            assert (await client.refused()).reason is Reason.SESSION_UNKNOWN
            await client.open(PROMPT, max_tokens=10)
            await client.play(client.root())
            for length in (-1, 0, len(PROMPT), len(client.tokens) + 1):
                client.cut(length)
                assert (await client.refused()).reason is Reason.INVALID_ARGUMENT
            client.cut(len(PROMPT) + 1, epoch=1)
            error = await client.refused()
            assert (error.reason, error.expected) == (Reason.STALE_ROUND, (0, 1, len(PROMPT) + 2))
            assert await client.play_to(expected[1:], np.random.default_rng(5)) == expected[1:]

    run(play())
