"""The generator: a vLLM engine in a Monarch actor that samples tokens and loads new weights."""
