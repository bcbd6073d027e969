"""Gathers the pages of the core and of the plug-ins in `.site`, and has Zensical make a site of them: `make docs`.

Pages keep their places in the repository, so a link between two of them is right here and there. A link to a file that
is no page leads to the repository. Raises ValueError for a page that is in no group of the navigation, and for a group
that names a page that does not exist.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from posixpath import normpath

ROOT = Path(__file__).parents[2]
SITE = ROOT / ".site"
Navigation = Mapping[str, "str | Navigation"]
NAVIGATION: Navigation = {
    "What it is": "README.md",
    "Begin": {
        "Install": "docs/install.md",
        "Your first run": "docs/first_run.md",
        "Your first loop": "docs/first_loop.md",
        "Your first environment": "docs/first_environment.md",
        "Where to begin": "docs/where_to_begin.md",
        "Recipes": "docs/recipes.md",
    },
    "Coming from": {
        "TRL": "docs/from_trl.md",
        "verl": "docs/from_verl.md",
        "prime-rl": "docs/from_prime_rl.md",
        "Tinker": "docs/from_tinker.md",
        "OpenRLHF": "docs/from_openrlhf.md",
    },
    "Train": {
        "Tasks": "plugins/tasks/README.md",
        "Models": "docs/models.md",
        "More families of models": "plugins/families/README.md",
        "Models that read images": "plugins/vision/README.md",
        "LoRA": "docs/lora.md",
        "Losses": "docs/losses.md",
        "Published losses and distillation": "plugins/shelf/README.md",
        "Options of published losses": "plugins/shelf/docs/losses.md",
        "Agents": "plugins/agents/README.md",
        "Tinker scripts": "plugins/server/README.md",
        "Check a Tinker server": "plugins/referee/README.md",
    },
    "Watch a run": {
        "By symptom": "docs/symptoms.md",
        "The folder of a run": "docs/run_folder.md",
        "Reports and loggers": "plugins/report/README.md",
        "Runs for an assistant": "plugins/mcp/README.md",
        "Resume and recover": "docs/resume.md",
        "Check a model, a run, a task": "plugins/doctors/README.md",
        "Grade rollouts again": "plugins/instruments/README.md",
        "Safety": "docs/safety.md",
        "The box for a model's code": "plugins/sandbox/README.md",
    },
    "Machines": {
        "Several hosts": "plugins/hosts/README.md",
        "SSH": "plugins/hosts/docs/ssh.md",
        "Slurm": "plugins/hosts/docs/slurm.md",
        "Kubernetes": "plugins/hosts/docs/kubernetes.md",
        "Many GPUs": "plugins/hosts/docs/scaling.md",
        "What fits which machine": "plugins/plan/docs/what_fits.md",
        "Models, engines, layouts": "plugins/plan/docs/layouts.md",
        "GPU memory": "docs/memory.md",
        "Slow steps": "docs/slow_step.md",
        "Plan a run": "plugins/plan/README.md",
        "Megatron": "plugins/megatron/README.md",
    },
    "Reference": {
        "Metrics": "docs/metrics.md",
        "Script API": "docs/script_api.md",
        "Interface of plug-ins": "docs/extend.md",
        "Add a loss": "docs/add_a_loss.md",
        "Add an engine": "docs/add_an_engine.md",
        "Architecture": "docs/architecture.md",
        "What the recipes learned": "benchmarks/LEARNING.md",
        "Speed on CPUs": "benchmarks/RESULTS.md",
        "Results on GPUs": "benchmarks/RESULTS-gpu.md",
        "Changes": "CHANGELOG.md",
        "Contributing": "CONTRIBUTING.md",
        "Security": ".github/SECURITY.md",
        "Conduct": ".github/CODE_OF_CONDUCT.md",
    },
}
"""Title -> page, or a group of pages, in the order in which a person needs them."""
_SCRIPT_API = "docs/script_api.md"
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?\)")
_OUTSIDE = ("https://", "http://", "mailto:")


def listed(navigation: Navigation = NAVIGATION) -> Iterator[str]:
    """The pages of a navigation, in order."""
    for value in navigation.values():
        yield from (value,) if isinstance(value, str) else listed(value)


def pages_that_must_be_listed() -> set[str]:
    """Those of docs/ and of the plug-ins, as paths from the root."""
    patterns = ("docs/*.md", "plugins/*/README.md", "plugins/*/docs/*.md")
    return {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)}


def whole_navigation() -> Navigation:
    """`NAVIGATION` with pages of the API, and with plug-ins that it does not name in a group of their own."""
    missing, names = pages_that_must_be_listed() - {*listed()}, {*listed()}
    plugins = {path.split("/")[1]: path for path in sorted(missing) if path.endswith("/README.md")}
    if lost := sorted(missing - {*plugins.values()}):
        raise ValueError(f"{lost[0]} is in no group of the navigation: add it to NAVIGATION in docs/site/build.py")
    if absent := sorted(name for name in names if not (ROOT / name).is_file()):
        raise ValueError(f"{absent[0]}, which NAVIGATION in docs/site/build.py names, does not exist")
    return {
        **NAVIGATION,
        **({"More plug-ins": plugins} if plugins else {}),
        "API": {name: f"api/{name}.md" for name in api_pages()},
    }


def api_pages() -> dict[str, str]:
    """Name -> text of each page that is made from docstrings: of every module of scripts, and of plug-ins."""
    text = (ROOT / _SCRIPT_API).read_text(encoding="utf-8")
    pages: dict[str, str] = {}
    for section in text.split("\n## ")[1:]:
        module = section.partition("\n")[0].strip("`")
        names = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
        pages[module] = f"# {module}\n\n" + "".join(f"::: {module}.{name}\n\n" for name in names)
    kinds = re.findall(r"^## (ownloop\.\w+)\n\n`([\w.]+)`:", (ROOT / "docs/extend.md").read_text(), re.MULTILINE)
    return pages | {"plug-ins": "# The interface of plug-ins\n\n" + "".join(f"::: {name}\n\n" for _, name in kinds)}


def for_the_site(page: str, text: str, repository: str, pages: set[str]) -> str:
    """A page whose links to what is no page lead to the repository. Raises ValueError for a missing file."""

    def link(match: re.Match[str]) -> str:
        before, target, anchor = match[1], match[2], match[3] or ""
        path = normpath(Path(page).parent / target)
        if target.startswith(_OUTSIDE) or path in pages or path.endswith((".png", ".svg")):
            return match[0]
        if not (ROOT / path).exists():
            raise ValueError(f"{page} links to {target}, which does not exist")
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{before}{repository}/{kind}/main/{path}{anchor})"

    return _LINK.sub(link, text)


def gather(site: Path = SITE) -> None:
    """Writes all pages, their pictures and the settings to a folder."""
    settings = (ROOT / "docs/site/zensical.toml").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Homepage"]
    navigation = whole_navigation()
    shutil.rmtree(site / "pages", ignore_errors=True)
    api = {f"api/{name}.md": text for name, text in api_pages().items()}
    pages = {*listed(navigation)}
    for page in pages:
        text = api.get(page) or for_the_site(page, (ROOT / page).read_text(encoding="utf-8"), repository, pages)
        if page == _SCRIPT_API:
            text = _with_links_to_docstrings(text)
        target = site / "pages" / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
            copy = target.parent / picture
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy((ROOT / page).parent / picture, copy)
    shutil.copy(ROOT / "docs/site/wide.css", site / "pages")
    settings = settings.replace("nav = []", f"nav = {_toml(navigation)}").replace("REPOSITORY", repository)
    (site / "zensical.toml").write_text(settings, encoding="utf-8")


def _with_links_to_docstrings(text: str) -> str:
    """The table of names, each of which leads to its docstring."""
    module, lines = "", list[str]()
    for line in text.split("\n"):
        module = line.strip("# `") if line.startswith("## ") else module
        lines.append(re.sub(r"^\| `(\w+)` \|", rf"| [`\1`][{module}.\1] |", line))
    return "\n".join(lines)


def _toml(value: "str | Navigation") -> str:
    if isinstance(value, str):
        return json.dumps(value)
    return f"[{', '.join(f'{{ {json.dumps(title)} = {_toml(each)} }}' for title, each in value.items())}]"


if __name__ == "__main__":
    gather()
    sys.exit(subprocess.call([Path(sys.executable).with_name("zensical"), "build", "--clean", "--strict"], cwd=SITE))
