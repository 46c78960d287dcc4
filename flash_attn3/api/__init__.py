"""The public functions: they read arguments, refuse what no op sees, and call the ops."""
