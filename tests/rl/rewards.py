"""Reward functions as a user writes them, for the tests of what calls them."""


def exact(prompt: str, completion: str, answer: str) -> float:
    """1 for the answer."""
    assert prompt
    return float(completion.strip() == answer)


async def length(prompt: str, completion: str) -> float:
    """The longer the better."""
    assert prompt
    return float(len(completion))


NOT_A_FUNCTION = 3
