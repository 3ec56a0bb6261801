"""Secrets in configurations and messages, and what only looks like one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from trlx_like.errors import ConfigError, RewardError
from trlx_like.redact import HIDDEN, redacted, secrets_in

SECRET = "zq7Jx0vKp2LmN4rT"

TEXTS = {
    f"http://user:{SECRET}@host/v1": f"http://{HIDDEN}@host/v1",
    f"https://{SECRET}@host:80/v1?x=1": f"https://{HIDDEN}@host:80/v1?x=1",
    f"no route to http://u:p@{SECRET}@host/v1": f"no route to http://{HIDDEN}@host/v1",
    f"https://host/v1?api_key={SECRET}&n=3": f"https://host/v1?api_key={HIDDEN}&n=3",
    f"https://host/v1?n=3&token={SECRET}": f"https://host/v1?n=3&token={HIDDEN}",
    f"--set judge.body.apiKey={SECRET}: no": f"--set judge.body.apiKey={HIDDEN} no",
    f"made of {{'url': 'x', 'api_key': '{SECRET}'}}": f"made of {{'url': 'x', 'api_key': '{HIDDEN}'}}",
    f'{{"client_secret": "{SECRET} and more", "n": 1}}': f'{{"client_secret": "{HIDDEN}", "n": 1}}',
    f"a:\n  password: {SECRET}\n  n: 1": f"a:\n  password: {HIDDEN}\n  n: 1",
    f"Authorization: {SECRET}\r\nAccept: x": f"Authorization: {HIDDEN}\r\nAccept: x",
    f"Illegal header value b'Bearer {SECRET}'": f"Illegal header value b'Bearer {HIDDEN}'",
    f"sent Basic {SECRET}==.": f"sent Basic {HIDDEN}",
    f"key sk-proj-{SECRET} is wrong": f"key {HIDDEN} is wrong",
    f"hf_{SECRET}": HIDDEN,
    f"ghp_{SECRET}{SECRET}": HIDDEN,
    f"xoxb-{SECRET}": HIDDEN,
    "AKIA" + "Z" * 16: HIDDEN,
    f"eyJ{SECRET}.eyJ{SECRET}.{SECRET}": HIDDEN,
    f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END": f"-----BEGIN RSA PRIVATE KEY-----{HIDDEN}-----END",
}


@pytest.mark.parametrize("text", TEXTS)
def test_secrets_in_texts(text: str) -> None:
    assert redacted(text) == TEXTS[text]
    assert redacted(TEXTS[text]) == TEXTS[text]
    assert str(RewardError(text)) == TEXTS[text]


NOT_SECRET = [
    "http://localhost:8000/v1",
    "judge.api_key: unknown key. Did you mean judge.api_key_env?",
    "judge.api_key_env=OPENAI_API_KEY",
    "token=<pad>",
    "a bearer of news, a basic understanding",
    "task-learning-with-a-long-name",
    "models/sk-learn-classifier-model",
    "somebody@example.com",
    "0123456789abcdef0123456789abcdef01234567",
]


@pytest.mark.parametrize("text", NOT_SECRET)
def test_texts_that_stay(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    "name",
    ["api_key", "apiKey", "openai_api_key", "x-api-key", "password", "passwd", "client_secret", "hf_token"]
    + ["auth_token", "use_auth_token", "AWS_SECRET_ACCESS_KEY", "credentials", "Authorization", "Cookie"],
)
def test_names_of_secrets(name: str) -> None:
    assert redacted({name: "a", "n": [1]}) == {name: HIDDEN, "n": [1]}
    number: dict[str, object] = {name: 12345}
    assert redacted(number) == {name: HIDDEN}
    assert redacted({"body": [{name: ["a", "b"]}]}) == {"body": [{name: [HIDDEN, HIDDEN]}]}
    # Not a value: a switch, nothing, an empty text; a JSON schema of a tool with such a parameter.
    for value in (True, None, "", {"type": "string"}):
        assert redacted({name: value}) == {name: value}


@pytest.mark.parametrize(
    "name", ["api_key_env", "max_new_tokens", "pad_token", "eos_token", "token", "key", "keyboard", "cookies"]
)
def test_names_that_are_none(name: str) -> None:
    assert redacted({name: "a", "list": ({name: 3},)}) == {name: "a", "list": ({name: 3},)}


def test_a_long_token_and_all_headers_are_hidden() -> None:
    assert redacted({"token": SECRET, "tokens": SECRET}) == {"token": HIDDEN, "tokens": SECRET}
    headers = {"X-Custom": "abc", "more": {"Accept": "x"}}
    assert redacted({"extra_headers": headers}) == {
        "extra_headers": {"X-Custom": HIDDEN, "more": {"Accept": HIDDEN}},
    }
    assert headers == {"X-Custom": "abc", "more": {"Accept": "x"}}


def test_other_objects_are_returned_as_they_are() -> None:
    thing = object()
    assert redacted({"password": thing, "x": thing}) == {"password": thing, "x": thing}
    assert redacted(1.5) == 1.5 and redacted(3) == 3 and redacted(None) is None


def test_places_of_secrets() -> None:
    value = {"url": f"http://u:{SECRET}@h", "body": {"list": [{"api_key": 5}, {"n": 5}]}, "model": "m"}
    assert list(secrets_in(value)) == [("url",), ("body", "list", 0, "api_key")]
    assert list(secrets_in("text")) == [] and list(secrets_in(f"http://u:{SECRET}@h")) == [()]


def test_the_cause_of_an_error_is_shown_without_its_secret() -> None:
    assert str(ConfigError("data.judge (http://u:p@h)")) == f"data.judge (http://{HIDDEN}@h)"
    assert str(ConfigError()) == ""


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["password", "headers", "token", "n"]) | st.text(max_size=8), inner, max_size=3
        )
    ),
)


@given(values)
def test_redaction_keeps_the_shape_and_is_done_once(value: Any) -> None:
    once = redacted(value)
    assert redacted(once) == once
    assert type(once) is type(value) and list(secrets_in(once)) == []
