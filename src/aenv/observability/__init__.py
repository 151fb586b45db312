"""What can be seen of a node and its sandboxes: metrics, logs, the host."""
