"""What a loop holds: handles of trainers and generators, the router over replicas, adapters, the weight store."""
