"""Where processes run when one host is not enough: groups of hosts, their workers, and what can go wrong there."""
