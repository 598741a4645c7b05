"""OpenAI's own client against the gateway: the text is the gRPC client's, whatever the route and the shape."""

from __future__ import annotations

import json
import math
import re
import string
from typing import Any

import pytest

from paceline.client import ChatMessage, Generation, Grammar, GrammarKind, SamplingParams, SpeculationSettings
from paceline.engine.blocks import BLOCK_ROWS
from tests.gateway.gateways import MODEL, GatewayCluster

PROMPT = "Once upon a time"
SEED = 7
TOKENS = 24
MESSAGES: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]},
]
TURNS = (ChatMessage("system", "Be brief."), ChatMessage("user", "Hi!"))


def direct(gateway: GatewayCluster, **fields: Any) -> Generation:
    """The same over gRPC."""
    with gateway.client() as client:
        asked = {"seed": SEED, "max_new_tokens": TOKENS} | fields
        return client.generate(**asked if "messages" in asked else {"prompt": PROMPT} | asked)


@pytest.fixture(scope="module")
def own(gateway: GatewayCluster) -> Generation:
    """What the prompt gets over gRPC."""
    return direct(gateway)


def complete(gateway: GatewayCluster, **fields: Any) -> Any:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "seed": SEED, "max_tokens": TOKENS} | fields
    return gateway.openai.completions.create(**asked)


def chat(gateway: GatewayCluster, **fields: Any) -> Any:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": SEED, "max_completion_tokens": TOKENS}
    return gateway.openai.chat.completions.create(**asked | fields)


def logprobs_of(parts: list[Any], name: str) -> list[Any]:
    """A list of a completion's log-probabilities, put together again."""
    return [each for part in parts if part.logprobs for each in getattr(part.logprobs, name)]


def test_a_completion_is_the_grpc_clients_text_whole_and_streamed(gateway: GatewayCluster, own: Generation) -> None:
    whole = complete(gateway)
    streamed = list(complete(gateway, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].text == "".join(c.text for chunk in streamed for c in chunk.choices) == own.text
    assert whole.choices[0].finish_reason == "length"
    assert [c.finish_reason for chunk in streamed for c in chunk.choices][-1] == "length"
    assert whole.usage == streamed[-1].usage
    counted = (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens)
    assert counted == (len(PROMPT), TOKENS, len(PROMPT) + TOKENS)
    assert streamed[-1].choices == []
    assert all(chunk.usage is None for chunk in streamed[:-1])
    assert (whole.object, whole.model, streamed[0].id[:5]) == ("text_completion", MODEL, "cmpl-")
    assert len({chunk.id for chunk in streamed}) == 1


def test_a_chat_is_the_grpc_clients_text_whole_and_streamed(gateway: GatewayCluster) -> None:
    own = direct(gateway, messages=TURNS)
    whole, streamed = chat(gateway), list(chat(gateway, stream=True))
    assert whole.choices[0].message.content == own.text
    assert "".join(c.delta.content or "" for chunk in streamed for c in chunk.choices) == own.text
    assert streamed[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
    assert streamed[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert {chunk.object for chunk in streamed} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in streamed}) == 1
    assert all(chunk.usage is None for chunk in streamed)


def test_usage_says_what_the_target_had_in_its_prefix_cache(gateway: GatewayCluster) -> None:
    prompt = "A prompt that nobody has sent before, of a few blocks of the prefix cache. " * 2
    ask = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    new, again = (gateway.post("/v1/completions", ask).json["usage"] for _ in range(2))
    assert new["prompt_tokens_details"] == {"cached_tokens": 0}
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert len(prompt) - BLOCK_ROWS <= cached < len(prompt)
    two = ask | {"prompt": [prompt, "b" + prompt], "n": 2, "seed": 1}
    several = gateway.post("/v1/completions", two).json["usage"]
    assert several["prompt_tokens_details"]["cached_tokens"] == cached, "of each prompt the first sample's count"
    assert several["prompt_tokens"] == 2 * len(prompt) + 1
    turns = [{"role": "user", "content": prompt}]
    messages = {"model": MODEL, "messages": turns, "max_tokens": 1}
    claude = [gateway.post("/v1/messages", messages).json["usage"] for _ in range(2)]
    assert [each["cache_read_input_tokens"] > 0 for each in claude] == [False, True]
    assert claude[1]["input_tokens"] + claude[1]["cache_read_input_tokens"] == claude[0]["input_tokens"]


def test_a_predicted_chat_is_the_same_and_usage_says_what_became_of_the_prediction(gateway: GatewayCluster) -> None:
    """Bytes that are no UTF-8 are lost in text, so the prediction departs now and then."""
    fixed = {"paceline": {"drafter": "ngram", "num_draft_tokens": 4}}
    plain = chat(gateway, temperature=0)
    text = plain.choices[0].message.content
    for content in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]):
        prediction = {"type": "content", "content": content}
        one = chat(gateway, temperature=0, prediction=prediction, extra_body=fixed)
        details = one.usage.completion_tokens_details
        assert one.choices[0].message.content == text
        assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0
        assert one.usage.completion_tokens == plain.usage.completion_tokens
    assert plain.usage.completion_tokens_details.rejected_prediction_tokens == 0


def test_each_seed_has_its_text_a_negative_one_too_and_without_one_it_is_told(gateway: GatewayCluster) -> None:
    first = complete(gateway, seed=None)
    other = complete(gateway, seed=None)
    assert first.choices[0].text != other.choices[0].text
    assert direct(gateway, seed=first.paceline["seed"]).text == first.choices[0].text
    same = complete(gateway, prompt=[PROMPT, PROMPT], seed=None).choices
    assert same[0].text != same[1].text, "the same prompt twice is drawn twice"
    assert complete(gateway, seed=-SEED).choices[0].text == direct(gateway, seed=(1 << 64) - SEED).text


def test_samples_are_those_of_the_grpc_client(gateway: GatewayCluster) -> None:
    with gateway.client() as client:
        own = [each.text for each in client.generate_samples(3, prompt=PROMPT, seed=SEED, max_new_tokens=TOKENS)]
    for chunks in ([complete(gateway, n=3)], complete(gateway, n=3, stream=True)):
        parts = [choice for chunk in chunks for choice in chunk.choices]
        texts = ["".join(part.text for part in parts if part.index == index) for index in range(3)]
        assert texts == own
    assert len(set(own)) == 3


def test_several_prompts_are_each_as_if_alone(gateway: GatewayCluster, own: Generation) -> None:
    made = complete(gateway, prompt=[PROMPT, "abc"], n=2)
    assert [made.choices[0].text, made.choices[2].text] == [own.text, direct(gateway, prompt="abc").text]
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert made.usage.prompt_tokens == len(PROMPT) + 3
    assert made.usage.completion_tokens == 4 * TOKENS
    assert made.metrics is None
    assert made.paceline["seeds"] == [SEED, SEED]


def test_token_ids_are_taken_and_returned(gateway: GatewayCluster, own: Generation) -> None:
    ids = list(PROMPT.encode())
    for prompt in (ids, [ids]):
        (choice,) = complete(gateway, prompt=prompt, extra_body={"return_token_ids": True}).choices
        assert (choice.text, choice.prompt_token_ids) == (own.text, ids)
        assert choice.token_ids == list(own.token_ids)
    turned = chat(gateway, extra_body={"return_token_ids": True})
    of_chat = direct(gateway, messages=TURNS)
    assert turned.prompt_token_ids == list(of_chat.prompt_token_ids)
    assert turned.choices[0].token_ids == list(of_chat.token_ids)


def test_an_echoed_prompt_has_log_probabilities(gateway: GatewayCluster) -> None:
    """What evaluation harnesses read: the prompt's tokens, nothing known of the first, and one token behind them."""
    own = direct(gateway, max_new_tokens=1, prompt_logprobs=2, sampling=SamplingParams(logprobs=2))
    rows = (*own.prompt_logprobs, *own.logprobs)
    asked = {"echo": True, "logprobs": 2, "max_tokens": 1}
    for chunks in ([complete(gateway, **asked)], complete(gateway, **asked, stream=True)):
        parts = [choice for chunk in chunks for choice in chunk.choices]
        values, best = logprobs_of(parts, "token_logprobs"), logprobs_of(parts, "top_logprobs")
        assert "".join(part.text for part in parts) == PROMPT + own.text
        assert logprobs_of(parts, "tokens")[: len(PROMPT)] == list(PROMPT)
        assert (values[0], best[0]) == (None, None)
        assert values[1:] == [pytest.approx(row.logprobs[0]) for row in rows]
        assert [max(top.values()) for top in best[1:]] == [pytest.approx(max(row.logprobs)) for row in rows]
        assert logprobs_of(parts, "text_offset") == [*range(len(PROMPT) + 1)]


def test_a_prompt_is_scored_without_a_new_token(gateway: GatewayCluster) -> None:
    rows = direct(gateway, max_new_tokens=1, prompt_logprobs=1).prompt_logprobs
    asked = {"prompt": [PROMPT, PROMPT], "echo": True, "logprobs": 1, "max_tokens": 0}
    streamed = complete(gateway, **asked, stream=True, stream_options={"include_usage": True})
    for chunks in ([complete(gateway, **asked)], list(streamed)):
        for index in range(2):
            parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
            assert "".join(part.text for part in parts) == PROMPT
            assert "".join(logprobs_of(parts, "tokens")) == PROMPT
            assert logprobs_of(parts, "token_logprobs") == [None, *(pytest.approx(row.logprobs[0]) for row in rows)]
            assert parts[-1].finish_reason == "length"
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (2 * len(PROMPT), 0)
    assert complete(gateway, echo=True, max_tokens=0).choices[0].text == PROMPT


def test_logprobs_are_the_grpc_clients_in_both_shapes(gateway: GatewayCluster) -> None:
    own = direct(gateway, sampling=SamplingParams(logprobs=3)).logprobs
    (choice,) = complete(gateway, logprobs=3).choices
    shown = choice.logprobs
    assert shown.token_logprobs == pytest.approx([row.logprobs[0] for row in own])
    assert len(shown.tokens) == len(shown.text_offset) == len(shown.top_logprobs) == TOKENS
    assert all(
        math.isclose(max(top.values()), row.logprobs[1], rel_tol=1e-6)
        for top, row in zip(shown.top_logprobs, own, strict=True)
    )
    of_chat = direct(gateway, messages=TURNS, sampling=SamplingParams(logprobs=2)).logprobs
    asked = {"logprobs": True, "top_logprobs": 2}
    for made in ([chat(gateway, **asked)], chat(gateway, **asked, stream=True)):
        content = [each for part in made for c in part.choices if c.logprobs for each in c.logprobs.content]
        assert [each.logprob for each in content] == pytest.approx([row.logprobs[0] for row in of_chat])
        best = [[top.logprob for top in each.top_logprobs] for each in content]
        assert best == [pytest.approx(row.logprobs[1:]) for row in of_chat]


def test_logprobs_have_the_bytes_of_parts_of_characters(gateway: GatewayCluster) -> None:
    """Each id of this model is a byte, or special."""
    made = chat(gateway, logprobs=True, top_logprobs=3, extra_body={"return_token_ids": True})
    (choice,) = made.choices
    own = [[token] if token < 256 else [] for token in choice.token_ids]
    assert [each.bytes for each in choice.logprobs.content] == own
    assert any("\ufffd" in each.token for each in choice.logprobs.content)
    assert all(len(top.bytes) <= 1 for each in choice.logprobs.content for top in each.top_logprobs)


LETTERS = string.ascii_letters + string.digits
WORDS = tuple(word for letter in LETTERS.encode() for word in ((letter,), (32, letter)))


def test_sampling_parameters_mean_what_they_mean_over_grpc(gateway: GatewayCluster, own: Generation) -> None:
    """`test_parts` has each of them by itself."""
    fields: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 1.5, "frequency_penalty": 0.5}
    extra: dict[str, Any] = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.3}
    ours = SamplingParams(**fields, **extra, logit_bias=((65, 20.0), (66, -100.0)))
    made = complete(gateway, **fields, logit_bias={"65": 20, "66": -100}, extra_body=extra).choices[0].text
    assert made == direct(gateway, sampling=ours).text != own.text
    made = complete(gateway, extra_body={"bad_words": list(LETTERS)}).choices[0].text
    assert made == direct(gateway, sampling=SamplingParams(bad_words=WORDS)).text != own.text


def test_stop_strings_and_stop_token_ids_end_the_text_and_are_no_part_of_it(gateway: GatewayCluster) -> None:
    free = direct(gateway, ignore_eos=True, max_new_tokens=80)
    stop = next(char for char in free.text[5:] if char.isascii() and char.isalnum() and char not in free.text[:5])
    at = free.token_ids.index(ord(stop))
    for fields in (
        {"stop": stop},
        {"stop": ["never to be seen", stop]},
        {"extra_body": {"stop_token_ids": [ord(stop), 299]}},
    ):
        made = complete(gateway, max_tokens=80, **fields)
        assert (made.choices[0].finish_reason, made.choices[0].text) == ("stop", free.text.partition(stop)[0])
        assert made.usage.completion_tokens == at + 1
    ignoring = complete(gateway, max_tokens=80, extra_body={"stop_token_ids": [ord(stop)], "ignore_eos": True})
    assert ignoring.choices[0].text == free.text.partition(stop)[0]


def test_what_outputs_must_look_like(gateway: GatewayCluster) -> None:
    kinds = {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    schema = {"type": "object", **kinds}
    by_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    made = chat(gateway, response_format=by_format, max_completion_tokens=400)
    assert set(json.loads(made.choices[0].message.content)) == {"a"}
    sampling = SamplingParams(grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    own = direct(gateway, messages=TURNS, max_new_tokens=400, sampling=sampling)
    assert made.choices[0].message.content == own.text
    for outputs, pattern in (
        ({"regex": "[ab]{3,5}x"}, "[ab]{3,5}x"),
        ({"choice": ['say "yes"', "no\n"]}, 'say "yes"|no\n'),
        ({"grammar": 'start: "k" /[0-9]/ "k"'}, "k[0-9]k"),
        ({"json": schema}, r'\{\s*"a"\s*:\s*(true|false)\s*\}'),
    ):
        text = complete(gateway, max_tokens=400, extra_body={"structured_outputs": outputs}).choices[0].text
        assert re.fullmatch(pattern, text), (outputs, text)


def test_speculation_is_chosen_and_told(gateway: GatewayCluster, own: Generation) -> None:
    options = {"drafter": "default", "num_draft_tokens": 3, "explain": True, "rounds": True}
    with gateway.client() as client:
        options["drafter"] = client.describe_models()[0].drafters[-1]
    made = complete(gateway, extra_body={"paceline": options})
    figures = made.metrics["speculative_decoding"]
    assert len(figures["acceptance_histogram"]) == figures["num_spec_tokens"] + 1 <= 4
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"] > 0
    accepted = sum(j * rounds for j, rounds in enumerate(figures["acceptance_histogram"]))
    assert accepted == figures["num_accepted_draft_tokens"] <= figures["num_draft_tokens"]
    assert figures["mean_acceptance_length"] == pytest.approx(1 + accepted / figures["num_spec_steps"])
    assert figures["draft_acceptance_rate"] == pytest.approx(accepted / figures["num_draft_tokens"])
    assert sum(each["proposed"] for each in made.paceline["rounds"]) == figures["num_draft_tokens"]
    assert {"candidates", "account_ms"} <= set(made.paceline["explanation"])
    assert made.choices[0].text == own.text, "coupled: the drafter changes nothing"
    off = complete(gateway, extra_body={"paceline": {"off": True}})
    assert off.metrics["speculative_decoding"]["num_draft_tokens"] == 0
    assert "explanation" not in off.paceline


def test_rounds_are_told_while_they_stream(gateway: GatewayCluster) -> None:
    own = direct(gateway, speculation=SpeculationSettings(off=True))
    made = list(complete(gateway, stream=True, extra_body={"paceline": {"off": True, "rounds": True}}))
    details = [chunk.paceline for chunk in made if hasattr(chunk, "paceline")]
    told, last = details[:-1], details[-1]
    assert [i for each in told for i in each["token_ids"]] == list(own.token_ids)
    assert {p for each in told for p in each["provenance"]} == {"target"}
    assert all(len(each["text_ends"]) == len(each["token_ids"]) for each in told)
    assert last["seed"] == SEED
    assert len(last["rounds"]) == own.stats.rounds
    assert [each for chunk in told for each in chunk["ended_rounds"]] == last["rounds"]
    assert made[-1].choices == []
    assert made[-1].usage is None


def test_models_and_tokens(gateway: GatewayCluster) -> None:
    (model,) = gateway.openai.models.list().data
    assert (model.id, model.object, model.max_model_len) == (MODEL, "model", 30000)
    assert gateway.openai.models.retrieve(MODEL).id == MODEL
    tokenized = gateway.post("/tokenize", {"prompt": "aé", "return_token_strs": True}).json
    strings = ["a", "\ufffd", "\ufffd"]
    assert tokenized == {"count": 3, "max_model_len": 30000, "tokens": [97, 195, 169], "token_strs": strings}
    assert gateway.post("/detokenize", {"tokens": [97, 195, 169]}).json == {"prompt": "aé"}
    of_chat = gateway.post("/tokenize", {"messages": MESSAGES}).json["tokens"]
    assert of_chat == list(direct(gateway, messages=TURNS).prompt_token_ids)


def test_routes_of_operators(gateway: GatewayCluster) -> None:
    assert [gateway.get(path).status for path in ("/health", "/ping")] == [200, 200]
    assert set(gateway.get("/version").json) == {"version"}
    assert gateway.get("/load").json == {"server_load": 0}
    assert b"http_server_request_duration_seconds_count" in gateway.get("/metrics").content
    described = gateway.get("/openapi.json").json
    paths = described["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/health"} <= set(paths)
    assert set(paths["/v1/completions"]["post"]["responses"]) == {"200", "4XX", "5XX"}
    assert gateway.get("/docs").status == 404, "its page would load scripts from elsewhere"


def test_request_ids_are_echoed_or_made(gateway: GatewayCluster) -> None:
    assert gateway.get("/ping", X_Request_Id="mine-1").headers["x-request-id"] == "mine-1"
    made = {gateway.get("/ping", X_Request_Id=bad).headers["x-request-id"] for bad in ("", "a b", "x" * 200)}
    assert len(made) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in made)
    assert gateway.post("/v1/completions", b"{").headers["x-request-id"]
