"""Speculative decoding in rollouts: drafts, and a sampler that samples the same tokens with them as without."""
