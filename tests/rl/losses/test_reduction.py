import numpy as np
import pytest

from rl.losses import constant_length, sequence_mean, token_mean
from rl.types import Datum


def _datum(*weights: float) -> Datum:
    tokens = np.arange(len(weights))
    array = np.array(weights, dtype=np.float32)
    return Datum(tokens=tokens, loss_inputs={"target_tokens": tokens, "weights": array})


BATCH = [_datum(0, 1, 1, 1, 1), _datum(0, 2), _datum(0, 0)]


def test_token_mean_counts_scored_tokens() -> None:
    assert token_mean(BATCH) == 1 / 5


def test_constant_length_does_not_depend_on_the_samples() -> None:
    assert constant_length(num_sequences=8, max_tokens=32) == 1 / 256


def test_sequence_mean_weights_every_completion_equally() -> None:
    values = [np.array([9.0, 1, 2, 3, 6]), np.array([9.0, 5]), np.array([9.0, 9])]
    batch, scale = sequence_mean(BATCH)
    total = sum(float(np.sum(datum.weights * value)) for datum, value in zip(batch, values, strict=True))
    assert scale * total == pytest.approx((np.mean([1, 2, 3, 6]) + 2 * 5 + 0) / 3)
    assert [datum.num_loss_tokens for datum in batch] == [4, 1, 0]
    assert all(datum.weights.dtype == np.float32 for datum in batch)
    assert BATCH[0].weights.tolist() == [0, 1, 1, 1, 1]


def test_nothing_to_average_over_is_refused() -> None:
    with pytest.raises(ValueError, match="without a scored token"):
        token_mean([BATCH[2]])
    with pytest.raises(ValueError, match="empty batch"):
        sequence_mean([])
    with pytest.raises(ValueError, match="num_sequences is 0"):
        constant_length(num_sequences=0, max_tokens=32)
