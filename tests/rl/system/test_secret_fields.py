from typing import Any

import pytest

from rl.system.secret_fields import hide_in_text, hide_secrets, is_secret


@pytest.mark.stranger("F1")
@pytest.mark.parametrize(
    "field",
    ["api_key", "apiKey", "APIKEY", "OPENAI_API_KEY", "password", "dbPassword", "HF_TOKEN", "token", "client_secret",
     "access_keys", "credentials", "--env.api-key", "openai_key", "auth", "bearer", "Authorization", "X-Api-Key",
     "AWS_SESSION_TOKEN", "db_pass", "Cookie", "openAIKey", "private_key", "refresh_token", "pwd", "slack_webhook"],
)  # fmt: skip
def test_names_of_secrets(field: str) -> None:
    assert is_secret(field)


@pytest.mark.stranger("F1")
@pytest.mark.parametrize(
    "field",
    [
        "max_tokens",
        "tokenizer",
        "key",
        "keyboard",
        "monkey",
        "secretary",
        "num_steps",
        "author",
        "passes",
        "",
        "answer_key",
        "pass_at_k",
        "token_mean",
        "eos_token",
        "stop_token_ids",
        "num_key_value_heads",
        "key_path",
        "api_key_variable",
        "token_weight",
        "loss_per_token",
        "policy_key",
        "pin_memory",
    ],
)
def test_names_of_other_fields(field: str) -> None:
    assert not is_secret(field)


@pytest.mark.stranger("F1")
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
            "credentials": {"user": "***", "pins": ["***", "***"]},
        },
        "sampling": {"max_tokens": 8, "stop_token": 5, "token": None, "password": ""},
    }


@pytest.mark.stranger("F1")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pw@host/x?token=abc&y=2", "https://***@host/x?token=***&y=2"),
        ("ssh://user@host", "ssh://user@host"),
        ("Authorization: Bearer abcd", "Authorization: Bearer ***"),
        ('{"api_key": "abc", "n": 2}', '{"api_key": "***", "n": 2}'),
        ("run --password hunter2 --steps 3", "run --password *** --steps 3"),
        ("on bearer tokens and basic training", "on bearer tokens and basic training"),
        ("hf_abcdefghijkl, sk-abc-def-ghi-1234 and a", "***, *** and a"),
        ("runs/sk-model-of-2024-11, sk-learn-experiments", "runs/sk-model-of-2024-11, sk-learn-experiments"),
        ("eos_token=<|im_end|>, pass_at_k=4", "eos_token=<|im_end|>, pass_at_k=4"),
    ],
)
def test_texts_in_the_form_of_secrets(text: str, shown: str) -> None:
    assert hide_in_text(text) == shown
    assert hide_secrets({"note": [text]}) == {"note": [shown]}


def test_long_texts_take_no_longer_than_their_length() -> None:
    for text in ("a" * 100_000, "-" * 100_000, "a-" * 50_000, "a=" * 50_000, "://" + "a:" * 2_000):
        assert hide_in_text(text) == text
