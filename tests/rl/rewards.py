"""Reward functions such as a user writes, for tests of their callers."""


def exact(prompt: str, completion: str, answer: str) -> float:
    """1 for exactly the answer."""
    assert prompt
    return float(completion.strip() == answer)


async def length(prompt: str, completion: str) -> float:
    """The length of the answer."""
    assert prompt
    return float(len(completion))


NOT_A_FUNCTION = 3
