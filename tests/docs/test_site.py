"""The site of `make docs`: what it holds and refuses, and what a browser makes of each page."""

import functools
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from docs.site import build
from tests.docs.browser import BROWSER, Tab, browser
from tests.docs.pages import ROOT
from tests.waiting import LIMIT_S


def test_every_page_is_in_the_navigation(tmp_path: Path) -> None:
    build.gather(tmp_path)
    gathered = {path.relative_to(tmp_path / "pages").as_posix() for path in (tmp_path / "pages").rglob("*.md")}
    assert gathered == {*build.listed(build.whole_navigation())}
    assert gathered >= build.pages_that_must_be_listed()
    assert "::: rl.types.Datum\n" in (tmp_path / "pages/api/rl.types.md").read_text()
    assert "::: trainer.engine_table.EngineEntry\n" in (tmp_path / "pages/api/plug-ins.md").read_text()
    assert "| [`Datum`][rl.types.Datum] |" in (tmp_path / "pages/docs/script_api.md").read_text()


def test_a_page_that_no_group_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {title: page for title, page in build.NAVIGATION.items() if title != "Begin"}
    monkeypatch.setattr(build, "NAVIGATION", without)
    monkeypatch.setattr(build.listed, "__defaults__", (without,))
    with pytest.raises(ValueError, match="is in no group of the navigation: add it to NAVIGATION"):
        build.whole_navigation()


def test_a_new_plugin_is_listed_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {title: page for title, page in build.NAVIGATION.items() if title != "Machines"}
    monkeypatch.setattr(build, "NAVIGATION", {**without, "Hosts": "plugins/hosts/README.md"})
    monkeypatch.setattr(
        build, "pages_that_must_be_listed", lambda: {"plugins/hosts/README.md", "plugins/megatron/README.md"}
    )
    monkeypatch.setattr(build.listed, "__defaults__", (build.NAVIGATION,))
    assert build.whole_navigation()["More plug-ins"] == {"megatron": "plugins/megatron/README.md"}


def test_links_between_pages_stay_and_others_lead_to_the_repository() -> None:
    text = "[a](../rl/types.py) [b](lora.md#x) [c](../plugins/agents) [d](https://e.org) [e](#here)"
    assert build.for_the_site("docs/models.md", text, "https://host/repo", {"docs/lora.md"}) == (
        "[a](https://host/repo/blob/main/rl/types.py) [b](lora.md#x) [c](https://host/repo/tree/main/plugins/agents)"
        " [d](https://e.org) [e](#here)"
    )
    with pytest.raises(ValueError, match=r"docs/models\.md links to nothing\.md"):
        build.for_the_site("docs/models.md", "[a](nothing.md)", "https://host/repo", set())


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Writes nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the site is served that `make docs` makes."""
    made = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(build.SITE / "html")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_opens_every_page(address: str, tab: Tab, width: int) -> None:
    pages = sorted(
        {*(build.SITE / "html").rglob("*.html")} - {build.SITE / "html/404.html"}
    )  # it names the host's folder
    assert len(pages) > len(build.pages_that_must_be_listed())
    for page in pages:
        name = page.relative_to(build.SITE / "html").as_posix()
        tab.open(f"{address}/{name}", width)
        assert tab.errors() == [], name
        assert [url for url in tab.requests() if not url.startswith((address, "data:", "blob:"))] == [], name
        assert tab.value("document.documentElement.scrollWidth") <= width, name


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_the_search_needs_no_network(address: str, tab: Tab) -> None:
    tab.open(address, 1280)
    tab.value("document.querySelector('.md-search__button').click()")
    roots = "[...document.querySelectorAll('*')].map((each) => each.shadowRoot)"
    dialog = f"{roots}.find((each) => each?.querySelector('dialog'))"
    shown = f"{dialog}?.querySelector('[role=listbox]')?.textContent ?? ''"
    deadline = time.monotonic() + LIMIT_S
    while "max_staleness" not in (results := tab.value(shown)):
        tab.value(f"{dialog}?.querySelector('input').focus()")
        if not tab.value(f"{dialog}?.querySelector('input').value ?? 'closed'"):
            tab.call("Input.insertText", text="max_staleness")
        assert time.monotonic() < deadline, results
        time.sleep(0.1)
    assert [url for url in tab.requests() if not url.startswith((address, "data:", "blob:"))] == []
