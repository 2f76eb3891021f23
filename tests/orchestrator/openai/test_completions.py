"""Completions through the official client: prompts of every kind, log-probabilities, stops and lengths."""

import pytest

from services.orchestrator.service import Request
from services.speculation.noise import choice_seed
from services.speculation.warpers import Sampler

PROMPT = "the rivers of the north"


def ask(gateway, tiny, prompt=PROMPT, **options):
    return gateway.client.completions.create(model=tiny.info.name, prompt=prompt, **options)


def streamed(gateway, tiny, **options):
    with ask(gateway, tiny, stream=True, **options) as stream:
        return list(stream)


def test_a_completion_is_that_of_the_orchestrator(gateway, tiny):
    tokens = tiny.orchestrator.encode(PROMPT)
    want = tiny.straight(Request(tokens, 16, Sampler(1.0), seed=4))
    got = ask(gateway, tiny, seed=4)  # 16 tokens are OpenAI's default
    assert got.object == "text_completion"
    assert got.id.startswith("cmpl-")
    (choice,) = got.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (want.text, want.reason, None)
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(tokens), len(want.tokens))
    parts = streamed(gateway, tiny, seed=4, stream_options={"include_usage": True})
    assert "".join(c.text for part in parts for c in part.choices) == want.text
    assert parts[-2].choices[0].finish_reason == want.reason
    assert parts[-1].usage.completion_tokens == len(want.tokens)


def test_prompts_are_text_or_token_ids_and_several_are_answered_in_order(gateway, tiny):
    ids = [5, 6, 7, 8]
    texts = [PROMPT, "what all were when"]
    prompts = [*(tiny.orchestrator.encode(text) for text in texts), tuple(ids)]
    wants = [tiny.straight(Request(prompt, 8)).text for prompt in prompts]
    got = ask(gateway, tiny, texts, max_tokens=8, temperature=0)
    assert [choice.text for choice in got.choices] == wants[:2]
    assert got.usage.prompt_tokens == len(prompts[0]) + len(prompts[1])
    assert ask(gateway, tiny, ids, max_tokens=8, temperature=0).choices[0].text == wants[2]
    got = ask(gateway, tiny, [ids, list(prompts[1])], max_tokens=8, temperature=0)
    assert [choice.text for choice in got.choices] == [wants[2], wants[1]]


def test_choices_of_several_prompts_have_the_seeds_of_each_alone(gateway, tiny):
    prompts = [tiny.orchestrator.encode(text) for text in (PROMPT, "one")]
    wants = [tiny.straight(Request(p, 8, Sampler(1.0), choice_seed(5, i))).text for p in prompts for i in range(2)]
    got = ask(gateway, tiny, [PROMPT, "one"], max_tokens=8, n=2, seed=5)
    assert [(c.index, c.text) for c in got.choices] == list(enumerate(wants))
    assert got.usage.prompt_tokens == len(prompts[0]) + len(prompts[1])


def test_log_probs_in_the_form_of_completions(gateway, tiny):
    tokenizer = tiny.orchestrator.tokenizer
    tokens = tiny.orchestrator.encode(PROMPT)
    bias = {str(i): 30 for word in (" ", "the", "é") for i in tokenizer.encode(word).ids}  # some words, some halves
    pairs = tuple((int(token), value) for token, value in bias.items())
    want = tiny.straight(Request(tokens, 24, Sampler(1.0, logit_bias=pairs), seed=6, top_logprobs=3))
    options = {"max_tokens": 24, "seed": 6, "logprobs": 3, "logit_bias": bias}
    whole = ask(gateway, tiny, **options).choices[0]
    got = whole.logprobs
    assert len(got.tokens) == len(got.token_logprobs) == len(got.top_logprobs) == len(got.text_offset) == 24
    assert got.token_logprobs == pytest.approx([value.log_prob for value in want.log_probs], abs=1e-4)
    for top, value, name in zip(got.top_logprobs, want.log_probs, got.tokens, strict=True):
        assert top[name] == pytest.approx(value.log_prob, abs=1e-4)
        distinct = {value.token, *(token for token, _ in value.top)}
        assert len(top) == len(distinct)
    halves = [name for name in got.tokens if name.startswith("bytes:")]
    assert {"bytes:\\xc3", "bytes:\\xa9"} & set(halves)
    for name, offset in zip(got.tokens, got.text_offset, strict=True):
        if not name.startswith("bytes:") and "<|" not in name:
            assert whole.text[offset : offset + len(name)] == name
    parts = [part.choices[0].logprobs for part in streamed(gateway, tiny, **options) if part.choices[0].logprobs]
    assert [name for part in parts for name in part.tokens] == got.tokens
    assert [offset for part in parts for offset in part.text_offset] == got.text_offset


def test_the_sampled_token_alone_with_no_alternatives_asked_for(gateway, tiny):
    got = ask(gateway, tiny, max_tokens=4, temperature=0, logprobs=0).choices[0].logprobs
    assert [list(top) for top in got.top_logprobs] == [[name] for name in got.tokens]


# Faults 13, 14, 15, 17 and 18 of such systems: stops and lengths inside long accepted batches.

EXTRA = {"x-aerie-drafter": "known", "x-aerie-ignore-eos": True, "x-aerie-tree-top-k": 1, "x-aerie-tree-depth": 6}
LENGTH = 40
_WORDS = ("the and that with from which there were said", "éß€")


@pytest.fixture(scope="module")
def written(tiny):
    """A text of the target's, and the drafter that knows it: rounds accept six tokens at once."""
    prompt = tiny.orchestrator.encode(PROMPT)
    bias = {i: 12.0 for word in _WORDS for i in tiny.orchestrator.tokenizer.encode(word).ids}
    sampler = Sampler(1.0, logit_bias=tuple(bias.items()), frequency_penalty=1.0)
    want = tiny.straight(Request(prompt, LENGTH, sampler, seed=11, ignore_eos=True, drafter="off"))
    tiny.known.known = (*prompt, *want.tokens)
    batches = tiny.straight(Request(prompt, LENGTH, sampler, seed=11, ignore_eos=True, drafter="known")).rounds
    assert max(batches) >= 7
    options = {
        "seed": 11,
        "logit_bias": {str(token): value for token, value in bias.items()},
        "frequency_penalty": 1.0,
        "extra_body": EXTRA,
    }
    return want, options


def all_four(gateway, tiny, written, **options):
    """Text, tokens, log-probabilities and usage of the whole and of the stream, which must agree."""
    options = {**written[1], "logprobs": 0, **options}
    whole = ask(gateway, tiny, **options)
    choice = whole.choices[0]
    parts = streamed(gateway, tiny, stream_options={"include_usage": True}, **options)
    said = [c for part in parts for c in part.choices]
    assert "".join(c.text for c in said) == choice.text
    assert said[-1].finish_reason == choice.finish_reason
    tokens = [name for c in said if c.logprobs for name in c.logprobs.tokens]
    assert tokens == choice.logprobs.tokens
    assert len(choice.logprobs.token_logprobs) == len(tokens)
    assert whole.usage.completion_tokens == parts[-1].usage.completion_tokens == len(tokens)
    return choice, tokens


def test_lengths_are_exact(gateway, tiny, written):
    want, _ = written
    names = all_four(gateway, tiny, written, max_tokens=LENGTH)[1]
    for most in (1, 2, 3, 5, 6, 7, 8, 9, 13, 14, 15, 21, 29, 39):
        choice, tokens = all_four(gateway, tiny, written, max_tokens=most)
        assert tokens == names[:most]
        assert choice.finish_reason == "length"
        assert choice.text == tiny.orchestrator.tokenizer.decode(want.tokens[:most])


def test_text_tokens_and_usage_end_at_the_stop_string(gateway, tiny, written):
    want, _ = written
    decode = tiny.orchestrator.tokenizer.decode
    names = all_four(gateway, tiny, written, max_tokens=LENGTH)[1]
    checked = 0
    for start in range(0, len(want.text) - 4, 3):
        stop = want.text[start : start + 4]
        if "\ufffd" in stop:
            continue
        # The first token with which the text holds the stop string is the last one.
        last = next(i for i in range(1, LENGTH + 1) if stop in decode(want.tokens[:i]))
        choice, tokens = all_four(gateway, tiny, written, max_tokens=LENGTH, stop=["never", stop])
        assert choice.text == want.text[: want.text.index(stop)]
        assert tokens == names[:last]
        assert choice.finish_reason == "stop"
        checked += 1
    assert checked > 10


def test_an_earlier_stop_wins_over_the_length(gateway, tiny, written):
    want, _ = written
    decode = tiny.orchestrator.tokenizer.decode
    # A stop inside the second batch, whose last tokens the limit cuts off.
    start = len(decode(want.tokens[:9]))
    stop = want.text[start : start + 2]
    last = next(i for i in range(1, LENGTH + 1) if stop in decode(want.tokens[:i]))
    choice, tokens = all_four(gateway, tiny, written, max_tokens=last + 1, stop=stop)
    assert (choice.finish_reason, len(tokens)) == ("stop", last)
    choice, tokens = all_four(gateway, tiny, written, max_tokens=last - 1, stop=stop)
    assert (choice.finish_reason, len(tokens)) == ("length", last - 1)
    assert choice.text == decode(want.tokens[: last - 1])  # what was held back for the stop comes out
