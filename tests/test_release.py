"""What `make release` refuses, and what it writes before it builds."""

import datetime
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from requirements import release

ROOT = Path(__file__).parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with what describes the core and its plug-ins, and a changelog with a version to come."""
    root = tmp_path / "checkout"
    for path in (ROOT / "pyproject.toml", ROOT / "CITATION.cff", *ROOT.glob("plugins/*/pyproject.toml")):
        target = root / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (root / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 1.2.3, unreleased\n\n* News.\n\n## 0.1.0, 2026-01-01\n\nOld.\n"
    )
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "--quiet"), ("add", "."), (*identity, "commit", "--quiet", "--message", "one")):
        subprocess.run(["git", *words], cwd=root, check=True)
    return root


def test_a_clean_checkout_with_news_may_be_released(checkout: Path) -> None:
    release.check(checkout, "1.2.3")


@pytest.mark.parametrize(("version", "said"), [("1.2", "like 0.2.0"), ("", "like 0.2.0"), ("2.0.0", "CHANGELOG")])
def test_a_version_that_is_none_or_has_no_news_is_refused(checkout: Path, version: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        release.check(checkout, version)


def test_changes_and_a_tag_that_exists_are_refused(checkout: Path) -> None:
    (checkout / "new.txt").write_text("")
    with pytest.raises(ValueError, match=r"new\.txt"):
        release.check(checkout, "1.2.3")
    (checkout / "new.txt").unlink()
    subprocess.run(["git", "tag", "v1.2.3"], cwd=checkout, check=True)
    with pytest.raises(ValueError, match=r"the tag v1\.2\.3 exists"):
        release.check(checkout, "1.2.3")


def test_every_version_and_every_pin_is_the_new_one(checkout: Path) -> None:
    release.write_version(checkout, "1.2.3", datetime.date(2027, 3, 4))
    projects = [tomllib.loads(path.read_text())["project"] for path in checkout.rglob("pyproject.toml")]
    assert len(projects) == 1 + len([*ROOT.glob("plugins/*/pyproject.toml")])
    for project in projects:
        groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
        pins = [pin for group in groups for pin in group if pin.startswith("ownloop")]
        assert project["version"] == "1.2.3"
        assert all(pin.endswith("==1.2.3") for pin in pins), pins
        others = [pin for group in groups for pin in group if not pin.startswith("ownloop")]
        path = ROOT / ("" if project["name"] == "ownloop" else f"plugins/{project['name'][8:]}") / "pyproject.toml"
        assert all(f'"{pin}"' in path.read_text() for pin in others), "only our own pins change"
    citation = (checkout / "CITATION.cff").read_text()
    assert re.findall(r"^(?:version|date-released): .*", citation, re.MULTILINE) == [
        "version: 1.2.3",
        "date-released: 2027-03-04",
    ]
    assert "## 1.2.3, 2027-03-04\n\n* News." in (checkout / "CHANGELOG.md").read_text()
