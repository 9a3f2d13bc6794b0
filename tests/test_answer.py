import json

import pytest

from kvlab.answer import Answer, MalformedEvent, plain_tokens, spread


def event(text="", ids=None, finish=None, **more):
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    if ids is not None:
        choice["token_ids"] = ids
    return pack({"id": "cmpl-1", "choices": [choice | more.pop("choice", {})], **more})


def pack(values):
    return b"data: " + json.dumps(values, separators=(",", ":")).encode() + b"\n\n"


def usage(prompt=10, output=2, **more):
    return pack({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, **more}})


DONE = b"data: [DONE]\n\n"


def answer(*reads):
    made = Answer()
    for t, data in enumerate(reads):
        made.feed(data, float(t))
    made.end(float(len(reads)))
    return made


GOOD = (event("a", [1]), event("b", [2], finish="length"), usage(), DONE)


def test_a_good_answer_is_a_success():
    good = answer(*GOOD)
    assert good.why_not(10, 2) is None
    assert (good.times, good.event_tokens(), good.finish_reason) == ([0.0, 1.0], [1, 1], "length")


@pytest.mark.parametrize(
    "lead",
    [
        pack({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}),
        pack({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]}),
        event("", []),
        event(""),
        pack({"choices": []}),
        b": ping\n\n",
    ],
)
def test_an_event_without_content_is_not_the_first_content(lead):  # pitfall 1
    assert answer(lead, *GOOD).times == [1.0, 2.0]


def test_tokens_are_counted_within_events():  # pitfall 2
    made = answer(event("abc", [1, 2, 3]), event("", [4]), event("d", [5, 6], finish="length"), usage(10, 6), DONE)
    assert made.event_tokens() == [3, 1, 2] and made.exact
    assert made.why_not(10, 6) is None


def test_several_events_in_one_read_carry_its_time():
    made = Answer()
    made.feed(event("a", [1]) + event("b", [2]), 7.5)
    assert made.times == [7.5, 7.5] and made.event_tokens() == [1, 1]


def test_tokens_follow_a_running_usage():
    events = [event("abc", usage={"completion_tokens": 3}), event("d", usage={"completion_tokens": 4})]
    assert answer(*events, usage(10, 4), DONE).event_tokens() == [3, 1]


def test_tokens_without_any_count_are_spread_and_marked():
    made = answer(event("a"), event("b"), event("c", finish="length"), usage(10, 8), DONE)
    assert not made.exact
    assert sorted(made.event_tokens()) == [2, 3, 3]
    assert made.why_not(10, 8) is None
    assert answer(event("a")).event_tokens() is None


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "content"])
def test_reasoning_deltas_are_content(field):  # pitfall 3
    made = answer(pack({"choices": [{"index": 0, "delta": {field: "hm"}, "finish_reason": None}]}))
    assert made.times == [0.0]


def test_token_ids_without_text_are_content():
    assert answer(event("", [5])).times == [0.0]


def test_the_usage_event_is_not_content():  # pitfall 4
    assert answer(*GOOD).times[-1] == 1.0


@pytest.mark.parametrize(
    ("reads", "reason"),
    [
        ((GOOD[0], pack({"error": {"message": "engine died"}}), DONE), "error event after HTTP 200: engine died"),
        ((GOOD[0], b'event: error\ndata: {"message":"gone"}\n\n'), "error event after HTTP 200"),
        (GOOD[:-1], "without [DONE]"),
        ((event("a", [1]), event("b", [2]), usage(), DONE), "without a finish_reason"),
        ((event("a", [1]), event("b", [2], finish="abort"), usage(), DONE), "'abort'"),
        ((*GOOD[:2], DONE), "no usage"),
        ((event("", [], finish="length"), usage(10, 0), DONE), "no event held content"),
        ((event("a", [1], finish="length"), usage(10, 1), DONE), "1 output tokens instead of 2"),  # pitfall 15
        ((*GOOD[:2], usage(11), DONE), "counted 11 prompt tokens, 10 were sent"),  # pitfall 12
        ((event("a", [1], finish="length"), usage(), DONE), "events hold 1 tokens, the usage says 2"),
    ],
)
def test_everything_less_than_strict_success_has_a_reason(reads, reason):
    assert reason in answer(*reads).why_not(10, 2)


@pytest.mark.parametrize("payload", [b'{"choices": [', b"3", b"[]"])
def test_malformed_events_raise(payload):
    with pytest.raises(MalformedEvent):
        Answer().feed(b"data: " + payload + b"\n\n", 0.0)


def test_cached_tokens_are_null_where_not_reported():
    assert answer(usage()).cached_tokens is None
    assert answer(usage(prompt_tokens_details=None)).cached_tokens is None
    assert answer(usage(prompt_tokens_details={"cached_tokens": 0})).cached_tokens == 0


LOOKALIKES = ['"finish_reason":null', '"token_ids":[1,2,3]', '"error":', '"token_ids":[', "]", "\\"]


@pytest.mark.parametrize("text", LOOKALIKES)
def test_text_that_looks_like_a_key_does_not_fool_the_byte_checks(text):
    for ids in ([9], [9, 9], []):
        payload = event(text, ids)[6:-2]
        assert plain_tokens(payload) == len(ids)
    assert plain_tokens(event(text)[6:-2]) == 0


def test_byte_checks_count_the_tokens_and_not_an_echoed_prompt():
    echoed = event("a", [5, 6], choice={"prompt_token_ids": list(range(50))})[6:-2]
    before = b'{"choices":[{"finish_reason":null,"token_ids":[5,6],"prompt_token_ids":[1,2,3,4]}]}'
    assert plain_tokens(echoed) == 2 and plain_tokens(before) == 2


def test_byte_checks_leave_everything_else_to_the_parser():
    assert plain_tokens(event("a", [5], finish="length")[6:-2]) == 0
    assert plain_tokens(b'{"error":{"message":"x"},"finish_reason":null,"token_ids":[1]}') == 0


def test_spread_keeps_the_sum():
    assert spread(7, 3) == [2, 2, 3]
    assert [sum(spread(n, 5)) for n in (0, 4, 5, 23)] == [0, 4, 5, 23]
