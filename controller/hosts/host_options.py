"""What `--hosts` says: workers that run already, or how the run gets its own.

    --hosts trainer=n1:26600,n2:26600 generator=n3:26600
    --hosts ssh trainer=n1,n2 generator=n3 port=26700
    --hosts slurm trainer=4 generator=4 partition=gpu gpus_per_node=8
    --hosts kubernetes trainer=2 generator=1 image=registry/ownloop:1
    --hosts none

The last means this host, in place of those that a recipe or a resumed run names. Options are the fields of the class
that the first word names.
"""

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from controller.hosts.host_groups import Hosts, parse_groups
from controller.hosts.starting.kubernetes_hosts import KubernetesHosts
from controller.hosts.starting.slurm_hosts import SlurmHosts
from controller.hosts.starting.ssh_hosts import SshHosts
from rl.checks import did_you_mean

METAVAR = "ROLE=HOST:PORT,... | ssh ROLE=HOST,... | slurm ROLE=NODES ... | kubernetes ROLE=PODS ... image=IMAGE | none"
_NONE = "none"
_KINDS: Mapping[str, tuple[type[Any], Callable[[str, str], Any]]] = {
    "ssh": (SshHosts, lambda _, text: tuple(text.split(","))),
    "slurm": (SlurmHosts, lambda role, text: int(_number(f"--hosts slurm {role}", text, int))),
    "kubernetes": (KubernetesHosts, lambda role, text: int(_number(f"--hosts kubernetes {role}", text, int))),
}


def parse_hosts(words: Sequence[str]) -> Hosts | None:
    """The hosts that the words of `--hosts` name; None is this one.

    Raises ValueError as they do, for no word and for an unknown option.
    """
    if list(words) == [_NONE]:
        return None
    if words and words[0] in _KINDS:
        kind, parse_group = _KINDS[words[0]]
        return _with_options(kind, parse_group, words)
    if words and "=" not in words[0]:
        raise ValueError(f"--hosts {words[0]!r} is neither ROLE=HOST:PORT nor a way to start workers"
                         f"{did_you_mean(words[0], (*_KINDS, _NONE))}")  # fmt: skip
    return parse_groups(words)


def _with_options(kind: type[Any], parse_group: Callable[[str, str], Any], words: Sequence[str]) -> Hosts:
    """`kind` with the fields and roles that the words set."""
    name, *rest = words
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name not in ("groups", "env")}
    groups: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for word in rest:
        key, equals, text = word.partition("=")
        if not (key and equals and text) or key in groups or key in options:
            raise ValueError(f"--hosts {name} {word!r}: write each role and each option once, as NAME=VALUE")
        if key in fields:
            options[key] = _value(f"--hosts {name} {key}", fields[key], text)
        elif "did you mean" in (near := did_you_mean(key, fields)):
            raise ValueError(f"--hosts {name} {key!r} is no option{near}")
        else:
            groups[key] = parse_group(key, text)
    if not groups:
        raise ValueError(f"--hosts {name} names no role; write for example trainer=... generator=...")
    needed = [name for name, field in fields.items() if field.default is field.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in options]:
        raise ValueError(f"--hosts {name} needs {missing[0]}=...")
    return kind(groups, **options)


def _value(name: str, field: "dataclasses.Field[Any]", text: str) -> Any:
    """The value of a field that the text stands for."""
    if field.type is bool:
        if text not in ("yes", "no"):
            raise ValueError(f"{name} is {text!r}; write yes or no")
        return text == "yes"
    if field.type in (int, float):
        return _number(name, text, int if field.type is int else float)
    return text if field.type is str else tuple(shlex.split(text))


def _number(name: str, text: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, which is no number") from None
