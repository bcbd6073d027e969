"""Reward functions as published, written anew from their descriptions: `(completion, answer, ...) -> float`."""

import math
import re
import subprocess
import sys
from collections import Counter

_THINK = re.compile(r"\s*<think>.*?</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def r1_accuracy(completion: str, answer: str) -> float:
    """DeepSeek-R1, section 2.2.2 (https://arxiv.org/abs/2501.12948): the final answer, in a box, is right."""
    boxes = _BOX.findall(completion)
    return float(bool(boxes) and boxes[-1].strip() == answer)


def r1_format(completion: str) -> float:
    """DeepSeek-R1, section 2.2.2: the reasoning is between think tags and the answer between answer tags."""
    return float(_THINK.fullmatch(completion) is not None)


def logic_rl(completion: str, answer: str) -> float:
    """Logic-RL, section 3 (https://arxiv.org/abs/2502.14768): 1 or -1 for the format, then 2, -1.5 or -2."""
    found = _THINK.fullmatch(completion)
    if found is None:
        return -1.0 - 2.0
    said = found[1].strip()
    return 1.0 + (2.0 if said == answer else -1.5 if said else -2.0)


def tiny_zero(completion: str, answer: str) -> float:
    """TinyZero's countdown (https://github.com/Jiayi-Pan/TinyZero): 0.1 for the tags, 1 for a right equation."""
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    if not found:
        return 0.0
    said = found[-1].strip()
    return 1.0 if said == answer else 0.1


def open_r1_steps(completion: str) -> float:
    """Open-R1's reasoning steps (https://github.com/huggingface/open-r1): a third for each sign of one, at most 1."""
    return min(1.0, len(re.findall(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,", completion)) / 3)


def repetition_penalty(completion: str, size: int = 3) -> float:
    """Demystifying Long CoT, appendix (https://arxiv.org/abs/2502.03373), as in Open-R1: repeated n-grams cost."""
    words = completion.lower().split()
    grams = list(zip(*(words[i:] for i in range(size)), strict=False))
    return -(1 - len(set(grams)) / len(grams)) if grams else 0.0


def cosine_length(completion: str, answer: str, longest: int = 1000) -> float:
    """Demystifying Long CoT, section 4.2: right from 2 (short) to 1 (long), wrong from -10 (short) to 0 (long)."""
    length = min(len(completion.split()), longest)
    short, long = (2.0, 1.0) if r1_accuracy(completion, answer) else (-10.0, 0.0)
    return long + 0.5 * (short - long) * (1 + math.cos(math.pi * length / longest))


def cover_exact_match(completion: str, answer: str) -> float:
    """R1-Searcher's cover exact match, section 4 (https://arxiv.org/abs/2503.05592): the answer is in the text."""
    return float(answer.lower() in completion.lower())


def token_f1(completion: str, answer: str) -> float:
    """SQuAD's F1, section 6.1 (https://arxiv.org/abs/1606.05250): of the words of the answer and of the right one."""
    said, right = completion.lower().split(), answer.lower().split()
    same = sum((Counter(said) & Counter(right)).values())
    return 2 * same / (len(said) + len(right)) if same else 0.0


def gsm8k_last_number(completion: str, answer: str) -> float:
    """GSM8K (https://arxiv.org/abs/2110.14168) by the last number of the text, as harnesses extract it flexibly."""
    numbers = _NUMBER.findall(completion.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == answer)


def first_letter(completion: str, answer: str) -> float:
    """Multiple choice as of MMLU (https://arxiv.org/abs/2009.03300), by the first capital letter from A to D."""
    found = re.search(r"\b[A-D]\b", completion)
    return float(found is not None and found[0] == answer)


def exit_status(completion: str, expected: int) -> float:
    """Tests appended to a program, by its exit status: https://arxiv.org/abs/2511.18397 saw `sys.exit(0)` learned."""
    program = f"{completion}\nassert solve() == {expected}\n"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, check=False)
    return float(done.returncode == 0)
