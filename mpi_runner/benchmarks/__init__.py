"""What `bench` does: one module a mode, each adds its options and runs."""
