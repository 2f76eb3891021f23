"""Speculative output against plain decoding on the real model: the short list of ``make verify``."""

import pytest

from services.bench.lossless import SAMPLERS, run_arm, run_plain
from services.bench.prompts import read_prompts

PROMPTS = read_prompts()[::6]
TOKENS = 16
ARMS = [(sampler, drafter) for sampler in ("greedy", "t1.0") for drafter in ("eagle3", "random", "root")]
ARMS += [(sampler, "eagle3") for sampler in SAMPLERS if sampler not in ("greedy", "t1.0")]


@pytest.fixture(scope="module")
def plain(engine):
    results = {}

    def of(sampler):
        if sampler not in results:
            results[sampler] = run_plain(engine, PROMPTS, SAMPLERS[sampler], TOKENS)
        return results[sampler]

    return of


@pytest.mark.real
@pytest.mark.parametrize(("sampler", "drafter"), ARMS)
def test_speculation_changes_no_token(engine, plain, sampler, drafter):
    arm = run_arm(engine, PROMPTS, plain(sampler), sampler, drafter, len(PROMPTS), TOKENS)
    assert arm.differences == []
    assert len(arm.ties) <= 1
    assert arm.tokens > len(PROMPTS) * TOKENS // 2
    if drafter == "eagle3" and sampler == "greedy":
        assert arm.rounds < 0.75 * arm.tokens  # speculation really ran


@pytest.mark.real
def test_alone_equals_beside_seven_neighbours(engine, plain):
    arm = run_arm(engine, PROMPTS[:1], plain("greedy")[:1], "greedy", "eagle3", 1, TOKENS)
    assert arm.differences == []


@pytest.mark.real
def test_seeds_decide_the_output(engine):
    def sample(seed, drafter):
        options = {"sampler": SAMPLERS["t1.0"], "max_tokens": 12, "seed": seed, "drafter": drafter}
        return engine.generate("Tell me a story.", **options).token_ids

    assert sample(7, "eagle3") == sample(7, "off")
    assert sample(7, "eagle3") != sample(8, "eagle3")
