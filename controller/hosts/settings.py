"""What Monarch is told by environment variables when several hosts take part, in the controller and in workers.

Monarch reads them once, when it is imported.
"""

import os
from collections.abc import Mapping
from pathlib import Path

SETTINGS: Mapping[str, str] = {
    # A host that was out of reach for minutes can be attached to again. By default its address is lost for good.
    "HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT": "10m",
    "HYPERACTOR_MESH_ATTACH_CONFIG_TIMEOUT": "15s",
}
_TLS_VARIABLES = {"HYPERACTOR_TLS_CERT": "cert.pem", "HYPERACTOR_TLS_KEY": "key.pem", "HYPERACTOR_TLS_CA": "ca.pem"}
_CERTIFICATES_VARIABLE = "OWNLOOP_CERTS"


def certificates_folder(chosen: Path | None) -> Path:
    """The folder of this host's certificates: the chosen one, that of OWNLOOP_CERTS, or one in the user's settings."""
    default = Path(os.environ.get("XDG_CONFIG_HOME", "~/.config")).expanduser() / "ownloop" / "certs"
    return (chosen or Path(os.environ.get(_CERTIFICATES_VARIABLE, default))).absolute()


def tls_settings(own_folder: Path) -> Mapping[str, str]:
    """The variables with which Monarch speaks TLS as the host whose certificate is in `own_folder`."""
    return {variable: str(own_folder / name) for variable, name in _TLS_VARIABLES.items()}


def forwarded_env() -> Mapping[str, str]:
    """Variables of the controller that its processes need on any host: where a user's own modules are."""
    return {"PYTHONPATH": os.environ["PYTHONPATH"]} if os.environ.get("PYTHONPATH") else {}


def apply(settings: Mapping[str, str], *, override: bool = False) -> None:
    """Sets variables for this process and those that it starts. Without `override`, what the user has set stays."""
    for name, value in settings.items():
        if override or name not in os.environ:
            os.environ[name] = value
