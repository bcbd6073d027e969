"""What the history drafts, against a search in plain Python; and that it forgets."""

import sys
from collections.abc import Sequence

import numpy as np
import pytest

from ownloop_speculation.history import Calibration, Draft, History
from ownloop_speculation.search import Text, vote

PROMPT = [1, 2, 3]


def completion(
    history: History, name: str, tokens: Sequence[int], *, version: int = 0, prompt: Sequence[int] = ()
) -> None:
    """A completion from its beginning to its end."""
    history.begin(name, prompt or PROMPT)
    history.extend(name, tokens, version)
    history.end(name)


def searched(texts: Sequence[Sequence[int]], context: Sequence[int], most: int) -> list[int]:
    """The draft, found by looking at every place of every text, the newest text last."""
    places: list[tuple[int, Sequence[int]]] = []
    for text in texts:
        for place in range(1, len(text)):
            length = 0
            while length < min(16, len(context), place) and text[place - 1 - length] == context[-1 - length]:
                length += 1
            if length and text[place] >= 0:
                places.append((length, text[place:]))
    if any(length > 1 for length, _ in places):
        places = [place for place in places if place[0] > 1]
    places = sorted(places, key=lambda place: place[0])[-16:]
    draft: list[int] = []
    while places and len(draft) < most:
        votes = dict[int, float]()
        for length, text in reversed(places):
            token = text[len(draft)] if len(draft) < len(text) else -1
            votes[token] = votes.get(token, 0.0) + 0.6 ** (places[-1][0] - length)
        guess = max(votes, key=votes.__getitem__)
        if guess < 0:
            break
        places = [(length, text) for length, text in places if text[len(draft) : len(draft) + 1] == [guess]]
        draft.append(guess)
    return draft


def test_a_draft_follows_the_longest_context_that_was_seen() -> None:
    rng, history = np.random.default_rng(0), History(max_tokens=1 << 20)
    texts: list[list[int]] = []
    num_found = 0
    for number in range(60):
        tokens = rng.integers(4, 7, rng.integers(2, 30)).tolist()
        history.begin(str(number), PROMPT)
        history.extend(str(number), tokens, 0)
        draft = history.draft(str(number), 8, 0.0)
        expected = searched([*texts, [-2, *PROMPT], [-1, *tokens]], [-1, *tokens], 8)
        assert draft.tokens == expected
        assert draft.chances == sorted(draft.chances, reverse=True)
        num_found += len(expected)
        history.end(str(number))
        texts.append([-1, *tokens])
    assert num_found > 200


def test_a_sibling_that_is_ahead_is_followed_to_where_it_is() -> None:
    history = History(max_tokens=100)
    for name in "ab":
        history.begin(name, PROMPT)
    history.extend("a", [5, 6, 7, 8], 0)
    history.extend("b", [5, 6], 0)
    assert history.draft("b", 8, 0.0).tokens == [7, 8]
    history.extend("a", [9], 0)
    assert history.draft("b", 8, 0.0).tokens == [7, 8, 9]
    assert history.draft("b", 2, 0.0).tokens == [7, 8]
    history.begin("c", [1, 2, 4])
    history.extend("c", [5, 6], 0)
    assert history.draft("c", 8, 0.0).tokens == [], "another prompt, whose completion runs"
    history.end("a")
    assert history.draft("c", 8, 0.0).tokens == [7, 8, 9], "it has ended"


def test_another_prompts_completions_are_followed_where_the_own_have_a_short_context() -> None:
    history = History(max_tokens=1000)
    completion(history, "own", [4, 5, 6, 7, 20])
    completion(history, "other", [3, 4, 5, 6, 7, 21], prompt=[9])
    for before, expected in (([30, 7], 20), ([3, 4, 5, 6, 7], 20), ([30, 3, 4, 5], 6), ([9, 3], 4)):
        history.begin(f"{before}", PROMPT)
        history.extend(f"{before}", before, 0)
        assert history.draft(f"{before}", 1, 0.0).tokens == [expected]


def test_places_of_shorter_contexts_count_less() -> None:
    places = Text([(np.array([1, 5, 7, 2, 5, 8, 3, 2, 5, 7], np.int32), np.full(10, 255, np.uint8))]).find([1, 2, 5], 1)
    assert [(length, tokens) for length, tokens, _ in places] == [(2, [8]), (2, [7])]
    text = Text([(np.array([5, 7, 2, 5, 8], np.int32), np.full(5, 255, np.uint8))])
    assert [place[0] for place in text.find([3, 5], 1)] == [1, 1]
    placed = [(1, [7], [51]), (3, [8], [255]), (4, [7], [204])]
    total = 0.6**3 + 0.6 + 1
    chance = (0.6**3 * 0.2 + 0.8) / total  # 8 was certain, so 7 had no chance there
    assert vote(placed, 0) == pytest.approx((7, chance, (0.3 + 0.6**3 + 1) / (0.6 + total), total))
    assert vote([(4, [8], [255]), *placed], 0)[0] == 8


def test_own_drafts_come_from_prompt_and_completion_alone() -> None:
    history = History(max_tokens=100, own_only=True)
    completion(history, "a", [4, 5, 6, 7])
    history.begin("b", [9, 8, 7])
    history.extend("b", [4, 9, 8], 0)
    assert history.draft("b", 8, 0.0).tokens == [7]
    assert history.num_kept_tokens == 0


def test_a_draft_ends_where_its_chance_is_too_small() -> None:
    history = History(max_tokens=1000)
    for number, last in enumerate((7, 7, 7, 8)):
        completion(history, str(number), [4, 5, 6, last])
    history.begin("x", PROMPT)
    history.extend("x", [4, 5], 0)
    full: Draft = history.draft("x", 8, 0.0)
    assert full.tokens == [6, 7]
    assert history.draft("x", 8, full.chances[0]).tokens == [6]


def test_tokens_that_were_sampled_with_larger_chances_are_drafted() -> None:
    def chance(logprobs: Sequence[float], tokens: Sequence[int] = (6, 6, 8)) -> tuple[int, float]:
        history = History(max_tokens=1000)
        for number, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            history.begin(str(number), PROMPT)
            history.extend(str(number), [4, 5, token], 0, [-0.1, -0.1, logprob])
            history.end(str(number))
        history.begin("x", PROMPT)
        history.extend("x", [4, 5], 0)
        found = history.draft("x", 1, 0.0)
        return found.tokens[0], found.chances[0]

    token, usual = chance([-0.7, -0.7, -0.7])
    assert token == 6
    assert chance([-0.1, -0.1, -0.7])[1] > usual > chance([-0.7, -0.7, -0.2])[1], "another token took the chance"
    assert chance([-3.0, -3.0, -0.1])[0] == 8
    assert chance([-0.1, -0.1, -0.1], (6, 6, 6))[1] > chance([-0.1, -0.1], (6, 6))[1], "it was seen more often"


def test_chances_become_what_was_observed() -> None:
    for rate in (0.2, 0.9):
        calibration, rng = Calibration(), np.random.default_rng(0)
        features = calibration.features(5, 3, 0.5, 0.6, foreign=False)
        for hit in rng.random(4000) < rate:
            calibration.observe(features, hit=bool(hit))
        assert calibration.chance(features) == pytest.approx(rate, abs=0.05)
        assert calibration.chance(calibration.features(5, 3, 0.9, 0.9, foreign=False)) > calibration.chance(features)


def test_the_newest_three_versions_of_a_prompt_are_kept() -> None:
    history = History(max_tokens=100_000)
    for version in (0, 1, 1, 4, 9):
        completion(history, f"{version}", [10 + version, 11, 12], version=version)
    assert history.num_kept_tokens == 4 * (2 + 1 + 1)
    completion(history, "long", range(100, 10_000), prompt=[9])  # so that the others are not recent
    history.begin("x", PROMPT)
    history.extend("x", [10], 9)
    assert history.draft("x", 8, 0.0).tokens == []
    history.extend("x", [11], 9)
    history.end("x")
    history.begin("y", PROMPT)
    history.extend("y", [14], 9)
    assert history.draft("y", 8, 0.0).tokens == [11, 12]


def test_memory_is_bounded_and_eight_bytes_a_token() -> None:
    history, rng, tokens = History(max_tokens=50_000), np.random.default_rng(0), list[int]()
    for number in range(100):
        for sample in range(8):
            tokens = rng.integers(0, 50_000, 100).tolist()
            completion(history, f"{number}-{sample}", tokens, prompt=[number, *range(500)])
            assert history.num_kept_tokens <= 50_000
    at_rest = history._at_rest  # pyright: ignore[reportPrivateUsage]
    num_bytes = sys.getsizeof(at_rest) + sum(
        sum(map(sys.getsizeof, (key, kept, *kept))) for key, kept in at_rest.items()
    )
    assert num_bytes <= 8 * 100 * 8 * len(at_rest)
    history.begin("x", [99, *range(500)])
    history.extend("x", tokens[:4], 0)
    assert history.draft("x", 8, 0.0).tokens == tokens[4:12], "the newest prompts are kept"
    history.begin("y", [0, *range(500)])
    assert history.num_kept_tokens == len(at_rest) * 808 + 808
