"""What tests of images share: random pictures, datums with images, and transformers one document at a time."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from ownloop_vision.tiny_vl import tiny_gemma3, tiny_qwen2_5_vl, tiny_qwen3_vl
from rl.images import images_of
from rl.rollouts.rendering import Renderer
from rl.types import Datum

WITH_IMAGES = {
    "Qwen3VLForConditionalGeneration": tiny_qwen3_vl,
    "Qwen2_5_VLForConditionalGeneration": tiny_qwen2_5_vl,
    "Gemma3ForConditionalGeneration": tiny_gemma3,
}
"""Architectures that read images; plugins/vision/tests/test_image_rows.py has them."""
UNSEEN = tuple(f"vision_tower.vision_model.encoder.layers.{layer}.self_attn.k_proj.bias" for layer in range(2))
"""Adding the same to all keys changes no attention, so that the gradients of these in Gemma 3 are rounding."""
WORDS = ("what", "colour", "red", "blue", "square")


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors of gradients."""
    assert found.keys() == expected.keys()
    scales = {name: expected[name.replace("k_proj", "q_proj") if name.endswith(UNSEEN) else name] for name in expected}
    return {name: float((found[name] - expected[name]).norm() / scales[name].norm()) for name in expected}


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def photo(height: int, width: int, orientation: int) -> bytes:
    """A JPEG that is stored with these sides, and EXIF that says how to turn it (1 to 8; 1 stays as it is)."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    picture(height, width).save(file, "JPEG", exif=exif)
    return file.getvalue()


def parts(*contents: str | tuple[int, int]) -> list[dict[str, Any]]:
    """A chat of one message: texts, and pictures by their height and width, each another one."""
    return [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": f" {content} "}
                if isinstance(content, str)
                else {"type": "image", "image": picture(*content, seed=number)}
                for number, content in enumerate(contents)
            ],
        }
    ]


def image_datum(prompt: Sequence[int], answer: Sequence[int], seed: int = 0) -> Datum:
    """A prompt, with images or without, and an answer; with random inputs for any policy loss."""
    rng = np.random.default_rng(seed)
    sequence = np.array([*prompt, *answer])
    length = len(sequence) - 1
    inputs = {
        "target_tokens": sequence[1:],
        "weights": np.where(np.arange(length) < 2, 0, rng.uniform(0.5, 1.5, length)).astype(np.float32),
        "logprobs": rng.normal(-3.0, 0.5, length).astype(np.float32),
        "advantages": rng.normal(size=length).astype(np.float32),
    }
    return Datum(tokens=sequence[:-1], loss_inputs=inputs, images=images_of(prompt))


def image_batch(model: Path) -> list[Datum]:
    """Documents with no, one and two images of different shapes."""
    renderer = Renderer(model)
    prompts = [
        ("what", (64, 96), "colour"),
        ("what what red",),
        ((32, 32), "square", (96, 64), "red"),
        ((128, 64),),
        ("blue", (64, 64), (64, 64)),
    ]
    return [
        image_datum(renderer.encode(parts(*prompt)), [8, 9, 10, 3][: 1 + number % 4], number)
        for number, prompt in enumerate(prompts)
    ]


class ImageReference:
    """A transformers model in float32, which computes one datum at a time."""

    def __init__(self, path: Path) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        gemma = self.model.config.model_type.startswith("gemma")
        self._kinds = "token_type_ids" if gemma else "mm_token_type_ids"

    def logprobs(self, datum: Datum) -> Tensor:
        """[T] of the target tokens."""
        tokens = torch.from_numpy(datum.tokens)[None]
        kinds = torch.zeros_like(tokens)
        images: dict[str, Tensor] = {}
        if datum.images:
            for image in datum.images:
                kinds[0, image.start : image.start + image.num_tokens] = 1
            inputs = [image.inputs for image in datum.images]
            joined = np.concatenate if "image_grid_thw" in inputs[0] else np.stack  # patches, or one picture an image
            images["pixel_values"] = torch.from_numpy(joined([each["pixel_values"] for each in inputs]))
            if "image_grid_thw" in inputs[0]:
                images["image_grid_thw"] = torch.from_numpy(np.stack([each["image_grid_thw"] for each in inputs]))
        images[self._kinds] = kinds
        logits = self.model(input_ids=tokens, **images).logits[0]
        targets = torch.from_numpy(datum.loss_inputs["target_tokens"])
        return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]

    def backward(self, batch: Sequence[Datum]) -> None:
        """Adds the gradient of importance sampling over all datums."""
        for datum in batch:
            inputs = {name: torch.from_numpy(array) for name, array in datum.loss_inputs.items()}
            ratio = (self.logprobs(datum) - inputs["logprobs"]).exp()
            (-ratio * inputs["advantages"] * inputs["weights"]).sum().backward()

    def gradients(self, renamed: dict[str, str] | None = None) -> dict[str, Tensor]:
        """By the names of checkpoints; `renamed` are beginnings of names that differ there."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            start = next((start for start in renamed or {} if name.startswith(start)), "")
            stored = (renamed or {}).get(start, "") + name.removeprefix(start)
            if parameter.grad is not None:
                found[stored] = parameter.grad
        return found
