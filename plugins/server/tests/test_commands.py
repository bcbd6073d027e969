"""`ownloop serve` refuses what it cannot serve before anything starts, in one line."""

import socket
from pathlib import Path

import pytest

from controller.commands import cli
from ownloop_server.commands import configuration
from rl.tiny_models import tiny_llama

pytest.importorskip("tinker")
from ownloop_server.serving import held


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "--model is missing"),
        (["--model", "nonsense"], "'nonsense' is neither a local directory nor a known name"),
        (["--model", "x", "--host", "0.0.0.0"], "ownloop key add NAME --folder gateway"),
        (["--model", "x", "--host", "evil.example"], "must be an address of this host"),
        (["--model", "x", "--tls-key", "k.pem"], "tls_certificate is not"),
        (["--model", "x", "--limits.body-mb", "0"], "body_mb is 0"),
        (["--model", "x", "--port", "70000"], "ServeConfig.port is 70000"),
        (["--model", "x", "--max-rank", "0"], "max_rank is 0"),
        (
            ["--model", "x", "--trainer.placement", "colocated", "--generator.placement", "colocated"],
            "ServeConfig.trainer.placement is 'colocated'; it must be 'split'",
        ),
        (["--model", "x", "--generator.placement", "colocated"], "ServeConfig.generator.placement is 'colocated'"),
        (["--model", "x", "--max-snapshot", "3"], "did you mean '--max-snapshots'"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    options: list[str], text: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tinker")
    with pytest.raises(SystemExit) as stop:
        cli.main(["serve", *options])
    assert stop.value.code == 2
    error = capfd.readouterr().err
    assert text in error
    assert len(error.strip().splitlines()) == 1
    assert not list(here.iterdir())


def test_a_taken_port_is_an_error_before_a_process_starts(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tinker")
    model = tiny_llama(here / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as stop:
            cli.main(["serve", "--model", str(model), "--port", str(port)])
    assert stop.value.code == 2
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use; choose another --port" in capfd.readouterr().err
    assert not list((here / "gateway" / "logs").glob("trainer*"))


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    with held(tmp_path / "gateway"):
        message = "gateway is in use by another server; --folder names another one"
        with pytest.raises(ValueError, match=message), held(tmp_path / "gateway"):
            pass
        with held(tmp_path / "other"):
            pass
    with held(tmp_path / "gateway"):
        pass


def test_fields_of_trainer_and_generator_are_options() -> None:
    config = configuration(
        ["--model", "m", "--names", "a", "b/c", "--trainer.compute-dtype", "float32", "--generator.max-model-len", "99"]
    )
    assert (config.names, config.host, config.port) == (("a", "b/c"), "127.0.0.1", 8000)
    assert (config.trainer.compute_dtype, config.generator.max_model_len) == ("float32", 99)
