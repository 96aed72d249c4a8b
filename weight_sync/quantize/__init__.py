"""Quantized targets: the formats, both implementations of them, and who agrees to what."""
