"""Keeps secrets out of the files, pages and help texts of a run: an environment may need the key of a service.

Three things make a value secret: its field is declared as `Secret`; its field's name says so (`api_key`, `headers`'
`Authorization`); or its text has the form of a secret wherever it stands (`https://user:password@host`, `Bearer ...`,
`sk-...`). A key without any of the three, in a field `option7` for example, is not recognised: declare the field.
"""

import copy
import dataclasses
import functools
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, cast, get_args, get_type_hints

HIDDEN = "***"
"""Stands for the value of a secret."""


class _Declared:
    """Marks the type of a secret field."""


Secret = Annotated[str, _Declared()]
"""The type of a dataclass's field that holds a secret: `api_key: Secret = ""`. The value is a plain `str`."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z]+[0-9]*|[0-9]+")
_PASSWORDS = frozenset(
    {"password", "passwords", "passwd", "passphrase", "passcode", "pwd", "secret", "secrets", "credential"}
    | {"credentials", "creds", "dbpassword", "userpass", "mnemonic"}
)
"""Words of a name below which numbers are secret, too."""
_SECRET_WORDS = _PASSWORDS | {
    *("apikey", "authkey", "accesskey", "secretkey", "privatekey", "apitoken", "accesstoken", "authtoken"),
    *("auth", "authorization", "authorisation", "authentication", "bearer", "cookie", "cookies", "jwt", "pat"),
    *("signature", "otp", "netrc", "htpasswd"),
}
_KEYS = {(owner, key) for owner in ("api", "access", "auth", "private", "secret", "service") for key in ("key", "keys")}
_LAST_WORDS = frozenset({"token", "pass", "pin", "key", "keys", "sas", "dsn", "webhook", "sessionid"})
"""Words that make a secret of a name of several words when they are its last."""
_PLAIN_OWNERS = frozenset(
    "answer answers column completion data dict field foreign gold group hash image input item json label map message "
    "messages metric name output primary prompt prompts public question record reply response reward row rows sort "
    "state task text value yaml cache order num max min bypass one two first second third multi single by with no "
    "per is has train eval test current new policy eos bos pad stop unk sep mask cls special think tool end "
    "start".split()
)
"""Words before a last word that make it a plain name: `answer_key` names a column."""
_PLAIN_LAST_WORDS = frozenset("path file variable env id ids name names type method memory weight weights".split())
"""Words that make a plain name of any other: `api_key_variable` names an environment variable."""
_PLAIN_NAMES = ("use_auth", "token_mean", "pass_at")
_TEXTS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<=://)[^/\s@?#\"']*:[^/\s@?#\"']+(?=@)|(?i:(?<=http://)|(?<=https://))[^/\s@?#\"']+(?=@)",  # before a host
        r"(?<=\bBearer )[\w.~+/=-]{4,}|(?i:(?<=\bbearer ))(?=[a-z]*[^a-z\s])[\w.~+/=-]{8,}",
        r"(?i:(?<=\bbasic ))(?=[a-z]*[A-Z0-9+/=])[A-Za-z0-9+/]{8,}={0,2}",
        r"(?i)(?<=\btoken )(?=[\w-]*\d)[\w-]{16,}",
        r"(?<![/\w-])(?:sk|pk|rk|sess)[-_](?=[\w-]*\d)[\w-]{12,}(?!/)",
        r"(?<![/\w-])hf_[A-Za-z0-9]{8,}(?!/)|\bgh[pousr]_\w{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{12,}|\bnpm_\w{20,}",
        r"\bpypi-[\w-]{16,}|\bxox[abeoprs]-[\w-]{8,}|\bxapp-[\w-]{8,}|\bAIza[\w-]{20,}|\bya29\.[\w-]{10,}",
        r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bgsk_\w{16,}|\br8_\w{16,}|\bnvapi-[\w-]{16,}|\btml-[\w-]{8,}|\bolk_\w{8,}",
        r"\beyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*",  # a JSON Web Token
        r"(?s)(?<=PRIVATE KEY-----).+?(?=-----END|$)",
        r"(?i)(?<=hooks\.slack\.com/services/)[\w/]+",
    )
)
_OPTION = re.compile(r"(?<![\w.-])(?P<name>--[\w.-]++)(?P<between>\s+)(?P<value>(?!--)[^\s\"']+)")
_NAMED = re.compile(r"(?<![\w.-])(?P<name>[\w.-]++)(?P<between>[\"']?\s*[=:](?!//)\s*[\"']?)(?P<value>[^\s\"'&;,#]+)")


def hide_secrets(value: Any) -> Any:
    """A value in JSON types, or with tuples, without its secrets: by the names of fields, by the forms of texts."""
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        return {
            hide_in_text(name): hide_all(item, name) if is_secret(name) else hide_secrets(item)
            for name, item in fields.items()
        }
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        if len(items) == 2 and isinstance(items[0], str) and is_secret(items[0]):  # a header as a pair
            return type(value)((items[0], hide_all(items[1], items[0])))
        return type(value)(hide_secrets(item) for item in items)
    return hide_in_text(value) if isinstance(value, str) else value


def hide_in_text(text: str) -> str:
    """`text` with every part that has the form of a secret replaced: in a URL, after `Bearer`, after `api_key=`."""
    for pattern in _TEXTS:
        text = pattern.sub(HIDDEN, text)
    return _OPTION.sub(_hidden_pair, _NAMED.sub(_hidden_pair, text))


def is_secret(field: str) -> bool:
    """Whether a field's name says that it holds a secret: `api_key`, `HF_TOKEN` and `dbPassword`, not `max_tokens`."""
    words = [word.lower() for word in _WORDS.findall(field)]
    if not words or words[-1] in _PLAIN_LAST_WORDS or any(name in "_".join(words) for name in _PLAIN_NAMES):
        return False
    if any(pair in _KEYS for pair in itertools.pairwise(words)) or not _SECRET_WORDS.isdisjoint(words):
        return True
    return words == ["token"] or (len(words) > 1 and words[-1] in _LAST_WORDS and words[-2] not in _PLAIN_OWNERS)


@functools.cache
def is_declared(owner: type, field: str) -> bool:
    """Whether a dataclass declares this field as `Secret`, or as an optional one."""
    try:
        hint = get_type_hints(owner, include_extras=True).get(field)
    except (NameError, AttributeError, TypeError):  # a name that only type checkers import
        hint = owner.__annotations__.get(field)
    return bool(re.search(r"\bSecret\b", hint)) if isinstance(hint, str) else _mentions(hint)


def hide_all(value: Any, name: str = "") -> Any:
    """Everything below a secret field: its texts are hidden and, below a password, its numbers."""
    if isinstance(value, Mapping):
        return {key: hide_all(item, name) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return type(value)(hide_all(item, name) for item in cast("Sequence[Any]", value))
    numbers = not _PASSWORDS.isdisjoint(word.lower() for word in _WORDS.findall(name))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return HIDDEN if numbers else value
    return HIDDEN if isinstance(value, str | bytes) and value else value


def with_hidden_secrets(config: Any) -> Any:
    """A copy of a dataclass to show to a user, with the secrets of its fields hidden. Its checks are not run again."""
    shown = copy.copy(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = with_hidden_secrets(value)
        elif isinstance(value, str):
            secret = is_secret(field.name) or is_declared(type(config), field.name)
            value = hide_all(value, field.name) if secret else hide_in_text(value)
        elif isinstance(value, Mapping | list | tuple):
            value = hide_secrets({field.name: value})[field.name]
        object.__setattr__(shown, field.name, value)
    return shown


def hide_in_options(options: Sequence[str], hidden: Collection[str] = ()) -> list[str]:
    """Command-line options with the values of secrets hidden, as "--env.api-key=..." or in an argument of their own.

    `hidden` names fields whose values are hidden although their names do not say so: `env.option7`.
    """

    def secret(option: str) -> bool:
        return is_secret(option) or option.removeprefix("--").replace("-", "_") in hidden

    shown: list[str] = []
    owner = ""
    for option in options:
        if option.startswith("--"):
            owner, equals, value = option.partition("=")
            shown.append(f"{owner}={HIDDEN if secret(owner) else hide_in_text(value)}" if equals else option)
        else:
            shown.append(HIDDEN if secret(owner) else hide_in_text(option))
    return shown


def hidden_fields(config: Any, prefix: str = "") -> list[str]:
    """The fields of a recorded configuration that are hidden: `env.api_key`."""
    if isinstance(config, Mapping):
        fields = cast("Mapping[str, Any]", config).items()
        return [name for key, item in fields for name in hidden_fields(item, f"{prefix}.{key}" if prefix else key)]
    return [prefix] if config == HIDDEN else []


def _hidden_pair(match: re.Match[str]) -> str:
    name, between, value = match.group("name", "between", "value")
    plain = not is_secret(name) or value.lower() in ("true", "false", "none", "null", "bearer", "basic", HIDDEN)
    return match.group() if plain or HIDDEN in value else f"{name}{between}{HIDDEN}"


def _mentions(hint: Any) -> bool:
    """Whether a type is `Secret`, or has it among its arguments."""
    return isinstance(hint, _Declared) or any(_mentions(argument) for argument in get_args(hint))
