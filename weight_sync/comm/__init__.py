"""Communicator groups over NCCL and gloo: connect, move bytes, abort, rebuild, with deadlines."""
