from typing import Any

import pytest

from rl.runs.secret_fields import hide_secrets, is_secret


@pytest.mark.parametrize(
    "field",
    ["api_key", "apiKey", "APIKEY", "OPENAI_API_KEY", "password", "dbPassword", "HF_TOKEN", "token", "client_secret",
     "access_keys", "credentials", "--env.api-key"],
)  # fmt: skip
def test_names_of_secrets(field: str) -> None:
    assert is_secret(field)


@pytest.mark.parametrize(
    "field", ["max_tokens", "tokenizer", "key", "keyboard", "monkey", "secretary", "num_steps", "author", "passes", ""]
)
def test_names_of_other_fields(field: str) -> None:
    assert not is_secret(field)


def test_texts_of_secrets_are_hidden_wherever_they_are() -> None:
    config: Any = {
        "env": {
            "args": {"api_key": "sk-1", "url": "http://judge", "nested": [{"password": "p"}, 3]},
            "credentials": {"user": "u", "pins": ["1", 2]},
        },
        "sampling": {"max_tokens": 8, "stop_token": 5, "token": None, "password": ""},
    }
    assert hide_secrets(config) == {
        "env": {
            "args": {"api_key": "***", "url": "http://judge", "nested": [{"password": "***"}, 3]},
            "credentials": {"user": "***", "pins": ["***", 2]},
        },
        "sampling": {"max_tokens": 8, "stop_token": 5, "token": None, "password": ""},
    }
