"""One script per figure, each prints one JSON line last. `make bench` runs all of them and rewrites RESULTS.md."""
