"""What is refused, in OpenAI's error body and by name."""

import json

import openai
import pytest

from services.orchestrator.openai import app as app_module

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def body_of(tiny, path, **fields):
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return {"model": tiny.info.name, "max_tokens": 2, **prompt, **fields}


def message(**fields):
    return {"messages": [{"role": "user", "content": "hi", **fields}]}


NOT_SUPPORTED = [
    (CHAT, "tools", [{"type": "function", "function": {"name": "f"}}]),
    (CHAT, "tool_choice", "auto"),
    (CHAT, "parallel_tool_calls", False),
    (CHAT, "functions", [{"name": "f"}]),
    (CHAT, "function_call", "auto"),
    (CHAT, "response_format", {"type": "json_object"}),
    (CHAT, "audio", {"voice": "x", "format": "wav"}),
    (CHAT, "modalities", ["text", "audio"]),
    (CHAT, "moderation", {}),
    (CHAT, "prediction", {"type": "content", "content": "x"}),
    (CHAT, "prompt_cache_key", "x"),
    (CHAT, "prompt_cache_options", {}),
    (CHAT, "prompt_cache_retention", "24h"),
    (CHAT, "reasoning_effort", "low"),
    (CHAT, "service_tier", "flex"),
    (CHAT, "store", True),
    (CHAT, "verbosity", "low"),
    (CHAT, "web_search_options", {}),
    (COMPLETION, "best_of", 3),
    (COMPLETION, "best_of", True),
    (COMPLETION, "echo", True),
    (COMPLETION, "suffix", "x"),
]


@pytest.mark.parametrize(("path", "name", "value"), NOT_SUPPORTED)
def test_what_is_not_supported_is_refused_by_name(gateway, tiny, path, name, value):
    status, answer, _ = gateway.post(path, body_of(tiny, path, **{name: value}))
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, name, "unsupported_parameter")
    assert error["type"] == "invalid_request_error"
    assert error["message"] == f"{name} is not supported"


def test_every_field_of_the_official_client_is_honoured_or_refused(gateway, tiny):
    """With the value ``null`` no field asks for anything: the answer comes; none is unknown."""
    from openai.types import completion_create_params as completion
    from openai.types.chat import completion_create_params as chat

    for path, module in ((CHAT, chat), (COMPLETION, completion)):
        names = {*module.CompletionCreateParamsBase.__annotations__, "stream"}
        status, answer, _ = gateway.post(path, {**dict.fromkeys(names), **body_of(tiny, path)})
        assert (status, answer.get("error")) == (200, None)
        known = body_of(tiny, path)
        for name in names - known.keys():
            _, answer, _ = gateway.post(path, {**known, name: {"no": ["such", "value"]}})
            assert answer.get("error", {}).get("code") != "unknown_parameter", name
            assert "error" in answer or name == "metadata", name


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}),
        (CHAT, {"store": False, "service_tier": "auto", "stream": False, "n": 1, "user": "u"}),
        (CHAT, {"messages": [{"role": "user", "content": "hi", "name": None, "tool_calls": []}]}),
        (COMPLETION, {"best_of": 1, "echo": False, "suffix": "", "user": "u"}),
    ],
)
def test_values_that_ask_for_nothing_are_taken(gateway, tiny, path, fields):
    assert gateway.post(path, body_of(tiny, path, **fields))[0] == 200


WRONG = [
    (CHAT, {"nonsense": 1}, "nonsense", "unknown_parameter"),
    (COMPLETION, {"messages": []}, "messages", "unknown_parameter"),
    (COMPLETION, {"top_logprobs": 2}, "top_logprobs", "unknown_parameter"),
    (COMPLETION, {"max_completion_tokens": 2}, "max_completion_tokens", "unknown_parameter"),
    (CHAT, {"x-aerie-magic": 1}, "x-aerie-magic", "unknown_parameter"),
    (CHAT, {"model": None}, "model", "missing_required_parameter"),
    (CHAT, {"model": 5}, "model", "invalid_type"),
    (CHAT, {"messages": None}, "messages", "missing_required_parameter"),
    (CHAT, {"messages": []}, "messages", "invalid_value"),
    (CHAT, {"messages": "hi"}, "messages", "invalid_type"),
    (CHAT, {"messages": ["hi"]}, "messages[0]", "invalid_value"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role", "missing_required_parameter"),
    (CHAT, message(role="tool"), "messages[0].role", "invalid_value"),
    (CHAT, message(content=None), "messages[0].content", "missing_required_parameter"),
    (CHAT, message(content=5), "messages[0].content", "invalid_value"),
    (CHAT, message(name="x"), "messages[0].name", "unsupported_parameter"),
    (CHAT, message(tool_calls=[{}]), "messages[0].tool_calls", "unsupported_parameter"),
    (CHAT, message(mood="x"), "messages[0].mood", "unknown_parameter"),
    (CHAT, message(content=["hi"]), "messages[0].content", "invalid_value"),
    (CHAT, message(content=[{"type": "image_url"}]), "messages[0].content[0].type", "invalid_value"),
    (CHAT, message(content=[{"type": "text"}]), "messages[0].content[0].text", "missing_required_parameter"),
    (CHAT, message(content="\ud800"), "messages", "invalid_value"),
    (COMPLETION, {"prompt": None}, "prompt", "missing_required_parameter"),
    (COMPLETION, {"prompt": []}, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": 5}, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": "\ud800"}, "prompt", "invalid_value"),
    (COMPLETION, {"stop": "\ud800"}, "stop", "invalid_value"),
    (COMPLETION, {"prompt": ["a", 5]}, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": [1, 10**30]}, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": [-1]}, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": [True]}, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": ["a"] * 129}, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": ["a"] * 65, "n": 2}, "n", "invalid_value"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": 2.0}, "max_tokens", "invalid_type"),
    (CHAT, {"max_tokens": True}, "max_tokens", "invalid_type"),
    (CHAT, {"max_tokens": 10**30}, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    (CHAT, {"max_completion_tokens": 3}, "max_tokens", "invalid_value"),
    (CHAT, {"temperature": "hot"}, "temperature", "invalid_value"),
    (CHAT, {"temperature": -1}, "temperature", "invalid_value"),
    (CHAT, {"temperature": 10**400}, "temperature", "invalid_value"),
    (CHAT, {"temperature": False}, "temperature", "invalid_value"),
    (CHAT, {"top_p": 0}, "top_p", "invalid_value"),
    (CHAT, {"top_p": 1.5}, "top_p", "invalid_value"),
    (CHAT, {"presence_penalty": [1]}, "presence_penalty", "invalid_value"),
    (CHAT, {"frequency_penalty": 1e10}, "frequency_penalty", "invalid_value"),
    (CHAT, {"n": 0}, "n", "invalid_value"),
    (CHAT, {"n": 129}, "n", "invalid_value"),
    (CHAT, {"seed": 2**64}, "seed", "invalid_value"),
    (CHAT, {"seed": -(2**63) - 1}, "seed", "invalid_value"),
    (CHAT, {"seed": "1"}, "seed", "invalid_type"),
    (CHAT, {"stop": ""}, "stop", "invalid_value"),
    (CHAT, {"stop": 5}, "stop", "invalid_value"),
    (CHAT, {"stop": ["a", 5]}, "stop", "invalid_value"),
    (CHAT, {"stop": ["a"] * 17}, "stop", "invalid_value"),
    (CHAT, {"stop": "x" * 1025}, "stop", "invalid_value"),
    (CHAT, {"logprobs": 3}, "logprobs", "invalid_type"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    (COMPLETION, {"logprobs": True}, "logprobs", "invalid_type"),
    (COMPLETION, {"logprobs": -1}, "logprobs", "invalid_value"),
    (CHAT, {"logit_bias": [1]}, "logit_bias", "invalid_type"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"01": 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"²": 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"300": 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"1": "x"}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"1": None}}, "logit_bias", "invalid_value"),
    (CHAT, {"stream": "yes"}, "stream", "invalid_type"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (CHAT, {"stream": True, "stream_options": {"what": 1}}, "stream_options.what", "unknown_parameter"),
    (
        CHAT,
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_parameter",
    ),
    (CHAT, {"user": 5}, "user", "invalid_type"),
    (CHAT, {"metadata": {"a": 1}}, "metadata", "invalid_value"),
    (CHAT, {"x-aerie-drafter": 5}, "x-aerie-drafter", "invalid_type"),
    (CHAT, {"x-aerie-drafter": "other"}, "x-aerie-drafter", "drafter_unavailable"),
    (CHAT, {"x-aerie-top-k": -1}, "x-aerie-top-k", "invalid_value"),
    (CHAT, {"x-aerie-top-k": 2.5}, "x-aerie-top-k", "invalid_type"),
    (CHAT, {"x-aerie-min-p": 1}, "x-aerie-min-p", "invalid_value"),
    (CHAT, {"x-aerie-repetition-penalty": 0}, "x-aerie-repetition-penalty", "invalid_value"),
    (CHAT, {"x-aerie-ignore-eos": 1}, "x-aerie-ignore-eos", "invalid_type"),
    (CHAT, {"x-aerie-tree-nodes": 0}, "x-aerie-tree-nodes", "invalid_value"),
    (CHAT, {"x-aerie-tree-nodes": 10**6}, "x-aerie-tree-nodes", "invalid_value"),
    (CHAT, {"x-aerie-tree-depth": -1}, "x-aerie-tree-depth", "invalid_value"),
    (CHAT, {"x-aerie-tree-top-k": 0}, "x-aerie-tree-top-k", "invalid_value"),
]


@pytest.mark.parametrize(("path", "fields", "param", "code"), WRONG)
def test_what_is_wrong_is_refused_with_its_name(gateway, tiny, path, fields, param, code):
    status, answer, _ = gateway.post(path, body_of(tiny, path, **fields))
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, param, code)
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_that_are_empty_or_fill_the_context(gateway, tiny, stream):
    """Fault 32: they are refused with a status, and the server lives."""
    length = tiny.info.context_length
    cases = [
        (COMPLETION, {"prompt": ""}, "prompt", "prompt_empty"),
        (COMPLETION, {"prompt": ["hi", ""]}, "prompt", "prompt_empty"),
        (COMPLETION, {"prompt": [5] * length}, "prompt", "context_length_exceeded"),
        (CHAT, message(content="é" * length), "messages", "context_length_exceeded"),
    ]
    for path, fields, param, code in cases:
        status, answer, _ = gateway.post(path, body_of(tiny, path, stream=stream, **fields))
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
    client = gateway.client.completions
    last = client.create(model=tiny.info.name, prompt=[5] * (length - 1), max_tokens=9, temperature=0)
    assert (last.usage.completion_tokens, last.choices[0].finish_reason) == (1, "length")
    with pytest.raises(openai.BadRequestError) as error:
        client.create(model=tiny.info.name, prompt="hi", max_tokens=0, stream=stream)
    assert error.value.param == "max_tokens"
    assert client.create(model=tiny.info.name, prompt="hi", max_tokens=1, temperature=0).usage.completion_tokens == 1


def test_another_model_is_not_found(gateway, tiny):
    with pytest.raises(openai.NotFoundError) as error:
        gateway.client.chat.completions.create(model="gpt-4o", **message())
    assert (error.value.param, error.value.code) == ("model", "model_not_found")


BODIES = [
    (b"", "invalid_json"),
    (b"{", "invalid_json"),
    (b"[]", "invalid_json"),
    (b"\xff", "invalid_json"),
    (b'{"model": NaN}', "invalid_json"),
    (b"[" * 100_000, "invalid_json"),
    (b'{"seed": ' + b"1" * 5000 + b"}", "invalid_json"),
]


@pytest.mark.parametrize(("body", "code"), BODIES)
def test_bodies_that_are_no_json_object(gateway, body, code):
    status, answer, _ = gateway.post(CHAT, body)
    assert (status, answer["error"]["code"]) == (400, code)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_bodies_of_another_type(gateway, tiny, kind):
    status, answer, _ = gateway.post(CHAT, body_of(tiny, CHAT), {"Content-Type": kind})
    assert (status, answer["error"]["code"]) == (400, "invalid_content_type")
    assert gateway.post(CHAT, body_of(tiny, CHAT), {"Content-Type": "Application/JSON; charset=utf-8"})[0] == 200


def test_a_body_that_is_too_large(gateway, tiny, monkeypatch):
    monkeypatch.setattr(app_module, "BODY_BYTES", 1000)
    large = json.dumps(body_of(tiny, CHAT, user="x" * 2000)).encode()
    status, answer, _ = gateway.post(CHAT, large)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    # Nothing says beforehand how long a chunked body is.
    status, answer, _ = gateway.chunked(CHAT, [large[:700], large[700:]])
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    small = json.dumps(body_of(tiny, CHAT)).encode()
    assert gateway.chunked(CHAT, [small[:9], small[9:]])[0] == 200


def test_half_a_character_in_a_message_comes_back_as_json(gateway, tiny):
    status, answer, _ = gateway.post(CHAT, body_of(tiny, CHAT, **{"x-aerie-drafter": "\ud800"}))
    assert status == 400
    assert "\\ud800" in answer["error"]["message"] or "\ud800" in answer["error"]["message"]


def test_messages_of_errors_do_not_echo_a_whole_body(gateway, tiny):
    _, answer, _ = gateway.post(CHAT, body_of(tiny, CHAT, temperature="x" * 100_000))
    assert len(answer["error"]["message"]) == 500
