"""The trainer's log-probs of sampled tokens equal the generator's, bit by bit, on CPUs."""
