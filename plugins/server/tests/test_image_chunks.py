"""Image chunks of the Tinker API: tokens and patches are those of a renderer; mistakes are a sentence."""

import base64
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from ownloop_server.config import Limits
from ownloop_server.image_chunks import image_reader, image_tokens
from ownloop_server.sampling_clients import read_request
from ownloop_server.served_models import ServedModel
from ownloop_server.wire import read_batch
from ownloop_vision.qwen_images import file_bytes
from ownloop_vision.tiny_vl import tiny_qwen3_vl
from plugins.server.tests.running_server import running_server
from plugins.server.tests.toy_model import ToyHost
from plugins.vision.tests.vision import WORDS, parts, picture
from rl.images import images_of
from rl.rollouts.rendering import Renderer
from rl.tiny_models import tiny_qwen3

FILE = file_bytes(picture(64, 96, seed=1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_vl(tmp_path_factory.mktemp("models") / "vl", WORDS)


def request_of(
    tokens: tuple[int, ...], *, expected: int | None = None, file: bytes = FILE
) -> tuple[messages.ForwardBackwardRequest, types.SampleRequest]:
    """The tokens before and after the image of `tokens`, with a chunk in its place, to train on and to sample from."""
    (image,) = images_of(tokens)
    before, after = tokens[: image.start], tokens[image.start + image.num_tokens :]
    training = messages.ForwardBackwardRequest(loss_fn="cross_entropy")
    datum = training.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(before, np.int32).tobytes()
    chunk = datum.model_input.add().image
    chunk.data, chunk.format = file, "png"
    if expected is not None:
        chunk.expected_tokens = expected
    datum.model_input.add().encoded_text.tokens = np.array(after, np.int32).tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dtype, targets.dense = messages.DTYPE_INT64, np.array(tokens, np.int64).tobytes()
    chunks: list[types.ModelInputChunk] = [
        types.EncodedTextChunk(tokens=list(before)),
        types.ImageChunk(data=file, format="png", expected_tokens=expected),
        types.EncodedTextChunk(tokens=list(after)),
    ]
    prompt = types.ModelInput(chunks=chunks)
    return training, types.SampleRequest(prompt=prompt, sampling_params=types.SamplingParams(max_tokens=4))


@pytest.fixture
def served(model: Path, tmp_path: Path) -> ServedModel:
    return replace(ToyHost().served(tmp_path), vocab_size=64, read_image=image_reader(model))


def test_chunks_are_what_a_renderer_makes(model: Path, served: ServedModel) -> None:
    expected = Renderer(model).encode(parts("what", (64, 96), "red"))
    training, sampling = request_of(expected, expected=6)
    (datum,) = read_batch(training, {}, served.read_image).data
    prompt, _ = read_request(sampling, served)
    assert datum.tokens.tolist() == [*prompt] == [*expected]
    for (found,) in (datum.images, images_of(prompt)):
        assert found == images_of(expected)[0]
        for name, array in images_of(expected)[0].inputs.items():
            assert np.array_equal(found.inputs[name], array)


def test_a_wrong_number_of_tokens_is_refused(model: Path, served: ServedModel) -> None:
    training, sampling = request_of(Renderer(model).encode(parts((64, 96))), expected=7)
    said = "has an image whose expected_tokens is 7; this model reads it as 6 tokens"
    with pytest.raises(ValueError, match=rf"data\[0\].model_input {said}"):
        read_batch(training, {}, served.read_image)
    with pytest.raises(ValueError, match=f"prompt {said}"):
        read_request(sampling, served)


def test_a_broken_file_is_refused(model: Path, served: ServedModel) -> None:
    training, sampling = request_of(Renderer(model).encode(parts((64, 96))), file=FILE[:-400])
    with pytest.raises(ValueError, match=r"data\[0\].model_input: an image of .* bytes is broken"):
        read_batch(training, {}, served.read_image)
    with pytest.raises(ValueError, match=r"prompt: an image of .* bytes is broken"):
        read_request(sampling, served)


def test_a_model_of_text_takes_no_images(model: Path, served: ServedModel, tmp_path: Path) -> None:
    training, sampling = request_of(Renderer(model).encode(parts((64, 96))))
    assert image_reader(tiny_qwen3(tmp_path / "text")) is None
    with pytest.raises(ValueError, match="trains on text only"):
        read_batch(training, {})
    with pytest.raises(ValueError, match="samples from text only"):
        read_request(sampling, replace(served, read_image=None))


def test_what_is_not_supported_with_images_is_refused(model: Path, served: ServedModel) -> None:
    training, sampling = request_of(Renderer(model).encode(parts((64, 96))))
    training.data[0].model_input[1].image.override_dimensions.width = 32
    with pytest.raises(ValueError, match="an image with override_dimensions; resize the image in its place"):
        read_batch(training, {}, served.read_image)
    audio = types.ModelInput(chunks=[types.DmelChunk(dmel=b"")])
    with pytest.raises(ValueError, match="of kind dmel; this server samples from text and images"):
        read_request(sampling.model_copy(update={"prompt": audio}), served)


def test_the_sdk_samples_from_pointers(model: Path, tmp_path: Path) -> None:
    """The log-probs of a prompt with a pointer are those of one with the bytes; files elsewhere are none."""
    folder, start = tmp_path / "images", types.EncodedTextChunk(tokens=[3])
    folder.mkdir()
    for place in (folder / "a.png", tmp_path / "secret.png"):
        place.write_bytes(FILE)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")

    def prompt(location: str, expected: int = 6) -> types.ModelInput:
        pointer = types.ImageAssetPointerChunk(format="png", location=location, expected_tokens=expected)
        return types.ModelInput(chunks=[start, pointer, start])

    with running_server(tmp_path / "server", read_image=image_reader(model, folder), vocab_size=64) as server:
        sampling = server.client().create_sampling_client(base_model="toy").result()
        bytes_ = types.ImageChunk(data=FILE, format="png", expected_tokens=6)
        expected = sampling.compute_logprobs(types.ModelInput(chunks=[start, bytes_, start])).result()
        url = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"
        for location in ("a.png", str(folder / "a.png"), url):
            assert sampling.compute_logprobs(prompt(location)).result() == expected
        outside = (str(tmp_path / "secret.png"), "../secret.png", "link.png", "none.png", "http://example.org/a.png")
        for location in (*outside, ".", "a" * 300):
            with pytest.raises(tinker.RequestFailedError, match="name a file within the server's --limits"):
                sampling.compute_logprobs(prompt(location)).result()
        with pytest.raises(tinker.RequestFailedError, match="expected_tokens is 7; this model reads it as 6 tokens"):
            sampling.compute_logprobs(prompt("a.png", 7)).result()
        target = types.TensorData(data=[3] * 8, dtype="int64", shape=[8])
        datum = types.Datum(model_input=prompt("a.png"), loss_fn_inputs={"target_tokens": target})
        training = server.client().create_lora_training_client(base_model="toy", rank=4).result()
        with pytest.raises(ValueError, match="Unsupported model input chunk type: ImageAssetPointerChunk"):
            training.forward_backward([datum], "cross_entropy").result()
    read_image = image_reader(model)
    assert read_image is not None
    with pytest.raises(ValueError, match="image-folder; send an ImageChunk"):
        image_tokens("prompt", "a.png", None, read_image)
    with pytest.raises(ValueError, match=r"image_folder is .*; it must be a folder that exists"):
        Limits(image_folder=tmp_path / "none")
