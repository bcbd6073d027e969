"""Tasks for ownloop: mathematics, code, tools, MCP servers, judges, reward models, mixtures and games."""
