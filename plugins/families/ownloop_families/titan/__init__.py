"""What torchtitan lacks of the families: layers, experts and rotary embeddings."""
