"""Who may use the node, and what it keeps for them: keys, tokens, secrets, volumes."""
