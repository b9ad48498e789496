"""Sampling fields of requests: read by the table of sampling options, whatever a protocol calls them."""

from typing import Any

import pytest

from hetero_ee.options.sampling import SAMPLING, SamplingParams
from hetero_ee.serving.errors import RequestError
from hetero_ee.serving.protocols.body import Fields
from hetero_ee.serving.protocols.sampling_fields import CHATS, MESSAGES, RESPONSES, TEXTS, SamplingFields

USUAL = SamplingParams(max_new_tokens=7, temperature=0.5, seed=3)


@pytest.mark.parametrize(
    ("protocol", "values", "changes"),
    [
        (TEXTS, {"n_predict": 5, "max_tokens": 6}, {"max_new_tokens": 6}),
        (TEXTS, {"max_tokens": -1, "top_k": -1}, {"max_new_tokens": None, "top_k": 0}),
        (CHATS, {"repetition_penalty": 2, "repeat_last_n": -1}, {"repeat_penalty": 2.0}),
        (CHATS, {"stop": "a", "logit_bias": {"4": 1.5}}, {"stop": ("a",), "logit_bias": ((4, 1.5),)}),
        (CHATS, {"stop": [], "temperature": None}, {}),
        (RESPONSES, {"max_output_tokens": 9, "max_tokens": 8}, {"max_new_tokens": 9}),
        (MESSAGES, {"max_tokens": 9, "stop_sequences": ["b"], "min_p": 0.5}, {"max_new_tokens": 9, "stop": ("b",)}),
    ],
    ids=range(7),
)
def test_fields_change_the_usual_parameters(
    protocol: SamplingFields, values: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert protocol.read(Fields(values | {"seed": 11}), USUAL, 100) == USUAL.changed(seed=11, **changes)


@pytest.mark.parametrize(
    ("protocol", "values", "field"),
    [
        (TEXTS, {"n_predict": 0}, "n_predict"),
        (CHATS, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHATS, {"max_tokens": 0}, "max_tokens"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (MESSAGES, {"max_tokens": -1}, "max_tokens"),
        (MESSAGES, {"stop_sequences": [""]}, "stop_sequences"),
        (CHATS, {"repetition_penalty": 0}, "repetition_penalty"),
        (CHATS, {"logit_bias": {"100": 1}}, "logit_bias"),
    ],
    ids=range(8),
)
def test_errors_name_the_field_that_was_used(protocol: SamplingFields, values: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=f"^{field} ") as refused:
        protocol.read(Fields(values), USUAL, 100)
    assert refused.value.param == field


def test_only_so_many_tokens_have_a_bias() -> None:
    with pytest.raises(RequestError, match="holds 2000 tokens; expected at most 1024"):
        CHATS.read(Fields({"logit_bias": {str(each): 1 for each in range(2000)}}), USUAL, 4000)


def test_a_request_without_a_seed_gets_a_random_one() -> None:
    for values in ({}, {"seed": None}, {"seed": -1}):
        seeds = {CHATS.read(Fields(values), USUAL, 100).seed for _ in range(3)}
        assert len(seeds) == 3 and USUAL.seed not in seeds


def test_every_field_of_a_protocol_has_a_schema() -> None:
    for protocol in (CHATS, RESPONSES, MESSAGES):
        names = {name for option in SAMPLING.values() for name in option.fields_of(protocol.protocol)}
        assert set(protocol.schemas()) == names and len(names) > 5
    assert CHATS.schemas()["top_k"]["minimum"] == -1 and MESSAGES.schemas()["top_k"]["minimum"] == 0
