"""How a run starts workers itself: over SSH, through Slurm, in Kubernetes. Each is a `Hosts` with an `Allocation`."""
