"""Further families of models, an optional part: one row for each, which an entry point of `ownloop.families` names.

A row is data, so that the controller and generators can read it without PyTorch. Its functions are in the files of this
folder.
"""

from rl.system.hf_config import ModelFamily

GPT_OSS = ModelFamily(architectures=("GptOssForCausalLM",), generator_ranks=1)
QWEN3_5 = ModelFamily(
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    prepare="trainer.families.qwen3_5:by_documents",
    # vLLM keeps states of prefixes only with chunked prefill, which its CPU sampling does not allow.
    engine_args={"enable_prefix_caching": False},
    generator_ranks=1,
    generator_requires="torchvision",
)
