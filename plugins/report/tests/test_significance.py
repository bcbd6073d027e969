import pytest

from ownloop_report.comparison import t_quantile, welch


@pytest.mark.parametrize(
    ("better", "worse", "p_value", "low", "high"),
    [  # as scipy.stats.ttest_ind(equal_var=False) has them
        ([0.61, 0.64, 0.58], [0.50, 0.55, 0.47], 0.027053594486130334, 0.01991417867618664, 0.18675248799047992),
        ([0.9, 0.91], [0.2, 0.8, 0.5, 0.4], 0.04111682252673494, 0.03259241061788598, 0.8274075893821141),
        ([0.5, 0.6, 0.7], [0.55, 0.6, 0.66], 0.9627393436701959, -0.2089213285578415, 0.2022546618911747),
    ],
)
def test_welch_is_scipys(better: list[float], worse: list[float], p_value: float, low: float, high: float) -> None:
    found = welch(better, worse)
    assert found.p_value == pytest.approx(p_value, rel=1e-9)
    assert (found.interval.low, found.interval.high) == pytest.approx((low, high), rel=1e-9)
    turned = welch(worse, better)
    assert turned.p_value == pytest.approx(p_value, rel=1e-9)
    assert turned.interval.mean == -found.interval.mean


def test_quantiles_are_those_of_the_tables() -> None:
    assert [round(t_quantile(0.975, n), 3) for n in (1, 2, 4, 30)] == [12.706, 4.303, 2.776, 2.042]


def test_runs_that_do_not_vary() -> None:
    assert welch([1, 1], [1, 1]).p_value == 1
    sure = welch([1, 1], [0.5, 0.5])
    assert (sure.p_value, sure.interval.low, sure.interval.high) == (0, 0.5, 0.5)


def test_one_seed_is_not_tested() -> None:
    with pytest.raises(ValueError, match="two runs on each side; there are 1 and 3"):
        welch([1], [0.5, 0.6, 0.7])
