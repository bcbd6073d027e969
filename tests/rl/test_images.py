"""Images among tokens: they keep their places when tokens are joined, pickled, packed and made into datums."""

import pickle

import numpy as np
import pytest

from rl.data.batching import validate_batch
from rl.data.packing import pack_row
from rl.data.sources import text_to_datum
from rl.images import PlacedImage, TokensWithImages, images_of, join_tokens
from rl.rollouts.episodes import rollout_to_datum
from rl.types import Completion, Datum, Rollout, Turn


def image(start: int, num_tokens: int = 2, data: bytes = b"file") -> PlacedImage:
    return PlacedImage(start=start, num_tokens=num_tokens, data=data, inputs={"pixels": np.arange(6.0)})


def test_joined_tokens_move_their_images() -> None:
    first, second = TokensWithImages((1, 5, 5), [image(1)]), TokensWithImages((5, 5, 2), [image(0, data=b"other")])
    joined = join_tokens(first, (7, 8), second)
    assert joined == (1, 5, 5, 7, 8, 5, 5, 2)
    assert [(each.start, each.data) for each in images_of(joined)] == [(1, b"file"), (5, b"other")]
    assert type(join_tokens((1, 2), [3])) is tuple


def test_pickled_tokens_keep_their_images() -> None:
    tokens = TokensWithImages((1, 5, 5), [image(1)])
    again = pickle.loads(pickle.dumps(tokens))
    assert again == tokens
    assert images_of(again) == images_of(tokens)
    assert np.array_equal(images_of(again)[0].inputs["pixels"], np.arange(6.0))


def rollout() -> Rollout:
    """Two turns; the second message has an image, too."""

    def completion(*tokens: int) -> Completion:
        zeros = (0,) * len(tokens)
        return Completion(tokens=tokens, logprobs=zeros, versions=zeros, text="", finish_reason="stop")

    first = Turn(prompt_tokens=TokensWithImages((1, 5, 5), [image(1)]), completion=completion(7, 8))
    second = Turn(prompt_tokens=TokensWithImages((5, 5, 9), [image(0)]), completion=completion(6))
    return Rollout(turns=(first, second), reward=1.0)


def test_datums_have_the_images_of_all_turns() -> None:
    datum = rollout_to_datum(rollout(), 1.0)
    assert datum.tokens.tolist() == [1, 5, 5, 7, 8, 5, 5, 9]
    assert [each.start for each in datum.images] == [1, 5]
    assert text_to_datum(TokensWithImages((1, 5, 5), [image(1)]), (3,), "all").images[0].start == 1


def test_packed_rows_place_the_images_of_every_datum() -> None:
    datum = rollout_to_datum(rollout(), 1.0)
    row = pack_row([datum, datum], share_prefixes=False)
    assert [each.start for each in row.images] == [1, 5, 9, 13]
    assert all(row.tokens[each.start] == 5 for each in row.images)


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        ((8,), r"batch\[0\].images\[0\] takes 2 tokens from 8 on; images must follow each other within the datum's 9"),
        ((3, 4), r"images\[1\] takes 2 tokens from 4 on"),
    ],
)
def test_images_in_wrong_places_are_refused(starts: tuple[int, ...], said: str) -> None:
    tokens = np.arange(9)
    datum = Datum(tokens=tokens, loss_inputs={"target_tokens": tokens}, images=tuple(map(image, starts)))
    with pytest.raises(ValueError, match=said):
        validate_batch([datum], vocab_size=9, max_seq_len=16, reads_images=True)


def test_images_for_a_text_model_are_refused() -> None:
    datum = rollout_to_datum(rollout(), 1.0)
    with pytest.raises(ValueError, match=r"batch\[0\].images holds 2; the model, or its engine, takes text only"):
        validate_batch([datum], vocab_size=16, max_seq_len=16)
    validate_batch([datum], vocab_size=16, max_seq_len=16, reads_images=True)
