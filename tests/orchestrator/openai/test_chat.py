"""Chats through the official client, held to the same requests without HTTP."""

import math

import openai
import pytest

from services.orchestrator.service import Request
from services.speculation.noise import choice_seed
from services.speculation.warpers import Sampler

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name the rivers of the north."}]


@pytest.fixture(scope="module")
def prompt(tiny):
    return tiny.engine.chat_tokens(MESSAGES)


def ask(gateway, tiny, **options):
    return gateway.client.chat.completions.create(model=tiny.info.name, messages=MESSAGES, **options)


def streamed(gateway, tiny, **options):
    with ask(gateway, tiny, stream=True, **options) as stream:
        return list(stream)


def text_of(parts, index=0):
    return "".join(c.delta.content or "" for part in parts for c in part.choices if c.index == index)


OPTIONS = [
    ({"temperature": 0}, {"sampler": Sampler()}),
    ({"seed": 7}, {"sampler": Sampler(temperature=1.0), "seed": 7}),
    (
        {"seed": 8, "temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": -0.25},
        {"seed": 8, "sampler": Sampler(0.8, top_p=0.9, presence_penalty=0.5, frequency_penalty=-0.25)},
    ),
    (
        {"temperature": 0, "logit_bias": {"40": 100, "41": -1.5}},
        {"sampler": Sampler(logit_bias=((40, 100), (41, -1.5)))},
    ),
    (
        {
            "seed": 9,
            "extra_body": {"x-aerie-top-k": 20, "x-aerie-min-p": 0.01, "x-aerie-repetition-penalty": 1.3},
        },
        {"seed": 9, "sampler": Sampler(1.0, top_k=20, min_p=0.01, repetition_penalty=1.3)},
    ),
    ({"temperature": 0, "extra_body": {"x-aerie-drafter": "off"}}, {"sampler": Sampler(), "drafter": "off"}),
]


@pytest.mark.parametrize(("options", "request_"), OPTIONS)
def test_an_answer_is_that_of_the_orchestrator(gateway, tiny, prompt, options, request_):
    want = tiny.straight(Request(prompt, 24, **request_))
    got = ask(gateway, tiny, max_tokens=24, **options)
    assert got.object == "chat.completion"
    assert got.id.startswith("chatcmpl-")
    assert got.model == tiny.info.name
    assert got.system_fingerprint == f"fp_{tiny.info.weights_fingerprint}"
    (choice,) = got.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", want.text)
    assert choice.finish_reason == want.reason
    assert choice.logprobs is None
    usage = got.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(want.tokens))
    assert usage.total_tokens == len(prompt) + len(want.tokens)


@pytest.mark.parametrize(("options", "request_"), OPTIONS)
def test_a_stream_says_the_same_piece_by_piece(gateway, tiny, prompt, options, request_):
    want = tiny.straight(Request(prompt, 24, **request_))
    parts = streamed(gateway, tiny, max_completion_tokens=24, **options)
    assert {(part.id, part.created, part.model, part.object) for part in parts} == {
        (parts[0].id, parts[0].created, tiny.info.name, "chat.completion.chunk")
    }
    assert parts[0].choices[0].delta.role == "assistant"
    assert all(part.choices[0].delta.role is None for part in parts[1:])
    assert text_of(parts) == want.text
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + [want.reason]
    assert all(part.usage is None for part in parts)


def test_usage_in_a_stream_is_asked_for_and_comes_last(gateway, tiny, prompt):
    want = tiny.straight(Request(prompt, 10))
    options = {"temperature": 0, "max_tokens": 10}
    parts = streamed(gateway, tiny, stream_options={"include_usage": True}, **options)
    assert [bool(part.choices) for part in parts] == [True] * (len(parts) - 1) + [False]
    assert [part.usage is None for part in parts] == [True] * (len(parts) - 1) + [False]
    assert parts[-1].usage.completion_tokens == len(want.tokens)
    without = streamed(gateway, tiny, stream_options={"include_usage": False}, **options)
    assert all(part.choices for part in without)


def test_acceptance_statistics_come_with_the_usage(gateway, tiny, prompt):
    tiny.known.known = (*prompt, *tiny.straight(Request(prompt, 40)).tokens)
    extra = {"x-aerie-drafter": "known", "x-aerie-tree-nodes": 4, "x-aerie-tree-depth": 3, "x-aerie-tree-top-k": 1}
    got = ask(gateway, tiny, temperature=0, max_tokens=25, extra_body={**extra, "x-aerie-ignore-eos": True})
    own = got.usage.to_dict()["x-aerie"]
    # 1 token of the prefill and 24 in rounds of three accepted drafts and the bonus.
    assert got.usage.completion_tokens == 25
    assert (own["rounds"], own["acceptance_length"], own["acceptance_by_depth"]) == (6, 4.0, [1.0, 1.0, 1.0])
    assert own["tokens_per_second"] > 0
    assert own["draft_seconds"] > 0
    assert own["verify_seconds"] > 0


def test_log_probs_are_those_of_the_orchestrator(gateway, tiny, prompt):
    want = tiny.straight(Request(prompt, 16, Sampler(1.0), seed=3, top_logprobs=4))
    options = {"seed": 3, "max_tokens": 16, "logprobs": True, "top_logprobs": 4}
    whole = ask(gateway, tiny, **options).choices[0].logprobs.content
    parts = streamed(gateway, tiny, **options)
    pieces = [entry for part in parts if part.choices[0].logprobs for entry in part.choices[0].logprobs.content]
    assert len(whole) == len(want.tokens) == 16
    for content in (whole, pieces):
        got = [(e.logprob, [t.logprob for t in e.top_logprobs]) for e in content]
        for (log_prob, top), value in zip(got, want.log_probs, strict=True):
            assert log_prob == pytest.approx(value.log_prob, abs=1e-4)
            assert top == pytest.approx([p for _, p in value.top], abs=1e-4)
    tokens = [e.bytes for e in whole]
    assert [e.bytes for e in pieces] == tokens
    assert bytes(b for token in tokens for b in token).decode(errors="replace") == tiny.orchestrator.tokenizer.decode(
        want.tokens, skip_special_tokens=False
    )
    # The likeliest alternative of a greedy answer is the token itself.
    greedy = ask(gateway, tiny, temperature=0, max_tokens=8, logprobs=True, top_logprobs=1)
    assert all(e.top_logprobs[0].bytes == e.bytes for e in greedy.choices[0].logprobs.content)
    bare = ask(gateway, tiny, temperature=0, max_tokens=8, logprobs=True).choices[0].logprobs.content
    assert [e.top_logprobs for e in bare] == [[]] * len(bare)
    assert all(math.isfinite(e.logprob) for e in bare)


def test_n_choices_are_generations_with_seeds_of_their_own(gateway, tiny, prompt):
    wants = [tiny.straight(Request(prompt, 12, Sampler(1.0), choice_seed(21, i))) for i in range(3)]
    got = ask(gateway, tiny, n=3, seed=21, max_tokens=12)
    assert [choice.index for choice in got.choices] == [0, 1, 2]
    assert [choice.message.content for choice in got.choices] == [want.text for want in wants]
    assert len({want.text for want in wants}) == 3
    assert got.usage.completion_tokens == sum(len(want.tokens) for want in wants)
    assert got.usage.prompt_tokens == len(prompt)
    own = got.usage.to_dict()["x-aerie"]
    assert own["rounds"] == sum(want.done.stats.rounds for want in wants)
    assert [choice.to_dict()["x-aerie"]["seed"] for choice in got.choices] == [choice_seed(21, i) for i in range(3)]
    parts = streamed(gateway, tiny, n=3, seed=21, max_tokens=12)
    assert [text_of(parts, index) for index in range(3)] == [want.text for want in wants]
    roles = [c.index for part in parts for c in part.choices if c.delta.role]
    ends = [c.index for part in parts for c in part.choices if c.finish_reason]
    assert sorted(roles) == sorted(ends) == [0, 1, 2]


def test_a_drawn_seed_is_told_and_gives_the_answer_again(gateway, tiny):
    first = ask(gateway, tiny, max_tokens=12)
    second = ask(gateway, tiny, max_tokens=12)
    seed = first.to_dict()["x-aerie"]["seed"]
    assert seed != second.to_dict()["x-aerie"]["seed"]
    assert seed < 2**53
    again = ask(gateway, tiny, max_tokens=12, seed=seed)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert first.choices[0].to_dict()["x-aerie"] == {"seed": seed}


def test_a_negative_seed_is_the_same_64_bits(gateway, tiny):
    got = ask(gateway, tiny, max_tokens=1, seed=-1)
    assert got.to_dict()["x-aerie"]["seed"] == 2**64 - 1


def test_text_parts_are_joined_and_the_developer_is_the_system(gateway, tiny):
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        MESSAGES[1],
    ]
    got = gateway.client.chat.completions.create(model=tiny.info.name, messages=parts, max_tokens=8, temperature=0)
    assert got.choices[0].message.content == ask(gateway, tiny, max_tokens=8, temperature=0).choices[0].message.content


def test_labels_change_nothing_and_metadata_comes_back(gateway, tiny):
    options = {"max_tokens": 4, "temperature": 0}
    plain = ask(gateway, tiny, **options)
    got = ask(gateway, tiny, **options, user="u", metadata={"a": "b"}, safety_identifier="s", store=False, n=1)
    assert got.choices[0].message.content == plain.choices[0].message.content
    assert got.metadata == {"a": "b"}


def test_without_a_limit_the_answer_may_fill_the_context(gateway, tiny):
    long = [{"role": "user", "content": "x" * (tiny.info.context_length - 60)}]
    tokens = tiny.engine.chat_tokens(long)
    extra = {"x-aerie-ignore-eos": True}
    got = gateway.client.chat.completions.create(model=tiny.info.name, messages=long, temperature=0, extra_body=extra)
    assert got.choices[0].finish_reason == "length"
    assert got.usage.completion_tokens == tiny.info.context_length - len(tokens)


def test_models_are_listed(gateway, tiny):
    (model,) = gateway.client.models.list().data
    assert model.id == tiny.info.name
    assert gateway.client.models.retrieve(tiny.info.name).to_dict() == model.to_dict()
    assert model.to_dict()["x-aerie"]["context_length"] == tiny.info.context_length
    with pytest.raises(openai.NotFoundError) as error:
        gateway.client.models.retrieve("other")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
