"""An MCP server over runs, reports, plans and parity."""
