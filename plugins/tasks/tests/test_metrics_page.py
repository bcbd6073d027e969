"""The page of this plug-in names every metric that its environments report, and no other."""

from tests.docs.pages import ROOT, names_in_tables
from tests.docs.test_metrics_page import metrics_of_environments

PLUGIN = ROOT / "plugins" / "tasks"


def test_every_environment_s_metric_is_explained() -> None:
    assert metrics_of_environments(PLUGIN / "ownloop_tasks") == names_in_tables(PLUGIN / "README.md", "Metrics")
