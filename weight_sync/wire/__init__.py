"""Requests and replies over ZMQ: checked structs, private addresses, a deadline on every wait."""
